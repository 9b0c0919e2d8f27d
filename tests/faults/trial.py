"""One fault and what came of it, and the table of many."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fault done to a run.

    part       kills, disk, corruption, nan, matrix, ranks
    what       the fault, as a row of the table
    survived   the command ended as it should, said what happened in one message, and the run could go on to its end
    identical  the run that went on ended bit for bit as the undisturbed one; None where there is no such run
    message    what a user was told, first lines
    wrong      why the trial is a failure, or empty
    """

    part: str
    what: str
    survived: bool
    identical: bool | None
    message: str = ""
    wrong: str = ""

    @property
    def passed(self) -> bool:
        return self.survived and self.identical is not False and not self.wrong


def summarise(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """A row for each fault: how many, survived, identical, and one message of them."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for trial in trials:
        row = rows.setdefault(
            (trial.part, trial.what),
            {"part": trial.part, "what": trial.what, "trials": 0, "survived": 0, "resumed": 0, "identical": 0, "message": "", "wrong": []},
        )
        row["trials"] += 1
        row["survived"] += trial.survived
        row["resumed"] += trial.identical is not None
        row["identical"] += bool(trial.identical)
        row["message"] = row["message"] or trial.message
        if trial.wrong:
            row["wrong"].append(trial.wrong)
    return list(rows.values())


def as_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table as Markdown, so that it can be put into a document as it is."""
    yield "| part | fault | trials | survived | bit-identical | message |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        identical = f"{row['identical']} of {row['resumed']}" if row["resumed"] else "–"
        message = row["message"].replace("|", "\\|").replace("\n", " ")
        yield f"| {row['part']} | {row['what']} | {row['trials']} | {row['survived']} | {identical} | {message} |"
    for row in rows:
        for wrong in dict.fromkeys(row["wrong"]):
            yield f"\nFAILED  {row['part']}, {row['what']}: {wrong}"
