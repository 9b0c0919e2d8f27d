"""Makes the built-in data set `stdlib`. The data set contains pairs of a question and an answer,
and plain texts, from the docstrings of Python's standard library.

The source files of the running Python are parsed and never imported. The same version of Python
gives the same pairs in the same order.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "turtledemo",
    "ensurepip",
    "__pycache__",
    "pydoc_data",
}
# number of characters of an answer
_MIN_CHARACTERS = 20
_MAX_CHARACTERS = 480  # of an answer

_FUNCTION_QUESTIONS = (
    "What does `{name}` do?",
    "Explain `{name}`.",
    "What is `{name}` for?",
    "When would I use `{name}` in Python?",
    "Describe the function `{name}`.",
)
_METHOD_QUESTIONS = (
    "What does the method `{name}` do?",
    "What does `{name}` do?",
    "Explain `{name}`.",
    "Describe the method `{name}`.",
)
_CLASS_QUESTIONS = (
    "What is `{name}`?",
    "What is the class `{name}` for?",
    "Describe the class `{name}`.",
    "Explain `{name}`.",
)
_MODULE_QUESTIONS = (
    "What is the module `{name}` for?",
    "What does the Python module `{name}` do?",
    "Describe the module `{name}`.",
)
_SIGNATURE_QUESTIONS = (
    "How do I call `{name}`?",
    "What arguments does `{name}` take?",
    "What is the signature of `{name}`?",
)
_WHICH_QUESTIONS = (
    "Which {kind} of `{module}` fits this description? {summary}",
    "Name the {kind} in `{module}` for this: {summary}",
)
# kind of the item -> forms of a question about it
_QUESTION_FORMS = {
    "function": _FUNCTION_QUESTIONS,
    "method": _METHOD_QUESTIONS,
    "class": _CLASS_QUESTIONS,
    "module": _MODULE_QUESTIONS,
}


@dataclass(frozen=True, slots=True)
class DocumentedItem:
    """A module, class or function with a docstring."""

    name: str
    module: str
    kind: str
    signature: str
    doc: str


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """A question about the module, class or function `name`, and its answer."""

    name: str
    question: str
    answer: str


@cache
def stdlib_pairs() -> tuple[QuestionAnswer, ...]:
    """Returns question and answer pairs in a shuffled order that is always the same. No question
    occurs twice, and no description answers two questions.
    """
    pairs: list[QuestionAnswer] = []
    questions: set[str] = set()
    answers: set[str] = set()
    for item in documented_items():
        summary = _summary(item.doc)
        if summary is None or any(part.startswith("_") for part in item.name.split(".")):
            continue
        is_new = summary not in answers
        answers.add(summary)
        for pair in _item_pairs(item, summary, is_new=is_new):
            if pair.question not in questions:
                questions.add(pair.question)
                pairs.append(pair)
    # Sorted by a checksum, so that the first rows, also with `data.limit`, come from the whole
    # library.
    return tuple(sorted(pairs, key=lambda pair: (crc32(pair.question.encode()), pair.question)))


@cache
def stdlib_text() -> tuple[str, ...]:
    """Returns texts from which a small model can learn English and Python. The texts are
    docstrings, each below the signature of its function or class, and the topics of `help()`.
    """
    texts: dict[str, None] = {}
    for item in documented_items():
        if len(item.doc) >= _MIN_CHARACTERS:
            head = item.name if item.kind == "module" else f"{item.name}{item.signature}"
            texts[f"{head}\n\n{item.doc}"] = None
    with suppress(ImportError):  # some distributions of Python lack these topics
        from pydoc_data.topics import topics

        texts |= dict.fromkeys(inspect.cleandoc(topic) for _, topic in sorted(topics.items()))
    return tuple(sorted(texts, key=lambda text: (crc32(text.encode()), text)))


def _is_read(name: str) -> bool:
    """Whether documentation is read from a file or folder of this name."""
    return name.removesuffix(".py") not in _SKIPPED and "-" not in name


@cache
def documented_items() -> tuple[DocumentedItem, ...]:
    """Returns all modules, classes and functions of the standard library that have a docstring,
    ordered by file name.
    """
    root = Path(sysconfig.get_path("stdlib"))
    items: list[DocumentedItem] = []
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        # site-packages, which may hold 100,000 files, is not entered
        subfolders[:] = [name for name in subfolders if _is_read(name)]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and _is_read(name)]
    for path in sorted(paths):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        if module and not module.endswith("__main__"):
            items += _walk_items(tree, module, module)
    first_items: dict[str, Any] = {}
    for item in items:
        first_items.setdefault(item.name, item)
    return tuple(first_items.values())


def _walk_items(
    node: ast.Module | ast.ClassDef, name: str, module: str
) -> Iterator[DocumentedItem]:
    if doc := ast.get_docstring(node):
        kind = "module" if isinstance(node, ast.Module) else "class"
        yield DocumentedItem(name, module, kind, _constructor(node), doc)
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _walk_items(child, f"{name}.{child.name}", module)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and (
            doc := ast.get_docstring(child)
        ):
            kind = "method" if isinstance(node, ast.ClassDef) else "function"
            yield DocumentedItem(
                f"{name}.{child.name}", module, kind, _signature(child, bound=kind == "method"), doc
            )


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> str:
    arguments = ast.unparse(function.args)
    if bound:
        arguments = re.sub(r"^(self|cls)(, /)?(, |$)", "", arguments)
    return f"({arguments})"


def _constructor(node: ast.Module | ast.ClassDef) -> str:
    for child in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return _signature(child, bound=True)
    return ""


def _summary(doc: str) -> str | None:
    """Returns the first paragraph of a docstring as one line of prose. If the first paragraph is
    only a signature, returns the second paragraph. Returns None if the paragraph is not prose.
    """
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", doc)]
    text = paragraphs[0]
    if (
        re.match(r"^[\w.]+\(.*\)( ->.*)?( --? .*)?$", text)
        and len(paragraphs) > 1
        and " - " not in text
    ):
        text = paragraphs[1]
    text = re.sub(r"^[\w.]+\([^)]*\)\s*(->\s*[\w.\[\], ]+?)?\s*(--?|:)\s+", "", text).strip()
    text = re.sub(r":(?:\w+:)?`+([^`]+)`+", r"`\1`", text).replace("``", "`")
    text = re.sub(r"(?<![\w*])\*(\w+)\*(?![\w*])", r"`\1`", text)
    if (
        not _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS
        or ">>>" in text
        or "->" in text
        or not text.isascii()
        or not text[0].isalpha()
    ):
        return None
    letters = sum(character.isalpha() or character.isspace() for character in text) / len(text)
    if letters < 0.8 or len(text.split()) < 4:
        return None
    text = text[0].upper() + text[1:] if not re.match(r"\w*[._(=]", text) else text
    if text.endswith((":", ",", ";")):
        text = text[:-1]
    return text if text.endswith((".", "!", "?", ")")) else text + "."


def _item_pairs(item: DocumentedItem, summary: str, *, is_new: bool) -> Iterator[QuestionAnswer]:
    number = crc32(item.name.encode())
    if is_new:
        forms = _QUESTION_FORMS[item.kind]
        yield QuestionAnswer(item.name, forms[number % len(forms)].format(name=item.name), summary)
    if item.kind == "module" or not item.signature:
        return
    short_name = item.name.rsplit(".", 1)[1]
    if len(item.signature) <= 160 and number % 2 and (item.signature != "()" or number % 8 == 1):
        call = f"`{short_name}{item.signature}`"
        if item.signature != "()":
            answer = f"Call it as {call}."
        else:
            answer = f"It takes no arguments: {call}."
        yield QuestionAnswer(
            item.name,
            _SIGNATURE_QUESTIONS[number // 7 % len(_SIGNATURE_QUESTIONS)].format(name=item.name),
            answer,
        )
    # A third of the questions ask for an item's name, the others for its description.
    if (
        is_new
        and item.kind != "method"
        and number % 3 == 0
        and short_name not in summary
        and len(summary) <= 200
    ):
        form = _WHICH_QUESTIONS[number // 3 % len(_WHICH_QUESTIONS)]
        yield QuestionAnswer(
            item.name,
            form.format(kind=item.kind, module=item.module, summary=summary),
            f"`{item.name}`.",
        )
