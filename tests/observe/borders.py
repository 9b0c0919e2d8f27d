"""Programs at the borders of what is watched: twenty that break the declared precision, and twenty
that keep it.

The first are of four classes: time (nobody looks then), trust (something else runs than is
believed), history (what a file held) and rules (counts and norms). The others are families of
transformers, optimizers and callbacks that people use.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from isotype.errors import IsotypeError
from isotype.integrations import attach
from tests.integrations.trainers import WORDS, Encoded
from tests.models import lora, tiny

LIARS: dict[str, Callable[[Path], Seen]] = {}
HONEST: dict[str, Callable[[Path], Seen]] = {}


@dataclass
class Seen:
    """What a training said of its precision: violations, an error that ended it, and what it says
    was not watched.
    """

    violations: list[str] = field(default_factory=list)
    error: str = ""
    unwatched: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


def case(into: dict[str, Any]) -> Callable[[Any], Any]:
    def added(f: Any) -> Any:
        into[f.__name__] = f
        return f

    return added


liar, honest = case(LIARS), case(HONEST)


class At(TrainerCallback):
    """Calls `act(trainer's model, optimizer, state)` at an event of the trainer."""

    def __init__(self, event: str, act: Callable[..., None]) -> None:
        def called(
            args: Any,
            state: Any,
            control: Any,
            model: Any = None,
            optimizer: Any = None,
            **kwargs: Any,
        ) -> None:
            act(model, getattr(optimizer, "optimizer", optimizer), state)

        setattr(self, event, called)


def attached(
    folder: Path, family: str = "llama", *, precision: str = "bf16-mixed", adapter: bool = False, cls: Any = Trainer, change: Any = None,
    callbacks: Any = (), late: Any = (), resume: str | None = None, steps: int = 5, more: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None, model: Any = None, **given: Any,
) -> Seen:  # fmt: skip
    """Trains under `attach` and reads what it recorded. `change(model)` is called before, `late`
    are callbacks added after `attach`.
    """
    if model is None:
        model = tiny(family, vocab_size=WORDS + 3, **(config or {}))
    model = lora(model) if adapter else model
    if change is not None:
        change(model)
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, bf16=precision.startswith("bf16"), max_steps=steps, logging_steps=1, report_to=[],
        per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=2e-3, disable_tqdm=True, seed=42,
        **{"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2, **(more or {})},
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = cls(
        model,
        arguments,
        train_dataset=Encoded(),
        eval_dataset=Encoded(6),
        callbacks=list(callbacks),
        **given,
    )
    seen = Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach(trainer, precision, quiet=True)
        for callback in late:
            trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=resume)
        except IsotypeError as error:
            seen.error = str(error)
    file = folder / "isotype" / "precision.json"
    if file.exists():
        seen.record = json.loads(file.read_text())
        seen.violations = [finding["message"] for finding in seen.record["violations"]]
        seen.unwatched = [*seen.record["unobserved"], *seen.record["not watched"]]
    return seen


def rounded(tensor: Tensor) -> Tensor:
    return tensor.detach().bfloat16().to(tensor.dtype)


# ---- time
@liar
def to_half_and_back_after_a_step(folder: Path) -> Seen:
    return attached(
        folder,
        precision="fp32",
        callbacks=[At("on_step_end", lambda model, *_: model.half().float())],
    )


@liar
def weights_rounded_after_an_evaluation(folder: Path) -> Seen:
    def act(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            p.data.copy_(rounded(p))

    return attached(folder, callbacks=[At("on_evaluate", act)])


class RoundingScheduler(torch.optim.lr_scheduler.LambdaLR):
    """A schedule that keeps the optimizer's memory small."""

    def step(self, epoch: Any = None) -> None:
        for state in self.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(rounded(state[key]))
        super().step(epoch)


@liar
def a_schedule_that_rounds_the_states(folder: Path) -> Seen:
    class WithSchedule(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = RoundingScheduler(optimizer or self.optimizer, lambda step: 1.0)
            return self.lr_scheduler

    return attached(folder, cls=WithSchedule)


@liar
def a_table_rounded_at_the_beginning_of_a_step(folder: Path) -> Seen:
    def act(model: nn.Module, optimizer: Any, state: Any) -> None:
        if state.global_step == 3:
            table = model.model.rotary_emb.inv_freq
            table.copy_(rounded(table))

    return attached(folder, late=[At("on_step_begin", act)])


@liar
def products_of_evaluations_in_fp16(folder: Path) -> Seen:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp

        def forward(x: Tensor, inner: Any = mlp.forward) -> Tensor:
            if mlp.training:
                return inner(x)
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                return inner(x.half()).to(x.dtype)

        mlp.forward = forward

    return attached(folder, change=change)


@liar
def states_made_smaller_for_a_save(folder: Path) -> Seen:
    def act(model: Any, optimizer: Any, state: Any) -> None:
        for states in optimizer.state.values():
            states["exp_avg_sq"] = states["exp_avg_sq"].half().float()

    return attached(
        folder, callbacks=[At("on_save", act)], more={"save_strategy": "steps", "save_steps": 3}
    )


@liar
def weights_rounded_before_an_update(folder: Path) -> Seen:
    def act(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            p.data = rounded(p)

    return attached(folder, callbacks=[At("on_pre_optimizer_step", act)])


# ---- hooks, and what is written between backward and the update
@liar
def a_gradient_hook_that_rounds(folder: Path) -> Seen:
    def change(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.register_hook(rounded)

    return attached(folder, change=change)


@liar
def gradients_rounded_before_an_update(folder: Path) -> Seen:
    def act(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            p.grad.copy_(rounded(p.grad))

    return attached(folder, callbacks=[At("on_pre_optimizer_step", act)])


@liar
def gradients_replaced_by_rounded_ones(folder: Path) -> Seen:
    def act(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            p.grad = rounded(p.grad)

    return attached(folder, callbacks=[At("on_pre_optimizer_step", act)])


@liar
def a_hook_that_rounds_the_output_of_a_norm(folder: Path) -> Seen:
    def change(model: Any) -> None:
        model.model.norm.register_forward_hook(lambda m, args, out: out.bfloat16().to(out.dtype))

    seen = attached(folder, precision="fp32", change=change)
    assert any("forward hooks of the program on model.norm" in line for line in seen.unwatched)
    return seen


@liar
def an_adapter_merged_for_each_evaluation(folder: Path) -> Seen:
    def act(model: Any, *_: Any) -> None:
        model.merge_adapter()
        model.unmerge_adapter()

    return attached(folder, precision="bf16-lora", adapter=True, callbacks=[At("on_evaluate", act)])


@liar
def features_that_were_stored_in_fp16(folder: Path) -> Seen:
    class Features(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            inputs = dict(inputs)
            embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
            features = embeddings.detach().half()
            return super().compute_loss(model, {**inputs, "inputs_embeds": features}, *args, **more)

    return attached(folder, cls=Features, more={"eval_strategy": "no"})


# ---- trust
@liar
def an_update_of_the_trainers_own_in_bf16_pure(folder: Path) -> Seen:
    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            made = super().create_optimizer()
            inner = torch.optim.SGD(self.model.parameters(), lr=1e-2)

            def step(closure: Any = None) -> None:
                inner.step()

            made.step = step
            return made

    return attached(folder, precision="bf16-pure", cls=Own)


@liar
def an_optimizer_of_copies(folder: Path) -> Seen:
    class Copies(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(
                [nn.Parameter(p.detach().clone()) for p in self.model.parameters()], lr=1e-3
            )
            return self.optimizer

    return attached(folder, cls=Copies)


class Packed(Tensor):
    """int8 and a scale, which say that they are bf16."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        made = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.bfloat16, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Packed(args[0].codes, args[0].scale)
        given = torch.utils._pytree.tree_map(
            lambda t: (t.codes.bfloat16() * t.scale) if isinstance(t, Packed) else t,
            (args, kwargs or {}),
        )
        return func(*given[0], **given[1])


@liar
def a_base_of_int8_that_says_bf16(folder: Path) -> Seen:
    def change(model: Any) -> None:
        for p in model.parameters():
            p.data = p.data.bfloat16() if not p.requires_grad else p.data
        layer = model.base_model.model.model.layers[1].mlp.down_proj.base_layer
        weight = layer.weight.detach().float()
        scale = weight.abs().amax() / 127
        packed = Packed((weight / scale).round().to(torch.int8), scale.bfloat16())
        layer.weight = nn.Parameter(packed, requires_grad=False)

    seen = attached(folder, precision="bf16-lora", adapter=True, change=change)
    assert seen.error or "Packed" not in str(seen.record.get("observed"))
    return seen


@liar
def an_operator_in_the_namespace_of_a_library(folder: Path) -> Seen:
    return attached(folder, change=_with_operator("bitsandbytes::mix_rows"))


def _with_operator(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        if not hasattr(getattr(torch.ops, name.partition("::")[0]), name.partition("::")[2]):

            @torch.library.custom_op(name, mutates_args=())
            def mixed(x: Tensor, w: Tensor) -> Tensor:
                return (x.half() @ w.half().t()).to(x.dtype)

            mixed.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))
            mixed.register_autograd(lambda ctx, dy: (dy, None))
        operator = getattr(getattr(torch.ops, name.partition("::")[0]), name.partition("::")[2])
        mlp = model.model.layers[1].mlp
        square = nn.Parameter(torch.eye(model.config.hidden_size), requires_grad=False)
        mlp.register_buffer("square", square.data)

        def forward(x: Tensor, inner: Any = mlp.forward) -> Tensor:
            return inner(x) + operator(x, mlp.square)

        mlp.forward = forward

    return change


CELL = """
import torch
def forward(x, inner, table):
    angles = torch.outer(torch.arange(x.shape[1]).to(torch.bfloat16), table.bfloat16())
    return inner(x) + angles.sin().float().sum(-1)[None, :, None].to(x.dtype) * 1e-3
"""


@liar
def a_table_made_in_a_notebook_cell(folder: Path) -> Seen:
    def change(model: Any) -> None:
        space: dict[str, Any] = {}
        exec(compile(CELL, "<ipython-input-3-5f1c>", "exec"), space)  # as a notebook runs a cell
        mlp, table = model.model.layers[1].mlp, model.model.rotary_emb.inv_freq
        mlp.forward = lambda x, inner=mlp.forward: space["forward"](x, inner, table)

    return attached(folder, change=change)


class RoundingAdamW(torch.optim.AdamW):
    """Keeps weights that a bf16 checkpoint can hold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(rounded(p))
        return result


@liar
def an_optimizer_that_rounds_its_weights(folder: Path) -> Seen:
    class Rounding(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = RoundingAdamW(self.model.parameters(), lr=1e-2)
            return self.optimizer

    return attached(folder, cls=Rounding, steps=8)


# ---- history
def _checkpoint(folder: Path) -> Path:
    attached(folder, steps=3, more={"save_strategy": "steps", "save_steps": 3})
    return folder / "checkpoint-3"


@liar
def states_that_a_file_held_in_bf16(folder: Path) -> Seen:
    file = _checkpoint(folder) / "optimizer.pt"
    saved = torch.load(file, weights_only=True)
    for state in saved["state"].values():
        state |= {key: state[key].bfloat16() for key in ("exp_avg", "exp_avg_sq")}
    torch.save(saved, file)
    return attached(folder, steps=6, resume=str(file.parent))


@liar
def weights_that_a_file_held_in_bf16(folder: Path) -> Seen:
    from safetensors.torch import load_file, save_file

    file = _checkpoint(folder) / "model.safetensors"
    save_file(
        {name: t.bfloat16() for name, t in load_file(file).items()}, file, metadata={"format": "pt"}
    )
    return attached(folder, steps=6, resume=str(file.parent))


@liar
def an_average_of_squares_rounded_in_its_file(folder: Path) -> Seen:
    file = _checkpoint(folder) / "optimizer.pt"
    saved = torch.load(file, weights_only=True)
    for state in saved["state"].values():
        state["exp_avg_sq"] = state["exp_avg_sq"].half().float()
    torch.save(saved, file)
    return attached(folder, steps=6, resume=str(file.parent))


# ---- rules
def _loss(reduce: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
        )
        # many rows: a batch of 606 learnt tokens
        return reduce(losses.repeat(20), (targets != -100).flatten().repeat(20))

    return compute


@liar
def tokens_counted_in_bf16(folder: Path) -> Seen:
    return attached(
        folder,
        compute_loss_func=_loss(
            lambda losses, learnt: losses.sum() / learnt.to(torch.bfloat16).sum()
        ),
    )


@liar
def a_count_rounded_by_a_cast(folder: Path) -> Seen:
    return attached(
        folder,
        compute_loss_func=_loss(
            lambda losses, learnt: losses.sum() / (learnt.sum() + 1).bfloat16().float()
        ),
    )


@liar
def a_denominator_that_was_made_elsewhere_in_bf16(folder: Path) -> Seen:
    total = torch.tensor(606, dtype=torch.int64).to(torch.bfloat16)
    return attached(folder, compute_loss_func=_loss(lambda losses, learnt: losses.sum() / total))


@liar
def gradients_clipped_by_a_norm_in_bf16(folder: Path) -> Seen:
    class Clipping(Trainer):
        def _clip_grad_norm(self, model: Any) -> Any:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([g.norm() for g in gradients]).norm().bfloat16()
            for g in gradients:
                g.mul_((self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            return norm.float()

    return attached(folder, cls=Clipping)


# ---- honest: families
def _family(name: str, family: str, **settings: Any) -> None:
    def run(folder: Path) -> Seen:
        return attached(
            folder, family, more={"save_strategy": "steps", "save_steps": 2}, **settings
        )

    HONEST[name] = run


_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
_family("norm_of_one_plus_the_weight", "gemma2")
_family("norms_of_queries_and_keys", "qwen3")
_family("norm_after_the_block", "olmo2")
_family(
    "norm_with_mean",
    "gpt2",
    config={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
)
_family(
    "rope_dynamic",
    "llama",
    config={
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **_ROPE},
        "max_position_embeddings": 8,
    },
)
_family(
    "rope_yarn", "llama", config={"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_ROPE}}
)
_family(
    "rope_long", "phi3", config={
        "original_max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "longrope", "factor": 16.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **_ROPE},
    },
)  # fmt: skip
_family("rope_llama3_and_adapters", "llama", precision="bf16-lora", adapter=True, config={
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ROPE}})  # fmt: skip
_family("router_of_mixtral", "mixtral")
_family("router_of_qwen3", "qwen3_moe", config={"decoder_sparse_step": 1})
_family("router_with_sigmoid", "deepseek_v3")
_family("alibi", "bloom", config={"n_layer": 2, "n_head": 4})
_family("state_space", "mamba", config={"state_size": 4})
_family(
    "logits_and_rows_scaled",
    "granite",
    config={"logits_scaling": 8.0, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
)


class Mixer(nn.Module):
    """Mixes tokens by a Fourier transform, as FNet does, with a scale a row."""

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.full((size,), 1e-2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(x.float(), dim=-1), dim=-2).real
        rows = x.float().pow(2).mean(-1, keepdim=True).rsqrt()
        if self.training:
            self.seen += 1
        return self.inner(x) + (mixed * rows * self.scale).to(x.dtype)


@honest
def fourier_mixer_with_a_scale_a_row(folder: Path) -> Seen:
    def change(model: Any) -> None:
        layer = model.model.layers[1]
        layer.mlp = Mixer(layer.mlp, model.config.hidden_size)

    return attached(folder, change=change)


# ---- honest: optimizers, files, callbacks
@honest
def momentum_from_a_bf16_checkpoint_with_warmup(folder: Path) -> Seen:
    model = tiny("llama", vocab_size=WORDS + 3)
    model.to(torch.bfloat16).float()
    return attached(
        folder,
        model=model,
        steps=8,
        more={"optim": "sgd", "optim_args": "momentum=0.9", "warmup_steps": 3},
    )


@honest
def a_resumed_training(folder: Path) -> Seen:
    return attached(folder, steps=6, resume=str(_checkpoint(folder)))


@honest
def averages_in_place_for_an_evaluation(folder: Path) -> Seen:
    averages: dict[str, Tensor] = {}
    trained: dict[str, Tensor] = {}

    class Swapping(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    trained[name] = p.detach().clone()
                    p.copy_(averages.get(name, p))
                result = super().evaluate(*args, **kwargs)
                for name, p in self.model.named_parameters():
                    p.copy_(trained[name])
            return result

    def average(model: nn.Module, *_: Any) -> None:
        for name, p in model.named_parameters():
            averages[name] = averages.get(name, p.detach().clone()).lerp(p.detach(), 0.1)

    return attached(folder, cls=Swapping, callbacks=[At("on_step_end", average)])


@honest
def gradients_that_are_clipped_signed_and_averaged(folder: Path) -> Seen:
    averages: dict[Any, Tensor] = {}

    def act(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            average = averages.setdefault(p, torch.zeros_like(p, dtype=torch.bfloat16))
            average.lerp_(p.grad.bfloat16(), 0.1)
            assert float(p.grad.bfloat16().float().norm()) >= 0  # a figure for a log
            p.grad.add_(average.to(p.dtype), alpha=0.01)
            if p.dim() == 1:
                p.grad.sign_()

    def change(model: Any) -> None:
        model.model.layers[0].mlp.down_proj.weight.register_hook(lambda g: g.clamp(-1, 1))

    return attached(folder, change=change, callbacks=[At("on_pre_optimizer_step", act)])


@honest
def layers_that_are_trained_in_turn(folder: Path) -> Seen:
    def act(model: nn.Module, optimizer: Any, state: Any) -> None:
        for number, layer in enumerate(model.model.layers):
            for p in layer.parameters():
                p.requires_grad_(state.global_step % 2 == number)

    return attached(folder, precision="fp32", callbacks=[At("on_step_end", act)])


@honest
def weights_kept_within_a_norm(folder: Path) -> Seen:
    @torch.no_grad()
    def act(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(
                    p.norm(dim=1, keepdim=True).clamp(max=0.1)
                    / p.norm(dim=1, keepdim=True).clamp(min=1e-6)
                )

    return attached(folder, callbacks=[At("on_step_end", act)])


@honest
def adafactor_with_accumulation_and_counts(folder: Path) -> Seen:
    count = _loss(lambda losses, learnt: losses.sum() / learnt.sum().clamp(min=1))
    return attached(
        folder,
        compute_loss_func=count,
        more={"optim": "adafactor", "gradient_accumulation_steps": 2},
    )
