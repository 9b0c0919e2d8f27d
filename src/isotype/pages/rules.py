"""Registers rules: functions that look at facts and yield findings. Each has a code, and its docstring is its page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from ..finding import Finding


def docstring_page(code: str, rule: Callable[..., Any]) -> str:
    title, _, rest = (inspect.getdoc(rule) or "").partition("\n")
    return f"# {code}: {title}\n{rest}\n"


Facts = TypeVar("Facts")


def registered(
    rules: dict[str, Callable[[Facts], Iterator[Finding]]], code: str
) -> Callable[[Callable[[Facts], Iterator[Finding]]], Callable[[Facts], Iterator[Finding]]]:
    """Decorates a rule: adds it to `rules` under its code, which its findings get."""

    def register(function: Callable[[Facts], Iterator[Finding]]) -> Callable[[Facts], Iterator[Finding]]:
        assert code not in rules, code

        @wraps(function)
        def coded(facts: Facts) -> Iterator[Finding]:
            for finding in function(facts):
                yield replace(finding, code=code)

        rules[code] = coded
        return coded

    return register
