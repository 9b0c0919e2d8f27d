"""Implements `adapter.start`, which initialises A and B as orthogonal matrices whose product is
zero, or by a factorisation of the base weight (PiSSA and OLoRA).

PiSSA and OLoRA subtract the scaled product of the initial matrices, s B0 A0, from the base weight
W. The trained adapter then only fits the residual W - s B0 A0, which other programs do not have.
Isotype therefore also stores A0 and B0, and saves the adapter as an ordinary adapter for the
unchanged base. Its update is s (B A - B0 A0), with the matrices [A; A0] and [B, -B0] of twice the
rank. PEFT instead saves the name of the initialisation, and repeats the factorisation when an
adapter is loaded.

In shapes, K is the number of input features, O is the number of output features, and R is the rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..precision.apply import is_quantised

# names of the buffers in PEFT's layer
A0 = "start_A"
B0 = "start_B"  # name under which the initial B of an adapter is stored
SUBTRACTED_STARTS = ("pissa", "olora")


def initialise_adapter(model: nn.Module, start: str) -> None:
    """Initialises A and B of every linear layer's adapter. For PiSSA and OLoRA it subtracts the
    scaled product of A and B from the base weight.

    Raises  UsageError for a packed base, and for an odd rank if `start` is `orthogonal`
    """
    from peft.tuners.lora import Linear

    layer: Any
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A") or not hasattr(layer, "base_layer"):
            continue
        base: Any = layer.base_layer
        if is_quantised(base.weight):
            raise UsageError(
                f"adapter.start: {start}: the weight of {name} is packed, and what is left of it"
                " could not be",
                fix=_FIX,
            )
        if not issubclass(type(layer), Linear):
            raise UsageError(
                f"adapter.start: {start}: {name} is a {type(layer).__name__}", fix=_FIX
            )
        a = layer.lora_A["default"].weight
        b = layer.lora_B["default"].weight
        scale = float(layer.scaling["default"])
        a.data, b.data = a.data.float(), b.data.float()
        if start == "orthogonal" and len(a) % 2:
            raise UsageError(
                f"adapter.start: orthogonal: rank {len(a)} of {name} is odd",
                fix="an even adapter.r",
            )
        if a.is_meta:  # a memory plan builds the model on the meta device
            initial = a.detach().clone(), b.detach().clone()
        else:
            if start == "orthogonal":
                initial = _draw_orthogonal(len(a), a.shape[1], len(b))
            else:
                initial = _factorise_base(base.weight, len(a), scale, start)
            # LAPACK's results are column-major; the states of a restored optimizer are row-major
            a.data, b.data = (t.contiguous().to(a.device) for t in initial)
        if start in SUBTRACTED_STARTS:
            layer.register_buffer(A0, a.detach().clone())
            layer.register_buffer(B0, b.detach().clone())
            if not a.is_meta:
                base.weight.data = torch.addmm(
                    base.weight.data.float(), b.data, a.data, alpha=-scale
                ).to(base.weight.dtype)


_FIX = "adapter.start: default"


def _draw_orthogonal(rank: int, features: int, out: int) -> tuple[Tensor, Tensor]:
    """Draws A and B in such a way that B A = 0. For this, half of the rows of an orthogonal matrix
    are multiplied by a random matrix to get A, and the other half to get B. The random numbers are
    standard normal and divided by 10, as in PEFT.
    """
    rows = torch.linalg.qr(torch.randn(rank, rank)).Q
    a = rows[0::2].t() @ torch.randn(rank // 2, features) / 10
    b = torch.randn(out, rank // 2) @ rows[1::2] / 10
    return a, b


@torch.no_grad()
def _factorise_base(weight: Tensor, rank: int, scale: float, start: str) -> tuple[Tensor, Tensor]:
    """Factorises a base weight into A [R K] and B [O R] in fp32. For PiSSA, s B A is the matrix of
    rank R that is nearest to the base weight. For OLoRA, B and A are the first columns and rows of
    a QR decomposition.

    Source  PiSSA: Meng et al. 2024; OLoRA: Büyükakyüz 2024
    """
    wide = weight.float()
    if start == "olora":
        q, r = torch.linalg.qr(wide)
        return r[:rank], q[:, :rank]
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * v[:rank], u[:, :rank] * root


def _layers_with_start(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if A0 in layer._buffers)


def to_ordinary_adapter(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a state dict so that it holds an ordinary adapter for the unchanged base. Adapters
    of PiSSA and OLoRA get twice the rank.
    """
    result = dict(tensors)
    for name, layer in _layers_with_start(model):
        a = f"{name}.lora_A.default.weight"
        b = f"{name}.lora_B.default.weight"
        result[a] = torch.cat([result[a].detach(), layer._buffers[A0].to(result[a])])
        result[b] = torch.cat([result[b].detach(), -layer._buffers[B0].to(result[b])], 1)
        for key in (f"{name}.{A0}", f"{name}.{B0}"):
            result.pop(key, None)
    return result


def describe_ordinary_adapter(model: nn.Module, folder: Path) -> None:
    """Changes a saved adapter_config.json so that it describes the ordinary adapter. This adapter
    has twice the rank, and its alpha is changed so that the scale stays the same.
    """
    if next(_layers_with_start(model), None) is None:
        return
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    factor = 2.0**0.5 if settings.get("use_rslora") else 2.0
    settings["r"], settings["lora_alpha"] = 2 * settings["r"], factor * settings["lora_alpha"]
    settings["rank_pattern"] = {
        name: 2 * rank for name, rank in (settings.get("rank_pattern") or {}).items()
    }
    settings["alpha_pattern"] = {
        name: factor * alpha for name, alpha in (settings.get("alpha_pattern") or {}).items()
    }
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
