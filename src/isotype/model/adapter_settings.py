"""Checks the settings of a saved adapter before PEFT reads them. Numbers must be within their
ranges, values must have the right types, the rank must fit the file of weights, and patterns must
be matched within a time limit.

PEFT matches some settings as regular expressions. An expression such as `(a+)+$` can take years for
a name of forty characters. The expressions of a file are therefore first matched in a separate
process, which is stopped after `PATTERN_SECONDS`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..runs.value_limits import parse_json
from .value_ranges import MAX_CONFIG_BYTES, Range, describe_value

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PATTERN_SECONDS = 10.0  # time limit for matching the patterns of an adapter
_FETCH_AGAIN = "get the adapter again from where it came"
_RANK = Range(1, 1 << 16)
_ALPHA = Range(-1e6, 1e6, is_integer=False)
_NUMBERS: Mapping[str, Range] = {
    "r": _RANK,
    "lora_alpha": _ALPHA,
    "alpha": _ALPHA,  # of LoKr
    "lora_dropout": Range(0, 1, is_integer=False),
    "rank_dropout": Range(0, 1, is_integer=False),
    "module_dropout": Range(0, 1, is_integer=False),
    "decompose_factor": Range(-1, 1 << 16),
}
_NUMBERS_BY_PATTERN: Mapping[str, Range] = {"rank_pattern": _RANK, "alpha_pattern": _ALPHA}
_TEXTS = ("base_model_name_or_path", "peft_type", "task_type", "revision", "bias")
_NAMES = ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters")  # fmt: skip
_SWITCHES = ("use_rslora", "use_dora", "fan_in_fan_out", "inference_mode")
# the end of a weight's name -> the dimension of the weight whose size is the rank
_RANK_DIMENSIONS = {".lora_A.weight": 0, ".lora_B.weight": 1}
# a name, or the end of a name: an expression of these characters is matched at once
_PLAIN_NAME = re.compile(r"[\w.^$-]*")
# the program of the process that matches the expressions as PEFT does: its standard input is a JSON
# object with the keys "expressions" and "names"
_MATCH_PROGRAM = """
import json, re, sys
given = json.load(sys.stdin)
for method, expression in given["expressions"]:
    try:
        function = getattr(re.compile(expression), method)
    except (re.error, RecursionError, OverflowError) as error:
        print(error)
        sys.exit(3)
    for name in given["names"]:
        function(name)
"""


def read_adapter_config(folder: Path, label: str) -> dict[str, Any]:
    """Reads and checks adapter_config.json.

    label   the words that a message puts before the file's name
    Raises  UsageError for a file that is not a mapping, and for a value with a wrong type or
            outside its range
    """
    file = folder / ADAPTER_CONFIG_FILE
    label = f"{label}: {file}"
    try:
        if (size := file.stat().st_size) > MAX_CONFIG_BYTES:
            raise ValueError(f"it has {size:,} bytes, expected at most {MAX_CONFIG_BYTES:,}")
        settings = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not a mapping")
    except OSError as error:
        raise UsageError(f"{label}: {error.strerror}", fix=_FETCH_AGAIN) from None
    except ValueError as error:
        raise UsageError(f"{label} cannot be read: {error}", fix=_FETCH_AGAIN) from None
    for key, value in settings.items():
        if value is not None:
            _check_setting(label, key, value)
    _check_rank(label, settings, folder / ADAPTER_FILE)
    return settings


def _check_setting(label: str, key: str, value: Any) -> None:
    """Raises UsageError for a value that is outside its range or has another type."""
    expected: object = None
    if key in _NUMBERS and not _NUMBERS[key].contains(value):
        expected = _NUMBERS[key]
    elif key in _NUMBERS_BY_PATTERN and not isinstance(value, dict):
        expected = "a mapping"
    elif key in _TEXTS and not isinstance(value, str):
        expected = "a text"
    elif key in _NAMES and not _is_names(value):
        expected = "a text or a list of texts"
    elif key in _SWITCHES and not isinstance(value, bool):
        expected = "true or false"
    if expected is not None:
        raise UsageError(
            f"{label}: {key}: {describe_value(value)}, expected {expected}", fix=_FETCH_AGAIN
        )
    for pattern, number in value.items() if key in _NUMBERS_BY_PATTERN else ():
        if not _NUMBERS_BY_PATTERN[key].contains(number):
            message = f"{label}: {key}: {pattern!a:.60}: {describe_value(number)}, expected"
            raise UsageError(f"{message} {_NUMBERS_BY_PATTERN[key]}", fix=_FETCH_AGAIN)


def _is_names(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return isinstance(value, str)


def _check_rank(label: str, settings: Mapping[str, Any], weights: Path) -> None:
    """Raises UsageError for a rank that is larger than the largest rank in the file of weights.
    PEFT would first allocate matrices of this rank for every module, and only then compare them
    with the file.
    """
    largest_rank = _largest_rank(weights)
    ranks = settings.get("rank_pattern") or {}
    numbers = [("r", settings.get("r") if not ranks else None)]
    numbers += [(f"rank_pattern: {pattern!a:.60}", rank) for pattern, rank in ranks.items()]
    for key, rank in numbers:
        if largest_rank and rank is not None and rank > largest_rank:
            raise UsageError(
                f"{label}: {key}: {rank}, expected at most {largest_rank}, the largest rank in"
                f" {weights.name}",
                fix=_FETCH_AGAIN,
            )


def _largest_rank(weights: Path) -> int:
    """Returns the largest rank of a LoRA matrix of the file; 0 if the file has no such matrix or
    cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    rank = 0
    try:
        with safe_open(weights, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                for suffix, dimension in _RANK_DIMENSIONS.items():
                    if name.endswith(suffix):
                        rank = max(rank, file.get_slice(name).get_shape()[dimension])
    except (OSError, SafetensorError, IndexError):
        return 0  # the code that later loads the weights reports the error
    return rank


def check_patterns(
    settings: Mapping[str, Any],
    names: Iterable[str],
    label: str,
) -> None:
    """Raises UsageError for a setting that is not a valid regular expression, and for a regular
    expression that needs more time than the limit to match the names.

    names  the names of the model's modules
    """
    module_names = [name for name in names if name]
    for key, expressions in _expressions(settings).items():
        given = json.dumps({"expressions": expressions, "names": module_names})
        command = [sys.executable, "-I", "-S", "-c", _MATCH_PROGRAM]
        try:
            result = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                timeout=PATTERN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"{label}: {key}: a pattern takes more than {PATTERN_SECONDS:g} s to match the names of the"
                f" model's modules: {expressions[0][1]!a:.60}",
                fix="plain names of modules",
            ) from None
        if result.returncode:
            reason = result.stdout.strip() or "it cannot be matched"
            raise UsageError(
                f"{label}: {key}: no regular expression: {expressions[0][1]!a:.60}: {reason:.80}",
                fix=_FETCH_AGAIN,
            )


def _expressions(settings: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Returns for each key the expressions that PEFT builds from the key's values. Each expression
    is returned as a pair. The first value is the name of the method of `re.Pattern` that PEFT
    calls, and the second value is the expression itself. Plain names are left out.
    """
    expressions: dict[str, list[tuple[str, str]]] = {}
    for key, (method, template) in _TEMPLATES.items():
        value = settings.get(key) or []
        patterns = [value] if isinstance(value, str) else list(value)
        if key in ("target_modules", "exclude_modules") and not isinstance(value, str):
            patterns = []  # PEFT compares the ends of names with the entries of a list
        patterns = [pattern for pattern in patterns if not _PLAIN_NAME.fullmatch(pattern)]
        if patterns:
            expressions[key] = [
                (method, template.replace("PATTERN", pattern)) for pattern in patterns
            ]
    return expressions


# key -> the method and the expression with which PEFT compares a value with a module's name
_TEMPLATES = {
    "target_modules": ("fullmatch", "PATTERN"),
    "exclude_modules": ("fullmatch", "PATTERN"),
    "layers_pattern": ("match", r"(?:^|.*?\.)PATTERN\.(?P<idx>\d+)\."),
    "modules_to_save": ("match", r"(^|.*\.)PATTERN($|\..*)"),
    "rank_pattern": ("match", r"(.*\.)?(PATTERN)$"),
    "alpha_pattern": ("match", r"(.*\.)?(PATTERN)$"),
}
