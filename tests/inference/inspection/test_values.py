"""The range of the values of a tensor in a file, for every dtype that a file can have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.api import StoredTensor, measured_values

BYTES = np.arange(256, dtype=np.uint8).tobytes()
WORDS = np.arange(1 << 16, dtype=np.uint16).tobytes()
NUMBERS = {
    "bf16": torch.bfloat16,
    "BF16": torch.bfloat16,
    "fp16": torch.float16,
    "F16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e8m0": torch.float8_e8m0fnu,
}


def stored(tmp_path, dtype: str, content: bytes, count: int, row_bytes: int = 0) -> StoredTensor:
    file = tmp_path / "tensor"
    file.write_bytes(content)
    return StoredTensor("w", dtype, (count,), file, 0, len(content), row_bytes)


@pytest.mark.parametrize("dtype", sorted(measured_values._CODE_TABLES))
def test_every_bit_pattern_is_measured_as_its_value(tmp_path, dtype):
    """8-bit and 16-bit values are measured by their bit patterns. This gives what their values give,
    also if there is no NaN, and also if a GGUF file spells the dtype in its own way.
    """
    is_short = NUMBERS[dtype].itemsize == 1
    content = BYTES if is_short else WORDS
    reference = torch.frombuffer(bytearray(content), dtype=NUMBERS[dtype]).float().numpy()
    for chosen in (reference == reference, ~np.isnan(reference), np.abs(reference) <= 1):
        patterns = np.frombuffer(content, np.uint8 if is_short else np.uint16)[chosen]
        tensor = stored(tmp_path, dtype, patterns.tobytes(), patterns.size, row_bytes=8)
        values = reference[chosen]
        assert np.array_equal(np.concatenate(list(measured_values.read_values(tensor))), values)
        measured = measured_values.measure_values(tensor)
        assert measured == measured_values._measure_chunk(values)
        as_bf16 = torch.from_numpy(values).bfloat16().float().numpy()
        as_fp16 = torch.from_numpy(values).half().float().numpy()
        assert measured.only_bf16 == np.array_equal(as_bf16, values)
        assert measured.only_fp16 == np.array_equal(as_fp16, values)


def test_integers_have_no_range(tmp_path):
    assert measured_values.measure_values(stored(tmp_path, "int64", bytes(16), 2)) is None
    assert measured_values.measure_values(stored(tmp_path, "I32", bytes(16), 4)) is None
