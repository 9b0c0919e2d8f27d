"""Silences the progress bars and advice of libraries, but not their errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars


def quiet_libraries() -> None:
    """Switches off progress bars and advice, which would break the live line. Errors are still printed.

    The hub's progress bars stay on: it shows them only on a terminal, and a download happens before the first step and may take minutes.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    downloads_are_shown = not are_progress_bars_disabled()
    transformers.utils.logging.disable_progress_bar()  # its own, and the hub's
    if downloads_are_shown:
        enable_progress_bars()
    for library in ("peft", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    for module in ("transformers", "peft", "torch"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    # peft asks the hub at each save whether the vocabulary was changed, which no run does
    warnings.filterwarnings("ignore", message="Unable to fetch remote file|Could not find a config file in", module="peft")
    # advice for making an adapter: a folder's is loaded as it was saved, and a merge decides itself whether the head stays tied
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", module="peft")
    # of the patterns that PEFT writes itself for stacked experts, whose parameters it does not count as modules; they are followed
    warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match .*\['\.\*", module="peft")


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hides the warnings of libraries about a model without data, and the traceback of an operator that needs data."""
    operators = logging.getLogger("torch._subclasses.fake_tensor")
    before = operators.disabled
    operators.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        operators.disabled = before
