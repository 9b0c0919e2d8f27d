"""`isotype train` trains, `isotype plan` shows what it would do, and `isotype quickstart` trains
two small runs offline.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..environment.hardware import wait_passively
from ..errors import UsageError

if TYPE_CHECKING:
    from ..config.load import LoadedConfig


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [section.key=value ...]",
        help="A YAML file, then single settings.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Folder or hub id of the model (model.name).", show_default=False),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Training file, folder, glob, hf:NAME or stdlib (data.train); may be repeated.",
        show_default=False,
    ),
]
Out = Annotated[
    str | None, typer.Option("--out", help="Run folder (run.folder).", show_default=False)
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="lora, qlora, full, full-bf16, or a precision (precision.preset).",
        show_default=False,
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Tokenise anew and keep nothing of it (data.cache=none).")
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Optimizer steps (train.steps).", show_default=False)
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        help="Processes on this machine that share each step's rows.",
        show_default=False,
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="As --processes, with a GPU for each.", show_default=False),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Also show the dtype of each role, the ops and where they are placed."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout, progress on stderr.")
]


def train(
    settings: Settings = None,
    model: Model = None,
    data: Data = None,
    out: Out = None,
    preset: Preset = None,
    steps: Steps = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Folder of a run to go on with.", show_default=False),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --resume: accept changes that make it another run.")
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            "--skip",
            metavar="CODE=REASON",
            help="Leave a check of the preflight out; may be repeated.",
            show_default=False,
        ),
    ] = None,
    skip_kernel_check: Annotated[
        bool,
        typer.Option(
            "--skip-kernel-check",
            help="Do not check kernels before their first use on this device.",
        ),
    ] = False,
    no_cache: NoCache = False,
    processes: Processes = None,
    gpus: Gpus = None,
    verbose: Verbose = False,
    json_output: Json = False,
) -> None:
    """Fine-tune a model under a declared precision.

    Settings come from a YAML file, from `section.key=value`, and from the options below. Later ones
    override earlier ones.

    Examples:

        isotype train --model Qwen/Qwen2.5-0.5B --data chats.jsonl

        isotype train run.yaml train.learning_rate=1e-4 precision.preset=bf16-mixed

        isotype train run.yaml --preset qlora --steps 20
        isotype train --resume runs/qwen                      # continues bit-identically

        isotype train --resume runs/qwen train.steps=2000     # for longer

        isotype train run.yaml --gpus 4                       # the same run on 4 GPUs

        isotype train run.yaml --skip PF004="a shared disk that grows"

    Before training, a preflight checks data, memory, disk space and one test step. It refuses a run
    that would fail (exit status 3). `preflight.json` holds all results.
    """
    from ..training.preflight.codes import parse_skips

    if skip_kernel_check:
        # an environment variable, so that all processes of the run read it
        os.environ["ISOTYPE_SKIP_KERNEL_CHECK"] = "1"
    with _first_process_reports():
        skips = parse_skips(skip or [])
        loaded = _load_settings(
            settings,
            model=model,
            data=data,
            out=out,
            preset=preset,
            steps=steps,
            resume=resume,
            consent=yes,
            no_cache=no_cache,
            device="cuda" if gpus else None,
        )
        status = _launch_processes(loaded, processes, gpus)
    if status is not None:
        raise typer.Exit(status)
    from ..entry.train import start
    from ..training.console import RunConsole

    console = RunConsole(json_output=json_output, is_verbose=verbose)
    raise typer.Exit(start(loaded, resume=resume, console=console, skips=skips).status)


def plan(
    settings: Settings = None,
    model: Model = None,
    data: Data = None,
    out: Out = None,
    preset: Preset = None,
    steps: Steps = None,
    no_cache: NoCache = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="Plan for this device (rtx3060-12gb, h200, cpu) instead of the present one.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=2,
            help="Plan for so many, in machines of 8: memory and traffic.",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Show what `isotype train` would do: precision, parameters, data, memory and schedule. It
    loads no weights.

    Examples:

        isotype plan run.yaml

        isotype plan --model Qwen/Qwen2.5-0.5B --data chats.jsonl --preset qlora

        isotype plan run.yaml train.batch_size=16 train.gradient_checkpointing=layers
    """
    loaded = _load_settings(
        settings, model=model, data=data, out=out, preset=preset, steps=steps, no_cache=no_cache
    )
    from ..tasks.choose import plan_run as build_plan

    run_plan = build_plan(loaded, device=device, gpus=gpus)
    if json_output:
        print(json.dumps(run_plan.to_dict(), indent=1))
    else:
        print(fit_plan(run_plan.to_text()))


def fit_plan(text: str) -> str:
    """Wraps the long lines of a plan at spaces if the output is a terminal."""
    if not sys.stdout.isatty():
        return text
    from ..training.console import wrap_header

    return wrap_header(text, shutil.get_terminal_size().columns, indent=12)


@contextmanager
def _first_process_reports() -> Iterator[None]:
    """Lets only the first process of a launcher print mistakes in the command at once, because
    every process finds the same mistakes.

    The launcher ends the other processes as soon as the first one ends. The other processes print a
    mistake after five seconds, because a mistake can be on one machine only.
    """
    try:
        yield
    except UsageError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5.0)
        raise


def _launch_processes(loaded: LoadedConfig, processes: int | None, gpus: int | None) -> int | None:
    """Starts the requested number of processes and returns the exit status of the run. Returns None
    if it started no processes and this process must execute the run itself.

    Raises  UsageError if this number of processes cannot share a training step, or if it differs
            from the number of processes that a launcher started
    """
    from ..distributed.rank import Batching, find_rank

    if processes and gpus:
        raise UsageError("--processes and --gpus say the same thing", fix="give one of them")
    if gpus and loaded.config.model.device == "cpu":
        raise UsageError(
            f"--gpus {gpus} and model.device: cpu contradict each other",
            fix=f"--processes {gpus} shares the steps on a CPU",
        )
    requested_size, option = (gpus, "--gpus") if gpus else (processes, "--processes")
    position = find_rank()
    if requested_size and position.size not in (1, requested_size):
        raise UsageError(
            f"{option} {requested_size}, and {position.launcher} has started {position.size} processes",
            fix=f"leave {option} away",
        )
    size = max(position.size, requested_size or 1)
    if size > 1:
        Batching.plan_step(loaded.config.train, size=size)
    if size == position.size:
        return None
    from ..distributed.launch import launch

    return launch([sys.executable, "-m", "isotype", *sys.argv[1:]], size)


def _load_settings(
    settings: list[str] | None,
    *,
    model: str | None,
    data: list[str] | None,
    out: str | None,
    preset: str | None,
    steps: int | None,
    resume: Path | None = None,
    consent: bool = False,
    no_cache: bool = False,
    device: str | None = None,
) -> LoadedConfig:
    from ..entry.train import load_settings

    arguments = list(settings or [])
    file = Path(arguments.pop(0)) if arguments and "=" not in arguments[0] else None
    flags = {
        "model.name": model,
        "data.train": data[0] if data and len(data) == 1 else data or None,
        "run.folder": out,
        "train.steps": steps,
        "data.cache": "none" if no_cache else None,
        "model.device": device,
    }
    if consent and resume is None:
        raise UsageError("--yes has no effect without --resume")
    if resume is not None and out is not None:
        raise UsageError(
            "--out: a resumed run stays in its folder", fix="leave --out away, or start a new run"
        )
    return load_settings(
        file,
        arguments,
        flags,
        preset=preset,
        resume=resume,
        change_hint="give changes as section.key=value",
        consent=consent,
    )


def quickstart(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="Where everything goes: quickstart, or quickstart-diffusion."
        ),
    ] = None,
    diffusion: Annotated[
        bool,
        typer.Option("--diffusion", help="Pictures: a small Flux, then a LoRA for a new shape."),
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Progress on stderr, one JSON object on stdout.")
    ] = False,
) -> None:
    """Train a small model on Python's documentation, then a LoRA adapter on questions about it. The
    command works offline and takes minutes on a CPU.

    The folder then holds the text (or pictures), both configuration files, both runs and their
    reports. If the command is repeated, it continues where it stopped.

    Examples:

        isotype quickstart

        isotype quickstart --folder /tmp/try

        isotype quickstart --diffusion
    """
    wait_passively(is_forced=True)
    from ..quickstart import quickstart as quickstart_text
    from ..quickstart import quickstart_pictures

    folder = folder or Path("quickstart-diffusion" if diffusion else "quickstart")
    raise typer.Exit(
        (quickstart_pictures if diffusion else quickstart_text)(folder, json_output=json_output)
    )
