"""A dtype error explained from the operands that the op really got. The exception stays what it is: the explanation is a note on it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch

from ...finding import Finding, Severity
from ...observe.operators import Operator, floating
from ...observe.origin import Site, callers, place_of, statement, users_line
from ...observe.tape import Running
from .context import Context
from .operands import Operand, cause_of, dtypes_of, fix_of, odd_one
from .origin import Origin
from .refusals import explain_refusal

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
