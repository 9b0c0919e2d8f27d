"""Judges every operator of an observed step by its role: products, sums, elementwise arithmetic, casts.

These are violations: a product outside `compute` (in adapters: outside the dtype of their branch), arithmetic narrower than its role, fp64
anywhere, and a loss of precision that a later widening hides. To detect the last, `lineage` records what each value lost. Elementwise
arithmetic that is wider than its role is only counted. Common practice is not reported: fp32 products of a router, recognised by their
later use (top-k), and fp32 products of tables, which depend on no activation.

PyTorch's own backward operators follow the forward that was judged, so their sums are not judged again. Python code in backward is judged.

Long because it is one table of rules: which dtype each kind of operator may have in each part of a step.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes import FLOATS, itemsize, name
from ..apply import is_norm
from ..precision import Precision
from . import operators as ops
from .callers import ENGINE, OURS, PRACTICE, Caller, caller
from .disguises import quantised_operands, shifted
from .lineage import BUFFER, NOTHING, WEIGHT, Lineage, Lineages, Mark, joined, plain_tensors, wide
from .observation import Observation
from .regions import BACKWARD, FORWARD, GRADIENTS, LOSS, UPDATE, Regions

# autograd's nodes of products; other nodes, as a triangular solve's, may multiply in their own dtype
_PRODUCT_NODE = re.compile(r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Convolution|Linear|ScaledDot|GroupedMm|Trilinear)\w*Backward")
# operators that take values out of a table by integers, and those that turn floating values into such integers
_LOOKUPS = frozenset(("index", "index_select", "gather", "embedding", "take"))
_CODES = frozenset(("bucketize", "searchsorted", "argmin"))
_CHOICES = frozenset(("topk", "argmax", "sort", "argsort", "max"))
# a table that is checked for loss by computing it again holds no more than this
_SMALL = 1 << 20
_TERMS = 4
_OWN_KERNEL = "inside {}, an operator with a contract"


class JudgedStep:
    """What the calls of one step share: the declared precision, and what is known of the tensors and of earlier calls.

    role         compute, or generate while tokens are made
    lora_branch  the dtype of the adapters' own products: fp32 beside narrower base products, or None for either
    """

    def __init__(self, seen: Observation, precision: Precision, regions: Regions, *, role: str, lora_branch: str | None) -> None:
        self.seen, self.precision, self.regions, self.role, self.lora_branch = seen, precision, regions, role, lora_branch
        self.compute: str = getattr(precision, role)
        self.lineages = Lineages()
        self.pending: dict[int, tuple[str, str, Caller, str]] = {}  # products outside compute until their use is known
        self.routers: set[int] = set()
        self.wide_forward = False
        self.attention_calls: list[torch.dtype] = []
        words = {precision.base, precision.trainable, precision.unquantised, precision.compute, precision.generate, "fp32"}
        self.stored = words | {precision.grads, precision.optimizer, precision.reduce, precision.save_model, precision.save_adapter}
        self.allowed = {FORWARD: {self.compute, "fp32"}, LOSS: {self.compute, precision.loss, "fp32"}, UPDATE: {"fp32"}}

    def finish(self) -> None:
        """Reports the products outside `compute` that do not belong to a router."""
        for number, (module, word, by, symbol) in self.pending.items():
            if number in self.routers:
                self.seen.dtypes["router"][word] += 1
            else:
                self.product_outside(module, word, by, symbol)
        self.pending.clear()

    def product_outside(self, module: str, word: str, by: Caller, symbol: str) -> None:
        self.seen.report(
            self.role, f"{symbol} in {module or 'no module'} multiplies in {word}, declared {self.compute}", symbol=f"{symbol} in {module}",
            observed=word, declared=self.compute, cause="its operands have that dtype, and no autocast narrowed them", file=by.file,
            line=by.line,
        )  # fmt: skip


class Call:
    """One call of an operator: its inputs and outputs, its caller, and the part of the step."""

    def __init__(
        self, step: JudgedStep, op: ops.Operator, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        self.step, self.op, self.func, self.args, self.kwargs = step, op, func, args, kwargs
        self.inputs, self.outputs = inputs, outputs
        self.by = caller()
        self.region = step.regions.now()
        self.module = step.regions.module
        self.seen = step.seen

    # -- what the operator computes in

    def dtype(self) -> str | None:
        """The dtype of the arithmetic: the requested one, else the dtype to which the operands are promoted; None if none is floating."""
        asked = self.kwargs.get("dtype")
        if asked is not None and self.op.kind in (ops.SUM, ops.CREATE):
            return _float(asked)
        if self.op.name in ("_softmax", "_log_softmax") and len(self.args) > 2 and self.args[2] is True:
            return "fp32"
        floats = [t for t in self.inputs if _float(t.dtype)]
        if not floats:
            made = [t for t in self.outputs if _float(t.dtype)]
            return _float(made[0].dtype) if made else None
        several = [t for t in floats if t.dim()] or floats
        dtype = several[0].dtype
        for tensor in several[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype) if self.op.kind != ops.PRODUCT else dtype
        return _float(dtype)

    @property
    def symbol(self) -> str:
        return self.op.foreign or self.op.name

    def report(self, role: str, message: str, *, observed: str, declared: str, cause: str) -> None:
        place = f" at {_short(self.by.file)}:{self.by.line}" if self.by.kind != ENGINE else ""
        where = self.module or self.region
        self.seen.report(
            role, f"{message} ({where}{place})", symbol=where, observed=observed, declared=declared, cause=cause, file=self.by.file,
            line=self.by.line,
        )  # fmt: skip

    def unobserved(self, key: str, why: str) -> None:
        self.seen.unobserved.setdefault(key, why)

    # -- the rules

    def judge(self) -> None:
        if self.by.compiled:
            self.unobserved(
                f"compiled region in {self.module or 'no module'}",
                "runs operator by operator while it is observed; what the compiled code of the other steps does is not seen",
            )
        known = [(t, self.step.lineages.of(t)) for t in self.inputs]
        if self.op.kind == ops.CREATE:
            return self._created()
        self._unknown(known)
        lineages = [lineage or NOTHING for _, lineage in known]
        made = joined(lineages)
        dtype = self.dtype()
        if self.op.kind == ops.OPAQUE:
            self._opaque(dtype)
        elif dtype is not None:
            self._wrong_dtype(dtype, made)
            if self.op.kind == ops.PRODUCT:
                made = self._product(dtype, made)
            elif self.op.kind == ops.CAST:
                made = self._cast(made)
            else:
                self._widened(known, dtype)
                made = self._arithmetic(dtype, made)
        elif self.op.kind == ops.BITS or (made.bits and self.op.kind == ops.ARITHMETIC):
            self._bits(made)
        if self.op.name in _CODES:
            made = replace(made, integers=made.integers or made.data)
        if self.op.name in _LOOKUPS and dtype is not None:
            made = self._lookup(made)
        if self.op.name in _CHOICES and self.region == FORWARD and len(self.step.regions.stack) > 1:
            self.step.routers |= made.products
        if self.op.name == "view" and self.inputs and self.outputs:
            into_integers = _float(self.inputs[0].dtype) is not None and _float(self.outputs[0].dtype) is None
            made = replace(made, bits=made.bits or into_integers)
        self._remember(self._disguised(made))

    def _disguised(self, made: Lineage) -> Lineage:
        """Judges integers in arithmetic with floats, and large constants that are added and taken off again."""
        if self.op.kind in (ops.EXACT, ops.CAST) or not self.outputs or _float(self.outputs[0].dtype) is None:
            return made
        shift, rounds = shifted(self.op.name, self.args, self.kwargs, made)
        if self.by.kind not in (OURS, ENGINE, PRACTICE):
            if self.op.kind == ops.ARITHMETIC and (whole := quantised_operands(self.inputs, self.step.lineages)):
                self._on_a_grid(f"values pass through {name(whole[0].dtype)} in {self.op.name}", "quantised and widened again")
                made = replace(made, integers=False)
            if rounds and made.data:
                self._on_a_grid(f"{self.op.name} takes off a large constant that was added before", "the sum kept only the high bits")
        return replace(made, shift=shift)

    def _on_a_grid(self, message: str, cause: str) -> None:
        role = self._role()
        self.report(role, message, observed="a grid", declared=getattr(self.step.precision, role), cause=cause)

    def _remember(self, made: Lineage) -> None:
        for tensor in self.outputs:
            if not self._is_view(tensor) or made.bits:
                self.step.lineages.set(tensor, made)
        for index, writes in enumerate(self.op.writes):
            value = self.args[index] if index < len(self.args) else None
            for tensor in plain_tensors(value if writes else None, []):
                self.step.lineages.set(tensor, made)
        for tensor in plain_tensors(self.kwargs.get("out"), []):
            self.step.lineages.set(tensor, made)

    def _is_view(self, output: Tensor) -> bool:
        """Whether an output shares its storage with an input, and the operator wrote nothing."""
        if self.op.kind != ops.EXACT or any(self.op.writes):
            return False
        return any(self.step.lineages.same(output, tensor) for tensor in self.inputs)

    def _created(self) -> None:
        written = self.op.name not in ops.UNWRITTEN or self.by.kind in (OURS, ENGINE)
        for tensor in self.outputs:
            self.step.lineages.set(tensor, Lineage(written=written))

    def _unknown(self, known: list[tuple[Tensor, Lineage | None]]) -> None:
        """Reports floating values that no observed operator made, and memory that no observed operator wrote."""
        if self.by.kind == OURS:
            return
        if self.op.name in ("lift_fresh", "lift"):
            if self.by.kind == PRACTICE:  # a family's own code makes tables of numbers of its configuration: longrope's factors
                for tensor, _ in known:
                    self.step.lineages.set(tensor, Lineage(BUFFER))
            return
        for index, (tensor, lineage) in enumerate(known):
            if tensor.numel() < 2 or not _float(tensor.dtype) or type(tensor) not in (Tensor, nn.Parameter):
                continue
            if lineage is None:
                self.unobserved(
                    f"values from outside in {self.module or self.region}",
                    f"{name(tensor.dtype)}{list(tensor.shape)} at {_short(self.by.file)}:{self.by.line} was made by no operator that a "
                    "dispatch mode sees: another library, another thread, or a tensor kept outside modules",
                )
                if self.region != UPDATE and _float(tensor.dtype) not in self.step.stored | {"int8"}:
                    self._narrow_store(tensor)
                self.step.lineages.set(tensor, Lineage(BUFFER))
            elif not lineage.written and not self._is_written(index) and not any(map(self._is_view, self.outputs)):
                self.unobserved(
                    f"memory written elsewhere in {self.module or self.region}",
                    f"{name(tensor.dtype)}{list(tensor.shape)} at {_short(self.by.file)}:{self.by.line} is read and was written by no "
                    "operator: a kernel that is called by address, or another library",
                )

    def _is_written(self, index: int) -> bool:
        # an operator that writes its first argument, or `out`, does not read what lies there
        return self.kwargs.get("out") is self.inputs[index] or (index == 0 and bool(self.op.writes) and self.op.writes[0])

    def _narrow_store(self, tensor: Tensor) -> None:
        self.report(
            self.step.role, f"a tensor is stored in {name(tensor.dtype)}, which no role has", observed=name(tensor.dtype),
            declared=self.step.compute, cause="it is kept beside the model's parameters and buffers",
        )  # fmt: skip

    def _opaque(self, dtype: str | None) -> None:
        if self.op.trusted:
            if dtype is not None:
                self._wrong_dtype(dtype, NOTHING)
                self.seen.unseen_thing(self.step.role, _OWN_KERNEL.format(self.op.foreign))
            return
        self.unobserved(f"operator {self.op.foreign} in {self.module or self.region}", "its arithmetic is inside its own kernel")
        self.seen.unseen_thing(self.step.role, f"inside {self.op.foreign}")

    def _role(self) -> str:
        return {LOSS: "loss", BACKWARD: "grads", GRADIENTS: "grads", UPDATE: "optimizer"}.get(self.region, self.step.role)

    def _wrong_dtype(self, dtype: str, made: Lineage) -> None:
        """Reports fp64, and dtypes that no role of this region has."""
        role = self._role()
        declared = getattr(self.step.precision, role)
        words = {dtype, *(w for t in self.outputs if (w := _float(t.dtype)))}
        sizes = max((t.numel() for t in [*self.inputs, *self.outputs]), default=0)
        calculates = self.op.kind not in (ops.EXACT, ops.CAST)
        if "fp64" in words and self._in_a_position_table():
            return
        if "fp64" in words and (calculates or sizes > 1) and not (dtype != "fp64" and sizes <= 1):
            # a single number that a cast leaves in fp64 is harmless; a table is not
            self.report(role, f"{self.symbol} in fp64", observed="fp64", declared=declared, cause="fp64 is no role's dtype")
            return
        if self.op.kind == ops.EXACT or (self.region == BACKWARD and self.by.kind == ENGINE):
            # moving values loses nothing; native backward has the dtypes of the forward
            return
        allowed = self.step.allowed.get(self.region, self.step.stored)
        if self.by.kind == OURS:
            allowed = allowed | self.step.stored
        if self.op.kind == ops.CAST and self.region != FORWARD:
            allowed = allowed | self.step.stored
        if self.op.kind == ops.CAST and self.region == FORWARD and self.outputs:
            words = {w for t in [self.outputs[0], *self.inputs[:1]] if (w := _float(t.dtype))}
            allowed = allowed | {w for t in self.inputs[:1] if made.from_ == WEIGHT and (w := _float(t.dtype)) in self.step.stored}
        for word in sorted(words - allowed - {"fp64"}):
            self.report(
                role, f"{self.symbol} in {word}, declared {declared}", observed=word, declared=declared,
                cause="a cast to a dtype that no role has here" if self.op.kind == ops.CAST else "narrower than its role",
            )  # fmt: skip

    def _in_a_position_table(self) -> bool:
        """Whether this runs where diffusers computes positions in fp64 and returns them in fp32: in a module without weights, or in the
        functions that its patch embeddings call."""
        module = self.step.regions.stack[-1].module if self.step.regions.stack else None
        if module is None or not type(module).__module__.startswith("diffusers."):
            return False
        return next(module.parameters(), None) is None or self.by.file.endswith("diffusers/models/embeddings.py")

    # -- products

    def _product(self, dtype: str, made: Lineage) -> Lineage:
        step, adapter = self.step, "lora_" in self.module
        clean = replace(made, marks=())
        if self.region in (UPDATE, GRADIENTS, LOSS) and not (self.region == LOSS and self.by.kind == OURS):
            self.seen.dtypes["other_products"][dtype] += 1
            return clean
        wider = dtype != step.compute and dtype in FLOATS
        if not wider:
            self.seen.note(step.role, self.symbol, dtype, step.compute, allowed=(dtype,))
            return clean
        if self.by.kind == OURS:
            self.seen.dtypes["isotype_ops"][dtype] += 1
        elif self.by.kind == ENGINE and self.region == BACKWARD:
            # mirrors a forward product outside compute, which was judged; one without such a forward is autocast's
            if not step.wide_forward and _PRODUCT_NODE.match(type(torch._C._current_autograd_node()).__name__):
                step.product_outside("backward", dtype, self.by, self.symbol)
            self.seen.dtypes["mirrored_in_backward"][dtype] += 1
        elif step.attention_calls and _float(step.attention_calls[-1]) == step.compute:
            # with dropout, and on devices without a kernel, PyTorch makes attention of fp32 products of what it got in `compute`
            step.wide_forward = True
            self.seen.unseen_thing(step.role, "inside PyTorch's attention, which is given and gives `compute`")
        elif adapter and step.lora_branch in (None, dtype):
            step.wide_forward = True
            self.seen.dtypes["lora_branch"][dtype] += 1
        elif not made.activation and self.region == FORWARD:
            self.seen.dtypes["tables"][dtype] += 1
        elif self.region == FORWARD:
            number = len(step.pending)
            step.wide_forward = True
            step.pending[number] = (self.module, dtype, self.by, self.symbol)
            return replace(clean, products=clean.products | {number})
        else:
            step.product_outside(self.module or "backward", dtype, self.by, self.symbol)
        return clean

    # -- casts

    def _cast(self, made: Lineage) -> Lineage:
        """Judges a cast, or a copy into another dtype: which precision it loses, and which earlier loss it hides."""
        target, source = (self.args[0], self.args[1]) if self.op.name == "copy" and len(self.args) > 1 else (self.outputs[0], self.args[0])
        if not isinstance(source, Tensor) or not isinstance(target, Tensor):
            return made
        lineage = self.step.lineages.of(source) or NOTHING
        before, after = _float(source.dtype), _float(target.dtype)
        if before and after is None and target.dtype != torch.bool and not target.is_complex():
            return replace(lineage, integers=lineage.integers or lineage.data)
        if after and before is None:
            if lineage.integers and self.by.kind != OURS:
                self.report(
                    self._role(), f"values pass through {name(source.dtype)}", observed=name(source.dtype),
                    declared=getattr(self.step.precision, self._role()), cause="quantised and widened again",
                )  # fmt: skip
            return replace(lineage, integers=False)
        if not before or not after:
            return lineage
        if itemsize(after) > itemsize(before):
            self._hidden(lineage, before, after)
            return replace(lineage, marks=())
        if itemsize(after) < itemsize(before) and self._loses(source, target, lineage, after):
            mark = Mark("rounded", self.op.name, after, self.module, f"{_short(self.by.file)}:{self.by.line}", True)
            return replace(lineage, marks=(*lineage.marks, mark))
        return lineage

    def _loses(self, source: Tensor, target: Tensor, lineage: Lineage, after: str) -> bool:
        """Whether to record that this value was narrowed. Activations are declared to be `compute`, so for them it is no loss."""
        if self.by.kind in (OURS, ENGINE) or (self.by.kind == PRACTICE and self.region == FORWARD):
            return False
        if self.region == FORWARD and lineage.activation and after == self.step.compute:
            return False
        if after == "fp32" and self._in_a_position_table():
            return False
        if lineage.data or source.numel() > _SMALL:
            return True
        finite = source.isfinite() & target.isfinite()
        return not torch.equal(source[finite], target[finite].to(source.dtype))

    def _widened(self, known: list[tuple[Tensor, Lineage | None]], dtype: str) -> None:
        """Judges operands that the arithmetic widens without a cast."""
        for tensor, lineage in known:
            word = _float(tensor.dtype)
            if lineage is not None and lineage.marks and word and itemsize(word) < itemsize(dtype):
                self._hidden(lineage, word, dtype)

    def _hidden(self, lineage: Lineage, before: str, after: str) -> None:
        """Reports that a value with a recorded loss is widened: from here on its dtype hides the loss."""
        if self.region == FORWARD and (self.by.kind == OURS or self.step.regions.inside(is_norm) is not None):
            return  # a norm's own sums are judged by `norms`
        for mark in lineage.marks:
            if mark.kind == "reduced" and not mark.anywhere and mark.module != self.module:
                continue
            what = {
                "rounded": "values were rounded to",
                "reduced": f"{mark.operator} was computed in",
                "table": f"{mark.operator} was computed in",
            }
            role = self._role()
            self.report(
                role, f"{what[mark.kind]} {mark.dtype} at {mark.place} and widened to {after}", observed=mark.dtype,
                declared=getattr(self.step.precision, role), cause="the wider dtype hides what was lost",
            )  # fmt: skip

    # -- arithmetic

    def _arithmetic(self, dtype: str, made: Lineage) -> Lineage:
        op, by, region, precision = self.op, self.by, self.region, self.step.precision
        narrow = itemsize(dtype) < 4
        if op.kind == ops.EXACT:
            return made
        norm = self.step.regions.inside(is_norm) if region == FORWARD else None
        if norm is not None and op.name in ops.NORM_SUMS:
            norm.sums.add(dtype)
        if region == FORWARD and made.activation:
            made = replace(made, marks=tuple(m for m in made.marks if m.kind == "reduced"))
        if (
            op.kind == ops.ROUND
            and by.kind != OURS
            and (made.data or region in (BACKWARD, GRADIENTS, UPDATE))
            and op.name != "floor_divide"
        ):
            role = self._role()
            self.report(
                role, f"{op.name} puts values on a grid", observed="a grid", declared=getattr(precision, role), cause="quantised in place"
            )
        if by.kind == OURS or (by.kind == ENGINE and region == BACKWARD):
            return made
        of_the_loss = region == LOSS or (region == FORWARD and op.name in ops.LOSSES and not self._inside_a_familys_layer())
        if of_the_loss and made.activation and itemsize(dtype) < itemsize(precision.loss):
            self._narrower("loss", dtype, precision.loss)
        if not narrow:
            if region == FORWARD and norm is None and made.activation and itemsize(dtype) > itemsize(self.step.compute):
                self.seen.widened[f"{op.name} in {self.module}", dtype] += 1
            return made
        if region == BACKWARD:
            made = replace(made, added=made.added + (op.name in ("add", "sub", "addcmul", "lerp")))
            # a few terms are a formula; more are a sum written as a loop
            if (op.kind == ops.SUM or made.added > _TERMS) and itemsize(dtype) < itemsize(precision.grads):
                self._narrower("grads", dtype, precision.grads)
            return made
        if region != FORWARD:
            return made
        if by.kind == PRACTICE:
            return made
        if made.activation and norm is None and op.name in ops.NORMALISING and itemsize(dtype) < itemsize(precision.norms):
            self._narrower("norms", dtype, precision.norms)
        place = f"{_short(by.file)}:{by.line}"
        if made.activation:
            if op.kind == ops.SUM and op.name not in ops.WIDE_INSIDE:
                anywhere = op.name in ops.NAMED_SUMS
                return replace(made, marks=(*made.marks, Mark("reduced", op.name, dtype, self.module, place, anywhere)))
            return made
        if not made.from_ & WEIGHT and self._inexact():
            if op.name in ops.CURVED and max((t.numel() for t in self.outputs), default=0) > 1:
                self._narrower(self.step.role, dtype, "fp32 for tables")
            return replace(made, marks=(*made.marks, Mark("table", op.name, dtype, self.module, place, True)))
        return made

    def _inside_a_familys_layer(self) -> bool:
        """Whether code of transformers computes inside one of its layers, where a logsumexp belongs to attention (Granite SWA's sinks)."""
        return self.by.kind == PRACTICE and any(part.isdigit() for part in self.module.split("."))

    def _inexact(self) -> bool:
        """Whether the same operator on widened operands gives different values."""
        if (self.op.writes and any(self.op.writes)) or not self.outputs or self.outputs[0].numel() > _SMALL:
            return True
        try:
            args, kwargs = torch.utils._pytree.tree_map_only(Tensor, _widened, (self.args, self.kwargs))
            exact = self.func(*args, **kwargs)
        except (RuntimeError, TypeError):
            return True
        return not torch.equal(plain_tensors(exact, [])[0].float().nan_to_num(), self.outputs[0].float().nan_to_num())

    def _narrower(self, role: str, dtype: str, declared: str) -> None:
        self.report(
            role,
            f"{self.op.name} is computed in {dtype}, declared {declared}",
            observed=dtype,
            declared=declared,
            cause="narrower than its role",
        )

    def _lookup(self, made: Lineage) -> Lineage:
        """A table that is read at integers which were made of floating values may stand for those values, rounded."""
        if made.integers and self.by.kind != OURS:
            self.unobserved(
                f"values from a table in {self.module or self.region}",
                f"{_short(self.by.file)}:{self.by.line} reads a table at integers that floating values became: whether its entries "
                "stand for those values, rounded, is not seen",
            )
        return replace(made, integers=False)

    def _bits(self, made: Lineage) -> None:
        if made.bits and self.by.kind != OURS:
            role = self._role()
            declared = getattr(self.step.precision, role)
            self.report(
                role,
                f"{self.op.name} changes the bits of floating values",
                observed="cut bits",
                declared=declared,
                cause="values are edited as integers",
            )


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _float(dtype: torch.dtype) -> str | None:
    """The word of a floating or complex dtype, else None."""
    real = wide(dtype)
    return name(real) if real.is_floating_point else None


def _short(file: str) -> str:
    return file.rsplit("/", 1)[-1]
