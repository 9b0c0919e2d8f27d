"""What a packed base costs in exactness and memory, format by format, against fp64 of the dense
weights that its files mean.

    python benchmarks/packed_errors.py

Random packed tensors, a Llama of 3 layers, 256 wide, inner 464 (14.5 blocks of 32; 512 for GGUF,
whose blocks hold 256), LoRA of rank 4 on every layer, bf16. In brackets Isotype's own bf16-lora on
the dense weights; "ratio" is the largest over layers of a layer's gradient error over that of
bf16-lora. The merge is in fp32. Memory is measured on 4 layers of 1,024, over the file's bytes:
what the loaded model holds, and the process's largest anonymous memory while it loads; mapped files
are not part of that. A figure beyond the bounds (1.5, 2e-5, 1.15, the file and one layer) ends with
an exclamation mark, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import gguf_files, published
from tests.model.test_packed import adapted, dense, off, step
from tests.models import tiny

from isotype.inference.merge import merged_state
from isotype.model.load import Source, load_base
from isotype.precision import PRESETS

GGUF = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
BF16 = PRESETS["bf16-lora"]
IDS = torch.arange(3, 259).view(4, 64)


def written(form: str, folder: Path, **sizes: int) -> Path:
    """The folder or file of a model in this format."""
    tokenizer = gguf_files.splitting()
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = tiny(
        "llama",
        vocab_size=320,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        **ids,
        **sizes,
    )
    if form not in GGUF:
        published.write(model, tokenizer, folder, form)
        return folder
    tokenizer.save_pretrained(folder)
    gguf_files.write(model, folder, folder / "model.gguf", form)
    return folder / "model.gguf"


def loaded(place: Path, form: str) -> nn.Module:
    word = "gguf" if form in GGUF else published.FORMATS[form][0]
    return load_base(
        Source(str(place)),
        BF16.but(base=word),
        attention="auto",
        device=torch.device("cpu"),
        trainable=False,
    )


def anonymous() -> int:
    """Bytes of the process that are no file's."""
    return next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )


class Peak(threading.Thread):
    """The largest anonymous memory until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest, self.on = 0, True

    def run(self) -> None:
        while self.on:
            self.largest = max(self.largest, anonymous())
            time.sleep(0.001)

    def stop(self) -> int:
        self.on = False
        self.join()
        return max(self.largest, anonymous())


def errors(form: str, folder: Path) -> dict[str, float]:
    model: Any = loaded(
        written(
            form,
            folder,
            num_hidden_layers=3,
            hidden_size=256,
            intermediate_size=512 if form in GGUF else 464,
        ),
        form,
    )
    word = "gguf" if form in GGUF else published.FORMATS[form][0]
    plain, exact, merged = (
        dense(model, torch.bfloat16),
        dense(model, torch.float64),
        dense(model, torch.float64),
    )
    logits, grads = step(adapted(model, BF16.but(base=word)), IDS)
    dense_logits, dense_grads = step(adapted(plain, BF16), IDS)
    exact_logits, exact_grads = step(adapted(exact, None).double(), IDS)
    ours, theirs = (
        {name: off(grad, exact_grads[name]) for name, grad in each.items()}
        for each in (grads, dense_grads)
    )
    again = adapted(loaded(folder / "model.gguf" if form in GGUF else folder, form), None)
    expected = adapted(merged, None).double().merge_and_unload().state_dict()
    state, _, _ = merged_state(again, torch.float32)
    return {
        "logits": off(logits, exact_logits), "dense logits": off(dense_logits, exact_logits), "gradient": max(ours.values()),
        "dense gradient": max(theirs.values()), "ratio": max(ours[name] / theirs[name] for name in ours),
        "merge": max(off(value.double(), expected[name]) for name, value in state.items()),
    }  # fmt: skip


def memory(form: str, folder: Path) -> dict[str, float]:
    place = written(form, folder, num_hidden_layers=4, hidden_size=1024, intermediate_size=2816)
    file = place if place.is_file() else place / "model.safetensors"
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, peak = anonymous(), Peak()
    peak.start()
    model = loaded(place, form)
    largest = peak.stop() - before
    held = 0
    for p in model.parameters():
        state = getattr(p, "quant_state", None)
        held += p.nbytes + sum(
            t.nbytes for t in (state.tensors.values() if state is not None else ())
        )
    size = file.stat().st_size
    one_layer = 2816 * 1024 * 4
    return {
        "held": held / size,
        "peak": largest / size,
        "too much": float(largest > size + one_layer),
    }


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    transformers.logging.disable_progress_bar()
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # larger blocks are given back at once
    beyond = False

    def bounded(value: float, text: str, most: float) -> str:
        nonlocal beyond
        beyond |= not value <= most
        return text if value <= most else f"{text}!"

    print(
        "| | logits | worst layer's gradient | ratio | fp32 merge | held / file | peak of loading / file |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as place:
        memory("fp8-ct-channel", Path(place) / "warm")
        for form in (*published.FORMATS, *GGUF):
            e, m = errors(form, Path(place) / form), memory(form, Path(place) / f"{form}-large")
            cells = [
                f"{e['logits']:.4f} ({e['dense logits']:.4f})", f"{e['gradient']:.4f} ({e['dense gradient']:.4f})",
                bounded(e["ratio"], f"{e['ratio']:.2f}", 1.5), bounded(e["merge"], f"{e['merge']:.0e}", 2e-5),
                bounded(m["held"], f"{m['held']:.2f}", 1.15), bounded(m["too much"], f"{m['peak']:.2f}", 0),
            ]  # fmt: skip
            print(f"| {form} | {' | '.join(cells)} |", flush=True)
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
