"""A vision-language model learns colours and shapes from pictures, in three minutes on a CPU:
`isotype.train` on rows with pictures.

The model is a LLaVA of random weights, so that all of it is trained, tower too. Questions about
pictures that it never saw are asked with their own picture and with another one, where a model that
reads pictures is right no more often than by chance.

    python examples/colours_and_shapes.py         350 steps
    python examples/colours_and_shapes.py 10      a short form, which learns next to nothing
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText

import isotype
from isotype.quickstart.text import train_tokenizer

SIDE, PATCH, STEPS = 56, 14, 350
# standard deviation of the first weights: with the usual 0.02 a small tower learns colours and
# hardly any shapes
WIDE = 0.05
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 70, 210),
    "yellow": (240, 200, 30),
}
SHAPES = ("disc", "bar", "pole")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = {"which colour?": 0, "which shape?": 1}


def picture(colour: str, shape: str, chance: random.Random) -> Image.Image:
    canvas = Image.new("RGB", (SIDE, SIDE), "white")
    x, y, r = chance.randint(18, 38), chance.randint(18, 38), chance.randint(11, 16)
    width, height = (r if shape != "pole" else r // 3), (r if shape != "bar" else r // 3)
    draw = ImageDraw.Draw(canvas)
    (draw.ellipse if shape == "disc" else draw.rectangle)(
        (x - width, y - height, x + width, y + height), fill=COLOURS[colour]
    )
    return canvas


def rows(folder: Path, name: str, count: int, seed: int) -> list[dict[str, str]]:
    """Draws pictures into `folder`: of each, its file, a question and its answer."""
    chance, made = random.Random(seed), []
    for i in range(count):
        colour, shape = chance.choice(list(COLOURS)), chance.choice(SHAPES)
        picture(colour, shape, chance).save(folder / f"{name}{i}.png")
        made += [
            {"file": f"{name}{i}.png", "question": q, "answer": (colour, shape)[which]}
            for q, which in QUESTIONS.items()
        ]
    return made


def save_model(folder: Path) -> None:
    tokenizer = train_tokenizer(
        [f"{q} {a}" for q in QUESTIONS for a in (*COLOURS, *SHAPES)] * 2, vocabulary=300
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<image>"]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        "llava", vision_feature_layer=-1, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "initializer_range": WIDE,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "projection_dim": 96,
            "initializer_range": WIDE, "initializer_factor": WIDE / 0.02,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": size,
    }
    settings = {
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    for name, said in (("preprocessor_config.json", images), ("processor_config.json", settings)):
        (folder / name).write_text(
            json.dumps({**said, "processor_class": "LlavaProcessor"}), encoding="utf-8"
        )


def share_right(
    run: isotype.Run, asked: list[dict[str, str]], shown: list[dict[str, str]], folder: Path
) -> float:
    right = 0
    for question, other in zip(asked, shown, strict=True):
        run.forget()
        answer = run.chat(
            question["question"],
            images=[str(folder / other["file"])],
            max_new_tokens=6,
            temperature=0.0,
        )
        right += answer.strip().startswith(question["answer"])
    return right / len(asked)


def main(steps: int) -> tuple[float, float]:
    """(share of right answers with each question's own picture, with another one)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        learnt, held_out = (
            rows(folder, "learnt", 100 + 4 * steps, seed=1),
            rows(folder, "held_out", 40, seed=2),
        )
        lines = [
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "path": row["file"]},
                            {"type": "text", "text": row["question"]},
                        ],
                    },
                    {"role": "assistant", "content": row["answer"]},
                ]
            }
            for row in learnt
        ]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        run = isotype.train(
            model=str(folder / "model"), data=str(folder / "rows.jsonl"), adapter={"kind": "none", "vision": "full", "projector": "full"},
            precision="fp32", run={"folder": str(folder / "run"), "sample_every": 0},
            train={"steps": steps, "batch_size": 16, "accumulate": 1, "learning_rate": 1e-3, "warmup": 0.1},
        )  # fmt: skip
        own = share_right(run, held_out, held_out, folder)
        # two rows a picture: two places on is the same question of another picture
        return own, share_right(run, held_out, held_out[2:] + held_out[:2], folder)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    own, swapped = main(steps)
    print(
        f"right: {own:.2f} of 80 questions about pictures that were not learnt; {swapped:.2f} with another picture"
    )
    if steps >= STEPS:
        assert own > 0.9, own
        assert swapped < 0.5, swapped
