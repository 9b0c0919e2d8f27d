"""Prepares a model that is trained for the format in which it is served (`adapter.serve_as`).

If the exported file contains rounded values of a matrix, training uses the rounded values too.
Matrices without an adapter are rounded once, when the model is built. A layer with an adapter
multiplies by the rounded sum of base and adapter (`lora.served`). So the file that `isotype export`
writes contains the weights with which the model was trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import AdapterSection, RunConfig
from ..errors import UsageError
from ..lora.attach import is_lora, lora_layers, serve_layer
from ..lora.quantised import PackedLinear, is_packed
from ..ops.packed import PackedState, dequantise_packed
from ..ops.packed.quantise import (
    NVFP4_BLOCK,
    NVFP4_LARGEST,
    nvfp4_global_scale,
    pack_blocks,
    pack_compressed,
)
from ..precision.apply import inner_model, weight_shape
from ..precision.precision import Precision
from ..precision.vision import vision_parts

COMPRESSED_FORMATS = ("fp8", "int8", "int4", "nvfp4", "mxfp4")
"""Formats of folders of compressed-tensors, which vLLM serves. Linear layers without the head are
rounded; the embedding and the head keep the dtype of the model.
"""
# numbers of columns that share a scale; the first that divides all rows
_INT4_GROUPS = (128, 64, 32)
# value of `adapter.serve_as` -> kind of blocks in a GGUF file
GGUF_FORMATS = {"q8_0": "Q8_0", "q5_0": "Q5_0", "q4_0": "Q4_0"}
GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
"""Families of which whole models can be written as GGUF files."""
DEFAULT_SERVE_FROM = 0.1  # the share of the steps after which layers multiply by rounded weights
BLOCK_SIZE = 32  # values that share a scale in the blocks of a GGUF file
# types of the head that are wider than the type of the other matrices. llama-quantize writes Q6_K,
# for which the package gguf has no quantiser
_HEAD_TYPES = {"Q4_0": "Q8_0", "Q5_0": "Q8_0"}
# training changes the weights after their global scale is computed: up to this factor, their
# largest magnitude can grow without saturation
_GLOBAL_SCALE_HEADROOM = 2.0


def gguf_type(kind: str, shape: Sequence[int], *, is_head: bool) -> str:
    """Returns the GGUF type of one tensor if a model is written in the type `kind`.

    Vectors get F32. The head, or the embedding if the head shares its weight, gets Q8_0 in the
    4-bit and 5-bit types. llama.cpp uses a wider type for this weight too. A matrix gets F16 if the
    length of its rows is not a multiple of the block size.
    """
    if len(shape) < 2:
        return "F32"
    if is_head:
        kind = _HEAD_TYPES.get(kind, kind)
    if kind not in ("F16", "BF16") and shape[-1] % BLOCK_SIZE:
        return "F16"
    return kind


def check_served(config: RunConfig, precision: Precision) -> None:
    """Raises UsageError if another setting contradicts `adapter.serve_as`, because the exported
    file would not contain exactly the weights with which the model was trained. This check runs
    before anything is loaded.
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

    name           a value of `adapter.serve_as`
    group          the number of neighbouring values of a row that have the same scale in int4
    global_scales  id of a weight -> its global scale in nvfp4, fp32[1]

    A server joins matrices that have the same input (query, key and value; gate and up) and reads
    the joined matrix with one global scale. So matrices of one module with rows of the same length
    have the same global scale.

    read_values  returns the final values of a weight, in fp32. Without it, the values of the base
                 are read, and the global scales leave room for the change by training
    """

    def __init__(
        self, name: str, model: nn.Module, read_values: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.name = name
        self.is_gguf = name in GGUF_FORMATS
        inner: Any = inner_model(model)
        embedding = inner.get_input_embeddings()
        head = inner.get_output_embeddings()
        if any(is_lora(module) for module in (embedding, head)):
            raise UsageError(
                f"{name}: an adapter on the embedding or on the head is not merged", fix=SERVE_FIX
            )
        self._refuse_family(inner)
        is_tied = head is None or head.weight is embedding.weight
        self.head = embedding if is_tied else head
        self.weights = self._find_weights(inner)
        columns = {weight_shape(weight)[1] for weight in self.weights.values()}
        self.group = next(
            (
                group_size
                for group_size in _INT4_GROUPS
                if not any(column % group_size for column in columns)
            ),
            0,
        )
        self._refuse_rows(columns)
        self.global_scales: dict[int, Tensor] = {}
        if name == "nvfp4":
            self.global_scales = self._compute_global_scales(inner, read_values)

    def _refuse_family(self, inner: Any) -> None:
        family = inner.config.model_type
        if self.is_gguf and family not in GGUF_FAMILIES:
            raise UsageError(
                f"{self.name}: GGUF files are written of {', '.join(GGUF_FAMILIES)}, not of"
                f" {family}",
                fix=SERVE_FIX,
            )
        shapes = [weight_shape(parameter) for parameter in inner.parameters()]
        if any(len(shape) > 2 for shape in shapes) or vision_parts(inner) is not None:
            raise UsageError(
                f"{self.name}: {family} has stacked experts or a vision tower, whose weights are not"
                " written in this format",
                fix=SERVE_FIX,
            )

    def _find_weights(self, inner: nn.Module) -> dict[int, Tensor]:
        """Returns a dict from the id of each weight that is rounded to the weight."""
        adapters = {
            id(part)
            for _, layer in lora_layers(inner)
            for part in layer.modules()
            if part not in (layer, layer.base_layer)
        }
        weights = {}
        for module in inner.modules():
            is_linear = isinstance(module, nn.Linear) or is_packed(module)
            is_matrix = is_linear or isinstance(module, nn.Embedding)
            if not is_matrix or id(module) in adapters:
                continue
            weight: Any = module.weight
            if self.is_gguf or (is_linear and weight is not self.head.weight):
                weights[id(weight)] = weight
        return weights

    @torch.no_grad()
    def _compute_global_scales(
        self, inner: nn.Module, read_values: Callable[[Tensor], Tensor] | None
    ) -> dict[int, Tensor]:
        groups: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        for path, module in inner.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None and id(weight) in self.weights:
                parent = path.removesuffix(".base_layer").rpartition(".")[0]
                groups[parent, weight_shape(weight)[1]].append(weight)
        scales: dict[int, Tensor] = {}
        for weights in groups.values():
            scale = _shared_global_scale(weights, read_values)
            scales |= {id(weight): scale for weight in weights}
        return scales

    def _refuse_rows(self, columns: set[int]) -> None:
        blocks = {"nvfp4": NVFP4_BLOCK, "fp8": 1, "int8": 4}
        size = blocks.get(self.name, BLOCK_SIZE)
        for column in sorted(columns):
            if column % size:
                raise UsageError(
                    f"{self.name}: a matrix has rows of {column} values, no multiple of {size}",
                    fix=SERVE_FIX,
                )

    def rounds(self, weight: Tensor) -> bool:
        """Returns True if a file in this format contains rounded values of this weight."""
        return id(weight) in self.weights

    def pack(self, weight: Tensor, parameter: Tensor) -> tuple[Tensor, PackedState]:
        """Packs a matrix.

        weight     fp32[O K], the values before they are rounded
        parameter  the parameter of the model whose values these are
        """
        if not self.is_gguf:
            scale = self.global_scales.get(id(parameter))
            return pack_compressed(weight, self.name, group=self.group, global_scale=scale)
        is_head = parameter is self.head.weight
        return pack_blocks(
            weight, gguf_type(GGUF_FORMATS[self.name], weight.shape, is_head=is_head)
        )

    def round(self, weight: Tensor, parameter: Tensor) -> Tensor:
        """Returns the values that a file stores for a weight, in fp32.

        weight     the values before they are rounded
        parameter  the parameter of the model whose values these are
        """
        if not self.rounds(parameter):
            return weight
        packed, state = self.pack(weight, parameter)
        return state.dequantise(packed, torch.float32)


def _base_values(weight: Tensor) -> Tensor:
    """Returns the values of a weight of the base in fp32."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach().float()
    return dequantise_packed(weight.data, state, torch.float32)


def _shared_global_scale(
    weights: Sequence[Tensor], read_values: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Returns one global scale, fp32[1], for matrices that a server joins. If they were published
    with one global scale that fits their values, it is kept.
    """
    headroom = 1.0
    if read_values is None:
        read_values = _base_values
        headroom = _GLOBAL_SCALE_HEADROOM
    largest = torch.stack([read_values(weight).abs().amax() for weight in weights]).amax()
    states = [getattr(weight, "quant_state", None) for weight in weights]
    published = [
        state.tensors.get("weight_global_scale") if isinstance(state, PackedState) else None
        for state in states
    ]
    first = published[0]
    if first is None or first.is_meta:
        return nvfp4_global_scale(largest * headroom)
    is_shared = all(scale is not None and torch.equal(scale, first) for scale in published)
    if is_shared and largest * first <= NVFP4_LARGEST:
        return first
    return nvfp4_global_scale(largest * headroom)


@torch.no_grad()
def round_frozen(model: nn.Module, precision: Precision) -> ServedFormat | None:
    """Rounds the matrices without an adapter to the served format. A matrix that is not packed
    keeps its dtype. If this dtype is bf16, the cast back to it rounds the values a second time.
    Returns the format, which `serve_adapters` needs. Returns None and does nothing if the run is
    not trained for a served format.
    """
    if not precision.served:
        return None
    served = ServedFormat(precision.served, model)
    inner = inner_model(model)
    adapted = {id(layer.base_layer) for _, layer in lora_layers(inner)}
    rounded = set[int]()
    for parent in list(inner.modules()):
        for name, module in list(parent.named_children()):
            weight: Any = module._parameters.get("weight")
            if weight is None or not served.rounds(weight):
                continue
            if id(module) in adapted or id(weight) in rounded:
                continue
            rounded.add(id(weight))
            if is_packed(module):
                setattr(parent, name, _round_packed(module, served))
                continue
            packed, state = served.pack(weight.float(), weight)
            weight.data = state.dequantise(packed, weight.dtype)
    return served


def _round_packed(module: Any, served: ServedFormat) -> PackedLinear:
    packed, state = served.pack(_base_values(module.weight), module.weight)
    layer = PackedLinear(module.in_features, module.out_features, packed, state, module.bias)
    layer.compute_dtype = module.compute_dtype
    return layer


def serve_adapters(model: nn.Module, served: ServedFormat | None) -> list[str]:
    """Makes the layers with an adapter multiply by the rounded sum of base and adapter. Returns
    lines for the run's header. Does nothing without a format.

    served  the result of `round_frozen`, made before the frozen matrices were rounded
    """
    if served is None:
        return []
    count = 0
    for _, layer in lora_layers(model):
        serve_layer(layer, partial(served.pack, parameter=layer.base_layer.weight))
        count += 1
    return [
        f"served: {count} layers multiply by their weights rounded to {served.name}; other matrices"
        " that the file rounds are rounded too"
    ]
