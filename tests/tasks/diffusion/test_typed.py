"""What one types for a run on pictures: captions, tags, triggers, noise levels, losses, prompts of samples."""

import io
import shutil

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from PIL import Image

from isotype.config.kind import DIFFUSION, kind_of
from isotype.config.load import load
from isotype.config.schema import DiffusionSection, ImagesSection
from isotype.config.write import init_yaml
from isotype.errors import UsageError
from isotype.tasks.choose import task_of, train
from isotype.tasks.diffusion.loss import objective_of
from isotype.tasks.diffusion.picture_files import InFile, Picture
from isotype.tasks.diffusion.pictures import gather, with_trained_captions
from isotype.training.setup import settle


def captioned(*captions, **images):
    picture = Picture(InFile(None), captions, "here")
    (made,) = with_trained_captions([picture], ImagesSection(train="x", **images), seed=3)
    return made.captions


def test_tags_are_shuffled_behind_the_kept_ones_and_some_are_left_out():
    forms = captioned("1girl, red hair, smile, outdoors", tag_orders=40, keep_tags=1, trigger="sks")
    assert all(form.startswith("sks, 1girl, ") for form in forms)
    assert {frozenset(form.split(", ")) for form in forms} == {frozenset(["sks", "1girl", "red hair", "smile", "outdoors"])}
    assert len(set(forms)) == 6, "every order of three tags comes in 40"
    assert forms == captioned("1girl, red hair, smile, outdoors", tag_orders=40, keep_tags=1, trigger="sks"), "from the seed"
    dropped = captioned("1girl, red hair, smile, outdoors", tag_orders=400, keep_tags=1, tag_dropout=0.25)
    kept = sum("smile" in form for form in dropped) / 400
    assert kept == pytest.approx(0.75, abs=0.07)
    assert all(form.startswith("1girl") for form in dropped)


def test_captions_come_from_names_and_pictures_without_one_are_a_choice(studio, tmp_path):
    shutil.copytree(studio.pictures, tmp_path / "mine")
    texts = sorted((tmp_path / "mine").glob("*.txt"))
    for text in texts[:4]:
        text.unlink()

    def captions(**images):
        found = gather(ImagesSection(train=str(tmp_path / "mine"), eval_split=0.0, **images), seed=0).train
        return [picture.captions for picture in found]

    with pytest.raises(UsageError, match=r"no caption: .*\.txt is missing \(images.uncaptioned: empty or skip\)"):
        captions()
    assert captions(uncaptioned="empty").count(("",)) == 4
    assert len(captions(uncaptioned="skip")) == 8
    assert captions(captions="names")[0] == ("green circle 0",)


def drawn_levels(count=4000, **section):
    levels = objective_of(
        DiffusionSection(**section), {"_class_name": "FlowMatchEulerDiscreteScheduler"}, offered=("flow_matching",), tokens=1
    )
    generator = torch.Generator().manual_seed(0)
    return torch.tensor([levels.draw(generator) for _ in range(count)])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"timesteps": "mode", "mode_scale": 1.0}, {"weighting_scheme": "mode", "mode_scale": 1.0}),
        ({"logit_mean": 0.5, "logit_std": 1.5}, {"weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 1.5}),
    ],
)
def test_densities_are_diffusers(ours, theirs):
    found = drawn_levels(**ours)
    other = compute_density_for_timestep_sampling(
        batch_size=20000, generator=torch.Generator().manual_seed(1), **{"logit_mean": None, "logit_std": None, **theirs}
    )
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert float(found.quantile(share)) == pytest.approx(float(other.quantile(share)), abs=0.03)


def test_huber_is_diffusers_smooth_loss_and_an_offset_is_one_number_a_channel(drawn, studio):
    def made(**diffusion):
        loaded = drawn(model=studio.sdxl, adapter={"kind": "none"}, images={"limit": 4}, diffusion=diffusion)
        task = task_of(loaded.config)
        basis = settle(task, loaded.sources)
        task.encode(basis.device)
        model, _ = task.build_model(basis.resolved.precision, basis.device, studio.sdxl)
        return task, model, task.collate(task.feed().take(2))

    task, model, batch = made(loss="huber", huber_c=0.2)
    with torch.no_grad():
        ours = task.losses(model, batch, dtype="fp32")
        noisy, target = task.objective.mixed(batch.latents, batch.noise, batch.sigma)
        predicted = task.folder.family.predict(model, noisy, task.objective.time(batch.sigma), batch.text, asked(task))
    smooth = 2 * 0.2 * (torch.sqrt((predicted - target) ** 2 + 0.2**2) - 0.2)
    torch.testing.assert_close(ours, smooth.flatten(1).mean(1))
    _, _, plain = made()
    _, _, moved = made(noise_offset=0.1)
    offset = moved.noise - plain.noise
    assert torch.equal(moved.latents, plain.latents)
    torch.testing.assert_close(offset, offset[..., :1, :1].expand_as(offset), atol=1e-6, rtol=0)
    assert 0.01 < float(offset.std()) < 0.3


def asked(task):
    from isotype.tasks.diffusion.families import Asked

    return Asked(downscale=task.downscale)


def test_a_sample_has_its_own_size_seed_steps_and_negative_prompt(drawn, tmp_path):
    own = {"prompt": "a red circle on white", "size": 64, "seed": 7, "steps": 1}
    prompts = [own, own, {**own, "negative": "a green square", "guidance": 4}, {**own, "guidance": 4}, "a red circle on white"]
    assert train(drawn(run={"samples": prompts, "sample_every": 4}, train={"steps": 1})) == 0
    drawn_ones = [(tmp_path / f"run/samples/step_1_{i}.png").read_bytes() for i in range(5)]
    assert [Image.open(io.BytesIO(png)).size for png in drawn_ones] == [(64, 64)] * 4 + [(32, 32)]
    assert drawn_ones[0] == drawn_ones[1], "the seed decides"
    assert drawn_ones[2] != drawn_ones[3], "the negative prompt acts"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.png", b"", "an empty file"),
        ("a.jpg", b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "a HEIC picture, which is not read here: convert it"),
        ("a.png", b"no picture at all", "not a picture"),
        ("a.heic", b"\x00\x00\x00\x18ftypheic", "HEIC is not read here: convert it"),
        ("a.png", None, "1 x 1 pixels: too small to learn from"),
    ],
)
def test_a_bad_picture_is_named_with_what_it_is(drawn, studio, tmp_path, name, content, said):
    shutil.copytree(studio.pictures, tmp_path / "mine")
    if content is None:
        Image.new("RGB", (1, 1)).save(tmp_path / "mine" / name)
    else:
        (tmp_path / "mine" / name).write_bytes(content)
    (tmp_path / "mine/a.txt").write_text("a")
    loaded = drawn(images={"train": str(tmp_path / "mine")})
    task = task_of(loaded.config)
    with pytest.raises(UsageError, match=said):
        task.encode(settle(task, loaded.sources).device)


def test_init_writes_a_configuration_of_pictures(studio, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(init_yaml("lora", model=str(studio.sd3), data=str(studio.pictures)))
    config = load(file).config
    assert (kind_of(config), config.images.train) == (DIFFUSION, str(studio.pictures))
    text = file.read_text()
    assert all(f"{name}:" in text for name in ImagesSection.model_fields)
    assert "\ndata:" not in text
    hub = init_yaml("lora", model="black-forest-labs/FLUX.1-dev", data=str(studio.pictures))
    assert "images:" in hub, "a folder of pictures says it"
    assert "images:" not in init_yaml("lora", model="Qwen/Qwen2.5-0.5B", data="chats.jsonl")
