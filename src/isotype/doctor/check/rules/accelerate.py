"""Rules about accelerate's own configuration and its Accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import launcher_mode
from ..record import Record
from .base import error, rule


@rule("CF059")
def fp8_without_a_library(r: Record) -> Iterator[Finding]:
    """fp8 and no library for it

    **Why it matters.** accelerate needs TransformerEngine, torchao or MS-AMP: "Using `fp8` precision requires
    `transformer_engine` or `MS-AMP`".

    **Example.** `mixed_precision: fp8`, and none of them in requirements.txt.

    **What to do.** Install one, or bf16.
    """
    launcher = launcher_mode(r.facts)
    versions = r.facts.tool("versions")
    if launcher is None or str(launcher.value).lower() != "fp8" or versions is None:
        return
    if not {"transformer-engine", "transformer_engine", "torchao", "msamp", "ms-amp"} & set(versions.attributes.get("names", ())):
        yield error(
            "fp8 without TransformerEngine, torchao or MS-AMP",
            launcher,
            cause=f"{versions.file} lists none of the libraries that fp8 needs",
            fix="pip install transformer-engine[pytorch] (or torchao), or mixed_precision: bf16",
            wins="accelerate stops",
        )
