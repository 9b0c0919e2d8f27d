"""Programs that break the declared precision at the borders are named or listed as not watched;
those that keep it are not accused.
"""

from __future__ import annotations

import pytest

pytest.importorskip("trl")
from .borders import HONEST, LIARS

# what is said of a program beside a violation or a refusal: an entry of `unobserved` or `not
# watched`
LISTED = {
    "a_base_of_int8_that_says_bf16": "on Packed in base_model.model.model.layers.1.mlp.down_proj",
    "an_operator_in_the_namespace_of_a_library": "operator bitsandbytes::mix_rows",
    "an_adapter_merged_for_each_evaluation": "frozen weights that changed",
    "features_that_were_stored_in_fp16": "an input of the model in fp16",
}
OFTEN = {
    "a_table_rounded_at_the_beginning_of_a_step", "an_update_of_the_trainers_own_in_bf16_pure",
    "an_optimizer_that_rounds_its_weights", "a_gradient_hook_that_rounds",
    "a_denominator_that_was_made_elsewhere_in_bf16", "averages_in_place_for_an_evaluation", "momentum_from_a_bf16_checkpoint_with_warmup",
}  # fmt: skip


def cases(programs):
    return [
        pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.full]) for name in programs
    ]


@pytest.mark.parametrize("name", cases(LIARS))
def test_a_program_that_breaks_its_declaration_is_named(name, tmp_path):
    seen = LIARS[name](tmp_path)
    if name in LISTED:
        assert any(LISTED[name] in what for what in seen.unwatched)
    else:
        assert seen.violations or seen.error


@pytest.mark.parametrize("name", cases(HONEST))
def test_a_program_that_keeps_its_declaration_is_not_accused(name, tmp_path):
    seen = HONEST[name](tmp_path)
    assert (seen.violations, seen.error) == ([], "")
    assert seen.record["not watched"]
