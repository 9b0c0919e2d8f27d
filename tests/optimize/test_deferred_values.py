"""Values of single rows of deferred logits: the numbers and gradients of the real logits, and no real logits."""

import torch
import torch.nn.functional as F

from isotype.optimize.deferred import defer
from tests.ops.trials import FACTOR, error

CLASSES = 7
INDEX = torch.arange(10).view(2, 5, 1) % CLASSES
MASK = torch.tensor([[True, False, True, True, False], [False, False, True, False, True]])


def make(bias=False, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, 4, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randn(CLASSES, dtype=dtype, requires_grad=True) if bias else None


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
    "label smoothing as Trainer's": lambda x: (lp := -F.log_softmax(x, dim=-1)).gather(-1, INDEX) + lp.sum(dim=-1, keepdim=True) / 7,
    "cross-entropy with weights of classes": lambda x: F.cross_entropy(
        x.view(-1, CLASSES), INDEX.view(-1), weight=torch.arange(1.0, 8.0).to(x.dtype), reduction="sum"
    ),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(x.view(-1, CLASSES), -1), INDEX.view(-1), reduction="sum"),
}
SCALES = {"as it is": lambda x: x, "scaled": lambda x: x / 3, "softcap": lambda x: torch.tanh(x / 5.0) * 5.0}


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
        *((loss, ["as it is", "scaled", "softcap"][i % 3], i % 2 == 1) for i, loss in enumerate(LOSSES)),
        *((loss, "softcap", False) for loss in ("gather", "logsumexp", "mean", "log-probabilities")),
    ):
        with subtests.test(loss, scale=scale, bias=bias):
            logits, got = results(defer, LOSSES[loss], bias=bias, scale=SCALES[scale])
            _, want = results(F.linear, LOSSES[loss], bias=bias, scale=SCALES[scale])
            torch.testing.assert_close(got, want)
            if not (scale == "softcap" and ("mean" in loss or "smoothing" in loss)):  # the gradient of a capped mean needs every logit
                assert logits.computed is None


def test_what_is_read_for_metrics_needs_no_logits():
    hidden, weight, _ = make()
    x, y = (SCALES["softcap"](f(hidden, weight, None)).detach() for f in (defer, F.linear))
    torch.testing.assert_close([x.argmax(-1), x.argmax(2, keepdim=True), x.mean()], [y.argmax(-1), y.argmax(2, keepdim=True), y.mean()])
    assert x.computed is None


def test_bf16_gradients_are_no_farther_from_fp64_than_plain_pytorchs():
    """TRL's loss of ORPO: a gathered logit less the logsumexp, of logits cast to fp32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32) * 2, torch.randn(500, 32) / 5
    index = torch.randint(0, 500, (64, 1))

    def gradients(f, dtype):
        x, w = hidden.bfloat16().to(dtype).requires_grad_(), weight.bfloat16().to(dtype).requires_grad_()
        logits = f(x, w, None).to(torch.promote_types(dtype, torch.float32))
        values = torch.gather(logits, -1, index).squeeze(-1) - torch.logsumexp(logits, -1)
        (values * torch.linspace(-1, 2, 64, dtype=values.dtype)).sum().backward()
        return [x.grad, w.grad]

    exact = gradients(F.linear, torch.float64)
    for ours, theirs, truth in zip(gradients(defer, torch.bfloat16), gradients(F.linear, torch.bfloat16), exact):
        assert ours.dtype == torch.bfloat16
        assert error(ours, truth) <= FACTOR * error(theirs, truth)
