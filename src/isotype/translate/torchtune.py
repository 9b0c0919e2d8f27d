# ruff: noqa: E501  a table: one row, one key
"""torchtune's recipes: YAML with components, or `tune run RECIPE key=value`."""

from __future__ import annotations

import re
from typing import Any

from .account import Draft, Given, Handler, no_effect, not_offered, number, precision, to, to_count, to_number, to_truth, truth
from .source import Source
from .words import dropout, optimizer, schedule, trackers

_DATASETS = {  # component -> (hub dataset when `source` is not given, format)
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt"),
    "chat_dataset": (None, "auto"),
    "instruct_dataset": (None, "auto"),
    "text_completion_dataset": (None, "text"),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "text"),
}
_MODULES = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    for given in source.keys:
        word = str(given.value)
        if re.search(r"DPO|RSO|GRPO|PPO|torchtune\.rlhf|preference", word):
            return f"line {given.line}: {given.written or given.name}: {word}: preference methods are not offered, only training on given answers (SFT)"
        if given.name.startswith(("teacher_model", "teacher_checkpointer", "kd_")):
            return f"line {given.line}: {given.name}: distillation is not offered"
        if given.name.startswith("quantizer") or "qat" in source.method:
            return f"line {given.line}: {given.name}: quantisation-aware training and quantising a finished model are not offered"
        pictures = re.search(r"vision|multimodal|\.clip\.", word) and given.name.endswith("_component_")
        if pictures or given.name in ("tokenizer.max_num_tiles", "model.encoder_trainable", "model.fusion_trainable"):
            return f"line {given.line}: {given.name}: {word}: models with pictures are not offered"
    if source.has("tasks", "prompt", "max_new_tokens") and not source.has("optimizer"):
        return "evaluation or generation: isotype eval and isotype sample take a run folder, a model or an adapter"
    return None


def _model(draft: Draft, given: Given) -> None:
    component = str(given.value).rpartition(".")[2]
    if component.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        note = {"d": "DoRA is not offered; plain LoRA is used"}.get(component.removeprefix("q")[0], "")
        draft.set(given, "adapter.kind", "lora", note or "the model itself is model.name")
    else:
        draft.set(given, "adapter.kind", "none", "every weight is trained; the model itself is model.name")


def _checkpoint(draft: Draft, given: Given) -> None:
    draft.set(given, "model.name", str(given.value), "a folder in Hugging Face's format is needed (config.json, safetensors, tokenizer)")


def _modules(draft: Draft, given: Given) -> None:
    names = [_MODULES.get(str(name), str(name)) for name in given.value or []]
    if truth(draft.keys.get("model.apply_lora_to_mlp", False)):
        names += _MLP
    draft.set(given, "adapter.targets", names, "torchtune's names as Hugging Face has them" if "o_proj" in names else "")


def _mlp(draft: Draft, given: Given) -> None:
    draft.no_effect(given, "part of adapter.targets")


def _dataset(draft: Draft, given: Given) -> None:
    at = given.name.partition(".")[0]  # dataset or dataset_val
    target = "data.train" if at == "dataset" else "data.eval"
    component = str(given.value).rpartition(".")[2]
    known = _DATASETS.get(component)
    if known is None:
        draft.not_offered(given, "data.train: a file, a folder or hf:NAME")
        return
    source, files = draft.keys.get(f"{at}.source") or known[0], draft.keys.get(f"{at}.data_files")
    if files:
        entry: dict[str, Any] = {"name": str(files[0] if isinstance(files, list) else files)}
    elif source:
        entry = {"name": f"hf:{source}"}
    else:
        draft.not_offered(given, "dataset.source is missing: data.train names a file or hf:NAME")
        return
    if known[1] != "auto":
        entry["format"] = known[1]
    if not files and draft.keys.get(f"{at}.split") not in (None, "train"):
        entry["split"] = str(draft.keys[f"{at}.split"])
    draft.set(given, target, [entry])


def _counts(draft: Draft) -> bool:
    return str(draft.keys.get("run_val_every_n_steps")).isdigit()


def _warmup(draft: Draft, given: Given) -> None:
    draft.set(given, "train.warmup", number(given.value or 0))


def _betas(draft: Draft, given: Given) -> None:
    first, second = (float(value) for value in given.value)
    draft.settings["train.beta2"] = second
    draft.sources["train.beta2"] = given
    draft.set(given, "train.beta1", first, f"and train.beta2: {second}")


def _compile(draft: Draft, given: Given) -> None:
    if truth(given.value):
        draft.not_offered(given, "train without it: the fused ops are used by default (model.optimize)")
    else:
        draft.no_effect(given, "switched off")


def _checkpointing(draft: Draft, given: Given) -> None:
    offload = truth(draft.keys.get("enable_activation_offloading", False))
    draft.set(given, "train.gradient_checkpointing", ("layers+offload" if offload else "layers") if truth(given.value) else "none")


def _device(draft: Draft, given: Given) -> None:
    word = str(given.value)
    if word in ("cuda", "cpu"):
        draft.set(given, "model.device", word)
    else:
        draft.not_offered(given, "model.device is auto, cuda or cpu")


def _logger(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    trackers(
        draft,
        Given(given.name, "wandb" if "wandb" in word else "tensorboard" if "tensorboard" in word else "none", given.line, given.written),
    )


_PROFILER = no_effect("not a part of the training; isotype doctor trace and benchmarks/ look at programs")
KEYS: dict[str, Handler] = {
    "model._component_": _model,
    "model.lora_attn_modules": _modules,
    "model.apply_lora_to_mlp": _mlp,
    "model.apply_lora_to_output": not_offered("adapter.targets: [..., lm_head] where the model's head is not tied"),
    "model.lora_rank": to_count("adapter.r"),
    "model.lora_alpha": to_number("adapter.alpha"),
    "model.lora_dropout": dropout,
    "model.quantize_base": precision,
    "model.use_dora": not_offered("DoRA is not offered; plain LoRA is used"),
    "model.max_seq_len": no_effect("tokenizer.max_seq_len or data.max_length"),
    "checkpointer._component_": no_effect("safetensors in Hugging Face's format"),
    "checkpointer.checkpoint_dir": _checkpoint,
    "checkpointer.checkpoint_files": no_effect("the folder's index names them"),
    "checkpointer.output_dir": no_effect("run.folder"),
    "checkpointer.model_type": no_effect("the model's config.json says it"),
    "checkpointer.adapter_checkpoint": not_offered("adapter.start_from: a PEFT folder; isotype train --resume goes on with a run"),
    "checkpointer.recipe_checkpoint": not_offered("isotype train --resume RUN"),
    "tokenizer._component_": no_effect("the model's own tokenizer"),
    "tokenizer.path": no_effect("the model's own tokenizer; another one: model.tokenizer"),
    "tokenizer.merges_file": no_effect("the model's own tokenizer"),
    "tokenizer.max_seq_len": to_count("data.max_length"),
    "tokenizer.prompt_template": not_offered("data.chat_template: a Jinja file"),
    "dataset._component_": _dataset,
    "dataset.source": no_effect("part of data.train"),
    "dataset.data_files": no_effect("part of data.train"),
    "dataset.split": no_effect("part of data.train"),
    "dataset_val._component_": lambda draft, given: _dataset(draft, given) if _counts(draft) else draft.no_effect(given, "no evaluation: run_val_every_n_steps is not set"),
    "dataset_val": no_effect("part of data.eval"),
    "run_val_every_n_steps": to_count("train.eval_every"),
    "batch_size_val": to_number("train.eval_batch_size"),
    "low_cpu_ram": no_effect("weights are always loaded that way"),
    **dict.fromkeys(("tensor_parallel_plan", "fsdp", "data_parallel_shard_dim", "data_parallel_replicate_dim", "memory_efficient_fsdp_wrap"),
                    not_offered("not set in the file: it says what a step is, not on how many GPUs")),
    **dict.fromkeys(("tokenizer.vocab_path", "tokenizer.merges_path", "tokenizer.special_tokens_path"), no_effect("the model's own tokenizer")),
    **dict.fromkeys(("ac_mode", "ac_option"), not_offered("train.checkpointed_layers: every 2, a number or a list")),
    "checkpointer.keep_last_n_checkpoints": to_count("run.keep"),
    "name": no_effect("nothing here depends on it"),
    "dataset.packed": to_truth("data.packing"),
    "dataset.train_on_input": lambda draft, given: draft.set(given, "data.loss_on", "all" if truth(given.value) else "assistant"),
    "dataset.column_map": to("data.columns"),
    "dataset.column": no_effect("data.columns"),
    "dataset.conversation_column": lambda draft, given: draft.set(given, "data.columns", {"messages": str(given.value)}),
    "dataset.conversation_style": lambda draft, given: draft.set(given, "data.format", "sharegpt" if given.value == "sharegpt" else "messages"),
    "dataset.new_system_prompt": not_offered("write the system message into the rows"),
    "dataset.max_seq_len": to_count("data.max_length"),
    "seed": lambda draft, given: draft.no_effect(given, "train.seed: 0") if given.value is None else draft.set(given, "train.seed", int(number(given.value))),
    "shuffle": to_truth("data.shuffle"),
    "batch_size": to_number("train.batch_size"),
    "epochs": to_number("train.epochs"),
    "max_steps_per_epoch": not_offered("train.steps is the number of steps of the whole run"),
    "gradient_accumulation_steps": to_number("train.accumulate"),
    "optimizer._component_": optimizer,
    "optimizer.lr": to_number("train.learning_rate"),
    "optimizer.fused": no_effect("the step is fused where PyTorch can"),
    "optimizer.foreach": no_effect("the step is fused where PyTorch can"),
    "optimizer.weight_decay": to_number("train.weight_decay"),
    "optimizer.betas": _betas,
    "optimizer.eps": to_number("train.epsilon"),
    "optimizer_in_bwd": not_offered("one step after backward; adamw8bit or an adapter saves memory"),
    "lr_scheduler._component_": schedule,
    "lr_scheduler.num_warmup_steps": _warmup,
    "loss._component_": no_effect("cross-entropy; the head and its loss are computed in chunks (model.optimize)"),
    "loss": no_effect("cross-entropy; the head and its loss are computed in chunks (model.optimize)"),
    "clip_grad_norm": to_number("train.clip"),
    "compile": _compile,
    "output_dir": to("run.folder"),
    "device": _device,
    "dtype": precision,
    "enable_activation_checkpointing": _checkpointing,
    "enable_activation_offloading": no_effect("part of train.gradient_checkpointing"),
    "custom_sharded_layers": not_offered("not set in the file: it says what a step is, not on how many GPUs"),
    "fsdp_cpu_offload": not_offered("train.gradient_checkpointing: layers+offload, an adapter, or nf4-lora"),
    "tensor_parallel_dim": not_offered("not set in the file: it says what a step is, not on how many GPUs"),
    "metric_logger._component_": _logger,
    "metric_logger.log_dir": no_effect("everything lies in run.folder"),
    "metric_logger.project": no_effect("WANDB_PROJECT in the environment"),
    "log_every_n_steps": to_count("run.log_every"),
    "log_peak_memory_stats": no_effect("memory is always shown"),
    "log_level": no_effect("nothing here depends on it"),
    "resume_from_checkpoint": not_offered("isotype train --resume RUN"),
    "save_adapter_weights_only": no_effect("an adapter is a plain PEFT folder"),
    "keep_last_n_checkpoints": to_count("run.keep"),
    "save_every_n_steps": to_count("run.save_every"),
    "profiler": _PROFILER,
    "recipe": no_effect("the model's component says what is trained"),
}  # fmt: skip


def finish(draft: Draft, source: Source) -> None:
    """torchtune's defaults where they are not Isotype's."""
    if "adapter.kind" not in draft.settings:
        draft.settings["adapter.kind"] = "lora" if "lora" in source.method or "lora" in str(draft.keys.get("recipe", "")) else "none"
    if draft.settings["adapter.kind"] == "none":
        for key in [key for key in draft.settings if key.startswith("adapter.") and key != "adapter.kind"]:
            del draft.settings[key]
    else:
        draft.default("adapter.r", 8)
        draft.default("adapter.alpha", 16.0)
    if "train.schedule" not in draft.settings:
        draft.default("train.schedule", "constant")
        draft.default("train.warmup", 0)
    draft.default("train.clip", 0.0)
    draft.default("data.eval_split", 0)
    draft.default("train.weight_decay", 0.01)
