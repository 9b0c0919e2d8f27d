"""What a key takes, in words: `a whole number of at least 1`, `one of sdpa eager flash flex`. Taken from the schema. Imports no torch."""

from __future__ import annotations

from functools import cache
from typing import Any

from .schema import RunConfig

_PLURAL = {"string": "text", "object": "mappings"}


@cache
def keys() -> dict[str, dict[str, Any]]:
    """`train.steps` -> its JSON Schema, for every key of every section, in order."""
    schema = RunConfig.model_json_schema()
    found = {}
    for section, field in schema["properties"].items():
        reference = field.get("$ref") or field["allOf"][0]["$ref"]
        for key, key_schema in schema["$defs"][reference.rpartition("/")[2]]["properties"].items():
            found[f"{section}.{key}"] = key_schema
    return found


@cache
def sections() -> tuple[str, ...]:
    return tuple(RunConfig.model_fields)


def default(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(RunConfig(), section), name)


def expected(key: str) -> str:
    """What `key` takes."""
    return _words(keys()[key])


def options(key: str) -> list[str]:
    """The words that `key` takes; none where it takes anything else."""
    schema = keys()[key]
    return [str(word) for option in schema.get("anyOf", [schema]) for word in option.get("enum", [])]


def takes(key: str, kind: str) -> bool:
    """Whether `key` takes JSON's `kind`: boolean, string, object, ..."""
    schema = keys()[key]
    return any(option.get("type") == kind for option in schema.get("anyOf", [schema]))


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        options = [_words(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(options) + (" (or nothing)" if len(options) < len(schema["anyOf"]) else "")
    if "enum" in schema:
        return "one of " + " ".join(str(option) for option in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _number("a whole number" if kind == "integer" else "a number", schema)
    if kind == "array":
        items = schema.get("items", {})
        inner = [option.get("type") for option in items.get("anyOf", [items])]
        return "a list of " + " or ".join(_PLURAL[kind] for kind in inner) if all(kind in _PLURAL for kind in inner) else "a list"
    if "pattern" in schema:
        return f"text such as {schema['examples'][0]!r}"
    if schema.get("additionalProperties") == {"type": "string"}:
        return "a mapping of names to text"
    return {"string": "text", "boolean": "true or false", "object": "a mapping"}.get(str(kind), "a value")


def _number(noun: str, schema: dict[str, Any]) -> str:
    bounds = [
        f"{word} {schema[name]:g}"
        for name, word in (("minimum", "of at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"), ("exclusiveMaximum", "below"))
        if name in schema
    ]
    return f"{noun} {' and '.join(bounds)}" if bounds else noun
