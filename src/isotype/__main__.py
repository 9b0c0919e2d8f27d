"""`isotype` and `python -m isotype`. Ctrl-C ends with status 130, also while a command is still
being imported.
"""

import gc
import sys

_IMPORT_THRESHOLD = 10_000  # new objects between two garbage collections; Python's own is 700


def collect_less_while_importing() -> None:
    """Makes garbage collections rare until ten of them in a row find that no module was imported
    since the one before.

    While torch, transformers and PEFT were imported, 1,241 collections took 1.4 of 10 CPU seconds;
    now 84 take 0.6 (AMD EPYC, busy).
    """
    thresholds = gc.get_threshold()
    module_count = len(sys.modules)
    without_import = 0

    def restore_after_imports(phase: str, details: dict[str, int]) -> None:
        nonlocal module_count, without_import
        if phase == "start":
            without_import = 0 if len(sys.modules) != module_count else without_import + 1
            module_count = len(sys.modules)
            if without_import == 10:
                gc.set_threshold(*thresholds)
                gc.callbacks.remove(restore_after_imports)

    gc.set_threshold(_IMPORT_THRESHOLD, *thresholds[1:])
    gc.callbacks.append(restore_after_imports)


def main() -> None:
    # without the packages of the command line, so that a program starts without delay
    is_run = sys.argv[1:3] == ["doctor", "run"]
    if is_run and sys.argv[3:4] not in ([], ["--help"], ["-h"]):
        from isotype.doctor.run.program import main as run_program

        sys.exit(run_program(sys.argv[3:]))
    collect_less_while_importing()
    try:
        from isotype.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
