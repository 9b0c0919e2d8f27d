"""Prepares a model that is trained for the format in which it is served (`adapter.serve_as`).

Every matrix that a file stores rounded is rounded in the training too. Matrices without an adapter
are rounded once, when the model is built. A layer with an adapter multiplies by the rounded sum of
base and adapter (`lora.served`). So the file that `isotype export` writes contains the weights with
which the model was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import AdapterSection, RunConfig
from ..errors import UsageError
from ..lora.attach import is_lora, lora_layers, serve_layer
from ..lora.quantised import PackedLinear, is_packed
from ..ops.packed import PackedState, widen
from ..ops.packed.quantise import pack_blocks
from ..precision.apply import inner_model
from ..precision.precision import Precision

GGUF_FORMATS = {"q8_0": "Q8_0", "q5_0": "Q5_0", "q4_0": "Q4_0"}
GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
"""Families of which whole models can be written as GGUF files."""
DEFAULT_SERVE_FROM = 0.1
BLOCK_SIZE = 32
# types of the head that are wider than the type of the other matrices. llama-quantize writes Q6_K,
# for which the package gguf has no quantiser
_HEAD_TYPES = {"Q4_0": "Q8_0", "Q5_0": "Q8_0"}


def gguf_type(kind: str, shape: Sequence[int], *, is_head: bool) -> str:
    """Returns the GGUF type of one tensor if a model is written in the type `kind`.

    Vectors get F32. The head, or the embedding if the head shares its weight, gets Q8_0 in the
    4-bit and 5-bit types. llama.cpp keeps it wide too. A matrix whose rows are no multiple of a
    block's length gets F16.
    """
    if len(shape) < 2:
        return "F32"
    if is_head:
        kind = _HEAD_TYPES.get(kind, kind)
    if kind not in ("F16", "BF16") and shape[-1] % BLOCK_SIZE:
        return "F16"
    return kind


def check_served(config: RunConfig, precision: Precision) -> None:
    """Raises UsageError if `adapter.serve_as` is set together with a setting with which the file
    would not contain the trained weights. This check runs before anything is loaded.
    """
    adapter = config.adapter
    if adapter.serve_as is None and adapter.serve_from is not None:
        raise UsageError(
            "adapter.serve_from has no effect without adapter.serve_as", fix="leave it out"
        )
    if adapter.serve_as is None:
        return
    reasons = {
        "adapter.kind: none trains every weight": adapter.kind == "none",
        "adapter.kind: lokr is merged by other code": adapter.kind == "lokr",
        "with adapter.dora the rows are scaled after the sum": adapter.dora,
        "adapter.dropout changes the input of the adapter only": bool(adapter.dropout),
        "adapter.parameters adapts stacked experts": bool(adapter.parameters),
        "adapter.modules_to_save trains whole modules": bool(adapter.modules_to_save),
        "adapter.train_tokens trains rows of the embedding": bool(adapter.train_tokens),
        f"adapter.start: {adapter.start} is saved as another pair of matrices": (
            adapter.start in ("pissa", "olora")
        ),
        "model.optimize: false leaves the adapter to PEFT": not config.model.optimize,
        "model.add_tokens makes another base": bool(config.model.add_tokens),
        "model.offload moves the weights between uses": config.model.offload != "none",
        f"precision.trainable: {precision.trainable} rounds A and B": (
            precision.trainable != "fp32"
        ),
        f"precision.save: {precision.save} rounds the saved A and B": (
            precision.save_adapter != "fp32"
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UsageError(f"adapter.serve_as: {adapter.serve_as}: {reason}", fix=SERVE_FIX)


SERVE_FIX = "leave adapter.serve_as out, or change the other setting"


def served_start(adapter: AdapterSection, total: int) -> int:
    """Returns the first step that multiplies by rounded weights."""
    share = DEFAULT_SERVE_FROM if adapter.serve_from is None else adapter.serve_from
    return int(share * total) + 1


class ServedFormat:
    """Says how each matrix of a model is rounded.

    name  a value of `adapter.serve_as`
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name = name
        inner: Any = inner_model(model)
        self._refuse_family(inner)
        embedding = inner.get_input_embeddings()
        head = inner.get_output_embeddings()
        is_tied = head is None or head.weight is embedding.weight
        self.head = embedding if is_tied else head
        if any(is_lora(module) for module in (embedding, head)):
            raise UsageError(
                f"adapter.serve_as: {name}: an adapter on the embedding or on the head",
                fix=SERVE_FIX,
            )

    def _refuse_family(self, inner: Any) -> None:
        family = inner.config.model_type
        if family not in GGUF_FAMILIES:
            raise UsageError(
                f"adapter.serve_as: {self.name}: GGUF files are written of"
                f" {', '.join(GGUF_FAMILIES)}, not of {family}",
                fix=SERVE_FIX,
            )

    def pack(self, weight: Tensor, *, is_head: bool = False) -> tuple[Tensor, PackedState]:
        """Packs a matrix, fp32[O K]. Raises UsageError if its rows do not fit the format's blocks."""
        kind = gguf_type(GGUF_FORMATS[self.name], weight.shape, is_head=is_head)
        if kind == "F16":
            raise UsageError(
                f"adapter.serve_as: {self.name}: a matrix has rows of {weight.shape[-1]} values, no"
                f" multiple of {BLOCK_SIZE}",
                fix=SERVE_FIX,
            )
        return pack_blocks(weight, kind)

    def round(self, weight: Tensor, *, is_head: bool = False) -> Tensor:
        """Returns the values that a file stores for a matrix, fp32[O K]."""
        packed, state = self.pack(weight, is_head=is_head)
        return state.widen(packed, torch.float32)


@torch.no_grad()
def round_frozen(model: nn.Module, precision: Precision) -> None:
    """Rounds the matrices without an adapter to the served format. Dense matrices keep their dtype,
    so in bf16 their values are rounded once more. Does nothing if no format is served.
    """
    if not precision.served:
        return
    served = ServedFormat(precision.served, model)
    inner = inner_model(model)
    adapted = {id(part) for _, layer in lora_layers(inner) for part in layer.modules()}
    rounded = set[int]()
    for parent in list(inner.modules()):
        for name, module in list(parent.named_children()):
            is_matrix = isinstance(module, (nn.Linear, nn.Embedding)) or is_packed(module)
            if not is_matrix or id(module) in adapted:
                continue
            weight: Any = module.weight
            if id(weight) in rounded:
                continue
            rounded.add(id(weight))
            if is_packed(module):
                setattr(parent, name, _round_packed(module, served))
                continue
            is_head = weight is served.head.weight
            packed, state = served.pack(weight.float(), is_head=is_head)
            weight.data = state.widen(packed, weight.dtype)


def _round_packed(module: Any, served: ServedFormat) -> PackedLinear:
    weight = widen(module.weight.data, module.weight.quant_state, torch.float32)
    packed, state = served.pack(weight)
    layer = PackedLinear(module.in_features, module.out_features, packed, state, module.bias)
    layer.compute_dtype = module.compute_dtype
    return layer


def serve_adapters(model: nn.Module, precision: Precision) -> list[str]:
    """Makes the layers with an adapter multiply by the rounded sum of base and adapter. Returns
    lines for the run's header. Does nothing if no format is served.
    """
    if not precision.served:
        return []
    served = ServedFormat(precision.served, model)
    count = 0
    for _, layer in lora_layers(model):
        serve_layer(layer, served.pack)
        count += 1
    return [
        f"served: {count} layers multiply by their weights rounded to {served.name}; all other"
        " matrices are rounded too"
    ]
