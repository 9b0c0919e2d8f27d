"""`isotype.train(...)`, the `Run` that it returns, and the settings of a run from the command line
or from Python.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..config.load import LoadedConfig, load
from ..config.schema import RunConfig, Section
from ..environment.install import install_command
from ..errors import UsageError
from ..runs.folder import RunFolder

if TYPE_CHECKING:
    import pandas
    from torch import Tensor, nn

    from ..inference.loaded import Conversation, LoadedRun
    from ..report.record import RunRecord
    from ..training.callbacks import Callback, Objective
    from ..training.console import RunConsole


PACKAGE = Path(__file__).parents[1]
# a section of the configuration as the caller of `train` may give it: a name or path, a mapping,
# or a section
SectionLike: TypeAlias = str | Path | Mapping[str, Any] | Section | None
# the device files of the drivers of NVIDIA (on Windows' Linux too) and of AMD
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
SOURCE = "isotype.train()"
CHANGE_HINT = "give changes as sections: train={'steps': 200}"
# section -> the key that is set by a plain name or path
SHORTHAND_KEYS = {
    "model": "model.name",
    "data": "data.train",
    "images": "images.train",
    "diffusion": None,
    "adapter": "adapter.kind",
    "precision": "precision.preset",
    "preference": None,
    "distil": None,
    "train": None,
    "run": "run.folder",
    "parallel": "parallel.kind",
}


def train(
    config: RunConfig | str | Path | None = None,
    *,
    model: SectionLike = None,
    data: Any = None,
    images: SectionLike | list[str] = None,
    diffusion: SectionLike = None,
    adapter: SectionLike = None,
    precision: SectionLike = None,
    preference: SectionLike = None,
    distil: SectionLike = None,
    train: SectionLike = None,
    run: SectionLike = None,
    parallel: SectionLike = None,
    preset: str | None = None,
    resume: str | Path | None = None,
    accept_changes: bool = False,
    skip: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    objective: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Run:
    """Trains and returns the run. Ctrl-C, or an interrupt in a notebook, saves the run and returns
    it with the status `interrupted`.

        run = isotype.train(model="Qwen/Qwen2.5-0.5B", data="chats.jsonl", train={"steps": 200})
        run.metrics, run.adapter, run.chat("What is a bf16?")

    config     a RunConfig, or a YAML file; sections given as arguments override it
    model ...  each section as a name (for model.name, data.train, images.train, adapter.kind,
               precision.preset, run.folder or parallel.kind), as a mapping, or as an object of its
               class
    data       also the rows themselves: a list, a datasets.Dataset, or a pandas or polars frame; or
               a mapping with such rows as train and eval
    preset     lora, qlora, full, full-bf16, or a precision
    resume     the folder of a run to continue; the sections then hold the changes
    accept_changes  with resume: also accepts changes of keys that are otherwise fixed, like `--yes`
    skip       the preflight checks to skip, each code with a reason
    callbacks  objects of `isotype.Callback`, whose docstring lists what they can do
    objective  a function that replaces the loss of the task: objective(model, batch) -> float[],
               the sum of the losses of all tokens or pictures of a micro-batch, not divided by their
               number `batch.weight`. A batch of tokens has `inputs` for the model and `labels`.
               Evaluation uses the loss of the task.
    Raises     UsageError, PreflightError, RunError, DtypeError, each with its fix;
               KeyboardInterrupt for Ctrl-C before step 1

    Afterwards the random state, the default dtype, the deterministic mode, warnings and log levels
    are the same as before the call.
    """
    if callbacks:
        from ..training.callbacks import check_callbacks

        check_callbacks(callbacks)
    if skip:
        from ..training.preflight.codes import check_skips

        check_skips(skip)
    from ..data.sources import save_rows

    if isinstance(data, Mapping):
        data = {
            key: save_rows(value) if key in ("train", "eval") else value
            for key, value in data.items()
        }
    else:
        data = save_rows(data)
    sections = {
        "model": model,
        "data": data,
        "images": images,
        "diffusion": diffusion,
        "adapter": adapter,
        "precision": precision,
        "preference": preference,
        "distil": distil,
        "train": train,
        "run": run,
        "parallel": parallel,
    }
    flags: dict[str, Any] = {}
    if isinstance(config, RunConfig):
        flags |= {
            f"{name}.{key}": value
            for name in SHORTHAND_KEYS
            for key, value in _explicit_values(getattr(config, name)).items()
        }
    for name, value in sections.items():
        flags |= _section_settings(name, value)
    file = None if config is None or isinstance(config, RunConfig) else Path(config)
    resumed_folder = None if resume is None else Path(resume)
    if resumed_folder is not None and preset is not None:
        raise UsageError("preset: a resumed run has its own", fix=CHANGE_HINT)
    if accept_changes and resumed_folder is None:
        raise UsageError(
            "accept_changes has no effect without resume",
            fix="isotype.train(resume=..., accept_changes=True)",
        )
    loaded = load_settings(
        file,
        flags=flags,
        preset=preset,
        resume=resumed_folder,
        change_hint=CHANGE_HINT,
        source=SOURCE,
        consent=accept_changes,
    )

    with restore_process_state():
        outcome = start(
            loaded, resume=resumed_folder, skips=skip, callbacks=callbacks, objective=objective
        )
    if not outcome.has_run:
        raise KeyboardInterrupt("before step 1: there is no run")
    return Run(outcome.folder)


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run.

    status  the exit status: 0 done, 130 interrupted
    folder  the folder of the run
    has_run  whether the folder holds a run. This is false for a run that was interrupted before its
            first step
    """

    status: int
    folder: Path
    has_run: bool


def start(
    loaded: LoadedConfig,
    *,
    resume: Path | None = None,
    console: RunConsole | None = None,
    skips: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
) -> RunOutcome:
    """Trains to the end, or saves on Ctrl-C. Raises IsotypeError.

    resume     the folder of the run to continue
    console    shows the progress; by default on stdout
    skips      the preflight checks to skip, each code with a reason
    callbacks  called after steps, evaluations, saves and samples
    objective  computes the loss in place of the task's own loss
    """
    _start_kernel_builds(loaded.config)
    from ..tasks.choose import train as train_task
    from ..training.console import RunConsole

    console = console or RunConsole()
    repository = _find_push_repository(loaded, resume)
    status = train_task(
        loaded,
        resume=resume,
        console=console,
        skips=skips,
        callbacks=callbacks,
        objective=objective,
    )
    folder = Path(console.result["folder"])
    if repository is not None and status == 0:
        from ..inference.push import push

        console.print_line(push(folder, loaded.config, repository))
    return RunOutcome(status, folder, RunFolder(folder).is_run)


def _start_kernel_builds(config: RunConfig) -> None:
    """Starts to build the C++ kernels of a run on a CPU, before the imports of the run."""
    if not config.model.optimize:
        return
    if config.model.device != "cpu" and _has_gpu():
        return
    from ..ops.builds import COMMON_OPS, op_source, start_builds

    sources = [op_source(op) for op in COMMON_OPS]
    if config.adapter.kind == "lora":
        sources.append(PACKAGE / "lora" / "kernels.cpp")
    if config.precision.preset == "bf16-pure":
        sources.append(op_source("adamw"))
    start_builds(sources)


def _has_gpu() -> bool:
    """Whether torch can use a GPU. The import of torch takes a second, so torch is asked only if
    this machine may have a GPU.
    """
    if sys.platform == "linux" and not any(map(os.path.exists, GPU_FILES)):
        return False
    import torch

    return torch.cuda.is_available()


def _find_push_repository(loaded: LoadedConfig, resume: Path | None) -> str | None:
    """Checks that the result can be pushed to the hub, and returns the repository. None if this
    process does not push. Raises UsageError.
    """
    from ..distributed.rank import find_rank

    run = loaded.config.run
    if (
        run.push_to_hub is None and not run.push_merged and run.push_private
    ) or find_rank().rank != 0:
        return None
    from ..inference.push import check_push

    return check_push(loaded.config, resume)


def _section_settings(name: str, value: Any) -> dict[str, Any]:
    """Returns the settings in the argument for a section, as a mapping of `section.key` to the
    value.
    """
    if value is None:
        return {}
    if isinstance(value, Section):
        return {f"{name}.{key}": v for key, v in _explicit_values(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}.{key}": v for key, v in value.items()}
    key = SHORTHAND_KEYS[name]
    if key is None:
        raise UsageError(
            f"isotype.train({name}={value!r}): expected a mapping or a {name.capitalize()}Section",
            fix=f"{name}={{'steps': 100}}",
        )
    return {key: str(value) if isinstance(value, Path) else value}


def _explicit_values(section: Section) -> dict[str, Any]:
    """Returns the keys of a section that were set, without the defaults."""
    return {key: getattr(section, key) for key in section.model_fields_set}


class Run:
    """A finished or unfinished run. Each access reads the files again.

    Raises  UsageError if the folder holds no file of a run
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._loaded: LoadedRun | None = None
        self._conversation: Conversation | None = None
        self._read()

    def __repr__(self) -> str:
        loss = self.record.best_evaluation
        return f"<isotype.Run {self.folder}: {self.status}" + (
            f", best evaluation loss {loss:.4f}>" if loss is not None else ">"
        )

    @property
    def record(self) -> RunRecord:
        """The contents of the run folder."""
        return self._read()

    def _read(self) -> RunRecord:
        # imported here because it needs the libraries of the extra `train`
        from ..report.record import read_run

        return read_run(self.folder)

    @property
    def status(self) -> str:
        """The status: done, running, failed, interrupted or stopped."""
        return self.record.status

    @property
    def result(self) -> Mapping[str, Any]:
        """The content of result.json: steps, losses, and the check of the saved result."""
        return self.record.result

    @property
    def metrics(self) -> pandas.DataFrame:
        """The content of metrics.jsonl as a table, with a row per step and per evaluation, and a
        column per key.
        """
        import pandas

        return pandas.DataFrame(self.record.metrics)

    @property
    def adapter(self) -> Path:
        """The PEFT folder that the run saved. Raises UsageError if there is none."""
        return self._find_saved_folder("adapter")

    @property
    def model(self) -> Path:
        """The model folder that a run without an adapter saved. Raises UsageError if none exists."""
        return self._find_saved_folder("model")

    def _find_saved_folder(self, kind: str) -> Path:
        folder = self.folder / kind
        if not folder.is_dir():
            other_kind = {"adapter": "model", "model": "adapter"}[kind]
            if (self.folder / other_kind).is_dir():
                hint = f"run.{other_kind} is what it saved"
            else:
                hint = f"its status is {self.status}"
            raise UsageError(f"{self.folder}: no {kind} there: {hint}")
        return folder

    def load(self) -> LoadedRun:
        """Returns the model, the tokenizer, the precision and the device, as in training. The first
        call loads them.
        """
        if self._loaded is None:
            from ..inference.loaded import load_run

            self._loaded = load_run(self.folder)
        return self._loaded

    def chat(
        self,
        text: str,
        *,
        images: Sequence[str] = (),
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> str:
        """Sends a message to the model and returns its answer. Earlier messages are part of the
        conversation until `forget` is called. The settings of the first call apply to the whole
        conversation.

        images  picture files for the question, for a vision-language model
        Raises  UsageError for a picture that cannot be read, or a model without vision
        """
        if self._conversation is None:
            from ..inference.loaded import Conversation

            self._conversation = Conversation(
                self.load(),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                stream=False,
            )
        self._conversation.add_pictures(images)
        return self._conversation.answer(text)

    def forget(self) -> None:
        """Ends the conversation. The next `chat` begins a new conversation."""
        self._conversation = None

    @property
    def report(self) -> Path:
        """Writes report.html again and returns its path."""
        from ..report import write_report

        return write_report(self.folder)


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # set by `train.deterministic`
LIBRARIES = ("peft", "bitsandbytes")


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Sets the default dtype to fp32, enables gradients, and switches the caller's autocast off.
    Restores everything on exit.
    """
    import numpy as np
    import torch
    import transformers

    levels = {name: logging.getLogger(name).level for name in LIBRARIES}
    verbosity = transformers.utils.logging.get_verbosity()
    progress_bars = transformers.utils.logging.is_progress_bar_enabled()
    dtype = torch.get_default_dtype()
    workspace_config = os.environ.get(WORKSPACE)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(disable_autocast())
        try:
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            _set_or_remove(WORKSPACE, workspace_config)
            transformers.utils.logging.set_verbosity(verbosity)
            if progress_bars:
                transformers.utils.logging.enable_progress_bar()
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _set_or_remove(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def disable_autocast() -> Iterator[None]:
    """Switches the caller's autocast and its cache off. Inside the caller's autocast block PyTorch
    would cast each weight once and cache the copy. Every step would then compute with the weights
    of the first step.
    """
    import torch

    if not any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        yield
        return
    with (
        torch.autocast("cpu", enabled=False, cache_enabled=False),
        torch.autocast("cuda", enabled=False, cache_enabled=False),
    ):
        yield


def load_settings(
    file: Path | None,
    arguments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    preset: str | None,
    resume: Path | None,
    change_hint: str,
    **options: Any,
) -> LoadedConfig:
    """Loads the settings of a new run, or with `resume` the settings of the run in that folder with
    changes.

    arguments      `section.key=value`; they override the file
    flags          values by `section.key`; they override the file and the arguments, and None is
                   ignored
    change_hint    the fix that an error suggests if a file is given for a resumed run: how to
                   change the settings of this run
    options        further options of `config.load.load`
    Raises         UsageError for settings that are wrong or missing
    """
    if resume is not None:
        from ..runs.folder import require_run

        if file is not None:
            raise UsageError(f"{file}: a resumed run has its own configuration", fix=change_hint)
        file = require_run(resume) / "resolved.yaml"
    try:
        loaded = load(
            file, arguments, flags or {}, preset=preset, resolved=resume is not None, **options
        )
    except UsageError as error:
        if error.fix is not None or file is None or not _is_config_of_other_tool(file):
            raise
        raise UsageError(
            error.message,
            fix=(
                f"isotype import {file} --out NEW.yaml translates a configuration of another tool"
            ),
        ) from None
    refuse_incomplete(loaded)
    return loaded


def _is_config_of_other_tool(file: Path) -> bool:
    """Returns True if `isotype import` translates the file."""
    from ..translate.source import read_source
    from ..translate.translation import TOOLS

    try:
        return read_source(file).tool in TOOLS
    except UsageError:
        return False


def refuse_incomplete(loaded: LoadedConfig) -> None:
    """Raises UsageError with one line for each missing setting, file or package."""
    from ..config.kind import (
        DIFFUSION,
        GGUF_FIX,
        GGUF_REFUSAL,
        detect_run_kind,
        is_denoiser,
        refuse_inapplicable_keys,
    )
    from ..config.sources import (
        check_data,
        picture_sources,
        source_specs,
    )
    from ..data.sources import require_source

    config = loaded.config
    file_prefix = f"{loaded.path} " if loaded.path else ""
    missing = missing_trackers(config.run.trackers)
    if config.model.name is None and is_denoiser(config.model.config):
        missing.append(
            f"{file_prefix}model.name: missing: the pipeline whose VAE, text encoders and scheduler"
            " model.config is trained with"
        )
    elif config.model.name is None and (
        config.model.init == "pretrained" or config.model.config is None
    ):
        missing.append(
            f"{file_prefix}model.name: missing: --model FOLDER, or model.name in a file (isotype init"
            " writes one)"
        )
    missing += _model_name_problems(loaded)
    refuse_inapplicable_keys(config, loaded.sources)
    diffusion = detect_run_kind(config) == DIFFUSION
    if diffusion and str(config.model.name).endswith(".gguf"):
        missing.append(
            f"{file_prefix}model.name: {config.model.name}: {GGUF_REFUSAL}: take {GGUF_FIX}"
        )
    if diffusion and config.images.train is None:
        missing.append(
            f"{file_prefix}images.train: missing: a folder of pictures with captions, or a JSONL file"
        )
    if not diffusion and config.data.train is None:
        missing.append(
            f"{file_prefix}data.train: missing: --data FILE, or --data stdlib for the built-in questions"
            " and answers"
        )
    if missing:
        raise UsageError("\n".join(missing))
    if diffusion:
        for split in ("train", "eval", "regularisation"):
            picture_sources(config.images, split)
        return
    check_data(config, loaded.sources)
    for split in ("train", "eval"):
        for spec in source_specs(config.data, split):
            require_source(spec)


def _model_name_problems(loaded: LoadedConfig) -> list[str]:
    """Returns one line for each local model, tokenizer, teacher or adapter that does not exist or
    is of another kind.
    """
    from ..config.sources import (
        closest_model_hint,
        is_folder_name,
        missing_folder_hint,
        model_folder_problem,
    )

    config = loaded.config
    problems = []
    for key, name in (
        ("model.name", config.model.name),
        ("model.tokenizer", config.model.tokenizer),
        ("distil.teacher", config.distil.teacher),
        ("adapter.start_from", config.adapter.start_from),
    ):
        if name is None:
            continue
        is_local = key == "adapter.start_from" or is_folder_name(name)
        if is_local and not Path(name).exists():
            expected_kind = "file" if name.endswith((".safetensors", ".gguf")) else "folder"
            hint = closest_model_hint(name) or missing_folder_hint(name, loaded.path)
            problem: str | None = f"no such {expected_kind}{hint}"
        else:
            problem = model_folder_problem(key, name)
        if problem:
            problems.append(f"{loaded.sources[key]} {key}: {name}: {problem}")
    return problems


def missing_trackers(trackers: Sequence[str]) -> list[str]:
    """Returns one line for each tracker whose package is not installed. Packages and extras have
    the same names as the trackers.
    """
    missing = [name for name in dict.fromkeys(trackers) if find_spec(name) is None]
    return [
        f"run.trackers: {name} is not installed: {install_command(name)}, or leave it out of"
        " run.trackers"
        for name in missing
    ]
