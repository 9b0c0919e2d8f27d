"""Everything there is to run on a GPU, in two commands, each under nine minutes, part by part, and resumed where it stopped.

    python benchmarks/gpu.py tests --out gpu         # the tests marked gpu: kernels, then ops, models, LoRA, runs
    python benchmarks/gpu.py benchmarks --out gpu    # ops and LoRA beside their peers, at an H100's and H200's sizes
    python benchmarks/gpu.py benchmarks --out gpu --part elementwise --again
    python benchmarks/gpu.py benchmarks --out /tmp/tiny --device cpu --tiny    # the same commands at sizes of a test

Every part is a process of its own: what crashes, hangs or breaks the device ends that part alone. Its command, exit code, seconds, output
and rows are one line of OUT/tests.jsonl or OUT/benchmarks.jsonl, written as soon as it ends; a part that has a line with exit code 0 is
not run again. A part is begun only if it should fit in what is left of --minutes. Exit code: 0 all done, 1 a part failed, 3 some are left.
Nothing need be installed but the libraries of pyproject.toml's train and quant extras: src/ is put on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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


# What fails in a later group is often explained by an earlier one. A test belongs to the first group with a path that its file begins with.
GROUPS: dict[str, str | tuple[str, ...]] = {
    "kernels": "tests/ops/test_kernels.py",
    "ops": "tests/ops/",
    "models": "tests/optimize/",
    "lora": "tests/lora/",
    "runs": ("tests/training/", "tests/tasks/", "tests/test_five_failures.py"),
    "others": "",
}
SHARD = 24  # tests of a part: a kernel that compiles for the first time takes about 2 s, a run about 10


def collected(root: Path) -> list[str]:
    """The ids of every test under `root`/tests that is marked gpu, as pytest itself collects them.

    Raises  RuntimeError with pytest's output where a file cannot be imported: its tests would be missed
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "tests"]
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "ids.json"
        plugin = Path(folder) / "isotype_collected_ids.py"
        # the ids themselves: pytest prints them shortened by its own options
        plugin.write_text(
            "import json\ndef pytest_collection_finish(session):\n"
            f"    json.dump([item.nodeid for item in session.items], open({str(seen)!r}, 'w'))\n"
        )
        command += ["-p", plugin.stem]
        environment = with_source(os.environ, root, folder)
        done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        # 5: nothing is marked
        if done.returncode not in (0, 5) or not seen.is_file():
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-4000:]}")
        return list(json.loads(seen.read_text()))


def shards(ids: list[str]) -> dict[str, list[str]]:
    """Name -> at most SHARD ids, in the order of GROUPS; every id is in exactly one."""
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for identifier in ids:
        groups[next(name for name, path in GROUPS.items() if identifier.startswith(path))].append(identifier)
    parts = {}
    for name, members in groups.items():
        count = -(-len(members) // SHARD)
        for i in range(count):
            parts[f"{name}-{i + 1}" if count > 1 else name] = members[i * len(members) // count : (i + 1) * len(members) // count]
    return parts


def tests(a: argparse.Namespace) -> list[Part]:
    parts = []
    for name, ids in shards(collected(ROOT)).items():
        # by a file: ids hold brackets and spaces, and a hundred of them are a long command line
        file = a.out.resolve() / "shards" / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(ids) + "\n", encoding="utf-8")
        parts.append(Part(name, ("-m", "pytest", "-q", "-m", "gpu", "-rs", "--durations=5", f"@{file}"), 240))
    return parts


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
        lora("qlora-4k", "model", 4096, "--base", "nf4", "--rows", "PEFT", "Isotype"),
        lora("lora-16k", "checkpointing", 16384),
        lora("lora-memory-4k", "memory", 4096, "--rows", "PEFT", "Isotype"),
        Part("train", (str(BENCHMARKS / "train.py"), "--device", a.device, *train_size)),
        ops("unsloth", "unsloth"),
    ]


def done_before(file: Path) -> set[str]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {line["part"] for line in lines if line["rc"] == 0}


def with_source(environment: Mapping[str, str], root: Path, *folders: str) -> dict[str, str]:
    path = [str(root / "src"), *folders, environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(p for p in path if p)}


def run(part: Part, limit: float) -> dict[str, object]:
    environment = with_source(os.environ, ROOT) | {"PYTHONUNBUFFERED": "1"}
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
    a.out.mkdir(parents=True, exist_ok=True)
    parts = {"tests": tests, "benchmarks": benchmarks}[a.what](a)
    names = [part.name for part in parts]
    if unknown := [name for name in a.part or [] if name not in names]:
        parser.error(f"--part {unknown[0]}: there are {', '.join(names)}")
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
