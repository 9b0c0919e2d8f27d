"""An optimised model under what people do to models: PEFT, deepcopy, both checkpointings, compile,
saving.
"""

import copy
import io
import pickle
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama import modeling_llama as llama

from isotype.errors import UsageError
from isotype.ops import cpp
from isotype.ops.attention import op as attention
from isotype.ops.backend import kernel_unavailable_reason
from isotype.optimize import check_placed, optimize, restore
from isotype.precision import PRESETS
from tests.api import builds
from tests.api import gated_op as gated
from tests.api import rms_norm_op as norm
from tests.api import rope_op as rope
from tests.models import assert_same_step, lora, quantised, step
from tests.optimize.models import batch, tiny


def same_training(model, mine):
    assert_same_step(step(mine, **batch()), step(model, **batch()))


def with_peft(model, **more):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"],
        init_lora_weights=False,
        **more,
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize(
    ("when", "more"), [("before", {}), ("after", {"modules_to_save": ["lm_head"]})]
)
def test_optimize_before_or_after_peft_trains_the_same(when, more):
    model, mine = with_peft(tiny("qwen2"), **more), tiny("qwen2")
    if when == "before":
        optimize(mine)
    mine = with_peft(mine, **more)
    if when == "after":
        manifest = optimize(mine)
        assert manifest.replaced
    same_training(model, mine)
    prompt = batch()["input_ids"][:, :4]
    assert torch.equal(
        *(m.generate(input_ids=prompt, max_new_tokens=4, do_sample=False) for m in (model, mine))
    )
    with mine.disable_adapter(), model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(mine(**batch()).loss, model(**batch()).loss)


def test_training_under_checkpointing_is_the_same():
    model = tiny("gemma2")
    mine = copy.deepcopy(model)
    optimize(mine)
    for reentrant in (True, False):
        for m in (model, mine):
            m.train()
            m.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": reentrant}
            )
        same_training(model, mine)


def test_what_is_no_known_model_is_reported_or_refused():
    assert "nothing in this model was recognised" in str(optimize(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="takes a model, not a str"):
        optimize("llama")


def test_a_precision_in_any_form():
    for precision in ("bf16", torch.bfloat16, PRESETS["bf16-lora"], "bf16-lora grads=bf16"):
        model = tiny("llama")
        assert "norms give bf16" in str(optimize(model, precision)), precision
        assert model.model.norm(torch.randn(2, 32)).dtype == torch.bfloat16, precision
    for wrong, says in (
        ("bf16-lra", "expected one of fp32 bf16-mixed bf16-lora"),
        (16, "not a int"),
    ):
        with pytest.raises(UsageError, match=says):
            optimize(tiny("llama"), wrong)


def changed(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    model.model.norm.variance_epsilon = 0.5
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, output: output * 2)


def test_what_changes_on_a_module_after_optimize_is_computed():
    model, mine = tiny("llama"), tiny("llama")
    assert optimize(mine).replaced
    for each in (model, mine):
        step(each, **batch())
        changed(each)
    same_training(model, mine)
    copied = copy.deepcopy(mine)
    same_training(model, copied)


def test_a_model_outlined_on_the_meta_device_is_optimised_and_filled():
    """As `torch.device("meta")` makes it, for `load_state_dict(assign=True)`: its tables are asked
    for their form, and have no values.
    """
    plain = tiny("gemma3_text")
    with torch.device("meta"):
        model = type(plain)(plain.config)
    placed = optimize(model, device_type="cpu")
    assert all(buffer.is_meta for _, buffer in model.named_buffers())
    assert [(e.module, e.op) for e in placed.entries] == [
        (e.module, e.op) for e in optimize(tiny("gemma3_text")).entries
    ]
    model.load_state_dict(plain.state_dict(), assign=True)
    for name, buffer in plain.named_buffers():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_buffer(leaf, buffer, persistent=False)
    same_training(plain, model)


# --- `restore` takes out what `optimize` put in, and nothing that others have put around it since.


@pytest.mark.parametrize("order", ["offload after", "offload before"])
def test_accelerates_offloading_is_preserved(order):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model = lora(tiny("llama", attn_implementation="sdpa"), init_lora_weights=False)
    want = model(**batch(length=40)).loss.detach()
    if order == "offload after":
        optimize(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    if order == "offload before":
        optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(length=40)).loss, want)
    restore(model)
    assert all(p.device.type == "meta" for p in model.parameters()), "still offloaded"
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**batch(length=40)).loss, want)
    remove_hook_from_submodules(model)
    assert torch.equal(model(**batch(length=40)).loss.detach(), want)


# --- An optimised model saved whole and pickled: what is read back trains alike, is a model of its
# own, and can be restored.


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_what_is_read_back_is_optimised_and_independent():
    for model, again in (
        (
            lora(tiny("llama", attn_implementation="sdpa"), init_lora_weights=False),
            lambda model: pickle.loads(pickle.dumps(model)),
        ),
        (lora(quantised(tiny("phi3")), init_lora_weights=False), torch_saved),
    ):
        places = len(optimize(model).replaced)
        twin = again(model)
        losses = [each(**batch(length=40)).loss for each in (model, twin)]
        assert torch.equal(losses[0].detach() * 1, losses[1].detach() * 1)
        for loss in losses:
            loss.backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)
        originals = {id(module) for module in model.modules()}
        methods = [
            value
            for module in twin.modules()
            for value in vars(module).values()
            if hasattr(value, "__self__")
        ]
        assert methods
        assert not any(id(method.__self__) in originals for method in methods)
        assert restore(twin) == restore(model) == places
        assert not any(
            "forward" in vars(module) or "generate" in vars(module) for module in twin.modules()
        )


# --- A class that is given another forward after its model was optimised is refused at the next
# step; so is none that only wraps it.


def scaled(original):
    def patched(*args, **kwargs):
        return original(*args, **kwargs) * 1.25

    return patched


def test_a_class_patched_after_optimize_is_refused_at_the_next_step(monkeypatch):
    model, of = tiny("llama"), llama.LlamaMLP
    optimize(model)
    check_placed(model)
    with monkeypatch.context() as patch:
        patch.setattr(of, "forward", scaled(of.forward))
        with pytest.raises(
            UsageError, match=f"{of.__name__}.forward was replaced after isotype.optimize"
        ):
            check_placed(model)
        restore(model)
        check_placed(model)


# --- Without C++ kernels, norms, rotary functions and gated MLPs are no faster than the model's
# own: they stay, and the manifest says why.


def test_row_ops_are_not_placed_without_kernels_and_the_reason_is_noted(monkeypatch):
    monkeypatch.setattr(builds, "cpu_compiler", lambda: None)
    monkeypatch.setattr(cpp, "_fallback_reasons", {})
    for op in (gated, norm, rope, attention):
        monkeypatch.setattr(op.KERNELS, "library", None)
    manifest = optimize(tiny("llama"))
    assert {entry.op for entry in manifest.entries if entry.op} == {
        "generate",
        "linear_cross_entropy",
    }
    assert any(
        note.startswith("no C++ compiler (g++ or clang++) was found: norms, rotary")
        for note in manifest.notes
    )


def test_a_triton_that_cannot_run_is_a_line_of_the_manifest(monkeypatch):
    def probe(device):
        raise RuntimeError(
            "\nFailed to find C compiler. Please specify via CC environment variable.\n more"
        )

    monkeypatch.setattr("isotype.ops.launch.probe", probe)
    model = tiny("llama")
    # of its own: an answer is kept
    on_cuda = [types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:13"))]
    monkeypatch.setattr(model, "parameters", lambda *a, **k: iter(on_cuda))
    notes = optimize(model, device_type="cuda").notes
    said = "cuda:13: Triton cannot run a kernel: RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    assert any(note.startswith(f"{said}: norms, rotary") for note in notes), notes


def test_triton_is_asked_outside_a_fake_mode_and_a_failure_of_the_moment_is_not_kept(monkeypatch):
    device, real = torch.device("cuda:12"), []

    def probe(device):
        real.append(type(torch.ones(1)) is torch.Tensor)
        if len(real) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("isotype.ops.launch.probe", probe)
    with FakeTensorMode():
        assert [bool(kernel_unavailable_reason(device)) for _ in range(3)] == [True, False, False]
    assert real == [True, True]
