"""A repository's own tests as the caller: pytest runs with launches trapped on a pretended GPU, and what they launch is compiled.

The kernels do not run, so the tests' assertions about values fail; their results are not reported and do not count.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import UsageError
from .calls import Calls, Recording
from .pretend import pretend_gpu
from .target import Report
from .targets import DEFAULT, parse_target, require_triton
from .wrapper import check_reached


class _Recorder:
    """The pytest plugin: each test's call is recorded under the test's name."""

    def __init__(self, target: Any) -> None:
        self.target, self.calls, self.tests = target, Calls(), 0

    def hooks(self) -> dict[str, Any]:
        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(item: Any) -> Iterator[None]:
            self.tests += 1
            with Recording(self.calls, self.target, item.name):
                return (yield)

        @pytest.hookimpl(wrapper=True)
        def pytest_collection(session: Any) -> Iterator[None]:
            # `skipif(not torch.cuda.is_available())` is decided when a test file is imported
            import torch._dynamo  # noqa: F401  its table of functions must hold the real ones

            with pretend_gpu(self.target):
                return (yield)

        return {"pytest_runtest_protocol": staticmethod(pytest_runtest_protocol), "pytest_collection": staticmethod(pytest_collection)}


def check_pytest(arguments: Sequence[str], targets: Sequence[str] | None = None, *, binary: bool = False) -> Report:
    """Runs `pytest ARGUMENTS` in this process and checks every kernel that its tests launched.

    Raises  UsageError when pytest finds no test, or none launched a kernel
    """
    import pytest

    from .trap import trap_launches

    require_triton()
    chosen = list(targets or [DEFAULT])
    recorder = _Recorder(parse_target(chosen[0]))
    plugin = type("LaunchRecorder", (), recorder.hooks())()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), trap_launches():
        status = int(pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"], plugins=[plugin]))
    last = next((line for line in reversed(said.getvalue().splitlines()) if line.strip()), "no output")
    if status in (4, 3) or not recorder.tests:
        raise UsageError(f"pytest {' '.join(arguments)}: {last}")
    result = check_reached(recorder.calls, chosen, binary=binary)
    if not result.kernels:
        raise UsageError(f"pytest {' '.join(arguments)}: {recorder.tests} tests ran and launched no Triton kernel ({last})")
    report = Report()
    report.add_wrapper(result)
    report.remarks.insert(
        0, f"{recorder.tests} tests, {result.launches} launches recorded; the tests' own results do not count: no kernel ran"
    )
    return report
