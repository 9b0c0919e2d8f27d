"""The page of a run: whole runs, dead runs, hostile text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from isotype.errors import UsageError
from isotype.report import write_report
from isotype.report.chart import Guide, Series, bar_chart, line_chart, nice_ticks, smoothed, thinned
from isotype.report.words import plain

HOSTILE = "<script>alert('ran')</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"
DECLARED = {"base": {"value": "bf16", "reason": "preset bf16-lora"}, "grads": {"value": "fp32", "reason": "run.yaml:9"}}


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


def run_folder(path: Path, **files: Any) -> Path:
    """A run folder with the given files; `metrics` is a list of rows, `samples` a list of moments."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        if name == "metrics":
            (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        elif name == "samples":
            (path / "samples").mkdir(exist_ok=True)
            for moment in content:
                (path / "samples" / f"step_{moment['step']}.json").write_text(json.dumps(moment))
        elif name == "resolved":
            (path / "resolved.yaml").write_text(content)
        else:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def step(n: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": n,
        "loss": 4 / n,
        "learning_rate": 1e-4,
        "grad_norm": 2.0 / n,
        "share_changed": 0.98,
        "tokens_per_second": 3000.0,
        "memory_bytes": 10**9,
    } | changes


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


@pytest.fixture
def whole_run(tmp_path: Path) -> Path:
    folder = run_folder(
        tmp_path / "run",
        resolved="model:\n  name: some/model\nadapter:\n  kind: lora\n  r: 16\ntrain:\n  clip: 1.0\n",
        metrics=[*(step(n) for n in range(1, 101)), {"step": 100, "event": "evaluation", "eval_loss": 1.25}],
        precision={"preset": "bf16-lora", "declared": DECLARED, "observed": {"base": {"bf16": 12}, "grads": {"fp32": 4}}, "violations": []},
        data={"train": {"rows": 90, "lengths": {"histogram": [{"up_to": 64, "rows": 90}]}, "files": []}, "notes": ["7 rows were cut"]},
        env={"python": "3.11.7", "packages": {"torch": "2.13.0"}},
        result={"status": "done", "base": "some/model", "trained_seconds": 75.0},
        samples=[{"step": s, "samples": [{"prompt": "why?", "answer": f"because {s}", "reference": "so"}]} for s in (100, 0, 50)],
    )
    (folder / "adapter").mkdir()
    return folder


def test_everything_is_on_the_page(whole_run: Path) -> None:
    page = page_of(whole_run)
    for words in (
        "done",
        "Loss",
        "Gradient norm",
        "clip 1",
        "Share changed",
        "Tokens per second",
        "Peak memory",
        "1 min 15 s",
        "7 rows were cut",
        "12 bf16",
        "run.yaml:9",
        "because 0",
        "because 100",
        "in the data",
        "packages.torch",
        "2.13.0",
        "some/model",
    ):
        assert words in page.text, words
    assert page.text.index("because 0") < page.text.index("because 100") < page.text.index("because 50"), "first and last, then between"
    assert 'PeftModel.from_pretrained(base, "' in page.text


def test_it_needs_no_network_and_allows_no_script(whole_run: Path) -> None:
    text = write_report(whole_run).read_text()
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not re.search(r"""(?:src|href|action)\s*=|url\(|@import""", text)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_nothing_a_run_wrote_becomes_markup(tmp_path: Path) -> None:
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
        data={"train": {"rows": 1, "files": [{"path": bad, "format": bad, "why": bad}]}, "notes": [bad]},
        env={bad: bad, "list": [bad, {bad: bad}]},
        result={"status": bad, "error": bad, "base": bad},
        samples=[{"step": 1, "samples": [{"prompt": bad, "answer": bad, "reference": bad}]}],
    )
    (folder / "adapter").mkdir()
    page = page_of(folder)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("alert('ran')") >= 15
    assert "49" not in page.text


@pytest.mark.parametrize(
    "files",
    [
        {"resolved": "model:\n  name: x\n"},
        {"resolved": "", "metrics": []},
        {"metrics": [step(1, loss=float("nan"), grad_norm=float("inf"))], "result": {"status": "failed", "error": "not finite"}},
        {"metrics": [step(1)]},
        {"metrics": [{"step": 1, "event": "evaluation", "eval_loss": 2.0}]},
        {"metrics": [{"step": "x", "loss": None}, {"loss": 1}, {"step": 3, "loss": True}]},
        {"precision": {"declared": None, "observed": {"base": "bf16"}, "violations": None}},
        {"precision": [1], "data": [], "env": 3, "result": None},
        {"data": {"train": {"lengths": None, "files": None, "dropped": None}, "eval": 3, "notes": None}},
        {"result": {"status": "interrupted", "steps": 3}, "samples": [{"step": 0, "samples": [{"prompt": "p"}, 3]}]},
    ],
)
def test_a_run_that_died_anywhere_still_has_a_page(tmp_path: Path, files: dict[str, Any]) -> None:
    page = page_of(run_folder(tmp_path / "run", **files))
    assert "Precision" in page.text


def test_values_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    rows = [step(n, loss=float("nan") if n == 7 else 1.0) for n in range(1, 11)]
    text = write_report(run_folder(tmp_path / "run", metrics=rows)).read_text()
    assert "training loss is not finite at step 7" in text
    assert "1 values are not finite" in text


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(1), step(2)], resolved="a: [")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    (folder / "data.json").write_text("{")
    (folder / "env.json").write_bytes(b"\xff\xfe")
    text = page_of(folder).text
    for name in ("metrics.jsonl: 1 lines cut short or broken (first: line 3)", "data.json: ", "env.json: ", "resolved.yaml: "):
        assert name in text, name


def test_a_violation_is_at_the_top(tmp_path: Path) -> None:
    violation = {"code": "DT003", "message": "gradient of w is bf16, declared fp32", "declared": "precision.grads: fp32"}
    precision = {"declared": DECLARED, "observed": {"grads": {"bf16": 4}, "base": {"bf16": 1}}, "violations": [violation]}
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
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(run, tmp_path / "missing" / "page.html")
    assert not list(run.glob(".report*"))


def test_charts_are_well_formed_and_inside_their_frame() -> None:
    points = [(float(x), (x % 7) * 10.0**8 if x != 50 else float("nan")) for x in range(1, 2000)]
    svg = ElementTree.fromstring(line_chart([Series("a<b", points), Series("c", [(5.0, 1.0)], "dots", 2)], label="<&>", written=plain))
    for path in svg.iter("path"):
        numbers = [float(v) for v in re.findall(r"-?[\d.]+", path.get("d") or "")]
        assert all(0 <= x <= 460 for x in numbers[::2])
        assert all(0 <= y <= 190 for y in numbers[1::2])
        assert len(numbers) < 3000
    assert not line_chart([Series("a", [(1.0, float("nan"))])], label="x", written=plain)
    assert not bar_chart([("1", 0)], label="x")


def test_a_guide_out_of_reach_does_not_flatten_the_curve() -> None:
    flat = line_chart([Series("a", [(1.0, 0.1), (2.0, 0.2)])], label="x", written=plain, guides=[Guide(100.0, "clip 100")])
    assert "clip 100" not in flat
    assert "clip 0.3" in line_chart([Series("a", [(1.0, 0.1), (2.0, 0.2)])], label="x", written=plain, guides=[Guide(0.3, "clip 0.3")])


def test_thinning_keeps_peaks_and_gaps() -> None:
    points = [(float(x), 1000.0 if x == 777 else float("nan") if x == 888 else 1.0) for x in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 620
    assert (777.0, 1000.0) in kept
    assert sum(y != y for _, y in kept) == 1


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.2, 5.8), (0.0, 0.0), (-3.0, -3.0), (1e-9, 2e-9), (1e12, 5e12)])
def test_ticks_are_few_and_enclose(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert high <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    assert smoothed([(0.0, low)]) == [(0.0, low)]
