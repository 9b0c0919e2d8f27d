"""What a file's launches `kernel[grid](...)` hand to a kernel's pointers, when the launching function is given bf16."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dataflow.functions import FunctionClass, function_classes
from ..dataflow.plain import PURE, launched_by
from ..dataflow.values import Tensor
from ..source import SourceFile, bindings, keyword, last_name
from .kernels import Kernel, KernelEvent

if TYPE_CHECKING:
    from ..repository import Repository


def against(file: SourceFile, kernel: Kernel, event: KernelEvent, repository: Repository | None) -> str:
    """Why no launch of this kernel meets what was seen of bf16 pointers, or ""."""
    name = kernel.node.name
    if _is_left_over(file, name, repository):
        return "nothing launches it, and this file launches its other kernels"
    files = _launching(file, name, repository)
    for pointer in (event.before.loaded, event.after.loaded):
        where = _always_wide(files, kernel, pointer) if pointer in kernel.parameters else ""
        if where:
            return f"every launch hands {pointer} fp32 or integers ({where})"
    for flag in sorted(event.flags & kernel.constexprs):
        where = _chosen_by_dtype(files, kernel, flag)
        if where:
            return f"the launch chooses {flag} by the dtype ({where}), and the other branch casts"
    return ""


def leads(file: SourceFile, kernel: Kernel, event: KernelEvent, repository: Repository | None) -> tuple[str, str]:
    """A launch that hands the accused pointer bf16 when its caller has bf16; else "" and what is missing."""
    name = kernel.node.name
    pointers = [p for p in (event.before.loaded, event.after.loaded) if p in kernel.parameters]
    files = _launching(file, name, repository)
    sites = [(other, site) for other in files for site in _sites(other, name)]
    own = next((p for p in pointers if p in kernel.casts), None)
    if own and event.kind in ("branch", "loop"):
        return f"{name} itself casts what {own} holds to fp32, which an fp32 pointer would not need", ""
    if not sites:
        alone = "the file was linted alone, and launching the kernel is left to its readers"
        return (alone, "") if repository is None else ("", f"no launch of {name} was found")
    if not pointers:
        return f"{Path(sites[0][0].path).name}:{sites[0][1].lineno} launches it, with pointers of unknown dtypes", ""
    for other, site in sites:
        for given in _handed(other, site):
            for pointer in pointers:
                value = _argument(kernel, pointer, *given)
                if isinstance(value, Tensor) and value.low:
                    return f"{Path(other.path).name}:{site.lineno} hands {pointer} {value.dtype} when it is given {value.dtype}", ""
    return "", f"no launch is seen to hand {' or '.join(dict.fromkeys(pointers))} a low precision"


def mixed(file: SourceFile, kernel: Kernel, event: KernelEvent, repository: Repository | None) -> tuple[str, str]:
    """A launch that hands the two pointers of a product different dtypes: the gradient's, which autocast chose, and a saved tensor's."""
    left, right = event.before.loaded, event.after.loaded
    assert left is not None
    assert right is not None
    if left not in kernel.parameters or right not in kernel.parameters:
        return "", "its operands are loaded by another function"
    for other in _launching(file, kernel.node.name, repository):
        for cls in _functions_reaching(other, kernel.node.name, repository):
            for scenario, launched in cls.launched_under.items():
                for site, handed in launched.items():
                    if last_name(site.func.value) != kernel.node.name:  # type: ignore[attr-defined]  # a launch site is a call of an indexed name
                        continue
                    for given in handed:
                        values = [_argument(kernel, pointer, *given) for pointer in (left, right)]
                        if all(isinstance(v, Tensor) and v.floating for v in values) and values[0].dtype != values[1].dtype:
                            where = f"{Path(other.path).name}:{site.lineno} in {cls.cls.name}"
                            return f"{where} hands {left} {values[0].dtype} and {right} {values[1].dtype} with {scenario}", ""
    return "", "no launch is seen to hand them different dtypes"


def _launching(file: SourceFile, name: str, repository: Repository | None) -> list[SourceFile]:
    """This file, and those of the repository that import the kernel and launch it."""
    others = repository.files_with(f"{name}[".encode(), but=Path(file.path)) if repository is not None else []
    return [file, *(other for other in others if name in other.imports)]


def _functions_reaching(file: SourceFile, kernel: str, repository: Repository | None) -> list[FunctionClass]:
    """The autograd.Functions that launch the kernel in this file: its own, and those of files that import the function that launches it."""
    sites = _sites(file, kernel)
    launchers = {function.name for site in sites if (function := file.function_of(site)) is not None}
    found = function_classes(file) if sites else []
    for name in launchers if repository is not None else ():
        others = repository.files_with(f"{name}(".encode(), but=Path(file.path))  # type: ignore[union-attr]  # the loop is empty without a repository
        found = [*found, *(cls for other in others if name in other.imports for cls in function_classes(other))]
    return found


def _is_left_over(file: SourceFile, name: str, repository: Repository | None) -> bool:
    """Whether the kernel's name stands only where it is defined, in a file that launches other kernels of its own."""
    if any(n.id == name for n in file.nodes(ast.Name)) or any(n.value == name for n in file.nodes(ast.Constant)):
        return False
    if repository is not None and repository.mentions(name, but=Path(file.path)):
        return False
    return any(isinstance(n.func, ast.Subscript) and last_name(n.func.value) in file.memo["jit_functions"] for n in file.nodes(ast.Call))


def _always_wide(files: Iterable[SourceFile], kernel: Kernel, pointer: str) -> str:
    """The file and line of a launch, where every launch in these files certainly hands the pointer fp32, fp64 or integers; else ""."""
    found = ""
    for file in files:
        for site in _sites(file, kernel.node.name):
            values = [_argument(kernel, pointer, *given) for given in _handed(file, site)]
            if not values or not all(isinstance(v, Tensor) and v.dtype is not None and not v.low for v in values):
                return ""
            found = f"{Path(file.path).name}:{site.lineno}"
    return found


def _chosen_by_dtype(files: Iterable[SourceFile], kernel: Kernel, flag: str) -> str:
    """The file and line of a launch, where every launch in these files chooses the flag by some tensor's dtype; else ""."""
    found = ""
    for file in files:
        for site in _sites(file, kernel.node.name):
            source = keyword(site, flag) or _argument(kernel, flag, site.args, {})
            if not isinstance(source, ast.expr) or not _asks_for_a_dtype(file, site, source):
                return ""
            found = f"{Path(file.path).name}:{site.lineno}"
    return found


def _sites(file: SourceFile, name: str) -> list[ast.Call]:
    return [n for n in file.nodes(ast.Call) if isinstance(n.func, ast.Subscript) and last_name(n.func.value) == name]


def _handed(file: SourceFile, site: ast.Call) -> list[tuple[list[Any], dict[str, Any]]]:
    """The arguments of this launch along each way through the function around it; none where that could not be followed."""
    function = file.function_of(site)
    if function is None:
        return []
    for cls in function_classes(file):
        if function in (cls.forward, cls.backward):
            return cls.launched.get(site, [])
    return launched_by(file, function, PURE).get(site, [])


def _argument(kernel: Kernel, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    position = kernel.parameters.index(name)
    return kwargs.get(name, args[position] if position < len(args) else None)


def _asks_for_a_dtype(file: SourceFile, site: ast.Call, source: ast.expr) -> bool:
    """Whether the expression, or what the function around binds to its name, compares a dtype."""
    bound = [value for node in file.own(file.function_of(site) or file.tree) for target, value in bindings(node)
             if isinstance(target, ast.Name) and isinstance(source, ast.Name) and target.id == source.id]  # fmt: skip
    return any(isinstance(n, ast.Attribute) and n.attr == "dtype" for value in (source, *bound) for n in ast.walk(value))
