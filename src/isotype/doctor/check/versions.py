"""Installed or locked versions: requirements, constraints and lock files, and the rules about versions with known dtype faults."""

from __future__ import annotations

import re

from .settings import Document

_REQUIREMENT = re.compile(r"^\s*(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*==\s*(?P<version>[0-9][\w.+!-]*)")
_CONDA = re.compile(r"^\s*-\s*(?P<name>[A-Za-z0-9][\w.-]*)\s*={1,2}\s*(?P<version>[0-9][\w.+]*)")
_NAME = re.compile(r"^\s*-?\s*([A-Za-z0-9][\w.-]*)")
WATCHED = (
    "torch", "transformers", "accelerate", "bitsandbytes", "deepspeed", "peft", "trl", "triton", "torchtune", "lightning", "torchtitan",
    "simpletuner", "axolotl", "llamafactory",
)  # fmt: skip


def is_version_file(name: str) -> bool:
    return bool(
        re.match(r"^(?:requirements|constraints)[\w.-]*\.(?:txt|in|lock)$|^(?:poetry|uv|pdm)\.lock$|^environment[\w.-]*\.ya?ml$", name)
    )


def read_versions(text: str, name: str, file: str) -> Document | None:
    """Exact pins only: a range does not say what is installed."""
    document = Document("versions", file)
    if name.endswith(".lock") and "[[package]]" in text:
        import tomllib

        try:
            packages = tomllib.loads(text).get("package", [])
        except tomllib.TOMLDecodeError:
            return None
        lines = {m[1]: text.count("\n", 0, m.start()) + 1 for m in re.finditer(r'^name = "([^"]+)"', text, re.M)}
        document.attributes["names"] = {str(package.get("name")) for package in packages}
        for package in packages:
            if package.get("name") in WATCHED and package.get("version"):
                document.add(
                    package["name"], package["version"], lines.get(package["name"]), written=f"{package['name']}=={package['version']}"
                )
        return document
    for number, line in enumerate(text.splitlines(), 1):
        if name_only := _NAME.match(line):
            document.attributes.setdefault("names", set()).add(name_only[1].lower())
        match = _REQUIREMENT.match(line) or (_CONDA.match(line) if name.endswith(("yml", "yaml")) else None)
        if match and match["name"].lower() in WATCHED:
            document.add(match["name"].lower(), match["version"], number, written=f"{match['name']}=={match['version']}")
    return document


def installed() -> Document:
    """What importlib finds beside this Python."""
    from importlib import metadata

    document = Document("versions", "this Python")
    for name in WATCHED:
        try:
            document.add(name, metadata.version(name), None, written=f"{name} (installed)")
        except metadata.PackageNotFoundError:
            continue
    return document


def release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): enough to compare releases."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
