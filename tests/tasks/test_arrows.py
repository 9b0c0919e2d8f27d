"""The loop imports no task, and no task imports another."""

from __future__ import annotations

import ast
from pathlib import Path

import isotype

SOURCE = Path(isotype.__file__).parent


def imported(file: Path) -> set[str]:
    """Every module of isotype that a file imports, as `isotype.tasks.language`."""
    package = ("isotype", *file.relative_to(SOURCE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_training_imports_no_task():
    for room in ("training", "precision", "ops", "lora", "optimize", "distributed"):
        for file in (SOURCE / room).rglob("*.py"):
            assert not [name for name in imported(file) if name.startswith("isotype.tasks")], file


def test_no_task_imports_another():
    for own, other in (("language", "diffusion"), ("diffusion", "language")):
        for file in (SOURCE / "tasks" / own).rglob("*.py"):
            assert not [name for name in imported(file) if name.startswith(f"isotype.tasks.{other}")], file
