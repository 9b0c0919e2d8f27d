"""The families of errors: sheets (`families/*.txt`, read by `doctor.sheets`), two families that are code, and their pages.

A section is headed by the operators that refused, with `;` between them, and has a `message`; a rank is a cause's score, its fields are
`why`, `fix` and `seen`, the evidence. `+ outside autocast -2 if TEST` stands for causes that several families share, their scores moved so.
Two terms are tests of their own: `left > right`, a wider dtype, and `frames ~ regex`, a frame of the traceback, `{frame}` from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...dtypes import torch_word
from ...finding import Severity
from ...pages.rules import docstring_page
from ..sheets import Entry, sections
from ..sheets import Facts as Known
from .family import FAMILIES, Cause, Explained, Seen, custom_backward, family, is_floating, outside_autocast, wider
from .recognise import dtype_word
from .situation import failing_call

_SHARED: dict[str, Callable[[Seen, float], Iterator[Cause]]] = {
    "outside autocast": outside_autocast,
    "custom backward": lambda seen, _: custom_backward(seen),
}
_READINGS: dict[str, Callable[[str], Any]] = {
    " as dtype": dtype_word,
    " as torch": torch_word,
    " as mixed": lambda word: word.replace("-true", "-mixed"),
    " without spaces": str.strip,
    " as list": lambda words: ", ".join(sorted(word.strip().removeprefix("torch.") for word in words.split(","))),
    " as printed dtype": lambda text: next((dtype_word(word) for word in re.findall(r"dtype=(torch\.\w+)", text)), ""),
    " in lower case": str.lower,
    " in brief": lambda text: " ".join(text.split())[:160],
    " in 160": lambda text: text[:160],
    " without quotes": lambda text: text.replace("'", ""),
    " is floating": is_floating,
}


class Facts(Known):
    """What an incident showed, by name: a sheet's own words, dtypes by role, words of the text, flags of the situation, and the following.

    operator, text, half, torch_half, autocast  as in `Seen`; `autocast is on` is the flag
    where FLAG        the frame that proves a flag, in words
    word NAME         a word of the text, where a dtype's role has the same name
    NAME as dtype, NAME as list, and the other endings of `_READINGS`   a word, read so
    first of set, second of set   the dtypes of a set that the text prints
    package NAME      whether a frame lies in it
    call, in_place, product   the failing call; where it is a product in place; where it is a product of two tensors
    user, inner, frame        the innermost frame of the user's code, of all, and the one that a test found; its `place` and `line`
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.frame: Any = None

    def get(self, name: str) -> Any:
        seen, situation = self.seen, self.seen.situation
        for known in (self.made, seen.dtypes, seen.words):
            if name in known:
                return known[name]
        for ending, read in _READINGS.items():
            if name.endswith(ending):
                word = self.get(name.removesuffix(ending))
                return None if word is None else read(word)
        kind, _, rest = name.partition(" ")
        match kind:
            case "where":
                return situation.where(rest)
            case "word":
                return seen.words.get(rest)
            case "first" | "second" if rest and "set" in seen.words:
                words = [dtype_word(word) for word in seen.words["set"].split(",")]
                return words[0] if kind == "first" else words[1] if len(words) > 1 else "another"
            case "package":
                return rest in situation.packages
            case "autocast" if rest:
                return "autocast" in situation
            case "operator" | "text" | "half" | "torch_half" | "autocast":
                return getattr(seen, name)
            case "call" | "in_place" | "product":
                call = failing_call(situation)
                fits = call and (kind == "call" or (call.is_product and (call.in_place if kind == "in_place" else len(call.tensors) == 2)))
                return call if fits else None
            case "user" | "inner" | "frame":
                return {"user": situation.users, "inner": situation.innermost, "frame": self.frame}[kind]
            case "place" | "line" if (f := self.frame) is not None:
                return f"{f.function if kind == 'place' else f.code or f.function} at {f.file}:{f.line}"
        return name in situation or None

    def holds_specially(self, term: str) -> bool | None:
        left, found, right = term.partition(" > ")
        if found:
            return wider(str(self.get(left)), str(self.get(right)))
        if term.startswith("frames ~ "):
            frame = self.seen.situation.mentions(term.removeprefix("frames ~ "))
            self.frame = frame or self.frame
            return frame is not None
        return None


def _explain(entries: list[Entry], seen: Seen) -> Explained:
    facts, head = Facts(seen), entries[0]
    head.make(facts)
    causes: list[Cause] = []
    for entry in entries[1:]:
        if shared := re.fullmatch(r"\+ (.+?)(?: (-?\d+))?(?: if (.+))?", entry.title):
            causes += _SHARED[shared[1]](seen, float(shared[2] or 0)) if facts.holds(shared[3]) else ()
        elif score := entry.rank(facts):
            why, fix, because = (entry.first(name, facts) for name in ("why", "fix", "seen"))
            causes.append(Cause(name=facts.say(entry.title), score=float(score), why=why, fix=fix, because=because))
    severity = Severity.parse(head.first("severity", facts) or "error")
    return Explained(message=head.first("message", facts), causes=causes, severity=severity)


def register(path: Path) -> None:
    """Makes the families of one sheet."""
    for section in sections(path, ranks=r"[\d.]+", fields="message|severity|why|fix|seen"):

        def explained(seen: Seen, entries: list[Entry] = section.entries) -> Explained:
            return _explain(entries, seen)

        explained.__doc__ = section.page
        family(section.code, *section.name.split("; "))(explained)


@family("EX029", "demanded dtype")
def demanded(s: Seen) -> Explained:
    """An operator takes one dtype, and got another

    **Why it matters.** Extension kernels (quantised products, fp8 scales, fused attention) are compiled for one or two dtypes and
    assert them; the text names what they want, seldom what they got.

    **Example.** `Expected A.dtype() == at::kBFloat16 to be true`: quanto's int4 product takes bf16 activations only, and a run in fp16
    or fp32 hands it others.

    **What to do.** Run in the dtype it takes (`mixed_precision`, `dtype=` when loading), or cast next to the call.
    """
    only = ", ".join(dtype_word(word) for word in s.words.get("only", "").split(",") if word.strip()) or "another dtype"
    if "scalar" in s.text and s.words.get("only") == "float":
        only = "fp32"
    name = s.words.get("name", "an operator").strip()
    met = dtype_word(s.words["met"]) if "met" in s.words else None
    half = "torch.float16" if only == "fp16" else "torch.float32" if only == "fp32" else "torch.bfloat16"
    cast = f"cast next to the call: {name}.to({half})" if f"{name}.dtype" in s.text or "scale_" in name else ""
    if "call" in s.words:
        cast = f"cast next to the call: torch.{name}(x.float()).to(x.dtype)"
    whole = f"load and train with dtype={half}" if only != "fp32" else ""
    int4 = name in ("A", "scales") and only == "bf16"
    return Explained(
        message=f"{name} takes {only}" + (f", not {met}" if met else ""),
        causes=[
            *outside_autocast(s),
            Cause(
                name=f"{name} exists for {only} only",
                score=3,
                why=(
                    f"{name} is checked against {only} and has another dtype"
                    + (f" ({met})" if met else "")
                    + (
                        ": it was computed in half precision (bf16 or fp16 weights, or autocast)"
                        if "call" in s.words
                        else ": the run's precision is another, an fp32 norm or adapter promoted it, or `model.to(dtype)` cast what has to "
                        "stay (scales)"
                    )
                    + ("; torch's int4 weight-only product (quanto, torchao) takes bf16 on CUDA" if int4 else "")
                ),
                fix=", or ".join(part for part in (cast, whole) if part) or f"cast next to the call: x.to({half})",
                because="the text names it",
            ),
        ],
    )


@family("EX034", "paired arguments", "comparison", "interpolation", "storage")
def paired_arguments(s: Seen) -> Explained:
    """A function's arguments have two dtypes

    **Why it matters.** Arithmetic promotes; much else does not: `grid_sample`, `embedding_bag`, `lerp`, `cdist`, `torch.allclose`,
    `assert_close`, `set_` compare the dtypes of their arguments and stop.

    **Example.** `F.grid_sample(features, points)` with bf16 features and an fp32 grid; an average of weights (EMA) in fp32 whose model was
    cast to bf16 after the average was made.

    **What to do.** Cast one argument to the other's dtype at the call, or both to fp32 where the value matters (comparisons, averages).
    """
    left, right = s.dtype("left", s.dtype("expected")), s.dtype("right", s.dtype("got"))
    call = failing_call(s.situation)
    name = s.words.get("checker") or (call.function if call else "") or s.words.get("name") or "this function"
    if s.operator == "comparison":
        cause = Cause(
            name="values of two dtypes compared",
            score=3,
            why=(
                f"{name} compares the dtype too, and one side is {left}, the other {right}: a computed value (autocast, a cast model) "
                "beside a reference in fp32"
            ),
            fix=(
                "compare in one dtype, with the tolerance of the narrower: torch.testing.assert_close(a.float(), b.float(), rtol=1.6e-2, "
                "atol=1e-2), or check_dtype=False there; torch.allclose(a.float(), b.float())"
            ),
            because="the text names both",
        )
        return Explained(message=f"a comparison of {left} with {right}", causes=[cause])
    if s.operator == "storage":
        cause = Cause(
            name="a tensor's storage replaced by one of another dtype",
            score=3,
            why=f"set_ exchanges the memory behind a tensor and keeps its dtype: it was given {right} and is {left}",
            fix="copy, which casts: p.data.copy_(new); or cast before: p.data.set_(new.to(p.dtype))",
            because="the text names both",
        )
        return Explained(message=f"set_ of a {right} tensor into a {left} one", causes=[cause])
    if s.operator == "interpolation":
        return Explained(message=f"lerp of {left} with {right}", causes=_interpolation(s, left, right))
    if name.startswith("mps."):
        unpromoted = Cause(
            name="an operand that MPS does not promote",
            score=3,
            why=(
                f"the graph compiler of MPS takes one dtype where CUDA and the CPU promote: {left} meets {right}. The odd one is often a "
                "tensor of one element (a learning rate, a beta, a scale) that is kept in fp32"
            ),
            fix="cast it before the operation: scale = scale.to(x.dtype), or use a Python number",
            because="the text is of MPS's graph compiler",
        )
        return Explained(message=f"{name} of {left} and {right}", causes=[unpromoted])
    named = [s.words[key] for key in ("left", "right") if key in s.words]
    other = "b.astype(a.dtype)" if re.match(r"(?:lax|jnp|jax)\.", name) else "tf.cast(b, a.dtype)" if "zero-based" in s.text else ""
    pair = named if len(named) == 2 else list(call.tensors[:2]) if call else []
    roles = f"{pair[0]} and {pair[1]}" if pair else "its arguments"
    if len(named) == 2:
        roles = f"{named[0]} is {left}, {named[1]} {right}"
    else:
        roles = (
            f"{roles} are {left} and {right}" if "right" in s.dtypes else f"{roles} are of {left} and {right}, in one order or the other"
        )
    if other:
        cast = other
    elif pair and wider(right, left):
        cast = f"{pair[1]}.to({pair[0]}.dtype)"
    elif pair:
        cast = f"{pair[0]}.to({pair[1]}.dtype)"
    else:
        cast = "b.to(a.dtype)"
    return Explained(
        message=f"{name} of {left} and {right}",
        causes=[
            Cause(
                name="arguments of two dtypes",
                score=3,
                why=f"{name} takes one dtype and casts nothing: {roles}; what was made in fp32 (a grid, weights, a softmax) met {s.half}",
                fix=f"cast one at the call: {cast}, or both to fp32 where the precision matters",
                because=call.place if call else "the text names the arguments" if named else "",
            )
        ],
    )


def _interpolation(s: Seen, left: str, right: str) -> list[Cause]:
    call = failing_call(s.situation)
    causes = [
        Cause(
            name="ends of an interpolation differ" if s.words.get("which") != "weight" else "interpolation weight in another dtype",
            score=3,
            why=f"lerp takes one dtype for both ends and a tensor weight: it is {left}, the {s.words.get('which', 'other')} {right}",
            fix="cast at the call: torch.lerp(a, b.to(a.dtype), weight.to(a.dtype)); a Python number as weight fits every dtype",
            because="the text names the argument" + (f"; {call.frame.code}" if call else ""),
        )
    ]
    if "averaging" in s.situation:
        causes.append(
            Cause(
                name="the average and the model have two dtypes",
                score=5,
                why=(
                    f"an average of weights (EMA, SWA) is kept in {left} and the model's weights are {right}: the model was cast after the "
                    "average was made, or the average loaded in another dtype"
                ),
                fix=(
                    "make the average after the cast; to keep it in fp32 (in bf16 small steps round away) give it fp32 weights: "
                    "average.lerp_(p.float(), 1 - decay)"
                ),
                because=f"averaging in {s.situation.where('averaging')}",
            )
        )
    return causes


_NOT_DTYPE = """# EX000: not a dtype error

The text holds an error (or none), and nothing in it speaks of a disagreement between dtypes. Shapes, devices, memory and missing keys are
other matters; isotype says so rather than guess.

If you think it is one after all: paste the whole traceback, from its first line, or run the program under `isotype doctor trace`.
"""


def codes() -> list[str]:
    return sorted({"EX000", *(code for code, _ in FAMILIES.values())})


def page(code: str) -> str | None:
    if code == "EX000":
        return _NOT_DTYPE
    return next((docstring_page(code, function) for known, function in FAMILIES.values() if known == code), None)


for _sheet in sorted((Path(__file__).parent / "families").glob("*.txt")):
    register(_sheet)
