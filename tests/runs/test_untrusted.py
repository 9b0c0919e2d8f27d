"""Files from strangers: none of them runs code, is written through, or is half taken for what it is
not.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from isotype.config.load import load
from isotype.config.schema import ModelSection
from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.model.adapter import load_adapter
from isotype.model.load import Source, load_base, load_tokenizer
from isotype.precision.precision import PRESETS
from isotype.runs.folder import TRUST_VARIABLE, RunFolder
from isotype.tasks.choose import train
from tests.api import live, read_picture, read_run, write_text
from tests.models import lora, tiny

CPU = torch.device("cpu")


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """`trap.code` leaves a file when it is run; the test fails if it was."""
    mark = tmp_path / "it ran"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))  # where transformers copies code to

    class Trap:
        code = f"open({str(mark)!r}, 'w').write('x')\nclass C: pass\nclass M: pass\nclass T: pass\n"

        def __reduce__(self):
            return exec, (self.code,)

    yield Trap()
    assert not mark.exists(), "a stranger's code ran"


@pytest.fixture
def model(workshop, tmp_path, trap):
    """A copy of the base with code beside it; `model(config.json keys, tokenizer_config.json
    keys)`.
    """

    def make(config=None, tokenizer=None):
        folder = tmp_path / "model"
        shutil.copytree(workshop.base, folder)
        for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer)):
            file = folder / name
            file.write_text(json.dumps(json.loads(file.read_text()) | (changes or {})))
        (folder / "evil.py").write_text(trap.code)
        return folder

    return make


def base_of(folder: Path):
    return load_base(
        Source(str(folder)), PRESETS["fp32"], attention="sdpa", device=CPU, trainable=True
    )


def test_a_model_with_its_own_code_is_refused(model):
    folder = model(
        config={
            "model_type": "evil",
            "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        }
    )
    with pytest.raises(UsageError, match=r"its own code(.|\n)*model\.trust_remote_code: true"):
        base_of(folder)


def test_a_tokenizer_with_its_own_code_is_refused(model):
    folder = model(
        tokenizer={"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    )
    with pytest.raises(UsageError, match="its own code"):
        load_tokenizer(ModelSection(name=str(folder)))


def test_a_pickle_with_code_instead_of_weights_is_refused(model, trap):
    folder = model()
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": trap}, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pickle(.|\n)*safetensors"):
        base_of(folder)


def test_sizes_that_do_not_agree_with_the_weights(model):
    with pytest.raises(
        UsageError, match=r"config\.json and the weights do not have the same sizes"
    ):
        base_of(model(config={"hidden_size": 48}))


@pytest.fixture
def adapter(tmp_path):
    lora(tiny(), target_modules=["q_proj", "up_proj"]).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_in_a_pickle_is_not_opened(adapter, trap):
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"x": trap}, adapter / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"adapter_model\.bin is a pickle(.|\n)*save_pretrained"):
        load_adapter(tiny(), adapter)


def test_an_adapter_for_another_base_is_refused(adapter, subtests):
    """PEFT loads the first two with a warning at most: half an adapter, or one that is half
    untrained.
    """
    for changes, said in (
        ({"num_hidden_layers": 1}, r"layers\.1\..* is only in the adapter"),
        ({"num_hidden_layers": 3}, r"layers\.2\..* is only in the model"),
        ({"hidden_size": 48}, "size mismatch"),
    ):
        with (
            subtests.test(said),
            pytest.raises(UsageError, match=f"does not fit this model: .*{said}"),
        ):
            load_adapter(tiny(**changes), adapter)


@pytest.fixture
def run(configured, tmp_path):
    assert train(configured(train={"steps": 1})) == 0
    return tmp_path / "run"


def test_a_run_folder_cannot_consent_to_code(run, configured, monkeypatch):
    resolved = run / "resolved.yaml"
    resolved.write_text(
        resolved.read_text().replace("trust_remote_code: false", "trust_remote_code: true")
    )
    with pytest.raises(UsageError, match=rf"cannot consent(.|\n)*{TRUST_VARIABLE}=1"):
        load_run(run)
    with pytest.raises(UsageError, match="cannot consent"):
        train(load(resolved, ["train.steps=2"], consent=True, resolved=True), resume=run)
    assert (
        train(
            load(resolved, ["model.trust_remote_code=true"], consent=True, resolved=True),
            resume=run,
        )
        == 0
    )
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    assert load_run(run).weights_name == "adapter"


def test_nothing_is_written_through_a_link(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "checkpoints").mkdir(parents=True)
    outside.mkdir()
    for name in ("metrics.jsonl", ".lock", "checkpoints/.step_2.partial"):
        (run / name).symlink_to(outside)
        with (
            pytest.raises(UsageError, match="a link out of the run's folder"),
            RunFolder(run).lock(),
        ):
            pass
        (run / name).unlink()
    assert list(outside.iterdir()) == []
    (tmp_path / "mine").write_text("mine")
    # a small file is not written through what lies in its way
    (tmp_path / ".result.json.partial").symlink_to(tmp_path / "mine")
    write_text(tmp_path / "result.json", "{}")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "result.json").read_text() == "{}"


LINKED = (
    "metrics.jsonl", "resolved.yaml", "precision.json", "result.json", "plan.json", "examples.json", "samples", "log.txt",
)  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_nothing_is_read_through_a_link_out_of_the_folder(name, tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    secret = "a secret of the reader"
    row = {"step": 1, "status": secret, "loss": 1.0, "text": secret}
    sample = {"prompt": secret, "text": secret, "file": "samples/step_1_0.png"}
    content = {
        "metrics.jsonl": json.dumps(row),
        "resolved.yaml": f"model:\n  name: {secret}\n",
        "examples.json": json.dumps({"before": {}, "examples": [{"text": secret}]}),
        "log.txt": secret,
    }
    outside.mkdir()
    run.mkdir()
    (run / "config.yaml").write_text("model:\n  name: a\n")
    if name == "samples":
        (outside / name).mkdir()
        (outside / name / "step_1.json").write_text(json.dumps({"step": 1, "samples": [sample]}))
        (outside / name / "step_1_0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + secret.encode())
    else:
        (outside / name).write_text(content.get(name, json.dumps(row)))
    (run / name).symlink_to(outside / name)
    record = read_run(run)
    everything = repr(record) + repr(RunFolder(run).read_json(name)) + live._last_lines(run)
    assert secret not in everything
    assert read_picture(run, sample) is None
    assert name in ("log.txt", "samples") or any(
        "a link out of the run's folder" in line for line in record.damaged
    )
    # a link inside the folder is one of its files, and the folder itself may be a link
    (run / name).unlink()
    (outside / name).rename(run / "kept")
    (run / name).symlink_to("kept")
    (tmp_path / "again").symlink_to(run)
    again = read_run(tmp_path / "again")
    assert secret in repr(again) + live._last_lines(run)


def test_a_pipe_in_a_run_folder_does_not_block(tmp_path):
    (tmp_path / "resolved.yaml").write_text("run:\n  report: true\n")
    for name in ("metrics.jsonl", ".lock"):
        os.mkfifo(tmp_path / name)
    assert "metrics.jsonl: not a file" in read_run(tmp_path).damaged
    with pytest.raises(UsageError, match="neither a file nor a folder"), RunFolder(tmp_path).lock():
        pass


# ten ones, then ten times the line before, eight times
BOMB = "x: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"x{b}: &{c} [{','.join(['*' + b] * 10)}]\n" for b, c in zip("abcdefg", "bcdefgh", strict=True)
)


def test_yaml_that_unfolds_or_asks_for_objects_is_refused(tmp_path, subtests):
    for text, said in (
        (BOMB, "by anchors"),
        ("model: &a\n  config: *a\n", "an anchor that contains itself"),
        ("model: !!python/object/apply:os.system ['x']\n", "expected keys below it"),
        ("model: " + "[" * 1200, "nested too deep"),
    ):
        (tmp_path / "run.yaml").write_text(text)
        with subtests.test(said), pytest.raises(UsageError, match=said):
            load(tmp_path / "run.yaml")
