"""`Observer`: compares a model, its gradients, its optimizer and its files with a `Precision`, and watches what a step computes.

`watch()` hooks every module and activates a dispatch mode for one step only, so that other steps have no extra cost. What cannot be
observed (`UNSEEN`, `Observation.unobserved`) is reported with the reason and never counted as observed.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...dtypes import FLOATS, itemsize, name, to_torch
from ..apply import declared_dtype, inner_model, is_narrowed, is_norm, is_quantised
from ..keep_in_fp32 import modules_kept_in_fp32
from ..own_optimizer import kept_beside_states, plain_optimizer
from ..precision import Precision
from .arithmetic import Arithmetic, arithmetic_mode
from .callers import Caller
from .changes import Changes
from .escapes import Escapes
from .kept_casts import KeptCasts
from .lineage import NOTHING, readable
from .made_narrow import judge_entered
from .observation import CHANGED, TABLES, UNSEEN, Observation
from .regions import Call, Regions, observing
from .rounded_tables import rounded_tables
from .states import COUNT, COUNTS, SCALES, allowed_beside, states_of

Gradient = Callable[[nn.Parameter], Tensor | None]
States = Callable[[nn.Parameter], Mapping[str, Any]]
_IN_FILES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}  # safetensors' names
_AT_FIRST = "it was so at the first look: a .to() cast it, or its class makes it in that dtype or in the one in which the model is loaded"
_KEPT = "the optimizer keeps it in that dtype in an attribute of its own"
_FEW = 8  # distinct values of a buffer that is a mask, not a table


class Observer:
    """Compares a model, its gradients and its optimizer with a `Precision`.

    lora_branch  dtype of the adapters' own products: fp32, or None for `compute` or fp32
    read_only    models beside the trained one that a step reads, such as a reference: their weights are known
    """

    def __init__(
        self, model: nn.Module, precision: Precision, *, lora_branch: str | None = None, read_only: Sequence[nn.Module] = ()
    ) -> None:
        self.model, self.precision, self.lora_branch, self._read_only = model, precision, lora_branch, read_only
        self._changes = Changes(model)
        self._casts = KeptCasts()
        self._watching: tuple[Arithmetic, torch.optim.Optimizer | None] | None = None
        self._buffers = {full: b.dtype for full, b in model.named_buffers() if b.is_floating_point()}

    def changed(self) -> bool:
        """Whether dtypes, hooks, classes or forwards changed since the last observed step. If so, the next step should be observed."""
        return self._changes.found()

    def look(
        self,
        observation: Observation,
        *,
        gradient: Gradient | None = None,
        states: States | None = None,
        averages: Iterable[tuple[str, Tensor]] = (),
        parameters: bool = True,
    ) -> Observation:
        """Adds parameters to `observation`, and gradients, optimizer states and weight averages (EMA) where they are given."""
        p = self.precision
        for full, parameter in self.model.named_parameters():
            if parameters:
                self._look_at_parameter(observation, full, parameter)
            if parameter.requires_grad and gradient is not None:
                if (g := gradient(parameter)) is not None:
                    observation.note("grads", f"gradient of {full}", name(g.dtype), p.grads)
                else:
                    observation.unseen_thing("grads", "backward did not reach the weight")
            if parameter.requires_grad and states is not None:
                for key, word in states_of(parameter, states(parameter)):
                    if word is None:
                        observation.unseen_thing("optimizer", COUNTS if key == COUNT else SCALES)
                    else:
                        allowed = allowed_beside(p.optimizer, parameter)
                        observation.note("optimizer", f"{key} of {full}", word, p.optimizer, allowed=allowed)
        if parameters:
            self._look_at_buffers(observation)
        for full, average in averages:
            observation.note("averages", f"average of {full}", name(average.dtype), p.optimizer)
        return observation

    def _look_at_parameter(self, observation: Observation, full: str, parameter: nn.Parameter) -> None:
        p = self.precision
        if is_quantised(parameter):
            kind = getattr(getattr(parameter, "quant_state", None), "quant_type", "int8")
            observation.note("base", full, kind, p.base)
        elif parameter.is_floating_point():
            role, declared = "trainable" if parameter.requires_grad else "base", declared_dtype(self.model, full, parameter, p)
            observation.note(role, full, name(parameter.dtype), declared)
        elif parameter.is_complex():
            observation.unseen_thing("trainable" if parameter.requires_grad else "base", "complex numbers, which no precision declares")
        else:
            observation.unseen_thing("base", "integers: packed weights whose dtype is their library's")

    def _look_at_buffers(self, observation: Observation) -> None:
        """Checks floating buffers, which have no role of their own: a table or a running mean must be fp32, a mask may have any dtype.

        Tables that a family of transformers keeps in the model's file (MiniMax's decays) are loaded in the dtype of its weights. A buffer
        that a family's own forward assigns (CTRL's positions), or that the observed step wrote before it read it (a cache of keys and
        values), is a value of the forward, whose operators are judged.
        """
        for full, buffer in self.model.named_buffers():
            if not buffer.is_floating_point():
                continue
            word, first = name(buffer.dtype), self._buffers.setdefault(full, buffer.dtype)
            observation.dtypes["buffers"][word] += 1
            if word == self.precision.compute and (_assigned_in_forward(self.model, full) or self._holds_values(buffer)):
                continue
            if buffer.dtype == torch.float64 or (buffer.dtype != first and itemsize(word) < itemsize(name(first))):
                made_so = buffer.dtype == first
                observation.report(
                    "compute", f"buffer {full} is {word}" + ("" if made_so else f" and was {name(first)}"), symbol=full, observed=word,
                    rule=TABLES if made_so else f"a buffer keeps its dtype: {name(first)}", cause=_AT_FIRST if made_so else CHANGED,
                )  # fmt: skip
            elif (
                itemsize(word) < 4
                and (buffer.numel() > 1 or _is_a_programs_scale(self.model, full, buffer))
                and (word not in self._words() or (_is_table(buffer) and not _of_the_models_file(self.model, full)))
            ):
                observation.report(
                    "compute", f"buffer {full} is stored in {word}", symbol=full, observed=word, rule=TABLES, cause=_AT_FIRST,
                    fix="leave the .to() out, or load the model in fp32: precision.base: fp32, in full fine-tuning bf16-mixed",
                )  # fmt: skip

    def _holds_values(self, buffer: Tensor) -> bool:
        return self._watching is not None and self._watching[0].step.kept.holds_values(buffer)

    def _words(self) -> set[str]:
        p = self.precision
        return {p.compute, p.generate, p.trainable, p.unquantised, "fp32"}

    def look_at_loss(self, observation: Observation, dtype: torch.dtype) -> None:
        observation.note("loss", "the loss", name(dtype), self.precision.loss)

    def look_at_sums(self, observation: Observation, sent: Sequence[torch.dtype]) -> None:
        """What was summed across processes, by bucket."""
        for number, dtype in enumerate(sent):
            observation.note("reduce", f"bucket {number} of the gradients summed across processes", name(dtype), self.precision.reduce)

    def look_at_task(self, observation: Observation, tensors: Iterable[tuple[str, str, str]]) -> None:
        """(role, tensor, dtype) of the roles that only the run's task has."""
        for role, tensor, dtype in tensors:
            observation.note(role, tensor, dtype, getattr(self.precision, role))

    def look_at_files(self, observation: Observation, folder: Path, declared: str) -> None:
        """The floating tensors of a saved result, as its files have them; integers are packed 4-bit weights or ids."""
        from safetensors import safe_open

        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for full in file.keys():  # noqa: SIM118  # not a mapping
                    if dtype := _IN_FILES.get(file.get_slice(full).get_dtype()):
                        observation.note("save", f"{full} in {path.name}", dtype, declared)
                    else:
                        observation.unseen_thing("save", "integers: packed weights or ids")

    def know_batch(self, given: Any) -> None:
        """Registers the tensors of a batch, a nest of lists and mappings, in a step that is being watched."""
        if self._watching is not None:
            self._watching[0].know_batch(given)

    @contextmanager
    def set_apart(self) -> Iterator[None]:
        """Code that is not of the step, such as a callback, runs in this block: a step that is being watched does not judge it."""
        if self._watching is None:
            yield
            return
        arithmetic, optimizer = self._watching
        arithmetic.paused = True
        try:
            yield
        finally:
            arithmetic.know(self.model, optimizer)
            arithmetic.paused = False

    @contextmanager
    def watch(
        self, step: int, *, role: str = "compute", optimizer: torch.optim.Optimizer | None = None, gradient: Gradient | None = None
    ) -> Iterator[Observation]:
        """Judges every operator and notes every module's output within this block; `role` is `generate` while tokens are generated.

        optimizer, gradient  where given, gradients are looked at just before the update and states after the block
        """
        observation = Observation(step)
        inner = inner_model(self.model)
        regions = Regions(self.model, lambda call: self._left(observation, call, role))
        if role == "compute":
            for table, word in rounded_tables(inner, self.precision.compute):
                why = f"its fp32 values have no more bits than {word}; it was made before the observed step"
                observation.unobserved[f"how the table {table} was made"] = why
        arithmetic = arithmetic_mode(observation, self.precision, regions, role=role, lora_branch=self.lora_branch, casts=self._casts)
        judged = arithmetic.step
        arithmetic.know(self.model, optimizer)
        for other in self._read_only:
            arithmetic.know(other, None)

        def escaped(way: str, tensor: Tensor, by: Caller) -> None:
            if arithmetic.paused:
                return
            self._casts.leaves(tensor)
            known = arithmetic.lineages.of(tensor)
            lineage = known or NOTHING
            if not tensor.is_floating_point() and not lineage.integers:
                return  # ids and counts
            arithmetic.step.numbers_left = arithmetic.step.numbers_left or known is None or lineage.data
            if tensor.numel() > 1 and (lineage.data or regions.stack):
                where = regions.module or regions.now()
                why = f"{name(tensor.dtype)}{list(tensor.shape)} at {by.place.rsplit('/', 1)[-1]}; what is done to them there is not seen"
                observation.unobserved.setdefault(f"values leave through {way} in {where}", why)

        def entered(called: str, args: Any, kwargs: Any, made: Tensor, by: Caller) -> None:
            if not arithmetic.paused:
                arithmetic.paused = True  # the look's own operators
                try:
                    judge_entered(judged, called, args, kwargs, made, by)
                except Exception as error:  # such as data that is no number of fp32; the program goes on
                    first = "".join(str(error).splitlines()[:1])
                    observation.unobserved.setdefault(
                        f"{called} in {regions.module or regions.now()}", f"looking at its data failed: {first}"
                    )
                finally:
                    arithmetic.paused = False

        def before_update(*_: Any) -> None:
            # the gradients are gone after the step: their dtypes are taken just before the optimizer reads them
            if "grads" not in observation.total:
                arithmetic.paused = True  # the look's own operators are not the update's
                try:
                    self.look(observation, gradient=gradient)
                finally:
                    arithmetic.paused = False

        with ExitStack() as stack:
            stack.enter_context(regions.followed())
            inputs = observing(lambda m, args, kwargs: arithmetic.know_inputs((args, kwargs)))
            given = self.model.register_forward_pre_hook(inputs, with_kwargs=True)
            stack.callback(given.remove)
            for module_name, module in inner.named_modules():
                hook = observing(self._output_hook(observation, module_name or type(inner).__name__, role))
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if optimizer is not None and gradient is not None:
                # a wrapper that does not call PyTorch's constructor has no hooks: the optimizer inside it does
                hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
                register = optimizer.register_step_pre_hook if hooked else register_optimizer_step_pre_hook
                stack.callback(register(before_update).remove)
            stack.enter_context(Escapes(escaped, entered, judged.attention_calls, judged.quantiles, judged.entries))
            stack.enter_context(arithmetic)
            self._watching = arithmetic, optimizer
            stack.callback(setattr, self, "_watching", None)
            yield observation
        arithmetic.finish()
        self._look_at_product_setting(observation, role)
        self._changes.remember()
        if optimizer is not None:
            if "grads" not in observation.total:
                # an fp16 overflow skips the update
                self.look(observation, gradient=lambda p: None)
            self.look(observation, states=lambda p: optimizer.state.get(p, {}), parameters=False)
            self._look_beside_states(observation, optimizer)

    def _look_beside_states(self, observation: Observation, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer of a program's own keeps in attributes: states too, in the declared dtype or fp32."""
        by = type(plain_optimizer(optimizer)).__name__
        for attribute, tensor in kept_beside_states(optimizer):
            if tensor.is_floating_point():
                what = f"{attribute} of {by}"
                observation.note("optimizer", what, name(tensor.dtype), self.precision.optimizer, allowed=("fp32",), cause=_KEPT)

    def _look_at_product_setting(self, observation: Observation, role: str) -> None:
        """PyTorch may be told to multiply fp32 tensors in fewer bits, which no operator's dtype shows."""
        on_gpu = any(p.device.type == "cuda" for p in self.model.parameters())
        backend = torch.backends.cuda if on_gpu else torch.backends.mkldnn
        # "none" leaves the choice to the wider setting. "tf32" on a CPU is what torch.set_float32_matmul_precision("high") leaves there
        settings = (s.fp32_precision for s in (backend.matmul, backend, torch.backends) if hasattr(s, "fp32_precision"))
        word = next((s for s in settings if s != "none"), "none")
        if getattr(self.precision, role) == "fp32" and word in (("tf32", "bf16") if on_gpu else ("bf16",)):
            observation.report(
                role, f"products of fp32 tensors are computed in {word}", symbol="torch.backends", observed=word, declared="fp32",
                cause='a setting of the process: torch.set_float32_matmul_precision("medium"), or fp32_precision of torch.backends',
                fix='torch.set_float32_matmul_precision("highest"), or a precision that computes in bf16',
            )  # fmt: skip

    def _left(self, observation: Observation, call: Call, role: str) -> None:
        if role != "compute" or not is_norm(call.module):
            return
        if call.sums:
            narrowest = min(call.sums, key=itemsize)
            by = call.sums[narrowest]
            observation.note(
                "norms", f"arithmetic of {call.name}", narrowest, self.precision.norms, file=by.file, line=by.line,
                cause="its forward computes in that dtype there",
            )  # fmt: skip
        else:
            observation.unseen_thing("norms", UNSEEN["norms"])

    def _output_hook(self, observation: Observation, module_name: str, role: str) -> Callable[..., None]:
        compute = getattr(self.precision, role)
        generating = role == "generate"  # norms and embeddings leave in `compute` then too: only products are judged
        outermost = inner_model(self.model)
        in_fp32 = modules_kept_in_fp32(outermost, to_torch(self.precision.compute))

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._watching is not None and self._watching[0].paused:
                return
            declared = isinstance(module, nn.Linear) or (not generating and is_narrowed(module, in_fp32))
            for tensor in floating_tensors(output):
                dtype = name(tensor.dtype)
                if not generating:
                    observation.dtypes["outputs"][dtype] += 1
                if declared and dtype != compute and not self._adapter(module_name, dtype):
                    what = f"output of {module_name} ({type(module).__name__})"
                    observation.report(role, f"{what} is {dtype}, declared {compute}", symbol=what, observed=dtype, declared=compute)
                elif (
                    not declared and not generating and module is not outermost and dtype in FLOATS and itemsize(dtype) > itemsize(compute)
                ):
                    observation.promotions[module_name, dtype] += 1
                    if _is_stream(module_name, module, tensor, (args, kwargs)):
                        observation.report(
                            role, f"the residual stream leaves {module_name} in {dtype}, declared {compute}", symbol=module_name,
                            observed=dtype, declared=compute, cause="something widened it, and nothing narrows it again",
                        )  # fmt: skip

        return hook

    def _adapter(self, module_name: str, dtype: str) -> bool:
        return "lora_" in module_name and dtype == "fp32" and self.lora_branch in (None, "fp32")


def _of_the_models_file(model: nn.Module, full: str) -> bool:
    """Whether a buffer is stored with the weights by a module of transformers' own."""
    owner, _, own = full.rpartition(".")
    module = model.get_submodule(owner)
    return type(module).__module__.startswith("transformers.models.") and own not in module._non_persistent_buffers_set


def _assigned_in_forward(model: nn.Module, full: str) -> bool:
    """Whether the forward of a module of transformers' own assigns its buffer anew."""
    owner, _, own = full.rpartition(".")
    kind = type(model.get_submodule(owner))
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or not kind.__module__.startswith("transformers.models."):
        return False
    return any(step.opname == "STORE_ATTR" and step.argval == own for step in dis.get_instructions(code))


def _is_a_programs_scale(model: nn.Module, full: str, buffer: Tensor) -> bool:
    """Whether a buffer of one number, not a whole one, is of a module of the program's own. Libraries keep scales as their files do."""
    kind = type(model.get_submodule(full.rpartition(".")[0])).__module__
    if kind.startswith(("transformers.", "peft.", "bitsandbytes.", "torch.")):
        return False
    value = float(buffer.item())  # no cast, which would be judged
    return math.isfinite(value) and not value.is_integer()


def _is_table(buffer: Tensor) -> bool:
    if (values := readable(buffer.detach())) is None:
        return False
    return int(values.float().unique().numel()) > _FEW if values.numel() > _FEW else values.numel() > 1 and not _whole(values)


def _whole(buffer: Tensor) -> bool:
    """Whether a few values are whole numbers, or the bounds that masks are filled with."""
    values = buffer.detach().float()
    return bool(((values == values.round()) | ~values.isfinite() | (values.abs() > 1e4)).all())


def _is_stream(module_name: str, module: nn.Module, output: Tensor, given: Any) -> bool:
    """Whether a module passes on the residual stream: it has a weight matrix, and its output has the shape of its input.

    Of transformers' own modules only the layers count: `apply_precision` narrows their output, whatever they compute inside.
    """
    if output.dim() < 2 or not any(p.dim() > 1 for p in module.parameters()):
        return False
    if type(module).__module__.startswith("transformers.") and not module_name.rpartition(".")[2].isdigit():
        return False
    first = next(floating_tensors(given), None)
    return first is not None and first.shape == output.shape


def floating_tensors(output: Any) -> Iterator[Tensor]:
    """Every floating tensor in what a module returned, however it is nested."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from floating_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from floating_tensors(value)


def share_changed(before: list[Tensor], after: list[Tensor]) -> float:
    """The share of sampled elements that differ: 1.0 when every update changed its weight, 0.0 when all updates were rounded away."""
    total = sum(b.numel() for b in before)
    if not total:
        return 0.0
    counts = [torch.count_nonzero(b != a) for b, a in zip(before, after)]
    # one transfer: each read would make the host wait for the device
    return int(torch.stack([count.to(counts[0].device) for count in counts]).sum()) / total
