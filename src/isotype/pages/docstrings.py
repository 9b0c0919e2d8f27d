"""Makes a page of the docstring of a rule: the first line is its title."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def docstring_page(code: str, rule: Callable[..., Any]) -> str:
    title, _, rest = (inspect.getdoc(rule) or "").partition("\n")
    return f"# {code}: {title}\n{rest}\n"
