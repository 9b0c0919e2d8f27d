"""A page that is the docstring of its rule: the first line its title, the rest as it stands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def docstring_page(code: str, rule: Callable[..., Any]) -> str:
    title, _, rest = (inspect.getdoc(rule) or "").partition("\n")
    return f"# {code}: {title}\n{rest}\n"
