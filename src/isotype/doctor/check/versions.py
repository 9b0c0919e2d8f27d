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


NEWEST = {
    "axolotl": "0.18", "llamafactory": "0.9.5", "accelerate": "1.15", "trl": "1.16", "transformers": "5.23",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """The releases that have a setting. since and until are inclusive; () is open."""

    setting: str
    package: str
    since: tuple[int, ...]
    until: tuple[int, ...]
    instead: str

    def holds(self, version: tuple[int, ...]) -> bool:
        return self.since <= version and (not self.until or version[: len(self.until)] <= self.until)

    @property
    def releases(self) -> str:
        """`trl 0.17 to 0.27.2`, `trl up to 0.17`, `accelerate since 1.9`."""
        since, until = (".".join(map(str, v)) for v in (self.since, self.until))
        return f"{self.package} {f'since {since}' if not until else f'up to {until}' if not since else f'{since} to {until}'}"


@cache
def spans() -> list[Span]:
    """The table of releases.txt."""
    found = []
    for line in Path(__file__).with_name("releases.txt").read_text(encoding="utf-8").splitlines()[2:]:
        setting, package, releases, *instead = (cell.strip() for cell in line.split("|"))
        since, _, until = releases.partition("-")
        found.append(Span(setting, package, release(since), release(until), "".join(instead)))
    return found


def outside(facts: Facts) -> Iterator[tuple[Setting, Span, Setting | None]]:
    """Settings that a run gives and its release does not have, with the pin that says so; without a pin, what the newest one has lost."""
    for span in spans():
        setting = facts.get(span.setting) or next((s for s in facts.under(span.setting) if s.value is not None), None)
        pinned = facts.get(f"versions.{span.package}")
        had = bool(span.until) if pinned is None else not span.holds(release(str(pinned.value)))
        if setting is not None and had:
            yield setting, span, pinned
