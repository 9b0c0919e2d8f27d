"""Rules about checkpoints that were published quantised and are trained on by transformers with adapters."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..settings import Record, Setting
from .base import error, note, rule, warning

_QUANTISATION = "checkpoint.quantization_config"
_DENSE = "model.quantization_config.dequantize"
_FIX = "CompressedTensorsConfig(dequantize=True), or isotype train --model FOLDER, which trains on the file's weights as they are"


def _method(r: Record) -> Setting | None:
    """The `quant_method` of a checkpoint that transformers loads and an adapter is trained on."""
    return None if not r.adapter or r.facts.has("isotype") else r.facts.get(f"{_QUANTISATION}.quant_method")


@rule("CF064")
def rounded_activations(r: Record) -> Iterator[Finding]:
    """Adapters on a checkpoint whose activations are rounded

    **Why it matters.** A W8A8 checkpoint of compressed-tensors asks for rounded activations. transformers rounds them in training too,
    and rounding has derivative zero: only the residual stream and each layer's own adapter get a gradient. Measured with transformers 5.23
    and PEFT on fp8 and int8 with a scale a channel: LoRA gradients 97% off (layers 0, 1, 2: 99%, 95%, 84%), and no message. torchao's
    dynamic
    int8 gives the same.

    **Example.** `RedHatAI/...-FP8-dynamic` (`config_groups` with `input_activations`) and a LoRA adapter.

    **What to do.** `CompressedTensorsConfig(dequantize=True)`: 2.1% off, as dense bf16; the weights are bf16 then. Or `isotype train`.
    """
    method = _method(r)
    if method is None or str(method.value) != "compressed-tensors" or r.facts.on(_DENSE):
        return
    groups = r.facts.under(f"{_QUANTISATION}.config_groups")
    rounded = [s for s in groups if ".input_activations" in s.key and s.value not in (None, {}, False)]
    if rounded:
        yield error(
            "adapters on a checkpoint whose activations are rounded, which gives them no gradient",
            rounded[0],
            method,
            cause="rounding has derivative zero: an earlier layer's adapter reaches the loss through the residual stream alone",
            fix=_FIX,
            wins="the rounding; gradients are 97% off, without a message",
        )


_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "vocab_size")


@rule("CF065")
def blocks_that_do_not_divide(r: Record) -> Iterator[Finding]:
    """FP8 blocks that divide no size of the model

    **Why it matters.** Where transformers 5.23 has no kernel (a CPU, or `dequantize=True`), it takes the rows of a weight divided by the
    rows of its scales for the block size. At 448 rows and blocks of 128 that is 112: weights 11 to 22% off, logits 11%, gradients 14%;
    576 rows (DeepSeek's `kv_a_proj_with_mqa`) do not load.

    **Example.** `weight_block_size: [128, 128]` with `intermediate_size: 448`.

    **What to do.** A GPU with transformers' kernels, or `isotype train`, which takes the block size of config.json.
    """
    method = _method(r)
    block = r.facts.get(f"{_QUANTISATION}.weight_block_size")
    if method is None or block is None or str(method.value) != "fp8" or not isinstance(block.value, list) or len(block.value) != 2:
        return
    if r.device is not None and r.device.kind != "cpu" and not r.facts.on(_DENSE):
        return
    size = int(block.value[0])
    for name in _SIZES:
        found = r.facts.get(f"checkpoint.{name}", f"checkpoint.text_config.{name}")
        if found is not None and isinstance(found.value, int) and found.value % size and found.value > size:
            yield warning(
                f"{name} {found.value} is no multiple of the FP8 block's {size}",
                found,
                block,
                cause="without its kernels transformers 5.23 divides rows by the rows of the scales, and takes that for the block size",
                fix="a GPU with transformers' kernels, or isotype train --model FOLDER",
                wins="another block size than the file's: weights 11 to 22% off",
            )
            return


@rule("CF066")
def widened_for_good(r: Record) -> Iterator[Finding]:
    """A quantised checkpoint that becomes bf16

    **Why it matters.** transformers 5.23 widens compressed-tensors' layers at the first forward and keeps them so: a packed int4 model of
    1.39 MB holds 3.82 MB then, where the dense one holds 3.77. The run takes the memory of a bf16 model, while its settings say 4 bits.

    **Example.** `format: pack-quantized` or `nvfp4-pack-quantized`, and a LoRA adapter.

    **What to do.** Count the memory of bf16 weights; or `isotype train`, which holds the file's bytes.
    """
    method = _method(r)
    form = r.facts.get(f"{_QUANTISATION}.format")
    if method is None or form is None or str(method.value) != "compressed-tensors":
        return
    yield note(
        f"a checkpoint in {form.value}, which transformers widens to bf16 at its first forward",
        form,
        method,
        cause="its layers are decompressed in place and stay so",
        fix="isotype train --model FOLDER holds the file's bytes; else count the memory of bf16 weights",
        wins="bf16 weights",
    )
