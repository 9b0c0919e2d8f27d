"""Defines exception hooks that print the explanation of a dtype error under its traceback. There
are hooks for a program, for its threads, and for a notebook.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any

from ...finding import Finding
from .running_code import remove_record_frames
from .weight_record import RECORD

_HOOK_ATTRIBUTE = "_is_isotype_hook"  # attribute of the exception hook of `doctor run`


def install() -> None:
    """Sets `sys.excepthook` and `threading.excepthook`. The new hooks first call the hooks that
    were set before. Also starts the records of weights and of the first steps. A second call of this
    function has no effect.
    """
    RECORD.install_with_first_steps()
    earlier_hook = sys.excepthook
    if not getattr(earlier_hook, _HOOK_ATTRIBUTE, False):

        def explain_uncaught(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            remove_record_frames(error)
            earlier_hook(kind, error, traceback)
            explain_to_stderr(error)

        setattr(explain_uncaught, _HOOK_ATTRIBUTE, True)
        sys.excepthook = explain_uncaught
    install_thread_hook()


def install_thread_hook(json_file: str | None = None) -> None:
    """Sets `threading.excepthook`. The new hook first calls the hook that was set before."""
    earlier_hook = threading.excepthook
    if getattr(earlier_hook, _HOOK_ATTRIBUTE, False):
        return

    def explain_uncaught(args: threading.ExceptHookArgs) -> None:
        remove_record_frames(args.exc_value)
        earlier_hook(args)
        if args.exc_value is not None:
            explain_to_stderr(args.exc_value, json_file=json_file)

    setattr(explain_uncaught, _HOOK_ATTRIBUTE, True)
    threading.excepthook = explain_uncaught


def install_in_notebook(shell: Any) -> None:
    """Adds the explanation to the tracebacks of an IPython shell, and starts the records of weights and
    of the first steps.
    """
    RECORD.install_with_first_steps()

    def show_explained(
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
        tb_offset: int | None = None,
    ) -> None:
        remove_record_frames(error)
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
        explain_to_stderr(error)

    shell.set_custom_exc((Exception,), show_explained)


def _explain(error: BaseException) -> tuple[Finding, dict[str, Any]] | None:
    """Returns the finding about an exception, and the details for the JSON file. Returns None if
    the exception is neither about dtypes nor about a step with NaN or inf.
    """
    finding = getattr(error, "finding", None)
    if isinstance(finding, Finding):
        return finding, {}  # of a step that is not finite
    from .evidence import collect_evidence
    from .rules import decide_cause

    evidence = collect_evidence(error)
    return None if evidence is None else (decide_cause(evidence), evidence.to_dict())


def _add_devices_without_bf16(finding: Finding) -> Finding:
    """Adds the names of GPUs without bf16, such as a T4, to a finding that speaks of bf16."""
    details = [value for _, value in finding.details]
    text = " ".join([finding.message, finding.cause or "", finding.fix or "", *details])
    if "bf16" not in text and "bfloat16" not in text:
        return finding
    from ...environment.versions import detect_devices

    names = dict.fromkeys(row["name"] for row in detect_devices() if row.get("bf16") == "none")
    rows = [("device", f"{name} has no bf16: use fp16 or fp32 on it") for name in names]
    return replace(finding, details=(*finding.details, *rows))


def explain_to_stderr(error: BaseException, *, json_file: str | None = None) -> bool:
    """Prints the explanation of an exception, and writes the details to a file. The function prints
    nothing for an exception that is not about dtypes. If the explanation itself raises an error,
    this error is printed in one line. Returns whether anything was printed.
    """
    if "torch" not in sys.modules or not isinstance(error, Exception):
        return False
    with contextlib.suppress(OSError, ValueError):  # a closed stream
        sys.stdout.flush()
    try:
        explanation = _explain(error)
        if explanation is None:
            return False
        finding, evidence = explanation
        finding = _add_devices_without_bf16(finding)
        text = finding.render()
        facts = {"finding": finding.to_dict(), "evidence": evidence}
        if json_file is not None:
            from ...environment.versions import environment

            machine = environment()
            facts |= {key: machine[key] for key in ("packages", "devices")}
    except Exception as fault:
        if os.environ.get("ISOTYPE_TRACEBACK"):
            raise
        print(
            f"isotype: no explanation: {type(fault).__name__}: {fault} (ISOTYPE_TRACEBACK=1 shows"
            " where)",
            file=sys.stderr,
        )
        return True
    rank = os.environ.get("RANK")
    heading = "isotype doctor run" if rank is None else f"isotype doctor run, rank {rank}"
    print(f"\n{heading}\n{text}", file=sys.stderr, flush=True)
    if json_file is not None:
        with open(json_file, "w", encoding="utf-8") as stream:
            json.dump(facts, stream, indent=1)
    return True
