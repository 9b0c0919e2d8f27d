"""`generate` of an optimised model: its products of few rows, its adapters, and prompts in a batch."""

from types import SimpleNamespace

import peft
import pytest
import torch

from isotype.data.rows import SamplePrompt
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from tests.api import (
    LORA_KERNELS,
    batch_prompts,
    can_skip_padding,
    generate_samples,
    kernels_unavailable_reason,
)
from tests.optimize.models import VOCABULARY, tiny

kernels = pytest.mark.skipif(
    bool(kernels_unavailable_reason()), reason=kernels_unavailable_reason() or "-"
)
PROMPT = torch.tensor([[5, 9, 11, 3, 20]])


def adapted_model(preset, targets="all-linear", family="llama"):
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(family, attn_implementation="sdpa"), config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)
    precision = PRESETS[preset]
    optimize(model, precision)
    apply_precision(model, precision, device_type="cpu")
    return model


def logits(model):
    with torch.no_grad():
        return model(PROMPT).logits[:, -1]


@kernels
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "gate_proj"]])
def test_the_products_of_a_token_run_in_the_kernel(targets, monkeypatch):
    model = adapted_model("bf16-lora", targets)
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    shapes = []
    kernel = LORA_KERNELS.calls["few_rows"]

    def counted(*arguments):
        shapes.append(arguments[6])
        return kernel(*arguments)

    monkeypatch.setitem(LORA_KERNELS.calls, "few_rows", counted)
    model.generate(input_ids=PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    # two layers of seven products and the head; the head computes the last row of the prompt too
    assert shapes.count(1) == 2 * (2 * 7 + 1) + 1
    after = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    assert after == forwards


@kernels
def test_generation_sees_adapters_that_changed_since_the_last_call():
    model = adapted_model("bf16-lora")
    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    first = model.generate(input_ids=PROMPT, **options).logits[0]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.neg_()
    second = model.generate(input_ids=PROMPT, **options).logits[0]
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, logits(model).float(), rtol=2e-2, atol=2e-2)


def draw(model, prompts, **options):
    tokenizer = SimpleNamespace(
        eos_token_id=7,
        pad_token_id=0,
        decode=lambda ids, **_: " ".join(map(str, ids)),
    )
    return [
        s.answer
        for s in generate_samples(model, tokenizer, prompts, device=torch.device("cpu"), **options)
    ]


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [
        SamplePrompt("", tuple(torch.randint(8, VOCABULARY, (n,), generator=generator).tolist()))
        for n in lengths
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_prompts_in_a_batch_get_the_same_answers_as_alone(family):
    model = adapted_model("fp32", family=family)
    prompts = prompts_of([9, 3, 14, 6, 3, 11, 20, 1, 5])
    together = draw(model, prompts, max_new_tokens=12)
    alone = [draw(model, [prompt], max_new_tokens=12)[0] for prompt in prompts]
    assert together == alone
    assert len(set(together)) > 1


def test_an_answer_in_a_batch_ends_at_its_end_token():
    model = adapted_model("fp32")
    prompts = prompts_of([4, 6])
    (first, _) = draw(model, prompts, max_new_tokens=6)
    end = int(first.split()[2])
    model.generation_config.eos_token_id = end
    for answer, prompt in zip(draw(model, prompts, max_new_tokens=6), prompts, strict=True):
        assert answer == draw(model, [prompt], max_new_tokens=6)[0]
        assert str(end) not in answer.split()[:-1]


def test_prompts_with_pictures_and_prompts_of_recurrent_models_are_alone():
    prompts = [*prompts_of([3, 4, 5]), SamplePrompt("", (1, 2), None, ("a.png",))]
    assert batch_prompts(prompts) == [[3], [0, 1, 2]]
    assert batch_prompts(prompts, can_skip_padding=False) == [[3], [0], [1], [2]]
    assert can_skip_padding(adapted_model("fp32"))

    class Recurrent(torch.nn.Module):
        _is_stateful = True

        def forward(self, input_ids, position_ids=None): ...

    assert not can_skip_padding(Recurrent())
