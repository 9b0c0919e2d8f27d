"""What one compilation is given: the type of every parameter, the constexprs, and how sure we are that a caller produces it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

FLOAT_POINTERS = ("*fp32", "*bf16", "*fp16")
_FLOATS = ("fp64", "fp32", "bf16", "fp16")


class Reach(IntEnum):
    """How a combination came about; ordered by how much a failure of it matters."""

    LATENT = 0  # an extension of ours: nothing shows that a caller produces it
    INFERRED = 1  # plausible from the kernel's source or its launch sites alone
    MIXED = 2  # a caller's call with one tensor in another dtype reached the launch
    GIVEN = 3  # in the author's matrix, or a launch that was recorded

    @property
    def words(self) -> str:
        return _REACH_WORDS[self]


_REACH_WORDS = {
    Reach.LATENT: "latent: nothing shown produces this combination",
    Reach.INFERRED: "plausible: inferred from the source, no call was seen",
    Reach.MIXED: "reachable: a call with one tensor in another dtype launches it",
    Reach.GIVEN: "reachable: in the given matrix or a recorded launch",
}


@dataclass(frozen=True)
class Combination:
    """One entry of a kernel's matrix.

    types       parameter -> Triton's word (`*bf16`, `i32`, `fp32`, `constexpr`)
    constexprs  parameter (or a path into a tuple parameter) -> value
    attributes  path -> Triton's attribute list, as its own launcher would set it
    options     num_warps, num_stages and the like
    """

    label: str
    types: Mapping[str, Any]
    constexprs: Mapping[Any, Any] = field(default_factory=dict)
    attributes: Mapping[tuple[int, ...], Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    reach: Reach = Reach.GIVEN

    @property
    def key(self) -> str:
        """Equal for combinations that Triton would compile to the same program."""
        return repr(
            (
                sorted(self.types.items()),
                sorted(map(repr, self.constexprs.items())),
                sorted(self.attributes.items()),
                sorted(map(repr, self.options.items())),
            )
        )

    @property
    def written(self) -> str:
        """The types a reader needs: `logits_ptr *bf16, scale fp32`."""
        return ", ".join(f"{name} {word}" for name, word in self.types.items() if word != "constexpr")


def is_float_pointer(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("*") and word.removeprefix("*").removeprefix("k") in _FLOATS


def is_integer(word: Any) -> bool:
    return word in ("i32", "i64", "u32", "u64", "i16", "i8")


def distinct(combinations: Iterator[Combination] | list[Combination]) -> list[Combination]:
    """Without repetitions; of equal ones the most reachable stays, in its first place."""
    kept: dict[str, Combination] = {}
    for one in combinations:
        known = kept.get(one.key)
        if known is None or one.reach > known.reach:
            kept[one.key] = one
    return list(kept.values())


def float_pointer_matrix(base: Combination, *, reach_alike: Reach, free: list[str] | None = None) -> Iterator[Combination]:
    """First all float pointers in one dtype, then each one alone in another: 3 + 2n compilations instead of 3 to the power n.

    free   the pointers whose dtype a caller decides; the others keep the base's
    """
    pointers = [n for n in (free if free is not None else base.types) if is_float_pointer(base.types.get(n))]
    for word in FLOAT_POINTERS:
        yield replace(base, label=word.removeprefix("*"), types={**base.types, **dict.fromkeys(pointers, word)}, reach=reach_alike)
    if len(pointers) < 2:
        return
    for odd_one in pointers:
        for word in FLOAT_POINTERS:
            if word != "*bf16":
                types = {**base.types, **dict.fromkeys(pointers, "*bf16"), odd_one: word}
                yield replace(base, label=f"bf16, {odd_one} {word.removeprefix('*')}", types=types, reach=Reach.LATENT)


def scalar_variations(base: Combination, names: list[str], *, may_specialize: set[str]) -> Iterator[Combination]:
    """One integer at a time as 1 (specialised away), 0, 16 (both divisible by 16) and odd; float scalars as fp32 and fp64.

    names           parameters in order, for the attribute paths
    may_specialize  parameters that Triton's launcher specialises (no `do_not_specialize`)
    """
    for name, word in base.types.items():
        path = (names.index(name),) if name in names else None
        if path is None:
            continue
        if is_integer(word):
            others = {k: v for k, v in base.attributes.items() if k != path}
            yield replace(base, label=f"{base.label}, {name} odd", attributes=others, reach=Reach.LATENT)
            if name in may_specialize:
                divisible = {**others, path: [["tt.divisibility", 16]]}
                yield replace(base, label=f"{base.label}, {name} 16 or 0", attributes=divisible, reach=Reach.LATENT)
                types = {**base.types, name: "constexpr"}
                one = replace(base, label=f"{base.label}, {name} = 1", types=types, attributes=others, reach=Reach.LATENT)
                yield replace(one, constexprs={**base.constexprs, name: 1})
        elif word in ("fp32", "fp64"):
            other = "fp64" if word == "fp32" else "fp32"
            types = {**base.types, name: other}
            yield replace(base, label=f"{base.label}, {name} {other}", types=types, reach=Reach.LATENT)
