"""Loading: every mistake in one line with file, line and key; values typed; sources kept; nothing
but UsageError, whatever the text.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isotype.config.load import load
from isotype.errors import UsageError
from tests.api import KEY_ALIASES, key_schemas
from tests.commands import invoke

QUIET = settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def write(tmp_path):
    def _write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path

    return _write


def complaints(*given, **options) -> list[str]:
    with pytest.raises(UsageError) as refused:
        load(*given, **options)
    assert refused.value.exit_status == 2
    return str(refused.value).replace(str(given[0]), "run.yaml").splitlines()


def test_values_and_where_they_came_from(write):
    path = write("model:\n  name: here\ntrain:\n  learning_rate: 1e-4\n  steps: 20\n")
    loaded = load(
        path,
        ["train.steps=30", "data.train=[a.jsonl, b.jsonl]"],
        {"run.folder": "out", "data.eval": None},
    )
    assert loaded.config.train.learning_rate == 1e-4
    assert loaded.config.train.steps == 30
    assert loaded.config.data.train == ["a.jsonl", "b.jsonl"]
    assert loaded.sources["model.name"] == f"{path}:2"
    assert loaded.sources["train.learning_rate"] == f"{path}:4"
    assert loaded.sources["train.steps"] == loaded.sources["run.folder"] == "command line"
    assert loaded.sources["train.seed"] == loaded.sources["data.eval"] == "default"
    assert set(loaded.sources) == set(key_schemas())
    assert loaded.text.startswith("model:\n  name: here\n")
    assert "# command line: train.steps=30" in loaded.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "train:\n  lerning_rate: 1",
            "run.yaml:2 train.lerning_rate: unknown key, did you mean train.learning_rate?",
        ),
        ("train:\n  r: 8", "run.yaml:2 train.r: unknown key, did you mean adapter.r?"),
        ("trian:\n  steps: 8", "run.yaml:1 trian: unknown section, did you mean train?"),
        ("steps: 8", "run.yaml:1 steps: unknown section, did you mean train.steps?"),
        (
            "train:\n  batch_size: many",
            "run.yaml:2 train.batch_size: expected a whole number of at least 1, got many",
        ),
        (
            "train:\n  steps: true",
            "run.yaml:2 train.steps: expected a whole number of at least 1 (or nothing), got true",
        ),
        ("train:\n  epochs: .inf", "run.yaml:2 train.epochs: expected a number above 0, got .inf"),
        (
            "adapter:\n  dropout: 1",
            "run.yaml:2 adapter.dropout: expected a number of at least 0 and below 1, got 1",
        ),
        (
            "model:\n  attention: fast",
            "run.yaml:2 model.attention: expected one of auto sdpa eager flash flex, got fast",
        ),
        (
            "precision:\n  grads: torch.float",
            "run.yaml:2 precision.grads: expected one of fp32 bf16 fp16 (or nothing), got torch.float, did you mean fp32?",
        ),
        (
            "precision:\n  base: BFloat16",
            "run.yaml:2 precision.base: expected one of fp32 bf16 fp16 nf4 fp8 int8 int4 nvfp4 mxfp4 gguf (or nothing), got BFloat16, "
            "did you mean bf16?",
        ),
        (
            "train:\n  schedule: cosin",
            "run.yaml:2 train.schedule: expected one of cosine linear constant wsd, got cosin, did you mean cosine?",
        ),
        (
            "model:\n  revision: 1.0",
            "run.yaml:2 model.revision: expected text (or nothing), got 1.0; write it in quotes",
        ),
        (
            "data:\n  train: [1, 2]",
            "run.yaml:2 data.train: expected text or a list of text or mappings (or nothing), got [1, 2]",
        ),
        ("train:\n  steps: 1\n  steps: 2", "run.yaml:3 train.steps: given twice, first in line 2"),
        ("train:\n  steps: 1\ntrain:\n  seed: 2", "run.yaml:3 train: given twice, first in line 1"),
        ("train: 7", "run.yaml:1 train: expected keys below it, got 7"),
        (
            "model: org/name",
            "run.yaml:1 model: expected keys below it, got org/name, did you mean model.name: org/name?",
        ),
        (
            "finetuning_type: lora",
            "run.yaml:1 finetuning_type: unknown section; here it is adapter.kind; write adapter.kind: lora",
        ),
        (
            "--learning_rate: 1e-4",
            "run.yaml:1 --learning_rate: unknown section, did you mean train.learning_rate?",
        ),
        (
            "train:\n  checkpoint_every: 3",
            "run.yaml:2 train.checkpoint_every: unknown key; here it is run.save_every; write run.save_every: 3",
        ),
        ("- a\n- b", "run.yaml:1: expected sections (model:, data:, train:, ...)"),
        (
            "# nothing\n",
            "run.yaml: empty; expected sections "
            "(model, data, images, diffusion, adapter, precision, preference, distil, train, run, parallel)",
        ),
        ("model:\n  config: {a: 1, a: 2}", "run.yaml:2: a is given twice"),
        ("model:\n  config: &x [*x]", "run.yaml"),
        ("train:\n\tsteps: 1", "run.yaml:2: broken YAML: "),
        ("model: [a", "run.yaml:1: broken YAML: "),
        ("a: 1\n---\nb: 2", "run.yaml:2: broken YAML: "),
        (
            "train:\n  seed: !!python/object:os.system {}",
            "run.yaml:2 train.seed: expected a whole number, got {}",
        ),
    ],
)
def test_each_mistake_is_one_line_with_its_place(write, text, said):
    lines = complaints(write(text))
    assert len(lines) == 1
    assert lines[0].startswith(said)


def test_all_mistakes_are_reported_at_once_in_order(write):
    path = write("train:\n  steps: no\n  lr: 3\nmodel:\n  naem: x\n")
    lines = complaints(path, ["train.foo=1", "oops", "adapter.r=0"])
    assert [line.split(": ")[0] for line in lines] == [
        "run.yaml:2 train.steps", "run.yaml:3 train.lr", "run.yaml:5 model.naem",
        "command line train.foo", "command line oops", "command line adapter.r",
    ]  # fmt: skip


def test_files_that_are_no_configuration_are_refused(tmp_path, write):
    assert complaints(tmp_path / "no.yaml")[0].endswith("no such file; isotype init writes one")
    write("train: {}")
    assert complaints(tmp_path / "other.yaml")[0].endswith("no such file; isotype init writes one")
    assert complaints(tmp_path / "runn.yaml")[0].endswith(
        "did you mean " + str(tmp_path / "run.yaml") + "?"
    )
    assert complaints(tmp_path)[0] == "run.yaml: is a folder, expected a YAML file"
    (tmp_path / "resolved.yaml").write_text("train: {}")
    assert complaints(tmp_path)[1].split()[:4] == ["fix", "isotype", "train", "--resume"]
    (tmp_path / "config.json").write_text("{}")
    assert complaints(tmp_path)[1].split()[:2] == ["fix", "--model"]
    (tmp_path / "chats.jsonl").write_text('{"text": "a"}\n')
    assert complaints(tmp_path / "chats.jsonl") == [
        "run.yaml: expected a YAML file",
        "  fix       --data run.yaml",
    ]
    (tmp_path / "binary.yaml").write_bytes(b"\x80\x02\xff\xfe")
    assert complaints(tmp_path / "binary.yaml")[0].endswith(
        "not text (UTF-8): expected a YAML file"
    )
    (tmp_path / "nul.yaml").write_bytes(b"train:\n  seed: 1\x00\n")
    assert "broken YAML" in complaints(tmp_path / "nul.yaml")[0]
    with (tmp_path / "big.yaml").open("wb") as big:
        big.truncate(5 << 20)
    assert complaints(tmp_path / "big.yaml")[0].endswith("too large for a configuration")


def test_yaml_words_that_mean_other_things_in_yaml_1_1(write):
    loaded = load(
        write(
            "adapter:\n  kind: none\nrun:\n  samples: [no, on, 'null']\ntrain:\n  learning_rate: 2e-5\n  deterministic: yes\n"
        )
    )
    assert loaded.config.adapter.kind == "none"
    assert loaded.config.run.samples == ["no", "on", "null"]
    assert loaded.config.train.learning_rate == 2e-5
    assert loaded.config.train.deterministic is True


def test_keys_of_a_mapping_can_be_overridden_one_by_one():
    loaded = load(
        None, ["model.config.model_type=llama", "model.config.hidden_size=64", "model.init=random"]
    )
    assert loaded.config.model.config == {"model_type": "llama", "hidden_size": 64}
    assert complaints(None, ["model.config=folder", "model.config.hidden_size=64"]) == [
        "command line model.config.hidden_size: model.config is folder, not a mapping (command line)"
    ]


def test_a_preset_wins_over_the_file_for_precision_only(write):
    path = write("precision:\n  preset: fp32\ntrain:\n  learning_rate: 1e-3\n")
    loaded = load(path, preset="full-bf16")
    assert loaded.config.precision.preset == "bf16-pure"
    assert loaded.config.adapter.kind == "none"
    assert loaded.config.train.learning_rate == 1e-3
    assert (
        loaded.sources["precision.preset"] == loaded.sources["adapter.kind"] == "--preset full-bf16"
    )
    assert complaints(None, preset="bf17") == ["--preset bf17: unknown; one of lora qlora full full-bf16 auto fp32 bf16-mixed bf16-lora "
                                               "nf4-lora bf16-pure fp16-mixed"]  # fmt: skip


def test_epochs_of_the_command_line_replace_the_steps_of_the_file(write):
    path = write("train:\n  steps: 30\n")
    loaded = load(path, ["train.epochs=2"])
    assert (loaded.config.train.steps, loaded.config.train.epochs) == (None, 2.0)
    assert loaded.sources["train.steps"] == "command line"
    assert load(path, ["train.epochs=2", "train.steps=9"]).config.train.steps == 9
    assert load(path).config.train.steps == 30


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


@QUIET
@given(
    st.dictionaries(st.sampled_from(list(key_schemas())), VALUES, max_size=5),
    st.lists(st.text(max_size=20), max_size=2),
)
def test_any_value_of_any_key_is_taken_or_refused(flags, overrides):
    try:
        load(None, overrides, flags)
    except UsageError as error:
        assert str(error)


def test_checkpointing_takes_other_tools_words_and_those_of_old_runs(write):
    for word, means in (("true", "layers"), ("false", "none"), ("auto", "auto")):
        assert (
            load(
                write(f"train:\n  gradient_checkpointing: {word}\n")
            ).config.train.gradient_checkpointing
            == means
        )
        assert (
            load(None, [f"train.gradient_checkpointing={word}"]).config.train.gradient_checkpointing
            == means
        )


def test_the_number_of_complaints_shown_is_bounded(write):
    said = complaints(write("train:\n" + "".join(f"  zzz{i}{'y' * 900}: 1\n" for i in range(60))))
    assert (len(said), said[-1]) == (41, "and 20 more")
    assert max(map(len, said)) <= 600


def test_other_tools_names_are_known(write):
    path = write("train:\n  lr: 1\n  output_dir: x\nlora_alpha: 3\n")
    assert complaints(path) == [
        "run.yaml:2 train.lr: unknown key; here it is train.learning_rate; write train.learning_rate: 1",
        "run.yaml:3 train.output_dir: unknown key; here it is run.folder; write run.folder: x",
        "run.yaml:4 lora_alpha: unknown section; here it is adapter.alpha; write adapter.alpha: 3",
    ]
    for foreign, ours in (
        ("optim.kind", "train.optimizer"),
        ("optimizer.type", "train.optimizer"),
        ("lr_scheduler.name", "train.schedule"),
    ):
        with pytest.raises(UsageError, match=f"{foreign}: unknown key; here it is {ours}"):
            load(None, [f"{foreign}=x"])
    assert set(KEY_ALIASES.values()) <= set(key_schemas())
    assert not {key.partition(".")[2] for key in key_schemas()} & set(KEY_ALIASES)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("precision=bf16", "got precision=bf16, did you mean precision.preset=bf16-lora with an"),
        (
            "precision.preset=bf16",
            "did you mean bf16-lora with an adapter, or bf16-mixed for every",
        ),
        ("torch_dtype=bfloat16", "here it is precision.base; write precision.base=bf16"),
        ("model.dtype=float16", "here it is precision.base; write precision.base=fp16"),
        ("bf16=true", "write precision.preset=bf16-lora with an adapter, or bf16-mixed for every"),
        ("train.fp16=false", "write precision.preset=auto (the default, by the device), or fp32"),
        ("mixed_precision=no", "here it is precision.preset; write precision.preset=fp32"),
        ("load_in_4bit=true", "here it is precision.preset; write precision.preset=nf4-lora"),
        ("lr=1e-4", "here it is train.learning_rate; write train.learning_rate=0.0001"),
        ("fsdp=full_shard", "here it is parallel.kind; write parallel.kind=shard"),
        ("optim=adamw_torch", "here it is train.optimizer, which takes one of adamw adamw8bit"),
    ],
)
def test_a_setting_of_another_tool_names_the_key_and_the_value_to_write(write, setting, message):
    with pytest.raises(UsageError) as caught:
        load(None, [setting])
    assert message in str(caught.value)
    key, _, value = setting.partition("=")
    section, _, name = key.partition(".")
    text = f"{section}:\n  {name}: {value}\n" if name else f"{section}: {value}\n"
    with pytest.raises(UsageError) as caught:
        load(write(text))
    in_file = message.replace("precision=bf16", "bf16")
    for known in ("preset", "base", "learning_rate", "kind"):
        in_file = in_file.replace(f".{known}=", f".{known}: ")
    assert in_file in str(caught.value)


def test_a_preset_that_names_a_dtype_names_the_presets():
    with pytest.raises(UsageError) as caught:
        load(None, preset="bf16")
    assert caught.value.fix == "--preset bf16-lora with an adapter, or bf16-mixed for every weight"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_refused_with_the_way_to_save_it(tmp_path, encoding):
    path = tmp_path / "run.yaml"
    path.write_bytes("model:\n  name: base\n".encode(encoding))
    with pytest.raises(UsageError, match=r"run\.yaml: is in UTF-16") as caught:
        load(path)
    assert f"iconv -f UTF-16 -t UTF-8 {path} > NEW.yaml" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  name: “base”", "model.name: “base” has typographic quotes"),
        ("data:\n  train: [a.jsonl, ‘b.jsonl’]", "write data.train: b.jsonl"),
        (
            'model:\n  name: "C:\\Users\\me\\base"',
            'run.yaml:2: name: "C:\\Users\\me\\base": in double quotes a backslash begins an escape;'
            " write name: 'C:\\Users\\me\\base' or name: C:/Users/me/base",
        ),
        (
            'data:\n  train: "data\\new\\train.jsonl"',
            'run.yaml:2 data.train: "data\\new\\train.jsonl": in double quotes a backslash begins an'
            " escape; write data.train: 'data\\new\\train.jsonl' or data.train: data/new/train.jsonl",
        ),
    ],
)
def test_a_name_with_quotes_of_a_word_processor_or_windows_names_the_way_to_write(
    write, text, message
):
    with pytest.raises(UsageError) as caught:
        load(write(text))
    assert message in str(caught.value)


def test_typographic_quotes_in_text_and_in_names_of_files_are_kept(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("“rows”").touch()
    loaded = load(write("data:\n  train: “rows”\nrun:\n  samples: [“Hello” she said, “Hi”]\n"))
    assert loaded.config.data.train == "“rows”"
    assert loaded.config.run.samples == ["“Hello” she said", "“Hi”"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "dpo:\n  beta: 0.1",
            "run.yaml:1 dpo: train.objective names what is learnt, and the section preference",
        ),
        (
            "train:\n  deepspeed: ds.json",
            "run.yaml:2 train.deepspeed: sharding by DeepSpeed is not offered; ",
        ),
        (
            "parallel:\n  kind: tensor",
            "run.yaml:2 parallel.kind: expected one of auto replicate shard hybrid, got tensor; tensor parallelism",
        ),
        (
            "parallel:\n  context_parallel_size: 2",
            "run.yaml:2 parallel.context_parallel_size: context parallelism is not offered yet; ",
        ),
        (
            "parallel:\n  param_dtype: bf16",
            "run.yaml:2 parallel.param_dtype: not offered: it rounds adapters, norms and their gradients; ",
        ),
        (
            "parallel:\n  reduce_dtype: fp32",
            "run.yaml:2 parallel.reduce_dtype: unknown key; here it is precision.reduce",
        ),
        (
            "model:\n  rope_scaling: {factor: 2}",
            "run.yaml:2 model.rope_scaling: unknown key; here it is model.rope_parameters",
        ),
    ],
)
def test_a_setting_that_is_not_offered_is_refused_by_name(write, text, said):
    with pytest.raises(UsageError) as caught:
        load(write(text))
    assert said in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_another_tools_word_for_a_value_is_known(write):
    for word, ours in (("FSDP2", "shard"), ("hsdp", "hybrid"), ("ddp", "replicate")):
        with pytest.raises(
            UsageError,
            match=f"run.yaml:2 parallel.kind: expected one of .*, got {word}, did you mean {ours}\\?",
        ):
            load(write(f"parallel:\n  kind: {word}"))


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--lr", "train.learning_rate=VALUE"),
        ("--epoch", "train.epochs=VALUE"),
        ("--lora-alpha", "adapter.alpha=VALUE"),
        ("--4bit", "precision.preset=nf4-lora"),
        ("--dry-run", "isotype plan"),
        ("--output_dir", "run.folder=VALUE"),
        ("--train", "data.train=VALUE"),
        ("--limit", "data.limit=VALUE"),
        ("--objective", "train.objective=VALUE"),
        ("--optimizer", "train.optimizer=VALUE"),
        ("--deepspeed", "parallel.kind: shard"),
    ],
)
def test_options_of_other_tools_are_answered_with_the_setting(option, setting):
    done = invoke("train", "--model", "m", option, 1)
    assert isinstance(done.exception, UsageError)
    assert f"has no option {option}" in str(done.exception)
    assert setting in str(done.exception)
