"""Samples in the middle of training leave no trace: "train, generate, train" is bit-identical to "train, train"."""

import pytest
import torch
from transformers import BitsAndBytesConfig

from isotype.data.rows import SamplePrompt
from isotype.precision import PRESETS
from isotype.tasks.language.batches import collate
from isotype.tasks.language.result import evaluate
from isotype.tasks.language.sample import sample
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing
from tests.models import lora, rows, stepper, tiny


class WordTokenizer:
    """As much of a tokenizer as sampling needs."""

    eos_token_id, pad_token_id = 2, 0

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(i)) for i in ids)


def quantised(folder):
    """A tiny Llama in nf4. Its sizes are multiples of the block of 64, as those of real models are."""
    tiny(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    from transformers import AutoModelForCausalLM

    quantisation = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantisation, dtype=torch.bfloat16)


def trained(preset, folder, *, interludes, checkpointing=False):
    model = quantised(folder) if preset == "nf4-lora" else tiny()
    if checkpointing:
        apply_checkpointing(model, Checkpointing("layers", (0, 1), 2))
    if preset.endswith("lora"):
        model = lora(model, lora_dropout=0.1)
    step_of = stepper(model, preset, learning_rate=1e-3)
    torch.manual_seed(7)
    prompts = [SamplePrompt("one", (3, 4, 5)), SamplePrompt("two", (6, 7))]
    every, losses = rows(12), []
    for step in range(4):
        model.train()
        batch = collate(every[step * 3 : step * 3 + 3], pad_id=0)
        losses.append(step_of([batch], step=step + 1, learning_rate=1e-3, watch_changes=True).loss)
        if interludes:
            answers = sample(model, WordTokenizer(), prompts, max_new_tokens=5, device=torch.device("cpu"))
            assert len(answers) == 2
            assert all(a.answer for a in answers)
            evaluate(model, every, batch_size=4, pad_id=0, device=torch.device("cpu"))
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("preset", "checkpointing"),
    [("bf16-mixed", False), ("bf16-lora", False), ("nf4-lora", True), ("fp16-mixed", False)]
    + [pytest.param(preset, True, marks=pytest.mark.full) for preset in PRESETS],
)
def test_generation_and_evaluation_leave_no_trace(preset, checkpointing, tmp_path):
    plain = trained(preset, tmp_path, interludes=False, checkpointing=checkpointing)
    with_interludes = trained(preset, tmp_path, interludes=True, checkpointing=checkpointing)
    assert plain[0] == with_interludes[0]
    assert all(torch.equal(plain[1][name], tensor) for name, tensor in with_interludes[1].items())
