"""`isotype eval RUN FILE`: the loss of a run on a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..wording import counted


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or not; an adapter's or a model's too.")],
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="What data.train takes: a file, folder, glob, hf:NAME or stdlib. Without it the run's own evaluation rows.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Rows per forward pass; the result does not depend on it.")
    ] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option("--on-bad-row", metavar="error|skip", help="As data.on_bad_row; by default the run's own.", show_default=False),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Token-weighted loss and perplexity of a run on a file or its own evaluation rows, under the run's own precision.

    Of a diffusion run: the loss on the pictures of a folder or file, at fixed noise levels.

    Examples:

        isotype eval runs/qwen held_out.jsonl

        isotype eval runs/flux held_out_pictures
    """
    from ..errors import UsageError

    if on_bad_row not in (None, "error", "skip"):
        raise UsageError(f"--on-bad-row {on_bad_row}: expected error or skip")
    from ..config.kind import DIFFUSION
    from ..config.sources import SourceSpec
    from ..data.sources import refuse_absent
    from ..runs.folder import kind_of_run, require_run, run_and_result, without_run

    if without_run(run) is None:
        require_run(run_and_result(run)[0])  # checked first, since loading takes seconds
    if data is None and (kind_of_run(run) == DIFFUSION or without_run(run) is not None):
        raise UsageError(f"eval: which file? {run} has no evaluation rows of its own", fix=f"isotype eval {run} FILE")
    if kind_of_run(run) == DIFFUSION:
        if on_bad_row is not None:
            raise UsageError(f"--on-bad-row has no effect: {run} is a diffusion run")
        _pictures(run, str(data), batch_size=batch_size, json_output=json_output)
        return
    if data is not None:
        refuse_absent(SourceSpec(name=data))
    from ..training.console import quiet_libraries

    quiet_libraries()
    from ..config.schema import DataSection
    from ..data.bad_rows import FIX
    from ..data.load import load_data
    from ..inference.loaded import load_run
    from ..model.processor import pictures_of
    from ..tasks.language.objective import NextToken
    from ..tasks.language.result import evaluate as measure

    loaded = load_run(run)
    objective = loaded.config.train.objective
    if data is None and objective != "sft":
        raise UsageError(
            f"eval: {run} learnt from pairs ({objective}): the evaluations in its metrics.jsonl are of its own pairs, in eval_rewards/...",
            fix=f"isotype eval {run} FILE, with rows of one answer each",
        )
    other: dict[str, Any] = {"packing": False}
    if data is not None:
        other |= {"train": data, "eval": None, "eval_split": 0.0, "limit": None, "format": "auto", "stream": False}
    if on_bad_row is not None:
        other["on_bad_row"] = on_bad_row
    section = DataSection(**{**loaded.config.data.model_dump(), **other})
    try:
        pictures = pictures_of(loaded.config.model, section, loaded.tokenizer)
        read = load_data(section, loaded.tokenizer, seed=loaded.config.train.seed, pictures=pictures)
    except UsageError as error:
        if error.fix != FIX:
            raise
        raise UsageError(error.message, fix=f"isotype eval {run} {data or ''} --on-bad-row skip".replace("  ", " ")) from None
    rows, side = (read.eval, read.facts["eval"]) if data is None else (read.train, read.facts["train"])
    if not len(rows):
        raise UsageError(f"eval: {run} has no evaluation rows (data.eval, data.eval_split): which file?", fix=f"isotype eval {run} FILE")
    data = data or "its own evaluation rows"
    left_out = sum(side["bad_rows"].values()) + sum(dropped["rows"] for dropped in side["dropped"])
    size = batch_size or loaded.config.train.eval_batch_size or loaded.config.train.batch_size
    found = measure(
        loaded.model, rows, batch_size=size, pad_id=loaded.tokenizer.pad_token_id, device=loaded.device, loss_dtype=loaded.precision.loss,
        objective=NextToken(loaded.config, read.pictures),
    )  # fmt: skip
    perplexity = math.exp(min(found.loss, 700.0))
    answer = {"run": str(run), "taken": loaded.taken, "data": data, "rows": len(rows), "left_out": left_out, "tokens": found.weight}
    answer["loss"] = found.loss
    if json_output:
        print(json.dumps(answer | {"perplexity": perplexity}))
    else:
        print(
            f"{run} ({loaded.taken}) on {data}: loss {found.loss:.4f}, perplexity {perplexity:.2f}, {counted(len(rows), 'row')}, "
            f"{counted(found.weight, 'token')}" + (f"; {counted(left_out, 'row')} left out" if left_out else "")
        )


def _pictures(run: Path, data: str, *, batch_size: int | None, json_output: bool) -> None:
    from ..inference.diffusion import evaluate_with
    from ..training.console import quiet_libraries

    quiet_libraries()
    taken, found = evaluate_with(run, data, batch_size=batch_size)
    answer = {"run": str(run), "taken": taken, "data": data, "rows": found.weight, "loss": found.loss, "parts": dict(found.parts)}
    if json_output:
        print(json.dumps(answer))
        return
    parts = ", ".join(f"{name} {loss:.4f}" for name, loss in found.parts.items())
    print(f"{run} ({taken}) on {data}: loss {found.loss:.4f} of {counted(found.weight, 'picture')} ({parts})")
