"""Checks training configurations. The module reads every file that may be a configuration, and
decides which files belong to the same training run. For each run it determines the dtypes of the
weights, of the computation and of all other parts of training. Every rule then checks this result.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from pathlib import Path

from ...dtypes import FLOATS
from ...errors import UsageError
from ...finding import Finding, Place, Severity
from ...precision.safetensors_header import read_safetensors_header
from ...wording import align_columns, pluralise
from .programs import documents_from_environment, documents_from_python, documents_from_script
from .python_calls import read_notebook
from .roles import resolve_record
from .rules import RULES
from .rules.autocast_regions import autocast_around_backward
from .settings import ROLES, Decision, Document, Facts, Record, Setting, parse_device
from .text_files import Tree, UnreadableError, read_json, read_toml, read_yaml
from .tools import identify_tool


@dataclass
class CheckResult:
    """The result of a check.

    records  the precision of each run; runs of Isotype itself are left out
    files    the number of files that were read
    """

    findings: list[Finding]
    records: list[Record]
    files: int


def check(paths: Iterable[str], *, device: str | None = None) -> CheckResult:
    """Checks all configurations under `paths`.

    device       the device of the runs, such as `h100`; if it is None, the rules use what the files
                 say about the hardware
    Raises       UsageError
    """
    if device is not None:
        parse_device(device)
    collection = collect_documents(paths)
    records = []
    findings = [*collection.findings]
    for facts in group_runs(collection, device):
        if facts.has("isotype"):
            file = facts.documents[0].file
            findings.append(
                _make_finding(
                    file,
                    "a run of Isotype, whose settings are checked by its own plan",
                    f"isotype plan {file}",
                )
            )
            continue
        record = resolve_record(facts)
        if record.roles or any(
            document.tool in MAIN_TOOLS or document.tool in ("accelerate", "deepspeed")
            for document in facts.documents
        ):
            records.append(record)
        for rule in RULES.values():
            findings += rule(record)
    # a finding in a file that several runs share is reported once
    distinct: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        distinct.setdefault((finding.code, str(finding.place), finding.message), finding)
    return CheckResult(list(distinct.values()), records, collection.file_count)


def _make_finding(
    file: str,
    message: str,
    fix: str | None,
    severity: Severity = Severity.NOTE,
    line: int | None = None,
) -> Finding:
    return Finding(
        code="CF099", severity=severity, message=message, place=Place(file=file, line=line), fix=fix
    )


def nothing_recognised_finding(checked: CheckResult, paths: Iterable[str]) -> Finding | None:
    """Returns a note for the report if no file was recognised as a configuration. Without this
    note, an empty report would look as if all files had been checked.
    """
    if checked.records or checked.findings:
        return None
    message = f"no configuration found in {pluralise(checked.files, 'file')}"
    return _make_finding(
        ", ".join(paths), message, "give the folder or file with the training configuration"
    )


# internal name of a tool -> the name in messages
_TOOL_NAMES = {"aitoolkit": "ai-toolkit", "onetrainer": "OneTrainer"}


def format_record(record: Record) -> str:
    """Formats the precision of a run as a table. The columns are the role, its value, the reason,
    and the location of the setting that decided the value.
    """
    rows = []
    for role in ROLES:
        if role in record.roles:
            decision = record.roles[role]
            location = _format_location(decision.setting)
            rows.append((role, decision.value, decision.reason, location))
    if not rows:
        return ""
    documents = record.facts.documents
    main = next((document for document in documents if document.tool in MAIN_TOOLS), documents[0])
    tool = record.tool if main.tool == "hf" else main.tool
    lines = [f"what {main.file} will really do ({_TOOL_NAMES.get(tool, tool)})"]
    lines += [f"  {line}" for line in align_columns(rows)]
    return "\n".join(lines)


def _format_location(setting: Setting | None) -> str:
    if setting is None:
        return ""
    line = f":{setting.line}" if setting.line else ""
    return f"{setting.key}  {setting.file}{line}"


def record_to_json(record: Record) -> dict[str, object]:
    return {
        "tool": record.tool,
        "files": sorted({decision.file for decision in record.facts.documents}),
        "roles": {role: _decision_to_json(decision) for role, decision in record.roles.items()},
    }


def _decision_to_json(decision: Decision) -> dict[str, object]:
    fields: dict[str, object] = {"value": decision.value, "why": decision.reason}
    if decision.setting is not None:
        fields["key"] = decision.setting.key
        fields |= decision.setting.location.to_dict()
    return fields


# the tools whose settings describe a whole run
MAIN_TOOLS = (
    "hf",
    "simpletuner",
    "axolotl",
    "llamafactory",
    "torchtune",
    "torchtitan",
    "aitoolkit",
    "onetrainer",
    "lightning",
    "kohya",
    "isotype",
    "script",
)


def group_runs(collection: Collection, device: str | None) -> list[Facts]:
    """Decides which configuration files belong to the same training run, and returns one `Facts`
    per run. Each file with the arguments of a trainer starts a run, to which other files may
    belong. The remaining files form separate runs.
    """
    main_documents = [
        (folder, document)
        for folder, document in collection.documents
        if document.tool in MAIN_TOOLS
    ]
    used_ids: set[int] = set()
    runs: list[Facts] = []
    for folder, main in main_documents:
        documents = [main, *_documents_of_run(folder, main, collection)]
        used_ids |= {id(document) for document in documents}
        runs.append(Facts(documents, device))
    by_folder: dict[Path, list[Document]] = {}
    for folder, document in collection.documents:
        if document.tool in MAIN_TOOLS or id(document) in used_ids:
            continue
        if document.tool not in ("env", "code", "checkpoint") or not main_documents:
            by_folder.setdefault(folder, []).append(document)
    for documents in by_folder.values():
        runs += _runs_without_main(documents, device)
    return runs


def _documents_of_run(folder: Path, main: Document, collection: Collection) -> list[Document]:
    """Returns the settings that belong to the same run as `main`, the arguments of a trainer. These
    are the options of the launcher, the files that `main` names, and the settings of other tools in
    the same folder, or in a folder above or below it.
    """
    launchers = [document for _, document in collection.documents if _launches_main(document, main)]
    referenced = _referenced_files(main, *launchers)
    by_tool: dict[str, list[Document]] = {}
    for candidate_folder, candidate in collection.documents:
        if not _may_belong_to_run(candidate, candidate_folder, main, folder):
            continue
        is_near = folder.is_relative_to(candidate_folder) or candidate_folder.is_relative_to(folder)
        if is_near or os.path.basename(candidate.file) in referenced:
            by_tool.setdefault(candidate.tool, []).append(candidate)
    documents: list[Document] = []
    for tool, candidates in by_tool.items():
        referenced_documents = [
            document for document in candidates if os.path.basename(document.file) in referenced
        ]
        same_folder = [document for document in candidates if _is_in_same_folder(document, main)]
        # the launcher's options take precedence over accelerate's file
        if tool == "accelerate" and launchers:
            documents += launchers
            selected_documents = referenced_documents or [
                document for document in same_folder if not document.attributes.get("launcher")
            ]
        else:
            same_file = [document for document in candidates if document.file == main.file]
            selected_documents = referenced_documents or same_file or same_folder or candidates
        if (
            referenced_documents
            or len(selected_documents) == 1
            or _allows_several_documents(tool, selected_documents)
        ):
            documents += selected_documents
    return documents


def _may_belong_to_run(
    candidate: Document, candidate_folder: Path, main: Document, folder: Path
) -> bool:
    if candidate.tool in MAIN_TOOLS:
        return False
    if candidate.tool == "accelerate" and main.file.endswith(".ipynb"):
        return False  # no launcher starts a notebook
    is_program = candidate.attributes.get("reader") == "python"
    is_elsewhere = candidate.file != main.file and candidate_folder != folder
    return not (is_program and is_elsewhere)


def _launches_main(document: Document, main: Document) -> bool:
    """True if `document` contains the options of a launcher (such as torchrun), and this launcher
    starts the program of `main`.
    """
    if not document.attributes.get("launcher") or document.file != main.file:
        return False
    return _first_line(document) == _first_line(main)


def _first_line(document: Document) -> int:
    return min((setting.line or 0 for setting in document.settings.values()), default=0)


def _referenced_files(*documents: Document) -> set[str]:
    """Returns the names of the JSON and YAML files that occur as values of settings in these
    documents.
    """
    values = [setting.value for document in documents for setting in document.settings.values()]
    return {
        os.path.basename(value)
        for value in values
        if isinstance(value, str) and re.search(r"\.(?:json|ya?ml)$", value)
    }


def _is_in_same_folder(document: Document, main: Document) -> bool:
    return os.path.dirname(document.file) == os.path.dirname(main.file)


def _allows_several_documents(tool: str, documents: list[Document]) -> bool:
    """True if one run may use several documents of the same tool."""
    if tool == "checkpoint":
        return len({os.path.dirname(document.file) for document in documents}) == 1
    return tool in ("env", "code")


def _runs_without_main(documents: list[Document], device: str | None) -> list[Facts]:
    """Returns the runs of a folder in which no file contains the arguments of a trainer. If several
    files in the folder belong to the same tool (DeepSpeed, accelerate or a model), each of these
    files forms a separate run. All other files of the folder form one run.
    """
    counts = Counter(document.tool for document in documents)
    repeated = {tool for tool in ("deepspeed", "accelerate", "model") if counts[tool] > 1}
    runs = [Facts([document], device) for document in documents if document.tool in repeated]
    other_documents = [document for document in documents if document.tool not in repeated]
    if other_documents:
        runs.append(Facts(other_documents, device))
    return runs


# folders that are not searched
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
_RUN_FILES = {
    "resolved.yaml",
    "plan.json",
    "manifest.json",
    "env.json",
}  # the files that a run of Isotype writes
_TEST_FILE = re.compile(r"^test_.*\.py$|^conftest\.py$|_test\.py$")
MAX_TEXT_BYTES = 8 << 20  # larger text files are not read
MAX_FILES = 5000  # configuration files of a folder that are read
_TRAINING_KEYWORDS = re.compile(
    r"bf16|fp16|mixed_precision|learning_rate|load_in_4bit|bfloat16|float16"
)
# endings of the files that are read
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
    ".ipynb",
    ".safetensors",
    ".jsonc",
}


@dataclass
class Collection:
    """The settings in all files that were read, with the folder of each file.

    findings    findings about files that look like configurations but cannot be read
    file_count  the number of files that were read
    """

    documents: list[tuple[Path, Document]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    file_count: int = 0


def collect_documents(paths: Iterable[str]) -> Collection:
    """Reads every file under these paths that may be a configuration. Raises UsageError for a path
    that does not exist.
    """
    collection = Collection()
    for path_text in paths:
        path = Path(path_text)
        if not path.exists():
            raise UsageError(f"{path_text}: no such file or folder")
        if not path.is_file() and not path.is_dir():
            raise UsageError(f"{path_text}: neither a file nor a folder")
        is_named = path.is_file()
        files = [path] if is_named else list(islice(_walk_configurations(path), MAX_FILES + 1))
        collection.file_count += len(files)
        if collection.file_count > MAX_FILES:
            raise UsageError(
                f"{path_text}: more than {MAX_FILES} files that may be configurations; give the folder"
                " with those that are"
            )
        for file in files:
            _read_file(file, collection, is_named=is_named)
    return collection


def _walk_configurations(folder: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(
            folder
            for folder in folders
            if folder not in SKIPPED_FOLDERS and not folder.startswith((".", "checkpoint-"))
        )
        if set(files) >= _RUN_FILES:
            folders.clear()
            continue
        for name in sorted(files):
            path = Path(directory, name)
            # `is_file` excludes pipes and broken links. Tests are skipped because they mix dtypes
            # on purpose.
            if may_be_configuration(name) and path.is_file() and not _TEST_FILE.search(name):
                yield path


def may_be_configuration(name: str) -> bool:
    """True if a file with this name may be a configuration."""
    return Path(name).suffix.lower() in _SUFFIXES or name == ".env"


def _display_path(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _read_file(path: Path, collection: Collection, *, is_named: bool) -> None:
    suffix = path.suffix.lower()
    display_path = _display_path(path)
    text = ""
    try:
        if suffix != ".safetensors" and path.stat().st_size > MAX_TEXT_BYTES:
            if is_named:
                raise UsageError(
                    f"{display_path}: {path.stat().st_size >> 20} MiB is no configuration"
                )
            return
        if suffix == ".safetensors":
            text = ""
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
        if suffix == ".py":
            collection.findings += autocast_around_backward(text, display_path)
        if is_named and not may_be_configuration(path.name):
            raise UsageError(
                f"{display_path}: isotype doctor check reads JSON, YAML, TOML, env and shell files, Python"
                " and safetensors"
            )
        documents = _parse_file(path, text, display_path)
        if is_named and documents == [None]:
            collection.findings.append(
                _make_finding(
                    display_path,
                    "not known: its keys are of no tool that isotype doctor check knows",
                    None,
                )
            )
        collection.documents += [
            (path.parent, document)
            for document in documents
            if document is not None and document.settings
        ]
    except UnreadableError as error:
        # A text that does not mention training, such as a template, is not reported.
        if (
            is_named
            or error.line is None
            or (suffix not in (".py", ".ipynb") and _TRAINING_KEYWORDS.search(text))
        ):
            collection.findings.append(_unreadable_finding(display_path, error.line, str(error)))
    except OSError as error:
        collection.findings.append(
            _unreadable_finding(display_path, None, error.strerror or str(error))
        )
    except UsageError:
        raise
    # The other files are still checked if the reader of one file fails.
    except Exception as error:
        collection.findings.append(
            _unreadable_finding(display_path, None, f"{type(error).__name__}: {error}")
        )


def _parse_file(path: Path, text: str, display_path: str) -> Sequence[Document | None]:
    """Reads a file according to its suffix. The result contains None if the settings of the file
    belong to no known tool.
    """
    match path.suffix.lower():
        case ".safetensors":
            return [_document_from_safetensors(path, display_path)]
        case ".py":
            return documents_from_python(text, display_path)
        case ".ipynb":
            code, notebook_line = read_notebook(text)
            documents = documents_from_python(code, display_path)
            for document in documents:
                document.settings = {
                    key: replace(setting, line=notebook_line(setting.line))
                    for key, setting in document.settings.items()
                }
            return documents
        case ".sh" | ".bash" | ".slurm" | ".sbatch":
            return documents_from_script(text, display_path)
        case ".json" | ".jsonc":
            return [_document_from_tree(read_json(text), path.name, display_path)]
        case ".yaml" | ".yml":
            return [_document_from_tree(read_yaml(text), path.name, display_path)]
        case ".toml":
            return [_document_from_tree(read_toml(text), path.name, display_path)]
    return documents_from_environment(text, display_path)


def _unreadable_finding(file: str, line: int | None, reason: str) -> Finding:
    return _make_finding(
        file,
        f"cannot be read: {reason}",
        "correct the file; nothing in it was checked",
        Severity.ERROR,
        line,
    )


def _document_from_tree(tree: Tree, name: str, display_path: str) -> Document | None:
    tool = identify_tool(tree.data, name)
    tables: set[str] = set()
    # kohya's scripts ignore the names of the tables and use the keys of all tables
    if tool is None and name.endswith(".toml"):
        tables = {key for key, value in tree.data.items() if isinstance(value, dict)}
        flat = {k: v for key in tables for k, v in tree.data[key].items()} | {
            k: v for k, v in tree.data.items() if k not in tables
        }
        tool = "kohya" if identify_tool(flat, name) == "kohya" else None
    if tool is None:
        return None
    document = Document(tool, display_path)
    for key, value, line in tree.leaves():
        if tool == "kohya" and key.partition(".")[0] in tables:
            key = key.partition(".")[2]
        document.add(key.removeprefix("--"), value, line, written_key=key)
    if tool in ("model", "hf") and any(str(k).startswith(("bnb_", "load_in_")) for k in tree.data):
        for key, setting in list(document.settings.items()):
            if key.startswith(("bnb_", "load_in_")):
                document.settings[f"quantization_config.{key}"] = setting
    return document


def _document_from_safetensors(path: Path, display_path: str) -> Document | None:
    try:
        header = read_safetensors_header(path)
    except ValueError as error:
        raise UnreadableError(f"a safetensors file: {error}") from error
    dtype_counts: Counter[str] = Counter()
    for entry in header.tensors.values():
        if entry.dtype_name in FLOATS:
            dtype_counts[entry.dtype_name] += prod(entry.shape)
    if not dtype_counts or path.name.startswith(("adapter", "optimizer")):
        return None
    document = Document(
        "checkpoint", display_path, attributes={"dtypes": dtype_counts, "reader": "safetensors"}
    )
    document.add(
        "stored_dtype",
        max(dtype_counts, key=dtype_counts.__getitem__),
        None,
        written_key="safetensors header",
    )
    return document
