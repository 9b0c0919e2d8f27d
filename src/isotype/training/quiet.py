"""What libraries say beside what went wrong."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

from ..environment.hub import LOGGER, HubTries


def quiet_libraries() -> None:
    """Their progress bars and advice would tear the live line; their errors still reach the user.

    The hub's own bars stay, which it shows on a terminal only: a download is before the first step, and takes minutes.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    downloads_are_shown = not are_progress_bars_disabled()
    transformers.utils.logging.disable_progress_bar()  # its own, and the hub's
    if downloads_are_shown:
        enable_progress_bars()
    hub = logging.getLogger(LOGGER)
    if not any(isinstance(there, HubTries) for there in hub.filters):
        hub.addFilter(HubTries())
    for library in ("peft", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    for module in ("transformers", "peft", "torch"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    # peft asks the hub at each save whether the vocabulary was changed, which no run does
    warnings.filterwarnings("ignore", message="Unable to fetch remote file|Could not find a config file in", module="peft")


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hides what libraries advise about a model without data, and the traceback of an operator that cannot run without any."""
    operators = logging.getLogger("torch._subclasses.fake_tensor")
    before = operators.disabled
    operators.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        operators.disabled = before
