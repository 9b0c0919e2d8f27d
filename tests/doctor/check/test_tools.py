"""A file is shown under its own tool, with what it states; a file of an unknown tool gets no table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api import check_check as check

AITOOLKIT = """
job: extension
config:
  name: my_lora
  process:
    - type: sd_trainer
      device: cuda:0
      network: {type: lora, linear: 16}
      save: {dtype: float16}
      train: {batch_size: 1, steps: 2000, optimizer: adamw8bit, dtype: bf16}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true, quantize: true}
meta: {name: "[name]", version: "1.0"}
"""
ONETRAINER = {
    "__version": 6,
    "training_method": "LORA",
    "model_type": "FLUX_DEV_1",
    "workspace_dir": "w",
    "base_model_name": "black-forest-labs/FLUX.1-dev",
    "weight_dtype": "FLOAT_16",
    "output_dtype": "BFLOAT_16",
    "train_dtype": "BFLOAT_16",
    "fallback_train_dtype": "BFLOAT_16",
    "learning_rate": 3e-4,
    "lora_rank": 16,
    "lora_alpha": 1.0,
    "lora_weight_dtype": "FLOAT_32",
    "optimizer": {"optimizer": "ADAMW"},
}
SWIFT = """
model: Qwen/Qwen2.5-7B-Instruct
train_type: lora
dataset: a/b
torch_dtype: bfloat16
num_train_epochs: 1
per_device_train_batch_size: 1
learning_rate: 1e-4
output_dir: output
"""
# the arguments that ms-swift writes beside a checkpoint
SWIFT_ARGUMENTS = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "tuner_type": "lora",
    "template": "qwen2_5",
    "torch_dtype": "bfloat16",
    "lora_rank": 8,
    "bf16": True,
    "fp16": False,
    "dataset": ["a/b"],
    "per_device_train_batch_size": 1,
}
TORCHTITAN = """
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
seq_len = 8192
mixed_precision_reduce = "float32"
"""


@pytest.mark.parametrize(
    ("name", "text", "tool", "roles"),
    [
        ("job.yaml", AITOOLKIT, "aitoolkit", {"compute": "bf16", "storage": "quantised"}),
        (
            "config.json",
            json.dumps(ONETRAINER),
            "onetrainer",
            {"parameters": "fp16", "trained": "fp32", "compute": "bf16"},
        ),
        ("sft.yaml", SWIFT, "ms-swift", {"parameters": "bf16"}),
        (
            "args.json",
            json.dumps(SWIFT_ARGUMENTS),
            "ms-swift",
            {"parameters": "bf16", "compute": "bf16"},
        ),
        ("llama.toml", TORCHTITAN, "torchtitan", {"reduction": "fp32"}),
    ],
)
def test_tool_is_known_by_its_own_keys_and_shown_as_read(tmp_path: Path, name, text, tool, roles):
    (tmp_path / name).write_text(text)
    (record,) = check([str(tmp_path)]).records
    assert record.tool == tool
    assert {role: decision.value for role, decision in record.roles.items()} == roles


UNKNOWN = {
    "pipeline.toml": (
        "[model]\ntype = 'flux'\ndtype = 'bfloat16'\n[adapter]\ntype = 'lora'\nrank = 32\n"
        "[optimizer]\ntype = 'adamw'\nlr = 2e-5\n"
    ),
    "trainer.yaml": "job: train\nconfig: {steps: 10}\ntraining: {dtype: bf16, steps: 5}\n",
    "lora.json": json.dumps({"lora_alpha": 16, "lora_rank": 8, "trigger": "x"}),
    "big.json": json.dumps(
        {"learning_rate": 1e-4, "seed": 1, "logging_steps": 5, **{f"own_{i}": i for i in range(30)}}
    ),
    # diffusion-pipe, which has settings that DeepSpeed has too
    "flux.toml": """
output_dir = 'out'
micro_batch_size_per_gpu = 1
pipeline_stages = 1
gradient_accumulation_steps = 1
gradient_clipping = 1.0
[model]
type = 'flux'
dtype = 'bfloat16'
[optimizer]
type = 'adamw_optimi'
""",
    # NeMo, which has Lightning's trainer and other rules for weights
    "gpt.yaml": """
trainer: {devices: 8, accelerator: gpu, precision: bf16, max_steps: 1000}
exp_manager: {name: x}
model: {micro_batch_size: 1, megatron_amp_O2: true, tensor_model_parallel_size: 1}
""",
    "ppo.yaml": """
actor_rollout_ref:
  actor: {fsdp_config: {model_dtype: fp32, mixed_precision: {param_dtype: bf16}}}
trainer: {n_gpus_per_node: 8, precision: bf16}
""",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_file_of_another_tool_gets_no_table(tmp_path: Path, name):
    (tmp_path / name).write_text(UNKNOWN[name])
    checked = check([str(tmp_path / name)])
    assert not [record.tool for record in checked.records]
    assert [finding.code for finding in checked.findings] == ["CF099"]
    assert checked.findings[0].message.startswith("not known")


def test_a_command_of_another_package_is_not_a_trainers(tmp_path: Path):
    options = "--bf16 --learning_rate 5e-6 --gradient_checkpointing --output_dir o"
    (tmp_path / "run.sh").write_text(f"deepspeed --module openrlhf.cli.train_sft {options}\n")
    assert not check([str(tmp_path)]).records
    (tmp_path / "run.sh").write_text(f"deepspeed --module llava.train.train {options}\n")
    assert [record.tool for record in check([str(tmp_path)]).records] == ["hf"]


def test_settings_of_a_model_alone_do_not_tell_the_mixed_precision(tmp_path: Path):
    settings = {"model_name": "a/b", "load_in_4bit": True, "r": 16, "lora_alpha": 16, "dtype": None}
    (tmp_path / "c.json").write_text(json.dumps(settings))
    assert [record.value("compute") for record in check([str(tmp_path)]).records] == [None]


LAUNCHER = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\n"
)


def test_notebook_is_not_joined_with_the_launcher_of_a_script(tmp_path: Path):
    code = "a = TrainingArguments(output_dir='o', bf16=True)\n"
    (tmp_path / "accelerate.yaml").write_text(LAUNCHER)
    notebook = {"cells": [{"cell_type": "code", "source": [code]}]}
    (tmp_path / "train.ipynb").write_text(json.dumps(notebook))
    assert "CF009" not in [finding.code for finding in check([str(tmp_path)]).findings]
    (tmp_path / "train.py").write_text(code)
    found = [finding for finding in check([str(tmp_path)]).findings if finding.code == "CF009"]
    assert [Path(finding.place.file).name for finding in found] == ["train.py"]


AXOLOTL = """
base_model: a/b
datasets: [{path: x, type: alpaca}]
micro_batch_size: 1
sequence_len: 2048
learning_rate: 0.0002
bf16: true
optimizer: adamw_torch
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""


def test_list_form_of_fsdp_in_axolotl(tmp_path: Path):
    (tmp_path / "c.yml").write_text(AXOLOTL)
    (record,) = check([str(tmp_path)]).records
    assert record.value("trained") == "fp32"
    assert record.value("reduction") == "bf16"
    assert record.deciding_setting("reduction").key == "fsdp"
    (tmp_path / "c.yml").write_text(AXOLOTL[: AXOLOTL.index("fsdp:")])
    (record,) = check([str(tmp_path)]).records
    assert record.value("trained") == "bf16"
