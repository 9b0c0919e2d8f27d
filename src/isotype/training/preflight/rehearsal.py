"""Implements the checks PF012 to PF017. The checks run one step with learning rate 0 on the longest
rows, evaluate one batch and generate one sample. Afterwards, they restore the state of the run.

If the user has defined an optimizer, the checks do not run its update. A user's optimizer may store
a part of its state outside `optimizer.state`, and the checks could not restore this part.

The gradients, optimizer states, buffers, training or evaluation modes, the loss scale and every
random generator are restored. So the weights of a run are bit-identical with and without these
checks. With learning rate 0, AdamW does not change any weight. Stochastic rounding does not change
the weights either, because a weight that is not updated needs no rounding.
"""

from __future__ import annotations

import math
import os
import shlex
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...distributed.world import ALONE
from ...environment.hardware import out_of_memory_message
from ...errors import IsotypeError
from ...finding import Finding, Place, Severity
from ...observe.origin import find_custom_update
from ...observe.record import EVALUATION, GENERATION, LONGEST
from ...precision.parts import local_part, reshard_units
from ...wording import first_line, pluralise
from ..setting_names import SettingNames
from ..setup import CheckedRun, PreflightSubject
from ..step import peak_memory
from ..task import preserve_modes, preserve_random_state

# the errors that a model's code raises for unsuitable inputs; torch's are subclasses of
# RuntimeError, also OutOfMemoryError and NotImplementedError
STEP_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    MemoryError,
)
# a shorter run is not timed, because timing would take too large a part of it
MIN_TIMED_BATCHES = 50
_MAX_NAMES = 3  # largest number of tensors that a finding names
_LIBRARY_FOLDERS = (
    str(Path(__file__).parents[2]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
)


@contextmanager
def preserve_state(prepared: CheckedRun) -> Iterator[None]:
    """At the end of this block, restores all state that a forward, a backward, an evaluation or a
    generation changes. If processes share the model, the gathered weights are freed, so that each
    process again holds only its part.
    """
    model = prepared.model
    stepper = prepared.stepper
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    if stepper.loss_scale:
        saved_scale = (stepper.loss_scale.scale, stepper.loss_scale.quiet)
    else:
        saved_scale = None
    with preserve_random_state(), preserve_modes(model):
        try:
            yield
        finally:
            reshard_units(model)
            stepper.accumulator.zero()
            model.zero_grad(set_to_none=True)
            if stepper.loss_scale and saved_scale:
                stepper.loss_scale.scale, stepper.loss_scale.quiet = saved_scale
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            if prepared.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(prepared.device)


@contextmanager
def _preserve_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within this block, the optimizer has no states, and its learning rate is 0. At the end of the
    block, the states and settings of the optimizer are restored.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    # the optimizer of an attached trainer may have states from an earlier training
    states = optimizer.state
    optimizer.state = defaultdict(dict)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        optimizer.state = states
        for group, group_settings in zip(optimizer.param_groups, settings, strict=True):
            group.update(group_settings)


def rehearse_step(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the checks PF012 to PF015. The checks run forward, backward and an update on the longest
    rows, and check the gradients before these are freed.
    """
    prepared = subject.prepared
    stepper = prepared.stepper
    batch = subject.make_batch(subject.longest_rows)
    description = f"a training step on {batch}"
    with preserve_state(prepared):
        prepared.model.train()
        try:
            with subject.watch(LONGEST):
                loss = float(stepper.accumulate([batch]))
                norm = stepper.norm()
            subject.trial.peak_bytes = peak_memory(prepared.device)
        except STEP_ERRORS as error:
            yield _failure_finding("PF012", description, error, subject.names)
            return
        if not math.isfinite(loss) or (not math.isfinite(norm) and stepper.loss_scale is None):
            yield _non_finite_finding(
                subject, "the gradient" if math.isfinite(loss) else "the loss"
            )
            return
        yield from subject.violations(LONGEST)
        if batch.weight:
            yield from find_missing_gradients(subject)
            yield from find_frozen_gradients(subject)
        if not math.isfinite(norm):  # an fp16 overflow: the run's own step skips the update too
            return
        if (custom_code := find_custom_update(stepper.optimizer)) is not None:
            yield _unrehearsed_finding(custom_code)
            return
        try:
            with _preserve_optimizer(stepper.optimizer):
                stepper.optimizer.step()
            subject.trial.peak_bytes = peak_memory(prepared.device)
        except STEP_ERRORS as error:
            yield _failure_finding("PF012", f"the update after {description}", error, subject.names)


def time_longest_batch(subject: PreflightSubject) -> None:
    """Measures the time of forward and backward on the longest rows, and of a small sample. The
    measurement happens after the trial step, because the first step also compiles code and
    therefore takes many times longer than later steps. If the run has fewer than 50 batches,
    nothing is measured, because a batch would take more than 2% of the run's time. A run with
    several processes measures nothing either, because the processes wait for each other in each
    step.
    """
    prepared = subject.prepared
    stepper = prepared.stepper
    batches = subject.schedule.total * subject.config.train.accumulate
    if batches < MIN_TIMED_BATCHES or stepper.world.size > 1:
        return
    batch = subject.make_batch(subject.longest_rows)
    with preserve_state(prepared):
        prepared.model.train()
        start_time = time.perf_counter()
        stepper.accumulate([batch])
        stepper.norm()  # waits for a GPU
        subject.trial.batch_seconds = time.perf_counter() - start_time
    sample_ratio = subject.task.sample_ratio
    if sample_ratio is None or not subject.schedule.sample_every:
        return
    with preserve_state(prepared):
        start_time = time.perf_counter()
        subject.task.sample(prepared.model, prepared.device, is_shortened=True)
        subject.trial.sample_seconds = (time.perf_counter() - start_time) * sample_ratio


def rehearse_evaluation(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF016, which is one evaluation pass on the longest evaluation rows."""
    prepared = subject.prepared
    result = None
    with _rehearse(subject, "PF016", "an evaluation of the longest rows", EVALUATION) as findings:
        result = subject.task.rehearse_evaluation(
            prepared.model, prepared.device, dtype=prepared.resolved.precision.loss
        )
    yield from findings
    if result is None or math.isfinite(result.loss):
        return
    names = subject.names
    if prepared.resolved.precision.compute == "fp16":
        fix = f"another {names.preset}: fp16 overflows at 65504, where bf16 and fp32 do not"
    else:
        fix = f"another base, or another {names.eval_data}: nothing was trained yet"
    yield Finding(
        code="PF016",
        severity=Severity.ERROR,
        place=Place(symbol=names.eval_data),
        message=f"the evaluation loss before training is {result.loss}",
        fix=fix,
    )


def rehearse_samples(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF017, which generates one small sample in the dtype of `precision.generate`."""
    prepared = subject.prepared
    if not subject.task.samples or not subject.schedule.sample_every:
        return
    world = prepared.stepper.world if prepared.stepper.sharding is not None else ALONE
    with _rehearse(subject, "PF017", "a small sample", GENERATION, "generate") as findings:
        subject.task.sample(prepared.model, prepared.device, is_shortened=True, world=world)
    for finding in findings:
        if finding.code == "PF017" and subject.names.without_samples:
            yield replace(finding, fix=f"{subject.names.without_samples}; {finding.fix}")
        else:
            yield finding


@contextmanager
def _rehearse(
    subject: PreflightSubject,
    code: str,
    description: str,
    observation_name: str,
    role: str = "compute",
) -> Iterator[list[Finding]]:
    """Records the dtypes within this block, and restores all state at its end. Yields an empty
    list. At the end of the block, the list is filled with a `Finding` for each dtype that is not
    the declared one, and with a `Finding` for the error if the block failed.
    """
    findings: list[Finding] = []
    with preserve_state(subject.prepared):
        try:
            with subject.watch(observation_name, role):
                yield findings
        except STEP_ERRORS as error:
            findings.append(_failure_finding(code, description, error, subject.names))
    findings += subject.violations(observation_name)


def find_missing_gradients(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF014, which finds trained tensors that get no gradient, or a gradient that
    contains only zeros.
    """
    model = subject.prepared.model
    gradient = subject.prepared.stepper.accumulator.gradient
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: g for name, p in trained.items() if (g := gradient(p)) is not None}
    names_with_gradient = _nonzero_names(gradients, subject)
    nonzero_adapter_names = _nonzero_names(
        {
            name: local_part(p).detach()
            for name, p in trained.items()
            if ".lora_" in name or ".lokr_" in name
        },
        subject,
    )
    missing_names = [
        name
        for name in trained
        if name not in names_with_gradient
        and not _is_expected_zero(
            name, trained, nonzero_adapter_names, subject.prepared.manifest.unused
        )
    ]
    if not missing_names:
        return
    unreached_names = [name for name in missing_names if name not in gradients]
    names_text = ", ".join(missing_names[:_MAX_NAMES]) + (
        ", ..." if len(missing_names) > _MAX_NAMES else ""
    )
    yield Finding(
        code="PF014",
        severity=Severity.WARNING if names_with_gradient else Severity.ERROR,
        place=Place(symbol=missing_names[0]),
        message=f"{len(missing_names)} of {len(trained)} trained tensors get no usable gradient: {names_text}",
        observed=f"{len(unreached_names)} are not reached by backward, {len(missing_names) - len(unreached_names)} get zeros only",
        cause=(
            "the loss does not depend on them: a module that this forward does not use, a detach,"
            " or activations that underflow"
        ),
        fix=(
            "leave them out of adapter.targets and adapter.modules_to_save, or find what cuts them"
            " off: isotype doctor trace"
        ),
    )


def _nonzero_names(tensors: dict[str, Tensor], subject: PreflightSubject) -> set[str]:
    """Returns the names of the tensors that have a non-zero element. If processes share a model, a
    tensor counts as non-zero if any process holds a non-zero element of it.
    """
    stepper = subject.prepared.stepper
    flags = torch.stack([t.any() for t in tensors.values()]).tolist() if tensors else []
    if stepper.sharding is not None and flags:
        flags = stepper.world.sum([float(is_nonzero) for is_nonzero in flags])
    return {name for name, is_nonzero in zip(tensors, flags) if is_nonzero}


def _is_expected_zero(
    name: str,
    trained: dict[str, nn.Parameter],
    nonzero_adapter_names: set[str],
    unused_layers: Sequence[str],
) -> bool:
    """Returns True if it is correct that the gradient of a tensor contains only zeros. At the
    start, LoRA's matrix B is zero, so the gradient of A is zero at step 1. In LoKr, one factor is
    zero at the start, so the gradients of the other factors are zero. The gradient of an expert is
    zero if the expert gets no token.

    nonzero_adapter_names  the names of the adapters' matrices that have a non-zero element
    unused_layers          the names of the layers whose result the model does not use
    """
    if ".experts." in name or any(f".{layer}." in f".{name}" for layer in unused_layers):
        return True
    if ".lokr_" in name:
        partners = [
            name_part
            for name_part in trained
            if name_part != name and name_part.startswith(f"{name.partition('.lokr_')[0]}.lokr_")
        ]
        return any(name_part not in nonzero_adapter_names for name_part in partners)
    for name_part, partner_part in (
        ("lora_A", "lora_B"),
        ("lora_B", "lora_A"),
        ("lora_embedding_A", "lora_embedding_B"),
        ("lora_embedding_B", "lora_embedding_A"),
    ):
        partner = name.replace(f".{name_part}.", f".{partner_part}.")
        if partner != name and partner in trained and partner not in nonzero_adapter_names:
            return True
    return False


def find_frozen_gradients(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF015, which finds tensors that get a gradient although no optimizer updates
    them.
    """
    stepper = subject.prepared.stepper
    updated_ids = {id(p) for group in stepper.optimizer.param_groups for p in group["params"]}
    named_parameters = subject.prepared.model.named_parameters()
    gradients = {
        name: p.grad
        for name, p in named_parameters
        if id(p) not in updated_ids and p.grad is not None
    }
    if not gradients:
        return
    first_name = next(iter(gradients))
    yield Finding(
        code="PF015",
        severity=Severity.ERROR,
        place=Place(symbol=first_name),
        message=(
            f"{pluralise(len(gradients), 'tensor that is not trained gets', 'tensors that are not trained get')}"
            f" a gradient, {first_name} first"
        ),
        observed=(
            f"{sum(gradient.numel() * gradient.element_size() for gradient in gradients.values()):,} bytes of gradients that"
            " nothing reads or clears"
        ),
        cause=(
            "requires_grad was switched on after the optimizer was built, or by the model's own"
            " code"
        ),
        fix="name them in adapter.modules_to_save to train them, else requires_grad_(False)",
    )


def _non_finite_finding(subject: PreflightSubject, quantity: str) -> Finding:
    stepper = subject.prepared.stepper
    batch = subject.make_batch(subject.longest_rows)
    error = stepper.explain_non_finite([batch], step=0, quantity=quantity)
    first_line_text, *other_lines = error.message.splitlines()
    return Finding(
        code="PF013",
        severity=Severity.ERROR,
        message=f"{quantity} is not finite on the longest rows, before anything was trained",
        observed="\n".join(
            [first_line_text.removeprefix("step 0: "), *(line.strip() for line in other_lines)]
        ),
        fix=error.fix,
    )


def _unrehearsed_finding(custom_code: str) -> Finding:
    return Finding(
        code="PF012",
        severity=Severity.NOTE,
        place=Place(symbol=custom_code),
        message=f"the update by {custom_code} is not rehearsed",
        cause="code of your own may keep state that no rehearsal could restore",
        observed="whether it runs, and its memory, are not known",
    )


def _failure_finding(code: str, description: str, error: Exception, names: SettingNames) -> Finding:
    text = first_line(error)
    if (missing_memory := out_of_memory_message(error)) is not None:
        text = f"out of memory: {missing_memory}"
        fix = (
            f"a smaller {names.batch_size} with more {names.accumulate} gives the same result;"
            f" {names.checkpoint_layers}"
        )
    elif isinstance(error, IsotypeError) and error.fix:
        fix = error.fix
    else:
        fix = (
            f"isotype doctor explain {shlex.quote(text)} says more if this is a dtype error;"
            " ISOTYPE_TRACEBACK=1 shows where it came from"
        )
    return Finding(
        code=code,
        severity=Severity.ERROR,
        place=Place(symbol=_error_location(error)),
        message=f"{description} failed: {text}",
        cause=type(error).__name__,
        fix=fix,
    )


def _error_location(error: Exception) -> str | None:
    """Returns the innermost line of the traceback that is not in PyTorch or Isotype, as `file:line
    in function`. If all lines are in PyTorch or Isotype, returns the innermost line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    location = next(
        (
            frame
            for frame in reversed(frames)
            if not frame.filename.startswith((*_LIBRARY_FOLDERS, "<"))
        ),
        frames[-1],
    )
    return f"{Path(location.filename).name}:{location.lineno} in {location.name}"
