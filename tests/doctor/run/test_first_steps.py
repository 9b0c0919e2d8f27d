"""The record of the first steps: `doctor run` without `--trace`."""

import subprocess

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tests.api import FIRST_STEPS, RECORD, FirstStepsRecord, collect_evidence, decide_cause
from tests.warm import interpreter


class PassOn(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def record():
    replaced = (
        (torch, "compile"),
        (nn.Module, "train"),
        (nn.Module, "_apply"),
        (torch, "from_numpy"),
    )
    before = [getattr(owner, name) for owner, name in replaced]
    RECORD.install_with_first_steps()
    yield RECORD.tensors
    RECORD.remove()
    assert not list_modes()
    assert [getattr(owner, name) for owner, name in replaced] == before


def list_modes():
    return [type(mode) for mode in _get_current_function_mode_stack()]


def make_table():
    return [torch.arange(4) / 2 for _ in range(2)]


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def explain(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return decide_cause(collect_evidence(caught.value)).render()


def test_first_step_is_recorded_and_a_later_one_advises_trace(record):
    model = nn.Linear(4, 4).bfloat16()
    text = explain(lambda: model(make_table()[1]))
    assert "because it computes floats from int64" in text
    assert "--trace" not in text
    train(nn.Linear(4, 4), FIRST_STEPS)
    text = explain(lambda: model(make_table()[1]))
    assert "`isotype doctor run --trace` names it" in text


def test_record_comes_back_for_an_evaluation_and_leaves_from_below_other_modes(record):
    model = nn.Linear(4, 4)
    with PassOn():
        train(model, FIRST_STEPS - 1)
        assert list_modes() == [FirstStepsRecord, PassOn]
        train(model, 1)
        assert list_modes() == [PassOn]
        model.eval()
        assert list_modes() == [PassOn, FirstStepsRecord]
        tensor = torch.ones(2).double()
        train(model.train(), 1)
        assert list_modes() == [PassOn]
    assert record.event_of(tensor).function == "double"


def test_record_ends_before_code_is_compiled(record):
    compiled = torch.compile(lambda x: (x * 2).half(), fullgraph=True, backend="eager")
    assert not list_modes()
    assert compiled(torch.ones(2)).dtype == torch.float16
    nn.Linear(2, 2).eval()
    assert not list_modes()
    assert not RECORD.is_complete


LIBRARY = """
import torch

@torch.compile(fullgraph=True, backend="eager")
def widen(x):
    return x.float()

narrow = torch.compile(lambda x: x.half(), backend="eager")
"""


def test_record_ends_before_code_that_a_library_compiled_runs(record):
    library = {}
    exec(compile(LIBRARY, "/lib/site-packages/library/ops.py", "exec"), library)
    assert list_modes() == [FirstStepsRecord]
    with torch.compiler.set_stance("force_eager"):
        assert library["narrow"](torch.ones(2)).dtype == torch.float16
        assert not list_modes()
        assert library["widen"](torch.ones(2)).dtype == torch.float32


def test_record_that_took_too_long_ends_at_the_next_module(record, monkeypatch):
    monkeypatch.setattr("isotype.doctor.run.first_steps.MAX_SECONDS", 0.0)
    torch.ones(2).double()
    assert not RECORD.is_complete
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert not list_modes()
    assert not nn.modules.module._global_forward_pre_hooks


FREED = """
import weakref, torch

def cast(values, example):
    freed = weakref.ref(values)
    torch.ones(2).to(example.dtype)
    del values
    return freed()

print(cast(torch.ones(8), torch.ones(1).half()))
"""


def test_record_keeps_no_tensor_alive(tmp_path):
    program = tmp_path / "freed.py"
    program.write_text(FREED)
    command = [interpreter(), "-m", "isotype.doctor", "run", str(program)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "None\n"


def test_a_call_that_jit_traces_stays_free_of_the_record(record, recwarn):
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    assert not [warning for warning in recwarn if "TracerWarning" in str(warning.category)]
