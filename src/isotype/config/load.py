"""Merges a file, `section.key=value` overrides and command line flags into one checked
configuration, and records the source of each value.

Every mistake is one line, `run.yaml:14 train.lerning_rate: unknown key, did you mean
train.learning_rate?`, and all mistakes of a configuration are reported at once. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..dtypes import NO_FP8_PRODUCTS, parse
from ..errors import UsageError
from ..wording import closest_file_name
from .keys import (
    KEY_ALIASES,
    MAIN_KEYS,
    NAME_KEYS,
    NOT_OFFERED,
    VALUE_ALIASES,
    accepts_type,
    allowed_words,
    default_value,
    describe_accepted_values,
    key_schemas,
    presets_for_dtype,
    section_names,
    value_to_write,
)
from .schema import RunConfig
from .yaml_text import Entry, YamlError, read_sections, read_value, write_value

PRESET_KEY = "precision.preset"


@dataclass(frozen=True)
class Recipe:
    """Settings of several keys that `--preset NAME` sets together."""

    description: str
    settings: dict[str, Any] = field(default_factory=dict)


# name after --preset -> the settings for which it stands
RECIPES = {
    "lora": Recipe(
        "LoRA adapter; precision from the device",
        {"precision.preset": "auto", "adapter.kind": "lora"},
    ),
    "qlora": Recipe(
        "LoRA adapter on a 4-bit base", {"precision.preset": "nf4-lora", "adapter.kind": "lora"}
    ),
    "full": Recipe(
        "every weight; precision from the device",
        {"precision.preset": "auto", "adapter.kind": "none", "train.learning_rate": 2e-5},
    ),
    "full-bf16": Recipe(
        "every weight, in bf16 with stochastic rounding: half the memory of full",
        {"precision.preset": "bf16-pure", "adapter.kind": "none", "train.learning_rate": 2e-5},
    ),
}
_FULL_PRECISIONS = ("bf16-mixed", "bf16-pure")  # the precisions of full fine-tuning


def preset_names() -> list[str]:
    return [*RECIPES, *key_schemas()[PRESET_KEY]["enum"]]


def find_recipe(name: str) -> Recipe:
    """Returns the recipe for the name of a recipe or of a precision. Raises UsageError with the
    known names.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name in key_schemas()[PRESET_KEY]["enum"]:
        settings: dict[str, Any] = {PRESET_KEY: name}
        if name in _FULL_PRECISIONS:
            settings |= {"adapter.kind": "none", "train.learning_rate": 2e-5}
        return Recipe(f"precision {name}", settings)
    presets = presets_for_dtype(name)
    raise UsageError(
        f"--preset {name}: unknown; one of {' '.join(preset_names())}",
        fix=f"--preset {presets}" if presets else None,
    )


# key -> further values that it accepts, each with its meaning: other tools and older runs use true
# and false here
VALUE_SYNONYMS: Mapping[str, Mapping[Any, str]] = {
    "train.gradient_checkpointing": {True: "layers", False: "none"}
}
COMMAND_LINE = "command line"
DEFAULT = "default"
# the first words of a run's resolved.yaml (config.write.resolved_yaml)
RESOLVED_HEADER = "# Each value of this run and where it came from."
MAX_COMPLAINTS = 40  # largest number of complaints that are shown at once
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # the first bytes of files in UTF-16
MAX_BYTES = 4 << 20  # a configuration has a few kilobytes; a larger file is a data file by mistake


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration, and the source of each of its values.

    config   the settings, checked against the schema
    sources  for every key where its value comes from: `run.yaml:14`, `command line`, `--preset
             qlora` or `default`
    text     the file's text, followed by the command line's settings as comments
    path     the path of the file, or None
    consent  whether `--yes` was given; a resumed run may then also change keys that are otherwise
             fixed
    command_line_keys  the keys that the command line set
    """

    config: RunConfig
    sources: Mapping[str, str]
    text: str
    path: Path | None = None
    consent: bool = False
    command_line_keys: frozenset[str] = frozenset()


@dataclass
class _Settings:
    """The settings read so far. Later sources replace earlier ones, and the messages of all errors
    are collected in `complaints`.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, source: str) -> None:
        self.values[key], self.sources[key] = value, source

    def keys_set_by(self, *sources: str) -> frozenset[str]:
        return frozenset(key for key, source in self.sources.items() if source in sources)


def load(
    path: Path | str | None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    consent: bool = False,
    resolved: bool = False,
    source: str = COMMAND_LINE,
) -> LoadedConfig:
    """Reads and checks a configuration.

    path       a YAML file, or None
    overrides  `section.key=value`, the value in YAML
    flags      the values of command line options by `section.key`; None means that the option was
               not given
    preset     a recipe or precision by name (`recipe`)
    consent    the value of LoadedConfig.consent
    source     the source of the flags that error messages and resolved.yaml name
    resolved   whether the file is a run's resolved.yaml; the sources of its values are then read
               from its comments, so that a resumed run keeps the original sources
    Raises     UsageError, a line for each mistake
    """
    settings = _Settings()
    text = ""
    if path is not None:
        path = Path(path)
        text = read_text(path)
        _read_file(settings, text, str(path))
        if text.startswith(RESOLVED_HEADER) and not resolved:
            _drop_marked_defaults(settings, text, str(path))
    if preset is not None:
        # the file overrides a recipe, except for the precision
        for key, value in find_recipe(preset).settings.items():
            if key == PRESET_KEY or key not in settings.values:
                settings.set(key, value, f"--preset {preset}")
    flag_values = {key: value for key, value in (flags or {}).items() if value is not None}
    for key, value in flag_values.items():
        if key in key_schemas():
            settings.set(key, value, source)
        else:
            settings.complaints.append(
                f"{source} {key}: {_unknown_key_message(key, value, source)}"
            )
    overrides = list(overrides)
    for override in overrides:
        _apply_override(settings, override)
    if settings.keys_set_by(COMMAND_LINE, source) & {"train.epochs", "train.steps"} == {
        "train.epochs"
    }:
        # `train.steps` of the file would otherwise override the epochs of the command line
        settings.set("train.steps", None, settings.sources["train.epochs"])
    config = _check_settings(settings)
    command_line_keys = settings.keys_set_by(COMMAND_LINE, source)
    sources = {key: settings.sources.get(key, DEFAULT) for key in key_schemas()}
    if resolved:
        sources = {
            key: _source_in_comment(source, text, str(path)) for key, source in sources.items()
        }
    arguments = [
        *([f"--preset {preset}"] if preset else []),
        *[f"{key}={write_value(value)}" for key, value in flag_values.items()],
        *overrides,
    ]
    return LoadedConfig(
        config, sources, _append_command_line(text, arguments), path, consent, command_line_keys
    )


def parse_config(text: str, name: str) -> RunConfig:
    """Reads a configuration from YAML text. Raises UsageError with a line for each mistake."""
    settings = _Settings()
    _read_file(settings, text, name)
    return _check_settings(settings)


def _source_in_comment(source: str, text: str, name: str) -> str:
    """Returns the source that `config.write.resolved_yaml` wrote as a comment after the key in the
    line `source` (`NAME:LINE`).
    """
    line = source.removeprefix(f"{name}:")
    if line.isdecimal():
        return text.splitlines()[int(line) - 1].rpartition("  # ")[2]
    return source


def _drop_marked_defaults(settings: _Settings, text: str, name: str) -> None:
    """Removes the defaults that a resolved.yaml marks as such, for a new run that takes the file as
    its configuration. A removed key does not count as set, so a default that does not apply to this
    kind of run is no mistake, and `--preset` sets the key. A value that was edited stays.
    """
    for key, value in list(settings.values.items()):
        is_marked = _source_in_comment(settings.sources[key], text, name) == DEFAULT
        if is_marked and value == default_value(key):
            del settings.values[key], settings.sources[key]


def read_text(path: Path) -> str:
    """Reads the text of a configuration file. Raises UsageError with one line."""
    try:
        if path.is_dir():
            is_run = (path / "resolved.yaml").is_file()
            is_model = (path / "config.json").is_file()
            fix = None
            if is_model:
                fix = f"--model {path}"
            elif is_run:
                fix = (
                    f"isotype train --resume {path} continues this run; isotype train"
                    f" {path / 'resolved.yaml'} run.folder=OTHER starts another with its settings"
                )
            raise UsageError(f"{path}: is a folder, expected a YAML file", fix=fix)
        if path.suffix in (".jsonl", ".csv", ".tsv", ".parquet") and path.exists():
            raise UsageError(f"{path}: expected a YAML file", fix=f"--data {path}")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(
                f"{path}: {path.stat().st_size >> 20} MiB, too large for a configuration"
            )
        content = path.read_bytes()
        if _is_utf16(content):
            raise UsageError(
                f"{path}: is in UTF-16, expected UTF-8",
                fix=(
                    f"choose UTF-8 where the editor saves it, or: iconv -f UTF-16 -t UTF-8 {path} >"
                    " NEW.yaml"
                ),
            )
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UsageError:  # which is a ValueError
        raise
    except FileNotFoundError:
        names = []
        if path.parent.is_dir():
            names = [file.name for file in path.parent.glob("*.y*ml")]
        near = closest_file_name(path.name, names)
        if near:
            hint = f", did you mean {path.parent / near}?"
        else:
            hint = "; isotype init writes one"
        raise UsageError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not text (UTF-8): expected a YAML file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _is_utf16(content: bytes) -> bool:
    """Returns True if a file begins with the mark of UTF-16, or every other byte at its start is
    zero.
    """
    halves = (content[0:32:2], content[1:32:2])
    return content.startswith(_UTF16_MARKS) or any(half and not any(half) for half in halves)


def _read_file(settings: _Settings, text: str, name: str) -> None:
    try:
        entries = list(read_sections(text))
    except YamlError as error:
        location = f"{name}:{error.line}" if error.line else name
        raise UsageError(f"{location}: {_escape_message(text, error) or error}") from None
    resolved_file = Path(name).with_name("resolved.yaml")
    if not entries and Path(name).name == "config.yaml" and resolved_file.is_file():
        raise UsageError(
            f"{name}: empty: the settings of this run came from the command line",
            fix=f"isotype train {resolved_file} run.folder=OTHER starts another with its settings",
        )
    if not entries:
        raise UsageError(
            f"{name}: empty; expected sections ({', '.join(section_names())}); isotype init writes a"
            " file to start from"
        )
    first_lines: dict[str, int] = {}
    for entry, inner_entries in entries:
        location = f"{name}:{entry.line} "
        if entry.key in first_lines:
            settings.complaints.append(
                f"{location}{entry.key}: given twice, first in line {first_lines[entry.key]}"
            )
            continue
        first_lines[entry.key] = entry.line
        if entry.key not in section_names():
            message = _unknown_key_message(entry.key, entry.value, name)
            settings.complaints.append(f"{location}{entry.key}: {message}")
        elif inner_entries is not None:
            _read_section(settings, entry.key, inner_entries, name)
        elif entry.value is not None:  # `train:` with nothing below is an empty section
            hint = _main_key_hint(entry.key, entry.value, name)
            settings.complaints.append(
                f"{location}{entry.key}: expected keys below it, got {_shorten_value(entry.value)}{hint}"
            )


def _read_section(settings: _Settings, section: str, entries: list[Entry], name: str) -> None:
    first_lines: dict[str, int] = {}
    for entry in entries:
        key = f"{section}.{entry.key}"
        location = f"{name}:{entry.line}"
        if entry.key in first_lines:
            settings.complaints.append(
                f"{location} {key}: given twice, first in line {first_lines[entry.key]}"
            )
        elif key not in key_schemas():
            settings.complaints.append(
                f"{location} {key}: {_unknown_key_message(key, entry.value, name)}"
            )
        else:
            settings.set(key, entry.value, location)
        first_lines.setdefault(entry.key, entry.line)


def _apply_override(settings: _Settings, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        settings.complaints.append(f"{COMMAND_LINE} {override}: expected section.key=value")
        return
    try:
        value = read_value(text)
    except YamlError as error:
        settings.complaints.append(f"{COMMAND_LINE} {key}: {error}")
        return
    section, _, key_path = key.partition(".")
    name, _, nested_key = key_path.partition(".")
    parent_key = f"{section}.{name}"
    if (
        nested_key and parent_key in key_schemas() and accepts_type(parent_key, "object")
    ):  # model.config.hidden_size=128
        previous = settings.values.get(parent_key)
        if previous is not None and not isinstance(previous, dict):
            settings.complaints.append(
                f"{COMMAND_LINE} {key}: {parent_key} is {_shorten_value(previous)}, not a mapping"
                f" ({settings.sources[parent_key]})"
            )
            return
        settings.set(parent_key, {**(previous or {}), nested_key: value}, COMMAND_LINE)
    elif key in section_names():
        settings.complaints.append(
            f"{COMMAND_LINE} {key}: expected {key}.KEY=VALUE, got"
            f" {key}={_shorten_value(value)}{_main_key_hint(key, value, COMMAND_LINE)}"
        )
    elif key not in key_schemas():
        settings.complaints.append(
            f"{COMMAND_LINE} {key}: {_unknown_key_message(key, value, COMMAND_LINE)}"
        )
    else:
        settings.set(key, value, COMMAND_LINE)


# names of keys that say nothing by themselves: in `optim.kind` the section names the setting
_GENERIC_NAMES = frozenset(("kind", "name", "type"))
_ALIASES = KEY_ALIASES | {"optimizer": "train.optimizer"}


def _main_key_hint(section: str, value: Any, source: str) -> str:
    """Returns a hint for a section that was given a single value instead of keys: `, did you mean
    model.name: org/name?` for `model: org/name`.
    """
    if section not in MAIN_KEYS or not isinstance(value, str | list):
        return ""
    key = MAIN_KEYS[section]
    presets = presets_for_dtype(value) if key == PRESET_KEY else None
    return f", did you mean {_write_setting(key, presets or _shorten_value(value), source)}?"


def _write_setting(key: str, text: str, source: str) -> str:
    """Writes a setting in the syntax of its source: `key=value` on the command line, `key: value`
    in a file.
    """
    return f"{key}={text}" if source == COMMAND_LINE else f"{key}: {text}"


def _describe_alias(noun: str, name: str, key: str, value: Any, source: str) -> str:
    """Returns the error message for a key of another tool, which is named `name` there: the
    corresponding key of Isotype, and how to write the value.
    """
    message = f"unknown {noun}; here it is {key}"
    text = value_to_write(name, key, value)
    if text is not None:
        return f"{message}; write {_write_setting(key, text, source)}"
    if value is None:
        return message
    return f"{message}, which takes {describe_accepted_values(key)}"


_ESCAPED_VALUE = re.compile(r'^\s*(?:- +)?(?:([\w.]+) *: *)?.*?"([^"]*\\[^"]*)"')


def _escape_message(text: str, error: YamlError) -> str | None:
    """Returns the message for a path of Windows in double quotes, or None for another error."""
    if "escape" not in str(error) or error.line is None:
        return None
    match = _ESCAPED_VALUE.match(text.splitlines()[error.line - 1])
    if match is None:
        return None
    key = f"{match[1]}: " if match[1] else ""
    return _backslash_message(key, match[2])


def _backslash_message(key: str, path: str) -> str:
    return (
        f"{key}\"{path}\": in double quotes a backslash begins an escape; write {key}'{path}' or"
        f" {key}{path.replace(chr(92), '/')}"
    )


_TYPOGRAPHIC_QUOTES = "\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb"
_ESCAPES = {"\a": "a", "\b": "b", "\t": "t", "\n": "n", "\v": "v", "\f": "f", "\r": "r", "\x1b": "e"}  # fmt: skip


def _misquoted_name_message(key: str, name: str, source: str) -> str | None:
    """Returns the error message for a name of a file, folder or model that contains typographic
    quotes, or characters into which YAML has converted a backslash sequence in double quotes.
    Returns None for any other name.
    """
    is_quoted = name[:1] in _TYPOGRAPHIC_QUOTES and name[-1:] in _TYPOGRAPHIC_QUOTES
    if len(name) > 2 and is_quoted and not Path(name).exists():
        straight = name.strip(_TYPOGRAPHIC_QUOTES)
        setting = _write_setting(key, straight, source)
        return f"{source} {key}: {name} has typographic quotes, which are no quotes of YAML; write {setting}"
    if any(character in name for character in _ESCAPES):
        path = "".join(
            f"\\{_ESCAPES[character]}" if character in _ESCAPES else character for character in name
        )
        return f"{source} {_backslash_message(f'{key}: ', path)}"
    return None


def _unknown_key_message(key: str, value: Any, source: str) -> str:
    """Returns the message for an unknown key or section. The message suggests a key and how to
    write its value, or says that Isotype does not offer the setting.
    """
    key = key.lstrip("-")  # in files of command line options, keys have leading dashes
    section, dot, name = key.partition(".")
    for part in (name, name.partition(".")[0], section):
        if part in NOT_OFFERED:
            return NOT_OFFERED[part]
    if dot and section not in section_names() and name in _GENERIC_NAMES and section in _ALIASES:
        return _describe_alias("key", section, _ALIASES[section], value, source)
    noun = "key" if dot else "section"
    setting = name if dot else key
    for known_key in key_schemas():
        if known_key.partition(".")[2] == setting:
            return f"unknown {noun}, did you mean {known_key}?"
    if setting in KEY_ALIASES:
        return _describe_alias(noun, setting, KEY_ALIASES[setting], value, source)
    if not dot:
        near = get_close_matches(key, section_names(), n=1)
        if near:
            return f"unknown section, did you mean {near[0]}?"
        return f"unknown section; there are {', '.join(section_names())}"
    near_key = _near_key(section, name)
    if near_key is not None:
        return f"unknown key, did you mean {near_key}?"
    if section not in section_names():
        return f"unknown section; there are {', '.join(section_names())}"
    return f"unknown key; {section} has {' '.join(_section_keys(section))}"


def _section_keys(section: str) -> dict[str, str]:
    """Returns a mapping of the names of a section's keys to the full keys with the section."""
    return {key.partition(".")[2]: key for key in key_schemas() if key.startswith(f"{section}.")}


def _near_key(section: str, name: str) -> str | None:
    """Returns the known key with the most similar spelling. The function first corrects the section,
    then looks for a similar name in the same section, and then in all sections.
    """
    if section not in section_names():
        near = get_close_matches(section, section_names(), n=1)
        if near and f"{near[0]}.{name}" in key_schemas():
            return f"{near[0]}.{name}"
    section_keys = _section_keys(section)
    near = get_close_matches(name, section_keys, n=1)
    if near:
        return section_keys[near[0]]
    all_keys = {key.partition(".")[2]: key for key in key_schemas()}
    near = get_close_matches(name, all_keys, n=1, cutoff=0.75)
    return all_keys[near[0]] if near else None


def _check_settings(settings: _Settings) -> RunConfig:
    """Returns the configuration. Raises UsageError with a message for every mistake, in the order
    of the file's lines; mistakes in the command line come last.
    """
    tree: dict[str, dict[str, Any]] = {}
    for key, value in list(settings.values.items()):
        section, _, name = key.partition(".")
        names = value if isinstance(value, list) else [value]
        for file_name in names if key in NAME_KEYS else ():
            if isinstance(file_name, str):
                message = _misquoted_name_message(key, file_name, settings.sources[key])
                settings.complaints += [message] if message else []
        if isinstance(value, bool):
            value = settings.values[key] = VALUE_SYNONYMS.get(key, {}).get(value, value)
        # pydantic would accept true as the number 1
        if isinstance(value, bool) and not accepts_type(key, "boolean"):
            settings.complaints.append(_invalid_value_message(settings, key, value))
        else:
            tree.setdefault(section, {})[name] = value
    config = None
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        invalid_keys = dict.fromkeys(
            ".".join(str(part) for part in item["loc"][:2])
            for item in error.errors(include_url=False)
        )
        settings.complaints += [
            _invalid_value_message(settings, key, settings.values[key]) for key in invalid_keys
        ]
    if settings.complaints:
        lines = [
            line if len(line) <= 600 else f"{line[:597]}..."
            for line in sorted(settings.complaints, key=_complaint_order)
        ]
        more_line = (
            [f"and {len(lines) - MAX_COMPLAINTS} more"] if len(lines) > MAX_COMPLAINTS else []
        )
        raise UsageError("\n".join(lines[:MAX_COMPLAINTS] + more_line))
    assert config is not None, "without complaints there is a configuration"
    return config


def _invalid_value_message(settings: _Settings, key: str, value: Any) -> str:
    if (
        accepts_type(key, "string")
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    ):
        quote = "; write it in quotes"
    else:
        quote = ""
    return (
        f"{settings.sources[key]} {key}: expected {describe_accepted_values(key)}, got"
        f" {_shorten_value(value)}{quote}{_value_hint(key, value)}"
    )


def _value_hint(key: str, value: Any) -> str:
    """Returns a hint for an invalid value: for another name of a dtype or a misspelt word the hint
    is `, did you mean bf16?`; for a known value that Isotype does not support, the hint says so.
    """
    choices = allowed_words(key)
    presets = presets_for_dtype(value) if key == PRESET_KEY else None
    if presets:
        return f", did you mean {presets}?"
    if key == "precision.compute" and str(value).lower().startswith("fp8"):
        return f"; {NO_FP8_PRODUCTS}"
    word = str(value).lower().replace("-", "_")
    if choices and word in NOT_OFFERED:
        return f"; {NOT_OFFERED[word]}"
    try:
        matches = [choice for choice in (parse(str(value)),) if choice in choices]
    except ValueError:
        matches = []
    alias = VALUE_ALIASES.get(key, {}).get(str(value).lower())
    matches = matches or ([alias] if alias else get_close_matches(str(value), choices, n=1))
    return f", did you mean {matches[0]}?" if matches else ""


def _complaint_order(complaint: str) -> tuple[int, int]:
    line = complaint.split(" ", 1)[0].rpartition(":")[2]
    return (0, int(line)) if line.isdecimal() else (1, 0)


def _shorten_value(value: Any) -> str:
    if value is None:
        return "nothing"
    text = write_value(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _append_command_line(text: str, arguments: list[str]) -> str:
    if not arguments:
        return text
    end = "" if not text or text.endswith("\n") else "\n"
    return (
        text
        + end
        + "".join(
            f"# {COMMAND_LINE}: {' '.join(argument.splitlines())}\n" for argument in arguments
        )
    )
