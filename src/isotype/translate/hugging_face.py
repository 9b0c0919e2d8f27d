"""Hugging Face `TrainingArguments`, TRL's SFT (Python, YAML or command line), and Unsloth's notebooks, which are made of both."""

from __future__ import annotations

import re

from .draft import Draft, Given
from .source import Source
from .transforms import (
    GPUS,
    IRRELEVANT,
    Handler,
    attention,
    checkpointing,
    each,
    evaluation,
    no_effect,
    not_offered,
    number,
    only,
    optimizer,
    schedule,
    schedule_details,
    start,
    targets,
    to,
    to_count,
    to_either,
    to_number,
    to_truth,
    trackers,
    warmup_ratio,
    warmup_steps,
    when_on,
)

_METHOD = re.compile(r"^(DPO|GRPO|KTO|ORPO|CPO|Reward|PRM|RLOO|PPO|BCO|XPO|NashMD|GKD|OnlineDPO|MiniLLM)(?:v2)?(?:Config|Trainer)$")
_TASK = re.compile(r"^(?:Auto\w*|\w+?)(?:ModelFor|For)(?!CausalLM)(\w+)$|^(Diffusion|StableDiffusion|Flux)\w*Pipeline$")
_METHOD_KEYS = (
    *("rpo_alpha", "ref_model", "reference_free", "num_generations", "desirable_weight"),
    *("reward_funcs", "max_prompt_length", "beta"),
)
_VISION = ("FastVisionModel", "FastDiffusionModel", "AutoModelForImageTextToText", "AutoModelForVision2Seq")


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
    if name in ("json", "csv", "parquet", "text") and draft.keys.get("data_files"):
        draft.no_effect(given, "the format is seen from the file")
    elif re.search(r"\.(jsonl?|csv|parquet|txt)$", name) or name.startswith(("/", "./", "../")):
        draft.set(given, "data.train", name)
    else:
        draft.set(given, "data.train", f"hf:{name}", "a dataset of the hub")


def _data_files(draft: Draft, given: Given) -> None:
    if isinstance(given.value, dict):
        for split, key in (("train", "data.train"), ("validation", "data.eval"), ("test", "data.eval")):
            if split in given.value and key not in draft.settings:
                draft.set(given, key, given.value[split])
    else:
        draft.set(given, "data.train", given.value)


def _of_the_dataset(key: str, usual: tuple[str, ...]) -> Handler:
    """`split` and `subset` of a hub dataset become keys of data.train's mapping."""

    def handler(draft: Draft, given: Given) -> None:
        name = draft.settings.get("data.train")
        if str(given.value) in usual:
            draft.no_effect(given, "the default")
        elif isinstance(name, list) or (isinstance(name, str) and name.startswith("hf:")):
            entry = name[0] if isinstance(name, list) else {"name": name}
            draft.set(given, "data.train", [{**entry, key: str(given.value)}])
        else:
            draft.not_offered(given, f"{key} is for datasets of the hub: data.train: [{{name: 'hf:NAME', {key}: ...}}]")

    return handler


def _mixture(draft: Draft, given: Given) -> None:
    """alignment-handbook's and TRL's `dataset_mixture.datasets`: id or path, config, split, weight; columns are ignored."""
    entries = []
    for one in given.value:
        entry = {"name": f"hf:{one.get('id') or one['path']}"}
        for theirs, ours, usual in (("config", "subset", "default"), ("name", "subset", "default"), ("split", "split", "train")):
            if one.get(theirs) not in (None, usual):
                entry[ours] = str(one[theirs])
        entries.append(entry | ({"weight": one["weight"]} if one.get("weight") not in (None, 1, 1.0) else {}))
    note = ""
    if any("weight" in entry for entry in entries):
        entries = [{"weight": 1, **entry} for entry in entries]
        note = "weight is a share of the rows drawn in an epoch; there, of the rows that are kept"
    draft.set(given, "data.train", entries, note)


def _eval_share(draft: Draft, given: Given) -> None:
    if number(given.value) < 1:
        to_number("data.eval_split")(draft, given)
    else:
        draft.not_offered(given, "data.eval_split is a share of the rows")


LOSS_ON = to_either("data.loss_on", "assistant", "all")
LIGER = when_on("model.optimize", True, "switched off; model.optimize is on by default", "Isotype's own ops instead of Liger's")
# what Hugging Face's Trainer and PEFT take; LLaMA-Factory and axolotl hand these on
TRAINER: dict[str, Handler] = {
    "model_revision": to("model.revision"),
    "tokenizer_name": to("model.tokenizer"),
    "trust_remote_code": to_truth("model.trust_remote_code"),
    "attn_implementation": attention,
    # adapter
    "lora_r": to_count("adapter.r"),
    "lora_alpha": to_number("adapter.alpha"),
    "lora_dropout": to("adapter.dropout", lambda value: number(value or 0)),
    "lora_target_modules": targets,
    "lora_modules_to_save": to("adapter.modules_to_save"),
    **each(not_offered("one learning rate for all weights"), "embedding_learning_rate"),
    # precision: decided together
    **each(
        Draft.precision,
        "bf16 fp16 tf32 dtype torch_dtype load_in_4bit load_in_8bit load_in_16bit load_in_fp8 full_finetuning bnb_4bit_quant_type "
        "bnb_4bit_compute_dtype bnb_4bit_use_double_quant use_bnb_nested_quant bnb_4bit_quant_storage",
    ),
    # steps
    "max_steps": to_count("train.steps"),
    "num_train_epochs": to_number("train.epochs"),
    "per_device_train_batch_size": to_number("train.batch_size"),
    "per_device_eval_batch_size": to_number("train.eval_batch_size"),
    "gradient_accumulation_steps": to_number("train.accumulate"),
    "learning_rate": to_number("train.learning_rate"),
    "weight_decay": to_number("train.weight_decay"),
    "adam_beta1": to_number("train.beta1"),
    "adam_beta2": to_number("train.beta2"),
    "adam_epsilon": to_number("train.epsilon"),
    "max_grad_norm": to_number("train.clip"),
    "seed": to_number("train.seed"),
    "auto_find_batch_size": not_offered("isotype plan says which batch fits"),
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs": schedule_details,
    "warmup_ratio": warmup_ratio,
    "warmup_steps": warmup_steps,
    "optim": optimizer,
    "optim_args": not_offered("train.beta1, train.beta2 and train.epsilon are the optimizer's settings"),
    **each(checkpointing, "gradient_checkpointing use_gradient_checkpointing"),
    "gradient_checkpointing_kwargs": no_effect("recomputation is always the non-reentrant one"),
    "activation_offloading": when_on("train.gradient_checkpointing", "layers+offload", "off"),
    "data_seed": no_effect("train.seed"),
    "full_determinism": to_truth("train.deterministic"),
    "neftune_noise_alpha": to_number("train.embedding_noise"),
    "label_smoothing_factor": not_offered("no label smoothing in a run; isotype.ops.cross_entropy has it"),
    "torch_compile": not_offered("train without it: the fused ops are used by default (model.optimize)"),
    # evaluation, saving, logging
    **each(evaluation, "eval_strategy evaluation_strategy"),
    "do_train": no_effect("isotype train trains"),
    "do_eval": no_effect("evaluation rows are held out: data.eval_split"),
    "eval_steps": to_count("train.eval_every"),
    "save_steps": to_count("run.save_every"),
    "save_total_limit": to_count("run.keep"),
    "logging_steps": to_count("run.log_every"),
    "early_stopping_patience": to_count("train.patience"),
    "save_strategy": no_effect("checkpoints come by run.save_every, by default at every evaluation, and one at the end"),
    "load_best_model_at_end": no_effect("the best checkpoint is always kept, and the report names it"),
    **each(no_effect("the evaluation loss; lower is better"), "prediction_loss_only"),
    **each(no_effect("every line is written: run.log_every"), "logging_strategy"),
    "report_to": trackers,
    "output_dir": to("run.folder"),
    **each(no_effect("everything lies in run.folder, which names the run"), "run_name"),
    "overwrite_output_dir": no_effect("a folder that holds a run is never overwritten"),
    "push_to_hub": not_offered("run.push_to_hub: ORG/NAME pushes the result"),
    **each(no_effect("nothing is uploaded"), "hub_model_id hub_strategy"),
    "resume_from_checkpoint": not_offered("isotype train --resume RUN"),
    "save_safetensors": no_effect("always safetensors"),
    "save_only_model": no_effect("checkpoints always hold the optimizer, and can be resumed from"),
    **each(no_effect("metrics.jsonl is always written"), "trackio_*"),
    # machine
    **each(
        no_effect("rows are tokenised before training and read from one array"),
        "dataloader_num_workers",
    ),
    "deepspeed": not_offered("a DeepSpeed file is not read: precision.* and the memory plan (isotype plan) take its place"),
    **each(not_offered(GPUS), "fsdp fsdp_config"),
    "ddp_find_unused_parameters": no_effect("gradients are summed once a step without DDP"),
    "ddp_timeout": no_effect("no such limit"),
    **each(no_effect("model.device; one process uses one device"), "device_map"),
    "use_cpu": when_on("model.device", "cpu", "model.device: auto"),
    "use_mps_device": not_offered("model.device is auto, cuda or cpu"),
    "low_cpu_mem_usage": no_effect("weights are always loaded that way"),
    "use_cache": no_effect("off in training, on in samples"),
    "token": no_effect("HF_TOKEN in the environment"),
    **each(no_effect("losses are always divided by the tokens of the whole step"), "average_tokens_across_devices accelerator_config"),
    **each(no_effect("tokens a second are always shown"), "include_tokens_per_second"),
    "group_by_length": no_effect("rows of like length are put together where it saves padding"),
}
KEYS: dict[str, Handler] = {
    **TRAINER,
    "model_name_or_path": to("model.name"),
    "revision": to("model.revision"),
    "tokenizer_name_or_path": to("model.tokenizer"),
    **each(LIGER, "use_liger_kernel use_liger"),
    # data
    "dataset_name": _dataset,
    **each(_of_the_dataset("subset", ("default", "main")), "dataset_config dataset_config_name"),
    "dataset_train_split": _of_the_dataset("split", ("train",)),
    **each(_mixture, "dataset_mixture.datasets datasets"),
    "dataset_mixture.test_split_size": _eval_share,
    "dataset_mixture.seed": no_effect("train.seed"),
    "dataset_test_split": no_effect("data.eval names the evaluation data; without it data.eval_split is held out"),
    "data_files": _data_files,
    "train_file": to("data.train"),
    "validation_file": to("data.eval"),
    "chat_template_path": to("data.chat_template"),
    **each(to_count("data.max_length"), "max_length max_seq_length"),
    "max_train_samples": to_count("data.limit"),
    "packing": to_truth("data.packing"),
    "packing_strategy": no_effect("rows are packed whole, longest first, and never cut"),
    "padding_free": no_effect("data.packing has no padding"),
    "dataset_text_field": no_effect("rows with `text` are recognised; another key: data.columns"),
    **each(
        no_effect("rows are read by data.* (docs/data.md)"),
        "dataset_num_proc num_proc dataset_kwargs remove_unused_columns",
    ),
    "chat_template": not_offered("data.chat_template: a file with this text; without it the tokenizer's own is used"),
    **each(LOSS_ON, "assistant_only_loss completion_only_loss"),
    **each(no_effect("rows are shuffled in every epoch: data.shuffle"), "train_sampling_strategy"),
    "eos_token": no_effect("the tokenizer's own; the end-of-turn token is always learnt"),
    **each(to_truth("data.stream"), "streaming dataset_streaming"),
    # adapter
    "use_peft": to_either("adapter.kind", "lora", "none"),
    "lora_bias": not_offered("biases are not trained"),
    **each(no_effect("always CAUSAL_LM"), "task_type"),
    "use_rslora": to_truth("adapter.rslora"),
    "use_dora": to_truth("adapter.dora"),
    **each(start, "init_lora_weights lora_init"),
    "rank_pattern": to("adapter.rank_pattern"),
    "alpha_pattern": to("adapter.alpha_pattern"),
    "loftq": not_offered("LoftQ is not offered"),
    "lora_seed": no_effect("train.seed makes the adapter's first weights"),
    "layers_to_transform": not_offered("adapter.targets takes names of modules, as PEFT understands them"),
    "finetune_*": not_offered("adapter.targets names the modules"),
    # the rest
    **each(no_effect("evaluation runs under the run's precision, and leaves the weights as they are"), "fp16_full_eval"),
    **each(no_effect("samples come from the model that is trained"), "fast_inference"),
    "loss_type": only("nll chunked_nll", "cross-entropy", "the loss is cross-entropy"),
    "qat_scheme": not_offered("quantisation-aware training is not offered"),
    "offload_embedding": not_offered("the input embedding stays on the device"),
    **each(no_effect(IRRELEVANT), "log_level unsloth_force_compile"),
}


def finish(draft: Draft, source: Source) -> None:
    """Without PEFT every weight is trained; the defaults that differ from Isotype's are written down."""
    peft = source.has("lora_r", "lora_alpha", "lora_target_modules") or source.calls & {"LoraConfig", "get_peft_model"}
    draft.settings.setdefault("adapter.kind", "lora" if peft else "none")
    sft = "SFTConfig" in source.calls or "sft" in source.method
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
    if draft.without_adapter():
        return
    rank = 16 if source.tool == "unsloth" else 8
    draft.default("adapter.r", rank)
    draft.default("adapter.alpha", float(rank))
    if "adapter.targets" not in draft.settings and source.tool != "unsloth":
        draft.notes.append("adapter.targets: there PEFT chooses modules by the model's family; here all linear layers get an adapter")
