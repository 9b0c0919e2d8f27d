"""Runs that other launchers start, and what happens to one of two processes: decided once for both,
with one message.
"""

import json
import socket
import subprocess

import pytest

from tests.distributed.processes import ended, environment, run
from tests.warm import ROOT, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def given(configured, tmp_path):
    """What the worker is given."""
    configured("run", adapter={"kind": "none"})
    return {"config": str(tmp_path / "run.yaml")}


def launched(*options, given):
    command = [
        interpreter(),
        "-m",
        "torch.distributed.run",
        *options,
        "-m",
        "tests.distributed.worker",
        json.dumps(given),
    ]
    environ = environment() | {"PYTHON_EXEC": interpreter()}  # that of torchrun's processes
    return subprocess.Popen(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def on_two_machines(processes, *, given):
    """(exit statuses, everything said) of two torchruns on this machine, with so many processes
    each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        str(processes),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    )
    both = [launched(*where, given=given) for _ in range(2)]
    (one, first), (other, second) = (ended(process) for process in both)
    return [one, other], first + second


def test_torchrun_starts_one_run_of_two_processes(given):
    status, said = ended(launched("--nproc-per-node", "2", given=given))
    assert status == 0, said
    assert "2 on one machine, started by torchrun" in said
    assert said.count("step 6/6  loss") == 1


@pytest.mark.full
def test_two_torchruns_are_two_machines(given):
    statuses, said = on_two_machines(1, given=given)
    assert statuses == [0, 0], said
    assert said.count("2 on 2 machines, started by torchrun") == 1
    assert said.count("step 6/6  loss") == 1


# --- What happens to one of two processes is decided once for both: one message, one exit status,
# nothing left running.


@pytest.fixture
def file(configured, tmp_path):
    configured("run", adapter={"kind": "none"})
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        # for a part of a weight the test below has this in `make test`
        pytest.param(
            [1, 4, "weight"],
            ("NF001 step 4: the loss is not finite", "(rank 1)"),
            marks=pytest.mark.full,
        ),
        ([0, 4, "full"], ("CK001 could not write ", "No space left on device")),
        ([1, 4, "raise"], ("rank 1: ValueError: a row that nobody expected",)),
    ],
    ids=lambda value: value[-1],
)
def test_what_stops_one_process_stops_both_with_one_message(file, tmp_path, fault, said):
    status, told = run(2, file, fault=fault)
    assert status == 1, told
    assert all(words in told for words in said), told
    assert f"last good checkpoint: {tmp_path / 'run/checkpoints/step_2'}" in told
    assert told.count("isotype: ") == 1, told


def test_a_part_of_a_weight_that_is_not_finite_is_named_with_its_process(configured, tmp_path):
    """The forward gathers the weight: to the first process, which holds none of it, the activations
    overflow.
    """
    configured("run", parallel={"kind": "shard"}, adapter={"kind": "none"})
    status, said = run(2, tmp_path / "run.yaml", fault=[1, 3, "weight"])
    assert status == 1, said
    assert (
        "NF001 step 3: the loss is not finite, parameter model.norm.weight is not finite (rank 1)"
        in said
    )


def test_an_interrupt_of_one_process_saves_and_ends_both(file, tmp_path):
    status, said = run(2, file, fault=[1, 3, "interrupt"])
    assert status == 130, said
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["steps"]) == ("interrupted", 3)
    assert (tmp_path / "run/checkpoints/step_3/DONE").is_file()


def test_what_the_preflight_of_one_process_refuses_all_refuse(configured, tmp_path):
    """The step that is tried next gathers shared weights: a process that has refused would not
    come.
    """
    configured("run", parallel={"kind": "shard"})
    status, said = run(2, tmp_path / "run.yaml", fault=[1, 0, "refuse"])
    assert status == 3, said
    assert "rank 1: refused before step 1: PF004" in said
    assert said.count("isotype: ") == 1, said
    assert not (tmp_path / "run/checkpoints").exists()
