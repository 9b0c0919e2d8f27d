# ruff: noqa: E501  a table: one row, one key
"""axolotl's YAML."""

from __future__ import annotations

from typing import Any

from .account import Draft, Given, Handler, changed, no_effect, not_offered, number, precision, to, to_count, to_number, to_truth, truth
from .source import Source
from .words import (
    attention,
    attention_switch,
    checkpointing,
    dropout,
    optimizer,
    schedule,
    schedule_details,
    targets,
    warmup_ratio,
    warmup_steps,
)

_FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "input_output": None,
}
_PARALLEL = not_offered("not set in the file: it says what a step is, not on how many GPUs")


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    if (rl := source.has("rl")) and rl.value not in (None, "", False):
        return f"line {rl.line}: rl: {rl.value} is not offered: Isotype trains on given answers (SFT) and on text"
    for key, what in (
        ("reward_model", "reward models are"),
        ("process_reward_model", "reward models are"),
        ("num_labels", "classification is"),
        ("processor_type", "a model with pictures is"),
        ("qat", "quantisation-aware training is"),
        ("diffusion", "diffusion language models are"),
    ):
        if (given := source.has(key)) and given.value:
            return f"line {given.line}: {key}: {what} not offered"
    adapter = source.get("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        return f"adapter: {adapter} is not offered: lora and qlora are"
    return None


def _adapter(draft: Draft, given: Given) -> None:
    kind = "lora" if given.value else "none"
    draft.set(given, "adapter.kind", kind, "with precision.preset: nf4-lora" if given.value == "qlora" else "")


def _datasets(target: str) -> Handler:
    def handler(draft: Draft, given: Given) -> None:
        entries, notes = [], []
        for one in given.value if isinstance(given.value, list) else []:
            if isinstance(one, dict):
                entry, note = _dataset(one)
                entries.append(entry)
                notes += note
        if not entries:
            draft.not_offered(given, "data.train: a file, a folder or hf:NAME")
        else:
            draft.set(given, target, entries, "; ".join(dict.fromkeys(notes)))

    return handler


def _dataset(one: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """One entry of `datasets:` as one of data.train, and the keys of it that have no counterpart."""
    notes = []
    files = one.get("data_files")
    path = str((files[0] if isinstance(files, list) else files) or one.get("path"))
    local = bool(files) or path.endswith((".json", ".jsonl", ".parquet", ".csv", ".txt")) or path.startswith(("/", "./", "../", "~"))
    entry: dict[str, Any] = {"name": path if local else f"hf:{path}"}
    if isinstance(files, list) and len(files) > 1:
        notes.append(f"{len(files)} data_files: the first is named, add the others")
    for theirs, ours in (("split", "split"), ("name", "subset"), ("revision", "revision")):
        if one.get(theirs) not in (None, "train" if theirs == "split" else None):
            if local:
                notes.append(f"{theirs} is for datasets of the hub")
            else:
                entry[ours] = str(one[theirs])
    word = str(one["type"]).partition(".")[0].partition(":")[0] if isinstance(one.get("type"), str) else None
    if word in _FORMATS:
        if _FORMATS[word]:
            entry["format"] = _FORMATS[word]
    elif one.get("type") is not None:
        notes.append(
            f"type {one['type'] if isinstance(one['type'], str) else 'with its own fields'}: the format is recognised from the rows; see data.columns"
        )
    if one.get("field_messages") not in (None, "messages"):
        entry["columns"] = {"messages": str(one["field_messages"])}
    elif word == "completion" and one.get("field") not in (None, "text"):
        entry["columns"] = {"text": str(one["field"])}
    if one.get("roles_to_train") not in (None, ["assistant"], ["gpt"]) or one.get("train_on_eos") not in (None, "turn", "all"):
        notes.append("learnt are the assistant's answers with their end of turn (data.loss_on)")
    if one.get("message_property_mappings") or one.get("message_field_role"):
        notes.append("other names inside a message are not read: ShareGPT's and OpenAI's are")
    if one.get("shards"):
        notes.append("shards: data.limit")
    return entry, notes


def _val_set_size(draft: Draft, given: Given) -> None:
    value = number(given.value or 0)
    if value >= 1:
        draft.not_offered(given, "data.eval_split is a share of the rows; data.eval names a file")
    else:
        draft.set(given, "data.eval_split", value)


def _times_an_epoch(target: str) -> Handler:
    """`evals_per_epoch: 4`: the number of steps in an epoch is not known before the data is read."""

    def handler(draft: Draft, given: Given) -> None:
        draft.not_offered(given, f"{target} in steps; by default ten evaluations in a run, each with a checkpoint")

    return handler


def _linear(draft: Draft, given: Given) -> None:
    if truth(given.value):
        draft.set(given, "adapter.targets", "all-linear")
    else:
        draft.no_effect(given, "adapter.targets")


def _train_on_inputs(draft: Draft, given: Given) -> None:
    draft.set(given, "data.loss_on", "all" if truth(given.value) else "assistant")


def _pretraining(draft: Draft, given: Given) -> None:
    one = given.value[0] if isinstance(given.value, list) and given.value else given.value
    name, field = (one.get("path"), one.get("text_column")) if isinstance(one, dict) else (one, None)
    entry: dict[str, Any] = {"name": f"hf:{name}", "format": "text"}
    if isinstance(one, dict) and one.get("name"):
        entry["subset"] = str(one["name"])
    if field not in (None, "text"):
        entry["columns"] = {"text": str(field)}
    draft.settings["data.stream"] = True
    draft.set(given, "data.train", [entry], "text, tokenised while training (data.stream)")


KEYS: dict[str, Handler] = {
    "base_model": to("model.name"),
    "base_model_config": no_effect("the model's own configuration is read"),
    "revision_of_model": to("model.revision"),
    "tokenizer_config": to("model.tokenizer"),
    "trust_remote_code": to_truth("model.trust_remote_code"),
    **dict.fromkeys(("model_type", "tokenizer_type", "is_llama_derived_model", "tokenizer_use_fast"), no_effect("the model's own class is used")),
    "datasets": _datasets("data.train"),
    "test_datasets": _datasets("data.eval"),
    "pretraining_dataset": _pretraining,
    "streaming": to_truth("data.stream"),
    "val_set_size": _val_set_size,
    "dataset_prepared_path": no_effect("tokenised rows are cached: data.cache"),
    "dataset_processes": no_effect("rows are tokenised once and cached"),
    "dataset_exact_deduplication": not_offered("remove repeated rows beforehand"),
    "shuffle_merged_datasets": to_truth("data.shuffle"),
    "skip_prepare_dataset": no_effect("rows are always prepared"),
    "sequence_len": to_count("data.max_length"),
    "sample_packing": to_truth("data.packing"),
    "multipack_real_batches": no_effect("one way to pack"),
    "sample_packing_eff_est": no_effect("rows are packed before training"),
    "sample_packing_group_size": no_effect("rows are packed before training"),
    "sample_packing_bin_size": no_effect("rows are packed before training"),
    "eval_sample_packing": no_effect("evaluation rows are never packed; the loss is the same"),
    "pad_to_sequence_len": no_effect("rows are padded to the longest of their batch; the loss is the same"),
    "group_by_length": no_effect("rows of like length are put together where it saves padding"),
    "train_on_inputs": _train_on_inputs,
    "chat_template": lambda draft, given: draft.no_effect(given, "the tokenizer's own template; another one: data.chat_template")
    if given.value in (None, "tokenizer_default")
    else draft.not_offered(given, f"data.chat_template: a Jinja file; without it the tokenizer's own template is used, not {given.value}"),
    "chat_template_jinja": not_offered("data.chat_template: a file with this text"),
    "default_system_message": not_offered("write the system message into the rows"),
    "adapter": _adapter,
    "lora_r": to_count("adapter.r"),
    "lora_alpha": to_number("adapter.alpha"),
    "lora_dropout": dropout,
    "lora_target_modules": lambda draft, given: targets(draft, given) if given.value else draft.no_effect(given, "lora_target_linear decides"),
    "lora_target_linear": _linear,
    "lora_modules_to_save": to("adapter.modules_to_save"),
    "lora_fan_in_fan_out": no_effect("seen from the layer"),
    "peft_use_rslora": to_truth("adapter.rslora"),
    "peft_use_dora": not_offered("DoRA is not offered; plain LoRA is used"),
    "peft_layers_to_transform": not_offered("adapter.targets takes names of modules, as PEFT understands them"),
    "lora_model_dir": to("adapter.start_from"),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), no_effect("adapters are fused by default: model.optimize")),
    **dict.fromkeys(("relora*", "jagged_restart_*"), not_offered("ReLoRA is not offered")),
    "lisa_*": not_offered("LISA is not offered"),
    "peft": not_offered("adapter.* has what is offered of PEFT's settings"),
    "save_only_model": no_effect("checkpoints always hold the optimizer, and can be resumed from"),
    "curriculum_sampling": not_offered("data.shuffle: rows in the order of the file, or shuffled"),
    **dict.fromkeys(("use_swanlab", "swanlab_*", "use_otel_metrics", "otel_*"), not_offered("run.trackers is tensorboard or wandb")),
    "use_wandb": lambda draft, given: draft.set(given, "run.trackers", ["wandb"]) if truth(given.value) else draft.no_effect(given, "off"),
    "llmcompressor": not_offered("pruning is not offered"),
    **dict.fromkeys(("use_ray", "ray_*"), not_offered("not set in the file: it says what a step is, not on how many GPUs")),
    **dict.fromkeys(("fp8_*", "nvfp4_*", "dsv4_*"), not_offered("products are bf16, fp16 or fp32")),
    "unfrozen_parameters": not_offered("every weight (adapter.kind: none) or adapter.modules_to_save"),
    **dict.fromkeys(
        ("bf16", "fp16", "tf32", "bfloat16", "float16", "float32", "load_in_4bit", "load_in_8bit", "gptq", "bnb_config_kwargs", "fp8"), precision
    ),
    "flash_attention": attention_switch("flash"),
    "flash_attn_fuse_mlp": no_effect("gated MLPs are fused by default: model.optimize"),
    "sdp_attention": attention_switch("sdpa"),
    "eager_attention": attention_switch("eager"),
    "flex_attention": attention_switch("flex"),
    "xformers_attention": not_offered("model.attention is sdpa, eager, flash or flex; sdpa is used"),
    "s2_attention": not_offered("shifted sparse attention is not offered"),
    "attn_implementation": attention,
    "gradient_accumulation_steps": to_number("train.accumulate"),
    "micro_batch_size": to_number("train.batch_size"),
    "eval_batch_size": to_number("train.eval_batch_size"),
    "num_epochs": to_number("train.epochs"),
    "max_steps": to_count("train.steps"),
    "optimizer": optimizer,
    "optim_args": not_offered("train.beta1, train.beta2 and train.epsilon are the optimizer's settings"),
    "learning_rate": to_number("train.learning_rate"),
    "lr_scheduler": schedule,
    "lr_scheduler_kwargs": schedule_details,
    "cosine_min_lr_ratio": to_number("train.min_learning_rate"),
    "cosine_constant_lr_ratio": not_offered("train.schedule: wsd has a constant part"),
    "warmup_ratio": warmup_ratio,
    "warmup_steps": warmup_steps,
    "weight_decay": to_number("train.weight_decay"),
    "adam_beta1": to_number("train.beta1"),
    "adam_beta2": to_number("train.beta2"),
    "adam_epsilon": to_number("train.epsilon"),
    "max_grad_norm": to_number("train.clip"),
    "embedding_lr": not_offered("one learning rate for all weights"),
    "loraplus_lr_ratio": not_offered("one learning rate for A and B"),
    "gradient_checkpointing": checkpointing,
    "gradient_checkpointing_kwargs": no_effect("recomputation is always the non-reentrant one"),
    "seed": to_number("train.seed"),
    "neftune_noise_alpha": not_offered("noise on embeddings (NEFTune) has no counterpart"),
    "noisy_embedding_alpha": not_offered("noise on embeddings (NEFTune) has no counterpart"),
    "early_stopping_patience": to_count("train.patience"),
    "evals_per_epoch": _times_an_epoch("train.eval_every"),
    "saves_per_epoch": _times_an_epoch("run.save_every"),
    "eval_steps": to_count("train.eval_every"),
    "save_steps": to_count("run.save_every"),
    "eval_strategy": no_effect("evaluations come by train.eval_every, by default ten in a run"),
    "save_strategy": no_effect("checkpoints come by run.save_every, by default at every evaluation"),
    "save_total_limit": to_count("run.keep"),
    "save_first_step": no_effect("the preflight tries a save before step 1"),
    "save_safetensors": no_effect("always safetensors"),
    "load_best_model_at_end": no_effect("the best checkpoint is always kept"),
    "logging_steps": to_count("run.log_every"),
    "output_dir": to("run.folder"),
    "resume_from_checkpoint": not_offered("isotype train --resume RUN"),
    "auto_resume_from_checkpoints": not_offered("isotype train --resume RUN"),
    "use_tensorboard": lambda draft, given: draft.set(given, "run.trackers", ["tensorboard"]) if truth(given.value) else draft.no_effect(given, "off"),
    "wandb_project": lambda draft, given: draft.set(given, "run.trackers", ["wandb"], "the project: WANDB_PROJECT in the environment")
    if given.value
    else draft.no_effect(given, "off"),
    **dict.fromkeys(
        ("wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id", "wandb_mode"),
        no_effect("wandb reads its own environment variables (WANDB_NAME, WANDB_MODE, ...)"),
    ),
    **dict.fromkeys(("mlflow_tracking_uri", "mlflow_experiment_name", "comet_api_key", "use_comet", "use_mlflow"), not_offered("run.trackers is tensorboard or wandb")),
    "deepspeed": not_offered("a DeepSpeed file is not read: precision.* and the memory plan (isotype plan) take its place"),
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_version", "fsdp_final_state_dict_type"), _PARALLEL),
    **dict.fromkeys(("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "dp_shard_size"), _PARALLEL),
    "ddp": no_effect("gradients are summed once a step without DDP"),
    "ddp_timeout": no_effect("no such limit"),
    "device_map": no_effect("model.device; one process uses one device"),
    "local_rank": no_effect("given by the launcher"),
    "torch_compile": not_offered("train without it: the fused ops are used by default (model.optimize)"),
    "special_tokens": not_offered("the tokenizer's own are used; to change them, save a tokenizer and name it in model.tokenizer"),
    "tokens": not_offered("add tokens to a tokenizer and name it in model.tokenizer"),
    "added_tokens_overrides": not_offered("change a tokenizer and name it in model.tokenizer"),
    "resize_token_embeddings_to_32x": no_effect("embeddings keep their size"),
    "plugins": not_offered("Isotype's own ops are used by default (model.optimize)"),
    **dict.fromkeys(
        ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_layer_norm", "liger_fused_linear_cross_entropy",
         "liger_cross_entropy", "cut_cross_entropy"),
        no_effect("Isotype's own ops are used by default: model.optimize"),
    ),
    **dict.fromkeys(("strict", "debug", "loss_watchdog_threshold", "loss_watchdog_patience", "xformers", "gc_steps", "hf_use_auth_token", "push_dataset_to_hub",
                     "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"), no_effect("nothing here depends on it")),
    "eot_tokens": changed("the end of a turn is what the chat template writes; it is always learnt"),
    **dict.fromkeys(("quantize_moe_experts", "expert_parallel_size", "experts_implementation", "use_scattermoe", "use_sonicmoe", "llama4_linearized_experts"),
                    not_offered("stacked experts stay as they are (model.allow_unquantised)")),
    **dict.fromkeys(("use_kernels", "fused_attn_kernel", "flash_attn_cross_entropy", "flash_attn_rms_norm", "liger_*", "tiled_mlp", "gemma4_hybrid_attn_impl", "use_dsv4_kernels"),
                    no_effect("Isotype's own ops are used by default: model.optimize")),
    **dict.fromkeys(("torchdistx_path", "gptq_groupsize", "gptq_model_v1", "max_packed_sequence_len", "batch_size", "experimental_skip_move_to_device", "trackio_*",
                     "tokenizer_use_mistral_common", "tokenizer_legacy", "flash_optimum", "eval_table_size", "total_num_tokens", "base_model_ignore_patterns",
                     "streaming_multipack_buffer_size", "sample_packing_*", "low_cpu_mem_usage"), no_effect("nothing here depends on it")),
    "activation_offloading": lambda draft, given: draft.set(given, "train.gradient_checkpointing", "layers+offload") if truth(given.value) else draft.no_effect(given, "off"),
    "lora_target_parameters": not_offered("adapters are put on linear layers; stacked experts have none"),
    **dict.fromkeys(("dp_replicate_size", "ddp_find_unused_parameters", "context_*", "accelerator_config"), no_effect("gradients are summed once a step without DDP")),
    **dict.fromkeys(("model_config", "overrides_of_model_config", "model_quantization_config", "model_quantization_config_kwargs", "cls_model_config"),
                    not_offered("the model's own configuration is used")),
    "adam_eps": to_number("train.epsilon"),
    "min_sample_len": no_effect("short rows are kept"),
    "evaluation_strategy": no_effect("evaluations come by train.eval_every, by default ten in a run"),
    **dict.fromkeys(("use_eaft", "eaft_*"), not_offered("the loss is cross-entropy; a loss of your own is a function in Python")),
    "eta_min": not_offered("train.min_learning_rate is a share of the peak"),
    "lr_quadratic_warmup": not_offered("warm-up is linear"),
    "reinit_weights": not_offered("model.init: random builds fresh weights"),
    "flex_attn_compile_kwargs": no_effect("nothing here depends on it"),
    "do_bench": no_effect("nothing here depends on it"),
    "hub_model_id": not_offered("isotype merge RUN writes the model; upload it with `hf upload`"),
    "hub_strategy": no_effect("nothing is uploaded"),
    "rope_scaling": not_offered("the model's own configuration is used"),
}  # fmt: skip


def finish(draft: Draft, source: Source) -> None:
    """axolotl's defaults where they are not Isotype's."""
    draft.settings.setdefault("adapter.kind", "none")
    if draft.settings["adapter.kind"] == "none":
        for key in [key for key in draft.settings if key.startswith("adapter.") and key != "adapter.kind"]:
            del draft.settings[key]
    draft.default("train.batch_size", 1)
    draft.default("train.accumulate", 1)
    draft.default("data.max_length", 512)
    draft.default("train.schedule", "cosine")
    if "data.eval" in draft.settings:
        draft.settings.pop("data.eval_split", None)
    else:
        draft.default("data.eval_split", 0)
