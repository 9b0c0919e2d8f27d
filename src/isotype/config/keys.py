"""Describes the configuration keys: the values that each accepts, their names in other tools, and
settings of other tools that Isotype does not offer. Imports no torch.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError

from ..dtypes import parse
from .schema import RunConfig
from .yaml_text import write_value

_PLURAL_TYPE_NAMES = {"string": "text", "object": "mappings"}


@cache
def key_schemas() -> dict[str, dict[str, Any]]:
    """Returns the JSON Schema of every key of every section, by the key's full name
    (`train.steps`), in order.
    """
    schema = RunConfig.model_json_schema()
    schemas = {}
    for section, field in schema["properties"].items():
        reference = field.get("$ref") or field["allOf"][0]["$ref"]
        for key, key_schema in schema["$defs"][reference.rpartition("/")[2]]["properties"].items():
            schemas[f"{section}.{key}"] = key_schema
    return schemas


@cache
def section_names() -> tuple[str, ...]:
    return tuple(RunConfig.model_fields)


def default_value(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(RunConfig(), section), name)


def describe_accepted_values(key: str) -> str:
    """Describes the values that `key` accepts: `a whole number of at least 1`."""
    return _describe_schema(key_schemas()[key])


def allowed_words(key: str) -> list[str]:
    """Returns the words that `key` accepts; an empty list for a key without a fixed list of words."""
    schema = key_schemas()[key]
    return [
        str(choice) for option in schema.get("anyOf", [schema]) for choice in option.get("enum", [])
    ]


def accepts_type(key: str, json_type: str) -> bool:
    """Returns True if `key` accepts a value of this JSON type (`boolean`, `string`, `object`, ...)."""
    schema = key_schemas()[key]
    return any(option.get("type") == json_type for option in schema.get("anyOf", [schema]))


def accepts_value(key: str, value: Any) -> bool:
    """Returns True if `key` accepts this value."""
    # pydantic would accept true as the number 1
    if isinstance(value, bool) and not accepts_type(key, "boolean"):
        return False
    section, _, name = key.partition(".")
    try:
        RunConfig.model_validate({section: {name: value}})
    except ValidationError:
        return False
    return True


def _describe_schema(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        options = [
            _describe_schema(option) for option in schema["anyOf"] if option.get("type") != "null"
        ]
        return " or ".join(options) + (
            " (or nothing)" if len(options) < len(schema["anyOf"]) else ""
        )
    if "enum" in schema:
        return "one of " + " ".join(str(option) for option in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _describe_number("a whole number" if kind == "integer" else "a number", schema)
    if kind == "array":
        items = schema.get("items", {})
        inner = [option.get("type") for option in items.get("anyOf", [items])]
        if all(kind in _PLURAL_TYPE_NAMES for kind in inner):
            return "a list of " + " or ".join(_PLURAL_TYPE_NAMES[kind] for kind in inner)
        return "a list"
    if "pattern" in schema:
        return f"text such as {schema['examples'][0]!r}"
    values = schema.get("additionalProperties")
    if values == {"type": "string"}:
        return "a mapping of names to text"
    if values == {"anyOf": [{"type": "string"}, {"type": "null"}]}:
        return "a mapping of names to text or null"
    return {"string": "text", "boolean": "true or false", "object": "a mapping"}.get(
        str(kind), "a value"
    )


def _describe_number(noun: str, schema: dict[str, Any]) -> str:
    bounds = [
        f"{phrase} {schema[name]:g}"
        for name, phrase in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if name in schema
    ]
    return f"{noun} {' and '.join(bounds)}" if bounds else noun


# Isotype's key -> the names of the same setting in other tools, in one text
_ALIASES_BY_KEY = {
    "train.learning_rate": "lr",
    "train.epochs": "num_train_epochs num_epochs",
    "train.steps": "max_steps",
    "train.batch_size": "per_device_train_batch_size micro_batch_size train_batch_size batch",
    "train.eval_batch_size": "per_device_eval_batch_size",
    "train.accumulate": "gradient_accumulation_steps",
    "train.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "train.warmup": "warmup_ratio warmup_steps",
    "train.clip": "max_grad_norm",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.epsilon": "adam_epsilon",
    "train.optimizer": "optim",
    "train.aux_loss": "moe_aux_loss_coef router_aux_loss_coef",
    "train.eval_every": "eval_steps",
    "train.patience": "early_stopping_patience",
    "data.max_length": "max_seq_length max_seq_len sequence_len cutoff_len",
    "data.train": "dataset datasets train_file",
    "data.eval": "validation_file",
    "data.packing": "sample_packing",
    "data.eval_split": "val_set_size val_size",
    "adapter.kind": "finetuning_type",
    "adapter.r": "lora_r rank lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target_modules lora_target",
    "adapter.parameters": "target_parameters lora_target_parameters",
    "adapter.rslora": "use_rslora",
    "adapter.dora": "use_dora",
    "adapter.plus": "loraplus_lr_ratio",
    "adapter.start": "init_lora_weights",
    "adapter.text_encoders": "train_text_encoder",
    "adapter.text_encoder_rate": "text_encoder_lr",
    "model.name": "model_name_or_path base_model pretrained_model_name_or_path",
    "model.attention": "attn_implementation flash_attention flash_attn",
    "model.rope_parameters": "rope_scaling rope_theta",
    "train.embedding_noise": "neftune_noise_alpha neftune_alpha noisy_embedding_alpha",
    "run.folder": "output_dir",
    "run.save_every": (
        "save_steps save_interval checkpoint_every checkpoint_interval checkpointing_steps"
    ),
    "run.log_every": "logging_steps",
    "run.keep": "save_total_limit",
    "run.trackers": "report_to",
    "precision.preset": "bf16 fp16 mixed_precision load_in_4bit",
    "precision.base": "torch_dtype dtype",
    "precision.reduce": "reduce_dtype mixed_precision_reduce",
    "parallel.kind": "fsdp fsdp_config fsdp_version",
}
# section -> the key to suggest if a file gives the whole section one value, as `model: org/name`
# does
MAIN_KEYS = {
    "model": "model.name",
    "data": "data.train",
    "adapter": "adapter.kind",
    "precision": "precision.preset",
}
# the name in another tool -> Isotype's key
KEY_ALIASES = {alias: key for key, names in _ALIASES_BY_KEY.items() for alias in names.split()}
# keys whose value is the name of a file, a folder or a model
NAME_KEYS = (
    "model.name",
    "model.tokenizer",
    "model.config",
    "model.vae",
    "data.train",
    "data.eval",
    "images.train",
    "images.eval",
    "images.regularisation",
    "adapter.start_from",
    "distil.teacher",
    "run.folder",
)

# dtype that a user wrote as the precision -> the presets with this dtype
_PRESETS_BY_DTYPE = {
    "bf16": "bf16-lora with an adapter, or bf16-mixed for every weight",
    "fp16": "fp16-mixed",
    "fp32": "fp32",
}
# settings of other tools that switch a precision on or off
_PRECISION_SWITCHES = {
    "bf16": _PRESETS_BY_DTYPE["bf16"],
    "fp16": _PRESETS_BY_DTYPE["fp16"],
    "load_in_4bit": "nf4-lora",
}


def presets_for_dtype(value: Any) -> str | None:
    """Returns the presets that compute in a dtype, for a value that is the name of a dtype but not
    of a preset (`bf16`, `float16`, `no` for fp32). Returns None for any other value.
    """
    text = str(value).lower()
    if text == "no":
        return _PRESETS_BY_DTYPE["fp32"]
    try:
        return _PRESETS_BY_DTYPE.get(parse(text))
    except ValueError:
        return None


def value_to_write(name: str, key: str, value: Any) -> str | None:
    """Returns the value of `key` that means the same as `value` under another tool's name of the
    key, for example nf4-lora for `load_in_4bit: true`. Returns None if no corresponding value is
    known.
    """
    if key == "precision.preset":
        if name in _PRECISION_SWITCHES and isinstance(value, bool):
            if value:
                return _PRECISION_SWITCHES[name]
            return "auto (the default, by the device), or fp32"
        return presets_for_dtype(value)
    if key == "precision.base":
        try:
            value = parse(str(value))
        except ValueError:
            return None
    value = VALUE_ALIASES.get(key, {}).get(str(value).lower(), value)
    if isinstance(value, str | int | float) and accepts_value(key, value):
        return write_value(value)
    return None


_OPTION_ALIASES = {
    "4bit": "precision.preset=nf4-lora", "load_in_4bit": "precision.preset=nf4-lora", "qlora": "--preset qlora", "dry_run": "isotype plan",
}  # fmt: skip


def setting_for_option(option: str) -> str | None:
    """Returns what to write in place of an unknown option (`train.learning_rate=VALUE` for `--lr`),
    or a message that Isotype does not offer it. Returns None if nothing similar is known.
    """
    name = option.lstrip("-").replace("-", "_")
    if name in NOT_OFFERED:
        return NOT_OFFERED[name]
    if name in _OPTION_ALIASES:
        return _OPTION_ALIASES[name]
    # a name that several sections have means the first section's key; keys of `diffusion` and
    # `precision` come last
    ordered_keys = sorted(
        key_schemas(), key=lambda key: key.startswith(("diffusion.", "precision."))
    )
    spellings = {
        spelling: key
        for key in reversed(ordered_keys)
        for spelling in (key.partition(".")[2], key.replace(".", "_", 1), key)
    } | KEY_ALIASES
    matches = get_close_matches(name, spellings, n=1, cutoff=0.8)
    return f"{spellings[matches[0]]}=VALUE" if matches else None


# key -> other tools' names of its values
VALUE_ALIASES = {
    "parallel.kind": {
        **dict.fromkeys(("fsdp", "fsdp1", "fsdp2", "full_shard", "zero3"), "shard"),
        **dict.fromkeys(("hsdp", "hybrid_shard"), "hybrid"),
        **dict.fromkeys(("ddp", "dp", "data_parallel", "no_shard"), "replicate"),
    }
}

_OBJECTIVE_HINT = (
    "train.objective names what is learnt, and the section preference has its settings (beta,"
    " label_smoothing, ...)"
)
_REINFORCEMENT_LEARNING_HINT = (
    "this way of learning preferences is not offered yet; TRL's trainers do it"
)
_SHARDED_HINT = (
    "sharding by DeepSpeed is not offered; parallel.kind: shard shares weights, gradients and"
    " states between processes"
)
_TENSOR_HINT = (
    "tensor parallelism is not offered yet; parallel.kind: shard shares the weights, layer by layer"
)
_CONTEXT_HINT = (
    "context parallelism is not offered yet; data.max_length and train.gradient_checkpointing:"
    " layers bound a row's memory"
)
_PIPELINE_HINT = (
    "pipeline parallelism is not offered yet; parallel.kind: shard shares the weights, layer by"
    " layer"
)
_CLASSES_HINT = (
    "classes of a text are not offered: train.objective: reward trains one score, and"
    " attach(Trainer(...)) adds the checks to a trainer of classes"
)
_EMBEDDINGS_HINT = (
    "embedding models are not offered: a trainer for them, such as sentence-transformers, trains"
    " one"
)
_PARAM_DTYPE_HINT = (
    "not offered: it rounds adapters, norms and their gradients; precision.compute is the dtype of"
    " products, precision.reduce that of sums"
)
# a section, key or value of another tool -> the message that says why it is not offered
NOT_OFFERED = {
    **dict.fromkeys(
        ("dpo", "orpo", "simpo", "cpo", "ipo", "kto", "reward", "reward_model"), _OBJECTIVE_HINT
    ),
    **dict.fromkeys(("grpo", "ppo", "rlhf"), _REINFORCEMENT_LEARNING_HINT),
    **dict.fromkeys(
        (
            "classification",
            "text_classification",
            "sequence_classification",
            "token_classification",
            "seq_cls",
            "token_cls",
            "num_labels",
            "id2label",
            "problem_type",
        ),
        _CLASSES_HINT,
    ),
    **dict.fromkeys(
        (
            "embedding",
            "embeddings",
            "feature_extraction",
            "sentence_transformers",
            "contrastive",
            "reranker",
            "reranking",
        ),
        _EMBEDDINGS_HINT,
    ),
    **dict.fromkeys(
        ("deepspeed", "deepspeed_config", "zero_optimization", "zero_stage"), _SHARDED_HINT
    ),
    **dict.fromkeys(
        (
            "tensor",
            "tensor_parallel",
            "tensor_parallel_size",
            "tensor_parallel_degree",
            "tp",
            "tp_size",
        ),
        _TENSOR_HINT,
    ),
    **dict.fromkeys(
        (
            "context",
            "context_parallel",
            "context_parallel_size",
            "context_parallel_degree",
            "cp",
            "cp_size",
        ),
        _CONTEXT_HINT,
    ),
    **dict.fromkeys(
        ("sequence_parallel", "sequence_parallel_size", "sequence_parallel_degree", "sp_size"),
        _CONTEXT_HINT,
    ),
    **dict.fromkeys(
        (
            "pipeline",
            "pipeline_parallel",
            "pipeline_parallel_size",
            "pipeline_parallel_degree",
            "pp",
            "pp_size",
        ),
        _PIPELINE_HINT,
    ),
    **dict.fromkeys(
        ("param_dtype", "mixed_precision_param", "mixed_precision_policy"), _PARAM_DTYPE_HINT
    ),
}
