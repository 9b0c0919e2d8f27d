"""The pytest plugin. The plugin adds a fixture `ampcheck` and a marker `interpreted`. If the check
of the fixture fails, pytest prints the report of the check instead of a traceback. The marker lets
the Triton kernels of a test run on the CPU.

    def test_silu_mul(ampcheck):
        ampcheck(silu_mul, (gate, up), reference=silu_mul_reference)

    @pytest.mark.interpreted          # Triton kernels run on the CPU, in the repaired interpreter
    def test_kernel(): ...

The plugin imports torch and Triton only when a test uses the fixture or the marker.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

MARKER = (
    "interpreted: Triton kernels run on the CPU, in Isotype's repaired interpreter (skipped without"
    " Triton)"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def ampcheck() -> Any:
    """Returns `isotype.testing.ampcheck`."""
    from .amp.check import ampcheck as check

    return check


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpreted") is not None:
        pytest.importorskip("triton")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("interpreted") is None:
        return (yield)
    from .interpreter import interpreted

    with interpreted():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Prints the report of a ConformanceError instead of the traceback, which would only show
    ampcheck's frames.
    """
    result = yield
    info = call.excinfo
    if (
        info is None
        or type(info.value).__name__ != "ConformanceError"
        or not hasattr(info.value, "report")
    ):
        return result
    test_frame = next(
        (entry for entry in reversed(info.traceback) if str(entry.path) == str(item.path)), None
    )
    line = item.nodeid
    if test_frame is not None:
        line = f"{item.path.name}:{test_frame.lineno + 1}"
    result.longrepr = f"{line}: ampcheck\n\n{info.value.report.render()}"
    return result
