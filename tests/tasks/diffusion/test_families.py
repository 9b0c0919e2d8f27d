"""Each family: loss and LoRA gradients equal those of diffusers' own pieces in fp32 on the same
draws, diffusers loads its file, and a picture is drawn.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from diffusers import (
    ChromaPipeline,
    DDPMScheduler,
    ErnieImagePipeline,
    Flux2KleinPipeline,
    FluxKontextPipeline,
    Ideogram4Pipeline,
    Krea2Pipeline,
    LongCatImagePipeline,
    LTX2Pipeline,
    LTXPipeline,
    QwenImagePipeline,
)
from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids
from peft import PeftModel
from safetensors.torch import load_file

from isotype.errors import UsageError
from isotype.precision.apply import denoiser_blocks
from isotype.tasks.choose import plan_run, train
from isotype.tasks.diffusion.families import REFUSED
from tests.api import Batch, PipelineFolder
from tests.api import tasks_diffusion_result_load_result as load_result
from tests.tasks.diffusion.models import with_adapter


def flow(batch: Batch):
    """noisy latents, and the velocity from latent to noise"""
    sigma = batch.sigma.view(-1, 1, 1, 1)
    return (1.0 - sigma) * batch.latents + sigma * batch.noise, batch.noise - batch.latents


def squared_error(made, target):
    return torch.mean(((made.float() - target.float()) ** 2).reshape(len(target), -1), 1).mean()


def plain_qwen(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    made = model(
        hidden_states=QwenImagePipeline._pack_latents(noisy, n, c, h, w), timestep=batch.sigma, guidance=None,
        encoder_hidden_states=batch.text["text"], encoder_hidden_states_mask=batch.text["mask"],
        img_shapes=[[(1, h // 2, w // 2)]] * n, return_dict=False,
    )[0]  # fmt: skip
    return squared_error(QwenImagePipeline._unpack_latents(made, h * 4, w * 4, 4)[:, :, 0], target)


def plain_kontext(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    pack, ids = FluxKontextPipeline._pack_latents, FluxKontextPipeline._prepare_latent_image_ids
    after, before = (ids(n, h // 2, w // 2, torch.device("cpu"), torch.float32) for _ in range(2))
    before[..., 0] = 1
    made = model(
        hidden_states=torch.cat([pack(noisy, n, c, h, w), pack(batch.controls[0], n, c, h, w)], dim=1), timestep=batch.sigma,
        guidance=torch.full_like(batch.sigma, 1.0), encoder_hidden_states=batch.text["text"], pooled_projections=batch.text["pooled"],
        txt_ids=torch.zeros(batch.text["text"].shape[1], 3), img_ids=torch.cat([after, before]), return_dict=False,
    )[0][:, : h * w // 4]  # fmt: skip
    return squared_error(FluxKontextPipeline._unpack_latents(made, h * 4, w * 4, 4), target)


def plain_qwen_edit(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    pictures = (noisy, *batch.controls)
    tokens = [QwenImagePipeline._pack_latents(x, n, c, *x.shape[-2:]) for x in pictures]
    shapes = [(1, x.shape[-2] // 2, x.shape[-1] // 2) for x in pictures]
    made = model(
        hidden_states=torch.cat(tokens, dim=1), timestep=batch.sigma, guidance=None, encoder_hidden_states=batch.text["text"],
        encoder_hidden_states_mask=batch.text["mask"], img_shapes=[shapes] * n, return_dict=False,
    )[0][:, : tokens[0].size(1)]  # fmt: skip
    return squared_error(QwenImagePipeline._unpack_latents(made, h * 4, w * 4, 4)[:, :, 0], target)


def plain_z_image(model, batch):
    noisy, target = flow(batch)
    texts = [one[:length] for one, length in zip(batch.text["text"], batch.lengths, strict=True)]
    made = model(
        list(noisy.unsqueeze(2).unbind(0)),
        (1000 - batch.sigma * 1000) / 1000,
        texts,
        return_dict=False,
    )[0]
    return squared_error(-torch.stack([one.float() for one in made]).squeeze(2), target)


def plain_klein(model, batch):
    noisy, target = flow(batch)
    n, _, h, w = noisy.shape
    made = model(
        hidden_states=Flux2KleinPipeline._pack_latents(noisy), timestep=batch.sigma, guidance=None,
        encoder_hidden_states=batch.text["text"], txt_ids=Flux2KleinPipeline._prepare_text_ids(batch.text["text"]),
        img_ids=Flux2KleinPipeline._prepare_latent_ids(noisy), return_dict=False,
    )[0]  # fmt: skip
    return squared_error(made.transpose(1, 2).reshape(n, -1, h, w), target)


def plain_klein_edit(model, batch):
    """The same of Flux.2 with its guidance as a number."""
    noisy, target = flow(batch)
    n, _, h, w = noisy.shape
    pack, pipeline = Flux2KleinPipeline._pack_latents, Flux2KleinPipeline
    before = pipeline._prepare_image_ids([x[:1] for x in batch.controls]).repeat(n, 1, 1)
    has_guidance = model.config.guidance_embeds
    made = model(
        hidden_states=torch.cat([pack(x) for x in (noisy, *batch.controls)], dim=1), timestep=batch.sigma,
        guidance=torch.full_like(batch.sigma, 1.0) if has_guidance else None,
        encoder_hidden_states=batch.text["text"], txt_ids=pipeline._prepare_text_ids(batch.text["text"]),
        img_ids=torch.cat([pipeline._prepare_latent_ids(noisy), before], dim=1), return_dict=False,
    )[0][:, : h * w]  # fmt: skip
    return squared_error(made.transpose(1, 2).reshape(n, -1, h, w), target)


def plain_chroma(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    mask = ChromaPipeline._prepare_attention_mask(None, n, h * w // 4, None, batch.text["mask"])
    made = model(
        hidden_states=ChromaPipeline._pack_latents(noisy, n, c, h, w), timestep=batch.sigma, encoder_hidden_states=batch.text["text"],
        txt_ids=torch.zeros(batch.text["text"].shape[1], 3), attention_mask=mask,
        img_ids=ChromaPipeline._prepare_latent_image_ids(n, h // 2, w // 2, torch.device("cpu"), torch.float32), return_dict=False,
    )[0]  # fmt: skip
    return squared_error(ChromaPipeline._unpack_latents(made, h * 4, w * 4, 4), target)


def plain_sd1(model, batch):
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    steps = (batch.sigma * 1000).round().long()
    made = model(
        scheduler.add_noise(batch.latents, batch.noise, steps),
        steps,
        batch.text["text"],
        return_dict=False,
    )[0]
    return squared_error(made, batch.noise)


def plain_sana(model, batch):
    noisy, target = flow(batch)
    made = model(
        noisy, encoder_hidden_states=batch.text["text"], encoder_attention_mask=batch.text["mask"], timestep=batch.sigma * 1000,
        return_dict=False,
    )[0]  # fmt: skip
    return squared_error(made, target)


def plain_auraflow(model, batch):
    noisy, target = flow(batch)
    return squared_error(
        model(
            noisy, encoder_hidden_states=batch.text["text"], timestep=batch.sigma, return_dict=False
        )[0],
        target,
    )


def plain_lumina2(model, batch):
    noisy, target = flow(batch)
    made = model(
        noisy, 1 - batch.sigma, batch.text["text"], batch.text["mask"].long(), return_dict=False
    )[0]
    return squared_error(-made, target)


def plain_hidream(model, batch):
    """In training its denoiser gives patches in their order, so the target is put into patches."""
    noisy, target = flow(batch)
    n, c, h, w = target.shape
    made = model.train()(
        noisy, timesteps=batch.sigma * 1000, encoder_hidden_states_t5=batch.text["text"],
        encoder_hidden_states_llama3=batch.text["layers"].transpose(0, 1), pooled_embeds=batch.text["pooled"], return_dict=False,
    )[0]  # fmt: skip
    patches = (
        target.reshape(n, c, h // 2, 2, w // 2, 2)
        .permute(0, 1, 2, 4, 3, 5)
        .reshape(n, c, h * w // 4, 4)
    )
    return squared_error(-made[:, :, : h * w // 4], patches)


def plain_krea2(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    length = batch.text["text"].shape[1]
    pipe = type("Packing", (), {"patch_size": 2, "vae_scale_factor": 4})()
    made = model(
        hidden_states=Krea2Pipeline._pack_latents(pipe, noisy, n, c, h, w), timestep=batch.sigma,
        encoder_hidden_states=batch.text["text"], encoder_attention_mask=batch.text["mask"].bool(),
        position_ids=Krea2Pipeline.prepare_position_ids(length, h // 2, w // 2, torch.device("cpu")), return_dict=False,
    )[0]  # fmt: skip
    return squared_error(Krea2Pipeline._unpack_latents(pipe, made, h * 4, w * 4)[:, :, 0], target)


def plain_ernie_image(model, batch):
    noisy, target = flow(batch)
    texts = [one[:length] for one, length in zip(batch.text["text"], batch.lengths, strict=True)]
    width = model.config.text_in_dim
    padded, lengths = ErnieImagePipeline._pad_text(texts, noisy.device, noisy.dtype, width)
    made = model(noisy, batch.sigma * 1000, padded, lengths, return_dict=False)[0]
    return squared_error(made, target)


def plain_ideogram4(model, batch):
    """Its pipeline pads texts before, not after them, and turns the sign of the velocity."""
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    longest = batch.text["text"].shape[1]
    texts = torch.zeros_like(batch.text["text"])
    for row, text, length in zip(texts, batch.text["text"], batch.lengths, strict=True):
        row[longest - length :] = text[:length]
    ids, segments, kinds = Ideogram4Pipeline._prepare_ids(
        list(batch.lengths), h, w, longest, noisy.device
    )
    tokens = noisy.permute(0, 2, 3, 1).reshape(n, h * w, c)
    made = model(
        hidden_states=torch.cat([torch.zeros(n, longest, c).to(tokens), tokens], 1), timestep=1.0 - batch.sigma,
        encoder_hidden_states=torch.cat([texts, torch.zeros(n, h * w, texts.shape[-1]).to(texts)], 1), position_ids=ids,
        segment_ids=segments, indicator=kinds, return_dict=False,
    )[0]  # fmt: skip
    return squared_error(-made[:, longest:].reshape(n, h, w, c).permute(0, 3, 1, 2), target)


def plain_longcat(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    length = batch.text["text"].shape[1]
    made = model(
        hidden_states=LongCatImagePipeline._pack_latents(noisy, n, c, h, w), timestep=batch.sigma,
        encoder_hidden_states=batch.text["text"], txt_ids=prepare_pos_ids(0, "text", (0, 0), length),
        img_ids=prepare_pos_ids(1, "image", (length, length), height=h // 2, width=w // 2), return_dict=False,
    )[0]  # fmt: skip
    return squared_error(LongCatImagePipeline._unpack_latents(made, h * 4, w * 4, 4), target)


def plain_kandinsky5(model, batch):
    """Each caption alone, as long as it is: its denoiser has no mask."""
    noisy, target = flow(batch)
    _, _, h, w = noisy.shape
    made = [
        model(
            hidden_states=noisy[i].permute(1, 2, 0)[None, None], encoder_hidden_states=batch.text["text"][i : i + 1, :length],
            timestep=batch.sigma[i : i + 1] * 1000, pooled_projections=batch.text["pooled"][i : i + 1],
            visual_rope_pos=[torch.arange(1), torch.arange(h // 2), torch.arange(w // 2)], text_rope_pos=torch.arange(length),
        ).sample[0, 0].permute(2, 0, 1)
        for i, length in enumerate(batch.lengths)
    ]  # fmt: skip
    return squared_error(torch.stack(made), target)


def plain_wan(model, batch):
    noisy, target = flow(batch)
    made = model(noisy.unsqueeze(2), batch.sigma * 1000, batch.text["text"], return_dict=False)[0]
    return squared_error(made.squeeze(2), target)


def plain_ltx(model, batch):
    noisy, target = flow(batch)
    h, w = noisy.shape[-2:]
    made = model(
        LTXPipeline._pack_latents(noisy.unsqueeze(2)), batch.text["text"], batch.sigma * 1000, batch.text["mask"], num_frames=1, height=h,
        width=w, rope_interpolation_scale=(8 / 25, 4, 4), return_dict=False,
    )[0]  # fmt: skip
    return squared_error(LTXPipeline._unpack_latents(made, 1, h, w).squeeze(2), target)


def plain_ltx2(model, batch):
    """With another number of sound tokens, which are not zeros: the video does not depend on them."""
    noisy, target = flow(batch)
    n, _, h, w = noisy.shape
    sound = torch.ones(n, 3, 8).to(noisy)
    text = batch.text
    made = model(
        LTX2Pipeline._pack_latents(noisy.unsqueeze(2)), sound, text["text"], text["audio"], batch.sigma * 1000, sigma=batch.sigma * 1000,
        encoder_attention_mask=text["mask"], audio_encoder_attention_mask=text["mask"], num_frames=1, height=h, width=w, fps=24.0,
        audio_num_frames=3, isolate_modalities=True, return_dict=False,
    )[0]  # fmt: skip
    return squared_error(LTX2Pipeline._unpack_latents(made, 1, h, w).squeeze(2), target)


PLAIN = {
    "qwen": plain_qwen, "z_image": plain_z_image, "klein": plain_klein, "chroma": plain_chroma, "sd1": plain_sd1, "sana": plain_sana,
    "auraflow": plain_auraflow, "lumina2": plain_lumina2, "hidream": plain_hidream, "wan": plain_wan, "ltx": plain_ltx,
    "ltx2": plain_ltx2,
    "kontext": plain_kontext, "qwen_edit": plain_qwen_edit, "qwen_edit_plus": plain_qwen_edit,
    "krea2": plain_krea2, "ernie_image": plain_ernie_image, "ideogram4": plain_ideogram4, "longcat": plain_longcat,
    "kandinsky5": plain_kandinsky5,
    "klein_edit": plain_klein_edit, "flux2_edit": plain_klein_edit,
    "klein_several": plain_klein_edit, "qwen_edit_plus_several": plain_qwen_edit,
}  # fmt: skip
IN_PAIRS = ("kontext", "qwen_edit", "qwen_edit_plus", "klein_edit", "flux2_edit")
SEVERAL = ("klein_several", "qwen_edit_plus_several")  # pictures before the edit
# trained by `make test-full` alone, where a family of the same form is trained every day
FULL = (
    "z_image",
    "kontext",
    "ltx",
    "ltx2",
    "hidream",
    "lumina2",
    "chroma",
    "sana",
    "qwen_edit",
    "klein",
    "auraflow",
    "qwen_edit_plus",
    "flux2_edit",
    "qwen_edit_plus_several",
    "krea2",
    "ernie_image",
    "ideogram4",
    "longcat",
    "kandinsky5",
    "klein_several",
    "sd1",
    "qwen",
)


def edits(studio):
    """`images` of a run on pairs."""
    return {"train": str(studio.pairs / "after"), "controls": str(studio.pairs / "before")}


def data_of(family, studio):
    """`images` and `run.samples` for this family."""
    if family in SEVERAL:
        folders = [str(studio.references / name) for name in ("before", "style")]
        files = [f"{folder}/circle_0.png" for folder in folders]
        images = {"train": str(studio.references / "after"), "controls": folders}
        return images, [{"prompt": "green", "control": files}]
    if family not in IN_PAIRS:
        return {}, ["a red circle on white"]
    return edits(studio), [
        {"prompt": "green", "control": str(studio.pairs / "before/circle_0.png")}
    ]


def loss_and_grads(plain, model, batch, names):
    model.zero_grad()
    loss = plain(model, batch)
    loss.backward()
    found = dict(model.named_parameters())
    grads = torch.cat(
        [found[name.removeprefix("base_model.model.")].grad.flatten() for name in names]
    )
    return loss.detach(), grads.clone()


def in_fp64(batch):
    def wide(value):
        if isinstance(value, tuple):
            return tuple(map(wide, value))
        return value.double() if torch.is_tensor(value) and value.is_floating_point() else value

    widened = {
        name: wide(getattr(batch, name))
        for name in ("latents", "noise", "sigma", "crop", "controls")
    }
    return replace(
        batch, **widened, text={name: wide(tensor) for name, tensor in batch.text.items()}
    )


def widened(model):
    """In fp64, but for the embedding of Kandinsky's time, which gives itself fp32."""
    model = model.double()
    if hasattr(model, "time_embeddings"):
        model.time_embeddings.float()
    return model


def relative(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def model_of(family):
    """The name of the tiny pipeline."""
    name = family.removesuffix("_several")
    return name.removesuffix("_edit") if name in ("klein_edit", "flux2_edit") else name


def in_training(drawn, studio, tmp_path, family, preset):
    """The task, the model with random numbers in its adapter, and a batch; the adapter is saved in
    tmp_path.
    """
    images, samples = data_of(family, studio)
    images = {"limit": 6, "caption_dropout": 0.5, **images}
    loaded = drawn(
        model=getattr(studio, model_of(family)),
        images=images,
        run={"samples": samples},
        precision={"preset": preset},
    )
    return loaded, *with_adapter(loaded, tmp_path, rows=3)


def in_diffusers(task, tmp_path, dtype):
    """diffusers' denoiser with the saved adapter."""
    denoiser = task.run.folder.denoiser(dtype)
    if not task.run.folder.family.loads_lora:
        return PeftModel.from_pretrained(denoiser, tmp_path, is_trainable=True).base_model.model
    pipe = task.run.folder.pipeline_for_sampling(denoiser, None)
    pipe.load_lora_weights(tmp_path, adapter_name="default")
    return getattr(pipe, task.run.folder.denoiser_part)


@pytest.mark.full
@pytest.mark.parametrize("family", PLAIN)
def test_bf16_gradients_are_at_most_half_as_far_again_as_diffusers(drawn, studio, tmp_path, family):
    """From fp64 on the same numbers: weights in bf16, an adapter in fp32."""
    _, task, model, batch = in_training(drawn, studio, tmp_path, family, "bf16-lora")
    (task.loss_sum(model, batch, dtype="fp32") / batch.weight).backward()
    trained = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None and p.grad.any()
    }
    assert {p.grad.dtype for p in trained.values()} == {torch.float32}
    theirs = in_diffusers(task, tmp_path, torch.bfloat16)
    for name, p in theirs.named_parameters():
        if "lora_" in name:
            p.data = dict(model.named_parameters())[f"base_model.model.{name}"].detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, plain = loss_and_grads(PLAIN[family], theirs, batch, trained)
    _, exact = loss_and_grads(PLAIN[family], widened(theirs), in_fp64(batch), trained)
    ours = torch.cat([p.grad.flatten() for p in trained.values()])
    assert relative(ours, exact) < 1.5 * relative(plain, exact)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full) if name in FULL else name for name in PLAIN],
)
def test_a_family_learns_as_diffusers_pieces_do(drawn, studio, tmp_path, family):
    loaded, task, model, batch = in_training(drawn, studio, tmp_path, family, "fp32")
    ours = task.loss_sum(model, batch, dtype="fp32") / batch.weight
    ours.backward()
    unused = task.run.folder.family.unused_layers(model.get_base_model())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    without = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    assert all(any(part in name for part in unused) for name in without), without

    plain = in_diffusers(task, tmp_path, torch.float32).float()
    learnt = [name for name in trained if name not in without]
    theirs, plain_grads = loss_and_grads(PLAIN[family], plain, batch, learnt)
    _, exact = loss_and_grads(PLAIN[family], widened(plain), in_fp64(batch), learnt)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    grads = torch.cat([trained[name].grad.flatten() for name in learnt])
    # where diffusers' own fp32 is further from fp64
    allowed = max(1e-6, 2 * relative(plain_grads, exact))
    assert relative(grads, exact) < allowed

    again = load_result(
        tmp_path, task.run.folder, loaded.config, task.run.precision, torch.device("cpu")
    )
    with torch.no_grad():
        torch.testing.assert_close(
            task.loss_sum(again, batch, dtype="fp32") / batch.weight,
            ours.detach(),
            rtol=1e-6,
            atol=0,
        )
    (picture,) = task.sample(model, torch.device("cpu"))
    assert (picture.settings.size.height, picture.settings.size.width) == (32, 32)
    planned = plan_run(loaded)
    assert planned.memory.not_simulated is None
    assert planned.memory.activations > 0
    assert denoiser_blocks(model)


@pytest.mark.full
@pytest.mark.parametrize("family", ["ltx", "hidream"])
def test_blocks_that_a_denoiser_does_not_name_are_recomputed(
    drawn, studio, tmp_path, capsys, family
):
    for recompute in ("none", "layers"):
        assert (
            train(
                drawn(
                    recompute,
                    model=getattr(studio, family),
                    train={"steps": 2, "gradient_checkpointing": recompute},
                )
            )
            == 0
        )
    assert "layers: all of 2" in capsys.readouterr().out
    kept, again = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors")
        for name in ("none", "layers")
    )
    assert all(torch.equal(kept[name], tensor) for name, tensor in again.items())


def test_another_pipeline_is_refused_by_name(tmp_path):
    for name in ("FluxFillPipeline", "LTX2ConditionPipeline", "NoSuchPipeline"):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        reason = REFUSED.get(name, "is not supported: expected one of")
        with pytest.raises(UsageError, match=f"{name}.*{re.escape(reason)}"):
            PipelineFolder.open(str(tmp_path))


def test_a_modular_pipeline_is_refused_by_name(drawn, tmp_path):
    """As FLUX.3's and Anima's, whose folder has no model_index.json."""
    (tmp_path / "flux3").mkdir()
    (tmp_path / "flux3/modular_model_index.json").write_text("{}")
    with pytest.raises(UsageError, match="a modular pipeline of diffusers"):
        plan_run(drawn(model=tmp_path / "flux3"))
