"""The command line, as a user gives it."""

import subprocess
from typing import Any

from typer.testing import CliRunner, Result

from tests.warm import interpreter


def invoke(*arguments: Any, text: str | None = None) -> Result:
    """A command in this process; its error is `result.exception`."""
    from isotype.cli.app import build_app

    return CliRunner().invoke(build_app(), [str(a) for a in arguments], input=text)


def ask(*arguments: Any, text: str | None = None) -> str:
    """What a command in this process prints. Raises its error."""
    done = invoke(*arguments, text=text)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def isotype(*arguments: Any, **given: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [interpreter(), "-m", "isotype", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, **given
    )
