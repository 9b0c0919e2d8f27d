"""Whether another version of transformers loads what Isotype saves, with the logits that the
trained model had.

`write FOLDER` with this environment, then `load FOLDER` with the other one, which needs only torch,
safetensors and its transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


TOKENS = torch.arange(3, 35)[None]
# family, tied, what is trained beside the attention's adapters, dtype of the merged files
CASES = [
    (family, tied, trained, dtype)
    for family, tied in (
        ("llama", False),
        ("llama", True),
        ("qwen2", True),
        ("qwen3", False),
        ("gemma2", True),
        ("mistral", False),
    )
    for trained in ("lora", "lora and head", "lora and embedding", "every weight")
    for dtype in ("fp32", "bf16")
]


def write(folder: Path) -> None:
    from tests.models import lora, tiny

    from isotype.inference.loaded import load_run
    from isotype.inference.merge import merge
    from isotype.precision.precision import PRESETS
    from isotype.quickstart.text import train_tokenizer
    from isotype.tasks.language.result import save_model

    torch.set_num_threads(2)
    tokenizer = train_tokenizer(["How much is 1 plus 2? 3."] * 4, vocabulary=300)
    for family, tied, trained, dtype in CASES:
        place = folder / f"{family} {'tied' if tied else 'untied'}, {trained}, {dtype}"
        base = tiny(family, tie_word_embeddings=tied, vocab_size=len(tokenizer))
        base.save_pretrained(place / "base")
        tokenizer.save_pretrained(place / "base")
        if trained == "every weight":
            _move(base)
            save_model(base, place / "result", PRESETS["fp32"].but(save=dtype))
            model = base
        else:
            base.name_or_path = base.config._name_or_path = str(place / "base")
            settings = {"target_modules": ["q_proj", "v_proj"]}
            if trained == "lora and head":
                settings["modules_to_save"] = ["lm_head"]
            elif trained == "lora and embedding":
                settings["target_modules"].append("embed_tokens")
            model = lora(base, **settings)
            _move(model)
            model.save_pretrained(place / "adapter")
            merge(load_run(place / "adapter"), place / "result", dtype=dtype)
        with torch.no_grad():
            logits = model.eval()(input_ids=TOKENS).logits
        (place / "expected.json").write_text(json.dumps(logits[0].tolist()))


def load(folder: Path) -> None:
    """Prints a line a case: the share of equal argmaxes, and the largest difference as a share of
    the largest logit.
    """
    print(f"transformers {transformers.__version__}, torch {torch.__version__}\n")
    print("| case | config says tied | argmax equal | difference |")
    print("|---|---|---|---|")
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        expected = torch.tensor(json.loads((place / "expected.json").read_text()))
        dtype = (
            {"torch_dtype": torch.float32}
            if transformers.__version__ < "5"
            else {"dtype": torch.float32}
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(place / "result", **dtype)
        with torch.no_grad():
            logits = model.eval()(input_ids=TOKENS).logits[0]
        same = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
        difference = ((logits - expected).abs().max() / expected.abs().max()).item()
        tied = json.loads((place / "result/config.json").read_text())["tie_word_embeddings"]
        print(f"| {place.name} | {str(tied).lower()} | {same:.0%} | {difference:.1e} |")


def _move(model: torch.nn.Module) -> None:
    """As training would: every trained weight away from where it began."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


if __name__ == "__main__":
    actions = {"write": write, "load": load}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=actions)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    actions[arguments.action](arguments.folder)
