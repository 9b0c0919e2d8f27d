"""`isotype quickstart`: a small model from random weights, then an adapter on it, with real text, on any machine, without a network.

The folder holds everything needed to do it again by hand: the text, the tokenizer and the model's configuration, and two files,
`pretrain.yaml` and `tune.yaml`, that `isotype train` takes. Both stages are ordinary runs. A finished stage is not repeated and an
interrupted one is resumed, so the command can be given again at any time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .entry.stage import quoted, run_stage
from .entry.stage_time import StageTime, take_fewer_threads_where_faster, timed
from .errors import UsageError
from .printable import printable

MOST_SECONDS = 280.0  # as counted here; with 300 the whole command took 5 min 10 s beside two busy loops
TRAIN_SECONDS = 180.0  # of the steps of both stages, as planned before anything else of the command was timed
TUNE_STEP = 1.4  # seconds of a tuning step for each of a pretraining step: 98 and 69 ms where both were measured
_PROBED = 12  # steps that are timed before the training
LEAST = 0.1  # of the steps, by plan: below it an untrained model's answers can hardly be told from a trained one's
_LEAST_STEPS = {"pretrain": 60, "tune": 20}  # done in any case: the losses fall visibly
TEXT, PARTS, PRETRAIN, TUNE = "text.txt", "small", "pretrain.yaml", "tune.yaml"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the model is and how long it trains. The default takes two and a half minutes on two idle cores with bf16, and is shortened
    on slower machines."""

    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 4
    window: int = 256
    pretrain_steps: int = 1200
    tune_steps: int = 400

    def shortened(self, step_seconds: float) -> Size:
        """Fewer steps where a pretraining step takes so long that both stages would take more than TRAIN_SECONDS."""
        if not step_seconds:
            return self
        needed = step_seconds * (self.pretrain_steps + TUNE_STEP * self.tune_steps)
        share = max(LEAST, min(1.0, TRAIN_SECONDS / needed))
        return replace(self, pretrain_steps=round(share * self.pretrain_steps), tune_steps=round(share * self.tune_steps))


def quickstart(folder: Path, *, size: Size | None = None, json_output: bool = False) -> int:
    """Runs both stages and shows the result. Returns the exit status: 0, or 130 when interrupted and saved."""
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr if json_output else sys.stdout, flush=True)  # noqa: E731
    pace = StageTime(MOST_SECONDS, share=_share_of_pretraining(), least=_LEAST_STEPS)
    take_fewer_threads_where_faster(say)
    _prepare(folder, size, say)
    results = {}
    for stage, file, what in (
        ("pretrain", PRETRAIN, "1/2  a small model from scratch, on the text of Python's own documentation"),
        ("tune", TUNE, "2/2  LoRA on question and answer pairs, as `isotype train` does it"),
    ):
        say(f"\n{what}  ({folder / file})")
        if stage == "tune" and size is None:
            take_fewer_threads_where_faster(say)
            _tune_in_what_is_left(folder, pace, say)
        pace.begin(stage)
        if (status := run_stage(folder / stage, folder / file, json_output=json_output, callbacks=[pace] if size is None else [])) != 0:
            say(f"go on with: isotype quickstart --folder {folder}")
            return status
        pace.end()
        if pace.stopped_at:
            say(f"speed     ended at step {pace.stopped_at}, since the command is to take five minutes: other programs use the cores")
        results[stage] = json.loads((folder / stage / "result.json").read_text(encoding="utf-8"))
    summary = summarise(folder)
    if json_output:
        print(json.dumps({"folder": str(folder), **results, **summary}))
    else:
        _show(folder, summary, say)
    return 0


def summarise(folder: Path) -> dict[str, Any]:
    """Loss over steps of both stages, and the answers before and after tuning."""
    from .report.record import read_run

    pretrain, tune = read_run(folder / "pretrain"), read_run(folder / "tune")
    first, last = (tune.samples[0], tune.samples[-1]) if tune.samples else ({"samples": []}, {"samples": []})
    return {
        "loss": {"pretrain": pretrain.curve("loss"), "tune": tune.curve("loss")},
        "evaluations": {"pretrain": pretrain.curve("eval_loss"), "tune": tune.curve("eval_loss")},
        "samples": [
            {"prompt": before["prompt"], "before": before["answer"], "after": after["answer"], "reference": before["reference"]}
            for before, after in zip(first["samples"], last["samples"])
        ],
        "report": str(folder / "tune" / "report.html"),
    }


def _prepare(folder: Path, asked: Size | None, say: Callable[[str], None]) -> None:
    """Writes what both stages read; leaves a prepared folder as it is. `tune.yaml` comes last: with it the folder is complete.

    asked  None for the default size, shortened to the speed of this machine
    """
    if (folder / TUNE).is_file():
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file", fix="isotype quickstart --folder OTHER")
    if folder.is_dir() and any(path.name not in (TEXT, PARTS, PRETRAIN) for path in folder.iterdir()):
        raise UsageError(f"{folder}: holds other files", fix="isotype quickstart --folder OTHER")
    from .data.small_model import END_OF_TURN, small_config, train_tokenizer
    from .data.stdlib import stdlib_pairs, stdlib_text

    size = asked or Size()
    texts = stdlib_text()
    say(f"text      {len(texts):,} docstrings and topics of this Python, {sum(map(len, texts)) / 1e6:.1f} million characters")
    tokenizer = train_tokenizer(texts, vocabulary=size.vocabulary)
    config = small_config(tokenizer, hidden=size.hidden, layers=size.layers, positions=2 * size.window)
    say(f"tokenizer byte-level BPE, {len(tokenizer):,} tokens, trained on it")
    if asked is None:
        seconds = step_seconds(config, rows=4, length=size.window)
        size = size.shortened(seconds)
        if size != Size():
            share = size.pretrain_steps / Size().pretrain_steps
            say(f"speed     {1000 * seconds:.0f} ms a step: both stages are shortened to {share:.0%} of their steps, to take five minutes")
    say(f"pairs     {len(stdlib_pairs()):,} questions and answers from the same docstrings")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TEXT).write_text(END_OF_TURN.join(texts), encoding="utf-8")
        tokenizer.save_pretrained(folder / PARTS)
        config.save_pretrained(folder / PARTS)
        (folder / PRETRAIN).write_text(_pretrain_yaml(folder, size), encoding="utf-8")
        (folder / TUNE).write_text(_tune_yaml(folder, size), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}", fix="isotype quickstart --folder OTHER") from None


def _share_of_pretraining() -> float:
    full = Size()
    return full.pretrain_steps / (full.pretrain_steps + TUNE_STEP * full.tune_steps)


def _tune_in_what_is_left(folder: Path, pace: StageTime, say: Callable[[str], None]) -> None:
    """Sets the steps of the second stage by the speed of the first, where neither was run before."""
    from .report.record import read_run

    if (folder / "tune").exists():
        return
    seconds = [v for _, v in read_run(folder / "pretrain").curve("seconds")][-_PROBED:]
    if not seconds:
        return
    steps = tuning_steps(pace.left, sorted(seconds)[len(seconds) // 2])
    size = replace(Size(), tune_steps=steps)
    (folder / TUNE).write_text(_tune_yaml(folder, size), encoding="utf-8")
    if steps < Size().tune_steps:
        say(f"speed     {steps} of {Size().tune_steps} steps, to end in time")


def tuning_steps(left: float, pretraining_step: float) -> int:
    """Steps of the second stage that fit into `left` seconds, at so many seconds for a step of the first."""
    most = Size().tune_steps
    return int(min(most, max(LEAST * most, left / (TUNE_STEP * pretraining_step))))


def step_seconds(config: Any, *, rows: int, length: int) -> float:
    """Seconds of one training step of this model: the lower quartile of measured steps; 0 with a GPU, which is always fast enough."""
    import torch
    from transformers import AutoModelForCausalLM

    from .environment.hardware import detect

    hardware = detect()
    if hardware.kind != "cpu":
        return 0.0
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.randint(0, config.vocab_size, (rows, length))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=hardware.bf16 == "native"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    return timed(step, _PROBED)


def _show(folder: Path, summary: dict[str, Any], say: Callable[[str], None]) -> None:
    from .report.chart import terminal_chart

    for stage in ("pretrain", "tune"):
        say(f"\nloss of {stage}")
        say(terminal_chart(summary["loss"][stage], encoding=sys.stdout.encoding))
    say("\nanswers to questions that were not trained on, before and after LoRA")
    for sample in summary["samples"]:
        say(f"\n  > {sample['prompt']}")
        say(f"    before  {_short(sample['before'])}")
        say(f"    after   {_short(sample['after'])}")
        say(f"    in the documentation: {_short(sample['reference'] or '')}")
    say(f"\nreport    {summary['report']}")
    say(f"adapter   {folder / 'tune' / 'adapter'}  on  {folder / 'pretrain' / 'model'}")
    say(f"again     isotype train {folder / TUNE} run.folder=runs/mine data.train=YOUR.jsonl")


def _short(text: str, most: int = 110) -> str:
    flat = printable(" ".join(text.split()))
    return (flat if len(flat) <= most else flat[: most - 3] + "...") or "(nothing)"


def _pauses(size: Size) -> int:
    """Evaluations of a stage. A shortened one has fewer, and samples at its start and its end alone: each takes as long as many steps."""
    full = Size()
    return 2 if (size.pretrain_steps, size.tune_steps) < (full.pretrain_steps, full.tune_steps) else 5


def _pretrain_yaml(folder: Path, size: Size) -> str:
    return f"""\
# A small model from random weights, every one of them trained, on plain text.
model:
  init: random
  config: {quoted(folder / PARTS)}
  tokenizer: {quoted(folder / PARTS)}
data:
  train: {quoted(folder / TEXT)}
  max_length: {size.window}
  eval_split: 0.02
adapter:
  kind: none
train:
  steps: {size.pretrain_steps}
  batch_size: 4
  learning_rate: 1.5e-3
  beta2: 0.95
  eval_every: {max(1, size.pretrain_steps // _pauses(size))}
run:
  folder: {quoted(folder / "pretrain")}
  sample_every: {size.pretrain_steps if _pauses(size) == 2 else max(1, size.pretrain_steps // 2)}
  keep: 1
  sample_tokens: 40
"""


def _tune_yaml(folder: Path, size: Size) -> str:
    return f"""\
# An adapter on the model that pretrain.yaml makes; put your own file in data.train to tune it on something else.
model:
  name: {quoted(folder / "pretrain" / "model")}
data:
  train: stdlib
  max_length: {size.window}
  eval_split: 0.03
adapter:
  kind: lora
  r: 32
  alpha: 64
train:
  steps: {size.tune_steps}
  batch_size: 16
  learning_rate: 2.0e-3
  eval_every: {max(1, size.tune_steps // _pauses(size))}
run:
  folder: {quoted(folder / "tune")}
  sample_every: {size.tune_steps if _pauses(size) == 2 else max(1, size.tune_steps // 2)}
  keep: 1
  sample_tokens: 48
"""
