# ruff: noqa: E501  a table: one row, one configuration
"""Configurations as the tools' own documentation writes them: name -> file name, text, the settings
that must come of it (or words of the refusal).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """tool: what it must be recognised as. expected: `section.key` -> value in the result. refused:
    words of the message, exit 2.
    """

    file: str
    text: str
    tool: str = ""
    expected: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


def notebook(*cells: str) -> str:
    made = [
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": cell.splitlines(keepends=True),
        }
        for cell in cells
    ]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


AXOLOTL = """base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/lora-out
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
"""
AXOLOTL_LORA = (
    "adapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_dropout: 0.05\nlora_target_linear: true\n"
)
FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
TUNE = """output_dir: /tmp/torchtune/llama3_2_1B/lora
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/Llama-3.2-1B-Instruct/original/tokenizer.model
  max_seq_len: 4096
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_alpha: 128
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/Llama-3.2-1B-Instruct/
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 1
batch_size: 4
gradient_accumulation_steps: 8
device: cuda
dtype: bf16
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""
TUNE_DPO = TUNE.replace(
    "torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss"
).replace(
    "torchtune.datasets.alpaca_cleaned_dataset", "torchtune.datasets.stack_exchange_paired_dataset"
)
TUNE_FULL = TUNE.replace("lora_llama3_2_1b", "llama3_2_1b").replace(
    "  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']\n  apply_lora_to_mlp: True\n  lora_rank: 64\n  lora_alpha: 128\n",
    "",
)
TRAINER = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype={dtype})
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    learning_rate=2e-5,
    num_train_epochs=2,
    {flag}=True,
    save_total_limit=3,
    report_to="wandb",
)
Trainer(model=model, args=args, train_dataset=rows).train()
"""
SFT = """from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    args=SFTConfig(output_dir="out", max_length=512, packing=True, learning_rate=2e-4, max_steps=100, model_init_kwargs=KWARGS),
    train_dataset=load_dataset("trl-lib/Capybara", split="train[:1000]"),
    peft_config=LoraConfig(r=32, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
"""
UNSLOTH = """from unsloth import FastLanguageModel, is_bfloat16_supported
from trl import SFTConfig, SFTTrainer
max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B-Instruct", max_seq_length=max_seq_length, dtype=None, load_in_4bit=LOAD
)
model = FastLanguageModel.get_peft_model(
    model, r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_alpha=16, lora_dropout=0, bias="none",
    use_gradient_checkpointing="unsloth", random_state=3407,
)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=dataset, dataset_text_field="text",
    args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=5, max_steps=60, learning_rate=2e-4,
                   fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(), optim="adamw_8bit", weight_decay=0.01,
                   lr_scheduler_type="linear", seed=3407, output_dir="outputs"),
)
"""

DPO = """from trl import DPOConfig, DPOTrainer
ds = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
args = DPOConfig(output_dir="out", beta=0.05, label_smoothing=0.1, bf16=True)
trainer = DPOTrainer(model="Qwen/Qwen2.5-0.5B", args=args, train_dataset=ds, peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05))
"""
CASES: dict[str, Case] = {
    # axolotl
    "axolotl_lora": Case(
        "lora.yml",
        AXOLOTL + AXOLOTL_LORA,
        "axolotl",
        {
            "model.name": "NousResearch/Llama-3.2-1B", "data.train": [{"name": "hf:teknium/GPT4-LLM-Cleaned", "format": "alpaca"}],
            "data.eval_split": 0.1, "data.packing": True, "adapter.kind": "lora", "adapter.alpha": 32.0, "adapter.targets": "all-linear",
            "precision.preset": "bf16-lora", "train.optimizer": "adamw8bit", "train.learning_rate": 2e-4, "train.warmup": 0.1,
            "train.gradient_checkpointing": "layers", "model.attention": "flash",
        },
    ),
    "axolotl_qlora": Case("qlora.yml", AXOLOTL + AXOLOTL_LORA.replace("lora\n", "qlora\n", 1) + "load_in_4bit: true\n", "axolotl", {"precision.preset": "nf4-lora"}),
    "axolotl_full": Case(
        "fft.yml", AXOLOTL, "axolotl", {"adapter.kind": "none", "precision.preset": "bf16-pure", "train.optimizer": "adamw"}
    ),
    "axolotl_fp16": Case(
        "fp16.yml", (AXOLOTL + AXOLOTL_LORA).replace("bf16: auto", "fp16: true"), "axolotl", {"precision.preset": "fp16-mixed"}
    ),
    "axolotl_8bit": Case("8bit.yml", AXOLOTL + AXOLOTL_LORA + "load_in_8bit: true\n", "axolotl", {"precision.preset": "bf16-lora", "precision.base": "int8"}),
    "axolotl_chat": Case(
        "chat.yaml",
        AXOLOTL.replace("    type: alpaca", "    type: chat_template\n    field_messages: conversations\n    split: train_sft") + AXOLOTL_LORA,
        "axolotl",
        {"data.train": [{"name": "hf:teknium/GPT4-LLM-Cleaned", "split": "train_sft", "format": "messages", "columns": {"messages": "conversations"}}]},
    ),
    "axolotl_local_file": Case(
        "local.yaml",
        AXOLOTL.replace("path: teknium/GPT4-LLM-Cleaned\n    type: alpaca", "path: json\n    data_files: data/rows.jsonl\n    type: completion\n    field: body"),
        "axolotl",
        {"data.train": [{"name": "data/rows.jsonl", "format": "text", "columns": {"text": "body"}}]},
    ),
    "axolotl_pretraining": Case(
        "pretrain.yml",
        AXOLOTL.replace("datasets:\n  - path: teknium/GPT4-LLM-Cleaned\n    type: alpaca\n", "pretraining_dataset:\n  - path: allenai/c4\n    name: en\n")
        + "max_steps: 200\n",
        "axolotl",
        {"data.stream": True, "train.steps": 200, "data.train": [{"name": "hf:allenai/c4", "format": "text", "subset": "en"}]},
    ),
    "axolotl_dpo": Case(
        "dpo.yml",
        "rl_beta: 0.2\n" + AXOLOTL.replace("type: alpaca", "type: chat_template.default") + AXOLOTL_LORA + "rl: dpo\ndpo_label_smoothing: 0.1\n",
        "axolotl",
        {
            "train.objective": "dpo", "preference.beta": 0.2, "preference.label_smoothing": 0.1, "data.packing": False,
            "adapter.dropout": 0.0, "data.train": [{"name": "hf:teknium/GPT4-LLM-Cleaned"}],
        },
    ),
    "axolotl_simpo": Case(
        "simpo.yml", AXOLOTL + "rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 0.7\n", "axolotl",
        {"train.objective": "simpo", "preference.beta": 2.0, "preference.simpo_gamma": 0.7, "preference.nll": 1.0},
    ),
    "axolotl_orpo": Case("orpo.yml", AXOLOTL + "rl: orpo\norpo_alpha: 0.2\n", "axolotl", {"train.objective": "orpo", "preference.beta": 0.2}),
    "axolotl_kto": Case(
        "kto.yml", AXOLOTL + "rl: kto\nkto_desirable_weight: 0.5\nkto_undesirable_weight: 2\n", "axolotl",
        {"train.objective": "kto", "preference.desirable_weight": 0.5, "preference.undesirable_weight": 2.0},
    ),
    "axolotl_reward": Case(
        "reward.yml", AXOLOTL + "reward_model: true\nnum_labels: 1\ncenter_rewards_coefficient: 0.01\n", "axolotl",
        {"train.objective": "reward", "preference.center_rewards_coefficient": 0.01},
    ),
    "axolotl_grpo": Case("grpo.yml", AXOLOTL + "rl: grpo\n", refused="rl: grpo is not offered"),
    "axolotl_process_reward": Case("prm.yml", AXOLOTL + "process_reward_model: true\n", refused="reward models are not offered"),
    "axolotl_pictures": Case(
        "vision.yml", AXOLOTL + AXOLOTL_LORA + "processor_type: AutoProcessor\nskip_prepare_dataset: true\nfreeze_mm_modules: false\n", "axolotl",
        {"adapter.vision": "lora"},
    ),
    "factory_pictures": Case(
        "vision.yaml", FACTORY + "image_max_pixels: 262144\nfreeze_vision_tower: true\nfreeze_multi_modal_projector: false\n", "llamafactory",
        {"data.max_pixels": 262144, "adapter.vision": "none", "adapter.projector": "lora"},
    ),
    # LLaMA-Factory
    "llamafactory_lora": Case(
        "llama3_lora_sft.yaml",
        FACTORY,
        "llamafactory",
        {
            "model.name": "meta-llama/Meta-Llama-3-8B-Instruct", "adapter.r": 8, "adapter.alpha": 16.0, "data.max_length": 2048,
            "train.accumulate": 8, "train.schedule": "cosine", "precision.preset": "bf16-lora", "data.eval_split": 0,
        },
    ),
    "llamafactory_qlora": Case("qlora.yaml", FACTORY + "quantization_bit: 4\n", "llamafactory", {"precision.preset": "nf4-lora"}),
    "llamafactory_full": Case(
        "full.yaml", FACTORY.replace("finetuning_type: lora\nlora_rank: 8\nlora_target: all\n", "finetuning_type: full\n"), "llamafactory",
        {"adapter.kind": "none", "precision.preset": "bf16-mixed"},
    ),
    "llamafactory_pure_bf16": Case(
        "pure.yaml",
        FACTORY.replace("finetuning_type: lora\nlora_rank: 8\nlora_target: all\n", "finetuning_type: full\n").replace("bf16: true", "pure_bf16: true"),
        "llamafactory",
        {"precision.preset": "bf16-pure"},
    ),
    "llamafactory_pretraining": Case("pt.yaml", FACTORY.replace("stage: sft", "stage: pt"), "llamafactory", {"data.format": "text"}),
    "llamafactory_command": Case(
        "train.sh",
        "llamafactory-cli train \\\n  --stage sft --do_train true --finetuning_type lora --model_name_or_path Qwen/Qwen2.5-7B \\\n"
        "  --dataset alpaca_en_demo --template qwen --cutoff_len 1024 --per_device_train_batch_size 2 --learning_rate 5e-5 --fp16 true "
        "--output_dir out\n",
        "llamafactory",
        {"model.name": "Qwen/Qwen2.5-7B", "train.batch_size": 2, "train.learning_rate": 5e-5, "precision.preset": "fp16-mixed"},
    ),
    "llamafactory_dpo": Case(
        "dpo.yaml", FACTORY.replace("stage: sft", "stage: dpo\npref_beta: 0.3\npref_ftx: 0.5\npref_loss: sigmoid"), "llamafactory",
        {"train.objective": "dpo", "preference.beta": 0.3, "preference.nll": 0.5},
    ),
    "llamafactory_simpo": Case(
        "simpo.yaml", FACTORY.replace("stage: sft", "stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.7"), "llamafactory",
        {"train.objective": "simpo", "preference.simpo_gamma": 0.7},
    ),
    "llamafactory_orpo": Case(
        "orpo.yaml", FACTORY.replace("stage: sft", "stage: dpo\npref_loss: orpo\npref_ftx: 0.5"), "llamafactory",
        {"train.objective": "orpo", "preference.nll": 1.5},
    ),
    "llamafactory_kto": Case(
        "kto.yaml", FACTORY.replace("stage: sft", "stage: kto\npref_beta: 0.2\nkto_chosen_weight: 0.5"), "llamafactory",
        {"train.objective": "kto", "preference.beta": 0.2, "preference.desirable_weight": 0.5},
    ),
    "llamafactory_reward": Case("rm.yaml", FACTORY.replace("stage: sft", "stage: rm"), "llamafactory", {"train.objective": "reward"}),
    "llamafactory_hinge": Case("hinge.yaml", FACTORY.replace("stage: sft", "stage: dpo\npref_loss: hinge"), refused="pref_loss: hinge is not offered"),
    "llamafactory_ppo": Case("ppo.yaml", FACTORY.replace("stage: sft", "stage: ppo"), refused="stage: ppo is not offered"),
    "llamafactory_export": Case(
        "merge.yaml", "model_name_or_path: a/b\nadapter_name_or_path: saves/x\nfinetuning_type: lora\ntemplate: llama3\nexport_dir: out\n",
        refused="isotype merge",
    ),
    "llamafactory_oft": Case("oft.yaml", FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"), refused="finetuning_type: oft"),
    # torchtune
    "torchtune_lora": Case(
        "1B_lora.yaml",
        TUNE,
        "torchtune",
        {
            "model.name": "/tmp/Llama-3.2-1B-Instruct/", "data.train": [{"name": "hf:yahma/alpaca-cleaned", "format": "alpaca"}],
            "data.packing": True, "data.max_length": 4096, "adapter.r": 64, "adapter.alpha": 128.0, "train.warmup": 100.0, "train.learning_rate": 3e-4,
            "adapter.targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "precision.preset": "bf16-lora", "train.clip": 0.0,
        },
    ),
    "torchtune_qlora": Case("qlora.yaml", TUNE.replace("lora_llama3_2_1b", "qlora_llama3_2_1b"), "torchtune", {"precision.preset": "nf4-lora"}),
    "torchtune_full_bf16": Case("full.yaml", TUNE_FULL, "torchtune", {"adapter.kind": "none", "precision.preset": "bf16-pure"}),
    "torchtune_full_fp32": Case("fp32.yaml", TUNE_FULL.replace("dtype: bf16", "dtype: fp32"), "torchtune", {"precision.preset": "fp32"}),
    "torchtune_dpo": Case(
        "dpo.yaml", TUNE_DPO.replace("DPOLoss", "DPOLoss\n  beta: 0.05\n  label_smoothing: 0.1\nref_checkpointer:\n  checkpoint_dir: /tmp/Llama-3.2-1B-Instruct/"), "torchtune",
        {
            "train.objective": "dpo", "preference.beta": 0.05, "preference.label_smoothing": 0.1, "data.packing": False,
            "data.train": [{"name": "hf:lvwerra/stack-exchange-paired", "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}}],
        },
    ),
    "torchtune_dpo_pairs": Case(
        "dpo.yaml", TUNE_DPO.replace("torchtune.datasets.stack_exchange_paired_dataset", "torchtune.datasets.preference_dataset\n  source: json\n  data_files: pairs.json"),
        "torchtune", {"train.objective": "dpo", "data.train": [{"name": "pairs.json"}]},
    ),
    "torchtune_rso": Case("rso.yaml", TUNE_DPO.replace("DPOLoss", "RSOLoss"), refused="RSOLoss is not offered"),
    "torchtune_dpo_command": Case("dpo.sh", "tune run lora_dpo_single_device --config llama3/x optimizer.lr=1e-5\n", refused="give that YAML file"),
    # Hugging Face
    "hf_trainer_fp32_weights": Case(
        "train.py",
        TRAINER.format(dtype="torch.float32", flag="bf16"),
        "hf",
        {
            "model.name": "Qwen/Qwen2.5-0.5B", "adapter.kind": "none", "precision.preset": "bf16-mixed", "train.schedule": "linear", "train.warmup": 0,
            "run.keep": 3, "run.trackers": ["wandb"], "train.epochs": 2.0,
        },
    ),
    "hf_trainer_bf16_weights": Case("train.py", TRAINER.format(dtype="torch.bfloat16", flag="bf16"), "hf", {"precision.preset": "bf16-pure"}),
    "hf_trainer_fp16": Case("train.py", TRAINER.format(dtype="torch.float32", flag="fp16"), "hf", {"precision.preset": "fp16-mixed"}),
    "hf_classification": Case(
        "glue.py",
        "args = TrainingArguments(output_dir='o', bf16=True)\nm = AutoModelForSequenceClassification.from_pretrained('bert')\nTrainer(m, args)\n",
        refused="only causal language models",
    ),
    "hf_json": Case(
        "args.json",
        json.dumps({"model_name_or_path": "a/b", "output_dir": "out", "per_device_train_batch_size": 8, "learning_rate": "5e-5", "warmup_steps": 200, "bf16": True}),
        "hf",
        {"train.learning_rate": 5e-5, "train.warmup": 200.0, "train.batch_size": 8},
    ),
    # TRL
    "trl_python": Case(
        "sft.py",
        SFT.replace(", model_init_kwargs=KWARGS", ""),
        "trl",
        {
            "model.name": "Qwen/Qwen3-0.6B", "data.train": [{"name": "hf:trl-lib/Capybara", "split": "train[:1000]"}], "data.packing": True,
            "adapter.r": 32, "adapter.alpha": 16.0, "adapter.targets": ["q_proj", "v_proj"], "train.steps": 100, "precision.preset": "bf16-lora",
        },
    ),
    "trl_yaml": Case(
        "sft.yaml",
        "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: stanfordnlp/imdb\nuse_peft: true\nlora_r: 16\nlora_alpha: 16\nload_in_4bit: true\n"
        "bnb_4bit_quant_type: nf4\nlearning_rate: 1.0e-4\noutput_dir: out\nbf16: true\nlr_scheduler_type: cosine_with_min_lr\n"
        "lr_scheduler_kwargs:\n  min_lr_rate: 0.1\nreport_to: []\n",
        "hf",
        {"precision.preset": "nf4-lora", "train.schedule": "cosine", "train.min_learning_rate": 0.1, "data.train": "hf:stanfordnlp/imdb"},
    ),
    "trl_command": Case(
        "sft.sh",
        "accelerate launch --num_processes 2 x.sh\ntrl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara \\\n"
        "  --learning_rate 2.0e-5 --packing --gradient_checkpointing --eos_token '<|im_end|>' --output_dir out\n",
        "hf",
        {"model.name": "Qwen/Qwen2.5-0.5B", "data.packing": True, "train.learning_rate": 2e-5, "adapter.kind": "none"},
    ),
    "trl_dpo": Case(
        "dpo.py",
        DPO,
        "trl",
        {
            "train.objective": "dpo", "preference.beta": 0.05, "preference.label_smoothing": 0.1, "train.learning_rate": 1e-6, "data.max_length": 1024,
            "model.name": "Qwen/Qwen2.5-0.5B", "data.train": "hf:trl-lib/ultrafeedback_binarized", "adapter.r": 16, "adapter.dropout": 0.0,
        },
    ),
    "trl_ipo": Case("ipo.py", DPO.replace("label_smoothing=0.1", "loss_type=['ipo']"), "trl", {"train.objective": "ipo", "preference.beta": 0.05}),
    "trl_dpo_hinge": Case("dpo.py", DPO.replace("label_smoothing=0.1", "loss_type='hinge'"), refused="loss_type: hinge is not offered: sigmoid, ipo is"),
    "trl_dpo_of_two_losses": Case("dpo.py", DPO.replace("label_smoothing=0.1", "loss_type=['sigmoid', 'sft']"), refused="loss_type: sigmoid sft is not offered"),
    "trl_kto": Case(
        "kto.py", DPO.replace("DPO", "KTO").replace("label_smoothing=0.1", "desirable_weight=0.5, undesirable_weight=2.0, max_length=512"), "trl",
        {"train.objective": "kto", "preference.desirable_weight": 0.5, "preference.undesirable_weight": 2.0, "data.max_length": 512},
    ),
    "trl_orpo": Case(
        "orpo.py", DPO.replace("DPO", "ORPO").replace("label_smoothing=0.1", "max_prompt_length=128"), "trl",
        {"train.objective": "orpo", "preference.beta": 0.05, "adapter.dropout": 0.05},
    ),
    "trl_cpo": Case("cpo.py", DPO.replace("DPO", "CPO"), "trl", {"train.objective": "cpo", "preference.label_smoothing": 0.1}),
    "trl_simpo": Case(
        "simpo.py", DPO.replace("DPO", "CPO").replace("label_smoothing=0.1", "loss_type='simpo', simpo_gamma=0.7"), "trl",
        {"train.objective": "simpo", "preference.simpo_gamma": 0.7, "preference.nll": 1.0},
    ),
    "trl_reward": Case(
        "reward.py",
        "model = AutoModelForSequenceClassification.from_pretrained('a/b', num_labels=1)\nRewardTrainer(model=model, "
        "args=RewardConfig(output_dir='o', center_rewards_coefficient=0.01), train_dataset=load_dataset('c/d', split='train'))\n",
        "trl",
        {"train.objective": "reward", "model.name": "a/b", "preference.center_rewards_coefficient": 0.01, "train.learning_rate": 1e-4},
    ),
    "trl_two_trainings": Case("both.py", SFT.replace(", model_init_kwargs=KWARGS", "") + DPO, refused="several trainings in one file"),
    "trl_dpo_command": Case(
        "dpo.sh", "trl dpo --model_name_or_path a/b --dataset_name c/d --output_dir out --bf16 --loss_type ipo\n", "hf",
        {"train.objective": "ipo", "model.name": "a/b", "data.train": "hf:c/d", "precision.preset": "bf16-mixed"},
    ),
    "trl_kto_script": Case(
        "kto.sh", "accelerate launch examples/scripts/kto.py --model_name_or_path a/b --dataset_name c/d --beta 0.2 --output_dir out\n", "hf",
        {"train.objective": "kto", "preference.beta": 0.2},
    ),
    "trl_yaml_of_no_method": Case("c.yaml", "model_name_or_path: a/b\nbeta: 0.1\noutput_dir: o\nbf16: true\n", refused="give the command or program that starts it"),
    "trl_grpo": Case("grpo.py", "from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(model='a', args=GRPOConfig(output_dir='o', bf16=True))\n", refused="GRPO is not offered"),
    "trl_from_its_command_line": Case(
        "script.py",
        "parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\n"
        "trainer = SFTTrainer(model=model, args=training_args)\n",
        refused="takes its settings from its command line",
    ),
    # Unsloth
    "unsloth_4bit": Case(
        "notebook.ipynb",
        notebook("%%bash\npip install unsloth\ncase $X in\n  a) b ;;\nesac\n", "!pip install \\\n  unsloth\n" + UNSLOTH.replace("LOAD", "True")),
        "unsloth",
        {
            "model.name": "unsloth/Llama-3.2-1B-Instruct", "precision.preset": "nf4-lora", "train.gradient_checkpointing": "layers+offload",
            "train.steps": 60, "train.warmup": 5.0, "train.seed": 3407, "train.optimizer": "adamw8bit", "adapter.dropout": 0.0,
        },
    ),
    "unsloth_16bit": Case("train.py", UNSLOTH.replace("LOAD", "False"), "unsloth", {"adapter.r": 16, "train.batch_size": 2}),
    "unsloth_vision": Case(
        "vision.py",
        UNSLOTH.replace("FastLanguageModel", "FastVisionModel").replace("LOAD", "True").replace(
            'bias="none",', 'bias="none", finetune_vision_layers=True, finetune_language_layers=True,'
        ),
        "unsloth", {"adapter.vision": "lora", "precision.preset": "nf4-lora"},
    ),
}  # fmt: skip
