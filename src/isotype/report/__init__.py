"""Writes `report.html` of a run from the files in the run folder. The page is a single file and
needs no network.
"""

from .page import write_report

__all__ = ["write_report"]
