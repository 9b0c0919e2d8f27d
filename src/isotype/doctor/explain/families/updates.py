"""Errors of gradients and their use: optimizers, backward, GradScaler."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family
from .causes import wider


@family("EX010", "optimizer update", "fused optimizer", "step counter")
def optimizer_update(s: Seen) -> Explained:
    """The optimizer got a gradient, state and weight of different dtypes

    **Why it matters.** Adam's moments, the weight and its gradient take part in one update (`lerp`, a fused kernel); torch does
    not cast them.

    **Example.** Gradients re-typed to fp32 between micro-steps (`gradient_precision=fp32`) beside bf16 weights, or states loaded
    in another dtype.

    **What to do.** Leave `param.grad` in the weight's dtype; for fp32 accumulation keep separate fp32 buffers and update an fp32 copy.
    """
    state, gradient = s.dtype("state", s.dtype("expected", "one dtype")), s.dtype("gradient", s.dtype("got", "another"))
    if s.operator == "step counter":
        return Explained(
            message="optimizer: step counters in another dtype than fp32",
            causes=[
                Cause(
                    name="step counters cast with the other states",
                    score=4,
                    why="torch.optim keeps each parameter's step as an fp32 scalar on the CPU; a checkpoint that was saved or loaded with "
                    "every floating tensor cast to bf16 or fp16 has cast these as well",
                    fix="after loading: for state in optimizer.state.values(): state['step'] = state['step'].float().cpu(); and do "
                    "not cast `step` when states are saved",
                    because="the text names step tensors",
                )
            ],
        )
    named = "state" in s.dtypes
    keeps = (
        f"the optimizer keeps its state (exp_avg) in {state} and the gradient is {gradient}"
        if named
        else f"the weights are {state}, and a gradient or a state is {gradient}"
    )
    later = named and wider(state, gradient)  # a state takes its weight's dtype when it is made: the weight was wider then
    return Explained(
        message="fused Adam: weights, gradients and states differ in dtype"
        if s.operator == "fused optimizer"
        else f"optimizer: {gradient} gradient or state beside {state}",
        causes=[
            Cause(
                name="gradient in another dtype than the parameter",
                score=3,
                why=(
                    f"{keeps}: a hook, a custom "
                    "backward, or a gradient precision setting (gradient_precision=fp32) changed param.grad beside bf16 "
                    "parameters"
                ),
                fix=(
                    "leave gradients in the parameter's dtype (remove gradient_precision=fp32, or set it to unmodified), "
                    "or cast back before the step: p.grad = p.grad.to(p.dtype); keep trainable parameters in fp32 for "
                    "fp32 gradients"
                ),
                because=f"optimizer step in {s.situation.where('optimizer')}" if "optimizer" in s.situation else "",
            ),
            *(
                [
                    Cause(
                        name="interpolation weight in another dtype",
                        score=4,
                        why=(
                            f"lerp's weight (a beta or momentum kept as a 0-dim tensor) is {gradient} and the buffer {state}: eager "
                            "mode takes a Python float, a compiled step takes tensors of one dtype"
                        ),
                        fix="cast it at the call: exp_avg.lerp_(grad, (1 - beta).to(exp_avg.dtype)), or keep all states in fp32",
                        because="the text names lerp's weight",
                    )
                ]
                if s.words.get("which") == "weight"
                else []
            ),
            Cause(
                name="optimizer state loaded in another dtype",
                score=5 if "resumed" in s.situation else 3.5 if later else 2,
                why=(
                    (f"{keeps}, and a state is made in its weight's dtype: " if later else "")
                    + "a checkpoint's optimizer state has another dtype than the parameters have now, or parameters were "
                    "cast after the optimizer was made"
                ),
                fix=(
                    "cast the model before making the optimizer, and the states after loading: state['exp_avg'] = "
                    "state['exp_avg'].to(p.dtype)"
                )
                if not wider(gradient, state)
                else (
                    "load_state_dict casts every state to its parameter's dtype: put the saved fp32 states back after loading, "
                    "state['exp_avg'] = saved['exp_avg'], or keep the master weights in fp32"
                ),
                because="the text says that a checkpoint was loaded" if "resumed" in s.situation else "",
            ),
            Cause(
                name="update computed in another dtype (Muon and its kin)",
                score=4 if "muon" in s.situation or s.situation.mentions("(?i)muon|newtonschulz|zeropower") else 0.5,
                why=f"the orthogonalised update is made in bf16 (or cast to fp32) and the momentum buffer is {state}",
                fix="cast the update to the buffer's dtype before lerp_: buffer.lerp_(update.to(buffer.dtype), 1 - beta)",
                because="Newton-Schulz code is in the traceback"
                if s.situation.mentions("(?i)muon|newtonschulz|zeropower")
                else "the text names such an optimizer or its second momentum"
                if "muon" in s.situation
                else "",
            ),
            Cause(
                name="parameters of several dtypes in one optimizer",
                score=1,
                why="some parameters (DoRA magnitudes, modules_to_save) have another dtype than the rest",
                fix=(
                    "list them: {n: (p.dtype, p.grad.dtype) for n, p in model.named_parameters() if p.grad is not None}; "
                    "use fused=False, foreach=False, or one dtype"
                ),
            ),
        ],
    )


@family("EX011", "assigned gradient", "gradient in backward", "backward of a promotion")
def gradient_dtype(s: Seen) -> Explained:
    """A gradient in another dtype than its tensor

    **Why it matters.** autograd gives a gradient its tensor's dtype. Re-typing `.grad` in place (fp32 gradients of bf16 weights)
    breaks accumulation at the next
    micro-step, DDP and hooks; a loss whose inputs were promoted in silence fails in its backward.

    **Example.** SimpleTuner's `gradient_precision=fp32` with gradient accumulation: "Expected BFloat16, got Float".

    **What to do.** Leave `.grad` alone and accumulate into separate fp32 buffers; cast both inputs of a loss with `.float()`.
    """
    if s.operator == "backward of a promotion":
        got, want = s.dtype("got"), s.dtype("expected")
        return Explained(
            message=f"backward: found {got}, expected {want}",
            causes=[
                Cause(
                    name="loss inputs of two dtypes",
                    score=3,
                    why=(
                        f"a forward (often a loss) promoted two dtypes in silence: a {got} target or weight with a {want} "
                        "prediction; its backward does not"
                    ),
                    fix="cast both inputs of the loss: loss_fn(prediction.float(), target.float())",
                    because=f"the gradient is {got}, the tensor {want}",
                )
            ],
        )
    want, got = s.dtype("expected", s.dtype("parameter")), s.dtype("got", s.dtype("gradient"))
    causes = [
        Cause(
            name="gradients re-typed between micro-steps",
            score=3,
            why=(
                f"a {got} gradient meets {want}: param.grad was converted after a backward (gradient_precision=fp32, "
                f"fp32 gradient buffers on {want} weights), and the next backward accumulates in {want}"
            ),
            fix=(
                "remove the gradient precision setting (gradient_precision=unmodified), or keep fp32 accumulation "
                "buffers apart from param.grad; Isotype: precision: {preset: bf16-pure, grads: fp32}"
            ),
            because="the text speaks of assigning to .grad" if s.operator == "assigned gradient" else "",
        ),
        Cause(
            name="custom backward returns another dtype",
            score=6 if "custom backward" in s.situation else 2,
            why="a custom autograd backward returns a gradient in another dtype than its input",
            fix="return grad.to(input.dtype) from backward",
            because=f"{s.situation.where('custom backward')}" if "custom backward" in s.situation else "",
        ),
    ]
    return Explained(message=f"a {got} gradient where {want} is expected", causes=causes)


@family("EX012", "scaler, fp16 gradients")
def unscale_fp16(s: Seen) -> Explained:
    """GradScaler found fp16 gradients: trained weights are fp16

    **Why it matters.** Loss scaling keeps fp32 weights (and gradients) exact; with fp16 weights there is nothing exact to unscale
    into, so torch refuses.

    **Example.** `from_pretrained(..., dtype=torch.float16)` with `fp16=True`.

    **What to do.** Keep what is trained in fp32 (load in float32, or cast the adapters only), or train in bf16 without a scaler.
    """
    causes = [
        Cause(
            name="trainable weights are fp16",
            score=3,
            why=(
                "a GradScaler (fp16=True) met fp16 gradients: the trainable parameters (weights) themselves are "
                "fp16, because the model was loaded in float16 or adapters inherited it"
            ),
            fix=(
                "load in fp32 (dtype=torch.float32) or cast only what is trained:\n    for p in "
                "model.parameters():\n        if p.requires_grad: p.data = p.data.float()\nor use bf16=True, which "
                "needs no scaler"
            ),
            because=f"{s.situation.where('clip')}" if "clip" in s.situation else "",
        )
    ]
    if "evaluation" in s.situation or "generate" in s.situation:
        flag = "evaluation" if "evaluation" in s.situation else "generate"
        causes.append(
            Cause(
                name="validation cast the live model",
                score=4,
                why="an evaluation or pipeline cast the trained model to fp16",
                fix="cast a copy, or use autocast for validation",
                because=s.situation.where(flag),
            )
        )
    if s.situation.mentions("/peft/|lora"):
        causes.append(
            Cause(
                name="fp16 adapters",
                score=3.5,
                why="adapters inherited the base's fp16 (old PEFT, autocast_adapter_dtype=False, or modules_to_save)",
                fix="autocast_adapter_dtype=True (the default), and cast modules_to_save to fp32",
                because="an adapter is in the traceback",
            )
        )
    return Explained(message="GradScaler cannot unscale fp16 gradients", causes=causes)


@family("EX013", "scaler, bf16 gradients")
def unscale_bf16(s: Seen) -> Explained:
    """GradScaler met bf16 gradients

    **Why it matters.** fp16 training (`fp16=True`) makes a GradScaler; its CUDA kernel has no bf16. bf16 has fp32's range and
    needs no loss scaling.

    **Example.** A checkpoint saved in bf16, loaded in its own dtype, trained with `fp16=True`.

    **What to do.** `bf16=True, fp16=False`; or load in fp32 where the GPU has no bf16.
    """
    gradient = s.dtype("gradient", "bf16")
    return Explained(
        message=f"GradScaler (fp16 training) cannot unscale {gradient} gradients",
        causes=[
            Cause(
                name="fp16=True with bf16 weights",
                score=4,
                why=(
                    f"fp16=True created a GradScaler, and the trainable parameters are {gradient} (a bf16 checkpoint "
                    "loaded in its own dtype): bf16 needs no loss scaling"
                ),
                fix=(
                    "bf16=True, fp16=False (no GradScaler), or load fp32 weights with dtype=torch.float32, or disable "
                    "the scaler: GradScaler(enabled=False)"
                ),
                because=f"the scaler's kernel is named for {gradient}",
            )
        ],
    )
