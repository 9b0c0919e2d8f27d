"""torch.compile and Triton: compiled regions are run eagerly so that they can be seen, and kernel launches are watched from outside."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ....finding import Finding, Place, Severity
from ..context import Context
from ..source import Site, in_library
from ..watcher import Watcher


class Compiled(Watcher):
    """Switches torch.compile off while tracing, with a note, and records launches of Triton kernels."""

    order = 85

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._compile: Any = torch.compile
        self._stance: Any = None
        self._regions: dict[Site, None] = {}
        self._launches: dict[str, int] = {}
        self._jit: Any = None
        self._jit_run: Any = None

    def start(self) -> None:
        if "torch._dynamo" in sys.modules:
            self._hold_off()
        torch.compile = self._compiling
        self.forward_begins()

    def forward_begins(self) -> None:
        """Called at every forward, because the program may import Triton after the trace began."""
        if self._jit is None and "triton.runtime.jit" in sys.modules:
            self._watch_launches()

    def stop(self) -> None:
        torch.compile = self._compile
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if self._jit is not None:
            self._jit.run = self._jit_run
            self._jit = None

    def _hold_off(self) -> None:
        if self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")

    def _compiling(self, *args: Any, **kwargs: Any) -> Any:
        self._hold_off()
        site = self._context.locator.here()
        if site is not None and not in_library(site.file):
            self._regions[site] = None
        return self._compile(*args, **kwargs)

    def _watch_launches(self) -> None:
        """Kernel arguments never pass the dispatcher: what a launch gets is seen where the launch is made."""
        from triton.runtime.jit import JITFunction

        watch, inner = self, JITFunction.run
        self._jit, self._jit_run = JITFunction, inner

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(kernel, "__name__", "kernel")
            watch._launches[name] = watch._launches.get(name, 0) + 1
            try:
                return inner(kernel, *args, **kwargs)
            except Exception as error:
                names = list(getattr(kernel, "arg_names", ()))
                watch._context.failures.launch_failed(error, name, [*zip(names, args), *kwargs.items()])
                raise

        JITFunction.run = run

    def findings(self) -> list[Finding]:
        found = []
        for site in self._regions:
            found.append(
                Finding(
                    code="TR020",
                    severity=Severity.NOTE,
                    message="a torch.compile'd region was run eagerly while tracing",
                    place=Place(file=site.file, line=site.line, symbol=site.function),
                    cause="a compiled graph shows the tracer its inputs and outputs only; run eagerly, every op in it is seen. What "
                    "the compiler itself decides is not: "
                    "Inductor keeps fused intermediates in fp32, and its backward runs under the autocast state of its forward",
                    fix="no change is needed; for dtypes inside compiled code see TORCH_LOGS=output_code",
                )
            )
        if self._launches:
            shown = ", ".join(f"{name} ({count}x)" for name, count in list(self._launches.items())[:6])
            found.append(
                Finding(
                    code="TR021",
                    severity=Severity.NOTE,
                    message=f"Triton kernels were launched: {shown}",
                    cause="the tracer sees the arguments of a launch, not the dtypes inside the kernel",
                    fix="check the kernels themselves with `isotype doctor kernels FILE.py`",
                )
            )
        return found
