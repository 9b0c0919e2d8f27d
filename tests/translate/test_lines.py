"""Every key of every source has its line, in each way of writing; a value keeps all that is in it;
the options of what launches a program are accounted for.
"""

from __future__ import annotations

import json

import pytest

from isotype.errors import UsageError
from isotype.translate import Fate, translate
from tests.api import read_source

from .configurations import notebook

YAML = """\
# a comment
model_name_or_path: a/b

output_dir: out
learning_rate: 1.0e-4   # slow
use_peft: true
lora_target_modules:
  - q_proj
  - v_proj
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
bf16: true
"""
JSON = json.dumps(
    {
        "model_name_or_path": "a/b",
        "output_dir": "out",
        "learning_rate": 1e-4,
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "bf16": True,
    },
    indent=2,
)
TOML = """\
# a comment
model_name_or_path = "a/b"
output_dir = "out"

learning_rate = 1e-4
use_peft = true
lora_target_modules = [
  "q_proj",
  "v_proj",
]
lr_scheduler_type = "cosine_with_min_lr"
lr_scheduler_kwargs = { min_lr_rate = 0.1 }
bf16 = true
"""
SHELL = """\
#!/bin/bash
# a comment
export MODEL=a/b
accelerate launch --config_file ds.yaml \\
    --num_processes 8 \\
    trl/scripts/sft.py \\
    --model_name_or_path $MODEL \\
    --output_dir=out \\
    --learning_rate 1.0e-4 --use_peft \\
    --lora_target_modules q_proj v_proj \\
    --lr_scheduler_type cosine_with_min_lr \\
    --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' \\
    --bf16
"""
PYTHON = """\
# a comment
model = AutoModelForCausalLM.from_pretrained(
    "a/b",
)
peft_config = LoraConfig(
    target_modules=["q_proj", "v_proj"],
)
trainer = SFTTrainer(
    model,
    args=SFTConfig(
        output_dir="out",
        learning_rate=1.0e-4,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        bf16=True,
    ),
    peft_config=peft_config,
)
"""
WRITINGS = {
    "a.yaml": YAML,
    "a.json": JSON,
    "a.toml": TOML,
    "a.sh": SHELL,
    "a.py": PYTHON,
    "a.ipynb": notebook("%pip install trl\n", PYTHON),
}
# what stands in a line where its key has no name
_IN_PLACE_OF_NAMES = {"model_name_or_path": "a/b"}


@pytest.mark.parametrize("file", WRITINGS)
def test_every_key_has_its_line(file, tmp_path):
    (tmp_path / file).write_text(WRITINGS[file])
    lines = WRITINGS[file].splitlines()
    keys = read_source(tmp_path / file).keys
    assert len(keys) >= 7
    for key in keys:
        written = key.name_in_file.rpartition("--")[2].rpartition("(")[2].rstrip(")") or key.name
        written = written.partition(".")[0]
        assert key.line, key
        line = lines[key.line - 1]
        assert written in line or _IN_PLACE_OF_NAMES.get(key.name, "?") in line, (key, line)


@pytest.mark.parametrize("file", WRITINGS)
def test_all_of_a_value_is_kept(file, tmp_path):
    (tmp_path / file).write_text(WRITINGS[file])
    text = translate(tmp_path / file).text
    assert "targets: [q_proj, v_proj]" in text
    assert "min_learning_rate: 0.1" in text
    assert "learning_rate: 0.0001" in text


def test_lines_stand_beside_the_settings(tmp_path):
    (tmp_path / "a.sh").write_text(SHELL)
    text = translate(tmp_path / "a.sh").text
    settings = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert settings["learning_rate"].endswith("# --learning_rate, line 9")
    assert settings["min_learning_rate"].endswith("# --lr_scheduler_kwargs, line 12")


LAUNCHERS = {
    "accelerate launch --config_file c.yaml --multi_gpu": ["config_file", "multi_gpu"],
    "accelerate launch --use_deepspeed --zero_stage 3 --dynamo_backend no": [
        "use_deepspeed",
        "zero_stage",
        "dynamo_backend",
    ],
    "torchrun --nproc_per_node 8 --master_port=29500": ["nproc_per_node", "master_port"],
    "python -m torch.distributed.run --nproc-per-node 2": ["nproc_per_node"],
    "CUDA_VISIBLE_DEVICES=0 python -u": [],
    "deepspeed --num_gpus=2 --include localhost:0": ["num_gpus", "include"],
    "srun --gpus 4 accelerate launch --machine_rank $RANK": ["gpus", "machine_rank"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_options_of_a_launcher_are_told(launcher, tmp_path):
    command = f"{launcher} \\\n  train.py --model_name_or_path a/b --output_dir o --bf16 true\n"
    (tmp_path / "a.sh").write_text(command)
    outcomes = translate(tmp_path / "a.sh").outcomes
    told = [one for one in outcomes if one.source_key.name.startswith("launcher.")]
    assert [one.source_key.name.partition(".")[2] for one in told] == LAUNCHERS[launcher]
    assert all(one.note and one.source_key.line == 1 for one in told)
    assert all(one.fate in (Fate.NO_EFFECT, Fate.NOT_OFFERED) for one in told)


@pytest.mark.parametrize(
    ("program", "preset"),
    [
        ("train.py --model_name_or_path a/b --output_dir o --per_device_train_batch_size 1", True),
        ("train.py --model_name_or_path a/b --output_dir o --fp16", False),
        ("train_dreambooth_lora_flux.py --pretrained_model_name_or_path f --instance_data_dir i", True),
        ("sdxl_train_network.py --network_module networks.lora --train_data_dir i", False),
    ],
)  # fmt: skip
def test_the_precision_of_a_launcher_counts_where_the_program_has_none(program, preset, tmp_path):
    (tmp_path / "a.sh").write_text(f"accelerate launch --mixed_precision bf16 {program}\n")
    result = translate(tmp_path / "a.sh")
    assert ("preset: bf16" in result.text) == preset
    (outcome,) = (
        one for one in result.outcomes if one.source_key.name == "launcher.mixed_precision"
    )
    assert (outcome.fate is Fate.NO_EFFECT) != preset


PICTURE_SETS = {
    "data.toml": (
        "run.toml",
        'pretrained_model_name_or_path = "sdxl"\nnetwork_module = "networks.lora"\n'
        'dataset_config = "data.toml"\n',
        '[general]\nkeep_tokens = 1\n\n[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "a"\n'
        '[[datasets.subsets]]\nimage_dir = "b"\n\n[[datasets]]\nresolution = 768\n[[datasets.subsets]]\nimage_dir = "c"\n',
    ),
    "concepts.json": (
        "config.json",
        '{"training_method": "LORA", "peft_type": "LORA", "base_model_name": "sdxl",\n'
        '"train_dtype": "BFLOAT_16", "fallback_train_dtype": "BFLOAT_16",\n'
        '"concept_file_name": "concepts.json"}',
        '[{"path": "a",\n"balancing": 2.0,\n"text": {\n"prompt_source": "sample"}},\n{"path": "b"}]',
    ),
}  # fmt: skip


@pytest.mark.parametrize("file", PICTURE_SETS)
def test_keys_of_a_file_of_pictures_have_their_lines(file, tmp_path):
    config, text, sets = PICTURE_SETS[file]
    (tmp_path / config).write_text(text)
    (tmp_path / file).write_text(sets)
    lines = sets.splitlines()
    keys = [key for key in read_source(tmp_path / config).keys if file in key.name_in_file]
    assert len(keys) >= 4
    for key in keys:
        written = key.name.rpartition(".")[2]
        assert written in lines[key.line - 1], key
        assert str(key.value) in lines[key.line - 1], key


SETTINGS = """\
# settings
model_name_or_path: a/b
output_dir: out
learning_rate: 1.0e-5
per_device_train_batch_size: 4
bf16: true
"""
AXOLOTL_SETTINGS = SETTINGS.replace("model_name_or_path", "base_model").replace(
    "per_device_train_batch_size", "micro_batch_size"
)
COMMANDS = {
    "trl sft --config c.yaml \\\n  --learning_rate 2.0e-4": SETTINGS,
    "accelerate launch --num_processes 2 sft.py --config c.yaml \\\n --learning_rate 2.0e-4": SETTINGS,
    "FORCE_TORCHRUN=1 llamafactory-cli train c.yaml \\\n learning_rate=2.0e-4": SETTINGS + "stage: sft\n",
    "llamafactory-cli train c.yaml \\\n --learning_rate 2.0e-4": SETTINGS + "stage: sft\n",
    "axolotl train c.yaml \\\n --learning-rate 2.0e-4": AXOLOTL_SETTINGS,
    "accelerate launch -m axolotl.cli.train c.yaml \\\n --learning_rate 2.0e-4": AXOLOTL_SETTINGS,
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_file_is_read_with_its_lines_and_its_options_win(command, tmp_path):
    (tmp_path / "run.sh").write_text(f"# a script\n{command}\n")
    with pytest.raises(UsageError, match=r"c\.yaml is not there; its settings are needed"):
        translate(tmp_path / "run.sh")
    (tmp_path / "c.yaml").write_text(COMMANDS[command])
    text = translate(tmp_path / "run.sh").text
    settings = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert "learning_rate: 0.0002" in settings["learning_rate"]
    assert "learning_rate, line 3" in settings["learning_rate"].replace("-", "_")
    assert settings["batch_size"].endswith("batch_size, line 5")
    assert "c.yaml: " in settings["batch_size"]
    assert settings["folder"].endswith("# c.yaml: output_dir, line 3")
    assert "preset: bf16" in text
    (tmp_path / "run.sh").write_text(f"{command} --bf16 false\n")
    with pytest.raises(UsageError, match="--bf16 beside"):
        translate(tmp_path / "run.sh")


def test_a_program_of_llamafactory_is_read_with_its_file(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    settings = SETTINGS + "stage: sft\nfinetuning_type: full\ncutoff_len: 512\n"
    (tmp_path / "a/b/c.yaml").write_text(settings)
    other = "python prepare.py data.json\n"  # not a training
    command = "accelerate launch --config_file f.yaml src/train.py a/b/c.yaml\n"
    (tmp_path / "a/b/train.sh").write_text(other + command)
    result = translate(tmp_path / "a/b/train.sh")
    assert result.tool == "llamafactory"
    assert "batch_size: 4" in result.text
    lines = {one.source_key.name: one.source_key.line for one in result.outcomes}
    assert lines["launcher.config_file"] == 2
    assert lines["learning_rate"] == 4
