"""Deferred logits: what stays deferred, what turns them real, and that either way the values are
the model's.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

import isotype
from isotype.errors import IsotypeError
from isotype.optimize import optimize
from tests import models
from tests.api import DeferredLogits, defer
from tests.ops.trials import FACTOR, error, floor
from tests.optimize.models import batch, tiny


def make(bias=False, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 4, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randn(7, dtype=dtype, requires_grad=True) if bias else None


CHAINS = {
    "as it is": lambda x: x,
    "scaled": lambda x: 2 * (x * 0.5 / 3),
    "gemma's softcap": lambda x: torch.tanh(x / 5.0) * 5.0,
    "softcap, then a temperature": lambda x: (x / 5.0).tanh().mul(5.0).div(0.7),
    "divided by a named argument": lambda x: torch.div(x, other=3.0),
    "cast": lambda x: x.float(),
    "clone": lambda x: x.clone().contiguous(),
    "shifted": lambda x: x[..., :-1, :],
    "with an ellipsis": lambda x: x[0:1, ...],
    "rows by number": lambda x: x[torch.tensor([1, 1, 0])],
    "flattened and back": lambda x: x.flatten(0, 1).view(2, 5, 7),
}


def test_the_loss_of_a_chain_is_the_real_tensors(subtests):
    for chain, bias in (
        *((chain, False) for chain in CHAINS),
        ("softcap, then a temperature", True),
    ):
        results = []
        for f in (defer, F.linear):
            leaves = [t for t in make(bias) if t is not None]
            x = CHAINS[chain](f(leaves[0], leaves[1], leaves[2] if bias else None))
            assert isinstance(x, DeferredLogits) == (f is defer)
            targets = torch.arange(x.shape[0] * x.shape[1]) % 7
            loss = F.cross_entropy(x.reshape(-1, 7), targets, reduction="sum")
            loss.backward()
            results.append([loss, *(t.grad for t in leaves)])
        # a cast to fp32 rounds the real logits; deferred ones are rounded at the end
        loose = {"rtol": 1e-5, "atol": 1e-6} if results[0][0].dtype == torch.float32 else {}
        with subtests.test(chain, bias=bias):
            torch.testing.assert_close(results[0], results[1], **loose)


MATERIAL = {
    "the largest of all": lambda x: x.argmax(),
    "fp16": lambda x: x.half(),
    "a softcap in fp16": lambda x: 5.0 * torch.tanh(x.to(torch.float16) / 5.0),
    "times a tensor": lambda x: x * torch.ones(7, dtype=torch.float64),
    "a tanh of a tanh": lambda x: torch.tanh(torch.tanh(x)),
    "another view": lambda x: x.view(5, 14),
    "in place": lambda x: x.mul_(2),
    "weighted loss, smoothed, of a softcap": lambda x: F.cross_entropy(
        (x / 5).tanh().view(-1, 7),
        torch.arange(10) % 7,
        weight=torch.ones(7, dtype=torch.float64),
        label_smoothing=0.1,
    ),
    "probabilities as targets": lambda x: F.cross_entropy(
        x.view(-1, 7), torch.full((10, 7), 1 / 7, dtype=torch.float64)
    ),
    "an autograd.Function": lambda x: Double.apply(x),
    "numpy": lambda x: torch.as_tensor(x.detach().numpy()),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_anything_else_gets_the_real_tensor_with_its_graph(subtests):
    for name, use in MATERIAL.items():
        results = []
        for f in (defer, F.linear):
            hidden, weight, _ = make()
            y = use(f(hidden, weight, None))
            if y.requires_grad:
                y.double().square().sum().backward()
            results.append([y.detach() * 1, hidden.grad, weight.grad])
        with subtests.test(name):
            assert type(results[0][0]) is torch.Tensor
            torch.testing.assert_close(results[0], results[1])


def test_reading_without_gradients_keeps_the_graph():
    """Metrics are read so, and the loss is made of the same logits afterwards."""
    hidden, weight, _ = make()
    x = defer(hidden, weight, None)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            x.argmax(-1)
    F.cross_entropy(x.view(-1, 7), torch.arange(10) % 7).backward()
    want = torch.autograd.grad(
        F.cross_entropy(F.linear(hidden, weight).view(-1, 7), torch.arange(10) % 7),
        (hidden, weight),
    )
    torch.testing.assert_close((hidden.grad, weight.grad), want)
    with torch.no_grad():
        assert not defer(hidden, weight, None).requires_grad


def test_a_write_in_place_is_the_real_tensors():
    """As of a temperature that TRL divides by, or a mask of forbidden tokens."""
    seen = []
    for f in (defer, F.linear):
        hidden, weight, _ = make()
        x = f(hidden, weight, None)[:, :-1]
        before = x.clone() * 2
        x.div_(3.0)
        with torch.no_grad():
            x[0, 0, :2] = -5.0
        loss = (
            F.cross_entropy(x.reshape(-1, 7), torch.arange(x.numel() // 7) % 7)
            + before.logsumexp(-1).mean()
        )
        loss.backward()
        seen.append([loss.detach(), hidden.grad, weight.grad, x.detach() * 1])
    torch.testing.assert_close(*seen)


def test_logits_whose_memory_was_written_through_others_are_refused():
    hidden, weight, _ = make()
    whole = defer(hidden, weight, None)
    one, other = whole[:, 1:], whole[:, :-1]
    one.mul_(3.0)
    with pytest.raises(IsotypeError, match=r"mul_\(\) on logits from which these were sliced"):
        F.cross_entropy(whole.reshape(-1, 7), torch.arange(10) % 7)
    with pytest.raises(IsotypeError, match="were sliced"):
        F.cross_entropy(other.reshape(-1, 7), torch.arange(8) % 7)


def test_logits_read_after_the_weight_changed_are_refused(subtests):
    """Fused optimizers leave the version counter of the weight alone; sharpness-aware minimisation
    moves weights without an optimizer.
    """
    for change in ("fused AdamW", "by hand", "a hook of backward"):
        with subtests.test(change):
            refused_after(change)


def refused_after(change):
    hidden, weight, _ = make(dtype=torch.float32)
    x = defer(hidden, weight, None)
    kept, want = x.detach().clone(), F.linear(hidden, weight).detach()
    if change == "by hand":
        with torch.no_grad():
            weight.add_(0.1)
    elif change == "a hook of backward":
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        F.cross_entropy(x.view(-1, 7), torch.arange(10) % 7).backward()
    else:
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    with pytest.raises(IsotypeError, match="weight changed") as caught:
        x.sum()
    assert "optimizer.step(), also in a hook of backward(), or your own code" in caught.value.fix
    with pytest.raises(IsotypeError, match="weight changed"):
        F.cross_entropy(x.view(-1, 7), torch.arange(10) % 7)
    torch.testing.assert_close(kept, want)
    defer(hidden, weight, None).sum()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_a_loss_has_plain_pytorchs_dtype_and_is_no_worse(subtests):
    """Under autocast PyTorch computes a cross-entropy in fp32, of whatever logits: BERT's loss is
    one, and its fp16 gradient is scaled.
    """
    for case in (
        (BF16, FP32, "mean", True),
        (FP16, FP32, "mean", True),
        (None, BF16, "none", False),
        (BF16, FP32, "sum", False),
    ):
        with subtests.test(str(case)):
            no_worse(*case)


def no_worse(cast, dtype, reduction, inside):
    torch.manual_seed(0)
    values = torch.randn(64, 32, dtype=torch.float64), torch.randn(50, 32, dtype=torch.float64)
    targets = torch.randint(0, 50, (64,))
    seen = {}
    for kind in ("deferred", "plain", "exact"):
        hidden, weight = (
            v.to(dtype).to(torch.float64 if kind == "exact" else dtype).requires_grad_()
            for v in values
        )
        with torch.autocast("cpu", cast, enabled=cast is not None and kind != "exact"):
            logits = (defer if kind == "deferred" else F.linear)(hidden, weight, None)
            if inside:
                loss = F.cross_entropy(logits, targets, reduction=reduction)
        if not inside:
            loss = F.cross_entropy(logits, targets, reduction=reduction)
        # as a GradScaler does
        (loss.sum() * 1024).backward()
        seen[kind] = [loss.detach() * 1, hidden.grad / 1024, weight.grad / 1024]
    assert [t.dtype for t in seen["deferred"]] == [t.dtype for t in seen["plain"]]
    narrowest = floor(dtype, cast)
    for mine, theirs, truth in zip(*seen.values(), strict=True):
        assert error(mine, truth) <= FACTOR * max(error(theirs, truth), narrowest)


def test_the_gradient_of_deferred_logits_is_refused():
    model = tiny("llama")
    optimize(model)
    logits = model(**batch()).logits
    with pytest.raises(IsotypeError, match="retain_grad"):
        logits.retain_grad()
    with pytest.raises(IsotypeError, match="register_hook"):
        logits.register_hook(print)


# --- A loss that transformers sums and divides is rounded as plain PyTorch's is, whatever the
# window of micro-batches.


def test_a_window_of_several_batches_rounds_no_gradient_a_second_time():
    """With num_items_in_batch of three micro-batches, and a product after it: 2.8e-3 before, plain
    2.3e-3.
    """
    grads = {}
    for kind in ("ours", "plain", "exact"):
        model = models.tiny(
            vocab_size=3000, hidden_size=64, tie_word_embeddings=False
        ).requires_grad_(False)
        model.lm_head.requires_grad_().to(torch.float64 if kind == "exact" else torch.bfloat16)
        torch.nn.init.normal_(
            model.lm_head.weight, std=0.125, generator=torch.Generator().manual_seed(1)
        )
        # the backbone gives what it is given
        model.model = Given(model.model.embed_tokens)
        if kind == "ours":
            isotype.optimize(model)
        g, made = torch.Generator().manual_seed(0), []
        for counted in (200, 150, 90):
            x = (
                torch.randn(1, 257, 64, generator=g)
                .bfloat16()
                .to(model.lm_head.weight.dtype)
                .requires_grad_()
            )
            labels = torch.randint(0, 3000, (1, 257), generator=g)
            labels[:, counted + 1 :] = -100
            model(
                inputs_embeds=x, labels=labels, num_items_in_batch=torch.tensor(440)
            ).loss.backward()
            made.append(x.grad)
        grads[kind] = [torch.cat(made), model.lm_head.weight.grad]
    for mine, theirs, truth in zip(*grads.values(), strict=True):
        assert error(mine, truth) <= 1.05 * error(theirs, truth)


class Given(torch.nn.Module):
    """A backbone without layers."""

    def __init__(self, embeddings):
        super().__init__()
        self.embed_tokens = embeddings

    def forward(self, input_ids=None, inputs_embeds=None, **_):
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


# --- Values of single rows of deferred logits: the numbers and gradients of the real logits, and no
# real logits.


INDEX = torch.arange(10).view(2, 5, 1) % 7
MASK = torch.tensor([[True, False, True, True, False], [False, False, True, False, True]])


# each is a few lines of a loss as people write it: nothing of them needs all logits
LOSSES = {
    "gather": lambda x: torch.gather(x, dim=-1, index=INDEX),
    "gather of rows": lambda x: x[:, 1:].gather(2, INDEX[:, 1:]),
    "logsumexp": lambda x: torch.logsumexp(x, dim=-1).square(),
    "logsumexp, row by row": lambda x: torch.stack([torch.logsumexp(row, dim=-1) for row in x]),
    "logsumexp of a tensor, dimension kept": lambda x: x.logsumexp((-1,), keepdim=True),
    "mean": lambda x: x.mean(),
    "row means": lambda x: x.mean(-1, keepdim=True).square(),
    "log-probabilities": lambda x: F.log_softmax(x, dim=-1).gather(-1, INDEX).squeeze(-1),
    "of rows chosen by a mask": lambda x: torch.log_softmax(x[MASK], -1).gather(-1, INDEX[MASK]),
    "of flattened rows": lambda x: x.flatten(0, 1).log_softmax(-1).gather(-1, INDEX.view(-1, 1)),
    "sliced afterwards": lambda x: x.log_softmax(-1)[:, :-1].gather(-1, INDEX[:, 1:]),
    "label smoothing as Trainer's": lambda x: (
        (lp := -F.log_softmax(x, dim=-1)).gather(-1, INDEX) + lp.sum(dim=-1, keepdim=True) / 7
    ),
    "cross-entropy with weights of classes": lambda x: F.cross_entropy(
        x.view(-1, 7), INDEX.view(-1), weight=torch.arange(1.0, 8.0).to(x.dtype), reduction="sum"
    ),
    "nll_loss": lambda x: F.nll_loss(
        F.log_softmax(x.view(-1, 7), -1), INDEX.view(-1), reduction="sum"
    ),
}
SCALES = {
    "as it is": lambda x: x,
    "scaled": lambda x: x / 3,
    "softcap": lambda x: torch.tanh(x / 5.0) * 5.0,
}


def results(f, loss, *, bias=False, scale=SCALES["as it is"]):
    hidden, weight, b = make(bias)
    logits = f(hidden, weight, b)
    made = loss(scale(logits))
    weighed = (made * torch.linspace(-1, 2, made.numel(), dtype=made.dtype).view(made.shape)).sum()
    weighed.backward()
    return logits, [made.detach(), *(t.grad for t in (hidden, weight, b) if t is not None)]


def test_a_loss_of_them_is_the_real_tensors_and_needs_no_logits(subtests):
    """Each loss with one scale, and every scale and both biases with the losses of several forms."""
    for loss, scale, bias in (
        *(
            (loss, ["as it is", "scaled", "softcap"][i % 3], i % 2 == 1)
            for i, loss in enumerate(LOSSES)
        ),
        *(
            (loss, "softcap", False)
            for loss in ("gather", "logsumexp", "mean", "log-probabilities")
        ),
    ):
        with subtests.test(loss, scale=scale, bias=bias):
            logits, got = results(defer, LOSSES[loss], bias=bias, scale=SCALES[scale])
            _, want = results(F.linear, LOSSES[loss], bias=bias, scale=SCALES[scale])
            torch.testing.assert_close(got, want)
            # the gradient of a capped mean needs every logit
            if not (scale == "softcap" and ("mean" in loss or "smoothing" in loss)):
                assert logits.computed is None


def test_what_is_read_for_metrics_needs_no_logits():
    hidden, weight, _ = make()
    x, y = (SCALES["softcap"](f(hidden, weight, None)).detach() for f in (defer, F.linear))
    torch.testing.assert_close(
        [x.argmax(-1), x.argmax(2, keepdim=True), x.mean()],
        [y.argmax(-1), y.argmax(2, keepdim=True), y.mean()],
    )
    assert x.computed is None
