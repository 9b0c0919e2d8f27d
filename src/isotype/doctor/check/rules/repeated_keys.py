"""A rule about files themselves: a key that is given twice."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..settings import Setting
from .base import rule, warning


@rule("CF098")
def key_given_twice(r: Record) -> Iterator[Finding]:
    """A key is given twice in one file

    **Why it matters.** JSON and PyYAML take the later one, and print nothing.

    **Example.** `bf16: true` at the top, `bf16: false` further down.

    **What to do.** Remove one.
    """
    for document in r.facts.documents:
        for key, line in document.attributes.get("repeated", ()):
            setting = document.settings.get(key)
            shown = Setting(setting.value if setting else "...", key, document.file, line)
            yield warning(
                f"{key} is given twice",
                shown,
                cause="the later value is used, without a warning",
                fix="remove one of them",
                wins="the later one",
            )
