"""Runs a script or module as `python SCRIPT.py ARGS` and `python -m MODULE ARGS` do, and explains
the exception that ends it.

This module imports neither torch nor typer, so that a program starts without delay.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import Any

USAGE = (
    "isotype doctor run [--json FILE] [--forward-lines] [--trace|--nan] SCRIPT.py|-m MODULE [ARGS]"
)

NO_STEP = (
    "isotype doctor run: --nan saw no backward and no optimizer step in the main thread. It checked"
    " the results of modules, and the values that the program printed or converted. They contain no"
    " NaN and no +inf"
)

NOT_COMPILED = "isotype doctor run: with --trace, code for torch.compile runs eagerly. No error ended the program"


class ProgramError(Exception):
    """An error for a wrong command line, or for a program that does not exist."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed command line.

    target         the script or the module
    is_module      whether the program was given with `-m`
    arguments      the arguments of the program
    json_file      the file to which the details of an error are written as JSON, or None
    forward_lines  whether autograd records the line of each forward operator
    checks_nan     whether to stop at the first step whose loss, gradients or update contain NaN or
                   inf
    records_tensors  whether to record which call gave each tensor its dtype
    """

    target: str
    is_module: bool
    arguments: list[str]
    json_file: str | None = None
    forward_lines: bool = False
    checks_nan: bool = False
    records_tensors: bool = False

    @classmethod
    def parse(cls, words: Sequence[str]) -> Request:
        """Parses the options of this command, which come before the program. Raises ProgramError."""
        remaining = list(words)
        json_file = None
        forward_lines = checks_nan = records_tensors = False
        while remaining and remaining[0].startswith("-") and remaining[0] != "-m":
            option, _, value = remaining.pop(0).partition("=")
            if option == "--forward-lines":
                forward_lines = True
            elif option == "--nan":
                checks_nan = True
            elif option == "--trace":
                records_tensors = True
            elif option == "--json":
                if not value and not remaining:
                    raise ProgramError("--json needs a file")
                json_file = value or remaining.pop(0)
                folder = os.path.dirname(json_file)
                if folder and not os.path.isdir(folder):
                    raise ProgramError(f"--json {json_file}: there is no folder {folder}")
            else:
                raise ProgramError(f"no option {option}")
        if checks_nan and records_tensors:
            raise ProgramError("--nan and --trace observe different faults: give one of them")
        is_module = remaining[:1] == ["-m"]
        if is_module:
            remaining.pop(0)
        if not remaining:
            raise ProgramError("no program was given")
        arguments = remaining[1:]
        return cls(
            remaining[0],
            is_module,
            arguments,
            json_file,
            forward_lines,
            checks_nan,
            records_tensors,
        )


def main(words: Sequence[str]) -> int:
    """Runs the program of a command line and returns the exit status of its process."""
    if list(words[:1]) in (["--help"], ["-h"]):
        print(f"usage: {USAGE}")
        return 0
    try:
        request = Request.parse(words)
        if request.is_module:
            code, module = _load_module(request.target)
        else:
            code, module = _load_script(request.target)
    except ProgramError as error:
        print(f"isotype doctor run: {error}\n  usage     {USAGE}", file=sys.stderr)
        return 2
    from .hook import install_thread_hook
    from .running_code import remove_record_frames
    from .weight_record import RECORD

    if request.records_tensors:
        # compiled code does not call the record
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        RECORD.record_tensors()
    elif request.checks_nan:
        RECORD.install()
    else:
        RECORD.install_with_first_steps()
    sys.modules["__main__"] = module
    name = module.__file__ if request.is_module else None
    sys.argv = [name or request.target, *request.arguments]
    if request.forward_lines:
        _record_forward_lines()
    recorder = _check_every_step() if request.checks_nan else None
    install_thread_hook(request.json_file)
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code and recorder is not None and recorder.has_step:
            report_failure(recorder, end, request.json_file)
        else:
            report_end(recorder, request.json_file)
        raise
    except BaseException as error:
        traceback = _skip_outer_frames(error.__traceback__, code)
        error.__traceback__ = traceback
        remove_record_frames(error)
        if request.checks_nan:
            _skip_recorder_frames(traceback)
        sys.excepthook(type(error), error, traceback)
        if isinstance(error, KeyboardInterrupt):
            return 130
        explain_error(recorder, error, request.json_file)
        return 1
    report_end(recorder, request.json_file)
    if request.records_tensors and RECORD.tensors is not None and RECORD.tensors.has_compiled:
        print(NOT_COMPILED, file=sys.stderr, flush=True)
    return 0


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    importer = pkgutil.get_importer(os.path.abspath(path))
    if importer is not None:
        return _load_folder(path, importer)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        raise ProgramError(f"can't open {path}: {error.strerror}") from None
    module = ModuleType("__main__")
    module.__file__ = file
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    module.__annotations__ = {}
    return _compile(source, file), module


def _load_folder(path: str, importer: Any) -> tuple[CodeType, ModuleType]:
    """Loads the module `__main__` from a folder or a zip file. The folder or the zip file becomes
    the first entry of `sys.path`.
    """
    spec = importer.find_spec("__main__")
    if spec is None:
        raise ProgramError(f"can't find a '__main__' module in {path}")
    sys.path[0] = os.path.abspath(path)
    return _load_spec(spec)


def _compile(source: bytes, file: str) -> CodeType:
    try:
        return compile(source, file, "exec", dont_inherit=True)
    except SyntaxError:
        # the message of Python, with the line and its mark, says everything
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise ProgramError(f"no module {name}: {error}") from None
    if spec is None:
        raise ProgramError(f"no module {name} that can be run")
    return _load_spec(spec)


def _load_spec(spec: importlib.machinery.ModuleSpec) -> tuple[CodeType, ModuleType]:
    """Returns the code of a module, and a new module `__main__` in which this code can run."""
    get_code = getattr(spec.loader, "get_code", None)
    code = None if get_code is None else get_code(spec.name)
    if code is None:
        raise ProgramError(f"no module {spec.name} that can be run")
    module = ModuleType("__main__")
    module.__file__ = spec.origin
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    module.__spec__ = spec
    return code, module


def _skip_outer_frames(traceback: TracebackType | None, code: CodeType) -> TracebackType | None:
    """Returns the part of the traceback that starts at the program's first frame."""
    link = traceback
    while link is not None and link.tb_frame.f_code is not code:
        link = link.tb_next
    return link or traceback


def _skip_recorder_frames(traceback: TracebackType | None) -> None:
    """Removes the frames of the recorder from the end of a traceback."""
    folder = os.path.join(os.path.dirname(__file__), "not_finite")
    link = traceback
    while link is not None and link.tb_next is not None:
        if link.tb_next.tb_frame.f_code.co_filename.startswith(folder):
            rest = link.tb_next
            while rest.tb_next is not None:
                rest = rest.tb_next
            if rest.tb_frame.f_code.co_filename.startswith(folder):
                link.tb_next = None
        link = link.tb_next


def _check_every_step() -> Any:
    """Imports torch, and checks the loss, the gradients and the update of each step. Compiled
    regions run eagerly, because the operators inside compiled code cannot be observed.
    """
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from .not_finite.recorder import Recorder

    recorder = Recorder()
    recorder.install()
    return recorder


def explain_error(recorder: Any, error: BaseException, json_file: str | None) -> None:
    """Explains an error that ended the program. If it refuses NaN or inf, what `--nan` has seen comes
    first: the error of `torch.distributions` prints a tensor with its dtype.
    """
    from .hook import explain_to_stderr

    if recorder is not None and recorder.refuses(error):
        is_explained = report_failure(recorder, error, json_file)
        if is_explained:
            return
    if not explain_to_stderr(error, json_file=json_file):
        report_failure(recorder, error, json_file)


def report_failure(recorder: Any, error: BaseException, json_file: str | None) -> bool:
    """Explains the NaN or inf that `--nan` has seen before an error ended the program, such as the
    error of `torch.multinomial` or of the program's own check of its loss. Returns whether anything
    was printed.
    """
    if recorder is None:
        return False
    from .hook import explain_to_stderr
    from .not_finite.recorder import NotFiniteError

    finding = recorder.finish(error)
    if finding is None:
        return False
    return explain_to_stderr(NotFiniteError("a result is not finite", finding), json_file=json_file)


def report_end(recorder: Any, json_file: str | None) -> None:
    """Prints what `--nan` has seen in a program that ended without an error: a result that is not
    finite, if no step follows it, or a buffer, such as a running statistic. The exit status stays
    that of the program.
    """
    if recorder is None:
        return
    from .hook import explain_to_stderr
    from .not_finite.recorder import NotFiniteError

    finding = recorder.finish()
    if finding is not None:
        explain_to_stderr(NotFiniteError("a result is not finite", finding), json_file=json_file)
    elif not recorder.has_step:
        print(NO_STEP, file=sys.stderr, flush=True)


def _record_forward_lines() -> None:
    """Imports torch and switches autograd's anomaly mode on. An error in backward then names the
    line of its forward operator. The anomaly mode makes the program slower.
    """
    import torch

    torch.autograd.set_detect_anomaly(True, check_nan=False)
