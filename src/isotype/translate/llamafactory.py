# ruff: noqa: E501  a table: one row, one key
"""LLaMA-Factory: YAML, JSON and `llamafactory-cli train --...`. What it hands on to Hugging Face's Trainer is translated as that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .account import Draft, Given, Handler, no_effect, not_offered, number, precision, to, to_count, to_truth, truth
from .hugging_face import KEYS as TRAINER
from .source import Source
from .words import attention, targets

_FORMATTING = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    stage = source.get("stage")
    if stage not in (None, "sft", "pt"):
        return f"stage: {stage} is not offered: Isotype trains on given answers (sft) and on text (pt)"
    kind = source.get("finetuning_type")
    if kind not in (None, "lora", "full"):
        return f"finetuning_type: {kind} is not offered: lora and full are"
    if source.has("export_dir"):
        return "an export: isotype merge RUN writes the merged model"
    train = source.has("do_train")
    if train is not None and not truth(train.value):
        return "do_train: false; isotype eval and isotype sample look at a trained model"
    if train is None and source.has("infer_backend", "do_predict"):
        return "inference: isotype chat, sample and eval take a run folder, a model or an adapter"
    if given := source.has("dist_config", "peft_config.name", "sample_backend", "model_class", "init_config"):
        return f"line {given.line}: {given.name}: the format of LLaMA-Factory's v1 is not read, only that of its released versions"
    if source.has("image_max_pixels", "video_max_pixels", "freeze_vision_tower"):
        return "a model with pictures is not offered"
    return None


def _finetuning(draft: Draft, given: Given) -> None:
    draft.set(given, "adapter.kind", "lora" if given.value == "lora" else "none")


def _stage(draft: Draft, given: Given) -> None:
    if given.value == "pt":
        draft.set(given, "data.format", "text", "plain text, learnt whole")
    else:
        draft.no_effect(given, "training is on given answers")


def _datasets(target: str) -> Handler:
    def handler(draft: Draft, given: Given) -> None:
        names = given.value if isinstance(given.value, list) else str(given.value).split(",")
        entries, unknown = [], []
        known = _registry(draft)
        for name in (str(name).strip() for name in names):
            described = known.get(name)
            if described is None:
                unknown.append(name)
            entries.append(_entry(draft, name, described or {}))
        note = "named in dataset_info.json"
        if unknown:
            note = f"dataset_info.json was not found or lacks {', '.join(unknown)}: put the file's path there"
        draft.set(given, target, entries, note)

    return handler


def _registry(draft: Draft) -> dict[str, Any]:
    """dataset_info.json, where it lies beside the file or in dataset_dir; {} where it cannot be read."""
    asked = draft.keys.get("dataset_dir", "data")
    for folder in (Path(draft.folder), Path(".")):
        try:
            read = json.loads((folder / str(asked) / "dataset_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(read, dict):
            return read
    return {}


def _entry(draft: Draft, name: str, described: dict[str, Any]) -> dict[str, Any]:
    folder = str(draft.keys.get("dataset_dir", "data"))
    hub = described.get("hf_hub_url")
    entry: dict[str, Any] = {"name": f"hf:{hub}" if hub else f"{folder}/{described.get('file_name', name + '.json')}"}
    formatting = _FORMATTING.get(str(described.get("formatting", "alpaca")))
    if described and formatting:
        entry["format"] = formatting
    if described.get("split") not in (None, "train"):
        entry["split"] = str(described["split"])
    if described.get("subset"):
        entry["subset"] = str(described["subset"])
    if described.get("num_samples"):
        entry["limit"] = int(described["num_samples"])
    return entry


def _quantisation(draft: Draft, given: Given) -> None:
    draft.precision(given)


def _val_size(draft: Draft, given: Given) -> None:
    value = number(given.value or 0)
    if value >= 1:
        draft.not_offered(given, "data.eval_split is a share of the rows; data.eval names a file")
    else:
        draft.set(given, "data.eval_split", value)


def _template(draft: Draft, given: Given) -> None:
    draft.changed(given, "the tokenizer's own chat template is used; another one: data.chat_template, a Jinja file")


KEYS: dict[str, Handler] = {
    **TRAINER,
    "stage": _stage,
    "finetuning_type": _finetuning,
    "lora_rank": to_count("adapter.r"),
    "lora_target": targets,
    "additional_target": lambda draft, given: draft.set(
        given, "adapter.modules_to_save", [part.strip() for part in given.value.split(",")] if isinstance(given.value, str) else given.value
    ),
    "adapter_name_or_path": to("adapter.start_from"),
    "create_new_adapter": no_effect("an adapter goes on from adapter.start_from"),
    "loraplus_lr_ratio": not_offered("one learning rate for A and B"),
    "pissa_init": not_offered("PiSSA is not offered"),
    "dataset": _datasets("data.train"),
    "eval_dataset": _datasets("data.eval"),
    "dataset_dir": no_effect("part of the paths in data.train"),
    "template": _template,
    "cutoff_len": to_count("data.max_length"),
    "max_samples": to_count("data.limit"),
    "val_size": _val_size,
    "train_on_prompt": lambda draft, given: draft.set(given, "data.loss_on", "all" if truth(given.value) else "assistant"),
    "mask_history": not_offered("data.loss_on: every answer of a conversation is learnt, or everything"),
    "neat_packing": to_truth("data.packing"),
    "packing": to_truth("data.packing"),
    "buffer_size": to_count("data.shuffle_buffer"),
    "overwrite_cache": no_effect("rows are cached by their content: data.cache"),
    "preprocessing_num_workers": no_effect("rows are tokenised once and cached"),
    "preprocessing_batch_size": no_effect("rows are tokenised once and cached"),
    "tokenized_path": no_effect("data.cache"),
    "mix_strategy": not_offered("data.train: each source may have a weight"),
    "interleave_probs": not_offered("data.train: each source may have a weight"),
    "flash_attn": attention,
    "enable_liger_kernel": TRAINER["use_liger_kernel"],
    "use_unsloth": no_effect("Isotype's own ops are used by default: model.optimize"),
    "disable_gradient_checkpointing": lambda draft, given: draft.set(given, "train.gradient_checkpointing", "none" if truth(given.value) else "layers"),
    "upcast_layernorm": no_effect("norms are computed in fp32: precision.norms"),
    "upcast_lmhead_output": no_effect("the loss is computed in fp32: precision.loss"),
    "pure_bf16": precision,
    "quantization_bit": _quantisation,
    "quantization_method": no_effect("bitsandbytes' nf4"),
    "double_quantization": no_effect("nf4 with double quantisation"),
    "quantization_type": no_effect("always nf4"),
    "plot_loss": no_effect("report.html and report.png are always written"),
    "do_train": no_effect("isotype train trains"),
    "rope_scaling": not_offered("the model's own configuration is used"),
    "use_galore": not_offered("GaLore is not offered; adamw8bit or an adapter saves memory"),
    "use_badam": not_offered("BAdam is not offered; adamw8bit or an adapter saves memory"),
    "use_apollo": not_offered("APOLLO is not offered; adamw8bit or an adapter saves memory"),
    "use_muon": not_offered("Muon is not offered; adamw is used"),
    "shift_attn": not_offered("shifted sparse attention is not offered"),
    "include_effective_tokens_per_second": no_effect("tokens a second are always shown"),
    "use_swanlab": not_offered("run.trackers is tensorboard or wandb"),
    "save_only_model": no_effect("checkpoints always hold the optimizer, and can be resumed from"),
    **{family: not_offered(f"{name} is not offered; adamw8bit or an adapter saves memory") for family, name in (("galore_*", "GaLore"), ("badam_*", "BAdam"), ("apollo_*", "APOLLO"))},
    **dict.fromkeys(("use_kt", "kt_*"), not_offered("KTransformers is not offered")),
    **dict.fromkeys(("use_asft_loss", "asft_alpha", "use_dft_loss", "use_eaft_loss", "eaft_alpha"), not_offered("the loss is cross-entropy; a loss of your own is a function in Python")),
    **dict.fromkeys(("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"), not_offered("fp8 is not offered; products are bf16")),
    **dict.fromkeys(("use_adam_mini", "use_muon"), not_offered("train.optimizer is adamw or adamw8bit; adamw is used")),
    **dict.fromkeys(("pissa_iter", "pissa_convert"), not_offered("PiSSA is not offered")),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size", "sequence_parallel", "ray_*",
         "use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce", "fsdp_transformer_layer_cls_to_wrap"),
        not_offered("not set in the file: it says what a step is, not on how many GPUs"),
    ),
    "mixture_of_depths": not_offered("the model is trained as it is"),
    "use_v1_kernels": no_effect("Isotype's own ops are used by default: model.optimize"),
    "cache_dir": no_effect("HF_HOME in the environment"),
    "resize_vocab": not_offered("add tokens to a tokenizer and name it in model.tokenizer"),
    "new_special_tokens": not_offered("add tokens to a tokenizer and name it in model.tokenizer"),
    "low_cpu_mem_usage": no_effect("weights are always loaded that way"),
    "model_name_or_path": to("model.name"),
}  # fmt: skip


def finish(draft: Draft, source: Source) -> None:
    """LLaMA-Factory's defaults where they are not Isotype's."""
    draft.default("adapter.kind", "lora")
    if draft.settings["adapter.kind"] == "none":
        for key in [key for key in draft.settings if key.startswith("adapter.") and key != "adapter.kind"]:
            del draft.settings[key]
    else:
        draft.default("adapter.r", 8)
        draft.default("adapter.alpha", 2.0 * draft.settings["adapter.r"])
    draft.default("train.batch_size", 8)
    draft.default("train.epochs", 3.0)
    draft.default("train.learning_rate", 5e-5)
    draft.default("train.schedule", "linear")
    draft.default("train.warmup", 0)
    draft.default("data.max_length", 2048)
    if "data.eval" in draft.settings:
        draft.settings.pop("data.eval_split", None)
    else:
        draft.default("data.eval_split", 0)
