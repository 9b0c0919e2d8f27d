"""What `tell` restores after a callback, and what it refuses. `tests/entry/test_train.py` has the runs."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isotype.errors import RunError
from isotype.training.callbacks import Callback, Moment, tell


def told(folder, do, model=None):
    model = nn.Linear(4, 4) if model is None else model

    class Mine(Callback):
        def on_step(self, moment):
            do(moment)

    tell([Mine()], "step", Moment(1, 2, {}, model, folder), torch.optim.SGD(model.parameters(), 0.1))


def in_another_folder(moment):
    os.chdir(os.path.dirname(os.getcwd()))


LEFT_CHANGED = {
    "gradients off": lambda moment: torch.set_grad_enabled(False),
    "default dtype": lambda moment: torch.set_default_dtype(torch.float64),
    "default device": lambda moment: torch.set_default_device("meta"),
    "autocast": lambda moment: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "threads": lambda moment: torch.set_num_threads(torch.get_num_threads() + 1),
    "folder": in_another_folder,
}


def settings():
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"), depth,
        torch.get_num_threads(), os.getcwd(),
    )  # fmt: skip


@pytest.fixture
def settings_put_back():
    """Else a failure would change the tests after it."""
    threads = torch.get_num_threads()
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(threads)
    torch.set_autocast_enabled("cpu", False)
    while settings()[4] > 0:
        torch.autocast_decrement_nesting()


@pytest.mark.usefixtures("settings_put_back")
@pytest.mark.parametrize("what", LEFT_CHANGED)
def test_settings_of_the_process_that_a_callback_leaves_changed_are_restored(what, tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    before = settings()
    seen = []

    def change(moment):
        LEFT_CHANGED[what](moment)
        seen.append(settings())

    told(tmp_path, change)
    assert seen != [before]
    assert settings() == before


def test_a_callback_that_freezes_a_weight_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"Mine.on_step changed weight"):
        told(tmp_path, lambda moment: moment.model.weight.requires_grad_(False))


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: comparisons, and reads of a value."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
        return function(*args, **(kwargs or {}))


def test_sampled_values_are_read_in_one_transfer(tmp_path, monkeypatch):
    """With up to 32 parameters and their states a GPU would be waited for a hundred times around each callback."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    transfers, to_host = [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(self.numel()) or to_host(self))
    with Waits() as waits:
        tell([Callback()], "step", Moment(1, 2, {}, model, tmp_path), optimizer)
    # before the callback and after it; 20 parameters of 40 are sampled, AdamW has three states of each
    assert len(transfers) == 2
    assert min(transfers) > 4 * 4 * 20
    assert waits.number == 0
