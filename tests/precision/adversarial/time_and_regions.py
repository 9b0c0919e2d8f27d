"""Programs that break the declaration later than the first look, or where a dispatch mode sees nothing."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .arithmetic import Fp16MLP, in_fp16
from .program import program
from .tiny import HIDDEN, MLP, tiny


class LaterInFp16(MLP):
    """Right in its first call, in fp16 from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls == 1 else in_fp16(self, x)


def at_step(number: int, change):
    return lambda run, step: change(run) if step == number else None


def add_hook(run) -> None:
    run.model.layers[0].mlp.register_forward_hook(lambda m, args, out: out.half().to(out.dtype))


def swap_buffer(run) -> None:
    run.model.rotary.inv_freq = run.model.rotary.inv_freq.bfloat16()


def swap_forward(run) -> None:
    mlp = run.model.layers[0].mlp
    mlp.forward = lambda x: in_fp16(mlp, x)


def swap_module(run) -> None:
    new = Fp16MLP()
    new.load_state_dict(run.model.layers[0].mlp.state_dict())
    run.model.layers[0].mlp = new


def swap_parameter(run) -> None:
    mlp = run.model.layers[0].mlp
    mlp.up.weight = nn.Parameter(mlp.up.weight.detach().bfloat16())


class CompiledMLP(MLP):
    """In fp16, within a compiled region."""

    def __init__(self) -> None:
        super().__init__()
        self.run = torch.compile(self.inner, backend="eager")

    def inner(self, x: Tensor) -> Tensor:
        return MLP.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def compiled_module() -> nn.Module:
    model = tiny()
    model.layers[1].mlp.compile(backend="eager")
    return model


class InAThread(MLP):
    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []

        def work() -> None:
            with torch.no_grad():
                made.append(MLP.forward(self, x.double().float()).to(x.dtype))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return super().forward(x) + made[0].detach()


class OutOfSight(MLP):
    """Takes the dispatch modes off for its own arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        with _disable_current_modes(), torch.no_grad():
            y = x.half().softmax(-1).to(x.dtype)
        return super().forward(x) + y


@torch.library.custom_op("adversarial::narrow_mean", mutates_args=())
def narrow_mean(x: Tensor) -> Tensor:
    return x.half().mean(-1, keepdim=True).to(x.dtype)


@narrow_mean.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1))


class CustomOp(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - narrow_mean(x.detach()))


class Scripted(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.cap = torch.jit.trace(lambda x: torch.tanh(x.half()).to(torch.bfloat16), torch.zeros(1, 1, HIDDEN, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.cap(x))


class FilledElsewhere(MLP):
    """Fresh memory that foreign code writes through its address."""

    def forward(self, x: Tensor) -> Tensor:
        import ctypes

        y = torch.empty(x.shape, dtype=torch.float32)
        ctypes.memset(y.data_ptr(), 0, y.numel() * 4)
        return super().forward(x + y.to(x.dtype))


program("later_in_fp16", lambda: tiny(mlp=LaterInFp16), steps=8)
program("hook_added_later", tiny, steps=4, before_step=at_step(3, add_hook))
program("buffer_swapped_later", tiny, steps=4, before_step=at_step(3, swap_buffer))
program("forward_swapped_later", tiny, steps=4, before_step=at_step(3, swap_forward))
program("module_swapped_later", tiny, steps=4, before_step=at_step(3, swap_module))
program("parameter_swapped_later", tiny, steps=4, before_step=at_step(3, swap_parameter))
program("compiled_module", compiled_module)
for made in (CompiledMLP, InAThread, OutOfSight, CustomOp, Scripted, FilledElsewhere):
    program(made.__name__, lambda made=made: tiny(mlp=made))
