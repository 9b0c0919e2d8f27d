"""Everything there is to run on a GPU, in two commands, each under nine minutes, part by part, and resumed where it stopped.

    python benchmarks/gpu.py tests --out gpu         # the tests marked gpu, a part a file
    python benchmarks/gpu.py benchmarks --out gpu    # ops and LoRA beside their peers, at an H100's and H200's sizes
    python benchmarks/gpu.py benchmarks --out gpu --part elementwise --again
    python benchmarks/gpu.py benchmarks --out /tmp/tiny --device cpu --tiny    # the same commands at sizes of a test

Every part is a process of its own: what crashes, hangs or breaks the device ends that part alone. Its command, exit code, seconds, output
and rows are one line of OUT/tests.jsonl or OUT/benchmarks.jsonl, written as soon as it ends; a part that has a line with exit code 0 is
not run again. A part is begun only if it should fit in what is left of --minutes. Exit code: 0 all done, 1 a part failed, 3 some are left.
Nothing need be installed but the libraries of pyproject.toml's train extra: src/ is put on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


@dataclass(frozen=True)
class Part:
    """limit: seconds after which it is ended. rows: whether it takes --json FILE for what it measured"""

    name: str
    command: tuple[str, ...]
    limit: int = 120
    rows: bool = False


def tests(a: argparse.Namespace) -> list[Part]:
    files = [f for f in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in f.read_text(encoding="utf-8")]
    return [Part(f.stem, ("-m", "pytest", "-q", "-m", "gpu", str(f.relative_to(ROOT)), "--durations=5"), 180) for f in files]


def benchmarks(a: argparse.Namespace) -> list[Part]:
    device = ("--device", a.device, *(["--tiny"] if a.tiny else []))

    def ops(name: str, *cases: str, limit: int = 150) -> Part:
        return Part(name, (str(BENCHMARKS / "ops_gpu.py"), *device, *(word for case in cases for word in ("--case", case))), limit, True)

    # Llama 3 8B's layers and head, four layers of them
    large = ("--hidden", "4096", "--intermediate", "14336", "--layers", "4", "--vocabulary", "128256", "--batch", "1")
    small = ("--hidden", "64", "--intermediate", "128", "--layers", "1", "--vocabulary", "200", "--batch", "1", "--rounds", "1")

    def lora(name: str, part: str, length: int, *rest: str, limit: int = 120) -> Part:
        size = (*small, "--block-rounds", "1", "--length", "16") if a.tiny else (*large, "--length", str(length))
        return Part(name, (str(BENCHMARKS / "lora.py"), "--device", a.device, *size, "--part", part, "--json", *rest), limit)

    train_size = (
        "--layers",
        "1",
        "--hidden",
        "64",
        "--vocabulary",
        "200",
        "--length",
        "16",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--rounds",
        "1",
    )
    if not a.tiny:
        train_size = ("--layers", "12", "--hidden", "1024", "--vocabulary", "128256", "--length", "2048", "--batch", "4", "--rounds", "1")
    return [
        ops("elementwise", "rms_norm", "rms_norm_heads", "silu_mul", "gelu_mul_tanh", "rope", "cross_entropy"),
        ops("head-llama", "head-llama-frozen", "head-llama-trainable"),
        ops("head-gemma", "head-gemma-frozen", "head-gemma-trainable"),
        lora("lora-blocks", "blocks", 4096),
        lora("lora-4k", "model", 4096),
        lora("lora-16k", "checkpointing", 16384),
        lora("lora-memory-4k", "memory", 4096, "--rows", "PEFT", "Isotype"),
        Part("train", (str(BENCHMARKS / "train.py"), "--device", a.device, *train_size)),
        ops("unsloth", "unsloth"),
    ]


def done_before(file: Path) -> set[str]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {line["part"] for line in lines if line["rc"] == 0}


def run(part: Part, limit: float) -> dict[str, object]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, *part.command, *(["--json", str(rows)] if part.rows else [])]
        with tempfile.TemporaryFile("w+") as output:
            # a session of its own, so that a part's own processes end with it
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = 124
            output.seek(0)
            text = output.read()
        found = json.loads(rows.read_text()) if rows.is_file() else None
    return {
        "part": part.name, "rc": code, "seconds": round(time.monotonic() - start, 1), "command": " ".join(part.command), "rows": found,
        "output": text[-200_000:],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tests", "benchmarks"))
    parser.add_argument("--out", type=Path, required=True, help="a folder; what it already holds is not run again")
    parser.add_argument("--part", action="append", help="only this one; may be given several times")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="benchmarks at sizes of a test: the figures then mean nothing")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    a = parser.parse_args()
    parts = {"tests": tests, "benchmarks": benchmarks}[a.what](a)
    names = [part.name for part in parts]
    if unknown := [name for name in a.part or [] if name not in names]:
        parser.error(f"--part {unknown[0]}: there are {', '.join(names)}")
    a.out.mkdir(parents=True, exist_ok=True)
    file = a.out / f"{a.what}.jsonl"
    before = set() if a.again else done_before(file)
    wanted = [part for part in parts if part.name not in before and part.name in (a.part or names)]
    if a.list:
        print("\n".join(f"{part.name:24s} {'done' if part.name in before else ''}" for part in parts))
        return 0
    end, left, failed = time.monotonic() + 60 * a.minutes, [], []
    for part in wanted:
        room = end - time.monotonic()
        # half of its limit is what a part should take
        if room < min(part.limit / 2, 60 * a.minutes / 2):
            left.append(part.name)
            continue
        print(f"--- {part.name}", flush=True)
        line = run(part, min(part.limit, room))
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        # the last of it: a reply may keep only the end of all output
        print(str(line["output"])[-6000:], flush=True)
        print(f"--- {part.name}: exit code {line['rc']}, {line['seconds']} s", flush=True)
        if line["rc"]:
            failed.append(part.name)
    done = len(wanted) - len(failed) - len(left)
    print(f"{a.what}: {done} done, {len(before)} before; failed: {failed or 'none'}; left: {left or 'none'}; {file}")
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
