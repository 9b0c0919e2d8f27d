"""A second kind of run for the tests: a small network learns sin(x). No tokenizer, no transformer, no adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isotype.config.schema import RunConfig
from isotype.distributed.world import ALONE, World
from isotype.dtypes import to_torch
from isotype.optimize import Manifest
from isotype.precision.apply import apply_precision
from isotype.precision.parts import Part
from isotype.precision.precision import Precision
from isotype.training.feed import RowStream
from isotype.training.task import Check, Evaluation, Outline, StepOutline, Words, eval_mode

Row = tuple[float, float]
DATA: list[Row] = [(i / 8, float(torch.sin(torch.tensor(i / 8)))) for i in range(48)]


@dataclass(frozen=True)
class Points:
    """x, y: fp32[N 1]"""

    x: Tensor
    y: Tensor

    @property
    def rows(self) -> int:
        return len(self.x)

    weight = units = rows

    def to(self, device: torch.device) -> Points:
        return Points(self.x.to(device), self.y.to(device))

    def __str__(self) -> str:
        return f"{self.rows} points"


@dataclass(frozen=True)
class Guess:
    x: float
    y: float
    file = None

    def as_json(self) -> dict[str, Any]:
        return {"prompt": f"sin({self.x})", "answer": f"{self.y:.4f}", "reference": None}

    def lines(self) -> tuple[str, str]:
        return f"sin({self.x})", f"{self.y:.4f}"


class ToyTask:
    """Implements `training.task.Task`; mypy is not asked, the loop is."""

    kind = "toy"
    words = Words(units="points", unit="pt", weight="learnt")
    base_name = "a network of 16 units"
    roles: Mapping[str, str] = {}
    rows, eval_rows, samples = 40, 8, 1

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def fingerprints(self) -> dict[str, str]:
        return {"training": str(DATA), "evaluation": str(DATA)}

    def observed(self) -> Sequence[tuple[str, str, str]]:
        return ()

    def check(self, precision: Precision) -> None: ...
    def load_data(self) -> None: ...
    def encode(self, device: torch.device) -> None: ...

    def network(self, precision: Precision, device: torch.device) -> nn.Module:
        torch.manual_seed(self.config.train.seed)
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)).to(device, to_torch(precision.trainable))

    def build_model(self, precision: Precision, device: torch.device, folder: Path, part: Part | None = None) -> tuple[nn.Module, Manifest]:
        model = self.network(precision, device)
        apply_precision(model, precision, device_type=device.type, part=part)
        return model, Manifest()

    def feed(self) -> RowStream[Row]:
        return RowStream(DATA[: self.rows], seed=self.config.train.seed, shuffle=True)

    def largest(self, count: int) -> Sequence[Row]:
        return DATA[:count]

    def outline(self, precision: Precision, *, device_type: str) -> Outline:
        model = self.network(precision, torch.device("meta"))
        apply_precision(model, precision, device_type=device_type)
        elements = sum(p.numel() for p in model.parameters())
        return Outline(model, elements, elements)

    def step_outline(self, precision: Precision) -> StepOutline:
        rows = self.config.train.batch_size
        return StepOutline(rows=rows, length=1, batch=lambda device: Points(*(torch.empty(rows, 1, device=device) for _ in "xy")),
                           loss_sum=partial(self.loss_sum, dtype=precision.loss))  # fmt: skip

    def most_bytes(self, model: nn.Module, precision: Precision) -> int:
        return 1 << 20

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        return {}

    def before_training(self, model, device, folder, world, *, dtype):
        return []

    def before_step(self, model, batches, world, *, dtype):
        return batches

    def one_shape_each(self, rows: Sequence[Row]) -> list[Sequence[Row]]:
        return [rows]

    def collate(self, rows: Sequence[Row]) -> Points:
        x, y = torch.tensor(rows).unsqueeze(-1).unbind(1)
        return Points(x, y)

    def loss_sum(self, model: nn.Module, batch: Any, divisor: int = 1, *, dtype: str) -> Tensor:
        return F.mse_loss(model(batch.x).to(to_torch(dtype)), batch.y.to(to_torch(dtype)), reduction="sum") / divisor

    def flops(self, model: nn.Module) -> Callable[[Any], float]:
        return lambda batch: 6.0 * batch.rows * sum(p.numel() for p in model.parameters())

    def evaluate(self, model: nn.Module, device: torch.device, *, dtype: str, most: int | None = None, world: World = ALONE) -> Evaluation:
        batch = self.collate(DATA[self.rows :][:most]).to(device)
        with eval_mode(model):
            return Evaluation(float(self.loss_sum(model, batch, dtype=dtype)) / batch.rows, batch.rows, {"last": 0.0})

    def rehearse_evaluation(self, model: nn.Module, device: torch.device, *, dtype: str) -> Evaluation:
        return self.evaluate(model, device, dtype=dtype)

    def sample(
        self, model: nn.Module, device: torch.device, *, shortened: bool = False, seconds: float = 0.0, world: World = ALONE
    ) -> list[Guess]:
        with eval_mode(model):
            return [Guess(1.0, float(model(torch.ones(1, 1, device=device))))]

    def save(self, model: nn.Module, folder: Path, precision: Precision) -> None:
        save_file({n: t.to(to_torch(precision.save_model)) for n, t in model.state_dict().items()}, folder / "model.safetensors")

    def reload(self, folder: Path, precision: Precision, device: torch.device, part: Part | None = None) -> nn.Module:
        model = self.network(precision, device)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        apply_precision(model, precision, device_type=device.type, part=part)
        return model

    def header(self) -> list[tuple[str, str]]:
        return [("data", f"{self.rows} points")]

    def records(self) -> Mapping[str, Any]:
        return {"data.json": {"points": len(DATA)}}

    def begin(self, folder: Path, *, resuming: bool) -> None:
        """It has no lists."""

    def model_notes(self, made: Outline, precision: Precision) -> tuple[str, list[str]]:
        return "perceptron", []

    def plan_facts(self) -> dict[str, Any]:
        return {"points": self.rows}

    def plan_lines(self) -> list[str]:
        return [f"{self.rows} points"]
