"""The 81 cells, held."""

import json

import pytest
import torch
from benchmarks import lora_matrix as matrix


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.full] if op == "qkv" else [])  # gate_up is alike
        for op in matrix.OPS
    ],
)
def test_fused_runs_wherever_peft_runs_in_its_dtypes_and_no_farther_from_fp64(op):
    block = matrix.peft_block(op)
    outcomes = [matrix.measure(cell, block=block) for cell in matrix.cells()]
    ran, refused = [o for o in outcomes if o.peft_runs], [o for o in outcomes if not o.peft_runs]
    assert (len(ran), len(refused)) == (63, 18)
    assert [o.fused_runs for o in ran] == [True] * 63
    # one function, except where the branch is wide
    one = {"linear": "lora_linear", "mlp": "lora_mlp"}.get(op, "lora_group")
    for o in ran:
        wide = o.cell.autocast is None and o.cell.x != "fp32" and o.cell.adapter != o.cell.x
        assert o.ran == ("lora_linear" if wide else one), str(o.cell)
    assert [o.fused for o in ran] == [o.peft for o in ran]
    far = [
        f"{o.cell}: {o.worst} {o.share:.3f}"
        for o in outcomes
        if o.share is not None and o.share > matrix.EQUAL
    ]
    assert not far
    for o in refused:
        assert o.cell.autocast is None
        assert o.fused.startswith(
            f"<DtypeError: DT001 LoRA linear got an input in {o.cell.x} and a weight in {o.cell.weight}"
        )


def test_adapter_gradients_are_no_bf16_roundings():
    # the fp32 sum of bf16 operands: the error is the operands', an eighth of what a rounded result
    # adds
    cell = matrix.Cell("bf16", "bf16", "fp32", "bf16")
    block = matrix.in_cell(matrix.peft_block(trainable=False), cell)
    matrix.fuse_lora(block)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, matrix.FEATURES, generator=g).bfloat16()
    dy = torch.randn(64, 48, generator=g).bfloat16()
    _, grads = matrix.gradients(block, x, [dy], cell.context("cpu"))
    for key in ("proj.lora_A", "proj.lora_B"):
        assert not torch.equal(grads[key], grads[key].bfloat16().float())


def test_command_prints_the_table_and_json(monkeypatch, capsys):
    some = [
        cell
        for cell in matrix.cells()
        if cell.x == "bf16" and cell.adapter == "fp32" and cell.autocast != "fp16"
    ]
    monkeypatch.setattr(matrix, "cells", lambda: iter(some))
    assert matrix.main(["--op", "linear"]) == 0
    printed = capsys.readouterr().out
    assert "PEFT runs 4 of 6 cells" in printed
    assert "refused" in printed
    assert matrix.main(["--op", "linear", "--json"]) == 0
    assert {
        row["fused"].startswith("<") for row in json.loads(capsys.readouterr().out)["linear"]
    } == {True, False}
