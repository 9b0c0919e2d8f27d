"""An optimizer with a hook of a program's own: the preflight does not rehearse it, and the run is the plain one."""

import json

import torch
from torch import nn
from torch.optim import AdamW

from isotype.integrations import attach
from tests.integrations.trainers import Setting, curve, plain


def with_a_hook(model: nn.Module) -> AdamW:
    """PyTorch's AdamW, whose hook adds a share of the gradient before to each gradient."""
    made, kept = AdamW(model.parameters(), lr=1e-2), {}

    def added(optimizer, args, kwargs):
        for p in (p for p in optimizer.param_groups[0]["params"] if p.grad is not None):
            p.grad.add_(kept.get(p, torch.zeros(())))
            kept[p] = p.grad / 10

    made.register_step_pre_hook(added)
    return made


def test_an_attached_run_is_the_plain_one_and_the_update_is_not_rehearsed(models, tmp_path):
    curves = []
    for attached in (False, True):
        trainer = plain(Setting(models, more={"output_dir": str(tmp_path)}))
        trainer.optimizer = with_a_hook(trainer.model)
        if attached:
            attach(trainer, "fp32", quiet=True)
        curves.append(curve(trainer))
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-5, atol=1e-6)
    found = json.loads((tmp_path / "isotype" / "preflight.json").read_text())
    said = [finding["message"] for finding in found["findings"]] + [skipped["reason"] for skipped in found["skipped"]]
    assert any("with_a_hook" in line for line in said)
