"""From documents to runs: which of them belong together."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .collect import Collection
from .settings import Document, Facts

MAIN = ("hf", "simpletuner", "axolotl", "llamafactory", "torchtune", "torchtitan", "lightning", "kohya", "isotype", "script")


def _first_line(document: Document) -> int:
    return min((s.line or 0 for s in document.settings.values()), default=0)


def runs(found: Collection, device: str | None) -> list[Facts]:
    """One Facts for each main document (a trainer's arguments) with the documents next to it; further documents are separate runs."""
    made: list[Facts] = []
    used: set[int] = set()
    mains = [(folder, d) for folder, d in found.documents if d.tool in MAIN]
    for folder, main in mains:
        own_launcher = [
            d for _, d in found.documents if d.attributes.get("launcher") and d.file == main.file and _first_line(d) == _first_line(main)
        ]
        values = [s.value for d in (main, *own_launcher) for s in d.settings.values() if isinstance(s.value, str)]
        referenced = {os.path.basename(value) for value in values if re.search(r"\.(?:json|ya?ml)$", value)}
        together = [main]
        by_tool: dict[str, list[Document]] = {}
        for other_folder, other in found.documents:
            if other.tool in MAIN:
                continue
            if other.file == main.file and other.attributes.get("scope", 0) not in (0, main.attributes.get("scope", 0)):
                continue  # of another function, in a file of several programs
            if other.attributes.get("reader") == "python" and other.file != main.file and other_folder != folder:
                continue  # a program elsewhere in the tree
            if (
                os.path.basename(other.file) in referenced
                or other_folder == folder
                or other_folder in folder.parents
                or folder in other_folder.parents
            ):
                by_tool.setdefault(other.tool, []).append(other)
        for tool, candidates in by_tool.items():
            named = [d for d in candidates if os.path.basename(d.file) in referenced]
            same_file = [d for d in candidates if d.file == main.file]
            beside = [d for d in candidates if os.path.dirname(d.file) == os.path.dirname(main.file)]
            chosen = named or same_file or beside or candidates
            if tool == "accelerate" and own_launcher:  # its options win over its file's
                together += own_launcher
                used |= {id(d) for d in own_launcher}
                chosen = named or [d for d in beside if not d.attributes.get("launcher")]
            several_fit = tool in ("env", "versions", "code", "hardware") or (
                tool == "checkpoint" and len({os.path.dirname(d.file) for d in chosen}) == 1
            )
            if named or len(chosen) == 1 or several_fit:
                together += chosen
                used |= {id(d) for d in chosen}
        made.append(Facts(together, device))
    left = [(folder, d) for folder, d in found.documents if d.tool not in MAIN and id(d) not in used]
    by_folder: dict[Path, list[Document]] = {}
    for folder, document in left:
        if document.tool not in ("env", "code", "checkpoint", "hardware") or not mains:
            by_folder.setdefault(folder, []).append(document)
    for documents in by_folder.values():
        counts: dict[str, int] = {}
        for document in documents:
            counts[document.tool] = counts.get(document.tool, 0) + 1
        alone = [d for d in documents if counts[d.tool] > 1 and d.tool in ("deepspeed", "accelerate", "model")]
        rest = [d for d in documents if d not in alone]
        made += [Facts([d], device) for d in alone]
        if rest:
            made.append(Facts(rest, device))
    return made
