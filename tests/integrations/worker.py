"""One process of a trainer under torchrun or accelerate: trains as told, and the first process
writes its curve to a JSON file.

python -m tests.integrations.worker FOLDER NAME FORM PRECISION BATCH ACCUMULATE CURVE   PRECISION:
fp32, bf16-lora, ..., or none
"""

import json
import os
import sys
from pathlib import Path

from isotype.errors import IsotypeError
from isotype.integrations import attach
from tests.integrations.trainers import TRAINERS, Setting, curve


def main(
    folder: str,
    name: str,
    form: str,
    precision: str,
    batch: str,
    accumulate: str,
    written: str,
    *changes: str,
) -> None:
    more = {
        "per_device_train_batch_size": int(batch), "gradient_accumulation_steps": int(accumulate),
        **({"ddp_backend": "gloo"} if "WORLD_SIZE" in os.environ else {}),
        "output_dir": str(Path(folder) / f"out-{precision}"), **{k: json.loads(v) for k, _, v in (c.partition("=") for c in changes)},
    }  # fmt: skip
    trainer = TRAINERS[name](Setting(Path(folder), form, more=more))
    said: list[str] = []
    if precision != "none":
        try:
            said = attach(trainer, precision, quiet=True).notes
        except IsotypeError as error:
            print("REFUSED", error)
            return
    numbers = curve(trainer)
    if trainer.is_world_process_zero():
        Path(written).write_text(
            json.dumps({"numbers": numbers, "processes": trainer.args.world_size, "notes": said})
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
