"""A PEFT LoRA layer inside a small model, dense or 4-bit, and what running it gives."""

from collections import Counter

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FEATURES, OUT = 64, 48


class OneLinear(nn.Module):
    def __init__(self, proj: nn.Module) -> None:
        super().__init__()
        self.proj = proj
        # PEFT asks the model, not the layer
        self.is_loaded_in_4bit = hasattr(proj, "quant_state")

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Checkpointed(nn.Module):
    """Runs `inner` again in its backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def nf4_linear(
    *,
    bias: bool = True,
    compute: torch.dtype | None = torch.bfloat16,
    double: bool = True,
    out: int = OUT,
    features: int = FEATURES,
) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")

    torch.manual_seed(5)
    made = bnb.nn.Linear4bit(
        features,
        out,
        bias=bias,
        compute_dtype=compute,
        compress_statistics=double,
        quant_type="nf4",
    )
    return made.to("cpu")


def adapted(base: nn.Module | None = None, **config) -> peft.PeftModel:
    """A PeftModel over all linears of `base`, or over one linear; B has values, so that every
    gradient is more than zero.
    """
    torch.manual_seed(0)
    base = nn.Linear(FEATURES, OUT) if base is None else base
    model = base if list(base.children()) else OneLinear(base)
    made = peft.get_peft_model(
        model,
        peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **config}),
    )
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return made


def layer_of(model: peft.PeftModel):
    return model.base_model.model.proj


def inputs(dtype: torch.dtype = torch.float32, *, rows: int = 12) -> Tensor:
    return torch.randn(2, rows, FEATURES, generator=torch.Generator().manual_seed(1)).to(dtype)


def fused_nodes(y: Tensor) -> dict[str, int]:
    """How many fused functions are in the graph of y, by name: LoraLinear, LoraGroup, LoraMlp."""
    found: Counter[str] = Counter()
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__.startswith("Lora"):
            found[type(node).__name__.removesuffix("Backward")] += 1
        left += [parent for parent, _ in node.next_functions]
    return dict(found)


def results(
    model: nn.Module, x: Tensor, *, seed: int = 7, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """y, the gradient of x and of every parameter that has one."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y = model(x)
    y.float().square().sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    return found | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same(
    got: dict[str, Tensor], expected: dict[str, Tensor], *, relative: float = 2e-6
) -> None:
    """Same names, dtypes, and values up to a relative distance (2-norm) that defaults to a few fp32
    roundings.
    """
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        distance = (got[name].double() - value.double()).norm() / value.double().norm().clamp(
            min=1e-30
        )
        assert distance <= relative, f"{name}: {distance:.2e}"
