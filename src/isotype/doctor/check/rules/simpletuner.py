"""A rule about SimpleTuner's config.env that is more than a test of settings; the others are in `simpletuner.txt`."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from .base import rule, warning


@rule("CF029")
def env_read_two_ways(r: Record) -> Iterator[Finding]:
    """config.env means one thing to the shell and another to SimpleTuner

    **Why it matters.** SimpleTuner reads the file itself, line by line: it does not expand `${NAME}`, keeps a trailing comment as
    part of the value, and joins no
    continued lines. What is valid shell can be refused, or silently differ.

    **Example.** `TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --gradient_precision=unmodified"`.

    **What to do.** Write plain values, one a line, comments on their own lines; `TRAINER_EXTRA_ARGS+=" --flag"` to append.
    """
    for document in r.facts.documents:
        for name, (shell_value, own_value, _line) in document.attributes.get("own", {}).items():
            setting = document.settings.get(f"variable.{name}")
            yield warning(
                f"{name}: the shell reads {shell_value!r}, SimpleTuner {own_value!r}",
                setting,
                cause="SimpleTuner's own reader expands no variables, keeps trailing comments and joins no lines",
                fix=f'write the value out on one line: {name}="{shell_value}"',
                wins="SimpleTuner's reader, unless the file is sourced first",
            )
