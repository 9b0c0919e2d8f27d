"""What happens to one of two processes is decided once for both: one message, one exit status, nothing left running."""

import json

import pytest

from tests.distributed.processes import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def toy(configured, tmp_path):
    configured("run", adapter={"kind": "none"})
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ([1, 4, "nan"], ("NF001 step 4: the loss is not finite", "(rank 1)")),
        ([0, 4, "full"], ("CK001 could not write ", "No space left on device")),
        ([1, 4, "raise"], ("rank 1: ValueError: a row that nobody expected",)),
    ],
    ids=lambda value: value[-1],
)
def test_what_stops_one_process_stops_both_with_one_message(toy, tmp_path, fault, said):
    status, told = run(2, toy, toy=True, fault=fault)
    assert status == 1, told
    assert all(words in told for words in said), told
    assert f"last good checkpoint: {tmp_path / 'run/checkpoints/step_2'}" in told
    assert told.count("isotype: ") == 1, told


def test_a_part_of_a_weight_that_is_not_finite_is_named_with_its_process(configured, tmp_path):
    """The forward gathers the weight: to the first process, which holds none of it, the activations overflow."""
    configured("run", parallel={"kind": "shard"}, adapter={"kind": "none"})
    status, said = run(2, tmp_path / "run.yaml", fault=[1, 3, "weight"])
    assert status == 1, said
    assert "NF001 step 3: the loss is not finite, parameter model.norm.weight is not finite (rank 1)" in said


def test_an_interrupt_of_one_process_saves_and_ends_both(toy, tmp_path):
    status, said = run(2, toy, toy=True, fault=[1, 3, "interrupt"])
    assert status == 130, said
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["steps"]) == ("interrupted", 3)
    assert (tmp_path / "run/checkpoints/step_3/DONE").is_file()


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_what_the_preflight_of_one_process_refuses_all_refuse(kind, configured, tmp_path):
    """The step that is tried next gathers shared weights: a process that has refused would not come."""
    configured("run", parallel={"kind": kind})
    status, said = run(2, tmp_path / "run.yaml", fault=[1, 0, "refuse"])
    assert status == 3, said
    assert "rank 1: refused before step 1: PF004" in said
    assert said.count("isotype: ") == 1, said
    assert not (tmp_path / "run/checkpoints").exists()
