"""Records the first step of an attached trainer, with the number of fused calls and of others and their reason, and the dtypes of the
second step.

Neither changes what is computed: their hooks are marked as observing, so that fused code runs as in every other step.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from ..lora.plain import lora_layers, why_not_fused
from ..observe import Observation, Observer, observing
from ..observe.record import as_written, noted
from ..optimize import fused_head
from ..optimize.deferred import materialised
from ..optimize.deferred_values import answered
from .attachment import Attachment

_NO_STEP = "the second step of a training is observed, and there was none"
# roles that a run of Isotype's own observes and an attached trainer does not, or not always
_OF_THE_TRAINER = {
    "loss": "the trainer computes it: its operators are judged with the step's, the dtype of the result is not counted",
    "generate": "nothing was generated in the observed step",
    "save": "the trainer writes its own files, which are not read",
}
_COUNTED = ("norm", "gated mlp", "rotary", "attention", "4-bit")


class FirstSteps:
    """Counts calls in the first step of a training and observes dtypes in the second; every other step costs nothing."""

    def __init__(self, attached: Attachment) -> None:
        self.attached, self.model = attached, attached.trainer.model
        read_only = [getattr(attached.trainer, name) for name in attached.manifests if name != "model"]
        self.observer = Observer(self.model, attached.precision, read_only=read_only)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.seen: Observation | None = None
        self.steps = 0
        self.watching = False
        self._stack = ExitStack()
        self._hooks: list[Any] = []

    def begin(self, step: int) -> None:
        """At the beginning of a step, whose number is `step`."""
        self.steps += 1
        self.watching = self.steps <= 2
        if self.steps == 1:
            self._begin_counting()
        elif self.steps == 2:
            # accelerate's optimizer wraps the one whose step is observed
            optimizer = getattr(self.attached.trainer.optimizer, "optimizer", self.attached.trainer.optimizer)
            self.seen = self._stack.enter_context(self.observer.watch(step, optimizer=optimizer, gradient=self.attached.gradient))

    def _begin_counting(self) -> None:
        for entry in self.attached.manifest.entries:
            if entry.part in _COUNTED:
                self._count(self.model.get_submodule(entry.module), entry.part, entry.op or f"left alone: {entry.reason}")
        for _, layer in lora_layers(self.model):
            self._hooks.append(layer.register_forward_pre_hook(observing(partial(self._count_lora))))
        self._materialised, self._before = Counter(materialised), self._heads()

    def end(self) -> None:
        """After the update of an observed step."""
        self.stop()
        if self.seen is not None:
            return
        for op, count in (self._heads() - self._before).items():
            self.calls["head", op] += count
        for where, count in (Counter(materialised) - self._materialised).items():
            self.calls["head", f"logits computed: {where}"] += count

    def stop(self) -> None:
        """Removes every hook."""
        self.watching = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stack.close()

    def _count(self, module: nn.Module, part: str, op: str) -> None:
        def hook(*_: Any) -> None:
            self.calls[part, op] += 1

        self._hooks.append(module.register_forward_pre_hook(observing(hook)))

    def _count_lora(self, layer: nn.Module, args: Any) -> None:
        reason = why_not_fused(layer)
        self.calls["lora", f"PEFT's own code: {reason}" if reason else "lora_linear"] += 1

    def _heads(self) -> Counter[str]:
        found = Counter(answered)
        for module in self.model.modules():
            head = fused_head.placed(module)
            found += Counter(
                {op if op == "linear_log_probs" else f"TRL's own code: {op}": n for op, n in head.calls.items()} if head else {}
            )
        return found

    @property
    def promotions(self) -> int:
        """Module outputs wider than `compute` that the declaration does not speak of."""
        return sum(self.seen.promotions.values()) if self.seen is not None else 0

    def calls_json(self) -> list[dict[str, Any]]:
        return [{"part": part, "op": op, "calls": n} for (part, op), n in sorted(self.calls.items())]

    @property
    def seen_now(self) -> bool:
        """Whether the step that runs is the observed one."""
        return self.watching and self.seen is not None

    def precision_json(self, callbacks: Observation) -> dict[str, Any]:
        """precision.json, as a run of Isotype's own writes it; `callbacks` is what was seen of a user's own."""
        resolved = self.attached.resolved
        record = noted({}, self.seen) if self.seen is not None else {"places": {"every role": _NO_STEP}}
        beside = callbacks.as_json()
        if beside["violations"] or beside["unobserved"]:
            record["violations"] = record.get("violations", []) + beside["violations"]
            record["places"] = record.get("places", {}) | beside["unobserved"]
        return {
            "precision": resolved.text,
            "preset": resolved.preset,
            "declared": resolved.as_json(),
            **as_written(record, compute=resolved.precision.compute, more=self._unseen()),
        }

    def _unseen(self) -> dict[str, str]:
        """The reason for each role, and each model beside the trained one, of which nothing is counted."""
        reasons = dict(_OF_THE_TRAINER)
        if self.seen is None:
            reasons["generate"] = _NO_STEP
        if all(p.requires_grad for p in self.model.parameters()):
            reasons["base"] = "every weight is trained"
        for name in self.attached.manifests:
            if name != "model":
                reasons[f"the weights of {name}"] = "they are not counted; what is computed with them is judged with the step's"
        return reasons
