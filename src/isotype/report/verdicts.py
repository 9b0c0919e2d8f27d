"""Compares declared and observed values: the precision of every role, the preflight, and the run as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..wording import duration, percent, plain
from .record import RunRecord, dict_of, list_of, rows_of

_NOT_A_DTYPE = ("rounding", "loss_scaling")
ROLES = ("base", "trainable", "compute", "grads", "reduce", "optimizer", "loss", "norms", "generate", "save")


@dataclass(frozen=True)
class Verdict:
    """One sentence on what was learnt, one on the precision, and the worse of their moods."""

    learnt: str
    precision: str
    mood: str


def verdict(record: RunRecord) -> Verdict:
    """Base against tuned loss on the evaluation rows, and whether the declared precision was kept."""
    (learnt, mood), (kept, other) = _learnt(record), _precision(record)
    return Verdict(learnt, kept, next(worst for worst in ("bad", "warn", "good") if worst in (mood, other)))


def _learnt(record: RunRecord) -> tuple[str, str]:
    evaluations = record.evaluations()
    if not evaluations:
        return "No evaluation: whether it learnt something that holds for other rows is not known.", "warn"
    taken = record.result.get("of_step")
    (first, base), (last, tuned) = evaluations[0], evaluations[-1]
    if isinstance(taken, int):  # with early stopping the best step is the result
        last, tuned = next(((step, loss) for step, loss in reversed(evaluations) if step <= taken), evaluations[-1])
    if last == first:
        return f"Evaluation loss {plain(base)} at step {first:,.0f}; no second evaluation to compare it with.", "warn"
    before = "before training" if first == 0 else f"at step {first:,.0f}"
    share = (tuned - base) / base if base else 0.0
    best_step, best = min(evaluations, key=lambda point: point[1])
    how = "no change" if plain(tuned) == plain(base) else f"{percent(abs(share))} {'lower' if share < 0 else 'higher'}"
    said = f"Evaluation loss {plain(base)} {before}, {plain(tuned)} at step {last:,.0f}: {how}"
    if best_step not in (first, last) and plain(best) != plain(tuned):
        return f"{said}. It was lower at step {best_step:,.0f}, {plain(best)}: it learns its training rows by heart.", "warn"
    return f"{said}.", "good" if tuned < base else "warn"


def _precision(record: RunRecord) -> tuple[str, str]:
    table = precision(record)
    broken = len(table["violations"])
    if broken:
        return f"The declared precision was broken: {broken} {'violation' if broken == 1 else 'violations'}.", "bad"
    roles = [row for row in table["rows"] if row["role"] not in _NOT_A_DTYPE and row["declared"] is not None]
    seen = [row for row in roles if row["mood"] == "good"]
    if not seen:
        return "The precision was not observed.", "warn"
    unseen = [str(row["role"]) for row in roles if row not in seen]
    rest = f"; not observed: {', '.join(unseen)}" if unseen else ""
    return f"The declared precision was kept in {len(seen)} of {len(roles)} roles{rest}.", "good"


def precision(record: RunRecord) -> dict[str, Any]:
    """One row a role: declared, why, observed, and whether they agree. A reason that most roles share stands once, in `why`."""
    declared, observed = dict_of(record.precision.get("declared")), dict_of(record.precision.get("observed"))
    unobserved = dict_of(record.precision.get("unobserved"))
    violations = rows_of(record.precision.get("violations"), "code", "message", "declared")
    broken = " ".join(v["declared"] for v in violations)
    rows = []
    for role in [r for r in ROLES if r in declared or r in observed] + [r for r in {**declared, **observed} if r not in ROLES]:
        setting = declared[role] if isinstance(declared.get(role), dict) else {"value": declared.get(role)}
        value = setting.get("value")
        if isinstance(setting.get("rest"), str):
            value = f"{value} (rest {setting['rest']})"
        words = [f"{n:,} {dtype}" if isinstance(n, int) else f"{n} {dtype}" for dtype, n in dict_of(observed.get(role)).items()]
        mood = "bad" if f"precision.{role}:" in broken else "good" if words and value is not None else ""
        said = ", ".join(words) or ("" if role in _NOT_A_DTYPE else "not observed")
        rows.append({"role": role, "declared": value, "reason": str(setting.get("reason") or ""), "observed": said, "mood": mood,
                     "seen": bool(words), "unseen": str(unobserved.get(role, ""))})  # fmt: skip
    reasons = [row["reason"] for row in rows if row["reason"]]
    usual = max(set(reasons), key=reasons.count) if reasons else ""
    return {
        "rows": rows,
        "why": usual,
        "differing": any(reason != usual for reason in reasons),
        "promotions": rows_of(record.precision.get("promotions"), "module", "dtype", "times"),
        "violations": violations,
        "places": [{"place": str(place), "why": str(why)} for place, why in unobserved.items() if place not in ROLES],
        "not_watched": [str(what) for what in list_of(record.precision.get("not watched"))],
        "observed_at": [plain(float(s)) for s in list_of(record.precision.get("observed_at")) if isinstance(s, int)],
    }


def preflight(record: RunRecord) -> dict[str, Any] | None:
    """Every check with what became of it: passed, found something, or left out with its reason. None where there is no record."""
    said = record.preflight
    if not said:
        return None
    findings = rows_of(said.get("findings"), "code", "severity", "message", "fix")
    skipped = rows_of(said.get("skipped"), "code", "check", "reason")
    moods = {f["code"]: "bad" if f["severity"] == "error" else "warn" for f in findings}
    checks = [{"code": code, "what": what, "mood": moods.get(code, "good")} for code, what in dict_of(said.get("checks")).items()]
    seconds = [s for s in dict_of(said.get("seconds")).values() if isinstance(s, int | float)]
    passed = sum(check["mood"] == "good" for check in checks)
    return {
        "checks": checks,
        "findings": findings,
        "skipped": skipped,
        "passed": passed,
        "seconds": duration(sum(seconds)) if seconds else "",
    }
