"""`isotype` and `python -m isotype`. Ctrl-C ends with status 130, also while a command is still
being imported.
"""

import sys


def main() -> None:
    # without the packages of the command line, so that a program starts without delay
    is_run = sys.argv[1:3] == ["doctor", "run"]
    if is_run and sys.argv[3:4] not in ([], ["--help"], ["-h"]):
        from isotype.doctor.run.program import main as run_program

        sys.exit(run_program(sys.argv[3:]))
    try:
        from isotype.cli.app import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
