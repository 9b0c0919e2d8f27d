"""`isotype`: finds the commands beside this file and maps errors to one line and an exit status.

A command is a module `cli/NAME.py` with `register(app)`. Exit statuses: 0 done, 1 the run failed (or findings), 2 bad configuration
or usage, 3 refused by preflight, 130 interrupted and saved.
"""

from __future__ import annotations

import errno
import io
import os
import pkgutil
import sys
from importlib import import_module

import typer

from ..environment.waiting import wait_passively
from ..errors import IsotypeError, UsageError
from ..version import __version__

ENGINE, RUNS, DOCTOR, ABOUT = "Train", "With a run", "Doctor", "About"  # the panels of --help
# a package that an installation without extras lacks -> the extra that installs it
_EXTRA_OF = dict.fromkeys(
    ("torch", "transformers", "peft", "safetensors", "jinja2", "matplotlib", "tokenizers", "numpy", "huggingface_hub", "datasets"), "train"
)
_EXTRA_OF |= {"bitsandbytes": "quant", "triton": "kernels", "pytest": "testing", "hypothesis": "testing"}
# commands that need torch and were never run on another system (docs/platforms.md); the others run without torch on macOS and Windows too
LINUX_ONLY = frozenset(("train", "plan", "quickstart", "chat", "sample", "eval", "merge", "report", "trace", "conform", "kernels"))
_SYSTEMS = {"win32": "Windows", "darwin": "macOS"}
_PANEL_ORDER = (ENGINE, RUNS, DOCTOR, ABOUT)


def _version(asked: bool) -> None:
    if asked:
        print(f"isotype {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="isotype",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        help="Fine-tune transformers in mixed precision with every dtype declared and checked; find dtype faults in any training code.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ) -> None:
        if context.invoked_subcommand in LINUX_ONLY and not sys.platform.startswith("linux"):
            here = _SYSTEMS.get(sys.platform, sys.platform)
            linux = "WSL 2, a container or a remote machine" if sys.platform == "win32" else "a container or a remote machine"
            raise UsageError(
                f"isotype {context.invoked_subcommand} runs on Linux only; this is {here}",
                fix=f"{linux}; check, explain, doctor, import, init, schema and env run here",
            )

        if context.invoked_subcommand in LINUX_ONLY - {"trace"}:  # it runs another's program
            wait_passively()

    package = import_module(__package__)
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        command = import_module(f"{__package__}.{module}")
        if hasattr(command, "register"):
            command.register(app)
    app.registered_commands.sort(key=lambda c: _PANEL_ORDER.index(c.rich_help_panel) if c.rich_help_panel in _PANEL_ORDER else 99)
    return app


def main() -> None:
    """The entry point: errors a user caused are one line on stderr, never a traceback (`ISOTYPE_TRACEBACK=1` shows it)."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal's encoding lacks must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        build_app()()
    except IsotypeError as error:
        if os.environ.get("ISOTYPE_TRACEBACK"):
            raise
        if not error.shown_elsewhere:
            print(f"isotype: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None or os.environ.get("ISOTYPE_TRACEBACK"):
            raise
        print(
            f"isotype: this command needs {error.name}, which is not installed\n  fix       pip install 'isotype[{extra}]'", file=sys.stderr
        )
        sys.exit(2)
    except BrokenPipeError:
        _leave_out_output()
        sys.exit(1)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or _can_write():
            raise
        _leave_out_output()
        print(f"isotype: could not write the output: {error.strerror}\n  fix       send it to a file that has room", file=sys.stderr)
        sys.exit(1)


def _open_standard_streams() -> None:
    """Opens what the shell closed (`2>&-`): else the next file that is opened gets its number, and what libraries print goes into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _can_write() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return False
    return True


def _leave_out_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
