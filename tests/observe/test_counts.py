"""For every role, what was seen plus what was not seen is all there is."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isotype.observe import Observation, Observer
from isotype.optimize import optimize
from isotype.precision import PRESETS
from tests.models import lora, quantised
from tests.models import tiny as tiny_model
from tests.observe.run import set_up, watched_step


def sums(seen: Observation, role: str) -> int:
    return sum(seen.dtypes[role].values()) + sum(seen.unseen[role].values())


def parameters(model, *, trainable: bool) -> int:
    return sum(p.requires_grad == trainable for p in model.parameters())


@pytest.mark.parametrize(
    ("preset", "optimized"),
    [
        ("fp32", False),
        ("bf16-lora", True),
        ("nf4-lora", True),
        ("bf16-pure", False),
        ("fp16-mixed", True),
    ],
)
def test_seen_and_unseen_counts_sum_to_the_total(preset, optimized):
    model = tiny_model()
    if preset == "nf4-lora":
        pytest.importorskip("bitsandbytes")
        model = quantised(model)
    model = lora(model) if preset.endswith("lora") else model
    if optimized:
        optimize(model, PRESETS[preset])
    run = set_up(model, PRESETS[preset])
    seen = watched_step(run, 1)
    assert all(sums(seen, role) == n for role, n in seen.total.items())
    assert sums(seen, "trainable") == parameters(model, trainable=True)
    assert sums(seen, "base") == parameters(model, trainable=False)
    assert sums(seen, "grads") == parameters(model, trainable=True)
    assert sums(seen, "optimizer") == tensors_of(run.stepper.optimizer) > 0
    norms = sum(type(m).__name__ == "LlamaRMSNorm" for m in model.modules())
    assert sums(seen, "norms") == norms
    assert sums(seen, "loss") == 1
    assert sums(seen, "compute") > 0


class Products(TorchDispatchMode):
    """Counts matrix products and attention without the observer."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in ("mm", "addmm", "bmm", "baddbmm") or name.startswith(
            "_scaled_dot_product"
        )
        return func(*args, **(kwargs or {}))


# products that are counted beside `compute`: their dtype is that of another declaration, or of
# PyTorch's own backward
BESIDE = (
    "other_products",
    "isotype_ops",
    "mirrored_in_backward",
    "lora_branch",
    "tables",
    "router",
    "family_in_fp32",
)


@pytest.mark.parametrize("preset", ["fp32", "bf16-mixed", "bf16-lora"])
def test_every_product_of_a_step_is_counted_once(preset):
    model = tiny_model()
    run = set_up(lora(model) if preset == "bf16-lora" else model, PRESETS[preset])
    with Products() as there:
        seen = watched_step(run, 1)
    assert (
        sums(seen, "compute") + sum(seen.dtypes[kind].total() for kind in BESIDE) == there.count > 0
    )


def tensors_of(optimizer: torch.optim.Optimizer) -> int:
    """Counted without the observer: every tensor of every state, as a checkpoint has them."""
    return sum(
        isinstance(v, torch.Tensor) for state in optimizer.state.values() for v in state.values()
    )


def test_8_bit_states_are_named_and_counted():
    pytest.importorskip("bitsandbytes")
    # matrices on both sides of 4,096 elements
    model = tiny_model(hidden_size=64, intermediate_size=96)
    precision = PRESETS["bf16-mixed"].but(optimizer="int8")
    run = set_up(model, precision, optimizer="adamw8bit")
    run.observer.precision = PRESETS["bf16-mixed"]
    assert any(
        "is int8, declared fp32" in finding.message for finding in watched_step(run, 1).violations
    )
    run.observer.precision = precision
    seen = watched_step(run, 2)
    assert seen.violations == []
    large = sum(p.numel() >= 4096 for p in model.parameters())
    small = sum(p.numel() < 4096 for p in model.parameters())
    assert dict(seen.dtypes["optimizer"]) == {"int8": 2 * large, "fp32": 2 * small}
    assert sums(seen, "optimizer") == tensors_of(run.stepper.optimizer)


def test_large_fp32_states_declared_int8_are_a_violation():
    run = set_up(tiny_model(hidden_size=64, intermediate_size=96), PRESETS["bf16-mixed"])
    run.observer.precision = PRESETS["bf16-mixed"].but(optimizer="int8")
    messages = [finding.message for finding in watched_step(run, 1).violations]
    assert messages
    assert all("is fp32, declared int8" in message for message in messages)


def test_every_tensor_of_a_saved_file_is_counted(tmp_path):
    from safetensors.torch import save_file

    tensors = {
        "a": torch.zeros(2),
        "b": torch.zeros(3, dtype=torch.bfloat16),
        "packed": torch.zeros(4, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    seen = Observation(1)
    model = tiny_model()
    Observer(model, PRESETS["fp32"]).observe_files(seen, tmp_path, "fp32")
    assert sums(seen, "save") == len(tensors)
    assert [finding.observed for finding in seen.violations] == ["bf16"]
