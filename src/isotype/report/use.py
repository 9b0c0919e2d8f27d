"""How to load a run's result: Python that needs no Isotype, and the commands that take the run folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from .record import RunRecord, dict_of

_TORCH = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def use(record: RunRecord) -> dict[str, Any]:
    """`code` is empty while nothing is saved."""
    run = record.folder.resolve()
    adapter, model = run / "adapter", run / "model"
    compute = dict_of(dict_of(record.precision.get("declared")).get("compute")).get("value")
    dtype = _TORCH.get(str(compute).split(",")[0], "torch.float32")
    code, commands = "", []
    folder = shlex.quote(str(run))
    if record.plan.get("task") == "diffusion":
        return _of_diffusion(record, adapter, model, dtype)
    if adapter.is_dir():
        base = str(record.result.get("base") or record.setting("model", "name") or "BASE MODEL")
        base = str(Path(base).resolve()) if Path(base).is_dir() else base  # else an id on the hub
        code = (
            "import torch\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"base = AutoModelForCausalLM.from_pretrained({_text(base)}, dtype={dtype})\n"
            f"model = PeftModel.from_pretrained(base, {_text(adapter)})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({_text(adapter)})\n"
        )
        commands = [f"isotype merge {folder}"]
    elif model.is_dir():
        code = (
            "import torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"model = AutoModelForCausalLM.from_pretrained({_text(model)}, dtype={dtype})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({_text(model)})\n"
        )
    if code or (run / "checkpoints").is_dir():
        asked = [f"isotype chat {folder}", f"isotype sample {folder} 'Your prompt'", f"isotype eval {folder} FILE"]
        commands = [*asked, *commands]
    if record.status not in ("done", "running"):
        commands.append(f"isotype train --resume {folder}")
    return {"code": code, "commands": commands}


def _of_diffusion(record: RunRecord, adapter: Path, model: Path, dtype: str) -> dict[str, Any]:
    """Code for diffusers. It loads the adapter itself; a denoiser whose every weight was trained replaces the pipeline's."""
    base = str(record.setting("model", "name") or "PIPELINE")
    base = str(Path(base).resolve()) if Path(base).is_dir() else base
    code, commands = "", []
    if adapter.is_dir():
        code = (
            "import torch\nfrom diffusers import DiffusionPipeline\n\n"
            f"pipe = DiffusionPipeline.from_pretrained({_text(base)}, dtype={dtype})\npipe.load_lora_weights({_text(adapter)})\n"
        )
    elif model.is_dir():
        code = (
            "import torch\nfrom diffusers import AutoModel, DiffusionPipeline\n\n"
            f"trained = AutoModel.from_pretrained({_text(model)}, dtype={dtype})\n"
            f"pipe = DiffusionPipeline.from_pretrained({_text(base)}, transformer=trained, dtype={dtype})\n"
        )
    folder = shlex.quote(str(record.folder.resolve()))
    if code or (record.folder / "checkpoints").is_dir():
        commands.append(f"isotype sample {folder} 'Your prompt'")
    if record.status not in ("done", "running"):
        commands.append(f"isotype train --resume {folder}")
    return {"code": code, "commands": commands}


def _text(value: object) -> str:
    return json.dumps(str(value))
