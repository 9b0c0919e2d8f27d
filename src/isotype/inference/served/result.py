"""Writes the result of a comparison with a server as JSON or as lines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...wording import pluralise

SAME = "same"
DIFFERS = "differs"
UNKNOWN = "unknown"
ABSENT = "absent"
NO_GAIN = "on these rows training lowered the loss by no more than the draw of rows explains"


@dataclass(frozen=True)
class Check:
    """Contains the result of comparing one property, for example the tokens of the prompts.

    name     prompt, tokens, first token, ...
    outcome  same, differs, unknown (the server has no function for it) or absent (the run does not
             have this property)
    message  what was compared, or what differs
    fix      the setting that removes the difference
    """

    name: str
    outcome: str
    message: str = ""
    fix: str = ""

    def line(self) -> str:
        parts = [] if self.outcome == ABSENT else [self.outcome]
        if self.message:
            parts.append(self.message)
        if self.outcome == DIFFERS and self.fix:
            parts.append(f"fix: {self.fix}")
        return f"{self.name:<10}{'; '.join(parts)}"


@dataclass(frozen=True)
class ServedResult:
    """The result of comparing the answers of a server with the answers of the trained model.

    url, engine, model  the server
    checks              the comparisons, in the order of the report
    kept                the share of the run's improvement in loss that the server shows; None if
                        the server cannot return log-probabilities of given tokens, or if these rows
                        show no improvement
    min_kept            the smallest share that is accepted
    base_loss, trained_loss, served_loss
                        the mean losses of the compared tokens; served_loss is None if the server
                        returns no log-probabilities
    row_source          where the compared rows come from
    cause               the cause of different answers; None if the answers are the same
    agreement           the share of greedy tokens that are the same; None without a comparison
    """

    url: str
    engine: str
    model: str
    checks: Sequence[Check]
    kept: float | None
    min_kept: float
    base_loss: float
    trained_loss: float
    served_loss: float | None
    agreement: float | None
    rows: int
    tokens: int
    prompts: int
    row_source: str
    notes: Sequence[str] = ()
    cause: Check | None = None

    @property
    def is_same(self) -> bool:
        return all(check.outcome != DIFFERS for check in self.checks)

    @property
    def differences(self) -> list[Check]:
        return [check for check in self.checks if check.outcome == DIFFERS]

    def to_json(self) -> dict[str, Any]:
        return {
            "same": self.is_same,
            "summary": self.summary(),
            "kept": self.kept,
            "loss": {
                "base": self.base_loss,
                "trained": self.trained_loss,
                "served": self.served_loss,
            },
            "agreement": self.agreement,
            "checks": {check.name: check.outcome for check in self.checks},
            "differences": [
                {"kind": "server", "name": check.name, "message": check.message, "fix": check.fix}
                for check in self.differences
            ],
            "cause": None if self.cause is None else self.cause.message,
            "fix": None if self.cause is None else self.cause.fix,
            "notes": list(self.notes),
            "rows": {"count": self.rows, "tokens": self.tokens, "source": self.row_source},
            "server": self.url,
            "model": self.model,
            "format": f"server, {self.engine}",
            "min_kept": self.min_kept,
        }

    def lines(self) -> list[str]:
        prompts = pluralise(self.prompts, f"{self.row_source} prompt")
        lines = [f"asked     {self.url} ({self.engine}, model {self.model}), {prompts}"]
        lines += [check.line() for check in self.checks]
        if self.cause is not None:
            lines.append(f"{'cause':<10}{self.cause.message}; fix: {self.cause.fix}")
        lines += [f"note      {note}" for note in self.notes]
        lines.append(f"result    {self.summary()}")
        return lines

    def summary(self) -> str:
        """Says whether the server gives the same answers as the trained model."""
        if not self.is_same:
            names = ", ".join(check.name for check in self.differences)
            return f"the server does not answer as the trained model does: {names}"
        unknown = [check.name for check in self.checks if check.outcome == UNKNOWN]
        text = "the server answers as the trained model does"
        return f"{text}; not compared: {', '.join(unknown)}" if unknown else text
