"""The page as headless Chromium shows it: what can only be seen once it is laid out. Skipped where no Chromium is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isotype.report.record import read_run
from isotype.report.write import render

from .runs import run_folder, step, whole

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in PATH: test_report.py checks the page without one")
SECTIONS = ("curves", "precision", "preflight", "data", "samples", "use", "settings", "environment")


class Browser:
    """Chromium's debugging protocol over its pipe: messages end in a zero byte. No driver and no port."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def connect() -> None:  # the protocol is on descriptors 3 and 4
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *options], preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._sent, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps({"id": self._sent, "method": method, "params": parameters, **session}).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._sent:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def show(self, file: Path, *, width: int, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.ask("Page.navigate", url=file.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """What the console shows: errors, warnings, and what the page's own policy refused."""
        said = [
            e["params"] for e in self.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]
        return [json.dumps(one) for one in said]

    @property
    def asked_for(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, Path]:
    """A finished run, one that failed, one with long words everywhere, and one that has only begun."""
    long = "x" * 400
    folders = {
        "finished": whole(tmp_path / "finished"),
        "failed": run_folder(
            tmp_path / "failed",
            metrics=[step(1), step(2, loss=float("nan"))],
            result={"status": "failed", "error": "NF001 not finite\n" + long},
        ),
        "long": whole(tmp_path / long[:200]),
        "begun": run_folder(tmp_path / "begun", resolved="model:\n  name: x\n"),
    }
    run_folder(
        folders["long"],
        resolved=f"model:\n  name: {long}\ntrain:\n  optimizer: {long}\n",
        samples=[{"step": 0, "samples": [{"prompt": long, "answer": long, "reference": long}]}],
        examples={"examples": [{"which": long, "parts": [{"text": long, "learnt": True}]}]},
        env={long: long},
        precision={"declared": {"base": {"value": long, "reason": long}}, "observed": {"base": {long: 1}}},
        preflight={"findings": [{"code": long, "message": long}], "checks": {"PF001": long}},
        data={"notes": [long], "train": {"rows": 1, "files": [{"path": long, "format": "x", "why": long}]}},
    )
    for name, folder in folders.items():
        folders[name] = folder / "report.html"
        folders[name].write_text(render(read_run(folder)))
    return folders


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_page_is_laid_out_without_a_complaint(browser: Browser, pages: dict[str, Path], width: int, dark: bool) -> None:
    for name, file in pages.items():
        browser.show(file, width=width, dark=dark)
        assert browser.value("document.documentElement.scrollWidth") <= width, f"{name} scrolls sideways"
        heights = browser.value(
            f"{json.dumps(SECTIONS)}.map(id => document.getElementById(id).parentElement.getBoundingClientRect().height)"
        )
        assert all(height > 40 for height in heights), f"{name}: {dict(zip(SECTIONS, heights))}"
        assert browser.complaints == [], name
        assert browser.asked_for == [file.as_uri()], "the page and nothing else is loaded"


def test_a_telephone_shows_charts_whose_numbers_can_be_read(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["finished"], width=390)
    drawn = (
        "[...document.querySelectorAll('svg .tick')].map(t => { const s = t.ownerSVGElement;"
        " return parseFloat(getComputedStyle(t).fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width })"
    )
    assert min(browser.value(drawn)) > 9


def test_charts_are_drawn_in_both_colour_schemes(browser: Browser, pages: dict[str, Path]) -> None:
    strokes = []
    for dark in (False, True):
        browser.show(pages["finished"], width=1280, dark=dark)
        boxes = browser.value(
            "[...document.querySelectorAll('svg')].map(s => { const b = s.getBoundingClientRect(); return [b.width, b.height] })"
        )
        assert len(boxes) >= 3  # constant values are a line of text, not a chart
        assert all(width > 300 and height > 100 for width, height in boxes)
        strokes.append(
            browser.value(
                "getComputedStyle(document.querySelector('svg path.c1')).stroke + getComputedStyle(document.body).backgroundColor"
            )
        )
    assert strokes[0] != strokes[1]


def test_pointing_at_the_loss_shows_its_value(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["finished"], width=1280)
    svg = "#curves ~ figure svg"
    box = f"document.querySelector('{svg}').getBoundingClientRect()"
    x, y = browser.value(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
    shown = f"[...document.querySelectorAll('{svg} .said')].filter(t => getComputedStyle(t).opacity === '1').map(t => t.textContent)"
    assert browser.value(shown) == []
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    (said,) = browser.value(shown)
    assert said.startswith("step ")
    assert "training loss" in said


def test_the_page_has_texts_for_screen_readers(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["finished"], width=1280)
    browser.ask("Accessibility.enable")
    nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
    images = [n["name"]["value"] for n in nodes if n.get("role", {}).get("value") in ("image", "img")]
    assert any(name.startswith("Loss: training loss") and "evaluation loss" in name for name in images)
    assert all(images)
    headings = [n["name"]["value"] for n in nodes if n.get("role", {}).get("value") == "heading"]
    assert headings[0] == "finished"
    assert {"Precision, declared and observed", "Preflight", "Settings that differ from the preset"} <= set(headings)
