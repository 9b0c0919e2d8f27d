"""How the code reads: density, decisions and names, as `make size` prints and `tests/test_words.py` holds them.

    python benchmarks/words.py              # every room of src/isotype, and the whole
    python benchmarks/words.py FOLDER --top # one folder, with the names and functions to look at

tokens a line           tokens without comments, by lines of the file (PEFT, TRL and typer have 4)
conditionals            conditional expressions in 1,000 lines
private names           of 1,000 names that are bound (variables, arguments, functions, classes,
                        attributes), those that are one participle, preposition, pronoun or question
                        word alone, where the field has a noun
oddly named functions   percent of functions that begin or end in such a word: `kind_of`
heavy functions         functions with more than 25 decisions: branches, loops, handlers,
                        conditions, operands of and / or
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "isotype"
MAX_DECISIONS = 25

PRIVATE_WORDS = frozenset(
    [
        "found",
        "given",
        "made",
        "said",
        "told",
        "asked",
        "kept",
        "wanted",
        "left",
        "gone",
        "taken",
        "meant",
        "shown",
        "done",
        "seen",
        "known",
        "named",
        "needed",
        "put",
        "own",
        "one",
        "ones",
        "why",
        "what",
        "where",
        "how",
        "when",
        "which",
        "who",
        "whose",
        "other",
        "others",
        "another",
        "same",
        "such",
        "all",
        "both",
        "beside",
        "before",
        "after",
        "behind",
        "within",
        "without",
        "again",
        "once",
        "now",
        "then",
        "here",
        "there",
        "apart",
        "instead",
        "whole",
        "until",
        "since",
        "thing",
        "things",
        "way",
        "word",
        "words",
        "place",
        "places",
        "them",
        "they",
        "it",
        "its",
    ]
)
FIRST_WORDS = frozenset(
    [
        "of",
        "why",
        "what",
        "as",
        "in",
        "by",
        "where",
        "how",
        "which",
        "within",
        "beside",
        "without",
        "those",
        "that",
        "said",
        "made",
        "given",
        "found",
        "asked",
        "kept",
        "so",
        "when",
        "whose",
        "until",
    ]
)
LAST_WORDS = frozenset(["of", "in", "by", "with", "for", "from", "at", "as", "on"])
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.Assert,
    ast.With,
    ast.match_case,
)
LAYOUT_TOKENS = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


@dataclass
class Reading:
    """Counts over the Python files of a folder, and the names behind them."""

    lines: int = 0
    tokens: int = 0
    conditionals: int = 0
    functions: int = 0
    names: Counter[str] = field(default_factory=Counter)
    odd_functions: list[str] = field(default_factory=list)
    heavy_functions: list[str] = field(default_factory=list)

    def add(self, other: Reading) -> None:
        """Adds the counts of another reading."""
        self.lines += other.lines
        self.tokens += other.tokens
        self.conditionals += other.conditionals
        self.functions += other.functions
        self.names.update(other.names)
        self.odd_functions += other.odd_functions
        self.heavy_functions += other.heavy_functions

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.lines)

    @property
    def conditionals_per_1000_lines(self) -> float:
        return 1000 * self.conditionals / max(1, self.lines)

    @property
    def private_names(self) -> Counter[str]:
        return Counter({name: n for name, n in self.names.items() if is_private(name)})

    @property
    def private_per_1000_names(self) -> float:
        return 1000 * self.private_names.total() / max(1, self.names.total())

    @property
    def odd_percent(self) -> float:
        return 100 * len(self.odd_functions) / max(1, self.functions)


def is_private(name: str) -> bool:
    return name.strip("_").lower() in PRIVATE_WORDS


def is_oddly_named(name: str) -> bool:
    parts = [part for part in name.strip("_").lower().split("_") if part]
    if len(parts) == 1:
        return parts[0] in FIRST_WORDS
    return len(parts) > 1 and (parts[0] in FIRST_WORDS or parts[-1] in LAST_WORDS)


def count_decisions(function: ast.AST) -> int:
    """1, plus one for each branch, loop, handler, condition and further operand of `and` / `or`."""
    decisions = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            decisions += 1
        elif isinstance(node, ast.BoolOp):
            decisions += len(node.values) - 1
    return decisions


def walk_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The module and its statements at any depth. Expressions, which are most nodes of a tree, are
    not visited.
    """
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            pending += getattr(node, part, ())


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that the nodes of a module bind, each as often as it is bound."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@functools.cache
def read_file(path: Path) -> Reading:
    """Returns the counts of a file."""
    reading = Reading()
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    reading.lines += len(text.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        reading.tokens += token.type not in LAYOUT_TOKENS
    reading.names.update(bound_names(nodes))
    for node in nodes:
        if isinstance(node, ast.IfExp):
            reading.conditionals += 1
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            reading.functions += 1
            place = f"{path}:{node.lineno} {node.name}"
            if is_oddly_named(node.name):
                reading.odd_functions.append(place)
            if count_decisions(node) > MAX_DECISIONS:
                reading.heavy_functions.append(place)
    return reading


def read_folder(folder: Path) -> Reading:
    reading = Reading()
    for path in sorted(folder.rglob("*.py")):
        reading.add(read_file(path))
    return reading


def inner_modules_in_tests(tests: Path) -> set[str]:
    """Modules below `isotype` that test files import; tests/api.py is left out."""
    modules = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCE.rglob("*.py")
    }
    imported = set()
    for path in tests.rglob("*.py"):
        if path == tests / "api.py" or "fixtures" in path.parts:
            continue
        for node in walk_statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                parents = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= (parents & modules) or {str(node.module)}
    return {name for name in imported & modules if name.count(".") > 0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="*", type=Path)
    parser.add_argument("--top", action="store_true", help="name what is counted")
    options = parser.parse_args()
    folders = options.folder or [*sorted(p for p in SOURCE.iterdir() if p.is_dir()), SOURCE]
    columns = "tokens/line  conditionals  private  odd %  heavy"
    print(f"{'':24}{'lines':>7}  {columns}")
    for folder in folders:
        reading = read_folder(folder)
        if not reading.lines:
            continue
        print(
            f"{folder.name:24}{reading.lines:>7}  {reading.tokens_per_line:11.1f}"
            f"  {reading.conditionals_per_1000_lines:12.0f}  {reading.private_per_1000_names:7.1f}"
            f"  {reading.odd_percent:5.1f}  {len(reading.heavy_functions):5}"
        )
        if options.top:
            print(*(f"  {name} {n}" for name, n in reading.private_names.most_common()), sep="\n")
            print(*(f"  odd    {place}" for place in reading.odd_functions), sep="\n")
            print(*(f"  heavy  {place}" for place in reading.heavy_functions), sep="\n")


if __name__ == "__main__":
    main()
