"""Translates a YAML file of axolotl to an Isotype configuration. Keys that axolotl passes on to
Hugging Face's Trainer are translated by the table of `hugging_face`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..data.row_keys import TURN_COLUMNS
from . import row_names, transforms
from .hugging_face import (
    TRAINER_HANDLERS,
    add_text_defaults,
    frozen_part_handler,
    preference_handler,
)
from .source import Source
from .transforms import ConfigDraft, SourceKey

# the tool's name of a row format -> Isotype's
_FORMATS = {
    "alpaca": "alpaca",
    "alpaca_chat": "alpaca",
    "alpaca_instruct": "alpaca",
    "alpaca_w_system": "alpaca",
    "gpteacher": "alpaca",
    "sharegpt": "sharegpt",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "input_output": None,
}
# the last word of a type whose rows have other keys -> Isotype's key -> the row's key
_TYPE_COLUMNS: dict[str, dict[str, str]] = {
    "load_qa": {"instruction": "question", "output": "answer"},
    "load_camel_ai": {"instruction": "message_1", "output": "message_2"},
    "load_open_orca": {
        "instruction": "question",
        "output": "response",
        "system": "system_prompt",
    },
    "load_open_orca_chatml": {
        "instruction": "question",
        "output": "response",
        "system": "system_prompt",
    },
    "gpteacher": {"output": "response"},
}
# the same for types of pairs and of labelled answers
_PAIR_TYPE_COLUMNS: dict[str, dict[str, str]] = {
    "intel": {"prompt": "question"},
    "icr": {"prompt": "input"},
    "argilla": {
        "prompt": "instruction",
        "chosen": "chosen_response",
        "rejected": "rejected_response",
    },
}
_LABELLED_TYPE_COLUMNS: dict[str, dict[str, str]] = {
    "intel": {"prompt": "question"},
    "argilla": {"prompt": "instruction"},
    "argilla_chat": {"messages": "completion"},
}
# Isotype's key -> the field that names it in a `type` given as a mapping
_OWN_FIELDS = {
    "instruction": "field_instruction",
    "input": "field_input",
    "output": "field_output",
    "system": "field_system",
    "prompt": "field_prompt",
    "completion": "field_completion",
    "label": "field_label",
    "chosen": "field_chosen",
    "rejected": "field_rejected",
}
# formats of a question that add no words, so that the chat template alone gives the same prompt
_PLAIN_WORDINGS = ("{instruction} {input}", "{instruction}", "{prompt}", "{system}", "{input}")


# values of axolotl's `rl` that are objectives of Isotype
_RL_METHODS = ("dpo", "ipo", "orpo", "simpo", "kto")


def _read_objective(draft: ConfigDraft) -> str | None:
    """Returns the training objective. The function reads all keys of the file, because the key that
    names the training method may come after settings that depend on this method.
    """
    if draft.source_values.get("reward_model"):
        return "reward"
    rl = draft.source_values.get("rl")
    if rl == "dpo" and draft.source_values.get("dpo_loss_type") == ["ipo"]:
        return "ipo"
    if rl in _RL_METHODS:
        return str(rl)
    return None


# makes a handler for a setting of the section `preference`
_preference_handler = partial(preference_handler, read_objective=_read_objective)


def _convert_rl(draft: ConfigDraft, source_key: SourceKey) -> None:
    if (objective := _read_objective(draft)) is None:
        draft.report_no_effect(source_key, "training is on given answers")
    else:
        note = transforms.REFERENCE_NOTE if objective in ("dpo", "ipo", "kto") else ""
        draft.set(source_key, "train.objective", objective, note)


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    if (rl := source.find_key("rl")) and rl.value not in (None, "", False, *_RL_METHODS):
        return (
            f"line {rl.line}: rl: {rl.value} is not offered: train.objective is {', '.join(_RL_METHODS)},"
            " reward or distil"
        )
    for key, subject in (
        ("process_reward_model", "reward models are"),
        ("num_labels", "classification is"),
        ("qat", "quantisation-aware training is"),
        ("diffusion", "diffusion language models are"),
    ):
        if (
            (source_key := source.find_key(key))
            and source_key.value
            and not (key == "num_labels" and source.get("reward_model"))
        ):
            return f"line {source_key.line}: {key}: {subject} not offered"
    if (source_key := source.find_key("dpo_loss_type")) and source_key.value not in (
        None,
        ["sigmoid"],
        ["ipo"],
    ):
        return (
            f"line {source_key.line}: dpo_loss_type: {source_key.value}: train.objective: dpo and ipo have"
            " one loss each"
        )
    adapter = source.get("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        return f"adapter: {adapter} is not offered: lora and qlora are"
    return None


def _convert_adapter(draft: ConfigDraft, source_key: SourceKey) -> None:
    note = "with precision.preset: nf4-lora" if source_key.value == "qlora" else ""
    draft.set(source_key, "adapter.kind", "lora" if source_key.value else "none", note)


def _datasets_handler(target: str) -> transforms.Handler:
    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        entries = []
        notes = []
        for dataset in source_key.value if isinstance(source_key.value, list) else []:
            if isinstance(dataset, dict):
                entry, dataset_notes = _convert_dataset(dataset, _read_objective(draft))
                entries.append(entry)
                notes += dataset_notes
        if not entries:
            draft.report_not_offered(source_key, "data.train: a file, a folder or hf:NAME")
        else:
            draft.set(source_key, target, entries, "; ".join(dict.fromkeys(notes)))

    return handler


def _convert_dataset(
    dataset: dict[str, Any], objective: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Translates one entry of `datasets:` into an entry of data.train. Returns the new entry, and
    messages about keys that Isotype does not have.
    """
    entry, notes = _locate_dataset(dataset)
    kind = dataset.get("type")
    if isinstance(kind, dict):
        notes += _name_own_fields(entry, kind, objective)
    else:
        notes += _name_by_type(entry, str(kind or ""), dataset, objective)
    row_names.add_columns(
        entry,
        {
            key: dataset.get(field)
            for key, field in (
                ("chosen", "field_chosen"),
                ("rejected", "field_rejected"),
                ("system", "field_system"),
                ("tools", "field_tools"),
            )
        },
    )
    if dataset.get("roles_to_train") not in (None, ["assistant"], ["gpt"]) or dataset.get(
        "train_on_eos"
    ) not in (None, "turn", "all"):
        notes.append("learnt are the assistant's answers with their end of turn (data.loss_on)")
    for key, note in _UNREAD_DATASET_KEYS.items():
        if dataset.get(key):
            notes.append(note)
    return entry, notes


_UNREAD_DATASET_KEYS = {
    "shards": "shards: data.limit",
    "message_field_training_detail": "message_field_training_detail: a turn is learnt, or it is not",
    "drop_system_message": "drop_system_message: take the system turns out of the rows",
}


def _locate_dataset(dataset: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns an entry with the path or hub name of the data set, and messages for the user."""
    notes = []
    files = dataset.get("data_files")
    first_file = files[0] if isinstance(files, list) else files
    path = str(first_file or dataset.get("path"))
    is_local = (
        bool(files)
        or path.endswith((".json", ".jsonl", ".parquet", ".csv", ".txt"))
        or path.startswith(("/", "./", "../", "~"))
    )
    entry: dict[str, Any] = {"name": path if is_local else f"hf:{path}"}
    if isinstance(files, list) and len(files) > 1:
        notes.append(f"{len(files)} data_files: the first is named, add the others")
    for source_name, setting in (("split", "split"), ("name", "subset"), ("revision", "revision")):
        if dataset.get(source_name) not in (None, "train" if source_name == "split" else None):
            if is_local:
                notes.append(f"{source_name} is for datasets of the hub")
            else:
                entry[setting] = str(dataset[source_name])
    return entry, notes


def _name_own_fields(
    entry: dict[str, Any], kind: dict[str, Any], objective: str | None
) -> list[str]:
    """Translates the column names in `type: {field_instruction: ..., format: ...}`. Returns
    messages for the user.
    """
    columns = {key: kind.get(field) for key, field in _OWN_FIELDS.items()}
    row_names.add_columns(entry, columns)
    if objective is None:
        entry["format"] = "alpaca"
    notes = []
    wordings = {
        key: str(value).strip() for key, value in kind.items() if key.endswith("format") and value
    }
    own_wordings = [
        key for key, text in wordings.items() if " ".join(text.split()) not in _PLAIN_WORDINGS
    ]
    if own_wordings:
        notes.append(
            f"{', '.join(own_wordings)}: the chat template writes question and answer; for another"
            " wording give data.chat_template"
        )
    if kind.get("system_prompt"):
        notes.append("system_prompt: write the system message into the rows")
    return notes


def _name_by_type(
    entry: dict[str, Any], kind: str, dataset: dict[str, Any], objective: str | None
) -> list[str]:
    """Sets the format and the columns according to `type`, which may be `alpaca`, `chat_template`
    or `chatml.intel`, for example. Returns messages for the user.
    """
    strategy, _, function = kind.partition(":")[0].partition(".")
    format_name = _FORMATS.get(strategy)
    if has_turns := strategy in ("chat_template", "sharegpt") or "field_messages" in dataset:
        _name_turns(entry, strategy, dataset, row_format=objective is None)
    elif objective is None and format_name:
        entry["format"] = format_name
    if objective is None:
        columns = _TYPE_COLUMNS.get(function or strategy, {})
    elif objective == "kto":
        columns = _LABELLED_TYPE_COLUMNS.get(function, {})
    else:
        columns = _PAIR_TYPE_COLUMNS.get(function, {})
    if not has_turns:
        row_names.add_columns(entry, columns)
    if strategy == "completion" and objective is None:
        row_names.add_columns(entry, {"text": dataset.get("field")})
    if kind and strategy not in _FORMATS and objective is None:
        return [f"type {kind}: the format is recognised from the rows; see data.columns"]
    if function == "nectar":
        return [f"type {kind}: ranks are not read; write rows with completions and scores"]
    return []


def _name_turns(
    entry: dict[str, Any], strategy: str, dataset: dict[str, Any], *, row_format: bool
) -> None:
    """Writes three kinds of names that the data uses into the entry: the key of the list of turns,
    the keys of a turn, and the roles.
    """
    default_keys = ("from", "value") if strategy == "sharegpt" else ("role", "content")
    default_field = "conversations" if strategy == "sharegpt" else "messages"
    properties = dict(dataset.get("message_property_mappings") or {})
    role = properties.pop("role", None) or dataset.get("message_field_role")
    content = properties.pop("content", None) or dataset.get("message_field_content")
    turn_columns = {key: value for key, value in properties.items() if key in TURN_COLUMNS}
    if dataset.get("field_thinking"):
        turn_columns["reasoning_content"] = dataset["field_thinking"]
    if dataset.get("message_field_training"):
        turn_columns["train"] = dataset["message_field_training"]
    role_names = {
        role_name: [str(word) for word in role_words]
        for role_name, role_words in (dataset.get("roles") or {}).items()
        if isinstance(role_words, list)
    }
    row_names.set_turn_columns(
        entry,
        dataset.get("field_messages") or default_field,
        (str(role or default_keys[0]), str(content or default_keys[1])),
        role_names,
        turn_columns=turn_columns,
        sets_format=row_format,
    )


def _convert_pretraining(draft: ConfigDraft, source_key: SourceKey) -> None:
    dataset = (
        source_key.value[0]
        if isinstance(source_key.value, list) and source_key.value
        else source_key.value
    )
    if isinstance(dataset, dict):
        name = dataset.get("path")
        field = dataset.get("text_column")
    else:
        name = dataset
        field = None
    entry: dict[str, Any] = {"name": f"hf:{name}", "format": "text"}
    if isinstance(dataset, dict) and dataset.get("name"):
        entry["subset"] = str(dataset["name"])
    if field not in (None, "text"):
        entry["columns"] = {"text": str(field)}
    draft.settings["data.stream"] = True
    draft.set(source_key, "data.train", [entry], "text, tokenised while training (data.stream)")


def _is_set(_: ConfigDraft, source_key: SourceKey) -> bool:
    return bool(source_key.value)


def _refuse_epoch_interval(target: str) -> transforms.Handler:
    """Returns a handler that refuses an interval in epochs, such as `evals_per_epoch`, because the
    number of steps in an epoch is unknown before the data is read.
    """
    return lambda draft, source_key: draft.report_not_offered(
        source_key,
        f"{target} in steps; by default at most ten evaluations in a run, and ten checkpoints",
    )


# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "rows are tokenised once and cached: data.cache": "dataset_prepared_path",
    "part of train.objective": "dpo_loss_type",
    transforms.REFERENCE_NOTE: "precompute_ref_log_probs rl_adapter_ref_model",
    transforms.OWN_OPS_NOTE: (
        "dpo_use_liger_kernel dpo_use_logits_to_keep dpo_padding_free lora_mlp_kernel"
        " lora_qkv_kernel lora_o_kernel flash_attn_fuse_mlp cut_cross_entropy liger_* use_kernels"
        " fused_attn_kernel tiled_mlp flash_attn_cross_entropy flash_attn_rms_norm"
        " gemma4_hybrid_attn_impl use_dsv4_kernels"
    ),
    "samples come by run.sample_every": "dpo_generate_during_eval",
    "evaluations come by train.eval_every, by default at most ten in a run": "evaluation_strategy",
    "wandb reads its own environment variables (WANDB_NAME, WANDB_MODE, ...)": (
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id"
    ),
    "the checkpoint's own processor reads the pictures; a row's are in `images` (docs/vision.md)": (
        "processor_type skip_prepare_dataset remove_unused_columns"
    ),
    transforms.IRRELEVANT_NOTE: (
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
# what to use instead -> the keys that Isotype does not offer, in one text
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
    transforms.OWN_OPS_NOTE: "plugins",
    "stacked experts stay as they are (model.allow_unquantised)": (
        "quantize_moe_experts expert_parallel_size experts_implementation use_scattermoe"
        " use_sonicmoe llama4_linearized_experts"
    ),
    "train.schedule: wsd has a constant part": "cosine_constant_lr_ratio",
    "train.min_learning_rate is a share of the peak": "eta_min",
    "the loss is cross-entropy; a loss of your own is a function in Python": "use_eaft eaft_*",
    "isotype train --resume RUN": "auto_resume_from_checkpoints",
    "run.trackers is tensorboard or wandb": "use_swanlab swanlab_* use_otel_metrics otel_*",
    transforms.NO_GPU_COUNT_NOTE: (
        "fsdp_version fsdp_final_state_dict_type tensor_parallel_size context_parallel_size"
        " sequence_parallel_degree dp_shard_size use_ray ray_*"
    ),
    transforms.NO_SETTING_NOTE: (
        "model_config model_quantization_config model_quantization_config_kwargs cls_model_config"
        " dpo_use_weighting dpo_norm_loss dpo_loss_weights relora* jagged_restart_* lisa_*"
        " llmcompressor fp8_* nvfp4_* dsv4_* s2_attention lr_quadratic_warmup"
    ),
}


def _convert_rope(rope_scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the rotary embedding. The key `type` is renamed to `rope_type`, its
    name in transformers 5.
    """
    return {("rope_type" if key == "type" else key): value for key, value in rope_scaling.items()}


# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **TRAINER_HANDLERS,
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
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
    "rope_scaling": transforms.convert_to("model.rope_parameters", _convert_rope),
    # data
    "datasets": _datasets_handler("data.train"),
    "test_datasets": _datasets_handler("data.eval"),
    "pretraining_dataset": _convert_pretraining,
    "val_set_size": transforms.convert_eval_split,
    "train_on_inputs": transforms.convert_switch("data.loss_on", "all", "assistant"),
    **transforms.same_handler(transforms.convert_template, "chat_template chat_template_jinja"),
    "tokens": transforms.convert_list("model.add_tokens"),
    "reinit_weights": transforms.set_if_enabled("model.init", "random"),
    "freeze_mm_modules": frozen_part_handler("adapter.vision"),
    "eot_tokens": transforms.report_changed(
        "the end of a turn is what the chat template writes; it is always learnt"
    ),
    # preferences
    **transforms.same_handler(_convert_rl, "rl reward_model"),
    "rl_beta": _preference_handler("beta", "dpo", "ipo", "simpo", "kto"),
    "orpo_alpha": _preference_handler("beta", "orpo"),
    "simpo_gamma": _preference_handler("simpo_gamma", "simpo"),
    "cpo_alpha": _preference_handler("nll", "simpo"),
    "rpo_alpha": _preference_handler("nll", "dpo", "ipo"),
    "dpo_label_smoothing": _preference_handler("label_smoothing", "dpo"),
    "kto_desirable_weight": _preference_handler("desirable_weight", "kto"),
    "kto_undesirable_weight": _preference_handler("undesirable_weight", "kto"),
    "center_rewards_coefficient": _preference_handler("center_rewards_coefficient", "reward"),
    # adapter
    "adapter": _convert_adapter,
    "lora_target_modules": transforms.choose_handler(
        _is_set,
        transforms.convert_targets,
        transforms.report_no_effect("lora_target_linear decides"),
    ),
    "lora_target_linear": transforms.set_if_enabled(
        "adapter.targets", "all-linear", off_note="adapter.targets"
    ),
    "peft_init_lora_weights": transforms.convert_lora_init,
    # precision
    **transforms.same_handler(
        transforms.ConfigDraft.add_precision_key,
        "bfloat16 float16 float32 gptq bnb_config_kwargs fp8",
    ),
    # attention and kernels
    "flash_attention": transforms.set_if_enabled("model.attention", "flash"),
    "sdp_attention": transforms.set_if_enabled("model.attention", "sdpa"),
    "eager_attention": transforms.set_if_enabled("model.attention", "eager"),
    "flex_attention": transforms.set_if_enabled("model.attention", "flex"),
    # steps
    "optimizer": transforms.convert_optimizer,
    "lr_scheduler": transforms.convert_schedule,
    # evaluation, saving, logging
    "evals_per_epoch": _refuse_epoch_interval("train.eval_every"),
    "saves_per_epoch": _refuse_epoch_interval("run.save_every"),
    "use_tensorboard": transforms.set_if_enabled("run.trackers", ["tensorboard"], off_note="off"),
    "use_wandb": transforms.set_if_enabled("run.trackers", ["wandb"], off_note="off"),
    "wandb_project": transforms.choose_handler(
        _is_set,
        transforms.set_constant(
            "run.trackers", ["wandb"], "the project: WANDB_PROJECT in the environment"
        ),
        transforms.report_no_effect("off"),
    ),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds axolotl's defaults to the new configuration where they differ from the defaults of
    Isotype.
    """
    draft.settings.setdefault("adapter.kind", "none")
    draft.set_adapter_defaults("none")
    draft.set_defaults(
        {
            "train.batch_size": 1,
            "train.accumulate": 1,
            "data.max_length": 512,
            "train.schedule": "cosine",
        }
    )
    if draft.settings.get("train.objective") == "simpo":
        draft.set_default("preference.nll", 1.0)  # TRL's cpo_alpha
    add_text_defaults(draft)
