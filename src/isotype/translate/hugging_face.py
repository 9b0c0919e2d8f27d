# ruff: noqa: E501  a table: one row, one key
"""Hugging Face `TrainingArguments`, TRL's SFT (Python, YAML or command line), and Unsloth's notebooks, which are made of both."""

from __future__ import annotations

import re

from .account import Draft, Given, Handler, no_effect, not_offered, number, precision, to, to_count, to_number, to_truth, truth
from .source import Source
from .words import (
    attention,
    checkpointing,
    dropout,
    evaluation,
    optimizer,
    saving,
    schedule,
    schedule_details,
    targets,
    trackers,
    warmup_ratio,
    warmup_steps,
)

_METHOD = re.compile(r"^(DPO|GRPO|KTO|ORPO|CPO|Reward|PRM|RLOO|PPO|BCO|XPO|NashMD|GKD|OnlineDPO|MiniLLM)(?:v2)?(?:Config|Trainer)$")
_TASK = re.compile(r"^(?:Auto\w*|\w+?)(?:ModelFor|For)(?!CausalLM)(\w+)$|^(Diffusion|StableDiffusion|Flux)\w*Pipeline$")
_METHOD_KEYS = (
    "rpo_alpha",
    "ref_model",
    "reference_free",
    "num_generations",
    "desirable_weight",
    "reward_funcs",
    "max_prompt_length",
    "beta",
)
_VISION = ("FastVisionModel", "FastDiffusionModel", "AutoModelForImageTextToText", "AutoModelForVision2Seq")
_DATA = "rows are read by data.* (docs/data.md)"


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    for name in sorted(source.calls):
        if found := _METHOD.match(name):
            return f"{found[1]} is not offered: Isotype trains causal language models on given answers (SFT) and on text"
        if name.endswith("Trainer") and name not in ("Trainer", "SFTTrainer", "UnslothTrainer", "Seq2SeqTrainer"):
            return f"{name} is a trainer of its own: isotype.optimize(model) and `isotype doctor trace` work with it as it is"
        if name in _VISION:
            return f"{name}: models with pictures are not offered"
        if name.endswith("ForConditionalGeneration"):
            return f"{name}: only causal language models without pictures are trained"
    parsed = source.calls & {"HfArgumentParser", "TrlParser"}
    if parsed and not any(given.written.startswith(("TrainingArguments", "SFTConfig")) for given in source.keys):
        return (
            f"takes its settings from its command line ({', '.join(sorted(parsed))}): give the shell script or the YAML file that starts it"
        )
    if not any("CausalLM" in name or name in ("SFTTrainer", "SFTConfig") or name.startswith("Fast") for name in source.calls):
        for name in sorted(source.calls):
            if (found := _TASK.match(name)) and name not in ("LoraConfig",) and "Collator" not in name:
                return f"{name}: only causal language models are trained"
    word = source.method.split(" ")[0]
    if word in ("dpo", "grpo", "kto", "orpo", "cpo", "reward", "rloo", "prm"):
        return f"trl {word} is not offered: Isotype trains on given answers (SFT) and on text"
    if found := re.search(r"\b(dpo|grpo|kto|orpo|cpo|reward_modeling|rloo|ppo)\w*\.py", source.method):
        return f"{found[1]} is not offered: Isotype trains on given answers (SFT) and on text"
    if given := source.has(*_METHOD_KEYS):
        return f"line {given.line}: {given.written or given.name} belongs to a preference or reward method, which is not offered"
    if given := source.has("auto_model"):
        return f"line {given.line}: {given.written}: auto_model names another class than a causal language model's"
    if source.has("predict_with_generate", "generation_num_beams"):
        return "sequence-to-sequence training is not offered: only causal language models are trained"
    return None


def _dataset(draft: Draft, given: Given) -> None:
    name = str(given.value)
    files = draft.keys.get("data_files")
    if name in ("json", "csv", "parquet", "text") and files:
        draft.no_effect(given, "the format is seen from the file")
        return
    here = name if re.search(r"\.(jsonl?|csv|parquet|txt)$", name) or name.startswith(("/", "./", "../")) else f"hf:{name}"
    draft.set(given, "data.train", here, "" if here == name else "a dataset of the hub")


def _data_files(draft: Draft, given: Given) -> None:
    value = given.value
    if isinstance(value, dict):
        for split, key in (("train", "data.train"), ("validation", "data.eval"), ("test", "data.eval")):
            if split in value and key not in draft.settings:
                draft.set(given, key, value[split])
    else:
        draft.set(given, "data.train", value)


def _of_the_dataset(key: str, usual: tuple[str, ...]) -> Handler:
    """`split` and `subset` of a hub dataset become keys of data.train's mapping."""

    def handler(draft: Draft, given: Given) -> None:
        name = draft.settings.get("data.train")
        if str(given.value) in usual or given.value is None:
            draft.no_effect(given, "the default")
        elif isinstance(name, str) and name.startswith("hf:"):
            draft.set(given, "data.train", [{"name": name, key: str(given.value)}])
        elif isinstance(name, list):
            draft.set(given, "data.train", [{**name[0], key: str(given.value)}])
        else:
            draft.not_offered(given, f"{key} is for datasets of the hub: data.train: [{{name: 'hf:NAME', {key}: ...}}]")

    return handler


def _mixture(draft: Draft, given: Given) -> None:
    """alignment-handbook's and TRL's `dataset_mixture.datasets`: id or path, config, split, weight; columns only pick what is read anyway."""
    entries = []
    for one in given.value:
        entry = {"name": f"hf:{one.get('id') or one['path']}"}
        for theirs, ours, usual in (("config", "subset", "default"), ("name", "subset", "default"), ("split", "split", "train")):
            if one.get(theirs) not in (None, usual):
                entry[ours] = str(one[theirs])
        entries.append(entry | ({"weight": one["weight"]} if one.get("weight") not in (None, 1, 1.0) else {}))
    weighed = any("weight" in entry for entry in entries)
    if weighed:
        entries = [{"weight": 1, **entry} for entry in entries]
    draft.set(
        given, "data.train", entries, "weight is a share of the rows drawn in an epoch; there, of the rows that are kept" if weighed else ""
    )


def _use_peft(draft: Draft, given: Given) -> None:
    draft.set(given, "adapter.kind", "lora" if truth(given.value) else "none")


def _liger(draft: Draft, given: Given) -> None:
    if truth(given.value):
        draft.set(given, "model.optimize", True, "Isotype's own ops instead of Liger's")
    else:
        draft.no_effect(given, "switched off; model.optimize is on by default")


def _loss_on(draft: Draft, given: Given) -> None:
    draft.set(given, "data.loss_on", "assistant" if truth(given.value) else "all")


def _neftune(draft: Draft, given: Given) -> None:
    not_offered("noise on embeddings (NEFTune) has no counterpart")(draft, given)


KEYS: dict[str, Handler] = {
    "model_name_or_path": to("model.name"),
    "model_revision": to("model.revision"),
    "revision": to("model.revision"),
    "tokenizer_name": to("model.tokenizer"),
    "tokenizer_name_or_path": to("model.tokenizer"),
    "trust_remote_code": to_truth("model.trust_remote_code"),
    "attn_implementation": attention,
    "use_liger_kernel": _liger,
    "use_liger": _liger,
    # data
    "dataset_name": _dataset,
    "dataset_config": _of_the_dataset("subset", ("default", "main")),
    "dataset_config_name": _of_the_dataset("subset", ("default", "main")),
    "dataset_train_split": _of_the_dataset("split", ("train",)),
    "dataset_mixture.datasets": _mixture,
    "datasets": _mixture,
    "dataset_mixture.test_split_size": lambda draft, given: to_number("data.eval_split")(draft, given) if number(given.value) < 1 else draft.not_offered(given, "data.eval_split is a share of the rows"),
    "dataset_mixture.seed": no_effect("train.seed"),
    "chat_template": not_offered("data.chat_template: a file with this text; without it the tokenizer's own is used"),
    "log_level": no_effect("nothing here depends on it"),
    "embedding_learning_rate": not_offered("one learning rate for all weights"),
    "dataset_test_split": no_effect("data.eval names the evaluation data; without it data.eval_split is held out"),
    "data_files": _data_files,
    "train_file": to("data.train"),
    "validation_file": to("data.eval"),
    "max_length": to_count("data.max_length"),
    "max_seq_length": to_count("data.max_length"),
    "packing": to_truth("data.packing"),
    "packing_strategy": no_effect("rows are packed whole, longest first, and never cut"),
    "eval_packing": no_effect("evaluation rows are never packed; the loss is the same"),
    "padding_free": no_effect("data.packing has no padding"),
    "dataset_text_field": no_effect("rows with `text` are recognised; another key: data.columns"),
    "dataset_num_proc": no_effect(_DATA),
    "dataset_kwargs": no_effect(_DATA),
    "chat_template_path": to("data.chat_template"),
    "assistant_only_loss": _loss_on,
    "completion_only_loss": _loss_on,
    "group_by_length": no_effect("rows of like length are put together where it saves padding"),
    "remove_unused_columns": no_effect(_DATA),
    "shuffle_dataset": no_effect("rows are shuffled in every epoch: data.shuffle"),
    "max_train_samples": to_count("data.limit"),
    "eos_token": no_effect("the tokenizer's own; the end-of-turn token is always learnt"),
    "pad_token": no_effect("padding has no part in the loss"),
    "streaming": to_truth("data.stream"),
    "dataset_streaming": to_truth("data.stream"),
    # adapter
    "use_peft": _use_peft,
    "lora_r": to_count("adapter.r"),
    "lora_alpha": to_number("adapter.alpha"),
    "lora_dropout": dropout,
    "lora_target_modules": targets,
    "lora_modules_to_save": to("adapter.modules_to_save"),
    "lora_bias": not_offered("biases are not trained"),
    "lora_task_type": no_effect("always CAUSAL_LM"),
    "task_type": no_effect("always CAUSAL_LM"),
    "lora_inference_mode": no_effect("an adapter is trained"),
    "use_rslora": to_truth("adapter.rslora"),
    "use_dora": not_offered("DoRA is not offered; plain LoRA is used"),
    "lora_init": no_effect("PEFT's default: B is zero"),
    "loftq": not_offered("LoftQ is not offered"),
    "lora_seed": no_effect("train.seed makes the adapter's first weights"),
    # precision: decided together
    **dict.fromkeys(
        ("bf16", "fp16", "tf32", "dtype", "torch_dtype", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype",
         "bnb_4bit_use_double_quant", "use_bnb_nested_quant", "bnb_4bit_quant_storage", "load_in_fp8", "full_finetuning"),
        precision,
    ),
    "bf16_full_eval": no_effect("evaluation runs under the run's precision, and leaves the weights as they are"),
    "fp16_full_eval": no_effect("evaluation runs under the run's precision, and leaves the weights as they are"),
    "half_precision_backend": no_effect("one backend"),
    # steps
    "max_steps": to_count("train.steps"),
    "num_train_epochs": to_number("train.epochs"),
    "per_device_train_batch_size": to_number("train.batch_size"),
    "per_device_eval_batch_size": to_number("train.eval_batch_size"),
    "gradient_accumulation_steps": to_number("train.accumulate"),
    "auto_find_batch_size": not_offered("isotype plan says which batch fits"),
    "learning_rate": to_number("train.learning_rate"),
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs": schedule_details,
    "warmup_ratio": warmup_ratio,
    "warmup_steps": warmup_steps,
    "optim": optimizer,
    "optim_args": not_offered("train.beta1, train.beta2 and train.epsilon are the optimizer's settings"),
    "weight_decay": to_number("train.weight_decay"),
    "adam_beta1": to_number("train.beta1"),
    "adam_beta2": to_number("train.beta2"),
    "adam_epsilon": to_number("train.epsilon"),
    "max_grad_norm": to_number("train.clip"),
    "gradient_checkpointing": checkpointing,
    "gradient_checkpointing_kwargs": no_effect("recomputation is always the non-reentrant one"),
    "seed": to_number("train.seed"),
    "data_seed": no_effect("train.seed"),
    "full_determinism": to_truth("train.deterministic"),
    "neftune_noise_alpha": _neftune,
    "label_smoothing_factor": not_offered("no label smoothing in a run; isotype.ops.cross_entropy has it"),
    "torch_compile": not_offered("train without it: the fused ops are used by default (model.optimize)"),
    # evaluation, saving, logging
    "eval_strategy": evaluation,
    "evaluation_strategy": evaluation,
    "do_train": no_effect("isotype train trains"),
    "do_eval": no_effect("evaluation rows are held out: data.eval_split"),
    "eval_steps": to_count("train.eval_every"),
    "save_strategy": saving,
    "save_steps": to_count("run.save_every"),
    "save_total_limit": to_count("run.keep"),
    "load_best_model_at_end": no_effect("the best checkpoint is always kept, and the report names it"),
    "metric_for_best_model": no_effect("the evaluation loss"),
    "greater_is_better": no_effect("the evaluation loss, lower is better"),
    "logging_steps": to_count("run.log_every"),
    "logging_strategy": no_effect("run.log_every"),
    "logging_dir": no_effect("everything lies in run.folder"),
    "logging_first_step": no_effect("every line is written: run.log_every"),
    "report_to": trackers,
    "run_name": no_effect("run.folder names the run"),
    "output_dir": to("run.folder"),
    "overwrite_output_dir": no_effect("a folder that holds a run is never overwritten"),
    "early_stopping_patience": to_count("train.patience"),
    "push_to_hub": not_offered("isotype merge RUN writes the model; upload it with `hf upload`"),
    "hub_model_id": no_effect("nothing is uploaded"),
    "hub_strategy": no_effect("nothing is uploaded"),
    "resume_from_checkpoint": not_offered("isotype train --resume RUN"),
    "disable_tqdm": no_effect("--quiet"),
    # machine
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
        no_effect("rows are tokenised before training and read from one array"),
    ),
    "dataloader_drop_last": no_effect("the last, smaller batch is weighed by its tokens"),
    "deepspeed": not_offered("a DeepSpeed file is not read: precision.* and the memory plan (isotype plan) take its place"),
    "fsdp": not_offered("not set in the file: it says what a step is, not on how many GPUs"),
    "fsdp_config": not_offered("not set in the file: it says what a step is, not on how many GPUs"),
    "ddp_find_unused_parameters": no_effect("gradients are summed once a step without DDP"),
    "ddp_timeout": no_effect("no such limit"),
    "device_map": no_effect("model.device; one process uses one device"),
    "use_cpu": lambda draft, given: draft.set(given, "model.device", "cpu") if truth(given.value) else draft.no_effect(given, "model.device: auto"),
    "low_cpu_mem_usage": no_effect("weights are always loaded that way"),
    "use_cache": no_effect("off in training, on in samples"),
    "token": no_effect("HF_TOKEN in the environment"),
    "fast_inference": no_effect("samples come from the model that is trained"),
    "gpu_memory_utilization": no_effect("samples come from the model that is trained"),
    "max_lora_rank": no_effect("adapter.r"),
    "average_tokens_across_devices": no_effect("losses are always divided by the tokens of the whole step"),
    "include_num_input_tokens_seen": no_effect("tokens are always counted"),
    "include_tokens_per_second": no_effect("tokens a second are always shown"),
    "prediction_loss_only": no_effect("evaluation is the loss"),
    "activation_offloading": lambda draft, given: draft.set(given, "train.gradient_checkpointing", "layers+offload") if truth(given.value) else draft.no_effect(given, "off"),
    **dict.fromkeys(("trackio_*", "project", "hub_private_repo"), no_effect("metrics.jsonl is always written")),
    "num_proc": no_effect(_DATA),
    "data_dir": no_effect("part of the dataset; name the files in data.train"),
    "save_safetensors": no_effect("always safetensors"),
    "save_only_model": no_effect("checkpoints always hold the optimizer, and can be resumed from"),
    "length_column_name": no_effect(_DATA),
    "train_sampling_strategy": no_effect("rows are shuffled in every epoch: data.shuffle"),
    "ignore_data_skip": no_effect("a resumed run goes on where it was"),
    "accelerator_config": no_effect("losses are always divided by the tokens of the whole step"),
    "loss_type": lambda draft, given: draft.no_effect(given, "cross-entropy") if given.value in ("nll", "chunked_nll") else draft.not_offered(given, "the loss is cross-entropy"),
    "unsloth_force_compile": no_effect("nothing here depends on it"),
    "layers_to_transform": not_offered("adapter.targets takes names of modules, as PEFT understands them"),
    "target_parameters": not_offered("adapters are put on linear layers"),
    "finetune_*": not_offered("adapter.targets names the modules"),
    "use_gradient_checkpointing": checkpointing,
    "load_in_16bit": precision,
    "qat_scheme": not_offered("quantisation-aware training is not offered"),
    "attn_implementation_internal": no_effect("model.attention"),
    "offload_embedding": lambda draft, given: draft.set(given, "model.embedding", "host") if truth(given.value) else draft.no_effect(given, "off"),
    "use_mps_device": not_offered("model.device is auto, cuda or cpu"),
    "max_memory": no_effect("one process uses one device"),
    "use_fast": no_effect("the model's own tokenizer"),
    "torch_empty_cache_steps": no_effect("memory is planned, so that no cache has to be emptied"),
}  # fmt: skip


def finish(draft: Draft, source: Source) -> None:
    """Without PEFT every weight is trained; the defaults that differ from Isotype's are written down."""
    if "adapter.kind" not in draft.settings:
        peft = source.has("lora_r", "lora_alpha", "lora_target_modules") or source.calls & {"LoraConfig", "get_peft_model"}
        draft.settings["adapter.kind"] = "lora" if peft else "none"
    if draft.settings["adapter.kind"] == "none":
        for key in [key for key in draft.settings if key.startswith("adapter.") and key != "adapter.kind"]:
            del draft.settings[key]
    sft = "SFTConfig" in source.calls or source.method.startswith("sft") or "sft" in source.method
    draft.default("train.batch_size", 8)
    if "train.steps" not in draft.settings:
        draft.default("train.epochs", 3.0)
    draft.default("train.learning_rate", 2e-5 if sft else 5e-5)
    draft.default("train.schedule", "linear")
    draft.default("train.warmup", 0)
    if sft and "data.loss_on" not in draft.settings:
        draft.notes.append(
            "data.loss_on: TRL learns whole conversations unless assistant_only_loss is set; here the answers only (data.loss_on: all)"
        )
    if draft.settings["adapter.kind"] == "lora":
        rank = 16 if source.tool == "unsloth" else 8
        draft.default("adapter.r", rank)
        draft.default("adapter.alpha", float(rank))
        if "adapter.targets" not in draft.settings and source.tool != "unsloth":
            draft.notes.append("adapter.targets: there PEFT chooses modules by the model's family; here all linear layers get an adapter")
