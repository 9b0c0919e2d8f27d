"""SimpleTuner's configuration as keys with lines: config.env as a shell reads it, JSON and TOML, and the dataset file that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..doctor.check import shell
from ..doctor.check.text_files import Tree, Unreadable, read_json, scalar
from ..errors import UsageError
from ..finding import Finding
from .draft import Given

# variables of config.env whose argument is not their name in small letters
ARGUMENTS = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint", "DATALOADER_CONFIG": "data_backend_config", "TRAINING_SEED": "seed",
    "ACCELERATE_CONFIG_PATH": "accelerate_config", "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "MINIMUM_RESOLUTION": "minimum_image_size", "PUSH_CHECKPOINTS": "push_checkpoints_to_hub", "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs", "CHECKPOINTING_STEPS": "checkpoint_step_interval", "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id", "MODEL_NAME": "pretrained_model_name_or_path", "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "VALIDATION_STEPS": "validation_step_interval", "LR_SCHEDULE": "lr_scheduler", "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines", "TRAINER_DYNAMO_BACKEND": "dynamo_backend", "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}  # fmt: skip
OTHER_NAMES = {  # older or shorter arguments
    "validation_steps": "validation_step_interval", "checkpointing_steps": "checkpoint_step_interval", "rank": "lora_rank",
    "validation_prompts": "validation_prompt", "max_steps": "max_train_steps",
}  # fmt: skip
HIDDEN = "(secret)"
_NAME = re.compile(r"token$|api_?key|secret|passw|access_?key|credential|webhook|_auth$", re.I)
_VALUE = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,})\b")
_FLAG = re.compile(r"--?([\w-]+)[= ]+(\S+)")
DATASET = "dataset"  # keys of the dataset file are `dataset.0.id`


def _is_secret(name: str) -> bool:
    """By the last part of a key's name: `hub_token`, `aws_secret_access_key`."""
    return bool(_NAME.search(name.rpartition(".")[2]))


class Secrets:
    """The values found in one file."""

    def __init__(self) -> None:
        self.values: set[str] = set()

    def without(self, given: Given) -> Given:
        """The key with its secret hidden, whether its name says so, its value does, or a flag inside the value."""
        text = str(given.value)
        if _is_secret(given.name) and given.value not in (None, "", True, False):
            self.values.add(text)
            return replace(given, value=HIDDEN)
        self.values |= set(_VALUE.findall(text)) | {value for name, value in _FLAG.findall(text) if _is_secret(name.replace("-", "_"))}
        return replace(given, value=self.hidden(text)) if isinstance(given.value, str) else given

    def hidden(self, text: str) -> str:
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        return _VALUE.sub(HIDDEN, text)

    def without_in(self, findings: Iterable[Finding]) -> list[Finding]:
        return [self._without_in(finding) for finding in findings]

    def _without_in(self, finding: Finding) -> Finding:
        texts: dict[str, Any] = {
            f.name: self.hidden(value) for f in fields(finding) if f.name != "code" and isinstance(value := getattr(finding, f.name), str)
        }
        return replace(finding, **texts, details=tuple((name, self.hidden(value)) for name, value in finding.details))


def keys_of_env(text: str, secrets: Secrets) -> list[Given]:
    """Raises nothing: lines that are no assignments are skipped; a shell that sources the file would run them."""
    found: dict[str, Given] = {}
    for name, assignment in shell.read(text).variables.items():
        if name == "TRAINER_EXTRA_ARGS":
            for key, value in shell.arguments(assignment.value.split()).items():
                argument = _argument(key)
                found[argument] = Given(argument, _scalar(value), assignment.line, f"{name}: --{key}")
        else:
            argument = _argument(ARGUMENTS.get(name, name.lower()))
            found.setdefault(argument, Given(argument, _scalar(assignment.value), assignment.line, name))
    return [secrets.without(given) for given in found.values()]


def keys_of_tree(tree: Tree, secrets: Secrets) -> list[Given]:
    """The keys of a JSON or TOML file; their names may begin with `--`."""
    data = tree.data if isinstance(tree.data, dict) else {}
    found = {}
    for key, value in data.items():
        name = _argument(str(key).lstrip("-").replace("-", "_"))
        found[name] = Given(name, value, tree.lines.get((key,)), str(key))
    return [secrets.without(given) for given in found.values()]


def keys_of_datasets(config: Path, named: object, secrets: Secrets) -> tuple[Path | None, list[Given]]:
    """The dataset file that a configuration names, and its keys; None where it is not found.

    config  the configuration's file: SimpleTuner is started some folders above it, so the name is tried from each
    Raises  UsageError for a file that is no list of datasets
    """
    if not isinstance(named, str) or not named:
        return None, []
    folders = [config.parent, *config.absolute().parents[1:4], Path(".")]
    file = next((found for folder in folders if (found := folder / named).is_file()), None)
    file = file or next((found for name in (Path(named).name,) if (found := config.parent / name).is_file()), None)
    if file is None:
        return None, []
    try:
        tree = read_json(file.read_text(encoding="utf-8-sig"))
    except Unreadable as error:
        raise UsageError(f"{file}:{error.line}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None
    if not isinstance(tree.data, list) or not all(isinstance(entry, dict) for entry in tree.data):
        raise UsageError(f"{file}: expected a list of datasets")
    return file, [secrets.without(given) for given in _of_datasets(file, tree)]


def _of_datasets(file: Path, tree: Tree) -> Iterator[Given]:
    for i, entry in enumerate(tree.data):
        for key, value in entry.items():
            yield Given(f"{DATASET}.{i}.{key}", value, tree.lines.get((i, key)), f"{file.name}: {entry.get('id', i)}.{key}")


def _argument(name: str) -> str:
    return OTHER_NAMES.get(name, name)


def _scalar(value: str | bool) -> Any:
    return scalar(value) if isinstance(value, str) else value
