"""From paths to runs: every file read, each document given to its tool, documents that belong together joined.

A run has one main document (a trainer's arguments) and what stands beside it: model, checkpoint, DeepSpeed, accelerate, FSDP, environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...finding import Finding, Place, Severity
from .identify import identify
from .readers import json_lines, pickled, python_calls, safetensors_header, shell, toml_lines, yaml_lines
from .readers.tree import Tree
from .settings import Document, Facts
from .simpletuner_env import read_config_env
from .versions import is_version_file, read_versions

MAIN = ("hf", "simpletuner", "axolotl", "llamafactory", "torchtune", "torchtitan", "lightning", "kohya", "isotype")
SKIPPED_FOLDERS = {
    ".git",
    "node_modules",
    "__pycache__",
    "site-packages",
    ".venv",
    "venv",
    "wandb",
    ".mypy_cache",
    ".ruff_cache",
    "build",
    "dist",
    ".cache",
}
LARGEST = 8 << 20  # bytes of a text file that may be a configuration
MOST_FILES = 5000
_SUFFIXES = {
    ".json",
    ".yaml",
    ".yml",
    ".toml",
    ".env",
    ".sh",
    ".bash",
    ".slurm",
    ".sbatch",
    ".py",
    ".bin",
    ".safetensors",
    ".txt",
    ".lock",
    ".cfg",
    ".jsonc",
}


class Collection:
    """documents: folder-tagged; trouble: files that look like configurations and cannot be read."""

    def __init__(self) -> None:
        self.documents: list[tuple[Path, Document]] = []
        self.trouble: list[Finding] = []
        self.files = 0
        self.trees: dict[str, Tree] = {}  # of Isotype's own files, which have their own reader


def collect(paths: Iterable[str]) -> Collection:
    """Raises UsageError for a path that does not exist."""
    found = Collection()
    for given in paths:
        path = Path(given)
        if not path.exists():
            raise UsageError(f"{given}: no such file or folder")
        explicit = path.is_file()
        for file in [path] if explicit else _walk(path):
            found.files += 1
            if found.files > MOST_FILES:
                raise UsageError(f"{given}: more than {MOST_FILES} files; give the folder with the configurations")
            _read(file, found, explicit=explicit)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith((".", "checkpoint-")))
        for name in sorted(files):
            path = Path(here, name)
            if path.suffix.lower() in _SUFFIXES or name == ".env" or is_version_file(name):
                yield path


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _read(path: Path, found: Collection, *, explicit: bool) -> None:
    name, suffix, shown = path.name, path.suffix.lower(), _shown(path)

    def keep(document: Document | None) -> None:
        if document is not None and document.settings:
            found.documents.append((path.parent, document))

    try:
        if suffix == ".safetensors":
            keep(_safetensors(path, shown))
            return
        if suffix == ".bin":
            if name == "training_args.bin" or (explicit and path.stat().st_size < LARGEST):
                document = Document("hf", shown, attributes={"reader": "pickle"})
                for key, value in pickled.read(path.read_bytes()).items():
                    document.add(key, value, None)
                keep(document)
            return
        if path.stat().st_size > LARGEST:
            if explicit:
                raise UsageError(f"{shown}: {path.stat().st_size >> 20} MiB is no configuration")
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        if is_version_file(name):
            keep(read_versions(text, name, shown))
        elif suffix == ".py":
            for made in _python(text, shown):
                keep(made)
        elif suffix in (".sh", ".bash", ".slurm", ".sbatch"):
            for made in _script(text, shown):
                keep(made)
        elif suffix == ".env" or name == ".env":
            for made in _environment(text, shown):
                keep(made)
        elif suffix in (".json", ".jsonc", ".yaml", ".yml", ".toml"):
            tree = {".toml": toml_lines.read, ".yaml": yaml_lines.read, ".yml": yaml_lines.read}.get(suffix, json_lines.read)(text)
            read = _document(tree, name, shown)
            if read is None and explicit:
                found.trouble.append(_trouble(shown, None, "holds no setting of a tool that isotype check knows", Severity.NOTE))
            if read is not None and read.tool == "isotype":
                found.trees[shown] = tree
            keep(read)
        elif explicit:
            raise UsageError(
                f"{shown}: isotype check reads JSON, YAML, TOML, env and shell files, Python, training_args.bin and safetensors"
            )
    except (json_lines.BadJson, yaml_lines.BadYaml, toml_lines.BadToml, python_calls.BadPython) as error:
        if explicit or suffix not in (".py", ".json"):
            found.trouble.append(_trouble(shown, error.line, str(error)))
    except (pickled.BadPickle, safetensors_header.BadHeader) as error:
        found.trouble.append(_trouble(shown, None, str(error)))
    except OSError as error:
        found.trouble.append(_trouble(shown, None, error.strerror or str(error)))


def _trouble(file: str, line: int | None, what: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(
        code="CF099",
        severity=severity,
        message=f"cannot be read: {what}" if severity else what,
        place=Place(file=file, line=line),
        fix="correct the file; nothing in it was checked" if severity else None,
    )


def _document(tree: Tree, name: str, shown: str) -> Document | None:
    tool = identify(tree.data, name)
    if tool is None:
        return None
    document = Document(tool, shown)
    document.attributes["repeated"] = [(".".join(map(str, path)), line) for path, line in tree.repeated]
    for key, value, line in tree.leaves():
        document.add(key.removeprefix("--"), value, line, written=key)
    if tool == "model" and any(str(k).startswith(("bnb_", "load_in_")) for k in tree.data):
        for key, setting in list(document.settings.items()):
            if key.startswith(("bnb_", "load_in_")):
                document.settings[f"quantization_config.{key}"] = setting
    return document


def _safetensors(path: Path, shown: str) -> Document | None:
    count = safetensors_header.read(path)
    floats = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
    held = {floats[word]: n for word, n in count.items() if word in floats}
    if not held or path.name.startswith(("adapter", "optimizer")):
        return None
    document = Document("checkpoint", shown, attributes={"dtypes": held, "reader": "safetensors"})
    document.add("stored_dtype", max(held, key=held.__getitem__), None, written="safetensors header")
    return document


def _plain(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The known values of an argument, nested ones under dotted keys."""
    if isinstance(value, dict):
        for inner, item in value.items():
            if inner != "__call__":
                yield from _plain(f"{key}.{inner}", item)
    elif value is not python_calls.Unknown:
        yield key, value


_TRL = re.compile(r"^(?:SFT|DPO|GRPO|ORPO|CPO|KTO|RLOO|Reward|PRM|BCO|GKD|OnlineDPO|NashMD|XPO|PPO)Config$")


def _python(text: str, shown: str) -> list[Document]:
    """The calls that decide precision, as documents of their tools."""
    if not re.search(
        r"TrainingArguments|from_pretrained|Config\(|Accelerator|Trainer\(|Fabric\(|autocast|GradScaler|environ|FSDPStrategy", text
    ):
        return []
    documents: list[Document] = []

    def document(tool: str, **attributes: Any) -> Document:
        made = next((d for d in documents if d.tool == tool and tool not in ("hf", "lightning")), None)
        if made is None:
            made = Document(tool, shown, attributes={"reader": "python"})
            documents.append(made)
        made.attributes.update(attributes)
        return made

    def copy(call: python_calls.Call, into: Document, prefix: str = "") -> None:
        for key, (value, line) in call.arguments.items():
            if key.isdigit():
                continue
            known = list(_plain(prefix + key, value))
            for name, plain in known:
                into.add(name, plain, line)
            if not known:
                into.attributes.setdefault("unknown", set()).add(prefix + key)

    code = Document("code", shown)
    accelerators: list[python_calls.Call] = []
    lightning = bool(re.search(r"\b(?:lightning|pytorch_lightning|lightning_fabric)\b", text))
    for call in python_calls.read(text):
        if call.name in ("TrainingArguments", "Seq2SeqTrainingArguments") or _TRL.match(call.name):
            copy(call, document("hf", made_by=call.name))
        elif call.name == "BitsAndBytesConfig":
            copy(call, document("model"), "quantization_config.")
        elif (
            call.name == "from_pretrained"
            and re.search(r"Model|Pipeline|VAE|UNet|Transformer", call.owner)
            and "Tokenizer" not in call.owner
        ):
            copy(call, document("model", unsloth="Fast" in call.owner) if "Fast" in call.owner else document("model"))
            if call.owner.startswith("Fast"):
                made = document("model")
                for key in ("load_in_4bit", "load_in_8bit"):
                    if key in made.settings:
                        made.settings[f"quantization_config.{key}"] = made.settings[key]
        elif call.name in ("LoraConfig", "get_peft_model", "AdaLoraConfig", "prepare_model_for_kbit_training"):
            made = document("peft")
            copy(call, made)
            made.add("called", call.name, call.line)
        elif call.name == "Accelerator":
            accelerators.append(call)
            copy(call, document("accelerate"))
        elif call.name in ("FullyShardedDataParallelPlugin", "FSDPStrategy"):
            made = document("fsdp")
            copy(call, made)
            made.add("strategy", call.name, call.line)
        elif call.name in ("Trainer", "Fabric") and lightning:
            copy(call, document("lightning"))
        elif call.name == "environ":
            made = document("env")
            for key, (value, line) in call.arguments.items():
                made.add(key, value, line)
        elif call.name in ("evaluate", "predict", "train", "fit", "generate") and call.owner:
            code.settings.setdefault(f"{call.name}@{call.owner}", document_setting(call, shown))
        elif call.name == "autocast":
            copy(call, code, "autocast.")
            code.add("autocast", "autocast", call.line)
        elif call.name == "GradScaler":
            enabled = call.arguments.get("enabled", (True, 0))[0]
            code.add("GradScaler", enabled, call.line)
        elif call.owner == "deepspeed" and call.name == "initialize":
            code.add("deepspeed.initialize", True, call.line)
    modes = {repr(c.arguments["mixed_precision"][0]): c for c in accelerators if "mixed_precision" in c.arguments}
    if len(modes) > 1:
        for index, call in enumerate(modes.values()):
            code.add(f"accelerators.{index}", call.arguments["mixed_precision"][0], call.line, written="Accelerator(mixed_precision=)")
    if code.settings:
        documents.append(code)
    return documents


def document_setting(call: python_calls.Call, shown: str) -> Any:
    from .settings import Setting

    return Setting(True, f"{call.owner}.{call.name}()", shown, call.line)


_KOHYA_SCRIPT = re.compile(
    r"(?:train_network|train_db|fine_tune|sdxl_train|train_textual_inversion|flux_train|sd3_train|lumina_train)\w*\.py"
)
_SIMPLETUNER = re.compile(r"(?:^|/)simpletuner$|simpletuner/train\.py|SimpleTuner")


def _script(text: str, shown: str) -> list[Document]:
    """The environment a script exports, the launcher's own arguments, and those of the program."""
    script = shell.read(text)
    documents: list[Document] = []
    environment = Document("env", shown)
    for assignment in [*script.variables.values(), *script.prefixed.values()]:
        environment.add(assignment.name, assignment.value, assignment.line)
    for words, line in script.commands:
        documents += _command(words, line, shown)
    if environment.settings:
        documents.append(environment)
    return documents


def _command(words: list[str], line: int, shown: str) -> list[Document]:
    program = next((i for i, w in enumerate(words) if w.endswith(".py")), None)
    module = words.index("-m") + 1 if program is None and "-m" in words[:-1] else None
    first = words[0].rpartition("/")[2]
    documents = []
    if first == "accelerate" and len(words) > 1 and words[1] == "launch":
        end = program if program is not None else module if module is not None else len(words)
        launcher = Document("accelerate", shown, attributes={"launcher": True})
        for key, value in shell.arguments(words[2:end]).items():
            launcher.add(key, value, line, written=f"accelerate launch --{key}")
        if launcher.settings:
            documents.append(launcher)
        start = end + 1
    elif program is not None:
        start = program + 1
    elif first in ("llamafactory-cli", "axolotl", "trl", "tune", "simpletuner"):
        start = 2
    elif module is not None:
        start = module + 1
    else:
        return []
    given = shell.arguments(words[start:])
    name = words[program] if program is not None else " ".join(words[:2])
    if not given:
        return documents
    if _KOHYA_SCRIPT.search(name) or {"full_bf16", "full_fp16", "network_module"} & set(given):
        tool: str | None = "kohya"
    elif _SIMPLETUNER.search(name) or {"gradient_precision", "base_model_precision"} & set(given):
        tool = "simpletuner"
    elif first == "llamafactory-cli":
        tool = "llamafactory"
    elif first == "axolotl":
        tool = "axolotl"
    elif "mixed_precision" in given and not {"bf16", "fp16"} & set(given):
        tool = "script"
    else:
        tool = identify(given)
        tool = (
            "hf"
            if tool in ("model", "peft", "checkpoint", "deepspeed", None)
            and {"bf16", "fp16", "output_dir", "tf32", "deepspeed"} & set(given)
            else tool
        )
    if tool is None:
        return documents
    document = Document(tool, shown, attributes={"reader": "command line"})
    for key, value in given.items():
        document.add(key, value, line, written=f"--{key}")
    return [*documents, document]


def _environment(text: str, shown: str) -> list[Document]:
    """An env file: SimpleTuner's config.env when it has its variables, else a plain environment."""
    if document := read_config_env(text, shown):
        return [document]
    environment = Document("env", shown)
    for assignment in shell.read(text).variables.values():
        environment.add(assignment.name, assignment.value, assignment.line)
    return [environment]


def process_environment(variables: Mapping[str, str]) -> Document:
    """What of this shell's environment a launcher would pass on."""
    document = Document("env", "environment")
    for name, value in variables.items():
        if name.startswith(("ACCELERATE_", "FSDP_", "DEEPSPEED_")):
            document.add(name, value, None)
    return document


def _first_line(document: Document) -> int:
    return min((s.line or 0 for s in document.settings.values()), default=0)


def runs(found: Collection, device: str | None) -> list[Facts]:
    """One Facts for each main document, with what stands beside it; what belongs to none forms runs of its own."""
    made: list[Facts] = []
    used: set[int] = set()
    mains = [(folder, d) for folder, d in found.documents if d.tool in MAIN]
    for folder, main in mains:
        own_launcher = [
            d for _, d in found.documents if d.attributes.get("launcher") and d.file == main.file and _first_line(d) == _first_line(main)
        ]
        values = [s.value for d in (main, *own_launcher) for s in d.settings.values() if isinstance(s.value, str)]
        referenced = {os.path.basename(value) for value in values if re.search(r"\.(?:json|ya?ml)$", value)}
        together = [main]
        by_tool: dict[str, list[Document]] = {}
        for other_folder, other in found.documents:
            if other.tool in MAIN:
                continue
            if (
                os.path.basename(other.file) in referenced
                or other_folder == folder
                or other_folder in folder.parents
                or folder in other_folder.parents
            ):
                by_tool.setdefault(other.tool, []).append(other)
        for tool, candidates in by_tool.items():
            named = [d for d in candidates if os.path.basename(d.file) in referenced]
            same_file = [d for d in candidates if d.file == main.file]
            beside = [d for d in candidates if os.path.dirname(d.file) == os.path.dirname(main.file)]
            chosen = named or same_file or beside or candidates
            if tool == "accelerate" and own_launcher:  # its options win over its file's
                together += own_launcher
                used |= {id(d) for d in own_launcher}
                chosen = named or [d for d in beside if not d.attributes.get("launcher")]
            several_fit = tool in ("env", "versions", "code", "hardware") or (
                tool == "checkpoint" and len({os.path.dirname(d.file) for d in chosen}) == 1
            )
            if named or len(chosen) == 1 or several_fit:
                together += chosen
                used |= {id(d) for d in chosen}
        made.append(Facts(together, device))
    left = [(folder, d) for folder, d in found.documents if d.tool not in MAIN and id(d) not in used]
    by_folder: dict[Path, list[Document]] = {}
    for folder, document in left:
        if document.tool not in ("env", "code", "checkpoint", "hardware") or not mains:
            by_folder.setdefault(folder, []).append(document)
    for documents in by_folder.values():
        counts: dict[str, int] = {}
        for document in documents:
            counts[document.tool] = counts.get(document.tool, 0) + 1
        alone = [d for d in documents if counts[d.tool] > 1 and d.tool in ("deepspeed", "accelerate", "model")]
        rest = [d for d in documents if d not in alone]
        made += [Facts([d], device) for d in alone]
        if rest:
            made.append(Facts(rest, device))
    return made
