"""Measures how much of a run's improvement in loss is kept in a file that was written from this
run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ...config.kind import FORMAT_OF_OBJECTIVE
from ...data.load import load_data
from ...data.pictures import Pictures
from ...data.rows import LoadedData, Row
from ...errors import UsageError
from ...model.adapter_settings import ADAPTER_CONFIG_FILE
from ...model.processor import build_picture_reader
from ...model.served import round_frozen, serve_adapters
from ...tasks.language.batches import Batch
from ...tasks.language.objective import NextToken
from ...tasks.language.result import evaluate
from ..gguf_file import MERGE_DTYPE_KEY
from ..loaded import LoadedRun
from ..merge import merged_dtype
from ..run_weights import RunWeights
from .gguf_model import open_gguf
from .reference import ReferenceModel, Scores
from .result import SMALLEST_SHOWN, Verification, kept_share
from .settings import (
    apply_folder_settings,
    apply_gguf_settings,
    compare_folder_settings,
    compare_gguf_settings,
    compare_rope_factors,
)
from .tensors import (
    Difference,
    TensorComparison,
    cast_to_merge,
    fill_and_compare,
    refuse_other_run,
    unmerged_difference,
)
from .written_model import WrittenModel, open_adapter_folder, open_folder

DEFAULT_ROWS = 32  # evaluation rows that are compared
MIN_KEPT = 0.9  # share of the adapter's effect that the file must keep
OLLAMA_FILE = "model.gguf"
_SMALL_SHARE = 0.02  # of what was learnt; a smaller change of the loss is not split into groups
RUN_DTYPES = "from the run's dtypes to fp32"


def verify_file(
    run: LoadedRun, path: Path, *, row_count: int = DEFAULT_ROWS, min_kept: float = MIN_KEPT
) -> Verification:
    """Reads a written file back, and compares it with its run.

    path       a GGUF file, the folder of a merged model or of an adapter, or a folder for Ollama
    row_count  the number of held-out rows, or of training rows if none are held out
    min_kept   the share of the run's improvement in loss that the file must keep
    Raises     UsageError for a damaged file, a file of another model or run, and missing rows
    """
    rows, loaded = load_evaluation(run, row_count)
    pictures = loaded.pictures
    weights = RunWeights(run)
    reference = ReferenceModel(run, weights)
    written = open_written(run, path, reference, weights)
    batches = reference.batches(rows, pictures)

    reference.fill(weights.base)
    base = reference.score(batches)
    unrounded = None
    if weights.served is not None:
        reference.fill(weights.unrounded)
        unrounded = reference.score(batches)
    reference.fill(weights.trained, _trained_names(reference, weights))
    trained = reference.score(batches)
    comparison = fill_and_compare(reference, weights, written)
    refuse_other_run(comparison)
    differences, notes = _compare_settings(run, reference, written, path)
    unmerged = unmerged_difference(comparison)
    if unmerged is not None:
        differences.insert(0, unmerged)
    file_weights = scores = reference.score(batches)
    causes: dict[str, float] = {}
    if unrounded is not None:
        notes.append(_note_served(run, trained, unrounded))
    changed_config = None
    if written.folder is not None:
        changed_config = apply_folder_settings(reference.config, written.config)
    elif not written.adapter_only:
        changed_config = apply_gguf_settings(reference.config, written)
    if changed_config is not None:
        scores = reference.score_with(changed_config, batches)
        causes["settings of the file"] = scores.loss - file_weights.loss
    causes |= _tensor_causes(
        reference,
        weights,
        written,
        comparison,
        batches,
        trained,
        file_weights,
        gain=base.loss - trained.loss,
    )
    noise = base.noise(trained)
    # last, since a model that was trained for a served format is rounded in place
    causes = {RUN_DTYPES: trained.loss - _loss_in_run(run, rows, pictures)} | causes
    return Verification(
        file=path.name,
        description=written.description,
        base_loss=base.loss,
        trained_loss=trained.loss,
        file_loss=scores.loss if math.isfinite(scores.loss) else None,
        noise=noise,
        kept=kept_share(base.loss, trained.loss, scores.loss, noise),
        min_kept=min_kept,
        agreement=scores.agreement(trained),
        rows=len(rows),
        tokens=len(trained.predictions),
        row_source=row_source(loaded),
        losses_by_cause={
            cause: change for cause, change in causes.items() if math.isfinite(change)
        },
        differences=[*differences, *comparison.differences],
        notes=notes,
    )


def load_evaluation(
    run: LoadedRun, count: int, *, prompt_count: int = 0
) -> tuple[list[Row], LoadedData]:
    """Returns up to `count` held-out rows of the run's data, or training rows if no rows are held
    out. The second result is the loaded data.

    prompt_count  the largest number of prompts that the data has
    Raises        UsageError for data that is missing, and for a folder without a run's data
    """
    data = run.config.data
    if data.train is None:
        raise UsageError(
            f"{run.folder}: this folder names no data on which the file could be compared",
            fix="give the run's folder, whose resolved.yaml names its data",
        )
    objective_format = FORMAT_OF_OBJECTIVE.get(run.config.train.objective)
    loaded = load_data(
        data,
        run.tokenizer,
        seed=run.config.train.seed,
        objective_format=objective_format,
        pictures=build_picture_reader(run.config.model, data, run.tokenizer),
        prompt_count=prompt_count,
    )
    rows = loaded.eval if len(loaded.eval) else loaded.documents
    # the rows of a preference pair follow one another, the chosen answer first
    step = 2 if objective_format == "preference" else 1
    selected = [rows[i] for i in range(0, min(len(rows), step * count), step)]
    learnt = [row for row in selected if row.supervised]
    if not learnt:
        source = row_source(loaded)
        raise UsageError(f"{run.folder}: its {source} rows have no learnt token")
    return learnt, loaded


def row_source(loaded: LoadedData) -> str:
    return "held-out" if len(loaded.eval) else "training"


def open_written(
    run: LoadedRun, path: Path, reference: ReferenceModel, weights: RunWeights
) -> WrittenModel:
    """Opens a file or folder according to its content. Raises UsageError if the path is neither a
    GGUF file nor the folder of a model or adapter.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.is_dir() and (path / OLLAMA_FILE).is_file():
        path = path / OLLAMA_FILE
    if path.is_file():
        written = open_gguf(path, reference.config, reference.names, weights.base)
        if not written.adapter_only:
            written.merge_dtype = _read_merge_dtype(written, run)
        return written
    if (path / ADAPTER_CONFIG_FILE).is_file():
        return open_adapter_folder(path, weights.base)
    if (path / "config.json").is_file():
        return open_folder(path, reference.shapes, text_only=reference.text_only)
    raise UsageError(
        f"{path}: neither a GGUF file nor the folder of a model or adapter",
        fix="--file the file or folder that isotype export or merge wrote",
    )


def _read_merge_dtype(written: WrittenModel, run: LoadedRun) -> str:
    """Returns the dtype of the merged weights from which a GGUF file was written. Files that
    `isotype export` writes contain the name of this dtype. For other files, returns the dtype that
    `isotype merge` uses.
    """
    dtype = written.fields.get(MERGE_DTYPE_KEY)
    return dtype if dtype in ("fp32", "bf16", "fp16") else merged_dtype(run.precision, run.model)[0]


def _note_served(run: LoadedRun, trained: Scores, unrounded: Scores) -> str:
    """Returns a message for a run that was trained for a served format. It compares the losses with
    and without the rounding to this format.

    unrounded  the scores of the exact sum of base and adapter
    """
    return (
        f"trained for {run.precision.served}: the trained model has rounded weights, with a loss of"
        f" {trained.loss:.4f}; without the rounding, base and adapter have {unrounded.loss:.4f}"
    )


def _trained_names(reference: ReferenceModel, weights: RunWeights) -> list[str]:
    """Returns the weights that the trained model does not share with the base."""
    if weights.served is not None:
        return reference.names
    return [name for name in reference.names if name in weights.changed_names]


def _loss_in_run(run: LoadedRun, rows: Sequence[Row], pictures: Pictures | None) -> float:
    """Returns the trained model's loss in the run's own dtypes."""
    serve_adapters(run.model, round_frozen(run.model, run.precision))
    return evaluate(
        run.model,
        rows,
        batch_size=4,
        pad_id=run.tokenizer.pad_token_id or 0,
        device=run.device,
        loss_dtype=run.precision.loss,
        objective=NextToken(run.config, pictures),
    ).loss


def _tensor_causes(
    reference: ReferenceModel,
    weights: RunWeights,
    written: WrittenModel,
    comparison: TensorComparison,
    batches: Sequence[Batch],
    trained: Scores,
    scores: Scores,
    *,
    gain: float,
) -> dict[str, float]:
    """Returns how much the rounding of the merge changes the loss. Also returns how much the values
    in the file change the loss, for each group of tensors. If all groups together change the loss
    only a little, the function returns one value for all of them, because each group needs another
    pass over the rows.

    gain  how much training lowered the loss
    """
    if written.adapter_only:
        return {"the adapter's file": scores.loss - trained.loss}
    groups = comparison.rounded_names
    if not groups:
        return {f"merge to {written.merge_dtype}": scores.loss - trained.loss}

    def read_merged(name: str) -> Tensor:
        return cast_to_merge(weights.trained(name), written.merge_dtype)

    names = [name for group in groups.values() for name in group]
    reference.fill(read_merged, names)
    causes = {}
    merged_loss = trained.loss
    if not comparison.is_merge_exact:
        merged_loss = reference.score(batches).loss
        causes[f"merge to {written.merge_dtype}"] = merged_loss - trained.loss
    change_in_file = scores.loss - merged_loss
    if abs(change_in_file) < max(_SMALL_SHARE * gain, SMALLEST_SHOWN):
        return causes | {"all tensors in the file": change_in_file}
    if len(groups) == 1:
        return causes | {f"{next(iter(groups))} in the file": change_in_file}
    for group, group_names in groups.items():
        readable = [name for name in group_names if name in comparison.read_names]
        reference.fill(written.read, readable)
        causes[f"{group} in the file"] = reference.score(batches).loss - merged_loss
        reference.fill(read_merged, readable)
    return causes


def _compare_settings(
    run: LoadedRun, reference: ReferenceModel, written: WrittenModel, path: Path
) -> tuple[list[Difference], list[str]]:
    """Compares the settings in the file with those of the run. Returns the differences, and
    messages about settings that could not be compared.
    """
    if written.folder is not None:
        return compare_folder_settings(run, reference.config, written.folder, written.config)
    if written.adapter_only:
        return [], ["an adapter alone: it is measured on the run's own base"]
    differences, notes = compare_gguf_settings(run, reference.config, written)
    differences += compare_rope_factors(reference.config, written.rope_factors)
    return differences, notes
