"""Detects values that a low-precision dtype cannot represent. The values are positions, timesteps,
rotary angles, log-probabilities, and activations that overflow in fp16.

bf16 represents integers exactly only up to 256, and the sine of a rounded angle is wrong.
Log-probabilities near -8 are 0.03 to 0.06 apart in bf16; in a measurement, a sum of 128 of them had
an error of 1.7 nats.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ...dtypes import eps, format_dtype, significant_bits, to_torch
from ...finding import Finding
from ...observe.operators import NARROW_FLOATS, Operator
from ...observe.origin import innermost_site, site_place
from .context import AfterHook, BeforeHook, Context, Watcher, is_due, make_finding, site_detail
from .origin import Origin

# dtype -> the largest integer up to which all integers are exact
_MAX_EXACT = {to_torch(word): 2 ** significant_bits(word) for word in ("bf16", "fp16")}
_MAX_ANGLE_ERROR = 0.2  # in radians; a rotation with a larger error is wrong, not only imprecise
_FULL_CHECKS = 16  # a line's values are checked at this many first calls, then at calls 2^n


@dataclass(slots=True)
class RoundedValue:
    """A quantity that the program rounded at one line, with its largest value and the origin of its
    dtype.
    """

    quantity: str
    dtype: torch.dtype
    largest: float
    origin: Origin
    module: str
    site: Any

    @property
    def is_angle(self) -> bool:
        return "of cos" in self.quantity


class Positions(Watcher):
    """Checks integers that are cast to low precision, and the angles of cos and sin."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rounded: dict[Any, RoundedValue] = {}
        self._check_counts: Counter[Any] = Counter()
        # line of a cast of inexact integers -> the dtype, and the largest integer
        self._casts: dict[Any, tuple[torch.dtype, float]] = {}

    def op_hooks(self) -> dict[str, tuple[BeforeHook, AfterHook | None]]:
        return dict.fromkeys(("cos", "sin", "arange", "_to_copy"), (self.check_op, None))

    def check_op(self, op: Operator, args: tuple, kwargs: dict) -> None:
        """Checks the arguments of cos and sin, and the integers that a cast or an arange stores in
        low precision.
        """
        dtype = kwargs.get("dtype")
        if op.name == "_to_copy":
            source = args[0]
            is_integer = not source.is_floating_point() and source.dtype != torch.bool
            may_hold_integers = (
                source.ndim <= 2
                and source.dtype in (torch.float32, torch.float64)
                and not source.requires_grad
            )
            if dtype in _MAX_EXACT and source.numel() > 1 and (is_integer or may_hold_integers):
                self._check_integers(source, dtype)
        elif op.name == "arange":
            if dtype is None and any(isinstance(argument, float) for argument in args):
                dtype = torch.get_default_dtype()
            largest = (
                max((abs(float(a)) for a in args if isinstance(a, (int, float))), default=0.0) - 1
            )
            if dtype in _MAX_EXACT and largest > _MAX_EXACT[dtype]:
                self._record("arange", dtype, largest, None)
        elif isinstance(args[0], torch.Tensor):
            self._check_angle(args[0])

    def _is_due(self, key: Any) -> bool:
        self._check_counts[key] += 1
        return is_due(self._check_counts[key], _FULL_CHECKS)

    def _check_integers(self, source: torch.Tensor, dtype: torch.dtype) -> None:
        key = innermost_site()
        is_float = source.is_floating_point()
        if key in self._rounded or not self._is_due(key) or (is_float and source.numel() > 65_536):
            return
        with torch.no_grad():
            values = source.detach()
            largest = max(abs(float(value)) for value in torch.aminmax(values))
            if not _MAX_EXACT[dtype] < largest < float("inf") or (
                is_float and not bool((values == values.round()).all())
            ):
                return
            if bool((values.to(dtype).to(values.dtype) == values).all()):
                return
            self._casts[key] = (dtype, largest)
            if is_float and not _is_range(values):
                return  # integers that are not positions
        self._record("whole numbers", dtype, largest, source)

    def _check_angle(self, angle: torch.Tensor) -> None:
        if not angle.numel():
            return
        low_dtype = angle.dtype if angle.dtype in _MAX_EXACT else self._low_precision_table(angle)
        if low_dtype is None:
            if self._casts and angle.dtype == torch.float32:
                self._check_earlier_rounding(angle)
            return
        key = innermost_site()
        if key in self._rounded or not self._is_due(key):
            return
        largest = float(angle.detach().abs().max())
        if largest * eps(format_dtype(low_dtype)) / 2 > _MAX_ANGLE_ERROR and largest < float("inf"):
            quantity = "frequencies of cos and sin"
            if angle.dtype in _MAX_EXACT:
                quantity = "angles of cos and sin"
            self._record(quantity, low_dtype, largest, angle)

    def _check_earlier_rounding(self, angle: torch.Tensor) -> None:
        """Checks fp32 angles that were computed from rounded integers. An earlier cast may have
        rounded these integers, for example a timestep that was cast to the model's dtype.
        """
        origin = next(
            (
                origin
                for origin in self._context.provenance.get(angle).chain()
                if origin.site in self._casts and origin.dtype in _MAX_EXACT
            ),
            None,
        )
        if origin is not None and innermost_site() not in self._rounded:
            self._record(
                "timesteps or positions behind cos and sin",
                *self._casts[origin.site],
                angle,
                origin,
            )

    def _low_precision_table(self, angle: torch.Tensor) -> torch.dtype | None:
        """The angles may have been computed from a low-precision buffer of the running module, such
        as inv_freq. Returns the dtype of this buffer. Returns None if the angles are not multiples
        of such a buffer.
        """
        if not self._context.stack or angle.ndim == 0:
            return None
        buffers = [
            buffer
            for buffer in self._context.stack[-1].module._buffers.values()
            if buffer is not None and buffer.dtype in _MAX_EXACT
        ]
        return next(
            (
                buffer.dtype
                for buffer in buffers
                if buffer.ndim == 1 and _are_multiples(angle, buffer)
            ),
            None,
        )

    def _record(
        self,
        quantity: str,
        dtype: torch.dtype,
        largest: float,
        tensor: torch.Tensor | None,
        known_origin: Origin | None = None,
    ) -> None:
        context = self._context
        site, module, node = context.locate_op()
        if node:
            return
        if tensor is not None and tensor.is_floating_point():
            origin = known_origin or context.provenance.get(tensor)
        else:
            origin = Origin(dtype, "created", context.call_name() or quantity, module, site)
        self._rounded[innermost_site()] = RoundedValue(
            quantity, dtype, largest, origin, module, site
        )

    def findings(self) -> list[Finding]:
        by_site: dict[Any, RoundedValue] = {}
        angles = [rounded for rounded in self._rounded.values() if rounded.is_angle]
        angle_sites = {origin.site for rounded in angles for origin in rounded.origin.chain()}
        for rounded in [
            *angles,
            *(rounded for rounded in self._rounded.values() if rounded.site not in angle_sites),
        ]:
            by_site.setdefault(rounded.site, rounded)
        return [_build_finding(rounded) for rounded in by_site.values()]


def _is_range(values: torch.Tensor) -> bool:
    """True if each value of a float tensor differs from the next value by one, as positions do."""
    steps = values.diff(dim=-1)
    if values.ndim == 1:
        return bool((steps.abs() <= 1).all())
    return bool((steps == 1).all())


def _are_multiples(angle: torch.Tensor, table: torch.Tensor) -> bool:
    """True if each of the last four rows of `angle` is equal to the table of frequencies times a
    number. This number is the position of the row. A row may be twice as long as the table. Then
    the row contains each value twice. Either its two halves are equal, or each value is followed by
    the same value.
    """
    count = table.numel()
    width = angle.shape[-1]
    if count < 2 or width not in (count, 2 * count):
        return False
    with torch.no_grad():
        rows = angle.detach().reshape(-1, width)[-4:].double()
        frequencies = table.detach().double()
        nonzero = frequencies != 0
        candidates = (rows[:, :count], rows[:, ::2]) if width > count else (rows,)
        for angles in candidates:
            positions = angles[:, nonzero] / frequencies[nonzero]
            if positions.numel() and bool(
                (positions - positions[:, :1]).abs().le(0.02 * positions[:, :1].abs() + 1e-6).all()
            ):
                return True
    return False


def _build_finding(rounded: RoundedValue) -> Finding:
    low_name = format_dtype(rounded.dtype)
    deciding_origin = rounded.origin.deciding_origin()
    location = deciding_origin.location()
    decision = deciding_origin.describe()
    if location:
        decision += f" ({location})"
    chain = (("chain", "\n".join(rounded.origin.explain())),)
    return make_finding(
        "TR015",
        site_place(rounded.site, rounded.module),
        chain + site_detail("at", rounded.site),
        what=rounded.quantity,
        word=low_name,
        angle=rounded.is_angle,
        largest=rounded.largest,
        error=rounded.largest * eps(low_name) / 2,
        step=2 ** max(0, int(rounded.largest).bit_length() - significant_bits(low_name)),
        exact=_MAX_EXACT[rounded.dtype],
        kind=deciding_origin.kind,
        decider=deciding_origin.creator,
        where=str(deciding_origin.site)
        if deciding_origin.site is not None
        else location or "its place",
        decision=decision,
    )


class Overflows(Watcher):
    """Checks the fp16 outputs of modules. The check stops at the first output that is not finite."""

    def on_module_exit(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.reports or not self._context.schedule.checks_values:
            return
        out = output[0] if isinstance(output, (tuple, list)) and output else output
        if (
            type(out) is not torch.Tensor
            or out.dtype != torch.float16
            or not out.numel()
            or bool(torch.isfinite(out).all())
        ):
            return
        inputs = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
        has_finite_inputs = all(bool(torch.isfinite(t).all()) for t in inputs)
        largest = max(
            (float(t.detach().abs().max()) for t in inputs if has_finite_inputs and t.numel()),
            default=0.0,
        )
        value_name = "NaN" if bool(torch.isnan(out).any()) else "inf"
        name = self._context.names.module_path(module)
        self.reports[name] = make_finding(
            "TR023",
            site_place(innermost_site(), name),
            module=name,
            inside=has_finite_inputs,
            largest=largest,
            word=value_name,
        )


_MIN_ERROR_NATS = 0.1  # per sequence; such an error changes preference losses and policy ratios


class LogProbs(Watcher):
    """Checks log-probabilities that are computed in low precision."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # the logits of the last log_softmax in low precision, until its result is gathered
        self._logits: torch.Tensor | None = None
        self._check_counts: Counter[Any] = Counter()
        self._worst: dict[Any, float] = {}  # line -> the largest error in nats

    def op_hooks(self) -> dict[str, tuple[BeforeHook, AfterHook | None]]:
        return {"_log_softmax": (self.on_log_softmax, None), "gather": (self.on_gather, None)}

    def on_log_softmax(self, op: Operator, args: tuple, kwargs: dict) -> None:
        logits, dim, is_widened = args[:3]
        is_low_precision = (
            logits.dtype in NARROW_FLOATS
            and not is_widened
            and dim in (-1, logits.ndim - 1)
            and not torch._C._current_autograd_node()
        )
        self._logits = logits.detach() if is_low_precision else None

    def on_gather(self, op: Operator, args: tuple, kwargs: dict) -> None:
        """Compares the gathered log-probabilities with log-probabilities that are computed from the
        logits in fp32.
        """
        log_probs, dim, index = args[:3]
        logits = self._logits
        key = innermost_site()
        if (
            logits is None
            or log_probs.shape != logits.shape
            or log_probs.dtype != logits.dtype
            or dim not in (-1, logits.ndim - 1)
        ):
            return
        self._logits = None
        self._check_counts[key] += 1
        if (
            index.shape[-1] != 1
            or not index.numel()
            or not is_due(self._check_counts[key], _FULL_CHECKS)
        ):
            return
        with torch.no_grad():
            exact = logits.float().log_softmax(-1).gather(-1, index).squeeze(-1)
            error = log_probs.detach().gather(-1, index).squeeze(-1).float() - exact
            # an error above one rounding means that other values than this log_softmax's are
            # gathered
            if not bool((error.abs() <= eps(format_dtype(logits.dtype)) * exact.abs()).all()):
                return
            worst = float(error.sum(-1).abs().max())
        if worst > max(_MIN_ERROR_NATS, self._worst.get(key, 0.0)):
            self._worst[key] = worst
            site, module, _ = self._context.locate_op()
            facts = {
                "word": format_dtype(logits.dtype),
                "off": worst,
                "tokens": exact.shape[-1] if exact.ndim else 1,
            }
            self.reports[key] = make_finding(
                "TR027", site_place(site, module), site_detail("at", site), **facts
            )
