"""The line that set the dtype of a cast is named only if the source code shows it."""

from __future__ import annotations

import pytest
import torch

from tests.api import collect_frames, find_dtype_setting

PROGRAM = """import torch
def cast(table, dtype=torch.float16):
    return table.to(dtype)
def run():
    {call}
    raise RuntimeError
run()
"""


def find_setting(call, folder):
    """Returns the setting of the cast to `dtype` in a program that has failed after it."""
    path = folder / "program.py"
    path.write_text(PROGRAM.format(call=call), encoding="utf-8")
    with pytest.raises(RuntimeError) as error:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {})
    frames = collect_frames(error.value)
    file, _, _ = frames[-1].location.rpartition(":")
    return find_dtype_setting(frames, "table.to(dtype)", f"{file}:3", torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "fix", "is_default"),
    [
        ("cast(torch.ones(2))", "`cast(torch.ones(2), dtype=torch.bfloat16)`", True),
        ("cast(torch.ones(2), torch.float16)", "`cast(torch.ones(2), torch.bfloat16)`", False),
        (
            "cast(torch.ones(2), torch.float16 if run else torch.float32)",
            "`cast(torch.ones(2), torch.bfloat16 if run else torch.float32)`",
            False,
        ),
    ],
)
def test_argument_that_set_the_dtype(call, fix, is_default, tmp_path):
    setting = find_setting(call, tmp_path)
    assert setting.is_default == is_default
    assert setting.fix.startswith(fix)


@pytest.mark.parametrize(
    "call",
    [
        "cast(**{'table': torch.ones(2), 'dtype': torch.float16})",
        "cast(*(torch.ones(2), torch.float16))",
        "cast(torch.ones(2)), cast(torch.ones(3), torch.float32)",
    ],
)
def test_argument_that_the_call_does_not_show(call, tmp_path):
    assert find_setting(call, tmp_path) is None
