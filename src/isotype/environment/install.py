"""Builds the command that installs an extra of this package from the same source as the installed
copy.

The installed copy may come from a Git checkout or a wheel, and a package index may not have a
package `isotype`. The source of this copy is read from the location of the package and from
`direct_url.json` (PEP 610), which pip and uv write beside an installed package.
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
_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


def install_command(*extras: str) -> str:
    """Returns the command `pip install ...` for these extras. The current folder is written as `.`,
    and every other folder with its full path.
    """
    extras_suffix = f"[{','.join(extras)}]"
    checkout = _checkout_folder()
    if checkout is not None:
        return f"pip install -e {_quote(_dot_if_current(checkout) + extras_suffix)}"
    record = _read_direct_url()
    url = record.get("url", "")
    is_local = url.startswith("file:")
    source = Path(url2pathname(urlsplit(url).path))
    if not url or (is_local and not source.exists()):
        return f"pip install {_quote(NAME + extras_suffix)}"
    if is_local:
        option = "-e " if record.get("dir_info", {}).get("editable") else ""
        return f"pip install {option}{_quote(_dot_if_current(source) + extras_suffix)}"
    version_control = record.get("vcs_info")
    if version_control:
        url = f"{version_control['vcs']}+{url}@{version_control['commit_id']}"
    return f"pip install {_quote(f'{NAME}{extras_suffix} @ {url}')}"


def _checkout_folder() -> Path | None:
    """Returns the folder of the checkout from whose `src` this copy runs; None for an installed
    copy.
    """
    folder = _PACKAGE_FOLDER.parent.parent
    if _PACKAGE_FOLDER.parent.name == "src" and (folder / "pyproject.toml").is_file():
        return folder
    return None


def _read_direct_url() -> dict[str, Any]:
    """Returns the content of `direct_url.json`. The content is empty for a copy that came from an
    index or was not installed.
    """
    try:
        text = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}


def _dot_if_current(path: Path) -> str:
    """Returns `.` for the current folder, and the unchanged path for other folders."""
    return "." if path == Path.cwd() else str(path)


def _quote(requirement: str) -> str:
    return shlex.quote(requirement)
