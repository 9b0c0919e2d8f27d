"""One Markdown page of what `benchmarks/gpu.py` found, from its OUT/COMMAND.jsonl: machine, tests,
whole steps, profiles, ops, failures.

    python benchmarks/gpu_table.py gpu > benchmarks/results/h100.md

The last line of a part counts. Ratios are between medians of one folder; figures of `--tiny` say
that the code runs, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

GIB = 2**30
COUNTS = re.compile(r"\d+ (?:passed|failed|skipped|errors?|xfailed)")


def table(folders: Sequence[Path]) -> str:
    """Markdown. folders: the newest first; what an earlier one lacks is taken from a later one."""
    parts = read(folders)
    of = {
        what: [line for (command, _), line in parts.items() if command == what]
        for what in {command for command, _ in parts}
    }
    sections = [
        machine(of.get("probe", [])),
        tests(of.get("tests", [])),
        steps([row for line in of.get("goal", []) for row in line["rows"] or []]),
        profiles(of.get("profile", [])),
        ops(of.get("ops", [])),
        failures(parts),
    ]
    device = next(
        (line["rows"]["device"]["name"] for line in of.get("probe", []) if line["rows"]),
        "a device that was not asked",
    )
    return "\n".join(
        [
            f"# Found on {device}",
            "",
            *(line for section in sections if section for line in [*section, ""]),
        ]
    )


def read(folders: Sequence[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """(command, part) -> its last line"""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for folder in reversed(folders):
        for file in sorted(folder.glob("*.jsonl")):
            for text in file.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                found[file.stem, line["part"]] = line
    return found


def rows_of(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    def line(cells: Sequence[object]) -> str:
        return (
            "| "
            + " | ".join("" if cell is None else str(cell).replace("|", "/") for cell in cells)
            + " |"
        )

    return [line(head), "|" + "---|" * len(head), *map(line, rows)] if rows else []


def machine(lines: list[dict[str, Any]]) -> list[str]:
    found = lines[-1]["rows"] if lines else None
    if not found:
        return []
    flat = {
        "device": found.get("device"), "kernels of Triton": found.get("Triton's kernels"), "versions": found.get("versions"),
        "products": found.get("products"), "copies": found.get("copies"), "attention": found.get("attention"),
    }  # fmt: skip
    said = {
        name: ", ".join(f"{k} {v}" for k, v in one.items()) if isinstance(one, dict) else one
        for name, one in flat.items()
    }
    return ["## Machine", "", *rows_of(("", ""), list(said.items()))]


def tests(lines: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            line["part"],
            ", ".join(COUNTS.findall(last_of(line))) or last_of(line),
            line["rc"],
            line["seconds"],
        )
        for line in lines
    ]
    return ["## Tests", "", *rows_of(("part", "result", "exit code", "s"), rows)] if rows else []


def steps(rows: list[dict[str, Any]]) -> list[str]:
    """Whole training steps: a line for each contender, beside PEFT of the same model, base and
    length.
    """
    beside = {
        (row["model"], row["base"], row["tokens"]): row for row in rows if row["who"] == "peft"
    }
    made = []
    for row in rows:
        peft = beside.get((row["model"], row["base"], row["tokens"]))
        peak, theirs = row["peak bytes"], peft and peft["peak bytes"]
        made.append((
            f"{row['model']} {row['base']}", row["tokens"], f"{row['who']}, {row['recompute']}", row["tokens/s"],
            peft and f"{peft['ms'] / row['ms']:.2f}", peak and f"{peak / GIB:.2f}", peak and theirs and f"{peak / theirs:.2f}",
        ))  # fmt: skip
    head = ("model", "tokens", "who, recomputed", "tokens/s", "of PEFT's", "peak GiB", "of PEFT's")
    return ["## Whole steps", "", *rows_of(head, made)] if made else []


def profiles(lines: list[dict[str, Any]]) -> list[str]:
    """Measured beside counted (`benchmarks/ledger.py`), and what of a step is the host's: wall time
    beside the device's own.
    """
    made = []
    for line in lines:
        for row in line["rows"] or []:
            whole = re.match(r"\s*([\d.]+) ms in all", row.get("profile", ""))
            counted = row.get("ledger", {})
            made.append((
                line["part"], row["tokens"], row["ms"], whole and whole[1], counted.get("ms"), counted.get("measured ms / counted"),
            ))  # fmt: skip
    head = ("part", "tokens", "wall ms", "ms of kernels", "counted ms", "measured / counted")
    return ["## Profiles", "", *rows_of(head, made)] if made else []


def ops(lines: list[dict[str, Any]]) -> list[str]:
    """Forward and backward of an op: each peer's median time over ours."""
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        for row in (line["rows"] or {}).get("rows", []):
            by_case.setdefault(row["case"], {})[row["peer"]] = row
    made = []
    for case, peers in by_case.items():
        own = peers.get("isotype")
        ours = median(own["times"]) if own and own["times"] else None
        for peer, row in peers.items():
            took = median(row["times"]) if row["times"] else None
            made.append((
                case, peer, took and f"{took * 1e3:.3f}", took and ours and f"{took / ours:.2f}",
                None if row["peak"] is None else f"{row['peak']:.0f}", row["failed"] or None,
            ))  # fmt: skip
    head = ("op", "peer", "ms", "over isotype's", "peak MiB", "failed")
    return ["## Ops, forward and backward", "", *rows_of(head, made)] if made else []


def failures(parts: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    rows = [
        (command, name, line["rc"], last_of(line))
        for (command, name), line in parts.items()
        if line["rc"]
    ]
    return (
        ["## Not done", "", *rows_of(("command", "part", "exit code", "its last line"), rows)]
        if rows
        else []
    )


def last_of(line: dict[str, Any]) -> str:
    return (str(line["output"]).strip().splitlines() or [""])[-1][:300]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUT", help="the newest first")
    print(table(parser.parse_args().folders))
