"""What libraries say beside what went wrong."""

from __future__ import annotations

import logging
import re
import sys
import warnings

_HUB = "huggingface_hub.utils._http"  # where each failed try is logged, for half a minute and more
_FAILED = re.compile(r"(.*) thrown while requesting \w+ \w+://([^/\s]+)", re.DOTALL)
_WAITING = re.compile(r"Rate limited\. Waiting ([\d.]+) ?s")


def quiet_libraries() -> None:
    """Their progress bars and advice would tear the live line; their errors still reach the user."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hub = logging.getLogger(_HUB)
    if not any(isinstance(there, HubTries) for there in hub.filters):
        hub.addFilter(HubTries())
    for library in ("peft", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    for module in ("transformers", "peft", "torch"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)


class HubTries(logging.Filter):
    """Of the hub's failed tries only the first of a host is said, at once; that it never answered is the error's to say."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        failed, waiting = _FAILED.match(text), _WAITING.match(text)
        if waiting is not None:
            say(f"the hub asks for patience: the next try is in {float(waiting[1]):.0f} s")
        elif failed is not None and failed[2] not in self.said:
            self.said.add(failed[2])
            say(
                f"{failed[2]} does not answer ({failed[1].strip(chr(39))}): trying again for a minute or less. "
                "Ctrl-C stops; HF_HUB_OFFLINE=1 takes what was downloaded before"
            )
        return record.levelno > logging.WARNING


def say(text: str) -> None:
    print(f"isotype: {text}", file=sys.stderr, flush=True)
