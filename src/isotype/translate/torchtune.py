"""Translates a recipe of torchtune to an Isotype configuration. The recipe is a YAML file with
components, or a command `tune run RECIPE key=value`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from . import transforms
from .hugging_face import drop_preference_conflicts
from .source import Source
from .transforms import ConfigDraft, SourceKey

_DATASETS = {  # component -> (its hub dataset if `source` is not set, format)
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt"),
    "chat_dataset": (None, "auto"),
    "instruct_dataset": (None, "auto"),
    "text_completion_dataset": (None, "text"),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "text"),
    "preference_dataset": (None, "auto"),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", "auto"),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", "auto"),
}
_STACK_EXCHANGE = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
_DPO_LOSS = "torchtune.rlhf.loss.DPOLoss"
_MODULE_NAMES = {"output_proj": "o_proj"}  # the tool's name of a module -> the name in transformers
_MLP_MODULES = ["gate_proj", "up_proj", "down_proj"]


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    for source_key in source.keys:
        value = str(source_key.value)
        if (
            source_key.name.endswith("_component_")
            and value != _DPO_LOSS
            and re.search(r"RSO|GRPO|PPO|torchtune\.rlhf", value)
        ):
            location = (
                f"line {source_key.line}: {source_key.name_in_file or source_key.name}: {value}"
            )
            return f"{location} is not offered: of these methods, DPOLoss is"
        if source_key.name.startswith(("teacher_model", "teacher_checkpointer", "kd_")):
            return f"line {source_key.line}: {source_key.name}: distillation is not offered"
        if source_key.name.startswith("quantizer") or "qat" in source.method:
            return (
                f"line {source_key.line}: {source_key.name}: quantisation-aware training and quantising a"
                " finished model are not offered"
            )
        is_vision = re.search(r"vision|multimodal|\.clip\.", value) and source_key.name.endswith(
            "_component_"
        )
        if is_vision or source_key.name in (
            "tokenizer.max_num_tiles",
            "model.encoder_trainable",
            "model.fusion_trainable",
        ):
            return f"line {source_key.line}: {source_key.name}: {value}: models with pictures are not offered"
    if re.search(r"dpo|ppo|grpo", source.method) and not source.find_key("loss"):
        return (
            f"tune {source.method.split(' --')[0]}: the method's settings are in its configuration:"
            " give that YAML file"
        )
    if source.find_key("tasks", "prompt", "max_new_tokens") and not source.find_key("optimizer"):
        return (
            "evaluation or generation: isotype eval and isotype sample take a run folder, a model"
            " or an adapter"
        )
    return None


def _convert_model(draft: ConfigDraft, source_key: SourceKey) -> None:
    component = str(source_key.value).rpartition(".")[2]
    if component.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        is_dora = component.removeprefix("q").startswith("dora_")
        draft.set(source_key, "adapter.kind", "lora", "the model itself is model.name")
        if is_dora:
            draft.settings["adapter.dora"] = True
    else:
        draft.set(
            source_key,
            "adapter.kind",
            "none",
            "every weight is trained; the model itself is model.name",
        )


def _convert_modules(draft: ConfigDraft, source_key: SourceKey) -> None:
    names = [_MODULE_NAMES.get(str(name), str(name)) for name in source_key.value or []]
    if transforms.is_enabled(draft.source_values.get("model.apply_lora_to_mlp", False)):
        names += _MLP_MODULES
    draft.set(
        source_key,
        "adapter.targets",
        names,
        "torchtune's names as Hugging Face has them" if "o_proj" in names else "",
    )


def _convert_dataset(draft: ConfigDraft, source_key: SourceKey) -> None:
    section = source_key.name.partition(".")[0]  # dataset or dataset_val
    target = "data.train" if section == "dataset" else "data.eval"
    component = str(source_key.value).rpartition(".")[2]
    defaults = _DATASETS.get(component)
    if defaults is None:
        draft.report_not_offered(source_key, "data.train: a file, a folder or hf:NAME")
        return
    dataset_name = draft.source_values.get(f"{section}.source") or defaults[0]
    files = draft.source_values.get(f"{section}.data_files")
    if files:
        entry: dict[str, Any] = {"name": str(files[0] if isinstance(files, list) else files)}
    elif dataset_name:
        entry = {"name": f"hf:{dataset_name}"}
    else:
        draft.report_not_offered(
            source_key, "dataset.source is missing: data.train names a file or hf:NAME"
        )
        return
    if defaults[1] != "auto":
        entry["format"] = defaults[1]
    if not files and draft.source_values.get(f"{section}.split") not in (None, "train"):
        entry["split"] = str(draft.source_values[f"{section}.split"])
    if is_paired := component == "stack_exchange_paired_dataset":
        entry["columns"] = draft.source_values.get(f"{section}.column_map") or _STACK_EXCHANGE
    note = ""
    if is_paired and not files:
        note = "torchtune reads only the dataset's folder data/rl"
    draft.set(source_key, target, [entry], note)


def _convert_betas(draft: ConfigDraft, source_key: SourceKey) -> None:
    beta1, beta2 = (float(value) for value in source_key.value)
    draft.settings["train.beta2"] = beta2
    draft.sources["train.beta2"] = source_key
    draft.set(source_key, "train.beta1", beta1, f"and train.beta2: {beta2}")


def _convert_checkpointing(draft: ConfigDraft, source_key: SourceKey) -> None:
    if not transforms.is_enabled(source_key.value):
        value = "none"
    elif transforms.is_enabled(draft.source_values.get("enable_activation_offloading", False)):
        value = "layers+offload"
    else:
        value = "layers"
    draft.set(source_key, "train.gradient_checkpointing", value)


def _convert_template(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates a prompt template that is given as the path of a class in torchtune. A template
    that is given as a mapping with texts for each role cannot be translated.
    """
    name = str(source_key.value).rpartition(".")[2].lower()
    is_class_path = (
        isinstance(source_key.value, str) and source_key.value not in transforms.OFF_VALUES
    )
    if is_class_path:
        source_key = replace(source_key, value=name)
    transforms.convert_template(draft, source_key)


def _convert_logger(draft: ConfigDraft, source_key: SourceKey) -> None:
    component = str(source_key.value).lower()
    transforms.convert_trackers(
        draft,
        replace(
            source_key,
            value=next((name for name in ("wandb", "tensorboard") if name in component), "none"),
        ),
    )


# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "part of adapter.targets": "model.apply_lora_to_mlp",
    "run.folder": "checkpointer.output_dir",
    "the model's own tokenizer; another one: model.tokenizer": "tokenizer.path",
    "part of data.train": "dataset.source dataset.data_files dataset.split",
    "part of data.eval": "dataset_val",
    "cross-entropy; the head and its loss are computed in chunks (model.optimize)": "loss",
    "part of train.gradient_checkpointing": "enable_activation_offloading",
    "everything lies in run.folder": "metric_logger.log_dir",
    "not a part of the training; isotype doctor trace and benchmarks/ look at programs": "profiler",
    transforms.IRRELEVANT_NOTE: (
        "checkpointer._component_ checkpointer.checkpoint_files checkpointer.model_type"
        " ref_checkpointer tokenizer._component_ tokenizer.merges_file tokenizer.vocab_path"
        " tokenizer.merges_path optimizer.fused optimizer.foreach low_cpu_ram"
        " save_adapter_weights_only log_peak_memory_stats recipe name log_level"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "adapter.targets: [..., lm_head] where the model's head is not tied": (
        "model.apply_lora_to_output"
    ),
    "adapter.start_from: a PEFT folder; isotype train --resume goes on with a run": (
        "checkpointer.adapter_checkpoint"
    ),
    "isotype train --resume RUN": "checkpointer.recipe_checkpoint resume_from_checkpoint",
    "write the system message into the rows": "dataset.new_system_prompt",
    "train.steps is the number of steps of the whole run": "max_steps_per_epoch",
    "one step after backward; adamw8bit or an adapter saves memory": "optimizer_in_bwd",
    "train without it: the fused ops are used by default (model.optimize)": "compile",
    "train.checkpointed_layers: every 2, a number or a list": "ac_mode ac_option",
    transforms.NO_GPU_COUNT_NOTE: (
        "tensor_parallel_plan tensor_parallel_dim fsdp data_parallel_shard_dim"
        " data_parallel_replicate_dim memory_efficient_fsdp_wrap custom_sharded_layers"
    ),
    "train.gradient_checkpointing: layers+offload, an adapter, or nf4-lora": "fsdp_cpu_offload",
}
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        data=(
            "columns=dataset.column_map max_length=tokenizer.max_seq_len"
            " max_length=dataset.max_seq_len packing=dataset.packed shuffle"
        ),
        adapter=(
            "r=model.lora_rank alpha=model.lora_alpha dropout=model.lora_dropout"
            " dora=model.use_dora"
        ),
        preference="beta=loss.beta label_smoothing=loss.label_smoothing",
        train=(
            "epochs batch_size accumulate=gradient_accumulation_steps learning_rate=optimizer.lr"
            " warmup=lr_scheduler.num_warmup_steps weight_decay=optimizer.weight_decay"
            " epsilon=optimizer.eps clip=clip_grad_norm eval_every=run_val_every_n_steps"
            " eval_batch_size=batch_size_val"
        ),
        run=(
            "folder=output_dir save_every=save_every_n_steps"
            " keep=checkpointer.keep_last_n_checkpoints keep=keep_last_n_checkpoints"
            " log_every=log_every_n_steps"
        ),
    ),
    "model._component_": _convert_model,
    "model.lora_attn_modules": _convert_modules,
    "model.quantize_base": transforms.ConfigDraft.add_precision_key,
    "checkpointer.checkpoint_dir": transforms.convert_to(
        "model.name",
        str,
        "a folder in Hugging Face's format is needed (config.json, safetensors, tokenizer)",
    ),
    # data
    "tokenizer.prompt_template": _convert_template,
    "dataset._component_": _convert_dataset,
    "dataset_val._component_": transforms.choose_handler(
        lambda draft, _: draft.lowercase_value("run_val_every_n_steps").isdigit(),
        _convert_dataset,
        transforms.report_no_effect("no evaluation: run_val_every_n_steps is not set"),
    ),
    "dataset.train_on_input": transforms.convert_switch("data.loss_on", "all", "assistant"),
    "dataset.conversation_column": transforms.convert_to(
        "data.columns", lambda value: {"messages": str(value)}
    ),
    "dataset.conversation_style": transforms.convert_to(
        "data.format", lambda value: "sharegpt" if value == "sharegpt" else "messages"
    ),
    # preferences
    "loss._component_": transforms.choose_handler(
        lambda _, source_key: source_key.value == _DPO_LOSS,
        transforms.set_constant("train.objective", "dpo", transforms.REFERENCE_NOTE),
        transforms.report_no_effect("the loss is cross-entropy"),
    ),
    "ref_checkpointer.checkpoint_dir": transforms.choose_handler(
        lambda draft, source_key: (
            source_key.value == draft.source_values.get("checkpointer.checkpoint_dir")
        ),
        transforms.report_no_effect(transforms.REFERENCE_NOTE),
        transforms.report_not_offered(f"another model; {transforms.REFERENCE_NOTE}"),
    ),
    # steps
    "seed": transforms.convert_to("train.seed", lambda value: int(transforms.parse_number(value))),
    "optimizer._component_": transforms.convert_optimizer,
    "optimizer.betas": _convert_betas,
    "lr_scheduler._component_": transforms.convert_schedule,
    "dtype": transforms.ConfigDraft.add_precision_key,
    "enable_activation_checkpointing": _convert_checkpointing,
    # machine, saving, logging
    "device": transforms.convert_choice(
        "model.device", {"cuda": "cuda", "cpu": "cpu"}, "model.device is auto, cuda or cpu"
    ),
    "metric_logger._component_": _convert_logger,
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds torchtune's defaults to the new configuration where they differ from the defaults of
    Isotype.
    """
    recipe = f"{source.method} {draft.source_values.get('recipe', '')}"
    draft.settings.setdefault("adapter.kind", "lora" if "lora" in recipe else "none")
    draft.set_adapter_defaults("lora", 8, 16.0)
    if "train.schedule" not in draft.settings:
        draft.set_defaults({"train.schedule": "constant", "train.warmup": 0})
    draft.set_defaults({"train.clip": 0.0, "data.eval_split": 0, "train.weight_decay": 0.01})
    drop_preference_conflicts(draft)
