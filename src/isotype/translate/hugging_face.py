"""Translates the settings of Hugging Face's `TrainingArguments`, TRL's trainers (Python, YAML or
command line) and Unsloth's notebooks to an Isotype configuration.

The modules of other tools that train on text use parts of this module for their own tables. These
parts are the entries for the arguments of Trainer, and the settings of preference methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from . import transforms
from .source import Source
from .transforms import ConfigDraft, SourceKey

_OTHER_METHOD_CLASS = re.compile(
    r"^(GRPO|PRM|RLOO|PPO|BCO|XPO|NashMD|GKD|OnlineDPO|MiniLLM)(?:v2)?(?:Config|Trainer)$"
)
_OTHER_MODEL_CLASS = re.compile(
    r"^(?:Auto\w*|\w+?)(?:ModelFor|For)(?!CausalLM)(\w+)$|^(Diffusion|StableDiffusion|Flux)\w*Pipeline$"
)
_PREFERENCE_KEYS = (
    *("rpo_alpha", "ref_model", "reference_free", "num_generations", "desirable_weight"),
    *("reward_funcs", "max_prompt_length", "beta", "cpo_alpha", "center_rewards_coefficient"),
)
# TRL's loss_type of a method -> Isotype's train.objective
_LOSSES = {
    "dpo": {"sigmoid": "dpo", "ipo": "ipo"},
    "cpo": {"sigmoid": "cpo", "simpo": "simpo"},
    "kto": {"kto": "kto"},
    "orpo": {"": "orpo"},
    "reward": {"": "reward"},
}
_VISION_MODEL_CLASSES = {"FastVisionModel", "AutoModelForImageTextToText", "AutoModelForVision2Seq"}


def _loss_name(value: object) -> str:
    """Returns the value of `loss_type` as text. TRL's DPO accepts a list of losses, and on a
    command line such a list is a text.
    """
    if value is transforms.Computed:
        return "computed by the program"
    names = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    return " ".join(str(name) for name in names)


def _read_objective(draft: ConfigDraft) -> str | None:
    """Returns the training objective. The function reads all keys of the file, because the key that
    names the training method may come after settings that depend on this method.
    """
    losses = _LOSSES.get(str(draft.source_values.get("trl_method")), {})
    return losses.get(_loss_name(draft.source_values.get("loss_type")) or next(iter(losses), ""))


def frozen_part_handler(target: str) -> transforms.Handler:
    """Returns a handler for a key that freezes a vision tower or projector. If the key is switched
    off, this part is trained like the rest of the model: with an adapter, or with all of its
    weights.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        kind = (
            draft.settings.get("adapter.kind")
            or draft.source_values.get("finetuning_type")
            or draft.source_values.get("adapter")
        )
        if transforms.is_enabled(source_key.value):
            draft.report_no_effect(source_key, f"{target} is none unless asked")
        else:
            draft.set(source_key, target, "lora" if kind in ("lora", "qlora") else "full")

    return handler


def preference_handler(
    name: str, *objectives: str, read_objective: Callable[[ConfigDraft], str | None]
) -> transforms.Handler:
    """Returns a handler that sets `preference.NAME` if the training objective of the file is one of
    `objectives`. `read_objective` reads the objective from all keys of the file, because the key
    that names the training method may come after the setting.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if source_key.value is None:
            draft.report_no_effect(source_key, "the default")
        elif read_objective(draft) in objectives:
            draft.set(source_key, f"preference.{name}", transforms.parse_number(source_key.value))
        else:
            draft.report_no_effect(source_key, f"of {', '.join(objectives)}")

    return handler


def add_text_defaults(draft: ConfigDraft) -> None:
    """Adds a default that all tools for text have. If there is no evaluation data, these tools
    train on every row. Removes settings that these tools ignore for preference methods.
    """
    if "data.eval" in draft.settings:
        draft.settings.pop("data.eval_split", None)
    else:
        draft.set_default("data.eval_split", 0)
    drop_preference_conflicts(draft)


def drop_preference_conflicts(draft: ConfigDraft) -> None:
    """Removes settings that Isotype does not allow for this objective."""
    objective = draft.settings.get("train.objective")
    conflicts = {
        "train.embedding_noise": (objective is not None, "it is for answers that are learnt"),
        "data.packing": (objective is not None, "each answer is judged as a whole"),
        "data.loss_on": (objective is not None, "answers are judged, not their prompts"),
        "adapter.dropout": (objective in ("dpo", "ipo", "kto"), "the reference has none"),
    }
    for key, (is_refused, reason) in conflicts.items():
        if is_refused and draft.settings.pop(key, None) not in (None, False, 0, "assistant"):
            draft.notes.append(f"{key} is left out: {reason}")


# makes a handler for a setting of the section `preference`
_preference_handler = partial(preference_handler, read_objective=_read_objective)


def _convert_method(draft: ConfigDraft, source_key: SourceKey) -> None:
    rows = "prompt, completion and label" if source_key.value == "kto" else "chosen and rejected"
    reference = f"; {transforms.REFERENCE_NOTE}" if source_key.value in ("dpo", "kto") else ""
    draft.set(
        source_key,
        "train.objective",
        _read_objective(draft),
        f"rows have {rows}; other names: data.columns{reference}",
    )


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    methods = [source_key for source_key in source.keys if source_key.name == "trl_method"]
    sft_classes = source.called_names & {"SFTTrainer", "SFTConfig"}
    reason = (
        _refused_class(source)
        or _command_line_reason(source)
        or _refused_model_class(source, has_method=bool(methods))
    )
    if reason:
        return reason
    if len(methods) + bool(sft_classes) > 1:
        names = [source_key.name_in_file for source_key in methods]
        return (
            f"several trainings in one file ({', '.join([*names, *sorted(sft_classes)])}): a"
            " configuration is one of them"
        )
    if methods:
        return _refused_loss(methods[0], source)
    return _refused_command(source) or _refused_key(source)


_TRAINERS = {
    "Trainer",
    "SFTTrainer",
    "UnslothTrainer",
    "Seq2SeqTrainer",
    "PatchDPOTrainer",
    "PatchKTOTrainer",
}


def _refused_class(source: Source) -> str | None:
    """Returns the reason to refuse a program that calls a trainer or a model class that Isotype
    does not offer.
    """
    for name in sorted(source.called_names):
        if match := _OTHER_METHOD_CLASS.match(name):
            return (
                f"{match[1]} is not offered: Isotype trains causal language models on given answers"
                " (SFT) and on preferences"
            )
        is_trainer = name.endswith("Trainer") and name not in _TRAINERS
        if is_trainer and name.removesuffix("Trainer").lower() not in _LOSSES:
            return (
                f"{name} is a trainer of its own: isotype.optimize(model) and `isotype doctor"
                " trace` work with it as it is"
            )
        if name == "FastDiffusionModel":
            return f"{name}: `isotype train` with a picture model (docs/diffusion.md)"
        if name.endswith("ForConditionalGeneration"):
            return f"{name}: only causal language models without pictures are trained"
    return None


_ARGUMENTS_CALL = re.compile(r"(Training|SFT|DPO|KTO|ORPO|CPO|Reward)(Arguments|Config)\b.")


def _command_line_reason(source: Source) -> str | None:
    """Returns the reason to refuse a program that gets all its settings from the command line."""
    parsers = source.called_names & {"HfArgumentParser", "TrlParser"}
    if not parsers or any(_ARGUMENTS_CALL.match(key.name_in_file) for key in source.keys):
        return None
    return (
        f"takes its settings from its command line ({', '.join(sorted(parsers))}): give the"
        " shell script or the YAML file that starts it"
    )


def _is_text_class(name: str) -> bool:
    """Returns True if programs that call this class train a kind of model that Isotype can train."""
    if name in _VISION_MODEL_CLASSES or name in ("SFTTrainer", "SFTConfig"):
        return True
    return "CausalLM" in name or name.startswith("Fast")


def _refused_model_class(source: Source, *, has_method: bool) -> str | None:
    """Returns the reason to refuse a program that trains another kind of model."""
    if has_method or any(map(_is_text_class, source.called_names)):
        return None
    for name in sorted(source.called_names):
        if name == "LoraConfig" or "Collator" in name:
            continue
        if _OTHER_MODEL_CLASS.match(name):
            return f"{name}: only causal language models are trained"
    return None


def _refused_loss(method: SourceKey, source: Source) -> str | None:
    """Returns the reason to refuse a preference method with a loss that Isotype does not offer."""
    losses = _LOSSES[str(method.value)]
    loss = _loss_name(source.get("loss_type"))
    if not loss or loss in losses:
        return None
    offered = ", ".join(filter(None, losses)) or "its only loss"
    return f"{method.name_in_file}: loss_type: {loss} is not offered: {offered} is"


def _refused_command(source: Source) -> str | None:
    """Returns the reason to refuse a command line or a script that uses another training method."""
    offered = "Isotype trains on given answers (SFT) and on preferences"
    command = source.method.split(" ")[0]
    if command in ("grpo", "rloo", "prm"):
        return f"trl {command} is not offered: {offered}"
    script = re.search(r"\b(dpo|grpo|kto|orpo|cpo|reward_modeling|rloo|ppo)\w*\.py", source.method)
    if script:
        return f"{script[0]} is not offered: {offered}"
    return None


def _refused_key(source: Source) -> str | None:
    """Returns the reason to refuse a file that contains a key of another training method."""
    if source_key := source.find_key(*_PREFERENCE_KEYS):
        return (
            f"line {source_key.line}: {source_key.name_in_file or source_key.name} belongs to a"
            " preference or reward method, which the file does not name: give the command or"
            " program that starts it"
        )
    if source_key := source.find_key("auto_model"):
        return (
            f"line {source_key.line}: {source_key.name_in_file}: auto_model names another class"
            " than a causal language model's"
        )
    if source.find_key("predict_with_generate", "generation_num_beams"):
        return (
            "sequence-to-sequence training is not offered: only causal language models are trained"
        )
    return None


def _convert_dataset(draft: ConfigDraft, source_key: SourceKey) -> None:
    name = str(source_key.value)
    if name in ("json", "csv", "parquet", "text") and draft.source_values.get("data_files"):
        draft.report_no_effect(source_key, "the format is seen from the file")
    elif re.search(r"\.(jsonl?|csv|parquet|txt)$", name) or name.startswith(("/", "./", "../")):
        draft.set(source_key, "data.train", name)
    else:
        draft.set(source_key, "data.train", f"hf:{name}", "a dataset of the hub")


def _convert_data_files(draft: ConfigDraft, source_key: SourceKey) -> None:
    if isinstance(source_key.value, dict):
        for split, key in (
            ("train", "data.train"),
            ("validation", "data.eval"),
            ("test", "data.eval"),
        ):
            if split in source_key.value and key not in draft.settings:
                draft.set(source_key, key, source_key.value[split])
    else:
        draft.set(source_key, "data.train", source_key.value)


def _hub_dataset_handler(key: str, default_values: tuple[str, ...]) -> transforms.Handler:
    """Returns a handler that adds `split` or `subset` of a hub dataset to the mapping in
    data.train.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        name = draft.settings.get("data.train")
        if str(source_key.value) in default_values:
            draft.report_no_effect(source_key, "the default")
        elif isinstance(name, list) or (isinstance(name, str) and name.startswith("hf:")):
            entry = name[0] if isinstance(name, list) else {"name": name}
            draft.set(source_key, "data.train", [{**entry, key: str(source_key.value)}])
        else:
            draft.report_not_offered(
                source_key,
                f"{key} is for datasets of the hub: data.train: [{{name: 'hf:NAME', {key}: ...}}]",
            )

    return handler


def _convert_mixture(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `dataset_mixture.datasets` of the alignment handbook and TRL. The translated keys
    are the id or path, the config, the split and the weight of a data set. Columns are ignored.
    """
    entries = []
    for dataset in source_key.value:
        entry: dict[str, Any] = {"name": f"hf:{dataset.get('id') or dataset['path']}"}
        for source_name, setting, default in (
            ("config", "subset", "default"),
            ("name", "subset", "default"),
            ("split", "split", "train"),
        ):
            if dataset.get(source_name) not in (None, default):
                entry[setting] = str(dataset[source_name])
        if dataset.get("weight") not in (None, 1, 1.0):
            entry["weight"] = dataset["weight"]
        entries.append(entry)
    note = ""
    if any("weight" in entry for entry in entries):
        entries = [{"weight": 1, **entry} for entry in entries]
        note = "weight is a share of the rows drawn in an epoch; there, of the rows that are kept"
    draft.set(source_key, "data.train", entries, note)


def _convert_schedule_kwargs(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `lr_scheduler_kwargs`. Only the minimum of the learning rate can be translated."""
    details = source_key.value if isinstance(source_key.value, dict) else {}
    rate = details.get("min_lr_rate")
    if (
        rate is None
        and details.get("min_lr") is not None
        and draft.source_values.get("learning_rate")
    ):
        rate = float(details["min_lr"]) / float(draft.source_values["learning_rate"])
    if rate is None:
        draft.report_not_offered(
            source_key, "train.decay and train.min_learning_rate are what schedules take"
        )
    else:
        draft.set(source_key, "train.min_learning_rate", float(rate))


def _convert_warmup_ratio(draft: ConfigDraft, source_key: SourceKey) -> None:
    value = transforms.parse_number(source_key.value or 0)
    if (
        draft.source_values.get("warmup_steps")
        and transforms.parse_number(draft.source_values["warmup_steps"]) > 0
    ):
        draft.report_no_effect(source_key, "warmup_steps wins, there too")
    elif (
        draft.settings.get("train.schedule") == "constant"
        and draft.settings.get("train.warmup") == 0
        and value
    ):
        draft.report_no_effect(source_key, "a constant schedule has no warm-up, there too")
    else:
        draft.set(source_key, "train.warmup", value)


_convert_checkpointing = transforms.choose_handler(
    lambda _, source_key: str(source_key.value).lower() in ("unsloth", "offload", "offload_disk"),
    transforms.set_constant(
        "train.gradient_checkpointing",
        "layers+offload",
        "recomputes layers and keeps what is left in host memory (GPU only)",
    ),
    transforms.convert_switch("train.gradient_checkpointing", "layers", "none"),
)
convert_liger = transforms.set_if_enabled(
    "model.optimize",
    True,
    off_note="switched off; model.optimize is on by default",
    note="Isotype's own ops instead of Liger's",
)


def _convert_push(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `push_to_hub`. The repository is `hub_model_id`. If `hub_model_id` is not set, the
    repository has the name of the output folder, as in transformers.
    """
    if not transforms.is_enabled(source_key.value):
        draft.report_no_effect(source_key, "off")
        return
    repository = draft.source_values.get("hub_model_id") or draft.source_values.get("output_dir")
    name = repository if isinstance(repository, str) else ""
    if "hub_model_id" not in draft.source_values:
        name = name.rstrip("/").rpartition("/")[2]
    if name:
        draft.set(source_key, "run.push_to_hub", name, "private unless run.push_private is false")
    else:
        draft.report_not_offered(source_key, "run.push_to_hub: ORG/NAME pushes the result")


# arguments of Hugging Face's Trainer and PEFT, which LLaMA-Factory and axolotl pass on
# reason -> the keys for which it holds, separated by spaces
_TRAINER_NO_EFFECT = {
    "train.seed": "data_seed",
    "isotype train trains": "do_train",
    "evaluation rows are held out: data.eval_split": "do_eval",
    "checkpoints come by run.save_every, by default at every evaluation, and one at the end": (
        "save_strategy"
    ),
    "every line is written: run.log_every": "logging_strategy",
    "everything lies in run.folder, which names the run": "run_name",
    "model.device; one process uses one device": "device_map",
    "HF_TOKEN in the environment": "token",
    "losses are always divided by the tokens of the whole step": (
        "average_tokens_across_devices accelerator_config"
    ),
    transforms.IRRELEVANT_NOTE: (
        "gradient_checkpointing_kwargs prediction_loss_only overwrite_output_dir"
        " hub_strategy save_safetensors save_only_model trackio_* dataloader_num_workers"
        " ddp_find_unused_parameters ddp_timeout low_cpu_mem_usage use_cache"
        " include_tokens_per_second group_by_length"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_TRAINER_NOT_OFFERED = {
    "one learning rate for all weights": "embedding_learning_rate",
    "isotype plan says which batch fits": "auto_find_batch_size",
    "train.beta1, train.beta2 and train.epsilon are the optimizer's settings": "optim_args",
    "no label smoothing in a run; isotype.ops.cross_entropy has it": "label_smoothing_factor",
    "train without it: the fused ops are used by default (model.optimize)": "torch_compile",
    "isotype train --resume RUN": "resume_from_checkpoint",
    "a DeepSpeed file is not read: precision.* and the memory plan (isotype plan) take its place": (
        "deepspeed"
    ),
    transforms.NO_GPU_COUNT_NOTE: "fsdp fsdp_config",
    "model.device is auto, cuda or cpu": "use_mps_device",
}
# key of a Trainer's arguments -> the function that translates it
TRAINER_HANDLERS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _TRAINER_NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _TRAINER_NOT_OFFERED),
    **transforms.copy_values(
        model="revision=model_revision tokenizer=tokenizer_name trust_remote_code",
        adapter=(
            "r=lora_r alpha=lora_alpha dropout=lora_dropout modules_to_save=lora_modules_to_save"
        ),
        train=(
            "steps=max_steps epochs=num_train_epochs batch_size=per_device_train_batch_size"
            " accumulate=gradient_accumulation_steps learning_rate weight_decay"
            " embedding_noise=neftune_noise_alpha beta1=adam_beta1 beta2=adam_beta2"
            " epsilon=adam_epsilon clip=max_grad_norm deterministic=full_determinism"
            " eval_every=eval_steps eval_batch_size=per_device_eval_batch_size"
            " patience=early_stopping_patience"
        ),
        run="folder=output_dir save_every=save_steps keep=save_total_limit log_every=logging_steps",
    ),
    "attn_implementation": transforms.convert_attention,
    "load_best_model_at_end": transforms.set_if_enabled("run.save", "best"),
    "push_to_hub": _convert_push,
    "hub_model_id": transforms.require_key(
        "push_to_hub",
        "on",
        transforms.report_no_effect("part of run.push_to_hub"),
        "push_to_hub is off",
    ),
    "hub_private_repo": transforms.require_key(
        "push_to_hub",
        "on",
        transforms.convert_switch("run.push_private", True, False),
        "push_to_hub is off",
    ),
    # adapter
    "lora_target_modules": transforms.convert_targets,
    # precision: decided together
    **transforms.same_handler(
        transforms.ConfigDraft.add_precision_key,
        "bf16 fp16 tf32 dtype torch_dtype load_in_4bit load_in_8bit load_in_16bit load_in_fp8"
        " full_finetuning bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant"
        " use_bnb_nested_quant bnb_4bit_quant_storage",
    ),
    # steps
    "seed": transforms.convert_number("train.seed"),
    "lr_scheduler_type": transforms.convert_schedule,
    "lr_scheduler_kwargs": _convert_schedule_kwargs,
    "warmup_ratio": _convert_warmup_ratio,
    "warmup_steps": transforms.choose_handler(
        lambda draft, source_key: (
            transforms.parse_number(source_key.value) == 0 and "warmup_ratio" in draft.source_values
        ),
        transforms.report_no_effect("warmup_ratio decides"),
        transforms.convert_number("train.warmup"),
    ),
    "optim": transforms.convert_optimizer,
    **transforms.same_handler(
        _convert_checkpointing, "gradient_checkpointing use_gradient_checkpointing"
    ),
    "activation_offloading": transforms.set_if_enabled(
        "train.gradient_checkpointing", "layers+offload", off_note="off"
    ),
    # evaluation, saving, logging
    **transforms.same_handler(
        transforms.convert_choice(
            "data.eval_split",
            dict.fromkeys(("no", "false", "none"), (0, "no rows are held out")),
            "evaluations come by train.eval_every, by default at most ten in a run",
            fallback="report_no_effect",
        ),
        "eval_strategy evaluation_strategy",
    ),
    "report_to": transforms.convert_trackers,
    # machine
    "use_cpu": transforms.set_if_enabled("model.device", "cpu", off_note="model.device: auto"),
}
# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "train.seed": "dataset_mixture.seed",
    "data.eval names the evaluation data; without it data.eval_split is held out": (
        "dataset_test_split"
    ),
    "data.packing has no padding": "padding_free",
    "rows with `text` are recognised; another key: data.columns": "dataset_text_field",
    "rows are read by data.* (docs/data.md)": (
        "dataset_num_proc num_proc dataset_kwargs remove_unused_columns"
    ),
    "rows are shuffled in every epoch: data.shuffle": "train_sampling_strategy",
    "train.seed makes the adapter's first weights": "lora_seed",
    "evaluation runs under the run's precision, and leaves the weights as they are": (
        "fp16_full_eval"
    ),
    transforms.REFERENCE_NOTE: "precompute_ref_log_probs precompute_ref_batch_size",
    transforms.IRRELEVANT_NOTE: (
        "packing_strategy eos_token task_type fast_inference disable_dropout num_labels pad_token"
        " padding_value label_pad_token_id pad_to_multiple_of f_alpha_divergence_coef discopop_tau"
        " ref_model_mixup_alpha ref_model_sync_steps log_level unsloth_force_compile"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    f"{transforms.REFERENCE_NOTE}; another one": (
        "ref_model force_use_ref_model sync_ref_model reference_free ref_adapter_name"
        " model_adapter_name"
    ),
    "data.max_length is for prompt and answer together": "max_prompt_length max_completion_length",
    "one loss: preference.nll is the weight of the chosen answer's likelihood": "loss_weights",
    "run.samples shows answers": "generate_during_eval",
    "adapter.targets takes names of modules, as PEFT understands them": "layers_to_transform",
    "adapter.targets names the modules": (
        "finetune_attention_modules finetune_mlp_modules finetune_last_n_layers"
    ),
    transforms.NO_SETTING_NOTE: "lora_bias use_weighting ld_alpha alpha loftq qat_scheme offload_embedding",
}
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **TRAINER_HANDLERS,
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        model="name=model_name_or_path revision tokenizer=tokenizer_name_or_path",
        data=(
            "train=train_file eval=validation_file max_length max_length=max_seq_length packing"
            " chat_template=chat_template_path limit=max_train_samples stream=streaming"
            " stream=dataset_streaming"
        ),
        adapter="rslora=use_rslora dora=use_dora rank_pattern alpha_pattern",
    ),
    **transforms.same_handler(convert_liger, "use_liger_kernel use_liger"),
    # data
    "chat_template": transforms.convert_template,
    "turn_names": transforms.report_no_effect(
        "ShareGPT's and OpenAI's names of turns are recognised"
    ),
    "default_system_message": transforms.report_not_offered(
        "write the system message into the rows"
    ),
    "map_eos_token": transforms.report_no_effect(
        "the end of a turn is what the chat template writes"
    ),
    "dataset_name": _convert_dataset,
    **transforms.same_handler(
        _hub_dataset_handler("subset", ("default", "main")), "dataset_config dataset_config_name"
    ),
    "dataset_train_split": _hub_dataset_handler("split", ("train",)),
    **transforms.same_handler(_convert_mixture, "dataset_mixture.datasets datasets"),
    "dataset_mixture.test_split_size": transforms.convert_eval_split,
    "data_files": _convert_data_files,
    **transforms.same_handler(
        transforms.convert_switch("data.loss_on", "assistant", "all"),
        "assistant_only_loss completion_only_loss",
    ),
    # adapter
    "use_peft": transforms.convert_switch("adapter.kind", "lora", "none"),
    "finetune_vision_layers": transforms.set_if_enabled(
        "adapter.vision", "lora", off_note="the tower is frozen"
    ),
    "finetune_language_layers": transforms.accept_only(
        "True true",
        "the language part is trained",
        "the language part is trained: adapter.targets names others",
    ),
    **transforms.same_handler(transforms.convert_lora_init, "init_lora_weights lora_init"),
    # preferences
    "trl_method": _convert_method,
    "loss_type": transforms.choose_handler(
        lambda draft, _: _read_objective(draft),
        transforms.report_no_effect("part of train.objective"),
        transforms.accept_only("nll chunked_nll", "cross-entropy", "the loss is cross-entropy"),
    ),
    "beta": _preference_handler("beta", "dpo", "ipo", "orpo", "cpo", "simpo", "kto"),
    "label_smoothing": _preference_handler("label_smoothing", "dpo", "cpo"),
    "rpo_alpha": _preference_handler("nll", "dpo", "ipo"),
    "cpo_alpha": _preference_handler("nll", "cpo", "simpo"),
    "simpo_gamma": _preference_handler("simpo_gamma", "simpo"),
    "desirable_weight": _preference_handler("desirable_weight", "kto"),
    "undesirable_weight": _preference_handler("undesirable_weight", "kto"),
    "center_rewards_coefficient": _preference_handler("center_rewards_coefficient", "reward"),
    "f_divergence_type": transforms.accept_only(
        "reverse_kl", "the default", "the divergence is the reverse KL"
    ),
    "truncation_mode": transforms.accept_only(
        "keep_start", "the default", "what is longer than data.max_length is cut at its end"
    ),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds the defaults of Hugging Face's trainers to the new configuration where they differ from
    the defaults of Isotype. If the file does not use PEFT, every weight is trained.
    """
    has_peft = source.find_key(
        "lora_r", "lora_alpha", "lora_target_modules"
    ) or source.called_names & {
        "LoraConfig",
        "get_peft_model",
    }
    is_sft = "SFTConfig" in source.called_names or "sft" in source.method
    method = str(source.get("trl_method"))
    if "train.steps" not in draft.settings:
        draft.set_default("train.epochs", 3.0)
    if method == "reward":
        rate = 1e-4
    elif method in _LOSSES:
        rate = 1e-6
    elif is_sft:
        rate = 2e-5
    else:
        rate = 5e-5
    draft.set_defaults(
        {
            "train.batch_size": 8,
            "train.learning_rate": rate,
            "train.schedule": "linear",
            "train.warmup": 0,
        }
    )
    if method in _LOSSES:
        if "max_length" not in draft.source_values:
            draft.set_default("data.max_length", 1024)
        if draft.settings.get("train.objective") == "simpo":
            draft.set_default("preference.nll", 1.0)  # cpo_alpha
        drop_preference_conflicts(draft)
    if is_sft and "data.loss_on" not in draft.settings:
        draft.notes.append(
            "data.loss_on: TRL learns whole conversations unless assistant_only_loss is set; here"
            " the answers only (data.loss_on: all)"
        )
    draft.settings.setdefault("adapter.kind", "lora" if has_peft else "none")
    if source.called_names & _VISION_MODEL_CLASSES:
        draft.notes.append(
            "data.train: rows with pictures have `messages` and `images` (docs/vision.md)"
        )
    is_unsloth = source.tool == "unsloth"
    if (
        draft.set_adapter_defaults("lora", 16 if is_unsloth else 8, 16.0 if is_unsloth else 8.0)
        and "adapter.targets" not in draft.settings
        and not is_unsloth
    ):
        draft.notes.append(
            "adapter.targets: there PEFT chooses modules by the model's family; here all linear"
            " layers get an adapter"
        )
