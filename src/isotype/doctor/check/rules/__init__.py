"""Contains the rules of `isotype doctor check`, and the documentation page of each rule. Importing
a module of this package registers the rules in it.
"""

from ....pages import docstring_page
from . import keys  # noqa: F401
from .autocast_regions import CODE, autocast_around_backward
from .base import RULES as _REGISTERED

RULES = dict(sorted(_REGISTERED.items()))  # sorted by code, so that a rule can move to another file

_OTHER_PAGES = {
    CODE: docstring_page(CODE, autocast_around_backward),
    "CF099": (
        """# CF099: a file cannot be read

The file looks like a configuration and does not parse (the line is named), or holds nothing that `isotype doctor check` knows. Nothing in
it was checked.
"""
    ),
}


def codes() -> list[str]:
    return sorted([*RULES, *_OTHER_PAGES])


def page(code: str) -> str | None:
    if code in RULES:
        return docstring_page(code, RULES[code])
    return _OTHER_PAGES.get(code)


__all__ = ["RULES", "codes", "page"]
