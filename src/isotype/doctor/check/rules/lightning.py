"""Rules about Lightning, Fabric and litgpt."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import lightning_precision
from ..record import Record
from .base import error, rule


@rule("CF093")
def lightning_two_precisions(r: Record) -> Iterator[Finding]:
    """precision and a precision plugin

    **Why it matters.** Lightning stops: "Received both `precision=...` and `plugins=...`". litgpt's `quantize: bnb...` is such a plugin: it
    takes its dtype from a -true precision and refuses a mixed one ("Quantization and mixed precision is not supported").

    **Example.** `Trainer(precision="bf16-mixed", plugins=[MixedPrecision(...)])`; `quantize: bnb.nf4` with `precision: bf16-mixed`.

    **What to do.** Keep one; with `quantize`, `bf16-true`.
    """
    precision = lightning_precision(r.facts)
    plugins = next(
        (
            s
            for name, s in r.facts.all("lightning")
            if "plugins" in name.split(".") and "precision" in f"{s.value}{name}".lower().replace("trainer.precision", "")
        ),
        None,
    )
    if precision and plugins:
        yield error(
            "precision and a precision plugin are both given",
            precision,
            plugins,
            cause="both decide the precision",
            fix="keep one: precision, or the plugin",
            wins="Lightning stops",
        )
    quantize = r.facts.get("lightning.quantize")
    if precision and quantize and str(quantize.value).startswith("bnb.") and "mixed" in str(precision.value):
        yield error(
            f"quantize: {quantize.value} with precision: {precision.value}",
            precision,
            quantize,
            cause=f"{quantize.value} computes in the one dtype of a -true precision; a mixed one is refused",
            fix=f"precision: {str(precision.value).replace('mixed', 'true')}, or no quantisation",
            wins="litgpt stops with a ValueError",
        )
