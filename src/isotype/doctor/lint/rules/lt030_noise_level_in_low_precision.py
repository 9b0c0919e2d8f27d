from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..rule import Hit, Rule
from ..source import SourceFile, bindings, keyword, last_name
from .low_dtypes import LOW, casts_low, is_low

_LEVEL = re.compile(r"(^|_)(timesteps?|sigmas?|noise_levels?)$")
_MAKES_LEVELS = re.compile(r"(^|_)(sigmas?|timesteps?)(_|$)")
_SAME_VALUES = frozenset({"to", "cuda", "cpu", "flatten", "view", "reshape", "unsqueeze", "expand", "repeat"})


class NoiseLevelInLowPrecision(Rule):
    """a diffusion model's timestep or sigma is cast to a low precision

    Why
    ---
    bf16 keeps 8 bits: of 1,000 timesteps 498 stay apart, and one is moved by up to 3.5. The model is then told another noise level than the
    one its picture was mixed with. A sigma in the latents' dtype is up to 1.94 of 1,000 off, and so are the noisy latent and the target.
    Several example scripts for training do one or the other.

    Example
    -------
    ```python
    latents = vae.encode(pixels).latent_dist.sample().to(dtype=weight_dtype)
    sigmas = get_sigmas(timesteps, n_dim=latents.ndim, dtype=latents.dtype)
    predicted = transformer(noisy, timestep=timesteps.to(weight_dtype))
    ```

    Use instead
    -----------
    ```python
    sigmas = get_sigmas(timesteps, n_dim=latents.ndim, dtype=torch.float32)
    noisy = ((1.0 - sigmas) * latents + sigmas * noise).to(weight_dtype)
    predicted = transformer(noisy, timestep=timesteps)
    ```

    Fix safety
    ----------
    There is no automatic fix: the noisy latent may have to be cast after it was mixed.

    Known problems
    --------------
    Off by default: too few findings were read to tell how often it is right. A value counts as a noise level by its name (`timesteps`,
    `sigma`), and `latents.dtype` as low only where the same function casts or makes the latents so. Levels that bf16 holds exactly, such as
    those of a four-step schedule, lose nothing.
    """

    code = "LT030"
    name = "noise-level-in-low-precision"
    on = False
    words = ("timestep", "sigma", "noise_level")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for call in file.nodes(ast.Call):
            if isinstance(call.func, ast.Attribute) and _LEVEL.search(_name(call.func.value)) and _casts(file, call):
                yield _hit(file, call, _name(call.func.value))
            elif _MAKES_LEVELS.search(last_name(call.func)) and (dtype := keyword(call, "dtype")) is not None and _low(file, dtype):
                yield _hit(file, call, last_name(call.func))
        for node in file.nodes(ast.Assign):
            target, value = node.targets[0], node.value
            if not isinstance(target, ast.Name) or not _LEVEL.search(target.id) or not isinstance(value, ast.Call):
                continue
            told = isinstance(value.func, ast.Attribute) and _LEVEL.search(_name(value.func.value))
            if isinstance(value.func, ast.Attribute) and not told and _casts(file, value):
                yield _hit(file, value, target.id)


def _hit(file: SourceFile, call: ast.Call, what: str) -> Hit:
    return Hit(
        node=call,
        message=f"`{file.snippet(call)}` rounds noise levels to a low precision",
        cause=f"bf16 keeps 8 bits of `{what}`: of 1,000 levels 498 stay apart, and the model is told another one than its picture has",
        fix="keep timesteps and sigmas in float32, and cast what was mixed with them",
    )


def _name(node: ast.expr) -> str:
    """The last name of what is cast, past what only moves or reshapes it, and past an index."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_VALUES:
            node = node.func.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return str(node.slice.value)
        else:
            return last_name(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _casts(file: SourceFile, call: ast.Call) -> bool:
    given = [*call.args, *([dtype] if (dtype := keyword(call, "dtype")) is not None else [])]
    return casts_low(file, call) or (last_name(call.func) == "to" and any(_low(file, one) for one in given))


def _low(file: SourceFile, dtype: ast.expr) -> bool:
    """A low precision, or `x.dtype` of an x that the same function last assigned from a cast to one, or from a call that is given one."""
    if is_low(file, dtype):
        return True
    if not (isinstance(dtype, ast.Attribute) and dtype.attr == "dtype" and isinstance(dtype.value, ast.Name)):
        return False
    before = [
        value
        for statement in file.own(file.function_of(dtype) or file.tree)
        for target, value in bindings(statement)
        if isinstance(target, ast.Name) and target.id == dtype.value.id and value.lineno < dtype.lineno
    ]
    made = max(before, key=lambda value: value.lineno, default=None)  # nested statements come after those around them
    return isinstance(made, ast.Call) and (casts_low(file, made) or any(file.dotted(a) in LOW for a in made.args))
