"""A slice of the campaign, as a user starts it, and that the campaign itself can fail."""

import json
import os
import pickle
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest

from isotype.errors import UsageError
from isotype.tasks.choose import train
from tests.faults import fuzz
from tests.faults.hostile import Material
from tests.faults.trial import differences
from tests.faults.workshop import Workshop
from tests.warm import interpreter


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ["kills"],
        pytest.param(
            ["corruption", "disk", "nan", "matrix", "ranks", "fuzz"], marks=pytest.mark.full
        ),
    ],
    ids=" ".join,
)
def test_a_slice_of_the_campaign(parts):
    command = [interpreter(), "-m", "tests.faults", *parts, "--quick", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = json.loads(ended.stdout)
    assert ended.returncode == 0, answer
    assert answer["failed"] == 0
    assert {row["part"] for row in answer["rows"]} == set(parts)
    if "kills" in parts:
        assert sum(row["trials"] for row in answer["rows"] if row["part"] == "kills") == 1
    else:
        cells = {row["what"]: row for row in answer["rows"] if row["part"] == "matrix"}
        assert sum(row["identical"] for row in cells.values()) == 3
        assert cells["adamw8bit, bf16-pure, adapter none"]["message"].startswith("refused: ")
    assert "done" in ended.stderr
    assert answer["kept"] is None


@pytest.mark.full
def test_a_changed_file_is_reported_as_a_difference_of_two_runs(configured, tmp_path):
    assert train(configured("one")) == 0
    assert train(configured("other")) == 0
    one, other = tmp_path / "one", tmp_path / "other"
    assert differences(one, other) == []
    for name, change in (
        ("adapter/adapter_model.safetensors", flip),
        ("metrics.jsonl", shorten),
        ("samples/step_6.json", flip),
    ):
        kept = (one / name).read_bytes()
        change(one / name)
        assert len(differences(one, other)) == 1, name
        (one / name).write_bytes(kept)
    (one / "checkpoints/.step_4.partial").mkdir()
    assert "left behind" in differences(one, other)[0]


def flip(file: Path):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def shorten(file: Path):
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


# --- The watch over hostile inputs sees what it is there for.


@pytest.mark.full
def test_a_fault_is_reported_with_the_number_of_its_input(tmp_path, subtests):
    material = Material(Workshop(tmp_path))
    for target, fault in (
        (lambda m, folder, draw: {}["x"], "KeyError: 'x' at"),
        (lambda m, folder, draw: (folder / "../../../outside").write_text("x"), "outside"),
        (lambda m, folder, draw: os.system("true"), "os.system"),
        (lambda m, folder, draw: pickle.loads(pickle.dumps(OrderedDict())), "pickle.find_class"),
        (
            lambda m, folder, draw: (_ for _ in ()).throw(UsageError("x" * 30_000)),
            "a message of 30000 characters",
        ),
        (lambda m, folder, draw: os._exit(3), "the process died with 3"),
    ):
        with subtests.test(fault):
            done, _, faults = fuzz._chunk(material, "a target", target, 0, 10, 1)
            assert done == 1
            assert [number for number, _ in faults] == [10]
            assert fault in faults[0][1]
