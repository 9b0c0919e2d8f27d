"""A loss that transformers sums and divides is rounded as plain PyTorch's is, whatever the window of micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import isotype
from isotype.optimize.deferred import defer
from tests.models import tiny
from tests.ops.trials import error


@pytest.mark.parametrize("trained_head", [False, True], ids=["frozen", "trained"])
def test_a_window_of_several_batches_rounds_no_gradient_a_second_time(trained_head):
    """With num_items_in_batch of three micro-batches, and a product after it: 2.8e-3 before, plain 2.3e-3."""
    grads = {}
    for kind in ("ours", "plain", "exact"):
        model = tiny(vocab_size=3000, hidden_size=64, tie_word_embeddings=False).requires_grad_(False)
        model.lm_head.requires_grad_(trained_head).to(torch.float64 if kind == "exact" else torch.bfloat16)
        torch.nn.init.normal_(model.lm_head.weight, std=0.125, generator=torch.Generator().manual_seed(1))
        # the backbone gives what it is given
        model.model = Given(model.model.embed_tokens)
        if kind == "ours":
            isotype.optimize(model)
        g, made = torch.Generator().manual_seed(0), []
        for counted in (200, 150, 90):
            x = torch.randn(1, 257, 64, generator=g).bfloat16().to(model.lm_head.weight.dtype).requires_grad_()
            labels = torch.randint(0, 3000, (1, 257), generator=g)
            labels[:, counted + 1 :] = -100
            model(inputs_embeds=x, labels=labels, num_items_in_batch=torch.tensor(440)).loss.backward()
            made.append(x.grad)
        grads[kind] = [torch.cat(made), *([model.lm_head.weight.grad] if trained_head else [])]
    for mine, theirs, truth in zip(*grads.values()):
        assert error(mine, truth) <= 1.05 * error(theirs, truth)


class Given(torch.nn.Module):
    """A backbone without layers."""

    def __init__(self, embeddings):
        super().__init__()
        self.embed_tokens = embeddings

    def forward(self, input_ids=None, inputs_embeds=None, **_):
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["none", "number", "tensor"])
def test_a_sum_is_the_sum_whatever_divides_it(items):
    results = []
    for f in (lambda x, w: defer(x, w, None, items), F.linear):
        g = torch.Generator().manual_seed(0)
        x, w = (torch.randn(n, 4, generator=g, dtype=torch.float64).requires_grad_() for n in (12, 7))
        targets = torch.randint(0, 7, (12,), generator=g)
        targets[::5] = -100
        loss = F.cross_entropy(f(x, w), targets, reduction="sum")
        (loss / 3 + loss).backward()
        results.append([loss.detach(), x.grad, w.grad])
    torch.testing.assert_close(*results)
