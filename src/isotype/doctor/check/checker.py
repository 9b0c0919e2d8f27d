"""Checks configurations: reads every file that may be one, joins them into runs, compiles each into
its record, asks every rule.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from pathlib import Path

from ...errors import UsageError
from ...finding import Finding, Place, Severity
from ...wording import aligned, counted
from .programs import from_environment, from_python, from_script
from .python_calls import read_notebook
from .rules import RULES
from .rules.autocast_regions import autocast_around_backward
from .settings import ROLES, Document, Facts, Record, parse_device
from .text_files import Tree, Unreadable, read_json, read_toml, read_yaml
from .tools import effective_precision, identify


@dataclass
class Checked:
    """records: one a run of another tool; files: how many were looked at."""

    findings: list[Finding]
    records: list[Record]
    files: int


def check(paths: Iterable[str], *, device: str | None = None) -> Checked:
    """Everything wrong with the configurations under `paths`.

    device       what it will run on, as `h100`; None leaves rules about hardware to what the files
                 say
    Raises       UsageError
    """
    if device is not None:
        parse_device(device)
    found = collect(paths)
    records = []
    findings = [*found.trouble]
    for facts in runs(found, device):
        if facts.has("isotype"):
            file = facts.documents[0].file
            findings.append(
                _told(
                    file,
                    "a run of Isotype, whose settings are checked by its own plan",
                    f"isotype plan {file}",
                )
            )
            continue
        record = effective_precision(facts)
        if record.roles or any(
            d.tool in MAIN or d.tool in ("accelerate", "deepspeed") for d in facts.documents
        ):
            records.append(record)
        for function in RULES.values():
            findings += function(record)
    # files shared by several runs say the same thing once
    distinct: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        distinct.setdefault((finding.code, str(finding.place), finding.message), finding)
    return Checked(list(distinct.values()), records, found.files)


def _told(
    file: str,
    message: str,
    fix: str | None,
    severity: Severity = Severity.NOTE,
    line: int | None = None,
) -> Finding:
    return Finding(
        code="CF099", severity=severity, message=message, place=Place(file=file, line=line), fix=fix
    )


def trouble_without_files(checked: Checked, paths: Iterable[str]) -> Finding | None:
    """A note when nothing was recognised: silence would look like a clean bill."""
    if checked.records or checked.findings:
        return None
    what = f"no configuration found in {counted(checked.files, 'file')}"
    return _told(", ".join(paths), what, "give the folder or file with the training configuration")


def table(record: Record) -> str:
    """What the run will really do: role, value, why, and the line that decided."""
    rows = []
    for role in ROLES:
        if role in record.roles:
            decision = record.roles[role]
            by = decision.by
            if by is not None:
                where = f"{by.key}  {by.file}{f':{by.line}' if by.line else ''}"
            else:
                where = ""
            rows.append((role, decision.value, decision.why, where))
    if not rows:
        return ""
    main = next((d for d in record.facts.documents if d.tool in MAIN), record.facts.documents[0])
    return "\n".join(
        [f"what {main.file} will really do ({main.tool})", *(f"  {line}" for line in aligned(rows))]
    )


def as_json(record: Record) -> dict[str, object]:
    return {
        "tool": record.tool,
        "files": sorted({d.file for d in record.facts.documents}),
        "roles": {
            role: {
                "value": d.value,
                "why": d.why,
                **({"key": d.by.key, **d.by.place.to_dict()} if d.by is not None else {}),
            }
            for role, d in record.roles.items()
        },
    }


MAIN = (
    "hf",
    "simpletuner",
    "axolotl",
    "llamafactory",
    "torchtune",
    "torchtitan",
    "lightning",
    "kohya",
    "isotype",
    "script",
)


def _first_line(document: Document) -> int:
    return min((s.line or 0 for s in document.settings.values()), default=0)


def runs(found: Collection, device: str | None) -> list[Facts]:
    """One Facts for each main document (a trainer's arguments) with the documents next to it;
    further documents are separate runs.
    """
    made: list[Facts] = []
    used: set[int] = set()
    mains = [(folder, d) for folder, d in found.documents if d.tool in MAIN]
    for folder, main in mains:
        own_launcher = [
            d
            for _, d in found.documents
            if d.attributes.get("launcher")
            and d.file == main.file
            and _first_line(d) == _first_line(main)
        ]
        values = [
            s.value
            for d in (main, *own_launcher)
            for s in d.settings.values()
            if isinstance(s.value, str)
        ]
        referenced = {
            os.path.basename(value) for value in values if re.search(r"\.(?:json|ya?ml)$", value)
        }
        together = [main]
        by_tool: dict[str, list[Document]] = {}
        for other_folder, other in found.documents:
            if other.tool in MAIN:
                continue
            if (
                other.attributes.get("reader") == "python"
                and other.file != main.file
                and other_folder != folder
            ):
                continue  # a program elsewhere in the tree
            near = folder.is_relative_to(other_folder) or other_folder.is_relative_to(folder)
            if near or os.path.basename(other.file) in referenced:
                by_tool.setdefault(other.tool, []).append(other)
        for tool, candidates in by_tool.items():
            named = [d for d in candidates if os.path.basename(d.file) in referenced]
            same_file = [d for d in candidates if d.file == main.file]
            beside = [
                d for d in candidates if os.path.dirname(d.file) == os.path.dirname(main.file)
            ]
            chosen = named or same_file or beside or candidates
            if tool == "accelerate" and own_launcher:  # its options win over its file's
                together += own_launcher
                used |= {id(d) for d in own_launcher}
                chosen = named or [d for d in beside if not d.attributes.get("launcher")]
            several_fit = tool in ("env", "code") or (
                tool == "checkpoint" and len({os.path.dirname(d.file) for d in chosen}) == 1
            )
            if named or len(chosen) == 1 or several_fit:
                together += chosen
                used |= {id(d) for d in chosen}
        made.append(Facts(together, device))
    left = [
        (folder, d) for folder, d in found.documents if d.tool not in MAIN and id(d) not in used
    ]
    by_folder: dict[Path, list[Document]] = {}
    for folder, document in left:
        if document.tool not in ("env", "code", "checkpoint") or not mains:
            by_folder.setdefault(folder, []).append(document)
    for documents in by_folder.values():
        counts = Counter(document.tool for document in documents)
        alone = [
            d
            for d in documents
            if counts[d.tool] > 1 and d.tool in ("deepspeed", "accelerate", "model")
        ]
        rest = [d for d in documents if d not in alone]
        made += [Facts([d], device) for d in alone]
        if rest:
            made.append(Facts(rest, device))
    return made


SKIPPED_FOLDERS = {
    ".git", "node_modules", "__pycache__", "site-packages", ".venv", "venv", "wandb", ".mypy_cache", ".ruff_cache", "build", "dist",
    ".cache",
}  # fmt: skip
_RUN = {"resolved.yaml", "plan.json", "manifest.json", "env.json"}  # what a run of Isotype leaves
IS_TEST = re.compile(r"^test_.*\.py$|^conftest\.py$|_test\.py$")
LARGEST = 8 << 20  # bytes of a text file that may be a configuration
MOST_FILES = 5000
_TRAINING = re.compile(r"bf16|fp16|mixed_precision|learning_rate|load_in_4bit|bfloat16|float16")
_SUFFIXES = {
    ".json", ".yaml", ".yml", ".toml", ".env", ".sh", ".bash", ".slurm", ".sbatch", ".py", ".ipynb", ".safetensors",
    ".jsonc",
}  # fmt: skip


@dataclass
class Collection:
    """documents: folder-tagged; trouble: files that look like configurations and cannot be read."""

    documents: list[tuple[Path, Document]] = field(default_factory=list)
    trouble: list[Finding] = field(default_factory=list)
    files: int = 0


def collect(paths: Iterable[str]) -> Collection:
    """Raises UsageError for a path that does not exist."""
    found = Collection()
    for given in paths:
        path = Path(given)
        if not path.exists():
            raise UsageError(f"{given}: no such file or folder")
        if not path.is_file() and not path.is_dir():
            raise UsageError(f"{given}: neither a file nor a folder")
        explicit = path.is_file()
        files = [path] if explicit else list(islice(_walk(path), MOST_FILES + 1))
        found.files += len(files)
        if found.files > MOST_FILES:
            raise UsageError(
                f"{given}: more than {MOST_FILES} files that may be configurations; give the folder"
                " with those that are"
            )
        for file in files:
            _read(file, found, explicit=explicit)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            f
            for f in folders
            if f not in SKIPPED_FOLDERS and not f.startswith((".", "checkpoint-"))
        )
        if set(files) >= _RUN:
            folders.clear()
            continue
        for name in sorted(files):
            path = Path(here, name)
            # no pipe, no link to nowhere; tests mix dtypes on purpose, each function as a program
            # of its own
            if may_be_configuration(name) and path.is_file() and not IS_TEST.search(name):
                yield path


def may_be_configuration(name: str) -> bool:
    """By the name of the file alone."""
    return Path(name).suffix.lower() in _SUFFIXES or name == ".env"


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _read(path: Path, found: Collection, *, explicit: bool) -> None:
    suffix = path.suffix.lower()
    shown = _shown(path)
    text = ""
    try:
        if suffix != ".safetensors" and path.stat().st_size > LARGEST:
            if explicit:
                raise UsageError(f"{shown}: {path.stat().st_size >> 20} MiB is no configuration")
            return
        if suffix == ".safetensors":
            text = ""
        else:
            text = path.read_text(encoding="utf-8", errors="replace")
        if suffix == ".py":
            found.trouble += autocast_around_backward(text, shown)
        if explicit and not may_be_configuration(path.name):
            raise UsageError(
                f"{shown}: isotype doctor check reads JSON, YAML, TOML, env and shell files, Python"
                " and safetensors"
            )
        documents = _documents(path, text, shown)
        if explicit and documents == [None]:
            found.trouble.append(
                _told(shown, "holds no setting of a tool that isotype doctor check knows", None)
            )
        found.documents += [
            (path.parent, document)
            for document in documents
            if document is not None and document.settings
        ]
    except Unreadable as error:
        # a text that says nothing of training (a template of something else) is nobody's fault
        if (
            explicit
            or error.line is None
            or (suffix not in (".py", ".ipynb") and _TRAINING.search(text))
        ):
            found.trouble.append(_trouble(shown, error.line, str(error)))
    except OSError as error:
        found.trouble.append(_trouble(shown, None, error.strerror or str(error)))
    except UsageError:
        raise
    # one file that defeats its reader is no reason to say nothing of the others
    except Exception as error:
        found.trouble.append(_trouble(shown, None, f"{type(error).__name__}: {error}"))


def _documents(path: Path, text: str, shown: str) -> Sequence[Document | None]:
    """By the file's ending. None for a tree of settings that is no tool's."""
    match path.suffix.lower():
        case ".safetensors":
            return [_safetensors(path, shown)]
        case ".py":
            return from_python(text, shown)
        case ".ipynb":
            code, line_of = read_notebook(text)
            documents = from_python(code, shown)
            for made in documents:
                made.settings = {
                    k: replace(s, line=line_of(s.line)) for k, s in made.settings.items()
                }
            return documents
        case ".sh" | ".bash" | ".slurm" | ".sbatch":
            return from_script(text, shown)
        case ".json" | ".jsonc":
            return [_tree_document(read_json(text), path.name, shown)]
        case ".yaml" | ".yml":
            return [_tree_document(read_yaml(text), path.name, shown)]
        case ".toml":
            return [_tree_document(read_toml(text), path.name, shown)]
    return from_environment(text, shown)


def _trouble(file: str, line: int | None, what: str) -> Finding:
    return _told(
        file,
        f"cannot be read: {what}",
        "correct the file; nothing in it was checked",
        Severity.ERROR,
        line,
    )


def _tree_document(tree: Tree, name: str, shown: str) -> Document | None:
    tool = identify(tree.data, name)
    tables: set[str] = set()
    # kohya's scripts take the keys of all tables as if there were no tables
    if tool is None and name.endswith(".toml"):
        tables = {key for key, value in tree.data.items() if isinstance(value, dict)}
        flat = {k: v for key in tables for k, v in tree.data[key].items()} | {
            k: v for k, v in tree.data.items() if k not in tables
        }
        tool = "kohya" if identify(flat, name) == "kohya" else None
    if tool is None:
        return None
    document = Document(tool, shown)
    for key, value, line in tree.leaves():
        if tool == "kohya" and key.partition(".")[0] in tables:
            key = key.partition(".")[2]
        document.add(key.removeprefix("--"), value, line, written=key)
    if tool in ("model", "hf") and any(str(k).startswith(("bnb_", "load_in_")) for k in tree.data):
        for key, setting in list(document.settings.items()):
            if key.startswith(("bnb_", "load_in_")):
                document.settings[f"quantization_config.{key}"] = setting
    return document


def _safetensors(path: Path, shown: str) -> Document | None:
    count = read_safetensors_header(path)
    floats = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
    held = {floats[word]: n for word, n in count.items() if word in floats}
    if not held or path.name.startswith(("adapter", "optimizer")):
        return None
    document = Document("checkpoint", shown, attributes={"dtypes": held, "reader": "safetensors"})
    document.add(
        "stored_dtype", max(held, key=held.__getitem__), None, written="safetensors header"
    )
    return document


LARGEST_HEADER = 100 << 20


def read_safetensors_header(path: Path) -> Counter[str]:
    """dtype word of the file (`BF16`, `F32`, `U8`) -> number of elements. Raises Unreadable."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= LARGEST_HEADER:
            raise Unreadable("no safetensors header")
        text = file.read(size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable("the safetensors header is not JSON") from error
    if not isinstance(header, dict):
        raise Unreadable("the safetensors header is not an object")
    count: Counter[str] = Counter()
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        if isinstance(tensor, dict):
            dtype = tensor.get("dtype")
            shape = tensor.get("shape")
        else:
            dtype = None
            shape = None
        if (
            not isinstance(dtype, str)
            or not isinstance(shape, list)
            or not all(isinstance(n, int) for n in shape)
        ):
            raise Unreadable(f"the safetensors header has no dtype and shape for {name[:80]!r}")
        count[dtype] += prod(shape)
    return count
