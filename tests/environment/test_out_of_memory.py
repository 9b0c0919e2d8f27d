"""An error for want of memory is told from the same words for another reason."""

from __future__ import annotations

import errno

import pytest

from isotype.environment.hardware import out_of_memory


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("std::bad_alloc")])
def test_a_plain_want_of_memory(error: Exception) -> None:
    assert out_of_memory(error)
    assert out_of_memory(ValueError(str(error))) is None
