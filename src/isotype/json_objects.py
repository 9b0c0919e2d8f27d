"""JSON whose objects have each key once. `json` alone keeps the last of two equal keys and does not report the others."""

from __future__ import annotations

import json
from typing import Any


class RepeatedKey(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:60]!r} is given twice in one object")


class ObjectDecoder(json.JSONDecoder):
    """Decodes as `json` does. `repeated` is then the first key that an object of the value has twice, or None.

    It does not raise in the middle of a value, so that a reader of many values knows where the next one begins.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object)
        self.repeated: str | None = None

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        self.repeated = None
        return super().raw_decode(s, idx)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs) and self.repeated is None:
            seen: set[str] = set()
            self.repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # add gives None
        return made


def loads(text: str) -> Any:
    """The value of a JSON text. Raises RepeatedKey, or what `json.loads` raises."""
    decoder = ObjectDecoder()
    value = decoder.decode(text)
    if decoder.repeated is not None:
        raise RepeatedKey(decoder.repeated)
    return value
