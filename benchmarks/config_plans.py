"""The least memory of the language models of examples/configs by `isotype plan`, for the table of examples/README.md.

    python benchmarks/config_plans.py            # a row for each configuration; some minutes, no GPU, no download

Each model's folder is written with its published architecture and without weights; tokenizers and data are stand-ins whose rows fill
`data.max_length`. Every block is recomputed (`train.gradient_checkpointing=layers`), and everything else is the configuration's own.

Source  the `config.json` files of the repositories that the configurations name. Of pictures, benchmarks/diffusion_plans.py has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from isotype.config.load import load
from isotype.quickstart.text import train_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.vlms import saved_with_processor

CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "configs"
DEVICE = "h200"
_QWEN = {
    "model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "lora": {**_QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "dpo": {**_QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "qlora": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 5e5,
    },
    "full": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
        "num_attention_heads": 15, "num_key_value_heads": 5, "max_position_embeddings": 8192, "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "experts": {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
    },
}  # fmt: skip
CLASSES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "olmoe": "OlmoeForCausalLM"}
_VISION_TEXT = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 128000, "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}  # fmt: skip
_VISION_TOWER = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048, "patch_size": 14,
    "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112,
}  # fmt: skip
LONG = "a word of an answer that does not end " * 400


def write_language_model(folder: Path, name: str) -> None:
    architecture = ARCHITECTURES[name]
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer([LONG], vocabulary=320)
    tokenizer.save_pretrained(folder)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = {
        "architectures": [CLASSES[architecture["model_type"]]], "torch_dtype": "bfloat16", "bos_token_id": None, **ids, **architecture,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def write_vision_model(folder: Path) -> None:
    """The processor and the tokens' ids are those of a tiny model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    saved_with_processor("qwen2_5_vl", folder)
    (folder / "model.safetensors").unlink()
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"].pop("layer_types", None)
    config["text_config"].pop("head_dim", None)
    config["text_config"].pop("rope_parameters", None)
    config["text_config"] |= _VISION_TEXT
    config["text_config"]["max_window_layers"] = 36
    config["vision_config"] |= _VISION_TOWER
    config |= {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    file.write_text(json.dumps(config))
    processor = folder / "preprocessor_config.json"
    settings = json.loads(processor.read_text())
    settings["size"] = {"shortest_edge": 3136, "longest_edge": 12845056}
    processor.write_text(json.dumps(settings))


def write_data(place: Path) -> None:
    """Rows that fill `data.max_length`, and a picture of a megapixel."""
    question = {"role": "user", "content": "what?"}
    answer = {"role": "assistant", "content": LONG}
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    rows = {
        "chats.jsonl": {"messages": [question, answer]},
        "pairs.jsonl": {"prompt": "what?", "chosen": LONG, "rejected": LONG[2:]},
        "questions.jsonl": {"messages": [image, answer], "images": ["pictures/0.png"]},
    }
    for file, row in rows.items():
        (place / file).write_text((json.dumps(row) + "\n") * 32)
    (place / "pictures").mkdir()
    Image.new("RGB", (1024, 1024), "red").save(place / "pictures/0.png")


def plan(name: str, place: Path) -> dict[str, Any]:
    """What `isotype plan --json` prints."""
    command = [sys.executable, "-m", "isotype", "plan", str(CONFIGS / f"{name}.yaml"), "--device", DEVICE, "--json"]  # fmt: skip
    settings = ["train.gradient_checkpointing=layers"]
    done = subprocess.run(
        [*command, *settings],
        cwd=place,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "ISOTYPE_CACHE": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr or done.stdout}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every_name = [*ARCHITECTURES, "vision"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every_name))
    names = parser.parse_args().names or every_name
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_data(place)
        for name in names:
            model = load(CONFIGS / f"{name}.yaml", [], {}).config.model.name
            if name in ARCHITECTURES:
                write_language_model(place / str(model), name)
            else:
                write_vision_model(place / str(model))
            memory = plan(name, place)["memory"]
            print(f"{name:10} {memory['peak'] / 2**30:6.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
