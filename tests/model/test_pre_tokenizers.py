"""A tokenizer's splits of text beside those of llama.cpp's names."""

import json

import numpy as np
import pytest
from tokenizers import Regex, normalizers
from tokenizers import pre_tokenizers as steps

from isotype.errors import UsageError
from isotype.model.gguf import load_gguf_tokenizer
from tests.api import _WORD_PATTERN, SPLITTINGS, build_pre_tokenizer, tokenizer_keys
from tests.gguf_files import TEXTS, splitting

BYTES = {"add_prefix_space": False}
# as the published tokenizers spell them
PUBLISHED = {
    "gpt-2": steps.ByteLevel(**BYTES),
    "smollm": steps.Sequence([steps.Digits(individual_digits=True), steps.ByteLevel(**BYTES)]),
    "bloom": steps.Sequence(
        [
            steps.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated"),
            steps.ByteLevel(use_regex=False, **BYTES),
        ]
    ),
}
WRITTEN = {each.names[0]: each for each in SPLITTINGS if each.may_write_name}


def name_of(folder, pre_tokenizer=None, *, ignore_merges=False, normalizer=None, unreached=False):
    own = splitting()
    backend = own._tokenizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.model.ignore_merges = ignore_merges
    own.save_pretrained(folder)
    if unreached:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        vocabulary["zqx"] = len(vocabulary)
        file.write_text(json.dumps(content), encoding="utf-8")
    return dict(tokenizer_keys(folder, 320, "llama.cpp's command"))["add_tokenizer_pre"]


def test_each_splitting_is_found_by_its_pieces(tmp_path, subtests):
    for name, each in WRITTEN.items():
        with subtests.test(name):
            found = name_of(
                tmp_path,
                build_pre_tokenizer(each),
                ignore_merges=each.ignores_merges,
                unreached=True,
            )
            assert found == name
    for name, published in PUBLISHED.items():
        with subtests.test(f"{name} as it is published"):
            assert name_of(tmp_path, published) == name


def test_a_token_beyond_the_merges_decides_between_names(tmp_path):
    """llama.cpp takes a whole piece that is a token under llama-bpe, and merges under smaug-bpe."""
    words = build_pre_tokenizer(WRITTEN["llama-bpe"])
    assert name_of(tmp_path, words) == "llama-bpe", "every token is reached: both are right"
    assert name_of(tmp_path, words, unreached=True) == "smaug-bpe"
    assert name_of(tmp_path, words, unreached=True, ignore_merges=True) == "llama-bpe"


def test_text_that_llama_cpp_would_split_otherwise_is_refused(tmp_path, subtests):
    cases = {
        "a space before the text": {"pre_tokenizer": steps.ByteLevel(add_prefix_space=True)},
        "its own words": {
            "pre_tokenizer": steps.Sequence(
                [steps.Split(Regex(r"\s+"), "isolated"), steps.ByteLevel(use_regex=False, **BYTES)]
            )
        },
        "lower case": {"normalizer": normalizers.Lowercase()},
        "a token that the merges do not reach": {"ignore_merges": True, "unreached": True},
    }
    for name, changes in cases.items():
        with subtests.test(name), pytest.raises(UsageError, match="splits no text as") as refused:
            name_of(tmp_path, **changes)
        assert refused.value.fix == "llama.cpp's command"
    assert name_of(tmp_path, normalizer=normalizers.NFC()) == "qwen2"


def test_a_file_is_split_as_its_name_says(tmp_path, subtests):
    gguf = pytest.importorskip("gguf")
    for each in SPLITTINGS:
        own = splitting()
        own._tokenizer.pre_tokenizer = build_pre_tokenizer(each)
        splitting(_WORD_PATTERN % "").save_pretrained(tmp_path)
        keys = dict(tokenizer_keys(tmp_path, 320, ""))
        for name in each.names:
            file = tmp_path / f"{name}.gguf"
            writer = gguf.GGUFWriter(str(file), "llama")
            writer.add_block_count(1)
            for method, value in (keys | {"add_tokenizer_pre": name}).items():
                getattr(writer, method)(value)
            for tensor in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"):
                writer.add_tensor(tensor, np.zeros((1, 32), np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            with subtests.test(name):
                read = load_gguf_tokenizer(file)
                assert read.backend_tokenizer.model.ignore_merges == each.ignores_merges
                texts = [*TEXTS, "iPhoneX'LL 123456, a.b\n\n  ÄpfelÖl"]
                assert [read(t)["input_ids"] for t in texts] == [own(t)["input_ids"] for t in texts]
