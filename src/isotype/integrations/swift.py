"""Callback for ms-swift: `--external_plugins PATH_OF_THIS_FILE --callbacks isotype`; `ISOTYPE_PRECISION` names the precision.

ms-swift runs the file and finds the callback by its name in `swift.callbacks.callbacks_map`, which it calls with its arguments and the
trainer. `python -m isotype.integrations.swift` prints the path.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from isotype.integrations.attach import attach_at_first_use

NAME = "isotype"


class SwiftCallback(TrainerCallback):
    """The class that ms-swift finds by its name. It attaches to the trainer when it is first called."""

    def __init__(self, args: Any, trainer: Any) -> None:
        attach_at_first_use(trainer, os.environ.get("ISOTYPE_PRECISION", "auto"))


def register(callbacks_map: dict[str, Any]) -> None:
    callbacks_map[NAME] = SwiftCallback


try:
    from swift.callbacks import callbacks_map
except ImportError:
    pass
else:
    register(callbacks_map)

if __name__ == "__main__":
    print(__file__)
