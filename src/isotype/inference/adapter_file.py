"""Reads a saved PEFT adapter as pairs of matrices, for programs that support only LoRA, and writes
adapters for vLLM.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..environment.hub_kernels import disable_hub_kernels
from ..errors import UsageError
from ..model.adapter_settings import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    check_patterns,
    read_adapter_config,
)
from ..model.lora_names import PEFT_PREFIX
from ..runs.checkpoint.atomic_folder import SEAL, write_folder
from ..runs.folder import locate_base, refuse_non_empty

_A_SUFFIX = ".lora_A.weight"
_B_SUFFIX = ".lora_B.weight"


@dataclass(frozen=True)
class LoraPair:
    """The change that an adapter makes to one linear layer. The product `scale * b @ a` is added to
    the layer's weight.

    module  the layer's name in the base model
    a       F[r in]
    b       F[out r]
    """

    module: str
    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the layer's weight."""
        return self.b.shape[0], self.a.shape[1]

    def change(self) -> Tensor:
        """Returns the matrix that is added to the layer's weight, in fp32."""
        return self.scale * (self.b.float() @ self.a.float())

    def rescaled_b(self, scale: float) -> Tensor:
        """Returns `b`, rescaled so that a program which multiplies by `scale` gets the same result.
        If `scale` is the pair's own scale, `b` is unchanged.
        """
        if scale == self.scale:
            return self.b
        return (self.b.float() * (self.scale / scale)).to(self.b.dtype)


def read_settings(adapter: Path) -> dict[str, Any]:
    """Reads adapter_config.json and checks its values. Raises UsageError."""
    return read_adapter_config(adapter, "adapter")


def read_base_name(adapter: Path) -> str:
    """Returns the path or hub id of an adapter's base."""
    return locate_base(str(read_settings(adapter).get("base_model_name_or_path")), adapter)


def read_pairs(adapter: Path, reader: str) -> list[LoraPair]:
    """Reads the pairs of matrices from a PEFT folder. Raises UsageError if the adapter has parts
    that the program `reader` does not support.
    """
    settings = read_settings(adapter)
    tensors = _load_tensors(adapter)
    refuse_more_than_pairs(adapter, settings, list(tensors), reader)
    return _build_pairs(adapter, settings, tensors)


def read_changes(adapter: Path, reader: str) -> tuple[list[LoraPair], dict[str, Tensor]]:
    """Reads what a PEFT folder changes: the pairs of matrices, and the weights of modules that were
    trained in full, by their names in the base model. Raises UsageError for other parts.
    """
    settings = read_settings(adapter)
    tensors = _load_tensors(adapter)
    full_names = []
    for module in settings.get("modules_to_save") or []:
        prefixes = (f"{PEFT_PREFIX}{module}.", f".{module}.")
        full_names += [
            name
            for name in tensors
            if (name.startswith(prefixes[0]) or prefixes[1] in name) and ".lora_" not in name
        ]
    full_weights = {name.removeprefix(PEFT_PREFIX): tensors.pop(name) for name in set(full_names)}
    refuse_more_than_pairs(adapter, settings, list(tensors), reader)
    return _build_pairs(adapter, settings, tensors), full_weights


def _load_tensors(adapter: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    if not (adapter / ADAPTER_FILE).is_file():
        raise UsageError(f"{adapter}: no {ADAPTER_FILE} there")
    return load_file(adapter / ADAPTER_FILE)


def _build_pairs(
    adapter: Path, settings: dict[str, Any], tensors: dict[str, Tensor]
) -> list[LoraPair]:
    """Returns the pairs of LoRA matrices in `tensors`, each with its scale. Raises UsageError for a
    rank that contradicts the settings.
    """
    disable_hub_kernels()  # PEFT imports bitsandbytes
    from peft.utils.other import get_pattern_key

    modules = (name.removeprefix(PEFT_PREFIX).removesuffix(_A_SUFFIX) for name in tensors)
    check_patterns(settings, modules, f"adapter: {adapter / ADAPTER_CONFIG_FILE}")
    rank = settings.get("r", 8)
    alpha = settings.get("lora_alpha", 8)
    ranks = settings.get("rank_pattern") or {}
    alphas = settings.get("alpha_pattern") or {}
    pairs = []
    for name in sorted(name for name in tensors if name.endswith(_A_SUFFIX)):
        module = name.removeprefix(PEFT_PREFIX).removesuffix(_A_SUFFIX)
        a = tensors[name]
        b = tensors[name.removesuffix(_A_SUFFIX) + _B_SUFFIX]
        r = ranks.get(get_pattern_key(list(ranks), module), rank)
        if a.shape[0] != r:
            raise UsageError(
                f"{adapter / ADAPTER_FILE}: {module} has rank {a.shape[0]}, and {ADAPTER_CONFIG_FILE} says {r}"
            )
        module_alpha = alphas.get(get_pattern_key(list(alphas), module), alpha)
        divisor = math.sqrt(r) if settings.get("use_rslora") else r
        pairs.append(LoraPair(module, a, b, module_alpha / divisor))
    return pairs


def refuse_more_than_pairs(
    adapter: Path, settings: dict[str, Any], names: list[str], reader: str
) -> None:
    """Raises UsageError for adapters of experts, DoRA, fully trained layers, embeddings and biases."""
    unread = [name for name in names if not name.endswith((_A_SUFFIX, _B_SUFFIX))]
    kind = settings.get("peft_type")
    # the pair of stacked experts has the name of their module, and a row for each expert and rank
    experts = settings.get("target_parameters") or [name for name in names if ".experts." in name]
    if kind != "LORA":
        complaint = f"is {kind}, and {reader} reads LoRA"
    elif experts:
        complaint = (
            f"adapts stacked experts ({experts[0]}), which releases of {reader} drop, or read with"
            " rows and columns exchanged"
        )
    elif settings.get("use_dora"):
        complaint = f"is a DoRA adapter, which {reader} does not apply"
    elif unread:
        complaint = f"holds {unread[0]} beside its pairs of matrices, and {reader} reads only these"
    elif not names:
        complaint = "holds no tensor"
    else:
        return
    raise UsageError(
        f"{adapter}: this adapter {complaint}",
        fix="isotype merge writes a whole model, with everything in it",
    )


# values that vLLM 0.6 to 0.23 accept for --max-lora-rank
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def export_vllm(adapter: Path, out: Path, name: str) -> str:
    """Writes a folder for vLLM, and returns the command that serves the adapter as model `name`.

    vLLM computes one scale from r, lora_alpha and use_rslora, and ignores rank_pattern and
    alpha_pattern. If the scales of layers differ, the matrix B of each layer is multiplied by the
    layer's scale.

    Raises  UsageError for an adapter that vLLM refuses or would apply wrongly
    """
    pairs = read_pairs(adapter, "vLLM")
    settings = read_settings(adapter)
    rank = max(pair.rank for pair in pairs)
    if rank > VLLM_RANKS[-1]:
        raise UsageError(
            f"{adapter}: rank {rank}, and vLLM takes at most {VLLM_RANKS[-1]}",
            fix="isotype merge writes a whole model",
        )
    refuse_non_empty(out)

    def fill(folder: Path) -> None:
        from safetensors.torch import save_file

        for file in adapter.iterdir():  # includes tokenizer and template; the seal is written anew
            if file.is_file() and file.name != SEAL:
                shutil.copy2(file, folder / file.name)
        if len({(pair.scale, pair.rank) for pair in pairs}) > 1:
            (folder / ADAPTER_FILE).unlink()
            uniform = {
                "r": rank,
                "lora_alpha": rank,
                "use_rslora": False,
                "rank_pattern": {},
                "alpha_pattern": {},
            }
            (folder / ADAPTER_CONFIG_FILE).write_text(
                json.dumps(settings | uniform, indent=2) + "\n", encoding="utf-8"
            )
            tensors = {f"{PEFT_PREFIX}{pair.module}{_A_SUFFIX}": pair.a for pair in pairs}
            tensors |= {
                f"{PEFT_PREFIX}{pair.module}{_B_SUFFIX}": pair.rescaled_b(1.0) for pair in pairs
            }
            save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})

    write_folder(out, fill, next_action="export again")
    if (out / "chat_template.jinja").is_file():
        template = ["--chat-template", str(out / "chat_template.jinja")]
    else:
        template = []
    command = [
        "vllm",
        "serve",
        read_base_name(adapter),
        "--enable-lora",
        "--max-lora-rank",
        str(next(most for most in VLLM_RANKS if most >= rank)),
        "--lora-modules",
        f"{name}={out.absolute()}",
        *template,
    ]
    return shlex.join(command)
