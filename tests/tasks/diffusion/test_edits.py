"""Models that edit pictures: pairs of pictures with an instruction, trained, drawn and resumed."""

import csv
import json
import shutil
from io import BytesIO

import pytest
import torch
from diffusers import QwenImageEditPipeline
from PIL import Image

from isotype.errors import UsageError
from isotype.tasks.choose import train
from tests.api import encode_png, row_generator
from tests.commands import ask
from tests.tasks.diffusion.models import built, encoded, refused
from tests.tasks.diffusion.test_families import edits
from tests.training.memory.test_blocks import same


@pytest.mark.full
def test_an_edit_is_drawn_and_exported_also_where_the_pictures_of_its_prompts_are_gone(
    drawn, studio, tmp_path
):
    """Only where samples are drawn they are read."""
    control = str(shutil.copy(studio.pairs / "before/circle_0.png", tmp_path))
    run = {"samples": [{"prompt": "green on white", "control": control}], "sample_every": 4}
    assert (
        train(
            drawn(
                model=studio.kontext,
                images=edits(studio),
                run=run,
                precision={"preset": "bf16-lora"},
            )
        )
        == 0
    )
    assert json.loads((tmp_path / "run/precision.json").read_text())["violations"] == []
    (sample,) = json.loads((tmp_path / "run/samples/step_4.json").read_text())["samples"]
    assert sample["prompt"] == "green on white (circle_0.png)"
    ask("report", tmp_path / "run")
    assert "<figcaption>before the edit</figcaption>" in (tmp_path / "run/report.html").read_text()
    (tmp_path / "circle_0.png").unlink()
    ask("export", tmp_path / "run", "--to", "comfyui")
    assert (
        json.loads(
            ask("eval", tmp_path / "run", studio.pairs / "rows.jsonl", "--json").splitlines()[-1]
        )["rows"]
        == 8
    )
    ask("merge", tmp_path / "run", "--out", tmp_path / "merged")
    assert ask("sample", tmp_path / "run", "red", "--control", studio.pairs / "before/circle_1.png")


@pytest.mark.full
def test_an_edit_with_its_blocks_in_host_memory_is_the_same(drawn, studio, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "isotype.training.memory.blocks.MIN_OFFLOADED_BYTES", 1 << 8
    )  # of tiny weights
    file = studio.kontext / "transformer/config.json"
    model = {
        "name": str(file.parents[1]),
        "init": "random",
        "config": json.loads(file.read_text()) | {"num_layers": 3},
    }
    sample = {"prompt": "green on white", "control": str(studio.pairs / "before/circle_0.png")}
    train = {"gradient_checkpointing": "layers", "batch_size": 2}
    settings = {
        "images": edits(studio),
        "precision": {"preset": "bf16-lora"},
        "train": train,
        "run": {"samples": [sample]},
    }
    drawn_with = []

    def batches(task):
        drawn_with.append(task)
        return [task.collate(task.feed().take(2)) for _ in range(2)]

    late, sizes, models = same(drawn(model=model, **settings), batches, tmp_path)
    assert late.most <= sum(sorted(sizes)[-2:]) < sum(sizes)
    first, second = (
        task.sample(model, torch.device("cpu"))
        for task, model in zip(drawn_with, models, strict=True)
    )
    assert [sample.content for sample in first] == [sample.content for sample in second]


@pytest.mark.full
def test_flux2_is_trained_on_pairs_where_a_setting_names_the_pictures_before(drawn, studio):
    """The same pipeline is trained on captions without such a setting."""
    rows = {"train": str(studio.pairs / "rows.jsonl"), "columns": {"control": "source"}}
    sources = {
        "train": [{"name": str(studio.pairs / "after"), "controls": str(studio.pairs / "before")}]
    }
    for images in (edits(studio), rows, sources):
        task = encoded(drawn(model=studio.klein, images=images))
        assert task.collate(task.feed().take(2)).controls
    task = encoded(drawn(model=studio.klein))
    assert not task.collate(task.feed().take(2)).controls


def test_a_bad_pair_is_named_with_its_line(drawn, studio, tmp_path):
    folder = shutil.copytree(studio.pairs, tmp_path / "pairs")
    # the same shape, more pixels
    Image.open(folder / "before/circle_1.png").resize((64, 64)).save(folder / "before/circle_1.png")
    Image.new("RGB", (64, 32)).save(folder / "before/circle_2.png")
    (folder / "before/circle_3.png").write_bytes((folder / "before/circle_3.png").read_bytes()[:60])
    (folder / "before/square_0.png").unlink()
    (folder / "two.jsonl").write_text(
        json.dumps(
            {"image": "after/circle_0.png", "control": ["before/circle_0.png"] * 2, "text": "green"}
        )
    )
    said = said_of(drawn(model=studio.kontext, images={"train": str(folder / "two.jsonl")}))
    assert "two.jsonl:1: 2 pictures before the edit, and this model takes one" in said
    said = said_of(drawn(model=studio.kontext, images={"train": str(folder / "rows.jsonl")}))
    assert said.splitlines() == [f"{folder}/rows.jsonl:5: before/square_0.png: no such picture"]
    said = said_of(
        drawn(
            model=studio.kontext,
            images={"train": str(folder / "after"), "controls": str(folder / "before")},
        )
    )
    assert (
        said
        == f"{folder}/after/square_0.png: no picture before the edit: {folder}/before has none of its name"
    )
    rows = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join(row for row in rows if "square_0" not in row))
    for family in ("kontext", "qwen_edit"):
        said = said_of(
            drawn(model=getattr(studio, family), images={"train": str(folder / "rows.jsonl")})
        )
        assert said.splitlines()[0] == (
            f"{folder}/rows.jsonl:3: 32 x 32 pixels, and the picture before the edit has 64 x 32: cut one to the other's shape"
        )
        assert said.splitlines()[1].startswith(
            f"{folder}/rows.jsonl:4: the picture before the edit: "
        )


def test_rows_have_several_reference_pictures_of_other_shapes(drawn, studio, tmp_path):
    """From folders, from lists in rows, from numbered columns and from a CSV file alike."""
    data = studio.references
    folders = {
        "train": str(data / "after"),
        "controls": [str(data / name) for name in ("before", "style")],
    }
    rows = [json.loads(line) for line in (data / "rows.jsonl").read_text().splitlines()]
    table = tmp_path / "references"
    shutil.copytree(data, table)
    numbered = [
        {"image": row["edited_image"], "text": "green on white"}
        | {f"control_{i}": file for i, file in enumerate(row["source"], start=1)}
        for row in rows
    ]
    (table / "numbered.jsonl").write_text("\n".join(map(json.dumps, numbered)))
    with (table / "rows.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "control", "text"])
        for row in rows:
            writer.writerow([row["edited_image"], json.dumps(row["source"]), "green on white"])
    batches = []
    for images in (
        folders,
        {"train": str(data / "rows.jsonl"), "columns": {"control": "source"}},
        {"train": str(table / "numbered.jsonl"), "columns": {"control": "control"}},
        {"train": str(table / "rows.csv"), "columns": {"control": "control"}},
    ):
        task = encoded(drawn(model=studio.klein, images=images | {"shuffle": False}))
        batches.append(task.collate(task.feed().take(2)))
    before, style = batches[0].controls
    assert before.shape == batches[0].latents.shape
    height, width = style.shape[-2:]
    assert height < width
    assert height * width <= before.shape[-1] ** 2
    for batch in batches[1:]:
        assert all(map(torch.equal, batch.controls, batches[0].controls))


def test_a_missing_reference_picture_is_named(drawn, studio, tmp_path):
    folder = shutil.copytree(studio.references, tmp_path / "data")
    (folder / "style/circle_1.png").unlink()
    (folder / "style/circle_2.png").write_bytes(b"no picture")
    images = {
        "train": str(folder / "after"),
        "controls": [str(folder / name) for name in ("before", "style")],
    }
    said = said_of(drawn(model=studio.klein, images=images))
    assert said == (
        f"{folder}/after/circle_1.png: no picture before the edit: {folder}/style has none of its name"
    )
    rows = {"train": str(folder / "rows.jsonl"), "columns": {"control": "source"}}
    said = said_of(drawn(model=studio.klein, images=rows))
    assert said == f"{folder}/rows.jsonl:2: style/circle_1.png: no such picture"
    (folder / "after/circle_1.png").unlink()
    (folder / "after/circle_1.txt").unlink()
    said = said_of(drawn(model=studio.klein, images=images))
    assert said.startswith(f"{folder}/after/circle_2.png: picture 2 before the edit: ")
    empty = {"image": "after/circle_0.png", "text": "a", "control_1": "", "control_2": "b.png"}
    (folder / "empty.jsonl").write_text(json.dumps(empty))
    rows = {"train": str(folder / "empty.jsonl"), "columns": {"control": "control"}}
    said = said_of(drawn(model=studio.klein, images=rows))
    assert said.endswith("empty.jsonl:1: control_1: empty, and control_2 has a picture")


def test_several_reference_pictures_are_refused_where_a_model_takes_one(drawn, studio):
    folders = [str(studio.references / name) for name in ("before", "style")]
    images = {"train": str(studio.references / "after"), "controls": folders}
    said = refused(drawn(model=studio.kontext, images=images))
    assert said.startswith("images.controls: 2 folders, and FluxKontextPipeline takes one picture")
    assert (
        "with several pictures: Flux2Pipeline, Flux2KleinPipeline, QwenImageEditPlusPipeline"
        in said
    )
    files = [f"{folder}/circle_0.png" for folder in folders]
    sample = {"prompt": "green", "control": files}
    said = refused(
        drawn(
            model=studio.kontext,
            images=images | {"controls": folders[0]},
            run={"samples": [sample]},
        )
    )
    assert "FluxKontextPipeline edits one picture, and control has 2" in said
    said = refused(drawn(model=studio.klein, images=images | {"controls": folders[:1] * 2}))
    assert "images.train.controls: the same folder is named twice" in said


def said_of(loaded):
    with pytest.raises(UsageError) as raised:
        encoded(loaded)
    return raised.value.message


def test_settings_of_edits_are_refused_where_they_do_nothing(drawn, studio, tmp_path):
    images = edits(studio)
    assert (
        "images.controls: has no effect: FluxPipeline is trained on captions here; on pairs: Flux"
        in refused(drawn(model=studio.flux, images=images))
    )
    source = {"name": images["train"], "controls": images["controls"]}
    assert "images.train[0].controls: has no effect" in refused(
        drawn(model=studio.flux, images={"train": [source]})
    )
    rows = {
        "train": str(studio.pairs / "rows.jsonl"),
        "columns": {"image": "edited_image", "control": "source", "text": "instruction"},
    }
    assert "images.columns: control: has no effect" in refused(
        drawn(model=studio.flux, images=rows)
    )
    assert "sees the picture as it is" in refused(
        drawn(model=studio.qwen_edit, images={**images, "flip": True})
    )
    said = refused(drawn(model=studio.kontext, images=images, run={"samples": ["green"]}))
    assert (
        said == "run.samples: 'green': FluxKontextPipeline edits a picture, and control is missing"
    )
    sample = {"prompt": "green", "control": str(tmp_path / "nowhere.png")}
    assert "nowhere.png: No such file" in refused(
        drawn(model=studio.kontext, images=images, run={"samples": [sample]})
    )
    sample["control"] = str(studio.pairs / "before/circle_0.png")
    said = refused(
        drawn(model=studio.flux, images={"train": images["train"]}, run={"samples": [sample]})
    )
    assert "control: has no effect: FluxPipeline draws from captions here" in said
    inside = {"train": str(studio.pairs), "controls": str(studio.pairs / "before")}
    assert "which holds the edited ones" in refused(drawn(model=studio.kontext, images=inside))


@pytest.mark.full
def test_an_edit_is_drawn_as_the_pipeline_draws_it(drawn, studio, tmp_path):
    """Of the size that the pipeline scales pictures to; its own picture and text go in."""
    prompt = {
        "prompt": "green on white",
        "control": str(studio.pairs / "before/circle_0.png"),
        "size": 1024,
        "seed": 3,
    }
    loaded = drawn(
        model=studio.qwen_edit_1024,
        images=edits(studio),
        run={"samples": [prompt], "sample_guidance": 3.0},
    )
    task, model = built(loaded, tmp_path)
    (ours,) = task.sample(model, torch.device("cpu"))
    pipe = QwenImageEditPipeline.from_pretrained(studio.qwen_edit_1024, processor=None)
    pipe.processor = task.run.folder.processor(pipe.tokenizer)
    (theirs,) = pipe(
        image=Image.open(prompt["control"]).convert("RGB").resize((1024, 1024), Image.Resampling.LANCZOS), prompt="green on white",
        negative_prompt="", true_cfg_scale=3.0, height=1024, width=1024, num_inference_steps=2, output_type="pt",
        generator=row_generator("sample", 3, 0),
    ).images  # fmt: skip
    first, second = (
        torch.tensor(list(Image.open(BytesIO(png)).getdata())).float()
        for png in (ours.content, encode_png(theirs * 2 - 1))
    )
    assert (first - second).abs().max() <= 1
