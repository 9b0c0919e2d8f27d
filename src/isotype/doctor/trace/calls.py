"""The function mode: what the program called, above the dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .context import Context

_BACKWARD = frozenset({"backward", "grad"})


class Calls(TorchFunctionMode):
    """What the program called: names casts and factories, and sees the checks made above the dispatcher."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__name__
        if name == "__get__":
            return func(*args)  # an attribute: half of all calls, and no op
        context = self._context
        outer, context.calling = context.calling, func
        context.autocast_around = torch.is_autocast_enabled(context.device)
        suspended = name in _BACKWARD and context.pace.backward_unwatched() and context.suspend(hooks=True)
        try:
            if name == "__set__" and len(args) == 2:
                context.attribute_set(func, *args)
            return func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            context.call_failed(error, func, args, kwargs)
            raise
        finally:
            if suspended:
                context.resume()
            if name == "backward":
                context.scaling.backward_done()
            context.calling = outer
