"""The code cells of a notebook as one Python text, with the file's line of each of its lines."""

from __future__ import annotations

import json
from collections.abc import Callable

from .json_lines import BadJson

_NOT_PYTHON = ("%", "!", "?")
_PYTHON_MAGICS = {"capture", "time", "timeit", "prun", "python", "python3"}  # `%%bash` and all others hold another language


def read(text: str) -> tuple[str, Callable[[int | None], int | None]]:
    """-> the code, and the function from its lines to the notebook's. Shell and magic lines become comments. Raises BadJson."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadJson(f"not a notebook: {error}", getattr(error, "lineno", 1)) from error
    code: list[str] = []
    places: list[int] = []
    raw, position = text, 0
    cells = data.get("cells") if isinstance(data, dict) else None
    for cell in cells if isinstance(cells, list) else []:
        source = cell.get("source") if isinstance(cell, dict) and cell.get("cell_type") == "code" else None
        if not isinstance(source, (str, list)):
            continue
        lines = source.splitlines() if isinstance(source, str) else "".join(map(str, source)).splitlines()
        magics = {line.split()[0][2:] for line in lines if line.startswith("%%") and line[2:].strip()}
        foreign, continued = bool(magics - _PYTHON_MAGICS), False
        for line in lines:
            written = json.dumps(line, ensure_ascii=False)[1:-1]
            at = raw.find(written, position) if written.strip() else position
            position = at if at >= 0 else position
            plain = line.lstrip()
            indent = line[: len(line) - len(plain)]
            within = foreign or continued  # a comment needs no indentation; the first line of a command may be a block's only one
            shell = within or plain.startswith(_NOT_PYTHON)
            continued = shell and plain.endswith("\\")  # `!pip install \` goes on in the next line
            code.append(f"# {plain}" if within else f"{indent}pass  # {plain}" if shell else line)
            places.append(raw.count("\n", 0, position) + 1)

    def line_of(line: int | None) -> int | None:
        return places[line - 1] if line is not None and 0 < line <= len(places) else line

    return "\n".join(code) + "\n", line_of
