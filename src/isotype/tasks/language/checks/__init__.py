"""The checks of tokens before step 1: labels, the tokenizer, positions, packing, padding."""

from __future__ import annotations

from ....training.task import Check
from .labels import end_never_learnt, nothing_to_learn, prompts_learnt
from .packing import packed_documents_apart
from .padding import padding_changes_nothing
from .positions import beyond_the_positions
from .tokens import beyond_the_embeddings, missing_template, untrained_new_tokens

CHECKS: dict[str, tuple[Check, ...]] = {
    "data": (
        Check(("PF005",), nothing_to_learn),
        Check(("PF006",), prompts_learnt),
        Check(("PF007",), end_never_learnt),
        Check(("PF008",), beyond_the_embeddings),
        Check(("PF009",), untrained_new_tokens),
        Check(("PF010",), missing_template),
        Check(("PF020",), beyond_the_positions),
    ),
    "real": (Check(("PF018",), packed_documents_apart), Check(("PF022",), padding_changes_nothing)),
}
