"""Adapters of a denoiser: for ComfyUI, read by its own rules; written as a run goes; DoRA, LoKr and
starts; of text encoders.

The rules, from ComfyUI's comfy/lora.py, comfy/utils.py and comfy/weight_adapter/lora.py: a table
has the names that a module of the model may have in a file; of each such name it takes
`NAME.alpha`, the matrices under `NAME.lora_up.weight` and `NAME.lora_down.weight`, or else
`NAME.lora_B.weight` and `NAME.lora_A.weight`; it adds alpha / rank times their product, or the
product itself without alpha; a tensor that no name takes is reported as not loaded.
"""

import json
import re

import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file, save_file

from isotype.config.schema import TrainSection
from isotype.errors import UsageError
from isotype.precision import PRESETS
from isotype.tasks.choose import train
from isotype.training.optimizer import build_optimizer
from tests.api import (
    Ideogram4,
    Lumina2,
    PipelineFolder,
    comfyui_name,
    draw_pictures,
    evaluate_pictures,
    export,
    export_comfyui,
    merge_denoiser,
    write_comfyui,
)
from tests.tasks.diffusion.models import built, refused, with_adapter
from tests.tasks.diffusion.test_families import data_of, in_fp64, relative, squared_error

ATTENTION = "attn.(to_q|to_k|to_v|to_out.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
MLPS = "(ff|ff_context).net.(0.proj|2)"
# the modules of a model under the names that ComfyUI knows them by in a file
NAMES = {
    "flux": [
        rf"transformer.transformer_blocks.\d+.({ATTENTION}|norm1.linear|norm1_context.linear|{MLPS})",
        r"transformer.single_transformer_blocks.\d+.(attn.(to_q|to_k|to_v)|proj_mlp|norm.linear|proj_out)",
    ],
    "sd3": [rf"transformer.transformer_blocks.\d+.({ATTENTION}|norm1.linear|norm1_context.linear|{MLPS})"],
    "sdxl": [
        r"lora_unet_(down_blocks_\d+|up_blocks_\d+|mid_block)_attentions_\d+_(proj_in|proj_out|transformer_blocks_\d+_"
        r"(attn[12]_(to_q|to_k|to_v|to_out_0)|ff_net_(0_proj|2)))"
    ],
    "qwen": [
        rf"transformer.transformer_blocks.\d+.({ATTENTION}|(img|txt)_mod.1|(img|txt)_mlp.net.(0.proj|2))",
    ],
    "hidream": [
        r"transformer.(double|single)_stream_blocks.\d+.block.(adaLN_modulation.1|attn1.(to_q|to_k|to_v|to_out)(_t)?|"
        r"ff_i.(shared_experts|experts.\d+).w[123]|ff_t.w[123])",
    ],
    "wan": [r"diffusion_model.blocks.\d+.((self|cross)_attn.[qkvo]|ffn.[02])"],
    "ltx": [r"diffusion_model.transformer_blocks.\d+.(attn[12].(to_q|to_k|to_v|to_out.0)|ff.net.(0.proj|2))"],
}  # fmt: skip
# read in ComfyUI: `krea2_to_diffusers` and `flux_to_diffusers` of comfy/utils.py, and the modules of
# comfy/ldm/ernie, kandinsky5 and ideogram4 after the prefixes of comfy/lora.py
KANDINSKY_ATTENTION = "(to_query|to_key|to_value|out_layer)"
NAMES |= {
    "kontext": NAMES["flux"], "qwen_edit": NAMES["qwen"], "longcat": NAMES["flux"],
    "krea2": [r"transformer.transformer_blocks.\d+.(attn.(to_q|to_k|to_v|to_gate|to_out.0)|ff.(gate|up|down))"],
    "ernie_image": [
        r"transformer.layers.\d+.(self_attention.(to_q|to_k|to_v|to_out.0)|mlp.(gate_proj|up_proj|linear_fc2))",
    ],
    "kandinsky5": [
        rf"diffusion_model.(text|visual)_transformer_blocks.\d+.((self|cross)_attention.{KANDINSKY_ATTENTION}|"
        r"feed_forward.(in|out)_layer|(text|visual)_modulation.out_layer)",
    ],
    "ideogram4": [r"diffusion_model.layers.\d+.(attention.(qkv|o)|feed_forward.w[123]|adaln_modulation)"],
}  # fmt: skip
OWN_NAMES = [  # Wan's
    (".attn1.", ".self_attn."), (".attn2.", ".cross_attn."), (".to_out.0", ".o"), (".to_", "."), (".ffn.net.0.proj", ".ffn.0"),
    (".ffn.net.2", ".ffn.2"),
]  # fmt: skip


def read_as_comfyui_does(file, names):
    """name of a module -> what is added to its weight; raises where a tensor of the file is not
    loaded.
    """
    tensors, added, loaded = load_file(file), {}, set()
    known = {key.rpartition(".alpha")[0] for key in tensors} | {
        re.sub(r"\.lora_(down|up|A|B)\.weight$", "", key) for key in tensors
    }
    for name in {name for name in known for pattern in names if re.fullmatch(pattern, name)}:
        alpha = None
        if f"{name}.alpha" in tensors:
            alpha = tensors[f"{name}.alpha"].item()
            loaded.add(f"{name}.alpha")
        up, down = f"{name}.lora_up.weight", f"{name}.lora_down.weight"
        if up not in tensors:
            up, down = f"{name}.lora_B.weight", f"{name}.lora_A.weight"
        loaded |= {up, down}
        scale = 1.0 if alpha is None else alpha / tensors[down].shape[0]
        added[name] = scale * tensors[up] @ tensors[down]
    assert set(tensors) == loaded, sorted(set(tensors) - loaded)
    return added


def peft_deltas(folder):
    """name of a module -> what PEFT adds to its weight."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    names = [
        name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")
    ]

    def scale(name):
        alpha = next(
            (a for end, a in settings["alpha_pattern"].items() if name.endswith(f".{end}")),
            settings["lora_alpha"],
        )
        return alpha / (settings["r"] ** 0.5 if settings["use_rslora"] else settings["r"])

    return {
        name.removeprefix("base_model.model."): scale(name)
        * tensors[f"{name}.lora_B.weight"]
        @ tensors[f"{name}.lora_A.weight"]
        for name in names
    }


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(
            "sdxl", {"rslora": True, "alpha_pattern": {"to_q": 8.0}}, marks=pytest.mark.full
        ),
        ("wan", {}),
        *(
            pytest.param(name, {}, marks=pytest.mark.full)
            for name in (
                "flux",
                "sd3",
                "qwen",
                "kontext",
                "qwen_edit",
                "hidream",
                "ltx",
                "krea2",
                "ernie_image",
                "longcat",
                "kandinsky5",
            )
        ),
    ],
)
def test_comfyui_adds_what_was_trained(drawn, studio, tmp_path, family, settings):
    run = {"adapter_format": "comfyui", "adapters_every": 2}
    loaded = drawn(
        model=getattr(studio, family),
        adapter={"r": 4, "alpha": 8.0, **settings},
        run=run,
        images=data_of(family, studio)[0],
    )
    assert train(loaded) == 0
    for folder in (tmp_path / "run/adapter", tmp_path / "run/adapters/step_2"):
        added, trained = (
            read_as_comfyui_does(folder / "comfyui.safetensors", NAMES[family]),
            peft_deltas(folder),
        )
        named = {_named(name, family): delta for name, delta in trained.items()}
        assert set(added) == set(named)
        for name, delta in named.items():
            torch.testing.assert_close(added[name], delta, rtol=1e-6, atol=1e-9)
        assert any(bool(delta.any()) for delta in named.values())


@pytest.mark.parametrize("name", ["krea2", "ernie_image", "ideogram4", "longcat", "kandinsky5"])
def test_comfyui_knows_every_adapted_module(studio, name):
    folder = PipelineFolder.open(str(getattr(studio, name)))
    family = folder.family
    denoiser = folder.denoiser_outline()
    parts = sum(family.comfyui_fused.values(), ())
    classes = family.adapted_classes(denoiser)
    blocks = {n: m for n, m in denoiser.named_modules() if type(m).__name__ in classes}
    modules = {
        f"{block}.{inner}"
        for block, module in blocks.items()
        for inner, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    assert modules
    for module in modules:
        if not module.endswith(parts or ("-",)):
            module = comfyui_name(module, family)
            assert any(re.fullmatch(pattern, module) for pattern in NAMES[name]), module


@pytest.mark.parametrize("alphas", [{}, {"to_k": 3.0}])
def test_comfyui_adds_fused_queries_keys_and_values(tmp_path, alphas):
    """Of Ideogram 4: in one matrix, of parts with other ranks and alphas, one part without."""
    generator = torch.Generator().manual_seed(0)
    ranks = {"to_q": 4, "to_k": 2, "to_out.0": 4}
    tensors = {}
    for part, rank in ranks.items():
        name = f"base_model.model.layers.3.attention.{part}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 6, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(6, rank, generator=generator)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"r": 4, "lora_alpha": 8.0, "use_rslora": False, "use_dora": False}
    settings |= {"alpha_pattern": alphas or {"to_k": 4.0}, "rank_pattern": {"to_k": 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "LORA"}))
    assert write_comfyui(tmp_path, tmp_path / "comfyui.safetensors", Ideogram4()) == 3
    added = read_as_comfyui_does(tmp_path / "comfyui.safetensors", NAMES["ideogram4"])
    scales = {"to_q": 2.0, "to_k": (alphas or {"to_k": 4.0})["to_k"] / 2, "to_out.0": 2.0}
    deltas = {
        part: scales[part]
        * tensors[f"base_model.model.layers.3.attention.{part}.lora_B.weight"]
        @ tensors[f"base_model.model.layers.3.attention.{part}.lora_A.weight"]
        for part in ranks
    }
    fused = torch.cat([deltas["to_q"], deltas["to_k"], torch.zeros(6, 6)])
    prefix = "diffusion_model.layers.3.attention"
    assert set(added) == {f"{prefix}.qkv", f"{prefix}.o"}
    torch.testing.assert_close(added[f"{prefix}.qkv"], fused, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(added[f"{prefix}.o"], deltas["to_out.0"], rtol=1e-6, atol=1e-6)


def test_queries_keys_and_values_of_unequal_sizes_are_fused_only_together(tmp_path):
    """Of Lumina 2, which has fewer heads for keys and values."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"to_q": 6, "to_k": 2, "to_v": 2}
    tensors = {}
    for part, size in sizes.items():
        name = f"base_model.model.layers.0.attn.{part}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(3, 6, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, 3, generator=generator)
    settings = {"r": 3, "lora_alpha": 6.0, "use_rslora": False, "use_dora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "LORA"}))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert write_comfyui(tmp_path, tmp_path / "comfyui.safetensors", Lumina2()) == 3
    qkv = "diffusion_model.layers.0.attention.qkv"
    added = read_as_comfyui_does(tmp_path / "comfyui.safetensors", [qkv])
    matrices = list(tensors.values())
    fused = torch.cat([2 * b @ a for a, b in zip(matrices[::2], matrices[1::2], strict=True)])
    torch.testing.assert_close(added[qkv], fused, rtol=1e-6, atol=1e-6)
    del tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=r"layers\.0\.attn\.to_v has no adapter"):
        write_comfyui(tmp_path, tmp_path / "comfyui.safetensors", Lumina2())


def test_a_lokr_of_fused_modules_is_refused_for_comfyui(drawn, studio):
    said = refused(
        drawn(
            model=studio.ideogram4,
            adapter={"kind": "lokr", "r": 4},
            run={"adapter_format": "comfyui"},
        )
    )
    assert "Ideogram4Pipeline: ComfyUI stores queries, keys and values in one matrix" in said


def test_alphas_of_a_narrow_file_are_exact(drawn, studio, tmp_path):
    """rsLoRA's alpha is no number of bf16."""
    loaded = drawn(
        model=studio.flux,
        adapter={"r": 6, "alpha": 128.0, "rslora": True},
        precision={"preset": "bf16-lora", "save": "bf16"},
        run={"adapter_format": "comfyui"},
        train={"steps": 1, "eval_every": 1},
    )
    assert train(loaded) == 0
    tensors = load_file(tmp_path / "run/adapter/comfyui.safetensors")
    alphas = {tensor.item() for name, tensor in tensors.items() if name.endswith(".alpha")}
    assert list(alphas) == [pytest.approx(128 * 6**0.5, rel=1e-7)]
    assert {t.dtype for name, t in tensors.items() if ".lora_" in name} == {torch.bfloat16}


def _named(name, family):
    if family == "sdxl":
        return f"lora_unet_{name.replace('.', '_')}"
    for theirs, own in OWN_NAMES if family == "wan" else ():
        name = name.replace(theirs, own)
    return (
        f"{'diffusion_model' if family in ('wan', 'ltx', 'kandinsky5') else 'transformer'}.{name}"
    )


@pytest.mark.full
def test_adapters_on_the_way_change_nothing_and_are_drawn_with(drawn, tmp_path, capsys):
    """`run.adapters_every` writes what the run of as many steps would have: it is loaded, drawn
    with and exported.
    """
    drawing = {"samples": ["a red circle on white"], "sample_every": 0}
    schedule = {"schedule": "constant", "warmup": 0}
    assert train(drawn("short", train={**schedule, "steps": 2}, run=drawing)) == 0
    assert (
        train(
            drawn(
                "way",
                train={**schedule, "steps": 4},
                run={**drawing, "adapters_every": 1, "adapters_keep": 2},
            )
        )
        == 0
    )
    assert sorted(p.name for p in (tmp_path / "way/adapters").iterdir()) == ["step_2", "step_3"]
    short, second = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("short/adapter", "way/adapters/step_2")
    )
    assert all(torch.equal(second[name], tensor) for name, tensor in short.items())
    taken, (picture,) = draw_pictures(tmp_path / "way/adapters/step_2", [])
    assert (taken, picture.content) == (
        "adapters/step_2",
        draw_pictures(tmp_path / "short", [])[1][0].content,
    )

    capsys.readouterr()
    export(tmp_path / "way/adapters/step_2", "comfyui", None, json_output=True)
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(tmp_path / "way/way-step_2.safetensors")
    with pytest.raises(UsageError, match="is there already"):
        export(tmp_path / "way/adapters/step_2", "comfyui", None, json_output=True)
    (tmp_path / "way/adapters/step_3/DONE").unlink()
    with pytest.raises(UsageError, match="never finished"):
        draw_pictures(tmp_path / "way/adapters/step_3", [])


# --- Adapters besides plain LoRA: DoRA, starts and LoKr on a denoiser.


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("flux", {"dora": True}),
        pytest.param("sdxl", {"start": "pissa"}, marks=pytest.mark.full),
    ],
)
def test_a_dora_or_a_start_is_loaded_by_diffusers(drawn, studio, tmp_path, family, adapter):
    assert train(drawn(model=getattr(studio, family), adapter={"r": 4, **adapter})) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["check"]["trained_loss"] == pytest.approx(
        result["check"]["reloaded_loss"], abs=1e-6
    )
    assert (tmp_path / "run/adapter/pytorch_lora_weights.safetensors").is_file()


@pytest.mark.parametrize(
    ("family", "factor"), [("flux", 4), pytest.param("sdxl", None, marks=pytest.mark.full)]
)
def test_a_lokr_is_pefts_and_comfyui_adds_what_was_trained(
    drawn, studio, tmp_path, capsys, family, factor
):
    model, precision = getattr(studio, family), {"preset": "bf16-lora"}
    adapter = {
        "kind": "lokr",
        "r": 4,
        "alpha": 2.0,
        "factor": factor,
        "rank_pattern": {"to_k": 2},
        "alpha_pattern": {"to_q": 3.0},
    }
    assert (
        train(
            drawn(
                model=model, adapter=adapter, precision=precision, run={"adapter_format": "comfyui"}
            )
        )
        == 0
    )
    assert "PF014" not in capsys.readouterr().out, (
        "one factor begins at 0, so that the others get no gradient in step 1"
    )
    assert json.loads((tmp_path / "run/precision.json").read_text())["violations"] == []
    part = "unet" if family == "sdxl" else "transformer"
    plain = getattr(DiffusionPipeline.from_pretrained(model), part)
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    merged = (
        PeftModel.from_pretrained(plain, tmp_path / "run/adapter").merge_and_unload().state_dict()
    )
    changed = {
        name: merged[name] - before[name]
        for name in before
        if not torch.equal(merged[name], before[name])
    }
    added = {
        name: delta
        for name, delta in as_comfyui_reads(
            load_file(tmp_path / "run/adapter/comfyui.safetensors")
        ).items()
        if delta.any()
    }
    assert len(added) == len(changed) > 5
    for name, delta in changed.items():
        module = name.removesuffix(".weight")
        named = (
            f"lora_unet_{module.replace('.', '_')}" if family == "sdxl" else f"transformer.{module}"
        )
        torch.testing.assert_close(added[named], delta, rtol=1e-4, atol=1e-6)
    merge_denoiser(tmp_path / "run", tmp_path / "merged", dtype="fp32")
    ours = getattr(DiffusionPipeline.from_pretrained(tmp_path / "merged"), part).state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(
            ours[name],
            weight.to(torch.bfloat16).float() if name not in changed else weight,
            rtol=0.02,
            atol=0.01,
        )


def as_comfyui_reads(tensors):
    """Module -> what is added to its weight, by ComfyUI's comfy/weight_adapter/lokr.py: without
    alpha the Kronecker product itself.
    """
    added = {}
    for module in {name.rpartition(".")[0] for name in tensors}:
        parts = {
            name.rpartition(".")[2]: tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[0] == module
        }
        first, second = (parts.get(f"lokr_w{i}") for i in (1, 2))
        first = parts["lokr_w1_a"] @ parts["lokr_w1_b"] if first is None else first
        second = parts["lokr_w2_a"] @ parts["lokr_w2_b"] if second is None else second
        added[module] = torch.kron(first, second)
    return added


def test_an_adapter_to_go_on_from_that_would_not_be_written_is_refused_before_training(
    drawn, studio, tmp_path
):
    def begins(settings, adapter, **run):
        (tmp_path / "adapter_config.json").write_text(settings)
        return refused(drawn(adapter={"start_from": str(tmp_path), **adapter}, run=run))

    save_file(
        {"base_model.model.nowhere.lora_A.weight": torch.zeros(4, 4)},
        tmp_path / "adapter_model.safetensors",
    )
    assert (
        "an adapter of another model than this SD3Transformer2DModel: nowhere: no such module"
        in begins("{}", {})
    )
    save_file({}, tmp_path / "adapter_model.safetensors")
    dora = json.dumps({"peft_type": "LORA", "use_dora": True})
    assert "a DoRA, which is not written for ComfyUI" in begins(dora, {}, adapter_format="comfyui")
    assert "is a lora, and adapter.kind is lokr" in begins(dora, {"kind": "lokr"})
    assert "is a lokr, and adapter.kind is lora" in begins('{"peft_type": "LOKR"}', {})
    assert "adapter_config.json cannot be read: Expecting value" in begins("nothing", {})
    assert "adapter.start_from: has no effect with adapter.kind: none" in begins(
        dora, {"kind": "none"}
    )


# --- Text encoders of SDXL and Stable Diffusion that are trained with the denoiser
# (`adapter.text_encoders`).


PARTS = {"sdxl": ("text_encoder", "text_encoder_2"), "sd1": ("text_encoder",)}
TE = r"text_model_encoder_layers_\d+_(self_attn_(q_proj|k_proj|v_proj|out_proj)|mlp_fc[12])"
ON = {"kind": "lora", "r": 4, "alpha": 8.0, "text_encoders": True}


def plain_loss(pipe, batch):
    """The loss of diffusers' scripts, with the embeddings of encoders that are trained; a dropped
    caption of SDXL is zeros.
    """
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    steps = (batch.sigma * 1000).round().long()
    noisy, given = scheduler.add_noise(batch.latents, batch.noise, steps), {}
    ids = batch.text["ids"]
    if hasattr(pipe, "text_encoder_2"):
        one, two = (
            encoder(ids[:, i], output_hidden_states=True)
            for i, encoder in enumerate((pipe.text_encoder, pipe.text_encoder_2))
        )
        shown = batch.text["captioned"].to(batch.latents)[:, None]
        text = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], -1) * shown[..., None]
        sizes = torch.cat([batch.crop, torch.tensor([[32.0, 32.0]]).expand(len(batch.crop), 2)], 1)
        given = {"added_cond_kwargs": {"text_embeds": two[0] * shown, "time_ids": sizes}}
    else:
        text = pipe.text_encoder(ids[:, 0])[0]
    return squared_error(pipe.unet(noisy, steps, text, return_dict=False, **given)[0], batch.noise)


@pytest.mark.parametrize("family", ["sdxl", pytest.param("sd1", marks=pytest.mark.full)])
def test_loss_and_gradients_are_those_of_diffusers_and_peft(drawn, studio, tmp_path, family):
    loaded = drawn(
        model=getattr(studio, family), images={"limit": 6, "caption_dropout": 0.5}, adapter=ON
    )
    task, model, batch = with_adapter(loaded, tmp_path, rows=4)
    assert 0 < int(batch.text["captioned"].sum()) < len(batch.latents)
    ours = task.loss_sum(model, batch, dtype="fp32") / batch.weight
    ours.backward()
    pipe = DiffusionPipeline.from_pretrained(getattr(studio, family))
    pipe.load_lora_weights(tmp_path, adapter_name="default")
    theirs = {}
    for part in ("unet", *PARTS[family]):
        module = getattr(pipe, part).train()
        theirs |= {
            f"{'' if part == 'unet' else f'text_encoders.{part}.'}{name}": p
            for name, p in module.named_parameters()
        }
    for name, p in theirs.items():
        p.requires_grad_("lora_" in name)
    plain = plain_loss(pipe, batch)
    plain.backward()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
    trained = {
        name.removeprefix("base_model.model."): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert set(trained) == {name for name, p in theirs.items() if p.requires_grad}
    grads = {name: theirs[name].grad.clone() for name in trained}
    for part in ("unet", *PARTS[family]):
        getattr(pipe, part).double().zero_grad()
    plain_loss(pipe, in_fp64(batch)).backward()
    for part in ("unet", *PARTS[family]):
        mine = [
            n
            for n in trained
            if n.startswith(f"text_encoders.{part}.")
            or (part == "unet" and "text_encoders." not in n)
        ]
        assert all(trained[name].grad.any() for name in mine)
        found, right, exact = (
            torch.cat([grad.flatten() for grad in some])
            for some in (
                [trained[n].grad for n in mine],
                [grads[n] for n in mine],
                [theirs[n].grad for n in mine],
            )
        )
        # where diffusers' own fp32 is further than that from fp64, twice its distance
        assert relative(found, exact) < max(1e-6, 2 * relative(right, exact)), part


@pytest.mark.parametrize(
    ("rate", "trained"),
    [
        (0.0, set()),
        ([0.0, 0.0], set()),
        ([1e-4, 0.0], {"text_encoder"}),
        (1e-4, set(PARTS["sdxl"])),
    ],
)
def test_an_encoder_with_the_rate_0_is_not_trained(drawn, studio, tmp_path, rate, trained):
    loaded = drawn(
        model=studio.sdxl,
        images={"limit": 4},
        adapter={**ON, "text_encoder_rate": rate},
    )
    _, model = built(loaded, tmp_path)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parts = {
        name.split("text_encoders.")[1].split(".")[0] for name in names if "text_encoders." in name
    }
    assert parts == trained


def test_a_run_with_encoders_ends_in_files_that_are_read(drawn, studio, tmp_path):
    """Of SDXL, whose second encoder has other names than its first."""
    family, adapter = "sdxl", {**ON, "text_encoder_rate": 5e-4}
    loaded = drawn(
        model=studio.sdxl,
        adapter=adapter,
        images={"caption_dropout": 0.2},
        train={"steps": 2, "eval_every": 2},
        run={"samples": ["a red circle on white"]},
    )
    assert train(loaded) == 0
    run = tmp_path / "run"
    tensors = load_file(run / "adapter/pytorch_lora_weights.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"unet", *PARTS[family]}
    assert all(
        name.split(".")[1] == "text_model" for name in tensors if name.startswith("text_encoder")
    )
    assert any(
        t.any()
        for name, t in tensors.items()
        if name.startswith("text_encoder") and "lora_B" in name
    )
    assert draw_pictures(run, ["a green square on white"])[1]
    assert evaluate_pictures(run, str(studio.pictures))[1].loss > 0

    export_comfyui(run, None, tmp_path / "comfy.safetensors")
    added, deltas = (
        read_as_comfyui_does(tmp_path / "comfy.safetensors", [*NAMES["sdxl"], "lora_te[12]_" + TE]),
        peft_deltas(run / "adapter"),
    )
    assert len(added) == len(deltas)
    name = "text_encoders.text_encoder_2.text_model.encoder.layers.0.mlp.fc1"
    torch.testing.assert_close(added["lora_te2_text_model_encoder_layers_0_mlp_fc1"], deltas[name])

    merge_denoiser(run, tmp_path / "merged", dtype="fp32")
    merged, plain = (
        DiffusionPipeline.from_pretrained(tmp_path / "merged"),
        DiffusionPipeline.from_pretrained(getattr(studio, family)),
    )
    plain.load_lora_weights(run / "adapter")
    arguments = {"do_classifier_free_guidance": False, "device": "cpu", "num_images_per_prompt": 1}
    with torch.no_grad():
        ours, theirs = (
            pipe.encode_prompt("a red circle on white", **arguments)[0] for pipe in (merged, plain)
        )
    torch.testing.assert_close(ours, theirs)


def test_encoders_have_a_rate_of_their_own_or_one_each():
    encoders = torch.nn.ModuleDict({part: torch.nn.Linear(2, 2) for part in PARTS["sdxl"]})
    model = torch.nn.ModuleDict(
        {"unet": torch.nn.ModuleDict({"text_encoders": encoders, "block": torch.nn.Linear(2, 2)})}
    )
    for plus, given, wanted in ((1.0, 5e-5, (0.25, 0.25)), (4.0, [1e-4, 5e-5], (0.5, 0.25))):
        optimizer = build_optimizer(
            model,
            TrainSection(learning_rate=2e-4),
            PRESETS["fp32"],
            lambda p: p.grad,
            plus=plus,
            text_rate=given,
        )
        rates = {
            id(p): group.get("rate_factor", 1.0)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        found = {name.split(".")[-2]: rates[id(p)] for name, p in model.named_parameters()}
        assert found == {"block": 1.0, **dict(zip(PARTS["sdxl"], wanted, strict=True))}
