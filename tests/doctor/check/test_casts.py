"""Buffers and what no cast reaches: what the record says, and what the installed versions do on one process of a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import distributed

from isotype.doctor.check.check import check

LAUNCHED = {"output_dir": "o", "bf16": True}
SHARDED = "distributed_type: FSDP\nfsdp_config: {{fsdp_version: {}}}\n"


@pytest.mark.parametrize(
    ("files", "buffers", "exempt"),
    [
        ({"accelerate_config.yaml": SHARDED.format(1)}, "bf16", "batch norms"),
        (
            {"accelerate_config.yaml": SHARDED.format("1, fsdp_ignored_modules: 'model.norm.*'")},
            "bf16",
            "batch norms, ignored modules (model.norm.*)",
        ),
        ({"accelerate_config.yaml": SHARDED.format(2)}, "as loaded", None),
        ({"ds.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'}, "as loaded", None),
        (
            {"ds.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "data_types": {"buffer_dtype": "bf16"}}'},
            "bf16",
            None,
        ),
        (
            {"ds.json": '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}', "requirements.txt": "deepspeed==0.18.0\n"},
            "bf16",
            None,
        ),
        ({}, None, None),
    ],
)
def test_buffers_and_what_is_exempt(tmp_path: Path, files: dict[str, str], buffers: str | None, exempt: str | None):
    settings = LAUNCHED | ({"deepspeed": "ds.json"} if "ds.json" in files else {})
    for name, text in ({"training_args.json": json.dumps(settings)} | files).items():
        (tmp_path / name).write_text(text)
    assert [(r.value("buffers"), r.value("exempt")) for r in check([str(tmp_path)]).records] == [(buffers, exempt)]


@pytest.mark.parametrize(("dtype", "lists"), [("bfloat16", 1), ("float16", 2), ("float32", 0)])
def test_modules_that_a_class_keeps_in_fp32(tmp_path: Path, dtype: str, lists: int):
    (tmp_path / "training_args.json").write_text(json.dumps({"output_dir": "o", "model_init_kwargs": {"dtype": dtype}}))
    (record,) = check([str(tmp_path)]).records
    assert (record.value("exempt") or "").count("_keep_in_fp32_modules") == lists


@pytest.fixture
def alone():
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Norms(torch.nn.Module):
    """A buffer, a batch norm, a layer and one that is ignored; notes the dtypes in its forward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.ignored, self.norm = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        self.seen = {
            "table": self.table.dtype,
            "layer": self.layer(x).dtype,
            "ignored": self.ignored(x.to(self.ignored.weight.dtype)).dtype,
            "norm": self.norm.weight.dtype,
            "statistics": self.norm.running_mean.dtype,
        }
        return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("version", "table", "norm"), [(1, torch.bfloat16, torch.float32), (2, torch.float32, torch.bfloat16)])
def test_the_installed_fsdp_casts_as_recorded(alone, version, table, norm):
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision("bf16")
    model, cpu = Norms(), torch.device("cpu")
    if version == 1:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        run = FullyShardedDataParallel(
            model,
            mixed_precision=plugin.mixed_precision_policy,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            auto_wrap_policy=lambda **_: False,
            ignored_modules=[model.ignored],
            use_orig_params=True,
            device_id=cpu,
        )
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        run = fully_shard(model, mp_policy=plugin.mixed_precision_policy, mesh=mesh, ignored_params=set(model.ignored.parameters()))
    run(torch.randn(3, 4))
    wide, low = torch.float32, torch.bfloat16
    assert model.seen == {"table": table, "layer": low, "ignored": wide, "norm": norm, "statistics": wide}
