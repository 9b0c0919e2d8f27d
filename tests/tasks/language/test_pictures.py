"""Rows with pictures: the loss and the gradients of the released class, what is learnt, bad
pictures, and a whole run.
"""

import base64
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from isotype.config.schema import AdapterSection, DataSection, ModelSection
from isotype.data.load import load_data
from isotype.errors import UsageError
from isotype.model.adapter import attach_adapter
from isotype.model.load import load_tokenizer
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from tests.api import build_picture_reader
from tests.commands import ask
from tests.results import same_tensors
from tests.training.interrupted import cut_back
from tests.vlms import saved_with_processor

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


@pytest.fixture
def seen(tmp_path):
    """Writes pictures 0.png to 5.png and rows about them; `seen(rows)` gives the file."""
    for i, colour in enumerate([*COLOURS.values()] * 2):
        Image.fromarray(np.full((40 + 8 * i, 64, 3), colour, np.uint8)).save(tmp_path / f"{i}.png")

    def file(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return file


def turns(question, answer="it is red."):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def asked(*pictures):
    return [
        *({"type": "image", "path": f"{i}.png"} for i in pictures),
        {"type": "text", "text": "what colour is it?"},
    ]


def read(folder, file, **section):
    tokenizer = load_tokenizer(ModelSection(name=str(folder)))
    data = DataSection(**{"train": str(file), "eval_split": 0, "cache": "none", **section})
    return load_data(
        data,
        tokenizer,
        seed=0,
        pictures=build_picture_reader(ModelSection(name=str(folder)), data, tokenizer),
    ), tokenizer


def test_answers_are_learnt_and_never_places_of_pictures(vlm, seen):
    for loss_on in ("assistant", "all"):
        data, tokenizer = read(vlm("gemma3"), seen(turns(asked(0))), loss_on=loss_on)
        (row,) = data.train
        learnt = tokenizer.decode([label for label in row.labels if label != -100])
        assert ("what colour" in learnt) == (loss_on == "all")
        assert "it is red.<|im_end|>" in learnt
        assert not any(
            token in learnt
            for token in ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
        )
        assert row.input_ids.count(tokenizer.convert_tokens_to_ids("<image_soft_token>")) == 4


def png(i, tmp_path):
    return (tmp_path / f"{i}.png").read_bytes()


def test_every_form_gives_the_same_row(vlm, seen, tmp_path, subtests):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.api import save_rows

    (wanted,) = read(vlm("qwen2_5_vl"), seen(turns(asked(1))))[0].train
    answer = {"role": "assistant", "content": "it is red."}
    parts = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "what colour is it?"}],
    }
    text = {"role": "user", "content": "what colour is it?"}
    marked = [
        {"from": "human", "value": "<image>what colour is it?"},
        {"from": "gpt", "value": "it is red."},
    ]
    url = "data:image/png;base64," + base64.b64encode(png(1, tmp_path)).decode()
    rows = {
        "parts and images": {"messages": [parts, answer], "images": ["1.png"]},
        "text and images": {
            "messages": [text, answer],
            "images": [{"path": "1.png", "bytes": None}],
        },
        "llava": {"conversations": marked, "image": "1.png"},
        "sharegpt": {"conversations": marked, "images": ["1.png"]},
        "bytes in JSON": turns(
            [{"type": "image", "url": url}, {"type": "text", "text": "what colour is it?"}]
        ),
        "parquet": {
            "messages": [text, answer],
            "images": [{"bytes": png(1, tmp_path), "path": None}],
        },
        "prompt_completion": {"prompt": [parts], "completion": [answer], "images": ["1.png"]},
        "rows in memory": {"messages": [text, answer], "images": [Image.open(tmp_path / "1.png")]},
    }
    for form, row in rows.items():
        if form == "parquet":
            file = tmp_path / "rows.parquet"
            pq.write_table(pa.Table.from_pylist([row]), file)
        else:
            file = save_rows([row]) if form == "rows in memory" else seen(row)
        with subtests.test(form):
            data, _ = read(vlm("qwen2_5_vl"), file)
            (made,) = data.train
            assert (made.input_ids, made.labels) == (wanted.input_ids, wanted.labels)
            assert np.array_equal(
                np.asarray(data.pictures.image(made.pictures[0])),
                np.asarray(Image.open(tmp_path / "1.png")),
            )


def save(tmp_path, name, image, **options):
    image.save(tmp_path / name, **options)


BAD = (
        (turns([{"type": "image", "path": "none.png"}]), "picture 1: none.png: no such picture"),
        (turns([{"type": "image", "path": "cut.png"}]), "picture 1: not a whole picture"),
        (turns([{"type": "image", "path": "rows.jsonl"}]), "picture 1: not a picture"),
        (turns([{"type": "image", "path": "large.png"}]), "100 megapixels"),
        (turns([{"type": "image", "path": "larger.png"}]), "more than 179 megapixels"),
        (turns("<image>what colour?"), "a placeholder <image> in the text, and the row has no picture"),
        (turns("what is <|image_pad|>?"), "1 times <|image_pad|>, which stands for a picture, and the row's pictures have 0"),
        (turns([{"type": "image", "path": "thin.png"}]), "the processor refuses it"),
        (turns([{"type": "image", "url": "https://example.org/a.png"}]), "not fetched from the network"),
        (turns([{"type": "image"}]), "a picture without one"),
        ({**turns([{"type": "image"}]), "images": ["0.png", "1.png"]}, "2 pictures and 1 places"),
        ({"conversations": [{"from": "human", "value": "<image><image>?"}, {"from": "gpt", "value": "no"}], "image": "0.png"},
         "a picture without one"),
        (turns("what?", [{"type": "image", "path": "0.png"}]), "has a picture: answers are text"),
        (turns([{"type": "video", "path": "0.png"}, {"type": "image", "path": "0.png"}]), "must be {type: text"),
        ({"prompt": "what?", "completion": "red", "images": ["none.png"]}, "picture 1: none.png: no such picture"),
)  # fmt: skip


def test_rows_whose_pictures_cannot_be_used_are_named(vlm, seen, tmp_path, subtests):
    sound = {
        "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "no"}],
        "image": "0.png",
    }
    seen()
    (tmp_path / "cut.png").write_bytes(png(0, tmp_path)[:60])
    save(tmp_path, "large.png", Image.new("1", (10000, 10000)))
    save(tmp_path, "larger.png", Image.new("1", (20000, 10000)))
    save(tmp_path, "thin.png", Image.new("RGB", (1, 900)))
    for row, said in BAD:
        good = (
            turns(asked(0))
            if "messages" in row
            else {"prompt": "what?", "completion": "red"}
            if "prompt" in row
            else sound
        )
        with subtests.test(said):
            file = seen(good, row)
            with pytest.raises(UsageError) as refused:
                read(vlm("qwen2_5_vl"), file)
            assert "rows.jsonl:2" in str(refused.value)
            assert said in str(refused.value)
            skipped, _ = read(vlm("qwen2_5_vl"), file, on_bad_row="skip")
            assert (len(skipped.train), len(skipped.bad_rows)) == (1, 1)


def test_pictures_are_seen_as_a_viewer_shows_them(vlm, seen, tmp_path):
    """CMYK as RGB, alpha on white, turned as its EXIF says."""
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path, "turned.jpg", Image.new("RGB", (80, 40), (200, 0, 0)), exif=exif)
    save(tmp_path, "cmyk.jpg", Image.new("CMYK", (40, 40), (0, 255, 255, 0)))
    save(tmp_path, "clear.png", Image.new("RGBA", (40, 40), (9, 9, 9, 0)))
    names = ("turned.jpg", "cmyk.jpg", "clear.png")
    data, _ = read(
        vlm("qwen2_5_vl"), seen(*(turns([{"type": "image", "path": name}]) for name in names))
    )
    turned, cmyk, clear = (data.pictures.image(row.pictures[0]) for row in data.train)
    assert turned.size == (40, 80)
    assert cmyk.getpixel((5, 5))[0] > 200 > 60 > max(cmyk.getpixel((5, 5))[1:])
    assert clear.getpixel((5, 5)) == (255, 255, 255)


def test_a_row_is_not_cut_inside_a_picture_and_fewer_pixels_make_it_shorter(vlm, seen):
    file = seen(turns(asked(5, 5)))
    (row,) = read(vlm("qwen2_5_vl"), file)[0].train
    with pytest.raises(UsageError, match="a row is not cut inside a picture") as refused:
        read(vlm("qwen2_5_vl"), file, max_length=12)
    assert f"{len(row.input_ids)} tokens" in str(refused.value)
    (smaller,) = read(vlm("qwen2_5_vl"), file, max_pixels=28 * 28 * 2)[0].train
    assert len(smaller.input_ids) < len(row.input_ids)


def test_a_processor_that_is_missing_or_of_another_model_is_refused(vlm, seen, tmp_path):
    file = seen(turns(asked(0)))
    bare = saved_with_processor("gemma3", tmp_path / "bare")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (bare / name).unlink()
    with pytest.raises(UsageError, match="its processor is missing"):
        read(bare, file)
    other = saved_with_processor("llava", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"image_token_index": 5, "image_token_id": 5})
    )
    with pytest.raises(UsageError, match="the processor is another model's"):
        read(other, file)


def test_a_cached_row_is_made_again_when_its_picture_changes(vlm, seen, tmp_path):
    file = seen(turns(asked(0)))
    (first,) = read(vlm("qwen2_5_vl"), file, cache=str(tmp_path / "kept"))[0].train
    data, _ = read(vlm("qwen2_5_vl"), file, cache=str(tmp_path / "kept"))
    assert "from " in data.facts["train"]["files"][0]["cache"]
    save(tmp_path, "0.png", Image.new("RGB", (84, 84)))
    with pytest.raises(UsageError, match="changed, or is gone"):
        data.pictures.image(first.pictures[0])
    data, _ = read(vlm("qwen2_5_vl"), file, cache=str(tmp_path / "kept"))
    assert data.train[0].input_ids != first.input_ids
    assert data.facts["pictures"]["rows"] == 1


def many(seen, count=12):
    """Rows with one picture, with two, and with none."""
    kinds = (asked(0), asked(1, 2), "what colour?", asked(4))
    return seen(*(turns(kinds[i % 4], f"it is {[*COLOURS][i % 3]}.") for i in range(count)))


SETTINGS = (
    "train.batch_size=3",
    "train.accumulate=1",
    "data.eval_split=0.2",
    "run.sample_tokens=4",
    "run.sample_every=2",
    "train.seed=1",
)


def test_a_run_from_its_rows_to_samples_chat_and_merge(vlm, seen, tmp_path):
    """Pixels reach the tower in the role's dtype, seen by the observer; a resumed run ends in the
    same bytes as an undisturbed one.
    """
    base, run = vlm("gemma3"), tmp_path / "run"
    file = many(seen)
    settings = ("precision.preset=bf16-lora", "train.steps=2", "run.save_every=1", *SETTINGS)
    ask("train", "--model", base, "--data", file, "--out", run, *settings)
    precision = json.loads((run / "precision.json").read_text())
    assert precision["declared"]["vision"]["value"] == "bf16"
    assert set(precision["observed"]["vision"]) == {"bf16"}
    data = json.loads((run / "data.json").read_text())
    assert data["pictures"]["images"].endswith("Pil")
    assert list((run / "samples").iterdir())
    report = (run / "report.html").read_text()
    assert 'img-src data:"' in report
    assert report.count('<img src="data:image/png;base64,') >= 1
    assert "&lt;image_soft_token&gt; x 4" in report

    half = tmp_path / "half"
    shutil.copytree(run, half)
    cut_back(half, 2)
    ask("train", "--resume", half)
    same_tensors(run, half)

    said = json.loads(
        ask(
            "chat",
            run,
            "--image",
            tmp_path / "0.png",
            "--tokens",
            3,
            "--json",
            text="what colour?\n",
        ).splitlines()[-1]
    )
    assert said["prompt"] == "what colour?"
    measured = json.loads(ask("eval", run, file, "--json").splitlines()[-1])
    assert measured["rows"] == 12
    ask("merge", run, "--out", tmp_path / "merged", "--dtype", "fp32")
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(
    ("family", "section", "trained"),
    [
        (
            "gemma3",
            {"vision": "lora", "projector": "full"},
            {"tower": ".lora_", "projector": "modules_to_save"},
        ),
        ("qwen2_5_vl", {"vision": "full"}, {"tower": "modules_to_save"}),
    ],
)
def test_tower_and_projector_are_trained_as_asked(family, section, trained, vlm, seen, tmp_path):
    """Each trained tensor gets a gradient, and the saved adapter gives the same loss on a fresh
    model.
    """
    from transformers import AutoModelForImageTextToText

    from isotype.model.adapter import load_adapter, save_adapter
    from isotype.precision import PRESETS
    from tests.api import vision_LANGUAGE as LANGUAGE
    from tests.api import vision_parts

    data, tokenizer = read(vlm(family), seen(turns(asked(0)), turns(asked(1, 2))))
    batch = collate(list(data.train), pad_id=tokenizer.pad_token_id, pictures=data.pictures)
    base = AutoModelForImageTextToText.from_pretrained(vlm(family), dtype=torch.float32)
    model = attach_adapter(base, AdapterSection(r=2, **section), seed=0, has_pictures=True)
    parts = vision_parts(model.get_base_model())
    found = {}
    for name, parameter in model.named_parameters():
        part = parts.part_kind(name.removeprefix("base_model.model."))
        if parameter.requires_grad and part != LANGUAGE:
            found.setdefault(part, set()).add(trained[part] in name)
    assert found == {part: {True} for part in trained}
    batch_loss_sum(model, batch).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert all("vision_tower.head" in n or "post_layernorm" in n for n in without)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.01)
    save_adapter(model, tmp_path / "adapter", PRESETS["fp32"])
    fresh = AutoModelForImageTextToText.from_pretrained(vlm(family), dtype=torch.float32)
    again = load_adapter(fresh, tmp_path / "adapter")
    assert batch_loss_sum(again, batch).item() == pytest.approx(
        batch_loss_sum(model, batch).item(), rel=1e-6
    )


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_5", "qwen3_vl", "qwen2_5_vl")],
)
def test_a_table_that_the_models_class_makes_in_fp32_is_no_promotion(family, vlm, seen, tmp_path):
    run = tmp_path / "run"
    settings = ("precision.preset=bf16-lora", "train.steps=2", *SETTINGS)
    output = ask("train", "--model", vlm(family), "--data", many(seen), "--out", run, *settings)
    assert json.loads((run / "precision.json").read_text())["promotions"] == []
    assert " promotions" not in output
    assert "Unintended promotions" not in (run / "report.html").read_text()
