"""Values that leave a dtype's range: the first module that turns finite inputs into inf or NaN in fp16, gradients that become zero, and the
optimizer step after which a weight is inf or NaN."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ....dtypes import name as dtype_name
from ....finding import Finding, Place, Severity, listed
from ....observe.operators import Operator
from ....observe.origin import Site, here, place_of
from ..context import After, Before, Context, Watcher, now_and_then
from ..origin import Origin

_GRADIENTS = 64  # gradients whose cast to fp16 is looked at
_SAMPLE = 4_096
_SHARE = 0.05  # of the values of a tensor that a division may make zero
_PRODUCTS = 256  # products of a backward that are looked at
_TIMES = 2  # that products, or most casts, must lose most of their values: once it may be a gradient that is nearly zero by right


@dataclass(frozen=True, slots=True)
class Overflow:
    module: str
    inside: bool  # made by the module; else by what its parent did before calling it
    largest: float
    word: str
    site: Site | None


@dataclass(frozen=True, slots=True)
class Beyond:
    op: str
    module: str
    largest: float
    site: Site | None


class Overflows(Watcher):
    """Looks at the fp16 outputs of modules, until one is not finite."""

    order = 60

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._first: Overflow | None = None
        self._gradients = 0  # gradients cast down to fp16 that were looked at, and those that mostly became zero
        self._flushed = 0
        self._site: Site | None = None
        self._products = 0
        self._beyond: Beyond | None = None
        self._looked: Counter[str] = Counter()
        self._divisions = 0
        self._divided: list[tuple[float, Site | None]] = []
        self._lost: list[tuple[str, Site | None]] = []  # modules and lines of the forward whose gradients' products became zero

    def left(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A module's forward has ended."""
        if self._first is not None or not self._context.pace.looking:
            return
        out = output[0] if isinstance(output, (tuple, list)) and output else output
        if type(out) is not torch.Tensor or out.dtype != torch.float16 or not out.numel() or bool(torch.isfinite(out).all()):
            return
        inputs = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
        inside = all(bool(torch.isfinite(t).all()) for t in inputs)
        largest = max((float(t.detach().abs().max()) for t in inputs if inside and t.numel()), default=0.0)
        word = "NaN" if bool(torch.isnan(out).any()) else "inf"
        self._first = Overflow(self._context.names.of(module), inside, largest, word, here())

    def cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        """Of a gradient that is cast to fp16: how much of it is below fp16's smallest value."""
        if out.dtype != torch.float16 or not origin.backward:
            return
        if source.dtype not in (torch.float32, torch.float64) or self._gradients > _GRADIENTS:
            return
        self._gradients += 1
        wide, low = source.detach().reshape(-1)[:_SAMPLE], out.detach().reshape(-1)[:_SAMPLE]
        there = int((wide != 0).sum())
        if there and int(((low == 0) & (wide != 0)).sum()) > there / 2:
            self._flushed += 1
            self._site = self._site or self._context.here()[0]

    def made(self, op: Operator, args: tuple, kwargs: dict | None, out: torch.Tensor) -> None:
        """A product of a backward without a loss scale came out in fp16: if it is mostly zero, whether it is so in fp32."""
        if self._products > _PRODUCTS or self._context.scaling.scaled or not out.numel():
            return
        self._products += 1
        if int((out == 0).sum()) * 2 < out.numel():
            return

        def widen(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value

        with torch.no_grad():
            wide = op.func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})
            wide = wide[0] if isinstance(wide, (tuple, list)) else wide
            there = int((wide != 0).sum())
            if there and int(((out == 0) & (wide != 0)).sum()) * 2 > there:
                site, module, _ = self._context.here()
                self._lost.append((module, site))

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        return {"mul": self._scaled, "div": self._scaled}

    def _scaled(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Between forwards, before an fp16 tensor is multiplied by, or divided by, a number: what of it becomes zero."""
        tensor, factor, power = args[0], args[1], 1.0 if op.name == "mul" else -1.0
        if not self._context.between_passes() or not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float16:
            return
        if type(factor) not in (int, float) or not factor or self._divisions > _GRADIENTS:
            return
        by = float(factor) ** power
        if not 0 < abs(by) < 1:
            return
        self._divisions += 1
        low = tensor.detach().reshape(-1)[:_SAMPLE]
        there = int((low != 0).sum())
        if there and int(((low * by == 0) & (low != 0)).sum()) > _SHARE * there:
            self._divided.append((by, here()))

    def computed(self, op: Operator, args: tuple, out: torch.Tensor) -> None:
        """An fp16 op that can leave the range of what it is given: whether it did."""
        context = self._context
        if self._beyond is not None or not out.numel():
            return
        if context.stack:
            if not context.pace.looking:
                return
        else:
            self._looked[op.name] += 1
            if not now_and_then(self._looked[op.name], _GRADIENTS):
                return
        given = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if bool(torch.isfinite(out).all()) or not all(bool(torch.isfinite(t).all()) for t in given):
            return
        module = context.names.of(context.stack[-1].module) if context.stack else ""
        largest = max((float(t.detach().abs().max()) for t in given if t.numel()), default=0.0)
        if largest >= torch.finfo(torch.float16).max or (op.name == "mul" and not out.dim()):
            return  # a mask of the smallest number, to which another is added; a loss times its scale, which the scaler lowers
        self._beyond = Beyond(op.name, module, largest, here())

    @property
    def beyond(self) -> Site | None:
        """The line of the first op that left fp16's range."""
        return self._beyond.site if self._beyond is not None else None

    def _range(self) -> list[Finding]:
        first = self._beyond
        if first is None:
            return []
        return [
            Finding(
                code="TR023",
                severity=Severity.WARNING,
                message=f"fp16 values become inf in {first.op}" + (f", in {first.module}" if first.module else ""),
                place=place_of(first.site, first.module),
                cause=f"fp16 ends at 65504: {first.op} was given finite values up to {first.largest:.4g} and its result is "
                "beyond it; a softmax of inf is NaN, and a factor made from inf is 0, which nan_to_num, clamp or a mask of what is finite "
                "only hide",
                fix="run in bf16, which has the range of fp32, or compute this in fp32 (`x.float()`; scale the operands first, as "
                "`(q * scale) @ k.T`)",
                details=(("at", f"{first.site}: {first.site.text}"),) if first.site is not None else (),
            )
        ]

    def _underflow(self) -> list[Finding]:
        if len(self._divided) >= _TIMES:
            by, site = self._divided[0]
            return [
                Finding(
                    code="TR025",
                    severity=Severity.WARNING,
                    message=f"fp16 values flush to zero when they are multiplied by {by:.3g}",
                    place=place_of(site),
                    cause="fp16's smallest value is 6e-8, and below 6e-5 it has fewer and fewer digits: divided by the number that they "
                    f"are averaged over, {len(self._divided)} tensors lost more than {100 * _SHARE:.0f}% of their values, and the rest is "
                    "imprecise",
                    fix="divide in fp32, before the cast or after it (`x.float() / n`), or send bf16, which has the range of fp32",
                    details=(("at", f"{site}: {site.text}"),) if site is not None else (),
                )
            ]
        casts = self._flushed >= _TIMES and self._flushed * 2 >= self._gradients
        if not casts and len(self._lost) < _TIMES:
            return []
        modules = list(dict.fromkeys(module for module, _ in self._lost if module))
        site = self._site if casts else self._lost[0][1]
        return [
            Finding(
                code="TR025",
                severity=Severity.WARNING,
                message=f"gradients flush to zero in fp16: {self._flushed} of {self._gradients} lost more than half of their values"
                if casts
                else f"gradients flush to zero in fp16: {len(self._lost)} products lost more than half of their values, in "
                + ", ".join(modules[:4]),
                place=place_of(site),
                cause="fp16's smallest value is 6e-8: a gradient below half of it is zero, and everything before it in the network gets "
                "none; the loss was not scaled (or not enough)",
                fix="scale the loss: scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer)\nor run in "
                "bf16, which has the range of fp32",
            )
        ]

    def findings(self) -> list[Finding]:
        """None where broken weights explain the values; without the line where a GradScaler that takes no step tells it."""
        if self._context.broken_steps.found:
            return []
        skipping = self._context.scaling.stuck
        if self._first is None:
            return ([] if skipping else self._range()) or self._underflow()
        first = self._first
        where = f"in {first.module}" if first.inside else f"before {first.module}, in the module that calls it"
        return [
            Finding(
                code="TR023",
                severity=Severity.WARNING,
                message=f"fp16 values become {first.word} {where}",
                place=Place(
                    file=first.site.file if first.site else None, line=first.site.line if first.site else None, symbol=first.module
                ),
                cause="fp16 ends at 65504: a product or a sum beyond it is inf, and inf - inf or inf / inf is NaN"
                + (f"; {first.module} was given values up to {first.largest:.0f}" if first.inside and first.largest else ""),
                fix="run in bf16, which has the range of fp32, or keep this part in fp32 (cast in, compute, cast back), "
                "or clamp to torch.finfo(x.dtype).max",
            )
        ]


_LOOKS = 4  # steps that are looked at; then those whose number is a power of two


@dataclass(frozen=True, slots=True)
class Broken:
    names: list[str]
    dtype: torch.dtype
    gradient: str  # what the first one's gradient held: "inf", "NaN" or ""
    eps: float | None  # of the optimizer, where it rounds to zero in that dtype
    site: Site | None


class BrokenSteps(Watcher):
    """Looks at the parameters before and after a step, until one is broken by it."""

    order = 55

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._steps: dict[int, int] = {}
        self._before: dict[int, str] | None = None  # id of a parameter that is finite -> what its gradient holds
        self._first: Broken | None = None

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        count = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        self._before = None
        if self._first is None and now_and_then(count, _LOOKS):
            with torch.no_grad():
                self._before = {id(p): unfit(p.grad) for p, _ in _stepped(optimizer) if not unfit(p)}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._before:
            return
        with torch.no_grad():
            broken = [(p, group) for p, group in _stepped(optimizer) if id(p) in self._before and unfit(p)]
        if not broken:
            return
        first, group = broken[0]
        eps = group.get("eps")
        vanishes = isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=first.dtype)) == 0
        names = [self._context.names.parameter_name(p) or f"of shape {tuple(p.shape)}" for p, _ in broken]
        self._first = Broken(names, first.dtype, self._before[id(first)], eps if vanishes else None, here())

    @property
    def found(self) -> bool:
        return self._first is not None

    def findings(self) -> list[Finding]:
        if self._first is None:
            return []
        first = self._first
        word, site = dtype_name(first.dtype), first.site
        if first.gradient:
            cause = f"the gradient of {first.names[0]} contained {first.gradient}, and the optimizer applied it"
            fix = "skip such a step: torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True) raises, torch.amp.GradScaler skips; then "
            fix += "look for what overflows before it"
        elif first.eps is not None:
            cause = f"eps={first.eps:g} is 0 in {word}, in which this optimizer keeps its states: where a squared gradient is 0 too, the "
            cause += "update is 0 / 0"
            fix = f"keep fp32 parameters (fp32 master weights) and let autocast lower the compute, or an eps that {word} holds (1e-4)"
        else:
            cause = f"the update of {first.names[0]} left the range of {word}; its gradient was finite"
            fix = "keep fp32 parameters (fp32 master weights), or lower the learning rate"
        shown = listed(first.names, 4)
        return [
            Finding(
                code="TR028",
                severity=Severity.WARNING,
                message=f"an optimizer step makes {word} weights inf or NaN: {shown}",
                place=place_of(site, first.names[0]),
                cause=cause,
                fix=fix,
                details=(("stepped at", f"{site}: {site.text}"),) if site is not None else (),
            )
        ]


def _stepped(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def unfit(x: torch.Tensor | None) -> str:
    """ "NaN" or "inf" where a dense tensor holds one."""
    if x is None or x.layout != torch.strided or x.device.type == "meta" or not x.is_floating_point():
        return ""
    # the sum of a finite tensor may overflow; min and max are exact, and NaN if any is
    low, high = (float(v) for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    return "NaN" if low != low else "inf" if max(-low, high) == float("inf") else ""
