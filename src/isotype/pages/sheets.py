"""Reads text files of rules, which are called sheets. For each code, a sheet contains an
explanation (the page). The entries that can be reported follow after it, with their conditions.

    # EX012 Title            begins the page of a code. Text above the first page is a comment
    = HEADER                 begins a section. Each kind of sheet uses the header differently: for
                             rows of variables, for names of operators, or not at all
    parameters: NAME, NAME   the variables that the program passes to this section
    set NAME if TEST: FACT   sets a variable to the value of a fact. If several lines have the same
                             name, the first line whose fact is not None applies
    let NAME if TEST: text   sets a variable to this text. If several lines have the same name, the
                             first line whose condition is true applies
    - title                  begins an entry, which can be reported
      RANK if TEST           the severity or score of the entry: the first rank whose condition is
                             true. An entry without a rank is not reported
      FIELD if TEST: text    a text of the entry: the first text whose condition is true
    + NAME -2 if TEST        includes the entries of another section and changes their scores by -2

In texts `{name}` is replaced by the value of this fact or variable. `{one|another|some text}` is
replaced by the value of the first name that has a value. If no name has a value, it is replaced by
the last part as literal text. `\\n` is a line break. A condition (TEST) consists of terms joined by
`and` and `or`, where `and` binds tighter. A term may begin with `not`:

    name                             true if the fact has a value that is not empty
    name = value, another value      true if the fact equals one of these values
    name == other name               true if the two facts are equal
    name ~ regex                     true if the pattern matches a part of the fact
    name < number, name >= number    compares the fact with the number
    name narrower than other name    true if the first dtype has fewer bits; also `wider than`

Each kind of sheet has its own facts, ranks and fields. A sheet is checked when it is loaded: each
name must be one of these facts or a variable of the section, and each variable must be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar, NamedTuple

from ..dtypes import itemsize


class SheetError(ValueError):
    """An error for a wrong line in a text file of rules. The message names the file and the line."""

    def __init__(self, sheet: str, line: int, message: str) -> None:
        super().__init__(f"{sheet}, line {line}: {message}")


class Term(NamedTuple):
    """One term of a condition, such as `not held = bf16, fp16`."""

    is_negated: bool
    name: str
    sign: str
    value: str


_SIGNS = (" ~ ", " == ", " = ", " narrower than ", " wider than ", " < ", " >= ")
NAME_SIGNS = ("==", "narrower than", "wider than")  # their right side is a name


@cache
def parse_test(test: str) -> tuple[tuple[Term, ...], ...]:
    """Parses a condition into its alternatives. An alternative is true if all its terms are true."""
    return tuple(
        tuple(_parse_term(term) for term in alternative.split(" and "))
        for alternative in test.split(" or ")
    )


def _parse_term(text: str) -> Term:
    term = text.removeprefix("not ")
    is_negated = term != text
    for sign in _SIGNS:
        name, separator, value = term.partition(sign)
        if separator:
            return Term(is_negated, name, sign.strip(), value)
    return Term(is_negated, term, "", "")


@cache
def names_in_text(text: str) -> tuple[str, ...]:
    """Returns the names in the braces of a text. If braces contain several alternatives, such as
    `{one|another|some text}`, the last alternative is no name and is left out.
    """
    names: list[str] = []
    for _, placeholder, _, _ in Formatter().parse(text):
        if placeholder is not None:
            *alternatives, last = placeholder.split("|")
            names += alternatives or [last]
    return tuple(names)


class Function(NamedTuple):
    """Defines the names of the form `KIND ARGUMENT`.

    evaluate   returns the value for an argument

    arguments  the allowed arguments; None if the argument is itself a name
    """

    evaluate: Callable[[Any, str], Any]
    arguments: Collection[str] | None = None


class Facts:
    """Looks up the values of the names in a text file of rules. Each kind of file has its own
    subclass, which defines the following tables. The tables also say which names a file may use.

    variables       the variables of the section
    fact_functions  for each name the function that returns its value
    functions       for each kind the definition of `KIND ARGUMENT`
    conversions     for each ending the function that converts the value in `NAME ENDING`
    attributes      the attributes that may follow a name, as in `device.kind`
    values          for each name the values with which a condition may compare it
    """

    fact_functions: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    functions: ClassVar[Mapping[str, Function]] = {}
    conversions: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    attributes: ClassVar[Collection[str]] = ()
    values: ClassVar[Mapping[str, Collection[str]]] = {}

    def __init__(self, variables: Mapping[str, Any] | None = None) -> None:
        self.variables: dict[str, Any] = dict(variables or {})

    def get(self, name: str) -> Any:
        """Returns the value of a variable or fact; None if the name has no value."""
        if name in self.variables:
            return self.variables[name]
        if name in self.fact_functions:
            return self.fact_functions[name](self)
        for ending, read in self.conversions.items():
            if name.endswith(ending):
                value = self.get(name.removesuffix(ending))
                return None if value is None else read(value)
        kind, _, argument = name.partition(" ")
        if argument and kind in self.functions:
            return self.functions[kind].evaluate(self, argument)
        return self.evaluate_other_name(name)

    @classmethod
    def find_variables(cls, name: str, variables: Collection[str]) -> set[str] | None:
        """Returns the variables of the section that occur in a name; None for an unknown name."""
        if name in variables:
            return {name}
        if name in cls.fact_functions:
            return set()
        for ending in cls.conversions:
            if name.endswith(ending):
                return cls.find_variables(name.removesuffix(ending), variables)
        kind, _, argument = name.partition(" ")
        if argument and kind in cls.functions:
            arguments = cls.functions[kind].arguments
            if arguments is None:
                return cls.find_variables(argument, variables)
            return set() if argument in arguments else None
        special_variables = cls.find_variables_in_other_name(name, variables)
        if special_variables is not None:
            return special_variables
        return cls._find_owner_variables(name, variables)

    @classmethod
    def _find_owner_variables(cls, name: str, variables: Collection[str]) -> set[str] | None:
        """Does the same as `find_variables` for a name with attributes, such as `device.kind` or
        `call.tensors[0]`.
        """
        owner, *attributes = re.split(r"[.\[]", name)
        if not attributes:
            return None
        for attribute in attributes:
            is_index = attribute.endswith("]")
            if not is_index and attribute not in cls.attributes:
                return None
        return cls.find_variables(owner, variables)

    def evaluate_other_name(self, name: str) -> Any:
        """Called for a name that the tables of this class do not contain. Subclasses that know
        further names return their values here.
        """
        return None

    @classmethod
    def find_variables_in_other_name(cls, name: str, variables: Collection[str]) -> set[str] | None:
        """Called by `find_variables` for a name that the tables of this class do not contain."""
        return None

    # ---- texts and tests
    def __getitem__(self, key: str) -> Any:
        *names, last = key.split("|")
        if names:
            return next(
                (value for name in names if (value := self.get(name)) not in (None, "")), last
            )
        value = self.get(last)
        if value is None and last not in self.variables:
            raise KeyError(key)
        return "" if value is None else value

    def format(self, text: str) -> str:
        return text.format_map(self).replace("\\n", "\n")

    def holds(self, test: str | None) -> bool:
        return test is None or any(
            all(self._term_holds(term) != term.is_negated for term in alternative)
            for alternative in parse_test(test)
        )

    def matches(self, name: str, pattern: str) -> bool:
        value = self._value(name)
        return value is not None and re.search(pattern, str(value)) is not None

    def _value(self, name: str) -> Any:
        value = self.get(name)
        owner_name, _, attribute = name.partition(".")
        if value is None and attribute:
            owner = self.get(owner_name)
            return None if owner is None else getattr(owner, attribute)
        return value

    def _term_holds(self, term: Term) -> bool:
        match term.sign:
            case "~":
                return self.matches(term.name, term.value)
            case "==":
                return bool(self._value(term.name) == self.get(term.value))
            case "=":
                value = self._value(term.name)
                return value is not None and str(value) in term.value.split(", ")
            case "<" | ">=":
                return _compares_number(self._value(term.name), term.sign, float(term.value))
            case "narrower than":
                return _is_narrower(self.get(term.name), self.get(term.value))
            case "wider than":
                return _is_narrower(self.get(term.value), self.get(term.name))
        return bool(self.get(term.name))


def _compares_number(value: Any, sign: str, threshold: float) -> bool:
    try:
        number = float(str(value))
    except ValueError:
        return False
    if sign == "<":
        return number < threshold
    return number >= threshold


def _is_narrower(narrow: Any, wide: Any) -> bool:
    try:
        return narrow is not None and itemsize(str(narrow)) < itemsize(str(wide))
    except ValueError:  # no dtype
        return False


class Field(NamedTuple):
    """A line `NAME if TEST: text`. In a line `RANK if TEST`, the text is the rank."""

    name: str
    test: str | None
    text: str
    line: int


@dataclass(slots=True)
class Entry:
    """An entry of a section. The first entry of a section is special: it contains the section's
    variables.

    title      the title; for a line `+ NAME -2`, the name
    is_include  whether the line begins with `+`
    offset     the number in a line `+ NAME -2`
    test       the condition of a line that begins with `+`
    """

    title: str
    line: int
    fields: list[Field] = field(default_factory=list)
    ranks: list[Field] = field(default_factory=list)
    is_include: bool = False
    offset: float = 0.0
    test: str | None = None

    def text(self, name: str, facts: Facts) -> str:
        """Returns the first text of this field whose condition is true; "" if no condition is true."""
        return next(
            (
                facts.format(line.text)
                for line in self.fields
                if line.name == name and facts.holds(line.test)
            ),
            "",
        )

    def severity_or_score(self, facts: Facts) -> str:
        return next((line.text for line in self.ranks if facts.holds(line.test)), "")


_INCLUDE = re.compile(r"\+ (?P<name>.+?)(?: (?P<offset>-?\d+))?(?: if (?P<test>.+))?")


@dataclass(slots=True)
class Section:
    """One section of a text file of rules. `code` and `page` are the code and the explanation that
    stand above the section in the file. `header` is the text after `=`. The first of the `entries`
    contains the section's variables.

    sheet  the name of the text file
    """

    sheet: str
    line: int
    code: str
    page: str
    header: str
    entries: list[Entry]

    def to_page(self) -> str:
        """Returns the page that `isotype doctor explain CODE` prints."""
        return f"# {self.code}: {self.page}\n"

    @property
    def parameters(self) -> list[str]:
        """Returns the names of the variables whose values the program sets before it uses the
        section.
        """
        return [
            name
            for line in self.entries[0].fields
            if line.name == "parameters"
            for name in line.text.split(", ")
        ]

    def define_variables(self, facts: Facts) -> None:
        """Adds the variables of the section to the variables of `facts`."""
        head = self.entries[0]
        for line in head.fields:
            kind, _, name = line.name.partition(" ")
            if kind == "set" and facts.variables.get(name) is None and facts.holds(line.test):
                facts.variables[name] = facts.get(facts.format(line.text))
            elif kind == "let" and name not in facts.variables:
                facts.variables[name] = head.text(line.name, facts)

    def matching_entries(self, facts: Facts) -> Iterator[tuple[str, Entry]]:
        """Yields (rank, entry) for each entry that applies to these facts, in the order of the
        file.
        """
        self.define_variables(facts)
        for entry in self.entries[1:]:
            rank = entry.severity_or_score(facts)
            if rank:
                yield rank, entry


def read_sections(path: Path, *, rank_pattern: str, field_pattern: str) -> Iterator[Section]:
    """Yields the sections of one text file of rules, in their order. `rank_pattern` and
    `field_pattern` are regular expressions.

    Raises  SheetError for a line that has none of the allowed forms
    """
    patterns = _LinePatterns(
        re.compile(
            rf"(?P<name>let [\w ]+?|set \w+|parameters|{field_pattern})"
            r"(?: if (?P<test>.+?))?: (?P<text>.*)"
        ),
        re.compile(rf"(?P<rank>{rank_pattern})(?: if (?P<test>.+))?"),
    )
    section: Section | None = None
    code = ""
    page: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(("# ", "=")) and section is not None:
            yield section
            section = None
        if line.startswith("# "):
            code, _, title = line[2:].partition(" ")
            page = [title]
        elif line.startswith("=") and code:
            header = line[1:].strip()
            head = Entry("", number)
            section = Section(path.name, number, code, "\n".join(page).strip(), header, [head])
        elif section is None:
            page.append(line)
        elif line.strip():
            _add_line(section, line.strip(), number, patterns)
    if section is not None:
        yield section


class _LinePatterns(NamedTuple):
    field: re.Pattern[str]
    rank: re.Pattern[str]


def _add_line(section: Section, line: str, number: int, patterns: _LinePatterns) -> None:
    """Parses one line below the header of a section and adds it to the section."""
    entry = section.entries[-1]
    if line.startswith("- "):
        section.entries.append(Entry(line.removeprefix("- "), number))
    elif match := _INCLUDE.fullmatch(line):
        include = Entry(match["name"], number, is_include=True, test=match["test"])
        include.offset = float(match["offset"] or 0)
        section.entries.append(include)
    elif match := patterns.field.fullmatch(line):
        entry.fields.append(Field(match["name"], match["test"], match["text"], number))
    elif match := patterns.rank.fullmatch(line):
        entry.ranks.append(Field("", match["test"], match["rank"], number))
    else:
        raise SheetError(section.sheet, number, f"{line!r} is no line of a sheet")
