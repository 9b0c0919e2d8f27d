"""Compares the dtypes of all operators of one training step with the declared precision. Some
deviations are violations. Others are only counted.

These are violations:
- a matrix product in another dtype than the declared one, which is `compute` outside of adapters;
- a loss in a narrower dtype than the declared `loss`;
- a sum in a narrower dtype than declared, for example when values are accumulated in backward, in
  an update or in a buffer, in norms of gradients, and inside a normalisation layer;
- a number in bf16 or fp16 by which the loss is divided or with which gradients are clipped;
- any arithmetic in fp64;
- numbers and tables that are rounded because they are created in bf16 or fp16;
- gradients and activations that the user's code casts to a narrower dtype and back.

Other arithmetic that is not in the dtype `compute` is only counted. `observer` checks stored
tensors, and `continuity` checks changes between steps.

Some matrix products in other dtypes than `compute` are common practice and are not reported. There
are three kinds: fp32 matrix products of a router, which is recognised by a later top-k; fp32 matrix
products of tables, which do not depend on an activation; and matrix products for which the code of
transformers switches autocast off. PyTorch's own backward is not checked, because it computes in
the dtypes of the forward. Python code that runs in backward is checked.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import FLOATS, eps, format_dtype, itemsize
from ..precision.apply import FP32_LAYERS_KEY, inner_model, is_norm
from ..precision.precision import Precision
from .operators import (
    ADDITIONS,
    CAST,
    CREATE,
    DIVISIONS,
    EXACT,
    FOREIGN,
    LOG_SUMS,
    LOSSES,
    NONLINEAR,
    NORM_SUMS,
    PRODUCT,
    PRODUCTS_WITH_CONTRACT,
    RAMPS,
    ROUTER_CHOICES,
    SUM,
    Operator,
)
from .origin import AUTOGRAD, HUGGING_FACE, ISOTYPE, USER, find_caller, is_in_compiled_region
from .record import TABLES_RULE, Observation
from .tape import (
    AFTER_BACKWARD,
    BACKWARD,
    FORWARD,
    LOSS,
    UPDATE,
    FunctionTape,
    StepTracker,
    make_tape,
)
from .values import (
    BUFFER,
    EMPTY_LINEAGE,
    FLOAT_INPUT,
    INPUT,
    MASK_BOUND,
    MAX_RECOMPUTED_ELEMENTS,
    WEIGHT,
    Call,
    Lineage,
    Lineages,
    Rounding,
    collect_tensors,
    dense_values,
    float_dtype_name,
    is_wrapper,
    merge_lineages,
    storage_address,
)

# names of autograd's nodes of products; other nodes, such as the node of a triangular solve, may
# multiply in another dtype
_PRODUCT_NODE = re.compile(
    r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Convolution|Linear|ScaledDot|GroupedMm|Trilinear)\w*Backward"
)
_ATTENTION_FUNCTIONS = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.nn.functional.multi_head_attention_forward,
)
# functions that create a tensor from Python numbers, or write a number into a tensor -> the
# position of the argument with the numbers
_NUMBER_ARGUMENTS = {"tensor": 0, "as_tensor": 0, "asarray": 0, "new_tensor": 1, "__setitem__": 2}
_NUMBERS_RULE = "numbers are made in fp32, or in the dtype that computes with them"
_SUMS_RULE = "sums are fp32"
_UNFUSED_CAUSE = (
    "no op runs this adapter, and PEFT's own code computes in autocast's dtype (see the manifest)"
)
# Muon's Newton-Schulz iteration is in bf16 for weights of any dtype, and is counted as
# `update_iteration`
_MUON_FILE = "torch/optim/_muon.py"
# more narrow additions than this number count as a sum that is written as a loop; this number or
# fewer count as a formula
_MAX_ADDITIONS = 4


# the cases of a matrix product, in this order: a product in `compute`; one in the loss, on
# gradients or in an update; in an op or kernel of Isotype; in an op's branch of an adapter; in
# autograd's backward of a forward product; inside PyTorch's attention; in an adapter that no op
# runs; a product of tables, which depend on no activation; one where code of transformers switches
# autocast off; a product in forward, for which a later operator decides whether it belongs to a
# router; any other
DECLARED_PRODUCT = "declared"
OTHER_PRODUCT = "other"  # the kinds of matrix products
ISOTYPE_PRODUCT = "isotype"
BRANCH_PRODUCT = "branch"
BACKWARD_PRODUCT = "backward"
ATTENTION_PRODUCT = "attention"
ADAPTER_PRODUCT = "adapter"
TABLE_PRODUCT = "table"
LIBRARY_PRODUCT = "library"
FORWARD_PRODUCT = "forward"
OUTSIDE_PRODUCT = "outside"
# case -> the key of `Observation.dtypes` under which it is counted
PRODUCT_COUNTERS = {
    OTHER_PRODUCT: "other_products",
    ISOTYPE_PRODUCT: "isotype_ops",
    BRANCH_PRODUCT: "lora_branch",
    ADAPTER_PRODUCT: "lora_branch",
    BACKWARD_PRODUCT: "mirrored_in_backward",
    TABLE_PRODUCT: "tables",
    LIBRARY_PRODUCT: "family_in_fp32",
}
MIRRORED_PRODUCTS = (ATTENTION_PRODUCT, ADAPTER_PRODUCT, LIBRARY_PRODUCT, FORWARD_PRODUCT)

ADDITION = "addition"
DIVISION = "division"
# (part of the step, kind of arithmetic) -> the role whose dtype it must have at least
ARITHMETIC_ROLES = {
    (AFTER_BACKWARD, SUM): "grads",
    (AFTER_BACKWARD, DIVISION): "grads",  # the division by the norm to which gradients are clipped
    (UPDATE, SUM): "grads",
    (UPDATE, ADDITION): "optimizer",
}


def arithmetic_kind(op: Operator) -> str:
    if op.kind == SUM:
        return SUM
    if op.base_name in ADDITIONS:
        return ADDITION
    return DIVISION if op.base_name in DIVISIONS else ""


def _is_accumulation(call: Call) -> bool:
    """Whether rounding matters in this call. Rounding matters if the call sums several numbers or
    adds tensors. It also matters if a division in the user's code returns a single number, for
    example when a number is divided by a norm.
    """
    kind = arithmetic_kind(call.op)
    if kind == SUM:
        return call.inputs[0].numel() > 1
    if kind == DIVISION:
        return call.caller.kind == USER and call.outputs[0].numel() == 1
    return True


class ContractChecker:
    """Checks every operator while its `modes` are active.

    role         compute, or generate while tokens are generated
    lora_branch  the dtype of the matrix products with A and B: fp32, or None if fp32 and `compute`
                 are both allowed
    paused       True while code runs that is not part of the step
    """

    def __init__(
        self,
        observation: Observation,
        precision: Precision,
        step: StepTracker,
        *,
        role: str,
        lora_branch: str | None,
    ) -> None:
        self.observation = observation
        self.precision = precision
        self.step = step
        self.role = role
        self.lora_branch = lora_branch
        self.compute: str = getattr(precision, role)
        self.paused = False
        self.lineages = Lineages()
        self.modes = (FunctionTape(self._run_function), make_tape(self._run_operator))
        self._models: tuple[nn.Module, ...] = ()
        # rounded copies of gradients; a copy that becomes a gradient is reported
        self._rounded_gradients: list[tuple[Call, Rounding, Tensor]] = []
        # address of the storage -> name of the model's floating buffer
        self._buffers: dict[int, str] = {}
        # products outside compute whose later use is not known yet, each with its dtype and the
        # cause
        self._pending_products: dict[int, tuple[Call, str, str]] = {}
        self._router_products: set[int] = set()
        self._wide_forward = False
        # decoder layers that compute in fp32, because their values do not fit fp16
        self._fp32_layers: set[nn.Module] = set()
        # dtypes of the running calls of PyTorch's attention, which may compute wide products inside
        self._attention_dtypes: list[str | None] = []

    def register_weights(self, *models: nn.Module) -> None:
        """Registers the tensors of these models that exist before the step: weights, gradients and
        buffers.
        """
        self._models = models
        for model in models:
            inner = inner_model(model)
            names = getattr(inner, FP32_LAYERS_KEY, ())
            self._fp32_layers |= {inner.get_submodule(name) for name in names}
            self.lineages.set_weights(model)
            for full_name, buffer in model.named_buffers():
                self.lineages.set(buffer, Lineage(BUFFER))
                if buffer.is_floating_point():
                    self._buffers[storage_address(buffer)] = full_name

    def register_inputs(self, inputs: Any) -> None:
        """Registers the arguments of the outermost module as inputs."""
        for tensor in collect_tensors(inputs, []):
            self._check_input(tensor)
            previous = self.lineages.get(tensor)
            # floats that the step computes without the model, such as noised latents, are inputs
            # too
            if previous is None or not previous.sources or not tensor.is_floating_point():
                lineage = previous or EMPTY_LINEAGE
                self.lineages.set(
                    tensor,
                    replace(
                        lineage,
                        sources=lineage.sources
                        | (FLOAT_INPUT if tensor.is_floating_point() else INPUT),
                    ),
                )

    def _check_input(self, tensor: Tensor) -> None:
        """Lists an input whose dtype is narrower than fp32 and is not `compute`. Its values were
        rounded before the step.
        """
        dtype_name = float_dtype_name(tensor.dtype)
        if dtype_name is None or itemsize(dtype_name) >= 4 or dtype_name == self.compute:
            return
        self.observation.unobserved.setdefault(
            f"an input of the model in {dtype_name}",
            f"it was made before the step, and is not in {self.compute}; features and embeddings"
            " that are stored in this dtype have its rounding",
        )

    def finish(self) -> None:
        """Reports the matrix products that are not in the dtype `compute` and do not belong to a
        router.
        """
        for number, (call, dtype_name, cause) in self._pending_products.items():
            if number in self._router_products:
                self.observation.dtypes["router"][dtype_name] += 1
            else:
                self._report_product(call, dtype_name, cause=cause)
        self._pending_products.clear()

    # ---- what runs
    def _run_function(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in _ATTENTION_FUNCTIONS and args and isinstance(args[0], Tensor):
            device = args[0].device.type
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
            else:
                dtype = args[0].dtype
            self._attention_dtypes.append(float_dtype_name(dtype))
            try:
                return func(*args, **kwargs)
            finally:
                self._attention_dtypes.pop()
        output = func(*args, **kwargs)
        if func.__name__ in _NUMBER_ARGUMENTS and not self.paused:
            tensor = args[0] if output is None else output
            if type(tensor) is Tensor and not tensor.is_meta:
                self._check_python_numbers(func.__name__, args, kwargs, tensor)
        return output

    def _run_operator(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        output = op(*args, **kwargs)
        # in a generation only operators inside the model are checked, not those of a sampler, or of
        # the scheduler and VAE of a pipeline
        if not self.paused and (self.role != "generate" or self.step.stack):
            with torch._C.DisableTorchFunction():
                call = Call(
                    self,
                    op,
                    args,
                    kwargs,
                    collect_tensors([args, kwargs], []),
                    collect_tensors(output, []),
                )
                try:
                    self._check(call)
                # for example a tensor whose class lacks an operator that the check needs; the
                # program continues
                except Exception as error:
                    self._record_failure(f"{op.base_name} in {call.location}", error)
        return output

    def _record_failure(self, subject: str, error: Exception) -> None:
        self.observation.unobserved.setdefault(
            subject, f"looking at its tensors failed: {''.join(str(error).splitlines()[:1])}"
        )

    def _check(self, call: Call) -> None:
        op = call.op
        if (wrapper := next((type(t) for t in call.inputs if is_wrapper(t)), None)) is not None:
            self.observation.unobserved.setdefault(
                f"operator {op.base_name} on {wrapper.__name__} in {call.location}",
                "the class computes with other tensors than its dtype says",
            )
            self.observation.count_unseen(self.role, f"operators on {wrapper.__name__}")
            return
        if is_in_compiled_region():
            self.observation.unobserved.setdefault(
                f"compiled region in {call.module or 'no module'}",
                "runs operator by operator while it is observed; what the compiled code of the"
                " other steps does is not seen",
            )
        if op.kind == CREATE:
            lineages = []
        else:
            lineages = [
                input_lineage
                for t in call.inputs
                if (input_lineage := self.lineages.get(t)) is not None
            ]
        lineage = merge_lineages(lineages)
        dtype = call.dtype()
        if op.kind == FOREIGN:
            self._check_opaque(call, dtype, lineage)
        elif op.kind == CREATE:
            self._check_numbers(call)
        elif dtype is not None:
            self._check_fp64(call, dtype, lineage)
            if op.kind == PRODUCT:
                lineage = self._check_product(call, dtype, lineage)
            elif op.kind == CAST:
                self._check_cast(call, lineage)
                lineage = self._check_round_trip(call, lineage)
            elif op.kind == EXACT:
                self._check_numbers(call)
            else:
                lineage = self._check_arithmetic(call, dtype, lineage)
        if lineage.rounding is not None and op.kind not in (CAST, EXACT):
            lineage = replace(lineage, rounding=None)
        if op.base_name in ROUTER_CHOICES and call.region == FORWARD and len(self.step.stack) > 1:
            self._router_products |= lineage.products
        self._record_lineage(call, lineage)

    def _record_lineage(self, call: Call, lineage: Lineage) -> None:
        may_be_view = call.op.kind == EXACT and not call.op.has_written_arguments
        for tensor in call.outputs:
            # a view shares the lineage of its storage
            if not may_be_view or not any(
                self.lineages.share_storage(tensor, input_tensor) for input_tensor in call.inputs
            ):
                self.lineages.set(tensor, lineage)
        if call.op.has_written_arguments:
            for value in call.written_tensors:
                self.lineages.set(value, lineage)

    # ---- rules
    def _check_opaque(self, call: Call, dtype: str | None, lineage: Lineage) -> None:
        if not call.op.has_contract(self.precision.base):
            self.observation.unobserved.setdefault(
                f"operator {call.op.foreign_name} in {call.location}",
                "its arithmetic is inside its own kernel",
            )
            self.observation.count_unseen(self.role, f"inside {call.op.foreign_name}")
        elif dtype is not None:
            self._check_fp64(call, dtype, lineage)
            is_product = call.op.foreign_name in PRODUCTS_WITH_CONTRACT
            if is_product and self._classify_product(call, dtype, lineage) == DECLARED_PRODUCT:
                self.observation.count_dtype(
                    self.role, call.op.base_name, dtype, self.compute, allowed=(dtype,)
                )
            self.observation.count_unseen(
                self.role, f"inside {call.op.foreign_name}, an operator with a contract"
            )

    def _check_fp64(self, call: Call, dtype: str, lineage: Lineage) -> None:
        """Reports arithmetic in fp64, and casts to or from fp64. A cast of a single number is
        harmless and not reported. Isotype's own code is not reported either, because it sums the
        results of an evaluation in fp64.
        """
        if dtype != "fp64" and not any(
            t.dtype in (torch.float64, torch.complex128) for t in call.outputs
        ):
            return
        size = max(t.numel() for t in [*call.inputs, *call.outputs])
        is_arithmetic = dtype == "fp64" and call.op.kind not in (EXACT, CAST)
        if size == 1 and not is_arithmetic:
            return
        if self._is_table(call, lineage) or self._is_diffusers_positions(call):
            return
        if call.caller.kind == ISOTYPE:
            return
        call.report(
            call.role,
            f"{call.op.foreign_name or call.op.base_name} in fp64",
            observed="fp64",
            cause="fp64 is no role's dtype",
        )

    def _is_table(self, call: Call, lineage: Lineage) -> bool:
        """Whether this call is part of a forward and computes positions or constants. These values
        depend on no activation and no weight, and no dtype is declared for them. For example,
        Z-Image computes its frequencies at the first call.

        If an activation is combined with such a table in fp64, the result is fp64 and is reported.
        """
        is_constant = not lineage.is_activation and not lineage.sources & WEIGHT
        return is_constant and call.region == FORWARD

    def _is_diffusers_positions(self, call: Call) -> bool:
        """Whether diffusers computes positions here. It computes them in fp64 and returns them in
        fp32. diffusers computes positions in modules without weights, and in functions that its
        patch embeddings call.
        """
        module = self.step.stack[-1].module if self.step.stack else None
        if module is None or not type(module).__module__.startswith("diffusers."):
            return False
        return next(module.parameters(), None) is None or call.caller.file.endswith(
            "diffusers/models/embeddings.py"
        )

    def _declared_compute(self) -> str:
        """Returns the dtype that is declared for the code that runs now."""
        if self._fp32_layers and any(call.module in self._fp32_layers for call in self.step.stack):
            return "fp32"
        return self.compute

    def _check_product(self, call: Call, dtype: str, lineage: Lineage) -> Lineage:
        case = self._classify_product(call, dtype, lineage)
        if case != OTHER_PRODUCT:
            self._check_adapter_product(call, dtype)
        if case == DECLARED_PRODUCT:
            self.observation.count_dtype(
                self.role, call.op.base_name, dtype, self.compute, allowed=(dtype,)
            )
            # the backward of a layer in fp32 computes in fp32, too
            self._wide_forward |= dtype != self.compute and dtype in FLOATS
        elif case == ATTENTION_PRODUCT:
            self.observation.count_unseen(
                self.role, "inside PyTorch's attention, which is given and gives `compute`"
            )
        elif case == OUTSIDE_PRODUCT or (case == BACKWARD_PRODUCT and self._has_no_forward()):
            self._report_product(call, dtype)
        if case in PRODUCT_COUNTERS:
            self.observation.dtypes[PRODUCT_COUNTERS[case]][dtype] += 1
        if self._is_mirrored(case, call, dtype):
            self._wide_forward = True
        if case != FORWARD_PRODUCT:
            return lineage
        number = len(self._pending_products)
        self._pending_products[number] = call, dtype, call.operand_dtype_reason(dtype)
        return replace(lineage, products=lineage.products | {number})

    def _classify_product(self, call: Call, dtype: str, lineage: Lineage) -> str:
        region = call.region
        source = call.caller
        if region in (UPDATE, AFTER_BACKWARD) or (region == LOSS and source.kind != ISOTYPE):
            return OTHER_PRODUCT
        if dtype == self._declared_compute() or dtype not in FLOATS:
            return DECLARED_PRODUCT
        if source.kind == ISOTYPE:
            return BRANCH_PRODUCT if source.is_lora_branch else ISOTYPE_PRODUCT
        if source.kind == AUTOGRAD and region == BACKWARD:
            return BACKWARD_PRODUCT
        if self._attention_dtypes and self._attention_dtypes[-1] == self.compute:
            return ATTENTION_PRODUCT
        if call.is_in_adapter and self.lora_branch in (None, dtype):
            return ADAPTER_PRODUCT
        if region != FORWARD:
            return OUTSIDE_PRODUCT
        if not lineage.is_activation:
            return TABLE_PRODUCT
        is_library_fp32 = source.kind == HUGGING_FACE and dtype == "fp32"
        if is_library_fp32 and self.step.is_autocast_off_by_library():
            return LIBRARY_PRODUCT
        return FORWARD_PRODUCT

    def _is_mirrored(self, case: str, call: Call, dtype: str) -> bool:
        """Whether the backward of this matrix product computes in the same dtype as the matrix
        product itself.
        """
        if case == OTHER_PRODUCT:
            # some losses multiply matrices, such as a contrastive loss
            return call.region == LOSS and dtype != self.compute
        if case in (BRANCH_PRODUCT, ISOTYPE_PRODUCT):
            # autograd records this product; it does not record products inside an autograd function
            return torch.is_grad_enabled()
        return case in MIRRORED_PRODUCTS

    def _has_no_forward(self) -> bool:
        """Whether this matrix product of backward must have the dtype `compute`. This is so if all
        matrix products of the forward had this dtype.
        """
        node = type(torch._C._current_autograd_node()).__name__
        return not self._wide_forward and _PRODUCT_NODE.match(node) is not None

    def _check_adapter_product(self, call: Call, dtype: str) -> None:
        """Reports matrix products in bf16 or fp16 in adapters whose matrix products should be
        computed in fp32. They occur in layers without a fused op, because PEFT's own code follows
        autocast.
        """
        if not call.is_in_adapter or self.lora_branch != "fp32":
            return
        if dtype != "fp32" and dtype in FLOATS:
            self._report_product(
                call,
                dtype,
                declared="fp32",
                rule="model.lora_branch: fp32",
                cause=_UNFUSED_CAUSE,
                fix="model.lora_branch: compute",
            )

    def _report_product(
        self, call: Call, dtype_name: str, *, cause: str = "", **overrides: str
    ) -> None:
        """Reports a matrix product that does not have its declared dtype.

        overrides  values that replace fields of the report, for a matrix product of an adapter
        """
        symbol = f"{call.op.foreign_name or call.op.base_name} in {call.location}"
        fields = {
            "declared": self._declared_compute(),
            **overrides,
        }
        self.observation.report(
            self.role,
            f"{symbol} multiplies in {dtype_name}, declared {fields['declared']}",
            location=symbol,
            observed=dtype_name,
            cause=cause or call.operand_dtype_reason(dtype_name),
            file=call.caller.file,
            line=call.caller.line,
            **fields,
        )

    def _check_arithmetic(self, call: Call, dtype: str, lineage: Lineage) -> Lineage:
        norm = self.step.innermost_call(is_norm) if call.region == FORWARD else None
        if norm is not None and call.op.base_name in NORM_SUMS and dtype not in norm.sum_dtypes:
            norm.sum_dtypes[dtype] = call.caller
        if call.op.base_name in DIVISIONS and call.region in (FORWARD, LOSS):
            self._check_divisor(call, lineage)
        is_narrow = itemsize(dtype) < 4
        if not is_narrow and dtype == self.compute:
            return lineage
        source = call.caller.kind
        if source == ISOTYPE or (source == AUTOGRAD and call.region == BACKWARD):
            return lineage
        self._check_loss(call, dtype, lineage)
        if call.region == FORWARD:
            if lineage.is_activation and norm is None and dtype != self._declared_compute():
                self.observation.arithmetic[f"{call.op.base_name} in {call.module}", dtype] += 1
            if is_narrow and source != HUGGING_FACE:
                self._check_buffers_and_tables(call, dtype, lineage)
        elif call.region == BACKWARD:
            lineage = self._check_backward(call, dtype, lineage)
        elif call.region == UPDATE and is_narrow and call.caller.file.endswith(_MUON_FILE):
            self.observation.dtypes["update_iteration"][dtype] += 1
        else:
            self._check_role(call, dtype)
        if call.region in (BACKWARD, AFTER_BACKWARD) and call.op.base_name in ADDITIONS:
            self._check_accumulation(call, dtype)
        return lineage

    def _check_loss(self, call: Call, dtype: str, lineage: Lineage) -> None:
        is_narrower = itemsize(dtype) < itemsize(self.precision.loss)
        if lineage.is_activation and is_narrower and self._is_loss_arithmetic(call):
            self._report_narrow(call, "loss", dtype)
        if call.region == LOSS and itemsize(dtype) < 4:
            self._check_count(call, dtype, lineage)

    def _check_backward(self, call: Call, dtype: str, lineage: Lineage) -> Lineage:
        """Reports a sum in Python code that runs in backward, if the sum has a narrower dtype than
        the gradients. A loop of additions counts as a sum too.
        """
        if itemsize(dtype) >= itemsize(self.precision.grads):
            return lineage
        if call.op.base_name in ADDITIONS:
            lineage = replace(lineage, additions=lineage.additions + 1)
        if call.op.kind == SUM or lineage.additions > _MAX_ADDITIONS:
            self._report_narrow(call, "grads", dtype)
        return lineage

    def _check_role(self, call: Call, dtype: str) -> None:
        """Checks the dtype of arithmetic with gradients and of arithmetic in an update.
        `ARITHMETIC_ROLES` states which field of the precision declares the dtype of this
        arithmetic.
        """
        role = ARITHMETIC_ROLES.get((call.region, arithmetic_kind(call.op)))
        if role is None:
            return
        precision = self.precision
        if role == "optimizer":
            declared = (precision.trainable, precision.optimizer)
            is_narrower = itemsize(dtype) < 4 and dtype not in declared
        else:
            is_narrower = itemsize(dtype) < itemsize(precision.grads)
        if is_narrower and _is_accumulation(call):
            self._report_narrow(call, role, dtype)

    def _check_count(self, call: Call, dtype: str, lineage: Lineage) -> None:
        """Reports a sum of whole numbers (such as the sum of a mask) if its dtype cannot represent
        the result.
        """
        if (
            call.op.kind == SUM
            and call.caller.kind == USER
            and not (lineage.is_activation or lineage.sources & WEIGHT)
            and call.is_inexact()
        ):
            self._report_narrow(call, "loss", dtype)

    def _check_divisor(self, call: Call, lineage: Lineage) -> None:
        """Reports a divisor of the loss in a narrow dtype, because it may be a rounded count."""
        divisor = call.args[1] if len(call.args) > 1 else None
        if (
            not isinstance(divisor, Tensor)
            or divisor.numel() != 1
            or not lineage.is_activation
            or not self._is_undeclared_dtype(LOSS, divisor.dtype)
        ):
            return
        divisor_lineage = self.lineages.get(divisor)
        values = dense_values(divisor.detach())
        dtype_name = format_dtype(divisor.dtype)
        is_in_layer = call.region == FORWARD and (
            call.outputs[0].numel() != 1 or self.step.is_in_submodule()
        )
        if (
            is_in_layer
            or values is None
            or (divisor_lineage is not None and divisor_lineage.is_activation)
        ):
            return
        value = float(values)
        if value.is_integer() and abs(value) <= 1 / eps(dtype_name):
            return
        call.report(
            "loss",
            f"the loss is divided by a number of {dtype_name}",
            observed=dtype_name,
            rule=_SUMS_RULE,
            cause="a count or a sum of weights is kept in that dtype, which may have rounded it",
        )

    def _is_loss_arithmetic(self, call: Call) -> bool:
        """Whether this call computes the loss. The loss may be computed after the forward, or
        inside the forward of a model that gets labels.

        A log-softmax or logsumexp inside a submodule with weights may belong to attention or to a
        router, so it does not count as a loss. Losses in the layers of transformers are ignored
        too.
        """
        if call.region != FORWARD:
            return call.region == LOSS
        if call.op.base_name not in LOSSES or (
            call.op.base_name in LOG_SUMS and self.step.is_in_submodule()
        ):
            return False
        return not (
            call.caller.kind == HUGGING_FACE
            and any(part.isdigit() for part in call.module.split("."))
        )

    def _check_buffers_and_tables(self, call: Call, dtype: str, lineage: Lineage) -> None:
        """Reports two faults in a forward. The first fault is an addition into a buffer of a narrow
        dtype, for example a running mean. The second fault is a computation with positions or
        constants in a narrow dtype.
        """
        for target in call.written_tensors:
            full_name = self._buffers.get(storage_address(target))
            if (
                full_name is not None
                and (call.op.base_name in ADDITIONS or call.op.kind == SUM)
                and itemsize(format_dtype(target.dtype)) < 4
            ):
                dtype_name = format_dtype(target.dtype)
                call.report(
                    self.role,
                    f"buffer {full_name} sums in {dtype_name}",
                    observed=dtype_name,
                    rule=_SUMS_RULE,
                    cause="it is stored in that dtype",
                )
        if (
            lineage.is_activation
            or lineage.sources & WEIGHT
            or call.op.base_name not in NONLINEAR
            or call.outputs[0].numel() < 2
        ):
            return
        if call.is_inexact():
            call.report(
                self.role,
                f"{call.op.base_name} is computed in {dtype}",
                observed=dtype,
                rule=TABLES_RULE,
                cause="narrower than its rule",
            )

    def _check_accumulation(self, call: Call, dtype: str) -> None:
        """Reports gradients that are added in place to a tensor of a narrower dtype. Such an
        addition contains no cast operator, so that the check of casts does not find it.
        """
        for target in call.written_tensors:
            dtype_name = float_dtype_name(target.dtype)
            if (
                dtype_name
                and itemsize(dtype_name) < itemsize(dtype)
                and itemsize(dtype_name) < itemsize(self.precision.grads)
            ):
                self._report_narrow(call, "grads", dtype_name)

    def _report_narrow(self, call: Call, role: str, dtype: str) -> None:
        message = (
            f"{call.op.base_name} is computed in {dtype}, declared {getattr(self.precision, role)}"
        )
        call.report(role, message, observed=dtype, cause="narrower than its role")

    # ---- numbers and positions
    def _is_undeclared_dtype(
        self, region: str, dtype: torch.dtype, *, is_table: bool = False
    ) -> bool:
        """Whether a dtype is narrower than fp32 and is not declared for this part of the step.

        is_table  whether the tensor is a table, which holds several numbers; a table must be in
                  fp32 whatever dtype `compute` is
        """
        precision = self.precision
        dtype_name = float_dtype_name(dtype)
        declared = {
            FORWARD: () if is_table else (self.compute,),
            LOSS: (precision.loss,),
            BACKWARD: (self.compute, precision.grads),
            AFTER_BACKWARD: (precision.grads,),
            UPDATE: (precision.trainable, precision.optimizer),
        }
        return (
            dtype_name is not None
            and itemsize(dtype_name) < 4
            and dtype_name not in declared[region]
        )

    def _check_numbers(self, call: Call) -> None:
        """Reports numbers that lose precision when an operator writes them to a tensor. The
        operator may fill a tensor with a number or create a sequence (`arange`, `linspace`).
        Numbers that the dtype represents exactly, such as 0.5 and -inf, are not reported.
        """
        if not call.outputs:
            return
        output = call.outputs[0]
        is_ramp = call.op.base_name in RAMPS
        if (
            not self._is_undeclared_dtype(call.region, output.dtype, is_table=is_ramp)
            or call.caller.is_library
            or dense_values(output) is None
        ):
            return
        if call.rounds_ramp() if is_ramp else call.rounds_numbers():
            self._report_rounded_numbers(call, call.op.base_name, output)

    def _check_python_numbers(
        self, function_name: str, args: tuple, kwargs: dict, tensor: Tensor
    ) -> None:
        """Reports Python numbers that were rounded when a tensor was created from them (as with
        `torch.tensor`), or when they were written into a tensor.
        """
        position = _NUMBER_ARGUMENTS[function_name]
        value = args[position] if len(args) > position else kwargs.get("data", kwargs.get("obj"))
        is_table = not isinstance(value, int | float | complex) and tensor.numel() > 1
        if isinstance(value, Tensor) or not self._is_undeclared_dtype(
            self.step.current_region(), tensor.dtype, is_table=is_table
        ):
            return
        source = find_caller()
        if source.is_library:
            return
        with torch._C.DisableTorchFunction():
            self.paused = True  # so that the operators of this check are not observed
            try:
                exact = torch.tensor(value, dtype=torch.float32)
                rounded = (
                    exact.isfinite()
                    & (exact.abs() < MASK_BOUND)
                    & (exact != exact.to(tensor.dtype).float())
                )
                if bool(rounded.any()):
                    self._report_rounded_numbers(
                        Call(self, None, args, kwargs, [], [tensor]),
                        function_name.strip("_"),
                        tensor,
                    )
            # for example data that is no fp32 number; the program continues
            except Exception as error:
                self._record_failure(
                    f"{function_name} in {self.step.module or self.step.current_region()}", error
                )
            finally:
                self.paused = False

    def _report_rounded_numbers(self, call: Call, source: str, tensor: Tensor) -> None:
        dtype_name = format_dtype(tensor.dtype)
        call.report(
            call.role,
            f"numbers of {source} are rounded to {dtype_name}",
            observed=dtype_name,
            rule=_NUMBERS_RULE,
            cause="they are made in that dtype",
        )

    def _check_cast(self, call: Call, lineage: Lineage) -> None:
        """Reports a cast that rounds positions, tables, counts or norms of gradients."""
        target, source = _cast_operands(call)
        if (
            not isinstance(source, Tensor)
            or source.dtype == torch.bool
            or not 0 < source.numel() <= MAX_RECOMPUTED_ELEMENTS
            or source.is_complex()
        ):
            return
        dtype_name = float_dtype_name(target.dtype)
        if (
            dtype_name is None
            or itemsize(dtype_name) >= 4
            or source.itemsize <= target.itemsize
            or call.caller.is_library
        ):
            return
        if (
            source.numel() == 1
            and call.region == AFTER_BACKWARD
            and itemsize(dtype_name) < itemsize(self.precision.grads)
        ):
            call.report(
                "grads",
                f"a norm of gradients is rounded to {dtype_name}",
                observed=dtype_name,
                cause="it is cast",
            )
        elif (
            not (lineage.is_activation or lineage.sources & WEIGHT)
            and (values := dense_values(source.detach())) is not None
        ):
            self._check_cast_values(call, values, target, dtype_name)

    def _check_round_trip(self, call: Call, lineage: Lineage) -> Lineage:
        """Reports values that the user's code casts to a narrower dtype and then back in the same
        function. Returns the `Lineage` of the result, which says from what it was computed.
        """
        lineage = replace(lineage, rounding=None)
        target, source = _cast_operands(call)
        if not isinstance(source, Tensor) or call.caller.is_library:
            return lineage
        source_name = float_dtype_name(source.dtype)
        target_name = float_dtype_name(target.dtype)
        if source_name is None or target_name is None:
            return lineage
        caller = call.caller
        if target.itemsize < source.itemsize:
            rounding = Rounding(target_name, caller.file, caller.function)
            return replace(lineage, rounding=rounding)
        previous = self.lineages.get(source)
        found = previous.rounding if previous is not None else None
        if found is None or (found.file, found.function) != (caller.file, caller.function):
            return lineage
        if target.itemsize > source.itemsize and target.numel() > 1:
            self._report_round_trip(call, found, target, lineage)
        return lineage

    def _report_round_trip(
        self, call: Call, rounding: Rounding, target: Tensor, lineage: Lineage
    ) -> None:
        width = itemsize(rounding.dtype_name)
        if call.region == BACKWARD:
            # a hook of a weight runs in the node AccumulateGrad
            node = type(torch._C._current_autograd_node()).__name__
            if node == "AccumulateGrad" and width < itemsize(self.precision.grads):
                _report_rounding(call, rounding, "grads", "a gradient is")
        elif call.region == AFTER_BACKWARD:
            if width < itemsize(self.precision.grads):
                self._rounded_gradients.append((call, rounding, target))
        elif (
            call.region == FORWARD
            and lineage.is_activation
            and width < itemsize(self._declared_compute())
        ):
            _report_rounding(call, rounding, self.role, "an activation is")

    def report_rounded_gradients(self) -> None:
        """Reports gradients whose values were rounded. Call this method just before the update. It
        compares each gradient with the tensors that were rounded in this step. So a copy that was
        rounded only for a log is not reported.
        """
        gradients = [
            parameter.grad
            for model in self._models
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        for call, rounding, target in self._rounded_gradients:
            if any(_has_equal_values(gradient, target) for gradient in gradients):
                _report_rounding(call, rounding, "grads", "a gradient is")
        self._rounded_gradients.clear()

    def _check_cast_values(
        self, call: Call, values: Tensor, target: Tensor, dtype_name: str
    ) -> None:
        """Reports whole numbers that the dtype cannot represent, such as numbers above 256 in bf16.
        For a table with another dtype than `compute`, it reports any number that is rounded.
        """
        values = values[values.isfinite() & (values.abs() < MASK_BOUND * 100)]
        is_whole = not values.is_floating_point() or bool((values == values.round()).all())
        # a single number is a count of tokens or rows
        is_checked = is_whole and (not values.is_floating_point() or call.region == LOSS)
        if values.numel() > 1:
            is_checked = call.region == FORWARD and (is_whole or dtype_name != self.compute)
        if (
            is_checked
            and call.region in (FORWARD, LOSS)
            and not torch.equal(values.to(target.dtype).to(values.dtype), values)
        ):
            if is_whole:
                subject = f"whole numbers up to {float(values.abs().max()):.0f} are"
            else:
                subject = "a table is"
            subject = subject if values.numel() > 1 else "a count is"
            call.report(
                call.role,
                f"{subject} rounded to {dtype_name}",
                observed=dtype_name,
                rule=TABLES_RULE,
                cause="it has fewer bits than they need",
            )


def _has_equal_values(gradient: Tensor, target: Tensor) -> bool:
    if (gradient.shape, gradient.dtype) != (target.shape, target.dtype):
        return False
    return bool(target.any()) and torch.equal(gradient, target)


def _report_rounding(call: Call, rounding: Rounding, role: str, subject: str) -> None:
    name = rounding.dtype_name
    call.report(
        role,
        f"{subject} rounded to {name} and cast back",
        observed=name,
        cause=f"{rounding.function} casts it to {name} and back, so that its dtype looks right",
    )


def _cast_operands(call: Call) -> tuple[Tensor, Any]:
    """Returns the tensor that a cast writes or creates, and the tensor whose values are cast."""
    if call.op.base_name == "copy" and len(call.args) > 1:
        return call.args[0], call.args[1]
    return call.outputs[0], call.args[0]
