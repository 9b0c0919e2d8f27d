"""The memory plan: exact where it can be, and against live tensors. Measured memory is in
tests/distributed/test_memory_of_parts.py.
"""

import gc

import pytest
import torch
from tests.api import prepare, widened_products
from transformers import AutoConfig

from isotype.config.load import load
from isotype.data.rows import Row
from isotype.environment.hardware import lookup_hardware
from isotype.model.build import resolve_precision
from isotype.precision.precision import Precision
from isotype.tasks.choose import choose_task
from isotype.tasks.language.batches import collate
from isotype.tasks.language.outline import outline_model, outline_step
from isotype.training.memory.plan import LiveBytes, plan_memory, plan_with_offload
from isotype.training.memory.recomputation import Checkpointing, configured_checkpointing

LLAMA = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 8000}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen2", "vocab_size": 4000, "tie_word_embeddings": True}


def planned(architecture: dict, overrides: list[str], length: int):
    config = load(None, ["train.gradient_checkpointing=none", *overrides]).config
    precision = Precision.preset(config.precision.preset)
    made = outline_model(AutoConfig.for_model(**architecture), config, precision, device_type="cpu")
    checkpointing = configured_checkpointing(made.model, config.train)
    return made, plan_memory(
        made,
        config.train,
        precision,
        outline_step(config, precision, length=length),
        checkpointing=checkpointing,
    )


def test_held_memory_is_counted_exactly():
    made, memory = planned(QWEN, ["precision.preset=bf16-lora", "adapter.r=8"], 32)
    assert memory.frozen == 2 * (made.total - made.trainable)
    assert memory.trained == memory.gradients == 4 * made.trainable
    assert memory.optimizer == 8 * made.trainable
    assert memory.not_simulated is None
    assert memory.peak > memory.frozen + memory.trained + memory.optimizer + memory.activations


@pytest.mark.parametrize(("preset", "packing"), [("nf4-lora", False), ("bf16-pure", True)])
def test_a_gpus_step_is_simulated_without_one(preset, packing):
    if preset == "nf4-lora":
        pytest.importorskip("bitsandbytes")
    kind = "lora" if preset == "nf4-lora" else "none"
    config = load(
        None, [f"precision.preset={preset}", f"adapter.kind={kind}", f"data.packing={packing}"]
    ).config
    precision = Precision.preset(preset)
    plans = {}
    for way in ("none", "layers", "layers+offload"):
        made = outline_model(AutoConfig.for_model(**LLAMA), config, precision, device_type="cuda")
        what = configured_checkpointing(
            made.model, config.train.model_copy(update={"gradient_checkpointing": way})
        )
        largest = outline_step(config, precision, length=500, device_type="cuda")
        plans[way] = plan_memory(
            made, config.train, precision, largest, checkpointing=what, device_type="cuda"
        )
        assert plans[way].not_simulated is None
        assert plans[way].length == 512
    peaks = [plans[way].peak for way in ("none", "layers", "layers+offload")]
    assert peaks[0] > peaks[1] >= peaks[2] > plans["none"].persistent_bytes
    assert (
        plans["none"].activations
        > plans["layers"].activations
        > plans["layers+offload"].activations
    )


def random_model(workshop, **changes):
    return {
        "name": None,
        "init": "random",
        "config": LLAMA | changes,
        "tokenizer": str(workshop.base),
    }


def test_planned_memory_of_a_gpu_step_is_that_of_every_live_tensor_of_a_real_step(
    configured, workshop, tmp_path
):
    """Where nothing is recomputed and the head is small, a CPU's has the same tensors."""
    settings = {"gradient_checkpointing": "none", "batch_size": 1}
    model = random_model(workshop, num_hidden_layers=2, vocab_size=512)
    loaded = configured(
        model=model, precision={"preset": "nf4-lora"}, adapter={"r": 16}, train=settings
    )
    config, precision = loaded.config, Precision.preset("nf4-lora")
    made = outline_model(
        AutoConfig.for_model(**model["config"]), config, precision, device_type="cuda"
    )
    largest = outline_step(config, precision, length=256, device_type="cuda")
    plan = plan_memory(
        made,
        config.train,
        precision,
        largest,
        checkpointing=Checkpointing("none", (), 2),
        device_type="cuda",
    )
    assert plan.not_simulated is None
    row = Row((5,) * 256, (5,) * 256, 0)
    with LiveBytes() as live:
        prepared = prepare(choose_task(config), loaded.sources, tmp_path / "base")
        prepared.model.train()
        gc.collect()
        live.restart_peak()
        for step in (1, 2):
            prepared.stepper(
                [collate([row], pad_id=0)], step=step, learning_rate=1e-4, watch_changes=False
            )
    assert plan.peak == pytest.approx(live.peak, rel=0.15)


def test_the_optimized_models_logits_are_not_held():
    plain, optimized = (
        planned(LLAMA, ["precision.preset=bf16-lora", f"model.optimize={on}"], 512)[1]
        for on in ("false", "true")
    )
    logits = 4 * 512 * 8000 * 2
    assert optimized.activations < plain.activations - logits
    assert optimized.peak < 0.5 * plain.peak


def planned_on_a_gpu(*overrides: str):
    pytest.importorskip("bitsandbytes")
    config = load(
        None,
        [
            "precision.preset=bf16-lora",
            "train.gradient_checkpointing=layers",
            "train.accumulate=2",
            *overrides,
        ],
    ).config
    loaded = resolve_precision(config, {}, lookup_hardware("rtx3060-12gb"))
    made = outline_model(
        AutoConfig.for_model(**LLAMA), config, loaded.precision, device_type="cuda"
    )
    plan = plan_memory(
        made,
        config.train,
        loaded.precision,
        outline_step(config, loaded.precision, length=500, device_type="cuda"),
        checkpointing=configured_checkpointing(made.model, config.train),
        device_type="cuda",
    )
    assert plan.not_simulated is None
    return made, plan


@pytest.mark.parametrize("base", ["bf16", "nf4", pytest.param("int8", marks=pytest.mark.full)])
def test_blocks_in_host_memory_are_planned_without_a_second_simulation(base):
    made, on_device = planned_on_a_gpu(f"precision.base={base}")
    _, offloaded = planned_on_a_gpu(f"precision.base={base}", "model.offload=blocks")
    assert offloaded.peak < on_device.peak
    assert plan_with_offload(made, on_device) == offloaded


def test_int8_and_fp8_bases_need_the_same_memory():
    int8, fp8 = (planned_on_a_gpu(f"precision.base={base}")[1] for base in ("int8", "fp8"))
    assert int8 == fp8


def test_products_in_fp32_blocks_need_memory_on_a_cpu_without_bf16_instructions():
    settings = ["precision.preset=bf16-lora", "adapter.r=8"]
    plans = []
    for dtypes in ((), (torch.bfloat16,)):
        with widened_products.widen_dtypes(dtypes):
            plans.append(planned(LLAMA, settings, 256)[1])
    plain, widened = plans
    assert widened.not_simulated is None
    assert widened.frozen == plain.frozen
    assert widened.peak >= plain.peak
    assert (1 << 20) < widened.backward - plain.backward < (64 << 20)
