# ruff: noqa: E501  real texts
"""Files are read with the line of every value, and never executed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from isotype.doctor.check import check, python_calls, shell
from isotype.doctor.check.collect import read_safetensors_header
from isotype.doctor.check.text_files import Unreadable, read_json, read_toml, read_yaml


def test_json_lines_comments_and_trailing_commas():
    tree = read_json('{\n // why\n "a": {"b": [1, 2.5e-1, true,],\n  "c": null}, # end\n "d": "x\\n\\u00e9"}')
    assert tree.data == {"a": {"b": [1, 0.25, True], "c": None}, "d": "x\né"}
    assert (tree.lines[("a",)], tree.lines[("a", "c")], tree.lines[("d",)]) == (3, 4, 5)


@pytest.mark.parametrize(("text", "line"), [('{"a" 1}', 1), ('{\n"a": 1,\n"b": }', 3), ("{\n", 2), ('{"a": 1}\nx', 2), ("[" * 300, 1)])
def test_bad_json_names_its_line(text: str, line: int):
    with pytest.raises(Unreadable) as error:
        read_json(text)
    assert error.value.line == line


def test_yaml_reads_plain_words_as_the_trainers_do():
    tree = read_yaml("a: no\nb: 'no'\nc: 1e-5\nd: 1.0e-5\ne: True\nbase: &x {k: 1}\nf:\n  <<: *x\n  m: on\n")
    assert tree.data == {"a": False, "b": "no", "c": "1e-5", "d": 1e-5, "e": True, "base": {"k": 1}, "f": {"k": 1, "m": True}}
    assert tree.lines[("f", "m")] == 9


def test_toml_lines():
    tree = read_toml('a = 1\n[t]\nb = "x"\n[t.u]\nc.d = true\n')
    assert tree.data == {"a": 1, "t": {"b": "x", "u": {"c": {"d": True}}}}
    assert (tree.lines[("t", "b")], tree.lines[("t", "u", "c", "d")]) == (3, 5)
    with pytest.raises(Unreadable):
        read_toml("a = \n")


def test_shell_words_quotes_and_variables():
    script = shell.read("export A=1  # one\nB=\"x y\"\nC='$A'\nD=\"${A} ${B}\"\nD+=' z'\nE=${NOT:-def}\nA=2 run --flag \\\n  --n $A\n")
    values = {name: a.value for name, a in script.variables.items()}
    assert values == {"A": "1", "B": "x y", "C": "$A", "D": "1 x y z", "E": "def"}
    assert script.commands == [(["run", "--flag", "--n", "1"], 7)]


def test_python_calls_are_found_and_not_run(tmp_path: Path):
    marker = tmp_path / "ran"
    text = f"open({str(marker)!r}, 'w')\nd = torch.bfloat16\nx = make(dtype=d, n=-1, q=Config(a=True), **dict(z=1), u=f())\n"
    call = next(c for c in python_calls.read(text) if c.name == "make")
    assert {k: v for k, (v, _) in call.arguments.items()} == {
        "dtype": "torch.bfloat16", "n": -1, "q": {"__call__": "Config", "a": True}, "z": 1, "u": {"__call__": "f"},
    }  # fmt: skip
    assert not marker.exists()


def test_a_safetensors_header(tmp_path: Path):
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]}}).encode()  # fmt: skip
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(28))
    assert read_safetensors_header(file) == {"BF16": 6, "F32": 4}
    (tmp_path / "args.json").write_text('{"output_dir": "o", "fp16": true, "logging_steps": 1}')
    assert "CF003" in {f.code for f in check([str(tmp_path)]).findings}
    file.write_bytes(b"12")
    assert [f.code for f in check([str(file)]).findings] == ["CF099"]
