"""Pictures with their captions, masks and settings, from folders and tables; what does not fit is
named all at once.
"""

import io
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from isotype.config.schema import ImagesSection
from isotype.errors import UsageError
from tests.api import Size, Window, collect_pictures, read_pixels, register_phone_formats
from tests.tasks.diffusion.models import draw


def gathered(**settings):
    return collect_pictures(ImagesSection(**{"eval_split": 0.0} | settings), seed=0)


def refusal(**settings) -> str:
    with pytest.raises(UsageError) as caught:
        gathered(**settings)
    return caught.value.message


def picture(file, captions=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    draw("circle", "red").save(file)
    if captions is not None:
        file.with_suffix(".txt").write_text(captions)
    return file


def test_a_line_of_the_text_file_is_a_caption(tmp_path):
    picture(tmp_path / "a.png", "a red circle\n\n  a   disc \na red circle\n")
    picture(tmp_path / "b.png", "")
    assert [p.captions for p in gathered(train=str(tmp_path)).train] == [
        ("a red circle", "a disc"),
        ("",),
    ]


def test_pictures_without_captions_and_captions_without_pictures_are_all_named(tmp_path):
    picture(tmp_path / "alone.png")
    picture(tmp_path / "twice.png", "a caption")
    picture(tmp_path / "twice.jpg")
    picture(tmp_path / "two.png", "a red circle")
    (tmp_path / "two.caption").write_text("a green square")
    (tmp_path / "words.txt").write_text("a caption")
    for name in ("clip.mp4", "clip.txt", "raw.dng", "raw.txt"):
        (tmp_path / name).write_text("a video is not read here, nor is its caption")
    said = refusal(train=str(tmp_path))
    assert "raw.txt: a caption without a picture: raw.dng is not read" in said
    assert "alone.png: no caption: there is no .txt or .caption file with the same name" in said
    assert "words.txt: a caption without a picture" in said
    assert "has the same caption file" in said
    assert "two.png: two.txt and two.caption disagree" in said
    assert len(said.splitlines()) == 5


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_captions_of_windows_are_read_or_named(tmp_path, encoding):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes("ein grüner Hund\r\n".encode(encoding))
    if encoding == "cp1252":
        assert "a.txt is not text in UTF-8: save it as UTF-8" in refusal(train=str(tmp_path))
        return
    assert [p.captions for p in gathered(train=str(tmp_path)).train] == [("ein grüner Hund",)]


def test_captions_in_a_metadata_file_of_a_subfolder_are_named(tmp_path):
    picture(tmp_path / "train/a.png")
    (tmp_path / "train/metadata.jsonl").write_text('{"file_name": "a.png", "text": "a dog"}\n')
    message = refusal(train=str(tmp_path))
    assert f"images.train names its folder, {tmp_path}/train" in message
    assert len(gathered(train=f"{tmp_path}/train").train) == 1


WAYS = {
    "text files": {},
    "a caption": {"caption": "a photo of sks dog"},
    "metadata": {"metadata": True},
    "names": {"captions": "names"},
}


def phone_folder(folder, way):
    """Pictures of a phone and what lies beside them: five are read without pillow-heif."""
    for name in ("a.jpg", "b.JPG", "c.jfif", "d.mpo", "e.avif"):
        picture(folder / name, "a dog" if way == "text files" else None)
    for name in ("f.heic", "clip.mp4", "g.MOV", "notes.pdf"):
        (folder / name).write_bytes(b"\x00\x00\x00\x18ftypheic")
    if way == "text files":
        (folder / "f.txt").write_text("a dog")
    if way == "metadata":
        rows = [{"image": p.name, "text": "a dog"} for p in folder.iterdir() if p.name[1] == "."]
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": str(folder), **{k: v for k, v in WAYS[way].items() if k == "caption"}}
    return {"train": [source], **{k: v for k, v in WAYS[way].items() if k == "captions"}}


@pytest.fixture
def without_heif(monkeypatch):
    """As where pillow-heif is not installed."""
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    register_phone_formats.cache_clear()
    yield
    register_phone_formats.cache_clear()


@pytest.mark.parametrize("way", WAYS)
def test_no_picture_of_a_phone_vanishes_wherever_captions_come_from(tmp_path, way, without_heif):
    settings = phone_folder(tmp_path, way)
    said = refusal(**settings)
    assert "f.heic: a HEIC picture: pip install pillow-heif reads it" in said
    for file in tmp_path.glob("f.*"):
        file.unlink()
    if way == "metadata":
        file = tmp_path / "metadata.jsonl"
        lines = [line for line in file.read_text().splitlines() if "f.heic" not in line]
        file.write_text("\n".join(lines) + "\n")
    made = gathered(**settings)
    assert len(made.train) == 5
    assert all(
        read_pixels(p.content.read(), Window(Size(32, 32))).shape == (3, 32, 32)
        for p in made.all_pictures
    )
    (line,) = made.other_file_lines()
    assert line == f"not read in {tmp_path}: 1 .mov, 1 .mp4, 1 .pdf"


def test_text_files_beside_a_caption_of_the_source_are_counted(tmp_path):
    picture(tmp_path / "a.png", "a red circle")
    made = gathered(train=[{"name": str(tmp_path), "caption": "a dog"}])
    assert made.other_file_lines() == [f"not read in {tmp_path}: 1 .txt"]


def test_the_first_picture_of_several_in_a_file_is_read(tmp_path):
    """MPO: a camera's JPEG with further ones behind it."""
    first, second = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "a.mpo", save_all=True, append_images=[second])
    content = (tmp_path / "a.mpo").read_bytes()
    with Image.open(io.BytesIO(content)) as opened:
        assert (opened.format, opened.n_frames) == ("MPO", 2)
    red, _, blue = read_pixels(content, Window(Size(32, 32))).mean((1, 2))
    assert red > 0.9
    assert blue < -0.9


def test_heic_is_read_where_pillow_heif_is(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    register_phone_formats.cache_clear()
    picture(tmp_path / "a.heic")
    made = gathered(train=[{"name": str(tmp_path), "caption": "a dog"}])
    assert read_pixels(made.train[0].content.read(), Window(Size(32, 32))).shape == (3, 32, 32)


TABLE = [("a.png", "a red circle"), ("a.png", "a disc"), ("b.png", "a green square")]


def table(folder, kind):
    rows = [{"file_name": name, "caption": text} for name, text in TABLE]
    file = folder / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "csv":
        file.write_text("file_name,caption\n" + "".join(f"{name},{text}\n" for name, text in TABLE))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def test_rows_of_one_picture_are_its_captions(tmp_path):
    for name in ("a.png", "b.png"):
        picture(tmp_path / name)
    for kind in ("jsonl", "csv", "parquet"):
        found = gathered(train=str(table(tmp_path, kind))).train
        assert [p.captions for p in found] == [("a red circle", "a disc"), ("a green square",)]
        assert found[0].content.read() == (tmp_path / "a.png").read_bytes()


def test_pairs_of_a_folder_and_of_rows_are_the_same(studio):
    sections = (
        {"train": str(studio.pairs / "after"), "controls": str(studio.pairs / "before")},
        {"train": str(studio.pairs / "rows.jsonl")},
    )
    folder, rows = (
        collect_pictures(ImagesSection(eval_split=0.0, **images), seed=0, has_controls=True).train
        for images in sections
    )
    assert [(p.content, p.captions, p.controls) for p in folder] == [
        (p.content, p.captions, p.controls) for p in rows
    ]
    assert len({p.controls for p in rows}) == 8


def test_parquet_may_hold_the_pictures(tmp_path):
    out = io.BytesIO()
    draw("square", "green").save(out, format="PNG")
    rows = [
        {"image": {"bytes": out.getvalue(), "path": None}, "text": f"caption {i}"} for i in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    found = gathered(train=str(tmp_path / "rows.parquet")).train
    assert [p.captions for p in found] == [(f"caption {i}",) for i in range(3)]
    assert found[2].content.read() == out.getvalue()


def test_broken_rows_are_all_named(tmp_path):
    picture(tmp_path / "a.png")
    rows = [
        {"image": "a.png", "text": "a red circle"},
        {"image": "b.png", "text": "gone"},
        {"image": "a.png", "text": 3},
    ]
    rows += [
        {"image": given, "text": "a"}
        for given in ("words " * 60, "data:;base64,AAAA", "https://a.b/c.png")
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    said = refusal(train=str(file))
    assert all(f"{file}:{line}: " in said for line in range(2, 8))
    assert all(
        reason in said
        for reason in ("no such picture", "a data: URL", "not fetched from the network")
    )
    assert f"{file}:1: " not in said


def test_columns_are_named_or_asked_for(tmp_path):
    picture(tmp_path / "a.png")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"photo": "a.png", "words": "a red circle"}) + "\n")
    assert "no column for the image" in refusal(train=str(file))
    assert gathered(train=str(file), columns={"image": "photo", "text": "words"}).train[
        0
    ].captions == ("a red circle",)
    assert "columns: unknown key 'caption'" in refusal(
        train=str(file), columns={"caption": "words"}
    )
    assert "no column 'foto'" in refusal(train=str(file), columns={"image": "foto"})
    file.write_text(json.dumps({f"{n}\n" * 5000: "a" for n in range(100)}) + "\n")
    said = refusal(train=str(file))
    assert said.endswith("and 60 more")
    assert len(said) < 4000
    assert "\n" not in said


def test_captions_of_megabytes_are_refused_before_they_are_held(tmp_path):
    picture(tmp_path / "a.png")
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(50_000_000)
    said = refusal(train=str(tmp_path))
    assert "a.txt has 50,000,000 bytes: captions have at most 1,048,576" in said
    rows = tmp_path / "metadata.jsonl"
    rows.write_text(json.dumps({"image": "a.png", "text": "red " * 300_000}) + "\n")
    assert "text: captions of more than 1,048,576 characters" in refusal(train=str(tmp_path))
    rows.write_text(json.dumps({"image": "a.png", "text": "red"}) + "\n")
    assert "metadata.jsonl and a.txt disagree" in refusal(train=str(tmp_path))


def test_two_files_that_disagree_about_a_picture_are_named(tmp_path):
    picture(tmp_path / "a.png", "a red circle")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"image": "a.png", "text": "a green square"}) + "\n")
    said = refusal(train=[str(tmp_path), str(file)])
    assert said == f"{file}:1: {tmp_path / 'a.png'} gives a.png another caption ('a red circle')"
    file.rename(tmp_path / "metadata.jsonl")
    assert "metadata.jsonl and a.txt disagree" in refusal(train=str(tmp_path))
    (tmp_path / "a.txt").unlink()
    assert gathered(train=str(tmp_path)).train[0].captions == ("a green square",)


def test_sources_have_repeats_and_regularisation_has_a_weight(tmp_path):
    picture(tmp_path / "mine/a.png", "my circle")
    picture(tmp_path / "class/b.png", "a circle")
    mine, others = str(tmp_path / "mine"), str(tmp_path / "class")
    found = gathered(
        train=[{"name": mine, "repeats": 3}], regularisation=[{"name": others, "weight": 0.5}]
    )
    assert [(p.repeats, p.weight) for p in found.train] == [(3, 1.0), (1, 0.5)]
    assert found.regularisation_count == 1
    assert "images.train[0].weight: only images.regularisation has it" in refusal(
        train=[{"name": mine, "weight": 2}]
    )
    assert "images.eval[0].repeats: has no effect" in refusal(
        train=mine, eval=[{"name": others, "repeats": 2}]
    )
    assert [p.captions for p in gathered(train=[{"name": others, "caption": "sks"}]).train] == [
        ("sks",)
    ]
    assert "did you mean repeats?" in refusal(train=[{"name": mine, "repeat": 2}])
    assert "is named twice; repeats" in refusal(train=[mine, mine])


def test_repeats_in_the_names_of_kohyas_folders_are_named(tmp_path):
    picture(tmp_path / "img/10_sks dog/a.png", "a dog")
    picture(tmp_path / "img/2024_trip/a.png", "a lake")
    folder = tmp_path / "img/10_sks dog"
    for name in (str(tmp_path / "img"), str(folder)):
        (line,) = gathered(train=name).unused_repeats_lines()
        assert line.endswith(f"images.train: [{{name: {folder}, repeats: 10}}]")
        assert "2024" not in line
    assert gathered(train=[{"name": str(folder), "repeats": 10}]).unused_repeats_lines() == []


@pytest.mark.parametrize("way", ["text files", "a caption", "metadata"])
def test_masks_may_lie_in_a_folder_of_the_pictures(tmp_path, way):
    picture(tmp_path / "a.png", "a red circle" if way == "text files" else None)
    picture(tmp_path / "masks/a.png")
    source = {"name": str(tmp_path)}
    if way == "a caption":
        source["caption"] = "a red circle"
    if way == "metadata":
        row = {"image": "a.png", "text": "a red circle"}
        (tmp_path / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    (one,) = gathered(train=[source], masks=str(tmp_path / "masks")).train
    assert one.content.path == tmp_path / "a.png"
    assert one.mask.path == tmp_path / "masks/a.png"


def test_masks_belong_to_pictures_by_name(tmp_path):
    picture(tmp_path / "mine/sub/a.png", "a red circle")
    picture(tmp_path / "mine/b.png", "a red circle")
    picture(tmp_path / "masks/sub/a.jpg")
    found = gathered(train=str(tmp_path / "mine"), masks=str(tmp_path / "masks"))
    assert {p.origin.rsplit("/")[-1]: p.mask is not None for p in found.train} == {
        "a.png": True,
        "b.png": False,
    }
    assert found.unmasked_lines() == [
        "1 training pictures have no mask and are learnt whole: b.png, ..."
    ]
    picture(tmp_path / "masks/c.png")
    assert "c.png: a mask without a picture" in refusal(
        train=str(tmp_path / "mine"), masks=str(tmp_path / "masks")
    )
