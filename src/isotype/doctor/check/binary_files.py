"""`training_args.bin` and safetensors headers, read without executing or loading anything.

A pickle's opcodes are followed with inert stand-ins for every class and call.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from .text_files import Unreadable

LARGEST = 16 << 20  # a training_args.bin has a few kilobytes


@dataclass(eq=False)
class Inert:
    """Stands for a class, or an instance of it; `state` is what BUILD would have set."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> Any:
        """An enum member or a torch dtype as its value, anything else as its name."""
        if len(self.arguments) == 1 and isinstance(self.arguments[0], str):
            return self.arguments[0]
        return self.name


def read_pickle(data: bytes) -> dict[str, Any]:
    """The attributes of the pickled object. Raises Unreadable."""
    import zipfile  # here, because few folders hold a training_args.bin and these two are slow to import

    if data[:2] == b"PK":
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
                if archive.getinfo(name).file_size > LARGEST:
                    raise Unreadable("the pickle inside is too large for training arguments")
                data = archive.read(name)
        except (zipfile.BadZipFile, StopIteration, KeyError) as error:
            raise Unreadable("not a file that torch.save wrote") from error
    if len(data) > LARGEST:
        raise Unreadable("too large for training arguments")
    result = None
    rest = data
    for _ in range(4):  # torch's old format has three small pickles before the object
        try:
            result, used = _follow(rest)
        except (ValueError, IndexError, KeyError, TypeError, EOFError) as error:
            raise Unreadable(f"not a pickle that can be followed ({error})") from error
        if isinstance(result, Inert) and result.state:
            break
        rest = rest[used:]
        if not rest:
            break
    if not isinstance(result, Inert):
        raise Unreadable("holds no object with attributes")
    return {key: value.plain() if isinstance(value, Inert) else value for key, value in result.state.items()}


_MARK = object()
_PUSH_ARGUMENT = {
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_PUSH_CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = {"PROTO", "FRAME", "STOP", "NEXT_BUFFER", "READONLY_BUFFER"}


def _follow(data: bytes) -> tuple[Any, int]:
    import pickletools

    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def to_mark() -> list[Any]:
        items = []
        while (item := stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    end = 0
    for opcode, argument, position in pickletools.genops(data):
        name = opcode.name
        end = (position or 0) + 1
        if name in _PUSH_ARGUMENT:
            stack.append(argument)
        elif name in _PUSH_CONSTANT:
            stack.append(_PUSH_CONSTANT[name])
        elif name in _IGNORED:
            continue
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}[name]())
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            items = to_mark()
            stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "DICT":
            items = to_mark()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [stack.pop()] if name == "APPEND" else to_mark()
            if isinstance(stack[-1], list):
                stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else to_mark()
            target = stack[-1].state if isinstance(stack[-1], Inert) else stack[-1]
            target.update({str(k): v for k, v in zip(items[::2], items[1::2], strict=True) if isinstance(k, str)})
        elif name in ("GLOBAL", "INST"):
            module, _, attribute = str(argument).partition(" ")
            made = Inert(f"{module}.{attribute}")
            if name == "INST":
                made = Inert(made.name, tuple(to_mark()))
            stack.append(made)
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Inert(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(Inert(getattr(function, "name", "?"), arguments if isinstance(arguments, tuple) else ()))
        elif name == "NEWOBJ_EX":
            stack.pop()
            arguments, function = stack.pop(), stack.pop()
            stack.append(Inert(getattr(function, "name", "?"), arguments))
        elif name == "OBJ":
            items = to_mark()
            stack.append(Inert(getattr(items[0], "name", "?"), tuple(items[1:])))
        elif name == "BUILD":
            state = stack.pop()
            state = state[0] if isinstance(state, tuple) and state and isinstance(state[0], dict) else state
            if isinstance(stack[-1], Inert) and isinstance(state, dict):
                stack[-1].state.update(state)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            to_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "PERSID":
            stack.append(Inert("persistent"))
        elif name == "BINPERSID":
            stack[-1] = Inert("persistent")
        else:
            raise ValueError(f"opcode {name}")
    return stack[-1] if stack else None, end


LARGEST_HEADER = 100 << 20


def read_safetensors_header(path: Path) -> Counter[str]:
    """dtype word of the file (`BF16`, `F32`, `U8`) -> number of elements. Raises Unreadable."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= LARGEST_HEADER:
            raise Unreadable("no safetensors header")
        text = file.read(size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable("the safetensors header is not JSON") from error
    if not isinstance(header, dict):
        raise Unreadable("the safetensors header is not an object")
    count: Counter[str] = Counter()
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = (tensor.get("dtype"), tensor.get("shape")) if isinstance(tensor, dict) else (None, None)
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
            raise Unreadable(f"the safetensors header has no dtype and shape for {name[:80]!r}")
        count[dtype] += prod(shape)
    return count
