"""What the comparison between steps costs (`isotype.observe.continuity`), as a share of a step.

    python benchmarks/continuity.py                      # LoRA and full fine-tuning of a 4-layer Llama of width 512
    python benchmarks/continuity.py --hidden 256 --steps 5

Both are timed in the same steps, in CPU time of one thread: `begin` and `take`, and the whole step around them. On a GPU the host's time is
the cost, as the step waits for its device once with and without it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isotype.config.schema import TrainSection
from isotype.data.rows import Row
from isotype.observe.continuity import Continuity
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from isotype.training.step import Stepper, assemble_stepper


def stepper_of(preset: str, hidden: int, layers: int) -> Stepper:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )
    model = AutoModelForCausalLM.from_config(config)
    if preset.endswith("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    precision = PRESETS[preset]
    optimize(model, precision)
    apply_precision(model, precision, device_type="cpu")
    return assemble_stepper(
        model.train(), TrainSection(), precision, partial(batch_loss_sum, dtype=precision.loss)
    )


def measured(
    preset: str, *, hidden: int, layers: int, tokens: int, steps: int
) -> tuple[float, float, int]:
    """Seconds of the comparison and of the step, each the median of all steps but the first, and
    how many tensors are trained.
    """
    stepper = stepper_of(preset, hidden, layers)
    continuity = Continuity(stepper.model, stepper.optimizer)
    stepper.continuity = continuity
    ids = tuple(
        torch.randint(3, 8192, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    )
    batch = collate([Row(ids, ids, 0)] * 4, pad_id=0)
    compared, whole = [], []
    for step in range(1, steps + 2):
        started = time.process_time()
        continuity.compare()
        begun = time.process_time()
        stepper([batch], step=step, learning_rate=1e-4, watch_changes=False)
        updated = time.process_time()
        continuity.take_sample(f"the update of step {step}")
        ended = time.process_time()
        compared.append(begun - started + ended - updated)
        whole.append(ended - started)
    return (
        statistics.median(compared[1:]),
        statistics.median(whole[1:]),
        len(stepper.accumulator.parameters),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    given = vars(parser.parse_args())
    for preset in ("bf16-lora", "bf16-mixed"):
        compared, step, trained = measured(preset, **given)
        print(
            f"{preset:12s} {trained} trained tensors  step {step * 1e3:.1f} ms  comparison {compared * 1e3:.2f} ms  {compared / step:.2%}"
        )


if __name__ == "__main__":
    main()
