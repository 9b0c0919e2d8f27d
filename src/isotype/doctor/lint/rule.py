"""What a rule is: a code, a name, a fix safety, a docstring that is its page, and one visitor."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from ...finding import Severity
from .dataflow.events import Scenario
from .repository import Repository
from .source import SourceFile


class FixSafety(StrEnum):
    """safe: `--fix` applies it and no working program computes anything else; unsafe: it changes values; none: no automatic fix."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of source, applied by `fix.py` with libcst.

    kind      append: put `text` after the expression; keyword: add the argument `text` to the call; finally: move the statement at
              `until` into a `finally` whose `try` holds the statements between the two
    line, column, end_line, end_column  the expression or statement meant, as `ast` counts them
    """

    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str = ""
    until: int = 0

    @classmethod
    def at(cls, kind: str, node: ast.expr | ast.stmt, text: str = "", until: int = 0) -> Edit:
        return cls(kind, node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, text, until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What a visitor yields; `run.py` makes a Finding of it.

    scenario  what it supposes: nothing is said where the repository speaks against that (`repository.py`)
    elsewhere asks the repository, None for a lone file, why nobody is likely to meet it, or ""
    weak      why the code itself makes the scenario unlikely, or ""
    reached   why whoever runs the code meets it, where the code itself or a framework's contract says so
    only_reached  whether nothing is to be said where nobody is seen to meet it, not even as possible
    leads     asks the repository, None for a lone file, what leads there: the chain, or "" and what is missing
    """

    node: ast.expr | ast.stmt
    message: str
    cause: str
    fix: str
    severity: Severity | None = None
    details: tuple[tuple[str, str], ...] = ()
    symbol: str | None = None
    edit: Edit | None = None
    scenario: Scenario | None = None
    elsewhere: Callable[[Repository | None], str] | None = None
    weak: str = ""
    reached: str = ""
    only_reached: bool = False
    leads: Callable[[Repository | None], tuple[str, str]] | None = None


SECTIONS = ("Why", "Example", "Use instead", "Fix safety", "Known problems")


class Rule:
    """Base of every rule.

    words  the rule is asked only about files whose text has one of them (a cheap first look)
    in_tests  False for a rule that supposes dtypes: a function called test_... fixes its own
    on     False for a rule of which fewer than 8 in 10 findings were true at first look, or that is new: in a folder it has to be selected
           by its code, or its findings to be reached and proved
    by_name  whether a rule that is off reports all the same on a file that is named itself: whoever names a file asks about it
    first_look  how many of its findings were true, of how many read, in packages that were linted for the first time
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity] = Severity.WARNING
    fix_safety: ClassVar[FixSafety] = FixSafety.NONE
    on: ClassVar[bool] = True
    by_name: ClassVar[bool] = False
    first_look: ClassVar[tuple[int, int] | None] = None
    words: ClassVar[tuple[str, ...]] = ("torch",)
    in_tests: ClassVar[bool] = True

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        raise NotImplementedError

    @classmethod
    def page(cls) -> str:
        """The docstring as Markdown: a title, the facts, the sections; one on the fix where the docstring has none: there is none."""
        title, _, body = _dedented(cls.__doc__ or "").partition("\n")
        if "\nFix safety\n" not in body:
            body = body.replace("\nKnown problems\n", "\nFix safety\n----------\nThere is no automatic fix.\n\nKnown problems\n")
        named = ", but for a file that is named itself" if cls.by_name and not cls.on else ""
        facts = f"severity {cls.severity}, {'on' if cls.on else 'off'} by default{named}, automatic fix: {cls.fix_safety}"
        if cls.first_look:
            true, read = cls.first_look
            facts += f"; at first look on code not seen before, possible findings included, {true} of {read} were true"
        else:
            facts += "; no finding yet in code not seen before: how often it is right is not known"
        body = re.sub(rf"^({'|'.join(SECTIONS)})\n-+$", r"## \1", body, flags=re.MULTILINE)
        return f"# {cls.code} {cls.name}: {title}\n\n({facts})\n{body.rstrip()}\n"


def _dedented(text: str) -> str:
    first, _, rest = text.partition("\n")
    margins = [len(line) - len(line.lstrip()) for line in rest.splitlines() if line.strip()]
    margin = min(margins, default=0)
    return "\n".join([first.strip(), *(line[margin:].rstrip() for line in rest.splitlines())])


@cache
def all_rules() -> dict[str, Rule]:
    """Code -> rule, from the files `rules/ltNNN_*.py`."""
    found: dict[str, Rule] = {}
    for path in sorted((Path(__file__).parent / "rules").glob("lt[0-9]*.py")):
        module = import_module(f"{__package__}.rules.{path.stem}")
        own = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Rule) and v.__module__ == module.__name__]
        assert len(own) == 1, f"{path.name} has {len(own)} rules, expected one"
        rule = own[0]()
        assert path.stem.startswith(rule.code.lower()), f"{path.name} holds {rule.code}"
        found[rule.code] = rule
    return found
