"""The families of errors: sheets (`families/*.txt`, read by `pages.sheets`), and their pages.

A section is headed by the operators that refused, with `;` between them, and has a `message`; a rank is a cause's score, its fields are
`why`, `fix` and `seen`, the evidence. `+ outside autocast -2 if TEST` stands for causes of `shared.txt`, their scores moved so.
Two terms are tests of their own: `left > right`, a wider dtype, and `frames ~ regex`, a frame of the traceback, `{frame}` from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dtypes import is_float, itemsize, torch_word
from ...finding import Severity
from ...pages import docstring_page
from ...pages.sheets import Entry, sections
from ...pages.sheets import Facts as Known
from .recognise import dtype_word
from .situation import Seen, failing_call


@dataclass(frozen=True, kw_only=True)
class Cause:
    """name: in a few words; score: higher is likelier; because: the evidence seen, empty when it is only the usual cause."""

    name: str
    score: float
    why: str
    fix: str
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class Explained:
    message: str
    causes: list[Cause]
    severity: Severity = Severity.ERROR

    def ranked(self) -> list[Cause]:
        return sorted(self.causes, key=lambda c: -c.score)


FAMILIES: dict[str, tuple[str, Callable[[Seen], Explained]]] = {}  # operator -> (code, function, whose docstring is the page)
_SHARED: dict[str, list[Entry]] = {}  # causes that several families take in


def wider(left: str, right: str) -> bool:
    try:
        return itemsize(left) > itemsize(right)
    except ValueError:
        return False


def is_floating(word: str) -> bool:
    try:
        return is_float(word)
    except ValueError:
        return False


_READINGS: dict[str, Callable[[str], Any]] = {
    " as dtype": dtype_word,
    " as dtypes": lambda words: ", ".join(dtype_word(word) for word in words.split(",") if word.strip()),
    " as torch": torch_word,
    " as mixed": lambda word: word.replace("-true", "-mixed"),
    " without spaces": str.strip,
    " as list": lambda words: ", ".join(sorted(word.strip().removeprefix("torch.") for word in words.split(","))),
    " as printed dtype": lambda text: next((dtype_word(word) for word in re.findall(r"dtype=(torch\.\w+)", text)), ""),
    " in lower case": str.lower,
    " in brief": lambda text: " ".join(text.split())[:160],
    " in 160": lambda text: text[:160],
    " without quotes": lambda text: text.replace("'", ""),
    " is floating": is_floating,
}


class Facts(Known):
    """What an incident showed, by name: a sheet's own words, dtypes by role, words of the text, flags of the situation, and the following.

    operator, text, half, torch_half, autocast  as in `Seen`; `autocast is on` is the flag
    where FLAG        the frame that proves a flag, in words
    word NAME         a word of the text, where a dtype's role has the same name
    NAME as dtype, NAME as list, and the other endings of `_READINGS`   a word, read so
    first of set, second of set   the dtypes of a set that the text prints
    package NAME      whether a frame lies in it
    call, in_place, product   the failing call; where it is a product in place; where it is a product of two tensors
    user, inner, frame        the innermost frame of the user's code, of all, and the one that a test found; its `place` and `line`
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.frame: Any = None

    def get(self, name: str) -> Any:
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
            case "first" | "second" if rest and "set" in seen.words:
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
        return name in situation or None

    def holds_specially(self, term: str) -> bool | None:
        left, found, right = term.partition(" > ")
        if found:
            return wider(str(self.get(left)), str(self.get(right)))
        if term.startswith("frames ~ "):
            frame = self.seen.situation.mentions(term.removeprefix("frames ~ "))
            self.frame = frame or self.frame
            return frame is not None
        return None


def _causes(entries: list[Entry], facts: Facts, moved: float = 0.0) -> Iterator[Cause]:
    for entry in entries:
        if shared := re.fullmatch(r"\+ (.+?)(?: (-?\d+))?(?: if (.+))?", entry.title):
            yield from _causes(_SHARED[shared[1]], facts, float(shared[2] or 0)) if facts.holds(shared[3]) else ()
        elif score := entry.rank(facts):
            why, fix, because = (entry.first(name, facts) for name in ("why", "fix", "seen"))
            yield Cause(name=facts.say(entry.title), score=float(score) + moved, why=why, fix=fix, because=because)


def register(path: Path) -> None:
    """Makes the families of one sheet."""
    for section in sections(path, ranks=r"[\d.]+", fields="message|severity|why|fix|seen"):

        def explained(seen: Seen, entries: list[Entry] = section.entries) -> Explained:
            facts, head = Facts(seen), entries[0]
            head.make(facts)
            causes = list(_causes(entries[1:], facts))
            severity = Severity.parse(head.first("severity", facts) or "error")
            return Explained(message=head.first("message", facts), causes=causes, severity=severity)

        explained.__doc__ = section.page
        for operator in section.name.split("; "):
            assert operator not in FAMILIES, operator
            FAMILIES[operator] = (section.code, explained)


_NOT_DTYPE = """# EX000: not a dtype error

The text holds an error (or none), and nothing in it speaks of a disagreement between dtypes. Shapes, devices, memory and missing keys are
other matters; isotype says so rather than guess.

If you think it is one after all: paste the whole traceback, from its first line, or run the program under `isotype doctor trace`.
"""


def codes() -> list[str]:
    return sorted({"EX000", *(code for code, _ in FAMILIES.values())})


def page(code: str) -> str | None:
    if code == "EX000":
        return _NOT_DTYPE
    return next((docstring_page(code, function) for known, function in FAMILIES.values() if known == code), None)


_FAMILIES = Path(__file__).parent / "families"
_SHARED.update(
    (section.name, section.entries[1:]) for section in sections(_FAMILIES / "shared.txt", ranks="[\\d.]+", fields="why|fix|seen")
)
for _sheet in sorted(_FAMILIES.glob("*.txt")):
    if _sheet.name != "shared.txt":
        register(_sheet)
