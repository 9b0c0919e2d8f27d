"""How the code reads and what a step passes: the figures of docs/design/README.md.

    python benchmarks/size.py             # a minute: it also trains a 2-layer LoRA for forty steps
    python benchmarks/size.py --json

names and density   as benchmarks/words.py defines them
inner modules       modules below `isotype` that test files other than tests/api.py import
files of a step     files of Isotype that run Python code between two steps of `isotype.train`: a
                    2-layer Llama, LoRA on every linear layer, bf16-lora, on a CPU
calls of a layer    Python functions called by forward and backward of one decoder layer (r 8 on all
                    linear layers, 64 tokens, bf16 autocast, eager): half the difference between
                    models of four and two layers; built-in functions left out
circles, upwards    whether there is a circle of imports between modules, and how many point
                    upwards, as tests/test_imports.py defines them
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import words  # noqa: E402

SOURCE = ROOT / "src" / "isotype"


class Called:
    """The Python functions that are called between `start` and `stop`."""

    def __init__(self) -> None:
        self.calls = 0
        self.files: set[str] = set()

    def start(self) -> None:
        sys.setprofile(self._event)

    def stop(self) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.calls += 1
            self.files.add(frame.f_code.co_filename)


def files_of_a_step() -> list[str]:
    """The files of Isotype that the 18th step of a small LoRA run passes: no evaluation, no
    checkpoint.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import isotype
    from isotype.quickstart.text import train_tokenizer

    called = Called()

    class Watches(isotype.Callback):
        def on_step(self, moment: Any) -> None:
            called.stop()
            if moment.row["step"] == 17:
                called.start()

    pairs = [
        (f"How much is {a} plus {b}?", f"{a} plus {b} is {a + b}.")
        for a in range(6)
        for b in range(12)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = train_tokenizer([" ".join(pair) for pair in pairs], vocabulary=320)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in pairs)
        )
        with contextlib.redirect_stdout(io.StringIO()):
            isotype.train(
                model=str(folder / "base"), data=str(folder / "rows.jsonl"), precision="bf16-lora", adapter={"r": 4},
                train={"steps": 40, "batch_size": 4}, run={"folder": str(folder / "run"), "report": False}, callbacks=[Watches()],
            )  # fmt: skip
    inside = str(SOURCE) + "/"
    return sorted(file.removeprefix(inside) for file in called.files if file.startswith(inside))


def calls_of_a_layer(change: Callable[[Any], object]) -> int:
    """Python calls of a decoder layer's forward and backward after `change(model)`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    counts = []
    for layers in (2, 4):
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        base = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).bfloat16()
        # adapters are fp32
        model = get_peft_model(
            base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        change(model)
        ids = torch.randint(3, 96, (1, 64))

        def step(model: Any = model, ids: torch.Tensor = ids) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()

        for _ in range(3):
            step()
        called = Called()
        called.start()
        step()
        called.stop()
        counts.append(called.calls)
    return (counts[1] - counts[0]) // 2


def arrows() -> tuple[int, int]:
    """Circles of modules (1 where there is any), and imports of a room above."""
    from tests.test_imports import LEVELS, imports, modules, room

    known = modules()
    found = {name: imports(name, path, known) for name, path in known.items()}
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    upwards = [
        (name, other)
        for name, others in found.items()
        for other in others
        if name != "isotype"
        and room(name) != room(other)
        and level[room(other)] >= level[room(name)]
    ]
    try:
        TopologicalSorter(found).prepare()
    except CycleError:
        return 1, len(upwards)
    return 0, len(upwards)


def uncited_pages() -> list[str]:
    """Pages below docs/ whose file name stands in no other page, source file or test."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in [
            *ROOT.glob("*.md"),
            *pages,
            *ROOT.glob("docs/*.py"),
            *SOURCE.rglob("*.py"),
            *(ROOT / "tests").rglob("*.py"),
        ]
    }
    return [
        str(page.relative_to(ROOT))
        for page in pages
        if page.name != "index.md"
        and not any(page.name in text for path, text in texts.items() if path != page)
        and page.stem not in texts.get(page.with_name("index.md"), "").split()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--list", action="store_true", help="name the files of a step")
    options = parser.parse_args()
    import isotype

    reading = words.read_folder(words.SOURCE)
    circles, upwards = arrows()
    step = files_of_a_step()
    figures = {
        "tokens a line": round(reading.tokens_per_line, 1),
        "conditional expressions in 1,000 lines": round(reading.conditionals_per_1000_lines),
        "private names in 1,000": round(reading.private_per_1000_names, 1),
        "functions oddly named, percent": round(reading.odd_percent, 1),
        "functions over 25 decisions": len(reading.heavy_functions),
        "inner modules held by tests": len(words.inner_modules_in_tests(ROOT / "tests")),
        "files of a step": len(step),
        "calls of a layer": calls_of_a_layer(isotype.optimize),
        "calls of a layer, PEFT": calls_of_a_layer(lambda model: None),
        "circles": circles,
        "arrows upwards": upwards,
        "pages nobody cites": len(uncited_pages()),
    }
    if options.json:
        print(json.dumps(figures | {"files": step}))
        return
    print(*(f"{name:44}{value}" for name, value in figures.items()), sep="\n")
    if options.list:
        print(*step, sep="\n")


if __name__ == "__main__":
    main()
