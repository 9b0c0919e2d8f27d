"""Rules about transformers: its arguments and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import CHECKPOINT_DTYPE
from ..record import Record
from ..settings import dtype_of
from ..versions import release
from .base import error, rule, warning

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


@rule("CF046")
def stored_and_said(r: Record) -> Iterator[Finding]:
    """A checkpoint's config.json and its weights disagree

    **Why it matters.** "auto" takes the dtype of config.json; the weights were saved in another, and are cast when loaded.

    **Example.** `"torch_dtype": "float16"` beside a safetensors file of bf16.

    **What to do.** Correct config.json, or give `dtype` yourself.
    """
    f = r.facts
    stored, said = f.get(CHECKPOINT_DTYPE[0]), f.get(*CHECKPOINT_DTYPE[1:])
    if (
        stored
        and said
        and dtype_of(said.value)
        and dtype_of(said.value) != stored.value
        and not f.get("model.dtype", "model.torch_dtype", "hf.dtype")
    ):
        yield warning(
            f"config.json says {said.value}, the weights are {stored.value}",
            said,
            stored,
            cause="the weights were saved in another dtype than config.json names",
            fix=f"dtype: {said.value} given by yourself, or correct config.json",
            wins="config.json, when dtype is auto",
        )
