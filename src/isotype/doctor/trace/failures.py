"""A dtype error explained: from the operands that the op really got, or, for checks made in Python (GradScaler, FSDP, checkpoint, an
attention backend), from the tensors in the failing frames. The exception stays what it is: the explanation is a note on it.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...finding import Finding, Severity, listed
from ...observe.operators import FLOATS, LOW, Operator, floating
from ...observe.origin import Site, callers, in_library, place_of, short, statement, users_line
from ...observe.tape import Running
from .context import Context, Recompute, at, say
from .operands import Operand, cause_of, dtypes_of, fix_of, odd_one
from .origin import Origin

MENTIONS_DTYPE = re.compile(
    r"dtype|scalar ?type|\bdata type|BFloat16|\bHalf\b|\bFloat\b|float(16|32|64)|\b(fp|bf)(16|32)\b|not implemented for '|without "
    "overflow|floating|CheckpointError",
    re.IGNORECASE,
)
_ENGINE = frozenset({"backward", "grad"})
_READERS = 8  # operands shown in full


_MARK = "_isotype_finding"  # on the exception itself: to keep exceptions would keep the frames and tensors of their tracebacks
_CAUGHT = 32  # findings kept for errors that the program catches


class Failures:
    """Explains each failing op once, where it fails first; which of them escaped the program is known only at the end."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: list[Finding] = []
        self.told: set[Any] = set()  # places and names in the chains that a failure shows: a silent finding need not repeat them

    def op_failed(self, error: Exception, op: Operator, args: tuple, kwargs: dict) -> None:
        """Called below the dispatcher, with what the op itself got."""
        self._explain(error, op.name, list(op.operands(args, kwargs)))

    def call_failed(self, error: Exception, func: Any, args: tuple, kwargs: dict | None) -> None:
        """Called above the dispatcher: a check made in a composite op or in Python."""
        name = getattr(func, "__name__", str(func))
        if name in _ENGINE:
            return  # what failed is inside: an op has explained it, or the program's end will
        labels = _parameter_names(func)
        named = [(labels[i] if i < len(labels) else f"argument {i}", value) for i, value in enumerate(args)] + list((kwargs or {}).items())
        self._explain(error, name, list(floating(named)))

    def again(self, error: Exception, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Runs a failed forward that was not watched once more, to find the operands."""
        if hasattr(error, _MARK) or not MENTIONS_DTYPE.search(f"{type(error).__name__}: {error}"):
            return
        context = self._context
        outer, context.modules.stack = context.stack, [Running("", module)]
        try:
            with torch.random.fork_rng():
                module.forward(*args, **kwargs)
        except Exception as repeated:
            if (finding := getattr(repeated, _MARK, None)) is not None:
                error.add_note(finding.render())
                setattr(error, _MARK, finding)
        finally:
            context.modules.stack = outer

    def escaped(self, error: BaseException) -> Finding | None:
        """The explanation of an exception that ended the program, or of what led to it; made now if no op failed (a check in Python)."""
        chain = _causes(error)
        for link in reversed(chain):
            if (found := getattr(link, _MARK, None)) is not None:
                explained: Finding | None = found
                return explained
        for link in reversed(chain):
            finding = explain_refusal(self._context, link) if MENTIONS_DTYPE.search(f"{type(link).__name__}: {link}") else None
            if finding is not None:
                self._attach(link, finding)
                return finding
        return None

    def caught(self, error: BaseException | None) -> list[Finding]:
        """The explanations of errors that the program itself dealt with."""
        left = [getattr(link, _MARK, None) for link in _causes(error)] if error is not None else []
        return [finding for finding in self._seen if not any(finding is other for other in left)]

    def _attach(self, error: BaseException, finding: Finding) -> None:
        error.add_note(finding.render())
        setattr(error, _MARK, finding)
        if len(self._seen) < _CAUGHT:
            self._seen.append(finding)

    def _explain(self, error: Exception, name: str, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if not isinstance(error, (RuntimeError, ValueError, TypeError)) or hasattr(error, _MARK):
            return
        if not tensors or not (len({t.dtype for _, t in tensors}) > 1 or MENTIONS_DTYPE.search(str(error))):
            return
        if not MENTIONS_DTYPE.search(str(error)) and "same" not in str(error):
            return  # mixed operands, but the complaint is about something else (a shape, an index)
        self._context.names.find_live()
        operands = [Operand.of(self._context, label, tensor) for label, tensor in tensors]
        for operand in operands:
            for origin in operand.origin.chain():
                self.told |= {origin.site, origin.what} - {None}
        self._attach(error, self._finding(error, name, operands))

    def _stale_origins(self, operands: Sequence[Operand]) -> list[tuple[Origin, torch.dtype]]:
        """Parameters in the chains, each with the dtype that it has now."""
        now = {name: tensor.dtype for _, name, tensor in self._context.names.tensors()}
        return [
            (step, now[step.what])
            for operand in operands
            for step in operand.origin.chain()
            if step.kind == "parameter" and step.what in now
        ]

    def _finding(self, error: Exception, name: str, operands: Sequence[Operand]) -> Finding:
        context = self._context
        stack = callers(3)
        site, module, node = context.here()
        mixed = len({operand.dtype for operand in operands}) > 1
        value = re.match(r"value cannot be converted to type", str(error)) is not None
        odd = odd_one(operands, context.census_of_failure(), name)
        on = torch.is_autocast_enabled(context.device)
        state, before = context.autocast.state()
        generate = next((s for s in stack if s.function.rpartition(".")[2] in ("generate", "_sample")), None) is not None
        leak = context.defaults.explain()
        called = context.calling_name()
        title = f"{called} ({name})" if called and called.strip("_") != name.strip("_") else name
        others = [operand for operand in operands if operand is not odd]
        line = statement(site) if site is not None else ""
        if leak is not None:
            cause, fix = leak.cause, leak.fix
        elif value:
            cause = (
                f"a number given to {name} is beyond the range of {odd.word}, the dtype of the tensor that takes it: `{line}`. "
                "A limit such as torch.finfo(torch.float32).min, or -1e9 for fp16, was hard-coded for another dtype"
            )
            fix = "use the limit of the tensor's own dtype: torch.finfo(x.dtype).min"
        elif not mixed and "not implemented for" in str(error):
            cause = f"{name} has no {odd.word} kernel on {context.device}. {cause_of(odd, name, context.census_of_failure(), '')}"
            fix = f"run this part in fp32 or bf16 on {context.device}: `.to(torch.float32)`, or torch.autocast"
        else:
            outside = ""
            if before and not on:
                outside = "Autocast was on when this module ran before and is off here" + (
                    ": generate() runs outside the autocast that the trainer puts around its own forward" if generate else ""
                )
            cause = cause_of(odd, name, context.census_of_failure(), outside)
            fix = fix_of(
                odd, others, name, autocast_on=on, autocast_before=before and not on, device=context.device, generate=generate and not on
            )
            named = {step.what for operand in operands for step in operand.origin.chain() if step.kind in ("parameter", "buffer")}
            changed = context.parameters.of_names(named)
            # only where it bears on the failure: the model was cast after something (an optimizer state, a cache) was made from it
            if changed and any(step.dtype != known for step, known in self._stale_origins(operands)):
                cause += f". {changed}; what was made from it before kept the old dtype"
        return Finding(
            code="TR001",
            severity=Severity.ERROR,
            message=f"{title} got {dtypes_of(operands)}" if mixed else f"{title} refused {dtypes_of(operands)}",
            place=place_of(site, module),
            cause=cause,
            fix=fix,
            observed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            details=_details(operands, node, state, users_line(stack), site),
        )


def _parameter_names(func: Any) -> list[str]:
    """Names of a torch function's positional arguments: from its signature, or for a builtin from the first line of its documentation."""
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        found = re.match(r"\s*\w+\(([^)]*)\)", getattr(func, "__doc__", None) or "")
        return [part.partition("=")[0].strip() for part in found[1].split(",")] if found else []


def _causes(error: BaseException) -> list[BaseException]:
    """The exception and those it was raised from, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _details(operands: Sequence[Operand], node: str, state: str, own: Site | None, site: Site | None) -> tuple[tuple[str, str], ...]:
    details = []
    if own is not None and own != site:
        details.append(("called at", f"{own}: {own.text}"))
    details.append(("phase", f"backward of {node}" if node else "forward"))
    details.append(("autocast", state))
    for operand in operands[:_READERS]:
        details.append((operand.label, "\n".join([operand.describe(), *operand.origin.explain()])))
    if len(operands) > _READERS:
        rest = operands[_READERS:]
        words = ", ".join(f"{sum(o.word == w for o in rest)} {w}" for w in dict.fromkeys(o.word for o in rest))
        details.append(("further", f"{len(rest)} operands: {words}"))
    return tuple(details)


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
    trainable: dict[torch.dtype, list[str]] = field(default_factory=lambda: defaultdict(list))


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]


def _tensors_in(value: Any, label: str, depth: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dtype in FLOATS:
            yield label, value
    elif depth and isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{label}[{index}]", depth - 1)
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{label}[{key!r}]", depth - 1)
    elif depth and isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from _tensors_in(group["params"], label, 1)


def gather(context: Context, error: BaseException) -> Evidence:
    """The tensors that the failing frames held, innermost first, until a frame has some."""
    frames = _frames(error)
    evidence = Evidence([Site(frame.f_code, line) for frame, line in frames])
    named = {id(tensor): name for kind, name, tensor in context.names.tensors() if kind == "parameter"}
    for frame, _ in frames:
        for label, value in frame.f_locals.items():
            for spot, tensor in _tensors_in(value, label):
                if isinstance(tensor, torch.nn.Parameter) or id(tensor) in named:
                    name = named.get(id(tensor)) or f"{spot} (shape {tuple(tensor.shape)})"
                    for group in (evidence.parameters, evidence.trainable) if tensor.requires_grad else (evidence.parameters,):
                        if name not in group[tensor.dtype]:
                            group[tensor.dtype].append(name)
                else:
                    evidence.tensors.append((spot, tensor))
        if evidence.parameters or evidence.tensors:
            break
    return evidence


def explain_refusal(context: Context, error: BaseException) -> Finding | None:
    """A finding for a Python-level refusal, or None when the frames hold nothing to explain it by."""
    context.names.find_live()
    evidence = gather(context, error)
    text = str(error)
    own = evidence.stack and not in_library(evidence.stack[0].file)
    if own and isinstance(error, AssertionError) and "dtype" not in statement(evidence.stack[0]):
        return None  # the program's own complaint, about something else than the dtype of a tensor at hand
    for pattern, explain in _KNOWN:
        if re.search(pattern, f"{type(error).__name__}: {text}"):
            finding = explain(context, error, evidence)
            if finding is not None:
                return finding
    return _from_tensors(context, error, evidence)


def _finding(
    context: Context, error: BaseException, evidence: Evidence, *, symbol: str = "", code: str = "TR002", more: Chains = (), **words: Any
) -> Finding:
    raised = evidence.stack[0] if evidence.stack else None
    own = users_line(evidence.stack)
    details = [("raised by", f"{raised.function}, {short(raised.file)}:{raised.line}")] if raised is not None and raised != own else []
    details += at("called at", own)
    details += [("autocast", context.autocast.state()[0])]
    details += [(dtype_name(dtype), listed(names)) for dtype, names in evidence.parameters.items()]
    found = say(code, place_of(own or raised, symbol), (*details, *more), **words)
    return replace(found, observed=_first_line(error))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _unscale(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """GradScaler.unscale_: the gradients, hence the trainable parameters, are fp16."""
    trainable = [(n, p) for kind, n, p in context.names.tensors() if kind == "parameter" and p.requires_grad and p.dtype == torch.float16]
    low = [n for n, _ in trainable] or (evidence.trainable or evidence.parameters).get(torch.float16, [])
    if not low:
        return None
    changed = next((line for _, p in trainable if (line := context.parameters.of(p))), "")
    return _finding(context, error, evidence, symbol=low[0], kind="unscale", count=len(low), shown=listed(low), change=changed)


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
    odd, *_, usual = sorted(groups, key=lambda dtype: sum(sizes.get(name, 1) for name in groups[dtype]))
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
        shown=listed(groups[odd]),
        others=listed(groups[usual]),
    )


_SAVED = re.compile(r"saved metadata: \{.*?'dtype': torch\.(\w+).*?recomputed metadata: \{.*?'dtype': torch\.(\w+)", re.DOTALL)


def _checkpoint(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """torch.utils.checkpoint: the recomputed tensors have another dtype than the saved ones."""
    if (recompute := context.autocast.recomputation()) is not None:
        return recompute_finding(recompute, error)
    differing = next((pair for pair in _SAVED.findall(str(error)) if pair[0] != pair[1]), None)
    if differing is None:
        return None
    saved, recomputed = map(dtype_name, differing)
    return _finding(context, error, evidence, code="TR003", saved=saved, recomputed=recomputed)


def recompute_finding(recompute: Recompute, error: BaseException | None) -> Finding:
    """Autocast differed between a module's forward and its recomputation."""
    site = recompute.site
    where = f"{site.function}, {short(site.file)}:{site.line}" if site is not None else recompute.module
    place = place_of(site, f"{site.function} ({recompute.module})" if site else recompute.module)
    words = {"module": recompute.module, "before": recompute.before, "after": recompute.after, "where": where}
    return say("TR003", place, at("called at", site), error=_first_line(error) if error is not None else "", **words)


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
    only_low = re.search(r"(only|must).*(fp16|bf16|half|bfloat16|float16)", str(error), re.IGNORECASE) is not None
    strays = [o for o in operands if (o.dtype not in LOW if only_low else usual is not None and o.dtype != usual)]
    odd = (strays or operands)[0]
    name = evidence.stack[0].function
    state, _ = context.autocast.state()
    others = [o for o in operands if o is not odd]
    cause = cause_of(odd, name, census, "")
    fix = fix_of(odd, others, name, autocast_on=state.startswith("on"), autocast_before=False, device=context.device, generate=False)
    chains = tuple((o.label, "\n".join([o.describe(), *o.origin.explain()])) for o in [odd, *others][:4])
    return _finding(context, error, evidence, more=chains, name=name, word=odd.word, label=odd.label, cause=cause, fix=fix)
