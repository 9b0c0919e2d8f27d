"""`[tool.isotype.lint]` of the nearest pyproject.toml.

[tool.isotype.lint]
select = ["LT"]            # only these (codes or prefixes); rules that are off by default are switched on by naming them
extend-select = ["LT009"]  # these too
ignore = ["LT007"]         # never these
possible = true            # also, as notes, what no run proves and nobody here is seen to reach
exclude = ["third_party"]  # glob patterns of files and folders
[tool.isotype.lint.per-file-ignores]
"tests/*" = ["LT007"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .rule import all_rules
from .suppress import PAGES

_LISTS = ("select", "extend-select", "ignore", "exclude")
_KEYS = (*_LISTS, "possible", "per-file-ignores")


@dataclass(frozen=True, kw_only=True)
class LintConfig:
    """root: the folder of the pyproject.toml, to which its patterns are relative; named: the folders to be linted; files: those named."""

    select: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    possible: bool = False
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    root: Path = field(default_factory=Path.cwd)
    named: tuple[Path, ...] = ()
    files: frozenset[Path] = frozenset()

    def active(self, *, prove: bool = False, by_name: bool = False) -> list[str]:
        """The codes of the rules to run, after select, extend-select and ignore.

        prove    those that are off as well: findings of such a rule are printed only where a run proves them
        by_name  for a file that is named itself, and not by its folder
        """
        chosen = []
        for code, rule in all_rules().items():
            # a bare family ("LT") selects what is on by default; a rule that is off wants its own code, or ALL
            if self.select:
                wanted = any(p in (code, "ALL") or (code.startswith(p) and rule.on) for p in self.select)
            else:
                wanted = rule.on or prove or (by_name and rule.by_name)
            wanted = wanted or any(p in (code, "ALL") for p in self.extend_select)
            if wanted and not code.startswith(tuple(self.ignore)):
                chosen.append(code)
        return chosen

    def ignored_in(self, path: Path) -> tuple[str, ...]:
        """Prefixes of codes that `per-file-ignores` silences in this file."""
        if not self.per_file_ignores:
            return ()
        try:
            relative = path.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError:
            relative = path.as_posix()
        return tuple(code for pattern, codes in self.per_file_ignores if fnmatch(relative, pattern) for code in codes)


def check_codes(codes: Iterable[str], where: str) -> tuple[str, ...]:
    """The codes in capitals.

    Raises  UsageError for one that is neither a code nor the beginning of one.
    """
    known = ["ALL", *all_rules(), *PAGES]
    given = tuple(code.strip().upper() for code in codes if code.strip())
    for code in given:
        if not any(k.startswith(code) for k in known):
            close = get_close_matches(code, known, n=1)
            raise UsageError(f"{where}: no rule {code}" + (f"; did you mean {close[0]}?" if close else ""))
    return given


def find_pyproject(start: Path) -> Path | None:
    """The nearest pyproject.toml at or above `start` that has a `[tool.isotype.lint]` table."""
    folder = start.resolve() if start.is_dir() else start.resolve().parent
    for candidate in (folder, *folder.parents):
        file = candidate / "pyproject.toml"
        if file.is_file() and "tool.isotype" in file.read_text(encoding="utf-8", errors="replace"):
            return file
    return None


def load(file: Path | None) -> LintConfig:
    """The configuration of one pyproject.toml; None gives the defaults.

    Raises  UsageError naming file and key for a key or value that means nothing.
    """
    if file is None:
        return LintConfig()
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("isotype", {}).get("lint", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{file}: tool.isotype.lint: expected a table")
    for key in table:
        if key not in _KEYS:
            close = get_close_matches(key, _KEYS, n=1)
            raise UsageError(f"{file}: tool.isotype.lint.{key}: no such key" + (f"; did you mean {close[0]}?" if close else ""))
    lists: dict[str, tuple[str, ...]] = {key: _strings(table.get(key, []), f"{file}: tool.isotype.lint.{key}") for key in _LISTS}
    for key in ("select", "extend-select", "ignore"):
        lists[key] = check_codes(lists[key], f"{file}: tool.isotype.lint.{key}")
    if not isinstance(table.get("possible", False), bool):
        raise UsageError(f"{file}: tool.isotype.lint.possible: expected true or false, got {table['possible']!r}")
    per_file = table.get("per-file-ignores", {})
    if not isinstance(per_file, dict):
        raise UsageError(f"{file}: tool.isotype.lint.per-file-ignores: expected a table of pattern = [codes]")
    pairs = []
    for pattern, codes in per_file.items():
        where = f'{file}: tool.isotype.lint.per-file-ignores."{pattern}"'
        pairs.append((pattern, check_codes(_strings(codes, where), where)))
    return LintConfig(
        select=lists["select"],
        extend_select=lists["extend-select"],
        ignore=lists["ignore"],
        exclude=lists["exclude"],
        possible=table.get("possible", False),
        per_file_ignores=tuple(pairs),
        root=file.parent,
    )


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{where}: expected a list of strings, got {value!r}")
    return tuple(value)
