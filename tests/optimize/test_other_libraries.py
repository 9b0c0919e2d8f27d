"""Models that another library's kernels or loss already have: left alone where they are, each with
its line, and training as before.
"""

import copy
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

from isotype.optimize import optimize, restore
from tests.api import BYPASSED_NOTE
from tests.models import assert_same_step, step
from tests.optimize.models import batch, tiny

BY_LIGER = "its forward was already replaced by liger_kernel"


def reasons(manifest, part):
    return {e.reason for e in manifest.left if e.part == part}


@pytest.fixture
def liger(monkeypatch):
    """Liger's patches of Llama, undone afterwards: it rebinds names of transformers' module and the
    class's forward.
    """
    patch = pytest.importorskip("liger_kernel.transformers")
    from transformers.models.llama import modeling_llama

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(
        modeling_llama.LlamaForCausalLM, "forward", modeling_llama.LlamaForCausalLM.forward
    )
    return patch


def test_an_instance_patched_by_liger_is_not_replaced(liger):
    model = tiny("llama")
    liger.apply_liger_kernel_to_llama(model=model, rope=False)
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    manifest = optimize(model)
    assert reasons(manifest, "norm") == reasons(manifest, "gated mlp") == {BY_LIGER}
    assert reasons(manifest, "head") == {f"the model: {BY_LIGER}, which may have a loss of its own"}
    assert {e.part for e in manifest.replaced} - {"generate"} == {"rotary"}
    restore(model)
    assert {n: dict(m.__dict__) for n, m in model.named_modules()} == before


def test_modules_of_ligers_classes_are_not_replaced(liger):
    liger.apply_liger_kernel_to_llama()
    manifest = optimize(tiny("llama"))
    assert reasons(manifest, "foreign") == {
        "it is liger_kernel's LigerRMSNorm",
        "it is liger_kernel's LigerSwiGLUMLP",
    }
    assert reasons(manifest, "rotary") == {
        "apply_rotary_pos_emb was already replaced by liger_kernel"
    }
    assert reasons(manifest, "head") == {
        "the model: its class's forward was replaced by liger_kernel, which may have a loss of its own"
    }
    assert not {e.part for e in manifest.replaced} - {"generate"}


def test_torchs_cross_entropy_replaced_by_liger_keeps_the_head_real(monkeypatch):
    ours = types.FunctionType(
        F.cross_entropy.__code__, {"__name__": "liger_kernel.transformers.functional"}
    )
    monkeypatch.setattr(F, "cross_entropy", ours)
    assert reasons(optimize(tiny("llama")), "head") == {
        "torch's cross_entropy was replaced by liger_kernel"
    }


@pytest.mark.parametrize("when", ["before", "after"])
def test_trls_fused_head_is_detected_and_not_fought(when):
    add_fused_lm_head = getattr(
        pytest.importorskip("trl.trainer.sft_trainer"), "add_fused_lm_head", None
    )
    if add_fused_lm_head is None:
        pytest.skip("this trl has no fused head")
    model = tiny("qwen2", tied=True)
    mine = copy.deepcopy(model)
    add_fused_lm_head(model)
    manifest = optimize(mine) if when == "before" else None
    add_fused_lm_head(mine)
    if when == "after":
        manifest = optimize(mine)
        assert [(e.op, e.reason) for e in manifest.entries if e.part == "head"] == [
            ("linear_log_probs", "for TRL's fused head")
        ]
        assert {"norm", "gated mlp", "rotary"} <= {e.part for e in manifest.replaced}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_same_step(
                step(mine, **batch(), fused_lm_head=True),
                step(model, **batch(), fused_lm_head=True),
            )
    # the head that was given deferred logits says, once, that they are not asked for
    assert (
        sum(BYPASSED_NOTE in str(w.message) for w in said)
        == manifest.notes.count(BYPASSED_NOTE)
        == (when == "before")
    )
    # without TRL's flag the model's own loss runs, deferred or not
    torch.testing.assert_close(step(mine, **batch())[0], step(model, **batch())[0])
