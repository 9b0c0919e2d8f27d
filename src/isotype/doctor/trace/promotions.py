"""Detects unwanted promotions. In a promotion, an op widens an activation because another operand
has a wider dtype. A promotion is reported if its wide result is used in another module or in a
matrix product, or is an output of the model. The module also counts the gradients that autograd
casts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...dtypes import format_dtype
from ...finding import Finding
from ...observe.operators import NARROW_FLOATS, Operator
from ...observe.origin import Site, site_place
from .context import Context, Watcher, make_finding, site_detail
from .failures import describe_majority
from .origin import ORIGIN_ATTRIBUTE, Origin


@dataclass(slots=True)
class Promotion:
    """Counts how often the same op at the same line of code widens an activation.

    narrow       the dtype of the activation before it was widened
    extra_bytes  the memory that the wider results take in addition
    spread       the places that used the widened tensor before it was cast back
    """

    origin: Origin
    narrow: torch.dtype
    module_class: str
    dtype_counts: Counter[torch.dtype]
    count: int = 0
    extra_bytes: int = 0
    is_vector: bool = False
    # whether the wide operand is as large as the result, so that it is an activation and not a
    # scale, mask or table
    is_full_size: bool = False
    spread: dict[str, None] = field(default_factory=dict)


class Promotions(Watcher):
    """Counts the promotions that happen in forward. Reports a promotion if its wide result is used
    in another module or in a matrix product, or is part of the model's output.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._promotions: dict[tuple[str, str, Any], Promotion] = {}

    def on_promotion(
        self,
        op: Operator,
        origin: Origin,
        wide: torch.Tensor,
        narrow: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        context = self._context
        if origin.backward or not context.stack or out.ndim == 0 or narrow.numel() < out.numel():
            return
        dtype_counts = context.model_dtype_counts()
        usual_dtype = dtype_counts.most_common(1)[0][0] if dtype_counts else None
        if usual_dtype is None or (
            not (narrow.dtype in NARROW_FLOATS and usual_dtype in NARROW_FLOATS)
            and not (out.dtype == torch.float64 and usual_dtype != torch.float64)
        ):
            return
        key = (origin.module, op.name, origin.site)
        promotion = self._promotions.get(key)
        if promotion is None:
            module_class = type(context.stack[-1].module).__name__
            is_same_size = wide.numel() == out.numel()
            promotion = self._promotions[key] = Promotion(
                origin,
                narrow.dtype,
                module_class,
                dtype_counts,
                is_vector=wide.ndim <= 1,
                is_full_size=is_same_size,
            )
        promotion.count += 1
        promotion.extra_bytes += out.numel() * (out.element_size() - narrow.element_size())
        origin.promotion = promotion

    def record_spread(self, tensor: Any, destination: str) -> None:
        """Called when a tensor is passed to a matrix product or another module, or is returned by
        the model.
        """
        if type(tensor) is torch.Tensor:
            entry = tensor.__dict__.get(ORIGIN_ATTRIBUTE)
            if entry is not None and entry[0].promotion is not None:
                spread = entry[0].promotion.spread
                if len(spread) < 8:
                    spread[destination] = None

    def on_module_enter(self, module: torch.nn.Module, args: tuple) -> None:
        if len(self._context.stack) > 1 and not type(module).__name__.endswith("Loss"):
            for arg in args:
                self.record_spread(arg, f"the input of {self._context.names.module_path(module)}")

    def on_module_exit(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        if self._context.stack or output is None:
            return
        items: Iterable[Any] = (output,)
        if isinstance(output, (tuple, list)):
            items = output
        elif isinstance(output, dict):
            items = output.values()
        for item in items:
            self.record_spread(item, f"the output of {type(module).__name__}")

    def on_cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        if origin.kind == "autocast" and not isinstance(source, torch.nn.Parameter):
            self.record_spread(
                source, f"autocast, which casts it down for {origin.creator} in {origin.module}"
            )

    def findings(self) -> list[Finding]:
        """Returns one finding for each line of code that caused promotions. A promotion is only
        reported if its wide result was used in another module or in a matrix product, or was
        returned by the model. Lines that the explanation of an error already contains are not
        reported again.
        """
        explained = self._context.failures.explained_origins
        decisions: dict[tuple[str, Any, torch.dtype], list[Promotion]] = {}
        for promotion in self._promotions.values():
            deciding_origin = promotion.origin.deciding_origin()
            if (
                promotion.spread
                and (deciding_origin.site or deciding_origin.creator) not in explained
            ):
                if deciding_origin.kind in ("parameter", "buffer"):
                    group = deciding_origin.creator.rpartition(".")[2]
                else:
                    group = deciding_origin.creator
                decisions.setdefault((group, deciding_origin.site, promotion.narrow), []).append(
                    promotion
                )
        return [_build_finding(group) for group in decisions.values()]


def _build_finding(group: list[Promotion]) -> Finding:
    first_promotion = group[0]
    origin, deciding_origin = first_promotion.origin, first_promotion.origin.deciding_origin()
    wide = format_dtype(origin.dtype)
    narrow = format_dtype(first_promotion.narrow)
    is_norm = deciding_origin.kind == "parameter" and (
        "norm" in first_promotion.module_class.lower() or first_promotion.is_vector
    )
    # True if the residual stream is wide on purpose (residual_in_fp32), and not because the cast
    # back after an adapter or a router was forgotten
    is_residual = (
        deciding_origin.kind == "cast"
        and first_promotion.is_full_size
        and origin.writer.startswith("_to_copy")
    )
    spread = list(dict.fromkeys(destination for p in group for destination in p.spread))
    decision = deciding_origin.describe()
    if location := deciding_origin.location():
        decision += f" ({location})"
    return make_finding(
        "TR010",
        site_place(origin.site, origin.module),
        site_detail("at", origin.site),
        op=origin.creator,
        wide=wide,
        narrow=narrow,
        decider=deciding_origin.creator,
        decision=decision,
        place=origin.location(),
        spread=spread[0],
        more=len(spread) - 1,
        share=describe_majority(first_promotion.dtype_counts),
        norm=is_norm,
        residual=is_residual and not is_norm,
        count=sum(p.count for p in group),
        extra=format_bytes(sum(p.extra_bytes for p in group)),
    )


def format_bytes(count: float) -> str:
    """Formats a number of bytes in binary units, for example `3 bytes` or `1.5 MiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            if unit == "bytes":
                return f"{count:.0f} {unit}"
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


class EngineCasts(Watcher):
    """Counts the gradients that autograd casts."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._casts: Counter[tuple[str, torch.dtype, torch.dtype, Site | None, str]] = Counter()

    def on_cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        if origin.kind == "engine":
            self._casts[origin.backward, source.dtype, out.dtype, origin.site, origin.module] += 1

    def findings(self) -> list[Finding]:
        return [
            make_finding(
                "TR013",
                site_place(site, module or node),
                site_detail("forward at", site),
                node=node,
                before=format_dtype(source_dtype),
                after=format_dtype(target_dtype),
                loses=target_dtype.itemsize > source_dtype.itemsize,
                count=count,
            )
            for (node, source_dtype, target_dtype, site, module), count in self._casts.items()
        ]
