"""Rules as sheets of text: pages, and below each what is said when, in words that a reader of the
page can read as well.

    # EX012 Title                      the page of a code begins; what follows is its text, and what
                                       stands above the first a remark
    = a section                        what is below holds for this section
    let NAME if TEST: text             a word for the texts below; the first whose test holds, of
                                       several with one name
    - what is said
      RANK if TEST                     the first whose test holds; nothing is said where none does
      FIELD if TEST: text              likewise

In texts `{name}` is a fact, and `{one|another|some words}` the first of these that is known, or the
last as it stands; `\\n` is a line break. A test is made of terms joined by `and`, and those by
`or`; a term may begin with `not`: `name` (known and not empty), `name = value, another value`,
`name == other name`, `name ~ regex`. Which facts, ranks and fields there are is for the reader of a
sheet to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..finding import Finding, Place, Severity


class Facts:
    """What is known by name; made: words that are handed over, and those that the sheet itself
    made.
    """

    def __init__(self, made: Mapping[str, Any] | None = None) -> None:
        self.made: dict[str, Any] = dict(made or {})

    def get(self, name: str) -> Any:
        """The fact, or None where it is not known."""
        return self.made.get(name)

    def holds_specially(self, term: str) -> bool | None:
        """A term of a kind of its own; None where it is none."""
        return None

    def __getitem__(self, key: str) -> Any:
        *names, last = key.split("|")
        if names:
            return next(
                (value for name in names if (value := self.get(name)) not in (None, "")), last
            )
        value = self.get(last)
        if value is None and last not in self.made:
            raise KeyError(key)
        return "" if value is None else value

    def say(self, text: str) -> str:
        return text.format_map(self).replace("\\n", "\n")

    def holds(self, test: str | None) -> bool:
        return test is None or any(
            all(map(self._term, part.split(" and "))) for part in test.split(" or ")
        )

    def _term(self, term: str) -> bool:
        if term.startswith("not "):
            return not self._term(term[4:])
        if (own := self.holds_specially(term)) is not None:
            return own
        for sign in (" ~ ", " == ", " = "):
            left, found, right = term.partition(sign)
            if not found:
                continue
            name, _, attribute = left.partition(".")
            value = self.get(left)
            if value is None and attribute and (owner := self.get(name)) is not None:
                value = getattr(owner, attribute)
            if sign == " == ":
                return bool(value == self.get(right))
            return value is not None and (
                re.search(right, str(value)) is not None
                if sign == " ~ "
                else str(value) in right.split(", ")
            )
        return bool(self.get(term))


@dataclass(slots=True)
class Entry:
    """A section's head, or one thing to be said: its title, its fields in order (name, test, text)
    and its ranks (test, word).
    """

    title: str
    fields: list[tuple[str, str | None, str]] = field(default_factory=list)
    ranks: list[tuple[str | None, str]] = field(default_factory=list)

    def first(self, name: str, facts: Facts) -> str:
        """The first text of this field whose test holds, or ""."""
        return next(
            (
                facts.say(text)
                for known, test, text in self.fields
                if known == name and facts.holds(test)
            ),
            "",
        )

    def rank(self, facts: Facts) -> str:
        return next((word for test, word in self.ranks if facts.holds(test)), "")

    def make(self, facts: Facts, kind: str = "let") -> None:
        """Makes the words of a head."""
        for name in dict.fromkeys(
            name for name, _, _ in self.fields if name.startswith(f"{kind} ")
        ):
            facts.made[name.partition(" ")[2]] = self.first(name, facts)


@dataclass(frozen=True, slots=True)
class Section:
    """code and page stand above it; entries: its head first."""

    code: str
    page: str
    name: str
    entries: list[Entry]

    def as_page(self) -> str:
        """What `isotype doctor explain CODE` prints."""
        return f"# {self.code}: {self.page}\n"


def sections(path: Path, *, ranks: str, fields: str) -> Iterator[Section]:
    """Those of one sheet, in order; `ranks` and `fields` are regular expressions for their words.

    Raises  ValueError for a line that is none of a sheet's.
    """
    wanted = re.compile(rf"(?P<name>let [\w ]+?|{fields})(?: if (?P<test>.+?))?: (?P<text>.*)")
    ranked = re.compile(rf"(?P<rank>{ranks})(?: if (?P<test>.+))?")
    for sheet in re.split(r"(?m)^# ", path.read_text(encoding="utf-8"))[1:]:
        page, *parts = re.split(r"(?m)^=", sheet)
        code, _, rest = page.partition(" ")
        for part in parts:
            name, *lines = part.splitlines()
            entries = [Entry("")]
            for line in filter(None, map(str.strip, lines)):
                if line.startswith(("- ", "+ ")):
                    entries.append(Entry(line.removeprefix("- ")))
                elif match := wanted.fullmatch(line):
                    entries[-1].fields.append((match["name"], match["test"], match["text"]))
                elif match := ranked.fullmatch(line):
                    entries[-1].ranks.append((match["test"], match["rank"]))
                else:
                    raise ValueError(f"{path.name}, {code}: {line!r} is no line of a sheet")
            yield Section(code, rest.strip(), name.strip(), entries)


def texts(path: Path) -> Callable[..., Finding]:
    """The findings of a sheet whose sections are codes: `say(code, place, details, **words)` makes
    the first entry whose rank holds.
    """
    known = {
        s.code: s.entries
        for s in sections(path, ranks="error|warning|note", fields="cause|fix|declared|observed")
    }

    def say(
        code: str, place: Place, details: tuple[tuple[str, str], ...] = (), /, **words: Any
    ) -> Finding:
        facts = Facts(words)
        head, *entries = known[code]
        head.make(facts)
        entry = next(entry for entry in entries if entry.rank(facts))
        said: dict[str, Any] = {
            name: entry.first(name, facts) or None
            for name in ("cause", "fix", "declared", "observed")
        }
        severity = Severity.parse(entry.rank(facts))
        return Finding(
            code=code,
            severity=severity,
            message=facts.say(entry.title),
            place=place,
            details=details,
            **said,
        )

    return say
