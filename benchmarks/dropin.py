"""Attached trainers beside unmodified ones: the same curves, speed, memory, and what watching
costs.

python -m benchmarks.dropin curves              every trainer x full, LoRA, QLoRA x checkpointing:
                                                benchmarks/results/dropin.json
python -m benchmarks.dropin speed SFT DPO GRPO ORPO   tokens/s of one step, alternating, and its
                                                      memory, at 160M
python -m benchmarks.dropin line SFT DPO        a whole train() of ten steps, each way in a process
                                                of its own: preflight, record and peak
python -m benchmarks.dropin tiny KTO GRPO       CPU seconds that attach adds before and around three
                                                steps of a tiny model, with built kernels
python -m benchmarks.dropin overhead            CPU time of everything that watches, in alternating
                                                pairs
python -m benchmarks.dropin bf16                errors of SFT, DPO and GRPO in bf16 against fp64
python -m benchmarks.dropin table               writes the table into docs/trainers.md
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import operator
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isotype.environment.memory_limits import status_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


RESULTS = Path(__file__).parent / "results" / "dropin.json"
PAGE = Path(__file__).parents[1] / "docs" / "trainers.md"
# where the tables stand in the page
MARKS = "<!-- table: python -m benchmarks.dropin table -->", "<!-- end of table -->"
SPEED_MARKS = "<!-- speed: python -m benchmarks.dropin table -->", "<!-- end of speed -->"
FORMS = ("full", "lora", "qlora")
LINE_MARKS = "<!-- line: python -m benchmarks.dropin table -->", "<!-- end of line -->"
BF16_BATCHES = 8
# how a whole train() is measured
WAYS = ("unmodified", "unwatched", "attached")


# --- curves


def one_cell(name: str, form: str, checkpointing: bool, folder: Path) -> dict[str, Any]:
    """The largest difference of three steps' losses and gradient norms between an unmodified and an
    attached trainer.
    """
    from tests.integrations.trainers import TRAINERS, Setting, curve

    from isotype.integrations import attach

    if name == "Reward" and form == "qlora":
        return {
            "trainer": name,
            "form": form,
            "checkpointing": checkpointing,
            "skipped": "the test's classifier is not quantised",
        }
    bf16 = form == "qlora"  # bitsandbytes on a CPU: bf16 products; the others in fp32
    setting = Setting(
        folder,
        form,
        bf16,
        checkpointing=checkpointing,
        stored=torch.bfloat16 if bf16 else torch.float32,
    )
    want = curve(TRAINERS[name](setting))
    trainer = TRAINERS[name](setting)
    attached = attach(trainer, "nf4-lora" if bf16 else "fp32", quiet=True)
    got = curve(trainer)
    manifest = json.loads((folder / "out" / "isotype" / "manifest.json").read_text())
    heads = sorted(c["op"] for c in manifest["first_step"] if c["part"] == "head")
    return {
        "trainer": name, "form": form, "checkpointing": checkpointing, "precision": str(attached.precision),
        "loss": max(abs(a - b) for a, b in zip(want[::2], got[::2])),
        "gradient_norm": max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(want[1::2], got[1::2])),
        "steps": len(got) // 2, "places": len(attached.manifest.replaced), "heads": heads,
    }  # fmt: skip


def curves(names: list[str], forms: list[str]) -> list[dict[str, Any]]:
    from tests.integrations.trainers import TRAINERS

    cells = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in names or list(TRAINERS):
            for form in forms:
                for checkpointing in (False, True):
                    try:
                        cell = one_cell(name, form, checkpointing, Path(temporary))
                    except Exception as error:
                        said = str(error).split("\n")[0][:200]
                        cell = {
                            "trainer": name,
                            "form": form,
                            "checkpointing": checkpointing,
                            "failed": f"{type(error).__name__}: {said}",
                        }
                    cells.append(cell)
                    print(json.dumps(cell), file=sys.stderr, flush=True)
                    gc.collect()
    return cells


def bf16_errors(name: str, folder: Path) -> dict[str, Any]:
    """How far loss and gradients in bf16 are from an fp64 run's, unmodified and attached: root mean
    squares over some batches.

    A checkpoint in bf16, LoRA. One batch would say little about a loss, whose roundings may cancel.
    """
    from tests.integrations.trainers import TRAINERS, Setting

    from isotype.integrations import attach

    ways = {
        way: TRAINERS[name](Setting(folder, "lora", True, stored=torch.bfloat16))
        for way in ("exact", "unmodified", "attached")
    }
    for trainer in ways.values():
        for n, p in trainer.model.named_parameters():
            if ".lora_B." in n:  # zero at first: no gradient would reach A
                torch.nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(len(n)))
        trainer.current_gradient_accumulation_steps = 1
    batches = some_batches(ways["exact"], BF16_BATCHES)
    attach(ways["attached"], "bf16-lora", quiet=True)
    losses, gradients = {}, {}
    for way, trainer in ways.items():
        trainer.model.train()
        model = trainer.model.double() if way == "exact" else trainer.model
        of = [
            _loss_and_gradient(trainer, model, dict(inputs), autocast=way == "unmodified")
            for inputs in batches
        ]
        losses[way] = torch.tensor([loss for loss, _ in of], dtype=torch.float64)
        gradients[way] = torch.stack([gradient for _, gradient in of])
    exact_loss, exact = losses.pop("exact"), gradients.pop("exact")
    return {
        "trainer": name,
        "batches": len(batches),
        "loss": {
            way: float((loss - exact_loss).square().mean().sqrt()) for way, loss in losses.items()
        },
        "gradient": {
            way: float(((gradient - exact).norm(dim=1) / exact.norm(dim=1)).square().mean().sqrt())
            for way, gradient in gradients.items()
        },
    }


def _loss_and_gradient(
    trainer: Any, model: Any, inputs: dict[str, Any], *, autocast: bool
) -> tuple[float, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
    named = sorted(
        (n, p.grad.double().flatten()) for n, p in model.named_parameters() if p.grad is not None
    )
    return float(loss), torch.cat([g for _, g in named])


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown: a row a trainer, in alphabetical order, a column a form; the page explains what a
    cell says.
    """

    def shown(cell: dict[str, Any] | None) -> str:
        if cell is None:
            return ""
        if "skipped" in cell:
            return "not tried"
        return (
            cell["failed"]
            if "failed" in cell
            else f"{cell['loss']:.0e} / {cell['gradient_norm']:.0e}"
        )

    by = {(c["trainer"], c["form"], c["checkpointing"]): c for c in cells}
    names = sorted({c["trainer"] for c in cells}, key=str.lower)
    columns = [(form, checkpointing) for form in FORMS for checkpointing in (False, True)]
    titles = [
        f"{form}{', checkpointing' if checkpointing else ''}" for form, checkpointing in columns
    ]
    lines = [
        "| trainer | ops that compute the head | " + " | ".join(titles) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name in names:
        heads = {
            op
            for c in cells
            if c["trainer"] == name
            for op in c.get("heads", [])
            if not op.startswith("logits computed")
        }
        row = [shown(by.get((name, *column))) for column in columns]
        lines.append(
            f"| {name} | {', '.join(sorted(heads)) or 'the model'} | " + " | ".join(row) + " |"
        )
    return "\n".join(lines)


def speed_table(measured: list[dict[str, Any]]) -> str:
    """Markdown: a row a trainer, the unmodified one beside the attached one."""
    lines = [
        "| trainer | tokens/s, unmodified : attached | ratio | ratio of CPU time | step memory, MiB | ratio |",
        "|---" * 6 + "|",
    ]
    for one in measured:
        tokens, memory = one["tokens_per_second"], one["step_mib"]
        lines.append(
            f"| {one['trainer']} | {tokens['unmodified']:.0f} : {tokens['attached']:.0f} | {one['speed_ratio']:.1f} "
            f"| {one['cpu_ratio']:.1f} | {memory['unmodified']:,.0f} : {memory['attached']:,.0f} | {one['memory_ratio']:.2f} |"
        )
    return "\n".join(lines)


def line_table(measured: list[dict[str, Any]]) -> str:
    """Markdown: a row a trainer and size, a whole `train()` each way, preflight and record
    included.
    """
    titles = [
        "trainer",
        "CPU seconds",
        "ratio",
        "peak of the process, MiB",
        "ratio",
        "growth, MiB",
        "ratio",
        "peak, relative to no preflight and no record",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for one in measured:
        was, got, ratio = one["unmodified"], one["attached"], one["attached/unmodified"]
        peak = got["peak_mib"] / one["unwatched"]["peak_mib"]
        lines.append(
            f"| {one['trainer']}, {one['layers']} layers "
            f"| {was['cpu_seconds']:.0f} : {got['cpu_seconds']:.0f} | {ratio['cpu_seconds']:.2f} "
            f"| {was['peak_mib']:,.0f} : {got['peak_mib']:,.0f} | {ratio['peak_mib']:.2f} "
            f"| {was['grown_mib']:,.0f} : {got['grown_mib']:,.0f} | {ratio['grown_mib']:.2f} | {peak:.2f} |"
        )
    return "\n".join(lines)


def write_tables() -> None:
    results = json.loads(RESULTS.read_text())
    text = PAGE.read_text(encoding="utf-8")
    for (begin, end), made in (
        (MARKS, table(results["curves"])), (SPEED_MARKS, speed_table(results["speed"])), (LINE_MARKS, line_table(results["line"])),
    ):  # fmt: skip
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(text, encoding="utf-8")


# --- speed and memory


def large(layers: int = 16) -> Any:
    """A Llama of 162M parameters, random, in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def large_trainer(
    name: str, folder: Path, *, length: int, rows: int, checkpointing: bool, layers: int
) -> Any:
    import datasets
    import trl
    from peft import LoraConfig
    from tests.integrations.trainers import tokenizer

    datasets.disable_progress_bars()
    g = torch.Generator().manual_seed(0)

    def ids(n: int) -> list[int]:
        return torch.randint(3, 90, (n,), generator=g).tolist()

    common = {
        "output_dir": str(folder), "use_cpu": True, "bf16": True, "max_steps": 10, "per_device_train_batch_size": rows, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": checkpointing, "learning_rate": 1e-4,
    }  # fmt: skip
    given = {
        "processing_class": tokenizer(), "peft_config": LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    }  # fmt: skip
    model = large(layers)
    if name == "SFT":
        data = datasets.Dataset.from_dict({"input_ids": [ids(length) for _ in range(rows)]})
        return trl.SFTTrainer(
            model, args=trl.SFTConfig(**common, max_length=length), train_dataset=data, **given
        )
    words = [" ".join(f"w{i}" for i in ids(length // 2 - 2)) for _ in range(3 * rows)]
    if name == "GRPO":
        policy = {"num_generations": rows, "max_completion_length": length // 2, "beta": 0.0}
        data = datasets.Dataset.from_dict({"prompt": words[:rows]})
        return trl.GRPOTrainer(
            model,
            args=trl.GRPOConfig(**common, **policy),
            train_dataset=data,
            reward_funcs=by_length,
            **given,
        )
    data = datasets.Dataset.from_dict(
        {"prompt": words[:rows], "chosen": words[rows : 2 * rows], "rejected": words[2 * rows :]}
    )
    if name == "DPO":
        return trl.DPOTrainer(
            model, args=trl.DPOConfig(**common, max_length=length), train_dataset=data, **given
        )
    if name == "ORPO":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(
            model, args=ORPOConfig(**common, max_length=length), train_dataset=data, **given
        )
    raise SystemExit(f"speed has no {name}: one of SFT, DPO, GRPO, ORPO")


def by_length(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between the completions of a prompt, so that advantages are not zero."""
    return [float(i) for i in range(len(completions))]


def one_batch(trainer: Any) -> dict[str, Any]:
    """The inputs of one step over all rows; of a policy trainer the rollouts of one row."""
    return _inputs(trainer, [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))])


def some_batches(trainer: Any, count: int) -> list[dict[str, Any]]:
    """The inputs of `count` steps, each of its own rows."""
    rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
    size = len(rows) // count
    return [_inputs(trainer, rows[i * size : (i + 1) * size]) for i in range(count)]


def _inputs(trainer: Any, rows: list[Any]) -> dict[str, Any]:
    """The rows, collated; of a policy trainer the rollouts of the first, which are drawn once and
    are no part of the step.
    """
    if not hasattr(trainer, "_generate_and_score_completions"):
        return dict(trainer.data_collator(rows))
    torch.manual_seed(0)
    return dict(trainer._generate_and_score_completions([rows[0]] * len(trainer.train_dataset)))


class Step:
    """Forward and backward of one batch, as the trainer's own training_step makes them."""

    def __init__(self, trainer: Any, inputs: dict[str, Any]) -> None:
        self.trainer, self.inputs = trainer, inputs
        trainer.model = trainer.accelerator.prepare_model(trainer.model)
        trainer.current_gradient_accumulation_steps = 1
        if hasattr(trainer, "_generate_and_score_completions"):
            # they are a batch with its rollout already
            trainer._prepare_inputs = lambda inputs: inputs
        ids = [v for name, v in inputs.items() if name == "input_ids" or name.endswith("_ids")]
        self.tokens = sum(v.numel() for v in ids if isinstance(v, torch.Tensor) and v.dim() == 2)

    def __call__(self) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        self.trainer.training_step(self.trainer.model, dict(self.inputs), None)
        took = time.perf_counter() - wall, time.process_time() - cpu
        self.trainer.model.zero_grad()
        return took


def peak_of(step: Step) -> int:
    """Bytes that the process grew by in one step, above what it held before."""
    gc.collect()
    # what earlier steps freed would hide what this one takes
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    step()
    return status_bytes("VmHWM") - before


def speed(
    name: str, *, length: int, rows: int, pairs: int, checkpointing: bool, layers: int
) -> dict[str, Any]:
    from isotype.integrations import attach

    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Step] = {}
        inputs: dict[str, Any] = {}
        for way in ("unmodified", "attached"):
            trainer = large_trainer(
                name,
                Path(folder),
                length=length,
                rows=rows,
                checkpointing=checkpointing,
                layers=layers,
            )
            inputs = inputs or one_batch(trainer)
            if way == "attached":
                attach(trainer, "bf16-lora", quiet=True, preflight=False, record=False)
            steps[way] = Step(trainer, inputs)
            steps[way]()
        memory = {way: peak_of(step) for way, step in steps.items()}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
        for i in range(pairs):
            for way in sorted(steps, reverse=bool(i % 2)):
                times[way].append(steps[way]())
    wall = {way: statistics.median(t[0] for t in of) for way, of in times.items()}
    cpu = {way: statistics.median(t[1] for t in of) for way, of in times.items()}
    return {
        "trainer": name, "rows": rows, "length": length, "checkpointing": checkpointing, "layers": layers, "pairs": pairs,
        "tokens_per_second": {way: steps[way].tokens / wall[way] for way in steps}, "cpu_seconds": cpu,
        "step_mib": {way: n / 2**20 for way, n in memory.items()},
        "speed_ratio": wall["unmodified"] / wall["attached"], "cpu_ratio": cpu["unmodified"] / cpu["attached"],
        "memory_ratio": memory["attached"] / max(1, memory["unmodified"]),
    }  # fmt: skip


def line(name: str, *, length: int, rows: int, pairs: int, layers: int) -> dict[str, Any]:
    """The promised line as a user runs it, preflight and record included: `train()` of ten steps,
    and the peak of its process.
    """
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    asked = ["--length", str(length), "--rows", str(rows), "--layers", str(layers)]
    for _pair in range(pairs):
        for way, of in runs.items():
            command = [sys.executable, "-m", "benchmarks.dropin", "one-line", name, way, *asked]
            made = subprocess.run(command, capture_output=True, text=True, check=True)
            of.append(json.loads(made.stdout.splitlines()[-1]))
    middle = {
        way: {key: statistics.median(run[key] for run in of) for key in of[0]}
        for way, of in runs.items()
    }
    ratios = {
        key: middle["attached"][key] / middle["unmodified"][key] for key in middle["attached"]
    }
    return {
        "trainer": name,
        "rows": rows,
        "length": length,
        "layers": layers,
        "pairs": pairs,
        **middle,
        "attached/unmodified": ratios,
    }


def one_line(name: str, way: str, *, length: int, rows: int, layers: int) -> dict[str, float]:
    """Seconds, CPU seconds, and MiB of the process at its highest: with libraries and model, and
    grown since before the line.

    The way `unwatched` attaches without preflight and record: what the two add to the peak is the
    difference from `attached`.
    """
    from isotype.integrations import attach

    with tempfile.TemporaryDirectory() as folder:
        trainer = large_trainer(
            name, Path(folder), length=length, rows=rows, checkpointing=False, layers=layers
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        wall, cpu = time.perf_counter(), time.process_time()
        if way == "attached":
            attach(trainer, "bf16-lora", quiet=True)
        elif way == "unwatched":
            attach(trainer, "bf16-lora", quiet=True, preflight=False, record=False)
        trainer.train()
        took = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": took[0],
        "cpu_seconds": took[1],
        "peak_mib": peak,
        "grown_mib": max(1.0, peak - before),
    }


def overhead(*, pairs: int, layers: int, length: int) -> dict[str, Any]:
    """CPU time of a step with and without the guards, on one attached trainer: the median of the
    pairs' ratios.

    A pair scatters by more than the guards cost. So `own` says it a second way: the CPU time inside
    the guards' code over that of the step around it, in the same steps. Clipping, which replaces
    the trainer's, counts whole: an upper bound.
    """
    from isotype.integrations import attach
    from isotype.integrations.steps import Guards

    with tempfile.TemporaryDirectory() as folder:
        trainer = large_trainer(
            "SFT", Path(folder), length=length, rows=2, checkpointing=False, layers=layers
        )
        attached = attach(trainer, "bf16-lora", quiet=True, preflight=False, record=False)
        guards = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Guards))
        step = Step(trainer, one_batch(trainer))
        # below the guards; logits are deferred and ops fused in both
        plain = partial(type(trainer).training_step, trainer)
        optimizer = torch.optim.AdamW(
            [p for p in trainer.model.parameters() if p.requires_grad], lr=1e-4
        )

        def cpu_of(call: Callable[..., Any], *args: Any) -> float:
            before = time.process_time()
            call(*args)
            return time.process_time() - before

        def run(watched: bool) -> tuple[float, float]:
            """CPU seconds of the step, and those of them inside the guards' code."""
            begun, below = time.process_time(), 0.0

            def original(*args: Any) -> torch.Tensor:
                nonlocal below
                before = time.process_time()
                loss: torch.Tensor = plain(*args)
                below = time.process_time() - before
                return loss

            if watched:
                own = (
                    cpu_of(guards._training_step, original, trainer.model, dict(step.inputs))
                    - below
                )
                own += cpu_of(trainer._clip_grad_norm, trainer.model)
                own += cpu_of(guards.on_pre_optimizer_step, None, None, None)
                optimizer.step()
                own += cpu_of(guards.on_optimizer_step, None, None, None)
            else:
                own = 0.0
                plain(trainer.model, dict(step.inputs))
                type(trainer)._clip_grad_norm(trainer, trainer.model)
                optimizer.step()
            trainer.model.zero_grad()
            return time.process_time() - begun, own

        trainer.optimizer = trainer.accelerator.prepare_optimizer(optimizer)
        guards.on_train_begin(None, None, None)
        run(True), run(False)
        ratios, shares = [], []
        for i in range(pairs):
            seconds = {
                watched: run(watched) for watched in ((True, False) if i % 2 else (False, True))
            }
            ratios.append(seconds[True][0] / seconds[False][0] - 1)
            shares.append(seconds[True][1] / (seconds[True][0] - seconds[True][1]))
        assert attached.manifest.replaced
    found = {
        "overhead": statistics.median(ratios),
        "own": statistics.median(shares),
        "each": ratios,
        "each_own": shares,
    }
    return {"pairs": pairs, "layers": layers, "length": length, **found}


def keep(key: str, value: Any) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if key == "curves":
        fresh = {(c["trainer"], c["form"], c["checkpointing"]) for c in value}
        value = [
            c
            for c in found.get(key, [])
            if (c["trainer"], c["form"], c["checkpointing"]) not in fresh
        ] + value
    elif key == "overhead":
        pass  # one measurement: the last
    elif key in found:
        which = (
            operator.itemgetter("trainer", "layers")
            if key == "line"
            else operator.itemgetter("trainer")
        )
        value = [*[v for v in found[key] if which(v) != which(value[0])], *value]
    RESULTS.write_text(json.dumps(found | {key: value}, indent=1) + "\n")


def tiny(name: str) -> dict[str, float]:
    """Returns the CPU seconds of three steps of a tiny bf16 model with LoRA, each in a process of
    its own: unmodified, and attached with its preflight, its record and the check of its kernels.
    """
    seconds = {}
    for way in ("unmodified", "attached"):
        command = [sys.executable, "-m", "benchmarks.dropin", "one-tiny", name, way]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds[way] = float(process.stdout.splitlines()[-1])
    return seconds


def one_tiny(name: str, way: str) -> float:
    from tests.integrations.trainers import TRAINERS, Setting

    from isotype.integrations import attach

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[name](Setting(Path(folder), bf16=True, stored=torch.bfloat16))
        start = time.process_time()
        if way == "attached":
            attach(trainer, "bf16-lora", quiet=True)
        trainer.train()
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        choices=[
            "curves",
            "bf16",
            "speed",
            "line",
            "one-line",
            "tiny",
            "one-tiny",
            "overhead",
            "table",
        ],
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--forms", nargs="*", default=list(FORMS))
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=None, help="5 for speed, 10 for overhead")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--checkpointing", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    import datasets

    datasets.disable_progress_bars()
    if given.what == "curves":
        keep("curves", curves(given.names, given.forms))
    elif given.what == "bf16":
        with tempfile.TemporaryDirectory() as folder:
            for name in given.names or ["SFT", "DPO", "GRPO"]:
                found = bf16_errors(name, Path(folder))
                keep("bf16", [found])
                print(json.dumps(found, indent=1))
    elif given.what == "speed":
        for name in given.names or ["SFT"]:
            found = speed(
                name,
                length=given.length,
                rows=given.rows,
                pairs=given.pairs or 5,
                checkpointing=given.checkpointing,
                layers=given.layers,
            )
            keep("speed", [found])
            print(json.dumps(found, indent=1))
    elif given.what == "line":
        for name in given.names or ["SFT"]:
            found = line(
                name,
                length=given.length,
                rows=given.rows,
                pairs=given.pairs or 3,
                layers=given.layers,
            )
            keep("line", [found])
            print(json.dumps(found, indent=1))
    elif given.what == "one-line":
        print(
            json.dumps(
                one_line(*given.names, length=given.length, rows=given.rows, layers=given.layers)
            )
        )
    elif given.what == "tiny":
        for name in given.names or ["KTO", "GRPO"]:
            cpu = tiny(name)
            added = cpu["attached"] - cpu["unmodified"]
            print(f"{name}: attach adds {added:.1f} CPU s to {cpu['unmodified']:.1f}; one thread")
    elif given.what == "one-tiny":
        print(one_tiny(*given.names))
    elif given.what == "overhead":
        found = overhead(pairs=given.pairs or 10, layers=given.layers, length=given.length)
        keep("overhead", [found])
        print(json.dumps(found, indent=1))
    else:
        write_tables()


if __name__ == "__main__":
    main()
