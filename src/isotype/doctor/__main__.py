"""Defines `python -m isotype.doctor`, which does the same as `isotype doctor`. Launchers can start it
too, as in `torchrun -m isotype.doctor run train.py`.
"""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "doctor")
    runpy.run_module("isotype", run_name="__main__")
