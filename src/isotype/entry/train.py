"""`isotype.train(...)`: the run of `isotype train`, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..config.schema import RunConfig, Section
from ..errors import UsageError
from .run import Run
from .settings import load_settings, of_this_start

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..training.callbacks import Callback

Given: TypeAlias = str | Path | Mapping[str, Any] | Section | None
SOURCE = "isotype.train()"
HOW_TO_CHANGE = "give changes as sections: train={'steps': 200}"
# what a plain name or path means for each section
NAMED = {
    "model": "model.name",
    "data": "data.train",
    "images": "images.train",
    "diffusion": None,
    "adapter": "adapter.kind",
    "precision": "precision.preset",
    "train": None,
    "run": "run.folder",
    "parallel": "parallel.kind",
}


def train(
    config: RunConfig | str | Path | None = None,
    *,
    model: Given = None,
    data: Any = None,
    images: Given | list[str] = None,
    diffusion: Given = None,
    adapter: Given = None,
    precision: Given = None,
    train: Given = None,
    run: Given = None,
    parallel: Given = None,
    preset: str | None = None,
    resume: str | Path | None = None,
    accept_changes: bool = False,
    skip: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    objective: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Run:
    """Trains, and returns the run; Ctrl-C (in a notebook: interrupt) saves and returns a run whose status is `interrupted`.

        run = isotype.train(model="Qwen/Qwen2.5-0.5B", data="chats.jsonl", train={"learning_rate": 1e-4})
        run.metrics, run.adapter, run.chat("What is a bf16?")

    config     a RunConfig, or a YAML file; sections given beside it win
    model ...  each section as a name (model.name, data.train, images.train, adapter.kind, precision.preset, run.folder,
               parallel.kind), a mapping, or its class
    data       also rows: a list of them, a datasets.Dataset, a pandas or polars frame; or a mapping whose train and eval are such
    preset     lora, qlora, full, full-bf16, or a precision
    resume     a run's folder to go on with; sections are what is to change
    accept_changes  with resume: accepts changes that make it another run, as `--yes` does
    skip       checks of the preflight to leave out, code to reason
    callbacks  objects of `isotype.Callback`; its docstring says what they may and may not do
    objective  objective(model, batch) -> float[], the losses of a micro-batch summed over `batch.weight` tokens or pictures,
               instead of the loss of the task. A batch of tokens has `inputs` for the model and `labels`. Evaluation keeps the task's loss.
    Raises     UsageError, PreflightError, RunError, DtypeError, each with its fix; KeyboardInterrupt for Ctrl-C before step 1

    Random state, the default dtype, deterministic mode, warnings and log levels are afterwards what they were before the call.
    """
    if callbacks:
        from ..training.callbacks import check_callbacks

        check_callbacks(callbacks)
    if skip:
        from ..training.preflight.codes import check_skips

        check_skips(skip)
    from ..data.in_memory import as_source

    if isinstance(data, Mapping):
        data = {key: as_source(value) if key in ("train", "eval") else value for key, value in data.items()}
    given = {
        "model": model,
        "data": as_source(data),
        "images": images,
        "diffusion": diffusion,
        "adapter": adapter,
        "precision": precision,
        "train": train,
        "run": run,
        "parallel": parallel,
    }
    flags: dict[str, Any] = {}
    if isinstance(config, RunConfig):
        flags |= {f"{name}.{key}": value for name in NAMED for key, value in _set_keys(getattr(config, name)).items()}
    for name, value in given.items():
        flags |= _flags(name, value)
    file = None if config is None or isinstance(config, RunConfig) else Path(config)
    before = None if resume is None else Path(resume)
    if before is not None and preset is not None:
        raise UsageError("preset: a resumed run has its own", fix=HOW_TO_CHANGE)
    if accept_changes and before is None:
        raise UsageError("accept_changes has no effect without resume", fix="isotype.train(resume=..., accept_changes=True)")
    loaded = load_settings(
        file, flags=flags, preset=preset, resume=before, how_to_change=HOW_TO_CHANGE, source=SOURCE, consent=accept_changes
    )
    loaded, before = of_this_start(loaded, before)
    from .process_state import own_process_state
    from .start import start

    with own_process_state():
        ended = start(loaded, resume=before, skips=skip, callbacks=callbacks, objective=objective)
    if not ended.begun:
        raise KeyboardInterrupt("before step 1: there is no run")
    return Run(ended.folder)


def _flags(name: str, value: Any) -> dict[str, Any]:
    """`section.key` -> value."""
    if value is None:
        return {}
    if isinstance(value, Section):
        return {f"{name}.{key}": v for key, v in _set_keys(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}.{key}": v for key, v in value.items()}
    key = NAMED[name]
    if key is None:
        raise UsageError(
            f"isotype.train({name}={value!r}): expected a mapping or a {name.capitalize()}Section", fix=f"{name}={{'steps': 100}}"
        )
    return {key: str(value) if isinstance(value, Path) else value}


def _set_keys(section: Section) -> dict[str, Any]:
    """The keys that were set, not those that have their defaults."""
    return {key: getattr(section, key) for key in section.model_fields_set}
