"""Replaces transformers' attention function by one that calls the op `attention`. The forward of an
attention layer looks up the attention function in a global table.

On a CPU, PyTorch's function takes three to four times as long as the op in bf16. On a GPU, the op
supports packed documents, sliding windows and softcaps without a mask of positions x positions.
With gradient checkpointing, the output and the logsumexp of the attention can be kept, so that the
recompute of the layer does not compute the attention again. The original function runs for calls
that the op does not support (dropout, a bias, few queries as in generation, a compiled graph). It
also runs for every other attention implementation of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..environment.planned_device import plan_device
from ..errors import UsageError
from ..instance_method import Placement
from ..ops import attention
from ..ops.attention import Documents
from ..ops.attention.gpu import choose_gpu_backend, disable_cudnn_with_mask
from ..ops.attention.op import kernel_attention, mask_outside_window, reads_documents
from ..ops.widened_calls import WidenedCalls
from ..ops.widened_products import emulated_dtypes
from ..precision.apply import inner_model
from ..precision.vision import get_language_part
from .instances import Replacement, make_placement, rebuild_blocker, replacement_blocker

PART_NAME = "attention"  # the value of `Placement.part`
FUNCTION_TABLE = "ALL_ATTENTION_FUNCTIONS"  # the name of transformers' table of attention functions
# with fewer queries PyTorch's forward is as fast, because the op computes blocks of 64 queries and
# most of a block would be empty
MIN_QUERIES = 32
# arguments that would change the result, and that the op does not support
UNSUPPORTED_ARGUMENTS = ("position_bias", "cache", "s_aux", "output_attentions")


def attention_implementation(module: nn.Module) -> str | None:
    """Returns the name under which the module's forward looks up its attention function in
    transformers' table. Returns None if the forward does not use this table.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or FUNCTION_TABLE not in forward.__code__.co_names:
        return None
    table = forward.__globals__.get(FUNCTION_TABLE)
    config = getattr(module, "config", None)
    if hasattr(table, "get_interface"):
        return getattr(config, "_attn_implementation", None)
    return None


def attention_softcap(module: nn.Module) -> float | None:
    return getattr(getattr(module, "config", None), "attn_logit_softcapping", None)


def is_candidate(module: nn.Module, device_type: str) -> bool:
    """Whether the op can replace the module's attention function. The op can replace the
    implementation "sdpa". On a GPU, it can also replace "eager" if the module has a softcap, since
    "sdpa" cannot compute softcaps.
    """
    implementation = attention_implementation(module)
    return implementation == "sdpa" or (
        implementation == "eager" and device_type != "cpu" and attention_softcap(module) is not None
    )


def place_attention(
    path: str, module: nn.Module, device_type: str, replacements: list[Replacement]
) -> Placement:
    """Adds a new table of attention functions to `replacements`. The caller then creates a copy of
    the module's forward that uses this table instead of transformers' table. On a GPU, the returned
    manifest entry names the attention back ends.
    """
    reason = replacement_blocker(module) or rebuild_blocker(type(module).forward)
    if reason is not None:
        return make_placement(PART_NAME, path, module, None, reason)
    replacements.append(Replacement(FUNCTION_TABLE, AttentionFunctions))
    note = "" if device_type == "cpu" else describe_backends(module)
    return make_placement(PART_NAME, path, module, "attention", note)


def describe_backends(module: nn.Module) -> str:
    """Returns the names of the attention back ends that compute this module in a training step in
    bf16.
    """
    device = next((p.device for p in module.parameters()), torch.device("meta"))
    device = device if device.type == "cuda" else torch.device("meta")
    config: Any = getattr(module, "config", None)
    # transformers does not allow to read settings that differ between layers from the common
    # configuration
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[cast(int, module.layer_idx)]
    depth = (
        getattr(module, "head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    x = torch.empty(1, 1, 128, depth, dtype=torch.bfloat16, device="meta")
    options: dict[str, Any] = {
        "causal": True,
        "has_mask": False,
        "window": getattr(module, "sliding_window", None),
        "softcap": attention_softcap(module),
    }
    with nullcontext() if device.type == "cuda" else plan_device("cuda"):
        unpacked_backend, packed_backend = (
            choose_gpu_backend(x.dtype, x, x, **options, is_packed=packed_backend, device=device)
            for packed_backend in (False, True)
        )
    if unpacked_backend == packed_backend:
        return f"{unpacked_backend} in bf16"
    return f"{unpacked_backend} in bf16, {packed_backend} for packed documents"


def _no_default(*_: Any, **__: Any) -> Any:
    raise LookupError("transformers has no function for sdpa")


class AttentionFunctions:
    """Replaces transformers' table of attention functions. Its entries "sdpa" and "eager" call the
    op.
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        # one wrapper per original function, so that Dynamo does not recompile for every call
        self.wrappers: dict[Any, Callable[..., Any]] = {}
        # created in advance: otherwise a graph of the first call would be valid only for an empty
        # table
        self.get_interface("sdpa", _no_default)

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        original: Callable[..., Any] = self.table.get_interface(implementation, default)
        # a user may have registered another function under that name
        expected_module = (
            "transformers.integrations.sdpa_attention"
            if implementation == "sdpa"
            else getattr(default, "__module__", None)
        )
        is_transformers_own = (
            implementation in ("sdpa", "eager")
            and getattr(original, "__module__", None) == expected_module
        )
        if not is_transformers_own:
            return original
        if original not in self.wrappers:
            self.wrappers[original] = wrap_attention(original, is_eager=implementation == "eager")
        return self.wrappers[original]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


def _run_original(
    original: Callable[..., tuple[Tensor, None]],
    arguments: tuple[nn.Module, Tensor, Tensor, Tensor, Tensor | None],
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Runs transformers' function. On a GPU, it disables cuDNN's attention if there is a mask. On a
    CPU without bf16 instructions, products of bf16 are computed in fp32.
    """
    mask = arguments[-1]
    if emulated_dtypes() and arguments[1].is_cpu and not torch.compiler.is_compiling():
        with WidenedCalls():
            return original(*arguments, **options)
    if mask is None or mask.is_cpu or torch.compiler.is_compiling():
        return original(*arguments, **options)
    with disable_cudnn_with_mask(mask):
        return original(*arguments, **options)


def wrap_attention(
    original: Callable[..., tuple[Tensor, None]], *, is_eager: bool
) -> Callable[..., Any]:
    """Wraps an attention function of transformers. Its arguments are (module, query, key, value,
    mask), and it returns ([B S N D], None). The wrapper calls the op `attention` if the op supports
    the call.

    is_eager  whether the original is the eager attention function in the file of the model
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **extra_options: Any,
    ) -> tuple[Tensor, None]:
        options = {"dropout": dropout, "scaling": scaling} | extra_options
        if not is_eager:
            options["is_causal"] = is_causal
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_unsupported = bool(dropout)
        for name in UNSUPPORTED_ARGUMENTS:
            if (
                name in extra_options
                and extra_options[name] is not None
                and extra_options[name] is not False
            ):
                is_unsupported = True
        if isinstance(attention_mask, DocumentMask):
            if is_unsupported or not causal:
                raise UsageError(
                    "a mask of documents reached an attention that cannot read it",
                    fix="model.attention: flash, or no packing",
                )
            window = extra_options.get("sliding_window")
            if window is not None and window >= query.shape[2]:
                window = None
            documents: Documents | None = attention_mask.documents
            if attention_mask.documents.whole_rows and window is None:
                documents = None
            softcap = extra_options.get("softcap")
            if documents is None or reads_documents(
                query, key, value, window=window, softcap=softcap
            ):
                limits: dict[str, Any] = {"causal": True, "window": window, "documents": documents}
            else:
                limits = {"mask": attention_mask.causal_mask(query, window)}
            output = attention(query, key, value, scale=scaling, softcap=softcap, **limits)
            return output.transpose(1, 2).contiguous(), None

        arguments = (module, query, key, value, attention_mask)
        is_short = query.shape[2] < MIN_QUERIES
        if is_unsupported or is_short or is_eager or extra_options.get("softcap") is not None:
            return _run_original(original, arguments, options)
        causal = causal and attention_mask is None
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            return _run_original(original, arguments, options)
        kernel_output = kernel_attention(
            query, key, value, mask=attention_mask, causal=causal, scale=scaling
        )
        if kernel_output is None:
            return _run_original(original, arguments, options)
        return (kernel_output.transpose(1, 2).contiguous(), None)

    return forward


def document_mask_blocker(model: nn.Module) -> str | None:
    """Returns the reason why this model needs an attention mask for packed documents. Returns None
    if no mask is needed, because the op gets the start positions of the documents instead. This is
    possible if the op computes all attention of the model and nothing else reads a mask.
    """
    language = get_language_part(inner_model(model))
    layers = [
        (name, module)
        for name, module in language.named_modules()
        if attention_implementation(module) is not None
    ]
    for name, module in layers:
        forward = vars(module).get("forward")
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        table = getattr(function, "__globals__", {}).get(FUNCTION_TABLE)
        if not isinstance(table, AttentionFunctions):
            return f"{name} runs its own attention"
        if attention_implementation(module) not in ("sdpa", "eager"):
            return f"{name} runs {attention_implementation(module)}"
        if getattr(module, "attention_dropout", 0.0) and module.training:
            return f"{name} has dropout"
        if attention_implementation(module) == "eager" and attention_softcap(module) is None:
            return f"{name} runs eager"
    if layers:
        return padding_mask_reason(model)
    return "it has no attention layer that is known"


class DocumentMask(Tensor):
    """A tensor that is passed in place of a mask and contains the bounds of packed documents. It
    has the dtype int32, the shape [1 1 1 E+1] and the values of `documents.bounds`.

    documents  the bounds of the documents and the positions of the tokens
    masks      sliding window (None without one) -> the mask that code other than the op gets
    """

    documents: Documents
    masks: dict[int | None, Tensor]

    @staticmethod
    def __new__(cls, documents: Documents) -> DocumentMask:
        values = documents.bounds.view(1, 1, 1, -1)
        if isinstance(values, FakeTensor):
            # a plan of memory. A fake tensor cannot become a tensor of another class
            with unset_fake_temporarily():
                values = torch.zeros(values.shape, dtype=torch.int32)
        mask = torch.Tensor._make_subclass(cls, values)
        mask.documents = documents
        mask.masks = {}
        return mask

    def causal_mask(self, query: Tensor, window: int | None) -> Tensor:
        """Returns bool[B or 1, 1, S, S], true where a query attends to a key. The mask is created
        once for all layers, for attention that cannot read the bounds of the documents.
        """
        if window not in self.masks:
            batch, _, positions, _ = query.shape
            if self.documents.whole_rows:
                # all rows have the same mask
                shape = (1, 1, positions, positions)
                mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
            else:
                mask = self.documents.mask(batch, positions).tril()
            if window is not None:
                mask = mask_outside_window(mask, window)
            self.masks[window] = mask
        return self.masks[window]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # a C function, where Tensor has a class method


# values of `layer_types` for layers with ordinary attention
PLAIN_LAYERS = {"full_attention", "sliding_attention"}


def padding_mask_reason(model: Any) -> str | None:
    """Returns the reason why this model needs a padding mask, or None if it needs no such mask. A
    model whose attention is causal needs no mask for padding on the right, because no real token
    attends to a later position.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "is_encoder_decoder", False):
        return "its encoder attends to both sides"
    if getattr(text, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    if getattr(text, "output_router_logits", False):
        return "its routers' balancing loss leaves padding out"
    other_types = sorted(set(getattr(text, "layer_types", None) or []) - PLAIN_LAYERS)
    if other_types:
        return f"it has layers of {', '.join(other_types)}"
    # a vision tower does not get the text's mask
    for name, module in get_language_part(model).named_modules():
        if getattr(module, "is_causal", True) is False:
            return f"{name} is not causal"
        if isinstance(module, nn.Conv1d) or hasattr(module, "A_log"):
            return f"{name} is a {type(module).__name__}, which mixes neighbouring positions"
    if getattr(text, "model_type", None):
        return None
    return "its configuration is unknown"


class MaskNeeds(NamedTuple):
    """States which masks a model needs.

    padding_mask_reason    the reason why the model needs a padding mask; None if it does not
    document_mask_blocker  the reason why it cannot use a `DocumentMask`; None if it can
    """

    padding_mask_reason: str | None
    document_mask_blocker: str | None


MASK_NEEDS_KEY = "_isotype_mask_needs"


def mask_needs(model: nn.Module) -> MaskNeeds:
    """Returns which masks a model needs. There is one cached result for training mode and one for
    evaluation mode. `optimize` and `restore` delete both.
    """
    # vars() bypasses nn.Module.__setattr__
    needs_by_mode: dict[bool, MaskNeeds] = vars(model).setdefault(MASK_NEEDS_KEY, {})
    if model.training not in needs_by_mode:
        needs_by_mode[model.training] = MaskNeeds(
            padding_mask_reason(model), document_mask_blocker(model)
        )
    return needs_by_mode[model.training]
