"""Two of the five failures of other tools that this project began with, each as a user would meet
it.

Fused LoRA under autocast is in tests/lora, a fused head in bf16 in tests/optimize/test_trainers.py,
bf16 weights with fp32 gradients in tests/training/test_run.py.
"""

import copy

import pytest
import torch
from transformers import TrainerCallback

from isotype import optimize
from tests.api import head as optimized_head
from tests.gpu import DEVICE, kernels, on_a_gpu
from tests.integrations.trainers import tokenizer
from tests.models import lora, quantised
from tests.ops.trials import FACTOR, error
from tests.optimize.models import batch, tiny


def arguments(tmp_path, **more):
    settings = {
        "output_dir": str(tmp_path), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "report_to": [],
        "learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return settings | more


# 2. Triton: above 65,536 words, with scaling and softcapping, a branch gave `logits` another dtype


def large_vocabulary(device):
    """Gemma 2 caps its logits; `step_with_kernels` scales them too."""
    return tiny("gemma2", vocab_size=65_600, num_hidden_layers=1).to(device)


def step_with_kernels(model, inputs, cast):
    with torch.autocast(DEVICE, cast), optimized_head.deferring():
        logits = model(input_ids=inputs["input_ids"]).logits
        scaled = logits / 0.5
        loss = torch.nn.functional.cross_entropy(
            scaled.view(-1, scaled.shape[-1]), inputs["labels"].view(-1)
        )
    loss.backward()
    return loss.detach(), model.lm_head.weight.grad


@on_a_gpu
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_a_large_vocabulary_with_scale_and_softcap_on_a_gpu(cast):
    compare_large_vocabulary(cast, DEVICE)


def test_a_large_vocabulary_with_scale_and_softcap_interpreted(monkeypatch):
    monkeypatch.setattr("tests.gpu.DEVICE", "cpu")
    monkeypatch.setattr(f"{__name__}.DEVICE", "cpu")
    compare_large_vocabulary(torch.bfloat16, "cpu")


def compare_large_vocabulary(cast, device):
    model = large_vocabulary(device)
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    optimize(mine)
    inputs = {name: t.to(device) for name, t in batch(rows=1, length=6).items()}
    with kernels():
        got, grad = step_with_kernels(mine, inputs, cast)
    want, theirs = step_with_kernels(model, inputs, cast)
    with torch.autocast(device, enabled=False):
        logits = exact(input_ids=inputs["input_ids"]).logits / 0.5
        truth = torch.nn.functional.cross_entropy(
            logits.view(-1, 65_600), inputs["labels"].view(-1)
        )
    truth.backward()
    assert got.dtype == want.dtype == torch.float32
    assert abs(got.double() - truth) <= FACTOR * abs(want.double() - truth) + 1e-3
    assert error(grad, exact.lm_head.weight.grad) <= FACTOR * error(
        theirs, exact.lm_head.weight.grad
    )


# 3. QLoRA in SFTTrainer: `generate` in a callback ran outside autocast, and failed in bf16


class Generates(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **_):
        self.seen.append(
            model.generate(
                input_ids=torch.arange(3, 9)[None], max_new_tokens=3, do_sample=True, pad_token_id=0
            )
        )


def test_sft_trainer_qlora_generates_in_a_callback(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from peft import prepare_model_for_kbit_training

    columns = {name: t.tolist() for name, t in batch(16).items() if name != "attention_mask"}

    def run(model, callbacks):
        config = trl.SFTConfig(
            **arguments(
                tmp_path, bf16=True, max_length=32, dataset_kwargs={"skip_prepare_dataset": True}
            )
        )
        trainer = trl.SFTTrainer(
            model,
            args=config,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    def qlora():
        prepared = prepare_model_for_kbit_training(
            quantised(tiny("llama")), use_gradient_checkpointing=False
        )
        prepared.lm_head.to(torch.bfloat16)
        return lora(prepared)

    with pytest.raises(RuntimeError, match="dtype"):
        run(qlora(), [Generates()])
    model, quiet = qlora(), qlora()
    for each in (model, quiet):
        optimize(each, "nf4-lora")
    callback = Generates()
    got = run(model, [callback])
    assert len(callback.seen) == 6
    assert got == run(quiet, []), "generation leaves no trace"
    assert got[-1] < got[0]
