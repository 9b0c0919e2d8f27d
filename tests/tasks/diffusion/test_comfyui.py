"""Adapters for ComfyUI, read by its own rules, and adapters that are written as a run goes.

The rules, from ComfyUI's comfy/lora.py, comfy/utils.py and comfy/weight_adapter/lora.py: a table has the names that a module of the model
may have in a file; of each such name it takes `NAME.alpha`, the matrices under `NAME.lora_up.weight` and `NAME.lora_down.weight`, or else
`NAME.lora_B.weight` and `NAME.lora_A.weight`; it adds alpha / rank times their product, or the product itself without alpha; a tensor that
no name takes is reported as not loaded.
"""

import json
import re

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from isotype.cli.merge import export
from isotype.errors import UsageError
from isotype.inference.diffusion import draw_with
from isotype.tasks.choose import train
from tests.tasks.diffusion.test_families import data_of

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
NAMES |= {"kontext": NAMES["flux"], "qwen_edit": NAMES["qwen"]}
OWN_NAMES = [  # Wan's
    (".attn1.", ".self_attn."), (".attn2.", ".cross_attn."), (".to_out.0", ".o"), (".to_", "."), (".ffn.net.0.proj", ".ffn.0"),
    (".ffn.net.2", ".ffn.2"),
]  # fmt: skip


def read_as_comfyui_does(file, names):
    """name of a module -> what is added to its weight; raises where a tensor of the file is not loaded."""
    tensors, added, loaded = load_file(file), {}, set()
    known = {key.rpartition(".alpha")[0] for key in tensors} | {re.sub(r"\.lora_(down|up|A|B)\.weight$", "", key) for key in tensors}
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
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]

    def scale(name):
        alpha = next((a for end, a in settings["alpha_pattern"].items() if name.endswith(f".{end}")), settings["lora_alpha"])
        return alpha / (settings["r"] ** 0.5 if settings["use_rslora"] else settings["r"])

    return {
        name.removeprefix("base_model.model."): scale(name) * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        for name in names
    }


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("flux", {}),
        ("sdxl", {"rslora": True, "alpha_pattern": {"to_q": 8.0}}),
        *(pytest.param(name, {}, marks=pytest.mark.full) for name in ("sd3", "qwen", "kontext", "qwen_edit", "hidream", "wan", "ltx")),
    ],
)
def test_comfyui_adds_what_was_trained(drawn, studio, tmp_path, family, settings):
    run = {"adapter_format": "comfyui", "adapters_every": 2}
    loaded = drawn(model=getattr(studio, family), adapter={"r": 4, "alpha": 8.0, **settings}, run=run, images=data_of(family, studio)[0])
    assert train(loaded) == 0
    for folder in (tmp_path / "run/adapter", tmp_path / "run/adapters/step_2"):
        added, trained = read_as_comfyui_does(folder / "comfyui.safetensors", NAMES[family]), peft_deltas(folder)
        named = {_named(name, family): delta for name, delta in trained.items()}
        assert set(added) == set(named)
        for name, delta in named.items():
            torch.testing.assert_close(added[name], delta, rtol=1e-6, atol=1e-9)
        assert any(bool(delta.any()) for delta in named.values())


def _named(name, family):
    if family == "sdxl":
        return f"lora_unet_{name.replace('.', '_')}"
    for theirs, own in OWN_NAMES if family == "wan" else ():
        name = name.replace(theirs, own)
    return f"{'diffusion_model' if family in ('wan', 'ltx') else 'transformer'}.{name}"


@pytest.mark.parametrize("family", ["wan", pytest.param("ltx", marks=pytest.mark.full)])
def test_diffusers_reads_the_file_for_comfyui_as_the_same_adapter(drawn, studio, tmp_path, family):
    """diffusers maps the names that ComfyUI has for these models to its own. Of LTX it takes no alphas."""
    assert train(drawn(model=getattr(studio, family), adapter={"r": 4, "alpha": 4.0}, run={"adapter_format": "comfyui"})) == 0
    pipe = DiffusionPipeline.from_pretrained(getattr(studio, family))
    tensors = load_file(tmp_path / "run/adapter/comfyui.safetensors")
    pipe.load_lora_weights({name: t for name, t in tensors.items() if family == "wan" or not name.endswith(".alpha")})
    found = {name: p for name, p in pipe.transformer.named_parameters() if "lora_" in name}
    saved = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert len(found) == len(saved)
    for name, p in found.items():
        assert torch.equal(p, saved[f"base_model.model.{name.replace('.default_0', '')}"])


def test_adapters_on_the_way_change_nothing_and_are_drawn_with(drawn, tmp_path, capsys):
    """`run.adapters_every` writes what the run of as many steps would have: it is loaded, drawn with and exported."""
    drawing = {"samples": ["a red circle on white"], "sample_every": 0}
    schedule = {"schedule": "constant", "warmup": 0, "steps": 4}
    assert train(drawn("plain", train=schedule, run=drawing)) == 0
    assert train(drawn("short", train={**schedule, "steps": 2}, run=drawing)) == 0
    kept = {**drawing, "adapters_every": 1, "adapters_keep": 2}
    assert train(drawn("way", train=schedule, run=kept)) == 0
    assert sorted(p.name for p in (tmp_path / "way/adapters").iterdir()) == ["step_2", "step_3"]

    def adapter(folder):
        return load_file(tmp_path / folder / "adapter_model.safetensors")

    for one, other in (("plain/adapter", "way/adapter"), ("short/adapter", "way/adapters/step_2")):
        assert all(torch.equal(adapter(other)[name], tensor) for name, tensor in adapter(one).items())

    short, second, last = (draw_with(tmp_path / folder, []) for folder in ("short", "way/adapters/step_2", "way"))
    assert [taken for taken, _ in (short, second, last)] == ["adapter", "adapters/step_2", "adapter"]
    assert short[1][0].png == second[1][0].png != last[1][0].png

    capsys.readouterr()
    export(tmp_path / "way/adapters/step_2", "comfyui", None, json_output=True)
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(tmp_path / "way/way-step_2.safetensors")
    assert len(read_as_comfyui_does(said["file"], NAMES["sd3"])) == said["modules"]
    with pytest.raises(UsageError, match="is there already"):
        export(tmp_path / "way/adapters/step_2", "comfyui", None, json_output=True)
    (tmp_path / "way/adapters/step_3/DONE").unlink()
    with pytest.raises(UsageError, match="never finished"):
        draw_with(tmp_path / "way/adapters/step_3", [])
