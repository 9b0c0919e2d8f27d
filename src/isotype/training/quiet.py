"""What libraries say beside what went wrong."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Their progress bars and advice would tear the live line; their errors still reach the user."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for library in ("peft", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    for module in ("transformers", "peft", "torch"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
