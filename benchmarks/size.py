"""How large the house is: the figures of docs/design/README.md, printed by `make size`.

    python benchmarks/size.py             # a minute: it also trains a 2-layer LoRA for forty steps
                                          and counts the calls of a layer
    python benchmarks/size.py --json

lines of sheets     rules, findings and causes of the doctor and of precision, written as text
files of a step     files of Isotype that run Python code between two steps of `isotype.train`: a
                    2-layer Llama, LoRA on every linear layer, bf16-lora, on a CPU
calls of a layer    Python functions called by forward and backward of one decoder layer (r 8 on all
                    linear layers, 64 tokens, bf16 autocast, eager): half the difference between
                    models of four and two layers; built-in functions left out
of them, since      what files hold that are wholly for features ordered after the aims of 23
                    November were set (experts, packed bases, vision-language models, preferences,
                    further pictures, exports, importers, ...): `SINCE`, none of which was there
                    before
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
SOURCE = ROOT / "src" / "isotype"
SINCE = (
    "ops/experts/* ops/packed/* ops/linear_divergence/* optimize/experts.py lora/dora.py model/packed.py model/gguf.py model/processor.py "
    "model/starts.py precision/packing.py precision/vision.py translate/pictures.py translate/kohya.py translate/ai_toolkit.py "
    "translate/onetrainer.py translate/diffusers_scripts.py data/pairs.py data/pictures.py tasks/language/preference.py "
    "tasks/language/labelled.py tasks/language/distil.py tasks/diffusion/single_file.py tasks/diffusion/text_encoders.py "
    "tasks/diffusion/families/video.py tasks/diffusion/families/edits.py inference/gguf_file.py inference/ollama.py "
    "inference/adapter_file.py inference/push.py report/live.py observe/continuity.py training/memory/blocks.py"
)
TESTS_SINCE = (
    "published.py vlms.py gguf_files.py data/test_thoughts.py distributed/test_experts.py inference/test_export.py inference/test_push.py "
    "integrations/test_pictures.py lora/test_dora.py model/test_gguf.py model/test_packed.py model/test_rope.py model/test_starts.py "
    "model/test_vision_language.py observe/test_continuity.py ops/test_experts.py ops/test_linear_divergence.py ops/test_packed.py "
    "optimize/test_experts.py report/test_live.py tasks/diffusion/test_edits.py tasks/diffusion/test_families.py "
    "tasks/diffusion/test_single_file.py tasks/diffusion/test_stories.py tasks/language/test_beside_trl.py "
    "tasks/language/test_pictures.py tasks/language/test_preference.py training/memory/test_blocks.py training/test_optimizers.py "
    "translate/test_picture_tools.py"
)


def lines(folder: Path, *endings: str, among: str = "**/*") -> tuple[int, int]:
    """Lines and files below a folder whose names end so.

    among  patterns below the folder, of which each must match a file
    """
    named = {
        pattern: [path for path in folder.glob(pattern) if path.suffix in endings]
        for pattern in among.split()
    }
    assert all(named.values()), [pattern for pattern, paths in named.items() if not paths]
    files = [path for paths in named.values() for path in paths]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files), len(files)


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

    source, files = lines(SOURCE, ".py", ".cpp", ".h")
    since, files_since = lines(SOURCE, ".py", ".cpp", ".h", among=SINCE)
    tests, _ = lines(ROOT / "tests", ".py")
    tests_since, _ = lines(ROOT / "tests", ".py", among=TESTS_SINCE)
    circles, upwards = arrows()
    step = files_of_a_step()
    found = {
        "source lines": source,
        "lines of sheets": lines(SOURCE, ".txt", ".tsv")[0],
        "source files": files,
        "source lines, files without those since": f"{source - since:,} in {files - files_since}",
        "test lines": tests,
        "test lines without those since": f"{tests - tests_since:,}",
        "files of a step": len(step),
        "calls of a layer": calls_of_a_layer(isotype.optimize),
        "calls of a layer, PEFT": calls_of_a_layer(lambda model: None),
        "circles": circles,
        "arrows upwards": upwards,
        "pages nobody cites": len(uncited_pages()),
    }
    if options.json:
        print(json.dumps(found | {"files": step}))
        return
    print(*(f"{name:44}{value}" for name, value in found.items()), sep="\n")
    if options.list:
        print(*step, sep="\n")


if __name__ == "__main__":
    main()
