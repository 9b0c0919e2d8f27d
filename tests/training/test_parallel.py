"""Which kind of sharing a run takes, and why; a plan for many GPUs; planned bytes against those that processes send."""

import json
import re
import socket
import subprocess

import pytest
from tests.distributed.processes import ended, environment, run
from tests.distributed.test_launchers import TORCHRUN, launched
from tests.warm import interpreter
from transformers import AutoModelForCausalLM

from isotype.config.schema import RunConfig
from isotype.distributed.world import World
from isotype.errors import UsageError
from isotype.model.adapter import attach_adapter
from isotype.precision import PRESETS
from isotype.precision.apply import cast_parameters
from isotype.training.memory import distributed_plan as exchange
from isotype.training.memory.distributed_plan import UnitBytes, unit_bytes
from isotype.training.setup import REPLICATE, SHARD, by_plan, parallel_as_configured

GIB = 1 << 30


def world(size, nodes=1):
    made = World()
    made.size, made.nodes, made.local_size = size, nodes, size // nodes
    return made


def config(kind, **train):
    return RunConfig.model_validate({"parallel": {"kind": kind}, "train": train})


@pytest.mark.parametrize(
    ("kind", "train", "where", "why"),
    [
        ("shard", {"optimizer": "adamw8bit"}, world(2), "its states have a scale every 256 elements"),
        ("shard", {"ema": 0.99}, world(2), "averages of shared weights are not offered yet"),
        ("hybrid", {}, world(4), "this run has one machine"),
        ("hybrid", {}, world(2, 2), "2 machines with 2 processes"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(kind, train, where, why):
    with pytest.raises(UsageError, match=why) as refused:
        parallel_as_configured(config(kind, **train), where)
    assert "\n" not in refused.value.message
    assert refused.value.fix


def test_auto_takes_the_whole_model_where_it_fits_and_says_why():
    def never():
        raise AssertionError("the bound is enough")

    below = by_plan(GIB, 80 * GIB, never, config=RunConfig())
    assert str(below) == "replicate (auto: a process cannot take more than 1.00 GiB of 80.00 GiB)"
    near = by_plan(70 * GIB, 80 * GIB, lambda: 60 * GIB, config=RunConfig())
    assert (near.kind, near.reason) == (REPLICATE, "auto: a process takes 60.00 GiB of 80.00 GiB")
    over = by_plan(90 * GIB, 80 * GIB, lambda: 75 * GIB, config=RunConfig())
    assert (over.kind, over.reason) == (SHARD, "auto: the whole model would take 75.00 GiB of 80.00 GiB")
    kept = by_plan(90 * GIB, 80 * GIB, lambda: 75 * GIB, config=config("auto", optimizer="adamw8bit"))
    assert kept.kind == REPLICATE
    assert "is not shared because of train.optimizer: adamw8bit" in kept.reason


def test_a_plan_for_sixteen_gpus(configured, tmp_path):
    configured("run", train={"batch_size": 8, "accumulate": 4})
    command = [interpreter(), "-m", "isotype", "plan", str(tmp_path / "run.yaml"), "--gpus", "16", "--device", "h100", "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["processes"]
    assert (made["processes"], made["machines"], made["micro_batches"], made["rows"]) == (16, 2, 1, 2)
    assert list(made["kinds"]) == ["replicate", "shard", "hybrid"]
    held = {kind: sum(one["memory"][part] for part in ("frozen", "trained", "optimizer")) for kind, one in made["kinds"].items()}
    assert held["replicate"] > held["hybrid"] > held["shard"]
    assert made["kinds"]["hybrid"]["between"] < made["kinds"]["shard"]["between"]
    assert made["auto"]["kind"] == "replicate"
    twelve = [*command[:5], "--gpus", "12", "--device", "h100"]
    refused = subprocess.run(twelve, env=environment(), capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "machines of 8 are planned for" in refused.stderr


# --- Planned bytes against those that real processes send, and the formulas' own arithmetic.


UNITS = [UnitBytes(600, 600, 150, 0, stays_gathered=False), UnitBytes(200, 0, 0, 0, stays_gathered=True)]
STEPS = {"steps": 2, "batch_size": 2, "accumulate": 4, "eval_every": None}
FULL = {"adapter": {"kind": "none"}}


def test_bytes_of_each_kind_are_those_of_the_formulas():
    fp32 = PRESETS["fp32"]
    assert exchange.replicated_exchange(UNITS, fp32, processes=4, nodes=1) == exchange.Exchange(2 * 600 * 3 // 4, 0)
    # all weights forward, those of the layer again backward, and its gradients: 800 + 600 + 600
    assert exchange.sharded_exchange(UNITS, fp32, processes=4, nodes=2, micro_batches=3) == exchange.Exchange(3 * 1500, 3 * 1500)
    within, between = 3 * 1000, 3 * 2 * 150
    assert exchange.hybrid_exchange(UNITS, fp32, processes=4, nodes=2, micro_batches=3) == exchange.Exchange(within + between, 2 * between)


def planned(workshop, config, preset, *, parts):
    """Units of the model that the run trains, in the dtypes that it has."""
    model = AutoModelForCausalLM.from_pretrained(workshop.base)
    if config.adapter.kind == "lora":
        model = attach_adapter(model, config.adapter, seed=0)
    cast_parameters(model, PRESETS[preset])
    return unit_bytes(model, parts)


def counted(said):
    found = re.search(r"step 2 sent (\d+) bytes, (\d+) of them to other machines", said)
    return int(found[1]), int(found[2])


SETTINGS = {
    "replicate, full": ("replicate", "bf16-mixed", 2, FULL),
    "replicate, lora": ("replicate", "bf16-lora", 2, {}),
    "shard, full": ("shard", "bf16-mixed", 2, FULL),
    "shard, full, bf16, three processes": ("shard", "bf16-pure", 3, FULL | {"train": STEPS | {"accumulate": 3}}),
    "shard, lora": ("shard", "bf16-lora", 4, {}),
    "shard, lora, recomputed": ("shard", "fp32", 2, {"train": STEPS | {"gradient_checkpointing": "layers"}}),
}


SLICE = ("shard, full", "shard, lora, recomputed")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [case if case in SLICE else pytest.param(case, marks=pytest.mark.full) for case in SETTINGS])
def test_planned_bytes_are_those_sent(case, configured, workshop, tmp_path):
    kind, preset, processes, sections = SETTINGS[case]
    sections = {"train": STEPS, "precision": {"preset": preset}, "run": {"sample_every": 0, "samples": []}} | sections
    loaded = configured("run", parallel={"kind": kind}, **sections)
    status, said = run(processes, tmp_path / "run.yaml", counted=True)
    assert status == 0, said
    sent, between = counted(said)
    precision, micro_batches = PRESETS[preset], loaded.config.train.accumulate // processes
    if kind == "replicate":
        made = exchange.replicated_exchange(planned(workshop, loaded.config, preset, parts=1), precision, processes=processes, nodes=1)
    else:
        units = planned(workshop, loaded.config, preset, parts=processes)
        made = exchange.sharded_exchange(units, precision, processes=processes, nodes=1, micro_batches=micro_batches)
    print(case, made.sent, sent)
    assert abs(made.sent - sent) <= 0.02 * sent
    assert made.between == between == 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planned_bytes_of_hybrid_are_those_sent(configured, workshop, tmp_path):
    loaded = configured(
        "run", parallel={"kind": "hybrid"}, train=STEPS, precision={"preset": "bf16-pure"}, run={"sample_every": 0, "samples": []}, **FULL
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    both = [launched(TORCHRUN, *where, given={"config": str(tmp_path / "run.yaml"), "counted": True}) for _ in range(2)]
    ends = [ended(process) for process in both]
    said = "".join(text for _, text in ends)
    assert [status for status, _ in ends] == [0, 0], said
    sent, between = counted(said)
    units = planned(workshop, loaded.config, "bf16-pure", parts=2)
    made = exchange.hybrid_exchange(units, PRESETS["bf16-pure"], processes=4, nodes=2, micro_batches=1)
    print(made, sent, between)
    assert abs(made.sent - sent) <= 0.02 * sent
    assert abs(made.between - 2 * between) <= 0.02 * made.between  # two processes of a machine
