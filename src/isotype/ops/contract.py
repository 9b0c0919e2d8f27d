"""OpContract: the declared dtype rule of a differentiable function. Imports no torch, so that the
doctor can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..dtypes import TensorSpec

# ignored: the op's dtypes are the same with autocast on; follows: a free letter becomes the
# autocast dtype, as a matmul's does; fp32: the output is fp32 under autocast, as torch's own
# cross_entropy's is
Autocast = Literal["ignored", "follows", "fp32"]


@dataclass(frozen=True)
class OpContract:
    """`OpContract("gate: F[*n d], up: F[*n d] -> F[*n d]", inside="fp32", grads={"gate": "F"},
    autocast="ignored")`

    signature  inputs `name: spec` in call order, `->`, one output spec or several
    inside     dtype of the arithmetic (fp64 when the inputs are fp64)
    grads      the dtype in which each gradient leaves; `F` is the input's own letter
    autocast   the effect of autocast: see `Autocast`
    """

    signature: str
    inside: str = "fp32"
    grads: Mapping[str, str] = field(default_factory=dict)
    autocast: Autocast = "ignored"

    def __post_init__(self) -> None:
        unknown = set(self.grads) - set(self.inputs)
        if unknown:
            raise ValueError(
                f"grads name {', '.join(sorted(unknown))}, which the signature {self.signature!r}"
                " has not"
            )
        assert self.outputs, "a contract has at least one output"

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """Name -> spec, in call order."""
        inputs = self.signature.split("->")[0]
        pairs = (part.split(":", 1) for part in inputs.split(",") if part.strip())
        return {name.strip(): TensorSpec.parse(spec) for name, spec in pairs}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        outputs = self.signature.split("->")[1]
        return tuple(TensorSpec.parse(part) for part in outputs.split(",") if part.strip())
