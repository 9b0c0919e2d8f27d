"""Imports bitsandbytes without code of the Hugging Face hub, which it would download and run.

If the package kernels is installed, importing bitsandbytes 0.50 downloads
`kernels-community/quantization-bitsandbytes` from the hub on a CPU with AVX512-BF16, and
`kernels-community/bitsandbytes-mps` on macOS 26. A run that uses only local files must not connect
to any server. The download is therefore switched off, unless the user sets `USE_HUB_KERNELS`, the
variable that transformers reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec

HUB_KERNELS_VARIABLE = "USE_HUB_KERNELS"  # environment variable of transformers
COMPILE_VARIABLE = "TORCHDYNAMO_DISABLE"
_TRUE_VALUES = ("1", "ON", "YES", "TRUE")
_PACKAGE = "kernels"
HUB_KERNELS_NOTE = (
    "bitsandbytes: kernels of the Hugging Face hub are off (the package kernels is installed, with"
    f" which it would download and run them); {HUB_KERNELS_VARIABLE}=1 in the environment allows them"
)


def disable_hub_kernels() -> bool:
    """Imports bitsandbytes, if it is installed. During this import, the package kernels cannot be
    imported, and `torch.compile` compiles nothing. PEFT and transformers import bitsandbytes too,
    so this function is called before they are imported.

    Returns True if this function has switched off the kernels of the hub. Returns False if the
    package kernels is not installed, or if the user allows the download.
    """
    if not _is_installed("bitsandbytes"):
        return False
    is_allowed = os.environ.get(HUB_KERNELS_VARIABLE, "").upper() in _TRUE_VALUES
    are_switched_off = not is_allowed and _is_installed(_PACKAGE)
    if "bitsandbytes" not in sys.modules:
        # PEFT and transformers import it again, and raise the error if the installation is broken
        with _compile_disabled(), suppress(Exception):
            if are_switched_off:
                _import_without_kernels()
            else:
                import_module("bitsandbytes")
    operators = sys.modules.get("bitsandbytes.backends.mps.ops")
    if are_switched_off and operators is not None:
        # it would ask the hub at the first call of an operator
        operators._kernel_load_failed = True  # type: ignore[attr-defined]  # bitsandbytes' own flag
    return are_switched_off


@contextmanager
def _compile_disabled() -> Iterator[None]:
    """Within this block, `torch.compile` returns functions unchanged. bitsandbytes 0.50 calls it
    when it is imported, for the operators of devices that it has no kernels for. This alone would
    import torch._inductor, in 1.1 s of CPU time.
    """
    if COMPILE_VARIABLE in os.environ:
        yield
        return
    os.environ[COMPILE_VARIABLE] = "1"
    try:
        yield
    finally:
        del os.environ[COMPILE_VARIABLE]


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
