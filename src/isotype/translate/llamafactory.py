"""Translates a YAML or JSON file of LLaMA-Factory, or a command `llamafactory-cli train --...`, to
an Isotype configuration. Keys of Hugging Face's Trainer are translated by the table of
`hugging_face`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from . import row_names, transforms
from .hugging_face import HANDLERS as TRAINER_HANDLERS
from .hugging_face import add_text_defaults, convert_liger, frozen_part_handler, preference_handler
from .source import Source
from .transforms import ConfigDraft, SourceKey

# values of `pref_loss` with `stage: dpo` -> objective
_PREF_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}


def _read_objective(draft: ConfigDraft) -> str | None:
    """Returns the training objective. The function reads all keys of the file, because the key that
    names the training method may come after settings that depend on this method.
    """
    stage = draft.source_values.get("stage")
    if stage == "dpo":
        return _PREF_LOSSES[str(draft.source_values.get("pref_loss") or "sigmoid")]
    return {"kto": "kto", "rm": "reward"}.get(str(stage))


# makes a handler for a setting of the section `preference`
_preference_handler = partial(preference_handler, read_objective=_read_objective)


def _convert_pref_ftx(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `pref_ftx`, the weight with which the likelihood of the chosen answer is added to
    the loss. The loss of ORPO already contains this likelihood with weight 1. So the weight for
    ORPO is 1 + `pref_ftx`.
    """
    if _read_objective(draft) == "orpo":
        draft.set(
            source_key,
            "preference.nll",
            1.0 + float(source_key.value),
            "beside the 1 that orpo has",
        )
    elif _read_objective(draft) == "kto":
        transforms.report_not_offered("kto has no likelihood part")(draft, source_key)
    else:
        _preference_handler("nll", "dpo", "ipo", "simpo")(draft, source_key)


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    stage = source.get("stage")
    loss = source.get("pref_loss") or "sigmoid"
    if stage not in (None, "sft", "pt", "dpo", "kto", "rm"):
        return f"stage: {stage} is not offered: sft, pt, dpo, kto and rm are"
    if stage == "dpo" and loss not in _PREF_LOSSES:
        return f"pref_loss: {loss} is not offered: {', '.join(_PREF_LOSSES)} are"
    kind = source.get("finetuning_type")
    if kind not in (None, "lora", "full"):
        return f"finetuning_type: {kind} is not offered: lora and full are"
    if source.find_key("export_dir"):
        return "an export: isotype merge RUN writes the merged model"
    do_train = source.find_key("do_train")
    if do_train is not None and not transforms.is_enabled(do_train.value):
        return "do_train: false; isotype eval and isotype sample look at a trained model"
    if do_train is None and source.find_key("infer_backend", "do_predict"):
        return "inference: isotype chat, sample and eval take a run folder, a model or an adapter"
    if source_key := source.find_key(
        "dist_config", "peft_config.name", "sample_backend", "model_class", "init_config"
    ):
        return (
            f"line {source_key.line}: {source_key.name}: the format of LLaMA-Factory's v1 is not read, only"
            " that of its released versions"
        )
    return None


def _convert_stage(draft: ConfigDraft, source_key: SourceKey) -> None:
    if (objective := _read_objective(draft)) is not None:
        note = transforms.REFERENCE_NOTE if objective in ("dpo", "ipo", "kto") else ""
        draft.set(source_key, "train.objective", objective, note)
    elif source_key.value == "pt":
        draft.set(source_key, "data.format", "text", "plain text, learnt whole")
    else:
        draft.report_no_effect(source_key, "training is on given answers")


def _datasets_handler(target: str) -> transforms.Handler:
    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        names = _dataset_names(source_key.value)
        entries: list[dict[str, Any]] = []
        unknown = []
        notes = ["named in dataset_info.json"]
        registry = _read_registry(draft)
        for name in names:
            description = registry.get(name)
            if draft.source_values.get("dataset_dir") == "ONLINE":
                entries.append({"name": f"hf:{name}"})
            elif isinstance(description, dict):
                entry, entry_notes = _convert_dataset(draft, name, description)
                entries.append(entry)
                notes += entry_notes
            else:
                unknown.append(name)
                entries.append({"name": f"{_data_folder(draft)}/{name}.json"})
        limit = draft.source_values.get("max_samples")
        if limit and len(names) > 1:
            entries = [{"limit": int(limit)} | entry for entry in entries]
        if unknown:
            notes = [
                f"dataset_info.json was not found or lacks {', '.join(unknown)}: put the file's"
                " path there, and in columns what its keys are called"
            ]
        draft.set(source_key, target, entries, "; ".join(dict.fromkeys(notes)))

    return handler


def _dataset_names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names]


def _convert_max_samples(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Sets data.limit if the file has one data set. If the file has several data sets, each entry
    of data.train gets the limit instead.
    """
    if len(_dataset_names(draft.source_values.get("dataset", ""))) == 1:
        transforms.convert_count("data.limit")(draft, source_key)
    else:
        draft.report_changed(source_key, "the limit of each source of data.train")


def _data_folder(draft: ConfigDraft) -> str:
    return str(draft.source_values.get("dataset_dir", "data"))


def _read_registry(draft: ConfigDraft) -> dict[str, Any]:
    """Reads dataset_info.json from `dataset_dir`, which is relative to the folder of the file or to
    the working directory. Returns {} if dataset_info.json cannot be read.
    """
    dataset_folder = draft.source_values.get("dataset_dir", "data")
    for folder in (Path(draft.folder), Path(".")):
        try:
            registry = json.loads(
                (folder / str(dataset_folder) / "dataset_info.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError):
            continue
        if isinstance(registry, dict):
            return registry
    return {}


# Isotype's key -> LLaMA-Factory's key, for rows in Alpaca's format only
_ALPACA_COLUMNS = {
    "instruction": "prompt",
    "input": "query",
    "output": "response",
    "history": "history",
}
# the same for rows in any format
_COMMON_COLUMNS = {
    "system": "system",
    "tools": "tools",
    "images": "images",
    "chosen": "chosen",
    "rejected": "rejected",
    "label": "kto_tag",
}
# Isotype's role -> the tag that names it
_ROLE_TAGS = {
    "user": "user_tag",
    "assistant": "assistant_tag",
    "tool": "observation_tag",
    "function_call": "function_tag",
    "system": "system_tag",
}
# the words that LLaMA-Factory uses for roles if an entry has no tags
_DEFAULT_TAGS = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def _convert_dataset(
    draft: ConfigDraft, name: str, description: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Translates an entry of dataset_info.json into an entry of data.train. Returns the new entry,
    and messages for the user.
    """
    hub = description.get("hf_hub_url")
    file_name = description.get("file_name", f"{name}.json")
    entry: dict[str, Any] = {"name": f"hf:{hub}" if hub else f"{_data_folder(draft)}/{file_name}"}
    notes = [
        f"{name}: {key} is not offered: put the file's path there"
        for key in ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
        if description.get(key) and not (hub or description.get("file_name"))
    ]
    columns = description.get("columns") or {}
    notes += [f"{name}: {key} are not offered" for key in ("videos", "audios") if columns.get(key)]
    if draft.source_values.get("stage") == "pt":
        entry["format"] = "text"
        row_names.add_columns(entry, {"text": columns.get("prompt", "instruction")})
    elif description.get("formatting", "alpaca") == "alpaca":
        _set_alpaca_columns(entry, description, sets_format=_read_objective(draft) is None)
    else:
        _set_turn_columns(entry, description, sets_format=_read_objective(draft) is None)
    if _read_objective(draft) == "kto" and not columns.get("kto_tag"):
        notes.append(f"{name} has no kto_tag: data.columns: {{label: NAME}}")
    if description.get("split") not in (None, "train"):
        entry["split"] = str(description["split"])
    if description.get("subset"):
        entry["subset"] = str(description["subset"])
    if description.get("num_samples"):
        entry["limit"] = int(description["num_samples"])
    return entry, notes


def _set_alpaca_columns(
    entry: dict[str, Any], description: dict[str, Any], *, sets_format: bool
) -> None:
    columns = description.get("columns") or {}
    if sets_format:
        entry["format"] = "alpaca"
    names = {**_ALPACA_COLUMNS, **_COMMON_COLUMNS}
    row_names.add_columns(entry, {key: columns.get(theirs) for key, theirs in names.items()})
    # if `columns` is given, LLaMA-Factory reads no other column: an `input` that it does not name
    # is ignored
    if columns and not columns.get("query") and "input" not in columns.values():
        entry["columns"] = {**entry.get("columns", {}), "input": None}


def _set_turn_columns(
    entry: dict[str, Any], description: dict[str, Any], *, sets_format: bool
) -> None:
    columns = description.get("columns") or {}
    tags = description.get("tags") or dict(_DEFAULT_TAGS)
    row_names.set_turn_columns(
        entry,
        columns.get("messages") or "conversations",
        (str(tags.get("role_tag") or "from"), str(tags.get("content_tag") or "value")),
        {role: [str(tags[tag])] for role, tag in _ROLE_TAGS.items() if tags.get(tag)},
        sets_format=sets_format,
    )
    row_names.add_columns(
        entry, {key: columns.get(theirs) for key, theirs in _COMMON_COLUMNS.items()}
    )


def _refused_optimizer_handler(name: str) -> transforms.Handler:
    return transforms.report_not_offered(
        f"{name} is not offered; adamw8bit or an adapter saves memory"
    )


# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "such an adapter is always saved as an ordinary one, for the untouched base": "pissa_convert",
    transforms.OWN_OPS_NOTE: "use_v1_kernels",
    "part of train.objective": "pref_loss",
    "part of the paths in data.train": "dataset_dir",
    "rows are tokenised once and cached by their content: data.cache": (
        "overwrite_cache preprocessing_num_workers tokenized_path"
    ),
    transforms.IRRELEVANT_NOTE: "pissa_iter quantization_method double_quantization plot_loss",
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "model.rope_parameters: {rope_type: yarn, factor: N}, N being cutoff_len over the model's positions": (
        "rope_scaling"
    ),
    "add tokens to a tokenizer and name it in model.tokenizer": "resize_vocab",
    transforms.REFERENCE_NOTE: "ref_model ref_model_adapters ref_model_quantization_bit",
    "data.loss_on: every answer of a conversation is learnt, or everything": "mask_history",
    "data.train: each source may have a weight": "interleave_probs",
    transforms.OTHER_OPTIMIZER_NOTE: "use_adam_mini",
    "the loss is cross-entropy; a loss of your own is a function in Python": (
        "use_asft_loss asft_alpha use_dft_loss use_eaft_loss eaft_alpha"
    ),
    transforms.NO_GPU_COUNT_NOTE: (
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size"
        " context_parallel_size sequence_parallel ray_* use_distributed_optimizer"
        " overlap_param_gather overlap_grad_reduce fsdp_transformer_layer_cls_to_wrap"
    ),
    transforms.NO_SETTING_NOTE: (
        "mixture_of_depths shift_attn pref_bco_weight ld_alpha fp8 fp8_backend"
        " fp8_enable_fsdp_float8_all_gather use_kt kt_* video_* audio_* freeze_language_model"
        " image_do_pan_and_scan crop_to_patches"
    ),
}
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **TRAINER_HANDLERS,
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        model="name=model_name_or_path",
        data=(
            "max_length=cutoff_len packing=neat_packing packing min_pixels=image_min_pixels"
            " max_pixels=image_max_pixels shuffle_buffer=buffer_size"
        ),
        adapter="r=lora_rank plus=loraplus_lr_ratio start_from=adapter_name_or_path",
        train="aux_loss=moe_aux_loss_coef",
    ),
    "flash_attn": transforms.convert_attention,
    "enable_liger_kernel": convert_liger,
    # adapter
    "stage": _convert_stage,
    "finetuning_type": transforms.convert_to(
        "adapter.kind", lambda value: "lora" if value == "lora" else "none"
    ),
    "lora_target": transforms.convert_targets,
    "additional_target": transforms.convert_list("adapter.modules_to_save"),
    "pissa_init": transforms.set_if_enabled("adapter.start", "pissa"),
    # preferences
    "pref_beta": _preference_handler("beta", "dpo", "ipo", "orpo", "simpo", "kto"),
    "pref_ftx": _convert_pref_ftx,
    "simpo_gamma": _preference_handler("simpo_gamma", "simpo"),
    "dpo_label_smoothing": _preference_handler("label_smoothing", "dpo"),
    "kto_chosen_weight": _preference_handler("desirable_weight", "kto"),
    "kto_rejected_weight": _preference_handler("undesirable_weight", "kto"),
    # data
    "dataset": _datasets_handler("data.train"),
    "eval_dataset": _datasets_handler("data.eval"),
    "max_samples": _convert_max_samples,
    "template": transforms.convert_template,
    **transforms.same_handler(
        transforms.convert_list("model.add_tokens"),
        "add_special_tokens new_special_tokens add_tokens",
    ),
    "enable_thinking": transforms.convert_to(
        "data.template_kwargs", lambda value: {"enable_thinking": transforms.is_enabled(value)}
    ),
    "freeze_vision_tower": frozen_part_handler("adapter.vision"),
    "freeze_multi_modal_projector": frozen_part_handler("adapter.projector"),
    "val_size": transforms.convert_eval_split,
    "train_on_prompt": transforms.convert_switch("data.loss_on", "all", "assistant"),
    # precision
    **transforms.same_handler(
        transforms.ConfigDraft.add_precision_key, "pure_bf16 quantization_bit"
    ),
    # steps
    "use_muon": transforms.set_if_enabled("train.optimizer", "muon"),
    "disable_gradient_checkpointing": transforms.convert_switch(
        "train.gradient_checkpointing", "none", "layers"
    ),
    **transforms.same_handler(_refused_optimizer_handler("GaLore"), "use_galore galore_*"),
    **transforms.same_handler(_refused_optimizer_handler("BAdam"), "use_badam badam_*"),
    **transforms.same_handler(_refused_optimizer_handler("APOLLO"), "use_apollo apollo_*"),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds LLaMA-Factory's defaults to the new configuration where they differ from the defaults of
    Isotype.
    """
    draft.set_adapter_defaults("lora", 8, alpha_per_rank=2.0)
    draft.set_defaults(
        {
            "train.batch_size": 8,
            "train.epochs": 3.0,
            "train.learning_rate": 5e-5,
            "train.schedule": "linear",
            "train.warmup": 0,
            "data.max_length": 2048,
        }
    )
    add_text_defaults(draft)
