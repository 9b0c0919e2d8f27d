"""What happens to one of two processes is decided once for both: one message, one exit status, nothing left running."""

import json

import pytest

from tests.distributed.processes import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def toy(configured, tmp_path):
    configured("run", adapter={"kind": "none"})
    return tmp_path / "run.yaml"


def test_a_loss_of_one_process_that_is_not_finite_stops_both(toy, tmp_path):
    status, said = run(2, toy, toy=True, fault=[1, 4, "nan"])
    assert status == 1, said
    assert "NF001 step 4: the loss is not finite" in said
    assert "(rank 1)" in said
    assert f"last good checkpoint: {tmp_path / 'run/checkpoints/step_2'}" in said
    assert said.count("isotype: ") == 1, said


def test_a_part_of_a_weight_that_is_not_finite_is_named_with_its_process(configured, tmp_path):
    """The forward gathers the weight: to the first process, which holds none of it, the activations overflow."""
    configured("run", parallel={"kind": "shard"}, adapter={"kind": "none"})
    status, said = run(2, tmp_path / "run.yaml", fault=[1, 3, "weight"])
    assert status == 1, said
    assert "NF001 step 3: the loss is not finite, parameter model.norm.weight is not finite (rank 1)" in said
    assert said.count("isotype: ") == 1, said


def test_a_full_disk_of_the_first_process_stops_both(toy, tmp_path):
    status, said = run(2, toy, toy=True, fault=[0, 4, "full"])
    assert status == 1, said
    assert "CK001 could not write " in said
    assert "No space left on device" in said
    assert f"last good checkpoint: {tmp_path / 'run/checkpoints/step_2'}" in said
    assert said.count("isotype: ") == 1, said


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
