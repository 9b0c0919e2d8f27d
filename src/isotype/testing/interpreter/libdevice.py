"""libdevice for the interpreter, which has only empty stubs of it: `tanh`, `rsqrt`, `erf`, ... by torch, in fp32 and fp64.

As on a GPU, a bf16 or fp16 argument is refused: these functions exist for fp32 and fp64 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle


def _torch_names() -> dict[str, Callable[..., torch.Tensor]]:
    same = (
        "abs floor ceil trunc exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    )
    same += "erf erfc erfinv lgamma round atan2 hypot copysign fmod pow nextafter"
    table: dict[str, Callable[..., torch.Tensor]] = {name: getattr(torch, name) for name in same.split()}
    special = {
        "erfcx": "erfcx",
        "normcdf": "ndtr",
        "normcdfinv": "ndtri",
        "j0": "bessel_j0",
        "j1": "bessel_j1",
        "y0": "bessel_y0",
        "y1": "bessel_y1",
    }
    special |= {"cyl_bessel_i0": "i0", "cyl_bessel_i1": "i1"}
    table |= {name: getattr(torch.special, theirs) for name, theirs in special.items()}
    table |= {f"fast_{name}f": table[name] for name in ("sin", "cos", "tan", "log", "log2", "log10", "exp", "tanh", "pow") if name in table}
    table |= {"rint": torch.round, "nearbyint": torch.round, "remainder": _ieee_remainder, "exp10": lambda x: torch.pow(10.0, x)}
    table |= {"fast_exp10f": table["exp10"], "fast_dividef": torch.div, "cbrt": _cbrt, "rcbrt": lambda x: 1 / _cbrt(x)}
    table |= {"fdim": lambda x, y: torch.clamp(x - y, min=0), "rhypot": lambda x, y: 1 / torch.hypot(x, y)}
    table |= {"saturatef": lambda x: x.clamp(0, 1), "sinpi": lambda x: torch.sin(torch.pi * x), "cospi": lambda x: torch.cos(torch.pi * x)}
    table |= {"add_rn": torch.add, "sub_rn": torch.sub, "mul_rn": torch.mul, "div_rn": torch.div, "sqrt_rn": torch.sqrt}
    table |= {"rcp_rn": torch.reciprocal, "rsqrt_rn": torch.rsqrt, "fma": _fma, "fma_rn": _fma}
    table |= {"isnan": torch.isnan, "isinf": torch.isinf, "finitef": torch.isfinite, "isfinited": torch.isfinite, "signbit": torch.signbit}
    return table


def _cbrt(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.cbrt(x.numpy()))


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x.double() * y.double() + z.double()).to(z.dtype)


def _ieee_remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x - y * torch.round(x / y)


FUNCTIONS = _torch_names()


def interpreted_libdevice(name: str, *arguments: Any) -> Any:
    """What the stub of this name returns while the interpreter runs."""
    if name not in FUNCTIONS:
        raise NotImplementedError(f"libdevice.{name} has no CPU version; known: {', '.join(sorted(FUNCTIONS))}")
    given = [a.value if isinstance(a, tl.constexpr) else a for a in arguments]
    types = [a.dtype for a in given if isinstance(a, tl.tensor)]
    wrong = [t for t in types if t not in (tl.float32, tl.float64)]
    if wrong:
        raise ValueError(f"libdevice.{name}: input arg type does not match. Expect fp32 or fp64, got {wrong[0]}")
    dtype = tl.float64 if tl.float64 in types else tl.float32
    wide = torch.float64 if dtype == tl.float64 else torch.float32
    numbers = [torch.from_numpy(np.array(a.handle.data)) if isinstance(a, tl.tensor) else torch.tensor(a, dtype=wide) for a in given]
    made = FUNCTIONS[name](*(n.to(wide) for n in numbers)).numpy()
    kind = tl.int1 if made.dtype == np.bool_ else dtype
    shape = next((a.type.shape for a in given if isinstance(a, tl.tensor) and a.type.is_block()), None)
    return tl.tensor(TensorHandle(made, kind), tl.block_type(kind, list(made.shape)) if shape is not None else kind)


def stubs() -> Iterator[tuple[FunctionType, Any]]:
    """(stub, the code to run in its place): the code is exchanged, so that names imported from libdevice earlier change too."""
    libdevice.__dict__.setdefault("_interpreted_libdevice", interpreted_libdevice)
    for name, stub in list(vars(libdevice).items()):
        if not isinstance(stub, FunctionType) or name.startswith("_"):
            continue
        count = stub.__code__.co_argcount
        arguments = ", ".join(f"arg{i}" for i in range(count))
        space: dict[str, Any] = {}
        exec(f"def {name}({arguments}, _semantic=None): return _interpreted_libdevice({name!r}, {arguments})", space)
        yield stub, space[name]
