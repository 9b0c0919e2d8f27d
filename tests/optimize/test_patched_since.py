"""A class that is given another forward after its model was optimised is refused at the next step; so is none that only wraps it."""

from __future__ import annotations

import pytest
from transformers.models.llama import modeling_llama as llama

from isotype.errors import UsageError
from isotype.optimize import check_placed, optimize, restore
from tests.optimize.models import tiny


def scaled(original):
    def patched(*args, **kwargs):
        return original(*args, **kwargs) * 1.25

    return patched


@pytest.mark.parametrize("of", [llama.LlamaMLP, llama.LlamaRMSNorm, llama.LlamaAttention, llama.LlamaDecoderLayer])
def test_a_class_patched_after_optimize_is_refused_at_the_next_step(monkeypatch, of):
    model = tiny("llama")
    optimize(model)
    check_placed(model)
    with monkeypatch.context() as patch:
        patch.setattr(of, "forward", scaled(of.forward))
        with pytest.raises(UsageError, match=f"{of.__name__}.forward was replaced after isotype.optimize"):
            check_placed(model)
        restore(model)
        check_placed(model)
    optimize(model)
    check_placed(model)


def test_the_class_that_fsdp_makes_of_a_layer_is_none():
    """FSDP2 makes a subclass of each unit's class; transformers wraps the forward that a subclass of a decoder layer inherits."""
    model = tiny("llama")
    optimize(model)
    layer = model.model.layers[0]
    layer.__class__ = type("FSDPLlamaDecoderLayer", (llama.LlamaDecoderLayer,), {})
    assert type(layer).forward is not llama.LlamaDecoderLayer.forward
    check_placed(model)
    layer.__class__ = type("Patched", (llama.LlamaDecoderLayer,), {"forward": scaled(llama.LlamaDecoderLayer.forward)})
    with pytest.raises(UsageError, match=r"Patched\.forward"):
        check_placed(model)
