"""Secrets in other tools' files: their values are never shown and never written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from ..finding import Finding
from .account import Given

HIDDEN = "(secret)"
_NAME = re.compile(r"token$|api_?key|secret|passw|access_?key|credential|webhook|_auth$", re.I)
_VALUE = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,})\b")
_FLAG = re.compile(r"--?([\w-]+)[= ]+(\S+)")


def is_secret(name: str) -> bool:
    """By the last part of a key's name: `hub_token`, `aws_secret_access_key`."""
    return bool(_NAME.search(name.rpartition(".")[2]))


class Secrets:
    """The values found in one file."""

    def __init__(self) -> None:
        self.values: set[str] = set()

    def without(self, given: Given) -> Given:
        """The key with its secret hidden, whether its name says so, its value does, or a flag inside the value."""
        text = str(given.value)
        if is_secret(given.name) and given.value not in (None, "", True, False):
            self.values.add(text)
            return replace(given, value=HIDDEN)
        self.values |= set(_VALUE.findall(text)) | {value for name, value in _FLAG.findall(text) if is_secret(name.replace("-", "_"))}
        return replace(given, value=self.hidden(text)) if isinstance(given.value, str) else given

    def hidden(self, text: str) -> str:
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        return _VALUE.sub(HIDDEN, text)

    def without_in(self, findings: Iterable[Finding]) -> list[Finding]:
        return [self._without_in(finding) for finding in findings]

    def _without_in(self, finding: Finding) -> Finding:
        texts: dict[str, Any] = {
            f.name: self.hidden(value) for f in fields(finding) if f.name != "code" and isinstance(value := getattr(finding, f.name), str)
        }
        return replace(finding, **texts, details=tuple((name, self.hidden(value)) for name, value in finding.details))
