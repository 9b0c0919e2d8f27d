"""Recognises the tool of a tree of settings by its keys. The name of the file only decides between tools that fit equally well.

A tool's distinctive keys weigh three, its ordinary ones one. Trainers that are recognised but not checked are named in a note, because no
output would look like a clean result.
"""

from __future__ import annotations

from typing import Any

# tool -> (distinctive keys, ordinary keys)
KEYS: dict[str, tuple[str, str]] = {
    "isotype": ("", ""),  # recognised by its sections, below
    "axolotl": (
        "base_model micro_batch_size sequence_len sample_packing bf16_full fp32_norms flash_attention "
        "lora_target_linear val_set_size datasets "
        "dataset_prepared_path pad_to_sequence_len xformers_attention sdp_attention strict "
        "fp8_enable_fsdp_float8_all_gather float16 float32",
        (
            "adapter load_in_8bit load_in_4bit bf16 fp16 lora_r rl deepspeed fsdp_config "
            "gradient_accumulation_steps optimizer learning_rate tf32 bfloat16 fsdp_version"
        ),
    ),
    "llamafactory": (
        "finetuning_type pure_bf16 quantization_bit upcast_layernorm upcast_lmhead_output template "
        "cutoff_len dataset_dir use_galore use_badam quantization_method "
        "dataset do_train fp8 lora_target",
        "stage model_name_or_path bf16 fp16 deepspeed lora_rank per_device_train_batch_size output_dir flash_attn",
    ),
    "torchtune": ("_component_ checkpointer tokenizer.path compile batch_size epochs", "dtype device optimizer loss model profiler"),
    "torchtitan": (
        (
            "job training.mixed_precision_param training.mixed_precision_reduce parallelism training.steps "
            "training.local_batch_size activation_checkpoint"
        ),
        "",
    ),
    "kohya": (
        "full_bf16 full_fp16 fp8_base fp8_base_unet network_module network_dim network_alpha network_args "
        "cache_latents train_data_dir dataset_config "
        "no_half_vae clip_skip xformers max_train_steps save_model_as",
        "mixed_precision pretrained_model_name_or_path optimizer_type save_precision learning_rate unet_lr sdpa",
    ),
    "simpletuner": (
        "model_family base_model_precision base_model_default_dtype gradient_precision data_backend_config model_flavour validation_prompt "
        "text_encoder_1_precision quantize_via vae_dtype lora_type attention_mechanism "
        "validation_step_interval checkpoint_step_interval i_know_what_i_am_doing use_ema",
        "model_type pretrained_model_name_or_path mixed_precision optimizer max_train_steps fsdp_enable resume_from_checkpoint lora_rank",
    ),
    "lightning": (
        "trainer.precision trainer.accelerator trainer.max_epochs trainer.strategy "
        # litgpt, which is Fabric
        "quantize lora_query lora_key lora_value lora_projection lora_mlp lora_head train.global_batch_size train.max_seq_length",
        "precision accelerator strategy devices max_epochs trainer.devices",
    ),
    "accelerate": (
        (
            "compute_environment distributed_type main_training_function num_machines machine_rank downcast_bf16 "
            "rdzv_backend same_network debug"
        ),
        "mixed_precision num_processes fsdp_config deepspeed_config use_cpu dynamo_config",
    ),
    "deepspeed": (
        "zero_optimization train_micro_batch_size_per_gpu data_types zero_force_ds_cpu_optimizer "
        "communication_data_type torch_autocast bf16.enabled fp16.enabled amp.enabled "
        "fp16.loss_scale fp16.initial_scale_power bf16.bf16_master_weights_and_grads",
        (
            "train_batch_size gradient_clipping gradient_accumulation_steps bf16 fp16 amp wall_clock_breakdown "
            "optimizer scheduler steps_per_print"
        ),
    ),
    "hf": (
        "per_device_train_batch_size per_device_eval_batch_size bf16_full_eval fp16_full_eval warmup_ratio "
        "lr_scheduler_type eval_strategy evaluation_strategy "
        "half_precision_backend fp16_backend fp16_opt_level no_cuda num_train_epochs save_strategy "
        "logging_steps save_steps gradient_checkpointing use_cpu "
        "model_init_kwargs eval_on_start fsdp bf16 fp16 trainable_dtype",
        (
            "learning_rate output_dir tf32 gradient_accumulation_steps optim deepspeed model_name_or_path dtype "
            "torch_dtype fsdp_config max_steps seed weight_decay"
        ),
    ),
    "checkpoint": (
        "architectures hidden_size num_hidden_layers transformers_version vocab_size num_attention_heads _diffusers_version",
        "model_type torch_dtype dtype quantization_config",
    ),
    "peft": (
        "peft_type lora_alpha target_modules base_model_name_or_path autocast_adapter_dtype",
        "r task_type lora_dropout bias modules_to_save use_dora",
    ),
    "fsdp": (
        ("fsdp_transformer_layer_cls_to_wrap fsdp_version fsdp_auto_wrap_policy fsdp_sharding_strategy mixed_precision_policy"),
        "activation_checkpointing reshard_after_forward",
    ),
    "model": (
        (
            "quantization_config attn_implementation bnb_4bit_compute_dtype bnb_4bit_quant_type "
            "bnb_4bit_quant_storage load_in_4bit load_in_8bit torch_dtype"
        ),
        "dtype model_name_or_path adapter device_map trust_remote_code use_peft model_name",
    ),
}
_ISOTYPE_SECTIONS = {"model", "data", "adapter", "precision", "train", "run"}
_TIES = ("model", "checkpoint", "peft", "fsdp", "deepspeed", "accelerate", "kohya", "llamafactory", "axolotl", "hf", "simpletuner")


def identify(data: Any, name: str = "") -> str | None:
    """The tool's namespace, or None when the keys say nothing of training."""
    if not isinstance(data, dict) or not data:
        return None
    keys = {str(k).removeprefix("--") for k in data}
    if keys <= _ISOTYPE_SECTIONS and all(isinstance(v, dict) or v is None for v in data.values()) and not _torchtitan(data):
        return "isotype"
    if all(str(k).isupper() for k in data) and not any(isinstance(v, dict) for v in data.values()):
        return "env"
    if keys <= {"device", "gpu", "hardware", "gpu_name", "accelerator", "num_gpus", "platform"} and keys & {
        "gpu",
        "gpu_name",
        "hardware",
        "device",
    }:
        return "hardware"
    keys |= {f"{k}.{inner}" for k, v in data.items() if isinstance(v, dict) for inner in v}
    if _mentions_component(data):
        return "torchtune"
    scores = {tool: 3 * len(keys & set(strong.split())) + len(keys & set(weak.split())) for tool, (strong, weak) in KEYS.items()}
    if sum(str(k).startswith("--") for k in data) * 2 > len(data):
        scores["simpletuner"] += 6
    if "accelerate" in name.lower() or name.lower() == "default_config.yaml":
        scores["accelerate"] += 2
    if "deepspeed" in name.lower() or name.lower().startswith(("ds_", "zero")):
        scores["deepspeed"] += 2
    if keys & {"base_model"} == set() and scores["axolotl"] < 6:
        scores["axolotl"] = 0
    if not keys & {"checkpointer", "tokenizer.path"}:
        scores["torchtune"] = 0  # without a component of its own, words that everybody uses
    if not keys & {"finetuning_type", "pure_bf16", "quantization_bit", "upcast_layernorm", "template", "stage"}:
        scores["llamafactory"] = 0
    if keys & {"finetuning_type", "pure_bf16"}:
        scores["llamafactory"] += 10
    best = max(scores.values())
    if best == 0 or (best == 1 and keys & {"mixed_precision"} == set()):
        return "model" if keys & {"dtype", "torch_dtype", "model_name_or_path"} else None
    if best in (scores["model"], scores["peft"]) and keys & {"bf16", "fp16"} and "output_dir" in keys:
        return "hf"  # a trainer's arguments and its model's in one flat file, as TRL's scripts take them
    tied = [tool for tool, score in scores.items() if score == best]
    return next((tool for tool in _TIES if tool in tied), tied[0]) if best > 1 else "accelerate"


def _torchtitan(data: dict[str, Any]) -> bool:
    training = data.get("training") or {}
    return "job" in data or any(str(k).startswith("mixed_precision") for k in training)


def _mentions_component(node: Any) -> bool:
    if isinstance(node, dict):
        return any(str(v).startswith("torchtune.") for k, v in node.items() if k == "_component_") or any(
            _mentions_component(v) for v in node.values()
        )
    return False


# tool -> groups of keys; a file that has all keys of one group, at any depth of mappings up to three, is the tool's
_KEYS: dict[str, tuple[frozenset[str], ...]] = {
    "OneTrainer": (frozenset({"train_dtype", "fallback_train_dtype"}), frozenset({"training_method", "weight_dtype", "output_dtype"})),
    "diffusion-pipe": (frozenset({"pipeline_stages", "micro_batch_size_per_gpu"}), frozenset({"transformer_dtype", "adapter", "dtype"})),
    "ai-toolkit": (frozenset({"job", "config", "process"}),),
    "musubi-tuner": (frozenset({"dit", "fp8_base"}), frozenset({"dit", "blocks_to_swap"}), frozenset({"dit", "vae_dtype"})),
}


def unknown_tool(data: Any) -> str | None:
    """The name of the tool, or None for a file of none of these."""
    keys = _keys(data, 3)
    return next((tool for tool, groups in _KEYS.items() if any(group <= keys for group in groups)), None)


def _keys(data: Any, depth: int) -> set[str]:
    if not isinstance(data, dict) or depth == 0:
        return set()
    return {str(key) for key in data}.union(*(_keys(value, depth - 1) for value in data.values()))
