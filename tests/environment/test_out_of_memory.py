"""An error for want of memory is told from the same words for another reason."""

from __future__ import annotations

import errno
import re
import sys
from pathlib import Path

import pytest

from isotype.environment.out_of_memory import out_of_memory


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("std::bad_alloc")])
def test_a_plain_want_of_memory(error: Exception) -> None:
    assert out_of_memory(error)
    assert out_of_memory(ValueError(str(error))) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    "error",
    [
        SystemError("error return without exception set"),
        RuntimeError("can't start new thread"),
        ImportError("/lib/x.so: failed to map segment from shared object"),
    ],
)
def test_other_words_count_at_the_limit_of_the_address_space(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    peak = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak
    for room, told in ((1 << 20, True), (1 << 40, False)):
        limit = int(peak[1]) * 1024 + room
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        said = out_of_memory(error)
        assert (said is not None) == told
        assert said is None or (f"{limit:,}" in said and str(error) in said)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert out_of_memory(error) is None
