"""Defines `OpContract`. A differentiable function uses it to declare the dtypes of its inputs,
outputs and gradients. The module does not import torch, so that the doctor's commands can read
contracts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..dtypes import TensorSpec

# "ignored": autocast does not change the op's dtypes. "follows": the dtype of a letter in the
# signature becomes the autocast dtype, as in a matmul. "fp32": the output is fp32 under autocast,
# as in torch's cross_entropy
Autocast = Literal["ignored", "follows", "fp32"]


@dataclass(frozen=True)
class OpContract:
    """Declares the dtypes of an op's inputs, arithmetic, outputs and gradients. Example:

        OpContract("gate: F[*n d], up: F[*n d] -> F[*n d]", inside="fp32", grads={"gate": "F"})

    signature  inputs `name: spec` in call order, `->`, one output spec or several
    inside     dtype of the arithmetic (fp64 when the inputs are fp64)
    grads      the dtype of each returned gradient; `F` is the letter of an input's dtype in the
               signature
    autocast   the effect of autocast; `Autocast` lists the possible values
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
                " does not have"
            )
        assert self.outputs, "a contract has at least one output"

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The dtype and shape of each input, by its name, in the order of the arguments."""
        inputs = self.signature.split("->")[0]
        pairs = (part.split(":", 1) for part in inputs.split(",") if part.strip())
        return {name.strip(): TensorSpec.parse(spec) for name, spec in pairs}

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        outputs = self.signature.split("->")[1]
        return tuple(TensorSpec.parse(part) for part in outputs.split(",") if part.strip())
