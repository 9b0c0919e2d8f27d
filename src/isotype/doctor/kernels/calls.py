"""Calls a function that launches Triton kernels (a wrapper) with CPU tensors, once for each input
dtype. Then the module compiles the launched kernels for the argument types with which Triton's
launcher would compile them.

The launches are only recorded, and no kernel is run (`trap_launches`). `compile_matrix` makes the
same check for tests, and raises an AssertionError if it fails.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...dtypes import format_dtype, to_torch
from ...finding import Severity, sort_findings
from ...wording import pluralise
from .checker import Report, check, check_combinations
from .compile_inputs import (
    DEFAULT_TARGET,
    OPTION_NAMES,
    Combination,
    Reach,
    is_kernel,
    parse_target,
    read_configuration,
    require_triton,
)
from .offsets import LaunchShape
from .simulated_gpu import simulate_gpu

# per autotuned kernel; the first configurations differ as much from each other as the later ones
MAX_CONFIGURATIONS = 8
INPUTS_AS_GIVEN = "inputs as given"  # the label of the combination with unchanged dtypes


@dataclass
class Launch:
    """One call `kernel[grid](...)`, stored as the kernel function and its arguments. The arguments
    include the values that an autotuning configuration sets.

    is_traced_by_compile  whether torch.compile would trace the launch, so that Inductor passes its
                          scalars
    """

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    grid: Any = None
    is_traced_by_compile: bool = False

    def combination(self, target: Any, label: str, reach: Reach = Reach.CONFIRMED) -> Combination:
        """Returns the combination for which Triton's launcher would compile the kernel with these
        arguments. A combination consists of the types of the arguments, the values of the
        constexprs, and the divisibility of integers and pointers. The integer 1 and None count as
        constexprs.
        """
        from triton._utils import find_paths_if, get_iterable_path
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(target)
        names = list(self.function.arg_names)
        bind = create_function_from_signature(
            self.function.signature, self.function.params, backend
        )
        options = {k: v for k, v in self.kwargs.items() if k in OPTION_NAMES and k not in names}
        kwargs = {k: _mock_tensor(v) for k, v in self.kwargs.items() if k in names}
        bindings, specialization, _ = bind(*(_mock_tensor(a) for a in self.args), **kwargs)
        types = [kind for kind, _ in specialization]
        constant_paths = find_paths_if(types, lambda _, kind: kind == "constexpr")
        values = list(bindings.values())
        specialized = ["" if kind == "constexpr" else value for kind, value in specialization]
        attribute_paths = find_paths_if(specialized, lambda _, value: isinstance(value, str))
        return Combination(
            label,
            dict(zip(names, types)),
            {path: get_iterable_path(values, path) for path in constant_paths},
            {
                path: backend.parse_attr(get_iterable_path(specialized, path))
                for path in attribute_paths
            },
            options,
            reach,
            is_traced_by_compile=self.is_traced_by_compile,
        )

    def shape(self) -> LaunchShape:
        """Returns the integer arguments, the number of elements that each tensor spans, and the
        grid.

        Raises  ValueError if the grid cannot be computed
        """
        arguments = {
            p.name: p.default for p in self.function.params if getattr(p, "has_default", False)
        }
        arguments |= {**dict(zip(self.function.arg_names, self.args)), **self.kwargs}
        values = {}
        extents = {}
        for name, value in arguments.items():
            if isinstance(value, int) and not isinstance(value, bool):
                values[name] = value
            elif isinstance(value, Tensor):
                extents[name] = 1 + sum(
                    (size - 1) * stride for size, stride in zip(value.shape, value.stride())
                )
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        sizes = [int(size) for size in (grid if isinstance(grid, (tuple, list)) else (grid,))]
        if not sizes or min(sizes) < 0:
            raise ValueError(f"the grid {grid} is not valid")
        x, y, z = [*sizes, 1, 1][:3]
        return LaunchShape(values, extents, (x, y, z))


def _mock_tensor(value: Any) -> Any:
    """Replaces tensors by Triton's mock tensors, which have only a dtype and an aligned pointer."""
    from triton.runtime.jit import MockTensor

    if isinstance(value, Tensor):
        return MockTensor(value.dtype)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_mock_tensor(item) for item in value)
    return value


def _is_traced_by_compile() -> bool:
    """False if the current call comes from a custom operator, or from a function for which
    torch.compile is switched off. torch.compile calls these functions as they are, and does not
    trace the code inside them.
    """
    frame: FrameType | None = sys._getframe(1)
    is_inside_operator = False
    while frame is not None:
        code = frame.f_code
        path = code.co_filename.replace(os.sep, "/")
        if path.endswith("torch/_library/triton.py"):
            return True  # torch.library.triton_op, which torch.compile reads
        if path.endswith(("torch/_library/custom_ops.py", "torch/_ops.py")):
            is_inside_operator = True
        if path.endswith("torch/_dynamo/eval_frame.py") and "Disable" in code.co_qualname:
            is_inside_operator = True
        frame = frame.f_back
    return not is_inside_operator


class _SkippedLaunch:
    """The return value of a launch that was recorded but not run. Some programs read from the
    return value how many registers the compiled kernel uses. For these programs the object contains
    small numbers.
    """

    n_regs = 32
    n_spills = 0
    n_max_threads = 1024

    def __init__(self) -> None:
        self.metadata = SimpleNamespace(shared=0, num_warps=4, num_stages=2, num_ctas=1)
        self.asm: dict[str, str] = {}

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self


@dataclass
class LaunchTrap:
    """The recorded launches, and a remark for each launch that could not be recorded."""

    launches: list[Launch] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@contextlib.contextmanager
def trap_launches() -> Iterator[LaunchTrap]:
    """Inside this context kernels are not run, and launches are only recorded. A launch of a kernel
    with autotuning is recorded once for each of its configurations.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    trap = LaunchTrap()

    def record_launch(
        function: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any
    ) -> Any:
        trap.launches.append(Launch(function, args, kwargs, grid, _is_traced_by_compile()))
        return _SkippedLaunch()

    def record_autotuned(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args))
        try:
            configs = list(tuner.prune_configs(kwargs))
        except Exception as error:
            trap.remarks.append(
                f"{getattr(tuner.base_fn, '__name__', 'a kernel')}: its pruning of configurations"
                f" failed ({error}); the first ones are used"
            )
            configs = list(tuner.configs)
        result: Any = None
        for config in configs[:MAX_CONFIGURATIONS]:
            configuration = read_configuration(config)
            result = tuner.fn.run(
                *args, **{**kwargs, **configuration.constexprs, **configuration.options}
            )
        tuner.nargs = None
        return result

    with (
        mock.patch.object(JITFunction, "run", record_launch),
        mock.patch.object(Autotuner, "run", record_autotuned),
    ):
        yield trap


@dataclass
class WrapperCalls:
    """The result of calling a wrapper.

    launched  id of a kernel -> the kernel, and the combinations with which it was launched
    refused  label of a combination -> the error that the wrapper raised for it
    """

    launched: dict[int, tuple[Any, list[Combination]]] = field(default_factory=dict)
    launches: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def record(self, target: Any, label: str, reach: Reach = Reach.CONFIRMED) -> Iterator[None]:
        """Records the launches inside this context, on a simulated GPU. If the code raises an
        error, the error is stored in `refused`, because the wrapper does not support this
        combination. At the end of the context, the combinations of the launches are added to
        `launched`.
        """
        # imported first, because its table of torch's functions must hold the unpatched functions
        import torch._dynamo  # noqa: F401

        with trap_launches() as trap, simulate_gpu(target):
            try:
                yield
            except Exception as error:
                self.refused[label] = (
                    f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                )
        self.launches += len(trap.launches)
        self.remarks += trap.remarks
        for launch in trap.launches:
            try:
                combination = launch.combination(target, label, reach)
            except Exception as error:
                text = " ".join(str(error).split())[:200]
                self.remarks.append(
                    f"{launch.function.__name__}: Triton refuses the arguments of a launch: {text}"
                )
                continue
            self.launched.setdefault(id(launch.function), (launch.function, []))[1].append(
                combination
            )

    def report(self, targets: Sequence[str | int], *, binary: bool = False) -> Report:
        """Compiles every kernel that was launched, and returns the report."""
        result = Report(
            launches=self.launches, refused=self.refused, remarks=list(dict.fromkeys(self.remarks))
        )
        for function, combinations in self.launched.values():
            result.add(check_combinations(function, combinations, targets, binary=binary))
        return result


def _float_tensors(tree: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _cast_inputs(inputs: Any, dtype_names: Sequence[str]) -> Any:
    """Casts the float tensors in the inputs to these dtypes, in the order in which they appear. If
    the same tensor appears twice, both places get the same cast tensor.
    """
    remaining_dtypes = iter(dtype_names)
    cast_tensors = dict[int, Tensor]()

    def cast_tensor(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        target_dtype = next(remaining_dtypes)
        if id(tensor) not in cast_tensors:
            cast_tensors[id(tensor)] = (
                tensor.detach()
                .to(to_torch(target_dtype), copy=True)
                .requires_grad_(tensor.requires_grad or tensor.is_leaf)
            )
        return cast_tensors[id(tensor)]

    return pytree.tree_map_only(Tensor, cast_tensor, inputs)


def _dtype_variants(inputs: Any) -> Iterator[tuple[str, Reach, list[str]]]:
    """Yields several ways to choose the dtypes of the float tensors. Each has a label, and a
    `Reach` that tells how likely callers are to use it. The order is: the given dtypes, all tensors
    in one dtype, all tensors in bf16 except one.
    """
    given_dtypes = [format_dtype(t.dtype) for t in _float_tensors(inputs)]
    yield INPUTS_AS_GIVEN, Reach.CONFIRMED, given_dtypes
    # if the given inputs have several dtypes, the author chose them by role
    is_uniform = len(set(given_dtypes)) <= 1
    reach = Reach.CONFIRMED if is_uniform else Reach.MIXED
    for dtype in ("fp32", "bf16", "fp16"):
        yield f"{dtype} inputs", reach, [dtype] * len(given_dtypes)
    if len(given_dtypes) < 2:
        return
    for index in range(len(given_dtypes)):
        for dtype in ("fp32", "fp16"):
            dtypes = ["bf16"] * len(given_dtypes)
            dtypes[index] = dtype
            yield f"bf16 inputs, float tensor {index} {dtype}", Reach.MIXED, dtypes


def split_calls(inputs: Any) -> list[Any]:
    """Splits `inputs` into the arguments of single calls. A list of tuples or dicts describes
    several calls. Any other value describes one call.
    """
    if isinstance(inputs, list) and inputs and all(isinstance(i, (tuple, dict)) for i in inputs):
        return inputs
    if inputs is None:
        return [()]
    return [(inputs,)] if isinstance(inputs, Tensor) else [inputs]


def call_function(function: Callable[..., Any], arguments: Any, *, backward: bool = True) -> None:
    """Calls a function with the arguments of one call. Then calls backward on the outputs that
    require a gradient. An autograd Function is called with `apply`.
    """
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        function = function.apply
    result = function(**arguments) if isinstance(arguments, dict) else function(*arguments)
    outputs = [t for t in _float_tensors(result) if t.requires_grad]
    if backward and outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _refuses(reference: Callable[..., Any], arguments: Any) -> bool:
    """True if plain PyTorch code raises an error for these arguments."""
    try:
        call_function(reference, arguments, backward=False)
    except Exception:
        return True
    return False


def check_wrapper(
    function: Callable[..., Any],
    inputs: Any,
    targets: Sequence[str | int] = (DEFAULT_TARGET,),
    *,
    backward: bool = True,
    binary: bool = False,
    reference: Callable[..., Any] | None = None,
) -> Report:
    """Calls `function(*inputs)` (or `function(**inputs)`) in every dtype. Runs backward too if an
    output requires a gradient.

    Signatures, constexprs, autotuning configurations and heuristics are taken from the wrapper's
    launches.

    reference  plain PyTorch code; dtypes that it refuses are left out, such as queries and keys of
               different dtypes in `scaled_dot_product_attention`
    """
    require_triton()
    calls = WrapperCalls()
    target = parse_target(targets[0])
    for label, reach, dtype_names in _dtype_variants(inputs):
        arguments = _cast_inputs(inputs, dtype_names)
        if reference is not None and reach == Reach.MIXED and _refuses(reference, arguments):
            continue
        callee = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
        if isinstance(callee, torch.nn.Module) and dtype_names and label != INPUTS_AS_GIVEN:
            callee = callee.to(to_torch(max(set(dtype_names), key=dtype_names.count)))
        with calls.record(target, label, reach):
            call_function(callee, arguments, backward=backward)
    return calls.report(targets, binary=binary)


def compile_matrix(
    function: Callable[..., Any],
    inputs: Any = None,
    targets: Sequence[str] = ("sm_80", "sm_90", "sm_100", "gfx942"),
    *,
    fail_on: Severity | str = Severity.WARNING,
    backward: bool = True,
    binary: bool = False,
) -> None:
    """Calls `function(*inputs)` on the CPU in every dtype, records the kernel launches, and
    compiles the kernels. No GPU is needed.

    function  a wrapper, an autograd.Function, an nn.Module, or a `@triton.jit` kernel, whose
              signatures are then inferred from its source
    inputs    a tuple, a list or a dict of arguments; a list of tuples describes several calls.
              Float tensors are cast, other arguments stay the same
    fail_on   with "error", the check fails if a combination of equal dtypes fails. With "warning"
              (default), it also fails if a combination with one tensor in another dtype fails,
              unless the function refuses this combination with an error
    backward  whether to call backward on the outputs
    binary    whether to compile to machine code too, which reports registers, spills and shared
              memory and takes seconds per target
    Raises    AssertionError that names the kernel, line, variable and dtypes, also if no kernel was
              launched
    """
    threshold = Severity.parse(fail_on) if isinstance(fail_on, str) else fail_on
    name = getattr(function, "__name__", type(function).__name__)
    if is_kernel(function):
        findings = check(function, targets=targets, binary=binary).findings
    else:
        findings = []
        for arguments in split_calls(inputs):
            report = check_wrapper(function, arguments, targets, backward=backward, binary=binary)
            if not report.launches:
                reason = next(iter(report.refused.values()), "the calls returned without one")
                raise AssertionError(f"{name} launched no Triton kernel: {reason}")
            findings += [finding for finding in report.findings if finding not in findings]
    failing = sort_findings(finding for finding in findings if finding.severity >= threshold)
    if failing:
        count = pluralise(len(failing), "finding")
        raise AssertionError(
            f"{name}: {count} for {', '.join(targets)}\n\n"
            + "\n\n".join(finding.render() for finding in failing)
        )
