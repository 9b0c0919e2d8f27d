"""Sheets of families: what their lines mean, and that every text of every sheet can be said."""

from __future__ import annotations

import re

import pytest

from isotype.doctor.explain import sheets
from isotype.doctor.explain.family import FAMILIES, Seen
from isotype.doctor.explain.log import Frame
from isotype.doctor.explain.recognise import FORMS
from isotype.doctor.explain.situation import read
from isotype.finding import Severity

SHEET = """# EX900 A title

**Why it matters.** It does.

= first refusal; second refusal
let pair if left and right: {left} and {right|another}
let pair: {left|something}
let wide if left > right: yes
severity: warning
message if operator = second refusal: the second, {pair}
message: {pair}
- wide: {left}
  3 if wide
  1 if not wide and frames ~ head|classifier
  why: {left|nothing}, {{literally}}
  fix: one\\nand two
  seen if frames ~ head: {place}
+ outside autocast -2 if not wide
"""


@pytest.fixture
def sheet(tmp_path, monkeypatch):
    """The operators of a sheet with this text."""
    known = dict(FAMILIES)
    monkeypatch.setattr("isotype.doctor.explain.family.FAMILIES", known)

    def registered(text):
        (tmp_path / "sheet.txt").write_text(text)
        sheets.register(tmp_path / "sheet.txt")
        return known

    return registered


def seen(operator, frames=(), **dtypes):
    return Seen(text="", operator=operator, dtypes=dtypes, situation=read([Frame("net.py", 7, *frame) for frame in frames]))


def test_the_first_line_that_holds_is_said(sheet):
    code, family = sheet(SHEET)["first refusal"]
    explained = family(seen("first refusal", left="fp32", right="bf16"))
    assert (code, explained.message, explained.severity) == ("EX900", "fp32 and bf16", Severity.WARNING)
    (cause,) = explained.causes
    assert (cause.name, cause.score, cause.why, cause.fix, cause.because) == ("wide: fp32", 3, "fp32, {literally}", "one\nand two", "")
    assert family(seen("second refusal")).message == "the second, something"
    assert family(seen("first refusal", left="bf16", right="fp32")).causes == []


def test_a_frame_that_a_test_found_is_said(sheet):
    family = sheet(SHEET)["first refusal"][1]
    (cause,) = family(seen("first refusal", [("lm_head", "y = self.head(x)")], left="bf16", right="fp32")).causes
    assert (cause.score, cause.because) == (1, "lm_head at net.py:7")


def test_shared_causes_are_moved_in_rank(sheet):
    family = sheet(SHEET)["first refusal"][1]
    (cause,) = family(seen("first refusal", [("generate", "out = model.generate(ids)")])).causes
    assert (cause.name, cause.score) == ("generate outside autocast", 4)
    explained = family(seen("first refusal", [("generate", "out = model.generate(ids)")], left="fp32", right="bf16"))
    assert [cause.name for cause in explained.causes] == ["wide: fp32"]


@pytest.mark.parametrize("line", ["whyy: a text", "3 when wide", "a sentence"])
def test_a_line_that_means_nothing_is_named(sheet, line):
    with pytest.raises(ValueError, match=f"EX900.*{re.escape(line)}"):
        sheet(SHEET.replace("severity: warning", line))


@pytest.mark.parametrize("operator", sorted(FAMILIES))
def test_every_text_can_be_said(operator):
    """With what its wordings find in a text, and nothing else."""
    groups = [set(re.findall(r"<(\w+)>", form)) for known, form in FORMS if known == operator] or [set()]
    for names in groups:
        words = {name.strip("_").rstrip("2"): "torch.bfloat16" for name in names if name.startswith("_")}
        dtypes = {name: "bf16" if i % 2 else "fp32" for i, name in enumerate(sorted(n for n in names if not n.startswith("_")))}
        for frames in ((), [Frame("lora/moe.py", 3, "generate", "y = self.vae.encode(x) @ w")]):
            explained = FAMILIES[operator][1](Seen(text="", operator=operator, dtypes=dtypes, words=words, situation=read(frames)))
            assert explained.message
            assert all(cause.name and cause.why and cause.fix for cause in explained.causes)
            assert "{" not in explained.message
