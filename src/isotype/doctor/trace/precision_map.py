"""The precision map: the module tree with the dtypes of parameters, activations and gradients, and who decided each, as one HTML file."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...errors import UsageError
from ...finding import Finding
from ...observe.operators import FLOATS
from ...version import __version__
from .context import Context, clean
from .origin import Origin

_CHANGES = 64  # conversions listed for one module


class PrecisionMap:
    """Collects while the program runs; strings and numbers only, so that no tensor is kept."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._outputs: dict[str, dict[str, Any]] = {}
        self._gradients: dict[str, Counter[str]] = {}
        self._changes: dict[str, dict[tuple[str, str, str, str], list[int]]] = {}
        self._trees: dict[str, list[dict[str, Any]]] = {}

    @property
    def looking(self) -> bool:
        return bool(self._context.pace.looking)

    def left(self, module: torch.nn.Module, args: Any, output: Any, *, root: bool) -> None:
        """A module's forward has ended."""
        if not self.looking:
            return
        names = self._context.names
        if root:
            self._trees[type(module).__name__] = self._tree(module)
        given = _dtypes(args)
        made = [t for t in _tensors(output) if t.dtype in FLOATS]
        if not made:
            return
        origin = self._context.provenance.get(made[0])
        self._outputs[names.of(module)] = {
            "in": " ".join(given),
            "out": " ".join(dict.fromkeys(dtype_name(t.dtype) for t in made)),
            "bytes": sum(t.nbytes for t in made),
            "why": origin.explain(),
        }

    def gradient(self, module: torch.nn.Module | None, out: torch.Tensor) -> None:
        """An op in backward made a tensor; it belongs to the module whose forward it undoes."""
        if module is not None and self.looking:
            self._gradients.setdefault(self._context.names.of(module), Counter())[dtype_name(out.dtype)] += out.nbytes

    def changed(self, origin: Origin, before: torch.dtype, out: torch.Tensor) -> None:
        """A cast or a promotion, in forward or backward."""
        rows = self._changes.setdefault(origin.module, {})
        key = (origin.kind, f"{dtype_name(before)} to {dtype_name(out.dtype)}", origin.what, str(origin.site or ""))
        if key in rows or len(rows) < _CHANGES:
            row = rows.setdefault(key, [0, 0])
            row[0] += 1
            row[1] += out.nbytes

    def _tree(self, root: torch.nn.Module) -> list[dict[str, Any]]:
        nodes = []
        for path, module in root.named_modules():
            own = [
                {
                    "name": leaf,
                    "dtype": dtype_name(t.dtype),
                    "shape": list(t.shape),
                    "bytes": t.nbytes,
                    "kind": kind,
                    "trains": t.requires_grad,
                }
                for kind, group in (("parameter", module._parameters), ("buffer", module._buffers))
                for leaf, t in group.items()
                if t is not None
            ]
            nodes.append({"path": clean(path), "name": self._context.names.of(module), "class": type(module).__name__, "tensors": own})
        return nodes

    def _worth_drawing(self, node: dict[str, Any], nodes: list[dict[str, Any]]) -> bool:
        """A module that ran, holds something, or has something below it that does."""
        below = f"{node['path']}." if node["path"] else ""
        return any(
            n["tensors"] or n["name"] in self._outputs or n["name"] in self._changes
            for n in nodes
            if n is node or n["path"].startswith(below)
        )

    def write(self, file: Path, findings: list[Finding]) -> None:
        """Draws the map.

        Raises  UsageError when the file cannot be written
        """
        trees = []
        for title, nodes in self._trees.items():
            drawn = []
            for node in nodes:
                if not self._worth_drawing(node, nodes):
                    continue
                name = node["name"]
                changes = [
                    {"kind": kind, "change": change, "what": what, "place": place, "count": count, "bytes": size}
                    for (kind, change, what, place), (count, size) in self._changes.get(name, {}).items()
                ]
                gradients = [{"dtype": word, "bytes": size} for word, size in self._gradients.get(name, {}).items()]
                drawn.append({**node, "activation": self._outputs.get(name), "gradients": gradients, "changes": changes})
            trees.append({"title": title, "nodes": drawn})
        data = {"trees": trees, "findings": [f.as_json() for f in findings], "version": __version__}
        page = resources.files(__package__).joinpath("map.html").read_text(encoding="utf-8")
        # inside <script>, "</" would end it
        page = page.replace("/*DATA*/null", json.dumps(data).replace("</", "<\\/"))
        try:
            file.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--map {file}: {error.strerror}") from None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [item for item in items if isinstance(item, torch.Tensor)]


def _dtypes(args: Any) -> list[str]:
    return list(dict.fromkeys(dtype_name(t.dtype) for t in _tensors(args)))
