"""Errors of quantised weights and 8-bit optimizers (bitsandbytes)."""

from __future__ import annotations

from ..family import Cause, Explained, Seen, family


@family("EX025", "quantised again", "8-bit optimizer", "quantised fine-tuning", "integer parameter")
def bitsandbytes(s: Seen) -> Explained:
    """bitsandbytes was given a dtype it cannot quantise or step

    **Why it matters.** Quantisation takes 16- and 32-bit floats: a weight that is quantised already is uint8. 8-bit optimizers
    need a kernel
    for the gradient's dtype, and old versions have none for bf16. Quantised weights take no gradient: they need an adapter.

    **Example.** `.to("cuda")` twice on a 4-bit model; `adamw_bnb_8bit` with bf16 gradients on an old version.

    **What to do.** Move a quantised model once; upgrade bitsandbytes; attach LoRA.
    """
    if s.operator == "quantised again":
        got = s.dtype("got")
        again = got in ("uint8", "int8")
        cause = Cause(
            name="weight quantised twice" if again else "dtype this bitsandbytes cannot quantise",
            score=4,
            why=(
                f"quantisation got {got}: the weight is quantised already (moved with .to() again, or a pre-quantised "
                "checkpoint loaded with a new quantization_config)"
            )
            if again
            else f"this version of bitsandbytes has no kernel for {got} (old versions lack bf16)",
            fix="load the pre-quantised checkpoint without quantization_config, and do not call .to() on it again"
            if again
            else "pip install -U bitsandbytes, or load with dtype=torch.float16",
            because=f"the text names {got}",
        )
        return Explained(message=f"bitsandbytes was asked to quantise {got}", causes=[cause])
    if s.operator == "integer parameter":
        return Explained(
            message="a quantised (integer) weight was made a trainable parameter",
            causes=[
                Cause(
                    name="nn.Parameter of an integer tensor",
                    score=3,
                    why=(
                        "4-bit and 8-bit weights are stored as uint8 or int8, and something made them nn.Parameter(...) with "
                        "requires_grad (its default): loading with strict shapes, sharding (FSDP2 before it passed requires_grad on), "
                        "or requires_grad_(True) over the whole model"
                    ),
                    fix=(
                        "train an adapter and leave the base frozen: p.requires_grad_(p.is_floating_point() and wanted); under FSDP store "
                        "the 4-bit weights in a floating dtype: bnb_4bit_quant_storage=torch.bfloat16"
                    ),
                )
            ],
        )
    if s.operator == "8-bit optimizer":
        return Explained(
            message=f"8-bit optimizer: {s.dtype('gradient')} gradients with {s.dtype('state')} states",
            causes=[
                Cause(
                    name="8-bit optimizer lacks this gradient dtype",
                    score=3,
                    why=f"this bitsandbytes has no 8-bit kernel for {s.dtype('gradient')} gradients (old versions lack bf16)",
                    fix=("pip install -U bitsandbytes, or use optim='adamw_torch', or fp32 parameters so that gradients are fp32"),
                    because="the text names the gradient's dtype",
                )
            ],
        )
    return Explained(
        message="a quantised model is trained without an adapter",
        causes=[
            Cause(
                name="quantised weights take no gradient",
                score=3,
                why="every trainable weight is quantised (int8 or 4-bit), and no adapter is attached",
                fix=(
                    "attach LoRA: model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...)), or "
                    "load without quantisation"
                ),
            )
        ],
    )
