"""Checkpoints as they are published: a tiny model's folder in each packed format, and the one value
that an element of its files means.

`write` quantises by nothing but drawing: each packed tensor is random, so that every code occurs.
`element` reads one weight with Python's integers and floats, independently of `isotype.ops.packed`.
"""

import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
GROUP = 16


def _ct(form: str, weights: dict, *, activations: bool = False) -> dict:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {"num_bits": 8, "dynamic": True} if activations else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _ao(kind: str, grain: str, data: dict) -> dict:
    how = {
        "_type": kind,
        "_version": 2,
        "_data": {"granularity": {"_type": grain, "_version": 1, "_data": data}},
    }
    return {"quant_method": "torchao", "quant_type": {"default": how}}


BLOCK = (32, 32)  # in the place of 128: tiny weights have a last block that is not whole
# format -> (word of precision.base, quantization_config)
FORMATS: dict[str, tuple[str, dict]] = {
    "fp8-block": ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}),
    "fp8-block-ue8m0": ("fp8", {"quant_method": "fp8", "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"}),
    "fp8-fbgemm": ("fp8", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8-ct-channel": (
        "fp8", _ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, activations=True),
    ),
    "fp8-ct-tensor": ("fp8", _ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"})),
    "fp8-ct-block": (
        "fp8", _ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "32x32"}),
    ),
    "int8-ct-channel": ("int8", _ct("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, activations=True)),
    "int8-bnb": ("int8", {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}),
    "int4-ct-packed": ("int4", _ct("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP})),
    "int4-ct-asymmetric": (
        "int4", _ct("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}),
    ),
    "int8-ct-packed": ("int8", _ct("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})),
    "int8-torchao": ("int8", _ao("Int8WeightOnlyConfig", "PerRow", {"dim": -1})),
    "int8-torchao-group": ("int8", _ao("IntxWeightOnlyConfig", "PerGroup", {"group_size": GROUP})),
    "fp8-torchao": ("fp8", _ao("Float8WeightOnlyConfig", "PerRow", {"dim": -1})),
    "gptq": ("int4", {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq-v2": ("int4", {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"}),
    "gptq-act-order": ("int4", {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq"}),
    "gptq-8": ("int8", {"quant_method": "gptq", "bits": 8, "group_size": -1}),
    "awq": ("int4", {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "nvfp4-ct": (
        "nvfp4", _ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ),
    "nvfp4-modelopt": ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4-ct": ("mxfp4", _ct("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32})),
}  # fmt: skip


def packed(form: str, o: int, i: int) -> dict[str, torch.Tensor]:
    """The tensors of one weight [o i] in the file, of the size that a trained weight has."""
    size = i**-0.5

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)

    def e4m3(*shape: int) -> torch.Tensor:
        # exponents up to 2**6; no code of these is NaN
        return (
            torch.randint(0, 256, shape, dtype=torch.uint8)
            .bitwise_and(0xEF)
            .view(torch.float8_e4m3fn)
        )

    def scale(*shape: int, of: float) -> torch.Tensor:
        return (torch.rand(shape) + 0.5) * size / of

    blocks, groups = (-(-o // BLOCK[0]), -(-i // BLOCK[1])), -(-i // GROUP)
    if form in ("fp8-block", "fp8-ct-block"):
        return {
            "weight": e4m3(o, i),
            "weight_scale_inv" if form == "fp8-block" else "weight_scale": scale(*blocks, of=40),
        }
    if form == "fp8-block-ue8m0":
        return {
            "weight": e4m3(o, i),
            "weight_scale_inv": torch.randint(118, 121, blocks, dtype=torch.uint8).view(
                torch.float8_e8m0fnu
            ),
        }
    if form in ("fp8-fbgemm", "fp8-ct-channel"):
        return {
            "weight": e4m3(o, i),
            "weight_scale": scale(o, 1, of=40).to(
                torch.bfloat16 if "ct" in form else torch.float32
            ),
        }
    if form == "fp8-ct-tensor":
        return {"weight": e4m3(o, i), "weight_scale": scale(1, of=40), "input_scale": torch.ones(1)}
    if form == "int8-ct-channel":
        return {
            "weight": torch.randint(-128, 128, (o, i)).to(torch.int8),
            "weight_scale": scale(o, 1, of=70).bfloat16(),
        }
    if form == "int8-bnb":
        made = {
            "weight": torch.randint(-127, 128, (o, i)).to(torch.int8),
            "SCB": scale(o, of=70) * 127,
        }
        return made | {"weight_format": torch.tensor(0, dtype=torch.uint8)}
    if form == "fp8-torchao":
        return {"_weight_qdata": e4m3(o, i), "_weight_scale": scale(o, 1, of=40)}
    if form.startswith("int8-torchao"):
        each = groups if "group" in form else 1
        own = torch.randint(-3, 4, (o, each)).to(torch.int8)
        return {"_weight_qdata": torch.randint(-128, 128, (o, i)).to(torch.int8), "_weight_scale": scale(o, each, of=70),
                "_weight_zero_point": own}  # fmt: skip
    shape = torch.tensor([o, i])
    if form.startswith("int4-ct"):
        made = {
            "weight_packed": words(o, -(-i // 8)),
            "weight_scale": scale(o, groups, of=4.6).bfloat16(),
            "weight_shape": shape,
        }
        return made | (
            {"weight_zero_point": words(-(-o // 8), groups)} if "asymmetric" in form else {}
        )
    if form == "int8-ct-packed":
        return {
            "weight_packed": words(o, -(-i // 4)),
            "weight_scale": scale(o, 1, of=74).bfloat16(),
            "weight_shape": shape,
        }
    if form == "gptq-8":
        made = {
            "qweight": words(i // 4, o),
            "qzeros": torch.full((1, o // 4), 0x7F7F7F7F, dtype=torch.int32),
        }
        return made | {
            "scales": scale(1, o, of=74).half(),
            "g_idx": torch.zeros(i, dtype=torch.int32),
        }
    if form.startswith("gptq"):
        of_column = torch.arange(i) // GROUP
        of_column = of_column[torch.randperm(i)] if "order" in form else of_column
        made = {
            "qweight": words(i // 8, o),
            "qzeros": words(groups, o // 8),
            "scales": scale(groups, o, of=6).half(),
        }
        return made | {"g_idx": of_column.int()}
    if form == "awq":
        return {
            "qweight": words(i, o // 8),
            "qzeros": words(groups, o // 8),
            "scales": scale(groups, o, of=6).half(),
        }
    halves = torch.randint(0, 256, (o, i // 2), dtype=torch.uint8)
    if form == "mxfp4-ct":
        return {
            "weight_packed": halves,
            "weight_scale": torch.randint(121, 124, (o, -(-i // 32)), dtype=torch.uint8),
        }
    own = (torch.rand(o, i // 16) * 400 + 1).to(torch.float8_e4m3fn)
    if form == "nvfp4-ct":
        return {
            "weight_packed": halves,
            "weight_scale": own,
            "weight_global_scale": torch.tensor([200 * 2.5 / size]),
        }
    return {
        "weight": halves,
        "weight_scale": own,
        "weight_scale_2": torch.tensor(size / 500),
        "input_scale": torch.tensor(1.0),
    }


def element(form: str, t: dict[str, torch.Tensor], o: int, i: int) -> float:
    """One weight, decoded with Python's integers and floats."""

    def number(word: torch.Tensor, at: int, bits: int = 4) -> int:
        return (int(word) & 0xFFFFFFFF) >> (bits * at) & (2**bits - 1)

    def fp4(byte: torch.Tensor) -> float:
        code = int(byte) >> 4 if i % 2 else int(byte) & 15
        return -E2M1[code & 7] if code & 8 else E2M1[code]

    if form == "fp8-block-ue8m0":
        byte = t["weight_scale_inv"].view(torch.uint8)[o // BLOCK[0], i // BLOCK[1]]
        return (
            float(t["weight"][o, i])
            * struct.unpack("<f", (int(byte) << 23).to_bytes(4, "little"))[0]
        )
    if form in ("fp8-block", "fp8-ct-block"):
        scale = t["weight_scale_inv" if form == "fp8-block" else "weight_scale"]
        return float(t["weight"][o, i]) * float(scale[o // BLOCK[0], i // BLOCK[1]])
    if form == "fp8-ct-tensor":
        return float(t["weight"][o, i]) * float(t["weight_scale"])
    if form in ("fp8-fbgemm", "fp8-ct-channel", "int8-ct-channel"):
        return float(t["weight"][o, i]) * float(t["weight_scale"][o, 0])
    if form == "int8-bnb":
        return float(t["weight"][o, i]) * float(t["SCB"][o]) / 127
    if "torchao" in form:
        at = (o, i // GROUP if "group" in form else 0)
        zero = int(t["_weight_zero_point"][at]) if "_weight_zero_point" in t else 0
        return (float(t["_weight_qdata"][o, i]) - zero) * float(t["_weight_scale"][at])
    if form == "int8-ct-packed":
        return (number(t["weight_packed"][o, i // 4], i % 4, 8) - 128) * float(
            t["weight_scale"][o, 0]
        )
    if form.startswith("int4-ct"):
        zero = (
            number(t["weight_zero_point"][o // 8, i // GROUP], o % 8) - 8
            if "asymmetric" in form
            else 0
        )
        return (number(t["weight_packed"][o, i // 8], i % 8) - 8 - zero) * float(
            t["weight_scale"][o, i // GROUP]
        )
    if form.startswith("gptq"):
        bits = 8 if form == "gptq-8" else 4
        per, group = 32 // bits, int(t["g_idx"][i])
        zero = number(t["qzeros"][group, o // per], o % per, bits) + (form != "gptq-v2")
        return (number(t["qweight"][i // per, o], i % per, bits) - zero) * float(
            t["scales"][group, o]
        )
    if form == "awq":
        q, zero = (
            number(t["qweight"][i, o // 8], AWQ[o % 8]),
            number(t["qzeros"][i // GROUP, o // 8], AWQ[o % 8]),
        )
        return (q - zero) * float(t["scales"][i // GROUP, o])
    if form == "mxfp4-ct":
        return fp4(t["weight_packed"][o, i // 2]) * 2.0 ** (
            int(t["weight_scale"][o, i // 32]) - 127
        )
    if form == "nvfp4-ct":
        return (
            fp4(t["weight_packed"][o, i // 2])
            * float(t["weight_scale"][o, i // 16])
            / float(t["weight_global_scale"])
        )
    return (
        fp4(t["weight"][o, i // 2])
        * float(t["weight_scale"][o, i // 16])
        * float(t["weight_scale_2"])
    )


def write(model, tokenizer, folder: Path, form: str) -> None:
    """Saves `model` with every linear layer but the head packed."""
    torch.manual_seed(0)
    tensors = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            del tensors[f"{name}.weight"]
            parts = packed(form, module.out_features, module.in_features)
            tensors |= {f"{name}.{part}": t for part, t in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": FORMATS[form][1]})
    )
    tokenizer.save_pretrained(str(folder))


def write_experts(model, folder: Path, form: str, *, layers: bool = False) -> None:
    """Saves a mixture with packed experts: stacked, in mxfp4 (gpt-oss), or a linear layer each in
    the layout `form`.

    layers  packs every linear layer but the head as well (DeepSeek)
    """
    torch.manual_seed(0)
    tensors, stacked = {}, form == "mxfp4"
    head = model.get_output_embeddings()
    linear = {
        n
        for n, m in model.named_modules()
        if layers and isinstance(m, torch.nn.Linear) and m is not head
    }
    for name, t in model.state_dict().items():
        owner, _, last = name.rpartition(".")
        if owner in linear and last == "weight":
            tensors |= {f"{owner}.{part}": p for part, p in packed(form, *t.shape).items()}
        elif last not in ("gate_up_proj", "down_proj"):
            tensors[name] = t.to(torch.bfloat16)
        elif stacked:
            experts, i, o = t.shape
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, (experts, o, i // 32, 16), dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(
                121, 124, (experts, o, i // 32), dtype=torch.uint8
            )
        else:
            experts, o, i = t.shape
            for expert in range(experts):
                for layer in ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",):
                    rows = o // 2 if last == "gate_up_proj" else o
                    tensors |= {
                        f"{owner}.{expert}.{layer}.{part}": p
                        for part, p in packed(form, rows, i).items()
                    }
    folder.mkdir(parents=True)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = {"quant_method": "mxfp4"} if stacked else FORMATS[form][1]
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "quantization_config": settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
