"""Writes report.html, whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import UsageError
from .page import page
from .record import RunRecord, read_run

REPORT = "report.html"
STEPS = "steps.js"  # of the page with pictures


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Makes the page from the files in `run_folder`: report.html there, or `out`.

    Raises UsageError when the folder holds no run or the file cannot be written.
    """
    target = out or run_folder / REPORT
    _write(target, render(read_run(run_folder)).encode("utf-8", "backslashreplace"))  # a file's name may be no UTF-8
    return target


@dataclass(frozen=True)
class Live:
    """What a page that `isotype watch` serves has beside the report.

    log       the last lines that the run printed
    process   the process that trains, where it can be asked to stop
    stopping  whether it was asked
    """

    log: str
    process: int | None
    stopping: bool


def render(record: RunRecord, live: Live | None = None) -> str:
    """The page as text. Everything a run wrote is escaped; the page's own policy allows no network, and no script but that of its pictures.

    live  for a page that is served, which has one script and a form
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("isotype.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = files(__package__).joinpath(STEPS).read_text(encoding="utf-8")
    policy = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("report.html.jinja")
    return template.render(page(record), live=live, script=Markup(script), script_hash=policy).lstrip()


def _write(target: Path, content: bytes) -> None:
    try:
        handle, aside = tempfile.mkstemp(dir=target.parent, prefix=".report-", suffix=target.suffix)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(aside, 0o644)
        os.replace(aside, target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        Path(aside).unlink(missing_ok=True)
