"""A printed fix, applied exactly as it is printed, ends the error of its program."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.doctor.run.test_programs import PROGRAMS, TRUTH, run_in_process

_PIECE = re.compile(r"`(?P<code>[^`]+)`| (?P<how>at|before) (?P<file>[^\s:]+):(?P<line>\d+)")
_ALTERNATIVE = re.compile(r"; |, or |, which ")
# the fix holds for some callers only, or needs another import
_CONDITION = re.compile(r" for what was built in | for a model in |, with `import ")
_REGION = re.compile(r"(?P<region>with .+?\)): .+  \((?P<file>\S+):(?P<line>\d+)\)")
# programs whose fix is no code for one line of the file, such as a cast that is left out
IN_WORDS = frozenset(
    (
        "assigned_checkpoint",
        "callback_cast",
        "checked_parameter",
        "checkpoint",
        "checkpoint_cast",
        "checkpoint_context",
        "checkpoint_table",
        "custom_operator",
        "default_dtype",
        "disabled_cast",
        "fused_backward",
        "integer_parameter",
        "kept_buffer",
        "layerwise_casting",
        "left_default",
        "library_hook",
        "library_kernel",
        "library_norms",
        "loaded_states",
        "numpy_adapter",
        "numpy_buffer",
        "optimizer_states",
        "orthogonal_weight",
        "other_device",
        "packed_weight",
        "pre_hook",
        "pareto_tail",
        "quantised_head",
        "sharded_head",
        "restored_moments",
        "resumed_states",
        "scaled_adapters",
        "scaler",
        "scaler_adapters",
        "steered_layers",
        "trainer_norms",
        "two_defaults",
        "unwrapped_model",
        "validation_cast",
        "validator_cast",
        "written_cache",
    )
)
# one program of each form of a fix; the others are `full`
SHORT = ("float_rows", "short_ids", "thread", "out_buffer", "residual_stream")


class SourceFile:
    """The source code of a program, in which expressions and statements are replaced."""

    def __init__(self, text: str) -> None:
        self.lines = text.encode().splitlines(keepends=True)
        self.tree = ast.parse(text)
        self.edits: dict[tuple[int, int], str] = {}

    def read(self, node: ast.AST) -> str:
        begin, end = self._find_span(node)
        return b"".join(self.lines)[begin:end].decode()

    def replace(self, node: ast.AST, text: str) -> None:
        self.edits[self._find_span(node)] = text

    def insert_before(self, statement: ast.stmt, text: str) -> None:
        begin, _ = self._find_span(statement)
        self.edits[begin, begin] = f"{text}\n{' ' * statement.col_offset}"

    def _find_span(self, node) -> tuple[int, int]:
        def offset(line: int, column: int) -> int:
            return sum(map(len, self.lines[: line - 1])) + column

        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def find_statement(self, line: int) -> ast.stmt:
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]
        return max((node for node in nodes if node.lineno <= line), key=lambda node: node.lineno)

    def list_expressions(self, line: int) -> list[ast.expr]:
        statement = self.find_statement(line)
        return [node for node in ast.walk(statement) if isinstance(node, ast.expr)]

    def write(self) -> str:
        source = b"".join(self.lines)
        for (begin, end), text in sorted(self.edits.items(), reverse=True):
            source = source[:begin] + text.encode() + source[end:]
        return source.decode()


def find_replaced(code: ast.expr, expressions: list[ast.expr]) -> list[ast.expr]:
    """Returns the expressions of a line that the code of a fix replaces: `x` for `x.float()`, and the
    call of the same function for `torch.zeros(4, dtype=torch.bfloat16)`.
    """
    inner: ast.expr = code
    match code:
        case ast.ListComp(_, [ast.comprehension(iter=value)]):
            inner = value
        case ast.IfExp(body=value):
            inner = value
        case ast.Call(ast.Attribute(_, "copy_"), [ast.Call(function)]):
            calls = [node for node in expressions if isinstance(node, ast.Call)]
            return [c for c in calls if ast.unparse(c.func) == ast.unparse(function)]
        case ast.Call(ast.Attribute(value, "to" | "float" | "long" | "bool" | "half")):
            inner = value
    loads = [n for n in expressions if not isinstance(getattr(n, "ctx", None), ast.Store)]
    equal = [node for node in loads if ast.unparse(node) == ast.unparse(inner)]
    if equal or not isinstance(code, ast.Call):
        return equal
    calls = [node for node in loads if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == ast.unparse(code.func)]


def apply_fix(fix: str, program: str, source: str) -> str | None:
    """Returns the source code of a program after its fix, or None for a fix that is no code for a
    line of the program. Of several alternatives, the first is applied.
    """
    if _CONDITION.search(fix):
        return None
    file = SourceFile(source)
    region = _REGION.match(fix)
    if region is not None:
        if not region["file"].endswith(program):
            return None
        statement = file.find_statement(int(region["line"]))
        indent = " " * (statement.col_offset + 4)
        file.replace(statement, f"{region['region']}:\n{indent}{file.read(statement)}")
        return file.write()
    codes: list[str] = []
    for match in _PIECE.finditer(_ALTERNATIVE.split(fix)[0]):
        if match["code"]:
            codes.append(match["code"])
            continue
        if not match["file"].endswith(program):
            return None
        for code in codes:
            apply_code(file, code, match["how"], int(match["line"]))
        codes = []
    repaired = file.write()
    return repaired if repaired != source else None


def apply_code(file: SourceFile, code: str, how: str, line: int) -> None:
    statement = ast.parse(code).body[0]
    if how == "before":
        file.insert_before(file.find_statement(line), code)
    elif isinstance(statement, ast.Expr):
        for node in find_replaced(statement.value, file.list_expressions(line)):
            file.replace(node, code)
    else:
        file.replace(file.find_statement(line), code)


def run_source(source: str, path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    default_dtype = torch.get_default_dtype()
    try:
        exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    finally:
        torch.set_default_dtype(default_dtype)


@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.full) for n in TRUTH]
)
def test_program_runs_with_its_printed_fix(name, monkeypatch):
    finding = run_in_process(name, monkeypatch, records_tensors=True)
    path = PROGRAMS / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    repaired = apply_fix(finding.fix, path.name, source)
    if repaired is None:
        assert name in IN_WORDS, finding.fix
        return
    assert name not in IN_WORDS, finding.fix
    run_source(repaired, path, monkeypatch)
