"""Defines `python -m isotype.doctor run SCRIPT.py`. It does the same as `isotype doctor run`.
Launchers can also start it, as in `torchrun -m isotype.doctor run train.py`.
"""

import sys


def main() -> int:
    if sys.argv[1:2] != ["run"]:
        print("usage: python -m isotype.doctor run SCRIPT.py [ARGS]", file=sys.stderr)
        return 2
    from .run.program import main as run_program

    return run_program(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
