"""`report.html` of a run: one file, no network; made from the files in the run folder only."""

from .page import write_report

__all__ = ["write_report"]
