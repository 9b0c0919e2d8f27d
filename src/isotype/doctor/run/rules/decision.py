"""Determines the cause of an exception from its stack frames (`Evidence`): the first rule that recognises
its cause decides.
"""

from __future__ import annotations

from collections.abc import Callable

from ....finding import Finding
from ..default_dtype import add_default_dtype_origin
from ..evidence import Evidence
from ..operand_origins import add_value_origins, add_weight_origins
from ..weight_record import RECORD
from .attention import find_attention_mask, find_attention_operand
from .autocast import (
    find_autocast_of_other_device,
    find_call_outside_autocast,
    find_custom_backward,
    find_lost_autocast,
)
from .backward import find_failed_operator
from .checkpointing import find_changed_checkpoint, find_failed_recomputation, find_uncached_cast
from .checks import find_failed_check
from .findings import MAX_ROWS, make_finding
from .fixes import cast_before_later_uses, check_fix, write_names_of_files
from .indices import find_mask_arithmetic, find_wrong_indices, find_wrong_mask
from .kernels import (
    find_constant_overflow,
    find_in_place_result,
    find_missing_kernel,
)
from .layers import find_layer_input
from .losses import find_loss_weight, find_wrong_target, find_wrong_target_in_backward
from .numpy_values import find_numpy_conversion, find_numpy_dtype, find_unconvertible_array
from .operands import list_floating
from .operators import find_compiled_operands, find_mixed_operands
from .optimizers import (
    find_assigned_gradient,
    find_cast_of_loaded_states,
    find_scaler_over_halves,
    find_stale_optimizer_states,
)
from .quantised import find_unquantised_operand
from .tables import find_missing_table_entry
from .weights import (
    find_gathered_operand,
    find_integer_parameter,
    find_left_default_dtype,
    find_mixed_weights,
    find_odd_weight,
    find_packed_weight,
)
from .writes import find_write

# in the order of evaluation: the more specific rules come first
RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    find_compiled_operands,
    find_changed_checkpoint,
    find_failed_recomputation,
    find_uncached_cast,
    find_scaler_over_halves,
    find_mixed_weights,
    find_stale_optimizer_states,
    find_cast_of_loaded_states,
    find_integer_parameter,
    find_numpy_dtype,
    find_numpy_conversion,
    find_unconvertible_array,
    find_missing_table_entry,
    find_wrong_indices,
    find_wrong_mask,
    find_mask_arithmetic,
    find_failed_operator,
    find_missing_kernel,
    find_unquantised_operand,
    find_assigned_gradient,
    find_wrong_target,
    find_loss_weight,
    find_wrong_target_in_backward,
    find_failed_check,
    find_in_place_result,
    find_constant_overflow,
    find_attention_mask,
    find_attention_operand,
    find_packed_weight,
    find_autocast_of_other_device,
    find_lost_autocast,
    find_write,
    find_custom_backward,
    find_call_outside_autocast,
    find_left_default_dtype,
    find_gathered_operand,
    find_odd_weight,
    find_layer_input,
    find_mixed_operands,
)


def decide_cause(evidence: Evidence) -> Finding:
    """Returns the finding of the first rule that recognises the cause. If no rule recognises the
    cause, returns RN000, a note that lists the facts.
    """
    if RECORD.tensors is not None:
        for operand in list_floating(evidence)[:MAX_ROWS]:
            evidence.producer_of(operand)  # shown with the operands
    for rule in RULES:
        finding = rule(evidence)
        if finding is not None:
            finding = add_value_origins(finding, evidence)
            finding = add_weight_origins(finding, evidence)
            finding = add_default_dtype_origin(finding, evidence)
            finding = check_fix(cast_before_later_uses(finding, evidence), evidence)
            return write_names_of_files(finding, evidence)
    lines = evidence.message.strip().splitlines() or [""]
    # the messages of TorchScript end with the error, after its traceback
    line = lines[-1] if "TorchScript" in lines[0] else lines[0]
    return make_finding(
        "RN000",
        evidence,
        operation=evidence.operation,
        error=f"{type(evidence.error).__name__}: {line}",
    )
