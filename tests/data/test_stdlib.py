"""The built-in set: real, deterministic, varied, without repeats."""

from __future__ import annotations

from isotype.data.stdlib import documented, stdlib_pairs


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
