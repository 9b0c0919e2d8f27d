"""The end of a run: save the adapter or the model, load it again, compare, write the result."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch

from ..dtypes import to_torch
from ..model.adapter import save_adapter
from ..precision.precision import Precision
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.checkpoint.snapshot import restore_model
from .evaluate import evaluate
from .loop import Loop
from .setup import Prepared
from .verify import check_rows, verify_result


def finish(loop: Loop, prepared: Prepared) -> dict[str, Any]:
    """Returns the content of result.json. Raises RunError SV001 when the saved result is not the trained one."""
    config, progress, precision = loop.config, loop.progress, prepared.resolved.precision
    taken = _take_best(loop) if config.train.patience else progress.step
    adapter = config.adapter.kind != "none"
    target = loop.folder.path / ("adapter" if adapter else "model")

    def fill(folder: Path) -> None:
        if adapter:
            save_adapter(loop.model, folder, precision)  # type: ignore[arg-type]  # attach_adapter made it a PeftModel
        else:
            save_model(loop.model, folder, precision)
        prepared.tokenizer.save_pretrained(str(folder))

    write_folder(target, fill)
    loop.observe_saved(target, precision.save_adapter if adapter else precision.save_model)
    rows = prepared.data.eval or prepared.data.train
    batch_size = config.train.eval_batch_size or config.train.batch_size
    pad = prepared.tokenizer.pad_token_id
    trained = evaluate(
        loop.model, check_rows(rows), batch_size=batch_size, pad_id=pad, device=loop.device, loss_dtype=precision.loss
    ).loss  # fmt: skip
    _free(loop, prepared)
    reloaded = verify_result(
        target, prepared.source, precision, rows, trained_loss=trained, batch_size=batch_size, tokenizer=prepared.tokenizer,
        config=config.model, device=prepared.device, adapter=adapter,
    )  # fmt: skip
    return {
        "status": "done",
        "folder": str(loop.folder.path),
        "adapter" if adapter else "model": str(target),
        "base": prepared.source.name if adapter else None,
        "steps": progress.step,
        "of_step": taken,
        "best_eval_loss": progress.best_loss if loop.eval_rows else None,
        "best_step": progress.best_step,
        "tokens": progress.tokens,
        "trained_seconds": round(progress.trained_seconds, 2),
        "check": {"rows": len(check_rows(rows)), "trained_loss": trained, "reloaded_loss": reloaded},
    }


def save_model(model: Any, folder: Path, precision: Precision) -> None:
    """An ordinary Hugging Face folder in `save_model`'s dtype."""
    dtype = to_torch(precision.save_model)
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")  # else dtype="auto" would widen it to what it was trained in
    file.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "precision.json").write_text(precision.as_file())


def _take_best(loop: Loop) -> int:
    """With early stopping the best weights are the result; returns their step."""
    best = loop.store.best
    if best is not None and best != loop.progress.step:
        if (reason := loop.store.fault(best)) is not None:
            loop.console.say(f"warning   the best checkpoint, step_{best}, is damaged ({reason}): the result is the last step's weights")
            return loop.progress.step
        restore_model(loop.model, loop.store.load(best).tensors)
        loop.console.say(f"taking the weights of step {best}, the best evaluation")
        return best
    return loop.progress.step


def _free(loop: Loop, prepared: Prepared) -> None:
    """Lets go of the trained model, so that the fresh one has its room."""
    loop.stepper.accumulator.close()
    loop.observer = loop.stepper = loop.model = None  # type: ignore[assignment]
    prepared.stepper = prepared.model = None  # type: ignore[assignment]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
