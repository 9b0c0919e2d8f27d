"""What a family of dtype errors is: one operator's way of refusing, and its causes, some of which several families share.

The docstring of a family's function is its page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...dtypes import is_float, itemsize, torch_word
from ...finding import Severity
from .situation import Situation


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What an incident showed.

    operator  what refused: `matrix product`, `convolution`, ...
    dtypes    role -> dtype word, in the order of the text (`left`, `right`; `expected`, `got`; `query`, `key`, `value`; ...)
    words     other facts of the text: a variable, an operator's internal name
    """

    text: str
    operator: str
    dtypes: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    situation: Situation = field(default_factory=Situation)

    def dtype(self, role: str, otherwise: str = "another dtype") -> str:
        return self.dtypes.get(role, otherwise)

    @property
    def half(self) -> str:
        """The 16-bit float that takes part, bf16 when none was named."""
        return next((d for d in self.dtypes.values() if d in ("bf16", "fp16")), "bf16")

    @property
    def torch_half(self) -> str:
        return f"torch.{torch_word(self.half)}"

    @property
    def autocast(self) -> str:
        """The call that switches autocast on, for the device that the text names, or CUDA."""
        device = next((kind for kind in ("cpu", "mps") if kind in self.situation.said), "cuda")
        return f'torch.autocast("{device}", dtype={self.torch_half})'


@dataclass(frozen=True, kw_only=True)
class Cause:
    """name: in a few words; score: higher is likelier; because: the evidence seen, empty when it is only the usual cause."""

    name: str
    score: float
    why: str
    fix: str
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class Explained:
    message: str
    causes: list[Cause]
    severity: Severity = Severity.ERROR

    def ranked(self) -> list[Cause]:
        return sorted(self.causes, key=lambda c: -c.score)


Family = Callable[[Seen], Explained]
FAMILIES: dict[str, tuple[str, Family]] = {}  # operator -> (code, function)


def family(code: str, *operators: str) -> Callable[[Family], Family]:
    """Registers a function for what refused; several operators may share it."""

    def register(function: Family) -> Family:
        for operator in operators:
            assert operator not in FAMILIES, operator
            FAMILIES[operator] = (code, function)
        return function

    return register


def wider(left: str, right: str) -> bool:
    try:
        return itemsize(left) > itemsize(right)
    except ValueError:
        return False


def is_floating(word: str) -> bool:
    try:
        return is_float(word)
    except ValueError:
        return False


def outside_autocast(s: Seen, base: float = 0.0) -> Iterator[Cause]:
    """Generation, evaluation and validation run outside the autocast that a trainer puts around the training forward only."""
    if "autocast" in s.situation:
        return
    if "generate" in s.situation:
        seen = f"generate is called in {s.situation.where('generate')}"
        if "callback" in s.situation:
            seen += f", from the callback {s.situation.where('callback')}"
        yield Cause(
            name="generate outside autocast",
            score=base + 6 + ("callback" in s.situation) + ("trainer" in s.situation),
            why=(
                "the trainer wraps only the training forward in autocast; generate() is outside autocast, so an fp32 "
                f"activation (from fp32 norms, adapters or embeddings) meets {s.half} weights uncast"
            ),
            fix=(
                f"with torch.no_grad(), {s.autocast}:\n    out = model.generate(**inputs)\nor cast what is fp32 once: "
                f"the norms and the head, model.to({s.torch_half})"
            ),
            because=seen,
        )
    elif "evaluation" in s.situation and "backward" not in s.situation:
        yield Cause(
            name="evaluation outside autocast",
            score=base + 4,
            why=f"training runs under autocast and this evaluation does not: fp32 activations meet {s.half} weights uncast",
            fix=f"with torch.no_grad(), {s.autocast}:\n    ...  # the evaluation forward",
            because=f"evaluation in {s.situation.where('evaluation')}",
        )


def custom_backward(s: Seen) -> Iterator[Cause]:
    if "backward" not in s.situation:
        return
    if "custom backward" in s.situation:
        yield Cause(
            name="custom backward mixes dtypes",
            score=8,
            why=(
                "a hand-written autograd backward multiplies the incoming gradient (in the dtype autocast gave the "
                "output) with saved tensors of another dtype; backward runs outside autocast"
            ),
            fix=(
                "decorate forward with torch.amp.custom_fwd(device_type='cuda') and backward with "
                "torch.amp.custom_bwd(device_type='cuda'), and cast next to the product:\n"
                "    saved = saved.to(grad_output.dtype)\nreturn each gradient in its tensor's dtype"
            ),
            because=f"custom backward in {s.situation.where('custom backward')}",
        )
    elif "recompute" not in s.situation:
        yield Cause(
            name="dtypes differ in backward",
            score=5,
            why=(
                "backward runs outside autocast: the gradient has the dtype of the forward's output and meets a "
                "tensor saved in another dtype"
            ),
            fix=(
                "make the forward produce one dtype: cast the odd operand before the product, or use "
                "torch.amp.custom_fwd / custom_bwd in a custom function"
            ),
            because=f"backward in {s.situation.where('backward')}",
        )
