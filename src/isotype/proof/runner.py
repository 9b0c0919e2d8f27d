"""Runs the parts of `isotype proof`. Each part has its own process. If it crashes, or if a kernel
hangs, the other parts still run.

OUT/proof.json is written after each part. A second call with the same folder runs the parts that
have not passed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..ops.trust import SKIP_VARIABLE
from ..runs.checkpoint.atomic_folder import write_text
from .parts import KERNEL_PARTS, PARTS, Part, Scale
from .summary import (
    FAILED,
    NO_PACKAGE,
    PASSED,
    TIMED_OUT,
    Proof,
    markdown_table,
    part_line,
)

PROOF_FILE = "proof.json"
TABLE_FILE = "proof.md"
_MAX_MESSAGE = 300  # characters of an error message in the result


def run_proof(
    folder: Path,
    *,
    card: dict[str, Any],
    scale: Scale,
    minutes: float,
    names: Sequence[str] = (),
    previous: Path | None = None,
    print_line: Callable[[str], None] = print,
) -> Proof:
    """Runs one part of the proof after the other until the time is used up. Returns all results.

    folder    gets proof.json and proof.md
    card      the result of `describe_card` for the device of `scale`
    minutes   the time for all parts. A part is begun only if its expected time is left
    names     the parts to run; by default all
    previous  a folder, or a proof.json, of an earlier call: what passed there is not repeated
    Raises    UsageError for an unknown part or another card's results
    """
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise UsageError(f"--part {unknown[0]}: there is no such part", fix=" ".join(PARTS))
    proof = _read_proof(folder, card, scale)
    if previous is not None:
        earlier = _read_proof(previous, card, scale)
        proof.parts = {**earlier.parts, **proof.parts}
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    for name in names or PARTS:
        part = PARTS[name]
        if proof.status(name) == PASSED:
            continue
        expected = 0 if scale.is_tiny else part.seconds
        time_left = deadline - time.monotonic()
        if time_left < max(1, expected):
            proof.left.append(name)
            continue
        proof.parts[name] = _run_part(name, part, scale, max(1.0, min(part.max_seconds, time_left)))
        write_proof(folder, proof)
        print_line(part_line(name, proof.parts[name]))
    write_proof(folder, proof)
    return proof


def write_proof(folder: Path, proof: Proof) -> None:
    write_text(folder / PROOF_FILE, json.dumps(proof.to_json(), indent=1) + "\n")
    write_text(folder / TABLE_FILE, markdown_table(proof))


def _read_proof(path: Path, card: dict[str, Any], scale: Scale) -> Proof:
    file = path / PROOF_FILE if path.is_dir() or not path.suffix else path
    if not file.is_file():
        return Proof(card, scale.is_tiny)
    try:
        proof = Proof.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file}: not a result of isotype proof", fix="another --out") from error
    if proof.card != card or proof.is_tiny != scale.is_tiny:
        raise UsageError(
            f"{file} has results of another card, other versions or other sizes",
            fix="another --out, or no --before",
        )
    return proof


def _run_part(name: str, part: Part, scale: Scale, max_seconds: float) -> dict[str, Any]:
    """Runs one part and returns its status, seconds, rows and, if it failed, the error."""
    missing = [package for package in part.packages if find_spec(package) is None]
    if missing:
        return {"status": NO_PACKAGE, "seconds": 0.0, "rows": [], "error": ", ".join(missing)}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        rows_file = Path(temporary) / "rows.jsonl"
        command = [sys.executable, "-m", "isotype.proof", name, scale.device, str(rows_file)]
        if scale.is_tiny:
            command.append("--tiny")
        try:
            process = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=max_seconds,
                check=False,
                cwd=temporary,
                env=_environment(name),
            )
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
            message = f"ended after {max_seconds:.0f} s"
        else:
            status = PASSED
            message = ""
            if process.returncode:
                status = FAILED
                message = _last_line(process.stderr)
        rows = _read_rows(rows_file)
    if status == PASSED and any(row.get("passed") is False for row in rows):
        status = FAILED
    return {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "rows": rows,
        "error": message,
    }


def _environment(name: str) -> dict[str, str]:
    """Returns the environment variables for the process of a part. With them, that process imports
    the same copy of Isotype as this process. The parts that check kernels also run kernels that are
    known to be wrong, so that the result shows the error.
    """
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if name in KERNEL_PARTS:
        environment[SKIP_VARIABLE] = "1"
    return environment


def _read_rows(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the process was ended while it wrote this line
            break
    return rows


def _last_line(text: str) -> str:
    """Returns the last line of an error output, without the names of folders."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return "no output"
    return re.sub(r"(/[^\s/:'\"]+)+/", "", lines[-1])[:_MAX_MESSAGE]
