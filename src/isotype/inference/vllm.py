"""An adapter as vLLM reads it: one scale for all layers, no patterns; and the line that serves it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

from safetensors.torch import save_file

from ..errors import UsageError
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.folder import refuse_filled
from .adapter_file import FILE, SETTINGS, read_pairs, read_settings

# what vLLM 0.6 to 0.23 take as --max-lora-rank
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def export_vllm(adapter: Path, out: Path, name: str) -> str:
    """Writes the folder, and returns the command that serves it as model `name`.

    vLLM computes one scale from r, lora_alpha and use_rslora and ignores rank_pattern and alpha_pattern; where layers differ, each
    one's own scale goes into its B.
    Raises  UsageError for an adapter that vLLM reads as another one, or refuses
    """
    pairs, settings = read_pairs(adapter, "vLLM"), read_settings(adapter)
    rank = max(pair.rank for pair in pairs)
    if rank > RANKS[-1]:
        raise UsageError(f"{adapter}: rank {rank}, and vLLM takes at most {RANKS[-1]}", fix="isotype merge writes a whole model")
    refuse_filled(out)

    def fill(folder: Path) -> None:
        for file in adapter.iterdir():  # tokenizer and template among them; the seal is a new one
            if file.is_file() and file.name != "DONE":
                shutil.copy2(file, folder / file.name)
        if len({(pair.scale, pair.rank) for pair in pairs}) > 1:
            (folder / FILE).unlink()
            one = {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
            (folder / SETTINGS).write_text(json.dumps(settings | one, indent=2) + "\n", encoding="utf-8")
            tensors = {f"base_model.model.{pair.module}.lora_A.weight": pair.a for pair in pairs}
            tensors |= {f"base_model.model.{pair.module}.lora_B.weight": pair.b_for(1.0) for pair in pairs}
            save_file(tensors, folder / FILE, metadata={"format": "pt"})

    write_folder(out, fill, then="export again")
    template = ["--chat-template", str(out / "chat_template.jinja")] if (out / "chat_template.jinja").is_file() else []
    command = [
        "vllm", "serve", str(settings.get("base_model_name_or_path")), "--enable-lora", "--max-lora-rank",
        str(next(most for most in RANKS if most >= rank)), "--lora-modules", f"{name}={out.absolute()}", *template,
    ]  # fmt: skip
    return shlex.join(command)
