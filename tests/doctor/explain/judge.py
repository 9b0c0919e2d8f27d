"""Compares what `explain` says about the logs of `judged.toml` with the truth that the file states.

Run it as a module to print one line a case: `python -m tests.doctor.explain.judge`.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

from isotype.doctor.explain import explain

CASES = tomllib.loads(Path(__file__).with_name("judged.toml").read_text(encoding="utf-8"))["case"]
WRONG = "wrong and confident"


def judge_case(case: dict[str, str]) -> str:
    """Returns the verdict on the first finding that `explain` reports for the log of a case."""
    finding = explain(case["log"].strip().splitlines(keepends=True))[0]
    if finding.code == "EX000":
        return "silent"
    details = dict(finding.details)
    fix = finding.fix or ""
    is_cause_right = re.search(case["cause_words"], finding.cause or "") is not None
    is_fix_right = re.search(case["fix_words"], fix) is not None
    says_forbidden = re.search(case["never"], f"{finding.cause}\n{fix}") is not None
    is_right = is_cause_right and not says_forbidden
    if details["sure"].startswith("decided"):
        if not is_right:
            return WRONG
        return "right cause and fix" if is_fix_right else "right cause"
    if is_right:
        return "open, right cause first"
    listed_causes = details.get("or", "").splitlines()
    is_listed = any(
        re.search(case["cause_words"], cause) or re.search(case["fix_words"], cause)
        for cause in listed_causes
        if not re.search(case["never"], cause)
    )
    return "open, another cause first" if is_listed else "open, true cause not listed"


def count_verdicts() -> Counter[str]:
    return Counter(judge_case(case) for case in CASES)


if __name__ == "__main__":
    for case in CASES:
        print(f"{judge_case(case):28s}{case['name']}")
    print(count_verdicts())
