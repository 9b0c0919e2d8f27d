"""`train.objective: distil`, by what docs/preferences.md promises."""

import json

import pytest
import torch

from isotype.errors import UsageError
from isotype.tasks.choose import task_of, train
from isotype.training.plan import plan
from tests.results import metrics
from tests.tasks.language.test_preference import taste


@pytest.fixture
def taught(configured, tmp_path, workshop):
    """`taught(folder, **sections)`: a loaded configuration with a teacher, which is the base with other weights and a larger head."""
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
    file.write_text("".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in taste(40)))

    def make(folder: str = "run", **sections):
        steps = {"steps": 24, "batch_size": 8, "learning_rate": 1e-2, "eval_every": 24, "objective": "distil"}
        data = {"train": str(file), "eval_split": 0.2, "max_length": 64}
        given = {"data": data, "train": steps, "distil": {"teacher": str(tmp_path / "teacher")}}
        for name, values in sections.items():
            given[name] = given.get(name, {}) | values
        return configured(folder, **given)

    return make


@pytest.mark.parametrize("beta", [0.0, *(pytest.param(beta, marks=pytest.mark.full) for beta in (0.5, 1.0))])
def test_a_student_halves_its_divergence_from_the_teacher(taught, tmp_path, capsys, beta):
    assert train(taught(distil={"beta": beta}, adapter={"kind": "none"})) == 0
    losses = [row["eval_loss"] for row in metrics(tmp_path / "run") if "eval_loss" in row]
    assert losses[-1] < losses[0] / 2
    assert "distil.teacher" in capsys.readouterr().out


def test_losses_are_those_of_whole_logits_and_accumulate(taught, tmp_path):
    """In fp32, with a share of cross-entropy: the op beside plain logits (`model.optimize: false`), and 1 x 8 beside 8 x 1."""
    alike = {"precision": {"preset": "fp32"}, "distil": {"cross_entropy": 0.3, "beta": 0.4, "temperature": 2.0}}
    runs = {"op": {}, "plain": {"model": {"optimize": False}}, "eight": {"train": {"batch_size": 1, "accumulate": 8, "steps": 3}}}
    for name, sections in runs.items():
        assert train(taught(name, **alike, **{"train": {"steps": 3}} | sections)) == 0
    op, plain, eight = ([row for row in metrics(tmp_path / name) if "loss" in row] for name in runs)
    for mine, other, third in zip(op, plain, eight, strict=True):
        assert mine["loss"] == pytest.approx(0.7 * mine["divergence"] + 0.3 * mine["cross_entropy"], rel=1e-5)
        for key in ("loss", "divergence", "cross_entropy", "grad_norm"):
            assert mine[key] == pytest.approx(other[key], rel=1e-4), key
            assert mine[key] == pytest.approx(third[key], rel=1e-4), key


def test_the_plan_counts_the_teacher(taught):
    made = {name: taught(name) for name in ("distil", "sft")}
    made["sft"] = taught("sft", train={"objective": "sft"})
    plans = {name: plan(task_of(loaded.config), loaded.sources) for name, loaded in made.items()}
    assert "distil.teacher" in plans["distil"].as_text()
    assert plans["distil"].memory.frozen - plans["sft"].memory.frozen == 4 * (36576 - 3712 + 9 * 64)


def test_a_teacher_of_another_vocabulary_is_refused(taught, tmp_path):
    from transformers import AutoTokenizer

    loaded = taught()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UsageError, match="has another vocabulary than the model: 1 entries differ"):
        train(loaded)
