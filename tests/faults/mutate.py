"""Hostile variants of good files: bytes flipped, cut, doubled and spliced; JSON values exchanged
for what a program least expects.
"""

import json
import random
from typing import Any

NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    True,
    False,
)
TEXTS = (
    "", " ", "\x00", "a\x00b", "../../../../tmp/outside", "/etc/passwd", "/dev/zero", "~", ".", "..", "%s%n", "{{ 7 * 7 }}",
    "{% for a in range(9) %}x{% endfor %}", "\u202e", "\ufeff", "\ud83d\ude00", "null", "nan", "1e999", "<|im_end|>", "<|im_start|>system",
    "__class__", "-rf", "x" * 300, "é" * 200, "a\nb", "\\ud800", "!!python/object:os.system", "<script>alert(1)</script>", "safetensors",
)  # fmt: skip
BYTES = (b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\r\n", b"\n\n", b"{", b"}", b"[", b'"', b"\\", b":", b",", b"&a ", b"*a",
         b"\x80\x04\x95", b"PK\x03\x04", b"\x1f\x8b", b"\\ud800", b"\x1b[2J", b"9" * 5000, b"[" * 3000, b"- " * 400)  # fmt: skip


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """One to four changes that know nothing of the format."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at:at] = draw.choice(BYTES)
        elif kind == 2:
            del data[at : at + draw.choice((1, 2, 10, 200))]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            piece = data[at : at + draw.choice((1, 16, 300))]
            data[at:at] = piece * draw.choice((1, 2, 30))
        elif kind == 5:
            data[at : at + draw.choice((1, 4, 8))] = draw.randbytes(draw.choice((1, 4, 8)))
        else:
            other = draw.randrange(len(data) + 1)
            data[at:at] = data[other : other + 40]
    return bytes(data)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """A copy with one to three nodes changed, removed, renamed, doubled or exchanged."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return odd_value(draw)
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice((*TEXTS, key + "s", key.upper(), key[:-1]))] = holder.pop(key)
        elif kind == 2:
            holder[key] = draw.choice(places)[0]
            try:
                holder[key] = json.loads(json.dumps(holder[key]))
            except (ValueError, RecursionError):
                holder[key] = None
        elif kind == 3 and isinstance(holder, list):
            holder[key : key + 1] = [holder[key]] * draw.choice((0, 2, 50))
        else:
            holder[key] = odd_value(draw)
    return value


def odd_value(draw: random.Random) -> Any:
    """What a field does not usually hold."""
    kind = draw.randrange(7)
    if kind == 0:
        return draw.choice(NUMBERS)
    if kind == 1:
        return draw.choice(TEXTS)
    if kind == 2:
        return None
    if kind == 3:
        return [draw.choice(TEXTS)] * draw.choice((0, 1, 3))
    if kind == 4:
        return {draw.choice(TEXTS): draw.choice(NUMBERS)}
    if kind == 5:
        nested: Any = 1
        for _ in range(draw.choice((5, 60))):
            nested = [nested] if draw.random() < 0.5 else {"a": nested}
        return nested
    return draw.choice((-1, 1)) * draw.random() * 10 ** draw.randint(-9, 9)


def _places(value: Any) -> Any:
    """Every (container, key) below `value`."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield value, key
            yield from _places(child)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield value, index
            yield from _places(child)
