"""Defines the names that conditions in the text files of `explain` (`families/*.txt`) can use. The
names stand for values that were read from the text and the traceback of an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from ...dtypes import torch_dtype_name
from ...pages import sheets
from .log import Frame
from .recognition import CAPTURES, DTYPE_ROLES, OPERATORS, normalise_dtype
from .situation import FLAGS, Call, RecognisedError, failing_call


def _normalise_dtypes(text: str) -> str:
    return ", ".join(normalise_dtype(name) for name in text.split(",") if name.strip())


def _sort_names(text: str) -> str:
    return ", ".join(sorted(name.strip().removeprefix("torch.") for name in text.split(",")))


def _find_printed_dtype(text: str) -> str:
    return next((normalise_dtype(name) for name in re.findall(r"dtype ?= ?(torch\.\w+)", text)), "")


def _dtype_of_set(number: int) -> Callable[[ErrorFacts], str | None]:
    def find(facts: ErrorFacts) -> str | None:
        text = facts.error.captures.get("set")
        if text is None:
            return None
        names = [normalise_dtype(name) for name in text.split(",")]
        return names[number] if number < len(names) else "another"

    return find


def _product_in_place(facts: ErrorFacts) -> Call | None:
    call = failing_call(facts.error.situation)
    return call if call and call.is_product and call.in_place else None


def _product_of_two(facts: ErrorFacts) -> Call | None:
    call = failing_call(facts.error.situation)
    return call if call and call.is_product and len(call.tensors) == 2 else None


def _describe_function(facts: ErrorFacts) -> str | None:
    frame = facts.frame
    return None if frame is None else f"{frame.function} at {frame.file}:{frame.line}"


def _describe_line(facts: ErrorFacts) -> str | None:
    frame = facts.frame
    if frame is None:
        return None
    return f"{frame.code or frame.function} at {frame.file}:{frame.line}"


class ErrorFacts(sheets.Facts):
    """Looks up values that describe an error. Conditions in the files of rules refer to these
    values by names. A name can be a variable that the section defines, the role of a dtype in the
    message (such as `left`), a part that was extracted from the text, a flag of the situation, or
    one of the following.

    operator, text, half, torch_half, autocast  attributes of `RecognisedError`
    autocast is on            whether autocast was on
    where FLAG                a description of the frame that shows the flag
    word NAME                 the part of the text with this name, if a dtype has the same name
    first of set, second of set   the first and second dtype of a set that the text prints
    package NAME              whether a frame is in this package
    call                      the failing call
    in_place, product         the failing call, if it is an in-place product, or a product of two
                              tensors
    user, inner               the innermost frame of the user's code, and of all code
    caller                    the innermost frame outside torch: the code that called what failed
    frame, place, line        the frame that `frames ~ regex` found, and descriptions of it

    In `NAME as dtype`, the ending `as dtype` converts a text to a dtype. There are other endings
    too.
    """

    fact_functions = {
        "operator": lambda self: self.error.operator,
        "text": lambda self: self.error.text,
        "half": lambda self: self.error.half,
        "torch_half": lambda self: self.error.torch_half,
        "autocast": lambda self: self.error.autocast,
        "autocast is on": lambda self: "autocast" in self.error.situation,
        "first of set": _dtype_of_set(0),
        "second of set": _dtype_of_set(1),
        "call": lambda self: failing_call(self.error.situation),
        "in_place": _product_in_place,
        "product": _product_of_two,
        "user": lambda self: self.error.situation.user_frame,
        "inner": lambda self: self.error.situation.innermost,
        "caller": lambda self: self.error.situation.failing_frame,
        "frame": lambda self: self.frame,
        "frames": lambda self: self.error.situation.frames,
        "place": _describe_function,
        "line": _describe_line,
    }
    functions = {
        "where": sheets.Function(
            lambda self, flag: self.error.situation.describe_evidence(flag), FLAGS
        ),
        "word": sheets.Function(lambda self, name: self.error.captures.get(name), CAPTURES),
        "package": sheets.Function(
            lambda self, name: name in self.error.situation.packages, ("deepspeed",)
        ),
    }
    conversions = {
        " as dtype": normalise_dtype,
        " as dtypes": _normalise_dtypes,
        " as torch": torch_dtype_name,
        " as mixed": lambda text: text.replace("-true", "-mixed"),
        " without spaces": str.strip,
        " as list": _sort_names,
        " as printed dtype": _find_printed_dtype,
        " in lower case": str.lower,
        " in brief": lambda text: " ".join(text.split())[:160],
        " in 160": lambda text: text[:160],
        " without quotes": lambda text: text.replace("'", ""),
    }
    attributes = ("file", "line", "function", "code", "frame", "place", "tensors")
    values = {"operator": OPERATORS}

    def __init__(self, error: RecognisedError) -> None:
        super().__init__()
        self.error = error
        self.frame: Frame | None = None

    def get(self, name: str) -> Any:
        if name not in self.variables:
            for table in (self.error.dtypes, self.error.captures):
                if name in table:
                    return table[name]
        return super().get(name)

    def evaluate_other_name(self, name: str) -> Any:
        return name in self.error.situation or None

    @classmethod
    def find_variables_in_other_name(cls, name: str, variables: Collection[str]) -> set[str] | None:
        return set() if name in DTYPE_ROLES or name in CAPTURES or name in FLAGS else None

    def matches(self, name: str, pattern: str) -> bool:
        if name != "frames":
            return super().matches(name, pattern)
        frame = self.error.situation.find_frame(pattern)
        self.frame = frame or self.frame
        return frame is not None
