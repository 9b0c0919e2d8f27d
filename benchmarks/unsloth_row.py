"""Unsloth's model as a contender: a random Llama of any shape, with adapters on every projection
and its own gradient checkpointing.

Importing Unsloth patches torch, transformers and TRL, so that it has a process to itself. It loads
models from folders only: the model is written to one and read back. Its calls are those of unsloth
2026.10.9.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAME = "Unsloth"
LEFT_OUT = 4  # exit code where a package is missing, as benchmarks/gpu.py reads it


def why_not(device: str, *, importing: bool = True) -> str:
    """Why Unsloth cannot run here, in one line, or "". Without `importing` it asks only whether it
    is there.
    """
    if torch.device(device).type == "cpu":
        return "Unsloth needs a GPU"
    if importlib.util.find_spec("unsloth") is None:
        return "unsloth is not installed"
    if not importing:
        return ""
    try:
        import unsloth  # noqa: F401
    except BaseException as error:  # an import may also leave by SystemExit
        if isinstance(error, KeyboardInterrupt):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"unsloth does not import: {type(error).__name__}: {first}"[:200]
    return ""


def save_tokenizer(folder: Path) -> None:
    """Of a few words: Unsloth asks every folder for one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(("<pad>", "<s>", "</s>", "a", "b"))}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    made.save_pretrained(folder)


def adapted(model: nn.Module, *, rank: int, length: int, nf4: bool, targets: list[str]) -> Any:
    """`model` as Unsloth loads it, ready to train: bf16 or NF4 weights, checkpointing "unsloth".
    Frees `model`'s own weights.
    """
    from unsloth import FastLanguageModel

    with tempfile.TemporaryDirectory() as written:
        folder = Path(written)
        save_tokenizer(folder)
        model.save_pretrained(folder)
        model.to("meta")
        torch.cuda.empty_cache()
        loaded, _ = FastLanguageModel.from_pretrained(
            str(folder),
            max_seq_length=length,
            dtype=torch.bfloat16,
            load_in_4bit=nf4,
            load_in_16bit=not nf4,
        )
    made = FastLanguageModel.get_peft_model(
        loaded,
        r=rank,
        target_modules=targets,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        bias="none",
        use_gradient_checkpointing="unsloth",
    )
    FastLanguageModel.for_training(made)
    return made
