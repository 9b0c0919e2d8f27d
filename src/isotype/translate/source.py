"""Another tool's file: its keys with their lines, and the tool that they belong to. Read as `isotype doctor check` reads it, never run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..doctor.check import python_calls, shell
from ..doctor.check.identify import identify
from ..doctor.check.programs import is_config_env
from ..doctor.check.python_calls import read_notebook
from ..doctor.check.text_files import Tree, Unreadable, read_json, read_toml, read_yaml, scalar
from ..errors import UsageError
from .account import Given
from .python_program import from_calls
from .secrets import Secrets
from .simpletuner_file import keys_of_datasets, keys_of_env, keys_of_tree

LARGEST = 4 << 20  # bytes
_TOOL_OF = {"model": "hf", "peft": "hf"}  # the answer of `identify` for a flat file with a model's or an adapter's arguments
_COMMANDS = ("trl", "llamafactory-cli", "axolotl", "tune")


@dataclass
class Source:
    """calls: names of what a Python file calls; method: the word behind `trl`, `tune run` or the like; all for `refusal`."""

    file: str
    tool: str | None
    keys: list[Given] = field(default_factory=list)
    calls: frozenset[str] = frozenset()
    method: str = ""
    secrets: Secrets = field(default_factory=Secrets)

    def get(self, name: str) -> object:
        return next((given.value for given in self.keys if given.name == name), None)

    def has(self, *prefixes: str) -> Given | None:
        """The first key with one of these names, or below one of them."""
        return next((g for g in self.keys if any(g.name == p or g.name.startswith(p + ".") for p in prefixes)), None)


def read(path: Path, asked: str | None = None) -> Source:
    """Raises UsageError with file and line for what cannot be read.

    asked  the tool that the user named
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give the configuration file")
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{path}: {path.stat().st_size >> 20} MiB, too large for a configuration")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not text (UTF-8)") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    suffix = path.suffix.lower()
    try:
        if suffix == ".py":
            return _program(text, path, lambda line: line)
        if suffix == ".ipynb":
            code, line_of = read_notebook(text)
            return _program(code, path, line_of)
        if suffix == ".env" and is_config_env(set(shell.read(text).variables)):
            return _simpletuner(path, keys_of_env(text, secrets := Secrets()), secrets)
        if suffix in (".sh", ".bash", ".slurm", ".sbatch", ".env"):
            return _commands(text, path)
        if suffix not in (".yaml", ".yml", ".json", ".toml"):
            raise UsageError(f"{path}: isotype import reads YAML, JSON, TOML, Python, notebooks and shell scripts")
        tree = {".toml": read_toml, ".json": read_json}.get(suffix, read_yaml)(text)
    except Unreadable as error:
        raise UsageError(f"{path}:{error.line}: {error}") from None
    tool = identify(tree.data, path.name)
    if "simpletuner" in (asked, tool):
        return _simpletuner(path, keys_of_tree(tree, secrets := Secrets()), secrets)
    keys = _keys(tree, whole=tool != "torchtune")
    names = {given.name.partition(".")[0] for given in keys}
    if "base_model" in names and names & {"micro_batch_size", "sequence_len", "sample_packing"}:
        tool = "axolotl"  # also for files in which most keys are Hugging Face's
    if names & {"dist_config", "sample_backend", "init_config"} or {"model_class", "model"} <= names:
        tool = "llamafactory"
    return Source(str(path), _TOOL_OF.get(tool or "", tool), keys)


def _simpletuner(path: Path, keys: list[Given], secrets: Secrets) -> Source:
    """The keys of the configuration and of its dataset file."""
    named = next((given.value for given in keys if given.name == "data_backend_config"), None)
    _, datasets = keys_of_datasets(path, named, secrets)
    return Source(str(path), "simpletuner", [*keys, *datasets], secrets=secrets)


def _keys(tree: Tree, *, whole: bool) -> list[Given]:
    """One Given a key. Lists of mappings (datasets) stay whole; nested sections become `optimizer.lr` where the tool has such."""
    keys: list[Given] = []

    def add(node: dict[str, object], path: tuple[str, ...]) -> None:
        for key, value in node.items():
            here = (*path, str(key))
            if isinstance(value, dict) and value and (not whole or here[-1] not in _WHOLE):
                add(value, here)
            else:
                keys.append(Given(".".join(here), value, tree.lines.get(here), ".".join(here)))

    if isinstance(tree.data, dict):
        add(tree.data, ())
    return keys


_WHOLE = ("lr_scheduler_kwargs", "special_tokens", "fsdp_config", "plugins", "rope_scaling", "dataset_columns", "deepspeed")


def _program(text: str, path: Path, line_of: Callable[[int | None], int | None]) -> Source:
    calls = python_calls.read(text)
    keys = [Given(g.name, g.value, line_of(g.line), g.written) for g in from_calls(calls)]
    named = frozenset(name for call in calls for name in (call.name, call.owner.rpartition(".")[2]) if name)
    trains = named & {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"} or any(name.endswith("Trainer") for name in named)
    tool = None
    if trains and keys:
        tool = "unsloth" if named & {"FastLanguageModel", "FastModel"} else "trl" if named & {"SFTConfig", "SFTTrainer"} else "hf"
    return Source(str(path), tool, keys, named)


def _commands(text: str, path: Path) -> Source:
    """The training command of a script: `trl sft --...`, `llamafactory-cli train --...`, `tune run RECIPE key=value`, `python x.py ...`."""
    for words, line in shell.read(text).commands:
        first = words[0].rpartition("/")[2]
        program = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if first not in _COMMANDS and program is None:
            continue
        start = 2 if first in _COMMANDS else (program or 0) + 1
        given = shell.arguments(words[start:])
        if first == "tune":
            pairs = [m for word in words[start:] if (m := re.match(r"^([A-Za-z_][\w.]*)=(.*)$", word))]
            given = {m[1]: scalar(m[2]) for m in pairs}
        if not given:
            continue
        keys = [
            Given(key, scalar(value) if isinstance(value, str) else value, line, f"--{key}" if first != "tune" else key)
            for key, value in given.items()
        ]
        tool = {"trl": "hf", "llamafactory-cli": "llamafactory", "axolotl": "axolotl", "tune": "torchtune"}.get(first) or identify(given)
        return Source(str(path), _TOOL_OF.get(tool or "", tool), keys, method=" ".join(words[1 : start + 1]))
    raise UsageError(
        f"{path}: no training command in it that isotype import knows (trl, llamafactory-cli, axolotl, tune run, python TRAIN.py --...)"
    )
