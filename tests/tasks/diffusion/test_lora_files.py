"""Runs that start from a LoRA in one file (`adapter.start_from: dog.safetensors`), as kohya's
scripts, diffusers, SimpleTuner, ai-toolkit and Isotype write them.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from isotype.tasks.choose import train
from tests.api import PipelineFolder, lora_layers, read_lora_file
from tests.tasks.diffusion.models import built, refused

Q = "transformer_blocks.0.attn.to_q"
K = "transformer_blocks.0.attn.to_k"
OUT = "single_transformer_blocks.0.proj_out"
FLUX_SIZES = {Q: (32, 32), K: (32, 32), OUT: (32, 160)}


def matrices(sizes, ranks, alphas):
    """module -> (A, B, alpha), random."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (
            torch.randn(rank, *columns, generator=generator),
            torch.randn(rows, rank, generator=generator),
            alpha,
        )
        for (name, (rows, *columns)), rank, alpha in zip(sizes.items(), ranks, alphas, strict=True)
    }


def attached_deltas(loaded, folder):
    """module -> what the adapter of a run adds to its weight at the start."""
    _, model = built(loaded, folder)
    deltas = {}
    for name, layer in lora_layers(model):
        a, b = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
        deltas[name.removeprefix("base_model.model.")] = (
            layer.scaling["default"] * b.detach().flatten(1) @ a.detach().flatten(1)
        )
    return deltas


def require_deltas(deltas, modules):
    assert set(deltas) == set(modules)
    for name, (a, b, alpha) in modules.items():
        expected = alpha / len(a) * b.flatten(1) @ a.flatten(1)
        assert torch.equal(deltas[name], expected), name


def write(path, modules, name_of, ends, *, alphas=True, metadata=None):
    tensors = {}
    for name, (a, b, alpha) in modules.items():
        tensors[f"{name_of(name)}.{ends[0]}.weight"] = a
        tensors[f"{name_of(name)}.{ends[1]}.weight"] = b
        if alphas:
            tensors[f"{name_of(name)}.alpha"] = torch.tensor(float(alpha))
    save_file(tensors, path, metadata=metadata)
    return path


PEFT_ENDS = ("lora_A", "lora_B")
KOHYA_ENDS = ("lora_down", "lora_up")
DIFFUSERS_METADATA = {
    "transformer.r": 2,
    "transformer.lora_alpha": 1.0,
    "transformer.rank_pattern": {"to_k": 4, f"^{OUT}": 4},
    "transformer.alpha_pattern": {"to_k": 8.0, f"^{OUT}": 2.0},
}
FLUX_FILES = {
    "diffusers": {
        "name_of": "transformer.{}",
        "alphas": False,
        "metadata": {
            "format": "pt",
            "lora_adapter_metadata": json.dumps(DIFFUSERS_METADATA),
        },
    },
    "SimpleTuner": {
        "name_of": "transformer.{}",
        "metadata": {"ss_training_comment": "SimpleTuner"},
    },
    "ai-toolkit": {
        "name_of": "diffusion_model.{}",
        "metadata": {"format": "pt", "software": '{"name": "ai-toolkit"}'},
    },
    "kohya": {"name_of": "lora_unet_{}", "ends": KOHYA_ENDS},
    "Isotype, for ComfyUI": {
        "name_of": "transformer.{}",
        "metadata": {"format": "pt", "pipeline": "FluxPipeline"},
    },
}

EVERY_DAY = ("kohya", "Isotype, for ComfyUI")  # other endings of names, and alphas of their own


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.full)
        for name in FLUX_FILES
    ],
)
def test_a_file_of_every_format_starts_a_run_with_its_ranks_and_alphas(
    drawn, studio, tmp_path, name
):
    modules = matrices(FLUX_SIZES, (2, 4, 4), (1.0, 8.0, 2.0))
    settings = dict(FLUX_FILES[name])
    pattern = settings.pop("name_of")
    ends = settings.pop("ends", PEFT_ENDS)

    def name_of(module):
        return pattern.format(module.replace(".", "_") if ends == KOHYA_ENDS else module)

    file = write(tmp_path / "dog.safetensors", modules, name_of, ends, **settings)
    loaded = drawn(model=studio.flux, adapter={"start_from": str(file)})
    task, _ = built(loaded, tmp_path / "run")
    (line,) = [line for line in task.plan_lines() if "start_from" in line]
    assert line == (
        f"adapter.start_from: dog.safetensors ({name}): 3 modules, rank 2 to 4, alpha 1 to 8"
    )
    require_deltas(attached_deltas(loaded, tmp_path / "run"), modules)


def test_files_without_alpha_have_the_scale_one(drawn, studio, tmp_path):
    modules = matrices(FLUX_SIZES, (2, 4, 4), (2, 4, 4))
    file = write(
        tmp_path / "a.safetensors", modules, "transformer.{}".format, PEFT_ENDS, alphas=False
    )
    loaded = drawn(model=studio.flux, adapter={"start_from": str(file)})
    require_deltas(attached_deltas(loaded, tmp_path / "run"), modules)


def test_rslora_of_a_diffusers_file(drawn, studio, tmp_path):
    modules = matrices(FLUX_SIZES, (4, 4, 4), (8.0, 8.0, 8.0))
    settings = {"transformer.r": 4, "transformer.lora_alpha": 4, "transformer.use_rslora": True}
    file = write(
        tmp_path / "a.safetensors", modules, "transformer.{}".format, PEFT_ENDS, alphas=False,
        metadata={"lora_adapter_metadata": json.dumps(settings)},
    )  # fmt: skip
    loaded = drawn(model=studio.flux, adapter={"start_from": str(file)})
    require_deltas(attached_deltas(loaded, tmp_path / "run"), modules)


def test_the_fused_names_of_kohyas_flux_become_three_modules(drawn, studio, tmp_path):
    """kohya's scripts train queries, keys and values of Flux as one layer."""
    (fused,) = matrices({"qkv": (96, 32)}, (4,), (2.0,)).values()
    file = write(
        tmp_path / "a.safetensors",
        {"lora_unet_double_blocks_0_img_attn_qkv": fused},
        str,
        KOHYA_ENDS,
    )
    loaded = drawn(model=studio.flux, adapter={"start_from": str(file)})
    a, b, alpha = fused
    names = ("to_q", "to_k", "to_v")
    modules = {
        f"transformer_blocks.0.attn.{name}": (a, part, alpha)
        for name, part in zip(names, b.chunk(3), strict=True)
    }
    require_deltas(attached_deltas(loaded, tmp_path / "run"), modules)


SD1_MODULES = {
    "down_blocks.0.attentions.0.proj_in": (8, 8, 1, 1),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (8, 8),
    "text_encoders.text_encoder.encoder.layers.0.self_attn.q_proj": (16, 16),
    "text_encoders.text_encoder.encoder.layers.0.mlp.fc1": (24, 16),
}
SD1_NAMES = {
    "input_blocks": "lora_unet_input_blocks_1_1",
    "down_blocks": "lora_unet_down_blocks_0_attentions_0",
}


@pytest.mark.parametrize(
    "names", ["input_blocks", pytest.param("down_blocks", marks=pytest.mark.full)]
)
def test_a_kohya_file_is_trained_saved_and_loaded_by_diffusers(drawn, studio, tmp_path, names):
    """With a convolution, a text encoder and another rank for each, under the names of diffusers'
    and of the original U-Net.
    """
    modules = matrices(SD1_MODULES, (2, 4, 4, 3), (1.0, 4.0, 4.0, 6.0))
    file_names = dict(
        zip(
            modules,
            (
                f"{SD1_NAMES[names]}_proj_in",
                f"{SD1_NAMES[names]}_transformer_blocks_0_attn1_to_q",
                "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
                "lora_te_text_model_encoder_layers_0_mlp_fc1",
            ),
            strict=True,
        )
    )
    conv = "down_blocks.0.attentions.0.proj_in"
    a, b, alpha = modules[conv]
    in_file = {**modules, conv: (a, b[..., None, None], alpha)}
    file = write(tmp_path / "a.safetensors", in_file, file_names.get, KOHYA_ENDS)
    settings = {"start_from": str(file), "text_encoders": True}
    steps = {"steps": 1, "eval_every": 1, "learning_rate": 1e-6}
    loaded = drawn(model=studio.sd1, adapter=settings, train=steps)
    require_deltas(attached_deltas(loaded, tmp_path / "run"), modules)
    assert train(loaded) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["check"]["trained_loss"] == pytest.approx(
        result["check"]["reloaded_loss"], abs=1e-6
    )
    saved = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    ranks = {
        name.removeprefix("base_model.model."): len(t)
        for name, t in saved.items()
        if "lora_A" in name
    }
    assert ranks == {f"{name}.lora_A.weight": len(a) for name, (a, _, _) in modules.items()}


# musubi-tuner's names are those of the original models: name in the file -> modules in diffusers
MUSUBI_FILES = {
    "krea2": {
        "blocks.1.attn.wq": ["transformer_blocks.1.attn.to_q"],
        "blocks.0.mlp.gate": ["transformer_blocks.0.ff.gate"],
        "txtfusion.refiner_blocks.0.attn.wo": ["text_fusion.refiner_blocks.0.attn.to_out.0"],
        "tmlp.2": ["time_embed.linear_2"],
        "last.linear": ["final_layer.linear"],
    },
    "ideogram4": {
        "layers.1.attention.qkv": [f"layers.1.attention.to_{part}" for part in "qkv"],
        "layers.0.attention.o": ["layers.0.attention.to_out.0"],
        "layers.0.feed_forward.w2": ["layers.0.feed_forward.w2"],
    },
    "lumina2": {
        "layers.0.attention.qkv": [f"layers.0.attn.to_{part}" for part in "qkv"],
        "layers.0.feed_forward.w2": ["layers.0.feed_forward.linear_2"],
    },
    "wan": {
        "blocks.1.self_attn.q": ["blocks.1.attn1.to_q"],
        "blocks.0.cross_attn.o": ["blocks.0.attn2.to_out.0"],
        "blocks.0.ffn.0": ["blocks.0.ffn.net.0.proj"],
    },
    "z_image": {
        "layers.0.attention.to_out.0": ["layers.0.attention.to_out.0"],
        "layers.1.feed_forward.w1": ["layers.1.feed_forward.w1"],
    },
}


@pytest.mark.parametrize("ends", [KOHYA_ENDS, PEFT_ENDS])
@pytest.mark.parametrize(
    "model",
    ["krea2", *(pytest.param(n, marks=pytest.mark.full) for n in MUSUBI_FILES if n != "krea2")],
)
def test_the_names_of_the_original_models_are_read(drawn, studio, tmp_path, model, ends):
    """As musubi-tuner writes them (`lora_unet_blocks_0_attn_wq.lora_down.weight`), and as ComfyUI's
    users have them (`diffusion_model.blocks.0.attn.wq.lora_A.weight`), with alphas.
    """

    def name_of(name):
        if ends == KOHYA_ENDS:
            return f"lora_unet_{name.replace('.', '_')}"
        return f"diffusion_model.{name}"

    folder = PipelineFolder.open(str(getattr(studio, model)))
    layers = dict(folder.denoiser_outline().named_modules())
    modules_by_name = MUSUBI_FILES[model]
    sizes = {}
    for name, modules in modules_by_name.items():
        rows = sum(layers[module].out_features for module in modules)
        sizes[name] = (rows, layers[modules[0]].in_features)
    in_file = matrices(sizes, [4] * len(sizes), [2.0] * len(sizes))
    file = write(tmp_path / "a.safetensors", in_file, name_of, ends)
    lora = read_lora_file(file, folder, drawn(model=getattr(studio, model)).config)
    expected = {}
    for name, modules in modules_by_name.items():
        a, b, alpha = in_file[name]
        parts = b.split([layers[module].out_features for module in modules])
        for module, rows in zip(modules, parts, strict=True):
            expected[module] = (a, rows, alpha)
    deltas = {
        name: module.alpha / module.rank * module.b @ module.a
        for name, module in lora.modules.items()
    }
    require_deltas(deltas, expected)


def test_files_that_do_not_fit_are_refused_in_one_line(drawn, studio, tmp_path):
    def refusal(tensors, name="a.safetensors"):
        save_file(tensors, tmp_path / name)
        return refused(drawn(model=studio.flux, adapter={"start_from": str(tmp_path / name)}))

    modules = matrices(FLUX_SIZES, (2, 4, 4), (1.0, 8.0, 2.0))
    a, b, _ = modules[Q]
    good = {f"transformer.{Q}.lora_A.weight": a, f"transformer.{Q}.lora_B.weight": b}
    unknown = {f"transformer.blocks.{i}.q.lora_A.weight": a.clone() for i in range(5)}
    message = refusal({**good, **unknown})
    assert "match nothing in this FluxPipeline: transformer.blocks.0.q.lora_A.weight" in message
    assert "(5 such)" in message
    assert "\n" not in message
    half = {f"transformer.{Q}.lora_A.weight": a}
    assert f"match nothing in this FluxPipeline: transformer.{Q}.lora_A.weight" in refusal(half)
    assert "is a LoKr (x.lokr_w1)" in refusal({"x.lokr_w1": a})
    wide = {**good, f"transformer.{Q}.lora_B.weight": torch.zeros(33, 2)}
    assert "matrices of [2, 32] and [33, 2], and the weight is [32, 32]" in refusal(wide)
    assert "expected a .safetensors file" in refusal(good, "a.pt")
