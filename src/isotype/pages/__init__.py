"""Finds the documentation page for the code of a fault. The page explains why the fault matters,
gives an example, and says what to do. `isotype doctor explain CODE` prints it.

A page is the file `CODE.md` in this folder, or the result of `page(code)` of the module that loads
the rule. This module imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from importlib import import_module, resources
from typing import Any, TypeVar

from ..finding import Finding

# Prefix of a code -> the module, which imports no torch, with `page(code) -> str | None` and
# `codes() -> list[str]`.
PAGE_MODULES = {
    "PR": "isotype.precision.contradictions",
    "CF": "isotype.doctor.check.rules",
    "EX": "isotype.doctor.explain.page",
    "RN": "isotype.doctor.run.causes",
}


def codes() -> list[str]:
    """Returns the codes of all faults that `isotype doctor explain CODE` can describe."""
    names = [
        file.name.removesuffix(".md")
        for file in resources.files(__name__).iterdir()
        if file.name.endswith(".md")
    ]
    for module in PAGE_MODULES.values():
        names += import_module(module).codes()
    return sorted(set(names))


def page(code: str) -> str | None:
    """Returns the page of a code as Markdown; None for a code that does not exist."""
    code = code.upper()
    file = resources.files(__name__) / f"{code}.md"
    if code.isalnum() and file.is_file():
        return file.read_text(encoding="utf-8")
    if module := PAGE_MODULES.get(code[:2]):
        text: str | None = import_module(module).page(code)
        return text
    return None


def docstring_page(code: str, rule: Callable[..., Any]) -> str:
    title, _, rest = (inspect.getdoc(rule) or "").partition("\n")
    return f"# {code}: {title}\n{rest}\n"


Facts = TypeVar("Facts")


def register_rule(
    rules: dict[str, Callable[[Facts], Iterator[Finding]]], code: str
) -> Callable[[Callable[[Facts], Iterator[Finding]]], Callable[[Facts], Iterator[Finding]]]:
    """Returns a decorator that adds a rule to `rules` under its code and sets the code of its
    findings.
    """

    def register(
        function: Callable[[Facts], Iterator[Finding]],
    ) -> Callable[[Facts], Iterator[Finding]]:
        assert code not in rules, code

        @wraps(function)
        def find_with_code(facts: Facts) -> Iterator[Finding]:
            for finding in function(facts):
                yield replace(finding, code=code)

        rules[code] = find_with_code
        return find_with_code

    return register
