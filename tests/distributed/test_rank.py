"""Which process of a run this is, what a launcher's variables may not say, and what a restart by torchrun finds."""

from __future__ import annotations

import pytest

from isotype.distributed.rank import find_rank, run_to_go_on_with
from isotype.errors import UsageError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_without_a_launcher_there_is_one_process():
    assert find_rank({}).size == 1
    assert find_rank({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


def test_variables_of_torchrun_and_accelerate_give_rank_and_launcher():
    found = find_rank(TORCHRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.launcher) == (3, 4, 1, 2, "torchrun")
    assert find_rank(TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}).launcher == "accelerate"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "RANK=0 is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 is not one of WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first' is not a number"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR does not say where they meet"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, "SLURM started 8 tasks"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environ, said):
    with pytest.raises(UsageError, match=said):
        find_rank(environ)


def test_a_batch_script_of_slurm_is_one_process():
    assert find_rank({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).size == 1


def test_only_a_restart_continues_a_run(tmp_path):
    first = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = first | {"TORCHELASTIC_RESTART_COUNT": "1"}
    folder = str(tmp_path)
    assert run_to_go_on_with(folder, again) is None  # it died before the run was begun
    (tmp_path / "resolved.yaml").touch()
    assert run_to_go_on_with(folder, again) == tmp_path
    assert run_to_go_on_with(folder, first) is None
    assert run_to_go_on_with(folder, {}) is None


def test_a_folder_with_the_time_in_its_name_is_refused():
    assert run_to_go_on_with("runs/{name}", {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    with pytest.raises(UsageError, match="another name at each start"):
        run_to_go_on_with("runs/{name}", {"TORCHELASTIC_MAX_RESTARTS": "3"})
