"""The files of SimpleTuner, kohya, ai-toolkit, OneTrainer and diffusers' scripts as keys with lines.

The keys of a dataset are `dataset.N.KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..doctor.check import shell
from ..doctor.check.text_files import Tree, Unreadable, read_json, read_toml, scalar
from ..errors import UsageError
from .transforms import Given

DATASET = "dataset"
_PROGRAMS = (
    (re.compile(r"^(sdxl_|sd3_|flux_|lumina_|chroma_)?(train_network|train_db|train)\.py$|^fine_tune\.py$"), "kohya"),
    (re.compile(r"^train_(dreambooth|text_to_image)\w*\.py$"), "diffusers"),
)
# SimpleTuner's variables of config.env whose argument is not their name in small letters
_ARGUMENTS = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint", "DATALOADER_CONFIG": "data_backend_config", "TRAINING_SEED": "seed",
    "ACCELERATE_CONFIG_PATH": "accelerate_config", "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "MINIMUM_RESOLUTION": "minimum_image_size", "PUSH_CHECKPOINTS": "push_checkpoints_to_hub", "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs", "CHECKPOINTING_STEPS": "checkpoint_step_interval", "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id", "MODEL_NAME": "pretrained_model_name_or_path", "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "VALIDATION_STEPS": "validation_step_interval", "LR_SCHEDULE": "lr_scheduler", "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines", "TRAINER_DYNAMO_BACKEND": "dynamo_backend", "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}  # fmt: skip
_OTHER_NAMES = {  # older or shorter arguments
    "validation_steps": "validation_step_interval", "checkpointing_steps": "checkpoint_step_interval", "rank": "lora_rank",
    "validation_prompts": "validation_prompt", "max_steps": "max_train_steps",
}  # fmt: skip
_HIDDEN = "(secret)"
_SECRET = (
    r"[\w.-]*(?:(?<!bos_|eos_|pad_|unk_|sep_|cls_)token|[_-]auth"
    r"|(?:api[_-]?key|secret|passw|access[_-]?key|credential|webhook)[\w.-]*)"
)
_VALUE = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,})\b")
_FLAG = re.compile(rf"(--?{_SECRET}[= ]+)\S+", re.I)


def tool_of_program(program: str) -> str | None:
    """The tool whose training script this is: `flux_train_network.py` is kohya's, `train_dreambooth_lora_flux.py` is diffusers'."""
    return next((tool for pattern, tool in _PROGRAMS if pattern.match(program.rpartition("/")[2])), None)


def tool_of_tree(tree: Tree, tool: str | None) -> str | None:
    """`kohya`, `ai-toolkit` or `onetrainer` where a file is theirs; `tool` is what `identify` says of it."""
    data = tree.data
    if tool == "kohya":
        return tool
    if not isinstance(data, dict):
        return None
    names = {str(key) for one in (data, *data.values()) if isinstance(one, dict) for key in one}
    if {"datasets", "general"} <= set(data) or names & {"network_module", "network_dim"}:
        return "kohya"
    if {"job", "config"} <= set(data) and isinstance(data["config"], dict):
        return "ai-toolkit" if "process" in data["config"] else None
    return "onetrainer" if {"training_method", "train_dtype"} <= set(data) else None


def keys_of(tool: str, tree: Tree, path: Path) -> list[Given]:
    """The keys of a file of kohya, ai-toolkit or OneTrainer. Raises UsageError."""
    return list({"kohya": _kohya, "ai-toolkit": _ai_toolkit, "onetrainer": _onetrainer}[tool](tree, path))


def _kohya(tree: Tree, path: Path) -> Iterator[Given]:
    """Keys of all tables, as if there were none."""
    for key, value in tree.data.items():
        if isinstance(value, dict) and key != "general":
            for inner, one in value.items():
                yield Given(str(inner), one, tree.lines.get((key, inner)), str(inner))
        elif key not in ("general", "datasets"):
            yield Given(str(key), value, tree.lines.get((key,)), str(key))
    yield from _kohya_datasets(tree, "")


def kohya_dataset_file(named: object, beside: Path) -> Iterator[Given]:
    """The keys of the file of `--dataset_config`; nothing where it is not found. Raises UsageError for one that is broken."""
    if isinstance(named, str) and (file := _file(named, Path("."), beside.parent)) is not None:
        yield from _kohya_datasets(_tree(file, read_toml), f"{file.name}: ")


def _kohya_datasets(tree: Tree, shown: str) -> Iterator[Given]:
    """A subset has its own keys, those of its dataset, and those of [general]."""
    data, count = tree.data, 0
    for i, dataset in enumerate(data.get("datasets", [])):
        for j, subset in enumerate(dataset.get("subsets", [])):
            outer = {**data.get("general", {}), **{key: value for key, value in dataset.items() if key != "subsets"}}
            for key, value in {**outer, **subset}.items():
                line = tree.lines.get(("datasets", i, "subsets", j, key)) or tree.lines.get(("datasets", i, key))
                yield Given(f"{DATASET}.{count}.{key}", value, line or tree.lines.get(("general", key)), f"{shown}{key}")
            count += 1


def _ai_toolkit(tree: Tree, path: Path) -> Iterator[Given]:
    processes = tree.data.get("config", {}).get("process") or []
    if not processes or not isinstance(processes[0], dict):
        raise UsageError(f"{path}: config.process: expected a list with one training process")
    yield from _nested(processes[0], tree, ("config", "process", 0))


def _nested(node: dict[str, Any], tree: Tree, at: tuple[Any, ...], before: str = "") -> Iterator[Given]:
    for key, value in node.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _nested(value, tree, (*at, key), f"{name}.")
        elif key == "datasets" and isinstance(value, list):
            for i, entry in enumerate(value):
                for inner, one in entry.items() if isinstance(entry, dict) else ():
                    yield Given(f"{DATASET}.{i}.{inner}", one, tree.lines.get((*at, key, i, inner)), f"datasets[{i}].{inner}")
        else:
            yield Given(name, value, tree.lines.get((*at, key)), name)


def _onetrainer(tree: Tree, path: Path) -> Iterator[Given]:
    concepts, shown, named = tree.data.get("concepts"), "concepts", tree.data.get("concept_file_name")
    yield from _nested({key: value for key, value in tree.data.items() if key != "concepts"}, tree, ())
    if concepts is None and isinstance(named, str):
        file = _file(named, path.parent, Path("."))
        concepts, shown = (None if file is None else _tree(file, read_json).data), Path(named).name
    for i, concept in enumerate(concepts or []):
        own = {key: value for key, value in concept.items() if not isinstance(value, dict)}
        for key, value in {**own, **(concept.get("image") or {}), **(concept.get("text") or {})}.items():
            yield Given(f"{DATASET}.{i}.{key}", value, None, f"{shown}[{i}].{key}")


def _file(named: str, *folders: Path) -> Path | None:
    """A file that another one names: in one of the folders, or by its own name beside the last."""
    places = [*(folder / named for folder in folders), *(folder / Path(named).name for folder in folders)]
    return next((found for found in places if found.is_file()), None)


def _tree(file: Path, reader: Callable[[str], Tree]) -> Tree:
    try:
        return reader(file.read_text(encoding="utf-8-sig"))
    except Unreadable as error:
        raise UsageError(f"{file}:{error.line}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def without_secret(given: Given) -> Given:
    """The key with its secret hidden, whether its name says so, its value does, or a flag inside the value."""
    if re.fullmatch(_SECRET, given.name.rpartition(".")[2], re.I) and given.value not in (None, "", True, False):
        return replace(given, value=_HIDDEN)
    return replace(given, value=hidden(given.value)) if isinstance(given.value, str) else given


def hidden(text: str) -> str:
    """A text with the secrets in it hidden."""
    return _VALUE.sub(_HIDDEN, _FLAG.sub(rf"\1{_HIDDEN}", text))


def simpletuner_keys(read: Tree | str, config: Path) -> list[Given]:
    """The keys of SimpleTuner's JSON or TOML, or of the text of a config.env, and of the dataset file that it names.

    Lines of a config.env that are no assignments are skipped; a shell that sources it would run them. Raises UsageError.
    """
    found: dict[str, Given] = {}
    if isinstance(read, str):
        for name, assignment in shell.read(read).variables.items():
            if name == "TRAINER_EXTRA_ARGS":
                for key, value in shell.arguments(assignment.value.split()).items():
                    key, written = _OTHER_NAMES.get(key, key), f"{name}: --{key}"
                    found[key] = Given(key, scalar(value) if isinstance(value, str) else value, assignment.line, written)
            else:
                key = _ARGUMENTS.get(name, name.lower())
                found.setdefault(
                    _OTHER_NAMES.get(key, key), Given(_OTHER_NAMES.get(key, key), scalar(assignment.value), assignment.line, name)
                )
    else:
        for written, value in read.data.items() if isinstance(read.data, dict) else ():
            key = str(written).lstrip("-").replace("-", "_")  # their names may begin with `--`
            found[key] = Given(_OTHER_NAMES.get(key, key), value, read.lines.get((written,)), str(written))
    named = next((given.value for given in found.values() if given.name == "data_backend_config"), None)
    return [*found.values(), *_simpletuner_datasets(named, config)]


def _simpletuner_datasets(named: object, config: Path) -> Iterator[Given]:
    """SimpleTuner is started some folders above its configuration, so the name is tried from each; nothing where it is not found."""
    if not isinstance(named, str) or not named or (file := _file(named, config.parent, *config.absolute().parents[1:4], Path("."))) is None:
        return
    tree = _tree(file, read_json)
    if not isinstance(tree.data, list) or not all(isinstance(entry, dict) for entry in tree.data):
        raise UsageError(f"{file}: expected a list of datasets")
    for i, entry in enumerate(tree.data):
        for key, value in entry.items():
            yield Given(f"{DATASET}.{i}.{key}", value, tree.lines.get((i, key)), f"{file.name}: {entry.get('id', i)}.{key}")
