"""Which kind of sharing a run takes, and why; a plan for many GPUs; planned bytes against those
that processes send.
"""

import json

import pytest
from tests.api import REPLICATE, SHARD, choose_by_plan, configured_parallel
from tests.commands import ask

from isotype.config.schema import RunConfig
from isotype.distributed.world import World
from isotype.errors import UsageError

GIB = 1 << 30


def world(size, nodes=1):
    made = World()
    made.size, made.nodes, made.local_size = size, nodes, size // nodes
    return made


def config(kind, **train):
    return RunConfig.model_validate({"parallel": {"kind": kind}, "train": train})


def test_what_cannot_be_shared_is_refused_in_one_line(subtests):
    of_optimizers = {"adamw8bit": "its states have a scale", "lion": "bitsandbytes'", "muon": "it makes", "adafactor": "its states",
                     "prodigy": "its rate"}  # fmt: skip
    for kind, train, where, why in (
        *(
            ("shard", {"optimizer": name}, world(2), f"train.optimizer: {name}: {why}")
            for name, why in of_optimizers.items()
        ),
        ("shard", {"ema": 0.99}, world(2), "averages of shared weights are not offered yet"),
        ("hybrid", {}, world(4), "this run has one machine"),
        ("hybrid", {}, world(2, 2), "2 machines with 2 processes"),
    ):
        with subtests.test(why):
            with pytest.raises(UsageError, match=why) as refused:
                configured_parallel(config(kind, **train), where)
            assert "\n" not in refused.value.message
            assert refused.value.fix
    assert (
        configured_parallel(
            config("shard", optimizer="schedule-free", schedule="constant"), world(2)
        ).kind
        == SHARD
    )


def test_auto_takes_the_whole_model_where_it_fits_and_says_why():
    def never():
        raise AssertionError("the bound is enough")

    below = choose_by_plan(GIB, 80 * GIB, never, config=RunConfig())
    assert str(below) == "replicate (auto: a process cannot take more than 1.00 GiB of 80.00 GiB)"
    near = choose_by_plan(70 * GIB, 80 * GIB, lambda: 60 * GIB, config=RunConfig())
    assert (near.kind, near.reason) == (REPLICATE, "auto: a process takes 60.00 GiB of 80.00 GiB")
    over = choose_by_plan(90 * GIB, 80 * GIB, lambda: 75 * GIB, config=RunConfig())
    assert (over.kind, over.reason) == (
        SHARD,
        "auto: the whole model would take 75.00 GiB of 80.00 GiB",
    )
    kept = choose_by_plan(
        90 * GIB, 80 * GIB, lambda: 75 * GIB, config=config("auto", optimizer="adamw8bit")
    )
    assert kept.kind == REPLICATE
    assert "is not shared because of train.optimizer: adamw8bit" in kept.reason


def test_a_plan_for_sixteen_gpus(configured, tmp_path):
    configured("run", train={"batch_size": 8, "accumulate": 4})
    made = json.loads(
        ask("plan", tmp_path / "run.yaml", "--gpus", 16, "--device", "h100", "--json")
    )["processes"]
    assert (made["processes"], made["machines"], made["micro_batches"], made["rows"]) == (
        16,
        2,
        1,
        2,
    )
    assert list(made["kinds"]) == ["replicate", "shard", "hybrid"]
    held = {
        kind: sum(one["memory"][part] for part in ("frozen", "trained", "optimizer"))
        for kind, one in made["kinds"].items()
    }
    assert held["replicate"] > held["hybrid"] > held["shard"]
    assert made["auto"]["kind"] == "replicate"
    with pytest.raises(UsageError, match="machines of 8 are planned for"):
        ask("plan", tmp_path / "run.yaml", "--gpus", 12, "--device", "h100")
