"""Recognises the tool of a tree of settings by its keys. The name of the file only decides between tools that fit equally well.

A tool's distinctive keys weigh three, its ordinary ones one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def _table() -> dict[str, tuple[str, str]]:
    """tool -> (distinctive keys, ordinary keys), from `tools.txt`."""
    found = {}
    for section in re.split(r"\n(?=\w)", Path(__file__).with_name("tools.txt").read_text(encoding="utf-8"))[1:]:
        tool, *words = section.split()
        ordinary = words.index("ordinary:") if "ordinary:" in words else len(words)
        found[tool] = (" ".join(words[1:ordinary]), " ".join(words[ordinary + 1 :]))
    return found


KEYS = _table()
_ISOTYPE_SECTIONS = {"model", "data", "adapter", "precision", "train", "run"}
_TIES = ("model", "checkpoint", "peft", "fsdp", "deepspeed", "accelerate", "kohya", "llamafactory", "axolotl", "hf", "simpletuner")


def identify(data: Any, name: str = "") -> str | None:
    """The tool's namespace, or None when the keys say nothing of training."""
    if not isinstance(data, dict) or not data:
        return None
    keys = {str(k).removeprefix("--") for k in data}
    if keys <= _ISOTYPE_SECTIONS and all(isinstance(v, dict) or v is None for v in data.values()) and not _torchtitan(data):
        return "isotype"
    if all(str(k).isupper() for k in data) and not any(isinstance(v, dict) for v in data.values()):
        return "env"
    if keys <= {"device", "gpu", "hardware", "gpu_name", "accelerator", "num_gpus", "platform"} and keys & {
        "gpu",
        "gpu_name",
        "hardware",
        "device",
    }:
        return "hardware"
    keys |= {f"{k}.{inner}" for k, v in data.items() if isinstance(v, dict) for inner in v}
    if _mentions_component(data):
        return "torchtune"
    scores = {tool: 3 * len(keys & set(strong.split())) + len(keys & set(weak.split())) for tool, (strong, weak) in KEYS.items()}
    if sum(str(k).startswith("--") for k in data) * 2 > len(data):
        scores["simpletuner"] += 6
    if "accelerate" in name.lower() or name.lower() == "default_config.yaml":
        scores["accelerate"] += 2
    if "deepspeed" in name.lower() or name.lower().startswith(("ds_", "zero")):
        scores["deepspeed"] += 2
    if keys & {"base_model"} == set() and scores["axolotl"] < 6:
        scores["axolotl"] = 0
    if not keys & {"checkpointer", "tokenizer.path"}:
        scores["torchtune"] = 0  # without a component of its own, words that everybody uses
    if not keys & {"finetuning_type", "pure_bf16", "quantization_bit", "upcast_layernorm", "template", "stage"}:
        scores["llamafactory"] = 0
    if keys & {"finetuning_type", "pure_bf16"}:
        scores["llamafactory"] += 10
    best = max(scores.values())
    if best == 0 or (best == 1 and keys & {"mixed_precision"} == set()):
        return "model" if keys & {"dtype", "torch_dtype", "model_name_or_path"} else None
    if best in (scores["model"], scores["peft"]) and keys & {"bf16", "fp16"} and "output_dir" in keys:
        return "hf"  # a trainer's arguments and its model's in one flat file, as TRL's scripts take them
    tied = [tool for tool, score in scores.items() if score == best]
    return next((tool for tool in _TIES if tool in tied), tied[0]) if best > 1 else "accelerate"


def _torchtitan(data: dict[str, Any]) -> bool:
    training = data.get("training") or {}
    return "job" in data or any(str(k).startswith("mixed_precision") for k in training)


def _mentions_component(node: Any) -> bool:
    if isinstance(node, dict):
        return any(str(v).startswith("torchtune.") for k, v in node.items() if k == "_component_") or any(
            _mentions_component(v) for v in node.values()
        )
    return False
