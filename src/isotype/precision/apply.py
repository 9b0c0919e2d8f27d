"""Applies a `Precision` to a model. It casts weights to their declared dtype. It also makes the
model compute matrix products in the dtype `compute`, and casts the outputs of norms and embeddings
to it.

If a trainer has wrapped the model, the forward of the model inside this wrapper is changed. So
generation, evaluation and callbacks compute in the same dtypes as training. Only instances are
changed, never classes. A deepcopy of the model computes in the same dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import to_torch
from ..environment import planned_device
from ..instance_method import InstanceMethod
from .parts import Part
from .precision import Precision
from .vision import is_vision_weight, vision_parts


def denoiser_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a diffusers model, in the order of the model. A block is a module in a
    module list, and its class is named in `_no_split_modules` of the model. If blocks are nested,
    only the inner blocks are returned (for example, the resnet and transformer blocks of a U-Net).
    The list is empty for other models.
    """
    for owner in model.modules():
        if type(owner).__module__.startswith("diffusers.") and getattr(
            owner, "_no_split_modules", None
        ):
            classes = set(owner._no_split_modules)  # type: ignore[arg-type]  # a list of names if the attribute exists
            lists = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
            members = {
                block for blocks in lists for block in blocks if type(block).__name__ in classes
            }
            return [
                block
                for block in owner.modules()
                if block in members and members.intersection(block.modules()) == {block}
            ]
    return []


def names_kept_in_fp32(model: Any, dtype: torch.dtype) -> frozenset[str]:
    """Returns the names of the modules and parameters that stay in fp32 in a model of `dtype`. In
    transformers, the modules in `_keep_in_fp32_modules` stay in fp32 if the model is fp16. The
    modules in the strict list stay in fp32 if the model is fp16 or bf16. diffusers has one list of
    such modules, which applies to both fp16 and bf16.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return frozenset()
    strict_names = getattr(model, "_keep_in_fp32_modules_strict", ())
    fp16_names = getattr(model, "_keep_in_fp32_modules", None) or ()
    is_transformers = hasattr(type(model), "_keep_in_fp32_modules_strict")
    names = set(strict_names or ())
    if not is_transformers or dtype == torch.float16:
        names |= {fp16_names} if isinstance(fp16_names, str) else set(fp16_names)
    return frozenset(names)


def is_kept_in_fp32(full_name: str, in_fp32: frozenset[str]) -> bool:
    """Whether the module or parameter at this path stays in fp32. `in_fp32` has the names of the
    modules and parameters that stay in fp32. Returns False for the weights of an adapter.
    """
    path = f".{full_name}."
    return ".lora_" not in path and any(f".{name}." in path for name in in_fp32)


def modules_kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[nn.Module]:
    """Returns the modules that stay in fp32 in a model of `dtype`, and all modules inside them."""
    in_fp32 = names_kept_in_fp32(model, dtype)
    if in_fp32:
        return {
            module
            for full_name, module in model.named_modules()
            if is_kept_in_fp32(full_name, in_fp32)
        }
    return set()


class _GradientJoin:
    """A forward pre-hook of a block, which replaces each input that needs a gradient by a view. The
    gradients that the block computes for this input are then summed at the view, before they are
    added to other gradients of the input.
    """

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return (_view_gradients(args), _view_gradients(kwargs))
        return None


def _view_gradients(value: Any) -> Any:
    """Replaces each tensor that needs a gradient by a view, also inside tuples, lists and
    dictionaries.
    """
    if isinstance(value, Tensor):
        return value.view_as(value) if value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(map(_view_gradients, value))
    if type(value) is dict:
        return {name: _view_gradients(item) for name, item in value.items()}
    return value


_STATE = "_isotype_precision"  # attribute of a model with the precision that was applied to it
# the attribute of a transformers model with the names of its decoder layers that compute in fp32,
# because their values do not fit fp16
FP32_LAYERS_KEY = "_isotype_fp32_layers"


class _PrecisionState:
    """Holds the settings of a model whose forwards are wrapped. Each wrapped module stores this
    object. It also stores the forward that was set on the instance before, or None. So deepcopy
    copies both.

    methods   the forwards that were installed
    settings  (module, attribute, value before) of each attribute that was changed
    """

    def __init__(self, precision: Precision, device_type: str) -> None:
        self.precision = precision
        self.device_type = device_type
        self.set_compute(precision.compute)
        self.methods: list[InstanceMethod] = []
        self.settings: list[tuple[nn.Module, str, Any]] = []

    def install(self, method: InstanceMethod) -> None:
        self.methods.append(method)
        method.install()

    def set_attribute(self, module: nn.Module, attribute: str, value: Any) -> None:
        self.settings.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)

    def set_compute(self, dtype: str) -> None:
        """Sets the dtype in which the model computes matrix products from now on."""
        # fp32 switches autocast off, so that a caller's own autocast cannot narrow a declared fp32
        # run
        self.dtype, self.autocast_dtype = dtype, to_torch(dtype) if dtype != "fp32" else None

    def autocast(self) -> AbstractContextManager[Any]:
        return planned_device.autocast(self.device_type, self.autocast_dtype)


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside a PEFT or DDP wrapper, or the model itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return inner_model(model.module)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def is_quantised(parameter: Tensor) -> bool:
    return hasattr(parameter, "quant_state") or type(parameter).__name__ in (
        "Params4bit",
        "Int8Params",
    )


def quantised_dtype_name(parameter: Tensor) -> str:
    """Returns the dtype of a quantised weight. The name of the dtype is the same as in
    `precision.base`, such as nf4 or fp8.
    """
    state = getattr(parameter, "quant_state", None)
    return str(getattr(state, "dtype_name", None) or getattr(state, "quant_type", "int8"))


def weight_shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of a weight. For a packed weight, this is the shape after dequantisation."""
    state = getattr(parameter, "quant_state", None)
    return tuple(parameter.shape if state is None else state.shape)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) or type(
        module
    ).__name__.endswith(("RMSNorm", "LayerNorm"))


def cast_parameters(model: nn.Module, precision: Precision, part: Part | None = None) -> None:
    """Casts frozen floating-point parameters to the dtype `base`, and trainable ones to the dtype
    `trainable`. Quantised parameters and buffers do not change.

    Parameters that the model's class keeps in fp32 (`names_kept_in_fp32`) are cast to fp32 or stay
    fp32.

    part  states which rows this process will keep of a sharded model; only these rows are cast
    """
    if part is not None:
        part.on_loaded(model)
    for full_name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not is_quantised(parameter):
            dtype = to_torch(declared_dtype(model, full_name, parameter, precision))
            if parameter.dtype != dtype:
                if part is None:
                    parameter.data = parameter.data.to(dtype)
                else:
                    parameter.data = part.cast_rows(parameter.data, dtype)


def declared_dtype(
    model: nn.Module, full_name: str, parameter: Tensor, precision: Precision
) -> str:
    """Returns the dtype that `precision` declares for one floating-point parameter of `model` that
    is not quantised.
    """
    is_vision = (
        precision.vision
        and not parameter.requires_grad
        and is_vision_weight(inner_model(model), full_name)
    )
    # the text encoders of a diffusion run that trains them
    is_text_encoder = precision.text_encoder and ".text_encoders." in f".{full_name}"
    if is_vision:
        frozen = precision.vision
    elif is_text_encoder:
        frozen = precision.text_encoder
    else:
        frozen = precision.unquantised
    if is_in_fp32_layer(inner_model(model), full_name):
        frozen = "fp32"
    dtype_name = precision.trainable if parameter.requires_grad else frozen
    if is_kept_in_fp32(full_name, names_kept_in_fp32(inner_model(model), to_torch(dtype_name))):
        return "fp32"
    return dtype_name


def is_in_fp32_layer(inner: nn.Module, name: str) -> bool:
    """Whether a module or parameter belongs to a decoder layer that computes in fp32."""
    layers = vars(inner).get(FP32_LAYERS_KEY, ())
    return any(f".{layer}." in f".{name}." for layer in layers)


def apply_precision(
    model: nn.Module,
    precision: Precision,
    *,
    device_type: str,
    cast: bool = True,
    part: Part | None = None,
) -> None:
    """Makes `model` follow `precision` in training, evaluation and generation.

    Parameters are cast according to `requires_grad`, so attach adapters and freeze weights first.
    PEFT casts activations to the adapter's dtype, which is often wider. This is switched off, and
    the small matrices A and B are cast to `compute` instead.

    cast  False if the caller has already cast the parameters
    part  as in `cast_parameters`
    """
    if cast:
        cast_parameters(model, precision, part)
    inner = inner_model(model)
    if hasattr(inner, _STATE):
        raise ValueError("this model has a precision already")
    state = _PrecisionState(precision, device_type)
    for wrapped_module in (inner, *_separately_called_parts(inner)):
        setattr(wrapped_module, _STATE, (state, wrapped_module.__dict__.get("forward")))
        state.install(InstanceMethod(_run_in_precision, wrapped_module, arguments=()))
    in_fp32 = modules_kept_in_fp32(inner, to_torch(precision.compute))
    # some decoder layers of transformers (Mamba, XGLM, JetMoE) return the residual stream in a
    # wider dtype
    for block in decoder_layers(inner):
        block.register_forward_hook(_CastFirstOutput(to_torch(precision.compute)))
    for block in denoiser_blocks(inner):
        # a table of shifts and scales that is trained in fp32 makes the block's output fp32
        block.register_forward_hook(_CastAllOutputs(to_torch(precision.compute)))
        block.register_forward_pre_hook(_GradientJoin(), with_kwargs=True)
    # attributes of PEFT's and bitsandbytes' layers are set, which nn.Module does not declare
    module: Any
    for module in inner.modules():
        if precision.compute != "fp32" and _has_stacked_weights(
            module, to_torch(precision.compute)
        ):
            state.install(
                InstanceMethod(
                    _run_with_cast_weights, module, arguments=(to_torch(precision.compute),)
                )
            )
        if is_narrowed(module, in_fp32):
            module.register_forward_hook(_CastOutput(to_torch(precision.compute)))
        if hasattr(module, "cast_input_dtype_enabled"):
            state.set_attribute(module, "cast_input_dtype_enabled", False)
        if hasattr(module, "compute_type_is_set"):
            # a 4-bit layer has its own dtype for products: the library's default, the file's, or
            # that of the first input
            state.set_attribute(module, "compute_dtype", to_torch(precision.compute))
            state.set_attribute(module, "compute_type_is_set", True)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes repacks the weight in place on the first forward without gradients, and
            # later gradients are wrong
            state.set_attribute(module, "support_avx512bf16_for_cpu", False)


def remove_precision(model: nn.Module) -> None:
    """Undoes `apply_precision`, except for the dtypes of the parameters. Does nothing for a model
    without a precision.
    """
    inner = inner_model(model)
    if _STATE not in inner.__dict__:
        return
    state: _PrecisionState = inner.__dict__[_STATE][0]
    for method in reversed(state.methods):
        method.uninstall()
    for wrapped_module in (inner, *_separately_called_parts(inner)):
        wrapped_module.__dict__.pop(_STATE, None)
    for module, attribute, value in reversed(state.settings):
        setattr(module, attribute, value)
    for module in inner.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [
                key for key, hook in hooks.items() if isinstance(hook, _CastOutput | _GradientJoin)
            ]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _separately_called_parts(inner: nn.Module) -> list[nn.Module]:
    """Returns the parts of a transformers model whose forward may be called without the forward of
    the whole model. For example, some losses call the model without its head. `generate` calls the
    encoder of an encoder-decoder model, or a vision tower.
    """
    parts = [getattr(inner, "base_model", None)]
    encoder = getattr(inner, "get_encoder", None)
    if callable(encoder) and getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        parts.append(encoder())
    vision = vision_parts(inner)
    if vision is not None:
        parts += [inner.get_submodule(path) for path in (*vision.towers, *vision.projectors(inner))]
    return [part for part in parts if isinstance(part, nn.Module) and part is not inner]


def is_narrowed(module: nn.Module, in_fp32: set[nn.Module]) -> bool:
    """Whether the output of a module is cast to `compute`. Returns True for norms and embeddings.
    Returns False for a norm that the model keeps in fp32 and for diffusers' FP32LayerNorm. The
    output of these norms has the dtype of their input. Some models scale and shift this output in
    fp32 and then cast the result themselves.
    """
    keeps_input_dtype = module in in_fp32 or type(module).__name__ == "FP32LayerNorm"
    return (is_norm(module) and not keeps_input_dtype) or isinstance(
        module, nn.Embedding | nn.EmbeddingBag
    )


def _run_in_precision(class_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's forward, so that it runs under autocast with the dtype that the model's
    precision declares.
    """

    @functools.wraps(class_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state, previous = getattr(self, _STATE)
        original_forward = (
            previous if previous is not None else functools.partial(type(self).forward, self)
        )
        with state.autocast():
            return original_forward(*args, **kwargs)

    return forward


class _CastOutput:
    """This forward hook casts a floating-point output to the declared compute dtype. It is an
    object, so that deepcopy and pickle copy it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.cast_dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if (
            isinstance(output, Tensor)
            and output.is_floating_point()
            and output.dtype != self.cast_dtype
        ):
            return output.to(self.cast_dtype)
        return output


def is_cast_hook(hook: Any) -> bool:
    """Whether a forward hook casts the output of its module to the dtype `compute`."""
    return isinstance(hook, _CastOutput)


class _CastFirstOutput(_CastOutput):
    """Casts the output of a block in the same way as `_CastOutput`. A block may return a tuple,
    whose first item is the hidden states. Only this item is cast.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple) and output:
            return (super().__call__(module, args, output[0]), *output[1:])
        return super().__call__(module, args, output)


class _CastAllOutputs(_CastOutput):
    """Casts the outputs of a block of diffusers in the same way as `_CastOutput`. Such a block may
    return two tensors, one for the text and one for the picture.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(
                super(_CastAllOutputs, self).__call__(module, args, item) for item in output
            )
        return super().__call__(module, args, output)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers of a model of transformers, in the order of the model."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [block for stack in stacks for block in stack if is_block(block)]


def is_block(module: nn.Module) -> bool:
    """Whether a module in a module list counts as a decoder layer. Its class must be from
    transformers, and it must have weight matrices.
    """
    return type(module).__module__.startswith("transformers.") and any(
        p.dim() > 1 for p in module.parameters()
    )


def _has_stacked_weights(module: nn.Module, compute: torch.dtype) -> bool:
    """Whether a module of transformers holds the weights of several experts in one tensor, and this
    tensor has another dtype than `compute`. Autocast does not cast such a tensor for matrix
    products.
    """
    if not type(module).__module__.startswith("transformers.") or "forward" in module.__dict__:
        return False
    stacked = [
        p
        for p in module._parameters.values()
        if p is not None and p.dim() == 3 and p.is_floating_point()
    ]
    return any(p.dtype != compute for p in stacked)


def _run_with_cast_weights(
    class_forward: Callable[..., Any], compute: torch.dtype
) -> Callable[..., Any]:
    """Wraps `class_forward`, the forward of a module. The wrapper casts the module's floating-point
    weights to `compute` in each call. Gradients flow through the cast.
    """

    @functools.wraps(class_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weights = self._parameters
        cast_weights = {
            k: p.to(compute) if p is not None and p.is_floating_point() else p
            for k, p in weights.items()
        }
        self._parameters = cast_weights  # type: ignore[assignment]  # read by attribute, never registered
        try:
            return class_forward(self, *args, **kwargs)
        finally:
            self._parameters = weights

    return forward


def get_precision(model: nn.Module) -> Precision | None:
    """Returns the precision that was applied to a model, or None if there is none."""
    state: _PrecisionState | None = getattr(inner_model(model), _STATE, (None,))[0]
    return None if state is None else state.precision


@contextmanager
def use_generate_dtype(model: nn.Module) -> Iterator[None]:
    """Within this block, the model computes matrix products in the dtype `precision.generate`."""
    state: _PrecisionState = getattr(inner_model(model), _STATE)[0]
    previous_dtype = state.dtype
    state.set_compute(state.precision.generate)
    try:
        yield
    finally:
        state.set_compute(previous_dtype)
