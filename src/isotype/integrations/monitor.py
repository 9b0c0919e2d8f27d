"""Observes an attached trainer. It observes the dtypes in the same steps as `isotype train`, and
counts the calls of fused code in the first step. Between two steps, it checks that nothing has
changed the weights, optimizer states and buffers since the last update.

Hooks of the trainer's optimizer mark the beginning and the end of an update, and show whether this
optimizer runs.
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
from ..finding import join_names
from ..lora.attach import fusion_blocker, is_dora_layer, lora_layers
from ..observe import Observation, Observer, is_observed, mark_observing
from ..observe.continuity import (
    BUFFER,
    STATE,
    WEIGHT,
    Continuity,
    Difference,
    FrozenWeights,
    report_differences,
    report_narrow_values,
)
from ..observe.record import DEFAULT_FIX, merge_observation, to_file_record
from ..optimize.deferred import materialisations
from ..optimize.deferred_values import op_counts
from ..optimize.trl_head import find_fused_head
from .attachment import Attachment

_NO_STEP = "no step of this training ended"
# replaces `DEFAULT_FIX`, which names a section of the configuration file
_DECLARE_FIX = (
    "find the cast (isotype doctor trace shows it), or declare what you meant in attach(trainer,"
    " precision=...)"
)
# roles that `isotype train` observes and an attached trainer may not observe
_TRAINER_ROLES = {
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
_COUNTED_PARTS = ("norm", "gated mlp", "rotary", "attention", "4-bit")


# DDP's communication hooks in PyTorch -> the dtype in which they sum; None means the gradients'
# dtype
_HOOK_DTYPES = {
    default_hooks.allreduce_hook: None, default_hooks.fp16_compress_hook: torch.float16, default_hooks.bf16_compress_hook: torch.bfloat16,
}  # fmt: skip


def read_reduce_dtypes(model: nn.Module) -> tuple[list[torch.dtype], str]:
    """Reads the dtypes in which a wrapped model sums its gradients across processes. Returns the
    dtypes and "", or an empty list and the reason why the dtypes cannot be read.
    """
    if isinstance(model, DistributedDataParallel):
        policy: Any = model.mixed_precision
        hooks = [hook for hook, _ in model._comm_hooks]
        if not hooks and (builtin := model._get_ddp_logging_data().get("comm_hook")):
            hooks = [builtin]
        for hook in hooks:
            if hook not in _HOOK_DTYPES:
                name = getattr(hook, "__qualname__", str(hook))
                reason = f"the communication hook {name} sums the gradients, and its dtype cannot be read"
                return [], reason
            if (narrow := _HOOK_DTYPES[hook]) is not None:
                return [narrow], ""
    elif isinstance(model, FullyShardedDataParallel):
        policy = model.mixed_precision
    elif isinstance(model, FSDPModule):
        policy = model._get_fsdp_state()._mp_policy
    else:
        reason = (
            f"neither DDP nor FSDP wraps the model ({type(model).__name__}): what sums the gradients is"
            " not known"
        )
        return [], reason
    declared = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
    if declared:
        return [declared], ""
    gradient_dtypes = dict.fromkeys(p.dtype for p in model.parameters() if p.requires_grad)
    return list(gradient_dtypes), ""


class StepMonitor:
    """Counts the calls of fused code in the first step of a training. Observes dtypes in the first
    step and in the same later steps as `isotype train`. Also observes them in the step after the
    model changed. In all other steps, it only compares the hooks, the dtypes and some stored values
    of the tensors (`observe.continuity`).
    """

    def __init__(self, attachment: Attachment, write: Callable[[dict[str, Any]], None]) -> None:
        """Creates the monitor of a trainer.

        write  a function that the first process calls with the record whenever the record changes
        """
        self.attachment = attachment
        self.model = attachment.trainer.model
        self.write = write
        read_only = [
            getattr(attachment.trainer, name) for name in attachment.manifests if name != "model"
        ]
        self.observer = Observer(self.model, attachment.precision, read_only=read_only)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.record: dict[str, Any] = {}
        self.steps = 0
        self._observation: Observation | None = None
        self._reduce_unknown_reason = ""
        self._stack = ExitStack()
        self._hooks: list[Any] = []
        self._update_hooks: list[Any] = []
        # accelerate's optimizer wraps the optimizer whose step is observed
        self.optimizer: Any = getattr(
            attachment.trainer.optimizer, "optimizer", attachment.trainer.optimizer
        )
        self.continuity = Continuity(self.model, self.optimizer, kinds=(WEIGHT, STATE))
        self.buffers = Continuity(self.model, kinds=(BUFFER,))
        self._buffers_compared = False
        self._reported: set[tuple[str, str, str]] = set()
        self._frozen: FrozenWeights | None = None  # set when the training starts
        self._updates = 0
        self._has_changed_weights = self._has_gradient = False

    @property
    def step(self) -> int:
        return int(self.attachment.trainer.state.global_step) + 1

    def start(self) -> None:
        """Starts the monitoring. Call it after the preflight, because the preflight makes a test
        update, which is not a training step.
        """
        has_hooks = hasattr(self.optimizer, "_optimizer_step_pre_hooks")
        if has_hooks:
            register_before = self.optimizer.register_step_pre_hook
        else:
            register_before = register_optimizer_step_pre_hook
        if has_hooks:
            register_after = self.optimizer.register_step_post_hook
        else:
            register_after = register_optimizer_step_post_hook
        self._update_hooks = [
            register_before(lambda *_: self._compare(self.continuity, "the update of")),
            register_after(self._after_update),
        ]
        self._take_samples("the start of the training")
        self._frozen = FrozenWeights(self.model)
        if self.step > 2:
            observation = Observation(self.step - 1)
            report_narrow_values(
                observation,
                self.continuity.find_narrow_loads(),
                f"after the load of step {self.step - 1}",
            )
            self._add_observation(observation)

    def _take_samples(self, moment: str) -> None:
        self.continuity.take_sample(moment)
        self.buffers.take_sample(moment)

    def check_buffers(self) -> None:
        """Compares buffers before the first forward of a step, because forwards may change them."""
        if not self._buffers_compared:
            self._buffers_compared = True
            self._compare(self.buffers, "")

    def _compare(self, continuity: Continuity, moment: str) -> None:
        continuity.compare()
        if any(map(float, continuity.flags)):
            observation = Observation(self.step)
            report_differences(
                observation,
                self._drop_reported(continuity.differences()),
                continuity.moment,
                f"{moment} step {self.step}".strip(),
                strict=False,
            )
            self._add_observation(observation)

    def _drop_reported(self, differences: list[Difference], topic: str = "") -> list[Difference]:
        """Removes the differences of a kind that was already reported. So if a callback changes
        something after each step, the user sees only one report.
        """
        unreported = [
            difference
            for difference in differences
            if (difference.kind, difference.narrower, topic) not in self._reported
        ]
        self._reported |= {
            (difference.kind, difference.narrower, topic) for difference in unreported
        }
        return unreported

    def _after_update(self, *_: Any) -> None:
        self._updates += 1
        if self._observation is not None:
            narrow_updates = self._drop_reported(self.continuity.find_narrow_updates(), "few bits")
            report_narrow_values(
                self._observation, narrow_updates, f"after the update of step {self.step}"
            )
        self._take_samples(f"the update of step {self.step}")
        self._buffers_compared = False

    def check_gradients(self) -> None:
        """Records whether the next update should change a weight, that is, whether a gradient and a
        learning rate are not zero. After the first update that has changed a weight, it does
        nothing.
        """
        if not self._has_changed_weights:
            has_learning_rate = any(float(group["lr"]) > 0 for group in self.optimizer.param_groups)
            gradients = (
                g
                for p in self.model.parameters()
                if p.requires_grad and (g := self.attachment.gradient(p)) is not None
            )
            self._has_gradient = has_learning_rate and any(
                bool(gradient.any()) for gradient in gradients
            )

    def check_update(self, share_changed: float) -> None:
        """Checks each update until one has changed a weight.

        Raises  UsageError if an optimizer other than Isotype's runs; RunError if an update with
                gradients changed no weight
        """
        if self._has_changed_weights:
            return
        name = f"step {self.step}"
        if not self._updates and self.attachment.accumulator is not None:
            raise UsageError(
                f"{name}: Isotype's AdamW was placed, and the trainer made this update without it:"
                " no weight gets its gradient",
                fix=(
                    "leave out the method that updates the weights itself, or"
                    " precision='bf16-mixed' (fp32 weights)"
                ),
            )
        if self._has_gradient and not share_changed:
            raise RunError(
                f"{name} changed no weight, and its gradients and learning rate are not zero:"
                f" {type(self.optimizer).__name__} did not run, or updates other tensors than the"
                " model's",
                fix=(
                    "give the optimizer model.parameters() as they are now, or leave it to the"
                    " trainer"
                ),
            )
        self._has_changed_weights = share_changed > 0

    def observe_checkpoint(self, folder: Path) -> None:
        """Observes the weight files of the first checkpoint."""
        if "save" in self.record.get("observed", {}) or not any(folder.glob("*.safetensors")):
            return
        observation = Observation(self.step - 1)
        precision = self.attachment.precision
        allowed_dtypes = () if hasattr(self.model, "peft_config") else (precision.unquantised,)
        self.observer.observe_files(
            observation, folder, precision.trainable, allowed=allowed_dtypes
        )
        self._add_observation(observation)

    def add_rehearsals(self, observations: Mapping[str, Observation]) -> None:
        """Adds what was observed in the test runs before the training. The keys of `observations`
        are the names of the test runs.
        """
        for observation in observations.values():
            self._add_observation(observation)
        self.record["watched"] = list(observations)

    def _add_observation(self, observation: Observation) -> None:
        """Adds an observation to the record, and warns if it contains faults (such as a dtype that
        differs from the declared one) that no earlier observation had.
        """
        observation.violations = [
            replace(finding, fix=_DECLARE_FIX) if finding.fix == DEFAULT_FIX else finding
            for finding in observation.violations
        ]
        earlier_violations = self.record.get("violations", [])
        self.record = merge_observation(self.record, observation)
        new_violations = [
            finding for finding in self.record["violations"] if finding not in earlier_violations
        ]
        self.record["violations"] = earlier_violations + new_violations
        if new_violations:
            warnings.warn(f"isotype: {observation.violations[0].render()}", stacklevel=2)
        if self.attachment.trainer.is_world_process_zero():
            self.write(self.precision_json())

    def close(self) -> None:
        """Removes every hook at the end of a training, also after an error."""
        self.stop()
        for hook in self._update_hooks:
            hook.remove()
        self._update_hooks.clear()
        observation = Observation(self.step - 1)
        self._list_changed_weights(observation)
        if observation.unobserved:
            self._add_observation(observation)

    def _list_changed_weights(self, observation: Observation) -> None:
        """Lists frozen weights that have changed since the start. They are not reported as an
        error, because a program may unfreeze and train layers, and freeze them again.
        """
        names = self._frozen.changed() if self._frozen is not None else []
        if names:
            observation.unobserved["frozen weights that changed"] = (
                f"{join_names(names, 3)}: something wrote them outside of the updates, such as"
                " merge_adapter() and unmerge_adapter(), which round a base of bf16 or fp16"
            )

    def begin(self, step: int) -> None:
        """Begins step `step`. The step is observed if its number is one of the numbers to observe,
        or if the model has changed.
        """
        trainer = self.attachment.trainer
        self.steps += 1
        is_first = self.steps == 1
        is_scheduled = is_first or is_observed(
            step,
            every=RunSection().observe_every,
            seed=trainer.args.seed,
            total=trainer.state.max_steps,
        )
        if not is_scheduled and not self.observer.has_changed():
            return
        if is_first:
            for entry in self.attachment.manifest.entries:
                if entry.part in _COUNTED_PARTS:
                    self._count(
                        self.model.get_submodule(entry.module),
                        entry.part,
                        entry.op or f"left alone: {entry.reason}",
                    )
            for _, layer in lora_layers(self.model):
                self._hooks.append(
                    layer.register_forward_pre_hook(mark_observing(partial(self._count_lora)))
                )
            self._materialised = Counter(materialisations)
            self._head_calls_at_start = self._count_head_calls()
        self._observation = self._stack.enter_context(
            self.observer.watch(step, optimizer=self.optimizer, gradient=self.attachment.gradient)
        )

    def end(self) -> Observation | None:
        """Ends a step after its update. Returns its observation, or None."""
        observation = self._observation
        if observation is None:
            return None
        self.stop()
        if self.steps == 1:
            for op, count in (self._count_head_calls() - self._head_calls_at_start).items():
                self.calls["head", op] += count
            for location, count in (Counter(materialisations) - self._materialised).items():
                self.calls["head", f"logits computed: {location}"] += count
        trainer = self.attachment.trainer
        if trainer.args.world_size > 1:
            dtypes, self._reduce_unknown_reason = read_reduce_dtypes(trainer.model_wrapped)
            self.observer.observe_sums(observation, dtypes)
        self._add_observation(observation)
        return observation

    def stop(self) -> None:
        """Removes the hooks with which a step was observed."""
        self._observation = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stack.close()

    def _count(self, module: nn.Module, part: str, op: str) -> None:
        def hook(*_: Any) -> None:
            self.calls[part, op] += 1

        self._hooks.append(module.register_forward_pre_hook(mark_observing(hook)))

    def _count_lora(self, layer: nn.Module, args: Any) -> None:
        reason = fusion_blocker(layer, allow_dora=True)
        if reason:
            op = f"PEFT's own code: {reason}"
        elif is_dora_layer(layer):
            op = "lora_dora"
        else:
            op = "lora_linear"
        self.calls["lora", op] += 1

    def _count_head_calls(self) -> Counter[str]:
        calls = Counter(op_counts)
        for module in self.model.modules():
            head = find_fused_head(module)
            calls += Counter(
                {
                    op if op == "linear_log_probs" else f"TRL's own code: {op}": count
                    for op, count in head.calls.items()
                }
                if head
                else {}
            )
        return calls

    def precision_json(self) -> dict[str, Any]:
        """Returns the content of precision.json, in the same format as in a run of `isotype train`."""
        resolved = self.attachment.resolved
        record = self.record or {"places": {"every role": _NO_STEP}}
        return {
            "precision": resolved.text,
            "preset": resolved.preset,
            "declared": resolved.to_dict(),
            **to_file_record(
                record,
                compute=resolved.precision.compute,
                extra_reasons=self._unobserved_reasons(),
                extra_unwatched=_NOT_WATCHED,
            ),
        }

    def _unobserved_reasons(self) -> dict[str, str]:
        """For some kinds of tensors and some additional models, no dtypes were counted. Returns a
        mapping from the name of each of them to the reason.
        """
        reasons = dict(_TRAINER_ROLES)
        if not self.record:
            reasons["generate"] = _NO_STEP
        if self._has_changed_weights and not self._updates:
            reasons["optimizer"] = "another optimizer than the trainer's moved the weights"
        if self._reduce_unknown_reason:
            reasons["reduce"] = self._reduce_unknown_reason
        if all(p.requires_grad for p in self.model.parameters()):
            reasons["base"] = "every weight is trained"
        for name in self.attachment.manifests:
            if name != "model":
                reasons[f"the weights of {name}"] = (
                    "they are not counted; what is computed with them is judged with the step's"
                )
        return reasons
