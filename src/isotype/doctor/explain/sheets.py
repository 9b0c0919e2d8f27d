"""Families of errors as sheets of text (`families/*.txt`): pages, and causes with the conditions under which they are likely.

    # EX012 Title                          the page of a code begins; what follows is its text
    = one operator; another                what is said where one of these refused
    let NAME if TEST: text                 a word for the texts below; the first whose test holds, of several
    message if TEST: text                  likewise; `severity: warning` where it is no error
    + outside autocast -2                  causes that several families share (`shared_causes.py`), their scores moved by so much
    - the name of a cause
      4 if TEST                            its score; the first whose test holds, and the cause is left out where none does
      why, fix, seen: text                 likewise; `seen` is the evidence; `\\n` in a fix is a line break

In texts `{name}` is a fact (`Facts`), and `{one|another|some words}` the first of these that is known, or the last as it stands. A test is
made of terms joined by `and`, and those by `or`; a term may begin with `not`: `name` (it is known and not empty), `name = value`,
`name == other name`, `name ~ regex`, `left > right` (a wider dtype), `frames ~ regex` (a frame of the traceback, `{frame}` from then on).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...dtypes import torch_word
from ...finding import Severity
from .family import Cause, Explained, Seen, family
from .recognise import dtype_word
from .shared_causes import custom_backward, is_floating, outside_autocast, wider
from .source_line import failing_call

_FIELD = re.compile(r"(?P<name>message|severity|let \w+|why|fix|seen)(?: if (?P<test>.+?))?: (?P<text>.*)")
_SCORE = re.compile(r"(?P<score>[\d.]+)(?: if (?P<test>.+))?")
_SHARED: dict[str, Callable[..., Iterator[Cause]]] = {
    "outside autocast": outside_autocast,
    "custom backward": lambda s, _: custom_backward(s),
}

_READINGS: dict[str, Callable[[str], Any]] = {
    " as dtype": dtype_word,
    " as torch": torch_word,
    " as mixed": lambda word: word.replace("-true", "-mixed"),
    " without spaces": str.strip,
    " as list": lambda words: ", ".join(sorted(word.strip().removeprefix("torch.") for word in words.split(","))),
    " in lower case": str.lower,
    " is floating": is_floating,
}


class Facts:
    """What an incident showed, by name: a sheet's own words, dtypes by role, words of the text, flags of the situation, and the following.

    operator, text, half, torch_half, autocast  as in `Seen`; `autocast is on` is the flag
    where FLAG        the frame that proves a flag, in words
    word NAME         a word of the text, where a dtype's role has the same name
    NAME as dtype, NAME as list, and the other endings of `_READINGS`   a word, read so
    first of set, second of set   the dtypes of a set that the text prints
    package NAME      whether a frame lies in it
    call, in_place, product   the failing call; where it is a product in place; where it is a product of two tensors
    user, inner, frame        the innermost frame of the user's code, of all, and the one that a test found; `place` and `line` are the last's
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.made: dict[str, str] = {}
        self.frame: Any = None

    def get(self, name: str) -> Any:
        """The fact, or None where it is not known."""
        seen, situation = self.seen, self.seen.situation
        for known in (self.made, seen.dtypes, seen.words):
            if name in known:
                return known[name]
        for ending, read in _READINGS.items():
            if name.endswith(ending):
                word = self.get(name.removesuffix(ending))
                return None if word is None else read(word)
        kind, _, rest = name.partition(" ")
        match kind:
            case "where":
                return situation.where(rest)
            case "word":
                return seen.words.get(rest)
            case "first" | "second" if "set" in seen.words:
                words = [dtype_word(word) for word in seen.words["set"].split(",")]
                return words[0] if kind == "first" else words[1] if len(words) > 1 else "another"
            case "package":
                return rest in situation.packages
            case "autocast" if rest:
                return "autocast" in situation
            case "operator" | "text" | "half" | "torch_half" | "autocast":
                return getattr(seen, name)
            case "call" | "in_place" | "product":
                call = failing_call(situation)
                fits = call and (kind == "call" or (call.is_product and (call.in_place if kind == "in_place" else len(call.tensors) == 2)))
                return call if fits else None
            case "user" | "inner" | "frame":
                return {"user": situation.users, "inner": situation.innermost, "frame": self.frame}[kind]
            case "place" | "line" if (f := self.frame) is not None:
                return f"{f.function if kind == 'place' else f.code or f.function} at {f.file}:{f.line}"
        return None

    def __getitem__(self, key: str) -> Any:
        *names, last = key.split("|")
        found = next((value for name in [*names, *([] if names else [last])] if (value := self.get(name)) not in (None, "")), None)
        if found is None and not names and last not in self.made:
            raise KeyError(key)
        return last if found is None and names else "" if found is None else found

    def say(self, text: str) -> str:
        return text.format_map(self).replace("\\n", "\n")  # type: ignore[arg-type]  # it asks for one item at a time

    def holds(self, test: str | None) -> bool:
        return test is None or any(all(map(self._term, part.split(" and "))) for part in test.split(" or "))

    def _term(self, term: str) -> bool:
        if term.startswith("not "):
            return not self._term(term[4:])
        if (parts := term.partition(" ~ "))[1]:
            name, _, pattern = parts
            if name == "frames":
                found = self.seen.situation.mentions(pattern)
                self.frame = found or self.frame
                return found is not None
            name, _, attribute = name.partition(".")
            value = self.get(name)
            return value is not None and re.search(pattern, str(getattr(value, attribute) if attribute else value)) is not None
        if (parts := term.partition(" > "))[1]:
            return wider(str(self.get(parts[0])), str(self.get(parts[2])))
        if (parts := term.partition(" == "))[1]:
            return bool(self.get(parts[0]) == self.get(parts[2]))
        if (parts := term.partition(" = "))[1]:
            return bool(self.get(parts[0]) == parts[2])
        return bool(self.get(term)) or term in self.seen.situation


@dataclass(slots=True)
class _Entry:
    """An operator's head, a cause, or a reference to shared causes; its fields in order: name, test, text."""

    title: str
    fields: list[tuple[str, str | None, str]] = field(default_factory=list)

    def first(self, name: str, facts: Facts) -> str:
        """The first text of this field whose test holds, or ""."""
        return next((facts.say(text) for known, test, text in self.fields if known == name and facts.holds(test)), "")


def _explain(entries: list[_Entry], seen: Seen) -> Explained:
    facts, head = Facts(seen), entries[0]
    for name in dict.fromkeys(name for name, _, _ in head.fields if name.startswith("let ")):
        facts.made[name[4:]] = head.first(name, facts)
    causes: list[Cause] = []
    for entry in entries[1:]:
        if entry.title.startswith("+"):
            if shared := re.fullmatch(r"\+ (.+?)(?: (-?\d+))?", entry.title):
                causes += _SHARED[shared[1]](seen, float(shared[2] or 0))
        elif score := entry.first("score", facts):
            name = facts.say(entry.title)
            causes.append(
                Cause(
                    name=name,
                    score=float(score),
                    why=entry.first("why", facts),
                    fix=entry.first("fix", facts),
                    because=entry.first("seen", facts),
                )
            )
    severity = Severity.WARNING if head.first("severity", facts) == "warning" else Severity.ERROR
    return Explained(message=head.first("message", facts), causes=causes, severity=severity)


def register(path: Path) -> None:
    """Makes the families of one sheet.

    Raises  ValueError for a line that is none of a sheet's.
    """
    for sheet in re.split(r"(?m)^# ", path.read_text(encoding="utf-8"))[1:]:
        page, *sections = re.split(r"(?m)^= ", sheet)
        code, _, rest = page.partition(" ")
        for section in sections:
            operators, *lines = section.splitlines()
            _register(code, rest.strip(), operators.split("; "), lines)


def _register(code: str, page: str, operators: list[str], lines: list[str]) -> None:
    entries = [_Entry("")]
    for line in filter(None, map(str.strip, lines)):
        if line.startswith(("- ", "+ ")):
            entries.append(_Entry(line.removeprefix("- ")))
        elif match := _FIELD.fullmatch(line):
            entries[-1].fields.append((match["name"], match["test"], match["text"]))
        elif match := _SCORE.fullmatch(line):
            entries[-1].fields.append(("score", match["test"], match["score"]))
        else:
            raise ValueError(f"{code}: {line!r} is no line of a sheet of families")

    def explained(seen: Seen) -> Explained:
        return _explain(entries, seen)

    explained.__doc__ = page
    family(code, *operators)(explained)
