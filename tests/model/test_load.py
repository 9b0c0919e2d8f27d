import json

import pytest
import torch

from isotype.config.schema import ModelSection
from isotype.errors import UsageError
from isotype.model.load import Source, base_source, check_vocabulary, load_base, load_tokenizer
from isotype.precision import PRESETS
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from isotype.training.memory.plan import LiveBytes
from tests.models import SIZES, rows, tiny

CPU = torch.device("cpu")


def load(source, preset="bf16-lora", *, trainable=False, attention="sdpa"):
    return load_base(source, PRESETS[preset], attention=attention, device=CPU, trainable=trainable)


@pytest.mark.parametrize(("preset", "trainable", "dtype"), [("bf16-lora", False, torch.bfloat16), ("bf16-mixed", True, torch.float32)])
def test_weights_are_loaded_in_the_declared_dtype(tmp_path, preset, trainable, dtype):
    tiny().save_pretrained(tmp_path)
    model = load(Source(str(tmp_path)), preset, trainable=trainable)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_are_quantised_one_after_the_other(tmp_path):
    """At no time is more than one matrix there in the dtype of its file. Bytes of live tensors are counted at every operator."""
    pytest.importorskip("bitsandbytes")
    model = tiny(hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    model.save_pretrained(tmp_path)
    sizes = [p.numel() for p in model.parameters()]
    with LiveBytes() as live:
        base = load(Source(str(tmp_path)), "nf4-lora")
    assert base.is_loaded_in_4bit
    assert sum(p.nbytes for p in base.parameters()) <= live.now  # the scales come on top
    # the matrix that is quantised in bf16 and fp32, and its own result; all of them in bf16 would take four times this bound
    bound = 8 * max(sizes)
    assert live.peak - live.now <= bound < 2 * sum(sizes) / 4


@pytest.mark.parametrize("attention", ["flash", "flex"])
def test_attention_that_needs_a_gpu_is_refused_on_a_cpu(tmp_path, attention):
    with pytest.raises(UsageError, match=r"on a GPU only(.|\n)*model.attention: auto"):
        load(Source(str(tmp_path)), attention=attention)


def test_a_random_model_is_built_once_and_loads_again(shared, tmp_path):
    tokenizer = load_tokenizer(ModelSection(name=str(shared / "data/stories260k")))
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("_id") and k != "vocab_size"}
    section = ModelSection(init="random", config={"model_type": "qwen2", **sizes}, tokenizer=str(shared / "data/stories260k"))
    source = base_source(section, tokenizer, folder=tmp_path / "base", seed=3, dtype="fp32")
    one, two = load(source, "fp32"), load(source, "fp32")
    assert one.config.vocab_size == len(tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    again = base_source(section, tokenizer, folder=tmp_path / "other", seed=3, dtype="fp32")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), load(again, "fp32").parameters()))


def test_a_tokenizer_larger_than_the_embeddings_is_refused(shared):
    tokenizer = load_tokenizer(ModelSection(name=str(shared / "data/stories260k")))
    with pytest.raises(UsageError, match=r"512 tokens and the model embeds 96"):
        check_vocabulary(tiny(), tokenizer)


def unknown_hub(tmp_path):
    return "someone/no-such-model", r"HF_HUB_OFFLINE is set|cannot be reached"


def missing_folder(tmp_path):
    return str(tmp_path / "nowhere"), "no such folder"


def mistyped_folder(tmp_path):
    tiny().save_pretrained(tmp_path / "base")
    return str(tmp_path / "bsae"), "no such folder, did you mean .*/base"


def empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty"), "no config.json there"


def broken_weights(tmp_path):
    tiny().save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not safetensors")
    return str(tmp_path / "broken"), "broken"


def missing_weight(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny().save_pretrained(tmp_path / "holes")
    file = tmp_path / "holes" / "model.safetensors"
    state = load_file(file)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, file, metadata={"format": "pt"})
    return str(tmp_path / "holes"), r"model\.layers\.1\.mlp\.up_proj\.weight first"


def impossible_generation(tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"max_new_tokens": -3}')
    return str(tmp_path / "model"), r"generation_config\.json: .*\n  fix       correct that file, or remove it"


def unknown_architecture(tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "no_such_architecture"}))
    return str(tmp_path / "odd"), "no_such_architecture"


@pytest.mark.parametrize(
    "make",
    [
        unknown_hub,
        missing_folder,
        mistyped_folder,
        empty_folder,
        broken_weights,
        missing_weight,
        impossible_generation,
        unknown_architecture,
    ],
)
def test_a_model_that_cannot_be_loaded_is_explained_in_a_line(tmp_path, make):
    name, message = make(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        load(Source(name))
    assert len(str(caught.value).splitlines()) <= 2
    assert make is missing_weight or caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(init="random", tokenizer="t"), "needs model.config"),
        (ModelSection(init="random", config={"hidden_size": 8}), "model_type is missing"),
        (ModelSection(init="random", config={"model_type": "lama"}), "lama"),
        (ModelSection(init="random", config="nowhere.json"), "nowhere.json"),
        (ModelSection(), r"model\.name: missing"),
    ],
)
def test_a_wrong_model_section_is_explained(section, message, tmp_path):
    class Tokenizer:
        pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

        def __len__(self):
            return 96

    with pytest.raises(UsageError, match=message):
        base_source(section, Tokenizer(), folder=tmp_path / "base", seed=0, dtype="fp32")


@pytest.mark.parametrize(("family", "word"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_auto_attention_picks_the_fastest_of_the_family_and_prints_it(tmp_path, family, word):
    from isotype.model.architecture import attention_line, attention_of

    tiny(family).save_pretrained(tmp_path)
    model = load(Source(str(tmp_path)), attention="auto")
    assert attention_of(model) == word
    assert attention_line(model, "auto").startswith(f"{word} (auto: ")
    assert attention_line(model, word) == word


WITHOUT_SDPA = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128},
    "gemma2": {"head_dim": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128},
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32},
    "xglm": {"ffn_dim": 48, "attention_heads": 4, "num_layers": 2, "d_model": 32},
}


@pytest.mark.parametrize("family", [f if f in ("gemma2", "mamba") else pytest.param(f, marks=pytest.mark.full) for f in WITHOUT_SDPA])
def test_a_family_without_sdpa_trains_by_default(tmp_path, family):
    from isotype.model.architecture import attention_of

    tiny(family, **WITHOUT_SDPA[family]).save_pretrained(tmp_path)
    model = load(Source(str(tmp_path)), "fp32", trainable=True, attention="auto")
    assert attention_of(model) == "eager"
    batch_loss_sum(model, collate(rows(2), pad_id=0), dtype="fp32").backward()
    with pytest.raises(UsageError, match="does not have it") as caught:
        load(Source(str(tmp_path)), attention="sdpa")
    assert caught.value.fix == "model.attention: auto"


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "bert is an encoder"), ("xlm", "xlm is an encoder"), ("modernbert", "modernbert is an encoder"),
        ("xlnet", r"xlnet learns .* permuted orders(?!.*is_decoder)"), ("vit", "vit is no language model"),
        ("clip", "clip is no language model"), ("t5", "encoder-decoder .* missing are"), ("bart", "encoder-decoder .* missing are"),
    ],
)  # fmt: skip
def test_what_does_not_predict_the_next_token_is_refused(tmp_path, family, message):
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=message):
        load(Source(str(tmp_path)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_classifier_is_refused_as_what_it_is(tmp_path, tied):
    from transformers import AutoModelForSequenceClassification

    config = tiny("qwen2", tie_word_embeddings=tied).config
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="Qwen2ForSequenceClassification answers with classes of a text"):
        load(Source(str(tmp_path)))
