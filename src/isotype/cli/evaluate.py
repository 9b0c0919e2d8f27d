"""Measures the loss of a trained model on data (`isotype eval RUN FILE`)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from ..wording import pluralise
from .run_options import JsonOutput, RunFolder, require_usable_folder


def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help=(
                "A file, folder, glob, hf:NAME (a dataset of the hub) or stdlib (questions from"
                " the docstrings of Python). Without it, the run's own evaluation rows."
            ),
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, help="Rows per forward pass; the result does not depend on it."
        ),
    ] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option(
            "--on-bad-row",
            metavar="error|skip",
            help="As data.on_bad_row; by default the run's own.",
            show_default=False,
        ),
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Measure the token-weighted loss and perplexity of a run on a file or on its own evaluation
    rows, in the run's precision.

    For a diffusion run, this is the loss on the pictures of a folder or file at fixed noise levels.

    Examples:

        isotype eval runs/qwen held_out.jsonl

        isotype eval runs/flux held_out_pictures
    """
    if on_bad_row not in (None, "error", "skip"):
        raise UsageError(f"--on-bad-row {on_bad_row}: expected error or skip")
    from ..config.kind import DIFFUSION
    from ..config.sources import SourceSpec
    from ..data.sources import require_source
    from ..runs.folder import detect_model_folder, detect_run_kind

    require_usable_folder(run)
    if data is None and (detect_run_kind(run) == DIFFUSION or detect_model_folder(run) is not None):
        raise UsageError(
            f"eval: which file? {run} keeps no evaluation rows that eval can read",
            fix=f"isotype eval {run} FILE",
        )
    if detect_run_kind(run) == DIFFUSION:
        if on_bad_row is not None:
            raise UsageError(f"--on-bad-row has no effect: {run} is a diffusion run")
        _evaluate_pictures(run, str(data), batch_size=batch_size, json_output=json_output)
        return
    if data is not None:
        require_source(SourceSpec(name=data))
    from ..training.console import quiet_libraries

    quiet_libraries()
    from ..config.schema import DataSection
    from ..data.bad_rows import BadRowsError
    from ..data.load import load_data
    from ..inference.loaded import load_run
    from ..model.processor import build_picture_reader
    from ..tasks.language.objective import NextToken
    from ..tasks.language.result import evaluate as evaluate_rows

    loaded = load_run(run)
    objective = loaded.config.train.objective
    if data is None and objective != "sft":
        raise UsageError(
            f"eval: {run} was trained on pairs of answers ({objective}), and eval measures rows"
            " with one answer. The results on its own evaluation pairs are in metrics.jsonl"
            " (eval_rewards/...)",
            fix=f"isotype eval {run} FILE, with rows of one answer each",
        )
    overrides: dict[str, Any] = {"packing": False}
    if data is not None:
        overrides |= {
            "train": data,
            "eval": None,
            "eval_split": 0.0,
            "limit": None,
            "format": "auto",
            "stream": False,
        }
    if on_bad_row is not None:
        overrides["on_bad_row"] = on_bad_row
    section = DataSection(**{**loaded.config.data.model_dump(), **overrides})
    try:
        picture_reader = build_picture_reader(loaded.config.model, section, loaded.tokenizer)
        loaded_data = load_data(
            section, loaded.tokenizer, seed=loaded.config.train.seed, pictures=picture_reader
        )
    except BadRowsError as error:
        raise UsageError(
            error.message,
            fix=f"isotype eval {run} {data or ''} --on-bad-row skip".replace("  ", " "),
        ) from None
    if data is None:
        rows = loaded_data.eval
        split_facts = loaded_data.facts["eval"]
    else:
        rows = loaded_data.train
        split_facts = loaded_data.facts["train"]
    if not len(rows):
        raise UsageError(
            f"eval: {run} has no evaluation rows (data.eval, data.eval_split): which file?",
            fix=f"isotype eval {run} FILE",
        )
    data = data or "its own evaluation rows"
    # bad rows cannot be read. Dropped rows can, but nothing would be learnt from them
    bad_count = sum(split_facts["bad_rows"].values())
    dropped_count = sum(dropped["rows"] for dropped in split_facts["dropped"])
    left_out = bad_count + dropped_count
    train = loaded.config.train
    evaluation = evaluate_rows(
        loaded.model,
        rows,
        batch_size=batch_size or train.eval_batch_size or train.batch_size,
        pad_id=loaded.tokenizer.pad_token_id,
        device=loaded.device,
        loss_dtype=loaded.precision.loss,
        objective=NextToken(loaded.config, loaded_data.pictures),
    )
    # the exponential of a larger loss would be infinite
    perplexity = math.exp(min(evaluation.loss, 700.0))
    token_count = evaluation.weight
    if json_output:
        result = {
            "run": str(run),
            "weights": loaded.weights_name,
            "data": data,
            "rows": len(rows),
            "left_out": left_out,
            "tokens": token_count,
            "loss": evaluation.loss,
            "perplexity": perplexity,
        }
        print(json.dumps(result))
    else:
        print(
            f"{run} ({loaded.weights_name}) on {data}: loss {evaluation.loss:.4f}, perplexity {perplexity:.2f},"
            f" {pluralise(len(rows), 'row')}, {pluralise(token_count, 'token')}"
            + (f"; {pluralise(left_out, 'row')} left out" if left_out else "")
        )


def _evaluate_pictures(run: Path, data: str, *, batch_size: int | None, json_output: bool) -> None:
    from ..inference.diffusion import evaluate_pictures
    from ..training.console import quiet_libraries

    quiet_libraries()
    weights_name, evaluation = evaluate_pictures(run, data, batch_size=batch_size)
    row_count = evaluation.weight
    losses_by_noise_level = dict(evaluation.losses_by_part)
    if json_output:
        result = {
            "run": str(run),
            "weights": weights_name,
            "data": data,
            "rows": row_count,
            "loss": evaluation.loss,
            "parts": losses_by_noise_level,
        }
        print(json.dumps(result))
        return
    level_losses = ", ".join(f"{name} {loss:.4f}" for name, loss in losses_by_noise_level.items())
    print(
        f"{run} ({weights_name}) on {data}: loss {evaluation.loss:.4f} of {pluralise(row_count, 'row')}"
        f" ({level_losses})"
    )
