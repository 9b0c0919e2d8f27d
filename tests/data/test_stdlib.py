"""The built-in set: real, deterministic, varied, without repeats."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from isotype.data.stdlib import documented, stdlib_pairs, stdlib_text

_DIGEST = (
    "import hashlib; from isotype.data.stdlib import *; print(hashlib.sha256(repr((stdlib_pairs(), stdlib_text())).encode()).hexdigest())"
)


def test_several_thousand_pairs_none_twice() -> None:
    pairs = stdlib_pairs()
    assert len(pairs) > 4000
    assert len({p.question for p in pairs}) == len(pairs)
    descriptions = [p.answer for p in pairs if not p.answer.startswith(("Call it as", "It takes no"))]
    assert len(set(descriptions)) == len(descriptions)


def test_well_known_functions_are_in_the_stdlib_set() -> None:
    answers = {p.name: p.answer for p in stdlib_pairs() if not p.answer.startswith(("Call it as", "`"))}
    assert "whitespace" in answers["textwrap.dedent"]
    calls = {p.name: p.answer for p in stdlib_pairs() if p.answer.startswith("Call it as")}
    assert calls["json.encoder.JSONEncoder.iterencode"] == "Call it as `iterencode(o, _one_shot=False)`."
    assert not any("(self" in item.signature for item in documented() if item.kind == "method")


@pytest.mark.full
def test_every_process_makes_the_same_set() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _DIGEST], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert ran.stdout.strip() == hashlib.sha256(repr((stdlib_pairs(), stdlib_text())).encode()).hexdigest()
