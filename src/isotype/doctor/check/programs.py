"""Reads settings from calls in Python files, from commands and exports in shell scripts, and from
env files. All settings of one tool are stored in one `Document`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from . import python_calls, shell
from .python_calls import Call
from .settings import Document, Setting, parse_dtype
from .tools import identify_tool

# The variables that affect precision, with the argument to which SimpleTuner maps each.
SIMPLETUNER_VARIABLES = {
    "MODEL_TYPE": "model_type",
    "MODEL_FAMILY": "model_family",
    "MODEL_NAME": "pretrained_model_name_or_path",
    "MIXED_PRECISION": "mixed_precision",
    "OPTIMIZER": "optimizer",
    "LEARNING_RATE": "learning_rate",
    "BASE_MODEL_PRECISION": "base_model_precision",
    "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "USE_EMA": "use_ema",
    "ALLOW_TF32": "allow_tf32",
    "USE_DORA": "use_dora",
    "LORA_TYPE": "lora_type",
    "ACCELERATE_CONFIG_PATH": "accelerate_config",
    "ACCELERATE_EXTRA_ARGS": "accelerate_extra_args",
}
_SIMPLETUNER_ONLY_VARIABLES = {
    "TRAINER_EXTRA_ARGS",
    "BASE_MODEL_PRECISION",
    "PURE_BF16",
    "TRAINING_NUM_PROCESSES",
    "VALIDATION_PROMPT",
    "MODEL_FAMILY",
    "FLUX",
    "DATALOADER_CONFIG",
}


def is_config_env(names: set[str]) -> bool:
    return (
        bool(names & _SIMPLETUNER_ONLY_VARIABLES)
        or {"MODEL_TYPE", "MIXED_PRECISION"} <= names
        or {"OPTIMIZER", "MIXED_PRECISION"} <= names
    )


def _flatten_argument(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Returns those values in an argument that can be read without running the program. Nested
    values get dotted keys.
    """
    if isinstance(value, dict):
        for inner, item in value.items():
            if inner != "__call__":
                yield from _flatten_argument(f"{key}.{inner}", item)
    elif value is not python_calls.UnknownValue:
        yield key, value


_RELEVANT_CALLS = re.compile(
    r"TrainingArguments|from_pretrained|Config\(|Accelerator|Trainer\(|Fabric\(|autocast|GradScaler|environ|FSDPStrategy|get_peft_model"
)
# A file without any of these words has no calls that affect precision. Its syntax tree is not
# built.
_PRECISION_KEYWORDS = re.compile(
    r"bf16|fp16|fp8|float16|half\(|precision|load_in_|GradScaler|autocast|TrainingArguments|ACCELERATE_|FSDP_|FSDPStrategy|TRITON_|GPU"
    r"|LoraConfig|get_peft_model|kbit|Fast\w+Model|FullySharded|(?:SFT|DPO|GRPO|ORPO|CPO|KTO|RLOO|Reward|PRM|BCO|GKD|MD|XPO|PPO)Config\b"
)
_TRAINER_ARGUMENTS = re.compile(
    r"^(?:(?:Seq2Seq)?TrainingArguments"
    r"|(?:SFT|DPO|GRPO|ORPO|CPO|KTO|RLOO|Reward|PRM|BCO|GKD|OnlineDPO|NashMD|XPO|PPO)Config)$"
)
_LIGHTNING_IMPORT = re.compile(r"\b(?:lightning|pytorch_lightning|lightning_fabric)\b")


def documents_from_python(text: str, display_path: str) -> list[Document]:
    """Reads the settings of a Python program that affect precision. Returns one `Document` for each
    tool.
    """
    if not _RELEVANT_CALLS.search(text) or not _PRECISION_KEYWORDS.search(text):
        return []
    calls = python_calls.read_calls(text)
    reader = _ProgramReader(text, display_path, calls)
    for call in calls:
        reader.read_call(call)
    return reader.finish()


class _ProgramReader:
    """Reads the calls in one program. The settings in these calls are stored in one `Document` per
    tool.

    code  the program's own statements about precision: autocast regions, a GradScaler, and the
          calls of train and evaluate
    """

    def __init__(self, text: str, display_path: str, calls: list[Call]) -> None:
        self.display_path = display_path
        self.calls = calls
        self.documents: list[Document] = []
        self.code = Document("code", display_path)
        # keyed by the variable that holds the arguments
        self._trainer_arguments: dict[str, Document] = {}
        # settings on which two calls disagree: only running the program would show which call
        # counts
        self._ambiguous: list[tuple[Document, str]] = []
        self._uses_lightning = _LIGHTNING_IMPORT.search(text) is not None
        quantisations = {
            repr({name: value for name, (value, _) in call.arguments.items()})
            for call in calls
            if call.name == "BitsAndBytesConfig"
        }
        self._has_one_quantisation = len(quantisations) == 1

    def read_call(self, call: Call) -> None:
        if _TRAINER_ARGUMENTS.match(call.name):
            self._read_trainer_arguments(call)
        elif (cast_dtype := _loaded_cast_dtype(call)) is not None:
            self._add_model_cast(call, cast_dtype)
        elif (read_function := _CALL_READERS.get(call.name)) is not None:
            read_function(self, call)

    def finish(self) -> list[Document]:
        if "GradScaler" in self.code.settings and all(
            document.tool != "model" for document in self.documents
        ):
            for call, dtype in _casts_before_training(self.calls):
                self._add_model_cast(call, dtype)
        for document, name in self._ambiguous:
            document.settings.pop(name, None)
            document.attributes.setdefault("unknown", set()).add(name)
        if self.code.settings:
            return [*self.documents, self.code]
        return self.documents

    def _get_document(self, tool: str, **attributes: Any) -> Document:
        """Returns the `Document` for the settings of a tool, and creates it if necessary. The
        arguments of a trainer always get a new `Document`, because a program may create several
        sets of arguments.
        """
        document = None
        if tool not in ("hf", "lightning"):
            document = next(
                (document for document in self.documents if document.tool == tool), None
            )
        if document is None:
            document = Document(tool, self.display_path, attributes={"reader": "python"})
            self.documents.append(document)
        document.attributes.update(attributes)
        return document

    def _copy_arguments(
        self, call: Call, document: Document, prefix: str = "", *, should_replace: bool = False
    ) -> None:
        """Stores the named arguments of a call as settings.

        should_replace  whether a value replaces a different value of an earlier call
        """
        may_replace = should_replace or document.tool in ("accelerate", "code")
        for key, (value, line) in call.arguments.items():
            if key.isdigit():
                continue
            values = list(_flatten_argument(prefix + key, value))
            for name, item_value in values:
                previous = document.settings.get(name)
                if previous is not None and previous.value != item_value and not may_replace:
                    self._ambiguous.append((document, name))
                document.add(name, item_value, line)
            if not values:
                document.attributes.setdefault("unknown", set()).add(prefix + key)

    def _add_model_cast(self, call: Call, dtype: str) -> None:
        self._get_document("model").add(
            "dtype", python_calls.DottedName(dtype), call.line, written_key=f".{call.name}()"
        )

    def _read_trainer_arguments(self, call: Call) -> None:
        document = self._get_document("hf", made_by=call.name)
        self._copy_arguments(call, document)
        if call.target:
            self._trainer_arguments[call.target] = document

    def _read_assignment(self, call: Call) -> None:
        """Reads an assignment such as `args.bf16 = True` to a trainer's arguments."""
        if call.owner in self._trainer_arguments:
            self._copy_arguments(call, self._trainer_arguments[call.owner], should_replace=True)

    def _read_quantisation(self, call: Call) -> None:
        if self._has_one_quantisation:  # several are alternatives
            self._copy_arguments(call, self._get_document("model"), "quantization_config.")

    def _read_model_loading(self, call: Call) -> None:
        if not re.search(f"{_MODEL_CLASS}|Pipeline", call.owner) or "Tokenizer" in call.owner:
            return
        document = self._get_document("model")
        if "Fast" in call.owner:
            document.attributes["unsloth"] = True
        self._copy_arguments(call, document)
        if not call.owner.startswith("Fast"):
            return
        for key in ("load_in_4bit", "load_in_8bit"):
            if key in document.settings:
                document.settings[f"quantization_config.{key}"] = document.settings[key]

    def _read_adapter(self, call: Call) -> None:
        document = self._get_document("peft")
        self._copy_arguments(call, document)
        document.add("called", call.name, call.line)

    def _read_accelerator(self, call: Call) -> None:
        self._copy_arguments(call, self._get_document("accelerate"))

    def _read_fsdp(self, call: Call) -> None:
        document = self._get_document("fsdp")
        self._copy_arguments(call, document)
        document.add("strategy", call.name, call.line)

    def _read_lightning(self, call: Call) -> None:
        if self._uses_lightning:
            self._copy_arguments(call, self._get_document("lightning", made_by=call.name))

    def _read_environment(self, call: Call) -> None:
        document = self._get_document("env")
        for key, (value, line) in call.arguments.items():
            document.add(key, value, line)

    def _read_phase(self, call: Call) -> None:
        """Records the first call of each phase, such as `trainer.train()` or `model.generate()`."""
        if not call.owner:
            return
        setting = Setting(True, f"{call.owner}.{call.name}()", self.display_path, call.line)
        self.code.settings.setdefault(f"{call.name}@{call.owner}", setting)

    def _read_autocast(self, call: Call) -> None:
        self._copy_arguments(call, self.code, "autocast.")
        self.code.add("autocast", "autocast", call.line)

    def _read_scaler(self, call: Call) -> None:
        enabled, _ = call.arguments.get("enabled", (True, 0))
        self.code.add("GradScaler", enabled, call.line)

    def _read_initialize(self, call: Call) -> None:
        if call.owner == "deepspeed":
            self.code.add("deepspeed.initialize", True, call.line)


# name of a called function -> the method that reads its arguments
_CALL_READERS: dict[str, Callable[[_ProgramReader, Call], None]] = {
    "setattr": _ProgramReader._read_assignment,
    "BitsAndBytesConfig": _ProgramReader._read_quantisation,
    "from_pretrained": _ProgramReader._read_model_loading,
    "Accelerator": _ProgramReader._read_accelerator,
    "environ": _ProgramReader._read_environment,
    "autocast": _ProgramReader._read_autocast,
    "GradScaler": _ProgramReader._read_scaler,
    "initialize": _ProgramReader._read_initialize,
    **dict.fromkeys(
        ("LoraConfig", "get_peft_model", "AdaLoraConfig", "prepare_model_for_kbit_training"),
        _ProgramReader._read_adapter,
    ),
    **dict.fromkeys(("FullyShardedDataParallelPlugin", "FSDPStrategy"), _ProgramReader._read_fsdp),
    **dict.fromkeys(("Trainer", "Fabric"), _ProgramReader._read_lightning),
    **dict.fromkeys(
        ("evaluate", "predict", "train", "fit", "generate"), _ProgramReader._read_phase
    ),
}


def _loaded_cast_dtype(call: Call) -> str | None:
    """Returns the dtype to which a call such as `Model.from_pretrained(...).half()` casts, or None
    for any other call.
    """
    owner, _, method = call.owner.rpartition(".")
    if method == "from_pretrained" and re.search(_MODEL_CLASS, owner):
        return _cast_dtype(call)
    return None


def _cast_dtype(call: Call) -> str | None:
    """Returns the dtype of a cast such as `.to(torch.bfloat16)` or `.half()`, or None for any other
    call.
    """
    if call.name == "to":
        dtype = call.arguments.get("dtype", call.arguments.get("0", (None, 0)))[0]
    else:
        dtype = _CAST_METHODS.get(call.name)
    if isinstance(dtype, str) and dtype.startswith("torch."):
        return str(dtype)
    return None


_MODEL_CLASS = "Model|VAE|UNet|Transformer"
# method of a model -> the dtype to which it casts
_CAST_METHODS = {"half": "torch.float16", "bfloat16": "torch.bfloat16", "float": "torch.float32"}


def _casts_before_training(
    calls: list[Call],
) -> Iterator[tuple[Call, str]]:
    """Returns the casts of models that the program itself defines. Examples are `model =
    Net().half()`, and `model.half()` before an optimizer is created with `model.parameters()`.
    """
    trained = {call.owner: call.line for call in reversed(calls) if call.name == "parameters"}
    for call in calls:
        name = call.target or call.owner
        dtype = _cast_dtype(call)
        if (
            dtype
            and parse_dtype(dtype)
            and not call.is_conditional
            and name in trained
            and call.line < trained[name]
        ):
            yield call, dtype


_KOHYA_SCRIPT = re.compile(
    r"(?:train_network|train_db|fine_tune|sdxl_train|train_textual_inversion|flux_train|sd3_train|lumina_train)\w*\.py"
)
_SIMPLETUNER = re.compile(r"(?:^|/)simpletuner$|simpletuner/train\.py|SimpleTuner")


def documents_from_script(text: str, display_path: str) -> list[Document]:
    """Reads a shell script. Returns the environment variables that it exports, and the options of
    the launchers and programs that it starts.
    """
    script = shell.read_script(text)
    documents: list[Document] = []
    environment = Document("env", display_path)
    for assignment in [*script.variables.values(), *script.prefixed.values()]:
        environment.add(assignment.name, assignment.value, assignment.line)
    for command in script.commands:
        documents += _documents_from_command(command, display_path)
    if environment.settings:
        documents.append(environment)
    return documents


# packages whose commands share options with the Hugging Face Trainer, but have other meanings for them
_UNKNOWN_PACKAGES = {"composer", "fairseq", "megatron", "nemo", "openrlhf", "verl"}


def _documents_from_command(command: shell.Command, display_path: str) -> list[Document]:
    argv = command.arguments
    lines = command.lines
    program = next((i for i, argument in enumerate(argv) if argument.endswith(".py")), None)
    # DeepSpeed's launcher spells the option `--module`
    flag = next((argument for argument in argv[:-1] if argument in ("-m", "--module")), None)
    module = argv.index(flag) + 1 if program is None and flag else None
    executable = argv[0].rpartition("/")[2]
    documents = []
    if executable == "accelerate" and len(argv) > 1 and argv[1] == "launch":
        if program is not None:
            end = program
        elif module is not None:
            end = module
        else:
            end = len(argv)
        launcher = Document("accelerate", display_path, attributes={"launcher": True})
        for option in shell.read_options(argv[2:end], lines[2:end]):
            launcher.add(
                option.name,
                option.value,
                option.line,
                written_key=f"accelerate launch --{option.name}",
            )
        if launcher.settings:
            documents.append(launcher)
        start = end + 1
    elif program is not None:
        start = program + 1
    elif executable in ("llamafactory-cli", "axolotl", "trl", "tune", "simpletuner", "swift"):
        start = 2
    elif module is not None and argv[module].partition(".")[0] not in _UNKNOWN_PACKAGES:
        start = module + 1
    else:
        return []
    options = {option.name: option for option in shell.read_options(argv[start:], lines[start:])}
    document = Document("", display_path, attributes={"reader": "command line"})
    if executable == "tune" and argv[1:2] == ["run"]:
        _add_overrides(document, argv[start:], lines[start:])
        return [document]
    name = " ".join(argv[:2]) if program is None else argv[program]
    values = {key: option.value for key, option in options.items()}
    document.tool = _command_tool(executable, name, values) or ""
    if document.tool:
        for key, option in options.items():
            document.add(key, option.value, option.line, written_key=f"--{key}")
    return [*documents, document]


def _add_overrides(document: Document, arguments: list[str], lines: list[int]) -> None:
    """Adds the settings of a command `tune run RECIPE key=value`. The name of the recipe is added
    too, because it tells whether adapters are trained.
    """
    document.tool = "torchtune"
    recipe_parts: list[str] = []
    for argument, line in zip(arguments, lines, strict=True):
        if override := re.match(r"^([A-Za-z_][\w.]*)=(.*)$", argument):
            document.add(override[1], override[2], line)
        elif "=" not in argument:
            recipe_parts.append(argument)
    if document.settings:
        document.add("recipe", " ".join(recipe_parts), lines[0], written_key="tune run")


def _command_tool(executable: str, program: str, options: dict[str, str | bool]) -> str | None:
    """Returns the tool to which a command belongs. The tool is determined from the executable, the
    program and the options of the command.
    """
    if (
        _KOHYA_SCRIPT.search(program)
        or {"full_bf16", "full_fp16", "network_module"} & options.keys()
    ):
        return "kohya"
    if (
        _SIMPLETUNER.search(program)
        or {"gradient_precision", "base_model_precision"} & options.keys()
    ):
        return "simpletuner"
    if executable in ("llamafactory-cli", "axolotl"):
        return executable.removesuffix("-cli")
    if "mixed_precision" in options and not {"bf16", "fp16"} & options.keys():
        return "script"
    tool = identify_tool(options)
    may_be_trainer = tool in ("model", "peft", "checkpoint", "deepspeed", None)
    if may_be_trainer and {"bf16", "fp16", "output_dir", "tf32", "deepspeed"} & options.keys():
        return "hf"
    return tool


def documents_from_environment(text: str, display_path: str) -> list[Document]:
    """Reads an env file. A file with SimpleTuner's variables is read as SimpleTuner's config.env,
    any other file as a plain environment.
    """
    variables = shell.read_script(text).variables
    if not is_config_env(set(variables)):
        environment = Document("env", display_path)
        for assignment in variables.values():
            environment.add(assignment.name, assignment.value, assignment.line)
        return [environment]
    document = Document("simpletuner", display_path, attributes={"reader": "config.env"})
    for name, assignment in variables.items():
        document.add(f"variable.{name}", assignment.value, assignment.line, written_key=name)
        if name in SIMPLETUNER_VARIABLES and assignment.value != "":
            document.add(
                SIMPLETUNER_VARIABLES[name], assignment.value, assignment.line, written_key=name
            )
    if extra := variables.get("TRAINER_EXTRA_ARGS"):
        for key, value in shell.parse_options(extra.value.split()).items():
            document.add(key, value, extra.line, written_key=f"TRAINER_EXTRA_ARGS:--{key}")
    return [document]
