"""Real trained weights: what a 260,000-parameter story model says, and that it goes on saying it through a LoRA wrapper."""

import pytest
import torch

from isotype.config.schema import AdapterSection, ModelSection
from isotype.data.prompts import prompts_from
from isotype.model.adapter import attach_adapter
from isotype.model.load import Source, load_base, load_tokenizer
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.language.sample import sample

pytestmark = pytest.mark.full


BEGINNING = ", there was a little girl named Lily. She loved to play outside in the park."


def test_stories260k_generates_a_story(shared):
    folder = str(shared / "data/stories260k")
    tokenizer, precision, cpu = load_tokenizer(ModelSection(name=folder)), PRESETS["fp32"], torch.device("cpu")
    model = attach_adapter(load_base(Source(folder), precision, attention="sdpa", device=cpu, trainable=False), AdapterSection(r=4), seed=0)
    apply_precision(model, precision, device_type="cpu")
    story = sample(model, tokenizer, prompts_from(["Once upon a time"], tokenizer), max_new_tokens=40, device=cpu)[0]
    assert story.answer.startswith(BEGINNING)
