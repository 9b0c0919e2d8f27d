"""Errors of C++ operators in backward, which have no Python frame of their own."""

import pytest
import torch
from torch import nn

from tests.api import RECORD, collect_evidence, decide_cause

FILE = "tests/doctor/run/test_failed_node.py"


@pytest.fixture(params=[True, False])
def is_recorded(request):
    if request.param:
        RECORD.install_with_first_steps()
    else:
        RECORD.install()
    yield request.param
    RECORD.remove()


class SparseLayer(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.weight, x).relu() + 1


def explain(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return decide_cause(collect_evidence(caught.value))


def compute_under_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float()


def train_sparse_layer():
    model = SparseLayer()
    loss = compute_under_autocast(model, torch.ones(4, 3)).sum()
    loss.backward()


def test_operator_that_autocast_does_not_know(is_recorded):
    finding = explain(train_sparse_layer)
    assert finding.code == "RN041"
    assert "SparseAddmmBackward0 does not cast. With a gradient in fp32" in finding.cause
    assert dict(finding.details)["gradient"] == "bf16[4 3]"
    if is_recorded:
        assert finding.place.line == SparseLayer.forward.__code__.co_firstlineno + 1
        fix = 'autocast("cpu", enabled=False): return torch.sparse.mm(self.weight, x).relu() + 1'
        assert fix in finding.fix
        assert (
            f"ran under autocast ({FILE}:{compute_under_autocast.__code__.co_firstlineno + 1})"
            in finding.cause
        )
        assert "next" not in dict(finding.details)
    else:
        assert finding.place.line == train_sparse_layer.__code__.co_firstlineno + 3
        assert "--forward-lines" in dict(finding.details)["next"]


def test_operand_that_is_cast_in_the_fix():
    RECORD.install_with_first_steps()
    weight = torch.eye(4).to_sparse().requires_grad_()

    def train():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = torch.sparse.mm(weight, torch.ones(4, 3).bfloat16().float())
            out = torch.sparse.mm(weight, out)
        out.float().sum().backward()

    try:
        finding = explain(train)
    finally:
        RECORD.remove()
    assert "out = torch.sparse.mm(weight, out.to(torch.float32))" in finding.fix


def differentiate_rows(losses, parameters, rows):
    def differentiate(row):
        return torch.autograd.grad(losses, parameters, row, retain_graph=True)[0]

    return torch.vmap(differentiate)(rows)


def test_backward_under_vmap(is_recorded):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
    losses = compute_under_autocast(model, torch.randn(8, 3)).sum(1)
    finding = explain(lambda: differentiate_rows(losses, list(model.parameters()), torch.eye(8)))
    assert finding.code == "RN041"
    assert "Without torch.vmap, NativeBatchNormBackward0 raises no error" in finding.cause
    assert "weight is fp32. Without" in finding.cause
    assert "`torch.stack([differentiate(row) for row in rows])` in place of" in finding.fix
    gradients = [
        torch.autograd.grad(losses, list(model.parameters()), row, retain_graph=True)[0]
        for row in torch.eye(8)
    ]
    assert torch.stack(gradients).shape == (8, 4, 3)


def test_weight_that_is_cast_between_forward_and_backward(is_recorded):
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1))

    def train():
        loss = model(torch.randn(1, 3, 4)).sum()
        model.to(torch.bfloat16)
        loss.backward()

    finding = explain(train)
    assert finding.code == "RN041"
    assert "ConvolutionBackward0 does not cast" in finding.cause
    assert "cast no weight between forward and backward" in finding.fix


def test_retained_graph_is_searched_in_the_order_of_the_engine(is_recorded):
    first, second = SparseLayer(), SparseLayer(3)

    def train():
        hidden = compute_under_autocast(first, torch.ones(4, 3))
        loss = compute_under_autocast(second, hidden.t()).sum()
        torch.autograd.grad(loss, list(second.parameters()), retain_graph=True)

    assert dict(explain(train).details)["gradient"] == "bf16[3 4]"


def test_loss_that_is_called_by_another_name():
    measure = nn.functional.huber_loss
    RECORD.install_with_first_steps()

    def train():
        loss = measure(torch.ones(3, requires_grad=True), torch.tensor([1, 2, 3]))
        loss.backward()

    try:
        finding = explain(train)
    finally:
        RECORD.remove()
    line = train.__code__.co_firstlineno + 1
    assert finding.fix == f"`torch.tensor([1, 2, 3]).to(torch.float32)` at {FILE}:{line}"
