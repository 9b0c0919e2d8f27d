"""`optimize` makes the modules of a model use ops, and `restore` undoes this."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..dtypes import TRAINING_FLOATS, format_dtype, to_torch
from ..errors import UsageError
from ..instance_method import Placement, get_method, uninstall_forward
from ..lora import forward_4bit, fuse_lora, is_4bit, unfuse_lora
from ..lora.attach import is_fused
from ..lora.products import kernels_unavailable_reason
from ..ops import trust
from ..ops.backend import (
    kernel_unavailable_reason,
    triton_blocked_reason,
    wrong_triton_kernels,
)
from ..ops.builds import COMMON_OPS
from ..ops.cpp import missing_kernels_reason, wrong_kernels
from ..ops.widened_products import emulated_dtypes
from ..precision import Precision
from . import attention, denoiser, experts, gated, generation, head, layers, norms, rotary
from .forwards import PLACED_KEY
from .instances import (
    KERNEL_LIBRARIES,
    Replacement,
    foreign_kernel_reason,
    install_rebuilt_forward,
    library_name,
    make_placement,
    place_replacement,
    replacement_blocker,
)
from .manifest import Manifest, base_notes
from .widened import place_widened

# the op of a manifest entry -> the folder of its Triton kernels
_TRITON_KERNELS = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "rope": "rope",
    "silu_mul": "gated",
    "gelu_mul": "gated",
    "gelu": "gated",
    "lora_mlp": "gated",
    "linear_cross_entropy": "cross_entropy",
    "linear_log_probs": "cross_entropy",
    "linear_4bit": "packed",
    "experts": "experts",
    "modulated_layer_norm": "modulation",
    "gated_residual": "modulation",
}


def find_causal_lms(model: nn.Module) -> list[nn.Module]:
    """Finds the modules that have a head and a loss. This is the model itself, or the model inside
    the wrapper of an adapter library.
    """
    models: list[Any] = [
        m
        for m in model.modules()
        if hasattr(m, "loss_function")
        and hasattr(m, "get_output_embeddings")
        and hasattr(m, "config")
    ]
    # the inner model (LlamaModel in LlamaForCausalLM) has the same methods but no head; the
    # wrappers of an adapter library return the same head
    by_head: dict[int, nn.Module] = {}
    for m in models:
        head: nn.Module | None = m.get_output_embeddings()
        if head is not None:
            by_head.setdefault(id(head), m)
    return list(by_head.values()) or models[:1]


def optimize(
    model: nn.Module,
    precision: Any = None,
    *,
    device_type: str | None = None,
    lora_branch: str = "compute",
) -> Manifest:
    """Replaces computations in a causal LM of transformers or a denoiser of diffusers by ops.
    Modules are recognised by their structure. The output of a module is compared with the output of
    the op for a small test input. Only instances are changed, never classes.

    model      the model, or a PEFT model of it
    precision  a Precision, the name of a preset, the short text form (`bf16-pure grads=fp32`), or a
               dtype. With a precision, the output of norms has the compute dtype; without one, it
               has the dtype of the input
    device_type  the type of the device on which the model will run; by default the type of the
                 device of its parameters
    lora_branch  with "fp32", matrix products with A and B are computed in fp32, also if the other
                 matrix products are narrower
    ->         the Manifest, which can be printed
    It places `rms_norm` in norms, `rope` in rotary functions, `attention` in attention layers, and
    `silu_mul` or `gelu_mul` in gated MLPs. The head and its loss use `linear_cross_entropy`. LoRA
    layers use `lora_linear`, and gated MLPs of LoRA layers use `lora_mlp`. Stacked experts with and
    without LoRA use `experts`, and 4-bit layers use `linear_4bit`. `model.generate` may be called
    during training; the module `generation` describes how.
    Raises  UsageError if `model` is not a module, and for an unknown precision or lora_branch
    """
    if lora_branch not in ("compute", "fp32"):
        raise UsageError(f"lora_branch is {lora_branch!r}: expected compute or fp32")
    if not isinstance(model, nn.Module):
        raise UsageError(f"optimize() takes a model, not a {type(model).__name__}")
    precision = parse_precision(precision)
    vars(model).pop(attention.MASK_NEEDS_KEY, None)
    dtype_name = getattr(precision, "compute", precision)
    # probes draw random numbers, and need real tensors also while the model is built under
    # torch.device("meta")
    with generation.preserve_random_state(), torch.device("cpu"):
        return _place_ops(
            model, precision, dtype_name, device_type=device_type, lora_branch=lora_branch
        )


def _find_gpus(model: nn.Module, device_type: str | None) -> set[torch.device]:
    """Returns the GPUs on which the model runs. These are the GPUs of its parameters, or the
    current GPU if the weights are still on the CPU.
    """
    devices = {p.device for p in model.parameters() if p.is_cuda}
    is_waiting_on_host = (
        device_type == "cuda"
        and not devices
        and any(p.device.type == "cpu" for p in model.parameters())
    )
    if is_waiting_on_host and torch.cuda.is_available():
        return {torch.device("cuda", torch.cuda.current_device())}
    return devices


def _place_ops(
    model: nn.Module,
    precision: Any,
    dtype_name: str | None,
    *,
    device_type: str | None,
    lora_branch: str,
) -> Manifest:
    norm_output_dtype: torch.dtype | None = None
    manifest = Manifest()
    if dtype_name is not None:
        norm_output_dtype = to_torch(dtype_name)
        manifest.precision = f"norms give {dtype_name}"
    branch_fp32 = lora_branch == "fp32"
    on_cpu = _runs_on_cpu(model, device_type)
    is_denoiser = denoiser.is_denoiser(model)
    missing_kernels = _find_missing_kernels(model, on_cpu=on_cpu, is_denoiser=is_denoiser)
    if missing_kernels:
        manifest.notes.append(_note_missing_kernels(missing_kernels, norm_output_dtype))
    manifest.notes += _note_gpus_without_kernels(_find_gpus(model, device_type))
    # LoRA layers are fused first, because a gated MLP depends on whether its layers are fused
    adapters = fuse_lora(model, branch_fp32=branch_fp32)
    if on_cpu and any(adapter.op for adapter in adapters):
        manifest.notes += _note_missing_products()
    tables = rotary.detect_tables(model)
    expert_modules = set[int]()
    for path, module in model.named_modules():
        if is_4bit(module):
            manifest.entries.append(_place_4bit(path, module))
        if not missing_kernels or (norm_output_dtype is not None and norms.is_candidate(module)):
            manifest.entries += _place_row_ops(
                path, module, norm_output_dtype, saves_input=is_denoiser
            )
        if not missing_kernels:
            if is_denoiser:
                manifest.entries += denoiser.place_denoiser_part(path, module, norm_output_dtype)
            else:
                manifest.entries += _place_attention(path, module, tables, on_cpu)
            if layers.is_candidate(module):
                manifest.entries.append(layers.place_layer(path, module))
        if path and id(module) not in expert_modules and experts.is_candidate(module):
            manifest.entries.append(experts.place_experts(path, module, branch_fp32=branch_fp32))
            expert_modules |= {id(m) for m in module.modules()}
    for lm in find_causal_lms(model):
        path = next(path for path, module in model.named_modules() if module is lm)
        manifest.entries.append(head.place_head(path, lm, manifest))
        manifest.entries.append(generation.place_generate(path, lm))
    manifest.entries += adapters
    if on_cpu:
        manifest.notes += place_widened(model, norm_output_dtype)
    # past nn.Module's own __setattr__
    vars(model)[PLACED_KEY] = [
        m for m in model.modules() if get_method(m) is not None or is_fused(m)
    ]
    manifest.notes += base_notes(model, precision)
    if not on_cpu:
        _check_triton_kernels(manifest, model, _find_gpus(model, device_type), norm_output_dtype)
    note_wrong_kernels(manifest)
    if not manifest.entries:
        manifest.notes.append("nothing in this model was recognised")
    return manifest


def _runs_on_cpu(model: nn.Module, device_type: str | None) -> bool:
    if device_type:
        return device_type == "cpu"
    return all(p.device.type == "cpu" for p in model.parameters())


def _find_missing_kernels(model: nn.Module, *, on_cpu: bool, is_denoiser: bool) -> str:
    """Returns the reason why the C++ kernels of ops are missing on a CPU, or "" if they exist or
    are not needed.

    Without its kernel, an op runs plain PyTorch and is not faster than the model's code.
    """
    if not on_cpu:
        return ""
    ops = [*COMMON_OPS]
    if is_denoiser:
        ops += denoiser.KERNEL_FOLDERS
    reason = missing_kernels_reason(*ops)
    if any(map(experts.has_stacks, model.modules())):
        # called to load the kernels; without them the op uses PyTorch's products
        missing_kernels_reason("experts")
    return reason


def _note_missing_kernels(reason: str, norm_output_dtype: torch.dtype | None) -> str:
    note = f"{reason}: norms, rotary, attention and gated MLPs are left to the model on this CPU"
    if norm_output_dtype is None:
        return note
    return f"{note} but for norms, whose output is declared"


def _note_gpus_without_kernels(devices: set[torch.device]) -> list[str]:
    notes = []
    for device in sorted(devices, key=str):
        if reason := kernel_unavailable_reason(device):
            notes.append(
                f"{device}: {reason}: norms, rotary, gated MLPs and losses run as plain PyTorch"
                " there"
            )
    return notes


def _check_triton_kernels(
    manifest: Manifest, model: nn.Module, devices: set[torch.device], dtype: torch.dtype | None
) -> None:
    """Checks the kernels of the placed ops on each GPU, if they were not checked there before. An
    op that is not in the manifest is checked when it first runs.

    dtype  the declared compute dtype, or None for the dtype of the weights
    """
    placed_ops = {entry.op for entry in manifest.replaced}
    kernels = sorted({_TRITON_KERNELS[op] for op in placed_ops if op in _TRITON_KERNELS})
    for device in devices:
        if kernel_unavailable_reason(device):
            continue
        dtype = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
        for op in kernels:
            triton_blocked_reason(op, device, dtype)


def note_wrong_kernels(manifest: Manifest) -> None:
    """Adds a note to the manifest for each op whose kernels are wrong on this machine, and one if
    the kernels were not checked. A run calls this again after its test step, in which more ops may
    have been checked.
    """
    notes = []
    if trust.is_check_skipped():
        notes.append(trust.SKIPPED_NOTE)
    for device_type, reasons in (("cpu", wrong_kernels()), ("cuda", wrong_triton_kernels())):
        for op, reason in reasons.items():
            notes.append(trust.describe_wrong_kernel(op, device_type, reason))
    manifest.notes += [note for note in notes if note not in manifest.notes]


def _note_missing_products() -> list[str]:
    reason = kernels_unavailable_reason()
    if not reason or torch.bfloat16 in emulated_dtypes():
        return []
    return [f"{reason}: the adapters' own products are PyTorch's on this CPU"]


def _place_4bit(path: str, module: nn.Module) -> Placement:
    note = ""
    if path.endswith(".base_layer"):
        note = "for when the adapter's op does not run"
    reason = replacement_blocker(module)
    return place_replacement(
        "4-bit", path, module, forward_4bit, "linear_4bit", settings_or_reason=reason, note=note
    )


def parse_precision(precision: Any) -> Any:
    """Converts the argument `precision` to a Precision, a dtype's name, or None."""
    if (
        precision is None
        or isinstance(precision, Precision)
        or (isinstance(precision, str) and precision in TRAINING_FLOATS)
    ):
        return precision
    if isinstance(precision, torch.dtype):
        return format_dtype(precision)
    if not isinstance(precision, str):
        raise UsageError(
            f"optimize() takes a Precision or a preset's name, not a {type(precision).__name__}"
        )
    return Precision.parse(precision)


def _place_row_ops(
    path: str, module: nn.Module, norm_output_dtype: torch.dtype | None, *, saves_input: bool
) -> list[Placement]:
    if library_name(type(module)) in KERNEL_LIBRARIES:
        return [make_placement("foreign", path, module, None, str(foreign_kernel_reason(module)))]
    if norms.is_candidate(module):
        return [norms.place_norm(path, module, norm_output_dtype, saves_input=saves_input)]
    if gated.is_candidate(module):
        return [gated.place_gated_mlp(path, module)]
    return []


def _place_attention(
    path: str, module: nn.Module, tables: rotary.Tables, on_cpu: bool
) -> list[Placement]:
    """Replaces the forward of an attention layer. The new forward is a copy that calls other
    functions for the rotary embedding and for the attention.
    """
    device_type = "cpu" if on_cpu else "cuda"
    placements: list[Placement] = []
    replacements: list[Replacement] = []
    if rotary.rotary_name(module) is not None:
        placements.append(rotary.place_rotary(path, module, tables, replacements))
    if attention.is_candidate(module, device_type):
        placements.append(attention.place_attention(path, module, device_type, replacements))
    if replacements:
        # eager attention, whose rotary function alone was replaced
        widens_calls = (
            on_cpu
            and bool(emulated_dtypes())
            and all(replacement.name != attention.FUNCTION_TABLE for replacement in replacements)
        )
        install_rebuilt_forward(module, replacements, widens_calls=widens_calls)
    return placements


def restore(model: nn.Module) -> int:
    """Undoes `optimize` exactly, on the model or a deep copy of it. Returns how many entries of the
    manifest it has undone.
    """
    vars(model).pop(PLACED_KEY, None)
    vars(model).pop(attention.MASK_NEEDS_KEY, None)
    undone = unfuse_lora(model)
    for module in model.modules():
        undone += uninstall_forward(module)
        head.remove_hooks(module)
        undone += generation.restore_generate(module)
    return undone
