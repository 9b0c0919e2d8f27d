"""Whether `attach` works with the versions of transformers, PEFT and TRL that other training tools
require: each trainer with and without `attach`, in an environment that has these versions.

python -m benchmarks.attach_peers run [NAME ...]   makes the environments, trains, and writes
                                                   benchmarks/results/attach_peers.json
python -m benchmarks.attach_peers table            writes the table into docs/trainers.md

An environment of a peer is a venv in `--folder` that has the pinned packages. It takes torch and
everything else from the environment that runs this script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "attach_peers.json"
PAGE = ROOT / "docs" / "trainers.md"
# where the table stands in the page
MARKS = (
    "<!-- table: python -m benchmarks.attach_peers table -->",
    "<!-- end of the table of versions -->",
)
PACKAGES = ("transformers", "peft", "trl", "accelerate", "datasets")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFT", "DPO", "KTO")


@dataclass(frozen=True)
class Peer:
    """A training tool with the versions that it requires.

    pins    package -> version
    source  the place that names these versions
    """

    name: str
    pins: dict[str, str]
    source: str

    @property
    def requirements(self) -> list[str]:
        return [f"{package}=={version}" for package, version in self.pins.items()]


PEERS = (
    Peer(
        "axolotl, lowest",
        dict(zip(PACKAGES, ("5.16.1", "0.20.0", "1.9.0", "1.13.0", "4.8.4"))),
        "the requirements of axolotl 0.19.0",
    ),
    Peer(
        "axolotl, highest",
        dict(zip(PACKAGES, ("5.20.2", "0.20.0", "1.14.2", "1.15.0", "4.8.4"))),
        "the requirements of its later commits",
    ),
    Peer(
        "ms-swift, highest",
        dict(zip(PACKAGES, ("5.19.0", "0.20.0", "0.29.1", "1.15.0", "4.8.4"))),
        "the requirements of ms-swift 4.6.0: transformers below 5.20, peft below 0.21, trl below 1",
    ),
    Peer(
        "LLaMA-Factory, highest",
        dict(zip(PACKAGES, ("5.6.0", "0.18.1", "0.24.0", "1.11.0", "4.0.0"))),
        "the requirements of LLaMA-Factory 0.9.5: transformers up to 5.6, peft up to 0.18.1",
    ),
)


def make_environment(peer: Peer, folder: Path) -> Path:
    """Makes the venv of a peer, and returns its Python. Packages that are not pinned are those of
    this environment.
    """
    place = folder / peer.name.replace(", ", "-")
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    (site_packages,) = place.glob("lib/python*/site-packages")
    shared = sysconfig.get_paths()["purelib"]
    (site_packages / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "-q", *peer.requirements], check=True)
    return python


def compare_trainers() -> list[dict[str, Any]]:
    """Trains each trainer as LoRA with the installed versions: plain in fp32, then with `attach` in
    fp32 and in bf16. Ignores the bounds that `attach` checks.
    """
    from tests.integrations.trainers import TRAINERS as MAKERS
    from tests.integrations.trainers import Setting, attached, curve

    from isotype.integrations import claims

    claims.TESTED_VERSIONS.clear()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in TRAINERS:
            row: dict[str, Any] = {"trainer": name}
            try:
                plain = curve(MAKERS[name](Setting(Path(folder) / f"{name} plain")))
            except Exception as error:
                rows.append(row | {"error": f"without attach: {_describe_error(error)}"})
                continue
            try:
                trainer = attached(MAKERS[name](Setting(Path(folder) / f"{name} attached")), "fp32")
                losses = curve(trainer)
                setting = Setting(Path(folder) / f"{name} bf16", bf16=True)
                bf16_losses = curve(attached(MAKERS[name](setting), "bf16-lora"))
            except Exception as error:
                rows.append(row | {"error": f"with attach: {_describe_error(error)}"})
                continue
            manifest = vars(trainer)[claims.ATTACHED].manifest
            row["difference"] = _max_difference(plain, losses)
            row["difference_bf16"] = _max_difference(plain, bf16_losses)
            row["ops"] = len(manifest.replaced)
            row["left"] = sorted({f"{entry.part}: {entry.reason}" for entry in manifest.left})
            rows.append(row)
    return rows


def _max_difference(plain: list[float], losses: list[float]) -> float:
    """The largest relative difference of a step's loss or gradient norm."""
    return max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(plain, losses, strict=True))


def _describe_error(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"[:200]


def run(names: list[str], folder: Path) -> None:
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for peer in PEERS:
        if names and peer.name not in names:
            continue
        python = make_environment(peer, folder)
        command = [python, "-m", "benchmarks.attach_peers", "worker"]
        environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{peer.name}: {done.stderr[-3000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        recorded[peer.name] = {"source": peer.source} | result
        RESULTS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        print(peer.name, json.dumps(result, indent=1))


def worker() -> None:
    versions = {package: metadata.version(package) for package in (*PACKAGES, "torch")}
    print(json.dumps({"versions": versions, "trainers": compare_trainers()}))


def format_table(results: dict[str, Any]) -> str:
    lines = [
        "| required by | transformers | peft | trl | accelerate | " + " | ".join(TRAINERS) + " |",
        "|---" * (5 + len(TRAINERS)) + "|",
    ]
    for name, result in results.items():
        versions = [result["versions"][package] for package in PACKAGES[:4]]
        cells = [_format_cell(row) for row in result["trainers"]]
        lines.append("| " + " | ".join([name, *versions, *cells]) + " |")
    return "\n".join(lines)


def write_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    table = format_table(json.loads(RESULTS.read_text()))
    PAGE.write_text(f"{text[:start]}\n{table}\n{text[end:]}", encoding="utf-8")


def _format_cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"].replace("|", "\\|")
    placed = "all placed" if not row["left"] else f"{len(row['left'])} kinds left alone"
    return f"{row['difference']:.0e} ({row['difference_bf16']:.0e}), {placed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "table", "worker"])
    parser.add_argument("names", nargs="*", help="peers, by default all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "attach_peers")
    arguments = parser.parse_args()
    if arguments.action == "run":
        arguments.folder.mkdir(parents=True, exist_ok=True)
        run(arguments.names, arguments.folder)
    elif arguments.action == "table":
        write_table()
    else:
        worker()


if __name__ == "__main__":
    main()
