"""What is compared between processes before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isotype.config.schema import RunConfig
from isotype.distributed import agree
from isotype.distributed.agree import (
    fingerprint_of_weights,
    lines_of,
    refuse_differences,
    refuse_folder_of_another_machine,
    refuse_other_precision,
)
from isotype.distributed.rank import Rank
from isotype.distributed.world import World, _take_gpu
from isotype.errors import UsageError
from isotype.precision.precision import PRESETS


class Others(World):
    """The first of several processes, of which the others say what is given."""

    def __init__(self, *others):
        self.size, self.others = 1 + len(others), others

    def gather(self, value):
        return [value, *({**value, **other} for other in self.others)]


def test_a_process_that_differs_is_named():
    refuse_differences(Others({}, {}), versions="torch 2", data="abc")
    with pytest.raises(UsageError, match=r"rank 2 \(node7\) and rank 0 .* have different data"):
        refuse_differences(Others({}, {"host": "node7", "data": "abd"}), versions="torch 2", data="abc")
    with pytest.raises(UsageError, match="different versions: torch 1 and torch 2"):
        refuse_differences(Others({"versions": "torch 1"}), versions="torch 2", data="abc")


def test_the_setting_that_differs_is_named():
    mine, its = (lines_of(RunConfig.model_validate({"train": {"seed": seed}, "parallel": {"timeout": 9 + seed}})) for seed in (0, 1))
    with pytest.raises(UsageError, match=r"different configuration: train\.seed: 1 and train\.seed: 0"):
        refuse_differences(Others({"configuration": its}), configuration=mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_another_seed_has_another_fingerprint(dtype):
    def made(seed):
        torch.manual_seed(seed)
        return nn.ParameterList([nn.Parameter((torch.rand(7, 5) * 100).to(dtype), requires_grad=False), nn.Parameter(torch.ones(()))])

    assert fingerprint_of_weights(made(0)) == fingerprint_of_weights(made(0))
    assert fingerprint_of_weights(made(0)) != fingerprint_of_weights(made(1))


def test_accelerates_precision_against_the_contract():
    contract = PRESETS["bf16-lora"]
    for said in ({}, {"ACCELERATE_MIXED_PRECISION": "no"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}):
        refuse_other_precision(contract, said)
    with pytest.raises(UsageError, match="mixed precision fp16, and this run computes in bf16"):
        refuse_other_precision(contract, {"ACCELERATE_MIXED_PRECISION": "fp16"})


def test_a_folder_that_another_machine_does_not_see(monkeypatch, tmp_path):
    monkeypatch.setattr(agree, "SEEN_WITHIN", 0.0)

    class Blind(Others):
        def gather(self, value):
            return [value, [False, "node7"]]

    with pytest.raises(UsageError, match=r"is not the same folder for rank 1 on node7 as for rank 0") as refused:
        refuse_folder_of_another_machine(Blind({}), tmp_path)
    assert "--out FOLDER" in refused.value.fix
    assert list(tmp_path.iterdir()) == []


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="4 processes on a machine with 2 GPUs") as refused:
        _take_gpu("auto", Rank(rank=1, size=4, local_rank=1, local_size=4))
    assert refused.value.fix == "start 2, or model.device: cpu"
