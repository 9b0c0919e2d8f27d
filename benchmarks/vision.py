"""A vision-language model beside TRL's SFT on the same rows with pictures, and on text beside its
language model alone; CPU, one thread.

python -m benchmarks.vision          two minutes; prints one JSON object and writes
                                     benchmarks/results/vision.json
python -m benchmarks.vision --small  the same with few layers, steps and rounds, to see that it
                                     runs; writes nothing

pictures  A Qwen2.5-VL of 4 decoder layers of 512 and a vocabulary of 32,000; four rows of about 300
          tokens with a picture each, bf16, LoRA of rank 16 on the language part, answers learnt.
          Each contender is a whole run (`isotype.train`, `SFTTrainer.train`) in a process of its
          own, in turns; pixels are read in each step. Times are the step's wall and CPU seconds
          (medians), memory is the peak of the resident size in a step less what was held before it
          (the least), the tower's seconds are CPU time of its forward (the least: some steps of a
          run are watched).
text      Steps of text rows, of a vision-language model and of the class for text with the same
          weights' sizes, in turns in one process.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from isotype.environment.memory_limits import status_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


RESULT = Path(__file__).parent / "results" / "vision.json"
ROWS, SENTENCES, WARM = 4, 26, 2  # WARM: steps that are not counted
SENTENCE = "what colour is the square? it is red. "
SIZES = {
    "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
TOWER = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 512, "patch_size": 14,
         "fullatt_block_indexes": [1, 3], "window_size": 112}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_base(folder: Path, layers: int) -> None:
    """The model with its processor, pictures, and rows.jsonl beside it."""
    from PIL import Image
    from tests import vlms

    rope = {"type": "mrope", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    vlms.FAMILIES["qwen2_5_vl"] = vlms.FAMILIES["qwen2_5_vl"] | {
        "eye": TOWER,
        "text": {"rope_scaling": rope},
    }
    vlms.saved_with_processor(
        "qwen2_5_vl",
        folder / "base",
        num_hidden_layers=layers,
        max_position_embeddings=1024,
        **SIZES,
    )
    rows = []
    for i in range(ROWS):
        Image.effect_noise((112, 112), 60 + i).convert("RGB").save(folder / f"{i}.png")
        parts = [
            {"type": "image", "path": f"{i}.png"},
            {"type": "text", "text": "what colour is the square?"},
        ]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": parts},
                    {"role": "assistant", "content": (SENTENCE * SENTENCES).strip()},
                ]
            }
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- pictures


class Clock:
    """What each step took: wall and CPU seconds, bytes at its peak above those before, seconds of
    the tower.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.tower = self._entered = 0.0
        self.begun, self.first_loss = False, 0.0

    def watch(self, model: Any) -> None:
        from isotype.precision.apply import inner_model
        from isotype.precision.vision import vision_parts

        inner = inner_model(model)
        parts = vision_parts(inner)
        assert parts is not None
        tower = inner.get_submodule(parts.towers[0])
        tower.register_forward_pre_hook(lambda *_: setattr(self, "_entered", time.process_time()))
        tower.register_forward_hook(
            lambda *_: setattr(self, "tower", self.tower + time.process_time() - self._entered)
        )

    def tick(self, loss: float) -> None:
        """A step ended, with this loss, and the next one begins."""
        if self.begun:
            took = {
                "seconds": time.perf_counter() - self.wall,
                "cpu": time.process_time() - self.cpu,
                "tower": self.tower,
            }
            self.steps.append(
                {
                    **took,
                    "bytes": status_bytes("VmHWM") - self.before,
                    "first_loss": self.first_loss,
                }
            )
        else:
            self.first_loss = loss
        gc.collect()
        # what earlier steps freed would hide what this one takes
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self.before, self.tower, self.begun = status_bytes("VmRSS"), 0.0, True
        self.wall, self.cpu = time.perf_counter(), time.process_time()


def own_run(folder: Path, steps: int, clock: Clock) -> None:
    import isotype

    class Steps(isotype.Callback):
        def on_step(self, moment: Any) -> None:
            if moment.step == 1:
                clock.watch(moment.model)
            clock.tick(moment.row["loss"])

    isotype.train(
        model=str(folder / "base"), data={"train": str(folder / "rows.jsonl"), "eval_split": 0.0, "cache": "none"},
        adapter={"r": 16, "alpha": 16, "targets": "all-linear"}, precision="bf16-lora", callbacks=[Steps()],
        train={"steps": steps, "batch_size": ROWS, "accumulate": 1, "learning_rate": 1e-4, "gradient_checkpointing": "none"},
        run={"folder": str(folder / f"run-{os.getpid()}"), "sample_every": 0, "report": False, "log_every": 1},
    )  # fmt: skip


def trl_run(folder: Path, steps: int, clock: Clock) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from PIL import Image
    from transformers import AutoModelForImageTextToText, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from isotype.config.schema import DataSection, ModelSection
    from isotype.model.load import load_tokenizer
    from isotype.model.processor import build_picture_reader

    class Steps(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                clock.tick(logs["loss"])

    section = ModelSection(name=str(folder / "base"))
    pictures = build_picture_reader(
        section, DataSection(train="", cache="none"), load_tokenizer(section)
    )
    assert pictures is not None
    processor = copy.copy(pictures.processor)  # the pixels of both contenders are the same
    processor.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content[0].text }}<|im_end|>"
        "{% endgeneration %}{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    )
    rows = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        asked, answered = json.loads(line)["messages"]
        image, text = asked["content"]
        messages = [{"role": "user", "content": text["text"]}, answered]
        rows.append({"images": [Image.open(folder / image["path"])], "messages": messages})
    args = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=1e-4, bf16=True, use_cpu=True,
        save_strategy="no", report_to=[], gradient_checkpointing=False, max_length=None, assistant_only_loss=True, logging_steps=1,
        disable_tqdm=True,
    )  # fmt: skip
    names = rf".*language_model.*\.({'|'.join(TARGETS)})"
    trainer = SFTTrainer(
        AutoModelForImageTextToText.from_pretrained(folder / "base", dtype=torch.bfloat16), args, train_dataset=Dataset.from_list(rows),
        processing_class=processor, callbacks=[Steps()],
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM"),
    )  # fmt: skip
    clock.watch(trainer.model)
    trainer.train()


def contender(name: str, folder: Path, steps: int) -> list[dict[str, float]]:
    clock = Clock()
    {"isotype": own_run, "trl": trl_run}[name](folder, steps, clock)
    return clock.steps


def pictures(folder: Path, *, steps: int, rounds: int, layers: int) -> dict[str, Any]:
    write_base(folder, layers)
    found: dict[str, list[dict[str, float]]] = {"isotype": [], "trl": []}
    for _ in range(rounds):
        for name, of in found.items():
            command = [
                sys.executable,
                "-m",
                "benchmarks.vision",
                "--contender",
                name,
                str(folder),
                "--steps",
                str(steps),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-3000:]}")
            of += json.loads(done.stdout.splitlines()[-1])[WARM - 1 :]
    middle = {
        name: {key: statistics.median(step[key] for step in of) for key in of[0]}
        for name, of in found.items()
    }
    least = {name: min(step["bytes"] for step in of) for name, of in found.items()}
    tokens = row_tokens(folder) * ROWS

    def ratio(key: str, less: str | None = None) -> float:
        ours, trl = (
            (middle[name][key] - (middle[name][less] if less else 0.0))
            for name in ("isotype", "trl")
        )
        return trl / ours

    return {
        "tokens_of_a_step": tokens,
        "tokens_per_second": {name: tokens / of["seconds"] for name, of in middle.items()},
        "cpu_seconds": {name: of["cpu"] for name, of in middle.items()},
        "tower_seconds": {name: min(step["tower"] for step in of) for name, of in found.items()},
        "step_mib": {name: n / 2**20 for name, n in least.items()},
        "speed_ratio": ratio("seconds"), "cpu_ratio": ratio("cpu"), "cpu_ratio_without_tower": ratio("cpu", "tower"),
        "memory_ratio": least["isotype"] / least["trl"],
        "first_loss": {name: of["first_loss"] for name, of in middle.items()},
    }  # fmt: skip


def row_tokens(folder: Path) -> int:
    """All rows have the same."""
    from isotype.config.schema import DataSection, ModelSection
    from isotype.data.load import load_data
    from isotype.model.load import load_tokenizer
    from isotype.model.processor import build_picture_reader

    section, data = (
        ModelSection(name=str(folder / "base")),
        DataSection(train=str(folder / "rows.jsonl"), eval_split=0.0, cache="none"),
    )
    tokenizer = load_tokenizer(section)
    return len(
        load_data(data, tokenizer, seed=0, pictures=build_picture_reader(section, data, tokenizer))
        .train[0]
        .input_ids
    )


# --- text


def alone(family: str, whole: Any) -> Any:
    """The class for text alone, of the sizes of the whole model's language part."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = whole.config.get_text_config()
    if family == "qwen2_5_vl":
        same = {
            key: getattr(text, key)
            for key in (*SIZES, "num_hidden_layers", "max_position_embeddings")
            if hasattr(text, key)
        }
        text = AutoConfig.for_model("qwen2", tie_word_embeddings=False, **same)
    return AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16)


def stepper(model: Any) -> Callable[[], tuple[float, float]]:
    """Seconds and CPU seconds of forward and backward of four text rows, with the adapter, ops and
    precision of a run.
    """
    from isotype.config.schema import AdapterSection
    from isotype.data.rows import Row
    from isotype.model.adapter import attach_adapter
    from isotype.optimize import optimize
    from isotype.precision import PRESETS
    from isotype.precision.apply import apply_precision
    from isotype.tasks.language.batches import collate
    from isotype.tasks.language.objective import batch_loss_sum

    model.config.use_cache = False
    adapted = attach_adapter(model.bfloat16(), AdapterSection(r=16), seed=0)
    optimize(adapted, PRESETS["bf16-lora"], device_type="cpu")
    apply_precision(adapted, PRESETS["bf16-lora"], device_type="cpu")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 290, (320,), generator=generator).tolist() for _ in range(ROWS)]
    batch = collate([Row(tuple(ids), tuple(ids), 1) for ids in rows], pad_id=0)

    def step() -> tuple[float, float]:
        adapted.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        batch_loss_sum(adapted, batch).backward()
        return time.perf_counter() - wall, time.process_time() - cpu

    return step


def text_alone(family: str, *, pairs: int, layers: int) -> dict[str, float]:
    from tests.vlms import tiny_vlm

    whole = tiny_vlm(family, num_hidden_layers=layers, max_position_embeddings=1024, **SIZES)
    steps = {"whole": stepper(whole), "alone": stepper(alone(family, whole))}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for i in range(pairs + 1):
        for name in sorted(steps, reverse=bool(i % 2)):
            times[name].append(steps[name]())
    # of each pair: what disturbs one step of it disturbs the other
    ratios = [[a[k] / b[k] for a, b in zip(times["whole"][1:], times["alone"][1:])] for k in (0, 1)]
    return {
        "seconds": statistics.median(t[0] for t in times["whole"][1:]), "ratio": statistics.median(ratios[0]),
        "cpu_ratio": statistics.median(ratios[1]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--contender", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.contender:
        name, folder = asked.contender
        print(json.dumps(contender(name, Path(folder), asked.steps)))
        return
    layers, steps, rounds, pairs = (1, 4, 1, 2) if asked.small else (4, asked.steps, 2, 4)
    with tempfile.TemporaryDirectory() as name:
        result: dict[str, Any] = {
            "threads": 1, "layers": layers, "rows": ROWS, "pictures": pictures(Path(name), steps=steps, rounds=rounds, layers=layers),
            "text": {family: text_alone(family, pairs=pairs, layers=layers) for family in ("qwen2_5_vl", "llava", "gemma3")},
        }  # fmt: skip
    print(json.dumps(result, indent=1))
    if not asked.small:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
