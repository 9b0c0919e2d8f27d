"""Generated tokens per second of a LoRA model, beside PEFT and beside transformers with the adapter
merged into the weights.

    python -m benchmarks.generation                             # a Llama of 217M in bf16, on a CPU
    python -m benchmarks.generation --hidden 512 --layers 24 --vocabulary 8192
    python -m benchmarks.generation --model SmolLM2-135M-Instruct   # the weights of a folder
    python -m benchmarks.generation --json out.json

In bf16 and in fp32, the contenders answer one prompt, and then 8 prompts of different lengths in a
batch, in turn. Speeds are tokens per CPU second, also those of the prompt's own computation.

Isotype also answers the 8 prompts one at a time. In fp32 all tokens must be equal to those of the
batch. In bf16, an answer may differ where the two best logits are nearly equal. The last column gives
the largest gap of these two logits at a first difference, in spacings of bf16 (2^-7 times the power
of two below the larger logit).

The weights of the adapter are random. The base weights are those of a checkpoint in bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isotype.data.rows import SamplePrompt
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision, use_generate_dtype
from isotype.tasks.language.sample import batch_prompts, padded_inputs

SIZES = {"hidden": 1024, "layers": 12, "vocabulary": 32000, "tokens": 48, "rounds": 5, "threads": 1}
PROMPT_LENGTHS = (32, 7, 20, 61, 12, 33, 45, 28)


def build_model(sizes: Any) -> Any:
    """Returns a bf16 Llama with a LoRA adapter of rank 16 whose B is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 3,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=sizes.hidden // 128,
        eos_token_id=None,
    )
    if sizes.model is None:
        base = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    else:
        base = AutoModelForCausalLM.from_pretrained(sizes.model, dtype=torch.bfloat16)
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.eval()


def build_isotype(sizes: Any, preset: str) -> Any:
    model = build_model(sizes)
    if preset == "fp32":
        model = model.float()
    precision = PRESETS[preset]
    optimize(model, precision)
    apply_precision(model, precision, device_type="cpu")
    return model.eval()


def generate(model: Any, inputs: dict[str, torch.Tensor], tokens: int, context: Any) -> Any:
    with torch.no_grad(), context():
        return model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )[:, inputs["input_ids"].shape[1] :]


def tokens_per_second(action: Callable[[], Any], tokens: int) -> float:
    started = time.process_time()
    action()
    return tokens / (time.process_time() - started)


def gap_at_difference(model: Any, prompt: SamplePrompt, first: Any, second: Any) -> float:
    """Returns the gap of the two best logits at the first token that differs in two answers, in
    spacings of bf16; 0 if the answers are equal.
    """
    if torch.equal(first, second):
        return 0.0
    start = int((first != second).nonzero()[0])
    ids = torch.tensor([[*prompt.input_ids, *first[:start].tolist()]])
    with torch.no_grad(), use_generate_dtype(model):
        logits = model(input_ids=ids).logits[0, -1].float()
    best = logits.topk(2).values
    spacing = 2.0 ** (math.floor(math.log2(best.abs().max())) - 7)
    return float(best[0] - best[1]) / spacing


def make_prompts(sizes: Any) -> list[SamplePrompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        SamplePrompt(
            "", tuple(torch.randint(3, sizes.vocabulary, (n,), generator=generator).tolist())
        )
        for n in PROMPT_LENGTHS
    ]


def compare_answers(sizes: Any, preset: str) -> dict[str, Any]:
    """Answers all prompts alone and in one batch with Isotype."""
    model = build_isotype(sizes, preset)
    prompts = make_prompts(sizes)
    context = lambda: use_generate_dtype(model)  # noqa: E731
    together: list[Any] = [None] * len(prompts)
    for numbers in batch_prompts(prompts):
        inputs = padded_inputs([prompts[n] for n in numbers], 0, torch.device("cpu"))
        for number, answer in zip(numbers, generate(model, inputs, sizes.tokens, context)):
            together[number] = answer
    alone: list[Any] = []
    for prompt in prompts:
        inputs = padded_inputs([prompt], 0, torch.device("cpu"))
        alone.append(generate(model, inputs, sizes.tokens, context)[0])
    pairs = list(zip(prompts, alone, together))
    return {
        "equal answers": sum(torch.equal(first, second) for _, first, second in pairs),
        "largest gap": max(gap_at_difference(model, *pair) for pair in pairs),
    }


def compare_contenders(sizes: Any, preset: str) -> dict[str, dict[str, list[float]]]:
    """Returns the speeds of each contender in each round, for one prompt and for all prompts."""
    isotype = build_isotype(sizes, preset)
    peft = build_model(sizes)
    merged = build_model(sizes).merge_and_unload()
    peft_context: Any = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    if preset == "fp32":
        peft = peft.float()
        merged = merged.float()
        peft_context = nullcontext
    contenders: dict[str, tuple[Any, Any]] = {
        "isotype": (isotype, lambda: use_generate_dtype(isotype)),
        "PEFT": (peft, peft_context),
        "merged transformers": (merged, nullcontext),
    }
    tasks = {
        "one prompt": [SamplePrompt("", tuple(range(3, 35)))],
        f"{len(PROMPT_LENGTHS)} prompts": make_prompts(sizes),
    }
    speeds: dict[str, dict[str, list[float]]] = {}
    for task, prompts in tasks.items():
        inputs = padded_inputs(prompts, 0, torch.device("cpu"))
        for model, context in contenders.values():
            generate(model, inputs, 2, context)
        speeds[task] = {name: [] for name in contenders}
        for _ in range(sizes.rounds):
            for name, (model, context) in contenders.items():
                speeds[task][name].append(
                    tokens_per_second(
                        lambda model=model, context=context, inputs=inputs: generate(
                            model, inputs, sizes.tokens, context
                        ),
                        sizes.tokens * len(prompts),
                    )
                )
        print_speeds(f"{task}, {preset}", speeds[task])
    return speeds


def print_speeds(title: str, speeds: dict[str, list[float]]) -> None:
    print(title)
    for name, values in speeds.items():
        print(f"  {name:<22}{median(values):7.1f}   {min(values):.1f} to {max(values):.1f}")
    for name in ("PEFT", "merged transformers"):
        ratios = [ours / theirs for ours, theirs in zip(speeds["isotype"], speeds[name])]
        print(f"  isotype beside {name}: {median(ratios):.2f} times, round by round", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", type=Path, help="the folder of a model to use instead")
    parser.add_argument("--preset", choices=("bf16-lora", "fp32"), help="only this preset")
    parser.add_argument("--json", type=Path)
    sizes = parser.parse_args()
    torch.set_num_threads(sizes.threads)
    load = os.getloadavg()[0]
    print(f"tokens per CPU second, {sizes.threads} thread(s), load {load:.1f}")
    presets = ("bf16-lora", "fp32") if sizes.preset is None else (sizes.preset,)
    speeds = {preset: compare_contenders(sizes, preset) for preset in presets}
    answers = {preset: compare_answers(sizes, preset) for preset in presets}
    for preset, result in answers.items():
        print(
            f"{len(PROMPT_LENGTHS)} prompts alone and in a batch, {preset:<10}"
            f" {result['equal answers']} answers equal, gap at a difference at most"
            f" {result['largest gap']:.1f} spacings"
        )
    if sizes.json:
        values = {name: getattr(sizes, name) for name in SIZES}
        result = {"sizes": values, "load": load, "speeds": speeds, "answers": answers}
        sizes.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
