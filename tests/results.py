"""What a run left in its folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TRAINED = (
    "adapter/adapter_model.safetensors", "model/model.safetensors", "model/diffusion_pytorch_model.safetensors",
)  # fmt: skip


def read(folder: Path, name: str) -> Any:
    """A JSON file of the folder."""
    return json.loads((folder / f"{name}.json").read_text())


def metrics(folder: Path, *keys: str) -> list[Any]:
    """The lines of metrics.jsonl; with keys their values in those lines that have them."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in keys if key in row] if keys else rows


def trained_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder / name for name in TRAINED if (folder / name).is_file()))


def losses(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")) for row in metrics(folder)]


def same_tensors(a: Path, b: Path) -> None:
    ours, theirs = trained_tensors(a), trained_tensors(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def same_result(a: Path, b: Path) -> None:
    """Trained tensors and losses, bit for bit."""
    same_tensors(a, b)
    assert losses(a) == losses(b)
