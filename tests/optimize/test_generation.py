"""`generate` of an optimised model: its products of few rows, its adapters, and prompts in a batch."""

import copy
import ctypes
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from isotype.data.rows import SamplePrompt
from isotype.optimize import optimize, restore
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from tests.api import (
    LORA_KERNELS,
    batch_prompts,
    can_skip_padding,
    forwards,
    generate_samples,
    keep_cast_adapters,
    kernels_unavailable_reason,
    use_fast_linears,
)
from tests.optimize.models import VOCABULARY, tiny

kernels = pytest.mark.skipif(
    bool(kernels_unavailable_reason()), reason=kernels_unavailable_reason() or "-"
)
row_kernels = pytest.mark.skipif(not LORA_KERNELS.load(), reason="no C++ compiler")
PROMPT = torch.tensor([[5, 9, 11, 3, 20]])


def adapted_model(preset, targets="all-linear", family="llama", **settings):
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **settings)
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


@row_kernels
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "gate_proj"]])
def test_the_products_of_a_token_run_in_the_kernel(targets, monkeypatch):
    model = adapted_model("bf16-lora", targets)
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    rows = []
    for name in ROWS_POSITION:
        count_rows(monkeypatch, name, rows)
    model.generate(input_ids=PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    # two layers and the head; the head computes the last row of the prompt too. In a layer, the
    # norm, q, k and v are one call if all have an adapter, and the MLP with its norm is another one
    calls = 3 if targets == "all-linear" else 5
    assert rows.count(1) == 2 * (2 * calls + 1) + 1
    after = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    assert after == forwards


# the position of the number of rows in the arguments of a kernel
ROWS_POSITION = {
    "few_rows": 6,
    "project_rows": 8,
    "project_normed_rows": 13,
    "decode_mlp_half": 13,
}


def count_rows(monkeypatch, name, rows):
    kernel = LORA_KERNELS.calls[name]

    def counted(*arguments):
        rows.append(arguments[ROWS_POSITION[name]])
        return kernel(*arguments)

    monkeypatch.setitem(LORA_KERNELS.calls, name, counted)


@row_kernels
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "gate_proj"]])
def test_layers_with_the_same_input_are_one_call_with_the_same_logits(targets, monkeypatch):
    model = adapted_model("fp32", targets)
    rows = []
    for name in ROWS_POSITION:
        count_rows(monkeypatch, name, rows)
    answer = model.generate(
        PROMPT.repeat(3, 1),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    # two layers: the norm with q, k and v (or each of these), the output, and the MLP with its norm;
    # then the head. The prompt has 15 rows, of which the head computes the last one of each prompt
    layer_calls = 3 if targets == "all-linear" else 5
    assert rows.count(15) == 2 * layer_calls
    assert rows.count(3) == 3 * 2 * layer_calls + 4
    with torch.no_grad():
        expected = model(answer.sequences[:, :-1]).logits[:, -4:]
    torch.testing.assert_close(torch.stack(answer.logits, 1), expected, rtol=1e-4, atol=1e-4)


@row_kernels
@pytest.mark.parametrize("preset", ["fp32", "bf16-lora"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_one_call_for_several_ops_has_the_same_bits(family, preset, monkeypatch):
    model = adapted_model(preset, family=family)
    calls = []
    for name in ("project_normed_rows", "decode_mlp_half"):
        count_rows(monkeypatch, name, calls)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    logits = model.generate(PROMPT.repeat(3, 1), **options).logits
    # Phi-3 has one layer for q, k and v, and Gemma's MLP has a norm after it
    assert len(calls) == 3 * 2 * (2 if family == "llama" else 1)
    calls.clear()
    monkeypatch.setattr(forwards, "normed_input", lambda *_: None)
    monkeypatch.setattr(forwards, "mlp_half", lambda *_: None)
    expected = model.generate(PROMPT.repeat(3, 1), **options).logits
    assert calls == []
    assert all(map(torch.equal, logits, expected))


LAYER_CHANGES = {
    "another norm weight": lambda layer: setattr(
        layer.post_attention_layernorm,
        "weight",
        torch.nn.Parameter(layer.post_attention_layernorm.weight * 2),
    ),
    "another epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
    "a hook on a norm": lambda layer: layer.input_layernorm.register_forward_hook(
        lambda *call: call[2] * 2
    ),
    "a hook on an MLP": lambda layer: layer.mlp.register_forward_hook(lambda *call: call[2] * 2),
    "another activation": lambda layer: setattr(layer.mlp, "act_fn", torch.nn.ReLU()),
    "an adapter is disabled": lambda layer: layer.mlp.down_proj.enable_adapters(False),
}


@row_kernels
@pytest.mark.parametrize("change", LAYER_CHANGES)
def test_changes_of_a_layer_between_two_tokens_take_effect(change, monkeypatch):
    model = adapted_model("fp32").base_model.model.model
    layer = model.layers[0]
    x = torch.randn(3, 1, layer.mlp.down_proj.out_features)
    calls = []
    for name in ("project_normed_rows", "decode_mlp_half"):
        count_rows(monkeypatch, name, calls)
    tables = model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long))

    def output():
        return layer(x, position_embeddings=tables)

    with torch.no_grad():
        with keep_cast_adapters():
            before = output()
            assert calls == [3, 3]
            LAYER_CHANGES[change](layer)
            after = output()
        expected = output()
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(before, after)


def move_memory(parameter):
    """Gives a parameter other memory and the same values, as FSDP does between two forwards. The old
    memory contains NaN when it is freed.
    """
    values = parameter.detach().clone()
    storage = parameter.untyped_storage()
    with torch.no_grad():
        parameter.fill_(torch.nan)
        storage.resize_(2 * storage.size())
        parameter.copy_(values)


@row_kernels
@pytest.mark.parametrize(("family", "is_adapted"), [("qwen2", True), ("llama", False)])
def test_each_parameter_that_moves_between_two_tokens_is_read_again(family, is_adapted):
    """Without an adapter, the C++ function of the MLP read the norm's old memory: the samples of two
    processes with FSDP were cut short. Qwen 2 has biases.
    """
    if is_adapted:
        causal_lm = adapted_model("fp32", family=family).base_model.model
    else:
        causal_lm = tiny(family, attn_implementation="sdpa")
        optimize(causal_lm, PRESETS["fp32"])
    model = causal_lm.model
    layer = model.layers[0]
    x = torch.randn(3, 1, model.config.hidden_size)
    tables = model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long))
    changed = []
    with torch.no_grad(), use_fast_linears(causal_lm), keep_cast_adapters():
        expected = layer(x, position_embeddings=tables)
        for name, parameter in layer.named_parameters():
            move_memory(parameter)
            if not torch.equal(layer(x, position_embeddings=tables), expected):
                changed.append(name)
    assert not changed


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_rotary_tables_of_the_next_token_take_effect(changed):
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    angles = torch.randn(2, 1, 1, 8)
    before = [angles[0].cos(), angles[0].sin(), "runs"]
    after = list(before)
    after[changed] = (angles[1].cos(), angles[1].sin(), "values")[changed]

    def rotate(cos, sin, form):
        return forwards.rotate(q, k, cos, sin, "halves", form)

    expected = [rotate(*before), rotate(*after), rotate(*before)]
    with keep_cast_adapters():
        rotated = [rotate(*before), rotate(*after), rotate(*before)]
    for tensors, expected_tensors in zip(rotated, expected, strict=True):
        assert all(map(torch.equal, tensors, expected_tensors))
    assert not torch.equal(rotated[0][0], rotated[1][0])


@row_kernels
def test_fp32_weights_with_bf16_values_are_read_in_bf16_with_the_same_logits(monkeypatch):
    model = adapted_model("fp32")
    exact = [name for name, _ in model.named_parameters() if "lora" not in name]
    del exact[3]  # k_proj of the first layer
    for name in exact:
        parameter = model.get_parameter(name)
        parameter.data = parameter.bfloat16().float()
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    kernel = LORA_KERNELS.calls["narrow_weight"]
    copies = []

    def counted(*arguments):
        kernel(*arguments)
        copies.append(ctypes.c_int64.from_address(arguments[3]).value)

    monkeypatch.setitem(LORA_KERNELS.calls, "narrow_weight", counted)
    logits = model.generate(PROMPT.repeat(3, 1), **options).logits
    # seven weights in each of two layers, and the head
    assert sorted(copies) == [0] + [1] * 14
    copies.clear()
    for name in exact:
        model.get_parameter(name).data.mul_(2)
    assert not torch.equal(model.generate(PROMPT.repeat(3, 1), **options).logits[1], logits[1])
    for name in exact:
        model.get_parameter(name).data.mul_(0.5)
    again = model.generate(PROMPT.repeat(3, 1), **options).logits
    assert all(map(torch.equal, logits, again))
    assert copies.count(1) == 2 * 14
    copies.clear()
    monkeypatch.setattr("isotype.lora.products.usable_memory", lambda: 0)
    expected = model.generate(PROMPT.repeat(3, 1), **options).logits
    assert copies == []
    assert all(map(torch.equal, logits, expected))


def replace_weight(attention):
    attention.q_proj.base_layer.weight = torch.nn.Parameter(attention.q_proj.base_layer.weight * 2)


CHANGES = {
    "an adapter is disabled": lambda layer: layer.self_attn.k_proj.enable_adapters(False),
    "another weight": lambda layer: replace_weight(layer.self_attn),
    "the memory of a weight": lambda layer: setattr(
        layer.mlp.down_proj.base_layer.weight, "data", layer.mlp.down_proj.base_layer.weight * 2
    ),
    "another scale": lambda layer: layer.self_attn.v_proj.set_scale("default", 3.0),
    "a hook": lambda layer: layer.mlp.up_proj.register_forward_hook(lambda *call: call[2] * 2),
    "autocast": lambda layer: torch.set_autocast_enabled("cpu", True),
}


@row_kernels
@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_two_tokens_take_effect(change, monkeypatch):
    layer = adapted_model("fp32").base_model.model.model.layers[0]
    x = torch.randn(3, 1, layer.mlp.down_proj.out_features)
    rows = []
    count_rows(monkeypatch, "project_rows", rows)

    def outputs():
        attention = layer.self_attn
        return [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x), layer.mlp(x)]

    with torch.no_grad():
        try:
            with keep_cast_adapters():
                before = outputs()
                assert rows == [3, 3, 3]
                CHANGES[change](layer)
                after = outputs()
            expected = outputs()
        finally:
            torch.set_autocast_enabled("cpu", False)
    for got, exact in zip(after, expected, strict=True):
        assert got.dtype == exact.dtype
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    assert not all(map(torch.equal, before, after))


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


def replace_data(model, factor):
    """As an average of the weights takes their place for an evaluation."""
    for parameter in model.parameters():
        parameter.data = parameter.data * factor


def write_data(model, factor):
    """The parameter has the same address and version afterwards."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * factor)


def move_to_another_dtype(model, factor):
    model.double()
    write_data(model, factor)
    model.float()


def assign_state(model, factor):
    state = {name: tensor * factor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@row_kernels
@pytest.mark.parametrize("use_dora", [False, True])
def test_generation_sees_weights_that_changed_since_the_last_call(use_dora):
    model = adapted_model("fp32", use_dora=use_dora)
    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    before = model.generate(input_ids=PROMPT, **options).logits[1]
    for change in (replace_data, write_data, move_to_another_dtype, assign_state):
        change(model, 1 + 0.2 * torch.rand(1, generator=torch.Generator().manual_seed(2)))
        after = model.generate(input_ids=PROMPT, **options).logits[1]
        copied = copy.deepcopy(model)
        restore(copied)
        expected = copied.generate(input_ids=PROMPT, **options).logits[1]
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4, msg=change.__name__)
        assert (after - before).abs().max() > 1e-2
        before = after


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_generation_between_steps_of_a_wrapped_model_sees_the_new_weights(wrapper):
    model = adapted_model("fp32")
    inner = model.base_model.model
    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        if wrapper == "DDP":
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        else:
            for unit in (*inner.model.layers, inner):
                fully_shard(unit)
            wrapped = model
        before = model.generate(input_ids=PROMPT, **options).logits[0]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        wrapped(input_ids=PROMPT, labels=PROMPT).loss.backward()
        optimizer.step()
        after = model.generate(input_ids=PROMPT, **options).logits[0]
        torch.testing.assert_close(after, logits(model), rtol=1e-4, atol=1e-4)
        assert (after - before).abs().max() > 1e-2
    finally:
        distributed.destroy_process_group()


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
