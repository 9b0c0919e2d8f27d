"""Reads the keys of another tool's file with their lines, and finds out to which tool the file
belongs. Programs are only parsed, as in `isotype doctor check`, and never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..doctor.check import python_calls, shell
from ..doctor.check.programs import is_config_env
from ..doctor.check.python_calls import Call, UnknownValue, read_notebook
from ..doctor.check.text_files import UnreadableError, parse_scalar, read_json, read_toml, read_yaml
from ..doctor.check.tools import identify_tool
from ..errors import UsageError
from . import clips
from .pictures import (
    detect_program_tool,
    detect_tree_tool,
    find_file,
    kohya_dataset_keys,
    nested_keys,
    read_picture_keys,
    redact_key,
    simpletuner_keys,
)
from .transforms import LAUNCHER_PREFIX, Computed, SourceKey

MAX_BYTES = 4 << 20  # largest size of a file that is read
# names that `identify_tool` returns for files with only a model's or an adapter's arguments
_TOOL_ALIASES = {"model": "hf", "peft": "hf"}
# command -> the tool to which it belongs
_COMMAND_TOOLS = {
    "trl": "hf",
    "llamafactory-cli": "llamafactory",
    "axolotl": "axolotl",
    "tune": "torchtune",
}
_TEXT_TOOLS = ("hf", "model", "peft", "trl", "llamafactory", "axolotl")
# function -> its arguments -> their names in the tables; a digit is a positional argument;
# arguments that are not listed keep their names
_LORA_ARGUMENTS = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
}
_MODEL_ARGUMENTS = {
    "0": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
    "model_name": "model_name_or_path",
}
_CALL_ARGUMENTS: dict[str, dict[str, str]] = {
    "LoraConfig": {
        **_LORA_ARGUMENTS,
        "0": "lora_r",
        "bias": "lora_bias",
        "inference_mode": "lora_inference_mode",
        "init_lora_weights": "lora_init",
    },
    "BitsAndBytesConfig": {},
    "get_peft_model": {
        **_LORA_ARGUMENTS,
        "bias": "lora_bias",
        "random_state": "lora_seed",
        "loftq_config": "loftq",
        "use_gradient_checkpointing": "gradient_checkpointing",
    },
    "get_chat_template": {
        "1": "chat_template",
        "mapping": "turn_names",
        "system_message": "default_system_message",
    },
    "load_dataset": {
        **dict.fromkeys(("0", "path"), "dataset_name"),
        **dict.fromkeys(("1", "name"), "dataset_config"),
        "split": "dataset_train_split",
    },
    **{
        f"{method}Trainer": {"model": "model_name_or_path", "max_seq_length": "max_length"}
        for method in ("SFT", "DPO", "KTO", "ORPO", "CPO", "Reward")
    },
    "Trainer": {"model": "model_name_or_path"},
}
_ARGUMENTS_CLASS = re.compile(
    r"^(?:Seq2Seq|Unsloth)?TrainingArguments$|^(?:SFT|DPO|KTO|ORPO|CPO|Reward)Config$"
)
# names of TRL's preference methods in classes and scripts; the method becomes the key `trl_method`
_METHOD_CLASS = re.compile(r"^(DPO|KTO|ORPO|CPO|Reward)(?:Config|Trainer)$")
_METHOD_SCRIPT = re.compile(
    r"^trl (dpo|kto|reward)$|(?:^|/)(?:run_)?(dpo|kto|orpo|cpo|reward)(?:_modeling)?\.py$"
)

_MODEL_CLASS = re.compile(
    r"^(?:Auto(?:Liger)?(?:ModelForCausalLM|KernelForCausalLM)|AutoLigerKernelForCausalLM|\w+ForCausalLM|Fast(?:Language|Vision)?Model"
    r"|AutoModelFor(?:SequenceClassification|ImageTextToText|Vision2Seq))$"
)
# arguments that pass an object from one call to another. The settings of the object are keys of the
# source; these arguments are not
_PROGRAM_OBJECTS = (
    *(
        "model",
        "tokenizer",
        "processing_class",
        "train_dataset",
        "eval_dataset",
        "args",
        "peft_config",
        "data_collator",
        "callbacks",
    ),
    *(
        "quantization_config",
        "config",
        "compute_metrics",
        "preprocess_logits_for_metrics",
        "formatting_func",
        "optimizers",
        "model_init",
    ),
)


@dataclass
class Source:
    """Contains the keys of a file, and the tool to which the file belongs.

    called_names  names of functions and classes that a Python file calls, for `refusal_reason`
    method        the words after `trl`, `tune run` or a similar command, or the name of kohya's
                  script
    config        the file of settings that a command names; this file decides the precision
    """

    file: str
    tool: str | None
    keys: list[SourceKey] = field(default_factory=list)
    called_names: frozenset[str] = frozenset()
    method: str = ""
    config: str = ""

    def __post_init__(self) -> None:
        self.keys = [redact_key(source_key) for source_key in self.keys]

    def get(self, name: str) -> object:
        return next((source_key.value for source_key in self.keys if source_key.name == name), None)

    def find_key(self, *prefixes: str) -> SourceKey | None:
        """Returns the first key that has one of these names or lies below one of them. For example,
        `loss.beta` lies below `loss`.
        """
        return next(
            (
                key
                for key in self.keys
                if any(
                    key.name == prefix or key.name.startswith(prefix + ".") for prefix in prefixes
                )
            ),
            None,
        )


def read_source(path: Path, requested_tool: str | None = None) -> Source:
    """Reads the keys of a file, and detects the tool to which the file belongs. Raises UsageError
    with file and line if the file cannot be read.

    requested_tool  the tool that the user named on the command line
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give the configuration file")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(
                f"{path}: {path.stat().st_size >> 20} MiB, too large for a configuration"
            )
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not text (UTF-8)") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    suffix = path.suffix.lower()
    try:
        if suffix == ".py":
            return _read_program(text, path, lambda line: line)
        if suffix == ".ipynb":
            code, map_line = read_notebook(text)
            return _read_program(code, path, map_line)
        if suffix == ".env" and is_config_env(set(shell.read_script(text).variables)):
            return Source(str(path), "simpletuner", simpletuner_keys(text, path))
        if suffix in (".sh", ".bash", ".slurm", ".sbatch", ".env"):
            return _read_script(text, path)
        if suffix not in (".yaml", ".yml", ".json", ".toml"):
            raise UsageError(
                f"{path}: isotype import reads YAML, JSON, TOML, Python, notebooks and shell"
                " scripts"
            )
        tree = {".toml": read_toml, ".json": read_json}.get(suffix, read_yaml)(text)
    except UnreadableError as error:
        raise UsageError(f"{path}:{error.line}: {error}") from None
    tool = identify_tool(tree.data, path.name)
    if "simpletuner" in (requested_tool, tool):
        return Source(str(path), "simpletuner", simpletuner_keys(tree, path))
    if (video_tool := clips.detect_video_tool(tree.data)) is not None:
        return Source(str(path), video_tool, list(clips.read_video_keys(video_tool, tree, path)))
    if (picture_tool := detect_tree_tool(tree, tool)) is not None:
        picture_keys = read_picture_keys(picture_tool, tree, path)
        dataset_file = next(
            (
                source_key.value
                for source_key in picture_keys
                if source_key.name == "dataset_config"
            ),
            None,
        )
        return Source(
            str(path), picture_tool, [*picture_keys, *kohya_dataset_keys(dataset_file, path)]
        )
    data = tree.data if isinstance(tree.data, dict) else {}
    mapping_values = () if tool == "torchtune" else _MAPPING_VALUES
    keys = list(nested_keys(data, tree, mapping_values=mapping_values))
    names = {source_key.name.partition(".")[0] for source_key in keys}
    if "base_model" in names and names & {"micro_batch_size", "sequence_len", "sample_packing"}:
        tool = "axolotl"  # also if most of the keys belong to Hugging Face's Trainer
    if (
        names & {"dist_config", "sample_backend", "init_config"}
        or {"model_class", "model"} <= names
    ):
        tool = "llamafactory"
    return Source(str(path), _TOOL_ALIASES.get(tool or "", tool), keys)


# keys whose mapping is one value; not used for torchtune, whose components are nested
_MAPPING_VALUES = (
    "lr_scheduler_kwargs", "special_tokens", "fsdp_config", "plugins", "rope_scaling", "chat_template_kwargs", "dataset_columns",
    "deepspeed",
)  # fmt: skip


def _read_program(text: str, path: Path, map_line: Callable[[int | None], int | None]) -> Source:
    calls = python_calls.read_calls(text)
    keys = [
        SourceKey(key.name, key.value, map_line(key.line), key.name_in_file)
        for key in _call_keys(calls)
    ]
    called_names = frozenset(
        name for call in calls for name in (call.name, call.owner.rpartition(".")[2]) if name
    )
    methods = {
        match[1].lower(): call for call in calls if (match := _METHOD_CLASS.match(call.name))
    }
    keys = [
        *(
            SourceKey("trl_method", method, map_line(call.line), call.name)
            for method, call in methods.items()
        ),
        *keys,
    ]
    argument_classes = called_names & {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"}
    has_training = (
        methods or argument_classes or any(name.endswith("Trainer") for name in called_names)
    )
    tool = None
    if has_training and keys:
        tool = "trl" if methods or called_names & {"SFTConfig", "SFTTrainer"} else "hf"
        if called_names & {"FastLanguageModel", "FastModel", "FastVisionModel"}:
            tool = "unsloth"
    return Source(str(path), tool, keys, called_names)


def _read_script(text: str, path: Path) -> Source:
    """Reads the training command of a script (`trl sft --...`, `llamafactory-cli train --...`,
    `tune run RECIPE key=value`, `python x.py ...`), with the options of its launcher.
    """
    for command in shell.read_script(text).commands:
        if (program := _find_program(command.arguments)) is None:
            continue
        arguments = command.arguments[program.start :]
        lines = command.lines[program.start :]
        keys = [
            SourceKey(option.name, _option_value(option), option.line, f"--{option.name}")
            for option in shell.read_options(arguments, lines)
        ]
        if program.executable in ("tune", "llamafactory-cli"):
            keys += _override_keys(arguments, lines)
        if program.executable == "tune":
            keys = [key for key in keys if not key.name_in_file.startswith("--")]
        config = _named_config(program, arguments, lines, keys, path)
        if not keys and config is None:
            continue
        method = " ".join(command.arguments[1 : program.start + 1])
        source = _command_source(program, keys, config, path, method, command.lines[0])
        source.keys = [*_launcher_keys(command, program.launcher_end), *source.keys]
        return source
    raise UsageError(
        f"{path}: no training command in it that isotype import knows (trl, llamafactory-cli,"
        " axolotl, tune run, python TRAIN.py --...)"
    )


@dataclass(frozen=True, slots=True)
class _Program:
    """Describes the training program that a command starts.

    executable    an executable such as `trl` or `axolotl`; "" for a Python script
    script        the file of a Python script; "" for an executable
    start         the position in the command at which the program's arguments begin
    launcher_end  the position at which the launcher's arguments end
    """

    executable: str
    script: str
    start: int
    launcher_end: int


def _find_program(arguments: list[str]) -> _Program | None:
    executable = arguments[0].rpartition("/")[2]
    if executable in _COMMAND_TOOLS:
        return _Program(executable, "", 2, 0)
    for i, argument in enumerate(arguments):
        if argument.endswith(".py"):
            return _Program("", argument, i + 1, i)
        if argument.startswith("axolotl.cli") and arguments[i - 1] in ("-m", "--module"):
            return _Program("axolotl", "", i + 1, i - 1)
    return None


def _named_config(
    program: _Program, arguments: list[str], lines: list[int], keys: list[SourceKey], path: Path
) -> SourceKey | None:
    """Returns the configuration file that a command names. The file is the value of `--config`, or
    the first argument of `axolotl train`, `llamafactory-cli train` and LLaMA-Factory's `train.py`.
    """
    if program.executable == "tune":
        return None
    config_key = next((key for key in keys if key.name == "config"), None)
    if config_key is not None:
        return config_key
    if not arguments or not arguments[0].endswith((".yaml", ".yml", ".json")):
        return None
    if not program.executable:
        file = _find_config(arguments[0], path)
        if file is None or read_source(file).tool != "llamafactory":
            return None
    return SourceKey("config", arguments[0], lines[0], arguments[0])


def _find_config(name: str, path: Path) -> Path | None:
    """Finds a file that a command of the script `path` names. The name of the file may be relative
    to the folder of the script, to a folder above it, or to the working directory.
    """
    return find_file(name, path.parent, *path.absolute().parents[1:4], Path("."))


def _override_keys(arguments: list[str], lines: list[int]) -> list[SourceKey]:
    """Reads the overrides `key=value` of torchtune's and LLaMA-Factory's commands."""
    matches = [
        (re.match(r"^([A-Za-z_][\w.]*)=(.*)$", argument), line)
        for argument, line in zip(arguments, lines, strict=True)
    ]
    return [
        SourceKey(match[1], parse_scalar(match[2]), line, match[1])
        for match, line in matches
        if match is not None
    ]


def _option_value(option: shell.Option) -> Any:
    """Returns the value of an option. The value of a flag is True. Several values become a list. A
    value in JSON is parsed.
    """
    if not option.values:
        return True
    values = [_parse_option_value(value) for value in option.values]
    return values[0] if len(values) == 1 else values


def _parse_option_value(value: str) -> Any:
    if value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return parse_scalar(value)


def _launcher_keys(command: shell.Command, program: int) -> list[SourceKey]:
    """Reads the options that a command has before the training program. They belong to accelerate,
    torchrun or DeepSpeed.
    """
    arguments = command.arguments[:program]
    if not arguments:
        return []
    launcher = (
        "accelerate launch" if "accelerate" in arguments[0] else arguments[0].rpartition("/")[2]
    )
    return [
        SourceKey(
            f"{LAUNCHER_PREFIX}{option.name}",
            _option_value(option),
            option.line,
            f"{launcher} --{option.name}",
        )
        for option in shell.read_options(arguments, command.lines[:program])
        if option.name not in ("m", "u")  # Python's options -m and -u
    ]


def _command_source(
    program: _Program,
    keys: list[SourceKey],
    config: SourceKey | None,
    path: Path,
    method: str,
    line: int,
) -> Source:
    """Returns the `Source` of a command. It contains the tool and the keys of the command, and the
    keys of the files that the command names.
    """
    options = {source_key.name: source_key.value for source_key in keys}
    tool = _COMMAND_TOOLS.get(program.executable) or identify_tool(options)
    picture_tool = detect_program_tool(program.script)
    if clips.is_musubi_program(program.script):
        picture_tool = clips.MUSUBI
    # programs of other tools may also be named `train.py`, as kohya's is
    is_text_program = program.script.endswith("train.py") and (
        tool in _TEXT_TOOLS or config is not None
    )
    if picture_tool is not None and not is_text_program:
        return _read_picture_command(picture_tool, keys, path, program.script)
    config_file = None
    if config is not None and (tool in _TEXT_TOOLS or tool is None):
        keys, config_file, config_tool = _add_config_keys(keys, config, path)
        tool = tool or config_tool
    tool = _TOOL_ALIASES.get(tool or "", tool)
    if tool in (None, "hf", "trl"):
        text = program.script
        if program.executable == "trl":
            text = f"trl {method.partition(' ')[0]}"
        if match := _METHOD_SCRIPT.search(text):
            name = match[1] or match[2]
            keys = [SourceKey("trl_method", name, line, match[0].lstrip("/")), *keys]
            tool = "hf"
    return Source(str(path), tool, keys, method=method, config=config_file or "")


_PRECISION_OPTIONS = {"bf16", "fp16", "dtype", "torch_dtype", "load_in_4bit", "load_in_8bit"}


def _add_config_keys(
    keys: list[SourceKey], config: SourceKey, path: Path
) -> tuple[list[SourceKey], str, str | None]:
    """Combines the options of a command with the keys of the configuration file that the command
    names. If a key is in the command and in the file, the option of the command takes precedence.
    Returns all keys, the name of the file, and the tool to which the file belongs.
    """
    value = str(config.value)
    label = "--config " if config.name_in_file == "--config" else ""
    file = _find_config(value, path)
    if file is None:
        raise UsageError(
            f"{path}:{config.line}: {label}{value} is not there; its settings are needed"
        )
    options = {key.name: key for key in keys if key is not config}
    if precision_options := sorted(options.keys() & _PRECISION_OPTIONS):
        name = options[precision_options[0]].name_in_file
        raise UsageError(
            f"{path}:{config.line}: {name} beside {label.strip() or value}: write it into {file}"
        )
    source = read_source(file)
    file_keys = [
        replace(key, name_in_file=f"{file.name}: {key.name_in_file or key.name}")
        for key in source.keys
        if key.name not in options
    ]
    return [*options.values(), *file_keys], str(file), source.tool


def _read_picture_command(tool: str, keys: list[SourceKey], path: Path, script: str) -> Source:
    """Reads a command of a script for pictures or videos, with the files that it names."""
    values = {source_key.name: source_key.value for source_key in keys}
    if tool in ("kohya", clips.MUSUBI):
        file = path.parent / str(values.get("config_file"))
        if file.is_file():
            file_keys = read_source(file).keys
            keys = [*keys, *(key for key in file_keys if key.name not in values)]
        read_datasets = kohya_dataset_keys if tool == "kohya" else clips.read_musubi_datasets
        keys += read_datasets(values.get("dataset_config"), path)
    return Source(str(path), tool, keys, method=script)


def _call_keys(calls: list[Call]) -> Iterator[SourceKey]:
    """Yields every argument of the calls that contain training settings."""
    for call in calls:
        names = _argument_names(call)
        if names is None:
            continue
        for argument, (value, line) in call.arguments.items():
            name = names.get(argument, argument)
            if argument.isdigit() and argument not in names:
                continue
            if name in _PROGRAM_OBJECTS or (
                name == "model_name_or_path"
                and call.name.endswith("Trainer")
                and not isinstance(value, str)
            ):
                continue
            keyword = "" if argument.isdigit() else argument
            name_in_file = f"{_call_label(call)}({keyword})"
            yield SourceKey(name, _literal_value(value), line, name_in_file)


def _argument_names(call: Call) -> dict[str, str] | None:
    """Returns a mapping from each argument of a call to the name that the tables of handlers have
    for it. Returns None if the call contains no training settings.
    """
    if call.name == "from_pretrained":
        if _MODEL_CLASS.match(call.owner.rpartition(".")[2]):
            return {**_MODEL_ARGUMENTS, "max_seq_length": "max_length"}
        return None
    if call.name == "get_peft_model" and not call.owner.endswith(
        ("FastLanguageModel", "FastModel", "FastVisionModel")
    ):
        return None  # PEFT's get_peft_model(model, config)
    if _ARGUMENTS_CLASS.match(call.name):
        return {"0": "output_dir", "max_seq_length": "max_length"}
    return _CALL_ARGUMENTS.get(call.name)


def _call_label(call: Call) -> str:
    if call.name == "from_pretrained":
        return f"{call.owner.rpartition('.')[2]}.{call.name}"
    return call.name


def _literal_value(value: Any) -> Any:
    """Returns the value of an argument if it is a literal. If the program computes the value, for
    example by calling `is_bfloat16_supported()`, the result is `Computed`.
    """
    if value is UnknownValue or (isinstance(value, dict) and "__call__" in value):
        return Computed
    if isinstance(value, list) and any(item is UnknownValue for item in value):
        return Computed
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not UnknownValue}
    if isinstance(value, (int, float, bool, list, type(None))):
        return value
    return str(value)
