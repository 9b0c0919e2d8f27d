"""PF012 to PF017: runs one step at learning rate 0 on the longest rows, one evaluation batch and
one sample, then restores the state.

The update of an optimizer of a program's own is left out: it may keep state outside
`optimizer.state`, which could not be put back.

It restores gradients, optimizer states, buffers, modes, the loss scale and every random generator,
so that the weights of a run with preflight are bit-identical to those without. At learning rate 0
AdamW changes no weight, not even with stochastic rounding: the value is exact.
"""

from __future__ import annotations

import math
import os
import shlex
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...distributed.world import ALONE
from ...environment.hardware import out_of_memory
from ...errors import IsotypeError
from ...finding import Finding, Place, Severity
from ...observe.origin import find_custom_update
from ...observe.record import EVALUATION, GENERATION, LONGEST
from ...precision.parts import local_part, reshard_units
from ...wording import first_line, pluralise
from ..setup import Prepared, Subject
from ..task import preserve_modes, preserve_random_state

# what a model's code raises for its inputs; RuntimeError is torch's, OutOfMemoryError and
# NotImplementedError among it
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
_SHOWN = 3  # names of tensors in a finding
_OURS_AND_PYTORCHS = (
    str(Path(__file__).parents[2]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
)


@contextmanager
def undone(prepared: Prepared) -> Iterator[None]:
    """Restores, on exit, all state that forward, backward, an evaluation or a generation changes.
    Weights of a shared model are parts again.
    """
    model = prepared.model
    stepper = prepared.stepper
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    if stepper.loss_scale:
        scale = (stepper.loss_scale.scale, stepper.loss_scale.quiet)
    else:
        scale = None
    with preserve_random_state(), preserve_modes(model):
        try:
            yield
        finally:
            reshard_units(model)
            stepper.accumulator.zero()
            model.zero_grad(set_to_none=True)
            if stepper.loss_scale and scale:
                stepper.loss_scale.scale, stepper.loss_scale.quiet = scale
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            if prepared.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(prepared.device)


@contextmanager
def _update_undone(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """An update in this block begins without states, at learning rate 0; the optimizer's states and
    settings are restored on exit.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    # a trainer that trains once more, or was given an optimizer, has states already
    states = optimizer.state
    optimizer.state = defaultdict(dict)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        optimizer.state = states
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)


def rehearsed_step(subject: Subject) -> Iterator[Finding]:
    """Runs forward, backward and update on the longest rows, and checks the gradients before they
    are freed.
    """
    prepared = subject.prepared
    stepper = prepared.stepper
    batch = subject.batch_of(subject.longest_rows)
    what = f"a training step on {batch}"
    with undone(prepared):
        prepared.model.train()
        try:
            with subject.watched(LONGEST):
                loss = float(stepper.accumulate([batch]))
                norm = stepper.norm()
        except STEP_ERRORS as error:
            yield _failed("PF012", what, error)
            return
        if not math.isfinite(loss) or (not math.isfinite(norm) and stepper.loss_scale is None):
            yield _not_finite(subject, "the gradient" if math.isfinite(loss) else "the loss")
            return
        yield from subject.violations(LONGEST)
        if batch.weight:
            yield from without_gradient(subject)
            yield from with_gradient_but_frozen(subject)
        if not math.isfinite(norm):  # an fp16 overflow: the run's own step skips the update too
            return
        if (own := find_custom_update(stepper.optimizer)) is not None:
            yield _not_rehearsed(own)
            return
        try:
            with _update_undone(stepper.optimizer):
                stepper.optimizer.step()
        except STEP_ERRORS as error:
            yield _failed("PF012", f"the update after {what}", error)


def rehearsed_evaluation(subject: Subject) -> Iterator[Finding]:
    """Runs one evaluation pass on the longest evaluation rows."""
    prepared = subject.prepared
    result = None
    with _tried(subject, "PF016", "an evaluation of the longest rows", EVALUATION) as found:
        result = subject.task.rehearse_evaluation(
            prepared.model, prepared.device, dtype=prepared.resolved.precision.loss
        )
    yield from found
    if result is not None and not math.isfinite(result.loss):
        yield Finding(
            code="PF016",
            severity=Severity.ERROR,
            place=Place(symbol="data.eval"),
            message=f"the evaluation loss before training is {result.loss}",
            fix=(
                "another precision.preset: fp16 overflows at 65504, where bf16 and fp32 do not"
                if prepared.resolved.precision.compute == "fp16"
                else "another base, or another data.eval: nothing was trained yet"
            ),
        )


def rehearsed_samples(subject: Subject) -> Iterator[Finding]:
    """Generates one small sample in the precision for samples."""
    prepared = subject.prepared
    if not subject.task.samples or not subject.plan.sample_every:
        return
    together = prepared.stepper.world if prepared.stepper.sharding is not None else ALONE
    with _tried(subject, "PF017", "a small sample", GENERATION, "generate") as found:
        subject.task.sample(prepared.model, prepared.device, shortened=True, world=together)
    for one in found:
        yield (
            replace(one, fix=f"run.sample_every: 0 trains without samples; {one.fix}")
            if one.code == "PF017"
            else one
        )


@contextmanager
def _tried(
    subject: Subject, code: str, what: str, watched: str, role: str = "compute"
) -> Iterator[list[Finding]]:
    """Undoes what runs in this block; gives its violations, or the finding about its failure."""
    found: list[Finding] = []
    with undone(subject.prepared):
        try:
            with subject.watched(watched, role):
                yield found
        except STEP_ERRORS as error:
            found.append(_failed(code, what, error))
    found += subject.violations(watched)


def without_gradient(subject: Subject) -> Iterator[Finding]:
    """PF014: trained tensors that get no gradient, or only zeros."""
    model = subject.prepared.model
    gradient = subject.prepared.stepper.accumulator.gradient
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    given = {name: g for name, p in trained.items() if (g := gradient(p)) is not None}
    useful = _not_zero(given, subject)
    filled = _not_zero(
        {
            name: local_part(p).detach()
            for name, p in trained.items()
            if ".lora_" in name or ".lokr_" in name
        },
        subject,
    )
    lost = [
        name
        for name in trained
        if name not in useful
        and not _rightly_zero(name, trained, filled, subject.prepared.manifest.unused)
    ]
    if not lost:
        return
    none = [name for name in lost if name not in given]
    shown = ", ".join(lost[:_SHOWN]) + (", ..." if len(lost) > _SHOWN else "")
    yield Finding(
        code="PF014",
        severity=Severity.WARNING if useful else Severity.ERROR,
        place=Place(symbol=lost[0]),
        message=f"{len(lost)} of {len(trained)} trained tensors get no usable gradient: {shown}",
        observed=f"{len(none)} are not reached by backward, {len(lost) - len(none)} get zeros only",
        cause=(
            "the loss does not depend on them: a module that this forward does not use, a detach,"
            " or activations that underflow"
        ),
        fix=(
            "leave them out of adapter.targets and adapter.modules_to_save, or find what cuts them"
            " off: isotype doctor trace"
        ),
    )


def _not_zero(tensors: dict[str, Tensor], subject: Subject) -> set[str]:
    """The names of tensors with an element that is not zero, in any of the processes that share a
    model.
    """
    stepper = subject.prepared.stepper
    some = torch.stack([t.any() for t in tensors.values()]).tolist() if tensors else []
    if stepper.sharding is not None and some:
        some = stepper.world.sum([float(any_element) for any_element in some])
    return {name for name, any_element in zip(tensors, some) if any_element}


def _rightly_zero(
    name: str, trained: dict[str, nn.Parameter], filled: set[str], unused: Sequence[str]
) -> bool:
    """Whether a zero gradient is correct. LoRA begins with B = 0, so A's gradient is zero at step
    1, and LoKr with one factor 0; an expert may get no token.

    filled  the adapters' matrices that are not zero
    unused  layers whose result the model drops
    """
    if ".experts." in name or any(f".{layer}." in f".{name}" for layer in unused):
        return True
    if ".lokr_" in name:
        others = [
            one
            for one in trained
            if one != name and one.startswith(f"{name.partition('.lokr_')[0]}.lokr_")
        ]
        return any(one not in filled for one in others)
    for one, other in (
        ("lora_A", "lora_B"),
        ("lora_B", "lora_A"),
        ("lora_embedding_A", "lora_embedding_B"),
        ("lora_embedding_B", "lora_embedding_A"),
    ):
        partner = name.replace(f".{one}.", f".{other}.")
        if partner != name and partner in trained and partner not in filled:
            return True
    return False


def with_gradient_but_frozen(subject: Subject) -> Iterator[Finding]:
    """PF015: tensors that backward fills although no optimizer updates them."""
    stepper = subject.prepared.stepper
    updated = {id(p) for group in stepper.optimizer.param_groups for p in group["params"]}
    named = subject.prepared.model.named_parameters()
    held = {name: p.grad for name, p in named if id(p) not in updated and p.grad is not None}
    if not held:
        return
    first = next(iter(held))
    yield Finding(
        code="PF015",
        severity=Severity.ERROR,
        place=Place(symbol=first),
        message=(
            f"{pluralise(len(held), 'tensor that is not trained gets', 'tensors that are not trained get')}"
            f" a gradient, {first} first"
        ),
        observed=(
            f"{sum(g.numel() * g.element_size() for g in held.values()):,} bytes of gradients that"
            " nothing reads or clears"
        ),
        cause=(
            "requires_grad was switched on after the optimizer was built, or by the model's own"
            " code"
        ),
        fix="name them in adapter.modules_to_save to train them, else requires_grad_(False)",
    )


def _not_finite(subject: Subject, what: str) -> Finding:
    stepper = subject.prepared.stepper
    batch = subject.batch_of(subject.longest_rows)
    error = stepper.non_finite([batch], step=0, what=what)
    first, *rest = error.message.splitlines()
    return Finding(
        code="PF013",
        severity=Severity.ERROR,
        message=f"{what} is not finite on the longest rows, before anything was trained",
        observed="\n".join([first.removeprefix("step 0: "), *(line.strip() for line in rest)]),
        fix=error.fix,
    )


def _not_rehearsed(own: str) -> Finding:
    return Finding(
        code="PF012",
        severity=Severity.NOTE,
        place=Place(symbol=own),
        message=f"the update by {own} is not rehearsed",
        cause="code of your own may keep state that no rehearsal could put back",
        observed="whether it runs, and its memory, are not known",
    )


def _failed(code: str, what: str, error: Exception) -> Finding:
    text = first_line(error)
    if (missing := out_of_memory(error)) is not None:
        text = f"out of memory: {missing}"
        fix = (
            "a smaller train.batch_size with more train.accumulate gives the same result;"
            " train.gradient_checkpointing: layers"
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
        place=Place(symbol=_where(error)),
        message=f"{what} failed: {text}",
        cause=type(error).__name__,
        fix=fix,
    )


def _where(error: Exception) -> str | None:
    """The innermost line of the traceback that is neither PyTorch's nor Isotype's own (else the
    innermost), `file:line in function`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    at = next(
        (
            frame
            for frame in reversed(frames)
            if not frame.filename.startswith((*_OURS_AND_PYTORCHS, "<"))
        ),
        frames[-1],
    )
    return f"{Path(at.filename).name}:{at.lineno} in {at.name}"
