"""The lines that a run prints at its end."""

from __future__ import annotations

import pytest

from isotype.training.finish import say_result


class Console:
    def __init__(self):
        self.lines: list[str] = []

    def say(self, line: str = "") -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("loss", "step", "said"),
    [
        (5.5, 7, "done      9 steps in 0:03, best evaluation loss 5.5000 at step 7"),
        (5.9, 0, "done      9 steps in 0:03, no evaluation lower than 5.9000, that before step 1"),
        (None, None, "done      9 steps in 0:03"),
    ],
)
def test_the_untrained_models_loss_is_not_called_the_best(loss, step, said):
    console = Console()
    check = {"rows": 1, "trained_loss": 5.8, "reloaded_loss": 5.8, "tensors": 28}
    result = {"adapter": "a", "steps": 9, "trained_seconds": 3.0, "best_eval_loss": loss, "best_step": step, "check": check}
    say_result(result, console)
    assert console.lines[1] == said
