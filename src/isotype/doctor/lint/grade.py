"""The grade of a finding: proved by execution, reached by a caller, or possible."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from .dataflow.events import Scenario
from .dataflow.functions import function_classes
from .dataflow.plain import entered_with
from .repository import Repository
from .rule import Hit
from .source import Function, SourceFile, last_name
from .stated_by_tests import stated

# methods that a framework calls, whoever wrote the class
_CALLED_BY_FRAMEWORKS = re.compile(
    r"__\w+__|forward|backward|setup_context|jvp|vmap|step|setup|call|compute_loss|(training|validation|test|predict|prediction)_step|"
    r"configure_\w+|on_\w+"
)
_ADAPTER_BASES = re.compile(r"\b(PreTrainedModel|ModelMixin|GenerationMixin|SchedulerMixin)\b")
_LOW = ("bf16", "fp16")
_ON_PURPOSE = re.compile(
    r"on purpose|intention|intended|deliberate|by design|(?:is|are) (?:fine|enough|ok|okay|sufficient)\b|to match\b|parity|"
    r"match(?:es|ing)? (?:the )?(?:original|reference|official|upstream|paper)|same as (?:the )?(?:original|reference|official|upstream)",
    re.IGNORECASE,
)
_WITHOUT_PARAMETERS = re.compile(r"(Loss|Error|Warning|Dropout|Identity|Tensor)$")
_TRAINER_BASES = re.compile(r"\b(PreTrainedModel|ModelMixin|LightningModule)\b")


class Grade(StrEnum):
    """possible: the code alone; reached: callers or a framework's contract lead there; proved: reached, and executed, and it failed."""

    PROVED = "proved"
    REACHED = "reached"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True)
class Evidence:
    """A grade with its reason."""

    grade: Grade
    why: str

    def __str__(self) -> str:
        return f"{self.grade}: {self.why}"


def evidence_for(hit: Hit, file: SourceFile, path: Path, repository: Repository | None, *, refused: bool = False) -> Evidence:
    """The grade that the code, its callers and its repository give; nothing is executed.

    refused  whether the rule says that torch refuses the dtypes: a test that runs the code with them speaks against it
    """
    evidence = _evidence(hit, file, path, repository)
    if evidence.grade is Grade.REACHED and hit.scenario is not None and not hit.reached and repository is not None:
        top, _ = _owners(file, hit.node)
        low = refused and hit.scenario.autocast is None and not hit.scenario.mixed_weights
        against = stated(top.name, repository.tests, repository.root, refused=low) if top is not None else ""
        if against:
            return Evidence(Grade.POSSIBLE, against)
    return evidence


def _evidence(hit: Hit, file: SourceFile, path: Path, repository: Repository | None) -> Evidence:
    against = hit.weak or _intended(file, hit.node)
    if not against and hit.elsewhere is not None:
        against = hit.elsewhere(repository)
    if not against and hit.scenario is not None and repository is not None:
        against = repository.against(hit.scenario, path, file.text) or _cast_by_callers(file, hit, repository)
    if against:
        return Evidence(Grade.POSSIBLE, against)
    if hit.reached:
        return Evidence(Grade.REACHED, hit.reached)
    if hit.leads is not None:
        chain, missing = hit.leads(repository)
        return Evidence(Grade.REACHED, chain) if chain else Evidence(Grade.POSSIBLE, missing)
    caller, missing = _caller(file, hit.node, path, repository)
    if not caller:
        return Evidence(Grade.POSSIBLE, missing)
    if hit.scenario is None or repository is None:
        return Evidence(Grade.REACHED, caller)
    brought = _brought_about(hit, file, path, repository)
    if not brought:
        return Evidence(Grade.POSSIBLE, f"{caller}, but nothing here shows {hit.scenario}")
    return Evidence(Grade.REACHED, f"{caller}; {brought}")


def _intended(file: SourceFile, node: ast.AST) -> str:
    """The comment beside the code, or in the two lines before it, that says that it is meant so; or ""."""
    lines = file.text.splitlines()
    last = node.lineno  # type: ignore[attr-defined]  # every node that is graded has a line
    for number in range(last, max(last - 3, 0), -1):
        code, mark, comment = lines[number - 1].partition("#") if number <= len(lines) else ("", "", "")
        if mark and (number == last or not code.strip()) and _ON_PURPOSE.search(comment):
            return f"a comment in line {number} says that it is meant so"
    return ""


def _cast_by_callers(file: SourceFile, hit: Hit, repository: Repository) -> str:
    """Where other files call the accused function, if each of them hands it wider dtypes than the scenario supposes; or ""."""
    scenario, (top, _) = hit.scenario, _owners(file, hit.node)
    if scenario is None or scenario.inputs not in _LOW or not isinstance(top, Function) or _named(file, top.name, outside=top):
        return ""
    found = ""
    for other, call in _calls_elsewhere(top.name, file, repository):
        caller = other.function_of(call)
        handed = entered_with(other, caller, top, scenario) if caller is not None else set()
        if not _asks_for_fp32(other, call) and (not handed or any(dtype in _LOW for dtypes in handed for dtype in dtypes)):
            return ""
        found = f"{Path(other.path).name}:{call.lineno} hands it fp32, or asks for it, and nothing else calls it"
    return found


def _calls_elsewhere(name: str, file: SourceFile, repository: Repository) -> Iterator[tuple[SourceFile, ast.Call]]:
    """The calls of a function in other files that import it, or its module."""
    module = Path(file.path).stem
    for other in repository.files_with(f"{name}(".encode(), but=Path(file.path)):
        for call in (c for c in other.nodes(ast.Call) if last_name(c.func) == name):
            owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            if name in other.imports or other.imports.get(owner, owner).rpartition(".")[2] == module:
                yield other, call


def _asks_for_fp32(file: SourceFile, call: ast.Call) -> bool:
    """Whether it passes torch.float32 or torch.float64 as it is."""
    given = [*call.args, *(k.value for k in call.keywords)]
    return any(file.dotted(g) in ("torch.float32", "torch.float", "torch.float64", "torch.double") for g in given)


# -- who calls it --------------------------------------------------------------------------------------------------------


def _caller(file: SourceFile, node: ast.AST, path: Path, repository: Repository | None) -> tuple[str, str]:
    """What leads to this code, or "" and what is missing."""
    top, method = _owners(file, node)
    if top is None:
        return "it runs when the file is imported", ""
    if repository is None:
        return f"the file was linted alone, and {top.name} is what it offers its callers", ""
    if method is not None and not (_CALLED_BY_FRAMEWORKS.fullmatch(method.name) or method.decorator_list):
        called = _named(file, method.name, outside=method) or repository.use_of(method.name, but=path)
        if not called:
            return "", f"nothing in this repository calls {top.name}.{method.name}"
    line = _named(file, top.name, outside=top)
    if line:
        return f"{top.name} is used in line {line}", ""
    spot = repository.use_of(top.name, but=path)
    if spot is not None:
        return f"{spot} uses {top.name}", ""
    registered = [last_name(d) for d in top.decorator_list if "regist" in last_name(d).lower()]
    if registered:
        return f"@{registered[0]} makes {top.name} known", ""
    if "__main__" in file.text and top.name == "main":
        return "the program runs it", ""
    return "", f"nothing in this repository uses {top.name}"


def _owners(file: SourceFile, node: ast.AST) -> tuple[Function | ast.ClassDef | None, Function | None]:
    """The outermost function or class around a node, and its method that holds the node."""
    around: list[Function | ast.ClassDef] = []
    current: ast.AST | None = node
    while current is not None:
        if isinstance(current, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            around.append(current)
        current = file.parents.get(current)
    if not around:
        return None, None
    top = around[-1]
    inner = around[-2] if len(around) > 1 else None
    return top, inner if isinstance(top, ast.ClassDef) and isinstance(inner, Function) else None


def _named(file: SourceFile, name: str, outside: Function | ast.ClassDef) -> int:
    """The first line of this file that names it outside its own definition and `__all__`; 0 where none does."""
    first, last = outside.lineno, outside.end_lineno or outside.lineno
    lines = [n.lineno for n in file.nodes(ast.Name) if n.id == name] + [n.lineno for n in file.nodes(ast.Attribute) if n.attr == name]
    return min((line for line in lines if not first <= line <= last), default=0)


# -- who brings its dtypes about -----------------------------------------------------------------------------------------


def _brought_about(hit: Hit, file: SourceFile, path: Path, repository: Repository) -> str:
    """Where this repository, or a framework by its contract, runs the code with these dtypes; or ""."""
    scenario = hit.scenario
    assert scenario is not None
    spot = repository.place_of(scenario, path, sharded=_may_be_sharded(file, hit.node))
    if spot is not None:
        return f"{spot} {_what(scenario)}"
    setting = repository.configured(scenario)
    if setting is not None:
        return f"{setting} asks for {'autocast' if scenario.autocast else 'weights in a low precision'}"
    if scenario.autocast is not None:
        base = _base(path, _TRAINER_BASES)
        if base:
            return f"a trainer runs a {base} under autocast when it is asked for bf16"
        if _in_an_autograd_function(file, hit.node) and repository.decorates and not (repository.trains or repository.serves):
            return f"users of this library open autocast regions: {repository.decorates} decorates another function for them"
        return ""
    base = _base(path, _ADAPTER_BASES)
    if base:
        if scenario.mixed_weights:
            return f"peft's prepare_model_for_kbit_training leaves the norms of a {base} in fp32"
        return f"from_pretrained loads a {base} in the dtype that it is asked for"
    if not scenario.mixed_weights and _takes_a_dtype(file, hit.node):
        return _asks_for_another_dtype(file, hit.node, repository)
    return ""


def _may_be_sharded(file: SourceFile, node: ast.AST) -> bool:
    """Whether FSDP's policy may reach it: not a module without parameters and submodules, as losses are."""
    top, _ = _owners(file, node)
    if not isinstance(top, ast.ClassDef) or [last_name(b) for b in top.bases] != ["Module"]:
        return True
    made = [last_name(n.func) for n in ast.walk(top) if isinstance(n, ast.Call)]
    return any(name[:1].isupper() and not _WITHOUT_PARAMETERS.search(name) for name in made)


def _what(scenario: Scenario) -> str:
    if scenario.autocast is not None:
        return "opens an autocast region, or lets a trainer do so"
    return "keeps some weights in fp32 beside narrower ones" if scenario.mixed_weights else "casts a model to a low precision"


@lru_cache(maxsize=256)
def _folder_text(folder: Path) -> str:
    texts = []
    for file in sorted(folder.glob("*.py"))[:40]:
        try:
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)


def _base(path: Path, bases: re.Pattern[str]) -> str:
    """The framework's class from which a model in this folder is derived, or ""."""
    text = _folder_text(path.resolve().parent)
    found = re.search(r"^\s*class \w+\([^)]*?" + bases.pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _in_an_autograd_function(file: SourceFile, node: ast.AST) -> bool:
    """Whether it stands in an autograd.Function, or in a plain function that one of this file calls."""
    current: ast.AST | None = node
    while current is not None and not isinstance(current, ast.ClassDef):
        current = file.parents.get(current)
    if current is not None:
        return any(file.dotted(b).endswith("Function") for b in current.bases)
    top, _ = _owners(file, node)
    methods = [m for cls in function_classes(file) for m in (cls.forward, cls.backward) if m is not None]
    called = {last_name(n.func) for m in methods for n in file.own(m) if isinstance(n, ast.Call)}
    return top is not None and top.name in called


def _takes_a_dtype(file: SourceFile, node: ast.AST) -> bool:
    """Whether a function around the node has an argument called dtype."""
    function = file.function_of(node)
    while function is not None:
        if any(re.fullmatch(r"(\w+_)?dtype", a.arg) for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)):
            return True
        function = file.function_of(function)
    return False


def _asks_for_another_dtype(file: SourceFile, node: ast.AST, repository: Repository) -> str:
    """A call of the function around a node that passes a dtype, and not fp32 as it is written; or ""."""
    top, _ = _owners(file, node)
    if top is None:
        return ""
    own = [(file, c) for c in file.nodes(ast.Call) if last_name(c.func) == top.name]
    for other, call in (*own, *_calls_elsewhere(top.name, file, repository)):
        given = [*call.args, *(k.value for k in call.keywords)]
        if any("dtype" in ast.unparse(g) for g in given) and not _asks_for_fp32(other, call):
            return f"{Path(other.path).name}:{call.lineno} passes it a dtype"
    return ""
