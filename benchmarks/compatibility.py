"""Runs small models of many families on every kind of base weights, and writes
docs/compatibility.md.

    python benchmarks/compatibility.py --minutes 20   # runs the missing cells, then writes the page
    python benchmarks/compatibility.py --minutes 0    # only writes the page

A cell is one family, one base and one trainer. The results are in benchmarks/results as one line
of JSON for each cell and set of versions, so that a second call continues after the last cell.
After a change of the checks, delete this file. The cells run in a worker process. If the worker
crashes or exceeds its time, the cell fails, and the next cell gets a new worker.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks/results/compatibility.jsonl"
PAGE = ROOT / "docs/compatibility.md"

from benchmarks.compatibility_cell import (  # noqa: E402
    MAX_RATIO,
    REFERENCE,
    STAGES,
    Cell,
    run_cell,
)

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3",
    "mixtral", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "kolibri1", "flint", "granite_swa",
    "gemma", "ministral", "phi", "olmo3", "cohere", "cohere2", "glm", "glm4", "starcoder2", "seed_oss",
    "helium", "nemotron", "stablelm", "gpt_neox", "apertus", "arcee", "hunyuan_v1_dense",
)  # fmt: skip
BASES = ("bf16", "nf4", "int8", "fp8", "GPTQ", "AWQ", "nvfp4", "mxfp4", "GGUF")
TRAINERS = ("PEFT", "TRL", "Isotype")
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "bitsandbytes",
    "compressed-tensors",
    "gptqmodel",
)
CELL_SECONDS = 120


@cache
def installed_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def work(connection: Any) -> None:
    """The worker: receives cells and sends back their rows."""
    import torch

    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        for descriptor in (1, 2):  # the progress bars of the libraries
            os.dup2(nowhere.fileno(), descriptor)
    while True:
        try:
            cell = connection.recv()
        except EOFError:  # the main process has ended
            return
        connection.send(run_cell(cell))


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
    """Returns the rows of the file, without a line whose writing was interrupted."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def remove_incomplete_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            path.write_bytes(complete)


def row_cell(row: dict[str, Any]) -> Cell:
    return row["family"], row["base"], row["trainer"]


def run_missing(minutes: float, path: Path = RESULTS, cells: Iterable[Cell] | None = None) -> None:
    """Runs the cells that have no row with the installed versions, and appends each row at once."""
    remove_incomplete_line(path)
    versions = installed_versions()
    done = {row_cell(row) for row in read_rows(path) if row["versions"] == versions}
    end = time.monotonic() + 60 * minutes
    worker = Worker()
    try:
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
    finally:
        worker.stop()


# --- The page

INTRODUCTION = f"""\
# Compatibility

`python benchmarks/compatibility.py` writes this page from the results of its runs. For each family, the script creates a small model
with random weights. It loads the model with each kind of base weights, adds LoRA adapters to all linear layers and to stacked experts,
and runs these checks:

| check | passes if |
|---|---|
| loads | the base weights are loaded without an exception |
| gradient | each linear layer has an adapter, and the adapter's gradient has at most {MAX_RATIO} times the error of a bf16 model (1) |
| merge | the merged model is saved and loaded again, and its logits have at most {MAX_RATIO} times the error of a bf16 model (1) |
| export | the merged model is written as a GGUF file, and transformers reads the same logits from this file (2) |

(1) The bf16 model has the dequantised weights. Errors are differences from the same weights in fp64. Both models are plain models of
transformers without layers of PEFT, Isotype or a quantisation library. The script adds the adapter to their weights itself.
bitsandbytes dequantises its 4-bit weights to fp32, and the package `gguf` dequantises GGUF files. For the other formats, the script
has its own short decoders.
(2) Only Isotype writes GGUF files, and only for some families.

* **PEFT** is transformers with PEFT, and bf16 autocast as with `TrainingArguments(bf16=True)`. It adds the adapter with
  `target_modules="all-linear"`, and merges with `merge_and_unload`.
* **TRL** is one step of `SFTTrainer` with `bf16=True`. The trainer adds the adapter, and PEFT merges it.
* **Bases**: `nf4` and `int8` are quantised when the model is loaded, by bitsandbytes. Isotype quantises to `int8` itself. Stacked
  experts stay in bf16. The other bases are published formats with random contents: fp8 in blocks, GPTQ and AWQ with 4 bits, nvfp4 and
  mxfp4 of compressed-tensors (for gpt_oss: its own mxfp4), and GGUF with Q8_0. PEFT and TRL load compressed-tensors with
  `dequantize=True`, because PEFT's layers otherwise find no weight.
* **Mixtures of experts**: each token uses all experts, because rounding would otherwise change the choice of experts.

All cells run on a CPU.

| in the tables | meaning |
|---|---|
| pass | all checks pass ("with export": also the export) |
| merge requantises | all other checks pass. PEFT rounds the merged weights to the format of the base again, by design |
| not loaded | the trainer refuses this base: a package or a GPU is missing, or it does not support the format. It is not a failure |
| reference failed | the script could not compute the fp64 values, so the trainer was not tested |
| - | no such model: the format is not used for the family, or the installed transformers does not have the family |
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

**Saving an fp8 base.** On a CPU, transformers dequantises fp8 weights when it loads them. `save_pretrained` then writes fp8 weights and
their scales, but `config.json` does not say that the weights are quantised. When the folder is loaded again, the scales are ignored, and
the weights are thousands of times too large. Transformers prints a table of unexpected keys, and raises no exception. With stacked
experts, `save_pretrained` raises `Undefined Operation encountered!`, also for nvfp4 and mxfp4. The weights of a saved gpt_oss with mxfp4
experts are wrong too. This program prints the standard deviation of a weight before and after:

```python
import json, torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

small = LlamaConfig(vocab_size=320, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
LlamaForCausalLM(small).save_pretrained("fp8")
tensors = load_file("fp8/model.safetensors")
for name in [name for name in tensors if "_proj" in name]:
    scale = tensors[name].abs().max() / 448
    tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = scale.view(1, 1)
save_file(tensors, "fp8/model.safetensors", metadata={"format": "pt"})
settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
config = json.load(open("fp8/config.json")) | {"quantization_config": settings}
json.dump(config, open("fp8/config.json", "w"))
model = LlamaForCausalLM.from_pretrained("fp8", dtype=torch.bfloat16)
model.save_pretrained("saved")
saved = LlamaForCausalLM.from_pretrained("saved")
print(*(m.model.layers[0].mlp.up_proj.weight.std().item() for m in (model, saved)))  # must be equal
```

**nvfp4 experts.** With `dequantize=True`, transformers dequantises the stacked experts of compressed-tensors without their global scale
(`CompressedTensorsDequantize` in `transformers/integrations/compressed_tensors.py`). The weights of our files are 4,000 and 5,657 times
too large. Linear layers are right.

**Layers without an adapter.** In some mixtures of experts, PEFT replaces the names `gate_proj`, `up_proj` and `down_proj` by the names of
the stacked experts. Linear layers with the same names then get no adapter, such as the shared experts and the first layer of GLM 4 MoE.
Isotype adapts these layers as parameters, but cannot do so if bitsandbytes has quantised them. This program prints three times `Linear`:

```python
from peft import LoraConfig, get_peft_model
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

small = Glm4MoeConfig(vocab_size=320, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=4, num_experts_per_tok=2)
model = get_peft_model(Glm4MoeForCausalLM(small), LoraConfig(target_modules="all-linear"))
dense = model.base_model.model.model.layers[0].mlp  # the first layer has no experts
print(type(dense.up_proj).__name__, type(dense.gate_proj).__name__, type(dense.down_proj).__name__)
```

**Older versions.** PEFT 0.20 cannot adapt packed experts, and Isotype says so. PEFT's int8 models are wrong after they are merged, saved
and loaded: 61.1 to 361.1 times the error of the bf16 model. We have not looked for the cause. Three cells of Isotype (`granite` and
`gemma2` with random published weights) are above the limit there and not here: these weights have such large activations that even the
bf16 model has errors of 4 to 16%, and the ratio varies.

**Gradient of Apertus.** The activation xIELU of transformers computes a wrong derivative if its input is exactly 0: -0.3 and not 0.5.
Under autocast, PEFT adds the outputs of the base layer and of the adapter in bf16, and a few of these sums are exactly 0. The bf16 model
that it is compared with adds them in fp32, where this hardly occurs. This program prints the derivatives:

```python
import torch
from transformers.activations import XIELUActivation

activation = XIELUActivation(dtype=torch.float32)
for value in (-0.001, 0.0, 0.001):
    x = torch.tensor([value], requires_grad=True)
    activation(x).backward()
    print(value, x.grad.item())
```
"""


def failed_stages(row: dict[str, Any]) -> list[str]:
    return [stage for stage in STAGES if row[stage].startswith("fail")]


def cell_text(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if REFERENCE in row:
        return "reference failed"
    if row["loads"].startswith("skipped"):
        return "-"
    if row["loads"].startswith("unsupported"):
        return "not loaded"
    failed = failed_stages(row)
    if failed:
        return "fails: " + ", ".join(failed)
    if row["merge"].startswith("requantised"):
        return "merge requantises"
    return "pass, with export" if row["export"] == "pass" else "pass"


def summary_table(trainer: str, rows: dict[Cell, dict[str, Any]]) -> list[str]:
    lines = [f"| family | {' | '.join(BASES)} |", "|---" * (1 + len(BASES)) + "|"]
    for family in FAMILIES:
        cells = [cell_text(rows.get((family, base, trainer))) for base in BASES]
        if set(cells) != {"not run"}:
            lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return lines


_ERROR = re.compile(r"relative error \S+, (\S+) times")
# parts of a message that differ between families
_FAMILY_PARTS = (
    (re.compile(r"adapter on \d+ weights, such as \S+"), "adapter on some linear layers"),
    (re.compile(r"layers\.\d+\.\S+"), "layers..."),
    (re.compile(r"architecture \S+ is"), "this architecture is"),
    (re.compile(r"GGUF files of \S+ are"), "GGUF files of this family are"),
)


def common_message(message: str) -> str:
    for pattern, text in _FAMILY_PARTS:
        message = pattern.sub(text, message)
    return message


def result_table(trainer: str, rows: dict[Cell, dict[str, Any]], outcome: str) -> list[str]:
    """Returns one line for each base, check and result with this outcome, with its families."""
    groups: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for (family, base, name), row in rows.items():
        if name != trainer:
            continue
        for stage in (*STAGES, REFERENCE):
            text = row.get(stage, "-")
            if text.startswith(f"{outcome}: "):
                message = text.removeprefix(f"{outcome}: ").replace("|", "\\|")
                match = _ERROR.match(message)
                ratio = float(match[1]) if match else math.nan
                message = "" if match else common_message(message)
                groups.setdefault((base, stage, message), []).append((family, ratio))
    lines = ["| base | check | result | families |", "|---|---|---|---|"]
    for (base, stage, message), members in groups.items():
        families = ", ".join(f"`{family}`" for family, _ in members)
        text = message or error_range([ratio for _, ratio in members])
        lines.append(f"| {base} | {stage} | {text} | {families} |")
    return lines


def error_range(ratios: list[float]) -> str:
    low, high = (f"{ratio:,.1f}" for ratio in (min(ratios), max(ratios)))
    numbers = low if low == high else f"{low} to {high}"
    return f"{numbers} times the error of the dense bf16 model"


def version_order(versions: str) -> list[Version]:
    numbers = json.loads(versions)
    return [Version(numbers[package]) for package in ("transformers", "peft", "torch")]


def version_line(versions: str) -> str:
    return ", ".join(f"{package} {number}" for package, number in json.loads(versions).items())


def changed_cells(
    older: dict[Cell, dict[str, Any]], newest: dict[Cell, dict[str, Any]]
) -> list[str]:
    """Returns a table of the cells that have another result with older versions."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    absent: set[str] = set()
    for (family, base, trainer), row in older.items():
        texts = cell_text(row), cell_text(newest.get((family, base, trainer)))
        if texts[0] == "-" != texts[1]:
            absent.add(f"`{family}`")
        elif texts[0] != texts[1]:
            groups.setdefault((trainer, base, *texts), []).append(f"`{family}`")
    lines = ["| trainer | base | these versions | newest versions | families |", "|---" * 5 + "|"]
    for key, families in groups.items():
        lines.append(f"| {' | '.join(key)} | {', '.join(families)} |")
    if absent:
        lines += ["", f"Not in these versions: {', '.join(sorted(absent))}."]
    return lines


OUTCOMES = {
    "fail": "What fails with {}",
    "requantised": "Merges that quantise again with {}",
    "unsupported": "What {} does not load here",
}


def format_page(rows: list[dict[str, Any]]) -> str:
    """The page of these rows. The last row of a cell counts."""
    sets: dict[str, dict[Cell, dict[str, Any]]] = {}
    for row in rows:
        sets.setdefault(json.dumps(row["versions"]), {})[row_cell(row)] = row
    order = sorted(sets, key=version_order, reverse=True)
    ordered = {
        versions: {cell: sets[versions][cell] for cell in all_cells() if cell in sets[versions]}
        for versions in order
    }
    parts = [INTRODUCTION]
    newest = ordered[order[0]]
    parts.append(f"Versions: {version_line(order[0])}.\n")
    for trainer in TRAINERS:
        parts.append(f"## {trainer}\n\n" + "\n".join(summary_table(trainer, newest)) + "\n")
        for outcome, title in OUTCOMES.items():
            table = result_table(trainer, newest, outcome)
            if len(table) > 2:
                parts.append(f"### {title.format(trainer)}\n\n" + "\n".join(table) + "\n")
    for versions in order[1:]:
        older = ordered[versions]
        title = f"## Older versions\n\n{version_line(versions)}: {len(older)} cells."
        parts.append("\n".join([title, "", *changed_cells(older, newest)]) + "\n")
        for trainer in TRAINERS:
            table = result_table(trainer, changed_failures(older, newest), "fail")
            if len(table) > 2:
                parts.append(f"### What else fails with {trainer}\n\n" + "\n".join(table) + "\n")
    return "\n".join([*parts, EXPLANATIONS])


def changed_failures(
    older: dict[Cell, dict[str, Any]], newest: dict[Cell, dict[str, Any]]
) -> dict[Cell, dict[str, Any]]:
    return {
        cell: row for cell, row in older.items() if cell_text(row) != cell_text(newest.get(cell))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the compatibility matrix.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for new cells")
    minutes = parser.parse_args().minutes
    run_missing(minutes)
    PAGE.write_text(format_page(read_rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
