"""Quantises a GGUF file with llama.cpp's own program, for the types that the package `gguf` cannot
write.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..errors import RunError, UsageError

PROGRAM = "llama-quantize"
# types that llama-quantize writes without an importance matrix, and that `isotype verify` reads
QUANTISED_TYPES = (
    "Q6_K",
    "Q5_K_M",
    "Q5_K_S",
    "Q4_K_M",
    "Q4_K_S",
    "Q3_K_L",
    "Q3_K_M",
    "Q3_K_S",
    "Q2_K",
    "IQ4_NL",
)
_PROGRESS = re.compile(r"^\[ *(\d+)/ *(\d+)\]")


def find_program(kind: str) -> str:
    """Returns the path of llama-quantize. Raises UsageError if it is not on the path."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise UsageError(
            f"--type {kind}: {PROGRAM} writes this type, and it is not on the path",
            fix=f"install llama.cpp (brew install llama.cpp, or a build with the target {PROGRAM})",
        )
    return program


def quantise_file(program: str, source: Path, out: Path, kind: str) -> None:
    """Writes the GGUF file `source` in the type `kind` to `out`. While the program runs, the
    terminal shows how many tensors are done. Raises RunError if the program fails.
    """
    last_line = ""
    shows_progress = sys.stderr.isatty()
    try:
        process = subprocess.Popen(
            [program, str(source), str(out), kind],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UsageError(f"{program}: cannot be started: {error.strerror}") from None
    with process:
        try:
            for line in process.stdout or ():
                last_line = line.strip() or last_line
                match = _PROGRESS.match(line)
                if match is not None and shows_progress:
                    done, total = match.groups()
                    print(f"\rquantise  {done} of {total} tensors", end="", file=sys.stderr)
        except BaseException:
            process.kill()
            raise
    if shows_progress:
        print(file=sys.stderr)
    if process.returncode != 0 or not out.is_file():
        status = f"exit status {process.returncode}"
        raise RunError(f"{PROGRAM} failed ({status}): {last_line or 'it printed nothing'}")
