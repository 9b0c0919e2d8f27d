"""An optimised model under what people do to models: PEFT, deepcopy, both checkpointings, compile, DDP, saving, evaluation."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from isotype.errors import UsageError
from isotype.optimize import optimize, restore
from tests.optimize.models import batch, tiny
from tests.optimize.test_families import loss_and_gradients


def same_training(model, mine, **tolerance):
    want, theirs = loss_and_gradients(model, batch())
    got, grads = loss_and_gradients(mine, batch())
    torch.testing.assert_close(got, want, **tolerance)
    assert grads.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(grads[name], theirs[name], **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


def with_peft(model, **more):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False, **more)
    return get_peft_model(model, config)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "lora and the head"])
def test_peft(when, more):
    model, mine = with_peft(tiny("qwen2"), **more), tiny("qwen2")
    if when == "before":
        optimize(mine)
    mine = with_peft(mine, **more)
    if when == "after":
        manifest = optimize(mine)
        assert manifest.replaced
    same_training(model, mine)
    prompt = batch()["input_ids"][:, :4]
    assert torch.equal(*(m.generate(input_ids=prompt, max_new_tokens=4, do_sample=False) for m in (model, mine)))
    with mine.disable_adapter(), model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(mine(**batch()).loss, model(**batch()).loss)


def test_deepcopy_trains_its_own_weights_and_restores_alone():
    model = tiny("llama")
    mine = copy.deepcopy(model)
    optimize(mine)
    twin = copy.deepcopy(mine)
    with torch.no_grad():
        for p in mine.parameters():
            p.zero_()
    same_training(model, twin)
    restore(twin)
    same_training(model, twin)
    assert restore(mine)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = tiny("gemma2")
    mine = copy.deepcopy(model)
    optimize(mine)
    for m in (model, mine):
        m.train()
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    same_training(model, mine)


@pytest.mark.slow
def test_compile_without_a_graph_break():
    torch._dynamo.reset()
    model = tiny("llama")
    mine = copy.deepcopy(model)
    optimize(mine)

    def loss_of(m):
        return torch.compile(lambda **inputs: m(**inputs).loss, backend="aot_eager", fullgraph=True)

    want = model(**batch()).loss
    got = loss_of(mine)(**batch())
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    for p, q in zip(model.parameters(), mine.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False])
def test_fp32_weights_under_autocast(cast, inside):
    model = tiny("qwen2")
    mine = copy.deepcopy(model)
    optimize(mine)
    results = []
    for m in (model, mine):
        with torch.autocast("cpu", cast):
            loss = m(**batch()).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in m.parameters())
        results.append((loss.detach(), m.model.layers[0].mlp.gate_proj.weight.grad))
    torch.testing.assert_close(results[1], results[0], rtol=3e-2, atol=3e-2)


def test_an_fp32_norm_does_not_widen_a_bf16_model():
    """What makes generation fail after prepare_model_for_kbit_training: fp32 norms promote the residual stream into a bf16 head."""
    model = tiny("llama", dtype=torch.bfloat16)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.float()
    with pytest.raises(RuntimeError):
        model(**batch())
    optimize(model, "bf16")
    loss = model(**batch()).loss
    loss.backward()
    model.generate(batch()["input_ids"], max_new_tokens=2)


def test_evaluation_and_state_dict():
    model = tiny("llama")
    mine = copy.deepcopy(model)
    optimize(mine)
    assert mine.state_dict().keys() == model.state_dict().keys()
    mine.eval()
    with torch.no_grad():
        got, want = mine(**batch()), model.eval()(**batch())
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.logits.argmax(-1), want.logits.argmax(-1))


def test_save_and_load(tmp_path):
    model = tiny("llama")
    optimize(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    restore(model)
    same_training(model, again)


def test_something_else():
    assert "nothing in this model was recognised" in str(optimize(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="takes a model, not a str"):
        optimize("llama")


@pytest.mark.slow
def test_two_processes(tmp_path):
    """DDP over gloo: losses and gradients of both ranks are those of the original model."""
    script = tmp_path / "ddp.py"
    script.write_text(
        textwrap.dedent("""
        import copy, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from isotype.optimize import optimize
        from tests.optimize.models import batch, tiny

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = tiny("llama")
        mine = copy.deepcopy(model)
        optimize(mine)
        for unused in (False, True):
            losses = []
            for m in (model, mine):
                m.zero_grad()
                wrapped = DistributedDataParallel(m, find_unused_parameters=unused)
                loss = wrapped(**batch(seed=rank)).loss
                loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses)
            for p, q in zip(model.parameters(), mine.parameters()):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
        print("same")
        dist.destroy_process_group()
        """)
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=900
    )
    assert done.stdout.count("same") == 2, done.stderr[-3000:]
