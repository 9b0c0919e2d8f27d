"""Explains a dtype error from the operands that the op received. For checks in Python code
(GradScaler, FSDP, checkpoint, an attention backend) the explanation uses the tensors in the frames
of the traceback. The exception itself stays the same, and the explanation is added to it as a note.
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

from ...dtypes import format_dtype
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
from .context import Context, make_finding, site_detail
from .origin import UNWATCHED_NOTE, Origin

MENTIONS_DTYPE = re.compile(
    r"dtype|scalar ?type|\bdata"
    r" type|BFloat16|\bHalf\b|\bFloat\b|float(16|32|64)|\b(fp|bf)(16|32)\b|not implemented for"
    r" '|without "
    "overflow|floating|CheckpointError",
    re.IGNORECASE,
)
# ops that write one operand into another; the first operand is the destination, whose dtype is
# required
_WRITING_OPS = {
    "index_put",
    "_index_put_impl",
    "scatter",
    "scatter_add",
    "index_copy",
    "index_add",
    "masked_scatter",
    "copy",
    "index_fill",
    "setitem",
}
_MAX_OPERANDS = 8  # operands shown in full
# The finding is stored on the exception. A list of exceptions would keep the frames and tensors of
# their tracebacks alive.
_FINDING_ATTRIBUTE = "_isotype_finding"


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument of an op.

    writer  the op and the module that wrote the operand last
    """

    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin
    writer: str

    @classmethod
    def from_tensor(cls, context: Context, label: str, tensor: torch.Tensor) -> Operand:
        return cls(
            label,
            tensor.dtype,
            tuple(tensor.shape),
            context.provenance.get(tensor),
            context.provenance.last_writer(tensor),
        )

    @property
    def dtype_name(self) -> str:
        return format_dtype(self.dtype)

    def describe_chain(self) -> tuple[str, str]:
        """Describes the dtype and shape of the operand, and the steps that gave it its dtype. This
        text is printed below a finding.
        """
        written = f"   last written by {self.writer}" if self.writer else ""
        return self.label, "\n".join(
            [
                f"{self.dtype_name}[{' '.join(map(str, self.shape))}]{written}",
                *self.origin.explain(),
            ]
        )


def _is_writing(op: str) -> bool:
    return op.strip("_") in _WRITING_OPS


def find_odd_operand(
    operands: Sequence[Operand], dtype_counts: Counter[torch.dtype], op: str
) -> Operand:
    """Returns the operand whose dtype differs from the usual dtype of the model. If the op writes
    into its first operand, returns the operand whose values are written. If the model has no usual
    dtype, returns the operand with the widest dtype.
    """
    odd_operands = [operand for operand in operands[1:] if operand.dtype != operands[0].dtype]
    if odd_operands and _is_writing(op):
        return odd_operands[0]
    dtypes = {operand.dtype for operand in operands}
    usual_dtype = next(
        (dtype for dtype, _ in dtype_counts.most_common() if dtype in dtypes), None
    ) or min(dtypes, key=lambda d: d.itemsize)
    odd_operands = [operand for operand in operands if operand.dtype != usual_dtype] or list(
        operands
    )
    # prefers an operand whose dtype was decided inside the program to one that came from outside
    return min(odd_operands, key=lambda operand: operand.origin.deciding_origin().kind == "input")


def describe_majority(dtype_counts: Counter[torch.dtype]) -> str:
    """Returns a sentence such as `99% of the parameters are bf16`."""
    if not dtype_counts:
        return ""
    dtype, count = dtype_counts.most_common(1)[0]
    return f"{100 * count / dtype_counts.total():.0f}% of the parameters are {format_dtype(dtype)}"


_DECISION_TEMPLATES = {
    "parameter": "parameter {what} is {word}",
    "buffer": "buffer {what} is {word}",
    "created": "{what} made {a} {word} tensor",
    "cast": "an explicit cast, {what}, made it {word}",
    "input": "{a} {word} tensor came from outside the trace",
}


def describe_cause(
    odd_operand: Operand, op: str, dtype_counts: Counter[torch.dtype], autocast: str
) -> str:
    """Describes which line decided the dtype of `odd_operand`, and which ops passed the tensor on
    until it reached the op that failed.
    """
    deciding_origin = odd_operand.origin.deciding_origin()
    location = deciding_origin.location()
    decided_dtype = format_dtype(deciding_origin.dtype)
    article = "an" if decided_dtype[0] in "aeiof" else "a"
    template = _DECISION_TEMPLATES.get(deciding_origin.kind, "{what} returned {word}")
    decision = template.format(what=deciding_origin.creator, word=decided_dtype, a=article)
    if location:
        decision += f" ({location})"
    parts = [decision]
    for step in odd_operand.origin.chain():
        if step is deciding_origin:
            break
        if step.kind == "promotion":
            if step.writer:
                writer_note = f"; the wider operand was last written by {step.writer}"
            else:
                writer_note = ""
            parts.append(
                f"{step.creator} promoted the other operand to {format_dtype(step.dtype)}"
                f" ({step.location()}{writer_note})"
            )
        else:
            parts.append(f"{step.describe()} ({step.location()})")
    if odd_operand.writer:
        parts.append(f"{odd_operand.writer} wrote it last")
    parts.append(f"{op} then got it as {odd_operand.label}")
    return ". ".join(
        part for part in ("; ".join(parts), describe_majority(dtype_counts), autocast) if part
    )


def describe_fix(
    odd_operand: Operand,
    operands: Sequence[Operand],
    op: str,
    *,
    device: str,
    autocast_call: str | None,
) -> str:
    """Describes the possible fixes. The likeliest fix comes first.

    autocast_call  a call that ran with autocast on earlier and runs with autocast off now; "" if
                   autocast is on now, None if autocast was never on
    """
    deciding_origin = odd_operand.origin.deciding_origin()
    matching = next(
        (operand for operand in operands if operand.dtype != odd_operand.dtype), odd_operand
    )
    target_dtype = str(matching.dtype)
    at_line = str(deciding_origin.site or "the place where it is made")
    # autocast to fp32 has no effect except a warning, so only half dtypes are suggested
    half_dtype = next(
        (
            operand.dtype
            for operand in (matching, odd_operand)
            if operand.dtype in (torch.bfloat16, torch.float16)
        ),
        None,
    )
    autocast_clause = f'under torch.autocast("{device}", dtype={half_dtype})'
    if autocast_call and half_dtype is not None:
        suggestions = [f"run {autocast_call} {autocast_clause}, as training does"]
    else:
        suggestions = []
    if _is_writing(op):
        suggestions.append(
            "cast the source to the destination's dtype where it is written: `.to(out.dtype)`,"
            f" here {matching.dtype_name}"
        )
        suggestions.append(
            f"or allocate the destination (buffer, cache dtype) as {odd_operand.dtype_name}"
        )
    match deciding_origin.kind:
        case "created" if (
            "without dtype=" in deciding_origin.creator or "tensor" in deciding_origin.creator
        ):
            if "tensor" in deciding_origin.creator:
                float_hint = " (a Python float, e.g. from math.sqrt, never promotes)"
            else:
                float_hint = ""
            suggestions.append(
                "give it the dtype of what it meets, `dtype=x.dtype`, or cast it: `.to(x.dtype)`,"
                f" here {target_dtype}{float_hint}"
            )
        case "created":
            suggestions.append(
                f"cast it to the dtype of what it meets, `.to(q.dtype)`, here {target_dtype}"
            )
        case "parameter" | "buffer":
            owner, _, leaf = deciding_origin.creator.rpartition(".")
            if owner:
                cast_call = f"`model.get_submodule({owner!r}).to({target_dtype})`"
            else:
                cast_call = f"cast `{leaf}` with the rest of the model to {target_dtype}"
            suggestions.append(
                f"if {deciding_origin.creator} was not meant to be {format_dtype(deciding_origin.dtype)}: {cast_call}"
            )
            promotion_site = next(
                (step.site for step in odd_operand.origin.chain() if step.kind == "promotion"), None
            )
            suggestions.append(
                "or keep it, and cast the results computed with it back: `.to(x.dtype)`"
                + (f" at {promotion_site}" if promotion_site else "")
            )
        case "cast":
            wide_dtype = format_dtype(deciding_origin.dtype)
            suggestions.append(
                f"cast back after the part that needs {wide_dtype}: `.to(x.dtype)`, here {target_dtype}, or"
                f" drop the cast at {at_line}"
            )
        case "input" if UNWATCHED_NOTE in deciding_origin.creator:
            suggestions.append(
                f"cast the operands to one dtype where they meet: `.to(x.dtype)`, here {target_dtype}"
            )
        case "input":
            suggestions.append(
                f"cast the input to the model's dtype before the call: `x.to({target_dtype})`"
            )
        case _:
            suggestions.append(f"cast its result back: `.to({target_dtype})` at {at_line}")
    if half_dtype is not None and autocast_call is None:
        suggestions.append(f"or run the forward {autocast_clause}")
    return "\n".join(suggestions)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"


def _mentions_dtype(error: BaseException) -> bool:
    return MENTIONS_DTYPE.search(f"{type(error).__name__}: {error}") is not None


class Failures:
    """Explains the ops that fail. If an error passes through several calls, it is explained only at
    the first of them. Errors that the program catches are not reported.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # sites and names in the chains of explained errors, which other findings do not repeat
        self.explained_origins: set[Any] = set()

    def explain_op_error(self, error: Exception, op: Operator, args: tuple, kwargs: dict) -> None:
        """Explains an error that an op raised. `args` are exactly the arguments that the op
        received, after autocast and after composite ops were split.
        """
        self._explain(error, op.name, list(op.operands(args, kwargs)))

    def explain_call_error(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
        """Explains an error that a torch function raised. This method is used if the error comes
        from a check in a composite op or in Python code, and not from a single op. `args` are the
        arguments that the program passed.
        """
        name = getattr(func, "__name__", str(func))
        if name in ("backward", "grad"):
            return  # the failing op inside is explained there, or at the end of the program
        labels = _parameter_names(func)
        labels += [f"argument {index}" for index in range(len(labels), len(args))]
        labelled = list(zip(labels, args, strict=False))
        self._explain(error, name, list(iterate_floating(labelled + list(kwargs.items()))))

    def rerun_forward(
        self, error: Exception, module: torch.nn.Module, args: tuple, kwargs: dict
    ) -> None:
        """Repeats a forward that failed while the tracer did not observe it. The second run finds
        the operands of the op that failed.
        """
        if hasattr(error, _FINDING_ATTRIBUTE) or not _mentions_dtype(error):
            return
        context = self._context
        outer_stack = context.stack
        context.modules.stack = [ModuleCall("", module)]
        try:
            with torch.random.fork_rng():
                module.forward(*args, **kwargs)
        except Exception as second_error:
            if (finding := getattr(second_error, _FINDING_ATTRIBUTE, None)) is not None:
                self._attach(error, finding)
        finally:
            context.modules.stack = outer_stack

    def explain_exception(self, error: BaseException) -> Finding | None:
        """Returns the explanation of an exception that ended the program, or of its cause. If an op
        failed, the explanation was already created when the op failed. If a check in Python code
        failed, this method creates the explanation.
        """
        chain: list[BaseException] = []
        exception: BaseException | None = error
        while exception is not None and exception not in chain:
            chain.insert(0, exception)
            exception = exception.__cause__ or exception.__context__
        findings: list[Finding] = [
            getattr(exception, _FINDING_ATTRIBUTE)
            for exception in chain
            if hasattr(exception, _FINDING_ATTRIBUTE)
        ]
        for exception in chain if not findings else ():
            finding = (
                explain_failed_check(self._context, exception)
                if _mentions_dtype(exception)
                else None
            )
            if finding is not None:
                self._attach(exception, finding)
                return finding
        return findings[0] if findings else None

    def _attach(self, error: BaseException, finding: Finding) -> None:
        error.add_note(finding.render())
        setattr(error, _FINDING_ATTRIBUTE, finding)

    def _explain(
        self, error: Exception, name: str, tensors: list[tuple[str, torch.Tensor]]
    ) -> None:
        if (
            not isinstance(error, (RuntimeError, ValueError, TypeError))
            or hasattr(error, _FINDING_ATTRIBUTE)
            or not tensors
        ):
            return
        has_mixed_dtypes = len({t.dtype for _, t in tensors}) > 1
        if not MENTIONS_DTYPE.search(str(error)) and not (
            has_mixed_dtypes and "same" in str(error)
        ):
            return  # the error is about something else, such as a shape or an index
        self._context.names.register_live_modules()
        operands = [Operand.from_tensor(self._context, label, tensor) for label, tensor in tensors]
        for operand in operands:
            for origin in operand.origin.chain():
                self.explained_origins |= {origin.site, origin.creator} - {None}
        self._attach(error, self._build_finding(error, name, operands, has_mixed_dtypes))

    def _build_finding(
        self, error: Exception, name: str, operands: Sequence[Operand], has_mixed_dtypes: bool
    ) -> Finding:
        context = self._context
        stack = call_sites(3)
        site, module, node = context.locate_op()
        dtype_counts = context.failure_dtype_counts()
        device = context.device
        odd_operand = find_odd_operand(operands, dtype_counts, name)
        state, ran_with_autocast = context.autocast.describe_state()
        is_autocast_on = torch.is_autocast_enabled(device)
        is_generating = not is_autocast_on and any(
            site.function.rpartition(".")[2] in ("generate", "_sample") for site in stack
        )
        call_name = context.call_name()
        title = f"{call_name} ({name})" if call_name and call_name != name.strip("_") else name
        if (leak := context.defaults.explain()) is not None:
            cause = leak.cause
            fix = leak.fix
        elif re.match(r"value cannot be converted to type", str(error)):
            cause = (
                f"a number given to {name} is beyond the range of {odd_operand.dtype_name}, the dtype of the"
                f" tensor that takes it: `{read_statement(site) if site is not None else ''}`. A limit"
                " such as torch.finfo(torch.float32).min, or -1e9 for fp16, was hard-coded for"
                " another dtype"
            )
            fix = "use the limit of the tensor's own dtype: torch.finfo(x.dtype).min"
        elif not has_mixed_dtypes and "not implemented for" in str(error):
            cause = f"{name} has no {odd_operand.dtype_name} kernel on {device}. {describe_cause(odd_operand, name, dtype_counts, '')}"
            fix = (
                f"run this part in fp32 or bf16 on {device}: `.to(torch.float32)`, or"
                " torch.autocast"
            )
        else:
            if ran_with_autocast and not is_autocast_on:
                autocast_note = "Autocast was on when this module ran before and is off here"
            else:
                autocast_note = ""
            if autocast_note and is_generating:
                autocast_note += (
                    ": generate() runs outside the autocast that the trainer puts around its own"
                    " forward"
                )
            if is_generating:
                autocast_call = "generate() (or the evaluation)"
            elif autocast_note:
                autocast_call = "this call"
            elif is_autocast_on:
                autocast_call = ""
            else:
                autocast_call = None
            cause = describe_cause(odd_operand, name, dtype_counts, autocast_note)
            fix = describe_fix(
                odd_operand, operands, name, device=device, autocast_call=autocast_call
            )
            cause += self._describe_earlier_cast(operands)
        details: list[tuple[str, str]] = []
        user_site = innermost_user_site(stack)
        if user_site != site:
            details += site_detail("called at", user_site)
        phase = f"backward of {node}" if node else "forward"
        details += [("phase", phase), ("autocast", state)]
        details += [operand.describe_chain() for operand in operands[:_MAX_OPERANDS]]
        if further := Counter(operand.dtype_name for operand in operands[_MAX_OPERANDS:]):
            counts = ", ".join(f"{count} {dtype}" for dtype, count in further.items())
            details.append(("further", f"{further.total()} operands: {counts}"))
        verb = "got" if has_mixed_dtypes else "refused"
        dtypes = " and ".join(dict.fromkeys(operand.dtype_name for operand in operands))
        return Finding(
            code="TR001",
            severity=Severity.ERROR,
            message=f"{title} {verb} {dtypes}",
            place=site_place(site, module),
            cause=cause,
            fix=fix,
            observed=_first_line(error),
            details=tuple(details),
        )

    def _describe_earlier_cast(self, operands: Sequence[Operand]) -> str:
        """Describes a cast of the model that left another tensor in the model's old dtype. Such a
        tensor, for example an optimizer state or a cache, was created before the cast.
        """
        context = self._context
        current_dtypes = {name: tensor.dtype for _, name, tensor in context.names.tensors()}
        steps = [
            step
            for operand in operands
            for step in operand.origin.chain()
            if step.kind in ("parameter", "buffer")
        ]
        change = context.parameters.describe_first_change({step.creator for step in steps})
        has_stale_dtype = any(
            step.kind == "parameter" and step.dtype != current_dtypes.get(step.creator, step.dtype)
            for step in steps
        )
        if change and has_stale_dtype:
            return f". {change}; what was made from it before kept the old dtype"
        return ""


def _parameter_names(func: Any) -> list[str]:
    """Returns the names of the positional arguments of a torch function. The names are read from
    the signature of the function. A builtin function has no signature, so its names are read from
    the first line of its documentation.
    """
    try:
        return list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        signature = re.match(r"\s*\w+\(([^)]*)\)", getattr(func, "__doc__", None) or "")
        if signature:
            return [part.partition("=")[0].strip() for part in signature[1].split(",")]
        return []


Details = tuple[tuple[str, str], ...]  # rows of a label and a text


@dataclass(slots=True)
class Evidence:
    """The tensors in the frames of a traceback.

    stack       the lines of the traceback, innermost first
    parameters  dtype -> names of parameters
    tensors     the other tensors in the innermost frame that has a tensor, with the names of their
                variables
    """

    stack: list[Site]
    parameters: dict[torch.dtype, list[str]] = field(default_factory=lambda: defaultdict(list))
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)


def _find_tensors(value: Any, label: str, depth: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dtype in FLOATS:
            yield label, value
    elif depth and isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _find_tensors(item, f"{label}[{key!r}]", depth - 1)
    elif depth and isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from _find_tensors(group["params"], label, 1)


def gather_evidence(context: Context, error: BaseException) -> Evidence:
    """Collects the tensors from the innermost frame whose variables contain tensors."""
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    evidence = Evidence([Site(frame.f_code, line) for frame, line in frames])
    parameter_names = {
        id(tensor): name for kind, name, tensor in context.names.tensors() if kind == "parameter"
    }
    for frame, _ in frames:
        for label, value in frame.f_locals.items():
            for path, tensor in _find_tensors(value, label):
                if isinstance(tensor, torch.nn.Parameter) or id(tensor) in parameter_names:
                    name = (
                        parameter_names.get(id(tensor)) or f"{path} (shape {tuple(tensor.shape)})"
                    )
                    if name not in (names := evidence.parameters[tensor.dtype]):
                        names.append(name)
                    if (
                        tensor.requires_grad
                        and tensor.dtype == torch.float16
                        and name not in evidence.trainable
                    ):
                        evidence.trainable.append(name)
                else:
                    evidence.tensors.append((path, tensor))
        if evidence.parameters or evidence.tensors:
            break
    return evidence


def explain_failed_check(context: Context, error: BaseException) -> Finding | None:
    """Explains an error that a check in Python code raised, and returns a finding. Returns None if
    no tensors in the frames explain the error.
    """
    context.names.register_live_modules()
    evidence = gather_evidence(context, error)
    is_user_assertion = evidence.stack and not is_library_file(evidence.stack[0].file)
    if (
        is_user_assertion
        and isinstance(error, AssertionError)
        and "dtype" not in read_statement(evidence.stack[0])
    ):
        # an assertion of the program that is not about a dtype
        return None
    for pattern, explain in _CHECK_EXPLAINERS:
        if (
            re.search(pattern, f"{type(error).__name__}: {error}")
            and (finding := explain(context, error, evidence)) is not None
        ):
            return finding
    return _explain_by_tensors(context, error, evidence)


def _check_finding(
    context: Context,
    error: BaseException,
    evidence: Evidence,
    *,
    symbol: str = "",
    code: str = "TR002",
    extra_details: Details = (),
    **facts: Any,
) -> Finding:
    raising_site = evidence.stack[0] if evidence.stack else None
    user_site = innermost_user_site(evidence.stack)
    if raising_site is not None and raising_site != user_site:
        details = [
            (
                "raised by",
                f"{raising_site.function}, {short_path(raising_site.file)}:{raising_site.line}",
            )
        ]
    else:
        details = []
    details += site_detail("called at", user_site)
    details += [("autocast", context.autocast.describe_state()[0])]
    details += [
        (format_dtype(dtype), join_names(names)) for dtype, names in evidence.parameters.items()
    ]
    return replace(
        make_finding(
            code, site_place(user_site or raising_site, symbol), (*details, *extra_details), **facts
        ),
        observed=_first_line(error),
    )


def _explain_unscale(context: Context, error: BaseException, evidence: Evidence) -> Finding | None:
    """Explains an error of GradScaler.unscale_. The error is raised if the gradients are fp16
    because the trainable parameters are fp16.
    """
    trainable = [
        (name, p)
        for kind, name, p in context.names.tensors()
        if kind == "parameter" and p.requires_grad and p.dtype == torch.float16
    ]
    fp16_names = [name for name, _ in trainable] or evidence.trainable
    if not fp16_names:
        return None
    change = next(
        (line for _, p in trainable if (line := context.parameters.describe_change(p))), ""
    )
    return _check_finding(
        context,
        error,
        evidence,
        symbol=fp16_names[0],
        kind="unscale",
        count=len(fp16_names),
        shown=join_names(fp16_names),
        change=change,
    )


def _explain_mixed_unit(
    context: Context, error: BaseException, evidence: Evidence
) -> Finding | None:
    """Explains the error that FSDP raises if the parameters in one FSDP unit do not all have the
    same dtype. A unit is a set of modules whose parameters FSDP combines into one tensor (FSDP1) or
    one group (FSDP2).
    """
    if len(evidence.parameters) < 2:
        evidence.parameters = defaultdict(list)
        for kind, name, tensor in context.names.tensors():
            if kind == "parameter" and tensor.dtype in FLOATS:
                evidence.parameters[tensor.dtype].append(name)
    groups = evidence.parameters
    if len(groups) < 2:
        return None
    sizes = {name: tensor.numel() for _, name, tensor in context.names.tensors()}
    odd_dtype, *_, usual_dtype = sorted(
        groups, key=lambda dtype: sum(sizes.get(name, 1) for name in groups[dtype])
    )
    has_adapters = any(
        "lora" in name.lower() or "adapter" in name.lower() for name in groups[odd_dtype]
    )
    return _check_finding(
        context,
        error,
        evidence,
        symbol=groups[odd_dtype][0],
        kind="uniform",
        dtypes=" and ".join(format_dtype(dtype) for dtype in groups),
        odd=format_dtype(odd_dtype),
        usual=format_dtype(usual_dtype),
        adapters="LoRA adapters" if has_adapters else "",
        shown=join_names(groups[odd_dtype]),
        others=join_names(groups[usual_dtype]),
    )


_CHECKPOINT_METADATA = re.compile(
    r"saved metadata: \{.*?'dtype': torch\.(\w+).*?recomputed metadata: \{.*?'dtype': torch\.(\w+)",
    re.DOTALL,
)


def _explain_recompute(
    context: Context, error: BaseException, evidence: Evidence
) -> Finding | None:
    """Explains an error of torch.utils.checkpoint. The error is raised if the recomputed tensors
    have another dtype than the saved tensors.
    """
    finding: Finding | None = context.autocast.recomputation_finding(_first_line(error))
    if finding is not None:
        return finding
    dtype_pair = next(
        (pair for pair in _CHECKPOINT_METADATA.findall(str(error)) if pair[0] != pair[1]), None
    )
    if dtype_pair is None:
        return None
    return _check_finding(
        context,
        error,
        evidence,
        code="TR003",
        saved=format_dtype(dtype_pair[0]),
        recomputed=format_dtype(dtype_pair[1]),
    )


_CHECK_EXPLAINERS: tuple[
    tuple[str, Callable[[Context, BaseException, Evidence], Finding | None]], ...
] = (
    (r"unscale FP16|unscale .*fp16", _explain_unscale),
    (r"uniform (original parameter )?dtype|same dtype.*FSDP|FSDP.*same dtype", _explain_mixed_unit),
    (r"CheckpointError|different metadata than during the forward", _explain_recompute),
)


def _explain_by_tensors(
    context: Context, error: BaseException, evidence: Evidence
) -> Finding | None:
    """Explains an error from a check for which this module has no special explanation. The
    explanation lists the tensors in the frame that failed, and for each tensor the steps that gave
    it its dtype.
    """
    operands = [
        Operand.from_tensor(context, label, tensor) for label, tensor in evidence.tensors[:12]
    ]
    if not operands:
        return None
    dtype_counts = context.failure_dtype_counts()
    usual_dtype = dtype_counts.most_common(1)[0][0] if dtype_counts else None
    requires_low_precision = (
        re.search(r"(only|must).*(fp16|bf16|half|bfloat16|float16)", str(error), re.IGNORECASE)
        is not None
    )
    if requires_low_precision:
        odd_operands = [operand for operand in operands if operand.dtype not in NARROW_FLOATS]
    else:
        odd_operands = [operand for operand in operands if usual_dtype not in (None, operand.dtype)]
    odd_operand = odd_operands[0] if odd_operands else operands[0]
    name = evidence.stack[0].function
    autocast_call = "" if context.autocast.describe_state()[0].startswith("on") else None
    cause = describe_cause(odd_operand, name, dtype_counts, "")
    fix = describe_fix(
        odd_operand, operands, name, device=context.device, autocast_call=autocast_call
    )
    chains = tuple(
        operand.describe_chain()
        for operand in sorted(operands, key=lambda o: o is not odd_operand)[:4]
    )
    return _check_finding(
        context,
        error,
        evidence,
        extra_details=chains,
        name=name,
        word=odd_operand.dtype_name,
        label=odd_operand.label,
        cause=cause,
        fix=fix,
    )
