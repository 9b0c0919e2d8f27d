"""Preference methods and distillation beside TRL, on a CPU: CPU time of one thread as a ratio, and peak memory.

    python benchmarks/methods.py            all parts, about three minutes
    python benchmarks/methods.py logits     log-probabilities of peaked rows with and without the logits that are made again in fp32
    python benchmarks/methods.py distil     `linear_divergence` beside TRL's op
    python benchmarks/methods.py dpo        a DPO step in `isotype train` beside TRL with `attach` and TRL alone

`isotype train` computes the log-probabilities of the reference once, before step 1; TRL computes them in each step. The part `dpo`
prints both: the step alone, and the step with the share of the reference's pass that belongs to its rows.

CPU time of one thread is what a busy machine disturbs least. Memory is the highest resident size in a step less that before it. Each
peer of `distil` and `dpo` runs in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isotype.environment.memory_limits import status_bytes

VOCABULARY, HIDDEN = 32_000, 512
STEPS, PAIRS, PROMPT, ANSWER = 4, 2, 48, 128  # of dpo; the first step is not counted


def begin_step() -> int:
    """What is resident before a step; its peak is counted from here on."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps freed would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


# --- logits


def logits() -> None:
    from isotype.ops import linear_divergence, linear_log_probs
    from isotype.ops.backend import force_backend
    from isotype.ops.linear_divergence.op import linear_divergence_reference

    generator = torch.Generator().manual_seed(0)
    print(
        "mean log-probability, logits made again: error of a token, of the gradient; CPU seconds of forward"
    )
    for spread in (0.05, 0.15, 0.4):
        weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * spread).bfloat16()
        x = torch.randn(256, HIDDEN, generator=generator)
        x = (x / x.square().mean(-1, keepdim=True).sqrt()).bfloat16()
        exact = (x.double() @ weight.double().t()).log_softmax(-1)
        rows, targets = (
            torch.arange(256),
            torch.multinomial(exact.exp(), 1, generator=generator).squeeze(-1),
        )
        dz = -exact.exp()
        dz[rows, targets] += 1
        want = dz @ weight.double()
        for backend in ("eager", "cpp"):
            leaf, best = x.clone().requires_grad_(), float("inf")
            for _ in range(3):
                begin = time.process_time()
                with force_backend(backend):
                    made = linear_log_probs(leaf, weight, targets).log_probs
                best = min(best, time.process_time() - begin)
            assert made is not None
            (gradient,) = torch.autograd.grad(made.sum(), leaf)
            token = (made.double() - exact[rows, targets]).square().mean().sqrt()
            off = (gradient.double() - want).norm() / want.norm()
            again = "yes" if backend == "cpp" else "no (eager)"
            print(
                f"  {exact[rows, targets].mean():6.2f}  {again:10}  {token:.1e}  {off:.1e}  {best:.3f}"
            )
    print(
        "divergence of two heads, beta 0.5: its mean, logits made again: error of a row, of the gradient; CPU seconds of forward"
    )
    for spread in (0.05, 0.15, 0.4):
        weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) * spread
        x = torch.randn(128, HIDDEN, generator=generator)
        near = [t + 0.3 * t.std() * torch.randn(t.shape, generator=generator) for t in (x, weight)]
        heads = [t.bfloat16() for t in (x, weight, *near)]
        leaf = heads[0].double().requires_grad_()
        exact = linear_divergence_reference(leaf, *(t.double() for t in heads[1:]), beta=0.5)
        (want,) = torch.autograd.grad(exact.sum(), leaf)
        for backend in ("eager", "cpp"):
            leaf, best = heads[0].clone().requires_grad_(), float("inf")
            for _ in range(3):
                begin = time.process_time()
                with force_backend(backend):
                    found = linear_divergence(leaf, *heads[1:], beta=0.5)
                best = min(best, time.process_time() - begin)
            (gradient,) = torch.autograd.grad(found.sum(), leaf)
            row, off = (
                (found - exact.detach()).square().mean().sqrt(),
                (gradient.double() - want).norm() / want.norm(),
            )
            print(
                f"  {exact.mean().item():6.2f}  {'yes' if backend == 'cpp' else 'no (eager)':10}  {row:.1e}  {off:.1e}  {best:.3f}"
            )


# --- distil


def distil_worker(peer: str, beta: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        torch.randn(256, size, generator=generator).bfloat16() for size in (HIDDEN, 768)
    )
    heads = [
        (torch.randn(VOCABULARY, size, generator=generator) * 0.1).bfloat16()
        for size in (HIDDEN, 768)
    ]
    student.requires_grad_()
    if peer == "isotype":
        from isotype.ops import linear_divergence
    else:
        from trl.trainer import distillation_trainer as trl

    def loss() -> Tensor:
        if peer == "isotype":
            return linear_divergence(student, heads[0], teacher, heads[1], beta=beta).sum()
        mask = torch.ones(1, 256)
        found: Tensor = trl._chunked_divergence_loss(
            student.unsqueeze(0), teacher.unsqueeze(0), *heads, mask, beta, 1
        )[0]
        return found

    loss().backward()
    best = float("inf")
    for _ in range(3):
        student.grad = None
        begin = time.process_time()
        loss().backward()
        best = min(best, time.process_time() - begin)
    student.grad = None
    before = begin_step()
    loss().backward()
    return {"seconds": best, "peak": status_bytes("VmHWM") - before}


# --- dpo


def dpo_worker(peer: str, folder: Path) -> dict[str, float]:
    times, before, high = [time.process_time()], 0, 0
    reference_seconds = 0.0

    def ended() -> None:
        nonlocal before, high
        # read before anything is saved or loaded after the last step
        high = status_bytes("VmHWM")
        times.append(time.process_time())
        if len(times) == 2:
            before = begin_step()

    rows = folder / "pairs.jsonl"
    if peer == "isotype":
        import isotype
        from isotype.tasks.language.preference import Preference

        prepare = Preference.prepare_training

        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal reference_seconds
            start = time.process_time()
            header = prepare(self, *args, **kwargs)
            reference_seconds = time.process_time() - start
            return header

        Preference.prepare_training = timed  # type: ignore[method-assign]

        class Clock(isotype.Callback):
            def on_step(self, moment: Any) -> None:
                ended()

        isotype.train(
            model=str(folder / "base"), data={"train": str(rows), "eval_split": 0.0, "max_length": 512, "shuffle": False},
            adapter={"kind": "lora", "r": 16, "targets": "all-linear"}, precision={"preset": "bf16-lora"},
            train={"objective": "dpo", "steps": STEPS, "batch_size": PAIRS, "learning_rate": 1e-5, "gradient_checkpointing": "none"},
            run={"folder": str(folder / "run"), "sample_every": 0, "report": False}, callbacks=[Clock()],
        )  # fmt: skip
    else:
        from datasets import load_dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
        from trl import DPOConfig, DPOTrainer

        class Steps(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                ended()

        args = DPOConfig(
            output_dir=str(folder / peer), max_steps=STEPS, per_device_train_batch_size=PAIRS, learning_rate=1e-5, bf16=True, use_cpu=True,
            save_strategy="no", report_to=[], gradient_checkpointing=False, max_length=512, logging_steps=1,
        )  # fmt: skip
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16), args=args,
            train_dataset=load_dataset("json", data_files=str(rows), split="train"),
            processing_class=AutoTokenizer.from_pretrained(folder / "base"), callbacks=[Steps()],
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        )  # fmt: skip
        if peer == "attach":
            from isotype.integrations import attach

            attach(trainer, "bf16-lora", quiet=True)
        trainer.train()
    return {
        "seconds": min(b - a for a, b in pairwise(times[1:])),
        "peak": high - before,
        "reference": reference_seconds / STEPS,
    }


def write_base(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from isotype.quickstart.text import train_tokenizer

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    tokenizer = train_tokenizer([" ".join(words)] * 8, vocabulary=300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")

    def text(i: int, count: int) -> str:
        return " ".join(words[(i * 7 + k * 3) % 10] for k in range(count))

    pairs = [
        {"prompt": text(i, PROMPT), "chosen": text(i + 1, ANSWER), "rejected": text(i + 2, ANSWER)}
        for i in range(STEPS * PAIRS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def measured(part: str, peer: str, *more: str) -> dict[str, float]:
    """seconds, and the bytes that a step takes at its peak beyond what is resident before it."""
    command = [sys.executable, __file__, part, "--worker", peer, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(part: str, peers: list[str], *more: str) -> None:
    found = {peer: measured(part, peer, *more) for peer in peers}
    own = found[peers[0]]
    if own.get("reference"):
        with_pass = dict(own, seconds=own["seconds"] + own["reference"])
        found = {peers[0]: own, f"{peers[0]} with its reference pass": with_pass, **found}
    for peer, values in found.items():
        print(
            f"  {peer:32} {values['seconds']:7.3f} s, {values['peak'] / 2**20:6.0f} MiB of the step: isotype is "
            f"{values['seconds'] / own['seconds']:.2f} times as fast in {own['peak'] / values['peak']:.2f} of the memory"
        )


def main() -> None:
    torch.set_num_threads(1)
    if "--worker" in sys.argv:
        part, _, peer, *more = sys.argv[1:]
        result = (
            distil_worker(peer, float(more[0]))
            if part == "distil"
            else dpo_worker(peer, Path(more[0]))
        )
        print(json.dumps(result))
        return
    every_part = ["logits", "distil", "dpo"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(every_part))
    parts = parser.parse_args().parts or every_part
    if unknown := set(parts) - set(every_part):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    if "logits" in parts:
        logits()
    if "distil" in parts:
        for beta in (0.0, 0.5, 1.0):
            print(f"distil, beta {beta}: 256 tokens, V {VOCABULARY}, bf16, forward and backward")
            compared("distil", ["isotype", "trl"], str(beta))
    if "dpo" in parts:
        print(
            f"dpo: 4 layers x {HIDDEN}, V {VOCABULARY}, {PAIRS} pairs of {PROMPT} + {ANSWER} words, r 16, bf16, one thread, fastest step"
        )
        with tempfile.TemporaryDirectory() as folder:
            write_base(Path(folder))
            compared("dpo", ["isotype", "attach", "trl"], folder)


if __name__ == "__main__":
    main()
