"""What `call_back` restores after a callback, and what it refuses. `tests/entry/test_train.py` has the runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isotype.errors import RunError
from isotype.training.callbacks import Callback, Moment, call_back


def called(folder, do, model=None):
    model = nn.Linear(4, 4) if model is None else model

    class Mine(Callback):
        def on_step(self, moment):
            do(moment)

    call_back([Mine()], "step", Moment(1, 2, {}, model, folder), torch.optim.SGD(model.parameters(), 0.1))


LEFT_CHANGED = {
    "gradients off": lambda moment: torch.set_grad_enabled(False),
    "default dtype": lambda moment: torch.set_default_dtype(torch.float64),
}


def settings():
    return torch.is_grad_enabled(), torch.get_default_dtype()


@pytest.fixture
def settings_put_back():
    """Else a failure would change the tests after it."""
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("settings_put_back")
@pytest.mark.parametrize("what", LEFT_CHANGED)
def test_settings_of_the_process_that_a_callback_leaves_changed_are_restored(what, tmp_path):
    before = settings()
    seen = []

    def change(moment):
        LEFT_CHANGED[what](moment)
        seen.append(settings())

    called(tmp_path, change)
    assert seen != [before]
    assert settings() == before


def test_a_callback_that_freezes_a_weight_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"Mine.on_step changed weight"):
        called(tmp_path, lambda moment: moment.model.weight.requires_grad_(False))
