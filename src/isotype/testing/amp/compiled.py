"""Compares a function under torch.compile with a plain call (AC024).

The backend is `aot_eager`. Like the default backend, it traces forward and backward. It then runs
the traced operators without generating code. Without a GPU, the
caller leaves out functions that launch Triton kernels, because torch.compile would trace the
interpreter of the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...dtypes import format_dtype
from ...finding import Place
from .attempt import FORWARD, Fault, Outcome, attempt, faulty_method_location, make_fault
from .numerics import Numerics
from .rules import first_line
from .samples import LOW, Sample, Setting, Subject

# a frame in the message of the compiler, and its source line
_TRACED_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n(.*)')


def compile_faults(function: Callable[..., Any], numerics: Numerics, sample: Sample) -> list[Fault]:
    """Runs a function with and without torch.compile, both in its original dtypes and under bf16
    autocast. Returns a fault if the compiled function raises an error, or if its results have other
    dtypes or values.
    """
    plain = Subject(function)
    compiled_function = torch.compile(function, backend="aot_eager", dynamic=False)

    def call_compiled(*args: Any, **kwargs: Any) -> Any:
        return compiled_function(*args, **kwargs)

    compiled = Subject(call_compiled)
    for setting in (Setting(None), Setting(None, autocast=LOW[0])):
        expected = attempt(plain, sample, setting)
        if not expected.succeeded:
            continue
        outcome = attempt(compiled, sample, setting, uses_compiler=True)
        location = faulty_method_location(plain, expected, FORWARD)
        values: dict[str, Any] = {
            "raised": "",
            "results": "",
            "line": "",
            "setting": setting.describe(),
        }
        if outcome.error is not None:
            values["raised"] = first_line(outcome.error)
            values["line"], location = _untraceable_line(outcome.error, location)
            return [make_fault("AC024", location, location.symbol, location.line, **values)]
        results = _find_differences(expected, outcome, numerics, setting)
        if results:
            values["results"] = ", ".join(results)
            return [make_fault("AC024", location, location.symbol, location.line, **values)]
    return []


def _untraceable_line(error: BaseException, location: Place) -> tuple[str, Place]:
    """Returns the line that the compiler cannot trace, and its place. Its message names this line,
    for example `super().forward(...)` in a class method of an autograd Function. Returns "" and the
    unchanged location if an operator raised the error.
    """
    _, _, user_code = str(error).partition("from user code:")
    matches = _TRACED_FRAME.findall(user_code)
    if not matches or not type(error).__module__.startswith("torch._dynamo"):
        return "", location
    file, line, source = matches[-1]
    return source.strip(), replace(location, file=file, line=int(line))


def _find_differences(
    expected: Outcome, outcome: Outcome, numerics: Numerics, setting: Setting
) -> list[str]:
    """Returns the results that differ, with their dtypes if these differ."""
    differences = []
    actual_results = outcome.results()
    for result, value in expected.results().items():
        actual = actual_results.get(result)
        if actual is not None and actual.dtype != value.dtype:
            dtypes = f"{format_dtype(actual.dtype)}, without it {format_dtype(value.dtype)}"
            differences.append(f"{result} is {dtypes}")
        elif not numerics.equals_up_to_order(actual, value, setting):
            differences.append(result)
    return differences
