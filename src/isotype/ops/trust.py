"""Checks the kernels of an op against the op's reference before a run uses them on this device.

A kernel can give wrong results on one machine although it gives right results on others, because of
a compiler, a driver or a processor. Each kernel is therefore checked before its first use on a
device. Forward and backward run at small sizes and are compared with fp64, in the same way as in
`isotype proof`. If the results of the kernel are wrong, the op runs in plain PyTorch. The result is
stored in the user's cache, under a hash of the device, the versions and the sources. Later
processes read this result and do not check again.

The check of all C++ kernels takes 0.2 s of CPU time, once per machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..environment.private_folder import NotPrivateError, open_private_folder, read_private_file
from .kernel_folder import BuildError, library_folder

SKIP_VARIABLE = "ISOTYPE_SKIP_KERNEL_CHECK"  # environment variable that skips the check of kernels
# line in the header of a run with --skip-kernel-check
SKIPPED_NOTE = "kernels: not checked on this device, because of --skip-kernel-check"
_OPS_FOLDER = Path(__file__).parent
# the module that has the cases of an op's kernels, if it is not `kernel_cases`
_CASE_MODULES = {"lora": "isotype.lora.kernel_cases"}


def is_check_skipped() -> bool:
    return os.environ.get(SKIP_VARIABLE, "") not in ("", "0")


def find_disagreement(
    op: str, facts: Sequence[str], device: torch.device, dtypes: Sequence[torch.dtype]
) -> str:
    """Returns the reason why the kernels of an op must not be used on this device, or "" if they
    agree with the reference. The result is read from the user's cache, or computed and stored
    there.

    op      the name of the folder of the op
    facts   texts that identify the device, the versions and the build of the kernels
    dtypes  the dtypes of the inputs that are checked
    """
    if is_check_skipped():
        return ""
    identity = [*facts, torch.__version__, *map(str, dtypes), hash_sources(op)]
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    stored = _read_result(op, key)
    if stored is not None:
        return stored
    try:
        reason = run_in_clean_thread(lambda: check_kernels(op, device, dtypes))
    except (torch.OutOfMemoryError, MemoryError):
        return "there was no memory to check its kernels"  # not stored
    _store_result(op, key, {"op": op, "device": str(device), "reason": reason, "facts": identity})
    return reason


def check_kernels(op: str, device: torch.device, dtypes: Sequence[torch.dtype]) -> str:
    """Runs the test cases of an op. Returns a text that describes the first wrong result, or "" if
    all results are right.

    Raises  OutOfMemoryError. Any other exception in a kernel counts as a wrong result
    """
    module: Any = import_module(_CASE_MODULES.get(op, "isotype.ops.kernel_cases"))
    for name, case in module.CASES.items():
        if case.kernels != op:
            continue
        for dtype in dtypes:
            if not case.supports(device, dtype):
                continue
            try:
                result = case.check(device, dtype)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                message = str(error).strip().splitlines() or [""]
                return f"{name} in {dtype}: {type(error).__name__}: {message[0][:120]}"
            if not result["passed"]:
                return (
                    f"{name} in {dtype}, {result['tensor']}: error {result['error']:.1e}, and"
                    f" {result['plain_error']:.1e} in PyTorch"
                )
    return ""


def run_in_clean_thread(function: Callable[[], str]) -> str:
    """Runs the function in a new thread and returns its result. Settings of the caller's thread
    (autocast, inference mode, dispatch modes, and hooks on saved tensors, which gradient
    checkpointing uses) do not apply in the new thread, so they do not change the result of the
    check.
    """
    results: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="isotype-kernel-check")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@cache
def warn_of_wrong_kernel(op: str, device_type: str, reason: str) -> None:
    """Prints one line about a kernel that is not used."""
    print(f"isotype: {describe_wrong_kernel(op, device_type, reason)}", file=sys.stderr, flush=True)


def describe_wrong_kernel(op: str, device_type: str, reason: str) -> str:
    option = " --device cpu" if device_type == "cpu" else ""
    part = "adapters" if op == "lora" else "kernels"
    return (
        f"{op}: its kernel is wrong on this device ({reason}), so PyTorch computes it; please report"
        f" the result of `isotype proof{option} --part {part}`"
    )


@cache
def hash_sources(op: str) -> str:
    """Returns a hash of the Python sources of an op and of the checks."""
    folder = _OPS_FOLDER.parent / "lora" if op == "lora" else _OPS_FOLDER / op
    digest = hashlib.sha256()
    for file in (*sorted(folder.glob("*.py")), *sorted(_OPS_FOLDER.glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def gpu_facts(device: torch.device) -> list[str]:
    """Returns texts that identify a GPU, its driver and the version of Triton."""
    from importlib.metadata import version

    driver = torch.version.cuda or torch.version.hip or ""
    for file in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        with suppress(OSError):
            driver += file.read_text(encoding="utf-8", errors="replace")
    if device.type != "cuda":
        return [str(device), driver, version("triton")]
    capability = torch.cuda.get_device_capability(device)
    return [torch.cuda.get_device_name(device), str(capability), driver, version("triton")]


def _result_name(op: str, key: str) -> str:
    return f"checked-{op}-{key}.json"


def _read_result(op: str, key: str) -> str | None:
    """Returns the stored result, or None if the kernels were not checked yet on this device with
    these versions.
    """
    with suppress(OSError, BuildError, NotPrivateError, ValueError, KeyError, TypeError):
        with open_private_folder(library_folder()) as folder:
            content = json.loads(read_private_file(folder / _result_name(op, key)))
        return str(content["reason"])
    return None


def _store_result(op: str, key: str, content: dict[str, Any]) -> None:
    """Stores a result. If no folder is writable, nothing is stored, and each process checks the
    kernels again.
    """
    with suppress(OSError, BuildError, NotPrivateError):
        with open_private_folder(library_folder()) as folder:
            file = folder / _result_name(op, key)
            temporary = folder / f"{file.name}.{os.getpid()}.tmp"
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                json.dump(content, opened, indent=1)
            temporary.replace(file)
