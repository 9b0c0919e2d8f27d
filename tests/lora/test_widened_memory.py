"""Widened 4-bit weights: of a step with CUDA's choices no more are alive at any moment than one fused function reads."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from isotype.config.load import load
from isotype.precision.precision import Precision
from isotype.tasks.language.outline import outline, step_outline
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import Checkpointing

LLAMA = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip


class Widened(TorchDispatchMode):
    """Bytes of widened weights that are alive: `now`, and at most `peak`; `made` is how many there were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.isotype.widen_4bit.default:
            size = result.untyped_storage().nbytes()
            self.made += 1
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(result.untyped_storage(), self._free, size)
        return result

    def _free(self, size):
        self.now -= size


@pytest.mark.parametrize(("length", "kind"), [(256, "none"), (4096, "layers")])
def test_widened_weights_of_one_function_are_alive_at_a_time(kind, length):
    pytest.importorskip("bitsandbytes")
    config = load(None, ["precision.preset=nf4-lora", "adapter.r=16", "train.batch_size=1", "train.accumulate=1"]).config
    precision = Precision.preset("nf4-lora")
    made = outline(AutoConfig.for_model(**LLAMA), config, precision, device_type="cuda")
    what = Checkpointing(kind, tuple(range(3)) if kind == "layers" else (), 3, "asked")
    with Widened() as widened:
        largest = step_outline(config, precision, length=length, device_type="cuda")
        plan_memory(made, config.train, precision, largest, checkpointing=what, device_type="cuda")
    # gate's and up's with 32 columns beside them for their adapters, and down's: what an MLP in tiles reads again and again
    hidden, inner = 512, 1792
    of_an_mlp = 2 * (2 * inner * (hidden + 32) + hidden * inner)
    assert 3 * 7 * 2 <= widened.made <= 3 * 7 * 5
    assert 2 * inner * hidden <= widened.peak <= of_an_mlp
    assert widened.now == 0
