"""NaN put into a run at a random step: into a weight, an activation, a batch, a gradient, and into
a weight after its last update.

The run must stop before a weight that is good becomes bad, name the step and the tensor, and name a
checkpoint that is good.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .child import run
from .trial import Trial
from .workshop import EVERY, FIRST, SECOND, STEPS, Workshop

if TYPE_CHECKING:
    from tests.api import Loop

NAN = float("nan")


def trained_weight(loop: Loop) -> None:
    _fill(next(p for p in loop.model.parameters() if p.requires_grad))


def frozen_weight(loop: Loop) -> None:
    _fill(next(p for p in loop.model.parameters() if not p.requires_grad))


def activation(loop: Loop) -> None:
    """The output of one layer's MLP, from this step on."""
    module = next(m for n, m in loop.model.named_modules() if n.endswith("layers.1.mlp"))
    module.register_forward_hook(lambda module, arguments, output: output * NAN)


def batch(loop: Loop) -> None:
    """One position of the embedded batch, as a row of a file of embeddings or pictures with a NaN
    in it would give.
    """

    def poison(module: Any, arguments: Any, output: Any) -> Any:
        output = output.clone()
        output[-1, 0, 0] = NAN
        return output

    loop.model.get_input_embeddings().register_forward_hook(poison)


def gradient(loop: Loop) -> None:
    trained = [p for p in loop.model.parameters() if p.requires_grad]
    trained[len(trained) // 2].register_hook(lambda g: g * NAN)


def updated_weight(loop: Loop) -> None:
    """After the optimizer's step and before the checkpoint: the loss was finite, and only the next
    one would show it.
    """
    loop.stepper.optimizer.register_step_post_hook(lambda *_: trained_weight(loop))


INTO: dict[str, tuple[Callable[[Loop], None], tuple[str, ...]]] = {
    "a trained weight": (trained_weight, (FIRST, SECOND)),
    "a frozen weight": (frozen_weight, (FIRST,)),
    "an activation": (activation, (FIRST, SECOND)),
    "a batch": (batch, (FIRST, SECOND)),
    "a gradient": (gradient, (FIRST, SECOND)),
    "a weight just updated": (updated_weight, (FIRST, SECOND)),
}


QUICK = ("an activation", "a weight just updated")


def nan_trials(workshop: Workshop, *, times: int, seed: int) -> Iterator[Trial]:
    """`times` each, under both recipes; 0: a slice of it."""
    steps = random.Random(seed)
    for what, inject, recipe in _planned(times):
        yield _trial(workshop, what, inject, recipe, steps.randint(EVERY + 1, STEPS))


def _planned(times: int) -> list[tuple[str, Callable[[Loop], None], str]]:
    if not times:
        return [(what, INTO[what][0], INTO[what][1][0]) for what in QUICK]
    return [
        (what, inject, recipe)
        for what, (inject, recipes) in INTO.items()
        for recipe in recipes
        for _ in range(times)
    ]


def _trial(
    workshop: Workshop, what: str, inject: Callable[[Loop], None], recipe: str, at: int
) -> Trial:
    folder = workshop.new_folder()
    ended = run(
        ["train", str(workshop.settings(folder, recipe))],
        workshop.log(),
        before=lambda: _before_step(at, inject),
    )
    wrong, good = list[str](), (at - 1) // EVERY * EVERY
    if ended.status != 1 or not ended.clear or "NF001" not in ended.error:
        wrong = [f"exit {ended.status} at step {at}: {ended.output[-1500:]}"]
    elif f"step_{good}" not in ended.error:
        wrong = [f"NaN at step {at}: the message does not name step_{good}: {ended.error}"]
    _, stuck, different = workshop.ends_as_undisturbed(folder, workshop.undisturbed(recipe)[0])
    return Trial(
        part="nan",
        what=f"NaN into {what}",
        wrong=wrong + stuck,
        different=different,
        message=ended.told("  saved"),
    )


def _before_step(at: int, inject: Callable[[Loop], None]) -> None:
    """In the child: the loop's own step, with `inject` right before step `at`."""
    from tests.api import Loop

    plain = Loop._step

    def poisoned(self: Loop, step: int) -> None:
        if step == at:
            inject(self)
        plain(self, step)

    Loop._step = poisoned


def _fill(parameter: Any) -> None:
    parameter.data.view(-1)[0] = NAN
