"""Loads the TARGET of the command line and checks its kernels. A target is a file, a module, a
kernel, or a function `build()`.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import UsageError
from ...finding import Finding, Severity, join_names
from ...wording import format_duration, pluralise
from ..loading import (
    convert_import_errors,
    get_member,
    import_on_any_device,
    load_module,
    required_parameters,
)
from .calls import WrapperCalls, check_wrapper, split_calls, trap_launches
from .checker import ARGUMENTS_UNKNOWN, Report, check
from .compile_inputs import (
    DEFAULT_TARGET,
    Reach,
    is_kernel,
    parse_target,
    require_triton,
    unwrap_kernel,
)
from .infer import returns_value
from .largest import check_largest


def check_target(
    text: str,
    targets: Sequence[str] | None = None,
    largest: Sequence[int] = (),
    *,
    show_progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Checks the kernels that `text` names. After Ctrl-C, the report contains the findings about
    the kernels that were checked until then.

    targets        the architectures; None means TARGETS of the module, or sm_90
    largest        the arguments for `build` with which it creates inputs of the largest shape, for
                   the check of offsets
    show_progress  receives a line of text before each kernel of a file, a module or a folder
    Raises         UsageError if it cannot be loaded, or holds no kernel
    """
    require_triton()
    requested_targets = list(targets) if targets else None
    for target in requested_targets or []:
        parse_target(target)
    location, _, name = text.partition(":")
    report = Report()
    modules = load_modules(location, report.remarks)
    module = modules[0]
    resolved_targets = (
        requested_targets
        or [str(target) for target in getattr(module, "TARGETS", [])]
        or [DEFAULT_TARGET]
    )
    if name:
        _check_name(module, name, location, resolved_targets, report)
        if largest:
            _check_offsets(module, name, largest, resolved_targets, report)
        return report
    if largest:
        raise UsageError(
            f"{text}: a largest shape needs a function that creates the inputs",
            fix="name it: FILE.py:build, with build(rows=4, columns=64)",
        )
    _check_modules(modules, resolved_targets, report, show_progress)
    if any(ARGUMENTS_UNKNOWN in remark for remark in report.remarks):
        report.remarks.append(
            "to check a kernel whose arguments cannot be inferred, write a function build() that"
            " returns (function, inputs), and name it: FILE.py:build"
        )
    if not report.kernels and not report.is_interrupted:
        raise UsageError(f"{text}: no @triton.jit kernel in it{_first_remark(report.remarks)}")
    return report


def load_modules(location: str, remarks: list[str]) -> list[ModuleType]:
    """Imports the module of a path or a dotted name, with the submodules of a package. Kernels that
    are launched during the import are not run.

    remarks  receives one line about all files or submodules that cannot be imported for the same
             reason
    Raises  UsageError for a missing file, a syntax error, or a failed import
    """
    failures: dict[str, list[str]] = {}
    with convert_import_errors(location), trap_launches():
        if Path(location).is_dir():
            modules = _import_folder(location, failures)
        else:
            module = import_on_any_device(partial(load_module, location, as_package_member=True))
            modules = [module, *_import_submodules(module, failures)]
    for reason, names in sorted(failures.items(), key=lambda item: -len(item[1])):
        remarks.append(
            f"{pluralise(len(names), 'file')} not checked, {reason} ({join_names(names, 3)})"
        )
    if not modules:
        raise UsageError(f"{location}: no file of it can be imported{_first_remark(remarks)}")
    return modules


def _import_folder(location: str, failures: dict[str, list[str]]) -> list[ModuleType]:
    files = sorted(
        file
        for file in Path(location).rglob("*.py")
        if "triton" in file.read_text(encoding="utf-8", errors="replace")
    )
    if not files:
        raise UsageError(f"{location}: no Python file in it names triton")
    modules = []
    for file in files:
        try:
            load = partial(load_module, str(file), as_package_member=True)
            modules.append(import_on_any_device(load))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest.skip at the top of a file is no Exception
            _record_failure(failures, error, str(file))
    return modules


def _import_submodules(module: ModuleType, failures: dict[str, list[str]]) -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(
        getattr(module, "__path__", []), f"{module.__name__}.", onerror=lambda name: None
    ):
        try:
            yield import_on_any_device(partial(importlib.import_module, info.name))
        except Exception as error:
            # an optional submodule may need a package that is not installed; the other submodules
            # are checked
            _record_failure(failures, error, info.name)


def _record_failure(failures: dict[str, list[str]], error: BaseException, name: str) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    failures.setdefault(reason, []).append(name)


def find_kernels(module: ModuleType) -> dict[str, Any]:
    """Returns the kernels that are defined in this module, in a dict whose keys are their names.
    `@triton.jit` functions that return a value are checked together with the kernels that call
    them.
    """
    kernels = {
        name: value
        for name, value in vars(module).items()
        if is_kernel(value) and unwrap_kernel(value).function.__module__ == module.__name__
    }
    return {
        name: value
        for name, value in kernels.items()
        if not returns_value(unwrap_kernel(value).function)
    }


def _check_modules(
    modules: Sequence[ModuleType],
    targets: Sequence[str],
    report: Report,
    show_progress: Callable[[str], None],
) -> None:
    """Checks all kernels of all modules, or those before Ctrl-C. flash-linear-attention has 481
    kernels in 232 files, which take several minutes.
    """
    kernels = [
        (module, name, kernel)
        for module in modules
        for name, kernel in find_kernels(module).items()
    ]
    start = time.monotonic()
    for index, (module, name, kernel) in enumerate(kernels):
        show_progress(_format_progress(index, len(kernels), module, report, start))
        try:
            _check_inferred(name, kernel, targets, report)
        except KeyboardInterrupt:
            report.is_interrupted = True
            report.remarks.append(
                f"interrupted: {index} of {pluralise(len(kernels), 'kernel')} were checked"
            )
            return


def _format_progress(
    index: int, total: int, module: ModuleType, report: Report, start: float
) -> str:
    """Returns a line such as `kernel 93/481  3 findings  41 s  ETA 2 min 36 s  fla/ops/gla/chunk.py`. The
    number counts findings that are more severe than a note.
    """
    elapsed = time.monotonic() - start
    count = sum(finding.severity > Severity.NOTE for finding in report.findings)
    parts = [f"kernel {index + 1}/{total}", pluralise(count, "finding"), format_duration(elapsed)]
    if index:
        parts.append(f"ETA {format_duration(elapsed / index * (total - index))}")
    path = f"{module.__name__.replace('.', '/')}.py"
    return "  ".join([*parts, path])


def _check_inferred(name: str, kernel: Any, targets: Sequence[str], report: Report) -> None:
    if type(unwrap_kernel(kernel).function).__name__ == "GluonJITFunction":
        report.remarks.append(f"{name}: not checked, because it is a Gluon kernel")
        return
    try:
        checked = check(kernel, targets=targets)
        checked.findings = [_lower_inferred(finding) for finding in checked.findings]
        report.add(checked)
    except UsageError:
        raise
    except Exception as error:
        report.remarks.append(
            f"{name}: not checked, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )


def _lower_inferred(finding: Finding) -> Finding:
    """Lowers the severity of a finding to `note` if the signature of the kernel was inferred from a
    source file. In this case it is not known whether any caller passes such tensors.
    """
    is_inferred = dict(finding.details).get("reach") == Reach.INFERRED.description
    return replace(finding, severity=Severity.NOTE) if is_inferred else finding


def _check_name(
    module: ModuleType, name: str, location: str, targets: Sequence[str], report: Report
) -> None:
    value = get_member(module, name, location)
    if is_kernel(value):
        _check_kernel(module, value, None, targets, report)
    elif callable(value):
        _check_callable(module, name, value, targets, report)
    else:
        raise UsageError(
            f"{name} is a {type(value).__name__}: expected a kernel, a function that launches"
            " kernels, or build()"
        )


def _check_offsets(
    module: ModuleType, name: str, largest: Sequence[int], targets: Sequence[str], report: Report
) -> None:
    """Checks the offsets at the largest shape. `name` is the name of a function that takes the
    sizes and returns (function, inputs).
    """
    build = getattr(module, name)
    pair = None if is_kernel(build) else build()
    if not isinstance(pair, tuple) or len(pair) != 2 or is_kernel(pair[0]):
        raise UsageError(f"{name} does not return (function, inputs), which a largest shape needs")
    report.add(check_largest(pair[0], lambda *sizes: build(*sizes)[1], largest, targets[0]))


def _check_kernel(
    module: ModuleType, kernel: Any, matrix: Any, targets: Sequence[str], report: Report
) -> None:
    """Checks a kernel with the signatures in `MATRIX` and `CONSTEXPRS` of its module. If there are
    none, the signatures are inferred.
    """
    signatures = (
        matrix if isinstance(matrix, Mapping) and matrix else getattr(module, "MATRIX", None)
    )
    is_matching = isinstance(signatures, Mapping) and all(
        set(signature) <= set(unwrap_kernel(kernel).function.arg_names)
        for signature in signatures.values()
    )
    report.add(
        check(
            kernel,
            signatures if is_matching else None,
            getattr(module, "CONSTEXPRS", None),
            targets,
        )
    )


def _check_callable(
    module: ModuleType,
    name: str,
    function: Callable[..., Any],
    targets: Sequence[str],
    report: Report,
) -> None:
    if isinstance(function, type) or required_parameters(function):
        raise UsageError(
            f"{name} needs inputs: name a function without arguments that returns ({name}, inputs)"
        )
    calls = WrapperCalls()
    result = None
    with calls.record(parse_target(targets[0]), "as called"):
        result = function()
    if isinstance(result, tuple) and result and is_kernel(result[0]):
        _check_kernel(module, result[0], result[1] if len(result) > 1 else None, targets, report)
    elif is_kernel(result):
        _check_kernel(module, result, None, targets, report)
    elif isinstance(result, tuple) and len(result) == 2 and callable(result[0]):
        for inputs in split_calls(result[1]):
            report.add(check_wrapper(result[0], inputs, targets))
        if not report.kernels:
            raise UsageError(
                f"{name}: calling what it returned launched no Triton kernel"
                + _first_remark(report.remarks)
            )
    elif calls.launches:
        report.add(calls.report(targets))
    else:
        raise UsageError(
            f"{name}() launched no Triton kernel, and returned no kernel"
            + _first_remark(list(calls.refused.values()))
        )


def _first_remark(remarks: Sequence[str]) -> str:
    return f": {remarks[0]}" if remarks else ""
