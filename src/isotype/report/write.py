"""Writes report.html: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import UsageError
from .page import page
from .record import read_run

REPORT = "report.html"


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Makes the page from the files in `run_folder` and returns its path, `run_folder/report.html` or `out`.

    Raises UsageError when the folder holds no run or the page cannot be written.
    """
    text = render(run_folder)
    target = out or run_folder / REPORT
    try:
        handle, aside = tempfile.mkstemp(dir=target.parent, prefix=".report-", suffix=".html")
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(aside, 0o644)
        os.replace(aside, target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        Path(aside).unlink(missing_ok=True)
    return target


def render(run_folder: Path) -> str:
    """The page as text. Everything a run wrote is escaped; the page's own policy allows no script and no network."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("isotype.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja").render(page(read_run(run_folder)))
