"""What a trainer refuses before it starts."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family


@family(
    "EX017",
    "both halves",
    "trainer refusal",
    "mixed precision word",
    "dtype string",
    "Lightning precision",
    "model and flag differ",
    "unknown argument",
)
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
        if "type" in s.words or "nvalid" in s.text:
            return Explained(
                message=f"a string{f' ({word})' if word else ''} where torch takes a torch.dtype",
                causes=[
                    Cause(
                        name="a dtype's name in place of the dtype",
                        score=4,
                        why="a configuration's word was handed on as it is; torch takes the object, and reads a string as a device",
                        fix='look it up once: {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[word], or '
                        'getattr(torch, "bfloat16")',
                        because="the text names the argument and a string" if "type" in s.words else f"the text names {word}",
                    )
                ],
            )
        return Explained(
            message=f"{s.words.get('flag', 'the setting')} does not take {word!r}"
            if "flag" in s.words
            else f"{word!r} is not an attribute of torch",
            causes=[
                Cause(
                    name="dtype string with a prefix or in another spelling",
                    score=4,
                    why=f"the setting is compared with (or looked up by) torch's own word without prefix, and got {word!r}",
                    fix='write "bfloat16", "float16" or "float32" (bnb_4bit_compute_dtype: bfloat16)',
                    because=f"the text names {word}",
                )
            ],
        )
    if s.operator == "unknown argument":
        argument = s.words["argument"]
        removed = argument in ("fp16_backend", "half_precision_backend", "fp16_opt_level")
        newer = argument == "dtype"
        return Explained(
            message=f"this version does not know the argument {argument}",
            causes=[
                Cause(
                    name="argument of another version",
                    score=4,
                    why=(
                        f"{argument} is no longer an argument: transformers 5 removed it with its apex backend"
                        if removed
                        else "dtype= came to from_pretrained with transformers 4.56; older ones hand it on to the model's __init__"
                        if newer
                        else f"the installed version has no {argument} (a newer or an older one has, or the model's __init__ was handed it)"
                    ),
                    fix=(
                        f"leave {argument} out; bf16=True or fp16=True is all there is"
                        if removed
                        else "torch_dtype=... there, or pip install -U transformers"
                        if newer
                        else "pip show the library and read that version's arguments; isotype check --installed names others"
                    ),
                    because="the text names it",
                )
            ],
        )
    if s.operator == "Lightning precision":
        word, allowed = s.words.get("word", ""), s.words.get("allowed", "")
        if "where" in s.words:
            return Explained(
                message=f"{s.words['where']} does not take precision={word!r}",
                causes=[
                    Cause(
                        name="precision that this strategy does not have",
                        score=4,
                        why=f"with {s.words['where']} as strategy Lightning takes {allowed}; {word} is for others",
                        fix=f"precision={word.replace('-true', '-mixed')!r}, or another strategy (fsdp, ddp)",
                        because="the text lists what it takes",
                    )
                ],
            )
        older = "-mixed" not in allowed or "-true" not in allowed
        return Explained(
            message=f"this Lightning does not know precision={word!r}",
            causes=[
                Cause(
                    name="precision word of another Lightning version" if older else "precision word that Lightning does not know",
                    score=4,
                    why=(
                        f"{word} came with Lightning 2.0 ('-mixed') and 2.1 ('-true'); this one takes {allowed}"
                        if older
                        else f"Lightning takes {allowed}"
                    ),
                    fix=(
                        f"pip install -U lightning, or precision={'bf16' if word.startswith('bf16') else '16'!r} (mixed precision there)"
                        if older
                        else "precision='bf16-mixed' (fp32 weights, bf16 products) or 'bf16-true' (all bf16)"
                    ),
                    because="the text lists what it takes",
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


@family("EX018", "hardware without bf16", "device without bf16", "device without fp8")
def hardware(s: Seen) -> Explained:
    """The device has no bf16 (or TF32)

    **Why it matters.** bf16 and TF32 need compute capability 8.0 (Ampere). T4, V100 and the 20xx series have fp16 only; without a
    visible GPU, a trainer may say the same.

    **Example.** `bf16=True` on a T4.

    **What to do.** `fp16=True` with fp32 weights there; `use_cpu=True` if a CPU run is meant.
    """
    if s.operator == "device without fp8":
        return Explained(
            message="this device has no fp8 products",
            causes=[
                Cause(
                    name="fp8 arithmetic on a GPU before Ada",
                    score=3,
                    why=(
                        "fp8 products need compute capability 8.9 (Ada, 40xx) or 9.0 (Hopper): 30xx and A100 store fp8 weights, and must "
                        "compute in bf16 or fp16"
                    ),
                    fix="switch fp8 arithmetic off (fp8_fast, fp8_e4m3fn_fast, float8 training) and keep fp8 as storage only, or use bf16",
                    because="the text names the product and the capability",
                )
            ],
        )
    if s.operator == "device without bf16":
        mps = "mps" in s.text.lower()
        target = s.words.get("target", "sm_80")
        return Explained(
            message="the MPS backend has no bf16 here" if mps else "this device has no native bf16",
            causes=[
                Cause(
                    name="bf16 on a Mac's GPU" if mps else "bf16 instructions on an older GPU",
                    score=3,
                    why=(
                        "torch's MPS backend takes bf16 only in newer versions on macOS 14 or newer; a checkpoint in bf16 (or "
                        "dtype=torch.bfloat16, a bf16 default in the program) was moved to it"
                        if mps
                        else f"the generated code uses bf16 instructions, which need {target} (compute capability 8.0, Ampere) or newer; "
                        "older GPUs only emulate bf16 in torch's own kernels, not in Triton, torch.compile or cuBLAS"
                    ),
                    fix=(
                        "dtype=torch.float16 or torch.float32 when loading (ComfyUI: --force-fp16, --force-fp32), or newer macOS and torch"
                        if mps
                        else "fp16 (dtype=torch.float16, fp16=True with fp32 weights), or leave torch.compile off"
                    ),
                    because="the text names the backend" if mps else "the text names the instruction",
                )
            ],
        )
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
