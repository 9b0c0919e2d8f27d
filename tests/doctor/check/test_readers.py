# ruff: noqa: E501  a real header
"""The header of a checkpoint says its dtype."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from isotype.doctor.check import check
from isotype.doctor.check.check import read_safetensors_header


def test_a_safetensors_header(tmp_path: Path):
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "b": {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]}}).encode()  # fmt: skip
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(28))
    assert read_safetensors_header(file) == {"BF16": 6, "F32": 4}
    (tmp_path / "args.json").write_text('{"output_dir": "o", "fp16": true, "logging_steps": 1}')
    assert "CF003" in {f.code for f in check([str(tmp_path)]).findings}
    file.write_bytes(b"12")
    assert [f.code for f in check([str(file)]).findings] == ["CF099"]
