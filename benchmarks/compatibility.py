"""Runs small models of many families on every kind of base weights, and writes
docs/compatibility.md.

    python benchmarks/compatibility.py --minutes 20   # runs the missing cells, then writes the page
    python benchmarks/compatibility.py --minutes 0    # only writes the page

A cell is one family, one base and one trainer. The results are in benchmarks/results as one line
of JSON for each cell and set of versions, so that a second call continues after the last cell.
The cells run in a worker process. If the worker crashes or exceeds its time, the cell fails, and
the next cell gets a new worker.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks/results/compatibility.jsonl"
PAGE = ROOT / "docs/compatibility.md"

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3",
    "gemma", "ministral", "phi", "olmo3", "cohere", "cohere2", "glm", "glm4", "starcoder2", "seed_oss",
    "helium", "nemotron", "stablelm", "gpt_neox", "apertus", "arcee", "hunyuan_v1_dense",
)  # fmt: skip
BASES = ("bf16", "nf4", "int8")
TRAINERS = ("PEFT", "Isotype")
STAGES = ("loads", "gradient", "merge", "export")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
# settings that a GGUF file of the family requires, as in its released models
REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
}
HEAD_SIZE_FAMILIES = ("qwen3", "gemma2", "gemma3_text")
MAX_RATIO = 1.5  # error relative to the error of the dense bf16 model
CELL_SECONDS = 120
Cell = tuple[str, str, str]


@cache
def installed_versions() -> dict[str, str]:
    return {package: version(package) for package in PACKAGES}


# --- One cell, in the worker


def save_model(family: str, folder: Path) -> None:
    """Saves a random bf16 model of the family, and a tokenizer."""
    import torch
    from tests.gguf_files import splitting
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    tokenizer = splitting()
    settings: dict[str, Any] = {**SIZES, "bos_token_id": None}
    settings |= {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    settings |= REQUIRED_SETTINGS.get(family, {})
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**settings)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_peer(folder: Path, base: str) -> Any:
    """Loads the base as the documentation of transformers does."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if base == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if base == "int8":
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantization
    )


def isotype_precision(base: str) -> Any:
    from isotype.precision import PRESETS

    if base == "nf4":
        return PRESETS["nf4-lora"]
    return PRESETS["bf16-lora"].but(base=base)


def load_isotype(folder: Path, base: str) -> Any:
    import torch

    from isotype.model.load import Source, load_base

    return load_base(
        Source(str(folder)),
        isotype_precision(base),
        attention="auto",
        device=torch.device("cpu"),
        trainable=False,
    )


def dense_copy(model: Any, folder: Path, dtype: Any) -> Any:
    """Returns the dense model with the values that the loaded base weights represent."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from isotype.ops.packed import widen

    state = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "quant_state", None) is not None:
            state[name] = widen(parameter, parameter.quant_state, torch.float64)
        elif getattr(parameter, "SCB", None) is not None:
            state[name] = parameter.data.double() * parameter.SCB.double()[:, None] / 127
        else:
            state[name] = parameter.data
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    missing = plain.load_state_dict(state, strict=False).missing_keys
    tied = set(plain.state_dict()) - {name for name, _ in plain.named_parameters()}
    unfilled = set(missing) - tied
    assert not unfilled, unfilled
    return plain.requires_grad_(False)


def add_adapter(model: Any) -> Any:
    """Adds LoRA with the same random matrices to every model."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in sorted(adapted.named_parameters()):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(len(name))
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = values.mul(0.05).to(parameter.dtype)
    return adapted


def token_ids() -> Any:
    import torch

    return torch.arange(3, 99).view(2, 48)


def adapter_gradient(model: Any) -> Any:
    """Returns the gradient of all adapter matrices as one fp64 vector."""
    import torch

    ids = token_ids()
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = [
        parameter.grad.double().flatten()
        for name, parameter in sorted(model.named_parameters())
        if "lora_" in name
    ]
    return torch.cat(gradients)


def model_logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=token_ids(), use_cache=False).logits.double()


def relative_error(values: Any, exact: Any) -> float:
    return float((values - exact).norm() / exact.norm())


def require_small_error(error: float, dense_error: float) -> None:
    if not error <= MAX_RATIO * dense_error:
        ratio = error / dense_error
        raise ArithmeticError(
            f"relative error {error:.1e}, {ratio:.1f} times the error of the dense bf16 model"
        )


def peer_gradient(model: Any) -> Any:
    """`TrainingArguments(bf16=True)` calls the model in the same way."""
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        return adapter_gradient(model)


def isotype_gradient(model: Any, base: str) -> Any:
    from isotype import optimize
    from isotype.precision.apply import apply_precision

    optimize(model, isotype_precision(base))
    apply_precision(model, isotype_precision(base), device_type="cpu")
    return adapter_gradient(model)


def merge_peer(adapted: Any, folder: Path, out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    adapted.merge_and_unload().save_pretrained(out)
    return AutoModelForCausalLM.from_pretrained(out, dtype="auto")


def merge_isotype(adapted: Any, folder: Path, out: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from isotype.inference.merge import merged_state

    state, _, _ = merged_state(adapted, torch.bfloat16)
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    plain.load_state_dict(state, strict=False)
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)


def check_export(merged: Any, folder: Path) -> None:
    """Writes the merged folder as a GGUF file, and compares the logits of transformers' reader."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from isotype.inference.gguf_file import export_model

    export_model(folder, folder / "model.gguf", "BF16")
    exact = model_logits(merged.double())
    # transformers does not read the head size of these families from the file
    config = AutoConfig.from_pretrained(folder)
    sizes = {"config": config} if config.model_type in HEAD_SIZE_FAMILIES else {}
    read = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", dtype=torch.float32, **sizes
    )
    error = relative_error(model_logits(read), exact)
    if not error <= 1e-4:
        raise ArithmeticError(f"relative error {error:.1e} of the logits")


def failing_line(error: BaseException) -> str:
    """Returns `file:line` of the innermost frame, with the path below site-packages or the
    repository.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename).as_posix()
    for root in ("site-packages/", "src/", "benchmarks/"):
        if root in path:
            path = path.split(root)[-1]
            break
    return f"{path}:{frame.lineno}"


def run_stage(row: dict[str, str], stage: str, action: Callable[[], Any]) -> Any:
    """Runs a stage that a previous failure does not prevent, and notes how it ended."""
    try:
        value = action()
    except ArithmeticError as error:
        row[stage] = f"fail: {error}"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        row[stage] = f"fail: {type(error).__name__}: {lines[0][:160]} ({failing_line(error)})"
    else:
        row[stage] = "pass"
        return value
    return None


def run_cell(cell: Cell) -> dict[str, Any]:
    import torch

    from isotype.model.served import GGUF_FAMILIES

    family, base, trainer = cell
    is_isotype = trainer == "Isotype"
    load = load_isotype if is_isotype else load_peer
    row = dict.fromkeys(STAGES, "-")
    with tempfile.TemporaryDirectory() as temporary:
        folder, out = Path(temporary, "model"), Path(temporary, "merged")
        save_model(family, folder)
        model = run_stage(row, "loads", lambda: load(folder, base))
        if model is None:
            return row
        exact = add_adapter(dense_copy(model, folder, torch.float64)).double()
        dense = add_adapter(dense_copy(model, folder, torch.bfloat16))
        exact_gradient = adapter_gradient(exact)
        dense_error = relative_error(adapter_gradient(dense), exact_gradient)

        def gradient() -> None:
            if is_isotype:
                values = isotype_gradient(add_adapter(model), base)
            else:
                values = peer_gradient(add_adapter(model))
            require_small_error(relative_error(values, exact_gradient), dense_error)

        run_stage(row, "gradient", gradient)
        exact_logits = model_logits(exact.merge_and_unload())
        dense_logits = model_logits(dense.merge_and_unload())

        def merge() -> Any:
            write = merge_isotype if is_isotype else merge_peer
            merged = write(add_adapter(load(folder, base)), folder, out)
            error = relative_error(model_logits(merged), exact_logits)
            require_small_error(error, relative_error(dense_logits, exact_logits))
            return merged

        merged = run_stage(row, "merge", merge)
        if is_isotype and merged is not None and family in GGUF_FAMILIES:
            run_stage(row, "export", lambda: check_export(merged, out))
    return row


def work(connection: Any) -> None:
    """The worker: receives cells and sends back their rows."""
    import torch

    torch.set_num_threads(1)
    while True:
        connection.send(run_cell(connection.recv()))


# --- All cells


class Worker:
    """A process that runs cells. It is replaced after a crash or a timeout."""

    def __init__(self) -> None:
        self.process: Any = None

    def run(self, cell: Cell) -> dict[str, Any]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, remote = context.Pipe()
            self.process = context.Process(target=work, args=(remote,), daemon=True)
            self.process.start()
            remote.close()
        try:
            self.connection.send(cell)
            if self.connection.poll(CELL_SECONDS):
                return self.connection.recv()
            message = f"fail: no result after {CELL_SECONDS} s"
        except (EOFError, ConnectionError):
            self.process.join()
            message = f"fail: the process ended with status {self.process.exitcode}"
        self.stop()
        return dict.fromkeys(STAGES, "-") | {"loads": message}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def all_cells() -> Iterator[Cell]:
    """The cells, ten families at a time, so that a short run covers all bases and trainers."""
    for start in range(0, len(FAMILIES), 10):
        yield from product(FAMILIES[start : start + 10], BASES, TRAINERS)


def read_rows(path: Path = RESULTS) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def row_cell(row: dict[str, Any]) -> Cell:
    return row["family"], row["base"], row["trainer"]


def run_missing(minutes: float, path: Path = RESULTS, cells: Iterable[Cell] | None = None) -> None:
    """Runs the cells that have no row with the installed versions, and appends each row at once."""
    versions = installed_versions()
    done = {row_cell(row) for row in read_rows(path) if row["versions"] == versions}
    end = time.monotonic() + 60 * minutes
    worker = Worker()
    for cell in cells or all_cells():
        if time.monotonic() >= end:
            break
        if cell in done:
            continue
        stages = worker.run(cell)
        names = dict(zip(("family", "base", "trainer"), cell, strict=True))
        row = {**names, **stages, "versions": versions}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(*cell, *(f"{stage}={row[stage]}" for stage in STAGES), flush=True)
    worker.stop()


# --- The page

INTRODUCTION = f"""\
# Compatibility

`python benchmarks/compatibility.py` writes this page from the results of its runs. For each family, the script creates a small model
with random weights. It loads the model with each kind of base weights, adds LoRA adapters to all linear layers and runs these checks:

| check | passes if |
|---|---|
| loads | the base weights are loaded without an exception |
| gradient | the adapter's gradient has at most {MAX_RATIO} times the error of a dense bf16 model (1) |
| merge | the merged model is saved and loaded again, and its logits have at most {MAX_RATIO} times the error of a merged dense model |
| export | the merged model is written as a GGUF file, and transformers reads the same logits from this file (2) |

(1) Both are compared with the same weights in fp64. The dense model runs in PEFT, without autocast, with the dequantised weights.
(2) Only Isotype writes GGUF files, and only for some families.

"PEFT" means transformers with PEFT, and bf16 autocast as with `TrainingArguments(bf16=True)`. It merges with `merge_and_unload`. `nf4` and
`int8` are made by bitsandbytes. All cells run on a CPU. Mixtures of experts, published checkpoints (fp8, GPTQ, AWQ, nvfp4,
mxfp4, GGUF), TRL and older versions are not part of this page yet; [LoRA](lora.md) has the errors of published formats.
"""
EXPLANATIONS = """\
## Reasons

**Merging into quantised weights.** `merge_and_unload` adds the adapter to the dequantised weight and quantises the sum again, so that the
merged model has a new rounding error. Isotype merges into a dense bf16 copy, which needs more memory. This program shows the error:

```python
import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
small = LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(small).save_pretrained("small")
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
base = LlamaForCausalLM.from_pretrained("small", quantization_config=nf4, dtype=torch.bfloat16)
model = get_peft_model(base, LoraConfig(target_modules="all-linear", init_lora_weights=False)).train()
ids = torch.arange(3, 51)[None]
adapted = model(ids).logits.float()
merged = model.merge_and_unload()(ids).logits.float()
print("relative error of the merged logits:", ((merged - adapted).norm() / adapted.norm()).item())
```

**Gradient of Apertus.** With bf16 autocast, the error is 3 to 5 times the error of the same dense model without autocast. We have not
looked for the line that causes it.
"""


def failed_stages(row: dict[str, Any]) -> list[str]:
    return [stage for stage in STAGES if row[stage].startswith("fail")]


def cell_text(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    failed = failed_stages(row)
    if failed:
        return "fails: " + ", ".join(failed)
    passed = [stage for stage in STAGES if row[stage] == "pass"]
    return "pass, with export" if "export" in passed else "pass"


def summary_table(trainer: str, rows: dict[Cell, dict[str, Any]]) -> list[str]:
    lines = [f"| family | {' | '.join(BASES)} |", "|---" * (1 + len(BASES)) + "|"]
    for family in FAMILIES:
        cells = [cell_text(rows.get((family, base, trainer))) for base in BASES]
        if set(cells) != {"not run"}:
            lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return lines


def failure_table(trainer: str, rows: dict[Cell, dict[str, Any]]) -> list[str]:
    lines = ["| family | base | check | result |", "|---|---|---|---|"]
    for (family, base, name), row in rows.items():
        if name == trainer:
            for stage in failed_stages(row):
                message = row[stage].removeprefix("fail: ").replace("|", "\\|")
                lines.append(f"| `{family}` | {base} | {stage} | {message} |")
    return lines


def format_page(rows: list[dict[str, Any]]) -> str:
    """The page of these rows. The last row of a cell counts."""
    latest = {row_cell(row): row for row in rows}
    ordered = {cell: latest[cell] for cell in all_cells() if cell in latest}
    versions = sorted({json.dumps(row["versions"]) for row in ordered.values()})
    parts = [INTRODUCTION]
    for text in versions:
        names = [f"{package} {number}" for package, number in json.loads(text).items()]
        parts.append(f"Versions: {', '.join(names)}.\n")
    for trainer in TRAINERS:
        parts.append(f"## {trainer}\n\n" + "\n".join(summary_table(trainer, ordered)) + "\n")
        failures = failure_table(trainer, ordered)
        if len(failures) > 2:
            parts.append(f"### What fails with {trainer}\n\n" + "\n".join(failures) + "\n")
    return "\n".join([*parts, EXPLANATIONS])


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the compatibility matrix.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for new cells")
    minutes = parser.parse_args().minutes
    run_missing(minutes)
    PAGE.write_text(format_page(read_rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
