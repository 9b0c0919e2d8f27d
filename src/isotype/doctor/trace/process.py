"""Finds faults in the use of autocast and of the default dtype, and handles torch.compile. These
are settings of the whole process.

`Autocast` finds recomputations (by activation checkpointing) that ran under another autocast state
than the forward. `Autocast` also finds ops that use a cached copy of a weight after the weight has
changed. `DefaultDtype` finds functions that set the default dtype and do not restore it.
`CompiledRegions` runs compiled regions eagerly, because the trace cannot observe compiled code.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...dtypes import format_dtype
from ...finding import Finding
from ...observe.operators import NARROW_FLOATS
from ...observe.origin import (
    Site,
    call_sites,
    innermost_site,
    innermost_user_site,
    is_library_file,
    running_frames,
    short_path,
    site_place,
)
from .context import Context, Watcher, make_finding, site_detail
from .origin import Origin


@dataclass(slots=True)
class DefaultDtypeChange:
    """A call of `torch.set_default_dtype`.

    setter        the line that called it: the innermost line of the user's code, or else of a
                  library
    tensor_count  the number of tensors that were created with it while its setter ran
    late_sites    the lines that created tensors with it after its setter had ended
    """

    old_dtype: torch.dtype
    new_dtype: torch.dtype
    setter: Site
    tensor_count: int = 0
    late_sites: list[Site] = field(default_factory=list)


class DefaultDtype(Watcher):
    """Watches `torch.set_default_dtype`. Finds functions that set a new default dtype and do not
    restore the old one. For example, such a function ends with an error before it has restored the
    dtype.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._original = torch.set_default_dtype
        self._initial = torch.get_default_dtype()
        self._current_change: DefaultDtypeChange | None = None
        # function -> its change, which was still in force when the function had ended
        self._leaks: dict[CodeType, DefaultDtypeChange] = {}
        # function -> its change, under which tensors were created inside and outside of the function
        self._unrestored_changes: dict[CodeType, DefaultDtypeChange] = {}

    @contextmanager
    def activate(self) -> Iterator[None]:
        with mock.patch.object(torch, "set_default_dtype", self._set_default_dtype):
            yield
            self.find_leak()

    def _set_default_dtype(self, dtype: torch.dtype) -> None:
        old_dtype = torch.get_default_dtype()
        self.find_leak()
        self._original(dtype)
        new_dtype = torch.get_default_dtype()
        if new_dtype == old_dtype:
            return
        if new_dtype == self._initial:
            self._unrestored_changes.clear()  # the initial dtype was restored
        stack = [site for site in call_sites(2) if not site.file.startswith("<")]
        if new_dtype == self._initial:
            self._current_change = None
        else:
            self._current_change = DefaultDtypeChange(
                old_dtype, new_dtype, innermost_user_site(stack) or stack[0]
            )

    def on_forward_start(self) -> None:
        self.find_leak()

    def find_leak(self) -> DefaultDtypeChange | None:
        """Returns a change of the default dtype that should have been undone. The function that
        made this change contains code to undo it, but has ended without running this code. Returns
        None if there is no such change.
        """
        change = self._current_change
        if change is None or torch.get_default_dtype() != change.new_dtype:
            return None
        code = change.setter.code
        if _is_running(code) or not _restores_dtype(code):
            return None
        self._leaks.setdefault(code, change)
        return change

    def record_creation(self, site: Site | None) -> None:
        """Called when a tensor is created without dtype= while the default dtype is changed."""
        change = self._current_change
        if change is None or change.new_dtype not in NARROW_FLOATS or len(change.late_sites) > 2:
            return
        code = change.setter.code
        if _is_running(code):
            change.tensor_count += 1
        elif change.tensor_count and site is not None and code.co_name != "<module>":
            change.late_sites.append(site)
            self._unrestored_changes.setdefault(code, change)

    def explain(self) -> Finding | None:
        """Returns a finding if a function has changed the default dtype and has ended without
        restoring it. Otherwise returns None.
        """
        change = self.find_leak()
        if change is not None:
            return _build_finding(change, is_leaked=True)
        return None

    def findings(self) -> list[Finding]:
        unrestored = [
            _build_finding(change, is_leaked=False)
            for code, change in self._unrestored_changes.items()
            if code not in self._leaks
        ]
        return unrestored + [
            _build_finding(change, is_leaked=True) for change in self._leaks.values()
        ]


def _build_finding(change: DefaultDtypeChange, *, is_leaked: bool) -> Finding:
    setter = change.setter
    details: tuple[tuple[str, str], ...] = ()
    if not is_leaked:
        details = tuple(("created at", f"{site}: {site.text}") for site in change.late_sites)
    return make_finding(
        "TR017",
        site_place(setter),
        details,
        leaked=is_leaked,
        library=is_library_file(setter.file),
        setter=setter.function,
        where=setter,
        before=format_dtype(change.old_dtype),
        after=format_dtype(change.new_dtype),
        built=change.tensor_count,
        first=change.late_sites[0] if change.late_sites else "",
    )


def _is_running(code: CodeType) -> bool:
    return any(frame.f_code is code for frame in running_frames(2))


def _restores_dtype(code: CodeType) -> bool:
    """True if a function contains code that restores the default dtype. We assume this if it
    reads the old dtype, or sets the dtype more than once.
    """
    calls = [i.argval for i in dis.get_instructions(code) if isinstance(i.argval, str)]
    return "get_default_dtype" in calls or calls.count("set_default_dtype") > 1


class CompiledRegions(Watcher):
    """Switches torch.compile off during the trace, and adds a note about this to the report."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._compile: Any = torch.compile
        self._eager_stances = ExitStack()

    @contextmanager
    def activate(self) -> Iterator[None]:
        if "torch._dynamo" in sys.modules:
            self._eager_stances.enter_context(torch.compiler.set_stance("force_eager"))
        with mock.patch.object(torch, "compile", self._compile_eagerly), self._eager_stances:
            yield

    def _compile_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        self._eager_stances.enter_context(torch.compiler.set_stance("force_eager"))
        site = innermost_site()
        if site is not None and not is_library_file(site.file):
            self.reports[site] = make_finding("TR020", site_place(site))
        return self._compile(*args, **kwargs)


class Autocast(Watcher):
    """Records for each module the autocast dtype of its last forward, and whether the module ever
    ran with autocast on.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # id of a module -> autocast dtype in its last forward, None if autocast was off
        self._last_dtype: dict[int, torch.dtype | None] = {}
        self._modules_with_autocast: set[int] = set()
        # module -> line, autocast state of its forward, and of its recomputation
        self._differing_modules: dict[str, tuple[Site | None, str, str]] = {}
        # storage of a weight's low-precision copy -> its reference, the weight, and the origin
        self._copies: dict[int, tuple[StorageWeakRef, weakref.ref[torch.Tensor], Origin]] = {}
        # copies whose weight was updated after the copy was made
        self.stale: dict[int, tuple[StorageWeakRef, Origin, Site | None]] = {}
        # weight -> the line of its update, and the line that used the stale copy
        self._stale_uses: dict[str, tuple[Site | None, Site | None]] = {}

    def on_module_enter(self, module: torch.nn.Module, args: tuple) -> None:
        """Records the autocast state of a module. The method is also called when a checkpoint
        recomputes the module in backward.
        """
        device = self._context.device
        key = id(module)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        else:
            dtype = None
        if torch._C._current_autograd_node() is None:
            self._last_dtype[key] = dtype
            if dtype is not None:
                self._modules_with_autocast.add(key)
        elif self._last_dtype.get(key, dtype) != dtype:
            name = self._context.names.module_path(module)
            # inner modules differ for the same reason, so only the outermost module is recorded
            if not any(name.startswith(f"{outer}.") for outer in self._differing_modules):
                self._differing_modules.setdefault(
                    name,
                    (
                        innermost_site(),
                        _describe_autocast(self._last_dtype[key]),
                        _describe_autocast(dtype),
                    ),
                )

    def on_cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        """Records the low-precision copy of a trainable weight. Autocast keeps this copy in its
        cache until the outermost autocast region ends.
        """
        if origin.kind == "autocast" and isinstance(source, torch.nn.Parameter):
            storage = out.untyped_storage()
            self._copies[storage._cdata] = (StorageWeakRef(storage), weakref.ref(source), origin)

    def on_update(self, parameter: torch.Tensor) -> None:
        """Called when a tensor is updated in place while autocast is on. From then on, the copy of
        the tensor in autocast's cache has old values.
        """
        if not torch.is_autocast_cache_enabled():
            return
        for key, (storage, owner, origin) in self._copies.items():
            if owner() is parameter and not storage.expired():
                self.stale[key] = (storage, origin, innermost_site())

    def on_use(self, inputs: list[torch.Tensor]) -> None:
        """Detects an op in forward that reads a cached copy with old values."""
        for tensor in inputs:
            key = tensor.untyped_storage()._cdata
            storage, origin, updated = self.stale.get(key, (None, None, None))
            if storage is not None and storage.expired():
                del self.stale[key]
            elif origin is not None:
                self._stale_uses.setdefault(
                    (origin.upstream or origin).creator, (updated, innermost_site())
                )

    def on_forward_start(self) -> None:
        self._copies = {key: entry for key, entry in self._copies.items() if not entry[0].expired()}
        self.stale = {key: entry for key, entry in self.stale.items() if not entry[0].expired()}

    def describe_state(self) -> tuple[str, bool]:
        """Returns a text that describes the autocast state. Also returns whether the running module
        ran with autocast on before.
        """
        device = self._context.device
        ran_with_autocast = (
            bool(self._context.stack)
            and id(self._context.stack[-1].module) in self._modules_with_autocast
        )
        if torch.is_autocast_enabled(device) or self._context.is_caller_autocast_on:
            return f"on, {format_dtype(torch.get_autocast_dtype(device))}", ran_with_autocast
        if ran_with_autocast:
            return "off here, on when this module ran before", True
        return "off here", False

    def recomputation_finding(self, error: str = "") -> Finding | None:
        """Returns a finding about a module that was recomputed under another autocast state than in
        its forward. Returns None if there is no such module.

        error  the message of the error that the recomputation raised, if any
        """
        if not self._differing_modules:
            return None
        module, (site, forward_state, recompute_state) = next(iter(self._differing_modules.items()))
        location = module
        symbol = module
        if site is not None:
            location = f"{site.function}, {short_path(site.file)}:{site.line}"
            symbol = f"{site.function} ({module})"
        finding_place = site_place(site, symbol)
        return make_finding(
            "TR003",
            finding_place,
            site_detail("called at", site),
            error=error,
            module=module,
            before=forward_state,
            after=recompute_state,
            where=location,
        )

    def findings(self) -> list[Finding]:
        findings = (
            [recomputation] if (recomputation := self.recomputation_finding()) is not None else []
        )
        if self._stale_uses:
            names = list(self._stale_uses)
            updated, used = self._stale_uses[names[0]]
            update = f" at {updated}" if updated is not None else ""
            facts = {
                "count": len(names),
                "shown": ", ".join(names[:4]),
                "update": update,
                "used": used,
            }
            findings.append(
                make_finding(
                    "TR014",
                    site_place(updated, names[0]),
                    site_detail("updated at", updated),
                    **facts,
                )
            )
        return findings


def _describe_autocast(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"on ({format_dtype(dtype)})"
