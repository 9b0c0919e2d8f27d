"""`python -m isotype.proof PART DEVICE ROWS_FILE [--tiny]` runs one part in this process and appends
its rows to a file. `isotype proof` calls it.
"""

from __future__ import annotations

import json
import sys

from .parts import PARTS, Scale


def main(arguments: list[str]) -> None:
    name, device, rows_file = arguments[:3]
    scale = Scale(device, is_tiny="--tiny" in arguments)
    with open(rows_file, "a", encoding="utf-8") as file:
        for row in PARTS[name].load()(scale):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
