"""Explains why a step contains NaN or inf. The texts of the findings are in `causes.txt`."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ....dtypes import format_dtype
from ....environment.versions import detect_devices
from ....finding import Finding, Place
from ....observe.operators import NARROW_FLOATS
from ....observe.origin import Site, is_library_file, read_statement, short_path
from ....pages.finding_sheet import load_finding_formatter
from ..causes import SHEET
from ..graph import read_grad_fn
from .buffers import Buffer
from .decompositions import describe_divisor, read_matrix
from .domains import (
    BELOW_ONE,
    BEYOND_ONE,
    NEGATIVE,
    Move,
    find_domain,
    is_outside,
    list_variables,
    read_target,
)
from .late_shadows import Rounding, find_last_rounding
from .lost_numbers import LostNumber, Replacement, prove_lost_numbers
from .number_settings import NumberSetting, find_number_setting
from .positions import Part, read_condition, read_input, read_part
from .replay import CONSTANT_WRITERS, Event, Range, Replay, Watch, describe_input, watch_update
from .stable_forms import describe_form
from .step import Entry, Step, all_finite, collect_tensors
from .trials import RunTrial

_format_finding = load_finding_formatter(SHEET)
_PRODUCTS_WITH_SCALE = ("bmm", "baddbmm", "mm", "matmul")
_PRODUCTS = frozenset((*_PRODUCTS_WITH_SCALE, "mul", "addmm", "dot", "mv"))
_DIVISIONS = frozenset(("div", "reciprocal", "rsqrt", "addcdiv"))
_DIVISIONS_OF_TENSORS = frozenset(("div", "divide", "truediv", "floordiv"))
_QUOTIENTS = frozenset(("div", "divide", "true_divide", "addcdiv"))
_LOGARITHMS = frozenset(("log", "log2", "log10", "logit", "xlogy"))
# functions whose derivative is infinite at the edges of their domain
_EDGE_FUNCTIONS = frozenset(("acos", "asin", "acosh", "atanh", "logit", "erfinv"))
_ROOTS = frozenset(("sqrt", "rsqrt", "pow"))
_SOFTMAXES = frozenset(("_softmax", "_log_softmax", "_safe_softmax"))
_EXPONENTIALS = frozenset(("exp", "exp2", "expm1", "cosh", "sinh"))
# why a result is not finite, for a fix that clamps the input of the operator
_CLAMPED_INPUTS = frozenset(("exponential", NEGATIVE, BEYOND_ONE, BELOW_ONE))
_CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16"))
_STATISTICS = frozenset(("mean", "std", "var", "std_mean", "var_mean", "std_correction"))
# losses that average over their elements, and have one result for a mean
_MEAN_LOSSES = frozenset(
    ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
    + ("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
)
_HUGE = 1e15  # a value that no healthy model has
_HUGE_WEIGHT = 1e4  # a size of a weight that no healthy model has
_EVENT_DETAILS = 5  # inputs of an operation that are shown
_LOSS_SCALE = 64  # a smaller factor is the weight of a loss


def explain_step(step: Step) -> Finding:
    """Returns the finding about a step whose loss or gradients contain NaN or inf."""
    finding = _find_bad_weight(step)
    if finding is not None:
        return finding
    replay = Replay(step)
    run_again = replay.run_trial(Replay.run_forward)
    try:
        replay.run_forward()
        has_bad_loss = not all(bool(loss.isfinite().all()) for loss in step.losses)
        event = _culprit(replay.find_sources_of_loss()) if has_bad_loss else None
        if event is None or not event.root().has_finite_inputs:
            finding = _find_bad_frozen_module(step)
            if finding is not None:
                return finding
        if event is None or not event.root().is_origin:
            finding = _find_bad_data(step)
            if finding is not None:
                return finding
        if event is None and not has_bad_loss:
            replay = Replay(step)
            run_again = replay.run_trial(Replay.run_backward)
            replay.run_backward()
            event = _find_bad_backward(replay)
            # a loss that leaves out NaN, such as one of masked rows, has gradients of 0 * NaN
            event = event or _culprit(replay.watch.hidden_events)
    except Exception as error:
        reason = f"running the step again raised {type(error).__name__}: {error}"
        return _unknown(step, reason)
    if event is None:
        return _unknown(step, "the step was run again and was finite")
    return _explain_event(event, step, replay.watch, run_again)


def _find_bad_backward(replay: Replay) -> Event | None:
    """Returns the first operator of backward that makes NaN or inf, of those from which it comes to
    a gradient if there are any.
    """
    origins = [event for event in replay.watch.events if event.is_backward and event.is_origin]
    sources = set(replay.find_sources_of_gradients())
    first = next((event for event in origins if event in sources), None)
    return first or next((event for event in origins if event.written is None), None)


def explain_call(entry: Entry, written_buffers: frozenset[int] = frozenset()) -> Finding:
    """Returns the finding about a call of a module whose result contains NaN or inf, in a program
    that has no step.

    written_buffers  ids of the buffers that the program has written
    """
    step = Step([entry], [], [], 1, written_buffers=written_buffers)
    finding = _find_bad_weight(step)
    if finding is not None:
        return finding
    bad = [(name, tensor) for name, tensor in _named_arguments(entry) if not _is_finite(tensor)]
    bad = [(name, tensor) for name, tensor in bad if _is_bad_data(tensor.detach())]
    if bad:
        return _explain_data(entry, *bad[0])
    reason = "the call was run again and was finite"
    try:
        finding = _explain_frozen_module(entry, step)
    except Exception as error:
        finding = None
        reason = f"running the call again raised {type(error).__name__}: {error}"
    if finding is not None:
        return finding
    what = f"the result of {entry.owner or entry.name}"
    place = _place(entry.site, entry.name)
    return _format_finding("RN036", place, (), what=what, name="", reason=reason, between=False)


def explain_function(entry: Entry, earlier: Sequence[Entry]) -> Finding:
    """Returns the finding about a call of a function outside of modules, in a program that has no
    step. The call makes NaN or inf from finite values.

    earlier  the calls before it
    """
    step = Step([*earlier, entry], [], [], 1)
    event = None
    reason = "the call was run again and was finite"
    replay = Replay(step)
    if not entry.is_in_place:
        try:
            replay.run_function(entry)
            event = _find_bad_operator(replay, entry)
        except Exception as error:
            reason = f"running the call again raised {type(error).__name__}: {error}"
    if event is None:
        finding = _explain_result(entry)
    else:
        run_again = replay.run_trial(lambda other: other.run_function(entry))
        finding = _explain_event(event, step, replay.watch, run_again)
    if finding is not None:
        return finding
    what = f"the result of {entry.name}"
    place = _place(entry.site, entry.name)
    return _format_finding("RN036", place, (), what=what, name="", reason=reason, between=False)


def _operation_name(entry: Entry) -> str:
    """Returns the name of a recorded operator, as `div` for `__rtruediv__` and `div_`."""
    return entry.name.strip("_").removeprefix("true").removeprefix("r")


def explain_gradients(
    parameters: Sequence[Tensor],
    suspect: Step | None,
    scaler: torch.amp.GradScaler | None,
    models: Sequence[nn.Module],
) -> Finding:
    """Returns the finding about gradients that contain NaN or inf just before the optimizer uses
    them.
    """
    bad = [p for p in parameters if p.grad is not None and not bool(p.grad.isfinite().all())]
    name = _parameter_name(bad[0], models)
    if scaler is not None:
        count = f", and of {len(bad) - 1} others" if len(bad) > 1 else ""
        scale = f"{scaler.get_scale():g}"
        return _format_finding("RN035", Place(symbol=name), (), scale=scale, name=name, count=count)
    if suspect is None:
        reason = "the gradients were finite after backward; code between backward and step, such as"
        reason += " a division by a count, changed the gradient of "
        place = Place(symbol=name)
        return _format_finding(
            "RN036", place, (), what="a gradient", name=name, reason=reason, between=True
        )
    return explain_step(suspect)


def _parameter_name(parameter: Tensor, models: Sequence[nn.Module]) -> str:
    for model in models:
        for name, value in model.named_parameters():
            if value is parameter:
                return str(name)
    return f"a parameter of shape {tuple(parameter.shape)}"


def _find_bad_weight(step: Step) -> Finding | None:
    bad: list[tuple[str, Tensor]] = []
    for model in _models(step):
        parameters = ((name, p.detach()) for name, p in model.named_parameters())
        bad += [(name, p) for name, p in parameters if not _is_finite(p)]
        # a buffer that a call of this step wrote may be a result of the fault
        buffers = [(n, b) for n, b in model.named_buffers() if id(b) not in step.written_buffers]
        bad += [(name, buffer) for name, buffer in buffers if _is_bad_data(buffer)]
    if not bad:
        return None
    name, value = bad[0]
    is_trained = any(
        n == name and p.requires_grad
        for model in _models(step)
        for n, p in model.named_parameters()
    )
    others = f", and so are {len(bad) - 1} other tensors" if len(bad) > 1 else ""
    is_first = step.number == 1 or not is_trained
    return _explain_bad_weight(name, value, step.number, is_first=is_first, others=others)


def _explain_bad_weight(
    name: str, value: Tensor, number: int, *, is_first: bool, others: str = ""
) -> Finding:
    """Returns the finding about a weight that contains NaN or inf before a step.

    is_first  whether no update could have written NaN or inf
    """
    value = value.detach()
    return _format_finding(
        "RN032",
        Place(symbol=name),
        (),
        name=name,
        has=format_dtype(value.dtype),
        count=int((~value.isfinite()).sum()),
        total=value.numel(),
        rows=_list_bad_rows(value),
        others=others,
        first=is_first,
        overflow=value.dtype == torch.float16 and not bool(value.isnan().any()),
        number=number,
        no_bf16=_lacks_bf16(value.device.type),
    )


def explain_buffer(step: Step, buffer: Buffer) -> Finding:
    """Returns the finding about a buffer, such as a running statistic, in which a call of a module
    has written NaN or inf.
    """
    module, tensor = buffer.module(), buffer.tensor
    assert module is not None
    assert tensor is not None
    replay = Replay(step)
    run_again = replay.run_trial(Replay.run_forward)
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: inputs.extend(collect_tensors(args)))
    finding = None
    try:
        replay.run_forward()
        bad = [item for item in inputs if not _is_finite(item)]
        event = _culprit(replay.watch.find_sources(bad))
        if event is not None:
            finding = _explain_event(event, step, replay.watch, run_again)
        elif bad:
            finding = _find_bad_data(step)
    except Exception:
        finding = None  # the step cannot be run again, such as one of a compiled model
    finally:
        hook.remove()
    if finding is not None:
        text = f"{buffer.name} keeps the {_result_text(Range.measure(tensor))} that the module gets"
        text += ", also if the step is left out; every evaluation uses it"
        # the recorded calls may be those of a step that the program left out
        details = [row for row in finding.details if row[0] not in ("loss", "gradient")]
        return replace(finding, details=(*details, ("buffer", text)))
    variances = [_measure_variance(item) for item in inputs]
    is_variance = buffer.key.endswith("var") and tensor.dtype == torch.float16
    return _format_finding(
        "RN039",
        Place(symbol=buffer.name),
        (),
        name=buffer.name,
        result=_result_text(Range.measure(tensor)),
        has=format_dtype(tensor.dtype),
        count=int((~tensor.isfinite()).sum()),
        total=tensor.numel(),
        module=_module_text(step, module, buffer.name.rpartition(".")[0]),
        variance=f"{max(variances):.3g}" if variances and is_variance else "",
        inputs=bool(inputs),
    )


def _module_text(step: Step, module: nn.Module, path: str) -> str:
    """Returns the code with which the program can name a module of its model."""
    entries = [entry for entry in step.entries if entry.is_module]
    entry = next((x for x in entries if any(m is module for m in x.function.modules())), None)
    model = "model" if entry is None else entry.owner or "model"
    if not path:
        return model
    is_attribute = all(name.isidentifier() for name in path.split("."))
    return f"{model}.{path}" if is_attribute else f'{model}.get_submodule("{path}")'


def _measure_variance(tensor: Tensor) -> float:
    """Returns the largest variance of a channel, that is, over all dimensions but the second."""
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return 0.0
    values = tensor.detach().float().transpose(0, 1).flatten(1)
    return float(values.var(1, correction=0).max())


def _list_bad_rows(tensor: Tensor) -> str:
    """Returns the numbers of the rows with NaN or inf, such as "10, 11"."""
    bad = ~tensor.isfinite()
    rows = bad.flatten(1).any(1) if tensor.dim() > 1 else bad.flatten()
    numbers = [int(row) for row in rows.nonzero().flatten()]
    text = ", ".join(map(str, numbers[:8]))
    return f"{text} and {len(numbers) - 8} more" if len(numbers) > 8 else text


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _models(step: Step) -> list[nn.Module]:
    models = {id(entry.function): entry.function for entry in step.entries if entry.is_module}
    return list(models.values())


def _find_bad_data(step: Step) -> Finding | None:
    """Searches for bad input data, that is, for an argument with NaN or inf that no recorded call
    computed. Returns a finding about the first such argument.
    """
    for entry in step.entries:
        bad = [(name, t) for name, t in _named_arguments(entry) if _is_bad_data(t)]
        is_function = not entry.takes_part and not entry.is_module
        if is_function and (finding := _explain_result(entry)) is not None:
            return finding
        if bad and entry.takes_part:
            finding = None if step.bad_call is None else _explain_sampling(step.bad_call)
            return finding or _explain_data(entry, *bad[0])
    return None


def _explain_sampling(entry: Entry) -> Finding | None:
    """Returns the finding about a call of a module without a gradient before a step, such as one
    that samples actions. Its weights may have changed since: then its result may be finite.
    """
    finding = explain_call(entry)
    return None if finding.code == "RN036" else finding


def _find_bad_frozen_module(step: Step) -> Finding | None:
    """Searches for a module without a gradient, such as a VAE or a text encoder, that returns NaN or
    inf for finite inputs. Runs its call again and returns the finding about the operator.
    """
    for entry in step.entries:
        if not entry.is_module or entry.takes_part:
            continue
        is_bad = any(_is_bad_data(tensor) for tensor in entry.outputs)
        if is_bad and all(_is_finite(tensor) for _, tensor in _named_arguments(entry)):
            return _explain_frozen_module(entry, step)
    return None


def _explain_frozen_module(entry: Entry, step: Step) -> Finding | None:
    """Runs a recorded call of a module again and returns the finding about it."""
    replay = Replay(step)
    replay.run_frozen_module(entry)
    event = _find_bad_operator(replay, entry)
    if event is None:
        return None
    run_again = replay.run_trial(lambda other: other.run_frozen_module(entry))
    return _explain_event(event, step, replay.watch, run_again)


def _explain_result(entry: Entry) -> Finding | None:
    """Returns the finding about a function without a gradient that returns NaN or inf for finite
    inputs.
    """
    inputs = [tensor for _, tensor in _named_arguments(entry)]
    is_bad = not all(_is_finite(tensor) for tensor in entry.outputs)
    if not is_bad or entry.is_overwritten or entry.name.rstrip("_") in CONSTANT_WRITERS:
        return None
    if not inputs or not all(_is_finite(tensor) for tensor in inputs):
        return None
    ranges = [Range.measure(tensor) for tensor in inputs]
    line = _statement_or_empty(entry.site)
    part = read_part(entry.position)
    name = _operation_name(entry)
    kind = ""
    value = f"{min(item.low for item in ranges):.3g}"
    if name in _LOGARITHMS:
        kind = "negative" if float(value) < 0 else "log"
    elif name in _DIVISIONS_OF_TENSORS:
        kind = "zero"
    elif name == "pow" and ranges[0].zeros and _read_exponent(entry) < 0:
        kind = "negative_power"
        value = f"{_read_exponent(entry):g}"
    elif name in _STATISTICS:
        results = max(entry.outputs[0].numel(), 1)
        kind = _classify_count([tensor.numel() // results for tensor in inputs])
    divisor = _name_divisor(line if part is None else part.text)
    small = "1e-4" if entry.outputs[0].dtype == torch.float16 else "1e-6"
    details = [
        ("input", f"{format_dtype(tensor.dtype)}[{' '.join(map(str, tensor.shape))}]  {item}")
        for tensor, item in zip(inputs, ranges)
    ]
    return _format_finding(
        "RN033",
        _place(entry.site, ""),
        tuple(details),
        operator=entry.name.strip("_"),
        result=_result_text(Range.measure(entry.outputs[0])),
        line=line,
        at=_location(entry.site),
        kind=kind,
        value=value,
        part=part.text if part is not None and part.is_one_of_several else "",
        divisor=divisor,
        bounded=_bound_divisor(divisor, ranges[-1].low, small),
        input=_read_part_input(part),
        small=small,
        largest=f"{max(item.magnitude for item in ranges):.3g}",
    )


def _read_exponent(entry: Entry) -> float:
    """Returns the exponent of a recorded power, or 0 if it is not a number."""
    exponent = entry.kwargs.get("exponent", entry.args[1] if len(entry.args) > 1 else 0)
    return float(exponent) if isinstance(exponent, (int, float)) else 0.0


def _classify_count(counts: Sequence[int]) -> str:
    """Determines whether a mean or a standard deviation has too few values."""
    if 0 in counts:
        return "empty"
    return "single" if 1 in counts else ""


def _is_bad_data(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.requires_grad:
        return False
    # -inf is usual in a mask
    return bool((tensor.isnan() | (tensor == float("inf"))).any())


def _named_arguments(entry: Entry) -> list[tuple[str, Tensor]]:
    named_values: list[tuple[str, Any]] = [
        (f"argument {i}", value) for i, value in enumerate(entry.args)
    ]
    named_values += list(entry.kwargs.items())
    return [(name, tensor) for name, value in named_values for tensor in collect_tensors(value)]


def _explain_data(entry: Entry, name: str, tensor: Tensor) -> Finding:
    bad = ~tensor.isfinite()
    label = _argument_text(entry, name)
    return _format_finding(
        "RN031",
        _place(entry.site, ""),
        (("line", "" if entry.site is None else _statement(entry.site)),),
        value=label,
        variable=label if label.isidentifier() else "",
        has=f"{format_dtype(tensor.dtype)}[{' '.join(map(str, tensor.shape))}]",
        count=int(bad.sum()),
        total=tensor.numel(),
        rows=_list_bad_rows(tensor),
        at=f"{entry.name} at {_location(entry.site)}",
        what="NaN" if bool(tensor.isnan().any()) else "inf",
    )


def _argument_text(entry: Entry, name: str) -> str:
    """Returns the name of the variable that the program passes as this argument. If this variable
    is not known, returns `name`.
    """
    if not name.startswith("argument ") or entry.site is None:
        return name
    import ast

    try:
        tree = ast.parse(_statement(entry.site).strip().rstrip(":"))
    except SyntaxError:
        return name
    index = int(name.removeprefix("argument "))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = [ast.unparse(call.args[index]) for call in calls if index < len(call.args)]
    names = [text for text in texts if text.isidentifier()]
    return names[-1] if names else name


def _find_bad_operator(replay: Replay, entry: Entry) -> Event | None:
    """Returns the operator that produced the first NaN or inf in a call. A constant is a cause only
    if it reaches the result.
    """
    events = [event for event in replay.watch.events if event.written is None]
    return _culprit(replay.find_sources_of_call(entry)) or _culprit(events)


def _culprit(events: Sequence[Event]) -> Event | None:
    """Returns the operator that produced the first NaN or inf. Operators that only write a
    constant, such as the -inf of a mask, are left out. If the operator gets inf from a call that was
    not run again, the result is the operator that makes NaN from it.
    """
    origins = [event for event in events if event.is_origin]
    made_nan = [e for e in origins if e.makes_nan or e.parts or _read_written(e) == "NaN"]
    if made_nan:
        first = made_nan[0]
        root = first.root()
        if root.is_origin and not _is_masked_softmax(first, root):
            return root
        return first
    return origins[0] if origins else None


def _is_masked_softmax(event: Event, root: Event) -> bool:
    """True if a softmax makes NaN from rows that are -inf, such as the logarithm of a mask. In other
    rows, -inf means a position that is masked.
    """
    is_softmax = event.operator in _SOFTMAXES and event.makes_nan
    return is_softmax and not root.parts and root.result.infinity == "-inf"


def _explain_event(event: Event, step: Step, watch: Watch, run_again: RunTrial) -> Finding:
    """Returns the finding about an operator.

    watch      the run in which the result of the operator was not finite
    run_again  runs the step through a trial
    """
    move = _find_move(event)
    if move is not None:
        rounding = find_last_rounding(watch.roundings, event.ordinal, run_again)
        return _explain_move(event, step, move, rounding)
    hidden = _find_hidden_infinity(event)
    hidden = hidden or _find_hidden_exponential(event)
    if hidden is not None:
        return _explain_event(hidden, step, watch, run_again)
    proof = prove_lost_numbers(watch.numbers, event.operator, event.ordinal, run_again)
    if proof and not _are_smaller_than_underflow(proof, event):
        finding = _explain_lost_numbers(event, step, proof)
        return _add_next_fault(finding, step, proof)
    small = "1e-4" if event.dtype == torch.float16 else "1e-6"
    form = describe_form(watch.find_form(event), small)
    if event.parts:
        return _explain_overflow(event, step, watch.events, form)
    kind, facts = _classify(event, step)
    if kind == "exponential":
        facts |= _describe_discard(event, watch.events)
    divisor = _name_divisor(_expression(event))
    low = event.inputs[-1].run.low if event.inputs else 0.0
    is_alone = kind not in _CLAMPED_INPUTS or "discard" in facts
    others = [] if is_alone else _list_like_events(event, watch.events)
    return _format_finding(
        "RN033",
        _place(event.site, event.module),
        _details(event, step),
        operator=_operator_text(event),
        result=_result_text(event.result),
        backward=event.is_derivative,
        line=_line(event),
        at=_location(event.site),
        kind=kind,
        value=facts.get("value", ""),
        weight=facts.get("weight", ""),
        part=_read_part(event),
        input=_read_input(event),
        root="sqrt" in _expression(event),
        form=form,
        small=small,
        edge=f"torch.finfo({event.dtype}).eps" if event.dtype in NARROW_FLOATS else "1e-6",
        divisor=facts.get("divisor", "") or divisor,
        bounded=facts.get("bounded", "") or _bound_divisor(divisor, low, small),
        function=_read_function(event),
        shifted=facts.get("shifted", ""),
        discard=facts.get("discard", ""),
        mask=facts.get("mask", ""),
        others=" and ".join(others),
        source=facts.get("source", ""),
        label=facts.get("label", ""),
        infinity=facts.get("infinity", ""),
        written=facts.get("written", ""),
        finite=facts.get("finite", ""),
        factor=facts.get("factor", ""),
        condition=facts.get("condition", ""),
        state=facts.get("state", ""),
        count=facts.get("count", ""),
        library=event.site is not None and is_library_file(event.site.file),
        largest=f"{max((item.run.magnitude for item in event.inputs), default=0):.3g}",
    )


def _find_hidden_infinity(event: Event) -> Event | None:
    """Returns the operator that makes an inf, if the event divides by a 0 that is the quotient of a
    number by this inf.
    """
    if event.operator not in _DIVISIONS or not _divides_by_zero(event):
        return None
    root = event.inputs[-1].infinite_divisor
    return None if root is None else root.root()


def _find_hidden_exponential(event: Event) -> Event | None:
    """Returns the exponential that gives inf, if its backward multiplies this inf by a gradient of
    0, such as one of `torch.where`. The result of forward is finite then.
    """
    if not event.is_derivative or event.operator != "mul" or not event.makes_nan:
        return None
    infinite = [item for item in event.inputs if item.run.has_infinity and item.origin is not None]
    roots = [item.origin.root() for item in infinite if item.origin is not None]
    overflows = [x for x in roots if x.operator in _EXPONENTIALS and x.is_origin and not x.parts]
    return overflows[0] if overflows else None


def _describe_discard(event: Event, events: Sequence[Event]) -> dict[str, str]:
    """Returns the values for the text about a product with 0, such as that with a mask, which
    discards each inf of an exponential and gives NaN.
    """
    for product in events:
        # another factor than 0 would leave an inf
        is_discard = product.operator == "mul" and product.makes_nan
        if not is_discard or product.result.has_infinity:
            continue
        for index, item in enumerate(product.inputs):
            if item.run.has_infinity and item.origin is not None and item.origin.root() is event:
                return _describe_product(event, product, 1 - index)
    return {}


def _describe_product(event: Event, product: Event, index: int) -> dict[str, str]:
    """Returns the values for the text about a product that discards each inf of an exponential.

    index  which factor of the product is the mask
    """
    if product.is_backward:
        return {"discard": "backward"}
    mask = _read_mask(_expression(product), index)
    if event.site is None or product.site is None or event.site.code is not product.site.code:
        mask = ""
    return {"discard": f"`{_expression(product)}` ({_location(product.site)})", "mask": mask}


def _read_mask(line: str, index: int) -> str:
    """Returns a factor of a product without its casts, such as `mask` for `mask.to(x.dtype)`."""
    factor = _read_factor(line, index)
    if not factor:
        return ""
    node = ast.parse(factor, mode="eval").body
    while True:
        match node:
            case ast.Call(ast.Attribute(owner, name)) if name in _CASTS:
                node = owner
            case _:
                return _format_operand(node)


def _list_like_events(event: Event, events: Sequence[Event]) -> list[str]:
    """Returns the other expressions of forward that apply the same operator to finite values for
    which it is not finite either, with their lines. After a fix of one place, they would fail next:
    a VAE takes the exponential of its log-variance in two functions.
    """
    if event.is_backward:
        return []
    places: dict[tuple[str, str], None] = {}
    for other in events:
        is_like = other.operator == event.operator and other.has_finite_inputs
        if not is_like or other.is_backward or other.site is None or other.parts:
            continue
        if not is_library_file(other.site.file):
            places[_expression(other), _location(other.site)] = None
    places.pop((_expression(event), _location(event.site)), None)
    return [f"`{text}` ({location})" for text, location in places]


def _find_move(event: Event) -> Move | None:
    """Returns the operator whose rounding moved the input of an operator out of its domain."""
    domain = find_domain(event.operator, event.settings)
    if not domain or not event.result.has_nan:
        return None
    # the exponent of a power has no such domain
    return next((item.moves[domain] for item in event.inputs[:1] if domain in item.moves), None)


def _explain_move(event: Event, step: Step, move: Move, rounding: Rounding | None) -> Finding:
    """Returns the finding about a value that rounding moved out of the domain of an operator.

    rounding  the last operator whose rounding is enough for this, if it is known
    """
    line = _statement_or_empty(move.site)
    rounded_line = "" if rounding is None else _statement_or_empty(rounding.site)
    is_elsewhere = rounded_line not in ("", line)
    dtype = move.dtype if rounding is None else rounding.dtype
    return _format_finding(
        "RN038",
        _place(move.site, event.module),
        (("line", line), *_details(event, step)[1:]),
        operator=_operator_text(event),
        domain=find_domain(event.operator, event.settings),
        backward=event.is_derivative,
        line=_line(event),
        at=_location(event.site),
        part=_read_part(event),
        input=_read_input(event),
        move_line=line,
        move_at=_location(move.site),
        rounded_line=rounded_line if is_elsewhere else "",
        rounded_at="" if rounding is None else _location(rounding.site),
        value=f"{move.value:.4g}",
        exact=f"{move.exact:.4g}",
        has=format_dtype(dtype),
        dtype=str(dtype),
        variables=" and ".join(list_variables(line)),
        target=read_target(line),
        root=event.operator in _ROOTS,
        autocast=any(entry.autocast for entry in step.entries),
        device=_device_type(step),
    )


def _explain_lost_numbers(
    event: Event, step: Step, replacements: dict[LostNumber, Replacement]
) -> Finding:
    """Returns the finding about the numbers of a line whose rounding is the reason for NaN or
    inf.
    """
    number = next(iter(replacements))
    line = "" if number.site is None else _statement(number.site)
    is_library_line = number.site is not None and is_library_file(number.site.file)
    details = [("line", line), *_setting_rows(replacements), *_details(event, step)[1:]]
    limit = float(torch.finfo(event.dtype).max)
    return _format_finding(
        "RN037",
        _place(number.site, event.module),
        tuple(details),
        operator=_operator_text(event),
        result=_result_text(event.result),
        backward=event.is_derivative,
        line=_line(event),
        at=_location(event.site),
        part=_read_part(event),
        parts=event.parts and event.exact.magnitude <= limit,
        has=format_dtype(number.dtype),
        autocast=any(entry.autocast for entry in step.entries),
        device=_device_type(step),
        owner=_owner_text(event),
        library=is_library_line,
        **_number_facts(replacements),
    )


def _add_next_fault(
    finding: Finding, step: Step, replacements: dict[LostNumber, Replacement]
) -> Finding:
    """Runs the whole step with other numbers in place of lost ones. If it is still not finite, adds
    the operator at fault and its fix: a bound in place of 1e-8 keeps a division finite, but not the
    derivative of the root before it.
    """
    if not step.losses:
        return finding
    replay = Replay(step)
    replay.watch.replacements = replacements
    try:
        replay.run_backward()
    except RuntimeError:
        return finding
    sources = [event for event in replay.find_sources_of_gradients() if event.is_backward]
    event = _culprit(replay.find_sources_of_loss()) or _culprit(sources)
    if event is None or event.parts:
        return finding
    following = _explain_event(event, step, replay.watch, lambda _: None)
    details = (*finding.details, ("next", f"with this change, {following.cause}"))
    return replace(finding, details=details, fix=f"{finding.fix}; and {following.fix}")


def _are_smaller_than_underflow(numbers: Collection[LostNumber], event: Event) -> bool:
    """Whether an earlier operator already turned values into 0 that are larger than an eps. A bound
    replaces these values, an eps only adds to them.
    """
    lost = _find_underflow(event)
    if lost is None or any(n.is_bound or n.nearest for n in numbers):
        return False
    if any(n.operator == lost.operator for n in numbers):
        return False
    return lost.exact.magnitude > 2 * max(abs(n.value) for n in numbers)


def _find_underflow(event: Event) -> Event | None:
    """Returns the operator that turned a divisor, or the input of a logarithm, into 0."""
    if event.operator not in _DIVISIONS | _LOGARITHMS:
        return None
    # the divisor is the last input
    return next((item.lost for item in event.inputs[::-1] if item.lost is not None), None)


def _number_facts(replacements: dict[LostNumber, Replacement]) -> dict[str, Any]:
    """Returns the values for the texts about the numbers of one line that have no effect."""
    number = next(iter(replacements))
    settings = {n: find_number_setting(n.expression, n.value, n.site) for n in replacements}
    changes = [_describe_change(n, r.text, settings[n]) for n, r in replacements.items()]
    bounds = [str(n.nearest) for n in replacements if n.is_bound]
    return {
        "becomes": " and ".join(n.describe() for n in replacements),
        "bound": " and ".join(dict.fromkeys(bounds)),
        "change": " and ".join(changes),
        "number_line": "" if number.site is None else _statement(number.site),
        "number_at": _location(number.site),
    }


def _setting_rows(numbers: Collection[LostNumber]) -> list[tuple[str, str]]:
    """Returns a row for each number that another line sets, with this line."""
    rows: list[tuple[str, str]] = []
    for number in numbers:
        setting = find_number_setting(number.expression, number.value, number.site)
        if setting is not None:
            text = f"`{number.expression}` from `{setting.text}` at {setting.location}"
            rows.append(("number", text))
    return list(dict.fromkeys(rows))


def _describe_change(number: LostNumber, replacement: str, setting: NumberSetting | None) -> str:
    """Returns the change of the line that sets a number, or of the line that uses it."""
    if setting is None or number.is_literal:
        return number.describe_change(replacement)
    if setting.is_default:
        return f"pass {replacement} in place of the default in `{setting.text}`"
    return f"write {replacement} in `{setting.text}` ({setting.location})"


def _device_type(step: Step) -> str:
    outputs = [tensor for entry in step.entries for tensor in entry.outputs]
    return next((str(t.device.type) for t in [*step.losses, *outputs]), "cpu")


def _lacks_bf16(device_type: str) -> bool:
    """Whether a device of this type has no bf16, such as a T4."""
    rows = [row for row in detect_devices() if (row["kind"] == "cpu") == (device_type == "cpu")]
    return any(row.get("bf16") == "none" for row in rows)


def _explain_overflow(event: Event, step: Step, events: Sequence[Event], form: str) -> Finding:
    """Returns the finding about a result that does not fit in its dtype.

    form  the change of the program to a stable function, or ""
    """
    lost = _find_underflow(event)
    scale, scale_site = _find_loss_scale(step) if event.is_backward else (None, None)
    is_library_line = event.site is not None and is_library_file(event.site.file)
    limit = float(torch.finfo(event.dtype).max)
    return _format_finding(
        "RN030",
        _place(event.site, event.module),
        _details(event, step),
        operator=_operator_text(event),
        has=format_dtype(event.dtype),
        result=_result_text(event.result),
        largest=f"{event.exact.magnitude:.4g}",
        backward=event.is_derivative,
        part=_read_part(event),
        product=event.operator in _PRODUCTS_WITH_SCALE,
        cast=event.op.is_to_call,
        mask=event.exact.magnitude > 0.99 * torch.finfo(torch.float32).max,
        room=_adds_to_lowest_value(event),
        fits=event.is_derivative or event.exact.magnitude <= limit,
        layer=event.module if event.in_layer or is_library_line else "",
        owner=_owner_text(event),
        lost=lost is not None,
        logarithm=event.operator in _LOGARITHMS,
        form=form,
        lost_line="" if lost is None else _line(lost),
        lost_at="" if lost is None else _location(lost.site),
        exponential=event.operator in _EXPONENTIALS,
        lost_part="" if lost is None else _read_part(lost),
        lost_value="" if lost is None else f"{lost.exact.magnitude:.3g}",
        line=_line(event),
        at=_location(event.site),
        dtype=str(event.dtype),
        device=_device_type(step),
        scaler=event.site is not None and "grad_scaler" in event.site.file,
        autocast=any(entry.autocast for entry in step.entries),
        integers=event.op.is_to_call and not event.inputs,
        loss_scale="" if scale is None else f"{scale:g}",
        scale_line="" if scale_site is None else _statement(scale_site),
        scale_at=_location(scale_site),
        divisor=_choose_divisor([event, *events]) if event.is_backward else "",
        has_scaler=step.scale is not None,
        no_bf16=_lacks_bf16(_device_type(step)),
        others=" and ".join(_list_like_overflows(event, events)),
    )


def _list_like_overflows(event: Event, events: Sequence[Event]) -> list[str]:
    """Returns the later lines of the same function whose results leave the range of their dtype too,
    and not because of this event.
    """
    if event.is_backward or event.site is None:
        return []
    lines = []
    for other in events:
        is_like = other.parts and other.has_finite_inputs and not other.is_backward
        if not is_like or other.site is None or other.site.line <= event.site.line:
            continue
        if (other.site.file, other.site.function) == (event.site.file, event.site.function):
            lines.append(_location(other.site))
    return list(dict.fromkeys(lines))


def _statement_or_empty(site: Site | None) -> str:
    return "" if site is None else _statement(site)


def _choose_divisor(events: Sequence[Event]) -> int:
    """Returns the power of two by which a loss is divided so that the gradients of a backward fit in
    their dtypes, with room for a step whose gradients are four times as large.
    """
    ratios = [
        event.exact.magnitude / float(torch.finfo(event.dtype).max)
        for event in events
        if event.is_backward and event.dtype.is_floating_point
    ]
    ratio = max((ratio for ratio in ratios if math.isfinite(ratio)), default=1.0)
    return int(2 ** math.ceil(math.log2(max(4 * ratio, 2))))


def _owner_text(event: Event) -> str:
    """Returns the program's expression for the model in which an operator runs, or its class."""
    if event.entry is None or not event.entry.is_module:
        return ""
    return event.entry.owner or event.entry.name


def _adds_to_lowest_value(event: Event) -> bool:
    """True if an operator adds values to a mask that contains the lowest value of the dtype."""
    if event.operator not in ("add", "sub"):
        return False
    limit = float(torch.finfo(event.dtype).max)
    magnitudes = sorted(item.run.magnitude for item in event.inputs)
    return len(magnitudes) == 2 and magnitudes[0] < limit / 2 and magnitudes[1] == limit


def _find_loss_scale(step: Step) -> tuple[float | None, Site | None]:
    """Returns the number by which the program multiplies the loss before backward, and the line.
    Loss scalers of PyTorch are left out, because they lower their scale.
    """
    if step.scale is not None:
        return None, None
    for entry in step.entries:
        is_loss = any(output is loss for output in entry.outputs for loss in step.losses)
        if not is_loss or entry.name.strip("_") not in ("mul", "rmul", "imul", "multiply"):
            continue
        factors = [_read_number(value) for value in entry.args]
        largest = max((factor for factor in factors if factor is not None), default=0.0)
        if largest >= _LOSS_SCALE:
            return largest, entry.site
    return None, None


def _read_number(value: Any) -> float | None:
    """Returns a number, or the value of a scalar tensor without a gradient."""
    if isinstance(value, Tensor):
        is_constant = value.numel() == 1 and not value.requires_grad
        return float(value) if is_constant else None
    return float(value) if isinstance(value, (int, float)) else None


def _classify(event: Event, step: Step) -> tuple[str, dict[str, str]]:
    """Determines why an operator returns NaN or inf even if it computes in fp32. Returns a short
    name of the reason, and the values for the text about this reason.
    """
    name = event.operator
    if event.written is not None:
        return "written", _describe_written(event)
    if name in _SOFTMAXES and event.makes_nan:
        return _classify_masked(event)
    if name.startswith("nll_loss") and event.makes_nan:
        return "labels", {"value": str(event.settings.get("ignore_index", -100))}
    if event.divisor is not None:
        part = event.part
        matrix = "" if part is None else read_matrix(part.node)
        kind = "triangular" if event.operator == "linalg_solve_triangular" else "decomposition"
        return kind, describe_divisor(event.divisor, matrix)
    if event.makes_nan and any(item.run.has_infinity for item in event.inputs):
        return _classify_infinity(event)
    kind, facts = _classify_domain(event)
    if kind:
        return kind, facts
    if name in _DIVISIONS and _divides_by_zero(event):
        ignored_label = event.inputs[0].ignored_label
        if ignored_label is not None:
            return "labels", {"value": str(ignored_label)}
        return _classify_division(event), {}
    kind, facts = _classify_values(event)
    if kind:
        return kind, facts
    if any(item.run.magnitude > _HUGE for item in event.inputs):
        return _classify_large(step)
    return "", {}


def _classify_masked(event: Event) -> tuple[str, dict[str, str]]:
    """Determines why every position of a row is -inf, for a softmax."""
    root = event.root()
    source = "" if root is event else f"`{_line(root)}` ({_location(root.site)})"
    limit = float(torch.finfo(root.dtype).max)
    if root.operator == "add" and any(item.run.low < -limit / 2 for item in root.inputs):
        code = _read_value(_line(root))
        bounded = f"({code}).clamp(min=torch.finfo({root.dtype}).min)"
        return "lowest", {"source": source, "bounded": bounded, "value": str(root.dtype)}
    mask = "" if event.part is None else _read_keyword(event.part.node, "key_padding_mask")
    return "masked", {"source": source, "mask": mask}


def _read_value(line: str) -> str:
    """Returns the expression whose value a statement returns or assigns, or "x"."""
    try:
        body = ast.parse(line.strip()).body
    except SyntaxError:
        body = []
    match body:
        case [ast.Return(ast.expr() as value)] | [ast.Assign(_, value)]:
            return ast.unparse(value)
    return "x"


def _read_keyword(node: ast.expr, name: str) -> str:
    """Returns the argument that a call passes by a name, if it is a variable."""
    keywords = node.keywords if isinstance(node, ast.Call) else []
    values = [keyword.value for keyword in keywords if keyword.arg == name]
    return next((value.id for value in values if isinstance(value, ast.Name)), "")


def _classify_domain(event: Event) -> tuple[str, dict[str, str]]:
    """Determines whether an operator gets a value for which it is not defined, such as a logarithm
    that gets 0.
    """
    domain = find_domain(event.operator, event.settings)
    for item in event.inputs[:1] if event.makes_nan else []:
        if is_outside(domain, item.run.low, item.run.high):
            value = item.run.high if domain == BEYOND_ONE and item.run.high > 1 else item.run.low
            return domain, {"value": f"{value:.3g}"}
    if event.operator in _LOGARITHMS:
        return "log", {}
    if event.operator == "log1p" and event.result.has_infinity:
        return "log1p", {}
    return "", {}


def _read_written(event: Event) -> str:
    return "" if event.written is None else event.written.constant


def _describe_written(event: Event) -> dict[str, str]:
    """Returns the values for the text about a constant that an operator writes."""
    assert event.written is not None
    part = event.part
    node = None
    if part is not None and event.written.condition is not None:
        node = read_condition(part.node)
    return {
        "infinity": event.written.constant,
        "condition": "" if node is None else ast.unparse(node),
        "state": str(event.written.condition),
        "count": f"{event.written.count} of {event.result.count}",
    }


def _classify_values(event: Event) -> tuple[str, dict[str, str]]:
    """Determines whether an exponential, a product with inf or a statistic has no finite result."""
    name = event.operator
    exponent = event.settings.get("exponent", 0) if name == "pow" and event.is_derivative else 0
    if exponent < 0 and event.inputs[0].run.zeros:
        return "power", {"value": f"{exponent + 1:.3g}"}
    power = event.settings.get("exponent", 0) if name == "pow" else 0
    if isinstance(power, (int, float)) and power < 0 and event.inputs[0].run.zeros:
        return "negative_power", {"value": f"{power:g}"}
    if name in _EXPONENTIALS and event.inputs:
        weight = event.inputs[0].path.removeprefix("parameter ")
        is_parameter = event.inputs[0].path.startswith("parameter ")
        return "exponential", {"weight": weight if is_parameter else ""}
    if name == "mul" and event.makes_nan and _has_infinite_number(event):
        return "infinity", {}
    if name in _STATISTICS:
        results = max(event.result.count, 1)
        kind = _classify_count([math.prod(item.shape) // results for item in event.inputs])
        if kind:
            return kind, {}
    if name in _MEAN_LOSSES and any(0 in item.shape for item in event.inputs):
        return "empty", {}
    return "", {}


def _has_infinite_number(event: Event) -> bool:
    """Whether an operator multiplies zeros by a number that is inf or -inf."""
    factors = [value for value in event.settings.values() if isinstance(value, float)]
    return any(map(math.isinf, factors)) and any(item.run.zeros for item in event.inputs)


def _classify_infinity(event: Event) -> tuple[str, dict[str, str]]:
    """Determines how an operator makes NaN from an inf or -inf that it gets, such as 0 * -inf."""
    index, infinite = next((i, x) for i, x in enumerate(event.inputs) if x.run.has_infinity)
    others = [item for item in event.inputs if item is not infinite]
    root = infinite.origin
    if root is not None and not root.is_constant and not root.is_origin:
        root = None  # it passes on an inf that comes from outside of this run
    written = infinite.run.infinity if root is None else root.result.infinity
    facts = {
        "infinity": infinite.run.infinity,
        "written": written,
        "finite": "-1e4" if written == "-inf" else "1e4",
        "label": infinite.label,
        "source": "" if root is None else f"`{_line(root)}` ({_location(root.site)})",
        "factor": _read_factor(_expression(event), index),
    }
    name = event.operator
    if name in _PRODUCTS and any(item.run.zeros for item in others):
        return "product", facts
    if name in ("sub", "rsub") and any(item.run.has_infinity for item in others):
        return "difference", facts
    return "infinite", facts


def _read_factor(line: str, index: int) -> str:
    """Returns one of the two factors of an expression that is a product, or in a statement with one
    product. Returns "" for other code.
    """
    try:
        body = ast.parse(line).body
    except SyntaxError:
        return ""
    nodes = [node for statement in body for node in ast.walk(statement)]
    products = [x for x in nodes if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult)]
    match body:
        case [ast.Expr(ast.BinOp(_, ast.Mult()) as product)]:
            products = [product]
    if len(products) != 1 or index > 1:
        return ""
    return _format_operand(products[0].right if index else products[0].left)


def _divides_by_zero(event: Event) -> bool:
    has_dividend = event.operator in ("div", "addcdiv")
    # the divisor is the last input
    divisors = event.inputs[1:][-1:] if has_dividend else event.inputs
    return any(item.run.zeros for item in divisors)


def _classify_division(event: Event) -> str:
    if not event.is_derivative:
        is_count = not event.inputs[-1].dtype.is_floating_point
        return "count" if is_count else "zero"
    if _read_function(event) in _EDGE_FUNCTIONS:
        return "edge"
    expression = _expression(event)
    if any(word in expression for word in ("sqrt", "norm", "** 0.5", "pow(0.5")):
        return "derivative"
    return "zero" if _list_divisors(expression) else "edge"


def _list_divisors(line: str) -> list[str]:
    """Returns the divisors in a statement such as `mean = total / count`."""
    try:
        nodes = list(ast.walk(ast.parse(line)))
    except SyntaxError:
        return []
    divisors: list[ast.expr] = []
    for node in nodes:
        match node:
            case ast.BinOp(_, ast.Div(), right):
                divisors.append(right)
            case ast.Call(ast.Attribute(_, name), [*_, last]) if _is_quotient(name):
                divisors.append(last)
    return [_format_operand(node) for node in divisors if not isinstance(node, ast.Constant)]


def _is_quotient(name: str) -> bool:
    """Whether a function divides, such as `div_` and `_foreach_addcdiv_`."""
    return name.strip("_").removeprefix("foreach_") in _QUOTIENTS


def _name_divisor(line: str) -> str:
    """Returns the divisor of an expression that is a division. Returns the divisor of another
    expression or of a statement if it has only one.
    """
    divisors = _list_divisors(line)
    if not divisors:
        return ""
    return divisors[0] if _is_division(line) or len(set(divisors)) == 1 else ""


def _bound_divisor(divisor: str, low: float, small: str) -> str:
    """Returns the code that keeps a divisor away from 0. A bound would replace all negative values,
    such as those of a difference.

    low  the smallest value of the divisor
    """
    name = divisor or "divisor"
    node = ast.parse(name, mode="eval").body
    is_difference = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)
    if low < 0 or is_difference:
        return f"torch.where({name}.abs() < {small}, {small}, {ast.unparse(node)})"
    return f"{name}.clamp(min={small})"


def _is_division(line: str) -> bool:
    try:
        node = ast.parse(line, mode="eval").body
    except SyntaxError:
        return False
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _format_operand(node: ast.expr) -> str:
    """Returns the code of an expression so that a method can be called on it."""
    is_primary = isinstance(node, (ast.Name, ast.Call, ast.Attribute, ast.Subscript))
    return ast.unparse(node) if is_primary else f"({ast.unparse(node)})"


def _classify_large(step: Step) -> tuple[str, dict[str, str]]:
    """Determines whether values are very large because weights are very large."""
    named_tensors: list[tuple[str, Tensor]] = []
    for model in _models(step):
        named_tensors += model.named_parameters()
    if not named_tensors:
        leaves = [
            t
            for entry in step.entries
            for _, t in _named_arguments(entry)
            if read_grad_fn(t) is None
        ]
        named_tensors = [
            (f"a tensor of shape {tuple(t.shape)}", t) for t in leaves if t.requires_grad
        ]
    largest = [
        (float(p.detach().float().abs().max()), name) for name, p in named_tensors if p.numel()
    ]
    magnitude, name = max(largest, default=(0.0, ""))
    if magnitude < _HUGE_WEIGHT:
        return "large", {}
    return "weights", {"weight": name, "value": f"{magnitude:.3g}"}


def _details(event: Event, step: Step) -> tuple[tuple[str, str], ...]:
    details = [("line", _line(event))]
    if event.module and event.site is not None:
        details.append(("module", event.module))
    for item in event.inputs[:_EVENT_DETAILS]:
        details.append((item.label, describe_input(item)))
    exact = "" if str(event.exact) == str(event.result) else f"; in fp32 {event.exact}"
    details.append(("result", f"{format_dtype(event.dtype)}  {event.result}{exact}"))
    details.append(("phase", "backward" if event.is_backward else "forward"))
    if not step.losses:
        return tuple(details)  # a program without steps
    if step.losses and not event.is_backward and all_finite(step.losses):
        details.append(("gradient", "0 * NaN: the loss leaves this result out"))
    losses = ", ".join(f"{float(loss.detach().float().sum()):.4g}" for loss in step.losses)
    losses = losses if step.quantity == "loss" else ""
    details.append((step.quantity, f"{losses} at step {step.number}".strip()))
    return tuple(details)


def _operator_text(event: Event) -> str:
    return str(event.operator).lstrip("_")


def _result_text(result: Range) -> str:
    if result.has_nan and result.has_infinity:
        return "NaN and inf"
    return "NaN" if result.has_nan else result.infinity


def _line(event: Event) -> str:
    return _statement_or_empty(event.site)


def _read_part(event: Event) -> str:
    """Returns the expression of the line that calls the operator, if the line has several of its
    kind, such as two logarithms.
    """
    part = event.part
    return part.text if part is not None and part.is_one_of_several else ""


def _read_function(event: Event) -> str:
    """Returns the name of the function that the program calls, such as `acos`, or ""."""
    node = None if event.part is None else event.part.node
    match node:
        case ast.Call(ast.Attribute(_, name)) | ast.Call(ast.Name(name)):
            return name.replace("arc", "a")
    return ""


def _read_input(event: Event) -> str:
    """Returns the input of a function of one tensor, such as `q` in `q.log()`, or ""."""
    return _read_part_input(event.part)


def _read_part_input(part: Part | None) -> str:
    node = None if part is None else read_input(part.node)
    return "" if node is None else _format_operand(node)


def _expression(event: Event) -> str:
    """Returns the expression that calls the operator, or its whole line."""
    part = event.part
    return _line(event) if part is None else part.text


def _statement(site: Site) -> str:
    """Returns the statement at a line, without a comment."""
    return read_statement(site).partition("  # ")[0]


def _location(site: Any) -> str:
    return "" if site is None else f"{short_path(site.file)}:{site.line}"


def _place(site: Any, symbol: str) -> Place:
    if site is None:
        return Place(symbol=symbol or None)
    return Place(file=short_path(site.file), line=site.line, symbol=symbol or site.function)


def _unknown(step: Step, reason: str) -> Finding:
    has_bad_loss = not all(bool(t.isfinite().all()) for t in step.losses)
    quantity = f"the {step.quantity}" if has_bad_loss else "a gradient"
    return _format_finding(
        "RN036", Place(), (), what=quantity, name="", reason=reason, between=False
    )


def explain_update(optimizer: Optimizer, number: int, models: Sequence[nn.Module]) -> Finding:
    """Returns the finding about an update after which weights contain NaN or inf. To find the
    cause, the function repeats the update of the first weight with NaN or inf. For this, it uses
    the gradient of the weight, and the optimizer states after the original update.
    """
    group, parameter = next(
        (group, p)
        for group in optimizer.param_groups
        for p in group["params"]
        if not bool(p.detach().isfinite().all())
    )
    name = _parameter_name(parameter, models)
    if parameter.grad is not None and not _is_finite(parameter.grad):
        reason = "the gradient was finite after backward, and not when the optimizer used it: code"
        reason += " between backward and step changed it, such as a division by a count of 0"
        place = Place(symbol=name)
        return _format_finding(
            "RN036", place, (), what="a weight", name="", reason=reason, between=True
        )

    def repeat_update() -> None:
        _repeat_update(optimizer, group, parameter)

    watch = watch_update(repeat_update)
    origins = [event for event in watch.events if event.is_origin and event.written is None]
    event = origins[0] if origins else None
    gradient = Range.measure(parameter.grad) if parameter.grad is not None else Range(0, 0)
    dtype = parameter.dtype
    facts: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "name": name,
        "has": format_dtype(dtype),
        "eps": group.get("eps", ""),
        "setting": "1e-8" if dtype in (torch.float32, torch.bfloat16) else "1e-4",
        "learning_rate": f"{float(group.get('lr', 0)):g}",
        "largest": f"{gradient.magnitude:.3g}",
    }
    if event is None and not _have_bad_states(optimizer, parameter):
        return _explain_bad_weight(name, parameter, number, is_first=number == 1)
    if event is None:
        reason = f"the update of {name} was run again with its gradient and was finite"
        return _format_finding(
            "RN036", Place(), (), what="a weight", name="", reason=reason, between=False
        )
    kind = _classify_update(event, group, dtype, gradient)
    proof = prove_lost_numbers(
        watch.numbers,
        event.operator,
        event.ordinal,
        lambda trial: watch_update(repeat_update, trial),
    )
    if proof and kind in ("", "zero"):
        kind = ""
        facts |= _number_facts(proof)
    setting_name = _find_bad_setting(group)
    if setting_name:
        kind = "setting"
        facts |= {"setting": setting_name, "eps": str(group[setting_name])}
    details = _setting_rows(proof) if proof and not kind else []
    details += [(item.label, describe_input(item)) for item in event.inputs]
    details.append(("result", f"{event.result}"))
    details.append(("step", str(number)))
    return _format_finding(
        "RN034",
        _place(event.site, type(optimizer).__name__),
        tuple(details),
        operator=_operator_text(event),
        result=_result_text(event.result),
        parts=event.parts,
        kind=kind,
        line=_line(event),
        at=_location(event.site),
        part=_read_part(event),
        divisor=_name_divisor(_expression(event)),
        lists=event.op.base_name.startswith("_foreach_"),
        small="1e-4" if dtype == torch.float16 else "1e-6",
        **facts,
    )


def _classify_update(
    event: Event, group: dict[str, Any], dtype: torch.dtype, gradient: Range
) -> str:
    """Determines why an operator of an update returns NaN or inf, from the settings of the parameter
    group and its inputs.
    """
    is_eps_lost = "eps" in group and float(torch.tensor(float(group["eps"]), dtype=dtype)) == 0
    divides = event.operator in _DIVISIONS
    if is_eps_lost and divides:
        return "eps"
    if event.parts:
        return ""
    step_size = gradient.magnitude * float(group.get("lr", 0))
    if event.has_finite_inputs and step_size > torch.finfo(dtype).max / 1e6:
        return "large"
    return "zero" if divides and _divides_by_zero(event) else ""


def _have_bad_states(optimizer: Optimizer, parameter: Tensor) -> bool:
    states = collect_tensors(list(optimizer.state.get(parameter, {}).values()))
    return not all(map(_is_finite, states))


def _find_bad_setting(group: dict[str, Any]) -> str:
    """Returns the name of a setting of a parameter group that is NaN or inf, such as a learning
    rate that a schedule computes.
    """
    for name, value in group.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if name != "params" and any(_is_bad_number(number) for number in numbers):
            return name
    return ""


def _is_bad_number(value: Any) -> bool:
    is_number = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
    return is_number and not math.isfinite(float(value))


def _repeat_update(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Updates a copy of one parameter, with the same optimizer class, settings and states."""
    clone = nn.Parameter(_zero_non_finite(parameter))
    if parameter.grad is not None:
        clone.grad = parameter.grad.detach().clone()
    state = {
        key: _zero_non_finite(value) if isinstance(value, Tensor) else copy.copy(value)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = [{**group, "params": [clone], "foreach": False, "fused": False}]
    copied.state = type(optimizer.state)(optimizer.state.default_factory)
    copied.state[clone] = state
    type(optimizer).step(copied)


def _zero_non_finite(tensor: Tensor) -> Tensor:
    """Returns a copy of the tensor in which NaN and inf are replaced by 0."""
    return tensor.detach().nan_to_num(0.0, 0.0, 0.0).clone()
