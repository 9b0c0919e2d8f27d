"""Dtype checks made in Python (GradScaler, FSDP, checkpoint, an attention backend): explained from the tensors in the failing frames."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...finding import Finding, listed
from ...observe.operators import FLOATS, LOW
from ...observe.origin import Site, in_library, place_of, short, statement, users_line
from .context import Context, Recompute, at, say
from .operands import Operand, cause_of, fix_of

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
