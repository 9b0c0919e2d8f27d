"""What an update leaves is what the next step finds; what a resumed run loads is what its file
holds; what was not watched is listed.

What changes between two looks is noticed.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from isotype import Callback
from isotype.errors import DtypeError, RunError
from isotype.report import write_report
from isotype.runs.checkpoint.store import CheckpointStore
from isotype.tasks.choose import choose_task
from isotype.training.run import train
from tests.api import Continuity, ModelChanges, is_observed


@pytest.fixture
def task(configured):
    """A run, and its task; `act(model)` runs in each evaluation after step 0's."""

    def make(act=None, **sections):
        given = {"steps": 6, "learning_rate": 1e-2, "eval_every": 2}
        loaded = configured(
            "run",
            adapter={"targets": ["q_proj"]},
            train=given | sections.pop("train", {}),
            **sections,
        )
        made, evaluations = choose_task(loaded.config), []
        evaluate = made.evaluate

        def acting(model, device, **options):
            evaluations.append(model)
            if act is not None and len(evaluations) > 1:
                act(model)
            return evaluate(model, device, **options)

        made.evaluate = acting
        return loaded, made

    return make


def trained(model, kind):
    return next(p for name, p in model.named_parameters() if p.requires_grad and kind in name)


def round_weight(model):
    trained(model, "lora_A").data.copy_(trained(model, "lora_A").bfloat16())


def round_table(model):
    table = model.get_base_model().model.rotary_emb
    table.inv_freq = table.inv_freq.bfloat16().float()


def shift_weight(model):
    trained(model, "lora_B").data += 1e-3


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (round_weight, "lora_A.default.weight was rounded to bf16"),
        (round_table, "rotary_emb.inv_freq was rounded to bf16"),
        (shift_weight, "lora_B.default.weight was changed"),
    ],
)
def test_what_an_evaluation_changes_ends_the_run_before_the_next_update(act, said, task, tmp_path):
    with pytest.raises(DtypeError, match=f"{said} between the update of step 2 and step 3"):
        train(*task(act))
    assert (
        said
        in json.loads((tmp_path / "run/precision.json").read_text())["violations"][0]["message"]
    )


class Rounds(Callback):
    def on_step(self, moment):
        round_table(moment.model)


def test_a_callback_that_rounds_a_buffer_is_named(task):
    with pytest.raises(
        RunError, match=r"CB001 step 1: Rounds.on_step changed .*rotary_emb.inv_freq"
    ):
        train(*task(), callbacks=[Rounds()])


@pytest.mark.parametrize("dtype", ["stored", pytest.param("values", marks=pytest.mark.full)])
def test_a_checkpoint_whose_states_are_bf16_is_not_resumed_as_fp32(dtype, task, tmp_path):
    loaded, made = task()
    assert train(loaded, made) == 0
    store = CheckpointStore(tmp_path / "run/checkpoints")
    step, _ = store.find_newest_intact()
    checkpoint = store.load(step)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("exp_avg"):
            narrow = tensor.bfloat16()
            checkpoint.tensors[name] = narrow if dtype == "stored" else narrow.float()
    store.save(checkpoint)
    loaded, made = task(train={"steps": 8})
    with pytest.raises(
        DtypeError,
        match="were bf16 and now fp32 between the save"
        if dtype == "stored"
        else "stored in fp32 with numbers of bf16 after the load of step 6",
    ):
        train(loaded, made, resume=tmp_path / "run")


def test_a_record_lists_what_was_not_watched_and_the_report_shows_it(task, tmp_path):
    loaded, made = task()
    assert train(loaded, made) == 0
    record = json.loads((tmp_path / "run/precision.json").read_text())
    assert record["watched"] == [
        "a step on the longest rows",
        "an evaluation batch",
        "a generation",
    ]
    said = record["not watched"]
    assert any(
        "other steps than these: " + ", ".join(map(str, record["observed_at"])) in what
        for what in said
    )
    assert any(what.startswith("evaluations, but for one batch") for what in said)
    for kind in ("parametrization", "key-value cache", "beside the step's own", "residual stream"):
        assert any(kind in what for what in said), kind
    page = write_report(tmp_path / "run").read_text()
    assert all(what.partition("(")[0].partition("'")[0] in page for what in said)


def test_tensors_beyond_a_sample_are_compared_in_turn_and_a_written_one_at_once():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(40)))
    kept = Continuity(model)
    last = model[39].weight
    found = []
    for number in range(4):
        kept.take_sample(f"update {number}")
        last.data.mul_(1.5)  # which PyTorch does not count as a write
        found += [(number, one.tensor) for one in kept.differences()]
    assert found == [(2, "39.weight")]
    kept.take_sample("update 4")
    with torch.no_grad():
        last.mul_(1.5)
    kept.compare()
    kept.take_sample("update 5")
    with torch.no_grad():
        last.mul_(1.5)
    assert [one.tensor for one in kept.differences()] == ["39.weight"]


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (256, 64), (96, 48), (48, 96), (4096, 8)])
def test_the_gradient_of_one_token_is_not_taken_for_a_rounded_state(rows, columns):
    """The gradient of one token is dy xᵀ, with bf16 values in dy and x. An expert may get one token
    only. Where x_j is 0.5, a column has bf16 values; a state that was rounded is still found.
    """
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(columns).bfloat16().float()
    x[0] = 0.5
    dy = torch.randn(rows).bfloat16().float()
    layer.weight.grad = torch.zeros(rows, columns)
    optimizer.step()
    kept = Continuity(layer, optimizer, kinds=("state",))
    kept.take_sample("update 0")
    layer.weight.grad = dy[:, None] * x
    optimizer.step()
    state = optimizer.state[layer.weight]["momentum_buffer"]
    assert torch.equal(state, dy[:, None] * x)
    assert kept.find_narrow_updates() == []
    state.copy_(state.bfloat16())
    assert [one.narrower for one in kept.find_narrow_updates()] == ["bf16"]


def test_a_large_model_is_compared_in_parts():
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(300))
    changes = ModelChanges(model)
    model[-1].weight.data = model[-1].weight.data.half()
    assert sum(changes.has_changed() for _ in range(3)) == 1


def test_observed_steps_depend_on_the_seed_only():
    def drawn(seed):
        return [s for s in range(1, 401) if is_observed(s, every=100, seed=seed, total=400)]

    assert {1, 100, 200, 300, 400} <= set(drawn(0))
    assert 6 <= len(drawn(0)) <= 9
    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in range(8)}) > 4


def test_a_short_run_has_several_observed_steps():
    assert sum(is_observed(s, every=100, seed=0, total=6) for s in range(1, 7)) > 1
