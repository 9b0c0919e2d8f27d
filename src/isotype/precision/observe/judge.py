"""Judges every operator of an observed step by its role: products, sums, elementwise arithmetic, casts.

These are violations: a product outside `compute` (in adapters: outside the dtype of their branch), arithmetic narrower than its role, fp64
anywhere, and a loss of precision that a later widening hides. To detect the last, `lineage` records what each value lost. Elementwise
arithmetic that is wider than its role is only counted. Common practice is not reported: fp32 products of a router, recognised by their
later use (top-k), fp32 products of tables, which depend on no activation, and those for which a family of transformers switches autocast
off.

PyTorch's own backward operators follow the forward that was judged, so their sums are not judged again. Python code in backward is judged.

`products`, `casts` and `narrow` hold the rules of these kinds of operators, `made_narrow` those of numbers that operators write.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...dtypes import name
from . import operators as ops
from .call import Call, float_word, short_name
from .callers import ENGINE, OURS, PRACTICE, USER
from .casts import judge_cast, judge_narrow_write, judge_widened_operands
from .disguises import quantised_operands, shifted
from .few_bits import few_bits, few_signed_levels
from .lineage import BUFFER, NOTHING, WEIGHT, Lineage, joined, plain_tensors
from .made_narrow import judge_numbers, kept_number
from .narrow import judge_arithmetic
from .products import judge_product
from .regions import BACKWARD, FORWARD, UPDATE

# operators that take values out of a table by integers, and those that turn floating values into such integers
_LOOKUPS = frozenset(("index", "index_select", "gather", "embedding", "take"))
_CODES = frozenset(("bucketize", "searchsorted", "argmin"))
# operators whose integers say where a value goes
_PLACES = frozenset(("scatter_add", "scatter_reduce", "index_add", "index_reduce"))
_CHOICES = frozenset(("topk", "argmax", "sort", "argsort", "max"))
# draws of values and counts of them, which may stand for the values
_STATISTICS = frozenset(("bernoulli", "histc", "histogram"))
# numbers that one module's activations gave in a step: more are no statistics
_MANY_NUMBERS = 128
_OWN_KERNEL = "inside {}, an operator with a contract"


class Judge(Call):
    """Judges one call."""

    def judge(self) -> None:
        if self.by.compiled:
            self.unobserved(
                f"compiled region in {self.module or 'no module'}",
                "runs operator by operator while it is observed; what the compiled code of the other steps does is not seen",
            )
        known = [(t, self.step.lineages.of(t) or self._of_a_number(t)) for t in self.inputs]
        if self.step.quantiles:
            return self._remember(joined([lineage or NOTHING for _, lineage in known]))
        if self.op.kind == ops.CREATE:
            return self._created()
        self._unknown(known)
        made = joined(self._beside_activations([lineage or NOTHING for _, lineage in known]))
        dtype = self.dtype()
        if self.op.kind == ops.OPAQUE:
            self._opaque(dtype)
        elif dtype is not None:
            self._wrong_dtype(dtype, made)
            if self.op.kind == ops.PRODUCT:
                made = judge_product(self, dtype, made)
            elif self.op.kind == ops.CAST:
                made = judge_cast(self, made)
            else:
                judge_widened_operands(self, known, dtype)
                made = judge_numbers(self, judge_narrow_write(self, dtype, judge_arithmetic(self, dtype, made)))
        elif self.op.kind == ops.BITS or (made.bits and (self.op.kind == ops.ARITHMETIC or any(self.op.writes))):
            self._bits(made)
        if self.op.name in _CODES:
            made = replace(made, integers=made.integers or made.data)
        elif self.op.name == "bincount":
            made = replace(made, integers=False)  # how often each was met
        if dtype is not None and (self.op.name in _LOOKUPS or self.op.kind == ops.PRODUCT or self.op.name == "mul"):
            made = self._lookup(made)
        if self.op.name in _CHOICES and self.region == FORWARD and len(self.step.regions.stack) > 1:
            self.step.routers |= made.products
        if self.op.name == "view" and self.inputs and self.outputs:
            into_integers = float_word(self.inputs[0].dtype) is not None and float_word(self.outputs[0].dtype) is None
            made = replace(made, bits=made.bits or into_integers)
        made = self._disguised(made)
        if self.by.kind == USER and self.region in (FORWARD, BACKWARD) and made.from_ & WEIGHT:
            self._stands_for_values(made)
        self._remember(made)

    def _beside_activations(self, lineages: list[Lineage]) -> list[Lineage]:
        """Takes no loss from a weight or table that was narrowed to `compute` to join activations, as an attention's learned sink does."""
        if self.region != FORWARD or self.op.kind != ops.EXACT or not any(lineage.activation for lineage in lineages):
            return lineages
        declared = ("rounded", self.step.compute)
        kept = [tuple(mark for mark in lineage.marks if (mark.kind, mark.dtype) != declared) for lineage in lineages]
        return [lineage if lineage.activation else replace(lineage, marks=marks) for lineage, marks in zip(lineages, kept)]

    def _stands_for_values(self, made: Lineage) -> None:
        """Reports, as unobserved, what a program made of activations or weights that may stand for them with fewer bits."""
        where, place = self.module or self.region, f"{short_name(self.by.file)}:{self.by.line}"
        key = f"values of few bits in {where}"
        if key in self.seen.unobserved:
            return
        if self.op.name in _STATISTICS and made.activation:
            self.unobserved(key, f"{place} draws or counts values ({self.op.name}): whether the result stands for them is not seen")
        elif self.op.name == "view" and made.activation and self._into_narrower_floats():
            word = name(self.outputs[0].dtype)
            self.unobserved(key, f"{place} takes the bits of values for {word}: whether it changes them is not seen")
        elif self.op.kind == ops.ARITHMETIC or self.op.name == "where":
            look = few_bits if made.activation else few_signed_levels
            plain = [t for t in self.outputs if type(t) is Tensor]
            found = next(filter(None, (look(t, self.step.compute) for t in plain)), None)
            # coarse operands, as of an embedding that was stored in bf16, were coarse before
            if found and not any(few_bits(t, self.step.compute) for t in self.inputs if t.is_floating_point()):
                self.unobserved(key, f"{found} after {self.op.name} at {place}: whether they stand for more exact ones is not seen")

    def _into_narrower_floats(self) -> bool:
        before, after = self.inputs[0].dtype, self.outputs[0].dtype
        return before.is_floating_point and after.is_floating_point and after.itemsize < before.itemsize

    def _disguised(self, made: Lineage) -> Lineage:
        """Judges integers in arithmetic with floats, and large constants that are added and subtracted again."""
        if self.op.kind in (ops.EXACT, ops.CAST) or not self.outputs or float_word(self.outputs[0].dtype) is None:
            return made
        shift, rounds = shifted(self.op.name, self.args, self.kwargs, made, self.step.lineages)
        if self.by.kind not in (OURS, ENGINE, PRACTICE):
            computes = self.op.kind == ops.ARITHMETIC and self.op.name not in _PLACES
            if computes and (whole := quantised_operands(self.inputs, self.step.lineages)):
                self._on_a_grid(f"values pass through {name(whole[0].dtype)} in {self.op.name}", "quantised and widened again")
                made = replace(made, integers=False)
            if rounds and made.data:
                self._on_a_grid(f"{self.op.name} subtracts a large constant that was added before", "the sum kept only the high bits")
        return replace(made, shift=shift)

    def _on_a_grid(self, message: str, cause: str) -> None:
        role = self.role()
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
        made = judge_numbers(self, Lineage(written=written))
        for tensor in self.outputs:
            self.step.lineages.set(tensor, made)

    def _unknown(self, known: list[tuple[Tensor, Lineage | None]]) -> None:
        """Reports floating values that no observed operator made, and memory that no observed operator wrote."""
        if self.by.kind == OURS:
            return
        if self.op.name in ("lift_fresh", "lift"):
            if self.by.kind == PRACTICE or self._of_own_numbers():
                for tensor, lineage in known:
                    if lineage is None:
                        self.step.lineages.set(tensor, kept_number(self, tensor))
            return
        if self.op.name == "_local_scalar_dense" and self.by.kind == USER:
            self.step.numbers_left = self.step.numbers_left or any(lineage is None or lineage.data for _, lineage in known)
            self._read_as_a_number(known)
        for index, (tensor, lineage) in enumerate(known):
            if tensor.numel() < 2 or not float_word(tensor.dtype) or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
                continue
            if lineage is None:
                if self.step.given.of(tensor) is None:
                    self._from_outside(tensor)
                if self.region != UPDATE and float_word(tensor.dtype) not in self.step.stored | {"int8"}:
                    self._narrow_store(tensor)
                self.step.lineages.set(tensor, Lineage(BUFFER))
            elif not lineage.written and not self._is_written(index) and not any(map(self._is_view, self.outputs)):
                self.unobserved(
                    f"memory written elsewhere in {self.module or self.region}",
                    f"{name(tensor.dtype)}{list(tensor.shape)} at {short_name(self.by.file)}:{self.by.line} is read and was written by no "
                    "operator: a kernel that is called by address, or another library",
                )

    def _of_a_number(self, tensor: Tensor) -> Lineage | None:
        """The record of a single number that is kept outside modules, where it was rounded."""
        if tensor.numel() != 1 or self.op.name in ("lift_fresh", "lift") or self.step.given.of(tensor) is not None:
            return None
        return kept if (kept := kept_number(self, tensor)).marks else None

    def _read_as_a_number(self, known: list[tuple[Tensor, Lineage | None]]) -> None:
        """Reports a module whose values leave one at a time: a scale or a statistic is a few numbers, and these are its values."""
        if self.region not in (FORWARD, BACKWARD) or not any(
            lineage and lineage.activation and t.is_floating_point() for t, lineage in known
        ):
            return
        self.step.single_numbers[self.module] += 1
        if self.step.single_numbers[self.module] == _MANY_NUMBERS:
            self.unobserved(
                f"values leave as Python numbers in {self.module or self.region}",
                f"{_MANY_NUMBERS} or more, one at a time, at {short_name(self.by.file)}:{self.by.line}; what is done to them is not seen",
            )

    def _of_own_numbers(self) -> bool:
        """Whether a tensor is made of numbers that are a program's own, as ALiBi's slopes: no value of the model became a number before.

        Backward does not show what becomes a number; there only a recomputation of what the forward made counts.
        """
        if torch._C._current_graph_task_id() == -1 and not self.step.numbers_left:
            self.step.own_numbers.add(self.by.place)
        return not self.step.numbers_left and self.by.place in self.step.own_numbers

    def _from_outside(self, tensor: Tensor) -> None:
        self.unobserved(
            f"values from outside in {self.module or self.region}",
            f"{name(tensor.dtype)}{list(tensor.shape)} at {short_name(self.by.file)}:{self.by.line} was made by no operator that a "
            "dispatch mode sees: another library, another thread, or a tensor kept outside modules",
        )

    def _is_written(self, index: int) -> bool:
        # an operator that writes its first argument, or `out`, does not read what lies there
        tensor = self.inputs[index]
        return self.kwargs.get("out") is tensor or any(writes and given is tensor for writes, given in zip(self.op.writes, self.args))

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

    def _wrong_dtype(self, dtype: str, made: Lineage) -> None:
        """Reports fp64, and dtypes that no role of this region has."""
        role = self.role()
        declared = getattr(self.step.precision, role)
        words = {dtype, *(w for t in self.outputs if (w := float_word(t.dtype)))}
        sizes = max((t.numel() for t in [*self.inputs, *self.outputs]), default=0)
        calculates = self.op.kind not in (ops.EXACT, ops.CAST)
        if "fp64" in words and self.in_a_position_table():
            return
        if self.op.kind == ops.CAST and self._moves_a_kept_one():
            return
        if "fp64" in words and (calculates or sizes > 1) and not (dtype != "fp64" and sizes <= 1):
            # a single number that a cast leaves in fp64 is harmless; a table is not
            self.report(role, f"{self.symbol} in fp64", observed="fp64", declared=declared, cause="fp64 is no role's dtype")
            return
        if self.op.kind == ops.EXACT or (self.region == BACKWARD and self.by.kind == ENGINE):
            # moving values loses nothing, and PyTorch's own backward has the dtypes of the forward
            if self.op.kind == ops.CAST:
                self.step.casts.gradient_passes(dtype, self.seen)
            return
        allowed = self.step.allowed.get(self.region, self.step.stored)
        if self.by.kind == OURS:
            allowed = allowed | self.step.stored
        if self.op.kind == ops.CAST and self.region != FORWARD:
            allowed = allowed | self.step.stored
        if self.op.kind == ops.CAST and self.region == FORWARD and self.outputs:
            words = {w for t in [self.outputs[0], *self.inputs[:1]] if (w := float_word(t.dtype))}
            allowed = allowed | {w for t in self.inputs[:1] if made.from_ == WEIGHT and (w := float_word(t.dtype)) in self.step.stored}
        narrowed = self._narrowed()
        for word in sorted(words - allowed - {"fp64"}):
            if self.by.kind == USER and word == narrowed:
                self.report_where_read(
                    role, f"{self.symbol} in {word}, declared {declared}", word, declared=declared,
                    cause="a cast to a dtype that no role has here",
                )  # fmt: skip
                continue
            self.report(
                role, f"{self.symbol} in {word}, declared {declared}", observed=word, declared=declared,
                cause="a cast to a dtype that no role has here" if self.op.kind == ops.CAST else "narrower than its role",
            )  # fmt: skip

    def _narrowed(self) -> str | None:
        """The dtype of a cast's result, or of the tensor that a copy writes, where its source has another one."""
        if self.op.kind != ops.CAST or not self.outputs:
            return None
        source = self.inputs[1 if self.op.name == "copy" and len(self.inputs) > 1 else 0]
        return None if source.dtype == self.outputs[0].dtype else float_word(self.outputs[0].dtype)

    def _moves_a_kept_one(self) -> bool:
        """Whether a copy of one dtype moves a cast's result that waits to be read."""
        return bool(self.outputs) and self._narrowed() is None and any(map(self.step.casts.holds, self.inputs))

    def _lookup(self, made: Lineage) -> Lineage:
        """A table that is read at integers which were made of floating values may stand for those values, rounded.

        A product with a row of zeros and a one reads it too.
        """
        if made.integers and self.by.kind != OURS:
            self.unobserved(
                f"values from a table in {self.module or self.region}",
                f"{short_name(self.by.file)}:{self.by.line} reads a table at integers that floating values became: whether its entries "
                "stand for those values, rounded, is not seen",
            )
        return replace(made, integers=False)

    def _bits(self, made: Lineage) -> None:
        if made.bits and self.by.kind != OURS:
            role = self.role()
            declared = getattr(self.step.precision, role)
            self.report(
                role,
                f"{self.op.name} changes the bits of floating values",
                observed="cut bits",
                declared=declared,
                cause="values are edited as integers",
            )
