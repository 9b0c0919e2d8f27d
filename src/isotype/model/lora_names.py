"""Recognises the LoRA tensors in a file by the names that PEFT, diffusers, kohya's scripts and
ComfyUI give them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PEFT_PREFIX = "base_model.model."
# the ends of the names of the two matrices
PAIR_SUFFIXES = (
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
)
ALPHA_SUFFIX = ".alpha"
# a part of a tensor's name -> the kind of adapter that has such tensors
OTHER_KINDS = {"lokr_": "LoKr", "hada_": "LoHa", "dora_scale": "DoRA", "magnitude": "DoRA"}


def detect_lora_format(names: Iterable[str], metadata: Mapping[str, str]) -> str:
    """Returns the name of the program whose format the file has. The format is recognised by the
    file's metadata and by the names of its tensors.
    """
    names = list(names)
    software = " ".join(value for key, value in metadata.items() if "software" in key).lower()
    first = names[0] if names else ""
    if "ai-toolkit" in software:
        return "ai-toolkit"
    if "simpletuner" in " ".join(metadata.values()).lower():
        return "SimpleTuner"
    if metadata.get("format") == "pt" and "pipeline" in metadata:
        return "Isotype, for ComfyUI"
    if first.startswith("lora_"):
        return "kohya"
    if first.startswith("diffusion_model.") or any(name.endswith(ALPHA_SUFFIX) for name in names):
        return "ComfyUI"
    if first.startswith(PEFT_PREFIX):
        return "PEFT"
    return "diffusers"


def find_pairs(names: Iterable[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Returns the names of the two matrices of each module, and the matrices whose partner is
    missing.
    """
    known_names = set(names)
    pairs: dict[str, tuple[str, str]] = {}
    single = []
    for name in sorted(known_names):
        for a_suffix, b_suffix in PAIR_SUFFIXES:
            if name.endswith(a_suffix):
                module = name.removesuffix(a_suffix)
                if f"{module}{b_suffix}" in known_names:
                    pairs[module] = (name, f"{module}{b_suffix}")
                else:
                    single.append(name)
            elif name.endswith(b_suffix):
                module = name.removesuffix(b_suffix)
                if f"{module}{a_suffix}" not in known_names:
                    single.append(name)
    return pairs, single
