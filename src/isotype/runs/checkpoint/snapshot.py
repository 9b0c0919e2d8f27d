"""Collects and restores the state from which a run can be resumed bit-identically: the trainable
weights, the optimizer, the random state, and the progress. The state consists only of tensors and
JSON.

A run that is resumed with the same number of processes is bit-identical. With a different number of
processes the run gets different random numbers. In a run of several processes, each process seeds
its random generators at each step from the run's seed, the step and its rank (`seed_rank`). So only
a run of one process has to store the state of its generators.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RunError
from ...precision.parts import is_sharded, local_part, local_rows
from .store import RowSelector

# optimizer states with one element per element of the parameter, in torch's and Isotype's AdamW,
# bitsandbytes and schedulefree
_ELEMENTWISE_STATES = ("exp_avg", "exp_avg_sq", "state1", "state2", "z")
PROCESS_COUNT = "processes"  # in state.json: the number of processes that wrote the checkpoint


@dataclass
class Progress:
    """The progress of a run.

    position      the number of training rows that were used
    best_loss     the lowest evaluation loss, reached at `best_step`
    without_gain  the number of evaluations since `best_step`
    evaluated     a hash of the evaluation rows with which `best_loss` was measured
    eval_stride   an evaluation uses every `eval_stride`-th row; 0 in checkpoints of older versions
    units         the number of tokens or pictures that were trained on
    """

    step: int = 0
    position: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    without_gain: int = 0
    evaluated: str | None = None
    eval_stride: int = 0
    trained_seconds: float = 0.0
    units: int = 0

    @classmethod
    def from_file(cls, values: Mapping[str, Any]) -> Progress:
        """Returns the progress that a checkpoint contains. Checkpoints of older versions have the
        key `tokens` for `units`. They also contain `sampled_seconds`, which is ignored.

        Raises  TypeError for a value of a wrong type, and for a negative one
        """
        renamed = {
            ("units" if name == "tokens" else name): value
            for name, value in values.items()
            if name != "sampled_seconds"
        }
        progress = cls(**renamed)
        kinds = {
            "best_loss": (float,),
            "trained_seconds": (float, int),
            "best_step": (int, type(None)),
            "evaluated": (str, type(None)),
        }
        for name, value in vars(progress).items():
            if type(value) not in kinds.get(name, (int,)) or (name not in kinds and value < 0):
                raise TypeError(f"progress.{name} is {value!r}")
        return progress

    def set_evaluation_rows(self, rows_hash: str) -> None:
        """Resets the best evaluation if it used other evaluation rows.

        rows_hash  a hash of the evaluation rows
        """
        if self.evaluated not in (None, rows_hash):
            self.best_loss = math.inf
            self.best_step = None
            self.without_gain = 0
        self.evaluated = rows_hash


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the states of Python's, NumPy's and torch's random generators, as (tensors, JSON)."""
    import numpy as np

    tensors = {"rng.torch": torch.get_rng_state()}
    # reading the state would create a CUDA context (some 500 MB) on every GPU, also for a run on
    # the CPU
    if torch.cuda.is_initialized():
        tensors |= {
            f"rng.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())
        }
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return tensors, {
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], *rest],
    }


def restore_random_state(tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Restores the state that `random_state` returned."""
    import numpy as np

    torch.set_rng_state(tensors["rng.torch"])
    if torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            if f"rng.cuda.{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"rng.cuda.{i}"], i)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seeds the random generators of this process. Every process gets a different seed, because
    dropout must differ between the rows of different processes. A repeated run gets the same seeds.
    """
    seed_generators(int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:4]))


def seed_generators(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def trainable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns every trainable parameter as `model.NAME`, and every buffer of the state dict as
    `buffer.NAME`.
    """
    persistent = set(model.state_dict(keep_vars=True))
    tensors = {f"model.{name}": p for name, p in model.named_parameters() if p.requires_grad}
    return tensors | {
        f"buffer.{name}": buffer
        for name, buffer in model.named_buffers()
        if name in persistent and "quant" not in name and "absmax" not in name
    }


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the optimizer's state as a pair (tensors, JSON). The keys contain the names of the
    parameters.
    """
    tensors: dict[str, Tensor] = {}
    json_state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            else:
                json_state.setdefault(name, {})[key] = value
    return tensors, json_state


def restore_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies the tensors of a checkpoint into the model.

    tensors  the result of `CheckpointStore.load`; for a sharded parameter, only the rows of this
             process
    Raises   RunError CK003 if the checkpoint belongs to another model or adapter
    """
    current = trainable_tensors(model)
    saved = {name: t for name, t in tensors.items() if name.startswith(("model.", "buffer."))}
    if set(current) != set(saved):
        mismatch = sorted(set(current) ^ set(saved))[0]
        raise RunError(
            f"this checkpoint belongs to another model or adapter: {mismatch.partition('.')[2]} is"
            " only on one side",
            code="CK003",
            fix="resume with the configuration it was made with",
        )
    with torch.no_grad():
        for name, tensor in current.items():
            local_tensor = local_part(tensor)
            if local_tensor.shape != saved[name].shape or local_tensor.dtype != saved[name].dtype:
                raise RunError(
                    f"{name.partition('.')[2]} is {saved[name].dtype}{list(saved[name].shape)} in"
                    f" the checkpoint and {local_tensor.dtype}{list(local_tensor.shape)} in the run",
                    code="CK003",
                    fix="resume with the configuration it was made with",
                )
            if name.endswith((".start_A", ".start_B")) and not torch.equal(
                local_tensor, saved[name].to(local_tensor.device)
            ):
                # the base's weights are the residual of these start values
                raise RunError(
                    "adapter.start: this machine decomposes the base's weights in another way than"
                    " the one that began the run",
                    code="CK003",
                    fix="resume where it began, or train on from its adapter: adapter.start_from",
                )
            local_tensor.copy_(saved[name])


def average_weights(tensors: dict[str, Tensor], beta1: float) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint, with each weight replaced by the average that a
    schedule-free optimizer computes. Tensors of other optimizers are returned unchanged.

    A weight y lies between the average x and the state z: y = beta1 x + (1 - beta1) z (Defazio et
    al. 2024, "The road less scheduled").
    """
    names = [
        name.removesuffix(".z").removeprefix("optimizer.")
        for name in tensors
        if name.startswith("optimizer.") and name.endswith(".z")
    ]
    return tensors | {
        f"model.{name}": (
            tensors[f"model.{name}"].lerp(tensors[f"optimizer.{name}.z"], 1 - 1 / beta1)
        )
        for name in names
    }


def local_row_selector(model: nn.Module) -> RowSelector:
    """Returns a function that takes the name of a checkpoint's tensor and returns the range of rows
    that this process holds. The function knows the names that `trainable_tensors` and
    `optimizer_tensors` return.
    """
    sharded = {full: local_rows(p) for full, p in model.named_parameters() if is_sharded(p)}

    def select_rows(name: str) -> range | None:
        category, _, parameter_name = name.partition(".")
        if category == "optimizer":
            parameter_name, _, key = parameter_name.rpartition(".")
            if key in _ELEMENTWISE_STATES:
                return sharded.get(parameter_name)
            return None
        return sharded.get(parameter_name) if category == "model" else None

    return select_rows


def local_tensors(tensors: dict[str, Tensor], *, is_first: bool) -> dict[str, Tensor]:
    """Returns the tensors that this process writes. Of each sharded tensor, a process writes only
    its own rows. The first process also writes the tensors that are not sharded.
    """
    return {
        name: local_part(tensor)
        for name, tensor in tensors.items()
        if is_first or is_sharded(tensor)
    }


def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    json_state: dict[str, Any],
) -> None:
    """Restores the optimizer's states on the devices of their parameters. Raises RunError CK003 for
    a state of another shape.
    """
    parameters = dict(model.named_parameters())
    # one copy per tensor, so that parameters which shared a state share it again
    copies: dict[tuple[int, torch.device], Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            parameter_name, _, key = name.removeprefix("optimizer.").rpartition(".")
            parameter = parameters[parameter_name]
            if key in _ELEMENTWISE_STATES and tensor.shape != local_part(parameter).shape:
                raise RunError(
                    f"the optimizer's {key} of {parameter_name} is {list(tensor.shape)} in the"
                    f" checkpoint and the parameter {list(local_part(parameter).shape)}",
                    code="CK003",
                    fix="resume with the configuration it was made with",
                )
            if key in _ELEMENTWISE_STATES and is_sharded(parameter):
                state = optimizer.state[parameter][key] = torch.zeros_like(
                    parameter.detach(), dtype=tensor.dtype
                )
                local_part(state).copy_(tensor)
                continue
            copy = copies.get((id(tensor), parameter.device))
            if copy is None:
                copy = copies[id(tensor), parameter.device] = tensor.to(parameter.device, copy=True)
            optimizer.state[parameter][key] = copy
    for name, values in json_state.items():
        optimizer.state[parameters[name]].update(values)
