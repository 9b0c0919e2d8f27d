"""PF012 to PF017: the rehearsed step, evaluation and generation, and that they leave no trace."""

import torch
from tests.api import rehearsal, rehearse_evaluation, rehearse_samples, rehearse_step

from isotype.finding import Severity


def everything(one):
    return [*rehearse_step(one), *rehearse_evaluation(one), *rehearse_samples(one)]


def test_rehearsal_restores_all_state(subject):
    one = subject(precision={"preset": "fp16-mixed"}, adapter={"kind": "none"})
    model, stepper = one.prepared.model, one.prepared.stepper
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rng, scale, modes = (
        torch.get_rng_state(),
        stepper.loss_scale.scale,
        [m.training for m in model.modules()],
    )
    assert everything(one) == []
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert stepper.loss_scale.scale == scale
    assert [m.training for m in model.modules()] == modes
    assert not stepper.optimizer.state
    assert stepper.accumulator.gradients() == []
    assert {group["lr"] for group in stepper.optimizer.param_groups} == {1e-3}


def test_a_step_that_fails_leaves_no_trace_and_is_told_with_its_fix(subject, monkeypatch):
    # the step below stands for a library's
    monkeypatch.setattr(rehearsal, "find_custom_update", lambda _: None)
    one = subject()
    for error, said, fix in (
        (
            RuntimeError("no kernel\nat all"),
            "failed: no kernel",
            "isotype doctor explain 'no kernel'",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            "out of memory: ",
            "train.batch_size",
        ),
    ):
        monkeypatch.setattr(
            torch.optim.AdamW, "step", lambda *a, error=error: (_ for _ in ()).throw(error)
        )
        (finding,) = rehearse_step(one)
        assert finding.code == "PF012"
        assert said in finding.message
        assert fix in finding.fix
        assert one.prepared.stepper.accumulator.gradients() == []


def test_a_weight_that_is_nan(subject):
    one = subject()
    weight = next(
        p
        for n, p in one.prepared.model.named_parameters()
        if n.endswith("layers.0.mlp.up_proj.base_layer.weight")
    )
    weight.data[0, 0] = float("nan")
    (finding,) = rehearse_step(one)
    assert finding.code == "PF013"
    assert "up_proj" in finding.render()
    assert [f.code for f in rehearse_evaluation(one)] == ["PF016"]


def test_a_trained_tensor_that_the_loss_does_not_see(subject):
    one = subject(adapter={"kind": "none"})
    layer = one.prepared.model.model.layers[0]
    layer.mlp.register_forward_hook(lambda module, args, out: out.detach())
    (finding,) = rehearse_step(one)
    assert finding.code == "PF014"
    assert finding.severity == Severity.WARNING
    assert "layers.0.mlp" in finding.message
    assert "not reached by backward" in str(finding.observed)


def test_no_gradient_at_all_is_an_error(subject):
    one = subject(adapter={"targets": ["up_proj"]})
    for layer in one.prepared.model.get_base_model().model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: out * 0)
    (finding,) = rehearse_step(one)
    assert finding.severity == Severity.ERROR
    assert "get zeros only" in str(finding.observed)


def test_a_frozen_tensor_with_a_gradient(subject):
    one = subject()
    name, frozen = next(
        (n, p)
        for n, p in one.prepared.model.named_parameters()
        if not p.requires_grad and p.ndim == 2
    )
    frozen.requires_grad_(True)
    findings = {f.code: f for f in rehearse_step(one)}
    assert findings["PF015"].place.symbol == name
    assert frozen.grad is None, "cleared with the rest"


def test_an_evaluation_or_a_generation_that_fails(subject):
    one = subject()

    def refuse(module, args):
        if not torch.is_grad_enabled():
            raise RuntimeError("expected mat1 and mat2 to have the same dtype")

    one.prepared.model.get_base_model().model.norm.register_forward_pre_hook(refuse)
    evaluation, generation = everything(one)
    assert (evaluation.code, generation.code) == ("PF016", "PF017")
    assert "mat1 and mat2" in evaluation.message
    assert "run.sample_every: 0" in str(generation.fix)
