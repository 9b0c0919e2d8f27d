"""Values that a low-precision dtype does not hold: positions, timesteps and rotary angles,
log-probabilities, and what overflows in fp16.

Whole numbers above 256 are not exact in bf16, and the sine of a rounded angle is noise. A
log-probability of -8 in bf16 has steps of 0.03 to 0.06; a sum of 128 of them was off by 1.7 nats.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ...dtypes import eps, significant_bits, to_torch
from ...dtypes import name as dtype_name
from ...finding import Finding
from ...observe.operators import NARROW_FLOATS, Operator
from ...observe.origin import innermost_site, site_place
from .context import After, Before, Context, Watcher, at, now_and_then, say
from .origin import Origin

# whole numbers up to here are exact
_EXACT = {to_torch(word): 2 ** significant_bits(word) for word in ("bf16", "fp16")}
_ANGLE = 0.2  # radians: an error from which on a rotation is wrong rather than rough
_LOOKS = 16  # calls of a line whose values are looked at, then those whose number is a power of two


@dataclass(slots=True)
class Rounded:
    """What was rounded at one line: the largest value, and who decided the dtype."""

    what: str
    dtype: torch.dtype
    largest: float
    origin: Origin
    module: str
    site: Any

    @property
    def angle(self) -> bool:
        return "of cos" in self.what


class Positions(Watcher):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rounded: dict[Any, Rounded] = {}
        self._looked: Counter[Any] = Counter()
        # where whole numbers beyond the exact ones were cast: to what, the largest
        self._cast: dict[Any, tuple[torch.dtype, float]] = {}

    def ops(self) -> dict[str, tuple[Before, After | None]]:
        return dict.fromkeys(("cos", "sin", "arange", "_to_copy"), (self.before, None))

    def before(self, op: Operator, args: tuple, kwargs: dict) -> None:
        """Looks at what cos and sin get, and at whole numbers on their way into low precision."""
        dtype = kwargs.get("dtype")
        if op.name == "_to_copy":
            source = args[0]
            whole = not source.is_floating_point() and source.dtype != torch.bool
            maybe = (
                source.ndim <= 2
                and source.dtype in (torch.float32, torch.float64)
                and not source.requires_grad
            )
            if dtype in _EXACT and source.numel() > 1 and (whole or maybe):
                self._whole_numbers(source, dtype)
        elif op.name == "arange":
            dtype = dtype or (
                torch.get_default_dtype() if any(isinstance(a, float) for a in args) else None
            )
            last = (
                max((abs(float(a)) for a in args if isinstance(a, (int, float))), default=0.0) - 1
            )
            if dtype in _EXACT and last > _EXACT[dtype]:
                self._note("arange", dtype, last, None)
        elif isinstance(args[0], torch.Tensor):
            self._angle(args[0])

    def _due(self, key: Any) -> bool:
        self._looked[key] += 1
        return now_and_then(self._looked[key], _LOOKS)

    def _whole_numbers(self, source: torch.Tensor, dtype: torch.dtype) -> None:
        key = innermost_site()
        fractional = source.is_floating_point()
        if key in self._rounded or not self._due(key) or (fractional and source.numel() > 65_536):
            return
        with torch.no_grad():
            values = source.detach()
            largest = max(abs(float(value)) for value in torch.aminmax(values))
            if not _EXACT[dtype] < largest < float("inf") or (
                fractional and not bool((values == values.round()).all())
            ):
                return
            if bool((values.to(dtype).to(values.dtype) == values).all()):
                return
            self._cast[key] = (dtype, largest)
            steps = values.diff(dim=-1) if fractional else None
            if steps is not None and not bool(
                (steps.abs() <= 1).all() if source.ndim == 1 else (steps == 1).all()
            ):
                return  # whole numbers, but no positions: a float tensor needs to look like a range
        self._note("whole numbers", dtype, largest, source)

    def _angle(self, angle: torch.Tensor) -> None:
        if not angle.numel():
            return
        low = angle.dtype if angle.dtype in _EXACT else self._low_table(angle)
        if low is None:
            if self._cast and angle.dtype == torch.float32:
                self._rounded_before(angle)
            return
        key = innermost_site()
        if key in self._rounded or not self._due(key):
            return
        largest = float(angle.detach().abs().max())
        if largest * eps(dtype_name(low)) / 2 > _ANGLE and largest < float("inf"):
            self._note(
                "angles of cos and sin" if angle.dtype in _EXACT else "frequencies of cos and sin",
                low,
                largest,
                angle,
            )

    def _rounded_before(self, angle: torch.Tensor) -> None:
        """Angles in fp32 that come from whole numbers once cast down (a timestep in the model's
        dtype).
        """
        origin = next(
            (
                o
                for o in self._context.provenance.get(angle).chain()
                if o.site in self._cast and o.dtype in _EXACT
            ),
            None,
        )
        if origin is not None and innermost_site() not in self._rounded:
            self._note(
                "timesteps or positions behind cos and sin", *self._cast[origin.site], angle, origin
            )

    def _low_table(self, angle: torch.Tensor) -> torch.dtype | None:
        """The low dtype of a float buffer of the running module (inv_freq), when the angles are
        multiples of it.
        """
        if not self._context.stack or angle.ndim == 0:
            return None
        buffers = [
            b
            for b in self._context.stack[-1].module._buffers.values()
            if b is not None and b.dtype in _EXACT
        ]
        return next((b.dtype for b in buffers if b.ndim == 1 and _are_multiples(angle, b)), None)

    def _note(
        self,
        what: str,
        dtype: torch.dtype,
        largest: float,
        tensor: torch.Tensor | None,
        by: Origin | None = None,
    ) -> None:
        context = self._context
        site, module, node = context.here()
        if node:
            return
        if tensor is not None and tensor.is_floating_point():
            origin = by or context.provenance.get(tensor)
        else:
            origin = Origin(dtype, "created", context.calling_name() or what, module, site)
        self._rounded[innermost_site()] = Rounded(what, dtype, largest, origin, module, site)

    def findings(self) -> list[Finding]:
        places: dict[Any, Rounded] = {}
        angles = [rounded for rounded in self._rounded.values() if rounded.angle]
        told = {origin.site for rounded in angles for origin in rounded.origin.chain()}
        for rounded in [
            *angles,
            *(rounded for rounded in self._rounded.values() if rounded.site not in told),
        ]:
            places.setdefault(rounded.site, rounded)
        return [_finding(rounded) for rounded in places.values()]


def _are_multiples(angle: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether each of the last rows of angles is one position times the table, the table perhaps
    twice, side by side or interleaved.
    """
    count = table.numel()
    width = angle.shape[-1]
    if count < 2 or width not in (count, 2 * count):
        return False
    with torch.no_grad():
        rows = angle.detach().reshape(-1, width)[-4:].double()
        frequencies = table.detach().double()
        kept = frequencies != 0
        for part in (rows[:, :count], rows[:, ::2]) if width > count else (rows,):
            positions = part[:, kept] / frequencies[kept]
            if positions.numel() and bool(
                (positions - positions[:, :1]).abs().le(0.02 * positions[:, :1].abs() + 1e-6).all()
            ):
                return True
    return False


def _finding(rounded: Rounded) -> Finding:
    word = dtype_name(rounded.dtype)
    decider = rounded.origin.decider()
    place = decider.place()
    chain = (("chain", "\n".join(rounded.origin.explain())),)
    return say(
        "TR015",
        site_place(rounded.site, rounded.module),
        chain + at("at", rounded.site),
        what=rounded.what,
        word=word,
        angle=rounded.angle,
        largest=rounded.largest,
        error=rounded.largest * eps(word) / 2,
        step=2 ** max(0, int(rounded.largest).bit_length() - significant_bits(word)),
        exact=_EXACT[rounded.dtype],
        kind=decider.kind,
        decider=decider.what,
        where=str(decider.site) if decider.site is not None else place or "its place",
        decision=decider.describe() + (f" ({place})" if place else ""),
    )


class Overflows(Watcher):
    """Looks at the fp16 outputs of modules, until one is not finite."""

    def left(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.found or not self._context.pace.looking:
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
        inside = all(bool(torch.isfinite(t).all()) for t in inputs)
        largest = max(
            (float(t.detach().abs().max()) for t in inputs if inside and t.numel()), default=0.0
        )
        word = "NaN" if bool(torch.isnan(out).any()) else "inf"
        name = self._context.names.of(module)
        self.found[name] = say(
            "TR023",
            site_place(innermost_site(), name),
            module=name,
            inside=inside,
            largest=largest,
            word=word,
        )


_NATS = 0.1  # of a sequence: a difference that losses of preferences and ratios of policies feel


class LogProbs(Watcher):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # of the last log_softmax in low precision, until they are gathered
        self._logits: torch.Tensor | None = None
        self._looked: Counter[Any] = Counter()
        self._worst: dict[Any, float] = {}  # nats

    def ops(self) -> dict[str, tuple[Before, After | None]]:
        return {"_log_softmax": (self.normalised, None), "gather": (self.gathered, None)}

    def normalised(self, op: Operator, args: tuple, kwargs: dict) -> None:
        logits, dim, widened = args[:3]
        plain = (
            logits.dtype in NARROW_FLOATS
            and not widened
            and dim in (-1, logits.ndim - 1)
            and not torch._C._current_autograd_node()
        )
        self._logits = logits.detach() if plain else None

    def gathered(self, op: Operator, args: tuple, kwargs: dict) -> None:
        """Compares what is gathered with the same of the logits in fp32."""
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
        self._looked[key] += 1
        if index.shape[-1] != 1 or not index.numel() or not now_and_then(self._looked[key], _LOOKS):
            return
        with torch.no_grad():
            exact = logits.float().log_softmax(-1).gather(-1, index).squeeze(-1)
            off = log_probs.detach().gather(-1, index).squeeze(-1).float() - exact
            # more than a rounding: these are other values than that log_softmax's
            if not bool((off.abs() <= eps(dtype_name(logits.dtype)) * exact.abs()).all()):
                return
            worst = float(off.sum(-1).abs().max())
        if worst > max(_NATS, self._worst.get(key, 0.0)):
            self._worst[key] = worst
            site, module, _ = self._context.here()
            words = {
                "word": dtype_name(logits.dtype),
                "off": worst,
                "tokens": exact.shape[-1] if exact.ndim else 1,
            }
            self.found[key] = say("TR027", site_place(site, module), at("at", site), **words)
