"""What one does with a run, through the command line, in this process."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from tests.api import locate_base, replace_sealed_file
from tests.commands import ask, invoke
from tests.models import save_with_tokenizer
from tests.results import metrics, read
from transformers import AutoModelForCausalLM

from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.runs.checkpoint.store import CheckpointStore
from isotype.tasks.choose import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(configured, tmp_path, trained):
    """The folder of a run, trained once for all tests here."""
    if trained.exists():
        shutil.copytree(trained, tmp_path / "run")
    else:
        assert train(configured(train={"learning_rate": 2e-2})) == 0
        shutil.copytree(tmp_path / "run", trained)
    return tmp_path / "run"


def answer_of(*arguments):
    return json.loads(ask(*arguments, "--json").splitlines()[-1])


def test_eval_of_the_training_file(run, workshop):
    answer = answer_of("eval", run, workshop.chats)
    other = answer_of("eval", run, workshop.chats, "--batch-size", 3)
    assert answer_of("eval", run, workshop.chats) == answer
    assert answer["weights"] == "adapter"
    assert answer["loss"] == pytest.approx(other["loss"], rel=1e-6)
    own = answer_of("eval", run)  # without a file: the rows that the run held out
    held_out = read(run, "data")["eval"]["rows"]
    assert (own["rows"], own["data"], own["left_out"]) == (held_out, "its own evaluation rows", 0)
    assert own["loss"] == pytest.approx(metrics(run, "eval_loss")[-1], rel=1e-6)
    with pytest.raises(UsageError, match="which file"):
        ask("eval", run / "adapter")


def test_a_checkpoint_that_a_run_removes_while_it_is_read_is_passed_over(run, monkeypatch):
    shutil.rmtree(run / "adapter")
    newest = CheckpointStore.find_newest_intact

    def removed_then(store):
        monkeypatch.undo()
        step, passed = newest(store)
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
        return step, passed

    before = load_run(run).weights_name
    monkeypatch.setattr(CheckpointStore, "find_newest_intact", removed_then)
    assert load_run(run).weights_name != before


def test_eval_of_a_file_with_bad_rows_is_refused_with_the_command_that_leaves_them_out(
    run, workshop, tmp_path
):
    file = tmp_path / "some.jsonl"
    file.write_text(
        Path(workshop.chats).read_text() + '{"messages": [\n{"messages": [], "messages": []}\n'
    )
    with pytest.raises(UsageError, match="--on-bad-row skip") as refused:
        ask("eval", run, file)
    fix = refused.value.fix
    whole, skipped = (
        json.loads(ask("eval", run, workshop.chats, "--json")),
        json.loads(ask(*fix.split()[1:], "--json")),
    )
    assert (whole["left_out"], skipped["left_out"]) == (0, 2)
    assert skipped["loss"] == whole["loss"]


def test_sample_is_greedy_by_default_and_drawn_with_a_seed(run, tmp_path):
    # two lines
    (tmp_path / "prompts.txt").write_text(
        "How much is 1\x0cplus\u20282?\r\n\nHow much is 3 plus 2?\n"
    )

    def answers(*options):
        out = ask(
            "sample", run, "--prompts", tmp_path / "prompts.txt", "--tokens", 8, "--json", *options
        )
        return [s["answer"] for s in json.loads(out.splitlines()[-1])["samples"]]

    assert len(answers()) == 2
    assert answers() == answers()
    drawn = ("--temperature", 2.0)
    assert (
        answers(*drawn, "--seed", 1) == answers(*drawn, "--seed", 1) != answers(*drawn, "--seed", 2)
    )


def test_chat_answers_what_is_piped_in(run):
    said = invoke(
        "chat", run, "--tokens", 4, "--json", text="one?\ntwo?\n/reset\n/foo\nthree?\n/quit\nfour?"
    )
    answers = [json.loads(line) for line in said.stdout.splitlines()]
    assert [a["prompt"] for a in answers] == ["one?", "two?", "three?"]
    assert "/foo: no such command" in said.stderr
    assert ask("chat", run, "--tokens", 4, "--temperature", 0, text="How much is 1 plus 2?\n")


def test_an_answer_moves_no_cursor_and_clears_no_screen(run, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(
        PreTrainedTokenizerFast, "decode", lambda self, ids, **options: "a\x1b[2J\x07\x9bb\r\n\tc\n"
    )
    for shown in (
        ask("chat", run, "--tokens", 1, text="one?\n"),
        ask("sample", run, "one?", "--tokens", 1),
    ):
        assert "a�[2J��b\n\tc\n" in shown
    answer = answer_of("sample", run, "one?", "--tokens", 1)["samples"][0]["answer"]
    assert answer.startswith("a\x1b[2J")


def test_a_mistyped_folder_suggests_the_nearest_name(run, tmp_path):
    for command in (("chat",), ("sample",), ("eval",), ("merge",)):
        with pytest.raises(UsageError, match=r"no such folder[\s\S]*did you mean .*run\?"):
            ask(*command, tmp_path / "rnu")
    with pytest.raises(UsageError, match="holds runs, but is none"):
        ask("chat", tmp_path)


def test_a_run_that_is_not_finished_is_loaded_from_its_checkpoint(run):
    shutil.rmtree(run / "adapter")
    assert load_run(run).weights_name == "checkpoint step_6"


def test_a_run_that_is_not_finished_asks_by_the_template_of_its_settings(configured, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ mark }}{% endif %}"
    )
    data = {"chat_template": str(template), "template_kwargs": {"mark": "so"}}
    assert (
        train(
            configured(
                data=data,
                train={"steps": 1, "eval_every": 1},
                run={"sample_every": 0, "samples": []},
            )
        )
        == 0
    )
    shutil.rmtree(tmp_path / "run" / "adapter")
    tokenizer = load_run(tmp_path / "run").tokenizer
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == f"q{tokenizer.eos_token}so"


def test_ls_lists_runs(default_run, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(default_run, tmp_path / name)
    listed = json.loads(ask("ls", tmp_path, "--json"))["runs"]
    assert [(r["status"], r["step"], r["precision"]) for r in listed] == [("done", 6, "fp32")] * 2
    assert "done" in ask("ls", tmp_path)


@pytest.mark.full
def test_an_adapter_on_a_4_bit_base_is_merged_in_fp32(configured, tmp_path, workshop):
    base = save_with_tokenizer(
        "llama", workshop.base, tmp_path / "wide", hidden_size=64, intermediate_size=128
    )
    assert (
        train(
            configured(
                precision={"preset": "nf4-lora"},
                train={"learning_rate": 2e-2},
                model={"name": str(base)},
            )
        )
        == 0
    )
    merged = merge(load_run(tmp_path / "run"), tmp_path / "merged", dtype="fp32")
    assert merged.weights == 14
    assert merged.noise < 1e-5
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype
        == torch.float32
    )


def test_a_model_without_a_run_is_asked_like_one(run, workshop, tmp_path):
    merged = tmp_path / "merged"
    ask("merge", run, "--dtype", "fp32", "--out", merged)

    def loss(folder):
        return answer_of("eval", folder, workshop.chats)

    assert loss(merged)["weights"] == "model"
    assert loss(merged)["loss"] == pytest.approx(loss(run)["loss"], rel=1e-2)
    assert loss(workshop.base)["loss"] > loss(merged)["loss"]
    answers = [
        ask("sample", folder, "How much is 1 plus 2?", "--tokens", 4, "--json")
        for folder in (merged, run, run / "adapter")
    ]
    assert len({json.loads(one.splitlines()[-1])["samples"][0]["answer"] for one in answers}) == 1
    assert ask("chat", merged, "--tokens", 4, "--temperature", 0, text="How much is 1 plus 2?\n")
    with pytest.raises(UsageError, match="no prompts of its own"):
        ask("sample", merged)
    with pytest.raises(UsageError, match="a model, without an adapter to merge"):
        ask("merge", merged)
    assert load_run(merged).precision.base == "fp32"


def test_merging_into_a_folder_with_files_is_refused_before_the_model_is_loaded(
    run, tmp_path, monkeypatch
):
    (tmp_path / "words").write_text("mine")
    monkeypatch.setattr("isotype.inference.loaded.load_run", lambda *given: pytest.fail("loaded"))
    with pytest.raises(UsageError, match="not empty"):
        ask("merge", run, "--out", tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        ask("merge", run, "--out", tmp_path / "words")


def test_an_adapter_that_was_written_on_the_way_is_answered_with_and_merged(configured, tmp_path):
    loaded = configured(
        train={"learning_rate": 2e-2, "steps": 3}, run={"adapters_every": 1, "adapters_keep": 1}
    )
    assert train(loaded) == 0
    assert [p.name for p in (tmp_path / "run/adapters").iterdir()] == ["step_2"]
    early, last = (
        answer_of("eval", tmp_path / folder) for folder in ("run/adapters/step_2", "run")
    )
    assert (early["weights"], last["weights"]) == ("adapters/step_2", "adapter")
    then = {
        row["step"]: row["eval_loss"] for row in metrics(tmp_path / "run") if "eval_loss" in row
    }
    assert early["loss"] == pytest.approx(then[2], rel=1e-6)
    assert last["loss"] == pytest.approx(then[3], rel=1e-6)
    assert ask("chat", tmp_path / "run/adapters/step_2", "--tokens", 4, text="one?\n")
    ask("merge", tmp_path / "run/adapters/step_2", "--out", tmp_path / "merged")
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_a_base_that_is_gone_is_said_with_the_setting_that_names_it(run, workshop):
    for file, setting in (
        ("resolved.yaml", "model.name"),
        ("adapter/adapter_config.json", "base_model_name_or_path"),
    ):
        (run / file).write_text(
            (run / file).read_text().replace(str(workshop.base), "/gone/to/base")
        )
        with pytest.raises(UsageError, match=f"{setting}: /gone/to/base is no longer there"):
            load_run((run / file).parent)


def test_a_relative_base_is_found_from_another_folder(run, workshop, tmp_path, monkeypatch):
    """The run was trained in `project`, and its command is started elsewhere."""
    project = tmp_path / "project"
    moved = project / "runs/small"
    shutil.copytree(run, moved)
    shutil.copytree(workshop.base, project / "small-base")
    config = (moved / "resolved.yaml").read_text().replace(str(workshop.base), "small-base")
    (moved / "resolved.yaml").write_text(re.sub("folder: .*", "folder: runs/small", config))
    settings = (moved / "adapter/adapter_config.json").read_text()
    settings = settings.replace(str(workshop.base), "small-base")
    replace_sealed_file(moved / "adapter", "adapter_config.json", settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    base = str(project / "small-base")
    assert load_run(moved).source.name == base
    assert load_run(Path("../project/runs/small/adapter")).source.name == base
    command = ask("export", moved, "--to", "vllm", "--out", tmp_path / "vllm")
    assert f"vllm serve {base} " in command
    # a folder of this name in the working folder is another model
    shutil.copytree(project / "small-base", "small-base")
    assert load_run(moved).source.name == base
    monkeypatch.chdir(project)
    assert load_run(moved).source.name == "small-base"


@pytest.mark.parametrize(
    ("setting", "place", "name", "located"),
    [
        ("runs/{name}", "runs/a-b-1", "base", "base"),
        ("./x/run", "x/run", "base", "base"),
        ("runs/run", "copied", "base", None),  # a run without its project keeps the name
        ("runs/run", "runs/run", "org/model", None),
        ("/data/run", "data/run", "base", None),
    ],
)
def test_the_folder_of_training_is_derived(setting, place, name, located, tmp_path, monkeypatch):
    run = tmp_path / place
    run.mkdir(parents=True)
    (tmp_path / "base").mkdir()
    (run / "resolved.yaml").write_text(f"run: {{folder: '{setting}'}}\n")
    monkeypatch.chdir(run)
    assert locate_base(name, run) == (name if located is None else str(tmp_path / located))
    assert locate_base(name, run / "adapters/step_3") == locate_base(name, run)


def test_the_folder_of_training_is_recorded_for_an_absolute_run_folder(
    run, workshop, tmp_path, monkeypatch
) -> None:
    started_in = json.loads((run / "env.json").read_text())["folder"]
    assert Path(started_in) == Path.cwd()
    copy = tmp_path / "moved"
    copy.mkdir()
    (copy / "resolved.yaml").write_text("run: {folder: /data/run}\n")
    (copy / "env.json").write_text(json.dumps({"folder": str(workshop.base.parent)}))
    monkeypatch.chdir(tmp_path)
    assert locate_base(workshop.base.name, copy) == str(workshop.base)
    assert locate_base("org/model", copy) == "org/model"
    for folder in (3, "relative", str(tmp_path / "absent")):
        (copy / "env.json").write_text(json.dumps({"folder": folder}))
        assert locate_base(workshop.base.name, copy) == workshop.base.name


def test_the_card_of_a_result_names_its_making_and_its_code_loads_it(
    run, workshop, configured, tmp_path
):
    assert train(configured("full", adapter={"kind": "none"}, train={"steps": 2})) == 0
    for folder, kind in ((run / "adapter", "peft"), (tmp_path / "full/model", "transformers")):
        card = ModelCard.load(folder / "README.md")
        assert card.data.library_name == kind
        assert card.data.base_model is None  # a path is no name on the hub
        assert f"* base: `{workshop.base}`" in card.text
        assert "* data: 43 training rows, 5 evaluation rows" in card.text
        assert "| optimizer | fp32 | fp32 |" in card.text
        assert "| reduce | fp32 | not observed |" in card.text
        code = card.text.partition("```python\n")[2].partition("```")[0]
        loaded: dict = {"FOLDER": str(folder)}
        exec(code, loaded)
        ids = torch.arange(3, 20)[None]
        assert torch.allclose(
            loaded["model"](ids).logits, load_run(folder).model(ids).logits, atol=1e-6
        )
