"""Rules about transformers: its arguments and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..versions import release
from .base import error, rule

_REMOVED = {
    "half_precision_backend": "remove it: native autocast is the only backend",
    "fp16_backend": "remove it: native autocast is the only backend",
    "fp16_opt_level": "remove it: it was apex's",
    "no_cuda": "use_cpu: true",
}


@rule("CF040")
def removed_arguments(r: Record) -> Iterator[Finding]:
    """An argument that transformers 5 removed

    **Why it matters.** `TrainingArguments` raises "unexpected keyword argument".

    **Example.** `half_precision_backend: auto`, `no_cuda: true`.

    **What to do.** Remove it; `use_cpu` replaces `no_cuda`.
    """
    pinned = r.facts.get("versions.transformers")
    if pinned is not None and release(str(pinned.value))[:1] < (5,):
        return
    document = r.facts.tool("hf")
    if document is None or document.attributes.get("reader") == "pickle":
        return
    for key, fix in _REMOVED.items():
        setting = document.settings.get(key)
        if setting is not None:
            yield error(
                f"{key} no longer exists",
                setting,
                pinned,
                cause="transformers 5 removed this argument: TypeError, unexpected keyword argument",
                fix=fix,
                holds="transformers >= 5",
            )
