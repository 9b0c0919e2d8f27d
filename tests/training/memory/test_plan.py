"""The memory plan: exact where it can be exact, and against the memory that real steps took."""

import gc
import json
import subprocess
import sys

import pytest
from tests.distributed.processes import environment
from tests.warm import ROOT
from transformers import AutoConfig

from isotype.config.load import load
from isotype.precision.precision import Precision
from isotype.tasks.language.outline import outline, step_outline
from isotype.training.memory.plan import LiveBytes, plan_memory
from isotype.training.memory.recomputation import Checkpointing, as_configured

from .measured_memory import built

LLAMA = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 8000}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen2", "vocab_size": 4000, "tie_word_embeddings": True}


def planned(architecture: dict, overrides: list[str], length: int):
    config = load(None, ["train.gradient_checkpointing=none", *overrides]).config
    precision = Precision.preset(config.precision.preset)
    made = outline(AutoConfig.for_model(**architecture), config, precision, device_type="cpu")
    checkpointing = as_configured(made.model, config.train)
    return made, plan_memory(made, config.train, precision, step_outline(config, precision, length=length), checkpointing=checkpointing)


def test_held_memory_is_counted_exactly():
    made, memory = planned(QWEN, ["precision.preset=bf16-lora", "adapter.r=8"], 32)
    assert memory.frozen == 2 * (made.total - made.trainable)
    assert memory.trained == memory.gradients == 4 * made.trainable
    assert memory.optimizer == 8 * made.trainable
    assert memory.not_simulated is None
    assert memory.peak > memory.frozen + memory.trained + memory.optimizer + memory.activations


@pytest.mark.parametrize(
    ("preset", "packing"),
    [
        *(("nf4-lora", False), ("bf16-pure", True)),
        *(pytest.param(*case, False, marks=pytest.mark.full) for case in [("fp32",), ("bf16-lora",), ("bf16-mixed",), ("fp16-mixed",)]),
    ],
)
def test_a_gpus_step_is_simulated_without_one(preset, packing):
    if preset == "nf4-lora":
        pytest.importorskip("bitsandbytes")
    kind = "lora" if preset.endswith("-lora") or preset == "fp32" else "none"
    config = load(None, [f"precision.preset={preset}", f"adapter.kind={kind}", f"data.packing={packing}"]).config
    precision = Precision.preset(preset)
    plans = {}
    for way in ("none", "layers", "layers+offload"):
        made = outline(AutoConfig.for_model(**LLAMA), config, precision, device_type="cuda")
        what = as_configured(made.model, config.train.model_copy(update={"gradient_checkpointing": way}))
        largest = step_outline(config, precision, length=500, device_type="cuda")
        plans[way] = plan_memory(made, config.train, precision, largest, checkpointing=what, device_type="cuda")
        assert plans[way].not_simulated is None
        assert plans[way].length == 512
    peaks = [plans[way].peak for way in ("none", "layers", "layers+offload")]
    assert peaks[0] > peaks[1] >= peaks[2] > plans["none"].held
    assert plans["none"].activations > plans["layers"].activations > plans["layers+offload"].activations


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("architecture", "overrides", "length"),
    [
        (LLAMA, ["precision.preset=bf16-lora", "data.packing=true"], 512),
        (LLAMA, ["precision.preset=nf4-lora", "train.gradient_checkpointing=layers", "train.checkpointed_layers=2"], 512),
    ],
)
def test_within_15_percent_of_the_memory_of_real_steps(architecture, overrides, length):
    pytest.importorskip("bitsandbytes")
    given = json.dumps([architecture, overrides, length])
    ended = subprocess.run(
        [sys.executable, "-m", "tests.training.memory.measured_memory", given],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    measured = json.loads(ended.stdout.splitlines()[-1])["peak"]
    assert planned(architecture, overrides, length)[1].peak == pytest.approx(measured, rel=0.15)


def test_planned_memory_of_a_gpu_step_is_that_of_every_live_tensor_of_a_real_step():
    """Where nothing is recomputed and the head is small, a CPU's has the same tensors."""
    pytest.importorskip("bitsandbytes")
    architecture = {**LLAMA, "num_hidden_layers": 2, "vocab_size": 512}
    settings = ["precision.preset=nf4-lora", "train.gradient_checkpointing=none", "train.batch_size=1"]
    config, precision = load(None, settings).config, Precision.preset("nf4-lora")
    made = outline(AutoConfig.for_model(**architecture), config, precision, device_type="cuda")
    largest = step_outline(config, precision, length=256, device_type="cuda")
    plan = plan_memory(made, config.train, precision, largest, checkpointing=Checkpointing("none", (), 2), device_type="cuda")
    assert plan.not_simulated is None
    with LiveBytes() as live:
        stepper, batches = built(architecture, settings, 256)
        gc.collect()
        live.restart_peak()
        for step in (1, 2):
            stepper(batches, step=step, learning_rate=1e-4, watch_changes=False)
    assert plan.peak == pytest.approx(live.peak, rel=0.15)


def test_the_optimized_models_logits_are_not_held():
    plain, optimized = (planned(LLAMA, ["precision.preset=bf16-lora", f"model.optimize={on}"], 512)[1] for on in ("false", "true"))
    logits = 4 * 512 * 8000 * 2
    assert optimized.activations < plain.activations - logits
    assert optimized.peak < 0.5 * plain.peak
