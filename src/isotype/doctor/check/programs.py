"""What programs decide: calls in Python files, commands and exports in scripts, env files; each as
documents of their tools.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from . import python_calls, shell
from .settings import Document, Setting, parse_dtype
from .tools import identify_tool

# Variables that SimpleTuner maps to arguments, of those that precision rests on.
SIMPLETUNER_VARIABLES = {
    "MODEL_TYPE": "model_type", "MODEL_FAMILY": "model_family", "MODEL_NAME": "pretrained_model_name_or_path",
    "MIXED_PRECISION": "mixed_precision", "OPTIMIZER": "optimizer", "LEARNING_RATE": "learning_rate",
    "BASE_MODEL_PRECISION": "base_model_precision", "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps", "USE_EMA": "use_ema",
    "ALLOW_TF32": "allow_tf32", "USE_DORA": "use_dora", "LORA_TYPE": "lora_type", "ACCELERATE_CONFIG_PATH": "accelerate_config",
    "ACCELERATE_EXTRA_ARGS": "accelerate_extra_args",
}  # fmt: skip
_SIMPLETUNER_ONLY_VARIABLES = {
    "TRAINER_EXTRA_ARGS", "BASE_MODEL_PRECISION", "PURE_BF16", "TRAINING_NUM_PROCESSES", "VALIDATION_PROMPT", "MODEL_FAMILY", "FLUX",
    "DATALOADER_CONFIG",
}  # fmt: skip


def is_config_env(names: set[str]) -> bool:
    return (
        bool(names & _SIMPLETUNER_ONLY_VARIABLES)
        or {"MODEL_TYPE", "MIXED_PRECISION"} <= names
        or {"OPTIMIZER", "MIXED_PRECISION"} <= names
    )


def _flatten_argument(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The known values of an argument, nested ones under dotted keys."""
    if isinstance(value, dict):
        for inner, item in value.items():
            if inner != "__call__":
                yield from _flatten_argument(f"{key}.{inner}", item)
    elif value is not python_calls.Unknown:
        yield key, value


_RELEVANT_CALLS = re.compile(
    r"TrainingArguments|from_pretrained|Config\(|Accelerator|Trainer\(|Fabric\(|autocast|GradScaler|environ|FSDPStrategy|get_peft_model"
)
# without one of these words a file's calls say nothing of precision, and its syntax tree is not
# built
_PRECISION_WORDS = re.compile(
    r"bf16|fp16|fp8|float16|half\(|precision|load_in_|GradScaler|autocast|TrainingArguments|ACCELERATE_|FSDP_|FSDPStrategy|TRITON_|GPU"
    r"|LoraConfig|get_peft_model|kbit|Fast\w+Model|FullySharded|(?:SFT|DPO|GRPO|ORPO|CPO|KTO|RLOO|Reward|PRM|BCO|GKD|MD|XPO|PPO)Config\b"
)
_TRL_CONFIG = re.compile(
    r"^(?:SFT|DPO|GRPO|ORPO|CPO|KTO|RLOO|Reward|PRM|BCO|GKD|OnlineDPO|NashMD|XPO|PPO)Config$"
)


def documents_from_python(text: str, display_path: str) -> list[Document]:
    """The calls that decide precision, as documents of their tools."""
    if not _RELEVANT_CALLS.search(text) or not _PRECISION_WORDS.search(text):
        return []
    documents: list[Document] = []

    # two calls disagree, and only running the program would tell which counts
    ambiguous: list[tuple[Document, str]] = []

    def document(tool: str, **attributes: Any) -> Document:
        made = next(
            (d for d in documents if d.tool == tool and tool not in ("hf", "lightning")), None
        )
        if made is None:
            made = Document(tool, display_path, attributes={"reader": "python"})
            documents.append(made)
        made.attributes.update(attributes)
        return made

    arguments: dict[str, Document] = {}  # by the variable that holds them

    def copy(
        call: python_calls.Call, into: Document, prefix: str = "", *, replaces: bool = False
    ) -> None:
        for key, (value, line) in call.arguments.items():
            if key.isdigit():
                continue
            known = list(_flatten_argument(prefix + key, value))
            for name, plain in known:
                before = into.settings.get(name)
                if (
                    before is not None
                    and before.value != plain
                    and into.tool not in ("accelerate", "code")
                    and not replaces
                ):
                    ambiguous.append((into, name))
                into.add(name, plain, line)
            if not known:
                into.attributes.setdefault("unknown", set()).add(prefix + key)

    code = Document("code", display_path)
    lightning = bool(re.search(r"\b(?:lightning|pytorch_lightning|lightning_fabric)\b", text))
    calls = python_calls.read_calls(text)
    quantisations = {
        repr({k: v for k, (v, _) in call.arguments.items()})
        for call in calls
        if call.name == "BitsAndBytesConfig"
    }
    for call in calls:
        if call.name in ("TrainingArguments", "Seq2SeqTrainingArguments") or _TRL_CONFIG.match(
            call.name
        ):
            made = document("hf", made_by=call.name)
            copy(call, made)
            if call.target:
                arguments[call.target] = made
        elif call.name == "setattr" and call.owner in arguments:
            copy(call, arguments[call.owner], replaces=True)
        elif call.name == "BitsAndBytesConfig":
            if len(quantisations) == 1:  # else they are a program's alternatives
                copy(call, document("model"), "quantization_config.")
        elif (
            call.name == "from_pretrained"
            and re.search(f"{_MODEL_CLASS}|Pipeline", call.owner)
            and "Tokenizer" not in call.owner
        ):
            if "Fast" in call.owner:
                made = document("model", unsloth=True)
            else:
                made = document("model")
            copy(call, made)
            if call.owner.startswith("Fast"):
                for key in ("load_in_4bit", "load_in_8bit"):
                    if key in made.settings:
                        made.settings[f"quantization_config.{key}"] = made.settings[key]
        elif (cast := _loaded_cast_dtype(call)) is not None:
            document("model").add(
                "dtype", python_calls.Name(cast), call.line, written=f".{call.name}()"
            )
        elif call.name in (
            "LoraConfig",
            "get_peft_model",
            "AdaLoraConfig",
            "prepare_model_for_kbit_training",
        ):
            made = document("peft")
            copy(call, made)
            made.add("called", call.name, call.line)
        elif call.name == "Accelerator":
            copy(call, document("accelerate"))
        elif call.name in ("FullyShardedDataParallelPlugin", "FSDPStrategy"):
            made = document("fsdp")
            copy(call, made)
            made.add("strategy", call.name, call.line)
        elif call.name in ("Trainer", "Fabric") and lightning:
            copy(call, document("lightning", made_by=call.name))
        elif call.name == "environ":
            made = document("env")
            for key, (value, line) in call.arguments.items():
                made.add(key, value, line)
        elif call.name in ("evaluate", "predict", "train", "fit", "generate") and call.owner:
            code.settings.setdefault(
                f"{call.name}@{call.owner}",
                Setting(True, f"{call.owner}.{call.name}()", display_path, call.line),
            )
        elif call.name == "autocast":
            copy(call, code, "autocast.")
            code.add("autocast", "autocast", call.line)
        elif call.name == "GradScaler":
            enabled = call.arguments.get("enabled", (True, 0))[0]
            code.add("GradScaler", enabled, call.line)
        elif call.owner == "deepspeed" and call.name == "initialize":
            code.add("deepspeed.initialize", True, call.line)
    if "GradScaler" in code.settings and not any(d.tool == "model" for d in documents):
        for call, dtype in _casts_before_training(calls):
            document("model").add(
                "dtype", python_calls.Name(dtype), call.line, written=f".{call.name}()"
            )
    for made, name in ambiguous:
        made.settings.pop(name, None)
        made.attributes.setdefault("unknown", set()).add(name)
    if code.settings:
        documents.append(code)
    return documents


def _loaded_cast_dtype(call: python_calls.Call) -> str | None:
    """The dtype of `Model.from_pretrained(...).half()` and its like."""
    owner, _, method = call.owner.rpartition(".")
    if method == "from_pretrained" and re.search(_MODEL_CLASS, owner):
        return _cast_dtype(call)
    return None


def _cast_dtype(call: python_calls.Call) -> str | None:
    """Of `.to(torch.bfloat16)`, `.half()` and its like; None for another call."""
    if call.name == "to":
        dtype = call.arguments.get("dtype", call.arguments.get("0", (None, 0)))[0]
    else:
        dtype = _CAST_METHODS.get(call.name)
    if isinstance(dtype, str) and dtype.startswith("torch."):
        return str(dtype)
    return None


_MODEL_CLASS = "Model|VAE|UNet|Transformer"
_CAST_METHODS = {"half": "torch.float16", "bfloat16": "torch.bfloat16", "float": "torch.float32"}


def _casts_before_training(
    calls: list[python_calls.Call],
) -> Iterator[tuple[python_calls.Call, str]]:
    """`model = Net().half()` or `model.half()` above an optimizer over `model.parameters()`: a
    model of the program's own.
    """
    trained = {c.owner: c.line for c in reversed(calls) if c.name == "parameters"}
    for call in calls:
        name = call.target or call.owner
        dtype = _cast_dtype(call)
        if (
            dtype
            and parse_dtype(dtype)
            and not call.conditional
            and name in trained
            and call.line < trained[name]
        ):
            yield call, dtype


_KOHYA_SCRIPT = re.compile(
    r"(?:train_network|train_db|fine_tune|sdxl_train|train_textual_inversion|flux_train|sd3_train|lumina_train)\w*\.py"
)
_SIMPLETUNER = re.compile(r"(?:^|/)simpletuner$|simpletuner/train\.py|SimpleTuner")


def documents_from_script(text: str, display_path: str) -> list[Document]:
    """The environment a script exports, the launcher's own arguments, and those of the program."""
    script = shell.read_script(text)
    documents: list[Document] = []
    environment = Document("env", display_path)
    for assignment in [*script.variables.values(), *script.prefixed.values()]:
        environment.add(assignment.name, assignment.value, assignment.line)
    for argv, line in script.commands:
        documents += _documents_from_command(argv, line, display_path)
    if environment.settings:
        documents.append(environment)
    return documents


def _documents_from_command(argv: list[str], line: int, display_path: str) -> list[Document]:
    program = next((i for i, w in enumerate(argv) if w.endswith(".py")), None)
    # DeepSpeed's launcher spells it out
    flag = next((w for w in argv[:-1] if w in ("-m", "--module")), None)
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
        for key, value in shell.parse_options(argv[2:end]).items():
            launcher.add(key, value, line, written=f"accelerate launch --{key}")
        if launcher.settings:
            documents.append(launcher)
        start = end + 1
    elif program is not None:
        start = program + 1
    elif executable in ("llamafactory-cli", "axolotl", "trl", "tune", "simpletuner", "swift"):
        start = 2
    elif module is not None:
        start = module + 1
    else:
        return []
    options = shell.parse_options(argv[start:])
    document = Document("", display_path, attributes={"reader": "command line"})
    if executable == "tune" and argv[1:2] == ["run"]:
        document.tool = "torchtune"
        for argument in argv[start:]:
            if override := re.match(r"^([A-Za-z_][\w.]*)=(.*)$", argument):
                document.add(override[1], override[2], line)
        if document.settings:  # the recipe's name says what is trained
            document.add(
                "recipe",
                " ".join(argument for argument in argv[start:] if "=" not in argument),
                line,
                written="tune run",
            )
        return [document]
    document.tool = (
        _command_tool(
            executable, argv[program] if program is not None else " ".join(argv[:2]), options
        )
        or ""
    )
    for key, value in options.items() if document.tool else ():
        document.add(key, value, line, written=f"--{key}")
    return [*documents, document]


def _command_tool(executable: str, program: str, options: dict[str, str | bool]) -> str | None:
    """Of a command with these options, which begins with `executable` and runs the program `program`."""
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
    trainers = tool in ("model", "peft", "checkpoint", "deepspeed", None)
    if trainers and {"bf16", "fp16", "output_dir", "tf32", "deepspeed"} & options.keys():
        return "hf"
    return tool


def documents_from_environment(text: str, display_path: str) -> list[Document]:
    """An env file: SimpleTuner's config.env when it has its variables, else a plain environment."""
    variables = shell.read_script(text).variables
    if not is_config_env(set(variables)):
        environment = Document("env", display_path)
        for assignment in variables.values():
            environment.add(assignment.name, assignment.value, assignment.line)
        return [environment]
    document = Document("simpletuner", display_path, attributes={"reader": "config.env"})
    for name, assignment in variables.items():
        document.add(f"variable.{name}", assignment.value, assignment.line, written=name)
        if name in SIMPLETUNER_VARIABLES and assignment.value != "":
            document.add(
                SIMPLETUNER_VARIABLES[name], assignment.value, assignment.line, written=name
            )
    if extra := variables.get("TRAINER_EXTRA_ARGS"):
        for key, value in shell.parse_options(extra.value.split()).items():
            document.add(key, value, extra.line, written=f"TRAINER_EXTRA_ARGS:--{key}")
    return [document]
