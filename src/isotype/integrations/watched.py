"""What is watched of an attached trainer: the steps of `isotype train`'s schedule, the calls of the
first one, and between all of them that weights, states and buffers are what the last update left.

Hooks of the trainer's own optimizer tell when an update begins and ends, and whether it is this
optimizer that runs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..config.schema import RunSection
from ..errors import RunError, UsageError
from ..lora.attach import fusion_blocker, is_dora_layer, lora_layers
from ..observe import Observation, Observer, is_observed, observing
from ..observe.continuity import (
    BUFFER,
    STATE,
    WEIGHT,
    Continuity,
    Difference,
    report_differences,
    report_narrow_values,
)
from ..observe.record import merge_observation, to_file_record
from ..optimize.deferred import materialised
from ..optimize.deferred_values import answered
from ..optimize.trl_head import fused_head_of
from .attachment import Attachment
from .preflight import in_trainers_words

_NO_STEP = "no step of this training ended"
# roles that a run of Isotype's own observes and an attached trainer does not, or not always
_OF_THE_TRAINER = {
    "loss": (
        "the trainer computes it: its operators are judged with the step's, the dtype of the result"
        " is not counted"
    ),
    "generate": "nothing was generated in the observed steps",
    "save": "no checkpoint with safetensors was written",
}
_NOT_WATCHED = (
    "what callbacks and schedulers compute: only what they leave in weights, states and buffers",
    "files, but for the weights in the first checkpoint, and what a resumed training loads",
)
_COUNTED = ("norm", "gated mlp", "rotary", "attention", "4-bit")


# hooks of PyTorch's own that a DDP may send its buckets with -> the dtype in which these are
# summed; None: that of the gradients
_HOOKS = {
    default_hooks.allreduce_hook: None, default_hooks.fp16_compress_hook: torch.float16, default_hooks.bf16_compress_hook: torch.bfloat16,
}  # fmt: skip


def summed_in(model: nn.Module) -> tuple[list[torch.dtype], str]:
    """The dtypes in which a wrapped model sums its gradients across processes; none and why, where
    that cannot be read.
    """
    if isinstance(model, DistributedDataParallel):
        policy: Any = model.mixed_precision
        hooks = [hook for hook, _ in model._comm_hooks]
        if not hooks and (builtin := model._get_ddp_logging_data().get("comm_hook")):
            hooks = [builtin]
        for hook in hooks:
            if hook not in _HOOKS:
                name = getattr(hook, "__qualname__", str(hook))
                return (
                    [],
                    (
                        f"the communication hook {name} sums the gradients, and its dtype cannot be"
                        " read"
                    ),
                )
            if (narrow := _HOOKS[hook]) is not None:
                return [narrow], ""
    elif isinstance(model, FullyShardedDataParallel):
        policy = model.mixed_precision
    elif isinstance(model, FSDPModule):
        policy = model._get_fsdp_state()._mp_policy
    else:
        return (
            [],
            (
                f"neither DDP nor FSDP wraps the model ({type(model).__name__}): what sums the"
                " gradients is not known"
            ),
        )
    declared = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
    own = dict.fromkeys(p.dtype for p in model.parameters() if p.requires_grad)
    return ([declared] if declared else list(own)), ""


class WatchedSteps:
    """Counts calls in the first step of a training. Observes dtypes in the first, in those of the
    schedule of `isotype train` and in the one after a change of the model; every other step costs a
    comparison of hooks and dtypes, and of samples (`observe.continuity`).
    """

    def __init__(self, attached: Attachment, write: Callable[[dict[str, Any]], None]) -> None:
        """write  gets the record whenever it changes, in the first process"""
        self.attached, self.model, self.write = attached, attached.trainer.model, write
        read_only = [
            getattr(attached.trainer, name) for name in attached.manifests if name != "model"
        ]
        self.observer = Observer(self.model, attached.precision, read_only=read_only)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.record: dict[str, Any] = {}
        self.steps = 0
        self._seen: Observation | None = None
        self._unsummed = ""
        self._stack = ExitStack()
        self._hooks: list[Any] = []
        self._of_updates: list[Any] = []
        # accelerate's optimizer wraps the one whose step is observed
        self.optimizer: Any = getattr(
            attached.trainer.optimizer, "optimizer", attached.trainer.optimizer
        )
        self.carried = Continuity(self.model, self.optimizer, kinds=(WEIGHT, STATE))
        self.buffers = Continuity(self.model, kinds=(BUFFER,))
        self._buffers_compared = False
        self._said: set[tuple[str, str, str]] = set()
        self._updates = 0
        self._moved = self._had_gradient = False

    @property
    def step(self) -> int:
        return int(self.attached.trainer.state.global_step) + 1

    def start(self) -> None:
        """After the preflight, whose rehearsed update is none of the training's."""
        hooked = hasattr(self.optimizer, "_optimizer_step_pre_hooks")
        if hooked:
            before = self.optimizer.register_step_pre_hook
        else:
            before = register_optimizer_step_pre_hook
        if hooked:
            after = self.optimizer.register_step_post_hook
        else:
            after = register_optimizer_step_post_hook
        self._of_updates = [
            before(lambda *_: self._compare(self.carried, "the update of")),
            after(self._after_update),
        ]
        self._take("the start of the training")
        if self.step > 2:
            seen = Observation(self.step - 1)
            report_narrow_values(
                seen, self.carried.find_narrow_loads(), f"after the load of step {self.step - 1}"
            )
            self._keep(seen)

    def _take(self, moment: str) -> None:
        self.carried.take_sample(moment)
        self.buffers.take_sample(moment)

    def before_micro_batch(self) -> None:
        """Compares buffers at the beginning of a step: its forwards may change them."""
        if not self._buffers_compared:
            self._buffers_compared = True
            self._compare(self.buffers, "")

    def _compare(self, kept: Continuity, moment: str) -> None:
        kept.compare()
        if any(map(float, kept.flags)):
            seen = Observation(self.step)
            report_differences(
                seen,
                self._first_time(kept.differences()),
                kept.moment,
                f"{moment} step {self.step}".strip(),
                strict=False,
            )
            self._keep(seen)

    def _first_time(self, found: list[Difference], of: str = "") -> list[Difference]:
        """Those of a sort that was not said before: what a callback does after each step is said
        once.
        """
        new = [one for one in found if (one.kind, one.narrower, of) not in self._said]
        self._said |= {(one.kind, one.narrower, of) for one in new}
        return new

    def _after_update(self, *_: Any) -> None:
        self._updates += 1
        if self._seen is not None:
            few = self._first_time(self.carried.find_narrow_updates(), "few bits")
            report_narrow_values(self._seen, few, f"after the update of step {self.step}")
        self._take(f"the update of step {self.step}")
        self._buffers_compared = False

    def look_at_gradients(self) -> None:
        """Before the first update: whether there is one that could move a weight."""
        if not self._moved:
            rates = any(float(group["lr"]) > 0 for group in self.optimizer.param_groups)
            gradients = (
                g
                for p in self.model.parameters()
                if p.requires_grad and (g := self.attached.gradient(p)) is not None
            )
            self._had_gradient = rates and any(bool(g.any()) for g in gradients)

    def check_update(self, share_changed: float) -> None:
        """After each update until one moved weights. Raises UsageError where Isotype's optimizer is
        not the one that runs, and RunError where gradients moved no weight.
        """
        if self._moved:
            return
        name = f"step {self.step}"
        if not self._updates and self.attached.accumulator is not None:
            raise UsageError(
                f"{name}: Isotype's AdamW was placed, and the trainer made this update without it:"
                " no weight gets its gradient",
                fix=(
                    "leave out the method that updates the weights itself, or"
                    " precision='bf16-mixed' (fp32 weights)"
                ),
            )
        if self._had_gradient and not share_changed:
            raise RunError(
                f"{name} changed no weight, and its gradients and learning rate are not zero:"
                f" {type(self.optimizer).__name__} did not run, or updates other tensors than the"
                " model's",
                fix=(
                    "give the optimizer model.parameters() as they are now, or leave it to the"
                    " trainer"
                ),
            )
        self._moved = share_changed > 0

    def saved(self, folder: Path) -> None:
        """Looks at the weights' files of the first checkpoint."""
        if "save" in self.record.get("observed", {}) or not any(folder.glob("*.safetensors")):
            return
        seen = Observation(self.step - 1)
        precision = self.attached.precision
        frozen = () if hasattr(self.model, "peft_config") else (precision.unquantised,)
        self.observer.observe_files(seen, folder, precision.trainable, allowed=frozen)
        self._keep(seen)

    def rehearsed(self, seen: Mapping[str, Observation]) -> None:
        """What the preflight ran under the observer, by what it was."""
        for one in seen.values():
            self._keep(one)
        self.record["watched"] = list(seen)

    def _keep(self, seen: Observation) -> None:
        """Adds to the record, and warns of what is new in it."""
        seen.violations = [
            replace(finding, fix=in_trainers_words(finding.fix or ""))
            for finding in seen.violations
        ]
        earlier = self.record.get("violations", [])
        self.record = merge_observation(self.record, seen)
        new = [finding for finding in self.record["violations"] if finding not in earlier]
        self.record["violations"] = earlier + new
        if new:
            warnings.warn(f"isotype: {seen.violations[0].render()}", stacklevel=2)
        if self.attached.trainer.is_world_process_zero():
            self.write(self.precision_json())

    def close(self) -> None:
        """At the end of a training, also of one that raised."""
        self.stop()
        for hook in self._of_updates:
            hook.remove()
        self._of_updates.clear()

    def begin(self, step: int) -> None:
        """At the beginning of a step, whose number is `step`."""
        trainer = self.attached.trainer
        self.steps += 1
        first = self.steps == 1
        drawn = first or is_observed(
            step,
            every=RunSection().observe_every,
            seed=trainer.args.seed,
            total=trainer.state.max_steps,
        )
        if not drawn and not self.observer.has_changed():
            return
        if first:
            for entry in self.attached.manifest.entries:
                if entry.part in _COUNTED:
                    self._count(
                        self.model.get_submodule(entry.module),
                        entry.part,
                        entry.op or f"left alone: {entry.reason}",
                    )
            for _, layer in lora_layers(self.model):
                self._hooks.append(
                    layer.register_forward_pre_hook(observing(partial(self._count_lora)))
                )
            self._materialised = Counter(materialised)
            self._before = self._heads()
        self._seen = self._stack.enter_context(
            self.observer.watch(step, optimizer=self.optimizer, gradient=self.attached.gradient)
        )

    def end(self) -> Observation | None:
        """After the update of a step: what was observed in it."""
        seen = self._seen
        if seen is None:
            return None
        self.stop()
        if self.steps == 1:
            for op, count in (self._heads() - self._before).items():
                self.calls["head", op] += count
            for where, count in (Counter(materialised) - self._materialised).items():
                self.calls["head", f"logits computed: {where}"] += count
        trainer = self.attached.trainer
        if trainer.args.world_size > 1:
            sent, self._unsummed = summed_in(trainer.model_wrapped)
            self.observer.observe_sums(seen, sent)
        self._keep(seen)
        return seen

    def stop(self) -> None:
        """Removes every hook."""
        self._seen = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stack.close()

    def _count(self, module: nn.Module, part: str, op: str) -> None:
        def hook(*_: Any) -> None:
            self.calls[part, op] += 1

        self._hooks.append(module.register_forward_pre_hook(observing(hook)))

    def _count_lora(self, layer: nn.Module, args: Any) -> None:
        reason = fusion_blocker(layer, allow_dora=True)
        self.calls[
            "lora",
            (
                f"PEFT's own code: {reason}"
                if reason
                else "lora_dora"
                if is_dora_layer(layer)
                else "lora_linear"
            ),
        ] += 1

    def _heads(self) -> Counter[str]:
        found = Counter(answered)
        for module in self.model.modules():
            head = fused_head_of(module)
            found += Counter(
                {
                    op if op == "linear_log_probs" else f"TRL's own code: {op}": n
                    for op, n in head.calls.items()
                }
                if head
                else {}
            )
        return found

    def precision_json(self) -> dict[str, Any]:
        """precision.json, as a run of Isotype's own writes it."""
        resolved = self.attached.resolved
        record = self.record or {"places": {"every role": _NO_STEP}}
        return {
            "precision": resolved.text,
            "preset": resolved.preset,
            "declared": resolved.to_dict(),
            **to_file_record(
                record,
                compute=resolved.precision.compute,
                extra_reasons=self._unseen(),
                extra_unwatched=_NOT_WATCHED,
            ),
        }

    def _unseen(self) -> dict[str, str]:
        """The reason for each role, and each model beside the trained one, of which nothing is
        counted.
        """
        reasons = dict(_OF_THE_TRAINER)
        if not self.record:
            reasons["generate"] = _NO_STEP
        if self._moved and not self._updates:
            reasons["optimizer"] = "another optimizer than the trainer's moved the weights"
        if self._unsummed:
            reasons["reduce"] = self._unsummed
        if all(p.requires_grad for p in self.model.parameters()):
            reasons["base"] = "every weight is trained"
        for name in self.attached.manifests:
            if name != "model":
                reasons[f"the weights of {name}"] = (
                    "they are not counted; what is computed with them is judged with the step's"
                )
        return reasons
