"""The function mode: what the program called, above the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from .tracer import Tracer

_BACKWARD = frozenset({"backward", "grad"})


class Calls(TorchFunctionMode):
    """What the program called: names casts and factories, and sees the checks made above the dispatcher."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__name__
        if name == "__get__":
            return func(*args)  # an attribute: half of all calls, and no op
        tracer = self._tracer
        outer, tracer.calling = tracer.calling, func
        tracer.autocast_around = torch.is_autocast_enabled(tracer.device)
        resting = name in _BACKWARD and tracer.pace.backward_rests() and tracer.rest(hooks=True)
        try:
            if name == "__set__" and len(args) == 2:
                tracer.attribute_set(func, *args)
            return func(*args, **kwargs) if kwargs else func(*args)
        except Exception as error:
            tracer.call_failed(error, func, args, kwargs)
            raise
        finally:
            if resting:
                tracer.wake()
            if name == "backward":
                tracer.scaling.backward_done()
            tracer.calling = outer
