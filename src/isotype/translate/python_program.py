"""A Python program's training settings: the arguments of the calls that make them, under the names that the command line has for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..doctor.check.python_calls import Call, Unknown
from .account import Computed, Given

# call -> (what its arguments are called in the tables, positional names); an argument not named here keeps its own name
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_MODEL = {"0": "model_name_or_path", "pretrained_model_name_or_path": "model_name_or_path", "model_name": "model_name_or_path"}
_CALLS: dict[str, dict[str, str]] = {
    "LoraConfig": {**_LORA, "0": "lora_r", "bias": "lora_bias", "inference_mode": "lora_inference_mode", "init_lora_weights": "lora_init"},
    "BitsAndBytesConfig": {},
    "get_peft_model": {
        **_LORA,
        "bias": "lora_bias",
        "use_gradient_checkpointing": "gradient_checkpointing",
        "random_state": "lora_seed",
        "loftq_config": "loftq",
    },
    "load_dataset": {
        "0": "dataset_name",
        "path": "dataset_name",
        "1": "dataset_config",
        "name": "dataset_config",
        "split": "dataset_train_split",
    },
    "SFTTrainer": {"model": "model_name_or_path", "max_seq_length": "max_length"},
    "Trainer": {"model": "model_name_or_path"},
}
_ARGUMENTS = re.compile(r"^(?:Seq2Seq|Unsloth)?TrainingArguments$|^SFTConfig$")
_MODELS = re.compile(
    r"^(?:Auto(?:Liger)?(?:ModelForCausalLM|KernelForCausalLM)|AutoLigerKernelForCausalLM|\w+ForCausalLM|Fast(?:Language)?Model)$"
)
_OBJECTS = {  # handed from one call to another: their own settings are keys, the variables are not
    "model",
    "tokenizer",
    "processing_class",
    "train_dataset",
    "eval_dataset",
    "args",
    "peft_config",
    "data_collator",
    "quantization_config",
    "config",
    "callbacks",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "formatting_func",
    "optimizers",
    "model_init",
}


def from_calls(calls: list[Call]) -> Iterator[Given]:
    """Every argument of every call that sets training up."""
    for call in calls:
        names = _names(call)
        if names is None:
            continue
        for argument, (value, line) in call.arguments.items():
            name = names.get(argument, argument)
            if argument.isdigit() and argument not in names:
                continue
            if name in _OBJECTS or (name == "model_name_or_path" and call.name in ("SFTTrainer", "Trainer") and not isinstance(value, str)):
                continue
            yield Given(name, _plain(value), line, f"{_shown(call)}({argument if not argument.isdigit() else ''})")


def _names(call: Call) -> dict[str, str] | None:
    """How this call's arguments are called here; None for a call that sets nothing."""
    if call.name == "from_pretrained":
        return {**_MODEL, "max_seq_length": "max_length"} if _MODELS.match(call.owner.rpartition(".")[2]) else None
    if call.name == "get_peft_model" and not call.owner.endswith(("FastLanguageModel", "FastModel")):
        return None  # PEFT's own: (model, config)
    if _ARGUMENTS.match(call.name):
        return {"0": "output_dir", "max_seq_length": "max_length"}
    return _CALLS.get(call.name)


def _shown(call: Call) -> str:
    return f"{call.owner.rpartition('.')[2]}.{call.name}" if call.name == "from_pretrained" else call.name


def _plain(value: Any) -> Any:
    """What is not written in the file is Computed; calls that only give a name (`is_bfloat16_supported()`) too."""
    if value is Unknown or (isinstance(value, dict) and "__call__" in value):
        return Computed
    if isinstance(value, list) and any(item is Unknown for item in value):
        return Computed
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not Unknown}
    return value if isinstance(value, (int, float, bool, list, type(None))) else str(value)
