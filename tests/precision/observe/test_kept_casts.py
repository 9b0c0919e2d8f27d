"""A cast to a dtype that no role has: a violation where its result is read, a line where it is kept, nothing where it is freed unread."""

import inspect

import pytest
import torch

from isotype.precision import PRESETS
from tests.precision.adversarial import kept_casts
from tests.precision.adversarial.program import PROGRAMS, Program
from tests.precision.adversarial.run import observed, set_up, watched_step
from tests.precision.adversarial.tiny import MLP, tiny

PRESET = pytest.mark.parametrize("preset", ["fp32", "bf16-mixed"])


class Logs(MLP):
    def forward(self, x):
        y = super().forward(x)
        self.log = self.look(y.detach())
        return y


class OfItsOutput(Logs):
    def look(self, y):
        return y.half()


class MovedToACpu(Logs):
    def look(self, y):
        return [y.to(torch.float16).cpu().clone()[0]]


class OfAHistogram(Logs):
    def look(self, y):
        return torch.histc(y.float(), 20).half()


class InSlots(Logs):
    def look(self, y):
        slots = torch.zeros(2, *y.shape, dtype=torch.float16)
        slots[0], slots[1] = y, y.half()
        return slots


class AsANumber(Logs):
    def look(self, y):
        return y.float().mean().half().item()


@PRESET
@pytest.mark.parametrize("logs", [OfItsOutput, MovedToACpu, OfAHistogram, InSlots, AsANumber])
def test_a_log_kept_in_half_is_no_violation_and_is_said(logs, preset):
    looks = observed(Program(logs.__name__, lambda: tiny(mlp=logs), preset=preset, steps=3))
    assert len(looks) > 1
    for seen in looks:
        assert [finding.message for finding in seen.violations] == []
        assert "test_kept_casts.py" in seen.unobserved["values in fp16 in layers.1.mlp"]


@PRESET
def test_losses_kept_in_half_are_no_violation(preset):
    run, kept = set_up(tiny(), PRESETS[preset]), []
    plain = run.stepper.loss_sum

    def loss_sum(*given):
        loss = plain(*given)
        first = loss[0] if isinstance(loss, tuple) else loss
        kept.append(first.detach().half())
        return loss

    run.stepper.loss_sum = loss_sum
    for step in (1, 2):
        seen = watched_step(run, step)
        assert [finding.message for finding in seen.violations] == []
        assert list(seen.unobserved) == ["values in fp16 in loss"]
    assert {loss.dtype for loss in kept} == {torch.float16}


class Dropped(Logs):
    def look(self, y):
        y.half()


@PRESET
def test_what_is_freed_unread_is_nothing(preset):
    (seen,) = observed(Program("Dropped", lambda: tiny(mlp=Dropped), preset=preset))
    assert not seen.violations
    assert not seen.unobserved


@PRESET
@pytest.mark.parametrize("kept", kept_casts.KEPT)
def test_what_is_read_is_a_violation_with_the_module_and_line_of_its_cast(kept, preset):
    violations = [finding for look in observed(PROGRAMS[f"{kept.__name__}_in_{preset}"]) for finding in look.violations]
    lines, first = inspect.getsourcelines(kept_casts._SavesHalf if kept is kept_casts.SavedForBackward else kept)
    casts = {first + number for number, line in enumerate(lines) if ".half()" in line}
    assert any(
        finding.message.startswith("_to_copy in fp16, declared") and "layers.1.mlp" in finding.message and finding.place.line in casts
        for finding in violations
    )
