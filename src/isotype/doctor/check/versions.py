"""Installed or locked versions: requirements, constraints and lock files; and what became of a setting in which release of a tool."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .settings import Document, Facts, Setting

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


def release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0): enough to compare releases."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


_LISTS = {
    # a name with a slash is a kernel of the hub
    "ATTENTION": "eager sdpa flash_attention_2 flash_attention_3 flex_attention xformers sage fp8 /",
    "QUANTISED": "no_change int8-quanto int4-quanto int2-quanto int8-torchao int8dq-torchao int8dq-int4-torchao int8-sdnq uint8-sdnq "
    "int16-sdnq uint16-sdnq fp16-sdnq fp8-sdnq int6-sdnq int5-sdnq uint5-sdnq uint4-sdnq uint3-sdnq uint2-sdnq nf4-bnb int4-torchao "
    "fp8-quanto fp8uz-quanto fp8-native fp8-torchao fp8wo-torchao fp8-int4-torchao fp8-transformerengine",
}
NEWEST = {
    "axolotl": "0.18", "llamafactory": "0.9.5", "accelerate": "1.15", "trl": "1.16", "transformers": "5.23", "simpletuner": "of 2026-08",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """One setting over the releases in which it was the same. since and until are inclusive; () is open."""

    setting: str
    package: str
    since: tuple[int, ...]
    until: tuple[int, ...]
    words: tuple[str, ...]
    instead: str

    def holds(self, version: tuple[int, ...]) -> bool:
        return self.since <= version and (not self.until or version[: len(self.until)] <= self.until)

    def takes(self, word: str) -> bool:
        return not self.words or word in self.words or ("/" in self.words and "/" in word)

    @property
    def releases(self) -> str:
        """`axolotl 0.13 to 0.14`, `trl up to 0.17`, `accelerate since 1.9`."""
        since, until = (".".join(map(str, v)) for v in (self.since, self.until))
        if not since and not until:
            return f"{self.package} {NEWEST[self.package]}"
        return f"{self.package} {f'since {since}' if not until else f'up to {until}' if not since else f'{since} to {until}'}"


@cache
def spans() -> dict[str, list[Span]]:
    """The spans of each setting, the oldest first."""
    found: dict[str, list[Span]] = {}
    for line in Path(__file__).with_name("releases.txt").read_text(encoding="utf-8").splitlines()[3:]:
        setting, package, releases, words, *instead = (cell.strip() for cell in line.split("|"))
        since, _, until = releases.partition("-")
        taken = () if words == "*" else tuple(_LISTS.get(words, words).split())
        found.setdefault(setting, []).append(Span(setting, package, release(since), release(until), taken, "".join(instead)))
    return found


@dataclass(frozen=True, slots=True)
class Given:
    """A setting of the table that a run gives. span: where the pinned release lies, or the newest one; None where it lies outside."""

    setting: Setting
    span: Span | None
    spans: list[Span]
    pinned: Setting | None

    @property
    def gone(self) -> bool:
        """Whether releases before the one that counts had it."""
        return self.pinned is None or release(str(self.pinned.value)) > self.spans[0].since


def given(facts: Facts) -> Iterator[Given]:
    """Each setting of the table that a run gives."""
    for name, lives in spans().items():
        setting = facts.get(name) or next((s for s in facts.under(name) if s.value is not None), None)
        if setting is None:
            continue
        pinned = facts.get(f"versions.{lives[0].package}")
        if pinned is not None:
            version = release(str(pinned.value))
            span = next((s for s in lives if s.holds(version)), None)
        else:
            span = lives[-1] if not lives[-1].until else None
        yield Given(setting, span, lives, pinned)
