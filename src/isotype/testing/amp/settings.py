"""The dtype combinations a trainer produces: dtypes of inputs and parameters, autocast, and where backward runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...dtypes import name
from .samples import INPUT, PARAM, TRAINED, Sample

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Setting:
    """One combination.

    dtypes   group -> dtype; None: as built
    inside   backward runs inside the autocast region (trainers run it outside)
    produced whether a trainer is sure to produce it; a combination resting on guessed groups is only worth a note
    wrap     "", "reentrant" or "non-reentrant" gradient checkpointing, or a backend of torch.compile
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] | None
    autocast: torch.dtype | None = None
    inside: bool = False
    produced: bool = True
    wrap: str = ""

    @property
    def by_group(self) -> dict[str, torch.dtype] | None:
        return None if self.dtypes is None else dict(self.dtypes)

    def lowest(self, sample: Sample) -> torch.dtype:
        """The narrowest dtype in play: what results may be rounded to."""
        met = sample.met(self.by_group) | ({self.autocast} if self.autocast else set())
        return max(met, key=lambda d: torch.finfo(d).eps, default=torch.float32)

    def produced_by_any_trainer(self, sample: Sample) -> bool:
        """Under autocast: not the combination that torch's own layers refuse (inputs wider than the weights)."""
        met = dict(self.dtypes) if self.dtypes is not None else sample.as_built()
        weights = [d for g, d in met.items() if g.startswith(PARAM)]
        inputs = [d for g, d in met.items() if not g.startswith(PARAM)]
        return not any(torch.finfo(i).bits > torch.finfo(w).bits for i in inputs for w in weights)

    def describe(self) -> str:
        if self.dtypes is None:
            dtypes = "as built"
        elif len({d for _, d in self.dtypes}) == 1:
            dtypes = f"all {name(str(self.dtypes[0][1]))}"
        else:
            dtypes = " ".join(f"{group} {name(str(dtype))}" for group, dtype in self.dtypes)
        parts = [dtypes, f"autocast {name(str(self.autocast)) if self.autocast else 'off'}"]
        if self.autocast:
            parts.append("backward inside" if self.inside else "backward outside")
        if self.wrap:
            parts.append(f"checkpoint {self.wrap}" if self.wrap in ("reentrant", "non-reentrant") else f"compile {self.wrap}")
        return ", ".join(parts)


def uniform(sample: Sample, dtype: torch.dtype, groups: tuple[str, ...], autocast: torch.dtype | None = None) -> Setting:
    return Setting(tuple((group, dtype) for group in groups), autocast)


def settings(sample: Sample, groups: tuple[str, ...], *, every: bool) -> Iterator[Setting]:
    """The combinations to try, the likeliest first.

    groups  the sample's groups, and `param` for a module's own parameters
    every   also those that only a reference or a contract can judge: every dtype of every group under every autocast
    """
    seen = set()
    for setting in _ordered(sample, groups, every):
        known = (setting.dtypes, setting.autocast)
        if known not in seen:
            seen.add(known)
            yield setting
            if setting.autocast is not None:
                yield replace(setting, inside=True)


def _ordered(sample: Sample, groups: tuple[str, ...], every: bool) -> Iterator[Setting]:
    low_as_built = set(LOW) & sample.met(None)
    for autocast in (None, *LOW):
        # not a realistic combination: a model in one low dtype under autocast to the other, which torch's own cat and stack refuse
        if autocast is None or not low_as_built - {autocast}:
            yield Setting(None, autocast)
    for autocast in (None, *LOW):
        yield uniform(sample, torch.float32, groups, autocast)
    for low in LOW:
        yield uniform(sample, low, groups)
        yield uniform(sample, low, groups, low)
    weights = [g for g in groups if g.startswith(PARAM)]
    if weights and len(weights) < len(groups):
        for low in LOW:
            # activations that an autocast op made, weights kept in fp32
            yield Setting(tuple((g, torch.float32 if g in weights else low) for g in groups), low)
            # a model in the low dtype that meets an fp32 norm's output
            yield Setting(tuple((g, low if g in weights else torch.float32) for g in groups), low, produced=not sample.guessed)
    if every:
        yield from _product(groups)


def _product(groups: tuple[str, ...]) -> Iterator[Setting]:
    if not 1 < len(groups) <= 3:
        return
    combinations: list[tuple[tuple[str, torch.dtype], ...]] = [()]
    for group in groups:
        combinations = [(*done, (group, dtype)) for done in combinations for dtype in TRAINED]
    for dtypes in combinations:
        for autocast in (None, *LOW):
            yield Setting(dtypes, autocast, produced=False)


__all__ = ["INPUT", "LOW", "PARAM", "Setting", "settings", "uniform"]
