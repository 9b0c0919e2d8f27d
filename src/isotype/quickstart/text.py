"""`isotype quickstart` trains a small model from random weights on real text, then an adapter. It
runs on any machine and needs no network.

The folder holds everything that is needed to repeat this by hand: the text, the tokenizer, the
model's configuration, and the files `pretrain.yaml` and `tune.yaml` for `isotype train`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..wording import remove_control_characters
from .stages import Stage, describe_shortened, run_quickstart

STAGES = (
    Stage(
        "pretrain",
        "a small model from scratch, on the text of Python's own documentation",
        1200,
        seconds=140,
        min_steps=60,
    ),
    Stage(
        "tune",
        "LoRA on question and answer pairs, as `isotype train` does it",
        400,
        seconds=80,
        min_steps=20,
    ),
)
TEXT = "text.txt"
MODEL_FOLDER = "small"
WINDOW = 256  # tokens of a training row
END_OF_TEXT = "<|endoftext|>"
TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"


FULL_RUN = Path(__file__).with_name("full_run.json")


def quickstart(
    folder: Path,
    *,
    step_share: float = 1.0,
    json_output: bool = False,
    stages: Sequence[Stage] = STAGES,
) -> int:
    """Calls `run_quickstart` for the text example."""
    return run_quickstart(
        folder,
        "isotype quickstart",
        stages,
        (TEXT, MODEL_FOLDER),
        write_inputs=lambda: _write_inputs(folder),
        step_share=step_share,
        json_output=json_output,
        summarise=lambda: summarise(folder),
        print_summary=lambda summary: _print_summary(folder, summary),
    )


def summarise(folder: Path) -> dict[str, Any]:
    """Returns the losses over steps of both stages, and the answers before and after tuning."""
    from ..report.record import read_run

    runs = {stage.name: read_run(folder / stage.name) for stage in STAGES}
    samples = [round_["samples"] for round_ in runs["tune"].samples] or [[]]
    return {
        "loss": {name: run.curve("loss") for name, run in runs.items()},
        "evaluations": {name: run.curve("eval_loss") for name, run in runs.items()},
        "samples": [
            {
                "prompt": first["prompt"],
                "before": first["answer"],
                "after": last["answer"],
                "reference": first["reference"],
            }
            for first, last in zip(samples[0], samples[-1])
        ],
        "report": str(folder / "tune" / "report.html"),
    }


def _write_inputs(folder: Path) -> None:
    from ..data.stdlib import stdlib_pairs, stdlib_text

    texts = stdlib_text()
    print(
        f"text      {len(texts):,} docstrings and topics of this Python,"
        f" {sum(map(len, texts)) / 1e6:.1f} million characters"
    )
    tokenizer = train_tokenizer(texts, vocabulary=2048)
    print(f"tokenizer byte-level BPE, {len(tokenizer):,} tokens, trained on it")
    print(f"pairs     {len(stdlib_pairs()):,} questions and answers from the same docstrings")
    (folder / TEXT).write_text(END_OF_TURN.join(texts), encoding="utf-8")
    tokenizer.save_pretrained(folder / MODEL_FOLDER)
    small_config(tokenizer, hidden=192, layers=4, positions=2 * WINDOW).save_pretrained(
        folder / MODEL_FOLDER
    )


def train_tokenizer(texts: Iterable[str], *, vocabulary: int = 4096) -> Any:
    """Trains a byte-level BPE tokenizer on `texts`, with the special tokens and the template of
    ChatML. The token that marks the end of a chat turn also marks the end of a text.

    Every digit is a separate token, as in Llama, which makes the vocabulary smaller.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from ..data.chat import NAMED_TEMPLATES

    special = [END_OF_TEXT, TURN, END_OF_TURN]
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast_tokenizer.chat_template = NAMED_TEMPLATES["chatml"].text
    fast_tokenizer.add_special_tokens({"additional_special_tokens": [TURN]})
    return fast_tokenizer


def small_config(
    tokenizer: Any, *, hidden: int = 256, layers: int = 4, positions: int = 512
) -> Any:
    """Returns the configuration of a small Llama with tied embeddings and head dimension 64. With
    the default sizes the model has about 4 million parameters.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_bias=False,
    )


def _print_summary(folder: Path, summary: dict[str, Any]) -> None:
    for stage, curve in summary["loss"].items():
        print(
            f"\nloss of {stage}  {curve[0][1]:.2f} at step {curve[0][0]:.0f}, {curve[-1][1]:.2f} at"
            f" step {curve[-1][0]:.0f}"
        )
    print("\nanswers to questions that were not trained on, before and after LoRA")
    full_answers = read_full_run()["answers"] if describe_shortened(folder, STAGES) else {}
    for sample in summary["samples"]:
        print(f"\n  > {sample['prompt']}")
        for key in ("before", "after", "reference"):
            print(f"    {key:<9}  {_shorten(sample[key] or '')}")
        if sample["prompt"] in full_answers:
            print(f"    full run   {_shorten(full_answers.pop(sample['prompt']))}")
    _print_full_run(folder, full_answers)
    print(f"\nreport    {summary['report']}")
    print(f"adapter   {folder / 'tune' / 'adapter'}  on  {folder / 'pretrain' / 'model'}")
    print(
        f"again     isotype train {folder / 'tune.yaml'} run.folder=runs/mine data.train=YOUR.jsonl"
    )


def _print_full_run(folder: Path, other_answers: dict[str, str]) -> None:
    """Prints what a full run learns, after a run that the time limit stopped. The results of the
    full run were recorded on another machine.

    other_answers  the recorded answers to questions that this run was not asked
    """
    if not describe_shortened(folder, STAGES):
        return
    recorded = read_full_run()
    print(
        f"\nfull run  a recorded run of all {recorded['steps']} steps, not this one: its loss of tune"
        f" ended at {recorded['loss']:.2f}"
    )
    for prompt, answer in other_answers.items():
        print(f"\n  > {prompt}\n    full run   {_shorten(answer)}")
    print(f"          (recorded by {recorded['command']}, Python {recorded['python']})")


def read_full_run() -> dict[str, Any]:
    """Reads the results of a run that was not stopped by a time limit: its questions and answers,
    and its last loss.
    """
    record: dict[str, Any] = json.loads(FULL_RUN.read_text(encoding="utf-8"))
    return record


def _shorten(text: str, limit: int = 110) -> str:
    one_line = remove_control_characters(" ".join(text.split()))
    return (one_line if len(one_line) <= limit else one_line[: limit - 3] + "...") or "(nothing)"
