"""Runs the checked function once with one combination of dtypes and autocast, and records what
happens. The function may run unchanged, in fp64, or as plain PyTorch.

The autograd engine silently casts gradients. So the module records the gradients of a hand-written
backward before the engine casts them, both those that it receives and those that it returns. Rules
return values of the type `Fault`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.utils import _pytree as pytree

from ...doctor.compiler import run_without_compiler
from ...finding import Finding, Place
from ...observe.operators import Operator
from ...observe.tape import Tape
from ...pages.finding_sheet import load_finding_formatter
from .samples import Sample, Setting, Subject


@dataclass
class BackwardCall:
    """One call of a Function's backward.

    expected  for each input: the dtype to which autograd casts its gradient, or None if it needs no
              gradient
    leaves    for each input: the tensor itself if it is a leaf, else None
    returned  dtypes of the gradients that backward returned
    context   the ctx of the call, kept only if backward raised (reading saved tensors a second time
              would disturb checkpointing)
    """

    function: type
    incoming: list[Tensor] = field(default_factory=list)
    context: Any = None
    expected: list[torch.dtype | None] = field(default_factory=list)
    leaves: list[Tensor | None] = field(default_factory=list)
    returned: list[torch.dtype | None] | None = None

    def saved(self) -> list[Tensor]:
        """Returns the saved tensors of a backward that raised an error."""
        try:
            if self.context is not None:
                return [t for t in self.context.saved_tensors if isinstance(t, Tensor)]
            return []
        except RuntimeError:  # freed, or changed after they were saved
            return []


@contextmanager
def record_backward_calls() -> Iterator[list[BackwardCall]]:
    """Within this block every call of a hand-written backward is recorded, for all autograd
    Functions.
    """
    calls: list[BackwardCall] = []
    originals = {
        name: BackwardCFunction.__dict__[name]
        for name in ("apply", "apply_boxed")
        if name in BackwardCFunction.__dict__
    }

    def make_recorder(original: Any, boxed: bool) -> Any:
        def apply(ctx: Any, *grads: Any) -> Any:
            incoming = grads[0] if boxed else grads
            call = BackwardCall(ctx._forward_cls)
            call.incoming = [gradient for gradient in incoming if isinstance(gradient, Tensor)]
            for node, index in ctx.next_functions:
                leaf = getattr(node, "variable", None)
                call.leaves.append(leaf)
                dtype = None
                if leaf is not None:
                    dtype = leaf.dtype
                elif node is not None:
                    dtype = node._input_metadata[index].dtype
                call.expected.append(dtype)
            calls.append(call)
            try:
                result = original(ctx, *grads)
            except Exception:
                call.context = ctx
                raise
            gradients = result if isinstance(result, (tuple, list)) else (result,)
            call.returned = [getattr(gradient, "dtype", None) for gradient in gradients]
            return result

        return apply

    with mock.patch.multiple(
        BackwardCFunction,
        **{
            name: make_recorder(original, name == "apply_boxed")
            for name, original in originals.items()
        },
    ):
        yield calls


def function_classes(outputs: list[Tensor]) -> list[type]:
    """Returns the hand-written Functions in the autograd graph of these outputs. The Functions
    nearest to the outputs come first.
    """
    classes: dict[type, None] = {}
    queue = [t.grad_fn for t in outputs if t.grad_fn is not None]
    visited = set()
    while queue:
        node = queue.pop(0)
        if node in visited:
            continue
        visited.add(node)
        if isinstance(node, BackwardCFunction):
            classes.setdefault(node._forward_cls)
        queue += [above for above, _ in node.next_functions if above is not None]
    return list(classes)


_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def _compute_in_fp64(op: Operator, args: tuple, kwargs: dict) -> Any:
    """Computes an operator in fp64. Casts to narrower float dtypes are skipped."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in _NARROW:
            return torch.float64
        if isinstance(value, Tensor) and value.dtype in _NARROW and not op.func._schema.is_mutable:
            return value.to(torch.float64)
        return value

    args, kwargs = pytree.tree_map(widen, (args, kwargs))
    return pytree.tree_map(widen, op(*args, **kwargs))


@contextmanager
def fp64_arithmetic() -> Iterator[None]:
    """Within this block every operator computes in fp64, and fp64 is the default dtype.

    Code that does not consist of torch operators, such as a Triton kernel, is not affected.
    """
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Tape(_compute_in_fp64):
            yield
    finally:
        torch.set_default_dtype(previous_dtype)


class _PlainContext:
    """Takes the place of `ctx` if the forward of an autograd Function runs as ordinary code.
    Autograd differentiates this code, so the data that forward stores for backward is not used.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *args: Any) -> None:
        pass

    save_for_forward = save_for_backward
    mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore


@contextmanager
def plain_functions() -> Iterator[None]:
    """Within this block `SomeFunction.apply(...)` runs the Function's forward as ordinary code that
    autograd differentiates. The Function's backward never runs.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.setup_context is not Function.setup_context:
            return cls.forward(*args, **kwargs)
        return cls.forward(
            _PlainContext(tuple(isinstance(a, Tensor) and a.requires_grad for a in args)),
            *args,
            **kwargs,
        )

    with mock.patch.object(Function, "apply", classmethod(apply)):
        yield


FORWARD = "forward"
BACKWARD = "backward"


@dataclass
class Outcome:
    """The results of one run, or its error.

    stage           the stage at which `error` was raised, or None
    grads           name -> the gradient that the caller gets (after the cast by the autograd
                    engine), or None
    watched_inputs  name -> the tensor that was passed, and a copy of its values before the run
                    (only with `watch_inputs`)
    values          copies of the outputs as they were when forward returned
    functions       the hand-written Functions in the graph of the outputs
    """

    outputs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    functions: list[type] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    calls: list[BackwardCall] = field(default_factory=list)
    stage: str | None = None
    error: BaseException | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    grad_outputs: list[Tensor] = field(default_factory=list)
    watched_inputs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    changed_by_forward: set[str] = field(default_factory=set)

    @property
    def succeeded(self) -> bool:
        """True if the run ended without an error."""
        return self.error is None

    def results(self) -> dict[str, Tensor]:
        """Returns the outputs and the gradients, in a dict whose keys are their names."""
        if len(self.outputs) == 1:
            results = {"output": self.values[0]}
        else:
            results = {f"output {i}": value for i, value in enumerate(self.values)}
        for argument, gradient in self.grads.items():
            if gradient is not None:
                results[f"gradient of {argument}"] = gradient
        return results


def attempt(
    subject: Subject,
    sample: Sample,
    setting: Setting,
    *,
    widen_to: torch.dtype | None = None,
    frozen: str | None = None,
    seed: int = 0,
    context: Callable[[], Any] = nullcontext,
    watch_inputs: bool = False,
    gradient: Callable[[Tensor, int], Tensor] | None = None,
    backward_passes: int = 1,
    forward_only: bool = False,
    uses_compiler: bool = False,
) -> Outcome:
    """Runs forward and backward once.

    widen_to         the dtype to which all tensors are cast after they were rounded to the
                     setting's dtypes; autocast is then off
    gradient         function that replaces `incoming_gradient`
    backward_passes  number of times that backward runs over the graph
    forward_only     whether to run no backward
    uses_compiler    whether functions that are compiled with torch.compile run compiled
    """
    outcome = Outcome()
    autocast = None
    if widen_to is None:
        autocast = setting.autocast
    try:
        leaves, tensors = sample.copy_leaves(setting.group_dtypes, widen_to=widen_to, frozen=frozen)
        call, parameters = subject.instantiate(
            setting.group_dtypes, widen_to=widen_to, frozen=frozen
        )
    except (RuntimeError, ValueError, TypeError) as error:
        return Outcome(stage=FORWARD, error=error)
    outcome.tensors = tensors | parameters
    args, kwargs = sample.call_arguments(leaves)
    if watch_inputs:
        watched = _name_tensors(leaves, sample) | parameters
        for name, tensor in watched.items():
            outcome.watched_inputs[name] = (tensor, tensor.detach().clone())
    _seed_generators(seed)
    compiler = nullcontext() if uses_compiler else run_without_compiler()
    with warnings.catch_warnings(), compiler, context():
        warnings.simplefilter("ignore")
        try:
            with torch.autocast(sample.device, dtype=autocast, enabled=autocast is not None):
                result = call(*args, **kwargs)
        except Exception as error:  # exceptions of the function are a result of the run
            outcome.stage = FORWARD
            outcome.error = error
            return outcome
        outcome.outputs = floating_tensors(result)
        outcome.changed_by_forward = {
            name
            for name, (t, copy) in outcome.watched_inputs.items()
            if not torch.equal(t.detach(), copy)
        }
        outcome.values = [t.detach().clone() for t in outcome.outputs]
        outcome.functions = function_classes([t for t in outcome.outputs if t.requires_grad])
        differentiable = [t for t in outcome.outputs if t.requires_grad]
        # the index counts all outputs, so that freezing an input does not change the gradients of
        # the other outputs
        outcome.grad_outputs = [
            (gradient or incoming_gradient)(t, i)
            for i, t in enumerate(outcome.outputs)
            if t.requires_grad
        ]
        tensors_with_grad = {name: t for name, t in outcome.tensors.items() if t.requires_grad}
        if forward_only or not differentiable or not tensors_with_grad:
            return outcome
        try:
            is_autocast_on = autocast is not None and setting.is_backward_in_autocast
            with (
                torch.autocast(sample.device, dtype=autocast, enabled=is_autocast_on),
                record_backward_calls() as outcome.calls,
            ):
                for remaining in reversed(range(backward_passes)):
                    torch.autograd.backward(
                        differentiable, outcome.grad_outputs, retain_graph=remaining > 0
                    )
        except Exception as error:
            outcome.stage = BACKWARD
            outcome.error = error
            return outcome
    outcome.grads = {name: t.grad for name, t in tensors_with_grad.items()}
    return outcome


def _name_tensors(leaves: list[Any], sample: Sample) -> dict[str, Tensor]:
    """Returns the tensors in the flattened arguments (`leaves`), in a dict whose keys are their
    names. A tensor that has no slot is named after its position, such as `argument 3`.
    """
    names = {slot.index: slot.name for slot in sample.slots}
    tensors = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and i not in names:
            tensors[f"argument {i}"] = leaf
    for i, name in names.items():
        tensors[name] = leaves[i]
    return tensors


def _seed_generators(seed: int) -> None:
    """Does the same as torch.manual_seed in less time. If CUDA is not initialised,
    torch.manual_seed stores a stack trace at every call.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def floating_tensors(result: Any) -> list[Tensor]:
    """Returns the floating tensors in a function's return value, also from tuples, dicts and
    dataclasses such as ModelOutput.
    """
    flat, _ = pytree.tree_flatten(result)
    return [t for t in flat if isinstance(t, Tensor) and t.is_floating_point()]


def incoming_gradient(output: Tensor, index: int) -> Tensor:
    """Returns the gradient that backward receives for one output of the checked function. The
    values of this gradient are exact in every dtype (multiples of 1/8 up to 2), are not all equal
    to one, and are the same in every run.
    """
    generator = torch.Generator().manual_seed(1000 + index)
    magnitudes = torch.randint(3, 17, output.shape, generator=generator)
    quarters = torch.randint(0, 4, output.shape, generator=generator)
    signs = quarters.clamp(max=1) * 2 - 1
    gradient = (magnitudes * signs).to(torch.float64) / 8
    return gradient.to(output.device, output.dtype)


# (a key that is the same for findings about the same fault, the finding)
Fault = tuple[tuple[object, ...], Finding]
format_finding = load_finding_formatter(Path(__file__).with_name("findings.txt"))


def make_fault(
    code: str,
    location: Place,
    *key: object,
    details: tuple[tuple[str, str], ...] = (),
    **values: Any,
) -> Fault:
    """Returns (key, finding). Two findings with the same key describe the same fault. The returned
    key contains the code and the arguments `key`. Without these arguments, it contains the code,
    the location and the severity.

    values  values for the placeholders in the text that findings.txt has for this code
    """
    finding = format_finding(code, location, details, **values)
    if not key:
        key = (location.symbol, location.line, finding.severity)
    return (code, *key), finding


def faulty_method_location(subject: Subject, outcome: Outcome, stage: str) -> Place:
    """Returns the location of the hand-written method that has the fault. If no hand-written method
    has the fault, returns the location of the checked function.
    """
    if outcome.calls:
        function = outcome.calls[0].function
        return method_location(function, stage, method_name(function, stage))
    return subject.location


def registered_function(function: type, method: str) -> Any:
    """If torch generated this Function for a torch.library operator, returns the function that the
    author of the operator registered. Returns None for other Functions.
    """
    backward = getattr(function, "backward", None)
    if not function.__name__.startswith("GeneratedBackwardFor_") or backward is None:
        return None
    infos = [
        cell.cell_contents
        for cell in backward.__closure__ or ()
        if hasattr(cell.cell_contents, "_backward_fn")
    ]
    if not infos:
        return None
    if method == BACKWARD:
        return infos[0]._backward_fn
    return getattr(infos[0], "_init_fn", None)


def method_name(function: type, method: str) -> str:
    """Returns the method's name, such as `Class.backward`. For an operator of torch.library it is
    the name of the registered function.
    """
    method_object = registered_function(function, method)
    if method_object is None:
        return f"{function.__qualname__.split('<locals>.')[-1]}.{method}"
    operator = function.__name__.removeprefix("GeneratedBackwardFor_")
    return f"{method_object.__qualname__.split('<locals>.')[-1]} (of {operator})"


def return_location(function: type, owner: str) -> Place:
    """Returns the location of the last `return` of a Function's backward."""
    return method_location(function, "backward", owner, at_return=True)


def method_location(function: type, method: str, owner: str, *, at_return: bool = False) -> Place:
    """Returns the location of a method of a Function. With `at_return`, this is the location of its
    last `return`.
    """
    method_object: Any = inspect.unwrap(
        registered_function(function, method) or getattr(function, method)
    )
    try:
        lines, first = inspect.getsourcelines(method_object)
        file = inspect.getsourcefile(method_object)
    except (OSError, TypeError):
        return Place(symbol=owner)
    line = first
    for offset, text in enumerate(lines):
        if text.lstrip().startswith("def "):
            line = first + offset
            break
    if at_return:
        try:
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except SyntaxError:
            tree = ast.Module(body=[], type_ignores=[])
        line = max(
            (first + node.lineno - 1 for node in ast.walk(tree) if isinstance(node, ast.Return)),
            default=line,
        )
    return Place(file=file, line=line, symbol=owner)
