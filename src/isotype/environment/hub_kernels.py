"""Keeps bitsandbytes from downloading and running compiled code of the Hugging Face hub.

If the package kernels is installed, importing bitsandbytes 0.50 downloads
`kernels-community/quantization-bitsandbytes` from the hub on a CPU with AVX512-BF16, and
`kernels-community/bitsandbytes-mps` on macOS 26. A run that uses only local files must not connect
to any server. The download is therefore switched off, unless the user sets `USE_HUB_KERNELS`, the
variable that transformers reads.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

HUB_KERNELS_VARIABLE = "USE_HUB_KERNELS"
_TRUE_VALUES = ("1", "ON", "YES", "TRUE")
_PACKAGE = "kernels"
HUB_KERNELS_NOTE = (
    "bitsandbytes: kernels of the Hugging Face hub are off (the package kernels is installed, with"
    f" which it would download and run them); {HUB_KERNELS_VARIABLE}=1 in the environment allows them"
)


def disable_hub_kernels() -> bool:
    """Imports bitsandbytes, if it is installed. During this import, the package kernels cannot be
    imported. PEFT and transformers import bitsandbytes too, so this function is called before they
    are imported.

    Returns True if this function has switched off the kernels of the hub. Returns False if the
    package kernels is not installed, or if the user allows the download.
    """
    if os.environ.get(HUB_KERNELS_VARIABLE, "").upper() in _TRUE_VALUES:
        return False
    if not _is_installed(_PACKAGE) or not _is_installed("bitsandbytes"):
        return False
    if "bitsandbytes" not in sys.modules:
        _import_without_kernels()
    operators = sys.modules.get("bitsandbytes.backends.mps.ops")
    if operators is not None:  # it would ask the hub at the first call of an operator
        operators._kernel_load_failed = True  # type: ignore[attr-defined]  # bitsandbytes' own flag
    return True


def _is_installed(package: str) -> bool:
    try:
        return package in sys.modules or find_spec(package) is not None
    except ValueError:  # a module without a specification, as a test may insert
        return True


def _import_without_kernels() -> None:
    kernels = sys.modules.get(_PACKAGE)
    sys.modules[_PACKAGE] = None  # type: ignore[assignment]  # Python then refuses to import it
    try:
        import_module("bitsandbytes")
    finally:
        del sys.modules[_PACKAGE]
        if kernels is not None:
            sys.modules[_PACKAGE] = kernels
