"""A saved PEFT adapter as pairs of matrices, for programs that read LoRA and nothing else of PEFT;
and written as vLLM reads it.
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

from ..errors import UsageError
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.folder import refuse_filled

FILE = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
_A = ".lora_A.weight"
_B = ".lora_B.weight"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Pair:
    """What an adapter adds to one linear layer: `scale * b @ a`.

    module  the layer's name in the base
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

    def rescaled_b(self, scale: float) -> Tensor:
        """b for a reader that multiplies with `scale`; the same bytes where that is this pair's
        own.
        """
        if scale == self.scale:
            return self.b
        return (self.b.float() * (self.scale / scale)).to(self.b.dtype)


def read_settings(adapter: Path) -> dict[str, Any]:
    """adapter_config.json. Raises UsageError."""
    try:
        settings = json.loads((adapter / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{adapter / SETTINGS}: {error}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"{adapter / SETTINGS}: not a mapping")
    return settings


def read_pairs(adapter: Path, reader: str) -> list[Pair]:
    """The pairs of a PEFT folder. Raises UsageError for what `reader`, named in the error, does not
    apply.
    """
    from peft.utils.other import get_pattern_key
    from safetensors.torch import load_file

    settings = read_settings(adapter)
    if not (adapter / FILE).is_file():
        raise UsageError(f"{adapter}: no {FILE} there")
    tensors = load_file(adapter / FILE)
    refuse_more_than_pairs(adapter, settings, list(tensors), reader)
    rank = settings.get("r", 8)
    alpha = settings.get("lora_alpha", 8)
    ranks = settings.get("rank_pattern") or {}
    alphas = settings.get("alpha_pattern") or {}
    pairs = []
    for name in sorted(name for name in tensors if name.endswith(_A)):
        module = name.removeprefix(_PREFIX).removesuffix(_A)
        a = tensors[name]
        b = tensors[name.removesuffix(_A) + _B]
        r = ranks.get(get_pattern_key(list(ranks), module), rank)
        if a.shape[0] != r:
            raise UsageError(
                f"{adapter / FILE}: {module} has rank {a.shape[0]}, and {SETTINGS} says {r}"
            )
        module_alpha = alphas.get(get_pattern_key(list(alphas), module), alpha)
        pairs.append(
            Pair(module, a, b, module_alpha / (math.sqrt(r) if settings.get("use_rslora") else r))
        )
    return pairs


def refuse_more_than_pairs(
    adapter: Path, settings: dict[str, Any], names: list[str], reader: str
) -> None:
    """Raises  UsageError for experts, DoRA, layers that were trained in full, embeddings and biases"""
    unread = [name for name in names if not name.endswith((_A, _B))]
    kind = settings.get("peft_type")
    # a pair on stacked experts is named after the module that holds them, and has a row for each
    # expert and rank
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


# what vLLM 0.6 to 0.23 take as --max-lora-rank
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def export_vllm(adapter: Path, out: Path, name: str) -> str:
    """Writes the folder, and returns the command that serves it as model `name`.

    vLLM computes one scale from r, lora_alpha and use_rslora and ignores rank_pattern and
    alpha_pattern; where layers differ, each one's own scale goes into its B.
    Raises  UsageError for an adapter that vLLM reads as another one, or refuses
    """
    pairs = read_pairs(adapter, "vLLM")
    settings = read_settings(adapter)
    rank = max(pair.rank for pair in pairs)
    if rank > VLLM_RANKS[-1]:
        raise UsageError(
            f"{adapter}: rank {rank}, and vLLM takes at most {VLLM_RANKS[-1]}",
            fix="isotype merge writes a whole model",
        )
    refuse_filled(out)

    def fill(folder: Path) -> None:
        from safetensors.torch import save_file

        for file in adapter.iterdir():  # tokenizer and template among them; the seal is a new one
            if file.is_file() and file.name != "DONE":
                shutil.copy2(file, folder / file.name)
        if len({(pair.scale, pair.rank) for pair in pairs}) > 1:
            (folder / FILE).unlink()
            uniform = {
                "r": rank,
                "lora_alpha": rank,
                "use_rslora": False,
                "rank_pattern": {},
                "alpha_pattern": {},
            }
            (folder / SETTINGS).write_text(
                json.dumps(settings | uniform, indent=2) + "\n", encoding="utf-8"
            )
            tensors = {f"base_model.model.{pair.module}.lora_A.weight": pair.a for pair in pairs}
            tensors |= {
                f"base_model.model.{pair.module}.lora_B.weight": pair.rescaled_b(1.0)
                for pair in pairs
            }
            save_file(tensors, folder / FILE, metadata={"format": "pt"})

    write_folder(out, fill, next_action="export again")
    if (out / "chat_template.jinja").is_file():
        template = ["--chat-template", str(out / "chat_template.jinja")]
    else:
        template = []
    command = [
        "vllm",
        "serve",
        str(settings.get("base_model_name_or_path")),
        "--enable-lora",
        "--max-lora-rank",
        str(next(most for most in VLLM_RANKS if most >= rank)),
        "--lora-modules",
        f"{name}={out.absolute()}",
        *template,
    ]
    return shlex.join(command)
