"""Ops in diffusers' transformers: the model's own results and gradients, fewer bytes kept, and the
class's code for every other call.
"""

import copy
import gc
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from benchmarks import diffusion as benchmark
from benchmarks.diffusion_matrix import CLASSES, plain_objective, random_batch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

from isotype.ops import cpp as ops_cpp
from isotype.optimize import optimize
from isotype.precision import Precision
from isotype.tasks.diffusion.families import Conditioning
from isotype.tasks.diffusion.loss import picture_losses
from isotype.training.memory.recomputation import LAYERS, Checkpointing, apply_checkpointing
from tests.api import denoiser, joint_attention, module_kind


def sd35():
    """A second attention of the picture alone in the first block, and a last block that leaves the
    text.
    """
    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32, pos_embed_max_size=8, qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )  # fmt: skip


MODELS = CLASSES | {"SD3.5": (sd35, CLASSES["SD3"][1])}
# (blocks, adaptive norms, attentions) that are ops in the matrix's tiny models
PLACED = {
    "Flux": (2, 4, 2), "SD3": (2, 5, 2), "SD3.5": (3, 7, 4), "PixArt": (0, 0, 2), "SDXL U-Net": (0, 0, 4), "Sana": (0, 0, 0),
    "Qwen-Image": (0, 1, 0), "Wan, one frame": (0, 0, 0),
}  # fmt: skip


def loss(model, family, batch):
    return picture_losses(
        model, family, plain_objective(family), batch, Conditioning(), dtype="fp32"
    ).sum()


def pair(name):
    """(the model, a copy with ops, its family, a batch), every weight drawn: zeros would hide a
    gate that is left out.
    """
    make, family = MODELS[name]
    torch.manual_seed(0)
    plain = make().train()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return (
        plain,
        copy.deepcopy(plain),
        family,
        random_batch(family, make().config, Precision.preset("fp32")),
    )


def test_results_and_gradients_are_the_models_own(subtests):
    for name in MODELS:
        with subtests.test(name):
            same_as_the_model(name)


def same_as_the_model(name):
    plain, ours, family, batch = pair(name)
    manifest = optimize(ours)
    parts = [entry for entry in manifest.entries if entry.op]
    adaptive = [e for e in parts if e.part == denoiser.NORM and e.kind != "LayerNorm"]
    assert (
        sum(e.part == denoiser.BLOCK for e in parts),
        len(adaptive),
        sum(e.part == "joint attention" for e in parts),
    ) == PLACED[name]
    results = []
    for model in (plain, ours):
        made = loss(model, family, batch)
        made.backward()
        results.append([made.detach(), *(p.grad for p in model.parameters())])
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(
                mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()) + 1e-7
            )


def test_a_lora_step_keeps_at_most_45_hundredths_of_a_peft_loops_bytes():
    """Counted, not timed: tensors saved for backward, each storage once, without weights."""
    width = 256
    mine, its = benchmark.denoiser(width), benchmark.denoiser(width)
    blocks = ("transformer_blocks.", "single_transformer_blocks.")
    targets = [
        name
        for name, module in its.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(blocks)
    ]
    (batch,) = benchmark.draws(1, side=16, text=32)
    (_, our_forward), (_, plain_forward) = (
        benchmark.ours(mine, "bf16-lora"),
        benchmark.plain(its, targets),
    )
    kept = (
        benchmark.kept_bytes(our_forward, copy.deepcopy(batch), mine),
        benchmark.kept_bytes(plain_forward, batch, its),
    )
    assert kept[0] <= 0.45 * kept[1]


def test_a_block_that_recomputes_keeps_its_inputs_alone_and_gives_the_same_gradients():
    results = []
    for layers in ((), (0, 1)):
        _, ours, family, batch = pair("Flux")
        optimize(ours)
        if layers:
            apply_checkpointing(ours, Checkpointing(LAYERS, layers, 2))
        kept = benchmark.kept_bytes(
            lambda batch, ours=ours, family=family: loss(ours, family, batch), batch, ours
        )
        loss(ours, family, batch).backward()
        results.append((kept, [p.grad for p in ours.parameters()]))
    (whole, plain), (less, again) = results
    assert less < whole / 2
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def held_bytes(width, *, has_ops):
    """The bytes of the tensors that a forward of recomputed blocks leaves in memory, without those
    that were there before. Also counts tensors that a node holds without saving them for backward.
    """
    peft = pytest.importorskip("peft")
    model = benchmark.denoiser(width).requires_grad_(False)
    targets = benchmark.linears(model, ("transformer_blocks.", "single_transformer_blocks."))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets)).train()
    if has_ops:
        optimize(model)
    apply_checkpointing(model, Checkpointing(LAYERS, tuple(range(6)), 6))
    (batch,) = benchmark.draws(1, side=16, text=32)

    def list_storages():
        storages = {}
        for item in gc.get_objects():
            if type(item) is torch.Tensor and item.device.type == "cpu":
                with suppress(RuntimeError):  # a tensor without memory, which another test left
                    storages[item.untyped_storage().data_ptr()] = item.untyped_storage()
        return storages

    gc.collect()
    first = list_storages()  # they stay alive, so that no new tensor gets their memory
    with torch.autocast("cpu", torch.bfloat16):
        result = loss(model, MODELS["Flux"][1], batch)
    gc.collect()
    last = list_storages()
    assert result.requires_grad
    return sum(storage.nbytes() for pointer, storage in last.items() if pointer not in first)


def test_a_recomputed_block_with_an_adapter_holds_its_inputs_alone():
    assert held_bytes(128, has_ops=True) <= 1.1 * held_bytes(128, has_ops=False)


def test_what_the_form_does_not_know_runs_the_classes_own_code():
    plain, ours, family, batch = pair("SD3")
    optimize(ours)
    for model in (plain, ours):
        block = model.transformer_blocks[0]
        # rows in chunks; another library's hook after a norm; another processor, which attends in
        # its own way
        block.set_chunk_feed_forward(1, 1)
        model.transformer_blocks[1].norm2.register_forward_hook(
            lambda module, args, output: output * 1.5
        )
        model.transformer_blocks[1].norm1.norm.register_forward_pre_hook(
            lambda module, args: (args[0] + 0.1,)
        )
    torch.testing.assert_close(
        loss(ours, family, batch), loss(plain, family, batch), rtol=1e-5, atol=0
    )


def test_a_model_in_fp16_is_clipped_as_its_class_does():
    torch.manual_seed(0)
    model: FluxTransformer2DModel = CLASSES["Flux"][0]().half()
    optimize(model)
    block = model.transformer_blocks[0]
    text = torch.full((1, 3, 32), 6e4, dtype=torch.float16)
    of_text, _ = block(torch.randn(1, 4, 32).half(), text, torch.full((1, 32), 50.0).half())
    assert of_text.isfinite().all()


def test_a_line_says_what_computes_attention():
    # the op's own kernel takes heads of multiples of 16
    here = "cpp" if ops_cpp.cpu_compiler() else "sdpa"
    for name, on_cpu, on_gpu in (
        ("Flux", {f"{here} in bf16"}, {"flash in bf16"}),
        ("SDXL U-Net", {"AttnProcessor2_0's own (4 of 8 layers), sdpa in bf16 (4 of 8 layers)",
                        "sdpa in bf16 (4 of 8 layers), AttnProcessor2_0's own (4 of 8 layers)"}, None),
    ):  # fmt: skip
        model = MODELS[name][0]()
        optimize(model)
        assert joint_attention.describe_backends(model, "bf16", device_type="cpu") in on_cpu
        assert joint_attention.describe_backends(model, "bf16", device_type="cuda") in (
            on_gpu or on_cpu
        )


def test_attention_layers_with_adapters_are_of_one_kind_and_no_model_is_kept():
    """The recognised forms are kept for the whole process, and with them everything in their keys.
    Query, key and value know each other's LoRA layers, and so did the keys.
    """
    peft = pytest.importorskip("peft")
    model = benchmark.denoiser(128).requires_grad_(False)
    targets = benchmark.linears(model, ("transformer_blocks.", "single_transformer_blocks."))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    optimize(model)
    blocks = model.get_base_model().single_transformer_blocks
    assert len(blocks) > 1
    assert len({module_kind(block.attn) for block in blocks}) == 1
    layer = weakref.ref(blocks[0].attn.to_q)
    assert hasattr(layer(), "lora_A")
    del model, blocks
    gc.collect()
    assert layer() is None
