"""Defines `Precision`, an immutable object that declares the dtype of each part of a run. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..dtypes import NO_FP8_PRODUCTS, parse
from ..errors import UsageError
from .packing import PACKED_DTYPES

_FLOAT_DTYPES = ("fp32", "bf16", "fp16")
# roles that cannot be quantised
_FLOAT_ROLES = (
    "trainable",
    "compute",
    "grads",
    "reduce",
    "loss",
    "norms",
    "generate",
    "save_model",
    "save_adapter",
)
# formats of files that a run can train for
SERVED_FORMATS = ("q8_0", "q5_0", "q4_0", "fp8", "int8", "int4", "nvfp4", "mxfp4")
TASK_ROLES = ("vae", "text_encoder", "timesteps", "latents", "ema", "vision", "served")
"""Roles that only some runs have. In other runs their value is empty."""
# role -> the values that it may have
ALLOWED_DTYPES: dict[str, tuple[str, ...]] = {
    "base": (*_FLOAT_DTYPES, "nf4", *PACKED_DTYPES),
    **dict.fromkeys((*_FLOAT_ROLES, *TASK_ROLES), _FLOAT_DTYPES),
    "served": SERVED_FORMATS,
    "optimizer": (*_FLOAT_DTYPES, "int8"),
    "rounding": ("nearest", "stochastic"),
    "loss_scaling": ("none", "dynamic"),
}
# all roles for which every precision has a dtype
ROLES = (
    "base",
    "trainable",
    "compute",
    "grads",
    "reduce",
    "optimizer",
    "loss",
    "norms",
    "generate",
    "save",
)
EIGHT_BIT_OPTIMIZERS = ("adamw8bit", "adamw8bit-paged", "lion8bit")
"""Optimizers (`train.optimizer`) whose states are int8."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Declares the dtype of each part of a run. These parts are called roles, and dtypes have the
    names `fp32`, `bf16`, `fp16`, `nf4` and so on. Every role has a value, so that no dtype depends
    on a default of another library.

    base          frozen weights. If the base is quantised (nf4 fp8 int8 int4 nvfp4 mxfp4 gguf), its
                  weights that are not quantised have the dtype `compute`
    trainable     weights that are trained
    compute       matrix products, activations, and the output of every module
    grads         gradients that are accumulated over micro-batches
    reduce        gradient sums across ranks
    optimizer     optimizer states. For an 8-bit optimizer this is int8 with one scale per block; it
                  keeps states with fewer than 4,096 elements in fp32
    loss          logits inside the loss, and log-probabilities
    norms         arithmetic inside norms; their output always has the dtype `compute`
    generate      matrix products while sampling
    save          saved files; one dtype, or `model bf16, adapter fp32`
    rounding      how an update is rounded into `trainable`, and into states in bf16: nearest or
                  stochastic
    loss_scaling  none, or dynamic, which fp16 gradients need

    These roles are used in the training of a diffusion model. Otherwise they are empty:

    vae           weights and arithmetic of the VAE
    text_encoder  weights of the text encoders, and their embeddings
    timesteps     the noise level that is an input of the model, and its sinusoidal embedding
    latents       latents, noise, noise level and target, before they are passed to the model
    ema           the moving average of trained weights

    This role is used in the training of a vision-language model. Otherwise it is empty:

    vision        frozen weights of the vision tower and the projector, and their input pixels;
                  their matrix products are computed in `compute`

    This role is used with `adapter.serve_as`. Otherwise it is empty:

    served        the format of the file that a server will load; in training, matrices are rounded
                  to this format before they are multiplied

    Raises  UsageError PR000 for a value that a role cannot have.
    """

    base: str = "fp32"
    trainable: str = "fp32"
    compute: str = "fp32"
    grads: str = "fp32"
    reduce: str = "fp32"
    optimizer: str = "fp32"
    loss: str = "fp32"
    norms: str = "fp32"
    generate: str = "fp32"
    save: str = "fp32"
    rounding: str = "nearest"
    loss_scaling: str = "none"
    vae: str = ""
    text_encoder: str = ""
    timesteps: str = ""
    latents: str = ""
    ema: str = ""
    vision: str = ""
    served: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = str(getattr(self, field.name)).strip().lower()
            if not value and field.name in TASK_ROLES:
                continue
            if field.name == "save":
                model, adapter = _parse_save(value)
                value = model if model == adapter else f"model {model}, adapter {adapter}"
            else:
                value = _parse_role_dtype(field.name, value)
            object.__setattr__(self, field.name, value)

    @property
    def save_model(self) -> str:
        """Returns the dtype of a saved model's weights."""
        return _parse_save(self.save)[0]

    @property
    def save_adapter(self) -> str:
        """Returns the dtype of a saved adapter's weights."""
        return _parse_save(self.save)[1]

    @property
    def unquantised(self) -> str:
        """Returns the dtype of the frozen weights that are not quantised."""
        return self.compute if self.packed else self.base

    @property
    def packed(self) -> bool:
        """Whether the linear layers of the base model are quantised, as nf4 or in the format of a
        published checkpoint.
        """
        return self.base == "nf4" or self.base in PACKED_DTYPES

    @classmethod
    def preset(cls, name: str, **overrides: str) -> Precision:
        """Returns the preset of this name, with the values in `overrides` instead of its own."""
        if name not in PRESETS:
            raise UsageError(
                f"unknown preset {name!r}: expected one of {' '.join(PRESETS)}", code="PR000"
            )
        return PRESETS[name].but(**overrides)

    def but(self, **overrides: str) -> Precision:
        """Returns a copy in which the given roles have new values."""
        unknown = set(overrides) - {role_field.name for role_field in fields(self)}
        if unknown:
            raise UsageError(
                f"unknown role {', '.join(sorted(unknown))}: expected one of"
                f" {' '.join(role_field.name for role_field in fields(self))}",
                code="PR000",
            )
        return replace(self, **overrides)

    def items(self) -> Iterator[tuple[str, str]]:
        """Returns the roles that this run uses, and their values."""
        yield from ((role, value) for role, value in asdict(self).items() if value)

    def __str__(self) -> str:
        """Returns the short text form, such as `bf16-pure grads=fp32`. The text contains the name
        of the most similar preset, and then each role whose value differs from this preset. `parse`
        reads this text.
        """
        return self.text(min(PRESETS, key=lambda name: len(self._differences(name))))

    def text(self, preset: str) -> str:
        """Returns the precision as a short text: the name of the preset, and then each role whose
        value differs from the preset.
        """
        pairs = (
            f"{role}={value.replace(', ', '/').replace(' ', ':')}"
            for role, value in self._differences(preset).items()
        )
        return " ".join([preset, *pairs])

    def _differences(self, preset: str) -> dict[str, str]:
        return {
            role: value for role, value in self.items() if value != getattr(PRESETS[preset], role)
        }

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Parses the short text form of a precision, such as `bf16-pure grads=fp32`. Raises
        UsageError PR000.
        """
        name, *pairs = text.split() or [""]
        overrides = {}
        for pair in pairs:
            role, equals, value = pair.partition("=")
            if not equals:
                raise UsageError(
                    f"precision {text!r}: expected role=dtype, got {pair!r}", code="PR000"
                )
            overrides[role] = value.replace("/", ", ").replace(":", " ")
        return cls.preset(name, **overrides)

    def to_dict(self) -> Mapping[str, Any]:
        return dict(self.items())


ALL_ROLES = tuple(field.name for field in fields(Precision))


def _parse_role_dtype(role: str, value: str) -> str:
    allowed = ALLOWED_DTYPES[role]
    if value not in allowed:
        with suppress(ValueError):
            value = parse(value)
    if value not in allowed:
        if role == "compute" and value.startswith("fp8"):
            reason = f"; {NO_FP8_PRODUCTS}"
        else:
            reason = ""
        raise UsageError(
            f"precision.{role}: {value!r} is not one of {' '.join(allowed)}{reason}", code="PR000"
        )
    return value


def _parse_save(text: str) -> tuple[str, str]:
    """Parses `bf16` or `model bf16, adapter fp32`. Returns (the model's dtype, the adapter's
    dtype). If one of the two dtypes is missing, it is the same as the other dtype.
    """
    parts = dict(part.split(None, 1) for part in text.split(",") if " " in part.strip())
    if not parts:
        return _parse_role_dtype("save_model", text), _parse_role_dtype("save_adapter", text)
    if set(parts) - {"model", "adapter"} or len(parts) != text.count(",") + 1:
        raise UsageError(
            f"precision.save: {text!r} is neither a dtype nor 'model bf16, adapter fp32'",
            code="PR000",
        )
    model = parts.get("model") or parts["adapter"]
    adapter = parts.get("adapter") or parts["model"]
    return _parse_role_dtype("save_model", model.strip()), _parse_role_dtype(
        "save_adapter", adapter.strip()
    )


# every preset writes out every role, so that it reads like a row of a table
_FP32_INSIDE = {
    "grads": "fp32",
    "reduce": "fp32",
    "optimizer": "fp32",
    "loss": "fp32",
    "norms": "fp32",
}

PRESETS: dict[str, Precision] = {
    "fp32": Precision(base="fp32", trainable="fp32", compute="fp32", generate="fp32", save="fp32", **_FP32_INSIDE),
    "bf16-mixed": Precision(
        base="bf16", trainable="fp32", compute="bf16", generate="bf16", save="model bf16, adapter fp32", **_FP32_INSIDE
    ),
    "bf16-lora": Precision(base="bf16", trainable="fp32", compute="bf16", generate="bf16", save="fp32", **_FP32_INSIDE),
    "nf4-lora": Precision(base="nf4", trainable="fp32", compute="bf16", generate="bf16", save="fp32", **_FP32_INSIDE),
    "bf16-pure": Precision(
        base="bf16", trainable="bf16", compute="bf16", generate="bf16", save="bf16", rounding="stochastic",
        **(_FP32_INSIDE | {"grads": "bf16", "optimizer": "bf16"}),
    ),
    "fp16-mixed": Precision(
        base="fp16", trainable="fp32", compute="fp16", generate="fp16",
        save="model fp16, adapter fp32", loss_scaling="dynamic", **_FP32_INSIDE,
    ),
}  # fmt: skip

# preset -> what it is for
PRESET_DESCRIPTIONS = {
    "fp32": "everything in fp32, the reference",
    "bf16-mixed": "full fine-tuning: fp32 weights, bf16 products",
    "bf16-lora": "LoRA: bf16 base, fp32 adapters",
    "nf4-lora": "QLoRA: 4-bit base, fp32 adapters",
    "bf16-pure": (
        "full fine-tuning in 8 bytes per weight instead of 16: weights, gradients and optimizer"
        " states in bf16, with stochastic rounding"
    ),
    "fp16-mixed": (
        "for GPUs without bf16: fp16 products with loss scaling; activations above 65504 overflow"
    ),
}
