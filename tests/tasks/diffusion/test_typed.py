"""What one types for a run on pictures: captions, tags, triggers, noise levels, losses, prompts of
samples.
"""

import io
import shutil
import sys

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from PIL import Image, ImageCms

from isotype.config.schema import DiffusionSection, ImagesSection
from isotype.errors import UsageError
from isotype.tasks.choose import train
from isotype.tasks.diffusion.families import Conditioning
from isotype.tasks.diffusion.loss import build_objective
from tests.api import (
    BadPicture,
    FileContent,
    Picture,
    PictureStream,
    Row,
    Size,
    Window,
    _picture_facts,
    apply_caption_settings,
    bucket_sizes,
    collect_pictures,
    displayed_size,
    read_mask_pixels,
    read_pixels,
    register_phone_formats,
)
from tests.tasks.diffusion.models import built, draw, encoded, refused
from tests.tasks.diffusion.test_families import data_of


def captioned(*captions, **images):
    picture = Picture(FileContent(None), captions, "here")
    (made,) = apply_caption_settings([picture], ImagesSection(train="x", **images), seed=3)
    return made.captions


def test_tags_are_shuffled_behind_the_kept_ones_and_some_are_left_out():
    forms = captioned("1girl, red hair, smile, outdoors", tag_orders=40, keep_tags=1, trigger="sks")
    assert all(form.startswith("sks, 1girl, ") for form in forms)
    assert {frozenset(form.split(", ")) for form in forms} == {
        frozenset(["sks", "1girl", "red hair", "smile", "outdoors"])
    }
    assert len(set(forms)) == 6, "every order of three tags comes in 40"
    assert forms == captioned(
        "1girl, red hair, smile, outdoors", tag_orders=40, keep_tags=1, trigger="sks"
    ), "from the seed"
    dropped = captioned(
        "1girl, red hair, smile, outdoors", tag_orders=400, keep_tags=1, tag_dropout=0.25
    )
    kept = sum("smile" in form for form in dropped) / 400
    assert kept == pytest.approx(0.75, abs=0.07)
    assert all(form.startswith("1girl") for form in dropped)


def test_captions_come_from_names_and_pictures_without_one_are_a_choice(studio, tmp_path):
    shutil.copytree(studio.pictures, tmp_path / "mine")
    texts = sorted((tmp_path / "mine").glob("*.txt"))
    for text in texts[:4]:
        text.unlink()

    def captions(**images):
        found = collect_pictures(
            ImagesSection(train=str(tmp_path / "mine"), eval_split=0.0, **images), seed=0
        ).train
        return [picture.captions for picture in found]

    with pytest.raises(UsageError) as error:
        captions()
    assert error.value.message.splitlines()[:2] == [
        "4 files cannot be used",
        "  4 x no caption: there is no .txt or .caption file with the same name",
    ]
    assert "caption: a photo of sks dog" in error.value.fix
    assert captions(uncaptioned="empty").count(("",)) == 4
    assert len(captions(uncaptioned="skip")) == 8
    assert captions(captions="names")[0] == ("green circle 0",)


def drawn_levels(count=4000, **section):
    levels = build_objective(
        DiffusionSection(**section),
        {"_class_name": "FlowMatchEulerDiscreteScheduler"},
        supported=("flow_matching",),
        tokens=1,
    )
    generator = torch.Generator().manual_seed(0)
    return torch.tensor([levels.draw(generator) for _ in range(count)])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"timesteps": "mode", "mode_scale": 1.0}, {"weighting_scheme": "mode", "mode_scale": 1.0}),
        (
            {"logit_mean": 0.5, "logit_std": 1.5},
            {"weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 1.5},
        ),
    ],
)
def test_densities_are_diffusers(ours, theirs):
    found = drawn_levels(**ours)
    other = compute_density_for_timestep_sampling(
        batch_size=20000,
        generator=torch.Generator().manual_seed(1),
        **{"logit_mean": None, "logit_std": None, **theirs},
    )
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert float(found.quantile(share)) == pytest.approx(float(other.quantile(share)), abs=0.03)


def test_huber_is_diffusers_smooth_loss_and_an_offset_is_one_number_a_channel(drawn, studio):
    def made(**diffusion):
        loaded = drawn(
            model=studio.sd1, adapter={"kind": "none"}, images={"limit": 4}, diffusion=diffusion
        )
        task, model = built(loaded, studio.sd1)
        return task, model, task.collate(task.feed().take(2))

    task, model, batch = made(loss="huber", huber_c=0.2)
    with torch.no_grad():
        ours = task.run.losses(model, batch, dtype="fp32")
        noisy, target = task.run.objective.mix(batch.latents, batch.noise, batch.sigma)
        predicted = task.run.folder.family.predict(
            model,
            noisy,
            task.run.objective.time(batch.sigma),
            batch.text,
            Conditioning(downscale=task.run.downscale),
        )
    smooth = 2 * 0.2 * (torch.sqrt((predicted - target) ** 2 + 0.2**2) - 0.2)
    torch.testing.assert_close(ours, smooth.flatten(1).mean(1))
    _, _, plain = made()
    _, _, moved = made(noise_offset=0.1)
    offset = moved.noise - plain.noise
    assert torch.equal(moved.latents, plain.latents)
    torch.testing.assert_close(offset, offset[..., :1, :1].expand_as(offset), atol=1e-6, rtol=0)
    assert 0.01 < float(offset.std()) < 0.3


def test_a_sample_has_its_own_size_seed_steps_and_negative_prompt(drawn, tmp_path):
    own = {"prompt": "a red circle on white", "size": 64, "seed": 7, "steps": 1}
    prompts = [
        own,
        own,
        {**own, "negative": "a green square", "guidance": 4},
        {**own, "guidance": 4},
        "a red circle on white",
    ]
    assert train(drawn(run={"samples": prompts, "sample_every": 4}, train={"steps": 1})) == 0
    drawn_ones = [(tmp_path / f"run/samples/step_1_{i}.png").read_bytes() for i in range(5)]
    assert [Image.open(io.BytesIO(png)).size for png in drawn_ones] == [(64, 64)] * 4 + [(32, 32)]
    assert drawn_ones[0] == drawn_ones[1], "the seed decides"
    assert drawn_ones[2] != drawn_ones[3], "the negative prompt acts"


@pytest.mark.parametrize(
    "family",
    [
        "flux",
        "klein",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                "sd1", "sdxl", "sd3", "qwen", "kontext", "qwen_edit", "z_image", "flux2", "chroma", "sana", "auraflow", "hidream",
                "pixart", "wan", "ltx",
            )
        ),
    ],
)  # fmt: skip
def test_a_sample_may_have_any_shape(drawn, studio, tmp_path, family):
    """`lumina2` needs 16 pixels a token."""
    images, (prompt,) = data_of(family, studio)
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    entry = {**prompt, "size": "64x32", "seed": 7, "steps": 2}
    loaded = drawn(
        model=getattr(studio, family), images={**images, "limit": 3}, run={"samples": [entry]}
    )
    task, model = built(loaded, tmp_path)
    (picture,) = task.sample(model, torch.device("cpu"))
    assert Image.open(io.BytesIO(picture.content)).size == (64, 32)
    assert picture.to_dict()["answer"].startswith("64 x 32 pixels, 2 steps, guidance ")
    assert picture.to_dict()["answer"].endswith(", seed 7")


@pytest.mark.parametrize(
    ("family", "limit"), [("sd1", 8), ("sdxl", 8), ("flux", 12), ("sana", 12), ("z_image", 12)]
)
def test_captions_beyond_the_encoder_are_counted_and_the_first_is_shown(
    drawn, studio, tmp_path, family, limit
):
    """By plan, header and data.json; what fits exactly is not counted."""
    folder = shutil.copytree(studio.pictures, tmp_path / "pictures")
    texts = sorted(folder.glob("*.txt"))
    texts[0].write_text(" ".join(["a"] * (limit - 1)))
    texts[1].write_text("red " + " ".join(["a"] * limit))
    texts[2].write_text("green " + " ".join(["a"] * (limit + 3)))
    sections = {} if family.startswith("sd") else {"diffusion": {"max_text_length": limit}}
    loaded = drawn(model=getattr(studio, family), images={"train": str(folder)}, **sections)
    task = encoded(loaded)
    (line,) = [line for line in task.plan_lines() if "are not learnt" in line]
    assert line.startswith("2 of ")
    assert f"longer than the {limit} tokens that are read (up to {limit + 5})" in line
    facts = task.records()["data.json"]
    assert facts["cut_captions"] == 2
    shown = dict(_picture_facts(facts))
    assert shown["captions cut by the text encoder"] == "2"
    assert shown["the first of them"] == facts["first_cut_caption"]
    assert any(f"longer than the {limit} tokens" in text for _, text in task.header())


def test_a_bad_picture_is_named_with_what_it_is(drawn, studio, tmp_path, subtests, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    register_phone_formats.cache_clear()
    for i, (name, content, said) in enumerate((
        ("a.png", b"", "an empty file"),
        ("a.jpg", b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "a HEIC picture: pip install pillow-heif reads it"),
        ("a.png", b"no picture at all", "not a picture"),
        ("a.heic", b"\x00\x00\x00\x18ftypheic", "a.heic: a HEIC picture: pip install pillow-heif reads it"),
        ("a.png", None, "1 x 1 pixels: too small to learn from"),
    )):  # fmt: skip
        folder = shutil.copytree(studio.pictures, tmp_path / f"{i}")
        if content is None:
            Image.new("RGB", (1, 1)).save(folder / name)
        else:
            (folder / name).write_bytes(content)
        (folder / "a.txt").write_text("a")
        with subtests.test(said), pytest.raises(UsageError, match=said):
            encoded(drawn(images={"train": str(folder)}))


# --- What a diffusion run cannot begin with is one line each, before anything heavy is loaded.


SMALLER = {
    "_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 1, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": [4, 6, 6],
}  # fmt: skip
FRESH = {"init": "random"}


DRAWN = {"name": "class", "caption": "a circle", "draw": 15}
ENCODERS = {"kind": "lora", "text_encoders": True}
REFUSED = (
    (
        "sd3",
        {"run": {"sample_tokens": 4}},
        "run.sample_tokens: does not apply to a diffusion run, here it is run.sample_steps",
    ),
    ("sd3", {"images": {"resolution": 36}}, "images.resolution: 36 is not a multiple of 8"),
    ("sd3", {"images": {"resolution": 128}}, "more than this model has positions for"),
    ("sd3", {"images": {"train": "nowhere"}}, "images.train: nowhere: no such file or folder"),
    (
        "sd3",
        {"images": {"regularisation": [{**DRAWN, "caption": None}]}},
        "images.regularisation[0].draw: needs caption",
    ),
    (
        "sd3",
        {"images": {"regularisation": [{**DRAWN, "draw": 0}]}},
        "[0].draw: expected a whole number of at least 1, got 0",
    ),
    (
        "sd3",
        {"images": {"regularisation": [{**DRAWN, "repeats": 2}]}},
        "repeats: has no effect with draw",
    ),
    ("sd3", {"images": {"tag_orders": 4}}, "none contains a comma"),
    ("sd3", {"images": {"keep_tags": 1}}, "keep_tags: has no effect without images.tag_orders"),
    (
        "sd3",
        {"images": {"tag_dropout": 0.1}},
        "tag_dropout: has no effect without images.tag_orders",
    ),
    ("sd3", {"precision": {"preset": "bf16-lora", "timesteps": "bf16"}}, "PR025"),
    (
        "sd3",
        {"diffusion": {"objective": "epsilon"}},
        "diffusion.objective: epsilon, but scheduler_config.json declares flow_matching",
    ),
    (
        "sdxl",
        {"diffusion": {"objective": "v"}},
        "diffusion.objective: v, but scheduler_config.json declares epsilon",
    ),
    (
        "sd3",
        {"diffusion": {"weighting": "min_snr"}},
        "diffusion.weighting: min_snr is not defined for flow matching",
    ),
    ("sdxl", {"diffusion": {"shift": 3.0}}, "diffusion.shift: 3.0 has no effect with epsilon"),
    (
        "sdxl",
        {"diffusion": {"max_text_length": 8}},
        "max_text_length: 8: StableDiffusionXLPipeline reads captions in windows of 6 tokens:"
        " expected 6, 12, 18",
    ),
    (
        "qwen_edit",
        {"diffusion": {"max_text_length": 8}},
        "diffusion.max_text_length: 8 has no effect",
    ),
    (
        "sd3",
        {"diffusion": {"noise_offset": 0.1}},
        "noise_offset: has no effect without epsilon or v",
    ),
    (
        "sd3",
        {"diffusion": {"mode_scale": 1.0}},
        "mode_scale: has no effect without timesteps: mode",
    ),
    (
        "sd3",
        {"diffusion": {"timesteps": "uniform", "logit_std": 2.0}},
        "logit_std: has no effect without timesteps: logit_normal",
    ),
    ("sd3", {"diffusion": {"huber_c": 0.2}}, "huber_c: has no effect without loss: huber"),
    ("sd3", {"diffusion": {"least_noise": 0.5, "most_noise": 0.4}}, "is not below"),
    ("sd3", {"run": {"samples": [{"prompt": "a", "sede": 1}]}}, "did you mean seed"),
    ("sd3", {"run": {"samples": [{"size": 32}]}}, "prompt is missing"),
    (
        "sd3",
        {"run": {"samples": [{"prompt": "a", "size": "big"}]}},
        "size: 'big': expected a side or WIDTHxHEIGHT",
    ),
    ("sd3", {"run": {"samples": [{"prompt": "a", "size": 33}]}}, "33 is not a multiple of"),
    ("sd3", {"run": {"samples": [{"prompt": "a", "size": "32x33"}]}}, "33 is not a multiple of"),
    (
        "sd3",
        {"run": {"samples": [{"prompt": "a", "size": "0x32"}]}},
        "expected a side or WIDTHxHEIGHT",
    ),
    ("sd3", {"run": {"adapters_keep": 2}}, "no effect without run.adapters_every"),
    (
        "sd3",
        {"adapter": {"kind": "none"}, "run": {"adapters_every": 2}},
        "no effect with adapter.kind: none",
    ),
    (
        "sd3",
        {"adapter": {"kind": "none"}, "run": {"adapter_format": "comfyui"}},
        "no effect with adapter.kind: none",
    ),
    (
        "sd3",
        {"adapter": {"start_from": "nowhere"}},
        "adapter.start_from: nowhere: no such folder",
    ),
    (
        "sd3",
        {"adapter": {"kind": "lokr", "dropout": 0.1}},
        "adapter.dropout: has no effect with adapter.kind: lokr",
    ),
    (
        "sd3",
        {"adapter": {"kind": "lora", "factor": 4}},
        "adapter.factor: has no effect with adapter.kind: lora",
    ),
    ("sd3", {"adapter": ENCODERS}, "only those of SDXL and Stable Diffusion"),
    ("sd1", {"adapter": {**ENCODERS, "kind": "none"}}, "adapter.text_encoders: adapter.kind: none"),
    (
        "sd1",
        {"adapter": {**ENCODERS, "text_encoder_rate": [1e-4, 1e-5]}},
        "has 2 rates, and a StableDiffusionPipeline has 1 encoder",
    ),
    (
        "sd1",
        {"adapter": {**ENCODERS, "dora": True}},
        "diffusers does not load the lengths of a DoRA",
    ),
    (
        "sd1",
        {"adapter": {"text_encoder_rate": 1e-4}},
        "has no effect without adapter.text_encoders",
    ),
    *(
        (kind, {"adapter": {"targets": targets}}, said)
        for kind, targets, said in (
            (
                "sdxl",
                ["to_q", "text_encoder_2"],
                "adapter.targets: text_encoder_2 names a text encoder, and",
            ),
            ("sdxl", "te1", "adapter.targets: te1 names a text encoder, and"),
            (
                "sdxl",
                ["text_model.encoder.layers.0.self_attn.q_proj"],
                "q_proj names a text encoder, and",
            ),
            ("sdxl", [".*self_attn.(q|v)_proj"], "these are layers of the unet"),
            ("flux", ["SelfAttention.q"], "SelfAttention.q names a text encoder, and"),
        )
    ),
    (
        "flux",
        {"model": {"config": SMALLER}},
        "model.config: has no effect without model.init: random",
    ),
    (
        "flux",
        {"model": FRESH | {"config": SMALLER | {"_class_name": "SD3Transformer2DModel"}}},
        "but the transformer of",
    ),
    (
        "flux",
        {"model": FRESH | {"config": SMALLER | {"num_layer": 2}}},
        "num_layer: unknown key, did you mean num_layers?",
    ),
    (
        "flux",
        {"model": FRESH | {"config": SMALLER | {"num_layers": "many"}}},
        "model.config: FluxTransformer2DModel: ",
    ),
    (
        "flux",
        {"model": FRESH | {"config": SMALLER, "name": None}},
        "model.name: missing: the pipeline whose VAE",
    ),
    ("flux", {"model": FRESH | {"config": "nowhere.json"}}, "model.config: nowhere.json: "),
)


def test_what_a_run_cannot_begin_with_is_one_line(drawn, studio, subtests):
    for kind, sections, said in REFUSED:
        folder = getattr(studio, kind)
        model = {"name": str(folder)} | sections["model"] if "model" in sections else folder
        with subtests.test(said):
            line = refused(drawn(**sections | {"model": model}))
            assert all(part in line for part in said.split(", here")), line
            assert len(line.splitlines()) == 1 or said == "PR025"


def test_keys_of_diffusion_runs_are_refused(configured):
    assert "precision.vae: does not apply to a language run" in refused(
        configured(precision={"preset": "fp32", "vae": "fp32"})
    )


def square(side: int) -> Window:
    return Window(Size(side, side))


def saved(image, tmp_path, suffix=".png", **settings) -> bytes:
    file = tmp_path / f"picture{suffix}"
    image.save(file, **settings)
    return file.read_bytes()


def test_pictures_come_out_as_a_viewer_shows_them(tmp_path):
    plain = read_pixels(saved(Image.new("RGB", (16, 16), (255, 0, 0)), tmp_path), square(16))
    assert plain[:, 0, 0].tolist() == [1.0, -1.0, -1.0]
    clear = read_pixels(saved(Image.new("RGBA", (16, 16), (255, 0, 0, 0)), tmp_path), square(16))
    assert clear.min() == 1.0
    deep = read_pixels(
        saved(Image.fromarray(np.full((16, 16), 32768, dtype=np.uint16)), tmp_path), square(16)
    )
    assert abs(float(deep.mean())) < 0.01
    halves = Image.new("RGB", (32, 16), "white")
    halves.paste((0, 0, 0), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: the left half is shown on top
    turned = read_pixels(saved(halves, tmp_path, ".png", exif=exif), square(16))
    assert turned[:, 0].mean() < -0.9 < 0.9 < turned[:, -1].mean()
    cmyk = read_pixels(
        saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), tmp_path, ".jpg"), square(16)
    )
    assert cmyk[0].mean() > 0.8 > -0.8 > cmyk[1].mean()
    with pytest.raises(BadPicture, match="an empty file"):
        read_pixels(b"", square(16))


def profile_with_red_and_green_exchanged() -> bytes:
    """sRGB's profile with the primaries of red and green in each other's place, named otherwise."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tags = {bytes(data[at : at + 4]): at for at in range(132, 132 + 12 * data[131], 12)}
    red, green = tags[b"rXYZ"], tags[b"gXYZ"]
    data[red : red + 4], data[green : green + 4] = b"gXYZ", b"rXYZ"
    return bytes(data).replace("sRGB".encode("utf-16-be"), "Odds".encode("utf-16-be"))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_are_those_of_the_pictures_profile(tmp_path, mode):
    image = Image.new("RGB", (16, 16), (255, 0, 0)).convert(mode)
    odd = saved(image, tmp_path, ".png", icc_profile=profile_with_red_and_green_exchanged())
    colour = read_pixels(odd, square(16))[:, 0, 0]
    torch.testing.assert_close(colour, torch.tensor([-1.0, 1.0, -1.0]), atol=0.02, rtol=0)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (srgb, b"no profile"):
        plain = saved(image, tmp_path, ".png", icc_profile=profile)
        assert read_pixels(plain, square(16))[:, 0, 0].tolist() == [1.0, -1.0, -1.0]


# --- Aspect buckets and the windows that are kept of a picture.


def test_buckets_have_about_the_squares_area():
    assert bucket_sizes(1024, max_aspect=1.0, multiple=16) == [Size(1024, 1024)]
    found = bucket_sizes(1024, max_aspect=2.0, multiple=16)
    assert found[0] == Size(1024, 1024)
    assert Size(832, 1216) in found
    assert {Size(size.width, size.height) for size in found} == set(found)
    for size in found:
        assert size.height % 64 == size.width % 64 == 0
        assert 0.9 * 1024**2 < size.area <= 1024**2
        assert max(size.height, size.width) <= 2 * min(size.height, size.width)


def test_a_size_is_written_as_it_is_read():
    """A user who copies a size from the output into a setting gets the same picture."""
    assert str(Size(height=832, width=1216)) == "1216 x 832"
    for size in bucket_sizes(512, max_aspect=3.0, multiple=16):
        assert Size.parse(str(size)) == size


def test_a_window_is_cut_where_it_says(tmp_path):
    wide = draw("circle", "red").resize((64, 32)).crop((0, 0, 64, 32))
    wide.paste((0, 0, 0), (0, 0, 32, 32))
    content = saved(wide, tmp_path)
    assert displayed_size(content) == (64, 32)
    size = Size(16, 16)
    assert float(read_pixels(content, Window(size, x_share=0.0)).max()) < -0.8
    assert float(read_pixels(content, Window(size, x_share=1.0))[:, 0, 0].min()) > 0.8
    assert read_pixels(content, Window(Size(16, 32))).shape == (3, 16, 32)
    assert float(read_mask_pixels(content, Window(size, x_share=1.0))[0, 0, 0]) > 0.8
    with pytest.raises(BadPicture, match="black all over"):
        read_mask_pixels(saved(Image.new("RGB", (8, 8)), tmp_path), Window(size))


def rows(*sizes: int) -> list[Row]:
    return [Row((str(i),), (), ("",), Size(8, side)) for i, side in enumerate(sizes)]


def test_a_steps_rows_have_one_size_and_every_row_comes_once_an_epoch():
    data = rows(*[8] * 9, *[16] * 7)
    stream = PictureStream(data, seed=0, shuffle=True, step_rows=4)
    steps = [[placed.row for placed in stream.take(4)] for _ in range(4)]
    assert [len({row.size for row in step}) for step in steps] == [1, 1, 1, 2]
    assert sorted(row.latents for step in steps for row in step) == sorted(
        row.latents for row in data
    )
    by_two = PictureStream(data, seed=0, shuffle=True, step_rows=4)
    assert [placed.row for _ in range(8) for placed in by_two.take(2)] == [
        row for step in steps for row in step
    ]
