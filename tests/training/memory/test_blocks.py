"""`model.offload: blocks`: losses and gradients of a run with every weight on the device, at most
two blocks there, and what a plan says.

On a CPU the host stands for the device too. `Late` makes a copy when somebody waits for it and not
before; until then its bytes are not numbers. It counts what is there.
"""

import gc

import pytest
import torch
from tests.api import (
    Block,
    check_offload,
    configured_parallel,
    get_frozen_blocks,
    offload_blocks,
    plan_offload,
    prepare,
    refuse_without_host_memory,
)
from tests.training.memory.test_offload import Late
from tests.training.test_parallel import world
from torch import nn
from transformers import AutoConfig

from isotype.config.load import load
from isotype.data.rows import Row
from isotype.environment.hardware import lookup_hardware
from isotype.errors import UsageError
from isotype.precision.precision import Precision
from isotype.tasks.choose import choose_task
from isotype.tasks.language.batches import collate
from isotype.tasks.language.outline import outline_model, outline_step
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import (
    Checkpointing,
    apply_checkpointing,
    checkpointable_layers,
    configured_checkpointing,
)

LLAMA = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
LAYERS = {"gradient_checkpointing": "layers", "batch_size": 1, "accumulate": 2}
CPU = torch.device("cpu")


def steps(prepared, batches):
    """Losses of two steps, an evaluation between them, and every trained weight and gradient."""
    model, found = prepared.model.train(), []
    for step in (1, 2):
        found += [
            prepared.stepper.accumulate(batches).clone(),
            *(g.clone() for g in prepared.stepper.accumulator.gradients()),
        ]
        prepared.stepper.accumulator.zero()
        prepared.stepper(batches, step=step, learning_rate=1e-2, watch_changes=False)
        with torch.no_grad():
            found.append(prepared.stepper.loss_sum(model.eval(), batches[0]))
        model.train()
    return [*found, *(p.detach().clone() for p in model.parameters() if p.requires_grad)]


def spoil_what_is_away(model):
    """On a CPU a block would find the host's tensors too."""
    for block in get_frozen_blocks(model).blocks:
        block.host_tensors = [
            torch.full_like(host.view(torch.uint8), 255).view(host.dtype).view(host.shape)
            for host in block.host_tensors
        ]
        for tensor, host in zip(block.tensors, block.host_tensors, strict=True):
            tensor.data = host


def same(loaded, batches_of, tmp_path):
    """Compares steps with and without blocks in host memory. (copies, bytes of each block in their
    order, both models)
    """
    late, found, models = Late(), [], []
    for copies in (None, late):
        task = choose_task(loaded.config)
        prepared = prepare(task, loaded.sources, tmp_path / "base")
        if copies is not None:
            offload_blocks(prepared.model, CPU, copies)
            apply_checkpointing(prepared.model, prepared.checkpointing)
            spoil_what_is_away(prepared.model)
        models.append(prepared.model)
        found.append(steps(prepared, batches_of(task)))
    assert all(torch.isfinite(t).all() for t in found[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return late, [block.bytes for block in get_frozen_blocks(prepared.model).run_order], models


def rows(count=2, length=40):
    row = Row(tuple(range(5, 5 + length)), tuple(range(5, 5 + length)), 0)
    return [collate([row], pad_id=0) for _ in range(count)]


def random_llama(configured, workshop, **changes):
    model = {"name": None, "init": "random", "config": LLAMA, "tokenizer": str(workshop.base)}
    return configured(model=model, adapter={"r": 4}, train=LAYERS, **changes)


@pytest.mark.parametrize(
    "precision",
    [
        {"preset": "bf16-lora"},
        pytest.param({"preset": "nf4-lora"}, marks=pytest.mark.full),
        pytest.param({"preset": "bf16-lora", "base": "fp8"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_language_models_steps_are_bit_equal_and_two_blocks_are_there(
    configured, workshop, tmp_path, precision
):
    if "nf4" in precision["preset"]:
        pytest.importorskip("bitsandbytes")
    late, sizes, _ = same(
        random_llama(configured, workshop, precision=precision), lambda task: rows(), tmp_path
    )
    gc.collect()
    assert late.most == sum(sorted(sizes)[-2:])
    assert late.here <= late.most
    assert len(sizes) == LLAMA["num_hidden_layers"]
    # a pass has each block in its forward and in its backward; the last waits for the backward
    # there, the first for the next forward
    passes, whole = 2 * 2 * 2, sum(sizes)
    trained = passes * (2 * whole - sizes[0] - sizes[-1])
    assert trained < late.moved <= trained + 2 * whole + 2 * (sizes[0] + sizes[-1]), (
        "training, and two evaluations"
    )


@pytest.mark.parametrize(
    "kind",
    [
        "Flux",
        "SDXL U-Net",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("SD3", "PixArt")),
    ],
)
def test_a_denoisers_gradients_are_those_without_recomputing_and_two_blocks_are_there(
    kind, monkeypatch
):
    pytest.importorskip("diffusers")
    from benchmarks.diffusion_matrix import CLASSES, plain_objective, random_batch
    from tests.api import build_denoiser

    from isotype.tasks.diffusion.families import Conditioning
    from isotype.tasks.diffusion.loss import picture_losses

    monkeypatch.setattr(
        "isotype.training.memory.blocks.MIN_OFFLOADED_BYTES", 1 << 8
    )  # of tiny weights
    (make, family), precision, late, found = (
        CLASSES[kind],
        Precision.preset("bf16-lora"),
        Late(),
        [],
    )
    for away in (False, True):
        torch.manual_seed(0)
        denoiser = make()
        batch = random_batch(family, denoiser.config, precision)
        model, _ = build_denoiser(
            denoiser, family, load(None, ["adapter.r=4"]).config, precision, device_type="cpu"
        )
        if away:
            offload_blocks(model, CPU, late)
            spoil_what_is_away(model)
            blocks = len(checkpointable_layers(model))
            apply_checkpointing(model, Checkpointing("layers", tuple(range(blocks)), blocks))
        for _ in range(2):
            losses = picture_losses(
                model.train(), family, plain_objective(family), batch, Conditioning(), dtype="fp32"
            )
            losses.sum().backward()
        found.append([losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    sizes = [block.bytes for block in get_frozen_blocks(model).run_order]
    assert late.most <= sum(sorted(sizes)[-2:])
    # twice in each pass, but for the last block, and the first of the second pass; a U-Net's first
    # two come before all that is trained and have no backward
    expected = 2 * (2 * sum(sizes) - sizes[0] - sizes[-1]) + sizes[0]
    assert late.moved == expected - (sizes[0] + sizes[1] if kind == "SDXL U-Net" else 0)


def planned(offload, preset="bf16-lora", **changes):
    settings = [
        f"precision.preset={preset}",
        f"model.offload={offload}",
        "train.gradient_checkpointing=layers",
        "train.accumulate=2",
    ]
    config, precision = load(None, settings).config, Precision.preset(preset)
    made = outline_model(
        AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": 6, **changes}),
        config,
        precision,
        device_type="cuda",
    )
    largest = outline_step(config, precision, length=256, device_type="cuda")
    checkpointing = configured_checkpointing(made.model, config.train)
    plan = plan_memory(
        made, config.train, precision, largest, checkpointing=checkpointing, device_type="cuda"
    )
    assert plan.not_simulated is None
    return plan, counted(made, plan.rows * plan.length, accumulate=2), made


def counted(made, tokens, device="rtx4090", accumulate=1):
    """With products of so many tokens and nothing else."""

    def flops(model):
        return [2 * tokens * sum(m.in_features * m.out_features for m in layer.modules() if isinstance(m, nn.Linear))
                for layer in checkpointable_layers(model)]  # fmt: skip

    return plan_offload(
        made.model, lookup_hardware(device), micro_batches=accumulate, compute="bf16", flops=flops
    )


@pytest.mark.parametrize("preset", ["bf16-lora", pytest.param("nf4-lora", marks=pytest.mark.full)])
def test_a_plan_counts_two_blocks_on_the_device(preset):
    if preset == "nf4-lora":
        pytest.importorskip("bitsandbytes")
    (whole, none, _), (plan, offload, made) = planned("none", preset), planned("blocks", preset)
    assert none is None
    sizes = [block.bytes for block in get_frozen_blocks(made.model).blocks]
    assert (offload.host, offload.held) == (sum(sizes), 2 * max(sizes))
    assert offload.moved == 2 * (2 * sum(sizes) - 2 * max(sizes)), (
        "twice in each of two passes, but for the first and the last block"
    )
    assert 0 <= plan.frozen - (whole.frozen - sum(sizes) + 2 * max(sizes)) < 6 * 16 * 256, (
        "padding between tensors"
    )
    assert whole.peak - plan.peak == pytest.approx(whole.frozen - plan.frozen, rel=0.1)
    assert whole.activations == plan.activations


@pytest.mark.full
def test_counted_time_follows_the_copies_where_there_is_little_work():
    _, short, _ = planned("blocks")
    wide = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    made = planned("blocks", **wide)[2]
    assert short.time > 2
    assert 1.0 <= counted(made, 8192).time < 1.15
    assert counted(made, 8192, "sm_90").time is None


def test_what_leaves_no_blocks_to_move_or_no_place_for_them_is_refused_in_one_line():
    for settings, device, said in (
        (["adapter.kind=none"], "cuda", "adapter.kind: none trains every one"),
        ([], "cpu", "on a CPU they are there already"),
        (
            ["train.gradient_checkpointing=none"],
            "cuda",
            "a block that does not recompute keeps its weights",
        ),
        (
            ["train.gradient_checkpointing=layers", "train.checkpointed_layers=2"],
            "cuda",
            "a block that does not recompute",
        ),
    ):
        with pytest.raises(UsageError, match=said) as refused:
            check_offload(
                load(None, ["model.offload=blocks", *settings]).config, device_type=device
            )
        assert "\n" not in refused.value.message
        assert refused.value.fix
    with pytest.raises(UsageError, match=r"parallel.kind: shard with model.offload: blocks"):
        configured_parallel(
            load(None, ["model.offload=blocks", "parallel.kind=shard"]).config, world(2)
        )
    refuse_without_host_memory(30 << 30, 32 << 30)
    refuse_without_host_memory(30 << 30, 0)
    with pytest.raises(
        UsageError,
        match=r"2 processes with 30.00 GiB of blocks each do not fit into 32.00 GiB of host memory",
    ):
        refuse_without_host_memory(30 << 30, 32 << 30, 2)


def test_the_pinned_memory_of_a_freed_block_is_unregistered(monkeypatch):
    unregistered = []

    class Runtime:
        def cudaHostUnregister(self, address):
            unregistered.append(address)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    block = Block([torch.zeros(4096)], CPU)
    address = block.host_memory.data_ptr()
    block.device = torch.device("cuda")
    del block
    gc.collect()
    assert unregistered == [address]
