"""What was declared or checked, beside what was found: the precision of every role, and the preflight."""

from __future__ import annotations

from typing import Any

from .record import RunRecord, dict_of, list_of, rows_of
from .words import duration, plain

_NOT_A_DTYPE = ("rounding", "loss_scaling")
ROLES = ("base", "trainable", "compute", "grads", "reduce", "optimizer", "loss", "norms", "generate", "save")


def precision(record: RunRecord) -> dict[str, Any]:
    """One row a role: declared, why, observed, and whether they agree. A reason that most roles share stands once, in `why`."""
    declared, observed = dict_of(record.precision.get("declared")), dict_of(record.precision.get("observed"))
    unobserved = dict_of(record.precision.get("unobserved"))
    violations = rows_of(record.precision.get("violations"), "code", "message", "declared")
    broken = " ".join(v["declared"] for v in violations)
    rows = []
    for role in [r for r in ROLES if r in declared or r in observed] + [r for r in {**declared, **observed} if r not in ROLES]:
        setting = declared.get(role)
        value, reason = (setting.get("value"), setting.get("reason")) if isinstance(setting, dict) else (setting, None)
        seen = observed.get(role)
        words = [f"{n:,} {dtype}" if isinstance(n, int) else f"{n} {dtype}" for dtype, n in seen.items()] if isinstance(seen, dict) else []
        if seen is not None and not isinstance(seen, dict):
            words = [str(seen)]
        mood = "bad" if f"precision.{role}:" in broken else "good" if words and value is not None else ""
        said = ", ".join(words) or ("" if role in _NOT_A_DTYPE else "not observed")
        rows.append({"role": role, "declared": value, "reason": str(reason or ""), "observed": said, "mood": mood, "seen": bool(words),
                     "unseen": str(unobserved.get(role, ""))})  # fmt: skip
    reasons = [row["reason"] for row in rows if row["reason"]]
    usual = max(set(reasons), key=reasons.count) if reasons else ""
    return {
        "rows": rows,
        "why": usual,
        "differing": any(reason != usual for reason in reasons),
        "promotions": rows_of(record.precision.get("promotions"), "module", "dtype", "times"),
        "violations": violations,
        "places": [{"place": str(place), "why": str(why)} for place, why in unobserved.items() if place not in ROLES],
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
