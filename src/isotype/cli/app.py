"""Builds the command `isotype`: registers its subcommands, and turns errors into one line and an
exit status.

A command is a function in a module of this folder. The commands of the doctor are subcommands of
`isotype doctor`. Exit statuses: 0 done, 1 the run failed or there are findings, 2 bad configuration
or usage, 3 refused by the preflight, 130 interrupted and saved.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from ..environment.hardware import wait_passively
from ..environment.install import install_command
from ..errors import IsotypeError, UsageError
from ..version import __version__
from .merge import FORMATS

# the panels of --help
TRAIN = "Train"
RUNS = "With a run"
DOCTOR = "Find dtype faults"
# command -> (module and function in this folder, panel of --help), in the order of use
_COMMANDS = {
    "quickstart": ("train.quickstart", TRAIN),
    "init": ("init.init", TRAIN),
    "import": ("init.import_config", TRAIN),
    "plan": ("train.plan", TRAIN),
    "train": ("train.train", TRAIN),
    "try": ("presets.try_presets", TRAIN),
    "chat": ("chat.chat", RUNS),
    "sample": ("sample.sample", RUNS),
    "eval": ("evaluate.evaluate", RUNS),
    "report": ("report.report", RUNS),
    "watch": ("report.watch", RUNS),
    "merge": ("merge.merge", RUNS),
    "export": ("merge.export", RUNS),
    "verify": ("verify.verify", RUNS),
    "inspect": ("inspect.inspect", RUNS),
    "ls": ("report.ls", RUNS),
    "proof": ("proof.proof", DOCTOR),
}
# command name that users may try -> the command to use
RENAMED_COMMANDS = {
    verb: f"isotype doctor {verb}"
    for verb in ("check", "explain", "trace", "kernels", "conform", "env")
} | {
    "schema": "isotype init --schema",
    "finetune": "isotype train",
    "version": "isotype --version",
}
# command -> its usage, shown for a mistake in its options and arguments
_FORMS = {
    "chat": 'isotype chat RUN; isotype sample RUN "a question" answers one',
    "eval": "isotype eval RUN FILE",
    "export": f"isotype export RUN --to {'|'.join(FORMATS)}",
    "merge": "isotype merge RUN_OR_ADAPTER --out FOLDER; the run or adapter_config.json names the base",
    "verify": "isotype verify RUN --file FILE, or --served URL",
    "inspect": "isotype inspect PATH, or PATH --against OTHER",
}
# package that is missing in an installation without extras -> the extra that installs it
_EXTRA_OF = dict.fromkeys(
    (
        "torch",
        "transformers",
        "peft",
        "safetensors",
        "jinja2",
        "tokenizers",
        "numpy",
        "huggingface_hub",
        "datasets",
    ),
    "train",
)
_EXTRA_OF |= {
    "bitsandbytes": "quant",
    "triton": "kernels",
    "pytest": "testing",
    "hypothesis": "testing",
    "PIL": "vision",
    "gguf": "gguf",
}
# These commands need torch and were only run on Linux (docs/platforms.md). The others need no torch
# and also run on macOS and Windows.
LINUX_ONLY = frozenset(
    (
        "train",
        "try",
        "plan",
        "quickstart",
        "chat",
        "sample",
        "eval",
        "merge",
        "export",
        "verify",
        "inspect",
        "report",
        "watch",
        "proof",
    )
) | {f"doctor {verb}" for verb in ("trace", "conform", "kernels")}
_SYSTEMS = {"win32": "Windows", "darwin": "macOS"}


class _Commands(TyperGroup):
    """For a command name of `RENAMED_COMMANDS`, the error names the command to use."""

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        if arguments and (replacement := RENAMED_COMMANDS.get(arguments[0])):
            raise UsageError(f"{arguments[0]} is not a command of its own: {replacement}")
        return super().resolve_command(context, arguments)

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except Exception as error:
            # compared by name, because newer versions of typer contain a copy of click
            if isinstance(error, IsotypeError) or type(error).__name__ not in (
                "NoSuchOption",
                "MissingParameter",
                "UsageError",
            ):
                raise
            from ..config.keys import setting_for_option

            command = context.invoked_subcommand
            option = getattr(error, "option_name", None)
            if option and command in ("train", "plan"):
                fix = setting_for_option(option)
            else:
                fix = _FORMS.get(command)
            if fix is None:
                raise
            problem = f" has no option {option}" if option else f": {error.format_message()}"  # type: ignore[attr-defined]
            raise UsageError(f"isotype {command}{problem}", fix=fix) from None


def _version(is_requested: bool) -> None:
    if is_requested:
        print(f"isotype {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="isotype",
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        help=(
            "Fine-tune transformers in mixed precision with every dtype declared and checked; find"
            " dtype faults in any training code."
        ),
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        context: typer.Context,
        version: bool = typer.Option(
            False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ) -> None:
        prepare(context.invoked_subcommand or "")

    for name, (location, panel) in _COMMANDS.items():
        module, _, function = location.partition(".")
        app.command(name=name, rich_help_panel=panel)(
            getattr(import_module(f"{__package__}.{module}"), function)
        )
    import_module(f"{__package__}.doctor").register(app)
    return app


def prepare(command: str) -> None:
    """Prepares the process for a command. Raises UsageError if the command does not run on this
    system.
    """
    if command not in LINUX_ONLY:
        return
    if not sys.platform.startswith("linux"):
        system = _SYSTEMS.get(sys.platform, sys.platform)
        if sys.platform == "win32":
            linux = "WSL 2, a container or a remote machine"
        else:
            linux = "a container or a remote machine"
        raise UsageError(
            f"isotype {command} runs on Linux only; this is {system}",
            fix=(
                f"{linux}; init, import, doctor, doctor check, doctor explain and doctor env run"
                " here"
            ),
        )
    if command != "doctor trace":  # traced programs run with their own settings
        wait_passively()


def _is_shown_by_another_process(error: IsotypeError) -> bool:
    """Returns True if the first process of this machine prints this error too: this is true for
    errors that every process raises by itself before the processes connect.
    """
    from ..distributed.rank import is_first_of_machine

    return isinstance(error, UsageError) and not is_first_of_machine()


def main() -> None:
    """The entry point. Errors that a user caused are printed as one line on stderr without a
    traceback. `ISOTYPE_TRACEBACK=1` shows the traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        # characters that the terminal's encoding lacks must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        build_app()(prog_name="isotype")  # also for `python -m isotype.doctor`
    except IsotypeError as error:
        if os.environ.get("ISOTYPE_TRACEBACK"):
            raise
        if not error.is_shown_elsewhere and not _is_shown_by_another_process(error):
            print(f"isotype: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None or os.environ.get("ISOTYPE_TRACEBACK"):
            raise
        print(
            f"isotype: this command needs {error.name}, which is not installed\n"
            f"  fix       {install_command(extra)}",
            file=sys.stderr,
        )
        sys.exit(2)
    # as in `isotype ls | head`; redirects stdout, so that flushing it at exit does not raise again
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
