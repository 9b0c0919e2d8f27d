"""What config.json says of a checkpoint whose weights are packed: by which library, in which word
of `precision.base`, in which blocks.

Which layers are packed, and how, is read off the file's tensors (`ops.packed.recognise`), not off
the lists of ignored layers here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WORDS = ("fp8", "int8", "int4", "nvfp4", "mxfp4", "gguf")
"""Words of packed bases, besides nf4, which bitsandbytes makes when a model is loaded. GGUF files
mix blocks of several sizes.
"""
ON_LOAD = ("fp8", "int8")
"""Those that a base that is not quantised may become when it is loaded, with a scale a channel."""
READ = (
    "fp8, fbgemm_fp8, compressed-tensors, bitsandbytes, gptq, awq, modelopt, mxfp4, torchao and"
    " GGUF files"
)


@dataclass(frozen=True)
class Packing:
    """library      as `quant_method` names it
    word         of `precision.base`
    layout       what shares a scale, in words
    blocks       (rows, columns) that may share a scale; -1 columns are all of them
    bits         of integers
    first_zero   what GPTQ's stored zero points lack
    activations  whether the file also asks for rounded activations
    needs        a tensor that every packed weight has by the settings, and some files of the same
                 library have not
    """

    library: str
    word: str
    layout: str
    blocks: tuple[tuple[int, int], ...] = ((1, -1),)
    bits: int = 8
    first_zero: int = 0
    activations: bool = False
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.word} by {self.library}, {self.layout}"


_OWN_CLASSES = {
    "hqq": "transformers 5.23 does not load it either",
    "quanto": "its files hold its own tensor classes",
}
AGAIN = "give the model it was quantised from; nf4-lora quantises it when it is loaded"


class UnreadPacking(ValueError):
    """Why a checkpoint's packing is not read: its library, format or version, or settings that are
    damaged.
    """


def packing(found: Mapping[str, Any]) -> Packing:
    """Reads `quantization_config`. Raises UnreadPacking."""
    method = found.get("quant_method")
    library = str(getattr(method, "value", method)).lower()
    reader = _READERS.get(library)
    if reader is None:
        why = f" ({_OWN_CLASSES[library]})" if library in _OWN_CLASSES else ""
        raise UnreadPacking(f"quantised by {library}, which is not read{why}: {READ} are")
    try:
        return reader(found)
    except UnreadPacking:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadPacking(
            f"config.json, quantization_config: {type(error).__name__}: {error}"
        ) from None


def _fp8(found: Mapping[str, Any]) -> Packing:
    block = found.get("weight_block_size")
    activations = found.get("activation_scheme") is not None
    if block is None:
        return Packing("fp8", "fp8", "a scale a tensor", activations=activations)
    rows, columns = _block(block)
    return Packing(
        "fp8",
        "fp8",
        f"a scale for each block of {rows} x {columns}",
        ((rows, columns),),
        activations=activations,
    )


def _gptq(found: Mapping[str, Any]) -> Packing:
    bits = int(found["bits"])
    version = str(found.get("checkpoint_format") or "gptq")
    if bits not in (4, 8):
        raise UnreadPacking(f"GPTQ with {bits} bits: 4 and 8 are read")
    if version not in ("gptq", "gptq_v2"):
        raise UnreadPacking(f"GPTQ's checkpoint_format {version}: gptq and gptq_v2 are read")
    size = int(found["group_size"])
    needs = "g_idx" if found.get("desc_act") else ""
    return Packing(
        "gptq",
        f"int{bits}",
        _group_words(size),
        ((1, size),),
        bits,
        first_zero=int(version == "gptq"),
        needs=needs,
    )


def _awq(found: Mapping[str, Any]) -> Packing:
    bits = int(found.get("bits", found.get("w_bit", 4)))
    version = str(found.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UnreadPacking(f"AWQ's version {version} with {bits} bits: gemm with 4 bits is read")
    size = int(found.get("group_size", found.get("q_group_size", 128)))
    return Packing("awq", "int4", _group_words(size), ((1, size),), 4)


def _modelopt(found: Mapping[str, Any]) -> Packing:
    algorithm = str(found.get("quant_algo") or (found.get("quantization") or {}).get("quant_algo"))
    if algorithm == "FP8":
        return Packing("modelopt", "fp8", "a scale a tensor", activations=True)
    if algorithm == "NVFP4":
        return Packing("modelopt", "nvfp4", _group_words(16), ((1, 16),), 4, activations=True)
    raise UnreadPacking(f"ModelOpt's quant_algo {algorithm}: FP8 and NVFP4 are read")


def _compressed(found: Mapping[str, Any]) -> Packing:
    if (sparsity := (found.get("sparsity_config") or {}).get("format")) not in (None, "dense"):
        raise UnreadPacking(f"compressed-tensors' sparsity {sparsity} is not read")
    made = [
        _compressed_group(group, str(group.get("format") or found.get("format")))
        for group in found["config_groups"].values()
    ]
    words = sorted({one.word for one in made})
    if len(words) != 1:
        raise UnreadPacking(
            f"its layers are {' and '.join(words) or 'not quantised'}, and precision.base is one"
            " word"
        )
    layouts = list(dict.fromkeys(one.layout for one in made))
    blocks = tuple(dict.fromkeys(block for one in made for block in one.blocks))
    return Packing(
        "compressed-tensors",
        words[0],
        " or ".join(layouts),
        blocks,
        made[0].bits,
        activations=any(one.activations for one in made),
        needs=made[0].needs if len(made) == 1 else "",
    )


# those whose files hold a number in a byte, with its scales beside it; the words of
# Int4WeightOnlyConfig lie as one kernel wants them
_TORCHAO = {
    "Int8WeightOnlyConfig": "int8", "Float8WeightOnlyConfig": "fp8", "IntxWeightOnlyConfig": "int8",
    "Int8DynamicActivationInt8WeightConfig": "int8", "Int8DynamicActivationIntxWeightConfig": "int8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
}  # fmt: skip


def _torchao(found: Mapping[str, Any]) -> Packing:
    how = found["quant_type"]
    how = how.get("default", how) if isinstance(how, Mapping) else {"_type": how}
    kind = str(how.get("_type"))
    own = how.get("_data", {})
    if kind not in _TORCHAO:
        raise UnreadPacking(f"torchao's {kind} is not read: {', '.join(_TORCHAO)} are")
    grain = own.get("granularity") or own.get("weight_granularity") or {}
    grain = grain[-1] if isinstance(grain, list) else grain
    size = int(grain.get("_data", {}).get("group_size") or own.get("group_size") or -1)
    return Packing(
        "torchao",
        _TORCHAO[kind],
        _group_words(size),
        ((1, size),),
        activations="Activation" in kind,
    )


_FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)


def _compressed_group(group: Mapping[str, Any], form: str) -> Packing:
    weights = group["weights"]
    rounds = group.get("input_activations") is not None
    if form not in (*_FORMATS, "None", "mixed-precision"):
        raise UnreadPacking(
            f"compressed-tensors' format {form} is not read: {', '.join(_FORMATS)} are"
        )
    bits = int(weights["num_bits"])
    kind = str(weights.get("type", "int"))
    strategy = str(weights.get("strategy", "channel"))
    size = int(weights.get("group_size") or -1)
    if kind == "float" and bits == 4:
        word = "mxfp4" if size == 32 else "nvfp4"
    elif (kind, bits) in (("float", 8), ("int", 8), ("int", 4)):
        word = "fp8" if kind == "float" else f"int{bits}"
    else:
        raise UnreadPacking(
            f"compressed-tensors' {kind}{bits} is not read: fp8, int8, int4, nvfp4 and mxfp4 are"
        )
    if strategy == "block":
        rows, columns = _block(weights["block_structure"])
        return Packing(
            "",
            word,
            f"a scale for each block of {rows} x {columns}",
            ((rows, columns),),
            bits,
            activations=rounds,
        )
    if strategy in ("tensor", "channel"):
        return Packing("", word, f"a scale a {strategy}", bits=bits, activations=rounds)
    needs = "" if kind == "float" or weights.get("symmetric", True) else "weight_zero_point"
    return Packing(
        "", word, _group_words(size), ((1, size),), bits, activations=rounds, needs=needs
    )


def _group_words(size: int) -> str:
    if size != -1 and size < 1:
        raise ValueError(f"group_size: {size}")
    if size == -1:
        return "a scale a channel"
    return f"a scale for {size} of a row"


def _block(given: Any) -> tuple[int, int]:
    rows, columns = (int(n) for n in (given.split("x") if isinstance(given, str) else given))
    if rows < 1 or columns < 1:
        raise ValueError(f"a block of {rows} x {columns}")
    return rows, columns


_READERS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda found: Packing("fbgemm_fp8", "fp8", "a scale a channel", activations=True),
    "bitsandbytes": lambda found: Packing(
        "bitsandbytes", "int8", "a scale a channel", activations=True
    ),
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": lambda found: Packing("mxfp4", "mxfp4", _group_words(32), ((1, 32),), 4),
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gguf": lambda found: Packing("gguf", "gguf", f"blocks {', '.join(found['kinds'])}"),
    "torchao": _torchao,
}
