"""What the samples before step 1 cost: a round as it is (`isotype train`), the short sample that the
preflight watches operator by operator, and a round that is watched as a whole. If the model changes
between the preflight and the samples, a run watches the short sample once more.

    python benchmarks/samples.py                         # 24 layers, 4 prompts of 32 tokens, 64 new tokens each
    python benchmarks/samples.py --layers 4 --whole      # the third too, which takes four to seven times as long

CPU time of one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isotype.data.rows import SamplePrompt
from isotype.observe import Observer
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.language.sample import sample
from isotype.tasks.language.task import REHEARSED_TOKENS

VOCABULARY = 8192


def build_model(hidden: int, layers: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        eos_token_id=None,
    )
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    precision = PRESETS["bf16-lora"]
    optimize(model, precision)
    apply_precision(model, precision, device_type="cpu")
    return model


def cpu_seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(options.hidden, options.layers)
    tokenizer: Any = SimpleNamespace(eos_token_id=None, pad_token_id=0, decode=lambda *_, **__: "")
    generator = torch.Generator().manual_seed(0)
    prompts = [
        SamplePrompt("", tuple(torch.randint(3, VOCABULARY, (32,), generator=generator).tolist()))
        for _ in range(options.prompts)
    ]
    draw = partial(sample, model, tokenizer, device=torch.device("cpu"))
    observer = Observer(model, PRESETS["bf16-lora"])

    def draw_watched(watched: list[SamplePrompt], tokens: int) -> None:
        with observer.watch(0, role="generate"):
            draw(watched, max_new_tokens=tokens)

    draw(prompts[:1], max_new_tokens=2)  # warms up
    plain = cpu_seconds(partial(draw, prompts, max_new_tokens=options.tokens))
    short = cpu_seconds(partial(draw_watched, prompts[:1], REHEARSED_TOKENS))
    print(f"{options.layers} layers of width {options.hidden}, CPU seconds of one thread")
    print(f"{options.prompts} prompts x {options.tokens} tokens  {plain:8.2f}")
    print(f"short watched sample        {short:6.2f}  {short / plain:.2f} times")
    if options.whole:
        whole = cpu_seconds(partial(draw_watched, prompts, options.tokens))
        print(f"watched as a whole          {whole:6.2f}  {whole / plain:.2f} times")


if __name__ == "__main__":
    main()
