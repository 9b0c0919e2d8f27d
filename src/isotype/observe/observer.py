"""`Observer` compares a model, its gradients, its optimizer and its files with a `Precision`, and
checks the operators of a step.

For one step, `watch()` installs hooks on every module, and a dispatch mode (`tape`). The other
steps have no extra cost. Some computations cannot be observed. They are never counted as observed,
and are reported with the reason: by the role of their tensors in `Observation.unseen`, and by their
place in the model in `Observation.unobserved`.

The observer checks the first step, every `every`-th step, one random step between two of these, and
the step after a change of the model. Some modules compute in another dtype only in some steps. The
random steps make it likely that the observer finds these modules. The choice depends only on the
number of the step and the seed. So a resumed run observes the same steps as an uninterrupted run.
"""

from __future__ import annotations

import dis
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..dtypes import FLOATS, format_dtype, itemsize
from ..finding import join_names
from ..precision.apply import (
    declared_dtype,
    inner_model,
    is_in_fp32_layer,
    is_norm,
    is_quantised,
    quantised_dtype_name,
)
from ..precision.precision import Precision
from ..precision.vision import is_vision_weight
from .contract import ContractChecker
from .origin import is_user_function
from .record import CHANGED_CAUSE, TABLES_RULE, UNSEEN_REASONS, Observation
from .tape import ModuleCall, StepTracker, mark_observing
from .values import dense_values, floating_tensors, is_wrapper

_MODULES_PER_CHECK = 128  # modules that one step checks; the next step checks the next ones


def is_observed(step: int, *, every: int, seed: int, total: int) -> bool:
    """Whether `step` (counted from 1) is observed. The observed steps are the first step, every
    `every`-th step, and one random step of every `every` consecutive steps. A run that is shorter
    than 3 x `every` steps is divided into three parts, with one random step in each.
    """
    if step == 1 or step % every == 0:
        return True
    length = max(2, min(every, -(-total // 3)))
    stretch = (step - 1) // length
    random_offset = random.Random(f"{seed} {stretch}").randrange(length)
    return step - 1 == stretch * length + random_offset


class ModelChanges:
    """Detects changes of the model since `snapshot`: other dtypes of parameters or buffers, other
    hooks, child modules or classes, and forwards that were replaced on an instance.

    Each step checks only the next 128 modules. So the cost does not grow with the size of the
    model. For example, three steps are needed for 300 modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.snapshot()

    def snapshot(self) -> None:
        self._states = [(module, _module_state(module)) for module in self.model.modules()]
        self._next = 0

    def has_changed(self) -> bool:
        """Whether a module has changed since `snapshot`. Each call checks only the next group of
        modules.
        """
        if self._next >= len(self._states):
            self._next = 0
        next_states = self._states[self._next : self._next + _MODULES_PER_CHECK]
        self._next += _MODULES_PER_CHECK
        return any(_module_state(module) != state for module, state in next_states)

    def has_any_change(self) -> bool:
        """Whether any module has changed since `snapshot`."""
        return any(_module_state(module) != state for module, state in self._states)


def _module_state(module: nn.Module) -> list[Any]:
    attributes = module.__dict__
    state: list[Any] = [module.__class__, id(attributes.get("forward"))]
    for hooks in (
        attributes["_forward_hooks"],
        attributes["_forward_pre_hooks"],
        attributes["_backward_hooks"],
        attributes["_backward_pre_hooks"],
    ):
        if hooks:
            state.append(tuple(hooks))
    if attributes["_modules"]:
        state.append(list(map(id, attributes["_modules"].values())))
    for tensors in (attributes["_parameters"], attributes["_buffers"]):
        for tensor in tensors.values():
            if tensor is not None:
                state.append(tensor.dtype)
                state.append(tensor._backward_hooks is not None and len(tensor._backward_hooks))
    return state


# parameter -> its gradient as the optimizer gets it
Gradient = Callable[[nn.Parameter], Tensor | None]
States = Callable[[nn.Parameter], Mapping[str, Any]]  # parameter -> the optimizer's states

# bitsandbytes keeps a state with fewer elements in fp32 (`min_8bit_size` of its optimizers)
MIN_8BIT_ELEMENTS = 4096
_FIRST_OBSERVATION_CAUSE = (
    "it had this dtype at the first observation: a .to() cast it, or its class makes it in that"
    " dtype or in the one in which the model is loaded"
)
_SCALES_REASON = "scales and code tables of 8-bit states"
_STEP_COUNTS_REASON = "step counts of the optimizer, which no precision declares"
_ALPHAS_REASON = "alphas of an adapter for ComfyUI, fp32 whatever its weights are"
_STEP_KEY = "step"  # the key of the step count in torch's and bitsandbytes' states
_MASK_VALUES = 8  # a buffer with at most this number of distinct values may be a mask


class Observer:
    """Compares a model, its gradients and its optimizer with a `Precision`.

    lora_branch  dtype of the matrix products with A and B: fp32, or None if fp32 and `compute` are
                 both allowed
    read_only    further models that a step reads, such as a reference model; their weights are
                 registered as weights
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        *,
        lora_branch: str | None = None,
        read_only: Sequence[nn.Module] = (),
    ) -> None:
        self.model = model
        self.precision = precision
        self.lora_branch = lora_branch
        self._read_only = read_only
        self._changes = ModelChanges(model)
        self._checker: ContractChecker | None = None
        self._buffers = {
            full_name: buffer.dtype
            for full_name, buffer in model.named_buffers()
            if buffer.is_floating_point()
        }

    def has_changed(self) -> bool:
        """Whether dtypes, hooks, classes or forwards of the model changed since the last step that
        was observed. If so, the next step should be observed.
        """
        return self._changes.has_changed()

    def has_any_change(self) -> bool:
        """The same as `has_changed`, but always checks all modules."""
        return self._changes.has_any_change()

    # ---- what is stored
    def observe_tensors(
        self,
        observation: Observation,
        *,
        gradient: Gradient | None = None,
        states: States | None = None,
        parameters: bool = True,
    ) -> Observation:
        """Adds the dtypes of the parameters to `observation`. If functions that return gradients or
        optimizer states are passed, it adds the dtypes of these tensors too.
        """
        precision = self.precision
        for full_name, parameter in self.model.named_parameters():
            if parameters:
                self._observe_parameter(observation, full_name, parameter)
            if parameter.requires_grad and gradient is not None:
                if (tensor := gradient(parameter)) is not None:
                    observation.count_dtype(
                        "grads",
                        f"gradient of {full_name}",
                        format_dtype(tensor.dtype),
                        precision.grads,
                    )
                else:
                    observation.count_unseen("grads", "backward did not reach the weight")
            if parameter.requires_grad and states is not None:
                allowed = (
                    ("fp32",)
                    if precision.optimizer == "int8" and parameter.numel() < MIN_8BIT_ELEMENTS
                    else ()
                )
                for key, dtype_name in iterate_state_dtypes(parameter, states(parameter)):
                    if dtype_name is None:
                        observation.count_unseen(
                            "optimizer", _STEP_COUNTS_REASON if key == _STEP_KEY else _SCALES_REASON
                        )
                    else:
                        observation.count_dtype(
                            "optimizer",
                            f"{key} of {full_name}",
                            dtype_name,
                            precision.optimizer,
                            allowed=allowed,
                        )
        if parameters:
            self._observe_buffers(observation)
        return observation

    def _observe_parameter(
        self, observation: Observation, full_name: str, parameter: nn.Parameter
    ) -> None:
        precision = self.precision
        if is_wrapper(parameter):
            role = "trainable" if parameter.requires_grad else "base"
            observation.count_unseen(
                role, f"{type(parameter).__name__}, a class that keeps its numbers in other tensors"
            )
        elif is_quantised(parameter):
            observation.count_dtype(
                "base", full_name, quantised_dtype_name(parameter), precision.base
            )
        elif parameter.is_floating_point():
            is_vision = precision.vision and is_vision_weight(inner_model(self.model), full_name)
            if parameter.requires_grad:
                role = "trainable"
            elif is_vision:
                role = "vision"
            else:
                role = "base"
            declared = declared_dtype(self.model, full_name, parameter, precision)
            observation.count_dtype(role, full_name, format_dtype(parameter.dtype), declared)
        elif parameter.is_complex():
            observation.count_unseen(
                "trainable" if parameter.requires_grad else "base",
                "complex numbers, which no precision declares",
            )
        else:
            observation.count_unseen(
                "base", "integers: packed weights whose dtype is their library's"
            )

    def _observe_buffers(self, observation: Observation) -> None:
        """Checks floating-point buffers, for which no dtype is declared. A table that the module's
        class creates must be fp32 or wider, and no buffer may be cast to a narrower dtype later.

        A buffer that the model's file stores may have the same dtype as the weights in this file
        (for example, MiniMax's decays). A buffer that a forward of transformers assigns (CTRL's
        positions) is not checked here, because the operators of that forward are checked.
        """
        for full_name, buffer in self.model.named_buffers():
            if not buffer.is_floating_point():
                continue
            dtype_name = format_dtype(buffer.dtype)
            first_dtype = self._buffers.setdefault(full_name, buffer.dtype)
            observation.dtypes["buffers"][dtype_name] += 1
            module_path, _, buffer_name = full_name.rpartition(".")
            module = self.model.get_submodule(module_path)
            if dtype_name == self.precision.compute and _is_assigned_in_forward(
                module, buffer_name
            ):
                continue
            is_narrowed = itemsize(dtype_name) < itemsize(format_dtype(first_dtype))
            if buffer.dtype != first_dtype and (is_narrowed or dtype_name == "fp64"):
                observation.report(
                    "compute",
                    f"buffer {full_name} is {dtype_name} and was {format_dtype(first_dtype)}",
                    location=full_name,
                    observed=dtype_name,
                    rule=f"a buffer keeps its dtype: {format_dtype(first_dtype)}",
                    cause=CHANGED_CAUSE,
                )
            elif (
                itemsize(dtype_name) < 4
                and buffer_name in module._non_persistent_buffers_set
                and _is_table(buffer)
            ):
                observation.report(
                    "compute",
                    f"buffer {full_name} is stored in {dtype_name}",
                    location=full_name,
                    observed=dtype_name,
                    rule=TABLES_RULE,
                    cause=_FIRST_OBSERVATION_CAUSE,
                    fix=(
                        "leave the .to() out, or load the model in fp32: precision.base: fp32, in"
                        " full fine-tuning bf16-mixed"
                    ),
                )

    def observe_loss(self, observation: Observation, dtype: torch.dtype) -> None:
        observation.count_dtype("loss", "the loss", format_dtype(dtype), self.precision.loss)

    def observe_sums(self, observation: Observation, dtypes: Sequence[torch.dtype]) -> None:
        """Records the dtype of each bucket of gradients that was summed across processes."""
        for number, dtype in enumerate(dtypes):
            observation.count_dtype(
                "reduce",
                f"bucket {number} of the gradients summed across processes",
                format_dtype(dtype),
                self.precision.reduce,
            )

    def observe_task_tensors(
        self, observation: Observation, tensors: Iterable[tuple[str, str, str]]
    ) -> None:
        """Records the dtypes of tensors that occur only in the task of this run. `tensors` yields
        (role, name of the tensor, dtype); the role is the field of the precision that declares the
        dtype.
        """
        for role, tensor, dtype in tensors:
            observation.count_dtype(role, tensor, dtype, getattr(self.precision, role))

    def observe_files(
        self,
        observation: Observation,
        folder: Path,
        declared: str,
        *,
        allowed: tuple[str, ...] = (),
    ) -> None:
        """Records the dtypes of the floating tensors in the files of a saved result. Integer
        tensors are counted as unseen, because they are packed weights or ids.
        """
        from safetensors import safe_open

        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for full_name in file.keys():  # noqa: SIM118  # safe_open's file is not a mapping
                    if full_name.endswith(".alpha"):
                        observation.count_unseen("save", _ALPHAS_REASON)
                    elif (dtype := format_dtype(file.get_slice(full_name).get_dtype())) in FLOATS:
                        observation.count_dtype(
                            "save", f"{full_name} in {path.name}", dtype, declared, allowed=allowed
                        )
                    else:
                        observation.count_unseen("save", "integers: packed weights or ids")

    # ---- what runs
    @contextmanager
    def watch(
        self,
        step: int,
        *,
        role: str = "compute",
        optimizer: torch.optim.Optimizer | None = None,
        gradient: Gradient | None = None,
    ) -> Iterator[Observation]:
        """Checks every operator and the output of every module within this block.

        role  `generate` while tokens are generated, else `compute`

        optimizer, gradient  if given, gradients are recorded just before the update, and optimizer
                             states after the block
        """
        observation = Observation(step)
        inner = inner_model(self.model)
        tracker = StepTracker(
            self.model, on_exit=lambda call: self._observe_norm(observation, call, role)
        )
        checker = ContractChecker(
            observation, self.precision, tracker, role=role, lora_branch=self.lora_branch
        )
        checker.register_weights(self.model, *self._read_only)
        _list_hooks(observation, self.model)
        tracker.on_inputs = checker.register_inputs

        def before_update(*_: Any) -> None:
            # the gradients are freed after the step, so their dtypes are recorded just before the
            # optimizer reads them
            if "grads" not in observation.total:
                checker.paused = True  # these operators are not part of the update
                try:
                    checker.report_rounded_gradients()
                    self.observe_tensors(observation, gradient=gradient)
                finally:
                    checker.paused = False

        with ExitStack() as stack:
            stack.enter_context(tracker.track())
            for module_name, module in inner.named_modules():
                hook = mark_observing(self._output_hook(observation, inner, module_name, role))
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if optimizer is not None and gradient is not None:
                # a wrapper that does not call PyTorch's constructor has no hooks, but the optimizer
                # inside it has
                has_hooks = hasattr(optimizer, "_optimizer_step_pre_hooks")
                if has_hooks:
                    register = optimizer.register_step_pre_hook
                else:
                    register = register_optimizer_step_pre_hook
                stack.callback(register(before_update).remove)
            for mode in checker.modes:
                stack.enter_context(mode)
            self._checker = checker
            stack.callback(setattr, self, "_checker", None)
            yield observation
        checker.finish()
        self._observe_product_setting(observation, role)
        self._changes.snapshot()
        if optimizer is not None:
            if "grads" not in observation.total:
                # an fp16 overflow skips the update
                self.observe_tensors(observation, gradient=lambda p: None)
            self.observe_tensors(
                observation, states=lambda p: optimizer.state.get(p, {}), parameters=False
            )

    def _observe_product_setting(self, observation: Observation, role: str) -> None:
        """Reports settings of PyTorch with which matrix products of fp32 tensors are computed in
        tf32 or bf16. The dtypes of the operators do not show that such a setting is active.
        """
        on_gpu = any(p.device.type == "cuda" for p in self.model.parameters())
        backend = torch.backends.cuda if on_gpu else torch.backends.mkldnn
        # "none" leaves the choice to the next setting, which is more general. On a CPU,
        # torch.set_float32_matmul_precision("high") sets "tf32"
        settings = (
            backend_setting.fp32_precision
            for backend_setting in (backend.matmul, backend, torch.backends)
            if hasattr(backend_setting, "fp32_precision")
        )
        setting = next(
            (backend_setting for backend_setting in settings if backend_setting != "none"), "none"
        )
        if getattr(self.precision, role) == "fp32" and setting in (
            ("tf32", "bf16") if on_gpu else ("bf16",)
        ):
            observation.report(
                role,
                f"products of fp32 tensors are computed in {setting}",
                location="torch.backends",
                observed=setting,
                declared="fp32",
                cause=(
                    'a setting of the process: torch.set_float32_matmul_precision("medium"), or'
                    " fp32_precision of torch.backends"
                ),
                fix=(
                    'torch.set_float32_matmul_precision("highest"), or a precision that computes in'
                    " bf16"
                ),
            )

    def _observe_norm(self, observation: Observation, call: ModuleCall, role: str) -> None:
        if role != "compute" or not is_norm(call.module):
            return
        if call.sum_dtypes:
            narrowest = min(call.sum_dtypes, key=itemsize)
            first_caller = call.sum_dtypes[narrowest]
            observation.count_dtype(
                "norms",
                f"arithmetic of {call.name}",
                narrowest,
                self.precision.norms,
                file=first_caller.file,
                line=first_caller.line,
                cause="its forward computes in that dtype there",
            )
        else:
            observation.count_unseen("norms", UNSEEN_REASONS["norms"])

    def _output_hook(
        self, observation: Observation, outermost: nn.Module, module_name: str, role: str
    ) -> Callable[..., None]:
        """Creates a hook that counts the dtypes of a module's outputs. The output of a linear layer
        must have the dtype `compute`. If the output of another module has a wider dtype, it is
        counted as a promotion. The output is not counted if the module's own code converts narrower
        values to this dtype.
        """
        module_name = module_name or type(outermost).__name__
        compute = getattr(self.precision, role)
        if is_in_fp32_layer(outermost, module_name):
            compute = "fp32"
        is_generation = role == "generate"

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._checker is not None and self._checker.paused:
                return
            is_product = isinstance(module, nn.Linear)
            for tensor in floating_tensors(output):
                dtype = format_dtype(tensor.dtype)
                if not is_generation:
                    observation.dtypes["outputs"][dtype] += 1
                is_fp32_branch = (
                    dtype == "fp32"
                    and "lora_" in module_name
                    and self.lora_branch in (None, "fp32")
                )
                if is_product and dtype != compute and not is_fp32_branch:
                    symbol = f"output of {module_name} ({type(module).__name__})"
                    observation.report(
                        role,
                        f"{symbol} is {dtype}, declared {compute}",
                        location=symbol,
                        observed=dtype,
                        declared=compute,
                    )
                elif (
                    not (is_product or is_generation or module is outermost)
                    and dtype in FLOATS
                    and itemsize(dtype) > itemsize(compute)
                    and not _is_declared_by_class(module, (args, kwargs), compute)
                ):
                    observation.promotions[module_name, dtype] += 1

        return hook


def _list_hooks(observation: Observation, model: nn.Module) -> None:
    """Lists the hooks of the program among the computations that are not observed. What a hook
    computes is only checked in the steps that are observed.
    """
    names: dict[str, list[str]] = {}
    for module_name, module in model.named_modules():
        attributes = module.__dict__
        for key, kind in _HOOK_KINDS.items():
            if any(map(is_user_function, attributes[key].values())):
                names.setdefault(kind, []).append(module_name or type(module).__name__)
    for full_name, parameter in model.named_parameters():
        hooks = [
            *(parameter._backward_hooks or {}).values(),
            *(getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values(),
        ]
        if any(map(is_user_function, hooks)):
            names.setdefault("gradient hooks", []).append(full_name)
    for kind, hooked in names.items():
        observation.unobserved[f"{kind} of the program on {join_names(hooked, 3)}"] = (
            "they are checked only in the steps that are observed"
        )


_HOOK_KINDS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward hooks",
}


def iterate_state_dtypes(
    parameter: Tensor, state: Mapping[str, Any]
) -> Iterator[tuple[str, str | None]]:
    """Yields (key, dtype name) for each tensor of an optimizer state. The name is None for a step
    count and for an auxiliary tensor of an 8-bit state, such as its scales.

    A block-wise 8-bit state is called int8, even if it is stored as uint8.
    """
    eight_bits = (torch.uint8, torch.int8)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    has_8bit_states = any(t.dtype in eight_bits for key, t in tensors.items() if key != _STEP_KEY)
    for key, tensor in tensors.items():
        if key == _STEP_KEY:
            yield key, None
        elif tensor.dtype in eight_bits:
            yield key, "int8"
        elif has_8bit_states and tensor.shape != parameter.shape:
            yield key, None
        else:
            yield key, format_dtype(tensor.dtype)


def _is_declared_by_class(module: nn.Module, inputs: Any, compute: str) -> bool:
    """Whether the code of a class of transformers itself made an output that is wider than
    `compute`, as for the tables of a rotary embedding and the scores of a router, which are computed
    in fp32. This is true if the class is one of transformers, and if no input and no parameter of
    the module is wider than `compute`. The weights of matrix products are ignored, because these
    products are computed in the dtype `compute` whatever dtype the weight has.
    """
    if not type(module).__module__.startswith("transformers.models."):
        return False
    if "forward" in vars(module):  # replaced for this instance, so the class does not decide
        return False
    parameters = [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.ndim < 2 or not name.endswith("weight") or isinstance(module, nn.Embedding)
    ]
    tensors = [*floating_tensors(inputs), *parameters]
    return all(tensor.dtype.itemsize <= itemsize(compute) for tensor in tensors)


def _is_assigned_in_forward(module: nn.Module, buffer_name: str) -> bool:
    """Whether the forward of a module of transformers assigns this buffer."""
    kind = type(module)
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or not kind.__module__.startswith("transformers.models."):
        return False
    return any(
        step.opname == "STORE_ATTR" and step.argval == buffer_name
        for step in dis.get_instructions(code)
    )


def _is_table(buffer: Tensor) -> bool:
    """Whether a buffer is a table of numbers and not a mask. A buffer with many different values is
    a table. A buffer with few values is a mask if all its values are whole, infinite or very large
    numbers, and a table otherwise.
    """
    values = dense_values(buffer.detach())
    if values is None or values.numel() < 2:
        return False
    values = values.float()
    if values.numel() > _MASK_VALUES:
        return int(values.unique().numel()) > _MASK_VALUES
    return not bool(((values == values.round()) | ~values.isfinite() | (values.abs() > 1e4)).all())
