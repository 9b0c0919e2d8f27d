"""axolotl's YAML. Keys that it hands on to Hugging Face's Trainer are translated as that table
says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from . import transforms as t
from .hugging_face import TRAINER, finish_text, frozen, preference
from .source import Source
from .transforms import Draft, Given

_FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "input_output": None,
}


# axolotl's `rl`, which is Isotype's `train.objective`
_RL = ("dpo", "ipo", "orpo", "simpo", "kto")


def _objective(draft: Draft) -> str | None:
    """Of the whole file, since settings may stand before it."""
    if draft.keys.get("reward_model"):
        return "reward"
    rl = draft.keys.get("rl")
    if rl == "dpo" and draft.keys.get("dpo_loss_type") == ["ipo"]:
        return "ipo"
    if rl in _RL:
        return str(rl)
    return None


# a setting of `preference`, wherever in the file `rl` stands
_of = partial(preference, of=_objective)


def _rl(draft: Draft, given: Given) -> None:
    if (objective := _objective(draft)) is None:
        draft.no_effect(given, "training is on given answers")
    else:
        draft.set(
            given,
            "train.objective",
            objective,
            t.REFERENCE if objective in ("dpo", "ipo", "kto") else "",
        )


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    if (rl := source.has("rl")) and rl.value not in (None, "", False, *_RL):
        return (
            f"line {rl.line}: rl: {rl.value} is not offered: train.objective is {', '.join(_RL)},"
            " reward or distil"
        )
    for key, what in (
        ("process_reward_model", "reward models are"),
        ("num_labels", "classification is"),
        ("qat", "quantisation-aware training is"),
        ("diffusion", "diffusion language models are"),
    ):
        if (
            (given := source.has(key))
            and given.value
            and not (key == "num_labels" and source.get("reward_model"))
        ):
            return f"line {given.line}: {key}: {what} not offered"
    if (given := source.has("dpo_loss_type")) and given.value not in (None, ["sigmoid"], ["ipo"]):
        return (
            f"line {given.line}: dpo_loss_type: {given.value}: train.objective: dpo and ipo have"
            " one loss each"
        )
    adapter = source.get("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        return f"adapter: {adapter} is not offered: lora and qlora are"
    return None


def _adapter(draft: Draft, given: Given) -> None:
    note = "with precision.preset: nf4-lora" if given.value == "qlora" else ""
    draft.set(given, "adapter.kind", "lora" if given.value else "none", note)


def _datasets(target: str) -> t.Handler:
    def handler(draft: Draft, given: Given) -> None:
        entries = []
        notes = []
        for one in given.value if isinstance(given.value, list) else []:
            if isinstance(one, dict):
                entry, note = _dataset(one)
                if _objective(draft) is not None:  # pairs and labels are read in one format
                    entry = {
                        key: value
                        for key, value in entry.items()
                        if key not in ("format", "columns")
                    }
                    note.append(
                        "rows have prompt, chosen and rejected (kto: prompt, completion, label);"
                        " other names: data.columns"
                    )
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
    local = (
        bool(files)
        or path.endswith((".json", ".jsonl", ".parquet", ".csv", ".txt"))
        or path.startswith(("/", "./", "../", "~"))
    )
    entry: dict[str, Any] = {"name": path if local else f"hf:{path}"}
    if isinstance(files, list) and len(files) > 1:
        notes.append(f"{len(files)} data_files: the first is named, add the others")
    for theirs, ours in (("split", "split"), ("name", "subset"), ("revision", "revision")):
        if one.get(theirs) not in (None, "train" if theirs == "split" else None):
            if local:
                notes.append(f"{theirs} is for datasets of the hub")
            else:
                entry[ours] = str(one[theirs])
    if isinstance(one.get("type"), str):
        word = str(one["type"]).partition(".")[0].partition(":")[0]
    else:
        word = None
    if word in _FORMATS:
        if _FORMATS[word]:
            entry["format"] = _FORMATS[word]
    elif one.get("type") is not None:
        shown = one["type"] if isinstance(one["type"], str) else "with its own fields"
        notes.append(f"type {shown}: the format is recognised from the rows; see data.columns")
    if one.get("field_messages") not in (None, "messages"):
        entry["columns"] = {"messages": str(one["field_messages"])}
    elif word == "completion" and one.get("field") not in (None, "text"):
        entry["columns"] = {"text": str(one["field"])}
    if one.get("roles_to_train") not in (None, ["assistant"], ["gpt"]) or one.get(
        "train_on_eos"
    ) not in (None, "turn", "all"):
        notes.append("learnt are the assistant's answers with their end of turn (data.loss_on)")
    if one.get("message_property_mappings") or one.get("message_field_role"):
        notes.append("other names inside a message are not read: ShareGPT's and OpenAI's are")
    if one.get("shards"):
        notes.append("shards: data.limit")
    return entry, notes


def _pretraining(draft: Draft, given: Given) -> None:
    one = given.value[0] if isinstance(given.value, list) and given.value else given.value
    if isinstance(one, dict):
        name = one.get("path")
        field = one.get("text_column")
    else:
        name = one
        field = None
    entry: dict[str, Any] = {"name": f"hf:{name}", "format": "text"}
    if isinstance(one, dict) and one.get("name"):
        entry["subset"] = str(one["name"])
    if field not in (None, "text"):
        entry["columns"] = {"text": str(field)}
    draft.settings["data.stream"] = True
    draft.set(given, "data.train", [entry], "text, tokenised while training (data.stream)")


def _filled(_: Draft, given: Given) -> bool:
    return bool(given.value)


def _times_an_epoch(target: str) -> t.Handler:
    """`evals_per_epoch: 4`: the number of steps in an epoch is not known before the data is read."""
    return lambda draft, given: draft.not_offered(
        given, f"{target} in steps; by default ten evaluations in a run, each with a checkpoint"
    )


_NO_EFFECT = {
    "rows are tokenised once and cached: data.cache": "dataset_prepared_path",
    "part of train.objective": "dpo_loss_type",
    t.REFERENCE: "precompute_ref_log_probs rl_adapter_ref_model",
    t.OWN_OPS: (
        "dpo_use_liger_kernel dpo_use_logits_to_keep dpo_padding_free lora_mlp_kernel"
        " lora_qkv_kernel lora_o_kernel flash_attn_fuse_mlp cut_cross_entropy liger_* use_kernels"
        " fused_attn_kernel tiled_mlp flash_attn_cross_entropy flash_attn_rms_norm"
        " gemma4_hybrid_attn_impl use_dsv4_kernels"
    ),
    "samples come by run.sample_every": "dpo_generate_during_eval",
    "evaluations come by train.eval_every, by default ten in a run": "evaluation_strategy",
    "wandb reads its own environment variables (WANDB_NAME, WANDB_MODE, ...)": (
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id"
    ),
    "the checkpoint's own processor reads the pictures; a row's are in `images` (docs/vision.md)": (
        "processor_type skip_prepare_dataset remove_unused_columns"
    ),
    t.IRRELEVANT: (
        "model_type tokenizer_type tokenizer_use_fast min_sample_len sample_packing_*"
        " eval_sample_packing pad_to_sequence_len resize_token_embeddings_to_32x num_labels"
        " lora_fan_in_fan_out dp_replicate_size context_* accelerator_config local_rank strict"
        " debug loss_watchdog_threshold loss_watchdog_patience xformers gc_steps hf_use_auth_token"
        " push_dataset_to_hub dataloader_num_workers dataloader_pin_memory"
        " dataloader_prefetch_factor torchdistx_path gptq_groupsize gptq_model_v1"
        " max_packed_sequence_len batch_size experimental_skip_move_to_device trackio_*"
        " tokenizer_use_mistral_common tokenizer_legacy flash_optimum eval_table_size"
        " total_num_tokens base_model_ignore_patterns streaming_multipack_buffer_size"
        " low_cpu_mem_usage flex_attn_compile_kwargs do_bench"
    ),
}
_NOT_OFFERED = {
    "remove repeated rows beforehand": "dataset_exact_deduplication",
    "write the system message into the rows": "default_system_message",
    "data.max_pixels is the most pixels of a picture": "image_size image_resize_algorithm",
    "data.shuffle: rows in the order of the file, or shuffled": "curriculum_sampling",
    "the tokenizer's own tokens are used; to change them, save a tokenizer and name it in model.tokenizer": (
        "special_tokens"
    ),
    "adapter.* has what is offered of PEFT's settings": "peft",
    "every weight (adapter.kind: none) or adapter.modules_to_save": "unfrozen_parameters",
    "model.attention is sdpa, eager, flash or flex; sdpa is used": "xformers_attention",
    t.OWN_OPS: "plugins",
    "stacked experts stay as they are (model.allow_unquantised)": (
        "quantize_moe_experts expert_parallel_size experts_implementation use_scattermoe"
        " use_sonicmoe llama4_linearized_experts"
    ),
    "train.schedule: wsd has a constant part": "cosine_constant_lr_ratio",
    "train.min_learning_rate is a share of the peak": "eta_min",
    "the loss is cross-entropy; a loss of your own is a function in Python": "use_eaft eaft_*",
    "isotype train --resume RUN": "auto_resume_from_checkpoints",
    "run.trackers is tensorboard or wandb": "use_swanlab swanlab_* use_otel_metrics otel_*",
    t.GPUS: (
        "fsdp_version fsdp_final_state_dict_type tensor_parallel_size context_parallel_size"
        " sequence_parallel_degree dp_shard_size use_ray ray_*"
    ),
    t.NO_SETTING: (
        "model_config model_quantization_config model_quantization_config_kwargs cls_model_config"
        " dpo_use_weighting dpo_norm_loss dpo_loss_weights relora* jagged_restart_* lisa_*"
        " llmcompressor fp8_* nvfp4_* dsv4_* s2_attention lr_quadratic_warmup"
    ),
}


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    """With transformers 5's name of the type."""
    return {("rope_type" if key == "type" else key): value for key, value in given.items()}


KEYS: dict[str, t.Handler] = {
    **TRAINER,
    **t.table(t.no_effect, _NO_EFFECT),
    **t.table(t.not_offered, _NOT_OFFERED),
    **t.carried(
        model="name=base_model revision=revision_of_model tokenizer=tokenizer_config",
        data=(
            "max_length=sequence_len packing=sample_packing template_kwargs=chat_template_kwargs "
            "shuffle=shuffle_merged_datasets stream=streaming"
        ),
        adapter=(
            "parameters=lora_target_parameters rslora=peft_use_rslora dora=peft_use_dora"
            " plus=loraplus_lr_ratio start_from=lora_model_dir"
        ),
        train=(
            "epochs=num_epochs batch_size=micro_batch_size min_learning_rate=cosine_min_lr_ratio "
            "embedding_noise=noisy_embedding_alpha epsilon=adam_eps eval_batch_size"
        ),
        run="push_to_hub=hub_model_id",
    ),
    "rope_scaling": t.to("model.rope_parameters", _rope),
    # data
    "datasets": _datasets("data.train"),
    "test_datasets": _datasets("data.eval"),
    "pretraining_dataset": _pretraining,
    "val_set_size": t.held_out,
    "train_on_inputs": t.either("data.loss_on", "all", "assistant"),
    **t.each(t.template, "chat_template chat_template_jinja"),
    "tokens": t.names("model.add_tokens"),
    "reinit_weights": t.when_on("model.init", "random"),
    "freeze_mm_modules": frozen("adapter.vision"),
    "eot_tokens": t.changed(
        "the end of a turn is what the chat template writes; it is always learnt"
    ),
    # preferences
    **t.each(_rl, "rl reward_model"),
    "rl_beta": _of("beta", "dpo", "ipo", "simpo", "kto"),
    "orpo_alpha": _of("beta", "orpo"),
    "simpo_gamma": _of("simpo_gamma", "simpo"),
    "cpo_alpha": _of("nll", "simpo"),
    "rpo_alpha": _of("nll", "dpo", "ipo"),
    "dpo_label_smoothing": _of("label_smoothing", "dpo"),
    "kto_desirable_weight": _of("desirable_weight", "kto"),
    "kto_undesirable_weight": _of("undesirable_weight", "kto"),
    "center_rewards_coefficient": _of("center_rewards_coefficient", "reward"),
    # adapter
    "adapter": _adapter,
    "lora_target_modules": t.when(_filled, t.targets, t.no_effect("lora_target_linear decides")),
    "lora_target_linear": t.when_on("adapter.targets", "all-linear", "adapter.targets"),
    "peft_init_lora_weights": t.start,
    # precision
    **t.each(t.Draft.precision, "bfloat16 float16 float32 gptq bnb_config_kwargs fp8"),
    # attention and kernels
    "flash_attention": t.when_on("model.attention", "flash"),
    "sdp_attention": t.when_on("model.attention", "sdpa"),
    "eager_attention": t.when_on("model.attention", "eager"),
    "flex_attention": t.when_on("model.attention", "flex"),
    # steps
    "optimizer": t.optimizer,
    "lr_scheduler": t.schedule,
    # evaluation, saving, logging
    "evals_per_epoch": _times_an_epoch("train.eval_every"),
    "saves_per_epoch": _times_an_epoch("run.save_every"),
    "use_tensorboard": t.when_on("run.trackers", ["tensorboard"], "off"),
    "use_wandb": t.when_on("run.trackers", ["wandb"], "off"),
    "wandb_project": t.when(
        _filled,
        t.always("run.trackers", ["wandb"], "the project: WANDB_PROJECT in the environment"),
        t.no_effect("off"),
    ),
}


def finish(draft: Draft, source: Source) -> None:
    """axolotl's defaults where they are not Isotype's."""
    draft.settings.setdefault("adapter.kind", "none")
    draft.default_adapter("none")
    draft.default_all(
        {
            "train.batch_size": 1,
            "train.accumulate": 1,
            "data.max_length": 512,
            "train.schedule": "cosine",
        }
    )
    if draft.settings.get("train.objective") == "simpo":
        draft.default("preference.nll", 1.0)  # TRL's cpo_alpha
    finish_text(draft)
