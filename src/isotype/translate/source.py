"""Another tool's file: its keys with their lines, and the tool that they belong to. Read as
`isotype doctor check` reads it, never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..doctor.check import python_calls, shell
from ..doctor.check.programs import is_config_env
from ..doctor.check.python_calls import Call, Unknown, read_notebook
from ..doctor.check.text_files import Unreadable, parse_scalar, read_json, read_toml, read_yaml
from ..doctor.check.tools import identify_tool
from ..errors import UsageError
from .pictures import (
    keys_of,
    kohya_dataset_file,
    nested,
    simpletuner_keys,
    tool_of_program,
    tool_of_tree,
    without_secret,
)
from .transforms import Computed, Given

LARGEST = 4 << 20  # bytes
# the answer of `identify` for a flat file with a model's or an adapter's arguments
_TOOL_OF = {"model": "hf", "peft": "hf"}
_COMMANDS = ("trl", "llamafactory-cli", "axolotl", "tune")
# call -> (what its arguments are called in the tables, positional names); an argument not named
# here keeps its own name
_LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
}
_MODEL = {
    "0": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
    "model_name": "model_name_or_path",
}
_PYTHON_CALLS: dict[str, dict[str, str]] = {
    "LoraConfig": {
        **_LORA,
        "0": "lora_r",
        "bias": "lora_bias",
        "inference_mode": "lora_inference_mode",
        "init_lora_weights": "lora_init",
    },
    "BitsAndBytesConfig": {},
    "get_peft_model": {
        **_LORA,
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
_ARGUMENTS = re.compile(
    r"^(?:Seq2Seq|Unsloth)?TrainingArguments$|^(?:SFT|DPO|KTO|ORPO|CPO|Reward)Config$"
)
# TRL's preference methods, as classes and as scripts; the method becomes the key `trl_method`
_METHOD_CLASS = re.compile(r"^(DPO|KTO|ORPO|CPO|Reward)(?:Config|Trainer)$")
_METHOD_SCRIPT = re.compile(
    r"^trl (dpo|kto|reward)$|(?:^|/)(?:run_)?(dpo|kto|orpo|cpo|reward)(?:_modeling)?\.py$"
)

_MODELS = re.compile(
    r"^(?:Auto(?:Liger)?(?:ModelForCausalLM|KernelForCausalLM)|AutoLigerKernelForCausalLM|\w+ForCausalLM|Fast(?:Language|Vision)?Model"
    r"|AutoModelFor(?:SequenceClassification|ImageTextToText|Vision2Seq))$"
)
_OBJECTS = (  # handed from one call to another: their own settings are keys, the variables are not
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
    """calls: names of what a Python file calls; method: the word behind `trl`, `tune run` or the
    like; all for `refusal`.

    config  the file of settings that a command names: its precision is the training's
    """

    file: str
    tool: str | None
    keys: list[Given] = field(default_factory=list)
    calls: frozenset[str] = frozenset()
    method: str = ""
    config: str = ""

    def __post_init__(self) -> None:
        self.keys = [without_secret(given) for given in self.keys]

    def get(self, name: str) -> object:
        return next((given.value for given in self.keys if given.name == name), None)

    def has(self, *prefixes: str) -> Given | None:
        """The first key with one of these names, or below one of them."""
        return next(
            (
                g
                for g in self.keys
                if any(g.name == p or g.name.startswith(p + ".") for p in prefixes)
            ),
            None,
        )


def read(path: Path, asked: str | None = None) -> Source:
    """Raises UsageError with file and line for what cannot be read.

    asked  the tool that the user named
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give the configuration file")
        if path.stat().st_size > LARGEST:
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
            return _program(text, path, lambda line: line)
        if suffix == ".ipynb":
            code, line_of = read_notebook(text)
            return _program(code, path, line_of)
        if suffix == ".env" and is_config_env(set(shell.read_script(text).variables)):
            return Source(str(path), "simpletuner", simpletuner_keys(text, path))
        if suffix in (".sh", ".bash", ".slurm", ".sbatch", ".env"):
            return _commands(text, path)
        if suffix not in (".yaml", ".yml", ".json", ".toml"):
            raise UsageError(
                f"{path}: isotype import reads YAML, JSON, TOML, Python, notebooks and shell"
                " scripts"
            )
        tree = {".toml": read_toml, ".json": read_json}.get(suffix, read_yaml)(text)
    except Unreadable as error:
        raise UsageError(f"{path}:{error.line}: {error}") from None
    tool = identify_tool(tree.data, path.name)
    if "simpletuner" in (asked, tool):
        return Source(str(path), "simpletuner", simpletuner_keys(tree, path))
    if (of_pictures := tool_of_tree(tree, tool)) is not None:
        found = keys_of(of_pictures, tree, path)
        named = next((given.value for given in found if given.name == "dataset_config"), None)
        return Source(str(path), of_pictures, [*found, *kohya_dataset_file(named, path)])
    data = tree.data if isinstance(tree.data, dict) else {}
    keys = list(nested(data, tree, whole=() if tool == "torchtune" else _WHOLE))
    names = {given.name.partition(".")[0] for given in keys}
    if "base_model" in names and names & {"micro_batch_size", "sequence_len", "sample_packing"}:
        tool = "axolotl"  # also for files in which most keys are Hugging Face's
    if (
        names & {"dist_config", "sample_backend", "init_config"}
        or {"model_class", "model"} <= names
    ):
        tool = "llamafactory"
    return Source(str(path), _TOOL_OF.get(tool or "", tool), keys)


# mappings that are one value; torchtune, whose components nest, has none
_WHOLE = (
    "lr_scheduler_kwargs", "special_tokens", "fsdp_config", "plugins", "rope_scaling", "chat_template_kwargs", "dataset_columns",
    "deepspeed",
)  # fmt: skip


def _program(text: str, path: Path, line_of: Callable[[int | None], int | None]) -> Source:
    calls = python_calls.read_calls(text)
    keys = [Given(g.name, g.value, line_of(g.line), g.written) for g in _from_calls(calls)]
    named = frozenset(
        name for call in calls for name in (call.name, call.owner.rpartition(".")[2]) if name
    )
    methods = {
        found[1].lower(): call for call in calls if (found := _METHOD_CLASS.match(call.name))
    }
    keys = [
        *(
            Given("trl_method", method, line_of(call.line), call.name)
            for method, call in methods.items()
        ),
        *keys,
    ]
    arguments = named & {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"}
    trains = methods or arguments or any(name.endswith("Trainer") for name in named)
    tool = None
    if trains and keys:
        tool = "trl" if methods or named & {"SFTConfig", "SFTTrainer"} else "hf"
        if named & {"FastLanguageModel", "FastModel", "FastVisionModel"}:
            tool = "unsloth"
        else:
            tool = tool
    return Source(str(path), tool, keys, named)


def _commands(text: str, path: Path) -> Source:
    """The training command of a script: `trl sft --...`, `llamafactory-cli train --...`, `tune run
    RECIPE key=value`, `python x.py ...`.
    """
    for words, line in shell.read_script(text).commands:
        first = words[0].rpartition("/")[2]
        program = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if first not in _COMMANDS and program is None:
            continue
        start = 2 if first in _COMMANDS else (program or 0) + 1
        given = shell.parse_options(words[start:])
        if first == "tune":
            pairs = [
                m for word in words[start:] if (m := re.match(r"^([A-Za-z_][\w.]*)=(.*)$", word))
            ]
            given = {m[1]: parse_scalar(m[2]) for m in pairs}
        if not given:
            continue
        keys = [
            Given(
                key,
                parse_scalar(value) if isinstance(value, str) else value,
                line,
                f"--{key}" if first != "tune" else key,
            )
            for key, value in given.items()
        ]
        script = words[program] if program is not None else ""
        if (of_pictures := tool_of_program(script)) is not None:
            return _picture_script(of_pictures, keys, path, script)
        tool = {
            "trl": "hf",
            "llamafactory-cli": "llamafactory",
            "axolotl": "axolotl",
            "tune": "torchtune",
        }.get(first) or identify_tool(given)
        method = " ".join(words[1 : start + 1])
        tool = _TOOL_OF.get(tool or "", tool)
        if tool in (None, "hf", "trl") and (
            found := _METHOD_SCRIPT.search(" ".join(words[:2]) if first == "trl" else script)
        ):
            return _preference_script(found, keys, path, method)
        return Source(str(path), tool, keys, method=method)
    raise UsageError(
        f"{path}: no training command in it that isotype import knows (trl, llamafactory-cli,"
        " axolotl, tune run, python TRAIN.py --...)"
    )


def _preference_script(found: re.Match[str], keys: list[Given], path: Path, method: str) -> Source:
    """A command line of TRL's preference scripts, with the file that `--config` names."""
    said = {given.name: given for given in keys}
    named = Given(
        "trl_method", found[1] or found[2], next(iter(said.values())).line, found[0].lstrip("/")
    )
    if (config := said.pop("config", None)) is None:
        return Source(str(path), "hf", [named, *keys], method=method)
    file = next(
        (
            file
            for file in (path.parent / str(config.value), Path(str(config.value)))
            if file.is_file()
        ),
        None,
    )
    if file is None:
        raise UsageError(
            f"{path}:{config.line}: --config {config.value} is not there; its settings are needed"
        )
    if own := sorted(
        said.keys() & {"bf16", "fp16", "dtype", "torch_dtype", "load_in_4bit", "load_in_8bit"}
    ):
        raise UsageError(f"{path}:{config.line}: --{own[0]} beside --config: write it into {file}")
    return Source(
        str(path),
        "hf",
        [named, *said.values(), *(key for key in read(file).keys if key.name not in said)],
        method=method,
        config=str(file),
    )


def _picture_script(tool: str, keys: list[Given], path: Path, script: str) -> Source:
    """A command line of kohya's or of diffusers' scripts, with the files that it names."""
    said = {given.name: given.value for given in keys}
    if tool == "kohya":
        file = path.parent / str(said.get("config_file"))
        keys = [
            *keys,
            *(
                given
                for given in (read(file).keys if file.is_file() else ())
                if given.name not in said
            ),
        ]
        keys += kohya_dataset_file(said.get("dataset_config"), path)
    return Source(str(path), tool, keys, method=script)


def _from_calls(calls: list[Call]) -> Iterator[Given]:
    """Every argument of every call that sets training up."""
    for call in calls:
        names = _names(call)
        if names is None:
            continue
        for argument, (value, line) in call.arguments.items():
            name = names.get(argument, argument)
            if argument.isdigit() and argument not in names:
                continue
            if name in _OBJECTS or (
                name == "model_name_or_path"
                and call.name.endswith("Trainer")
                and not isinstance(value, str)
            ):
                continue
            yield Given(
                name,
                _plain(value),
                line,
                f"{_shown(call)}({argument if not argument.isdigit() else ''})",
            )


def _names(call: Call) -> dict[str, str] | None:
    """How this call's arguments are called here; None for a call that sets nothing."""
    if call.name == "from_pretrained":
        if _MODELS.match(call.owner.rpartition(".")[2]):
            return {**_MODEL, "max_seq_length": "max_length"}
        return None
    if call.name == "get_peft_model" and not call.owner.endswith(
        ("FastLanguageModel", "FastModel", "FastVisionModel")
    ):
        return None  # PEFT's own: (model, config)
    if _ARGUMENTS.match(call.name):
        return {"0": "output_dir", "max_seq_length": "max_length"}
    return _PYTHON_CALLS.get(call.name)


def _shown(call: Call) -> str:
    if call.name == "from_pretrained":
        return f"{call.owner.rpartition('.')[2]}.{call.name}"
    return call.name


def _plain(value: Any) -> Any:
    """What is not written in the file is Computed; calls that only give a name
    (`is_bfloat16_supported()`) too.
    """
    if value is Unknown or (isinstance(value, dict) and "__call__" in value):
        return Computed
    if isinstance(value, list) and any(item is Unknown for item in value):
        return Computed
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not Unknown}
    if isinstance(value, (int, float, bool, list, type(None))):
        return value
    return str(value)
