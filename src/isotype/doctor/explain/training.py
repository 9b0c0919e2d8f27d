"""Families of errors from gradients, optimizers, scalers, sharding and configuration."""

from __future__ import annotations

from ...finding import Severity
from .family import Cause, Explained, Seen, family
from .recognise import dtype_word


@family("EX010", "optimizer update", "fused optimizer")
def optimizer_update(s: Seen) -> Explained:
    """The optimizer got a gradient, state and weight of different dtypes

    **Why it matters.** Adam's moments, the weight and its gradient take part in one update (`lerp`, a fused kernel); torch does
    not cast them.

    **Example.** Gradients re-typed to fp32 between micro-steps (`gradient_precision=fp32`) beside bf16 weights, or states loaded
    in another dtype.

    **What to do.** Leave `param.grad` in the weight's dtype; for fp32 accumulation keep separate fp32 buffers and update an fp32 copy.
    """
    state, gradient = s.dtype("state", s.dtype("expected", "one dtype")), s.dtype("gradient", s.dtype("got", "another"))
    return Explained(
        message="fused Adam: weights, gradients and states differ in dtype"
        if s.operator == "fused optimizer"
        else f"optimizer: {gradient} gradient or state beside {state}",
        causes=[
            Cause(
                name="gradient in another dtype than the parameter",
                score=3,
                why=(
                    f"the optimizer keeps its state (exp_avg) in {state} and the gradient is {gradient}: a hook, a custom "
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
            Cause(
                name="optimizer state loaded in another dtype",
                score=2,
                why=(
                    "a checkpoint's optimizer state has another dtype than the parameters have now, or parameters were "
                    "cast after the optimizer was made"
                ),
                fix=(
                    "cast the model before making the optimizer, and the states after loading: state['exp_avg'] = "
                    "state['exp_avg'].to(p.dtype)"
                ),
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


@family("EX014", "flattened parameters", "sharded group", "collective")
def sharding(s: Seen) -> Explained:
    """Sharding or a collective needs one dtype and met two

    **Why it matters.** FSDP1 flattens a unit's parameters into one tensor, frozen ones included; FSDP2 wants one dtype among a
    group's trainable ones; NCCL
    collectives and ZeRO-3's persistent parameters pack tensors together.

    **Example.** fp32 LoRA adapters (PEFT's default) on a bf16 base; 4-bit weights stored as uint8.

    **What to do.** One dtype a unit: `autocast_adapter_dtype=False`, `bnb_4bit_quant_storage=torch.bfloat16`, or norms and
    adapters in units of their own.
    """
    left, right = s.dtype("left", "one dtype"), s.dtype("right", "another")
    if "set" in s.words:
        left, right = ([dtype_word(word) for word in s.words["set"].split(",")] + ["another"])[:2]
    quant = {"uint8", "int8"} & {left, right}
    causes = [
        Cause(
            name="fp32 adapters or norms in a half-precision unit",
            score=3,
            why=(
                f"{left} and {right} parameters share one FSDP unit or collective: fp32 LoRA adapters (PEFT's "
                "default), fp32 norms or modules_to_save beside a half-precision base, uniform dtype is needed"
            ),
            fix=(
                f"one dtype: get_peft_model(model, config, autocast_adapter_dtype=False), or model.to({s.torch_half}) "
                "before wrapping, or wrap the fp32 modules in their own unit (auto_wrap_policy / fully_shard)"
            ),
            because=f"the text names {left} and {right}" if right != "another" else "",
        )
    ]
    causes.append(
        Cause(
            name="4-bit weights stored in another dtype",
            score=5 if quant or s.situation.mentions("bitsandbytes|Params4bit") else 1.5,
            why=("bitsandbytes stores 4-bit weights as uint8 unless told otherwise, and FSDP cannot flatten them with floats"),
            fix="BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16), equal to dtype=",
            because=f"{quant.pop()} is named" if quant else "",
        )
    )
    if s.operator == "collective":
        causes.append(
            Cause(
                name="mixed parameter dtypes in one collective",
                score=3.5,
                why=(
                    "a reduce_scatter or all_gather (DeepSpeed ZeRO, ZeRO++) packs tensors of mixed dtypes (fp32 LoRA on "
                    "a bf16 base, or a misspelt bf16 section "
                    "that left parameters in fp32) into one collective"
                ),
                fix=("one parameter dtype: autocast_adapter_dtype=False, and check that the DeepSpeed config has bf16: {enabled: auto}"),
                because="deepspeed is in the traceback" if "deepspeed" in s.situation.packages else "",
            )
        )
    what = {
        "flattened parameters": "FSDP1 needs one dtype in a unit",
        "sharded group": "FSDP2 needs one dtype among a group's trainable parameters",
        "collective": "a collective got tensors of two dtypes",
    }[s.operator]
    named = f": {left} and {right}" if right != "another" else ""
    return Explained(message=what + named, causes=causes)


@family("EX015", "recompute")
def recompute(s: Seen) -> Explained:
    """Checkpoint recompute produced another dtype

    **Why it matters.** Gradient checkpointing runs the forward again in backward. If autocast (or a dtype flag) differs then, the
    same tensor comes out in another dtype.

    **Example.** autocast entered around the model's call, left before `backward`, with a wrapper that does not restore it.

    **What to do.** Enter autocast inside the checkpointed function, use `use_reentrant=False`, and read no dtype from global state in it.
    """
    saved, again = s.dtype("saved"), s.dtype("recomputed")
    return Explained(
        message=f"gradient checkpointing: {saved} in forward, {again} when recomputed",
        causes=[
            Cause(
                name="autocast differs between forward and recompute",
                score=4,
                why=(
                    f"the same tensor (same shape) was {saved} in the forward pass and {again} in the recompute during "
                    "backward: the autocast state, or a flag that sets a dtype, differs between forward and backward"
                ),
                fix=(
                    "enter autocast inside the checkpointed function:\n    def block(x):\n        with "
                    "torch.autocast('cuda', dtype=torch.bfloat16):\n            return layer(x)\n    y = "
                    "checkpoint(block, x, use_reentrant=False)"
                ),
                because=f"{saved} saved, {again} recomputed, same shape",
            )
        ],
    )


@family("EX016", "DeepSpeed accumulation", "DeepSpeed mismatch")
def deepspeed(s: Seen) -> Explained:
    """DeepSpeed's configuration disagrees with itself or with the trainer

    **Why it matters.** DeepSpeed has its own precision sections; transformers compares them with its arguments and stops,
    accelerate with `--mixed_precision`.

    **Example.** `"fp16": {"enabled": true}` in the JSON and `bf16=True` in TrainingArguments.

    **What to do.** `"auto"` in the DeepSpeed sections, and the decision in one place. `isotype check` reads both files.
    """
    if s.operator == "DeepSpeed accumulation":
        return Explained(
            message="DeepSpeed: model dtype and grad_accum_dtype conflict",
            causes=[
                Cause(
                    name="grad_accum_dtype conflicts with bf16 and ZeRO",
                    score=3,
                    why=(
                        "data_types.grad_accum_dtype differs from what this DeepSpeed allows for the model's dtype and ZeRO "
                        "stage (versions 0.7.6 to 0.8.0 have contradicting defaults)"
                    ),
                    fix=(
                        'upgrade DeepSpeed, and set "data_types": {"grad_accum_dtype": "fp32"} (bf16 with ZeRO stage 1-3), '
                        "or remove it without ZeRO"
                    ),
                )
            ],
        )
    key = s.words.get("key") or f"{s.words.get('section', 'fp16')}.enabled"
    value = f"={s.words['ds']}" if "ds" in s.words else ""
    other = f"{s.words['hf']}={s.words.get('hfvalue')}" if "hf" in s.words else f"--mixed_precision {s.words.get('mp', '')}"
    return Explained(
        message=f"DeepSpeed {key}{value} disagrees with {other}",
        causes=[
            Cause(
                name=f"{key} in the DeepSpeed config",
                score=4,
                why=(
                    f"the DeepSpeed config sets {key}{value} and the trainer or launcher says {other}: a mismatch between "
                    "two owners of precision"
                ),
                fix=(
                    'set "enabled": "auto" in the fp16 and bf16 sections of the DeepSpeed config, and decide in '
                    "TrainingArguments (bf16=True or fp16=True)"
                ),
                because="the text names both settings",
            )
        ],
    )


@family("EX017", "both halves", "trainer refusal", "mixed precision word", "dtype string", "model and flag differ")
def refused_configuration(s: Seen) -> Explained:
    """A trainer refuses the combination of precision settings

    **Why it matters.** The program stopped before training, and rightly: two settings exclude each other, or a word is not one it knows.

    **Example.** `fp16=True` and `bf16=True` together; `--full_bf16` without `--mixed_precision=bf16`; `adamw_bf16` without bf16.

    **What to do.** One half precision, said once. `isotype check` on the folder names the files and lines.
    """
    if s.operator == "both halves":
        which = "for evaluation " if "full_eval" in s.text or "full eval" in s.text else ""
        return Explained(
            message=f"fp16 and bf16 are both on {which}".rstrip(),
            causes=[
                Cause(
                    name="fp16 and bf16 both set",
                    score=4,
                    why=(
                        f"fp16 and bf16 are both true {which}: a default or a config file sets one (bf16 is on by default in "
                        "some trainers) and your flag the other"
                    ),
                    fix="keep one: bf16=True, fp16=False where the GPU has bf16 (Ampere or newer), else fp16=True, bf16=False",
                    because="the text names both",
                )
            ],
        )
    if s.operator == "mixed precision word":
        word = s.words.get("word", "False")
        return Explained(
            message=f"mixed_precision: {word} is not a mode",
            causes=[
                Cause(
                    name="unknown mixed_precision mode",
                    score=4,
                    why=(
                        "mixed_precision takes no, fp16, bf16 (or fp8): fp32 is called 'no', words are lower case, and an "
                        "unquoted no in YAML is the boolean False"
                    ),
                    fix="mixed_precision: 'no' (quoted) for fp32, or bf16",
                )
            ],
        )
    if s.operator == "dtype string":
        word = s.words.get("word", "")
        return Explained(
            message=f"{word!r} is not an attribute of torch",
            causes=[
                Cause(
                    name="dtype string with a prefix or in another spelling",
                    score=4,
                    why=f"the setting is given to getattr(torch, ...): {word!r} must be torch's own word without prefix",
                    fix='write "bfloat16", "float16" or "float32" (bnb_4bit_compute_dtype: bfloat16)',
                    because=f"the text names {word}",
                )
            ],
        )
    if s.operator == "model and flag differ":
        left, right = s.dtype("left"), s.dtype("right")
        return Explained(
            message=f"the model is {left} and the flag asks for {right}",
            causes=[
                Cause(
                    name="model dtype and mixed precision flag differ",
                    score=4,
                    why=f"the model was loaded in {left} while the training flag says {right}",
                    fix=f"match them: {'bf16' if left == 'bf16' else 'fp16'}=True, or load with dtype={right}",
                    because="the text names both",
                )
            ],
        )
    full = s.words.get("full")
    what = (
        f"full_{full} needs mixed_precision={full}" if full else "a bf16-only optimizer needs bf16 weights, and gradients that are not fp32"
    )
    return Explained(
        message="the trainer refuses this combination of precision and optimizer",
        causes=[
            Cause(
                name="mixed_precision and optimizer or full_* do not go together",
                score=4,
                why=f"{what}: mixed_precision, optimizer, gradient_precision and the base model's default dtype must agree",
                fix=(
                    f"--mixed_precision={full or 'bf16'}, the same in accelerate launch and in the script; or an "
                    "optimizer made for fp32 weights (adamw), and gradient_precision=unmodified"
                ),
            )
        ],
    )


@family("EX018", "hardware without bf16")
def hardware(s: Seen) -> Explained:
    """The device has no bf16 (or TF32)

    **Why it matters.** bf16 and TF32 need compute capability 8.0 (Ampere). T4, V100 and the 20xx series have fp16 only; without a
    visible GPU, a trainer may say the same.

    **Example.** `bf16=True` on a T4.

    **What to do.** `fp16=True` with fp32 weights there; `use_cpu=True` if a CPU run is meant.
    """
    what = "TF32" if "tf32" in s.text.lower() else "bf16"
    return Explained(
        message=f"{what} was asked for on a device without it",
        causes=[
            Cause(
                name="GPU before Ampere, or no GPU seen",
                score=3,
                why=(
                    f"{what} needs a GPU of compute capability 8.0 (Ampere, A100, 30xx) or newer: T4, V100 and 20xx have "
                    "none; with no visible GPU trainers say the same"
                ),
                fix="fp16=True, bf16=False (with fp32 weights), or use_cpu=True for a CPU run; check torch.cuda.is_bf16_supported()",
            ),
        ],
    )


@family("EX019", "no gradient")
def no_gradient(s: Seen) -> Explained:
    """The loss has no graph; in a dtype context, a stale autocast cache

    **Why it matters.** Usually nothing requires a gradient (all frozen, or a loss made from detached values). One cause is
    precision: a forward under `no_grad` inside
    an autocast region caches low-precision copies of the weights without history, and the training forward re-uses them.

    **Example.** `generate()` and then the training forward within one `with torch.autocast(...)`.

    **What to do.** Separate autocast regions, or `torch.clear_autocast_cache()` between; check that something has `requires_grad`.
    """
    cached = "generate" in s.situation or "evaluation" in s.situation
    return Explained(
        message="the loss does not require a gradient",
        severity=Severity.WARNING,
        causes=[
            Cause(
                name="stale autocast cache",
                score=4 if cached else 2,
                why=(
                    "a no_grad forward (generate, evaluation) inside the same autocast region cached low-precision "
                    "weights without history, and the training forward re-used them"
                ),
                fix=(
                    "leave the autocast region between them, or torch.clear_autocast_cache() before the training "
                    "forward; newer torch mends it"
                ),
                because=s.situation.where("generate" if "generate" in s.situation else "evaluation") if cached else "",
            ),
            Cause(
                name="nothing requires a gradient",
                score=3,
                why=("every parameter is frozen, or gradient checkpointing with frozen embeddings cut the graph: not a dtype error then"),
                fix="model.enable_input_require_grads(), or check any(p.requires_grad for p in model.parameters())",
            ),
        ],
    )


@family("EX028", "autocast")
def autocast_word(s: Seen) -> Explained:
    """autocast met a dtype it does not know how to rank

    **Why it matters.** autocast promotes among fp16, bf16 and fp32; an fp16 tensor inside a bf16 region (or the reverse), or fp64
    or fp8, has no rank there.

    **Example.** An fp16 adapter under `torch.autocast(dtype=torch.bfloat16)`.

    **What to do.** One half format in a region: cast the odd tensor.
    """
    return Explained(
        message="autocast got a floating dtype it cannot rank",
        causes=[
            Cause(
                name="two half formats in one autocast region",
                score=3,
                why=(
                    "a tensor of the other half format (fp16 under bf16 autocast, or the reverse), or fp8, reached an "
                    "operator that autocast promotes"
                ),
                fix=("cast it to the region's dtype: x.to(torch.get_autocast_dtype('cuda')), or load every part in one dtype"),
            )
        ],
    )
