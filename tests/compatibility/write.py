"""Writes what this version leaves behind, for later versions to read: `python -m
tests.compatibility.write NAME`.

A written folder is never written again: the code of its day made it. Every path in it is relative
to the folder itself.
"""

import json
import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent

PAIRS = [
    (f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(4) for b in range(6)
]
CONFIGURATION = """\
model:
  name: base
data:
  train: rows.jsonl
  eval_split: 0.2
  max_length: 64
adapter:
  kind: {kind}
  r: 2
precision:
  preset: {preset}
train:
  steps: 4
  batch_size: 2
  accumulate: 2
  learning_rate: 1.0e-3
  eval_every: 2
run:
  folder: {folder}
  keep: 1
  sample_tokens: 4
  report: false
"""


def write(target: Path) -> None:
    """A base, its data, two configurations, and the finished run of each: LoRA, and full
    fine-tuning in bf16 with rounding.
    """
    from isotype.config.load import load
    from isotype.tasks.choose import train
    from tests.api import train_tokenizer
    from tests.models import SIZES, tiny

    target.mkdir()
    os.chdir(target)
    tokenizer = train_tokenizer([f"{q} {a}" for q, a in PAIRS] * 2, vocabulary=300)
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("_id")} | {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
    }
    model = tiny(
        **{
            **sizes,
            "vocab_size": len(tokenizer),
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
    )
    model.to(torch.bfloat16).save_pretrained("base")
    tokenizer.save_pretrained("base")
    rows = (
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in PAIRS
    )
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder, kind, preset in (("lora", "lora", "bf16-lora"), ("full", "none", "bf16-pure")):
        file = Path(f"{folder}.yaml")
        file.write_text(CONFIGURATION.format(kind=kind, preset=preset, folder=folder))
        assert train(load(file, [], {})) == 0
        environment = Path(folder, "env.json")
        known = json.loads(environment.read_text())
        environment.write_text(
            json.dumps(
                {
                    "isotype": known["isotype"],
                    "python": known["python"],
                    "packages": known["packages"],
                }
            )
            + "\n"
        )
        Path(folder, ".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    write(HERE / sys.argv[1])
