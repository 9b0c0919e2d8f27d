"""`isotype doctor PATH_OR_LOG` runs every part of the doctor that applies. Commands such as
`isotype doctor check` run a single part.

`check`, `explain` and `env` run no user code and import no torch. `run`, `trace`, `conform`, `gate`
and `kernels` run their target.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import UsageError
from ..finding import Finding, Place, Severity, parse_threshold, print_findings, sort_findings
from ..wording import pluralise
from .app import DOCTOR, prepare

if TYPE_CHECKING:
    from ..doctor.examination import Examination

CODE = re.compile(r"^[A-Za-z]{2,3}\d{3}$")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
FailOn = Annotated[
    str, typer.Option("--fail-on", help="Exit 1 from this severity on: error, warning or note.")
]
_EXAMINE = "look"  # the command behind `isotype doctor PATH`

HELP = """Find dtype faults in any training code, configuration or log.

`isotype doctor PATH_OR_LOG` runs the parts that apply: check on configurations and programs, explain on logs (also from standard
input), `isotype inspect` on the folder of a model. It does not import or run your code.
For kernels, conform and trace, which run it, it prints the command.

    isotype doctor .

    isotype doctor train.log

    python train.py 2>&1 | isotype doctor

    isotype doctor my_trainer --fail-on warning

    isotype doctor check configs/ --device t4

    isotype doctor explain CF001
"""


class _Doctor(TyperGroup):
    """If the first argument is not a subcommand, the arguments are a path or a log to examine.
    Without arguments, the command examines standard input, unless standard input is a terminal.
    """

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        asks_for_help = bool({"-h", "--help"} & set(arguments[:1]))
        if (
            not asks_for_help
            and (arguments or not sys.stdin.isatty())
            and arguments[:1] not in [[name] for name in self.commands]
        ):
            arguments = [_EXAMINE, *arguments]
        return super().parse_args(context, arguments)


def register(app: typer.Typer) -> None:
    doctor = typer.Typer(cls=_Doctor, no_args_is_help=True, help=HELP, rich_markup_mode="markdown")

    @doctor.callback()
    def prepare_part(context: typer.Context) -> None:
        prepare(f"doctor {context.invoked_subcommand}")

    doctor.command(context_settings=SCRIPT_ARGUMENTS)(run)
    for command in (check, explain, env):
        doctor.command()(command)
    doctor.command(context_settings=SCRIPT_ARGUMENTS)(trace)
    doctor.command()(conform)
    doctor.command()(gate)
    doctor.command()(kernels)
    doctor.command(_EXAMINE, help=HELP, hidden=True)(examine)
    app.add_typer(doctor, name="doctor", rich_help_panel=DOCTOR)


def examine(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH_OR_LOG",
            help="A folder, a file, `-` (standard input), an error's text, a code.",
            show_default=False,
        ),
    ] = None,
    fail_on: FailOn = "error",
    json_output: Json = False,
) -> None:
    threshold = parse_threshold(fail_on)
    subject = " ".join(what or ["-"])
    if CODE.match(subject) and not Path(subject).exists():
        show_page(subject.upper(), json_output)
        return
    subject, examinations = _examine(subject, what or [])
    findings = [finding for examination in examinations for finding in examination.findings]
    # notes are printed too if a single log is explained
    shows_notes = json_output or [examination.part for examination in examinations] == ["explain"]
    visible = findings
    if not shows_notes:
        visible = [finding for finding in findings if finding.severity > Severity.NOTE]
    if not json_output:
        for table in filter(None, (examination.table for examination in examinations)):
            print(table + "\n")
    parts = [
        {
            "part": examination.part,
            "subject": examination.subject,
            "findings": len(examination.findings),
        }
        for examination in examinations
    ]
    status = print_findings(
        visible, subject=subject, json_output=json_output, fail_on=threshold, parts=parts
    )
    if not json_output:
        for examination in examinations:
            print(_summary_line(examination, shows_notes=shows_notes))
        if not any(examination.was_examined for examination in examinations):
            print(
                "  nothing here is a configuration, a program, a log (*.log, *.err, *.out) or a"
                " Triton kernel"
            )
    raise typer.Exit(status)


def _examine(subject: str, arguments: list[str]) -> tuple[str, list[Examination]]:
    """Examines standard input, a path, or the text of an error. Returns a name for the examined
    subject, and the results of the examinations.

    Raises  UsageError for an unknown path or command, and for several paths
    """
    from ..doctor.examination import examine_log, examine_path

    if subject == "-":
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal's stream, or a test's that has the method
        return "standard input", [examine_log(sys.stdin)]
    has_path = any(Path(argument[:200]).exists() for argument in arguments)
    if _is_unknown_command(arguments, has_path=has_path):
        raise UsageError(
            f"{arguments[0]}: no such file or folder, and no command of isotype doctor, which has"
            " run, check, explain, env, trace, conform, gate and kernels"
        )
    if " " not in subject or Path(subject[:200]).exists():
        path = Path(subject)
        return subject, [*examine_path(path), *_inspect_model(path)]
    if len(arguments) > 1 and has_path:
        raise UsageError(
            f"one path at a time, got {len(arguments)}",
            fix="isotype doctor check PATH PATH, or the folder that holds them",
        )
    return "the text", [examine_log(subject.splitlines())]


def _inspect_model(path: Path) -> list[Examination]:
    """Inspects the files of a model or adapter, if the path is one."""
    from ..doctor.examination import Examination
    from ..inference.inspection.checkpoint import is_checkpoint

    if not is_checkpoint(path):
        return []
    try:
        prepare("inspect")
        from ..inference.inspection.inspect import inspect_checkpoint

        inspection = inspect_checkpoint(path)
    except UsageError as error:
        finding = Finding(
            code="MF000",
            severity=Severity.ERROR,
            message=error.message,
            place=Place(file=str(path)),
            fix=error.fix,
        )
        return [Examination("inspect", "files that cannot be read", [finding])]
    count = pluralise(len(inspection.facts.checkpoint.tensors), "tensor")
    return [Examination("inspect", count, inspection.findings)]


def _is_unknown_command(arguments: list[str], *, has_path: bool) -> bool:
    """Returns True if the first argument was probably meant as a subcommand: it is a single word,
    alone or before a path.
    """
    first = arguments[0]
    if not first.isidentifier() or Path(first).exists():
        return False
    return len(arguments) == 1 or has_path


def _summary_line(examination: Examination, *, shows_notes: bool) -> str:
    """Returns one line for a part of the doctor: what it examined, and how many faults it reports."""
    heading = f"  {examination.part:9}{examination.subject}"
    if not examination.was_examined:
        return heading
    notes = sum(finding.severity == Severity.NOTE for finding in examination.findings)
    summary = pluralise(len(examination.findings) - notes, "finding")
    codes = Counter(
        finding.code
        for finding in sort_findings(examination.findings)
        if finding.severity > Severity.NOTE
    )
    if len(examination.findings) > 1 and codes:
        listed = ", ".join(f"{number} {code}" for code, number in codes.items())
        summary += f" ({listed})"
    if notes:
        summary += f", {pluralise(notes, 'note')}"
        if not shows_notes:
            summary += f" (isotype doctor {examination.part} shows them)"
    return f"{heading}: {summary}"


def check(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Folders or files: SimpleTuner, Hugging Face, accelerate, DeepSpeed, axolotl, ...",
            show_default=False,
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="What it will run on: h100, a100, t4, v100, mi300x, cpu, sm_80, ..."),
    ] = None,
    fail_on: FailOn = "error",
    json_output: Json = False,
) -> None:
    """Show the effective precision of a training configuration, and its contradictions, before the
    run.

    isotype doctor check configs/

    isotype doctor check train.yaml ds_config.json --device t4
    """
    from ..doctor.check.checker import check as check_paths
    from ..doctor.check.checker import format_record, nothing_recognised_finding, record_to_json

    threshold = parse_threshold(fail_on)
    checked = check_paths(paths, device=device)
    no_config_finding = nothing_recognised_finding(checked, paths)
    findings = [*checked.findings, *([no_config_finding] if no_config_finding else [])]
    if not json_output:
        for record in checked.records:
            if text := format_record(record):
                print(text + "\n")
    subject = f"{pluralise(checked.files, 'file')}, {pluralise(len(checked.records), 'run')}"
    records = [record_to_json(record) for record in checked.records]
    raise typer.Exit(
        print_findings(
            findings, subject=subject, json_output=json_output, fail_on=threshold, records=records
        )
    )


def explain(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="A code (CF001), a log file, or an error's text; standard input when left out.",
            show_default=False,
        ),
    ] = None,
    list_codes: Annotated[
        bool, typer.Option("--list", help="List every code with its title.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Explain the cause of an error in a log, or print the page of a code.

    isotype doctor explain train.log

    isotype doctor explain < train.log

    isotype doctor explain "expected mat1 and mat2 to have the same dtype, but got: float !=
    c10::BFloat16"

    isotype doctor explain CF001

    isotype doctor explain --list
    """
    arguments = list(what or [])
    if list_codes or (not arguments and sys.stdin.isatty()):
        _print_codes(json_output)
        return
    if len(arguments) == 1 and CODE.match(arguments[0]) and not Path(arguments[0]).exists():
        show_page(arguments[0].upper(), json_output)
        return
    from ..doctor.explain import explain as explain_lines

    source: str | None = None
    if not arguments or arguments == ["-"]:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal's stream, or a test's that has the method
        findings = explain_lines(sys.stdin)
    elif len(arguments) == 1 and _is_file(arguments[0]):
        source = arguments[0]
        try:
            with open(source, encoding="utf-8", errors="replace") as log:
                findings = explain_lines(log, source=source)
        except OSError as error:
            raise UsageError(f"{source}: {error.strerror}") from error
    else:
        text = " ".join(arguments)
        if len(arguments) == 1 and re.fullmatch(r"[\w./~-]+\.(?:log|txt|out|err)", text):
            raise UsageError(f"{text}: no such file")
        findings = explain_lines(text.splitlines())
    raise typer.Exit(print_findings(findings, subject=source or "explain", json_output=json_output))


def _is_file(text: str) -> bool:
    try:
        if Path(text).is_dir():
            raise UsageError(f"{text} is a folder: give a log file")
        return Path(text).exists()
    except OSError:  # a pasted text can be too long for a file name
        return False


def show_page(code: str, json_output: bool) -> None:
    from ..pages import codes, page

    text = page(code)
    if text is None:
        similar_codes = [c for c in codes() if c[:2] == code[:2]]
        raise UsageError(
            f"{code} is not a code"
            + (
                f"; {code[:2]} codes are {', '.join(similar_codes)}"
                if similar_codes
                else "; isotype doctor explain --list shows all"
            )
        )
    print(
        json.dumps({"findings": [], "code": code, "page": text}, indent=1)
        if json_output
        else text.rstrip()
    )


def _print_codes(json_output: bool) -> None:
    from ..pages import codes as page_codes
    from ..pages import page

    titles = {
        code: (
            (page(code) or "").partition("\n")[0].removeprefix("# ").removeprefix(code).lstrip(": ")
        )
        for code in page_codes()
    }
    lines = "\n".join(f"{code}  {title}" for code, title in titles.items())
    print(json.dumps({"findings": [], "codes": titles}, indent=1) if json_output else lines)


def env(
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: env.json of a run, and the findings."),
    ] = False,
) -> None:
    """Show versions and devices. Warns about versions with known dtype faults and versions that do
    not work together.

        isotype doctor env

    The exit status is 1 if there is an error.
    """
    from ..environment import versions
    from ..environment.versions import find_faults

    system = versions.environment()
    if not json_output:
        print(_format_environment(system) + "\n")
    raise typer.Exit(
        print_findings(
            find_faults(system), subject="environment", json_output=json_output, environment=system
        )
    )


def _format_environment(environment: dict[str, Any]) -> str:
    torch = environment["torch"]
    lines = [
        f"isotype   {environment['isotype']}, Python {environment['python']}, {environment['platform']}"
    ]
    for device in environment["devices"]:
        facts = [
            (
                f"bf16 {device.get('bf16')}, fp16 {device.get('fp16')}"
                if "bf16" in device
                else device.get("reason", "")
            ),
            device.get("generation", ""),
            f"{device['cores']} cores" if device.get("cores") else "",
            f"{device['memory'] / (1 << 30):.1f} GiB" if device.get("memory") else "",
        ]
        lines.append(
            f"device    {device['name']} ({device['kind']}): {', '.join(fact for fact in facts if fact)}"
        )
    if torch:
        if torch["cuda"]:
            build = f"CUDA {torch['cuda']}"
        elif torch["hip"]:
            build = f"ROCm {torch['hip']}"
        else:
            build = "CPU"
        lines.append(
            f"torch     {torch['version']}, built for {build}, {torch['threads']} threads,"
            f" {torch['cpu_capability']}"
        )
    packages = [
        f"{name} {version}" for name, version in environment["packages"].items() if name != "torch"
    ]
    lines.append("packages  " + ", ".join(packages))
    if environment["variables"]:
        lines.append(
            "variables "
            + " ".join(f"{name}={value}" for name, value in environment["variables"].items())
        )
    return "\n".join(lines)


SCRIPT_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}


def run(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(metavar="SCRIPT.py|-m MODULE", help="The program, with its arguments.")
    ],
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the facts at the failure to this file.")
    ] = None,
    forward_lines: Annotated[
        bool,
        typer.Option(
            "--forward-lines",
            help=(
                "Record the line of each forward operator for errors in backward (autograd's"
                " anomaly mode, which is slower)."
            ),
        ),
    ] = False,
    checks_nan: Annotated[
        bool,
        typer.Option(
            "--nan",
            help=(
                "Stop at the first step whose loss, gradient or update is not finite, and name the"
                " first operator whose result is not (each step is slower)."
            ),
        ),
    ] = False,
    records_tensors: Annotated[
        bool,
        typer.Option(
            "--trace",
            help=(
                "Record in the whole program, and not only in its first steps, which call gave each"
                " tensor its dtype (the program is slower)."
            ),
        ),
    ] = False,
) -> None:
    """Run a program unchanged. If a dtype error ends the program, print the cause, place and fix of
    the error under the traceback. The explanation uses the values in memory at the failure.

    Output, traceback and exit status are the program's own. In the first ten steps and in evaluations the doctor
    records which call gave each tensor its dtype; this takes at most two seconds.

        isotype doctor run train.py --lr 1e-4

        isotype doctor run --json fault.json -m my_package.train

        isotype doctor run --trace train.py

        isotype doctor run --nan train.py

        torchrun --nproc-per-node 2 -m isotype.doctor run train.py

        accelerate launch -m isotype.doctor run train.py

    `import isotype.hook` does the same in a program, and `%load_ext isotype` in a notebook.
    """
    from ..doctor.run.program import main

    options = []
    if json_file is not None:
        options.append(f"--json={json_file}")
    if forward_lines:
        options.append("--forward-lines")
    if checks_nan:
        options.append("--nan")
    if records_tensors:
        options.append("--trace")
    raise typer.Exit(main([*options, program, *context.args]))


def trace(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT.py|FILE.py:FUNCTION", help="What to run.")
    ],
    json_output: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object on stdout; what the program prints goes to stderr."
        ),
    ] = False,
    fail_on: FailOn = "error",
) -> None:
    """Run a program unchanged, explain its dtype errors, and find dtype faults that raise no error.

    `isotype doctor trace train.py --lr 1e-4`  runs a script; Isotype's options come before it

    `isotype doctor trace case.py:run --json`  calls one function of a file without arguments
    """
    from ..doctor.trace.session import Target, plain_traceback, run_traced, stdout_to_stderr

    parsed = Target.parse(target)
    arguments = list(context.args)
    if parsed.function is not None and arguments:
        # a function takes no arguments, so options after FILE.py:FUNCTION are Isotype's too
        with context.command.make_context(
            "trace", [*arguments, target], parent=context.parent
        ) as inner:
            if inner.args:
                raise UsageError(
                    f"{target}: a function takes no arguments, got {' '.join(inner.args)}"
                )
            # compared by name: newer versions of typer have their own copy of click's enum
            options = {
                key: value
                for key, value in inner.params.items()
                if _parameter_source(inner, key) != "DEFAULT"
            }
        json_output = options.get("json_output", json_output)
        fail_on = options.get("fail_on", fail_on)
        arguments = []
    threshold = parse_threshold(fail_on)
    with stdout_to_stderr() if json_output else contextlib.nullcontext():
        outcome = run_traced(parsed, arguments)
    if outcome.error is not None and not isinstance(outcome.error, SystemExit):
        sys.stdout.flush()
        print(plain_traceback(outcome.error), file=sys.stderr, flush=True)
    status = print_findings(
        outcome.findings, subject=Path(target).name, json_output=json_output, fail_on=threshold
    )
    raise typer.Exit(status or outcome.status)


def _parameter_source(context: Any, key: str) -> str:
    """Returns the source of a parameter's value: COMMANDLINE, DEFAULT, ..."""
    return getattr(context.get_parameter_source(key), "name", "DEFAULT")


def conform(
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME or package.module:NAME; NAME defaults to `build`", show_default=False
        ),
    ],
    json_output: Json = False,
    fail_on: FailOn = "error",
) -> None:
    """Check an autograd.Function, a module or any callable under every dtype combination that a
    trainer produces.

    NAME is a function without arguments that returns `(callable, inputs)`, or `(callable, inputs,
    {"reference": ..., "params": ..., "contract": ...})`. Without a GPU, Triton code runs in
    Triton's interpreter, whose bf16 faults are corrected.

        isotype doctor conform my_ops.py:build

        isotype doctor conform my_ops.py:build_swiglu --json
    """
    # output of the checked file goes to stderr, so that stdout holds only the report
    with contextlib.redirect_stdout(sys.stderr):
        threshold = parse_threshold(fail_on)
        from ..testing.amp.check import ampcheck, load_target

        loaded = load_target(target)
        report = ampcheck(loaded.function, loaded.inputs, **loaded.options, raises=False)
    facts = {
        "subject_name": report.subject,
        "tried": report.tried,
        "refused": dict(report.refused),
        "skipped": list(report.skipped),
    }
    subject = f"{target} ({report.tried} runs)"
    status = print_findings(
        report.findings, subject=subject, json_output=json_output, fail_on=threshold, **facts
    )
    if not json_output:
        for line in report.skipped_lines():
            print(line)
    raise typer.Exit(status)


Largest = Annotated[
    str,
    typer.Option(
        "--largest",
        metavar="N,...",
        help="The largest shape, as arguments of the function that creates the inputs.",
    ),
]


def gate(
    target: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="The function.", show_default=False)
    ],
    against: Annotated[
        str,
        typer.Option(
            metavar="[FILE.py:]REFERENCE",
            help="The same mathematics in plain PyTorch.",
            show_default=False,
        ),
    ],
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.py:]NAME",
            help="The function that creates the inputs (default: `inputs`).",
            show_default=False,
        ),
    ] = None,
    largest: Largest = "",
    arch: Annotated[
        str, typer.Option("--arch", help="Architectures, with commas: sm_80,sm_90,gfx942.")
    ] = "sm_90",
    json_output: Json = False,
) -> None:
    """Decide whether a kernel or a function may replace its reference, with one exit status: 0
    pass, 1 fail, 2 a question could not be asked.

    The function is compared with the reference in fp64, and its errors with those of the reference
    in the same dtypes. The gate also checks gradients, autocast, torch.compile, and the compilation
    of Triton kernels, without a GPU. With `--largest` it checks that offsets fit in int32. No tensor
    of this shape is allocated.

    The file defines `inputs(rows=4, columns=64)`, which returns the arguments of one call.

        isotype doctor gate ops.py:rms_norm --against ops.py:reference

        isotype doctor gate ops.py:rms_norm --against reference --largest 524288,8192 --json
    """
    import warnings

    sizes = _parse_sizes(largest)
    architectures = _split_names(arch)
    warnings.filterwarnings("ignore", module="triton")
    # output of the checked file goes to stderr, so that stdout holds only the report
    with contextlib.redirect_stdout(sys.stderr):
        from ..testing.gate import load_gate_target, run_gate

        loaded = load_gate_target(target, against, inputs)
        result = run_gate(loaded, largest=sizes, architectures=architectures or ["sm_90"])
    print(json.dumps(result.to_dict(), indent=1) if json_output else result.render())
    raise typer.Exit(result.status)


def _split_names(text: str) -> list[str]:
    """Returns the names in a text such as `sm_80, sm_90`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_sizes(text: str) -> list[int]:
    """Returns the numbers in a text such as `65536,8192`.

    Raises  UsageError if the text is not a list of numbers above zero
    """
    sizes = []
    for part in filter(None, text.split(",")):
        if not part.strip().isdigit() or not int(part):
            raise UsageError(f"--largest {text}: expected numbers with commas, such as 65536,8192")
        sizes.append(int(part))
    return sizes


def kernels(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="file.py, module or file.py:name", show_default=False
        ),
    ],
    arch: Annotated[
        str,
        typer.Option(
            "--arch",
            help=(
                "Architectures, with commas: sm_80,sm_90,sm_100,gfx942 (default: TARGETS in the"
                " file, or sm_90)."
            ),
        ),
    ] = "",
    largest: Largest = "",
    json_output: Json = False,
    fail_on: FailOn = "error",
) -> None:
    """Compile Triton kernels for every dtype and several GPU architectures, without a GPU, and
    explain failures.

    TARGET is one of three: a file or module, whose kernels' signatures are inferred;
    `file.py:kernel`; or `file.py:build`. `build()` returns either a kernel or a pair (function,
    inputs). For a kernel, the file may define MATRIX, CONSTEXPRS and TARGETS. For a pair, the
    command calls the function with CPU tensors, and records its kernel launches instead of running
    them. With `--largest 65536,8192` it also calls `build(65536, 8192)`, with tensors that have no
    memory, and checks that the kernels' offsets fit in int32.

    A folder may take minutes. Progress is printed to stderr. After Ctrl-C the command prints the
    findings about the kernels that it has checked.

        isotype doctor kernels kernels.py

        isotype doctor kernels kernels.py:silu_mul --arch sm_80,sm_90,sm_100,gfx942

        isotype doctor kernels my_package.ops.rms_norm
    """
    import warnings

    threshold = parse_threshold(fail_on)
    targets = _split_names(arch) or None
    warnings.filterwarnings("ignore", module="triton")
    # output of imported code must not appear in the JSON
    with contextlib.redirect_stdout(sys.stderr):
        from ..doctor.kernels.target import check_target

        with _interrupt_on_sigterm():
            report = check_target(
                target, targets, _parse_sizes(largest), show_progress=_ProgressLines()
            )
    names = ", ".join(report.kernels[:6]) + (
        f" and {len(report.kernels) - 6} more" if len(report.kernels) > 6 else ""
    )
    subject = (
        f"{pluralise(len(report.kernels), 'kernel')} ({names}), {report.compiled} compilations"
    )
    visible = report.findings
    if not json_output:
        notes = [finding for finding in visible if finding.severity == Severity.NOTE]
        # notes about inferred signatures are all that a file without a build() gives
        hidden = notes if len(notes) < len(visible) else []
        visible = [finding for finding in visible if finding not in hidden]
        for remark in dict.fromkeys(report.remarks):
            print(f"  {remark}")
        if hidden:
            subject += f"; {pluralise(len(hidden), 'note')} not shown (--json)"
    facts = {name: getattr(report, name) for name in ("kernels", "compiled", "failed", "remarks")}
    status = print_findings(
        visible, subject=subject, json_output=json_output, fail_on=threshold, **facts
    )
    raise typer.Exit(_INTERRUPTED if report.is_interrupted else status)


_INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended
_SECONDS_BETWEEN_LINES = 5.0


class _ProgressLines:
    """Prints a line of progress to stderr every few seconds. A short command prints none."""

    def __init__(self) -> None:
        self.last_time = time.monotonic()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self.last_time >= _SECONDS_BETWEEN_LINES:
            self.last_time = now
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Within this block, SIGTERM has the effect of Ctrl-C. Commands such as `timeout` send it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
