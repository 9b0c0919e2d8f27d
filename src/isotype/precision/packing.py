"""Reads from config.json how the weights of a checkpoint are packed (quantised). The result
contains the library, the name of the dtype as in `precision.base`, and the size of blocks.

The lists of ignored layers in config.json are not used. The tensors in the checkpoint files show
which layers are packed and how (`ops.packed.recognise`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PACKED_DTYPES = ("fp8", "int8", "int4", "nvfp4", "mxfp4", "gguf")
"""Dtypes of packed bases, besides nf4, which bitsandbytes makes when a model is loaded. GGUF files
mix blocks of several sizes.
"""
DTYPES_ON_LOAD = ("fp8", "int8")
"""Dtypes to which a base can be quantised when it is loaded, with one scale per channel."""
READ_LIBRARIES = (
    "fp8, fbgemm_fp8, compressed-tensors, bitsandbytes, gptq, awq, modelopt, mxfp4, torchao and"
    " GGUF files"
)


@dataclass(frozen=True)
class Packing:
    """Describes how the weights of a checkpoint are packed.

    library            the library's name in `quant_method`
    dtype_name         the dtype, with the name that `precision.base` uses
    layout             a description of which numbers share a scale
    blocks             sizes (rows, columns) of the blocks that share a scale; -1 columns mean all
                       columns
    bits               the number of bits of each integer
    zero_point_offset  the number that is added to the stored zero points of GPTQ
    rounds_activations  whether the checkpoint's settings also ask for rounding activations
    required_tensor    the name of a tensor that must exist for every packed weight with these
                       settings; it is missing in some files of the library
    """

    library: str
    dtype_name: str
    layout: str
    blocks: tuple[tuple[int, int], ...] = ((1, -1),)
    bits: int = 8
    zero_point_offset: int = 0
    rounds_activations: bool = False
    required_tensor: str = ""

    def __str__(self) -> str:
        return f"{self.dtype_name} by {self.library}, {self.layout}"


_OWN_CLASSES = {
    "hqq": "transformers 5.23 does not load it either",
    "quanto": "its files hold its own tensor classes",
}
UNREAD_FIX = "give the model it was quantised from; nf4-lora quantises it when it is loaded"


class UnreadPacking(ValueError):
    """Raised for a packed checkpoint that cannot be read. Its library, format or version is not
    supported, or its settings are damaged.
    """


def read_packing(config: Mapping[str, Any]) -> Packing:
    """Reads `quantization_config`. Raises UnreadPacking."""
    method = config.get("quant_method")
    library = str(getattr(method, "value", method)).lower()
    reader = _READERS.get(library)
    if reader is None:
        remark = f" ({_OWN_CLASSES[library]})" if library in _OWN_CLASSES else ""
        raise UnreadPacking(
            f"quantised by {library}, which is not read{remark}: {READ_LIBRARIES} are"
        )
    try:
        return reader(config)
    except UnreadPacking:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadPacking(
            f"config.json, quantization_config: {type(error).__name__}: {error}"
        ) from None


def _read_fp8(config: Mapping[str, Any]) -> Packing:
    block = config.get("weight_block_size")
    activations = config.get("activation_scheme") is not None
    if block is None:
        return Packing("fp8", "fp8", "one scale per tensor", rounds_activations=activations)
    rows, columns = _parse_block(block)
    return Packing(
        "fp8",
        "fp8",
        f"one scale per block of {rows} x {columns}",
        ((rows, columns),),
        rounds_activations=activations,
    )


def _read_gptq(config: Mapping[str, Any]) -> Packing:
    bits = int(config["bits"])
    version = str(config.get("checkpoint_format") or "gptq")
    if bits not in (4, 8):
        raise UnreadPacking(f"GPTQ with {bits} bits: 4 and 8 are read")
    if version not in ("gptq", "gptq_v2"):
        raise UnreadPacking(f"GPTQ's checkpoint_format {version}: gptq and gptq_v2 are read")
    size = int(config["group_size"])
    needs = "g_idx" if config.get("desc_act") else ""
    return Packing(
        "gptq",
        f"int{bits}",
        _group_description(size),
        ((1, size),),
        bits,
        zero_point_offset=int(version == "gptq"),
        required_tensor=needs,
    )


def _read_awq(config: Mapping[str, Any]) -> Packing:
    bits = int(config.get("bits", config.get("w_bit", 4)))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise UnreadPacking(f"AWQ's version {version} with {bits} bits: gemm with 4 bits is read")
    size = int(config.get("group_size", config.get("q_group_size", 128)))
    return Packing("awq", "int4", _group_description(size), ((1, size),), 4)


def _read_modelopt(config: Mapping[str, Any]) -> Packing:
    algorithm = str(
        config.get("quant_algo") or (config.get("quantization") or {}).get("quant_algo")
    )
    if algorithm == "FP8":
        return Packing("modelopt", "fp8", "one scale per tensor", rounds_activations=True)
    if algorithm == "NVFP4":
        return Packing(
            "modelopt", "nvfp4", _group_description(16), ((1, 16),), 4, rounds_activations=True
        )
    raise UnreadPacking(f"ModelOpt's quant_algo {algorithm}: FP8 and NVFP4 are read")


def _read_compressed_tensors(config: Mapping[str, Any]) -> Packing:
    if (sparsity := (config.get("sparsity_config") or {}).get("format")) not in (None, "dense"):
        raise UnreadPacking(f"compressed-tensors' sparsity {sparsity} is not read")
    packings = [
        _read_compressed_group(group, str(group.get("format") or config.get("format")))
        for group in config["config_groups"].values()
    ]
    dtype_names = sorted({packing.dtype_name for packing in packings})
    if len(dtype_names) != 1:
        raise UnreadPacking(
            f"its layers are {' and '.join(dtype_names) or 'not quantised'}, and precision.base is one"
            " word"
        )
    layouts = list(dict.fromkeys(packing.layout for packing in packings))
    blocks = tuple(dict.fromkeys(block for packing in packings for block in packing.blocks))
    return Packing(
        "compressed-tensors",
        dtype_names[0],
        " or ".join(layouts),
        blocks,
        packings[0].bits,
        rounds_activations=any(packing.rounds_activations for packing in packings),
        required_tensor=packings[0].required_tensor if len(packings) == 1 else "",
    )


# torchao's formats that store one number per byte with separate scales. Int4WeightOnlyConfig is not
# among them: its numbers are stored in an order that only one kernel reads
_TORCHAO_DTYPES = {
    "Int8WeightOnlyConfig": "int8", "Float8WeightOnlyConfig": "fp8", "IntxWeightOnlyConfig": "int8",
    "Int8DynamicActivationInt8WeightConfig": "int8", "Int8DynamicActivationIntxWeightConfig": "int8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
}  # fmt: skip


def _read_torchao(config: Mapping[str, Any]) -> Packing:
    quant_type = config["quant_type"]
    quant_type = (
        quant_type.get("default", quant_type)
        if isinstance(quant_type, Mapping)
        else {"_type": quant_type}
    )
    class_name = str(quant_type.get("_type"))
    data = quant_type.get("_data", {})
    if class_name not in _TORCHAO_DTYPES:
        raise UnreadPacking(f"torchao's {class_name} is not read: {', '.join(_TORCHAO_DTYPES)} are")
    granularity = data.get("granularity") or data.get("weight_granularity") or {}
    granularity = granularity[-1] if isinstance(granularity, list) else granularity
    size = int(granularity.get("_data", {}).get("group_size") or data.get("group_size") or -1)
    return Packing(
        "torchao",
        _TORCHAO_DTYPES[class_name],
        _group_description(size),
        ((1, size),),
        rounds_activations="Activation" in class_name,
    )


_COMPRESSED_FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)


def _read_compressed_group(group: Mapping[str, Any], file_format: str) -> Packing:
    weights = group["weights"]
    rounds_activations = group.get("input_activations") is not None
    if file_format not in (*_COMPRESSED_FORMATS, "None", "mixed-precision"):
        raise UnreadPacking(
            f"compressed-tensors' format {file_format} is not read: {', '.join(_COMPRESSED_FORMATS)} are"
        )
    bits = int(weights["num_bits"])
    kind = str(weights.get("type", "int"))
    strategy = str(weights.get("strategy", "channel"))
    size = int(weights.get("group_size") or -1)
    if kind == "float" and bits == 4:
        dtype_name = "mxfp4" if size == 32 else "nvfp4"
    elif (kind, bits) in (("float", 8), ("int", 8), ("int", 4)):
        dtype_name = "fp8" if kind == "float" else f"int{bits}"
    else:
        raise UnreadPacking(
            f"compressed-tensors' {kind}{bits} is not read: fp8, int8, int4, nvfp4 and mxfp4 are"
        )
    if strategy == "block":
        rows, columns = _parse_block(weights["block_structure"])
        return Packing(
            "",
            dtype_name,
            f"one scale per block of {rows} x {columns}",
            ((rows, columns),),
            bits,
            rounds_activations=rounds_activations,
        )
    if strategy in ("tensor", "channel"):
        return Packing(
            "",
            dtype_name,
            f"a scale a {strategy}",
            bits=bits,
            rounds_activations=rounds_activations,
        )
    needs = "" if kind == "float" or weights.get("symmetric", True) else "weight_zero_point"
    return Packing(
        "",
        dtype_name,
        _group_description(size),
        ((1, size),),
        bits,
        rounds_activations=rounds_activations,
        required_tensor=needs,
    )


def _group_description(size: int) -> str:
    if size != -1 and size < 1:
        raise ValueError(f"group_size: {size}")
    if size == -1:
        return "one scale per channel"
    return f"one scale per {size} values of a row"


def _parse_block(block: Any) -> tuple[int, int]:
    rows, columns = (int(n) for n in (block.split("x") if isinstance(block, str) else block))
    if rows < 1 or columns < 1:
        raise ValueError(f"a block of {rows} x {columns}")
    return rows, columns


_READERS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": lambda config: Packing(
        "fbgemm_fp8", "fp8", "one scale per channel", rounds_activations=True
    ),
    "bitsandbytes": lambda config: Packing(
        "bitsandbytes", "int8", "one scale per channel", rounds_activations=True
    ),
    "gptq": _read_gptq,
    "awq": _read_awq,
    "mxfp4": lambda config: Packing("mxfp4", "mxfp4", _group_description(32), ((1, 32),), 4),
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed_tensors,
    "gguf": lambda config: Packing("gguf", "gguf", f"blocks {', '.join(config['kinds'])}"),
    "torchao": _read_torchao,
}
