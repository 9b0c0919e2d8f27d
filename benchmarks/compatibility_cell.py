"""Runs one cell of docs/compatibility.md: one family, one base and one trainer.

The reference does not use PEFT, Isotype or a quantised layer. It is the plain model of transformers
with the dequantised weights. The adapter is added to these weights in fp64, and autograd computes
the gradients of its two matrices.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tests import gguf_files, published  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

STAGES = ("loads", "gradient", "merge", "export")
REFERENCE = "reference"  # the name of a failure that is not the trainer's
MAX_RATIO = 1.5  # error relative to the error of the dense bf16 model
Cell = tuple[str, str, str]
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
# each token uses every expert, so that rounding cannot change the choice of experts
EXPERT_SIZES = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 4, "top_k_experts": 4,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "mlp_only_layers": [0], "n_shared_experts": 1,
}  # fmt: skip
# settings that a GGUF file of the family requires, as in its released models
REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "qwen3_moe": {"mlp_only_layers": []},
}
# transformers does not read the head size of these families from a GGUF file, or that of the experts
UNREAD_SIZES = ("qwen3", "gemma2", "gemma3_text", "qwen3_moe")
# base -> (format of tests/published.py, precision.base of Isotype)
PUBLISHED = {
    "fp8": ("fp8-block", "fp8"),
    "GPTQ": ("gptq", "int4"),
    "AWQ": ("awq", "int4"),
    "nvfp4": ("nvfp4-ct", "nvfp4"),
    "mxfp4": ("mxfp4-ct", "mxfp4"),
}
SCALE_DTYPES = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}
LORA_RANK = 4
LORA_SCALE = 2.0  # alpha 8
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
GGUF_FILE = "model.gguf"


class Skipped(Exception):
    """There is no such base model, so that the cell is empty."""


# --- The files of the base model


def plain_config(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        raise Skipped("transformers does not have this family")
    tokenizer = gguf_files.splitting()
    settings: dict[str, Any] = {**SIZES, "bos_token_id": None}
    settings |= {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    default = CONFIG_MAPPING[family]()
    settings |= {name: size for name, size in EXPERT_SIZES.items() if hasattr(default, name)}
    settings |= REQUIRED_SETTINGS.get(family, {})
    return CONFIG_MAPPING[family](**settings)


def save_model(family: str, base: str, folder: Path) -> None:
    """Saves a random model of the family in the format of the base, and a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = gguf_files.splitting()
    model = AutoModelForCausalLM.from_config(plain_config(family), dtype=torch.bfloat16)
    if base == "GGUF":
        if family not in gguf_files.FAMILIES or family in ("mixtral", "starcoder2"):
            raise Skipped("this script writes no GGUF file of the family")
        tokenizer.save_pretrained(folder)
        gguf_files.write(model, folder, folder / GGUF_FILE, "Q8_0")
    elif base not in PUBLISHED:
        model.save_pretrained(folder)
    elif family == "gpt_oss":
        if base != "mxfp4":
            raise Skipped("this family is only published with experts in mxfp4")
        folder.rmdir()
        published.write_experts(model, folder, "mxfp4")
        tokenizer.save_pretrained(folder)
        return
    elif expert_names(model):
        folder.rmdir()
        published.write_experts(model, folder, PUBLISHED[base][0], layers=True)
        if family == "mixtral":
            rename_expert_tensors(folder / "model.safetensors")
    else:
        published.write(model, tokenizer, folder, PUBLISHED[base][0])
    tokenizer.save_pretrained(folder)
    if base in SCALE_DTYPES:
        complete_compressed_config(folder / "config.json", SCALE_DTYPES[base])


def complete_compressed_config(file: Path, scale_dtype: str) -> None:
    """Adds the settings that compressed-tensors needs to load a folder, and Isotype does not."""
    config = json.loads(file.read_text(encoding="utf-8"))
    settings = config["quantization_config"]
    settings["quantization_status"] = "compressed"
    group = settings["config_groups"]["group_0"]
    group["format"] = settings["format"]
    group["weights"] |= {"symmetric": True, "dynamic": False, "scale_dtype": scale_dtype}
    file.write_text(json.dumps(config), encoding="utf-8")


def rename_expert_tensors(file: Path) -> None:
    """Gives the experts the names that Mixtral's files have."""
    from safetensors.torch import load_file, save_file

    names = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = {}
    for name, tensor in load_file(file).items():
        for new, old in names.items():
            name = name.replace(new, old)
        renamed[name] = tensor
    save_file(renamed, file, metadata={"format": "pt"})


# --- The values that the base weights mean, in fp64


def decode_nibbles(packed: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Splits each int32 word into its eight 4-bit numbers, along a new last dimension."""
    return (packed.long().unsqueeze(-1) >> torch.tensor(order).mul(4)) & 15


def decode_fp4(packed: Tensor) -> Tensor:
    magnitudes = torch.tensor(published.E2M1, dtype=torch.float64)
    values = torch.cat((magnitudes, -magnitudes))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return values[codes.long()]


def repeat_blocks(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Repeats each scale for the elements of its block."""
    rows = scale.double().repeat_interleave(block[0], -2)[..., : shape[0], :]
    return rows.repeat_interleave(block[1], -1)[..., : shape[1]]


def decode_weight(tensors: dict[str, Tensor]) -> Tensor:
    """Returns the fp64 weight [o i] of one packed layer of a published file."""
    if "weight_scale_inv" in tensors:
        values = tensors["weight"].double()
        return values * repeat_blocks(tensors["weight_scale_inv"], published.BLOCK, values.shape)
    if "weight_global_scale" in tensors:
        values = decode_fp4(tensors["weight_packed"])
        scale = repeat_blocks(tensors["weight_scale"], (1, 16), values.shape)
        return values * scale / tensors["weight_global_scale"].double()
    if "weight_packed" in tensors:
        values = decode_fp4(tensors["weight_packed"])
        exponents = repeat_blocks(tensors["weight_scale"], (1, 32), values.shape) - 127
        return values * exponents.exp2()
    if "g_idx" in tensors:  # GPTQ: words [i/8 o], and a zero point that is stored minus 1
        numbers = decode_nibbles(tensors["qweight"]).permute(0, 2, 1).flatten(0, 1)
        zeros = decode_nibbles(tensors["qzeros"]).flatten(-2) + 1
        group = tensors["g_idx"].long()
        return ((numbers - zeros[group]) * tensors["scales"].double()[group]).T
    numbers = decode_nibbles(tensors["qweight"], published.AWQ).flatten(-2)
    zeros = decode_nibbles(tensors["qzeros"], published.AWQ).flatten(-2)
    group = torch.arange(len(numbers)) // published.GROUP
    return ((numbers - zeros[group]) * tensors["scales"].double()[group]).T


PACKED_PARTS = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip


def published_state(file: Path) -> dict[str, Tensor]:
    """Returns the weights of a published file in fp64, with the names of transformers."""
    from safetensors.torch import load_file

    tensors = load_file(file)
    owners: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        owners.setdefault(owner, {})[part] = tensor
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for owner, parts in owners.items():
        if any(part in PACKED_PARTS for part in parts):
            value = decode_weight(parts)
            if ".experts." in owner:
                layer, expert, part = owner.rsplit(".", 2)
                experts.setdefault(f"{layer}.{part}", {})[int(expert)] = value
            else:
                state[f"{owner}.weight"] = value
            parts = {"bias": parts["bias"]} if "bias" in parts else {}
        for part, value in parts.items():
            if part.endswith("_blocks"):
                name = part.removesuffix("_blocks")
                rows = decode_fp4(value).flatten(-2)
                exponents = parts[f"{name}_scales"].double().repeat_interleave(32, -1) - 127
                state[f"{owner}.{name}"] = (rows * exponents.exp2()).transpose(1, 2)
            elif not part.endswith("_scales"):
                state[f"{owner}.{part}"] = value.double()
    stacks = {
        name: torch.stack([values[number] for number in sorted(values)])
        for name, values in experts.items()
    }
    mixtral = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name in list(stacks):
        layer, _, part = name.rpartition(".")
        if part in mixtral:
            layer = layer.replace("block_sparse_moe.", "mlp.")
            stacks[f"{layer}.{mixtral[part]}"] = stacks.pop(name)
    for name in list(stacks):
        layer, _, part = name.rpartition(".")
        if part == "gate_proj":
            pair = (stacks[name], stacks[f"{layer}.up_proj"])
            state[f"{layer}.gate_up_proj"] = torch.cat(pair, 1)
        elif part == "down_proj":
            state[name] = stacks[name]
    return {name.replace("block_sparse_moe.", "mlp."): value for name, value in state.items()}


def gguf_state(family_name: str, file: Path) -> dict[str, Tensor]:
    """Returns the weights of a GGUF file as the package gguf dequantises them."""
    import gguf
    from transformers import AutoModelForCausalLM

    config = plain_config(family_name)
    plain = AutoModelForCausalLM.from_config(config)
    family = gguf_files.FAMILIES[config.model_type]
    architecture = getattr(gguf.MODEL_ARCH, family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {
        tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).double()
        for tensor in gguf.GGUFReader(str(file)).tensors
    }
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = {}
    for name, like in plain.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj"):
            pair = [tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
            value = torch.cat(pair, 1)
        elif name.endswith("experts.down_proj"):
            value = tensors[f"blk.{layer}.ffn_down_exps.weight"]
        else:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if stored not in tensors:
                continue
            value = tensors[stored]
        if name.endswith("norm.weight"):
            value = value - family.norm_offset
        projection = name.split(".")[-2]
        if family.permutes_rows and projection in heads:
            pairs = value.view(heads[projection], -1, 2, *value.shape[1:])
            value = pairs.transpose(1, 2)
        state[name] = value.reshape(like.shape)
    return state


def loaded_state(model: Any) -> dict[str, Tensor]:
    """Returns the weights of a loaded model in fp64. bitsandbytes dequantises its own 4-bit weights
    to fp32.
    """
    import copy

    state = {}
    for name, parameter in model.named_parameters():
        quantisation = getattr(parameter, "quant_state", None)
        if hasattr(quantisation, "code"):
            from bitsandbytes.functional import dequantize_4bit

            wide = copy.copy(quantisation)
            wide.dtype = torch.float32
            state[name] = dequantize_4bit(parameter.data, wide).double()
        elif quantisation is not None:  # int8 of Isotype
            layout = quantisation.layout
            numbers = parameter.data.view(layout.packed_tensor[1]).view(layout.shape)
            state[name] = numbers.double() * quantisation.tensors["weight_scale"].double()
        elif getattr(parameter, "SCB", None) is not None:
            state[name] = parameter.data.double() * parameter.SCB.double()[:, None] / 127
        else:
            state[name] = parameter.data.double()
    return state


def dense_model(family: str, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Returns the plain model of transformers with these weights."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(
        plain_config(family), dtype=dtype, experts_implementation="eager"
    )
    missing = plain.load_state_dict(state, strict=False).missing_keys
    tied = set(plain.state_dict()) - {name for name, _ in plain.named_parameters()}
    unfilled = set(missing) - tied
    assert not unfilled, f"no value for {sorted(unfilled)[:3]}"
    return plain.to(dtype).requires_grad_(False)


# --- The adapter


def expert_names(model: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and name.split(".")[-1] in EXPERT_WEIGHTS
    ]


def linear_names(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def random_matrix(name: str, shape: Any) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.05)


class AdapterPart(NamedTuple):
    """The adapter of one weight. `name` is the name of the weight in the plain model."""

    name: str
    rank: int
    scale: float


class AddAdapter(nn.Module):
    """Adds the product of the adapter's matrices to a weight [o i] or a stack [e o i]."""

    def __init__(
        self, part: AdapterPart, weight: Tensor, *, is_transposed: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.rank, self.scale = part.rank, part.scale
        self.is_transposed = is_transposed
        self.experts = weight.shape[0] if weight.ndim == 3 else 1
        rows, columns = weight.shape[-2:]
        if is_transposed:
            rows, columns = columns, rows
        a = random_matrix(f"{part.name}.A", (self.rank * self.experts, columns))
        b = random_matrix(f"{part.name}.B", (rows, self.rank * self.experts))
        self.A, self.B = nn.Parameter(a.to(dtype)), nn.Parameter(b.to(dtype))

    def forward(self, weight: Tensor) -> Tensor:
        if weight.ndim == 2:
            change = self.B @ self.A
        else:  # in the layout of PEFT's adapters on stacked experts
            a = self.A.view(self.experts, self.rank, -1)
            b = self.B.view(-1, self.rank, self.experts).permute(2, 0, 1)
            change = b @ a
            if self.is_transposed:
                change = change.transpose(1, 2)
        return (weight + self.scale * change).to(weight.dtype)

    def add_to_output(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        low = nn.functional.linear(inputs[0].to(self.A.dtype), self.A)
        return (output + self.scale * nn.functional.linear(low, self.B)).to(output.dtype)


def add_reference_adapter(
    plain: Any, parts: tuple[AdapterPart, ...], dtype: torch.dtype
) -> dict[str, AddAdapter]:
    """Adds the adapter to a dense model. In fp64 it is added to the weights. In bf16 it is fp32 and
    is added to the outputs of linear layers, as in training.
    """
    adapters = {}
    for part in parts:
        owner_name, _, parameter = part.name.rpartition(".")
        owner = plain.get_submodule(owner_name)
        adapter = AddAdapter(
            part,
            getattr(owner, parameter),
            is_transposed=bool(getattr(owner, "is_transposed", False)),
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        )
        if isinstance(owner, nn.Linear) and dtype != torch.float64:
            owner.register_forward_hook(adapter.add_to_output)
        else:
            parametrize.register_parametrization(owner, parameter, adapter, unsafe=True)
        adapters[part.name] = adapter
    return adapters


def adapter_config(model: nn.Module) -> Any:
    from peft import LoraConfig

    experts = sorted({".".join(name.split(".")[-2:]) for name in expert_names(model)})
    return LoraConfig(
        r=LORA_RANK,
        lora_alpha=int(LORA_RANK * LORA_SCALE),
        target_modules="all-linear",
        target_parameters=experts or None,
        task_type="CAUSAL_LM",
    )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the name of each adapted weight in the plain model and PEFT's layer for it."""
    layers = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A") and len(layer.lora_A):
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            layers[f"{plain}.{getattr(layer, 'parameter_name', 'weight')}"] = layer
    return layers


def adapter_parts(adapted: nn.Module) -> tuple[AdapterPart, ...]:
    return tuple(
        AdapterPart(name, layer.r["default"], layer.scaling["default"])
        for name, layer in sorted(adapted_layers(adapted).items())
    )


def fill_adapter(adapted: Any) -> Any:
    """Gives the adapter the same random matrices in every model."""
    for name, layer in adapted_layers(adapted).items():
        for letter, matrices in (("A", layer.lora_A), ("B", layer.lora_B)):
            weight = matrices["default"].weight
            weight.data = random_matrix(f"{name}.{letter}", weight.shape).to(weight.dtype)
    return adapted


def add_adapter(model: Any) -> Any:
    from peft import get_peft_model

    return fill_adapter(get_peft_model(model, adapter_config(model)))


# --- Measures


def token_ids() -> Tensor:
    return torch.arange(3, 99).view(2, 48)


def model_loss(model: Any) -> Tensor:
    ids = token_ids()
    return model.train()(input_ids=ids, labels=ids, use_cache=False).loss


def join_gradients(matrices: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the gradients of all matrices as one fp64 vector. A missing gradient is zero."""
    parts = []
    for name in sorted(matrices):
        for matrix in matrices[name]:
            gradient = torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
            parts.append(gradient.double().flatten())
    return torch.cat(parts)


def adapter_gradient(adapted: Any) -> Tensor:
    return join_gradients(
        {
            name: (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            for name, layer in adapted_layers(adapted).items()
        }
    )


def reference_gradient(plain: Any, parts: tuple[AdapterPart, ...], dtype: torch.dtype) -> Tensor:
    adapters = add_reference_adapter(plain, parts, dtype)
    model_loss(plain).backward()
    return join_gradients({name: (adapter.A, adapter.B) for name, adapter in adapters.items()})


def model_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=token_ids(), use_cache=False).logits.double()


def relative_error(values: Tensor, exact: Tensor) -> float:
    if values.shape != exact.shape:
        raise ValueError(f"the adapter has {len(values)} elements, expected {len(exact)}")
    return float((values - exact).norm() / exact.norm())


class FailedCheck(ArithmeticError):
    """The trainer raises no exception, and its result is wrong."""


class Requantised(ArithmeticError):
    """The trainer rounds the merged weights to the format of the base, which is its design."""


def require_small_error(error: float, dense_error: float) -> None:
    if not error <= MAX_RATIO * dense_error:
        ratio = error / dense_error
        raise FailedCheck(
            f"relative error {error:.1e}, {ratio:.1f} times the error of the dense bf16 model"
        )


class Reference:
    """The fp64 gradient and logits of a base with an adapter, and the errors of the dense bf16
    model.
    """

    def __init__(
        self, family: str, state: dict[str, Tensor], parts: tuple[AdapterPart, ...]
    ) -> None:
        exact = dense_model(family, state, torch.float64)
        self.gradient = reference_gradient(exact, parts, torch.float64)
        self.logits = model_logits(exact)
        dense = dense_model(family, state, torch.bfloat16)
        gradient = reference_gradient(dense, parts, torch.bfloat16)
        self.gradient_error = relative_error(gradient, self.gradient)
        merged = dense_model(family, state, torch.float64)
        add_reference_adapter(merged, parts, torch.float64)
        for module in list(merged.modules()):
            for name in list(getattr(module, "parametrizations", {})):
                parametrize.remove_parametrizations(module, name)
        logits = model_logits(merged.to(torch.bfloat16))
        self.logits_error = relative_error(logits, self.logits)


# --- The trainers


def declared_quantisation(folder: Path) -> dict[str, Any]:
    """Returns the quantisation that config.json declares."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("quantization_config", {})


def load_peer(folder: Path, base: str) -> Any:
    """Loads the base as the documentation of transformers does."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        CompressedTensorsConfig,
    )

    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if base == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if base == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    if (
        base in SCALE_DTYPES
        and declared_quantisation(folder).get("quant_method") == "compressed-tensors"
    ):
        # without `dequantize`, a layer has no weight until the model's first forward
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if base == "GGUF":
        options["gguf_file"] = GGUF_FILE
        config = AutoConfig.from_pretrained(folder, gguf_file=GGUF_FILE)
        if config.model_type in UNREAD_SIZES:
            options["config"] = plain_config(config.model_type)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def isotype_precision(base: str) -> Any:
    from isotype.precision import PRESETS

    if base == "nf4":
        return PRESETS["nf4-lora"]
    word = PUBLISHED[base][1] if base in PUBLISHED else base.lower()
    return PRESETS["bf16-lora"].but(base=word)


def load_isotype(folder: Path, base: str) -> Any:
    from isotype.model.load import Source, load_base

    return load_base(
        Source(str(folder / GGUF_FILE if base == "GGUF" else folder)),
        isotype_precision(base),
        attention="auto",
        device=torch.device("cpu"),
        trainable=False,
    )


def attach_isotype(model: Any) -> Any:
    from isotype.config.schema import AdapterSection
    from isotype.model.adapter import attach_adapter

    section = AdapterSection(r=LORA_RANK, alpha=LORA_RANK * LORA_SCALE)
    return fill_adapter(attach_adapter(model, section, seed=0))


def train_peft(adapted: Any) -> None:
    """`TrainingArguments(bf16=True)` calls the model in the same way."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model_loss(adapted)
    loss.backward()


def train_trl(model: Any, folder: Path) -> Any:
    """One step of SFTTrainer with a learning rate of 0. The trainer adds the adapter."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class KeepGradients(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            for weight in weights:
                kept[weight] = weight.grad.clone()

    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=2,
        max_steps=1,
        learning_rate=0.0,
        max_grad_norm=0.0,
        bf16=True,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict({"input_ids": token_ids().tolist()}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter_config(model),
        callbacks=[KeepGradients()],
    )
    adapted = fill_adapter(trainer.model)
    weights = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    kept: dict[Tensor, Tensor] = {}
    trainer.train()
    for weight, gradient in kept.items():
        weight.grad = gradient
    return adapted


def train_isotype(adapted: Any, base: str) -> None:
    from isotype import optimize
    from isotype.precision.apply import apply_precision

    optimize(adapted, isotype_precision(base))
    apply_precision(adapted, isotype_precision(base), device_type="cpu")
    model_loss(adapted).backward()


def merge_peer(adapted: Any, family: str, out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    adapted.merge_and_unload().save_pretrained(out)
    return AutoModelForCausalLM.from_pretrained(out, dtype="auto")


def merge_isotype(adapted: Any, family: str, out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from isotype.inference.merge import merged_state

    state, _, _ = merged_state(adapted, torch.bfloat16)
    plain = AutoModelForCausalLM.from_config(plain_config(family), dtype=torch.bfloat16)
    plain.load_state_dict(state, strict=False)
    plain.save_pretrained(out)
    gguf_files.splitting().save_pretrained(out)
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)


def check_export(merged: Any, folder: Path) -> None:
    """Writes the merged folder as a GGUF file, and compares the logits of transformers' reader."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from isotype.inference.gguf_file import export_model

    export_model(folder, folder / GGUF_FILE, "BF16")
    exact = model_logits(merged.double())
    config = AutoConfig.from_pretrained(folder)
    sizes = {"config": config} if config.model_type in UNREAD_SIZES else {}
    read = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.float32, **sizes
    )
    error = relative_error(model_logits(read), exact)
    if not error <= 1e-4:
        raise FailedCheck(f"relative error {error:.1e} of the logits")


# --- The stages


def failing_line(error: BaseException) -> str:
    """Returns `file:line` of the innermost frame, with the path below site-packages or the
    repository.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename).as_posix()
    for root in ("site-packages/", "src/", "benchmarks/"):
        if root in path:
            path = path.split(root)[-1]
            break
    return f"{path}:{frame.lineno}"


# texts with which transformers refuses a format because of the machine or a missing package
REFUSALS = (
    "requires a GPU",
    "requires CUDA",
    "No CUDA",
    "GPU",
    "not supported yet",
    "not supported on",
)


def is_refusal(error: BaseException) -> bool:
    from isotype.errors import UsageError

    if isinstance(error, ImportError | NotImplementedError | UsageError):
        return True
    return any(text in str(error) for text in REFUSALS)


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = re.sub(r"\S*/tmp\w+/", "", lines[0])  # the temporary folder of the cell
    return f"{type(error).__name__}: {text[:160]} ({failing_line(error)})"


def run_stage(row: dict[str, str], stage: str, action: Callable[[], Any]) -> Any:
    """Runs a stage that a previous failure does not prevent, and notes how it ended."""
    try:
        value = action()
    except FailedCheck as error:
        row[stage] = f"fail: {error}"
    except Requantised as error:
        row[stage] = f"requantised: {error}"
    except Skipped as error:
        row[stage] = f"skipped: {error}"
    except Exception as error:
        is_unsupported = stage == "loads" and is_refusal(error)
        row[stage] = f"{'unsupported' if is_unsupported else 'fail'}: {describe(error)}"
    else:
        row[stage] = "pass"
        return value
    return None


def check_merge(merged: Any, reference: Reference) -> None:
    error = relative_error(model_logits(merged), reference.logits)
    try:
        require_small_error(error, reference.logits_error)
    except FailedCheck as failure:
        if getattr(merged.config, "quantization_config", None) is None:
            raise
        raise Requantised(str(failure)) from None


def run_cell(cell: Cell) -> dict[str, Any]:
    from isotype.model.served import GGUF_FAMILIES

    family, base, trainer = cell
    is_isotype = trainer == "Isotype"
    load = load_isotype if is_isotype else load_peer
    row = dict.fromkeys(STAGES, "-")
    with tempfile.TemporaryDirectory() as temporary:
        folder, out = Path(temporary, "model"), Path(temporary, "merged")
        folder.mkdir()
        files: dict[str, str] = {}
        run_stage(files, "loads", lambda: save_model(family, base, folder))
        if files["loads"] != "pass":
            key = "loads" if files["loads"].startswith("skipped") else REFERENCE
            return row | {key: files["loads"]}
        model = run_stage(row, "loads", lambda: load(folder, base))
        if model is None:
            return row

        def read_values() -> tuple[dict[str, Tensor], set[str]]:
            if base in PUBLISHED:
                state = published_state(folder / "model.safetensors")
            elif base == "GGUF":
                state = gguf_state(family, folder / GGUF_FILE)
            else:
                state = loaded_state(model)
            plain = dense_model(family, state, torch.float32)
            return state, {*linear_names(plain), *expert_names(plain)}

        values = run_stage(row, REFERENCE, read_values)
        if values is None:
            return row
        state, expected_names = values

        @cache
        def reference(parts: tuple[AdapterPart, ...]) -> Reference:
            try:
                return Reference(family, state, parts)
            except Exception as error:
                row[REFERENCE] = f"fail: {describe(error)}"
                raise

        def attach() -> Any:
            model = load(folder, base)
            if trainer == "TRL":
                return train_trl(model, folder)
            return attach_isotype(model) if is_isotype else add_adapter(model)

        def gradient() -> Any:
            adapted = attach()
            if trainer == "PEFT":
                train_peft(adapted)
            elif is_isotype:
                train_isotype(adapted, base)
            exact = reference(adapter_parts(adapted))
            error = relative_error(adapter_gradient(adapted), exact.gradient)
            require_small_error(error, exact.gradient_error)
            missing = expected_names - set(adapted_layers(adapted))
            if missing:
                raise FailedCheck(f"no adapter on {len(missing)} weights, such as {min(missing)}")

        run_stage(row, "gradient", gradient)

        def merge() -> Any:
            adapted = attach()
            exact = reference(adapter_parts(adapted))
            write = merge_isotype if is_isotype else merge_peer
            return write(adapted, family, out), exact

        result = run_stage(row, "merge", merge)
        if row[REFERENCE] != "pass":
            return row | {"gradient": "-", "merge": "-"}
        del row[REFERENCE]
        if result is None:
            return row
        merged, exact = result
        run_stage(row, "merge", lambda: check_merge(merged, exact))
        if is_isotype and row["merge"] == "pass" and family in GGUF_FAMILIES:
            run_stage(row, "export", lambda: check_export(merged, out))
    return row
