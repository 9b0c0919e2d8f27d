"""`train.objective: dpo` and its like, by what docs/preferences.md promises."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isotype.config.load import load
from isotype.config.schema import PreferenceSection, RunConfig, TrainSection
from isotype.data.rows import IGNORE_INDEX, Row
from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.optimize import optimize
from isotype.tasks.choose import choose_task, train
from isotype.tasks.language.batches import collate
from tests.api import (
    PairLogProbs,
    Preference,
    answer_log_probs,
    pair_losses,
    plan_run,
    plots,
    read_run,
)
from tests.distributed.processes import GUARD, environment
from tests.models import tiny
from tests.results import metrics, same_result
from tests.training.interrupted import cut_back


def taste(count: int, seed: int = 0) -> list[dict]:
    """Answers of one length: the chosen one says `is`, the rejected one `plus`; the numbers around
    it tell nothing.
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b, c, d, e, f = (draw.randrange(4) for _ in range(6))
        rows.append(
            {
                "prompt": f"How much is {a} plus {b}?",
                "chosen": f"{c} is {d}.",
                "rejected": f"{e} plus {f}.",
            }
        )
    return rows


@pytest.fixture
def paired(configured, tmp_path):
    """`paired(objective, **sections)`: a loaded configuration on pairs."""

    def make(objective: str = "dpo", *, rows=None, folder: str = "run", **sections):
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in (rows or taste(60))))
        steps = {
            "steps": 6,
            "batch_size": 4,
            "learning_rate": 5e-3,
            "eval_every": 3,
            "objective": objective,
        }
        given = {"data": {"train": str(file), "eval_split": 0.2, "max_length": 64}, "train": steps}
        for name, values in sections.items():
            given[name] = given.get(name, {}) | values
        return configured(folder, **given)

    return make


def test_a_taste_is_learnt_and_the_first_step_is_exact(paired, tmp_path, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = paired(train={"steps": 24, "eval_every": 24}, run={"report": True})
    assert train(loaded) == 0
    rows = metrics(tmp_path / "run")
    first = next(row for row in rows if row["step"] == 1)
    assert first["loss"] == float(torch.tensor(math.log(2.0)))
    assert first["pairs"] == 4
    assert first["rewards/margins"] == 0.0
    assert rows[-1]["eval_rewards/accuracies"] > 0.9
    assert rows[-1]["eval_rewards/margins"] == pytest.approx(
        rows[-1]["eval_rewards/chosen"] - rows[-1]["eval_rewards/rejected"], abs=1e-5
    )
    assert rows[-1]["eval_pairs"] == 12
    said = capsys.readouterr().out
    assert said.partition("chosen    ")[2].partition("rejected  ")[2].startswith(">>> ")
    assert "48 training pairs, 12 evaluation pairs" in said
    assert "24 steps of 4 x 1 pairs" in said
    assert {"Margin", "Accuracy"} <= {plot.title for plot in plots(read_run(tmp_path / "run"))}
    base = AutoModelForCausalLM.from_pretrained(loaded.config.model.name)
    PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")


def resumed(folder, *changes: str) -> int:
    return train(load(folder / "resolved.yaml", changes, {}, resolved=True), resume=folder)


@pytest.mark.parametrize(
    "objective",
    [pytest.param(name, marks=pytest.mark.full) for name in ("dpo", "kto", "reward")],
)
def test_a_killed_run_goes_on_bit_for_bit(paired, tmp_path, objective):
    rows = labelled(taste(30)) if objective == "kto" else None
    every_second = {"save_every": 2, "sample_every": 0, "samples": []}
    assert train(paired(objective, rows=rows, folder="whole", run=every_second)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut_back(tmp_path / "cut", 6)
    assert resumed(tmp_path / "cut") == 0
    same_result(tmp_path / "whole", tmp_path / "cut")
    if objective == "reward":
        return
    kept = tmp_path / "cut" / "reference.safetensors"
    before = load_file(kept)
    kept.unlink()  # made again from the model as the run starts, although a checkpoint is restored
    assert resumed(tmp_path / "cut", "train.steps=7") == 0
    again = load_file(kept)
    assert all(torch.equal(again[name], before[name]) for name in ("training", "evaluation"))
    save_file(again, kept, metadata={"model": "0"})
    with pytest.raises(UsageError, match="the reference of another model"):
        resumed(tmp_path / "cut", "train.steps=8")


ASK, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "a?"), ("assistant", "b"), ("assistant", "c"))
)


def test_conversations_share_the_turns_they_begin_with():
    from tests.api import Record, check_example

    def read(**row):
        return check_example(Record("x", 1, row), "preference", needs_answer=True)

    for row in (
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "a?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "a?", "chosen": [GOOD], "rejected": [BAD]},
    ):
        found = read(**row)
        assert found.messages == (ASK, GOOD)
        assert found.rejected.messages == (ASK, BAD)
        assert found.learn_from == found.rejected.learn_from == 1
    texts = read(prompt="a?", chosen=" yes", rejected=" yesterday")
    assert (texts.prompt, texts.completion, texts.rejected.completion) == (
        "a?",
        " yes",
        " yesterday",
    )


def test_several_answers_with_scores_become_the_pair_of_the_best_and_the_worst():
    from tests.api import Record, check_example, detect_format

    def read(columns=None, **row):
        record = Record("x", 1, {"prompt": "a?", **row})
        name, why = detect_format(record, "auto", columns, objective_format="preference")
        assert name == "preference"
        assert all(key in why for key in row if key != "prompt")
        found = check_example(record, "preference", needs_answer=True, columns=columns)
        return found.completion or found.messages[-1][
            "content"
        ], found.rejected.completion or found.rejected.messages[-1]["content"]

    assert read(completions=["a", "b", "c", "d"], scores=[1, 3.5, 3.5, 1]) == ("b", "a")
    assert read(responses='["a", "b"]', rewards="[0.25, -1]") == ("a", "b")
    assert read(generations=["a", "b"], ratings=[1, 10**400]) == ("b", "a")
    assert read({"completions": "texts", "scores": "marks"}, texts=["a", "b"], marks=[1, 2]) == (
        "b",
        "a",
    )
    assert read(prompt=[ASK], completions=[[BAD], [GOOD]], scores=[1, 2]) == (
        GOOD["content"],
        BAD["content"],
    )


PAIR = {"prompt": "a?", "chosen": "b", "rejected": "c"}
SCORED = {"prompt": "a?", "completions": ["b", "c"], "scores": [1, 2]}
LABELLED = {"prompt": "a?", "completion": "b", "label": True}


REFUSED = (
    (
        "dpo",
        [PAIR, PAIR | {"rejected": "b"}],
        {},
        "pairs.jsonl:2: chosen and rejected are the same",
        "on_bad_row: skip",
    ),
    (
        "dpo",
        [PAIR, {"prompt": "a?", "chosen": "b"}],
        {},
        "pairs.jsonl:2: no key 'rejected'",
        "on_bad_row: skip",
    ),
    ("dpo", [PAIR | {"rejected": " "}], {}, "no training row is left: the answer is empty", ""),
    (
        "dpo",
        [{"chosen": [ASK, GOOD], "rejected": [ASK]}],
        {},
        "one of chosen and rejected is the beginning of the other",
        "",
    ),
    (
        "dpo",
        [SCORED, SCORED | {"scores": [1]}],
        {},
        "pairs.jsonl:2: completions and scores must be lists of the same length",
        "skip",
    ),
    (
        "dpo",
        [SCORED, SCORED | {"scores": [1, None]}],
        {},
        "pairs.jsonl:2: scores must be numbers, got [1, null]",
        "skip",
    ),
    (
        "dpo",
        [SCORED, SCORED | {"scores": [2, 2]}],
        {},
        "pairs.jsonl:2: all scores are 2: no answer is better than another",
        "skip",
    ),
    (
        "kto",
        [SCORED],
        {},
        "train.objective learns from answers with a label",
        "train.objective=dpo learns from pairs",
    ),
    (
        "dpo",
        [{"prompt": "a?", "completion": "b"}],
        {},
        "train.objective learns from pairs",
        "train.objective: sft",
    ),
    ("sft", [PAIR], {}, "preference pairs", "train.objective=dpo"),
    (
        "dpo",
        [PAIR],
        {"data": {"packing": True}},
        "cannot run with data.packing: true",
        "leave out data.packing",
    ),
    (
        "dpo",
        [PAIR],
        {"data": {"stream": True}},
        "cannot run with data.stream: true",
        "leave out data.stream",
    ),
    (
        "dpo",
        [PAIR],
        {"adapter": {"dropout": 0.1}},
        "cannot run with adapter.dropout: 0.1",
        "leave out adapter.dropout",
    ),
    (
        "kto",
        [LABELLED, LABELLED | {"prompt": "c?"}],
        {},
        "every training answer is labelled true",
        "rows of the other label",
    ),
    (
        "kto",
        [LABELLED, LABELLED | {"label": "perhaps"}],
        {},
        'pairs.jsonl:2: label must be true or false, got "perhaps"',
        "on_bad_row",
    ),
    (
        "kto",
        [LABELLED, LABELLED | {"completion": "d", "label": False}],
        {},
        "every training row has the same prompt",
        "two prompts",
    ),
    (
        "kto",
        [PAIR],
        {},
        "train.objective learns from answers with a label",
        "train.objective=dpo learns from pairs",
    ),
    (
        "dpo",
        [LABELLED],
        {},
        "train.objective learns from pairs of answers",
        "train.objective=kto learns from labels",
    ),
    (
        "sft",
        [LABELLED, LABELLED | {"label": False}],
        {},
        "marks an unwanted answer",
        "train.objective=kto",
    ),
)


def test_bad_input_is_refused_in_one_line(paired, subtests):
    for objective, rows, sections, said, fix in REFUSED:
        with subtests.test(said):
            with pytest.raises(UsageError) as refused:
                train(paired(objective, rows=rows, **sections))
            assert said in refused.value.message
            assert fix in (refused.value.fix or "")


def test_a_model_with_dropout_is_refused_beside_a_reference():
    made, by_hand = torch.nn.Dropout(0.1), torch.nn.Linear(1, 1)
    by_hand.dropout = 0.1
    for layer in (made, by_hand):
        model = torch.nn.Sequential(layer)
        with pytest.raises(UsageError, match=r"a model with dropout \(0: 0.1\)"):
            Preference(RunConfig(train=TrainSection(objective="dpo"))).check_model(model)
        Preference(RunConfig(train=TrainSection(objective="simpo"))).check_model(model)


def test_a_mixture_whose_config_asks_for_its_balancing_loss_is_refused():
    from tests.api import Distil

    model = tiny("mixtral", output_router_logits=True, router_aux_loss_coef=0.02)
    for kind, objective in ((Preference, "dpo"), (Distil, "distil")):
        with pytest.raises(UsageError, match="no balancing loss beside its own") as refused:
            kind(RunConfig(train=TrainSection(objective=objective))).check_model(model)
        assert refused.value.fix == "train.aux_loss: 0 trains without it"
        kind(RunConfig(train=TrainSection(objective=objective, aux_loss=0.0))).check_model(model)


def test_an_answers_log_probability_is_the_sum_of_its_learnt_tokens():
    rows = [
        Row((5, 6, 7, 8, 9), (IGNORE_INDEX, IGNORE_INDEX, 7, 8, 9), 2),
        Row((11, 12, 13), (IGNORE_INDEX, 12, 13), 1),
    ]
    model = tiny("llama").eval()
    want = []
    for row in rows:
        log_probs = model(torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
        want.append(
            sum(
                log_probs[at - 1, label]
                for at, label in enumerate(row.labels)
                if label != IGNORE_INDEX
            )
        )
    optimize(model, "fp32")
    found = answer_log_probs(model, collate(rows, pad_id=0), dtype="fp32")
    torch.testing.assert_close(found, torch.stack(want))


def test_losses_are_those_of_trl():
    """Of sums, and of means for simpo and orpo, with TRL's own functions."""
    from types import SimpleNamespace

    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    c, r, n, m = (
        -torch.rand(16) * 30,
        -torch.rand(16) * 30,
        torch.randint(3, 20, (16,)).float(),
        torch.randint(3, 20, (16,)).float(),
    )
    answers = PairLogProbs(c, r, torch.zeros(16), torch.zeros(16), n, m)
    plain = {"beta": 0.1, "nll": 0.0}
    device = SimpleNamespace(device="cpu")
    odds = -ORPOTrainer.odds_ratio_loss(
        SimpleNamespace(beta=0.1, accelerator=device), c / n, r / m
    )[0]
    theirs = SimpleNamespace(
        beta=0.1,
        alpha=0.0,
        simpo_gamma=0.5,
        label_smoothing=0.1,
        loss_type="sigmoid",
        accelerator=device,
    )
    torch.testing.assert_close(
        pair_losses("orpo", PreferenceSection(**plain), answers).losses, odds
    )
    smoothed = PreferenceSection(**plain, label_smoothing=0.1)
    torch.testing.assert_close(
        pair_losses("cpo", smoothed, answers).losses, CPOTrainer.cpo_loss(theirs, c, r)[0]
    )
    theirs.loss_type, theirs.label_smoothing = "simpo", 0.0
    torch.testing.assert_close(
        pair_losses("simpo", PreferenceSection(**plain), answers).losses,
        CPOTrainer.cpo_loss(theirs, c / n, r / m)[0],
    )
    with_nll = pair_losses("orpo", PreferenceSection(), answers).losses
    torch.testing.assert_close(with_nll, odds - c / n)


@pytest.mark.parametrize(
    "objective",
    [pytest.param(name, marks=pytest.mark.full) for name in ("ipo", "orpo", "simpo", "cpo")],
)
def test_the_other_objectives_learn_the_taste(paired, tmp_path, objective):
    assert train(paired(objective, train={"steps": 24, "eval_every": 24})) == 0
    assert metrics(tmp_path / "run")[-1]["eval_rewards/accuracies"] > 0.9


def test_the_example_of_the_page_runs(workshop, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "preferences.md").read_text(encoding="utf-8")
    pairs, program = (
        re.search(rf"```{kind}\n(.*?)```", page, re.S).group(1) for kind in ("json", "python")
    )
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(pairs)
    exec(program.replace("Qwen/Qwen2.5-0.5B-Instruct", str(workshop.base)), {})
    assert [row["step"] for row in metrics(Path("runs/pairs"))] == [1, 2]


def labelled(pairs: list[dict]) -> list[dict]:
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]


@pytest.mark.full
def test_kto_learns_the_taste_from_labels(paired, tmp_path, capsys):
    steps = {"steps": 24, "batch_size": 8, "eval_every": 24, "learning_rate": 3e-2}
    assert (
        train(paired("kto", rows=labelled(taste(40)), preference={"beta": 0.5}, train=steps)) == 0
    )
    rows = metrics(tmp_path / "run")
    first = next(row for row in rows if row["step"] == 1)
    assert first["loss"] == 0.5
    assert first["kl"] == 0.0
    assert first["answers"] == 8
    assert rows[-1]["eval_rewards/accuracies"] > 0.9
    assert rows[-1]["eval_rewards/margins"] == pytest.approx(
        rows[-1]["eval_rewards/chosen"] - rows[-1]["eval_rewards/rejected"], abs=1e-5
    )
    assert "answers are labelled as wanted" in capsys.readouterr().out


@pytest.mark.full
def test_the_reference_point_of_kto_is_one_number_of_the_whole_step(paired, tmp_path):
    # mostly wanted answers, so that those to other prompts become likelier too, and the point is
    # above 0
    rows = [row for i, row in enumerate(labelled(taste(16))) if row["label"] or i % 8 == 1]
    assert train(paired("kto", rows=rows, folder="one", train={"batch_size": 8, "steps": 3})) == 0
    assert (
        train(
            paired(
                "kto",
                rows=rows,
                folder="eight",
                train={"batch_size": 1, "accumulate": 8, "steps": 3},
            )
        )
        == 0
    )
    one, eight = (metrics(tmp_path / name) for name in ("one", "eight"))
    assert max(row["kl"] for row in one if "kl" in row) > 0
    for mine, other in zip(one, eight, strict=True):
        for key in {
            "loss",
            "kl",
            "grad_norm",
            "rewards/margins",
            "eval_loss",
            "eval_kl",
        } & mine.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key


def test_a_reward_model_scores_the_taste_and_loads_in_transformers(paired, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    steps = {"steps": 16, "batch_size": 8, "eval_every": 16, "learning_rate": 1e-2}
    loaded = paired(
        "reward", train=steps, run={"report": True, "samples": []}, precision={"preset": "fp32"}
    )
    assert train(loaded) == 0
    rows = metrics(tmp_path / "run")
    assert rows[-1]["eval_accuracy"] > 0.9
    assert rows[-1]["eval_margin"] > 0
    base = AutoModelForSequenceClassification.from_pretrained(
        loaded.config.model.name, num_labels=1
    )
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")
    model.config.pad_token_id = tokenizer.pad_token_id
    margins = []
    for pair in taste(12, seed=1):
        chats = [
            [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair[side]},
            ]
            for side in ("chosen", "rejected")
        ]
        scores = [
            model(
                tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)[
                    "input_ids"
                ]
            ).logits.item()
            for chat in chats
        ]
        margins.append(scores[0] - scores[1])
    assert sum(margin > 0 for margin in margins) >= 11
    assert sum(margins) / 12 == pytest.approx(rows[-1]["eval_margin"], rel=0.2)
    assert "AutoModelForSequenceClassification" in (tmp_path / "run/adapter/README.md").read_text(
        encoding="utf-8"
    )
    with pytest.raises(UsageError, match="a reward model gives scores"):
        load_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"run\.samples has no effect"):
        train(paired("reward", folder="samples", run={"samples": ["a?"]}))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "objective"), [("replicate", "dpo"), ("shard", "kto")])
def test_two_processes_make_the_run_of_one(paired, tmp_path, kind, objective):
    rows = labelled(taste(30)) if objective == "kto" else taste(60)
    sections = {
        "rows": rows,
        "train": {"batch_size": 2, "accumulate": 4, "steps": 4},
        "run": {"sample_every": 0, "samples": []},
    }
    assert train(paired(objective, folder="one", **sections)) == 0
    paired(objective, folder="two", parallel={"kind": kind}, **sections)
    command = [
        sys.executable,
        "-m",
        "isotype",
        "train",
        str(tmp_path / "two.yaml"),
        "--processes",
        "2",
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=GUARD, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(one) == len(two)
    for mine, other in zip(one, two, strict=True):
        for key in {
            "loss",
            "pairs",
            "kl",
            "rewards/margins",
            "logps/chosen",
            "eval_loss",
            "eval_rewards/accuracies",
        } & mine.keys():
            assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
    assert (
        one[1]["loss"]
        == two[1]["loss"]
        == (0.5 if objective == "kto" else float(torch.tensor(math.log(2.0))))
    )
    references = [load_file(tmp_path / name / "reference.safetensors") for name in ("one", "two")]
    assert all(
        torch.equal(references[0][side], references[1][side]) for side in ("training", "evaluation")
    )


@pytest.mark.full
@pytest.mark.parametrize("objective", ["dpo", "ipo", "kto"])
def test_three_steps_have_the_losses_of_trl(workshop, paired, tmp_path, monkeypatch, objective):
    """Every weight of an fp32 model, so that both have one reference and one start; kto has TRL's
    partners, the row before in a batch.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(base)
    AutoModelForCausalLM.from_pretrained(workshop.base).save_pretrained(base)
    pairs = [row | {key: " " + row[key] for key in ("chosen", "rejected")} for row in taste(12)]
    if objective == "kto":
        pairs = [row for i, row in enumerate(labelled(pairs)) if row["label"] or i % 4 == 1][:12]
        monkeypatch.setattr(
            "isotype.data.pairs.draw_partners",
            lambda *_: np.array([i // 4 * 4 + (i - 1) % 4 for i in range(12)]),
        )
    alike = {"learning_rate": 1e-3, "warmup": 0.0, "schedule": "constant"}
    loaded = paired(
        objective, rows=pairs, model={"name": str(base)}, adapter={"kind": "none"}, data={"shuffle": False, "eval_split": 0.0},
        train={"steps": 3, "batch_size": 4, **alike},
    )  # fmt: skip
    assert train(loaded) == 0
    config, trainer = (KTOConfig, KTOTrainer) if objective == "kto" else (DPOConfig, DPOTrainer)
    own = {
        "dpo": {},
        "ipo": {"loss_type": "ipo"},
        "kto": {"train_sampling_strategy": "sequential"},
    }[objective]
    args = config(
        output_dir=str(tmp_path / "trl"), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="constant",
        warmup_steps=0, logging_steps=1, report_to=[], bf16=False, use_cpu=True, save_strategy="no", max_grad_norm=1.0,
        gradient_checkpointing=False, max_length=64, **own,
    )  # fmt: skip

    class InOrder(trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = InOrder(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    theirs.train()
    logged = [row for row in theirs.state.log_history if "loss" in row]
    ours = [row for row in metrics(tmp_path / "run") if "loss" in row]
    for mine, other in zip(ours, logged, strict=True):
        for key in {"loss", "kl", "rewards/margins", "logps/chosen"} & mine.keys():
            assert mine[key] == pytest.approx(
                float(other[key]), rel=1e-5, abs=1e-4 if "logps" in key else 1e-5
            ), (key, mine["step"])


# --- `train.objective: distil`, by what docs/preferences.md promises.


@pytest.fixture
def taught(configured, tmp_path, workshop):
    """`taught(folder, **sections)`: a loaded configuration with a teacher, which is the base with
    other weights and a larger head.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(workshop.base)
    teacher.resize_token_embeddings(teacher.config.vocab_size + 9, mean_resizing=False)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(workshop.base).save_pretrained(tmp_path / "teacher")
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n"
            for row in taste(40)
        )
    )

    def make(folder: str = "run", **sections):
        steps = {
            "steps": 24,
            "batch_size": 8,
            "learning_rate": 1e-2,
            "eval_every": 24,
            "objective": "distil",
        }
        data = {"train": str(file), "eval_split": 0.2, "max_length": 64}
        given = {"data": data, "train": steps, "distil": {"teacher": str(tmp_path / "teacher")}}
        for name, values in sections.items():
            given[name] = given.get(name, {}) | values
        return configured(folder, **given)

    return make


@pytest.mark.full
def test_a_student_halves_its_divergence_from_the_teacher(taught, tmp_path):
    assert train(taught(adapter={"kind": "none"})) == 0
    losses = [row["eval_loss"] for row in metrics(tmp_path / "run") if "eval_loss" in row]
    assert losses[-1] < losses[0] / 2
    assert "distil.teacher" in (tmp_path / "run/log.txt").read_text()


def test_losses_are_those_of_whole_logits_and_accumulate(taught, tmp_path):
    """In fp32, with a share of cross-entropy: the op in batches of 3 rows beside plain logits
    (`model.optimize: false`) in 3 batches of one row.
    """
    alike = {
        "precision": {"preset": "fp32"},
        "distil": {"cross_entropy": 0.3, "beta": 0.4, "temperature": 2.0},
    }
    accumulated = {"batch_size": 1, "accumulate": 3, "steps": 2}
    runs = {
        "op": {"train": {"batch_size": 3, "steps": 2}},
        "plain": {"model": {"optimize": False}, "train": accumulated},
    }
    for name, sections in runs.items():
        assert train(taught(name, **alike, **sections)) == 0
    op, plain = ([row for row in metrics(tmp_path / name) if "loss" in row] for name in runs)
    for mine, other in zip(op, plain, strict=True):
        assert mine["loss"] == pytest.approx(
            0.7 * mine["divergence"] + 0.3 * mine["cross_entropy"], rel=1e-5
        )
        for key in ("loss", "divergence", "cross_entropy", "grad_norm"):
            assert mine[key] == pytest.approx(other[key], rel=1e-4), key


def test_the_plan_counts_the_teacher(taught):
    made = {name: taught(name) for name in ("distil", "sft")}
    made["sft"] = taught("sft", train={"objective": "sft"})
    plans = {
        name: plan_run(choose_task(loaded.config), loaded.sources) for name, loaded in made.items()
    }
    assert "distil.teacher" in plans["distil"].to_text()
    assert plans["distil"].memory.frozen - plans["sft"].memory.frozen == 4 * (36576 - 3712 + 9 * 64)


def test_a_teacher_of_another_vocabulary_is_refused(taught, tmp_path):
    from transformers import AutoTokenizer

    loaded = taught()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UsageError, match="has another vocabulary than the model: 1 entries differ"):
        train(loaded)
