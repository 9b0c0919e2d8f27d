"""LLaMA-Factory: YAML, JSON and `llamafactory-cli train --...`. Keys of Hugging Face's Trainer are
translated as that table says.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from . import transforms as t
from .hugging_face import KEYS as TRAINER
from .hugging_face import LIGER, finish_text, frozen, preference
from .source import Source
from .transforms import Draft, Given

_FORMATTING = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}


_PREF_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}  # of stage: dpo


def _objective(draft: Draft) -> str | None:
    """Of the whole file, since settings may stand before it."""
    stage = draft.keys.get("stage")
    if stage == "dpo":
        return _PREF_LOSSES[str(draft.keys.get("pref_loss") or "sigmoid")]
    return {"kto": "kto", "rm": "reward"}.get(str(stage))


# a setting of `preference`, wherever in the file `stage` stands
_of = partial(preference, of=_objective)


def _ftx(draft: Draft, given: Given) -> None:
    """A weight of the chosen answer's likelihood, beside the one that ORPO has."""
    if _objective(draft) == "orpo":
        draft.set(given, "preference.nll", 1.0 + float(given.value), "beside the 1 that orpo has")
    elif _objective(draft) == "kto":
        t.not_offered("kto has no likelihood part")(draft, given)
    else:
        _of("nll", "dpo", "ipo", "simpo")(draft, given)


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    stage = source.get("stage")
    loss = source.get("pref_loss") or "sigmoid"
    if stage not in (None, "sft", "pt", "dpo", "kto", "rm"):
        return f"stage: {stage} is not offered: sft, pt, dpo, kto and rm are"
    if stage == "dpo" and loss not in _PREF_LOSSES:
        return f"pref_loss: {loss} is not offered: {', '.join(_PREF_LOSSES)} are"
    kind = source.get("finetuning_type")
    if kind not in (None, "lora", "full"):
        return f"finetuning_type: {kind} is not offered: lora and full are"
    if source.has("export_dir"):
        return "an export: isotype merge RUN writes the merged model"
    train = source.has("do_train")
    if train is not None and not t.is_on(train.value):
        return "do_train: false; isotype eval and isotype sample look at a trained model"
    if train is None and source.has("infer_backend", "do_predict"):
        return "inference: isotype chat, sample and eval take a run folder, a model or an adapter"
    if given := source.has(
        "dist_config", "peft_config.name", "sample_backend", "model_class", "init_config"
    ):
        return (
            f"line {given.line}: {given.name}: the format of LLaMA-Factory's v1 is not read, only"
            " that of its released versions"
        )
    return None


def _stage(draft: Draft, given: Given) -> None:
    if (objective := _objective(draft)) is not None:
        draft.set(
            given,
            "train.objective",
            objective,
            t.REFERENCE if objective in ("dpo", "ipo", "kto") else "",
        )
    elif given.value == "pt":
        draft.set(given, "data.format", "text", "plain text, learnt whole")
    else:
        draft.no_effect(given, "training is on given answers")


def _datasets(target: str) -> t.Handler:
    def handler(draft: Draft, given: Given) -> None:
        if isinstance(given.value, list):
            names = given.value
        else:
            names = str(given.value).split(",")
        entries = []
        unknown = []
        known = _registry(draft)
        for name in (str(name).strip() for name in names):
            described = known.get(name)
            if described is None:
                unknown.append(name)
            entries.append(_entry(draft, name, described or {}))
        note = "named in dataset_info.json"
        if _objective(draft) is not None:
            note += (
                "; rows have prompt, chosen and rejected (kto: prompt, completion, label); other"
                " names: data.columns"
            )
        if unknown:
            note = (
                f"dataset_info.json was not found or lacks {', '.join(unknown)}: put the file's"
                " path there"
            )
        draft.set(given, target, entries, note)

    return handler


def _registry(draft: Draft) -> dict[str, Any]:
    """dataset_info.json, where it lies beside the file or in dataset_dir; {} where it cannot be
    read.
    """
    asked = draft.keys.get("dataset_dir", "data")
    for folder in (Path(draft.folder), Path(".")):
        try:
            read = json.loads(
                (folder / str(asked) / "dataset_info.json").read_text(encoding="utf-8")
            )
        except (OSError, ValueError):
            continue
        if isinstance(read, dict):
            return read
    return {}


def _entry(draft: Draft, name: str, described: dict[str, Any]) -> dict[str, Any]:
    folder = str(draft.keys.get("dataset_dir", "data"))
    hub = described.get("hf_hub_url")
    entry: dict[str, Any] = {
        "name": f"hf:{hub}" if hub else f"{folder}/{described.get('file_name', name + '.json')}"
    }
    formatting = _FORMATTING.get(str(described.get("formatting", "alpaca")))
    # pairs and labels are read in one format, whose prompt Alpaca's files call instruction
    if _objective(draft) is not None:
        columns = described.get("columns") or {}
        if (
            described
            and formatting == "alpaca"
            and (prompt := columns.get("prompt", "instruction")) != "prompt"
        ):
            entry["columns"] = {"prompt": str(prompt)}
    elif described and formatting:
        entry["format"] = formatting
    if described.get("split") not in (None, "train"):
        entry["split"] = str(described["split"])
    if described.get("subset"):
        entry["subset"] = str(described["subset"])
    if described.get("num_samples"):
        entry["limit"] = int(described["num_samples"])
    return entry


def _saves_memory(name: str) -> t.Handler:
    return t.not_offered(f"{name} is not offered; adamw8bit or an adapter saves memory")


_NO_EFFECT = {
    "such an adapter is always saved as an ordinary one, for the untouched base": "pissa_convert",
    t.OWN_OPS: "use_v1_kernels",
    "part of train.objective": "pref_loss",
    "part of the paths in data.train": "dataset_dir",
    "rows are tokenised once and cached by their content: data.cache": (
        "overwrite_cache preprocessing_num_workers tokenized_path"
    ),
    t.IRRELEVANT: "pissa_iter quantization_method double_quantization plot_loss",
}
_NOT_OFFERED = {
    "model.rope_parameters: {rope_type: yarn, factor: N}, N being cutoff_len over the model's positions": (
        "rope_scaling"
    ),
    "add tokens to a tokenizer and name it in model.tokenizer": "resize_vocab",
    t.REFERENCE: "ref_model ref_model_adapters ref_model_quantization_bit",
    "data.loss_on: every answer of a conversation is learnt, or everything": "mask_history",
    "data.train: each source may have a weight": "interleave_probs",
    t.OTHER_OPTIMIZERS: "use_adam_mini",
    "the loss is cross-entropy; a loss of your own is a function in Python": (
        "use_asft_loss asft_alpha use_dft_loss use_eaft_loss eaft_alpha"
    ),
    t.GPUS: (
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size"
        " context_parallel_size sequence_parallel ray_* use_distributed_optimizer"
        " overlap_param_gather overlap_grad_reduce fsdp_transformer_layer_cls_to_wrap"
    ),
    t.NO_SETTING: (
        "mixture_of_depths shift_attn pref_bco_weight ld_alpha fp8 fp8_backend"
        " fp8_enable_fsdp_float8_all_gather use_kt kt_* video_* audio_* freeze_language_model"
        " image_do_pan_and_scan crop_to_patches"
    ),
}
KEYS: dict[str, t.Handler] = {
    **TRAINER,
    **t.table(t.no_effect, _NO_EFFECT),
    **t.table(t.not_offered, _NOT_OFFERED),
    **t.carried(
        model="name=model_name_or_path",
        data=(
            "max_length=cutoff_len packing=neat_packing packing min_pixels=image_min_pixels"
            " max_pixels=image_max_pixels limit=max_samples shuffle_buffer=buffer_size"
        ),
        adapter="r=lora_rank plus=loraplus_lr_ratio start_from=adapter_name_or_path",
        train="aux_loss=moe_aux_loss_coef",
    ),
    "flash_attn": t.attention,
    "enable_liger_kernel": LIGER,
    # adapter
    "stage": _stage,
    "finetuning_type": t.to("adapter.kind", lambda value: "lora" if value == "lora" else "none"),
    "lora_target": t.targets,
    "additional_target": t.names("adapter.modules_to_save"),
    "pissa_init": t.when_on("adapter.start", "pissa"),
    # preferences
    "pref_beta": _of("beta", "dpo", "ipo", "orpo", "simpo", "kto"),
    "pref_ftx": _ftx,
    "simpo_gamma": _of("simpo_gamma", "simpo"),
    "dpo_label_smoothing": _of("label_smoothing", "dpo"),
    "kto_chosen_weight": _of("desirable_weight", "kto"),
    "kto_rejected_weight": _of("undesirable_weight", "kto"),
    # data
    "dataset": _datasets("data.train"),
    "eval_dataset": _datasets("data.eval"),
    "template": t.template,
    **t.each(t.names("model.add_tokens"), "add_special_tokens new_special_tokens add_tokens"),
    "enable_thinking": t.to(
        "data.template_kwargs", lambda value: {"enable_thinking": t.is_on(value)}
    ),
    "freeze_vision_tower": frozen("adapter.vision"),
    "freeze_multi_modal_projector": frozen("adapter.projector"),
    "val_size": t.held_out,
    "train_on_prompt": t.either("data.loss_on", "all", "assistant"),
    # precision
    **t.each(t.Draft.precision, "pure_bf16 quantization_bit"),
    # steps
    "use_muon": t.when_on("train.optimizer", "muon"),
    "disable_gradient_checkpointing": t.either("train.gradient_checkpointing", "none", "layers"),
    **t.each(_saves_memory("GaLore"), "use_galore galore_*"),
    **t.each(_saves_memory("BAdam"), "use_badam badam_*"),
    **t.each(_saves_memory("APOLLO"), "use_apollo apollo_*"),
}


def finish(draft: Draft, source: Source) -> None:
    """LLaMA-Factory's defaults where they are not Isotype's."""
    draft.default_adapter("lora", 8, times=2.0)
    draft.default_all(
        {
            "train.batch_size": 8,
            "train.epochs": 3.0,
            "train.learning_rate": 5e-5,
            "train.schedule": "linear",
            "train.warmup": 0,
            "data.max_length": 2048,
        }
    )
    finish_text(draft)
