"""Which process of a run this is, what is compared before the first step, and which rows a process
computes.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isotype.cli.app import main
from isotype.config.schema import RunConfig, TrainSection
from isotype.distributed.world import World, _select_gpu
from isotype.errors import UsageError
from tests.api import (
    MODEL_SETTINGS,
    Batching,
    Rank,
    agree,
    configuration_lines,
    find_rank,
    fingerprint_of_weights,
    refuse_differences,
    refuse_folder_of_another_machine,
    setting_lines,
    versions,
)


class InThreads(World):
    """One of several processes, which are threads here."""

    def __init__(self, rank, values, barrier):
        self.rank, self.size = rank, len(values)
        self.values, self.barrier = values, barrier

    def gather(self, value):
        self.barrier.wait()  # all have read the values before
        self.values[self.rank] = value
        self.barrier.wait()
        return json.loads(json.dumps(self.values))

    def run_on_first(self, work, **options):
        return self.gather(work() if self.is_first else None)[0]


def compare(*facts):
    """Compares the facts of so many processes; all must raise the same error."""
    barrier, values = Barrier(len(facts)), [None] * len(facts)

    def refuse(rank):
        try:
            refuse_differences(InThreads(rank, values, barrier), **facts[rank])
        except UsageError as error:
            return error
        return None

    with ThreadPoolExecutor(len(facts)) as threads:
        errors = list(threads.map(refuse, range(len(facts))))
    assert len(set(map(str, errors))) == 1
    if errors[0] is not None:
        raise errors[0]


def test_a_process_that_differs_is_named():
    ours = {"versions": "torch 2", "data": "abc"}
    compare(ours, ours, ours)
    with pytest.raises(UsageError, match=r"rank 2 \(.*\) and rank 0 .* have different data"):
        compare(ours, ours, ours | {"data": "abd"})
    with pytest.raises(UsageError, match="different versions: torch 1 and torch 2"):
        compare(ours, ours | {"versions": "torch 1"})


def test_the_setting_that_differs_is_named():
    mine, its = (
        configuration_lines(
            RunConfig.model_validate({"train": {"seed": seed}, "parallel": {"timeout": 9 + seed}})
        )
        for seed in (0, 1)
    )
    with pytest.raises(
        UsageError, match=r"different configuration: train\.seed: 1 and train\.seed: 0"
    ):
        compare({"configuration": mine}, {"configuration": its})


def test_the_settings_of_the_model_and_every_library_that_decides_are_compared(monkeypatch):
    theirs, ours = (setting_lines({"rms_norm_eps": eps, "layers": 2}) for eps in (1e-5, 1e-6))
    message = r"different settings of the model: rms_norm_eps: 1e-05 and rms_norm_eps: 1e-06"
    with pytest.raises(UsageError, match=message):
        compare({MODEL_SETTINGS: ours}, {MODEL_SETTINGS: theirs})
    installed = dict.fromkeys(agree.COMPARED_PACKAGES, "1")
    monkeypatch.setattr(agree.metadata, "version", installed.__getitem__)
    ours = versions()
    for package in ("tokenizers", "diffusers", "accelerate", "safetensors"):
        installed[package] = "0"
        with pytest.raises(UsageError, match=f"different versions: {package} 0 and {package} 1"):
            compare({"versions": ours}, {"versions": versions()})
        installed[package] = "1"


def test_another_seed_has_another_fingerprint():
    def made(seed):
        torch.manual_seed(seed)
        drawn = ((torch.rand(7, 5) * 100).to(dtype) for dtype in (torch.bfloat16, torch.uint8))
        return nn.ParameterList(
            [*(nn.Parameter(t, requires_grad=False) for t in drawn), nn.Parameter(torch.ones(()))]
        )

    assert fingerprint_of_weights(made(0)) == fingerprint_of_weights(made(0))
    assert fingerprint_of_weights(made(0)) != fingerprint_of_weights(made(1))


def test_a_folder_that_another_machine_does_not_see(monkeypatch, tmp_path):
    monkeypatch.setattr(agree, "SHARED_FOLDER_TIMEOUT", 0.0)

    class Blind(World):
        size = 2

        def gather(self, value):
            return [value, [False, "node7"]]

    with pytest.raises(
        UsageError, match=r"is not the same folder for rank 1 on node7 as for rank 0"
    ) as refused:
        refuse_folder_of_another_machine(Blind(), tmp_path)
    assert "--out FOLDER" in refused.value.fix
    assert list(tmp_path.iterdir()) == []


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="4 processes on a machine with 2 GPUs") as refused:
        _select_gpu("auto", Rank(rank=1, size=4, local_rank=1, local_size=4))
    assert refused.value.fix == "start 2, or model.device: cpu"


# --- Which process of a run this is, and what a launcher's variables may not say.


TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


SRUN = {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "PMI_SIZE": "8", "PMI_RANK": "6",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MEETING_PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SRUN, (6, 8, 2, 4, "srun")),
        # all tasks of a machine were on GPU 0
        (SRUN | {"RANK": "6", "WORLD_SIZE": "8"}, (6, 8, 2, 4, "torchrun")),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, (6, 8, 2, 3, "srun")),
        (MPIRUN, (3, 4, 1, 2, "mpirun")),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2, 1, 2, "mpirun")),
        (SRUN | TORCHRUN, (3, 4, 1, 2, "torchrun")),
    ],
)  # fmt: skip
def test_processes_of_srun_and_mpirun_are_one_run(environ, expected):
    found = find_rank(environ | MEETING_PLACE)
    fields = (found.rank, found.size, found.local_rank, found.local_size, found.launcher)
    assert fields == expected


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 1),
        (TORCHRUN | {"LOCAL_RANK": "0"}, 1),
        (TORCHRUN, 0),
        (SRUN, 0),
        (MPIRUN, 0),
        (TORCHRUN | {"ISOTYPE_LAUNCHED_BY": "isotype"}, 1),
    ],
)
def test_a_refusal_is_printed_once_a_machine(environ, count, monkeypatch, capsys):
    monkeypatch.setattr("isotype.cli.train.time.sleep", lambda seconds: None)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["isotype", "train", "no_such_file.yaml"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("isotype: ") == count


def test_without_a_launcher_there_is_one_process():
    assert find_rank({}).size == 1
    assert find_rank({"RANK": "0", "WORLD_SIZE": "1"}).size == 1
    assert find_rank({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).size == 1  # its batch script


def test_variables_of_torchrun_and_accelerate_give_rank_and_launcher():
    found = find_rank(TORCHRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.launcher) == (
        3,
        4,
        1,
        2,
        "torchrun",
    )
    assert find_rank(TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}).launcher == "accelerate"


def test_variables_that_contradict_each_other_are_refused(subtests):
    for environ, said in (
        ({"RANK": "0"}, "WORLD_SIZE is not set, and others of a launcher's variables are"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 is not one of WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first' is not a number"),
        (
            {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"},
            "MASTER_ADDR does not say where they meet",
        ),
        (SRUN, "srun started 8 processes, and MASTER_ADDR does not say where they meet"),
        (SRUN | {"MASTER_ADDR": "node0"}, "srun started 8 processes, and MASTER_PORT"),
        (MPIRUN, "mpirun started 4 processes, and MASTER_ADDR"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpirun started 2 processes"),
    ):
        with subtests.test(said), pytest.raises(UsageError, match=said):
            find_rank(environ)


# --- The rows of a step are the same on any number of processes; rows of several shapes take a
# micro-batch for each shape.


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))
def test_every_row_is_computed_once(batch_size, accumulate, size):
    train = TrainSection(batch_size=batch_size, accumulate=accumulate)
    if batch_size * accumulate % size:
        with pytest.raises(UsageError):
            Batching.plan_step(train, size=size)
        return
    shares = [Batching.plan_step(train, rank=rank, size=size) for rank in range(size)]
    assert [n for share in shares for n in share.local_micro_batches] == list(
        range(shares[0].micro_batches)
    )
    assert all(
        share.micro_batch_size * share.micro_batches == batch_size * accumulate
        and share.micro_batch_size <= batch_size
        for share in shares
    )
    if accumulate % size == 0:  # the micro-batches are those of one process
        assert (shares[0].micro_batch_size, shares[0].micro_batches) == (batch_size, accumulate)


def test_the_nearest_numbers_are_named():
    with pytest.raises(
        UsageError, match=r"5 processes cannot share 12 rows.*\n.*4 or 6 processes can"
    ):
        Batching.plan_step(TrainSection(batch_size=4, accumulate=3), size=5)
    with pytest.raises(UsageError, match="4 processes can"):
        Batching.plan_step(TrainSection(batch_size=4), size=8)
    with pytest.raises(UsageError, match="1 process can"):
        Batching.plan_step(TrainSection(batch_size=1), size=2)
