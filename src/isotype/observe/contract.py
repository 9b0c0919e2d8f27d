"""What breaks the declared precision, and what is only counted: the reader of an observed step's
tape.

Of what operators do, these are violations: matrix products outside `compute` (in adapters: outside
the dtype of their branch), a loss narrower than `loss`, sums narrower than their role (accumulation
in backward, in an update or in a buffer; norms of gradients; a norm's own sums), narrow numbers by
which the loss is divided or gradients are clipped, fp64, and numbers and tables that are made in a
narrow dtype. What is stored is looked at by `observer`, what lies between steps by `continuity`.
Other arithmetic outside `compute` is counted.

Common practice is not reported: fp32 products of a router, recognised by their later use (top-k),
fp32 products of tables, which depend on no activation, and those for which a family of transformers
switches autocast off. PyTorch's own backward follows the forward that was judged; Python code in
backward is judged.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import FLOATS, eps, itemsize, name
from ..precision.apply import is_norm
from ..precision.precision import Precision
from .operators import (
    ADDITIONS,
    CAST,
    CHOICES,
    CREATE,
    CURVED,
    DIVISIONS,
    EXACT,
    LOG_SUMS,
    LOSSES,
    NORM_SUMS,
    OPAQUE,
    PRODUCT,
    RAMPS,
    SUM,
    Operator,
)
from .origin import ENGINE, OURS, PRACTICE, USER, caller
from .record import TABLES, Observation
from .tape import BACKWARD, FORWARD, GRADIENTS, LOSS, UPDATE, Calls, Step, tape
from .values import (
    BOUND,
    BUFFER,
    FLOAT_INPUT,
    INPUT,
    NOTHING,
    SMALL,
    WEIGHT,
    Call,
    Lineage,
    Lineages,
    address,
    float_word,
    is_wrapper,
    joined,
    plain_tensors,
    readable,
)

# autograd's nodes of products; other nodes, as a triangular solve's, may multiply in their own
# dtype
_PRODUCT_NODE = re.compile(
    r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Convolution|Linear|ScaledDot|GroupedMm|Trilinear)\w*Backward"
)
_ATTENTION = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.nn.functional.multi_head_attention_forward,
)
# functions that make a tensor of Python's numbers, or write one into it, and which argument is the
# numbers
_ENTRIES = {"tensor": 0, "as_tensor": 0, "asarray": 0, "new_tensor": 1, "__setitem__": 2}
_NUMBERS = "numbers are made in fp32, or in the dtype that computes with them"
_SUMMED = "sums are fp32"
_UNFUSED = (
    "no op runs this adapter, and PEFT's own code computes in autocast's dtype (see the manifest)"
)
# its Newton-Schulz iteration is in bf16 whatever its weights are, and is counted as
# `update_iteration`
_MUON = "torch/optim/_muon.py"
_TERMS = 4  # narrow additions that are a formula; more are a sum written as a loop


class Contract:
    """Judges every operator while it is active.

    role         compute, or generate while tokens are made
    lora_branch  the dtype of the adapters' own products: fp32 beside narrower base products, or
                 None for either
    paused       whether code runs that is not of the step
    """

    def __init__(
        self,
        seen: Observation,
        precision: Precision,
        step: Step,
        *,
        role: str,
        lora_branch: str | None,
    ) -> None:
        self.seen = seen
        self.precision = precision
        self.step = step
        self.role = role
        self.lora_branch = lora_branch
        self.compute: str = getattr(precision, role)
        self.paused = False
        self.lineages = Lineages()
        self.modes = (Calls(self._called), tape(self._ran))
        self._buffers: dict[int, str] = {}  # by storage: the model's floating buffers
        # products outside compute, with their cause, until their use is known
        self._pending: dict[int, tuple[Call, str, str]] = {}
        self._routers: set[int] = set()
        self._wide_forward = False
        # dtypes of PyTorch's attention that runs: its inside may be made of wide products
        self._attention: list[str | None] = []

    def know(self, *models: nn.Module) -> None:
        """Registers the tensors of models that exist before a step: weights, gradients and buffers."""
        for model in models:
            self.lineages.set_weights(model)
            for full, buffer in model.named_buffers():
                self.lineages.set(buffer, Lineage(BUFFER))
                if buffer.is_floating_point():
                    self._buffers[address(buffer)] = full

    def know_inputs(self, given: Any) -> None:
        """Registers what a module is called with from outside any other."""
        for tensor in plain_tensors(given, []):
            before = self.lineages.of(tensor)
            # floats made in the step of nothing that the model has, as noised latents are, are
            # inputs too
            if before is None or not before.from_ or not tensor.is_floating_point():
                made = before or NOTHING
                self.lineages.set(
                    tensor,
                    replace(
                        made,
                        from_=made.from_ | (FLOAT_INPUT if tensor.is_floating_point() else INPUT),
                    ),
                )

    def finish(self) -> None:
        """Reports the products outside `compute` that do not belong to a router."""
        for number, (call, word, cause) in self._pending.items():
            if number in self._routers:
                self.seen.dtypes["router"][word] += 1
            else:
                self._product_outside(call, word, cause=cause)
        self._pending.clear()

    # ---- what runs
    def _called(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in _ATTENTION and args and isinstance(args[0], Tensor):
            device = args[0].device.type
            if torch.is_autocast_enabled(device):
                inside = torch.get_autocast_dtype(device)
            else:
                inside = args[0].dtype
            self._attention.append(float_word(inside))
            try:
                return func(*args, **kwargs)
            finally:
                self._attention.pop()
        out = func(*args, **kwargs)
        if func.__name__ in _ENTRIES and not self.paused:
            made = args[0] if out is None else out
            if type(made) is Tensor and not made.is_meta:
                self._entered(func.__name__, args, kwargs, made)
        return out

    def _ran(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        out = op(*args, **kwargs)
        # beside the model, while tokens are made, runs a sampler's choice of a token, a pipeline's
        # scheduler and VAE
        if not self.paused and (self.role != "generate" or self.step.stack):
            with torch._C.DisableTorchFunction():
                call = Call(
                    self,
                    op,
                    args,
                    kwargs,
                    plain_tensors([args, kwargs], []),
                    plain_tensors(out, []),
                )
                try:
                    self._judge(call)
                # such as a tensor whose kind lacks an operator that the look needs; the program
                # goes on
                except Exception as error:
                    self._failed(f"{op.plain} in {call.where}", error)
        return out

    def _failed(self, what: str, error: Exception) -> None:
        self.seen.unobserved.setdefault(
            what, f"looking at its tensors failed: {''.join(str(error).splitlines()[:1])}"
        )

    def _judge(self, call: Call) -> None:
        op = call.op
        if (wrapper := next((type(t) for t in call.inputs if is_wrapper(t)), None)) is not None:
            self.seen.unobserved.setdefault(
                f"operator {op.plain} on {wrapper.__name__} in {call.where}",
                "the class computes with other tensors than its dtype says",
            )
            self.seen.unseen_thing(self.role, f"operators on {wrapper.__name__}")
            return
        if "torch._dynamo" in sys.modules and call.by.compiled:
            self.seen.unobserved.setdefault(
                f"compiled region in {call.module or 'no module'}",
                "runs operator by operator while it is observed; what the compiled code of the"
                " other steps does is not seen",
            )
        if op.kind == CREATE:
            known = []
        else:
            known = [lineage for t in call.inputs if (lineage := self.lineages.of(t)) is not None]
        made = joined(known)
        dtype = call.dtype()
        if op.kind == OPAQUE:
            self._opaque(call, dtype, made)
        elif op.kind == CREATE:
            self._numbers(call)
        elif dtype is not None:
            self._fp64(call, dtype, made)
            if op.kind == PRODUCT:
                made = self._product(call, dtype, made)
            elif op.kind == CAST:
                self._cast(call, made)
            elif op.kind == EXACT:
                self._numbers(call)
            else:
                made = self._arithmetic(call, dtype, made)
        if op.plain in CHOICES and call.region == FORWARD and len(self.step.stack) > 1:
            self._routers |= made.products
        self._remember(call, made)

    def _remember(self, call: Call, made: Lineage) -> None:
        for tensor in call.outputs:
            # a view shares the record of its storage
            if (
                call.op.kind != EXACT
                or any(call.op.writes)
                or not any(self.lineages.same(tensor, given) for given in call.inputs)
            ):
                self.lineages.set(tensor, made)
        for value in call.written:
            self.lineages.set(value, made)

    # ---- rules
    def _opaque(self, call: Call, dtype: str | None, made: Lineage) -> None:
        if not call.op.has_contract(self.precision.base):
            self.seen.unobserved.setdefault(
                f"operator {call.op.foreign} in {call.where}",
                "its arithmetic is inside its own kernel",
            )
            self.seen.unseen_thing(self.role, f"inside {call.op.foreign}")
        elif dtype is not None:
            self._fp64(call, dtype, made)
            self.seen.unseen_thing(
                self.role, f"inside {call.op.foreign}, an operator with a contract"
            )

    def _fp64(self, call: Call, dtype: str, made: Lineage) -> None:
        """A single number that a cast leaves in fp64 is harmless; a value that activations or
        weights become is not. Isotype adds up an evaluation in fp64.
        """
        if dtype != "fp64" and not any(
            t.dtype in (torch.float64, torch.complex128) for t in call.outputs
        ):
            return
        size = max(t.numel() for t in [*call.inputs, *call.outputs])
        is_arithmetic = dtype == "fp64" and call.op.kind not in (EXACT, CAST)
        if size == 1 and not is_arithmetic:
            return
        if self._is_table(call, made) or self._is_diffusers_positions(call):
            return
        if call.by.kind == OURS:
            return
        call.report(
            call.role,
            f"{call.op.foreign or call.op.plain} in fp64",
            observed="fp64",
            cause="fp64 is no role's dtype",
        )

    def _is_table(self, call: Call, made: Lineage) -> bool:
        """Whether a forward computes positions or constants here: values of no activation and no
        weight, which no role declares (Z-Image's frequencies, made at the first call).

        An activation that meets such a table in fp64 is fp64 itself, and is reported.
        """
        is_constant = not made.activation and not made.from_ & WEIGHT
        return is_constant and call.region == FORWARD

    def _is_diffusers_positions(self, call: Call) -> bool:
        """Whether this runs where diffusers computes positions that it is given as floats in fp64
        and returns them in fp32: in a module without weights, or in the functions that its patch
        embeddings call.
        """
        module = self.step.stack[-1].module if self.step.stack else None
        if module is None or not type(module).__module__.startswith("diffusers."):
            return False
        return next(module.parameters(), None) is None or call.by.file.endswith(
            "diffusers/models/embeddings.py"
        )

    def _product(self, call: Call, dtype: str, made: Lineage) -> Lineage:
        by = call.by
        region = call.region
        seen = self.seen
        adapter = "lora_" in call.module
        if region in (UPDATE, GRADIENTS, LOSS) and not (region == LOSS and by.kind == OURS):
            seen.dtypes["other_products"][dtype] += 1
            # backward mirrors a product of the loss, as that of a contrastive one, in its dtype
            self._wide_forward = self._wide_forward or (region == LOSS and dtype != self.compute)
            return made
        if adapter and self.lora_branch == "fp32" and dtype != "fp32" and dtype in FLOATS:
            # a layer that no op runs: PEFT's own code follows autocast
            self._product_outside(
                call,
                dtype,
                declared="fp32",
                rule="model.lora_branch: fp32",
                cause=_UNFUSED,
                fix="model.lora_branch: compute",
            )
        if dtype == self.compute or dtype not in FLOATS:
            seen.note(self.role, call.op.plain, dtype, self.compute, allowed=(dtype,))
        elif by.kind == OURS:
            seen.dtypes["lora_branch" if by.is_lora_branch else "isotype_ops"][dtype] += 1
            # recorded by autograd, unlike what runs inside an autograd function: backward mirrors
            # it
            self._wide_forward = self._wide_forward or torch.is_grad_enabled()
        elif by.kind == ENGINE and region == BACKWARD:
            # mirrors a forward product outside compute, which was judged; one without such a
            # forward is autocast's
            if not self._wide_forward and _PRODUCT_NODE.match(
                type(torch._C._current_autograd_node()).__name__
            ):
                self._product_outside(call, dtype)
            seen.dtypes["mirrored_in_backward"][dtype] += 1
        elif self._attention and self._attention[-1] == self.compute:
            # with dropout, and on devices without a kernel, PyTorch makes attention of fp32
            # products of what it got in `compute`
            self._wide_forward = True
            seen.unseen_thing(
                self.role, "inside PyTorch's attention, which is given and gives `compute`"
            )
        elif adapter and self.lora_branch in (None, dtype):
            self._wide_forward = True
            seen.dtypes["lora_branch"][dtype] += 1
        elif not made.activation and region == FORWARD:
            seen.dtypes["tables"][dtype] += 1
        elif (
            region == FORWARD
            and by.kind == PRACTICE
            and dtype == "fp32"
            and self.step.switched_off_by_family()
        ):
            self._wide_forward = True
            seen.dtypes["family_in_fp32"][dtype] += 1
        elif region == FORWARD:
            number = len(self._pending)
            self._wide_forward = True
            self._pending[number] = call, dtype, call.why(dtype)
            return replace(made, products=made.products | {number})
        else:
            self._product_outside(call, dtype)
        return made

    def _product_outside(self, call: Call, word: str, *, cause: str = "", **branch: str) -> None:
        """branch: what differs where an adapter's branch is declared."""
        symbol = f"{call.op.foreign or call.op.plain} in {call.where}"
        said = {
            "declared": self.compute,
            **branch,
        }
        self.seen.report(
            self.role,
            f"{symbol} multiplies in {word}, declared {said['declared']}",
            symbol=symbol,
            observed=word,
            cause=cause or call.why(word),
            file=call.by.file,
            line=call.by.line,
            **said,
        )

    def _arithmetic(self, call: Call, dtype: str, made: Lineage) -> Lineage:
        op = call.op
        region = call.region
        precision = self.precision
        narrow = itemsize(dtype) < 4
        norm = self.step.inside(is_norm) if region == FORWARD else None
        if norm is not None and op.plain in NORM_SUMS and dtype not in norm.sums:
            norm.sums[dtype] = call.by
        if op.plain in DIVISIONS and region in (FORWARD, LOSS):
            self._denominator(call, made)
        if not narrow and dtype == self.compute:
            return made
        kind = call.by.kind
        if kind == OURS or (kind == ENGINE and region == BACKWARD):
            return made
        below_grads = itemsize(dtype) < itemsize(precision.grads)
        if (
            made.activation
            and itemsize(dtype) < itemsize(precision.loss)
            and self._of_the_loss(call)
        ):
            self._narrower(call, "loss", dtype)
        if region == LOSS and narrow:
            self._count(call, dtype, made)
        if region == FORWARD:
            if made.activation and norm is None and dtype != self.compute:
                self.seen.arithmetic[f"{op.plain} in {call.module}", dtype] += 1
            if narrow and kind != PRACTICE:
                self._buffer_or_table(call, dtype, made)
        elif region == BACKWARD and below_grads:
            made = replace(made, added=made.added + (op.plain in ADDITIONS))
            if op.kind == SUM or made.added > _TERMS:
                self._narrower(call, "grads", dtype)
        elif region == UPDATE and narrow and call.by.file.endswith(_MUON):
            self.seen.dtypes["update_iteration"][dtype] += 1
        elif region in (GRADIENTS, UPDATE) and op.kind == SUM and below_grads:
            if call.inputs[0].numel() > 1:
                self._narrower(call, "grads", dtype)
        elif region == GRADIENTS and kind == USER and op.plain in DIVISIONS and below_grads:
            if call.outputs[0].numel() == 1:
                self._narrower(call, "grads", dtype)  # the norm by which gradients are clipped
        elif (
            region == UPDATE
            and narrow
            and op.plain in ADDITIONS
            and dtype not in (precision.trainable, precision.optimizer)
        ):
            self._narrower(call, "optimizer", dtype)
        if region in (BACKWARD, GRADIENTS) and op.plain in ADDITIONS:
            self._narrow_accumulation(call, dtype)
        return made

    def _count(self, call: Call, dtype: str, made: Lineage) -> None:
        """A sum of whole numbers, as of a mask, that its dtype does not hold."""
        if (
            call.op.kind == SUM
            and call.by.kind == USER
            and not (made.activation or made.from_ & WEIGHT)
            and call.is_inexact()
        ):
            self._narrower(call, "loss", dtype)

    def _denominator(self, call: Call, made: Lineage) -> None:
        """A number by which the loss is divided: one of few bits may be a count that was rounded."""
        divisor = call.args[1] if len(call.args) > 1 else None
        if (
            not isinstance(divisor, Tensor)
            or divisor.numel() != 1
            or not made.activation
            or not self._foreign(LOSS, divisor.dtype)
        ):
            return
        own = self.lineages.of(divisor)
        values = readable(divisor.detach())
        word = name(divisor.dtype)
        in_a_layer = call.region == FORWARD and (
            call.outputs[0].numel() != 1 or self.step.in_a_part()
        )
        if in_a_layer or values is None or (own is not None and own.activation):
            return
        value = float(values)
        if value.is_integer() and abs(value) <= 1 / eps(word):
            return
        call.report(
            "loss",
            f"the loss is divided by a number of {word}",
            observed=word,
            rule=_SUMMED,
            cause="a count or a sum of weights is kept in that dtype, which may have rounded it",
        )

    def _of_the_loss(self, call: Call) -> bool:
        """Whether this computes the loss: after forward, or in the forward of a model that is given
        labels.

        A part of the model that has weights takes a log-softmax or a logsumexp of its own values
        (scores, a router's). Code of transformers has losses of its own in layers.
        """
        if call.region != FORWARD:
            return call.region == LOSS
        if call.op.plain not in LOSSES or (call.op.plain in LOG_SUMS and self.step.in_a_part()):
            return False
        return not (
            call.by.kind == PRACTICE and any(part.isdigit() for part in call.module.split("."))
        )

    def _buffer_or_table(self, call: Call, dtype: str, made: Lineage) -> None:
        """In forward: an addition into a narrow buffer, as of a running mean; functions of
        positions and constants in a narrow dtype.
        """
        for target in call.written:
            full = self._buffers.get(address(target))
            if (
                full is not None
                and (call.op.plain in ADDITIONS or call.op.kind == SUM)
                and itemsize(name(target.dtype)) < 4
            ):
                word = name(target.dtype)
                call.report(
                    self.role,
                    f"buffer {full} sums in {word}",
                    observed=word,
                    rule=_SUMMED,
                    cause="it is stored in that dtype",
                )
        if (
            made.activation
            or made.from_ & WEIGHT
            or call.op.plain not in CURVED
            or call.outputs[0].numel() < 2
        ):
            return
        if call.is_inexact():
            call.report(
                self.role,
                f"{call.op.plain} is computed in {dtype}",
                observed=dtype,
                rule=TABLES,
                cause="narrower than its rule",
            )

    def _narrow_accumulation(self, call: Call, dtype: str) -> None:
        """Gradients that are added into a narrower tensor, which no cast shows."""
        for target in call.written:
            word = float_word(target.dtype)
            if (
                word
                and itemsize(word) < itemsize(dtype)
                and itemsize(word) < itemsize(self.precision.grads)
            ):
                self._narrower(call, "grads", word)

    def _narrower(self, call: Call, role: str, dtype: str) -> None:
        message = (
            f"{call.op.plain} is computed in {dtype}, declared {getattr(self.precision, role)}"
        )
        call.report(role, message, observed=dtype, cause="narrower than its role")

    # ---- numbers and positions
    def _foreign(self, region: str, dtype: torch.dtype, *, table: bool = False) -> bool:
        """Whether a dtype is narrower than fp32, and not the one of what is computed in this
        region.

        table  it holds different numbers: such a table is fp32 whatever `compute` is
        """
        p = self.precision
        word = float_word(dtype)
        declared = {
            FORWARD: () if table else (self.compute,),
            LOSS: (p.loss,),
            BACKWARD: (self.compute, p.grads),
            GRADIENTS: (p.grads,),
            UPDATE: (p.trainable, p.optimizer),
        }
        return word is not None and itemsize(word) < 4 and word not in declared[region]

    def _numbers(self, call: Call) -> None:
        """Numbers that an operator writes, as fills and ramps, and rounds. What the dtype holds
        exactly, as 0.5 and -inf, loses nothing.
        """
        if not call.outputs:
            return
        own = call.outputs[0]
        ramp = call.op.plain in RAMPS
        if (
            not self._foreign(call.region, own.dtype, table=ramp)
            or call.by.of_a_library
            or readable(own) is None
        ):
            return
        if call.is_rounded_ramp() if ramp else call.rounds_numbers():
            self._made_narrow(call, call.op.plain, own)

    def _entered(self, called: str, args: tuple, kwargs: dict, made: Tensor) -> None:
        """A tensor that `torch.tensor` and its relatives made of Python's numbers, or into which
        such a number was written.
        """
        at = _ENTRIES[called]
        given = args[at] if len(args) > at else kwargs.get("data", kwargs.get("obj"))
        several = not isinstance(given, int | float | complex) and made.numel() > 1
        if isinstance(given, Tensor) or not self._foreign(
            self.step.now(), made.dtype, table=several
        ):
            return
        by = caller()
        if by.of_a_library:
            return
        with torch._C.DisableTorchFunction():
            self.paused = True  # the look's own operators
            try:
                exact = torch.tensor(given, dtype=torch.float32)
                lost = (
                    exact.isfinite()
                    & (exact.abs() < BOUND)
                    & (exact != exact.to(made.dtype).float())
                )
                if bool(lost.any()):
                    self._made_narrow(
                        Call(self, None, args, kwargs, [], [made]), called.strip("_"), made
                    )
            # such as data that is no number of fp32; the program goes on
            except Exception as error:
                self._failed(f"{called} in {self.step.module or self.step.now()}", error)
            finally:
                self.paused = False

    def _made_narrow(self, call: Call, what: str, made: Tensor) -> None:
        word = name(made.dtype)
        call.report(
            call.role,
            f"numbers of {what} are rounded to {word}",
            observed=word,
            rule=_NUMBERS,
            cause="they are made in that dtype",
        )

    def _cast(self, call: Call, made: Lineage) -> None:
        """Positions, tables, counts and norms of gradients that a cast rounds."""
        if call.op.plain == "copy" and len(call.args) > 1:
            target = call.args[0]
            source = call.args[1]
        else:
            target = call.outputs[0]
            source = call.args[0]
        if (
            not isinstance(source, Tensor)
            or source.dtype == torch.bool
            or not 0 < source.numel() <= SMALL
            or source.is_complex()
        ):
            return
        word = float_word(target.dtype)
        if (
            word is None
            or itemsize(word) >= 4
            or source.itemsize <= target.itemsize
            or call.by.of_a_library
        ):
            return
        if (
            source.numel() == 1
            and call.region == GRADIENTS
            and itemsize(word) < itemsize(self.precision.grads)
        ):
            call.report(
                "grads",
                f"a norm of gradients is rounded to {word}",
                observed=word,
                cause="it is cast",
            )
        elif (
            not (made.activation or made.from_ & WEIGHT)
            and (values := readable(source.detach())) is not None
        ):
            self._cast_numbers(call, values, target, word)

    def _cast_numbers(self, call: Call, values: Tensor, target: Tensor, word: str) -> None:
        """Whole numbers beyond what the dtype counts (bf16: 256); of tables any number, in a dtype
        that no role has there.
        """
        values = values[values.isfinite() & (values.abs() < BOUND * 100)]
        whole = not values.is_floating_point() or bool((values == values.round()).all())
        # a single number is a count: of tokens, of rows
        judged = whole and (not values.is_floating_point() or call.region == LOSS)
        if values.numel() > 1:
            judged = call.region == FORWARD and (whole or word != self.compute)
        if (
            judged
            and call.region in (FORWARD, LOSS)
            and not torch.equal(values.to(target.dtype).to(values.dtype), values)
        ):
            if whole:
                what = f"whole numbers up to {float(values.abs().max()):.0f} are"
            else:
                what = "a table is"
            what = what if values.numel() > 1 else "a count is"
            call.report(
                call.role,
                f"{what} rounded to {word}",
                observed=word,
                rule=TABLES,
                cause="it has fewer bits than they need",
            )
