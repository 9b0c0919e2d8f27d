"""A second kind of run for the tests: a small network learns sin(x). No tokenizer, no transformer, no adapter."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isotype.distributed.world import ALONE
from isotype.dtypes import to_torch
from isotype.optimize import Manifest
from isotype.precision.apply import apply_precision
from isotype.training.feed import RowStream
from isotype.training.task import Evaluation, Outline, StepOutline, Words, eval_mode

DATA = [(i / 8, float(torch.sin(torch.tensor(i / 8)))) for i in range(48)]


@dataclass(frozen=True)
class Points:
    """x, y: fp32[N 1]"""

    x: Tensor
    y: Tensor

    @property
    def rows(self):
        return len(self.x)

    weight = units = rows

    def to(self, device):
        return Points(self.x.to(device), self.y.to(device))

    def __str__(self):
        return f"{self.rows} points"


@dataclass(frozen=True)
class Guess:
    x: float
    y: float
    file = None

    def as_json(self):
        return {"prompt": f"sin({self.x})", "answer": f"{self.y:.4f}", "reference": None}

    def lines(self):
        return f"sin({self.x})", f"{self.y:.4f}"


class ToyTask:
    """Implements `training.task.Task`; mypy is not asked, the loop is."""

    kind = "toy"
    words = Words(units="points", unit="pt", weight="learnt")
    base_name = "a network of 16 units"
    roles = {}
    rows, eval_rows, samples = 40, 8, 1

    def __init__(self, config):
        self.config = config

    def fingerprints(self):
        return {"training": str(DATA), "evaluation": str(DATA)}

    def observed(self):
        return ()

    def check(self, precision): ...
    def load_data(self): ...
    def encode(self, device): ...
    def begin(self, folder, *, resuming): ...

    def network(self, precision, device):
        torch.manual_seed(self.config.train.seed)
        return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)).to(device, to_torch(precision.trainable))

    def build_model(self, precision, device, folder, part=None):
        model = self.network(precision, device)
        apply_precision(model, precision, device_type=device.type, part=part)
        return model, Manifest()

    def feed(self):
        return RowStream(DATA[: self.rows], seed=self.config.train.seed, shuffle=True)

    def largest(self, count):
        return DATA[:count]

    def outline(self, precision, *, device_type):
        model = self.network(precision, torch.device("meta"))
        apply_precision(model, precision, device_type=device_type)
        elements = sum(p.numel() for p in model.parameters())
        return Outline(model, elements, elements)

    def step_outline(self, precision):
        rows = self.config.train.batch_size
        return StepOutline(rows=rows, length=1, batch=lambda device: Points(*(torch.empty(rows, 1, device=device) for _ in "xy")),
                           loss_sum=partial(self.loss_sum, dtype=precision.loss))  # fmt: skip

    def most_bytes(self, model, precision):
        return 1 << 20

    def checks(self):
        return {}

    def before_training(self, model, device, folder, world, *, dtype):
        return []

    def before_step(self, model, batches, world, *, dtype):
        return batches

    def one_shape_each(self, rows):
        return [rows]

    def collate(self, rows):
        x, y = torch.tensor(rows).unsqueeze(-1).unbind(1)
        return Points(x, y)

    def loss_sum(self, model, batch, divisor=1, *, dtype):
        return F.mse_loss(model(batch.x).to(to_torch(dtype)), batch.y.to(to_torch(dtype)), reduction="sum") / divisor

    def flops(self, model):
        return lambda batch: 6.0 * batch.rows * sum(p.numel() for p in model.parameters())

    def evaluate(self, model, device, *, dtype, most=None, world=ALONE):
        batch = self.collate(DATA[self.rows :][:most]).to(device)
        with eval_mode(model):
            return Evaluation(float(self.loss_sum(model, batch, dtype=dtype)) / batch.rows, batch.rows, {"last": 0.0})

    rehearse_evaluation = evaluate

    def sample(self, model, device, *, shortened=False, world=ALONE):
        with eval_mode(model):
            return [Guess(1.0, float(model(torch.ones(1, 1, device=device))))]

    def save(self, model, folder, precision):
        save_file({n: t.to(to_torch(precision.save_model)) for n, t in model.state_dict().items()}, folder / "model.safetensors")

    def reload(self, folder, precision, device, part=None):
        model = self.network(precision, device)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        apply_precision(model, precision, device_type=device.type, part=part)
        return model

    def header(self):
        return [("data", f"{self.rows} points")]

    def records(self):
        return {"data.json": {"points": len(DATA)}}

    def model_notes(self, made, precision):
        return "perceptron", []

    def plan_facts(self):
        return {"points": self.rows}

    def plan_lines(self):
        return [f"{self.rows} points"]
