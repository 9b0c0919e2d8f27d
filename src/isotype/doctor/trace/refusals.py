"""Dtype checks made in Python (GradScaler, FSDP, checkpoint, an attention backend): explained from the tensors in the failing frames."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...finding import Finding, Severity, listed
from ...observe.operators import FLOATS, LOW
from ...observe.origin import Site, in_library, place_of, short, statement, users_line
from .context import Context
from .operands import Operand, cause_of, fix_of, share_of


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
    context: Context, error: BaseException, evidence: Evidence, *, message: str, cause: str, fix: str, code: str = "TR002", symbol: str = ""
) -> Finding:
    raised = evidence.stack[0] if evidence.stack else None
    own = users_line(evidence.stack)
    at = own or raised
    groups = [(f"{dtype_name(dtype)}", listed(names)) for dtype, names in evidence.parameters.items()]
    details = [("raised by", f"{raised.function}, {short(raised.file)}:{raised.line}")] if raised is not None and raised != own else []
    if own is not None:
        details.append(("called at", f"{own}: {own.text}"))
    state, _ = context.autocast.state()
    details += [("autocast", state), *groups]
    return Finding(
        code=code,
        severity=Severity.ERROR,
        message=message,
        place=place_of(at, symbol),
        cause=cause,
        fix=fix,
        observed=f"{type(error).__name__}: {text.splitlines()[0] if (text := str(error)) else ''}",
        details=tuple(details),
    )


def _unscale(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """GradScaler.unscale_: the gradients, hence the trainable parameters, are fp16."""
    low = [n for d, names in (evidence.trainable or evidence.parameters).items() if d == torch.float16 for n in names]
    trainable = [(n, p) for kind, n, p in context.names.tensors() if kind == "parameter" and p.requires_grad and p.dtype == torch.float16]
    low = [n for n, _ in trainable] or low
    if not low:
        return None
    changed = next((line for _, p in trainable if (line := context.parameters.of(p))), "")
    return _finding(
        context,
        error,
        evidence,
        symbol=low[0],
        message=f"GradScaler refuses fp16 gradients: {len(low)} trainable parameters are fp16",
        cause=f"the trainable parameters {listed(low)} are stored in fp16, so their gradients are fp16; GradScaler unscales fp32 "
        "gradients only, "
        "since an fp16 gradient has already lost the digits that the scale should save" + (f". {changed}" if changed else ""),
        fix="keep trainable parameters in fp32 (`for p in model.parameters(): if p.requires_grad: p.data = p.data.float()`) before the "
        "optimizer "
        "is built; autocast lowers the compute\nor train in bf16 without a GradScaler",
    )


def _uniform(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """FSDP: one unit flattens its parameters into one tensor (FSDP1) or one group (FSDP2)."""
    groups = dict(evidence.parameters)
    if len(groups) < 2:
        groups = defaultdict(list)
        for kind, name, tensor in context.names.tensors():
            if kind == "parameter" and tensor.dtype in FLOATS:
                groups[tensor.dtype].append(name)
        evidence.parameters = groups
    if len(groups) < 2:
        return None
    sizes = {name: tensor.numel() for _, name, tensor in context.names.tensors()}
    odd = min(groups, key=lambda dtype: sum(sizes.get(name, 1) for name in groups[dtype]))
    usual = max(groups, key=lambda dtype: sum(sizes.get(name, 1) for name in groups[dtype]))
    adapters = any("lora" in name.lower() or "adapter" in name.lower() for name in groups[odd])
    kind = "LoRA adapters are" if adapters else "parameters are"
    return _finding(
        context,
        error,
        evidence,
        symbol=groups[odd][0],
        message=f"FSDP needs a uniform dtype within a unit and got {' and '.join(dtype_name(d) for d in groups)}",
        cause=f"FSDP flattens the parameters of a unit into one tensor; here the {kind} {dtype_name(odd)} ({listed(groups[odd])}) beside "
        f"{dtype_name(usual)} base weights ({listed(groups[usual])})",
        fix=f"give all parameters of a unit the same dtype: cast these to {dtype_name(usual)}"
        + (" (PEFT: get_peft_model(..., autocast_adapter_dtype=False))" if adapters else "")
        + "\nor wrap them in a unit of their own (auto_wrap_policy)\nfor quantised weights set bnb_4bit_quant_storage to that same dtype",
    )


def _gradient(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """A gradient has another dtype than the bucket or buffer of its parameter, which autograd or DDP rejects."""
    wrong = []
    for kind, name, tensor in context.names.tensors():
        if kind == "parameter" and tensor.requires_grad:
            kept = tensor.grad.dtype if tensor.grad is not None else getattr(tensor, "grad_dtype", None)
            if kept is not None and kept != tensor.dtype:
                wrong.append((name, tensor.dtype, kept))
    if not wrong:
        return None
    name, own, kept = wrong[0]
    return _finding(
        context,
        error,
        evidence,
        symbol=name,
        message=f"gradients are {dtype_name(kept)} where the parameters are {dtype_name(own)}",
        cause=f"the gradients of {listed([n for n, _, _ in wrong])} are kept in {dtype_name(kept)} (param.grad_dtype, or a re-typed "
        ".grad), the parameters are "
        f"{dtype_name(own)}; DDP's buckets and autograd's accumulation have the parameter's dtype",
        fix=f"leave .grad in the parameter's dtype and accumulate in {dtype_name(kept)} buffers of your own, filled from "
        "register_post_accumulate_grad_hook",
    )


def _checkpoint(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """torch.utils.checkpoint: the recomputed tensors have another dtype than the saved ones."""
    differing = [
        (a, b)
        for a, b in re.findall(
            r"saved metadata: \{.*?'dtype': torch\.(\w+).*?recomputed metadata: \{.*?'dtype': torch\.(\w+)", str(error), re.DOTALL
        )
        if a != b
    ]
    recompute = context.autocast.recomputation()
    if not differing and recompute is None:
        return None
    if recompute is not None:
        return recompute_finding(recompute, error)
    saved, recomputed = (dtype_name(word) for word in differing[0])
    return _finding(
        context,
        error,
        evidence,
        code="TR003",
        message=f"checkpoint recomputes in {recomputed} what forward saved in {saved}",
        cause="the checkpointed function makes other dtypes when it is recomputed in backward: what decides its dtype changed between "
        "forward and backward "
        "(an autocast opened inside it, a global, a cast of the model)",
        fix="make the checkpointed function decide its dtype the same way both times: open autocast around the whole forward, or "
        "unconditionally inside the function",
    )


def recompute_finding(recompute: Any, error: BaseException | None) -> Finding:
    """Autocast differed between a module's forward and its recomputation."""
    site = recompute.site
    where = f"{site.function}, {short(site.file)}:{site.line}" if site is not None else recompute.module
    return Finding(
        code="TR003",
        severity=Severity.ERROR if error is not None else Severity.WARNING,
        message=f"checkpoint recomputes {recompute.module} under another autocast state than its forward had",
        place=place_of(site, f"{site.function} ({recompute.module})" if site else recompute.module),
        cause=f"in forward {recompute.module} ran with autocast {recompute.before}; recomputed in backward, called from {where}, it "
        "ran with autocast "
        f"{recompute.after}: the dtype of what it saves and of its gradients changes between the two. torch.utils.checkpoint restores "
        "the autocast state "
        "around the checkpointed function; an autocast that is opened or switched off inside it by a condition is not restored",
        observed=f"{type(error).__name__}: {str(error).splitlines()[0]}" if error is not None else None,
        fix="decide autocast the same way in forward and in recompute: open it unconditionally inside the checkpointed function, or "
        "around the whole forward",
        details=(("called at", f"{site}: {site.text}"),) if site is not None else (),
    )


_KNOWN: tuple[tuple[str, Callable[[Context, BaseException, Evidence], Finding | None]], ...] = (
    (r"unscale FP16|unscale .*fp16", _unscale),
    (r"uniform (original parameter )?dtype|same dtype.*FSDP|FSDP.*same dtype", _uniform),
    (r"Expected \w+, got \w+|grad.*different dtype|gradient.*dtype", _gradient),
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
    cause = cause_of(odd, name, census, "" if usual is None else share_of(census) and "")
    finding = _finding(
        context,
        error,
        evidence,
        message=f"{name} refused {odd.word} ({odd.label})",
        cause=cause,
        fix=fix_of(odd, others, name, autocast_on=state.startswith("on"), autocast_before=False, device=context.device, generate=False),
    )
    chains = tuple((o.label, "\n".join([o.describe(), *o.origin.explain()])) for o in [odd, *others][:4])
    return Finding(**{f: getattr(finding, f) for f in finding.__dataclass_fields__ if f != "details"}, details=finding.details + chains)
