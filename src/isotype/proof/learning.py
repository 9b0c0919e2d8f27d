"""Runs `isotype.train` to check that every preset learns a short text, and that an interrupted run
can be resumed.

The model is a small Llama with random weights. It is trained on the Zen of Python, and each byte of
this text is one token. A preset passes if two conditions are true. The preset must lower the loss
by at least `MIN_SHARE` times the amount by which the same run in fp32 lowers it. No observed dtype
may differ from the declared dtype.
"""

from __future__ import annotations

import codecs
import contextlib
import filecmp
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..entry.train import Run, train
from ..environment.hardware import detect
from ..model.adapter_settings import ADAPTER_FILE
from ..runs.folder import RunFolder
from ..training.callbacks import Callback, Moment
from .card import supported_dtypes
from .parts import ResultRow, Scale

MIN_SHARE = 0.7  # NF4 on a random base learns least: 0.83 on a CPU
FULL_PRESETS = ("bf16-mixed", "bf16-pure", "fp16-mixed")
LORA_PRESETS = ("bf16-lora", "nf4-lora")
STEPS = 60  # of a run
TINY_STEPS = 25  # of a run if `Scale.is_tiny`
RESUME_STEPS = 8  # of the run that is interrupted and resumed
FULL_RATE = 3e-3  # learning rate of full fine-tuning
LORA_RATE = 1e-2  # learning rate of LoRA


class _StopAt(Callback):
    """Interrupts the run after a step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, moment: Moment) -> None:
        if moment.step == self.step:
            raise KeyboardInterrupt


def check_presets(scale: Scale) -> Iterator[ResultRow]:
    dtypes = supported_dtypes(detect(scale.device))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        for presets, is_lora in ((FULL_PRESETS, False), (LORA_PRESETS, True)):
            fp32_losses = _losses(_run(folder, scale, "fp32", is_lora=is_lora))
            fp32_gain = fp32_losses[0] - fp32_losses[-1]
            kind = "LoRA" if is_lora else "every weight"
            yield {
                "name": f"fp32, {kind}",
                "passed": fp32_gain > 0,
                "losses": [fp32_losses[0], fp32_losses[-1]],
            }
            for preset in presets:
                if preset.startswith("bf16") and "bf16" not in dtypes:
                    yield {"name": preset, "skipped": "this card has no bf16"}
                    continue
                yield _check_preset(folder, scale, preset, is_lora, fp32_gain)


def _check_preset(
    folder: Path, scale: Scale, preset: str, is_lora: bool, fp32_gain: float
) -> ResultRow:
    run = _run(folder, scale, preset, is_lora=is_lora)
    losses = _losses(run)
    violation_count = len(RunFolder(run.folder).read_json("precision.json")["violations"])
    share = (losses[0] - losses[-1]) / fp32_gain
    return {
        "name": preset,
        "passed": share >= MIN_SHARE and not violation_count,
        "losses": [losses[0], losses[-1]],
        "share_of_fp32": share,
        "violations": violation_count,
    }


def check_resume(scale: Scale) -> Iterator[ResultRow]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        uninterrupted = _run(folder, scale, "auto", is_lora=True, steps=RESUME_STEPS, name="whole")
        _run(
            folder,
            scale,
            "auto",
            is_lora=True,
            steps=RESUME_STEPS,
            name="stopped",
            callbacks=[_StopAt(RESUME_STEPS // 2)],
        )
        resumed = train(resume=folder / "stopped")
        file = f"adapter/{ADAPTER_FILE}"
        is_same = filecmp.cmp(uninterrupted.folder / file, resumed.folder / file, shallow=False)
        yield {
            "name": f"interrupted after step {RESUME_STEPS // 2} of {RESUME_STEPS}",
            "passed": is_same and _losses(uninterrupted) == _losses(resumed),
        }


def write_model(folder: Path, **sizes: Any) -> None:
    """Writes a Llama configuration and a tokenizer whose tokens are bytes to `folder`/model, and
    the text to `folder`/text.txt.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    with contextlib.redirect_stdout(io.StringIO()):  # the module prints its text
        import this

    (folder / "text.txt").write_text(codecs.decode(this.s, "rot13"), encoding="utf-8")
    tokens = ["<pad>", "</s>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteDecoder()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder / "model")
    settings = {
        "vocab_size": len(tokens),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    LlamaConfig(**{**settings, **sizes}).save_pretrained(folder / "model")


def _run(
    folder: Path,
    scale: Scale,
    preset: str,
    *,
    is_lora: bool,
    steps: int | None = None,
    name: str | None = None,
    callbacks: list[Callback] | None = None,
) -> Run:
    adapter = {"kind": "lora", "r": 32} if is_lora else {"kind": "none"}
    kind = "lora" if is_lora else "full"
    if steps is None:
        steps = TINY_STEPS if scale.is_tiny else STEPS
    return train(
        model={
            "init": "random",
            "config": str(folder / "model"),
            "tokenizer": str(folder / "model"),
            "device": scale.device,
        },
        data={"train": [str(folder / "text.txt")], "max_length": 128, "eval_split": 0},
        adapter=adapter,
        precision=preset,
        train={
            "steps": steps,
            "batch_size": 4,
            "learning_rate": LORA_RATE if is_lora else FULL_RATE,
        },
        run={"folder": str(folder / (name or f"{preset}-{kind}")), "sample_every": 0},
        callbacks=callbacks or [],
    )


def _losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.record.metrics if "loss" in row]
