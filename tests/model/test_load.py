"""A base as it is loaded: dtypes, quantisation weight by weight, attention, buffers; and models
that cannot be loaded.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from isotype.config.schema import RunConfig
from isotype.errors import UsageError
from isotype.model.adapter import save_adapter
from isotype.model.build import build_model
from isotype.model.load import Source, load_base, load_tokenizer
from isotype.precision import PRESETS
from isotype.precision.apply import is_quantised
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from isotype.tasks.language.outline import outline_model
from isotype.training.memory.plan import LiveBytes
from tests.api import attention_setting, describe_attention
from tests.api import tasks_language_result_load_result as load_result
from tests.models import rows, tiny

CPU = torch.device("cpu")


def load(source, preset="bf16-lora", *, trainable=False, attention="sdpa", notes=None):
    return load_base(
        source, PRESETS[preset], attention=attention, device=CPU, trainable=trainable, notes=notes
    )


@pytest.mark.parametrize(
    ("preset", "trainable", "dtype"),
    [("bf16-lora", False, torch.bfloat16), ("bf16-mixed", True, torch.float32)],
)
def test_weights_are_loaded_in_the_declared_dtype(tmp_path, preset, trainable, dtype):
    tiny().save_pretrained(tmp_path)
    model = load(Source(str(tmp_path)), preset, trainable=trainable)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_are_quantised_one_after_the_other(tmp_path):
    """At no time is more than one matrix there in the dtype of its file. Bytes of live tensors are
    counted at every operator.
    """
    pytest.importorskip("bitsandbytes")
    model = tiny(hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    model.save_pretrained(tmp_path)
    sizes = [p.numel() for p in model.parameters()]
    with LiveBytes() as live:
        base = load(Source(str(tmp_path)), "nf4-lora")
    assert base.is_loaded_in_4bit
    assert sum(p.nbytes for p in base.parameters()) <= live.current_bytes  # the scales come on top
    # the matrix that is quantised in bf16 and fp32, and its own result; all of them in bf16 would
    # take four times this bound
    bound = 8 * max(sizes)
    assert live.peak - live.current_bytes <= bound < 2 * sum(sizes) / 4


def without_a_weight(folder):
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def written(name, content):
    return lambda base: (base / name).write_text(content)


# what is asked for; what is done to the folder `base` of a whole model; what is said
CANNOT_BE_LOADED = (
    ("someone/no-such-model", None, r"HF_HUB_OFFLINE is set|cannot be reached"),
    ("{here}/nowhere", None, "no such folder"),
    ("{here}/bsae", None, "no such folder, did you mean .*/base"),
    ("{here}", None, "no config.json there"),
    ("{here}/base", written("model.safetensors", "not safetensors"), "base"),
    ("{here}/base", without_a_weight, r"model\.layers\.1\.mlp\.up_proj\.weight first"),
    (
        "{here}/base",
        written("generation_config.json", '{"max_new_tokens": -3}'),
        r"generation_config\.json: .*\n  fix       correct that",
    ),
    (
        "{here}/base",
        written("config.json", '{"model_type": "no_such_architecture"}'),
        "no_such_architecture",
    ),
)


def test_a_model_that_cannot_be_loaded_is_explained_in_a_line(tmp_path, subtests):
    for name, change, message in CANNOT_BE_LOADED:
        tiny().save_pretrained(tmp_path / "base")
        if change:
            change(tmp_path / "base")
        with subtests.test(message), pytest.raises(UsageError, match=message) as caught:
            load(Source(name.format(here=tmp_path)))
        assert len(str(caught.value).splitlines()) <= 2


def test_a_family_without_sdpa_trains_by_default_and_the_header_says_so(tmp_path):
    tiny("gemma2", head_dim=8).save_pretrained(tmp_path)
    model = load(Source(str(tmp_path)), "fp32", trainable=True, attention="auto")
    assert attention_setting(model) == "eager"
    assert describe_attention(model, "auto").startswith("eager (auto: ")
    assert describe_attention(tiny(), "auto").startswith("sdpa (auto: ")
    batch_loss_sum(model, collate(rows(2), pad_id=0), dtype="fp32").backward()
    with pytest.raises(UsageError, match="does not have it") as caught:
        load(Source(str(tmp_path)), attention="sdpa")
    assert caught.value.fix == "model.attention: auto"


def test_what_does_not_predict_the_next_token_is_refused(tmp_path, subtests):
    from transformers import AutoModelForSequenceClassification

    for family, message in (
        ("bert", "bert is an encoder"), ("xlnet", "xlnet does not predict the next token"), ("vit", "vit is no language model"),
        ("clip", "clip is no language model"), ("t5", "encoder-decoder .* missing are"),
    ):  # fmt: skip
        with subtests.test(family):
            AutoConfig.for_model(family).save_pretrained(tmp_path)
            with pytest.raises(UsageError, match=message):
                load(Source(str(tmp_path)))
    tied = tiny("qwen2", tie_word_embeddings=True)
    AutoModelForSequenceClassification.from_config(tied.config).save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match="Qwen2ForSequenceClassification answers with classes of a text"
    ):
        load(Source(str(tmp_path)))
    tied.model.save_pretrained(tmp_path)
    with pytest.raises(
        UsageError,
        match="Qwen2Model is a model without a head for tokens, as embedding models are saved",
    ):
        load(Source(str(tmp_path)))


# --- What an adapter trains in full is not quantised with the rest of the base, whatever kind of
# module it is.


NF4 = PRESETS["nf4-lora"]


def test_what_is_trained_in_full_is_not_quantised(workshop, tmp_path):
    pytest.importorskip("bitsandbytes")
    tokenizer = load_tokenizer(
        RunConfig.model_validate({"model": {"name": str(workshop.base)}}).model
    )
    base = tiny(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128)
    base.save_pretrained(tmp_path / "base")
    source = Source(str(tmp_path / "base"))
    config = RunConfig.model_validate({
        "model": {"name": source.name}, "adapter": {"r": 2, "targets": ["q_proj"], "modules_to_save": ["down_proj", "1.mlp.up_proj"]},
    })  # fmt: skip
    planned = outline_model(base.config, config, NF4, device_type="cpu")
    model, _ = build_model(config, NF4, source, tokenizer, CPU)
    for made in (planned.model, model):
        assert sum(is_quantised(p) for p in made.parameters()) == 14 - 3
    assert planned.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)

    ids = torch.arange(3, 19)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    in_full = {name: p for name, p in model.named_parameters() if ".modules_to_save." in name}
    assert in_full
    assert all(p.dtype == torch.float32 and p.grad is not None for p in in_full.values())
    with torch.no_grad():
        for parameter in in_full.values():
            parameter.add_(0.01)
        said = model.eval()(input_ids=ids).logits + 0
    save_adapter(model, tmp_path / "adapter", NF4)
    again = load_result(tmp_path / "adapter", source, NF4, config=config.model, device=CPU).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits + 0, said)


# --- Buffers that no file holds have the constructor's values, and rotary tables do not depend on
# earlier batches.


class OwnConfig(LlamaConfig):
    model_type = "own_buffers"


class Own(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        made = nn.Module()
        made.register_buffer("angles", torch.arange(4).float() / 3, persistent=False)
        made.register_buffer("numbers", torch.arange(5), persistent=False)
        made.register_buffer("below", torch.ones(3, 3).tril().bool(), persistent=False)
        made.register_buffer("kept", torch.full((2,), 7.0))
        self.own = made


@pytest.fixture
def with_buffers(tmp_path):
    torch.manual_seed(0)
    config = OwnConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    Own(config).save_pretrained(tmp_path)
    AutoModelForCausalLM.register(OwnConfig, Own, exist_ok=True)
    AutoConfig.register("own_buffers", OwnConfig, exist_ok=True)
    return tmp_path


def test_buffers_have_the_constructors_values(with_buffers):
    notes = []
    own = load(
        Source(str(with_buffers)), "bf16-pure", trainable=True, attention="eager", notes=notes
    ).own
    assert torch.equal(own.angles, torch.arange(4).float() / 3)
    assert torch.equal(own.numbers, torch.arange(5))
    assert torch.equal(own.below, torch.ones(3, 3).tril().bool())
    assert torch.equal(own.kept.float(), torch.full((2,), 7.0))
    assert notes[0].startswith("3 buffers that no file holds, own.angles first")
    assert not torch.are_deterministic_algorithms_enabled()
