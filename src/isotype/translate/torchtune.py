"""torchtune's recipes: YAML with components, or `tune run RECIPE key=value`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from . import transforms as t
from .hugging_face import leave_out
from .source import Source
from .transforms import Draft, Given

_DATASETS = {  # component -> (hub dataset when `source` is not given, format)
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
_DPO = "torchtune.rlhf.loss.DPOLoss"
_MODULES = {"output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    for given in source.keys:
        word = str(given.value)
        if (
            given.name.endswith("_component_")
            and word != _DPO
            and re.search(r"RSO|GRPO|PPO|torchtune\.rlhf", word)
        ):
            where = f"line {given.line}: {given.written or given.name}: {word}"
            return f"{where} is not offered: of these methods, DPOLoss is"
        if given.name.startswith(("teacher_model", "teacher_checkpointer", "kd_")):
            return f"line {given.line}: {given.name}: distillation is not offered"
        if given.name.startswith("quantizer") or "qat" in source.method:
            return (
                f"line {given.line}: {given.name}: quantisation-aware training and quantising a"
                " finished model are not offered"
            )
        pictures = re.search(r"vision|multimodal|\.clip\.", word) and given.name.endswith(
            "_component_"
        )
        if pictures or given.name in (
            "tokenizer.max_num_tiles",
            "model.encoder_trainable",
            "model.fusion_trainable",
        ):
            return f"line {given.line}: {given.name}: {word}: models with pictures are not offered"
    if re.search(r"dpo|ppo|grpo", source.method) and not source.has("loss"):
        return (
            f"tune {source.method.split(' --')[0]}: the method's settings are in its configuration:"
            " give that YAML file"
        )
    if source.has("tasks", "prompt", "max_new_tokens") and not source.has("optimizer"):
        return (
            "evaluation or generation: isotype eval and isotype sample take a run folder, a model"
            " or an adapter"
        )
    return None


def _model(draft: Draft, given: Given) -> None:
    component = str(given.value).rpartition(".")[2]
    if component.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        dora = component.removeprefix("q").startswith("dora_")
        draft.set(given, "adapter.kind", "lora", "the model itself is model.name")
        if dora:
            draft.settings["adapter.dora"] = True
    else:
        draft.set(
            given, "adapter.kind", "none", "every weight is trained; the model itself is model.name"
        )


def _modules(draft: Draft, given: Given) -> None:
    names = [_MODULES.get(str(name), str(name)) for name in given.value or []]
    if t.is_on(draft.keys.get("model.apply_lora_to_mlp", False)):
        names += _MLP
    draft.set(
        given,
        "adapter.targets",
        names,
        "torchtune's names as Hugging Face has them" if "o_proj" in names else "",
    )


def _dataset(draft: Draft, given: Given) -> None:
    at = given.name.partition(".")[0]  # dataset or dataset_val
    target = "data.train" if at == "dataset" else "data.eval"
    component = str(given.value).rpartition(".")[2]
    known = _DATASETS.get(component)
    if known is None:
        draft.not_offered(given, "data.train: a file, a folder or hf:NAME")
        return
    source = draft.keys.get(f"{at}.source") or known[0]
    files = draft.keys.get(f"{at}.data_files")
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
    if paired := component == "stack_exchange_paired_dataset":
        entry["columns"] = draft.keys.get(f"{at}.column_map") or _STACK_EXCHANGE
    draft.set(
        given,
        target,
        [entry],
        "of which torchtune reads the folder data/rl alone" if paired and not files else "",
    )


def _betas(draft: Draft, given: Given) -> None:
    first, second = (float(value) for value in given.value)
    draft.settings["train.beta2"] = second
    draft.sources["train.beta2"] = given
    draft.set(given, "train.beta1", first, f"and train.beta2: {second}")


def _checkpointing(draft: Draft, given: Given) -> None:
    offload = t.is_on(draft.keys.get("enable_activation_offloading", False))
    draft.set(
        given,
        "train.gradient_checkpointing",
        ("layers+offload" if offload else "layers") if t.is_on(given.value) else "none",
    )


def _template(draft: Draft, given: Given) -> None:
    """A class of torchtune by its path; one with the words of each role is not offered."""
    name = str(given.value).rpartition(".")[2].lower()
    is_named = isinstance(given.value, str) and given.value not in t.OFF
    t.template(draft, replace(given, value=name) if is_named else given)


def _logger(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    t.trackers(
        draft,
        replace(
            given, value=next((name for name in ("wandb", "tensorboard") if name in word), "none")
        ),
    )


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
    t.IRRELEVANT: (
        "checkpointer._component_ checkpointer.checkpoint_files checkpointer.model_type"
        " ref_checkpointer tokenizer._component_ tokenizer.merges_file tokenizer.vocab_path"
        " tokenizer.merges_path optimizer.fused optimizer.foreach low_cpu_ram"
        " save_adapter_weights_only log_peak_memory_stats recipe name log_level"
    ),
}
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
    t.GPUS: (
        "tensor_parallel_plan tensor_parallel_dim fsdp data_parallel_shard_dim"
        " data_parallel_replicate_dim memory_efficient_fsdp_wrap custom_sharded_layers"
    ),
    "train.gradient_checkpointing: layers+offload, an adapter, or nf4-lora": "fsdp_cpu_offload",
}
KEYS: dict[str, t.Handler] = {
    **t.table(t.no_effect, _NO_EFFECT),
    **t.table(t.not_offered, _NOT_OFFERED),
    **t.carried(
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
    "model._component_": _model,
    "model.lora_attn_modules": _modules,
    "model.quantize_base": t.Draft.precision,
    "checkpointer.checkpoint_dir": t.to(
        "model.name",
        str,
        "a folder in Hugging Face's format is needed (config.json, safetensors, tokenizer)",
    ),
    # data
    "tokenizer.prompt_template": _template,
    "dataset._component_": _dataset,
    "dataset_val._component_": t.when(
        lambda draft, _: draft.said("run_val_every_n_steps").isdigit(),
        _dataset,
        t.no_effect("no evaluation: run_val_every_n_steps is not set"),
    ),
    "dataset.train_on_input": t.either("data.loss_on", "all", "assistant"),
    "dataset.conversation_column": t.to("data.columns", lambda value: {"messages": str(value)}),
    "dataset.conversation_style": t.to(
        "data.format", lambda value: "sharegpt" if value == "sharegpt" else "messages"
    ),
    # preferences
    "loss._component_": t.when(
        lambda _, given: given.value == _DPO,
        t.always("train.objective", "dpo", t.REFERENCE),
        t.no_effect("the loss is cross-entropy"),
    ),
    "ref_checkpointer.checkpoint_dir": t.when(
        lambda draft, given: given.value == draft.keys.get("checkpointer.checkpoint_dir"),
        t.no_effect(t.REFERENCE),
        t.not_offered(f"another model; {t.REFERENCE}"),
    ),
    # steps
    "seed": t.to("train.seed", lambda value: int(t.as_number(value))),
    "optimizer._component_": t.optimizer,
    "optimizer.betas": _betas,
    "lr_scheduler._component_": t.schedule,
    "dtype": t.Draft.precision,
    "enable_activation_checkpointing": _checkpointing,
    # machine, saving, logging
    "device": t.word(
        "model.device", {"cuda": "cuda", "cpu": "cpu"}, "model.device is auto, cuda or cpu"
    ),
    "metric_logger._component_": _logger,
}


def finish(draft: Draft, source: Source) -> None:
    """torchtune's defaults where they are not Isotype's."""
    named = f"{source.method} {draft.keys.get('recipe', '')}"
    draft.settings.setdefault("adapter.kind", "lora" if "lora" in named else "none")
    draft.default_adapter("lora", 8, 16.0)
    if "train.schedule" not in draft.settings:
        draft.default_all({"train.schedule": "constant", "train.warmup": 0})
    draft.default_all({"train.clip": 0.0, "data.eval_split": 0, "train.weight_decay": 0.01})
    leave_out(draft)
