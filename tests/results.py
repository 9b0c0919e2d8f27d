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
    return [
        tuple(row.get(key) for key in ("step", "loss", "grad_norm", "eval_loss"))
        for row in metrics(folder)
    ]


def same_tensors(a: Path, b: Path) -> None:
    ours, theirs = trained_tensors(a), trained_tensors(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def same_result(a: Path, b: Path) -> None:
    """Trained tensors and losses, bit for bit."""
    same_tensors(a, b)
    assert losses(a) == losses(b)


def close_runs(one: Path, two: Path, *, loss: float, weight: float) -> None:
    """Losses and trained weights of two runs, absolutely; what they counted is equal."""
    for key in ("loss", "eval_loss"):
        assert (
            max(abs(a - b) for a, b in zip(metrics(one, key), metrics(two, key), strict=True))
            <= loss
        ), key
    assert metrics(one, "tokens", "supervised") == metrics(two, "tokens", "supervised")
    ours, theirs = trained_tensors(one), trained_tensors(two)
    assert ours.keys() == theirs.keys()
    assert (
        max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)
        <= weight
    )


def same_records(one: Path, two: Path, *, sums: str) -> None:
    """Nothing was replaced otherwise, no dtype is another one, and what the second run's processes
    summed was seen.
    """
    assert read(one, "manifest") == read(two, "manifest")
    first, second = read(one, "precision"), read(two, "precision")
    assert second["violations"] == []
    assert set(second["observed"]["reduce"]) == {sums}
    assert set(second.get("unobserved", {})) <= set(first.get("unobserved", {}))
    for role, seen in first["observed"].items():
        assert set(second["observed"][role]) == set(seen), role
