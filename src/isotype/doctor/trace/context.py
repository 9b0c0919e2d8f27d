"""Defines the shared state of a trace (`Context`), the names of modules and parameters
(`ModuleNames`), and `Watcher`. A watcher detects faults that raise no error, and `Watcher` is the
base class of all watchers.

The tracer inherits from `Context`, so that the watchers need not import the tracer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...finding import Finding
from ...observe.operators import Operator
from ...observe.origin import OBSERVER_FOLDERS, Site, innermost_site, read_statement, running_frames
from ...observe.tape import ModuleCall, ModuleStack
from ...pages.finding_sheet import load_finding_formatter
from .origin import ORIGIN_ATTRIBUTE, UNWATCHED_NOTE, Origin, live_objects

_CAST_FUNCTIONS = frozenset(
    {
        "to",
        "float",
        "half",
        "bfloat16",
        "double",
        "type",
        "type_as",
        "copy",
        "tensor",
        "as_tensor",
        "cpu",
        "cuda",
    }
)
# names that wrappers of modules add to paths
_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")

make_finding = load_finding_formatter(Path(__file__).with_name("findings.txt"))


def site_detail(label: str, site: Site | None) -> tuple[tuple[str, str], ...]:
    """Returns a line of code and its location as a detail that is printed with a finding. Returns
    an empty tuple if `site` is None.
    """
    if site is not None:
        return ((label, f"{site}: {site.text}"),)
    return ()


def clean_path(path: str) -> str:
    """Returns a module path without the names that wrappers such as FSDP insert."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


class ModuleNames:
    """The paths of all modules that ran, and the names of their parameters and buffers."""

    def __init__(self) -> None:
        # module -> its path, "" for a root
        self.modules: MutableMapping[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: list[weakref.ref[torch.nn.Module]] = []

    def register(self, root: torch.nn.Module) -> None:
        """Records the paths of all modules in a model. The model itself is called a root. If this
        model contains a model that was registered before, the modules of the inner model get new,
        longer paths.
        """
        paths = {module: clean_path(path) for path, module in root.named_modules()}
        self.modules.update(paths)
        self._roots = [ref for ref in self._roots if ref() not in paths]
        self._roots.append(weakref.ref(root))

    def module_path(self, module: torch.nn.Module) -> str:
        """Returns the path of the module inside its model. For a model itself, returns the name of
        its class.
        """
        return self.modules.get(module) or type(module).__name__

    def roots(self) -> list[torch.nn.Module]:
        return [root for ref in self._roots if (root := ref()) is not None]

    def find_root(self, module: torch.nn.Module) -> torch.nn.Module:
        """Returns the registered model that contains the module, or the module itself if there is
        none.
        """
        return next(
            (root for root in self.roots() if any(inner is module for inner in root.modules())),
            module,
        )

    def register_live_modules(self) -> None:
        """Registers the models that exist but have not run yet. These models are needed to explain
        an error that occurs while a model is wrapped or prepared.
        """
        modules = [
            candidate
            for candidate in live_objects(torch.nn.Module)
            if candidate not in self.modules
        ]
        children = {
            id(child) for module in modules for child in module.modules() if child is not module
        }
        for module in modules:
            if id(module) not in children and next(module.parameters(), None) is not None:
                self.register(module)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yields every parameter and buffer of the registered models, with its kind (`parameter` or
        `buffer`) and its name.
        """
        for root in self.roots():
            for name, parameter in root.named_parameters():
                yield "parameter", clean_path(name), parameter
            for name, buffer in root.named_buffers():
                yield "buffer", clean_path(name), buffer

    def parameter_name(self, tensor: torch.Tensor) -> str | None:
        return next((name for _, name, parameter in self.tensors() if parameter is tensor), None)

    def count_dtypes(self, root: torch.nn.Module | None = None) -> Counter[torch.dtype]:
        """Counts the floating-point parameter elements for each dtype, in one model or in all
        registered models.
        """
        counts: Counter[torch.dtype] = Counter()
        for module in [root] if root is not None else self.roots():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    counts[parameter.dtype] += parameter.numel()
        return counts


def is_due(count: int, full_count: int) -> bool:
    """True if an expensive check should run now. `count` is the number of times that the check
    could have run so far. The check runs the first `full_count` times, and later only if `count` is
    a power of two.
    """
    return count <= full_count or not count & (count - 1)


class Context:
    """The state of a trace. It contains the running module and call, the names and origins of
    tensors, and the other parts of the trace.
    """

    suspend: Any
    resume: Any
    provenance: Any
    schedule: Any
    failures: Any
    # watchers that other parts query
    autocast: Any
    parameters: Any
    promotions: Any
    sums: Any
    defaults: Any

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.modules = ModuleStack()
        self.device = "cpu"
        self.current_call: Any = None  # the torch function that the program called
        self.factory_dtype: torch.dtype | None = None  # the dtype argument of a factory call
        # whether autocast was on when the program called. PyTorch reports autocast as off inside the
        # dispatcher
        self.is_caller_autocast_on = False
        self.forward_count = 0  # calls of root modules
        # sequence number of an autograd node -> module and line of its forward
        self.forward_sites: dict[int, tuple[torch.nn.Module | None, Site | None]] = {}
        # the root module with parameters that was called last
        self.last_root: weakref.ref[torch.nn.Module] | None = None
        self._model_dtype_counts: Counter[torch.dtype] | None = None

    @property
    def stack(self) -> list[ModuleCall]:
        return self.modules.stack

    def locate_op(self) -> tuple[Site | None, str, str]:
        """Returns the line, the module path and (in backward) the autograd node of the op that is
        running. For an op in backward, the line is the line of the corresponding op in forward.
        """
        node = torch._C._current_autograd_node()
        site = innermost_site()
        if node is None:
            path = self.names.module_path(self.stack[-1].module) if self.stack else ""
            return site, path, ""
        module, forward_site = self.forward_sites.get(node._sequence_nr(), (None, None))
        path = self.names.module_path(module) if module is not None else ""
        return forward_site or site, path, node.name()

    def call_name(self) -> str:
        if self.current_call is not None:
            return getattr(self.current_call, "__name__", "").strip("_")
        return ""

    def uses_default_dtype(self, site: Site | None, dtype: torch.dtype, op: Operator) -> bool:
        """True if a call that creates a tensor used the default dtype because it has no dtype
        argument.
        """
        if dtype != torch.get_default_dtype() or self.factory_dtype is not None:
            return False
        if op.is_lift and (
            site is None
            or "dtype" in read_statement(site)
            or self.call_name() not in ("tensor", "Tensor")
        ):
            return False
        self.defaults.record_creation(site)
        return True

    def is_engine_cast(self) -> bool:
        """True if autograd itself casts the gradient that the backward of a custom Function
        returned. This is so if no Python frame of that backward is on the stack any more.
        """
        if not isinstance(
            torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction
        ):
            return False
        caller_frame = next(
            (
                frame
                for frame in running_frames(1)
                if not frame.f_code.co_filename.startswith(OBSERVER_FOLDERS)
            ),
            None,
        )
        return caller_frame is not None and caller_frame.f_code.co_name == "_engine_run_backward"

    def is_autocast_cast(self) -> bool:
        """True if the running cast was inserted by autocast. Autocast inserted the cast if autocast
        is on and the program did not call a cast.
        """
        return self.is_caller_autocast_on and self.call_name() not in _CAST_FUNCTIONS

    def infer_origin(self, tensor: torch.Tensor) -> Origin:
        """Determines the origin of a tensor that no traced op created. The tensor may be a
        parameter without a name, a parameter whose dtype has changed, or a tensor from outside the
        trace.
        """
        entry = tensor.__dict__.get(ORIGIN_ATTRIBUTE)
        if entry is not None and entry[0].kind in ("parameter", "buffer"):
            origin = Origin(tensor.dtype, entry[0].kind, entry[0].creator)
            tensor.__dict__[ORIGIN_ATTRIBUTE] = (origin, None)
            return origin
        shape = f"shape {tuple(tensor.shape)}"
        if isinstance(tensor, torch.nn.Parameter):
            return Origin(
                tensor.dtype,
                "parameter",
                self.names.parameter_name(tensor) or f"of {shape}, in no module seen so far",
            )
        if self.schedule.is_forward_unwatched:
            return Origin(tensor.dtype, "input", f"{UNWATCHED_NOTE}, {shape}")
        return Origin(tensor.dtype, "input", shape)

    def on_dtype_change(self) -> None:
        self._model_dtype_counts = None
        self.schedule.reset()

    def model_dtype_counts(self) -> Counter[torch.dtype]:
        """Counts the parameter elements of the running model for each dtype."""
        if self._model_dtype_counts is None:
            root = self.stack[0].module if self.stack else None
            self._model_dtype_counts = self.names.count_dtypes(root)
        return self._model_dtype_counts

    def failure_dtype_counts(self) -> Counter[torch.dtype]:
        """Counts the parameter elements for each dtype in the whole model that is running. In a
        loss, or between two forwards, the function counts the parameters of the model that ran
        last. If no model has run yet, it counts the parameters of all models.
        """
        running = self.stack[0].module if self.stack else None
        if running is None or next(running.parameters(), None) is None:
            running = self.last_root() if self.last_root is not None else None
        if running is None:
            return self.names.count_dtypes()
        return self.names.count_dtypes(self.names.find_root(running))


# called with an operator and its arguments before it runs; the result goes to its AfterHook
BeforeHook = Callable[[Operator, tuple, dict], Any]
AfterHook = Callable[[Any], None]
# methods of a watcher that the tracer calls
EVENTS = (
    "on_forward_start",
    "on_module_enter",
    "on_module_exit",
    "on_promotion",
    "on_cast",
    "on_step_start",
    "on_step_end",
)


class Watcher:
    """Detects one kind of silent fault. A silent fault is a fault that raises no error.

    reports  the findings of the watcher, by keys that the watcher chooses
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.reports: dict[Any, Finding] = {}

    def activate(self) -> AbstractContextManager[Any]:
        """Returns a context manager. The tracer enters it at the start of the trace and leaves it
        at the end.
        """
        return nullcontext()

    def on_forward_start(self) -> None:
        """Called before a forward of the model, if the trace observes this forward. (Some repeated
        forwards are not observed.)
        """

    def on_module_enter(self, module: torch.nn.Module, args: tuple) -> None:
        """Called when a module's forward begins. The module is the last of `context.stack`."""

    def on_module_exit(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        """Called when a module's forward has ended. `context.stack` then contains only the modules
        whose forward called this module.
        """

    def op_hooks(self) -> dict[str, tuple[BeforeHook, AfterHook | None]]:
        """Returns a dict from the name of each op to its two hooks. The first hook is called before
        the op, with (op, args, kwargs). The second hook is called after the op, with the result of
        the first hook. The second hook is not called if the first hook returns None.
        """
        return {}

    def on_promotion(
        self,
        op: Operator,
        origin: Origin,
        wide: torch.Tensor,
        narrow: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Called when an op widened one of its operands to the dtype of another operand."""

    def on_cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        """Called after a cast. `origin.kind` tells whether the program, autocast or autograd made
        the cast.
        """

    def on_step_start(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer steps."""

    def on_step_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer has stepped."""

    def findings(self) -> list[Finding]:
        """Returns the findings so far."""
        return list(self.reports.values())
