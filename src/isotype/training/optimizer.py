"""Builds the optimizers of a run. This module also computes averages of the trained weights.
Evaluations and results may use these averages in place of the weights.

AdamW supports every combination of dtypes that `Precision` allows. The optimizers of other
libraries support only fp32 weights.

If all dtypes are fp32, AdamW is torch's fused implementation. For other dtypes, AdamW is Isotype's
class `MixedAdamW`, because torch's AdamW does not accept fp32 gradients for bf16 weights. Muon and
Adafactor come from torch, Lion and the 8-bit optimizers from bitsandbytes, and the others from
their authors' packages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import RunConfig, TrainSection
from ..dtypes import format_dtype, to_torch
from ..environment.hub_kernels import disable_hub_kernels
from ..environment.install import install_command
from ..errors import RunError, UsageError, raise_first_refusal
from ..ops.adamw import AdamwHyperparameters, adamw_
from ..precision.parts import first_element_index, local_part
from ..precision.precision import EIGHT_BIT_OPTIMIZERS, Precision

Gradient = Callable[[nn.Parameter], Tensor | None]  # parameter -> its gradient; None if it has none
Matrices = Callable[[Tensor], Sequence[Tensor]]
"""Returns a view of each matrix in a tensor. A stack of experts has one matrix per expert."""
MUON = "muon"
SCHEDULE_FREE = "schedule-free"
PRODIGY = "prodigy"
# optimizer -> (package, class, extra of isotype)
_EXTERNAL = {
    "adamw8bit": ("bitsandbytes", "optim.AdamW8bit", "quant"),
    "adamw8bit-paged": ("bitsandbytes", "optim.PagedAdamW8bit", "quant"),
    "lion": ("bitsandbytes", "optim.Lion", "quant"),
    "lion8bit": ("bitsandbytes", "optim.Lion8bit", "quant"),
    SCHEDULE_FREE: ("schedulefree", "AdamWScheduleFree", "optimizers"),
    PRODIGY: ("prodigyopt", "Prodigy", "optimizers"),
}
# safeguard_warmup leaves warm-up steps out of Prodigy's estimate of its rate; foreach would copy
# all gradients
_EXTERNAL_OPTIONS: dict[str, dict[str, Any]] = {
    PRODIGY: {"safeguard_warmup": True},
    SCHEDULE_FREE: {"foreach": False},
}
# optimizer -> the settings that it does not use
_UNUSED_SETTINGS = {
    "lion": ("epsilon",),
    "lion8bit": ("epsilon",),
    "adafactor": ("beta1", "beta2", "epsilon"),
}
# bitsandbytes: 8-bit states have a scale every 256 elements, and small tensors keep fp32 states
_BLOCK_8BIT = 256
_SMALLEST_8BIT = 4096


class MixedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with fp32 arithmetic, for weights, gradients and states of
    any dtype.

    gradient   returns the accumulated gradient of a parameter
    state      dtype of the moments. Moments in bf16 are rounded in the same way as their weight
               (`rounding`). If the weight is fp32, they are rounded stochastically: the second
               moment changes by a thousandth per step, and rounding to nearest would remove such
               changes
    rounding   how weights are rounded to their dtype: nearest or stochastic
    seed       seed of the random numbers for stochastic rounding. The random numbers depend only on
               the seed, the step and the position of the element. So a resumed run needs no stored
               random state, and several processes that share a weight round it in the same way as a
               single process would

    gradient_scale  a factor by which the next step multiplies the gradients, for example to clip
               them. Multiplying them in the update is faster and adds no rounding
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        gradient: Gradient,
        state: str,
        rounding: str,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._gradient = gradient
        self.state_dtype = to_torch(state)
        self.gradient_scale = 1.0
        self._stochastic = rounding == "stochastic"
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure would compute the loss again, which this loop does not
        parameters_with_groups = (
            (parameter, group) for group in self.param_groups for parameter in group["params"]
        )
        for index, (parameter, group) in enumerate(parameters_with_groups):
            gradient = self._gradient(parameter)
            if gradient is not None:
                self._update(parameter, gradient, group, index)
        self.gradient_scale = 1.0

    def _update(self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
        state["step"] += 1
        hyperparameters = AdamwHyperparameters(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=state["step"],
            gradient_scale=self.gradient_scale,
        )
        seed = None
        if self._stochastic or p.dtype == torch.float32:
            # a different seed for each parameter and step, below 2**63
            seed = (self._seed * 1_000_003 + state["step"]) % 2**40 * 2**20 + index % 2**20
        adamw_(
            local_part(p.detach()),
            gradient,
            local_part(state["exp_avg"]),
            local_part(state["exp_avg_sq"]),
            hyperparameters,
            seed=seed,
            first_index=first_element_index(p),
        )


class Muon(MixedAdamW):
    """Uses torch's Muon (Jordan et al. 2024) for the matrices of a model, and AdamW for the other
    weights.

    matrices  maps a parameter to a function that splits it into its matrices; in a stack of
              experts, each expert is orthogonalised separately
    The learning rate of a matrix is scaled so that its update is as large as AdamW's (Liu et al.
    2025, "Muon is scalable for LLM training").
    """

    MOMENTUM = 0.95

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        matrices: Mapping[nn.Parameter, Matrices],
        **settings: Any,
    ) -> None:
        super().__init__(groups, **settings)
        self._matrices = matrices

    def _update(self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        from torch.optim import _muon

        split = self._matrices.get(p)
        if split is None:
            super()._update(p, gradient, group, index)
            return
        buffer = self.state[p].setdefault(
            "momentum_buffer", torch.zeros_like(p, dtype=self.state_dtype)
        )
        _muon.muon(
            list(split(p.detach())),
            list(split(gradient)),
            list(split(buffer)),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=self.MOMENTUM,
            nesterov=True,
            ns_coefficients=(_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),
            ns_steps=_muon.DEFAULT_NS_STEPS,
            eps=_muon.EPS,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )


def find_matrices(model: nn.Module) -> dict[nn.Parameter, Matrices]:
    """Returns the trained matrices of a model. Stacks of experts are included; the embeddings and
    the head are not.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()  # a denoiser has none
    excluded: set[nn.Module] = set() if head is None else set(head.modules())
    excluded |= {
        part for m in model.modules() if isinstance(m, nn.Embedding) for part in m.modules()
    }
    matrices: dict[nn.Parameter, Matrices] = {}

    def visit(module: nn.Module, experts: int) -> None:
        if module in excluded or isinstance(module, nn.modules.conv._ConvNd):
            return
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad and p.ndim in (2, 3) and "embedding" not in name:
                matrices[p] = torch.unbind if p.ndim == 3 else _whole_matrix
        for name, child in module.named_children():
            if name in ("lora_A", "lora_B") and experts > 1:
                split = functools.partial(
                    _split_experts_a if name == "lora_A" else _split_experts_b, experts
                )
                matrices.update((p, split) for p in child.parameters() if p.requires_grad)
            elif not name.startswith("lora_embedding"):
                visit(
                    child,
                    int(getattr(child, "num_experts", 1) or 1) if hasattr(child, "lora_A") else 1,
                )

    visit(model, 1)
    return matrices


def _whole_matrix(matrix: Tensor) -> Sequence[Tensor]:
    return (matrix,)


def _split_experts_a(experts: int, a: Tensor) -> Sequence[Tensor]:
    """Splits a LoRA matrix A, in which PEFT stacks all experts, [(E R) in], into one matrix per
    expert.
    """
    return a.view(experts, -1, a.shape[1]).unbind(0)


def _split_experts_b(experts: int, b: Tensor) -> Sequence[Tensor]:
    """Splits a LoRA matrix B, in which PEFT stacks all experts, [out (R E)], into one matrix per
    expert.
    """
    return b.view(b.shape[0], -1, experts).unbind(2)


def check_optimizer(config: RunConfig, sources: Mapping[str, str], *, device_type: str) -> None:
    """Raises UsageError if the package of the optimizer is not installed, or if a setting would
    have no effect with this optimizer.
    """
    train, name = config.train, config.train.optimizer
    package, _, extra = _EXTERNAL.get(name, ("", "", ""))
    key = f"train.optimizer: {name}"
    is_schedule_free = name == SCHEDULE_FREE
    unused_settings = [
        f"train.{setting}"
        for setting in _UNUSED_SETTINGS.get(name, ())
        if sources.get(f"train.{setting}", "default") != "default"
    ]
    raise_first_refusal(
        (
            package and find_spec(package) is None,
            f"{key} needs {package}",
            install_command(extra),
        ),
        *(
            (True, f"{setting} has no effect with {key}", f"remove {setting}")
            for setting in unused_settings
        ),
        (
            name == "adamw8bit-paged" and device_type == "cpu",
            f"{key} on a CPU, where nothing is paged",
            "train.optimizer: adamw8bit",
        ),
        (
            is_schedule_free and train.schedule != "constant",
            f"{key} with train.schedule: {train.schedule}, which its average replaces",
            f"{key} and train.schedule: constant",
        ),
        (
            is_schedule_free and train.ema is not None,
            f"{key} with train.ema: it averages the weights itself",
            f"{key} without train.ema",
        ),
        (
            is_schedule_free and train.beta1 == 0,
            f"{key} with train.beta1: 0, which leaves nothing to average",
            f"{key} and train.beta1: 0.9",
        ),
        (
            name == PRODIGY and train.learning_rate != 1.0,
            f"{key} with train.learning_rate: {train.learning_rate:g}: it finds the rate itself",
            f"{key} and train.learning_rate: 1",
        ),
    )


def build_optimizer(
    model: nn.Module,
    train: TrainSection,
    precision: Precision,
    gradient: Gradient,
    *,
    plus: float | None = None,
    text_rate: float | Sequence[float] | None = None,
) -> torch.optim.Optimizer:
    """Builds the optimizer of a run. Weight decay is applied only to matrices.

    plus       the learning rate of LoRA's B matrices, divided by the learning rate of the other
               weights (Hayou et al. 2024, "LoRA+")
    text_rate  the learning rate of a denoiser's text encoders, or a list with one rate for each
               text encoder; None if it is `train.learning_rate`
    Raises     UsageError if the optimizer is Muon and no trained weight is a matrix
    """
    groups = parameter_groups(model, train, plus=plus, text_rate=text_rate)
    name = train.optimizer
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=train.learning_rate, foreach=False)
    if name in _EXTERNAL:
        return _build_external(groups, train)
    rates: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.beta1, train.beta2),
        "eps": train.epsilon,
    }
    # a memory plan runs on meta tensors, which torch's fused AdamW refuses; MixedAdamW's kernel has
    # the same operands and results
    is_meta = any(p.is_meta for group in groups for p in group["params"])
    is_fp32 = precision.trainable == precision.grads == precision.optimizer == "fp32"
    if name == "adamw" and is_fp32 and not is_meta:
        return torch.optim.AdamW(groups, fused=True, **rates)
    settings: dict[str, Any] = {
        **rates,
        "gradient": gradient,
        "state": precision.optimizer,
        "rounding": precision.rounding,
        "seed": train.seed,
    }
    if name != MUON:
        return MixedAdamW(groups, **settings)
    matrices = find_matrices(model)
    if not matrices:
        raise UsageError(
            "train.optimizer: muon: no matrix is trained but embeddings and head",
            fix="train.optimizer: adamw",
        )
    return Muon(groups, matrices=matrices, **settings)


def _build_external(groups: list[dict[str, Any]], train: TrainSection) -> torch.optim.Optimizer:
    """Builds an optimizer that comes from another package."""
    name = train.optimizer
    package, path, _ = _EXTERNAL[name]
    disable_hub_kernels()
    optimizer_class: Any = functools.reduce(getattr, path.split("."), import_module(package))
    options = dict(_EXTERNAL_OPTIONS.get(name, {}))
    if name not in _UNUSED_SETTINGS:
        options["eps"] = train.epsilon
    optimizer: torch.optim.Optimizer = optimizer_class(
        groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), **options
    )
    if name == SCHEDULE_FREE:
        optimizer.train()  # type: ignore[attr-defined]  # schedulefree's method
    return optimizer


def parameter_groups(
    model: nn.Module,
    train: TrainSection,
    *,
    plus: float | None,
    text_rate: float | Sequence[float] | None,
) -> list[dict[str, Any]]:
    """Groups the trained parameters by their weight decay and by the factor of their learning rate.
    `plus` and `text_rate` have the same meaning as in `build_optimizer`.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    lora_b_weights: set[nn.Parameter] = set()
    if plus is not None:
        lora_b_weights = {p for name, p in trained.items() if ".lora_B." in name}
    other_weights = [p for p in trained.values() if p not in lora_b_weights]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in other_weights if p.ndim >= 2], "weight_decay": train.weight_decay},
        {
            "params": [p for p in trained.values() if p in lora_b_weights],
            "weight_decay": train.weight_decay,
            "rate_factor": plus,
        },
        {"params": [p for p in other_weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    if train.learning_rate > 0:
        for encoder, rate in _text_encoder_rates(text_rate).items():
            encoder_weights = {p for name, p in trained.items() if encoder in name}
            groups = _split_groups(groups, encoder_weights, rate / train.learning_rate)
    return [group for group in groups if group["params"]]


def _text_encoder_rates(text_rate: float | Sequence[float] | None) -> dict[str, float]:
    """Returns the learning rates of the text encoders. Each key of the returned dictionary is a
    text that occurs in the names of all parameters of one text encoder, or of all text encoders if
    they have the same rate.
    """
    if text_rate is None:
        return {}
    if not isinstance(text_rate, Sequence):
        return {".text_encoders.": text_rate}
    rates = {}
    for number, rate in enumerate(text_rate, 1):
        suffix = "" if number == 1 else f"_{number}"
        rates[f".text_encoders.text_encoder{suffix}."] = rate
    return rates


def _split_groups(
    groups: list[dict[str, Any]], weights: set[nn.Parameter], factor: float
) -> list[dict[str, Any]]:
    """Moves `weights` from their parameter groups to new parameter groups. In the new groups, the
    learning rate is multiplied by `factor`.
    """
    remaining_groups = []
    separate_groups = []
    for group in groups:
        remaining = [p for p in group["params"] if p not in weights]
        separate = [p for p in group["params"] if p in weights]
        rate_factor = factor * (group.get("rate_factor") or 1.0)
        remaining_groups.append(group | {"params": remaining})
        separate_groups.append(group | {"params": separate, "rate_factor": rate_factor})
    return remaining_groups + separate_groups


def state_bytes(model: nn.Module, train: TrainSection, precision: Precision) -> int:
    """Returns the bytes of the optimizer's states for the trained weights of a model. Step counts
    are not included.
    """
    matrices = find_matrices(model) if train.optimizer == MUON else {}
    moment_size = to_torch(precision.optimizer).itemsize

    def parameter_bytes(p: nn.Parameter) -> int:
        elements = p.numel()
        moments = {
            MUON: 1 if p in matrices else 2,
            "lion": 1,
            "lion8bit": 1,
            PRODIGY: 4,
        }.get(train.optimizer, 2)
        if train.optimizer in EIGHT_BIT_OPTIMIZERS:
            if elements < _SMALLEST_8BIT:
                moment_bytes = 4 * elements
            else:
                moment_bytes = elements + 4 * -(-elements // _BLOCK_8BIT)
            return moments * moment_bytes
        if train.optimizer == "adafactor" and p.ndim > 1:
            return moment_size * (elements // p.shape[-1] + elements // p.shape[-2])
        if train.optimizer != "adafactor":
            return moments * moment_size * elements
        return moment_size * elements

    return sum(parameter_bytes(p) for p in model.parameters() if p.requires_grad)


@contextmanager
def use_averages(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within this block, the model has the averaged weights of a schedule-free optimizer. For
    another optimizer, nothing is changed.

    At the end of the block, the weights are restored from a copy. The optimizer's own method
    `train()` would not restore them exactly, because of rounding.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    with preserve_weights(p for group in optimizer.param_groups for p in group["params"]):
        optimizer.eval()
        yield
    for group in optimizer.param_groups:
        group["train_mode"] = True


@contextmanager
def preserve_weights(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restores these weights bit for bit at the end of this block. Within the block, no gradients
    are computed.
    """
    with torch.no_grad():
        copies = [(p, p.detach().clone()) for p in parameters]
        try:
            yield
        finally:
            for p, value in copies:
                p.copy_(value)


EMA_PREFIX = "ema."  # beginning of the names of averaged weights in a checkpoint
FOLDER_SUFFIX = "_ema"
"""The suffix of the folder with the averaged result: `adapter_ema`."""


class Ema:
    """An exponential moving average of the trained weights (`train.ema`), in the dtype of
    `precision.ema`.

    averages  maps the name of a trained weight to its average
    The n-th update multiplies the old average by min(decay, (1 + n) / (10 + n)), as in diffusers'
    EMAModel. So the weights of the first steps have little influence on the final average, even in
    short runs.
    """

    def __init__(self, model: nn.Module, decay: float, dtype: str) -> None:
        self.decay = decay
        self.dtype = dtype
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {
            name: p.detach().to(to_torch(dtype), copy=True) for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Updates the averages with the weights after optimizer step `step`. Steps are counted from
        1.
        """
        share = min(self.decay, (1 + step) / (10 + step))
        averages = list(self.averages.values())
        weights = [
            p.detach().to(average.dtype) for p, average in zip(self.parameters.values(), averages)
        ]
        torch._foreach_lerp_(averages, weights, 1 - share)

    def observed_dtypes(self) -> list[tuple[str, str, str]]:
        """Returns a tuple for the moving average of each weight: the name of the precision setting
        (`ema`), the name of the tensor, and its dtype.
        """
        return [
            ("ema", name, format_dtype(average.dtype)) for name, average in self.averages.items()
        ]

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Within this block, the model has the averages as its weights. The averages are converted
        to the dtypes of the weights.
        """
        with preserve_weights(self.parameters.values()):
            for name, p in self.parameters.items():
                p.copy_(self.averages[name])
            yield

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averages with the names that they have in a checkpoint."""
        return {f"{EMA_PREFIX}{name}": average for name, average in self.averages.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the averages from the tensors of a checkpoint. Raises RunError CK003 if an average
        is missing there or has another shape or dtype.
        """
        for name, average in self.averages.items():
            saved = tensors.get(f"{EMA_PREFIX}{name}")
            if saved is None or saved.shape != average.shape or saved.dtype != average.dtype:
                raise RunError(
                    f"this checkpoint has no average of {name} in {self.dtype}",
                    code="CK003",
                    fix="resume with the train.ema and precision.ema it was made with",
                )
            average.copy_(saved)


def group_counters(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Returns the numbers that an optimizer changes in each of its parameter groups. A checkpoint
    stores them. Examples of such numbers are Prodigy's estimate of the learning rate and the
    weights with which a schedule-free optimizer averages.
    """
    counter_keys = ("k", "weight_sum", "lr_max", "scheduled_lr", "d", "d_max", "d_numerator")
    return [
        {key: group[key] for key in counter_keys if key in group}
        for group in optimizer.param_groups
    ]


def convert_states(
    optimizer: torch.optim.Optimizer, counters: Sequence[Mapping[str, float]]
) -> None:
    """Converts restored states to the form that this optimizer needs. This function converts the
    dtype of the moments and the type of the step count, and moves states to paged memory if the
    optimizer uses it. This is needed if the user has accepted that the resumed run uses other
    dtypes than the checkpoint.

    counters  the result of `group_counters` that the checkpoint contains
    """
    for group, values in zip(optimizer.param_groups, counters, strict=False):
        group.update(values)
    dtype = optimizer.state_dtype if isinstance(optimizer, MixedAdamW) else torch.float32
    for parameter, state in optimizer.state.items():
        if isinstance(optimizer, MixedAdamW | torch.optim.AdamW):
            state |= {
                key: state[key].to(dtype)
                for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
                if key in state
            }
            if isinstance(optimizer, MixedAdamW):
                state |= {"step": int(state["step"])} if "step" in state else {}
            elif not isinstance(state["step"], Tensor):
                state["step"] = torch.tensor(float(state["step"]), device=parameter.device)
        elif getattr(optimizer, "is_paged", False):
            for key in ("state1", "state2"):
                get_state_buffer = optimizer.get_state_buffer  # type: ignore[attr-defined]  # bitsandbytes'
                paged_state = get_state_buffer(parameter, dtype=state[key].dtype)
                state[key] = paged_state.copy_(state[key])
