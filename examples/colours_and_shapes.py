"""A vision-language model learns colours and shapes from pictures, in one to two minutes on a CPU:
`isotype.train` on rows with pictures.

The model is a LLaVA of random weights, so all weights are trained, those of the vision tower too.
After training it answers questions about pictures that it was not trained on. Each question is
asked with its own picture and with another picture. With another picture a model that uses pictures
answers correctly only by chance.

    python examples/colours_and_shapes.py         350 steps
    python examples/colours_and_shapes.py 10      a short form, which learns almost nothing and asks
                                                  about few pictures
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
HELD_OUT_PICTURES, FEW_PICTURES = 40, 5
# with the usual standard deviation of 0.02 a small tower learns the colours but hardly any shapes
INITIAL_WEIGHT_STD = 0.05
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


def draw_picture(colour: str, shape: str, rng: random.Random) -> Image.Image:
    canvas = Image.new("RGB", (SIDE, SIDE), "white")
    x, y, r = rng.randint(18, 38), rng.randint(18, 38), rng.randint(11, 16)
    width, height = (r if shape != "pole" else r // 3), (r if shape != "bar" else r // 3)
    draw = ImageDraw.Draw(canvas)
    (draw.ellipse if shape == "disc" else draw.rectangle)(
        (x - width, y - height, x + width, y + height), fill=COLOURS[colour]
    )
    return canvas


def make_rows(folder: Path, name: str, count: int, seed: int) -> list[dict[str, str]]:
    """Draws pictures into `folder` and returns rows with a file, a question and its answer."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        draw_picture(colour, shape, rng).save(folder / f"{name}{i}.png")
        rows += [
            {
                "file": f"{name}{i}.png",
                "question": question,
                "answer": (colour, shape)[answer_index],
            }
            for question, answer_index in QUESTIONS.items()
        ]
    return rows


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
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "initializer_range": INITIAL_WEIGHT_STD,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "projection_dim": 96,
            "initializer_range": INITIAL_WEIGHT_STD, "initializer_factor": INITIAL_WEIGHT_STD / 0.02,
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
    for name, content in (
        ("preprocessor_config.json", images),
        ("processor_config.json", settings),
    ):
        (folder / name).write_text(
            json.dumps({**content, "processor_class": "LlavaProcessor"}), encoding="utf-8"
        )


def accuracy(
    run: isotype.Run,
    questions: list[dict[str, str]],
    pictures: list[dict[str, str]],
    folder: Path,
) -> float:
    """The share of questions that are answered correctly with the pictures of other rows."""
    correct = 0
    for row, picture_row in zip(questions, pictures, strict=True):
        run.forget()
        answer = run.chat(
            row["question"],
            images=[str(folder / picture_row["file"])],
            max_new_tokens=6,
            temperature=0.0,
        )
        correct += answer.strip().startswith(row["answer"])
    return correct / len(questions)


def main(steps: int, held_out_pictures: int) -> tuple[float, float]:
    """Returns the share of correct answers with the right picture and with another picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        training_rows = make_rows(folder, "training", 100 + 4 * steps, seed=1)
        held_out = make_rows(folder, "held_out", held_out_pictures, seed=2)
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
            for row in training_rows
        ]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        run = isotype.train(
            model=str(folder / "model"), data=str(folder / "rows.jsonl"), adapter={"kind": "none", "vision": "full", "projector": "full"},
            precision="fp32", run={"folder": str(folder / "run"), "sample_every": 0},
            train={"steps": steps, "batch_size": 16, "accumulate": 1, "learning_rate": 1e-3, "warmup": 0.1},
        )  # fmt: skip
        right_picture = accuracy(run, held_out, held_out, folder)
        # a picture has two rows: shifted by two, each question gets the picture of another row
        other_picture = accuracy(run, held_out, held_out[2:] + held_out[:2], folder)
        return right_picture, other_picture


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    held_out_pictures = HELD_OUT_PICTURES if steps >= STEPS else FEW_PICTURES
    right_picture, other_picture = main(steps, held_out_pictures)
    print(
        f"right: {right_picture:.2f} of {2 * held_out_pictures} questions about new pictures;"
        f" {other_picture:.2f} with another picture"
    )
    if steps >= STEPS:
        assert right_picture > 0.9, right_picture
        assert other_picture < 0.5, other_picture
