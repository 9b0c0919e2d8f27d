"""Which mask a model needs, decided once for a model as it is: two walks over all its modules, 17 ms for 2,665 of them, at each batch.

The decision is stored with what it depends on, and made again when that has changed: the configuration, the modules, and of each attention
its implementation, its forward, its dropout and whether it is causal.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from .attention import implementation_of, why_no_document_mask
from .document_mask import why_mask_is_read

_DECISION = "_isotype_mask_needs"
# of a configuration: what `why_mask_is_read` and the attention layers ask it for
_ASKED = (
    "_attn_implementation", "attn_logit_softcapping", "is_encoder_decoder", "use_bidirectional_attention", "output_router_logits",
    "layer_types", "model_type",
)  # fmt: skip


class MaskNeeds(NamedTuple):
    """Why the model reads a mask of padding, and why it takes no mask of documents; None where it does not and where it does."""

    why_read: str | None
    why_no_documents: str | None


class _Decision:
    """A decision with the modules that it depends on; a copy or a pickle of the model does not take it along."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.looked_at = [m for m in self.modules if implementation_of(m) is not None or hasattr(m, "is_causal")]
        self.facts = self.current()
        self.needs = MaskNeeds(why_mask_is_read(model), why_no_document_mask(model))

    def current(self) -> tuple[Any, ...]:
        """0.5 ms for 2,665 modules."""
        children = hash(tuple(map(id, chain.from_iterable(m._modules.values() for m in self.modules))))
        configs = {id(c): c for m in (self.modules[0], *self.looked_at) if (c := getattr(m, "config", None)) is not None}
        texts = [c.get_text_config() if hasattr(c, "get_text_config") else c for c in configs.values()]
        asked = [tuple(_plain(getattr(text, name, None)) for name in _ASKED) for text in texts]
        own = [
            (m.training, id(vars(m).get("forward")), vars(m).get("is_causal"), vars(m).get("attention_dropout")) for m in self.looked_at
        ]  # fmt: skip
        return children, asked, own

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def mask_needs(model: nn.Module) -> MaskNeeds:
    """The decision for the model as it is now."""
    known: _Decision | None = vars(model).get(_DECISION)
    if known is None or known.facts != known.current():
        # past nn.Module's own __setattr__
        known = vars(model)[_DECISION] = _Decision(model)
    return known.needs
