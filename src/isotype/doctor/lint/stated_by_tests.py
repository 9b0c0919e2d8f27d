"""What the tests of a repository say of dtypes: a dtype that a test asserts is meant, and a refusal that it would meet does not happen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .source import Function, SourceFile

_LOW = re.compile(r"\b(?:torch|th)\.(?:bfloat16|float16|half)\b|\.half\(\)|\.bfloat16\(\)")
_STATED = re.compile(r"\.dtype\s*(?:==|is)\s|(?:assertEqual|assertIs)\([^)]*\.dtype")


def stated(name: str, tests: dict[Path, bytes], root: Path, *, refused: bool) -> str:
    """The test that states a dtype of what this function or class gives, or (refused) runs it in bf16 or fp16; or "".

    refused  whether the finding says that torch refuses the low precision
    """
    word = re.compile(rb"\b%b\b" % re.escape(name.encode()))
    for path, text in tests.items():
        if (b"dtype" not in text and b"float16" not in text) or not word.search(text):
            continue
        with suppress(SyntaxError, ValueError):
            for test, code in _tests_of(SourceFile(str(path), text.decode("utf-8", "replace")), name):
                where = f"{path.relative_to(root).as_posix()}:{test.lineno}"
                if _STATED.search(code):
                    return f"the test in {where} states the dtype that {name} gives"
                if refused and _LOW.search(code):
                    return f"the test in {where} runs {name} in a low precision"
    return ""


def _tests_of(file: SourceFile, name: str) -> Iterator[tuple[Function, str]]:
    """The test functions that use the name, each with its text, decorators included."""
    for test in file.nodes(ast.FunctionDef):
        if test.name.startswith("test") and any(
            (isinstance(n, ast.Name) and n.id == name) or (isinstance(n, ast.Attribute) and n.attr == name) for n in ast.walk(test)
        ):
            yield test, ast.unparse(test)
