"""The command that installs an extra of this package, as this copy of it was installed.

The name `isotype` alone is no answer for a copy that came from a checkout or a wheel: an index may
not have it. The package's own place and `direct_url.json` (PEP 610), which pip and uv write beside
an installed package, tell where this copy came from.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "isotype"
# src/isotype of a checkout, or site-packages/isotype
_PACKAGE = Path(__file__).resolve().parents[1]


def install_command(*extras: str) -> str:
    """`pip install ...` for these extras, to be typed in the current folder."""
    suffix = f"[{','.join(extras)}]"
    checkout = _checkout_folder()
    if checkout is not None:
        return f"pip install -e {_quote(_shorten(checkout) + suffix)}"
    record = _read_direct_url()
    url = record.get("url", "")
    is_local = url.startswith("file:")
    source = Path(url2pathname(urlsplit(url).path))
    if not url or (is_local and not source.exists()):
        return f"pip install {_quote(NAME + suffix)}"
    if is_local:
        option = "-e " if record.get("dir_info", {}).get("editable") else ""
        return f"pip install {option}{_quote(_shorten(source) + suffix)}"
    version_control = record.get("vcs_info")
    if version_control:
        url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
    return f"pip install {_quote(f'{NAME}{suffix} @ {url}')}"


def _checkout_folder() -> Path | None:
    """The folder of the checkout whose `src` this copy runs from."""
    folder = _PACKAGE.parent.parent
    if _PACKAGE.parent.name == "src" and (folder / "pyproject.toml").is_file():
        return folder
    return None


def _read_direct_url() -> dict[str, Any]:
    """Empty for a copy that an index gave, or that nothing installed."""
    try:
        text = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}


def _shorten(path: Path) -> str:
    """`.` for the current folder, which is how people write it."""
    return "." if path == Path.cwd() else str(path)


def _quote(requirement: str) -> str:
    return shlex.quote(requirement)
