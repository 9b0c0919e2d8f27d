"""A dtype error explained: from the operands that the op really got, or, for checks made in Python
(GradScaler, FSDP, checkpoint, an attention backend), from the tensors in the failing frames. The
exception stays what it is: the explanation is a note on it.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...finding import Finding, Severity, join_names
from ...observe.operators import FLOATS, NARROW_FLOATS, Operator, iterate_floating
from ...observe.origin import (
    Site,
    call_sites,
    innermost_user_site,
    is_library_file,
    read_statement,
    short_path,
    site_place,
)
from ...observe.tape import ModuleCall
from .context import Context, at, say
from .origin import UNWATCHED, Origin

MENTIONS_DTYPE = re.compile(
    r"dtype|scalar ?type|\bdata"
    r" type|BFloat16|\bHalf\b|\bFloat\b|float(16|32|64)|\b(fp|bf)(16|32)\b|not implemented for"
    r" '|without "
    "overflow|floating|CheckpointError",
    re.IGNORECASE,
)
# ops that write one operand into another: the first is the destination, and its dtype rules
_WRITES = {
    "index_put", "_index_put_impl", "scatter", "scatter_add", "index_copy", "index_add", "masked_scatter", "copy", "index_fill", "setitem",
}  # fmt: skip
_READERS = 8  # operands shown in full
# on the exception itself: to keep exceptions would keep the frames and tensors of their tracebacks
_MARK = "_isotype_finding"


@dataclass(frozen=True, slots=True)
class Operand:
    """What an op was given."""

    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin
    writer: str

    @classmethod
    def of(cls, context: Context, label: str, tensor: torch.Tensor) -> Operand:
        return cls(
            label,
            tensor.dtype,
            tuple(tensor.shape),
            context.provenance.get(tensor),
            context.provenance.writer(tensor),
        )

    @property
    def word(self) -> str:
        return dtype_name(self.dtype)

    def chain(self) -> tuple[str, str]:
        """A finding's detail: dtype, shape, and how it came to them."""
        written = f"   last written by {self.writer}" if self.writer else ""
        return self.label, "\n".join(
            [f"{self.word}[{' '.join(map(str, self.shape))}]{written}", *self.origin.explain()]
        )


def _writes(op: str) -> bool:
    return op.strip("_") in _WRITES


def odd_one(operands: Sequence[Operand], census: Counter[torch.dtype], op: str) -> Operand:
    """The operand whose dtype is not what the model is made of; for a write, the source; else the
    widest.
    """
    strays = [operand for operand in operands[1:] if operand.dtype != operands[0].dtype]
    if strays and _writes(op):
        return strays[0]
    dtypes = {operand.dtype for operand in operands}
    usual = next((dtype for dtype, _ in census.most_common() if dtype in dtypes), None) or min(
        dtypes, key=lambda d: d.itemsize
    )
    strays = [operand for operand in operands if operand.dtype != usual] or list(operands)
    # something decided inside the program explains more than something that came in
    return min(strays, key=lambda operand: operand.origin.decider().kind == "input")


def share_of(census: Counter[torch.dtype]) -> str:
    """`99% of the parameters are bf16`."""
    if not census:
        return ""
    dtype, count = census.most_common(1)[0]
    return f"{100 * count / census.total():.0f}% of the parameters are {dtype_name(dtype)}"


_DECIDED = {
    "parameter": "parameter {what} is {word}",
    "buffer": "buffer {what} is {word}",
    "created": "{what} made {a} {word} tensor",
    "cast": "an explicit cast, {what}, made it {word}",
    "input": "{a} {word} tensor came from outside the trace",
}


def cause_of(odd: Operand, op: str, census: Counter[torch.dtype], autocast: str) -> str:
    """Who decided, and how it travelled to the op that failed."""
    decider = odd.origin.decider()
    place = decider.place()
    word = dtype_name(decider.dtype)
    decided = _DECIDED.get(decider.kind, "{what} returned {word}").format(
        what=decider.what, word=word, a="an" if word[0] in "aeiof" else "a"
    )
    parts = [decided + (f" ({place})" if place else "")]
    for step in odd.origin.chain():
        if step is decider:
            break
        if step.kind == "promotion":
            if step.writer:
                wrote = f"; the wider operand was last written by {step.writer}"
            else:
                wrote = ""
            parts.append(
                f"{step.what} promoted the other operand to {dtype_name(step.dtype)}"
                f" ({step.place()}{wrote})"
            )
        else:
            parts.append(f"{step.describe()} ({step.place()})")
    if odd.writer:
        parts.append(f"{odd.writer} wrote it last")
    parts.append(f"{op} then got it as {odd.label}")
    return ". ".join(part for part in ("; ".join(parts), share_of(census), autocast) if part)


def fix_of(
    odd: Operand, operands: Sequence[Operand], op: str, *, device: str, around: str | None
) -> str:
    """The ways out, the likeliest first.

    around  the call that autocast was on around before, and is not now; empty where autocast is on,
            None where it never was
    """
    decider = odd.origin.decider()
    other = next((operand for operand in operands if operand.dtype != odd.dtype), odd)
    wanted = str(other.dtype)
    at_line = str(decider.site or "the place where it is made")
    # autocast to fp32 is switched off with a warning
    half = next(
        (one.dtype for one in (other, odd) if one.dtype in (torch.bfloat16, torch.float16)), None
    )
    under = f'under torch.autocast("{device}", dtype={half})'
    if around and half is not None:
        ways = [f"run {around} {under}, as training does"]
    else:
        ways = []
    if _writes(op):
        ways.append(
            "cast the source to the destination's dtype where it is written: `.to(out.dtype)`,"
            f" here {other.word}"
        )
        ways.append(f"or allocate the destination (buffer, cache dtype) as {odd.word}")
    match decider.kind:
        case "created" if "without dtype=" in decider.what or "tensor" in decider.what:
            if "tensor" in decider.what:
                single = " (a Python float, e.g. from math.sqrt, never promotes)"
            else:
                single = ""
            ways.append(
                "give it the dtype of what it meets, `dtype=x.dtype`, or cast it: `.to(x.dtype)`,"
                f" here {wanted}{single}"
            )
        case "created":
            ways.append(f"cast it to the dtype of what it meets, `.to(q.dtype)`, here {wanted}")
        case "parameter" | "buffer":
            owner, _, leaf = decider.what.rpartition(".")
            if owner:
                whole = f"`model.get_submodule({owner!r}).to({wanted})`"
            else:
                whole = f"cast `{leaf}` with the rest of the model to {wanted}"
            ways.append(
                f"if {decider.what} was not meant to be {dtype_name(decider.dtype)}: {whole}"
            )
            forced = next(
                (step.site for step in odd.origin.chain() if step.kind == "promotion"), None
            )
            ways.append(
                "or keep it, and cast the results computed with it back: `.to(x.dtype)`"
                + (f" at {forced}" if forced else "")
            )
        case "cast":
            wide = dtype_name(decider.dtype)
            ways.append(
                f"cast back after the part that needs {wide}: `.to(x.dtype)`, here {wanted}, or"
                f" drop the cast at {at_line}"
            )
        case "input" if UNWATCHED in decider.what:
            ways.append(
                f"cast the operands to one dtype where they meet: `.to(x.dtype)`, here {wanted}"
            )
        case "input":
            ways.append(f"cast the input to the model's dtype before the call: `x.to({wanted})`")
        case _:
            ways.append(f"cast its result back: `.to({wanted})` at {at_line}")
    if half is not None and around is None:
        ways.append(f"or run the forward {under}")
    return "\n".join(ways)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"


def _mentions(error: BaseException) -> bool:
    return MENTIONS_DTYPE.search(f"{type(error).__name__}: {error}") is not None


class Failures:
    """Explains each failing op once, where it fails first. An error that the program catches is its
    own business.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # places and names in the chains that a failure shows: a silent finding need not repeat them
        self.told: set[Any] = set()

    def op_failed(self, error: Exception, op: Operator, args: tuple, kwargs: dict) -> None:
        """Called below the dispatcher, with what the op itself got."""
        self._explain(error, op.name, list(op.operands(args, kwargs)))

    def call_failed(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
        """Called above the dispatcher: a check made in a composite op or in Python."""
        name = getattr(func, "__name__", str(func))
        if name in ("backward", "grad"):
            return  # what failed is inside: an op has explained it, or the program's end will
        labels = _parameter_names(func)
        named = [
            (labels[i] if i < len(labels) else f"argument {i}", value)
            for i, value in enumerate(args)
        ]
        self._explain(error, name, list(iterate_floating(named + list(kwargs.items()))))

    def again(self, error: Exception, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Runs a failed forward that was not watched once more, to find the operands."""
        if hasattr(error, _MARK) or not _mentions(error):
            return
        context = self._context
        outer = context.stack
        context.modules.stack = [ModuleCall("", module)]
        try:
            with torch.random.fork_rng():
                module.forward(*args, **kwargs)
        except Exception as repeated:
            if (finding := getattr(repeated, _MARK, None)) is not None:
                self._attach(error, finding)
        finally:
            context.modules.stack = outer

    def escaped(self, error: BaseException) -> Finding | None:
        """The explanation of an exception that ended the program, or of what led to it; made now if
        no op failed (a check in Python).
        """
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and link not in chain:
            chain.insert(0, link)
            link = link.__cause__ or link.__context__
        explained: list[Finding] = [getattr(link, _MARK) for link in chain if hasattr(link, _MARK)]
        for link in chain if not explained else ():
            finding = explain_refusal(self._context, link) if _mentions(link) else None
            if finding is not None:
                self._attach(link, finding)
                return finding
        return explained[0] if explained else None

    def _attach(self, error: BaseException, finding: Finding) -> None:
        error.add_note(finding.render())
        setattr(error, _MARK, finding)

    def _explain(
        self, error: Exception, name: str, tensors: list[tuple[str, torch.Tensor]]
    ) -> None:
        if (
            not isinstance(error, (RuntimeError, ValueError, TypeError))
            or hasattr(error, _MARK)
            or not tensors
        ):
            return
        mixed = len({t.dtype for _, t in tensors}) > 1
        if not MENTIONS_DTYPE.search(str(error)) and not (mixed and "same" in str(error)):
            return  # the complaint is about something else (a shape, an index)
        self._context.names.find_live()
        operands = [Operand.of(self._context, label, tensor) for label, tensor in tensors]
        for operand in operands:
            for origin in operand.origin.chain():
                self.told |= {origin.site, origin.what} - {None}
        self._attach(error, self._finding(error, name, operands, mixed))

    def _finding(
        self, error: Exception, name: str, operands: Sequence[Operand], mixed: bool
    ) -> Finding:
        context = self._context
        stack = call_sites(3)
        site, module, node = context.here()
        census = context.census_of_failure()
        device = context.device
        odd = odd_one(operands, census, name)
        state, before = context.autocast.state()
        on = torch.is_autocast_enabled(device)
        generate = not on and any(
            s.function.rpartition(".")[2] in ("generate", "_sample") for s in stack
        )
        called = context.calling_name()
        title = f"{called} ({name})" if called and called != name.strip("_") else name
        if (leak := context.defaults.explain()) is not None:
            cause = leak.cause
            fix = leak.fix
        elif re.match(r"value cannot be converted to type", str(error)):
            cause = (
                f"a number given to {name} is beyond the range of {odd.word}, the dtype of the"
                f" tensor that takes it: `{read_statement(site) if site is not None else ''}`. A limit"
                " such as torch.finfo(torch.float32).min, or -1e9 for fp16, was hard-coded for"
                " another dtype"
            )
            fix = "use the limit of the tensor's own dtype: torch.finfo(x.dtype).min"
        elif not mixed and "not implemented for" in str(error):
            cause = (
                f"{name} has no {odd.word} kernel on {device}. {cause_of(odd, name, census, '')}"
            )
            fix = (
                f"run this part in fp32 or bf16 on {device}: `.to(torch.float32)`, or"
                " torch.autocast"
            )
        else:
            if before and not on:
                outside = "Autocast was on when this module ran before and is off here"
            else:
                outside = ""
            if outside and generate:
                outside += (
                    ": generate() runs outside the autocast that the trainer puts around its own"
                    " forward"
                )
            if generate:
                around = "generate() (or the evaluation)"
            elif outside:
                around = "this call"
            elif on:
                around = ""
            else:
                around = None
            cause = cause_of(odd, name, census, outside)
            fix = fix_of(odd, operands, name, device=device, around=around)
            cause += self._casts_before(operands)
        details = at("called at", own) if (own := innermost_user_site(stack)) != site else ()
        details += (("phase", f"backward of {node}" if node else "forward"), ("autocast", state))
        details += tuple(operand.chain() for operand in operands[:_READERS])
        if rest := Counter(operand.word for operand in operands[_READERS:]):
            details += (
                (
                    "further",
                    (
                        f"{rest.total()} operands:"
                        f" {', '.join(f'{count} {word}' for word, count in rest.items())}"
                    ),
                ),
            )
        return Finding(
            code="TR001",
            severity=Severity.ERROR,
            message=(
                f"{title} {'got' if mixed else 'refused'}"
                f" {' and '.join(dict.fromkeys(operand.word for operand in operands))}"
            ),
            place=site_place(site, module),
            cause=cause,
            fix=fix,
            observed=_first_line(error),
            details=details,
        )

    def _casts_before(self, operands: Sequence[Operand]) -> str:
        """In words, where the model was cast after something (an optimizer state, a cache) was made
        from it.
        """
        context = self._context
        now = {name: tensor.dtype for _, name, tensor in context.names.tensors()}
        steps = [
            step
            for operand in operands
            for step in operand.origin.chain()
            if step.kind in ("parameter", "buffer")
        ]
        changed = context.parameters.of_names({step.what for step in steps})
        stale = any(
            step.kind == "parameter" and step.dtype != now.get(step.what, step.dtype)
            for step in steps
        )
        if changed and stale:
            return f". {changed}; what was made from it before kept the old dtype"
        return ""


def _parameter_names(func: Any) -> list[str]:
    """Names of a torch function's positional arguments: from its signature, or for a builtin from
    the first line of its documentation.
    """
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        found = re.match(r"\s*\w+\(([^)]*)\)", getattr(func, "__doc__", None) or "")
        if found:
            return [part.partition("=")[0].strip() for part in found[1].split(",")]
        return []


Chains = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Evidence:
    """What the frames of a traceback hold.

    stack       lines, innermost first
    parameters  dtype -> names
    tensors     the other tensors of the innermost frame that has any, by the name of their variable
    """

    stack: list[Site]
    parameters: dict[torch.dtype, list[str]] = field(default_factory=lambda: defaultdict(list))
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)


def _tensors_in(value: Any, label: str, depth: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dtype in FLOATS:
            yield label, value
    elif depth and isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(item, f"{label}[{key!r}]", depth - 1)
    elif depth and isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from _tensors_in(group["params"], label, 1)


def gather(context: Context, error: BaseException) -> Evidence:
    """The tensors that the failing frames held, innermost first, until a frame has some."""
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    evidence = Evidence([Site(frame.f_code, line) for frame, line in frames])
    named = {
        id(tensor): name for kind, name, tensor in context.names.tensors() if kind == "parameter"
    }
    for frame, _ in frames:
        for label, value in frame.f_locals.items():
            for spot, tensor in _tensors_in(value, label):
                if isinstance(tensor, torch.nn.Parameter) or id(tensor) in named:
                    name = named.get(id(tensor)) or f"{spot} (shape {tuple(tensor.shape)})"
                    if name not in (known := evidence.parameters[tensor.dtype]):
                        known.append(name)
                    if (
                        tensor.requires_grad
                        and tensor.dtype == torch.float16
                        and name not in evidence.trainable
                    ):
                        evidence.trainable.append(name)
                else:
                    evidence.tensors.append((spot, tensor))
        if evidence.parameters or evidence.tensors:
            break
    return evidence


def explain_refusal(context: Context, error: BaseException) -> Finding | None:
    """A finding for a Python-level refusal, or None when the frames hold nothing to explain it by."""
    context.names.find_live()
    evidence = gather(context, error)
    own = evidence.stack and not is_library_file(evidence.stack[0].file)
    if (
        own
        and isinstance(error, AssertionError)
        and "dtype" not in read_statement(evidence.stack[0])
    ):
        # the program's own complaint, about something else than the dtype of a tensor at hand
        return None
    for pattern, explain in _KNOWN:
        if (
            re.search(pattern, f"{type(error).__name__}: {error}")
            and (finding := explain(context, error, evidence)) is not None
        ):
            return finding
    return _from_tensors(context, error, evidence)


def _finding(
    context: Context,
    error: BaseException,
    evidence: Evidence,
    *,
    symbol: str = "",
    code: str = "TR002",
    more: Chains = (),
    **words: Any,
) -> Finding:
    raised = evidence.stack[0] if evidence.stack else None
    own = innermost_user_site(evidence.stack)
    if raised is not None and raised != own:
        details = [("raised by", f"{raised.function}, {short_path(raised.file)}:{raised.line}")]
    else:
        details = []
    details += at("called at", own)
    details += [("autocast", context.autocast.state()[0])]
    details += [
        (dtype_name(dtype), join_names(names)) for dtype, names in evidence.parameters.items()
    ]
    return replace(
        say(code, site_place(own or raised, symbol), (*details, *more), **words),
        observed=_first_line(error),
    )


def _unscale(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """GradScaler.unscale_: the gradients, hence the trainable parameters, are fp16."""
    trainable = [
        (n, p)
        for kind, n, p in context.names.tensors()
        if kind == "parameter" and p.requires_grad and p.dtype == torch.float16
    ]
    low = [n for n, _ in trainable] or evidence.trainable
    if not low:
        return None
    changed = next((line for _, p in trainable if (line := context.parameters.of(p))), "")
    return _finding(
        context,
        error,
        evidence,
        symbol=low[0],
        kind="unscale",
        count=len(low),
        shown=join_names(low),
        change=changed,
    )


def _uniform(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """FSDP: one unit flattens its parameters into one tensor (FSDP1) or one group (FSDP2)."""
    if len(evidence.parameters) < 2:
        evidence.parameters = defaultdict(list)
        for kind, name, tensor in context.names.tensors():
            if kind == "parameter" and tensor.dtype in FLOATS:
                evidence.parameters[tensor.dtype].append(name)
    groups = evidence.parameters
    if len(groups) < 2:
        return None
    sizes = {name: tensor.numel() for _, name, tensor in context.names.tensors()}
    odd, *_, usual = sorted(
        groups, key=lambda dtype: sum(sizes.get(name, 1) for name in groups[dtype])
    )
    adapters = any("lora" in name.lower() or "adapter" in name.lower() for name in groups[odd])
    return _finding(
        context,
        error,
        evidence,
        symbol=groups[odd][0],
        kind="uniform",
        dtypes=" and ".join(dtype_name(d) for d in groups),
        odd=dtype_name(odd),
        usual=dtype_name(usual),
        adapters="LoRA adapters" if adapters else "",
        shown=join_names(groups[odd]),
        others=join_names(groups[usual]),
    )


_SAVED = re.compile(
    r"saved metadata: \{.*?'dtype': torch\.(\w+).*?recomputed metadata: \{.*?'dtype': torch\.(\w+)",
    re.DOTALL,
)


def _checkpoint(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """torch.utils.checkpoint: the recomputed tensors have another dtype than the saved ones."""
    recomputed: Finding | None = context.autocast.recomputation(_first_line(error))
    if recomputed is not None:
        return recomputed
    differing = next((pair for pair in _SAVED.findall(str(error)) if pair[0] != pair[1]), None)
    if differing is None:
        return None
    return _finding(
        context,
        error,
        evidence,
        code="TR003",
        saved=dtype_name(differing[0]),
        recomputed=dtype_name(differing[1]),
    )


_KNOWN: tuple[tuple[str, Callable[[Context, BaseException, Evidence], Finding | None]], ...] = (
    (r"unscale FP16|unscale .*fp16", _unscale),
    (r"uniform (original parameter )?dtype|same dtype.*FSDP|FSDP.*same dtype", _uniform),
    (r"CheckpointError|different metadata than during the forward", _checkpoint),
)


def _from_tensors(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """Any other check: the tensors of the failing frame with their chains."""
    operands = [Operand.of(context, label, tensor) for label, tensor in evidence.tensors[:12]]
    if not operands:
        return None
    census = context.census_of_failure()
    usual = census.most_common(1)[0][0] if census else None
    only_low = (
        re.search(r"(only|must).*(fp16|bf16|half|bfloat16|float16)", str(error), re.IGNORECASE)
        is not None
    )
    odd = next(
        (
            o
            for o in operands
            if (
                o.dtype not in NARROW_FLOATS if only_low else usual is not None and o.dtype != usual
            )
        ),
        operands[0],
    )
    name = evidence.stack[0].function
    around = "" if context.autocast.state()[0].startswith("on") else None
    cause = cause_of(odd, name, census, "")
    fix = fix_of(odd, operands, name, device=context.device, around=around)
    chains = tuple(o.chain() for o in sorted(operands, key=lambda o: o is not odd)[:4])
    return _finding(
        context,
        error,
        evidence,
        more=chains,
        name=name,
        word=odd.word,
        label=odd.label,
        cause=cause,
        fix=fix,
    )
