"""The page of a run: whole runs, dead runs, hostile text; its verdict."""

import json
import math
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from isotype.config.keys import key_schemas
from isotype.errors import UsageError
from isotype.report import write_report
from tests.api import describe_losses, loss_plot, read_run, verdict
from tests.api import page_render as render
from tests.report.runs import DECLARED, RESOLVED, run_folder, step, whole

HOSTILE = "<script>alert('ran')</script><img src=x onerror=alert(1)>\"'&{{ 271828 * 314159 }}"


class Page(HTMLParser):
    """Tags, attributes and text of a page; every opened tag must be closed in order."""

    VOID = {"meta", "img", "br", "link", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def script_hash(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


def html_of(folder: Path) -> str:
    return render(read_run(folder))


def page_of(folder: Path) -> Page:
    return Page(html_of(folder))


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e308])
def test_a_time_that_is_no_number_is_left_out(tmp_path, seconds):
    metrics = [step(n, seconds=1e308) for n in range(1, 4)]
    folder = run_folder(tmp_path / "run", metrics=metrics, result={"trained_seconds": seconds})
    assert "training loss" in render(read_run(folder))


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    page = page_of(run)
    words = (
        "done|Loss|Gradient norm|clip 1|Share changed|Tokens per second|Peak memory|1 min 15 s|7 rows were cut|12 bf16|run.yaml:9|"
        "because 0|because 100|in the data|torch|2.13.0|some/model|16 of 17 checks passed|updates survive rounding|PF011|"
        "a smaller train.batch_size|shared disk|3 of 9 tokens are learnt|weight_decay|run.yaml:12"
    )
    assert [word for word in words.split("|") if word not in page.text] == []
    assert (
        page.text.index("because 0")
        < page.text.index("because 100")
        < page.text.index("because 50")
    ), "first and last, then between"
    assert f"isotype merge {run}" in page.text
    assert "normrms_normNorm3" in page.text


def test_it_needs_no_network_and_allows_no_script(tmp_path: Path) -> None:
    text = html_of(whole(tmp_path / "run"))
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not re.search(r"""(?:src|action)\s*=|url\(|@import|https?:""", text)
    assert {a["href"][0] for _, a in page.tags if a.get("href")} == {"#"}, "links stay on the page"
    policy = next(
        a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def pictures_of(path: Path, steps: tuple[int, ...] = (0, 5, 10), **files: Any) -> Path:
    """A diffusion run with an average, whose prompts are HOSTILE, and `a dog` with two seeds."""
    from PIL import Image

    asked = [
        (prompt, whose)
        for whose in ({}, {"weights": "average"})
        for prompt in (HOSTILE, "a dog", "a dog")
    ]
    names = {(s, i): f"samples/step_{s}_{i}.png" for s in steps for i in range(len(asked))}
    moments = [
        {
            "step": s,
            "samples": [
                {"prompt": p, "file": names[s, i], "answer": f"32 x 32 pixels, seed {i}", **w}
                for i, (p, w) in enumerate(asked)
            ],
        }
        for s in steps
    ]
    run_folder(
        path,
        samples=moments,
        plan={"task": "diffusion", "total": 10},
        **{"metrics": [step(1)], **files},
    )
    for (s, i), name in names.items():
        Image.new("RGB", (1, 1), (25 * s, 25 * i, 128)).save(path / name)
    return path


def test_pictures_are_beside_the_base_and_the_average_by_step(tmp_path: Path) -> None:
    text = html_of(pictures_of(tmp_path / "run"))
    page = Page(text)
    cards = text[: text.index('id="curves"')].split('<div class="card sample drawn">')[1:]
    shown = [
        "step 0, the base",
        "step 5, trained",
        "step 5, average",
        "step 10, trained",
        "step 10, average",
    ]
    assert [re.findall("<figcaption>(.*?)</figcaption>", card) for card in cards] == 3 * [shown], (
        "a card a prompt"
    )
    assert re.findall(r'<div class="note">(32 x 32.*?)</div>', text) == [
        f"32 x 32 pixels, seed {i}" for i in (3, 4, 5)
    ], "the settings of each prompt"
    files = [re.findall(r"samples/step_(\d+_\d+)", card) for card in cards]
    assert files == [[f"0_{i}", f"5_{i}", f"5_{i + 3}", f"10_{i}", f"10_{i + 3}"] for i in range(3)]
    assert [a["max"] for _, a in page.tags if a.get("type") == "range"] == ["1", "1", "1"]
    assert (
        text.index('id="samples"')
        < text.index('id="curves"')
        < text.index('id="data"')
        < text.index('id="precision"')
    )


def test_the_one_script_of_a_page_with_pictures_is_named_by_its_hash(tmp_path: Path) -> None:
    text = html_of(pictures_of(tmp_path / "run"))
    page = Page(text)
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    policy = next(
        a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    named = script_hash(script)
    assert (
        policy
        == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{named}'; img-src data:"
    )
    assert [tag for tag, _ in page.tags].count("script") == 1


def test_the_lora_of_a_step_is_linked_where_it_was_kept(tmp_path: Path) -> None:
    loras = (
        "adapters/step_5/pytorch_lora_weights.safetensors",
        "adapter/adapter_model.safetensors",
    )
    without = html_of(pictures_of(tmp_path / "run", resolved=RESOLVED))
    assert "run.adapters_every" in without
    for name in loras:
        (tmp_path / "run" / name).parent.mkdir(parents=True)
        (tmp_path / "run" / name).touch()
    best = {"status": "done", "steps": 10, "of_step": 7}
    text = html_of(pictures_of(tmp_path / "run", resolved=RESOLVED, result=best))
    assert loras[1] not in text, "the adapter of step 7 is not the one that drew at step 10"
    result = {"status": "done", "steps": 10, "of_step": 10}
    text = html_of(pictures_of(tmp_path / "run", resolved=RESOLVED, result=result))
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions[:5] == [
        "step 0, the base",
        f'step 5, trained <a href="{loras[0]}">LoRA</a>',
        "step 5, average",
        f'step 10, trained <a href="{loras[1]}">LoRA</a>',
        "step 10, average",
    ]
    assert "run.adapters_every" not in text


def test_a_page_without_samples_says_how_to_take_some(tmp_path: Path) -> None:
    plan = {"task": "diffusion", "total": 10}
    folder = run_folder(tmp_path / "run", metrics=[step(1)], plan=plan, resolved=RESOLVED)
    assert "run.samples=[a photo" in html_of(folder)
    text_run = run_folder(tmp_path / "text", metrics=[step(1)], resolved=RESOLVED)
    assert "run.samples=[Tell me" in html_of(text_run)
    (folder / "adapter").mkdir()
    commands = re.findall(r"isotype sample \S+", Page(html_of(folder)).text)
    assert commands == 2 * [f"isotype sample {folder}"], "in the samples and in the commands"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_slider_shows_one_step_and_a_click_enlarges_a_picture(tmp_path: Path) -> None:
    text = html_of(pictures_of(tmp_path / "run")).replace('value="1" auto', 'value="0" auto', 1)
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    clicking = f"{script}document.querySelectorAll('a.enlarge')[8].click();"
    for old, new in [(script, clicking), *[map(script_hash, (script, clicking))]]:
        text = text.replace(old, new)
    (tmp_path / "page.html").write_text(text)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
    ]
    after = subprocess.run(
        ["chromium", *options, f"file://{tmp_path}/page.html"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.findall(r'<div class="step" data-step="(\d+)"( hidden="")?>', after)[:4] == [
        ("5", ""), ("10", ' hidden=""'), ("5", ' hidden=""'), ("10", ""),
    ]  # fmt: skip
    assert re.findall("<output>(.*?)</output>", after) == ["step 5", "step 10", "step 10"]
    (dialog,) = re.findall("<dialog.*?</dialog>", after, re.DOTALL)
    assert dialog.startswith('<dialog class="enlarged" aria-label="Enlarged picture" open')
    assert "<p>a dog, step 10, trained · 32 x 32 pixels, seed 1</p>" in dialog
    assert '/samples/step_10_1.png"' in dialog


def test_losses_by_noise_level_and_pictures_by_size_are_tables(tmp_path: Path) -> None:
    levels = {"eval_loss_t500_1000": 0.25, "eval_loss_t0_500": 0.75}
    metrics = [
        step(1),
        *({"step": s, "event": "evaluation", "eval_loss": 0.5, **levels} for s in (0, 1)),
    ]
    data = {"train_pictures": 5, "train_pictures_by_size": {"24 x 40": 2, "32 x 32": 3}}
    text = html_of(pictures_of(tmp_path / "run", (0,), metrics=metrics, data=data))
    rows = [
        re.findall("<t[hd][^>]*>([^<]*)</t[hd]>", row)
        for row in re.findall("<tr>(.*?)</tr>", text, re.DOTALL)
    ]
    start = rows.index(["noise level", "step 0", "step 1"])
    assert rows[start + 1 : start + 3] == [
        ["0 to 500", "0.75", "0.75"],
        ["500 to 1,000", "0.25", "0.25"],
    ]
    assert ["training pictures of 24 x 40", "2"] in rows
    assert "range" not in [attributes.get("type") for _, attributes in Page(text).tags], (
        "nothing to slide through"
    )


def test_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    bad = HOSTILE
    folder = run_folder(
        tmp_path / "run",
        resolved=f"model:\n  name: {json.dumps(bad)}\ndata:\n  train: {json.dumps(bad)}\n",
        metrics=[step(1), {"step": 1, "event": bad}],
        precision={
            "preset": bad,
            "declared": {bad: {"value": bad, "reason": bad}},
            "observed": {bad: {bad: 1}},
            "violations": [{"code": bad, "message": bad}],
            "promotions": [{"module": bad, "dtype": bad, "times": bad}],
        },
        data={
            "train": {"rows": 1, "files": [{"path": bad, "format": bad, "why": bad}]},
            "notes": [bad],
        },
        env={bad: bad, "list": [bad, {bad: bad}]},
        result={"status": bad, "error": bad, "base": bad},
        samples=[{"step": 1, "samples": [{"prompt": bad, "answer": bad, "reference": bad}]}],
    )
    (folder / "adapter").mkdir()
    page = page_of(folder)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("alert('ran')") >= 12
    assert str(271828 * 314159) not in page.text, "Jinja ran what a run wrote"


def test_a_run_that_died_anywhere_still_has_a_page(tmp_path: Path, subtests: Any) -> None:
    folders: tuple[dict[str, Any], ...] = (
        {"resolved": "model:\n  name: x\n"},
        {"resolved": "", "metrics": []},
        {
            "metrics": [step(1, loss=float("nan"), grad_norm=float("inf"))],
            "result": {"status": "failed", "error": "not finite"},
        },
        {"metrics": [step(1)]},
        {"metrics": [{"step": 1, "event": "evaluation", "eval_loss": 2.0}]},
        {"metrics": [{"step": "x", "loss": None}, {"loss": 1}, {"step": 3, "loss": True}]},
        {"precision": {"declared": None, "observed": {"base": "bf16"}, "violations": None}},
        {"precision": [1], "data": [], "env": 3, "result": None},
        {
            "data": {
                "train": {"lengths": None, "files": None, "dropped": None},
                "eval": 3,
                "notes": None,
            }
        },
        {
            "result": {"status": "interrupted", "steps": 3},
            "samples": [{"step": 0, "samples": [{"prompt": "p"}, 3]}],
        },
    )
    for number, files in enumerate(folders):
        with subtests.test(**files):
            assert "Precision" in page_of(run_folder(tmp_path / f"run_{number}", **files)).text


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(1), step(2)], resolved="a: [")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    (folder / "data.json").write_text("{")
    (folder / "env.json").write_bytes(b"\xff\xfe")
    text = page_of(folder).text
    for name in (
        "metrics.jsonl: 1 lines cut short or broken (first: line 3)",
        "data.json: ",
        "env.json: ",
        "resolved.yaml: ",
    ):
        assert name in text, name


def test_a_violation_is_at_the_top(tmp_path: Path) -> None:
    violation = {
        "code": "DT003",
        "message": "gradient of w is bf16, declared fp32",
        "declared": "precision.grads: fp32",
    }
    precision = {
        "declared": DECLARED,
        "observed": {"grads": {"bf16": 4}, "base": {"bf16": 1}},
        "violations": [violation],
    }
    text = page_of(run_folder(tmp_path / "run", precision=precision)).text
    assert text.index("gradient of w is bf16") < text.index("Curves")
    assert "✗ 4 bf16" in re.sub(r"\s+", " ", text)
    assert "✓ 1 bf16" in re.sub(r"\s+", " ", text)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        write_report(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a folder"):
        write_report(tmp_path / "file")
    with pytest.raises(UsageError, match="not a run folder"):
        write_report(tmp_path)
    run = run_folder(tmp_path / "run", metrics=[])
    with pytest.raises(UsageError, match="could not write"):
        write_report(run, tmp_path / "missing" / "page.html")
    assert not list(run.glob(".report*"))


# --- The verdict on top of a report: base against tuned loss, and whether the declared precision
# was kept.


KEPT = {
    "declared": DECLARED,
    "observed": {"base": {"bf16": 12}, "grads": {"fp32": 4}},
    "violations": [],
}


def evaluations(*losses: float) -> list[dict]:
    return [
        {"step": 10 * i, "event": "evaluation", "eval_loss": loss} for i, loss in enumerate(losses)
    ]


def test_base_against_tuned_loss(tmp_path: Path, subtests: Any) -> None:
    for losses, said, rating in (
        ((4.0, 3.0), "Evaluation loss 4 before training, 3 at step 10: 25% lower.", "good"),
        ((4.0, 5.0), "Evaluation loss 4 before training, 5 at step 10: 25% higher.", "warn"),
        (
            (4.0, 2.0, 3.0),
            "25% lower. It was lower at step 10, 2: it learns its training rows by heart.",
            "warn",
        ),
        ((4.0,), "no second evaluation", "warn"),
        ((), "No evaluation", "warn"),
    ):
        with subtests.test(said):
            found = verdict(
                read_run(
                    run_folder(
                        tmp_path / "run", metrics=[step(1), *evaluations(*losses)], precision=KEPT
                    )
                )
            )
            assert said in found.learnt
            assert found.rating == rating
            assert found.precision == "The declared precision was kept in 2 of 2 roles."


OBJECTIVES = key_schemas()["train.objective"]["enum"]


def test_each_objective_describes_its_own_loss(tmp_path: Path) -> None:
    captions = {}
    for objective in OBJECTIVES:
        resolved = RESOLVED.replace("train:\n", f"train:\n  objective: {objective}\n")
        folder = run_folder(tmp_path / objective, resolved=resolved, metrics=[step(1), step(2)])
        plot = loss_plot(read_run(folder))
        assert plot is not None
        captions[objective] = plot.note
        assert plot.note in unescape(html_of(folder))
    assert len(set(captions.values())) == len(OBJECTIVES)
    assert "-ln p over the learnt tokens" in captions["sft"]
    for objective in set(OBJECTIVES) - {"sft"}:
        assert "-ln p over the learnt tokens" not in captions[objective]
    assert all("ln 2" in captions[name] for name in ("dpo", "reward"))

    own = run_folder(
        tmp_path / "own", resolved=RESOLVED, metrics=[step(1)], plan={"objective": "f"}
    )
    assert "the value that your objective f returns" in describe_losses(read_run(own))
    attached = run_folder(tmp_path / "attached", metrics=[step(1)], plan={"total": 1})
    assert "the loss that the trainer logs" in describe_losses(read_run(attached))
