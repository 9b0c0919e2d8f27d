"""Values of config.json and of GGUF headers: outside their ranges they are refused in one line, before
a model is built.
"""

import json
import shutil
import struct

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isotype.config.schema import ModelSection
from isotype.errors import UsageError
from isotype.model.load import Source, load_architecture, load_base
from isotype.precision.precision import PRESETS
from tests.api import check_model_config, read_architecture
from tests.flipped_bytes import check_flipped_bytes
from tests.models import tiny

CPU = torch.device("cpu")
DAMAGES = [
    ("num_attention_heads", 0, "0, expected an integer from 1"),
    ("hidden_size", "x", "'x', expected an integer from 1"),
    ("hidden_size", 10**9, "1000000000, expected an integer from 1 to 262,144"),
    ("hidden_size", [32], r"\[32\], expected an integer"),
    ("num_hidden_layers", 1e6, "1000000.0, expected an integer from 1 to 2,048"),
    ("num_hidden_layers", True, "True, expected an integer"),
    ("rms_norm_eps", float("nan"), "nan, expected a number from 0 to 1"),
    ("attention_dropout", 5.0, "5.0, expected a number from 0 to 1"),
    ("num_key_value_heads", 3, "3, expected a divisor of the 4 attention heads"),
    ("rope_parameters", {"rope_type": "linear", "factor": 0}, "0, expected a number from"),
    ("text_config", {"vocab_size": -1}, "-1, expected an integer"),
    ("never_heard_of", float("nan"), "NaN"),
    ("architectures", 5, "5, expected a list of texts"),
    ("hidden_act", ["silu"], r"\['silu'\], expected a text"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny("llama", num_hidden_layers=1).save_pretrained(folder)
    return folder


def load(folder):
    load_architecture(ModelSection(name=str(folder)), None)
    model = load_base(
        Source(str(folder)), PRESETS["fp32"], attention="sdpa", device=CPU, trainable=True
    )
    with torch.no_grad():
        model(torch.arange(8)[None])


@pytest.mark.parametrize(("key", "value", "message"), DAMAGES)
def test_a_value_outside_its_range_is_named(base, tmp_path, key, value, message):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    inner = next(iter(value)) if isinstance(value, dict) and key == "text_config" else None
    inner = "factor" if key == "rope_parameters" else inner
    path = f"{key}.{inner}" if inner else key
    with pytest.raises(UsageError, match=rf"config\.json: {path}: {message}") as refusal:
        load(folder)
    assert "\n" not in refusal.value.message


def test_a_long_value_is_not_quoted_whole(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pretraining_tp": ["x" * 9000]}))
    with pytest.raises(UsageError) as refusal:
        load(folder)
    assert len(refusal.value.message) < 2000


def test_settings_of_a_gigabyte_are_not_read(base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(UsageError, match=r"config\.json has 1,073,741,824 bytes, expected at most"):
        load(folder)


@pytest.mark.full
def test_the_defaults_of_every_family_are_inside():
    checked = 0
    for family in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[family]().to_dict()
        except Exception:  # a family without defaults
            continue
        if isinstance(config.get("num_hidden_layers"), dict):  # LXMERT counts layers per part
            continue
        check_model_config(config, family)
        checked += 1
    assert checked > 300


def fuzz_config(base, folder, count):
    if not folder.exists():
        shutil.copytree(base, folder)
    content = (base / "config.json").read_bytes()
    check_flipped_bytes(
        content, count, (folder / "config.json").write_bytes, [lambda: load(folder)]
    )


def test_flipped_bytes_of_config_json_are_refused_in_one_line(base, tmp_path):
    fuzz_config(base, tmp_path / "model", 25)


@pytest.mark.full
def test_many_flipped_bytes_of_config_json_are_refused_in_one_line(base, tmp_path):
    fuzz_config(base, tmp_path / "model", 3000)


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory):
    pytest.importorskip("gguf")
    from tests.gguf_files import splitting, write

    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = splitting()
    tokenizer.save_pretrained(folder / "tokenizer")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 320, "num_hidden_layers": 1}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    write(tiny("llama", **sizes, **ids), folder / "tokenizer", folder / "model.gguf", "Q8_0")
    return folder / "model.gguf"


def load_gguf(file):
    from isotype import load_packed

    load_architecture(ModelSection(name=str(file)), None)
    model = load_packed(str(file))
    with torch.no_grad():
        model(torch.arange(8)[None])


def replace_number(content: bytes, key: str, number: bytes) -> bytes:
    """The header with another number of the same length for a key."""
    position = content.index(key.encode()) + len(key) + 4  # behind the kind of the value
    return content[:position] + number + content[position + len(number) :]


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [
        ("llama.attention.head_count", 0, "head_count: 0, expected an integer from 1"),
        ("llama.embedding_length", 10**9, "embedding_length: 1000000000, expected an integer"),
        ("llama.block_count", 10**6, "block_count: 1000000, expected an integer"),
        ("llama.block_count", 700, "block_count: 700, expected the number of blocks with tensors, 1"),
        ("llama.attention.head_count_kv", 3, "head_count_kv: 3, expected a divisor"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "epsilon: nan, expected a number"),
    ],
)  # fmt: skip
def test_a_number_of_a_gguf_header_outside_its_range_is_named(
    gguf_model, tmp_path, key, number, message
):
    packed = struct.pack("<f" if isinstance(number, float) else "<I", number)
    file = tmp_path / "model.gguf"
    file.write_bytes(replace_number(gguf_model.read_bytes(), key, packed))
    with pytest.raises(UsageError, match=message) as refusal:
        load_gguf(file)
    assert str(file) in refusal.value.message
    assert "\n" not in refusal.value.message


def header(*fields: bytes, tensors: int = 0) -> bytes:
    return struct.pack("<IIQQ", 0x46554747, 3, tensors, len(fields)) + b"".join(fields)


def field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([field("general.architecture", 8, text("llama"))], "tensor token_embd.weight is missing"),
        ([field("x", 9, struct.pack("<IQ", 9, 1))], "a list of lists"),
        ([field("x", 9, struct.pack("<IQ", 8, 1 << 60))], "a list of 1,152,921,504,606,846,976 texts"),
        ([field("x\n\x1b[31m", 4, struct.pack("<I", 7))], "control characters, 'x.n.x1b"),
        ([field("general.architecture", 8, text("a\nb"))], r"general.architecture: 'a.nb'"),
        ([field("general.alignment", 8, text("x"))], "general.alignment: 'x'"),
        ([field("general.architecture", 4, struct.pack("<I", 7))], "GGUF files of 7 are not read"),
    ],
)  # fmt: skip
def test_a_gguf_header_without_a_model_is_refused(tmp_path, fields, message):
    file = tmp_path / "model.gguf"
    file.write_bytes(header(*fields) + bytes(64))
    with pytest.raises(UsageError, match=message) as refusal:
        read_architecture(str(file))
    assert "\n" not in refusal.value.message


def fuzz_gguf(gguf_model, file, count):
    content = gguf_model.read_bytes()
    head = content.index(b"token_embd.weight") + 2000  # settings, tokens and descriptions

    def write(changed_head):
        file.write_bytes(changed_head + content[head:])

    check_flipped_bytes(content[:head], count, write, [lambda: load_gguf(file)])


def test_flipped_bytes_of_a_gguf_header_are_refused_in_one_line(gguf_model, tmp_path):
    fuzz_gguf(gguf_model, tmp_path / "model.gguf", 40)


@pytest.mark.full
def test_many_flipped_bytes_of_a_gguf_header_are_refused_in_one_line(gguf_model, tmp_path):
    fuzz_gguf(gguf_model, tmp_path / "model.gguf", 3000)
