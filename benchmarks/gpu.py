"""Everything there is to run on a GPU, part by part, and resumed where it stopped. One command does all in the order of its worth:

    python benchmarks/gpu.py all --minutes 25 --out gpu    # then gpu/results.md is one table of all that was found
    python benchmarks/gpu.py all --out /tmp/tiny --device cpu --tiny    # the same at sizes of a test, without a GPU

or, one kind at a time:

    python benchmarks/gpu.py probe --out gpu         # versions, compiler, which attention wins, products, copies: a minute
    python benchmarks/gpu.py tests --out gpu         # the tests marked gpu: kernels, then ops, models, LoRA, runs
    python benchmarks/gpu.py profile --out gpu       # 4 layers of Llama-3.1-8B at 4k and 16k tokens, beside what the ledger counts
    python benchmarks/gpu.py goal --out gpu          # whole steps of 8B LoRA and QLoRA and Gemma-2-2B beside PEFT and Unsloth
    python benchmarks/gpu.py ops --out gpu           # ops and heads beside their peers, and the floors
    python benchmarks/gpu.py benchmarks --out gpu    # LoRA's blocks and steps in more detail
    python benchmarks/gpu.py ops --out gpu --part elementwise --again
    python benchmarks/gpu.py goal --out new --before gpu                     # what gpu/goal.jsonl has done is not run again
    python benchmarks/gpu.py ops --out /tmp/tiny --device cpu --tiny         # the same commands at sizes of a test

Every part is a process of its own: what crashes, hangs or breaks the device ends that part alone. Its command, exit code, seconds, output
and rows are one line of OUT/COMMAND.jsonl, written as soon as it ends; a part that has a line with exit code 0 is not run again. A part
that misses a package (bitsandbytes, Unsloth) ends with 4: it is named, fails nothing, and runs again the next time. `all` goes on with
the parts of the other commands, and their lines, and writes its table after each part. While a part
runs, its output is in OUT/running.log, which stays where this command is killed. A part is begun only if it should fit in what is left of
--minutes. Exit code: 0 all done, 1 a part failed, 2 nothing could be run, with the reason in a line, 3 some parts are left, 4 all done
but what misses a package.
Nothing is fetched. Nothing need be installed but the libraries of pyproject.toml's train and quant extras: src/ is put on the path.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


@dataclass(frozen=True)
class Part:
    """limit: seconds after which it is ended. rows: whether it takes --json FILE for what it
    measured
    """

    name: str
    command: tuple[str, ...]
    limit: int = 120
    rows: bool = False


# What fails in a later group is often explained by an earlier one. A test belongs to the first
# group with a path that its file begins with.
GROUPS: dict[str, str | tuple[str, ...]] = {
    "kernels": "tests/ops/test_kernels.py",
    "ops": "tests/ops/",
    "models": "tests/optimize/",
    "lora": "tests/lora/",
    "runs": ("tests/training/", "tests/tasks/", "tests/test_five_failures.py"),
    "others": "",
}
GPU_MARK = re.compile(r"@on_a_gpu\b|\bmark\.gpu\b")
# the exit code of a part that misses a package: it is not done, and runs again once the package is
# there
LEFT_OUT = 4
SHARD = 24  # tests of a part: a kernel that compiles for the first time takes about 2 s
SHARDS = {"runs": 8}  # a run takes about 10 s, a part 4 minutes at most

NEEDED = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "tokenizers",
    "pydantic",
    "ruamel.yaml",
    "typer",
    "rich",
    "packaging",
)
# triton, also on a CPU: without it modules of kernels collect nothing, and the rest fails one by
# one
NEEDED_BY_TESTS = ("pytest", "hypothesis", "datasets", "jinja2", "triton")


def collected(root: Path) -> tuple[list[str], dict[str, str]]:
    """(The ids of every test under `root`/tests that is marked gpu, as pytest itself collects them;
    file -> why it gives no tests: an import that failed, or its own skip).

    Only files whose text has such a mark are collected: the others take a minute to import, and one
    that an older library lacks something for says nothing about a GPU.
    Raises  RuntimeError with pytest's output where nothing is collected
    """
    marked = [
        file
        for file in sorted((root / "tests").rglob("test_*.py"))
        if GPU_MARK.search(file.read_text(encoding="utf-8"))
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "--continue-on-collection-errors",
        "-m",
        "gpu",
    ]
    command += [str(file.relative_to(root)) for file in marked]
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "ids.json"
        plugin = Path(folder) / "isotype_collected_ids.py"
        # the ids themselves: pytest prints them shortened by its own options
        plugin.write_text(
            "import json\nfailed = {}\n"
            "def pytest_collectreport(report):\n"
            "    if report.failed:\n"
            "        failed[report.nodeid] = str(report.longrepr).strip().splitlines()[-1].removeprefix('E').strip()\n"
            "    elif report.skipped:\n"
            "        failed[report.nodeid] = report.longrepr[2]\n"
            "def pytest_collection_finish(session):\n"
            f"    json.dump([[item.nodeid for item in session.items], failed], open({str(seen)!r}, 'w'))\n"
        )
        command += ["-p", plugin.stem]
        environment = with_source(os.environ, root, folder)
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ids, failed = json.loads(seen.read_text()) if seen.is_file() else ([], {})
        if not ids:
            raise RuntimeError(
                f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-4000:]}"
            )
        return ids, failed


def shards(ids: list[str]) -> dict[str, list[str]]:
    """Name -> at most SHARD ids, in the order of GROUPS; every id is in exactly one."""
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for identifier in ids:
        groups[next(name for name, path in GROUPS.items() if identifier.startswith(path))].append(
            identifier
        )
    parts = {}
    for name, members in groups.items():
        count = -(-len(members) // SHARDS.get(name, SHARD))
        for i in range(count):
            parts[f"{name}-{i + 1}" if count > 1 else name] = members[
                i * len(members) // count : (i + 1) * len(members) // count
            ]
    return parts


def tests(a: argparse.Namespace) -> list[Part]:
    parts = []
    folder = Path(tempfile.mkdtemp(prefix="isotype-gpu-shards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # the names of tests as they end, and not dots: a part that is cut says how far it came
    options = (
        "-o",
        "addopts=",
        "--strict-markers",
        "-p",
        "no:cacheprovider",
        "-v",
        "--tb=short",
        "-m",
        "gpu",
        "-rs",
        "--durations=5",
    )
    found, failed = collected(ROOT)
    for file_name, why in failed.items():
        print(f"not collected: {file_name}: {why}", file=sys.stderr)
    for name, ids in shards(found).items():
        # by a file: ids hold brackets and spaces, and a hundred of them are a long command line
        file = folder / f"{name}.txt"
        file.write_text("\n".join(ids) + "\n", encoding="utf-8")
        parts.append(Part(name, ("-m", "pytest", *options, f"@{file}"), 240))
    return parts


def probe(a: argparse.Namespace) -> list[Part]:
    return [
        Part(
            "probe",
            (
                str(BENCHMARKS / "gpu_probe.py"),
                "--device",
                a.device,
                *(["--tiny"] if a.tiny else []),
            ),
            180,
            True,
        )
    ]


def whole_steps(a: argparse.Namespace, name: str, *words: str, limit: int = 150) -> Part:
    """A part of benchmarks/goal.py; `words` without the sizes."""
    sizes = (
        ("--model", "tiny", "--tokens", "32", "--steps", "1", "--warmup", "1")
        if a.tiny
        else ("--tokens", "4096", "16384")
    )
    return Part(
        name, (str(BENCHMARKS / "goal.py"), "--device", a.device, *words, *sizes), limit, True
    )


def profile(a: argparse.Namespace) -> list[Part]:
    """Where the time of a step goes, 4 layers of the true geometry, and the ledger of the same
    step.
    """
    ways = {
        "none": ("--recompute", "none"),
        "layers": ("--recompute", "layers", "--keep", "attention"),
        "offload": ("--recompute", "layers+offload", "--keep", "attention"),
    }
    if a.device == "cpu":
        del ways["offload"]
    more = () if a.tiny else ("--layers", "4", "--ledger")
    return [
        whole_steps(a, f"profile-{name}", "--who", "isotype", "--profile", *more, *way)
        for name, way in ways.items()
    ]


def goal(a: argparse.Namespace) -> list[Part]:
    """The geometry with most to say first: 8B QLoRA, 8B LoRA, Gemma-2-2B; ours fast and lean, PEFT,
    Unsloth.
    """
    lean = (
        ("--recompute", "layers")
        if a.device == "cpu"
        else ("--recompute", "layers+offload", "--keep", "attention")
    )
    whos = {
        "isotype": ("--who", "isotype", "--recompute", "none"),
        "isotype-lean": ("--who", "isotype", *lean),
        "peft": ("--who", "peft", "--recompute", "layers"),
        "unsloth": ("--who", "unsloth"),
    }
    models = {
        "qlora-8b": ("--model", "llama-8b", "--base", "nf4"),
        "lora-8b": ("--model", "llama-8b"),
        "gemma-2b": ("--model", "gemma-2b"),
    }
    return [
        # 256,000 words: the head alone takes as long to build as a model of 8B layers
        whole_steps(a, f"{model}-{who}", *settings, *way, limit=240 if model == "gemma-2b" else 150)
        for model, settings in models.items()
        for who, way in whos.items()
    ]


def ops(a: argparse.Namespace) -> list[Part]:
    device = ("--device", a.device, *(["--tiny"] if a.tiny else []))

    def part(name: str, *cases: str, limit: int = 150) -> Part:
        return Part(
            name,
            (
                str(BENCHMARKS / "ops_gpu.py"),
                *device,
                *(word for case in cases for word in ("--case", case)),
            ),
            limit,
            True,
        )

    return [
        part(
            "elementwise",
            "rms_norm",
            "rms_norm_heads",
            "silu_mul",
            "gelu_mul_tanh",
            "rope",
            "cross_entropy",
        ),
        part("head-llama", "head-llama-frozen", "head-llama-trainable"),
        part("head-gemma", "head-gemma-frozen", "head-gemma-trainable"),
        part("unsloth", "unsloth"),
    ]


def benchmarks(a: argparse.Namespace) -> list[Part]:
    # Llama 3 8B's layers and head, four layers of them
    large = (
        "--hidden",
        "4096",
        "--intermediate",
        "14336",
        "--layers",
        "4",
        "--vocabulary",
        "128256",
        "--batch",
        "1",
    )
    small = (
        "--hidden",
        "64",
        "--intermediate",
        "128",
        "--layers",
        "1",
        "--vocabulary",
        "200",
        "--batch",
        "1",
        "--rounds",
        "1",
    )

    def lora(name: str, part: str, length: int, *rest: str, limit: int = 120) -> Part:
        size = (
            (*small, "--block-rounds", "1", "--length", "16")
            if a.tiny
            else (*large, "--length", str(length))
        )
        return Part(
            name,
            (
                str(BENCHMARKS / "lora.py"),
                "--device",
                a.device,
                *size,
                "--part",
                part,
                "--json",
                *rest,
            ),
            limit,
        )

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
        train_size = (
            "--layers",
            "12",
            "--hidden",
            "1024",
            "--vocabulary",
            "128256",
            "--length",
            "2048",
            "--batch",
            "4",
            "--rounds",
            "1",
        )
    return [
        lora("lora-blocks", "blocks", 4096),
        lora("lora-4k", "model", 4096),
        lora("qlora-4k", "model", 4096, "--base", "nf4", "--rows", "PEFT", "Isotype"),
        lora("lora-16k", "checkpointing", 16384),
        lora("lora-memory-4k", "memory", 4096, "--rows", "PEFT", "Isotype"),
        lora("unsloth-4k", "model", 4096, "--base", "nf4", "--rows", "Unsloth"),
        Part("train", (str(BENCHMARKS / "train.py"), "--device", a.device, *train_size)),
    ]


def done_before(file: Path) -> set[str]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {line["part"] for line in lines if line["rc"] == 0}


def with_source(environment: Mapping[str, str], root: Path, *folders: str) -> dict[str, str]:
    path = [str(root / "src"), *folders, environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(p for p in path if p)}


def run(part: Part, limit: float, log: Path) -> dict[str, object]:
    """log  holds the part's output while it runs, and afterwards where this process is killed
    before it ends
    """
    environment = with_source(os.environ, ROOT) | {"PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, *part.command, *(["--json", str(rows)] if part.rows else [])]
        with log.open("w+", encoding="utf-8", errors="replace") as output:
            print(f"{part.name}: {' '.join(part.command)}", file=output, flush=True)
            begin = output.tell()
            # a session of its own, so that a part's own processes end with it
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = 124
            output.seek(begin)
            text = output.read()
        found = json.loads(rows.read_text()) if rows.is_file() else None
    log.unlink()
    return {
        "part": part.name, "rc": code, "seconds": round(time.monotonic() - start, 1), "command": " ".join(part.command), "rows": found,
        "output": text[-200_000:],
    }  # fmt: skip


COMMANDS = {
    "probe": probe,
    "tests": tests,
    "profile": profile,
    "goal": goal,
    "ops": ops,
    "benchmarks": benchmarks,
}
# What `all` does, best first: parts whose names begin so. What is right comes before what is
# fast, and the ratios that are published before details; runs, the longest tests, come where there
# is time.
VISIT = (
    ("probe", ("",)),
    ("tests", ("kernels", "ops", "models", "lora")),
    ("profile", ("",)),
    ("goal", ("qlora-8b", "lora-8b", "gemma-2b")),
    ("ops", ("head-llama", "elementwise", "head-gemma", "unsloth")),
    ("tests", ("runs", "others")),
    ("benchmarks", ("",)),
)


@dataclass
class Outcome:
    """Names of parts, by how they ended; `before` were done earlier."""

    done: list[str]
    failed: list[str]
    left: list[str]
    left_out: list[str]
    before: list[str]

    def __str__(self) -> str:
        missing = f"; left out for want of a package: {self.left_out}" if self.left_out else ""
        return f"{len(self.done)} done, {len(self.before)} before; failed: {self.failed or 'none'}; left: {self.left or 'none'}{missing}"

    def exit_code(self) -> int:
        return 1 if self.failed else 3 if self.left else LEFT_OUT if self.left_out else 0


def run_parts(a: argparse.Namespace, queue: list[tuple[str, Part]], end: float) -> Outcome:
    """Runs what is not done yet of (command, part), while it should fit before `end`, on the clock
    of `time.monotonic`.
    """
    outcome, commands = Outcome([], [], [], [], []), {command for command, _ in queue}
    before = {command: set() if a.again else finished(a, command) for command in commands}
    for command, part in queue:
        if part.name in before[command]:
            outcome.before.append(part.name)
            continue
        room = end - time.monotonic()
        # half of its limit is what a part should take
        if room < min(part.limit / 2, 60 * a.minutes / 2):
            outcome.left.append(part.name)
            continue
        print(f"--- {part.name}", flush=True)
        line = run(part, min(part.limit, room), a.out / "running.log")
        with (a.out / f"{command}.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        # the last of it: a reply may keep only the end of all output
        print(str(line["output"])[-6000:], flush=True)
        print(f"--- {part.name}: exit code {line['rc']}, {line['seconds']} s", flush=True)
        ended = (
            outcome.left_out
            if line["rc"] == LEFT_OUT
            else outcome.failed
            if line["rc"]
            else outcome.done
        )
        ended.append(part.name)
        if a.what == "all":
            write_table(a)
    return outcome


def finished(a: argparse.Namespace, command: str) -> set[str]:
    return set().union(*(done_before(folder / f"{command}.jsonl") for folder in (a.out, *a.before)))


def write_table(a: argparse.Namespace) -> None:
    from benchmarks.gpu_table import table

    (a.out / "results.md").write_text(table([a.out, *a.before]), encoding="utf-8")


def every_part(a: argparse.Namespace) -> list[tuple[str, Part]]:
    made = {command: make(a) for command, make in COMMANDS.items()}
    return [
        (command, part)
        for command, beginnings in VISIT
        for beginning in beginnings
        for part in made[command]
        # a group of tests is NAME or NAME-1, NAME-2
        if part.name.startswith(beginning)
    ]


def why_nothing_runs(a: argparse.Namespace) -> str:
    """In one line, before anything is collected or started; "" where parts can run."""
    needed = (
        ("torch",)
        if a.what == "probe"
        else NEEDED + (NEEDED_BY_TESTS if a.what in ("tests", "all") else ())
    )
    if absent := [name for name in needed if not installed(name)]:
        return f"not installed: {' '.join(absent)} (python -m pip install {' '.join(absent)})"
    on_cpu = (
        os.environ.get("ISOTYPE_GPU_TESTS_ON") == "cpu" if a.what == "tests" else a.device == "cpu"
    )
    if on_cpu:
        return (
            ""
            if a.tiny or a.what == "tests"
            else "these sizes are a GPU's: --device cpu goes with --tiny"
        )
    import torch

    if torch.cuda.is_available():
        return ""
    instead = (
        "ISOTYPE_GPU_TESTS_ON=cpu runs the tests here"
        if a.what == "tests"
        else "--device cpu --tiny runs the same code here"
    )
    built = (
        f"torch {torch.__version__}"
        if torch.version.cuda or torch.version.hip
        else f"torch {torch.__version__}, built without CUDA"
    )
    return f"no GPU ({built}): {instead}; --list says what there is"


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package of a dotted name
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("all", *COMMANDS))
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder; what it already holds is not run again"
    )
    parser.add_argument("--part", action="append", help="only this one; may be given several times")
    parser.add_argument(
        "--before",
        type=Path,
        action="append",
        default=[],
        help="a folder with results of earlier times; may be repeated",
    )
    parser.add_argument("--again", action="store_true", help="also what was done before")
    parser.add_argument("--minutes", type=float, help="default: 25 of all, 9 of another command")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes of a test: the figures then mean nothing"
    )
    parser.add_argument("--list", action="store_true", help="only say what there is")
    a = parser.parse_args()
    a.minutes = a.minutes or (25.0 if a.what == "all" else 9.0)
    if not a.list and (reason := why_nothing_runs(a)):
        print(f"gpu.py {a.what}: {reason}", file=sys.stderr)
        return 2
    end = time.monotonic() + 60 * a.minutes
    if a.what == "all" and a.device == "cpu":
        os.environ.setdefault("ISOTYPE_GPU_TESTS_ON", "cpu")
    try:
        queue = (
            every_part(a) if a.what == "all" else [(a.what, part) for part in COMMANDS[a.what](a)]
        )
    except RuntimeError as error:  # no test was collected
        print(error, file=sys.stderr)
        return 2
    names = [part.name for _, part in queue]
    if unknown := [name for name in a.part or [] if name not in names]:
        parser.error(f"--part {unknown[0]}: there are {', '.join(names)}")
    queue = [(command, part) for command, part in queue if part.name in (a.part or names)]
    if a.list:
        print(
            "\n".join(
                f"{part.name:24s} {'done' if part.name in finished(a, command) else ''}"
                for command, part in queue
            )
        )
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    outcome = run_parts(a, queue, end)
    print(
        f"{a.what}: {outcome}; {a.out / ('results.md' if a.what == 'all' else f'{a.what}.jsonl')}"
    )
    return outcome.exit_code()


if __name__ == "__main__":
    sys.exit(main())
