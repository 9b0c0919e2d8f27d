"""The five failures of other tools that this project began with, each as a user would meet it, on the whole engine."""

import copy
import json

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from isotype import optimize
from isotype.optimize import deferred
from isotype.optimize import head as optimized_head
from tests.gpu import DEVICE, kernels, on_a_gpu
from tests.models import lora, quantised
from tests.ops.trials import FACTOR, error
from tests.optimize.models import VOCABULARY, batch, tiny
from tests.optimize.test_trainers import ARCHITECTURES, Rows, losses


def arguments(tmp_path, **more):
    settings = {
        "output_dir": str(tmp_path), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "report_to": [],
        "learning_rate": 1e-2, "save_strategy": "no", "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return settings | more


# 1. Fused LoRA: backward gave Float where BFloat16 was expected, because in-place products skip autocast


CELLS = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float16),
]


@pytest.mark.parametrize(("weights", "adapter", "cast"), CELLS)
def test_fused_lora_under_autocast(weights, adapter, cast):
    model = lora(tiny("llama", dtype=weights), init_lora_weights=False)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.to(adapter)
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    assert sum(e.op in ("lora_linear", "lora_mlp") for e in optimize(mine).replaced) >= 14
    seen = []
    for each in (mine, model, exact):
        with torch.autocast("cpu", cast, enabled=each is not exact):
            loss = each(**batch()).loss
        loss.backward()
        trained = [p for p in each.parameters() if p.requires_grad]
        assert each is exact or all(p.grad.dtype == p.dtype == adapter for p in trained)
        seen.append(torch.cat([p.grad.double().flatten() for p in trained]))
    assert error(seen[0], seen[2]) <= FACTOR * error(seen[1], seen[2])
    optimizer = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=1e-2)
    steps = []
    for _ in range(4):
        with torch.autocast("cpu", cast):
            loss = mine(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(loss.item())
    assert steps[-1] < steps[0]


# 2. Triton: above 65,536 words, with scaling and softcapping, a branch gave `logits` another dtype


def large_vocabulary(device):
    """Gemma 2 caps its logits; `step_with_kernels` scales them too."""
    return tiny("gemma2", vocab_size=65_600, num_hidden_layers=1).to(device)


def step_with_kernels(model, inputs, cast):
    with torch.autocast(DEVICE, cast), optimized_head.deferring():
        logits = model(input_ids=inputs["input_ids"]).logits
        scaled = logits / 0.5
        loss = torch.nn.functional.cross_entropy(scaled.view(-1, scaled.shape[-1]), inputs["labels"].view(-1))
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
        truth = torch.nn.functional.cross_entropy(logits.view(-1, 65_600), inputs["labels"].view(-1))
    truth.backward()
    assert got.dtype == want.dtype == torch.float32
    assert abs(got.double() - truth) <= FACTOR * abs(want.double() - truth) + 1e-3
    assert error(grad, exact.lm_head.weight.grad) <= FACTOR * error(theirs, exact.lm_head.weight.grad)


# 3. QLoRA in SFTTrainer: `generate` in a callback ran outside autocast, and failed in bf16


class Generates(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **_):
        self.seen.append(model.generate(input_ids=torch.arange(3, 9)[None], max_new_tokens=3, do_sample=True, pad_token_id=0))


def test_sft_trainer_qlora_generates_in_a_callback(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from peft import prepare_model_for_kbit_training

    columns = {name: t.tolist() for name, t in batch(16).items() if name != "attention_mask"}

    def run(model, callbacks):
        config = trl.SFTConfig(**arguments(tmp_path, bf16=True, max_length=32, dataset_kwargs={"skip_prepare_dataset": True}))
        trainer = trl.SFTTrainer(
            model, args=config, train_dataset=Dataset.from_dict(columns), processing_class=a_tokenizer(), callbacks=callbacks
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    def qlora():
        prepared = prepare_model_for_kbit_training(quantised(tiny("llama")), use_gradient_checkpointing=False)
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


def a_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 3))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


# 4. A fused head under HF Trainer's bf16=True: mat1 and mat2 had different dtypes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hugging_face_trainer_in_bf16_with_the_fused_head(architecture, tmp_path, monkeypatch):
    calls = []
    op = deferred.linear_cross_entropy
    monkeypatch.setattr(deferred, "linear_cross_entropy", lambda *a, **k: calls.append(a[1].dtype) or op(*a, **k))
    deferred.materialised.clear()
    family, more = ARCHITECTURES[architecture]
    model = tiny(family, tied=True, **more)
    mine = copy.deepcopy(model)
    optimize(mine)
    seen = [losses(Trainer(each, TrainingArguments(**arguments(tmp_path, bf16=True)), train_dataset=Rows())) for each in (model, mine)]
    assert len(calls) == 6
    assert not deferred.materialised, "the logits were never held"
    assert seen[1] == pytest.approx(seen[0], rel=2e-2)
    assert seen[1][-1] < seen[1][0]


# 5. bf16 weights with fp32 gradients: a setting that was accepted and ignored, or an error about the gradient's dtype


def test_bf16_weights_with_fp32_gradients_are_trained_and_observed(configured, tmp_path):
    from safetensors.torch import load_file

    from isotype.tasks.choose import train

    settings = {"precision": {"preset": "bf16-pure"}, "adapter": {"kind": "none"}, "train": {"steps": 4, "batch_size": 2, "accumulate": 4}}
    assert train(configured(**settings)) == 0
    precision = json.loads((tmp_path / "run/precision.json").read_text())
    assert precision["violations"] == []
    observed = precision["observed"]
    assert set(observed["trainable"]) == {"bf16"}
    assert set(observed["grads"]) == {"fp32"}
    (file,) = (tmp_path / "run/model").glob("*.safetensors")
    assert {t.dtype for t in load_file(file).values()} == {torch.bfloat16}
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row["loss"] for row in rows if "loss" in row]
    assert len(steps) == 4
    assert steps[-1] < steps[0]
