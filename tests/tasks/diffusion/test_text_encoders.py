"""Text encoders of SDXL and Stable Diffusion that are trained with the denoiser (`adapter.text_encoders`)."""

from dataclasses import replace

import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline
from safetensors.torch import load_file

from isotype.config.load import load
from isotype.config.schema import TrainSection
from isotype.inference.diffusion import draw_with, evaluate_with, export_comfyui, merge_denoiser
from isotype.precision import PRESETS
from isotype.tasks.choose import train
from isotype.training.callbacks import Callback
from isotype.training.optimizer import build_optimizer
from tests.tasks.diffusion.models import refused, with_adapter
from tests.tasks.diffusion.test_comfyui import NAMES, peft_deltas, read_as_comfyui_does
from tests.tasks.diffusion.test_families import relative
from tests.tasks.diffusion.test_loss import squared_error

PARTS = {"sdxl": ("text_encoder", "text_encoder_2"), "sd1": ("text_encoder",)}
TE = r"text_model_encoder_layers_\d+_(self_attn_(q_proj|k_proj|v_proj|out_proj)|mlp_fc[12])"
ON = {"kind": "lora", "r": 4, "alpha": 8.0, "text_encoders": True}


def in_training(drawn, studio, tmp_path, family):
    """The task, the model with random numbers in its adapter, which is saved in tmp_path, and a batch with a dropped caption."""
    loaded = drawn(model=getattr(studio, family), images={"limit": 6, "caption_dropout": 0.5}, adapter=ON)
    return with_adapter(loaded, tmp_path, rows=4)


def plain_loss(pipe, batch):
    """The loss of diffusers' scripts, with the embeddings of encoders that are trained; a dropped caption of SDXL is zeros."""
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    steps = (batch.sigma * 1000).round().long()
    noisy, given = scheduler.add_noise(batch.latents, batch.noise, steps), {}
    ids = batch.text["ids"]
    if hasattr(pipe, "text_encoder_2"):
        one, two = (encoder(ids[:, i], output_hidden_states=True) for i, encoder in enumerate((pipe.text_encoder, pipe.text_encoder_2)))
        shown = batch.text["captioned"].to(batch.latents)[:, None]
        text = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], -1) * shown[..., None]
        sizes = torch.cat([batch.cut, torch.tensor([[32.0, 32.0]]).expand(len(batch.cut), 2)], 1)
        given = {"added_cond_kwargs": {"text_embeds": two[0] * shown, "time_ids": sizes}}
    else:
        text = pipe.text_encoder(ids[:, 0])[0]
    return squared_error(pipe.unet(noisy, steps, text, return_dict=False, **given)[0], batch.noise)


def in_fp64(batch):
    return replace(batch, **{name: getattr(batch, name).double() for name in ("latents", "noise", "sigma", "cut")})


@pytest.mark.parametrize("family", PARTS)
def test_loss_and_gradients_are_those_of_diffusers_and_peft(drawn, studio, tmp_path, family):
    task, model, batch = in_training(drawn, studio, tmp_path, family)
    assert 0 < int(batch.text["captioned"].sum()) < len(batch.latents)
    ours = task.loss_sum(model, batch, dtype="fp32") / batch.weight
    ours.backward()
    pipe = DiffusionPipeline.from_pretrained(getattr(studio, family))
    pipe.load_lora_weights(tmp_path, adapter_name="default")
    theirs = {}
    for part in ("unet", *PARTS[family]):
        module = getattr(pipe, part).train()
        theirs |= {f"{'' if part == 'unet' else f'text_encoders.{part}.'}{name}": p for name, p in module.named_parameters()}
    for name, p in theirs.items():
        p.requires_grad_("lora_" in name)
    plain = plain_loss(pipe, batch)
    plain.backward()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
    trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == {name for name, p in theirs.items() if p.requires_grad}
    grads = {name: theirs[name].grad.clone() for name in trained}
    for part in ("unet", *PARTS[family]):
        getattr(pipe, part).double().zero_grad()
    plain_loss(pipe, in_fp64(batch)).backward()
    for part in ("unet", *PARTS[family]):
        mine = [n for n in trained if n.startswith(f"text_encoders.{part}.") or (part == "unet" and "text_encoders." not in n)]
        assert all(trained[name].grad.any() for name in mine)
        found, right, exact = (
            torch.cat([grad.flatten() for grad in some])
            for some in ([trained[n].grad for n in mine], [grads[n] for n in mine], [theirs[n].grad for n in mine])
        )
        # where diffusers' own fp32 is further than that from fp64, twice its distance
        assert relative(found, exact) < max(1e-6, 2 * relative(right, exact)), part


@pytest.mark.parametrize("family", PARTS)
def test_a_run_with_encoders_ends_in_files_that_are_read(drawn, studio, tmp_path, family):
    rate = {"text_encoder_rate": 5e-4}
    loaded = drawn(
        model=getattr(studio, family), adapter={**ON, **rate}, images={"caption_dropout": 0.2}, run={"samples": ["a red circle on white"]}
    )
    assert train(loaded) == 0
    run = tmp_path / "run"
    tensors = load_file(run / "adapter/pytorch_lora_weights.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"unet", *PARTS[family]}
    assert all(name.split(".")[1] == "text_model" for name in tensors if name.startswith("text_encoder"))
    assert any(t.any() for name, t in tensors.items() if name.startswith("text_encoder") and "lora_B" in name)
    assert draw_with(run, ["a green square on white"])[1]
    assert evaluate_with(run, str(studio.pictures))[1].loss > 0

    export_comfyui(run, None, tmp_path / "comfy.safetensors")
    prefix = "lora_te[12]_" if family == "sdxl" else "lora_te_"
    added = read_as_comfyui_does(tmp_path / "comfy.safetensors", [*NAMES["sdxl"], prefix + TE])
    assert len(added) == len(peft_deltas(run / "adapter"))
    deltas = peft_deltas(run / "adapter")
    at = "lora_te2" if family == "sdxl" else "lora_te"
    name = f"text_encoders.{PARTS[family][-1]}.{'text_model.' if family == 'sdxl' else ''}encoder.layers.0.mlp.fc1"
    torch.testing.assert_close(added[f"{at}_text_model_encoder_layers_0_mlp_fc1"], deltas[name])

    merge_denoiser(run, tmp_path / "merged", dtype="fp32")
    merged, plain = DiffusionPipeline.from_pretrained(tmp_path / "merged"), DiffusionPipeline.from_pretrained(getattr(studio, family))
    plain.load_lora_weights(run / "adapter")
    arguments = {"do_classifier_free_guidance": False, "device": "cpu", "num_images_per_prompt": 1}
    with torch.no_grad():
        ours, theirs = (pipe.encode_prompt("a red circle on white", **arguments)[0] for pipe in (merged, plain))
    torch.testing.assert_close(ours, theirs)


def test_with_class_pictures_and_dropped_captions_a_run_resumes_bit_for_bit(drawn, studio, tmp_path):
    class Stops(Callback):
        def on_step(self, moment):
            if moment.step == 3:
                raise RuntimeError("stopped here")

    def settings(folder):
        prior = {"name": str(tmp_path / "class"), "caption": "a square on white", "draw": 2}
        images = {"limit": 6, "caption_dropout": 0.3, "regularisation": [prior], "eval_split": 0}
        own = {"adapter": {**ON, "text_encoder_rate": 5e-4}, "precision": {"preset": "bf16-lora"}, "run": {"save_every": 2}}
        return drawn(folder, model=studio.sdxl, images=images, **own)

    assert train(settings("whole")) == 0
    assert len(list((tmp_path / "class").glob("*.png"))) == 2
    with pytest.raises(RuntimeError, match="stopped here"):
        train(settings("stopped"), callbacks=[Stops()])
    assert train(load(tmp_path / "stopped/resolved.yaml", [], {}, resolved=True), resume=tmp_path / "stopped") == 0
    whole, resumed = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert {tensor.dtype for tensor in whole.values()} == {torch.float32}


def test_the_encoders_rate_is_theirs():
    model = torch.nn.ModuleDict({"unet": torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("text_encoders", "block")})})
    optimizer = build_optimizer(model, TrainSection(learning_rate=2e-4), PRESETS["fp32"], lambda p: p.grad, text_rate=5e-5)
    rates = {id(p): group.get("rate_factor", 1.0) for group in optimizer.param_groups for p in group["params"]}
    assert all(rates[id(p)] == (0.25 if ".text_encoders." in name else 1.0) for name, p in model.named_parameters())
    assert len(rates) == 4


def test_each_encoder_may_have_its_own_rate(drawn, studio, tmp_path):
    rate = {"text_encoder_rate": [5e-4, 1e-12]}
    assert train(drawn(model=studio.sdxl, adapter={**ON, **rate, "plus": 4.0}, train={"weight_decay": 0.0})) == 0
    tensors = load_file(tmp_path / "run/adapter/pytorch_lora_weights.safetensors")
    first, second = (
        max(float(t.abs().max()) for n, t in tensors.items() if n.startswith(f"{p}.") and "lora_B" in n) for p in PARTS["sdxl"]
    )
    assert second < 1e-9 < 1e-4 < first


@pytest.mark.parametrize(
    ("model", "adapter", "said"),
    [
        ("sd3", ON, "only those of SDXL and Stable Diffusion"),
        ("sd1", {**ON, "kind": "none"}, "adapter.text_encoders: adapter.kind: none"),
        ("sd1", {**ON, "kind": "lokr"}, "adapter.kind: lokr"),
        ("sd1", {**ON, "text_encoder_rate": [1e-4, 1e-5]}, "has 2 rates, and a StableDiffusionPipeline has 1 encoder"),
        ("sd1", {**ON, "dora": True}, "diffusers does not load the lengths of a DoRA"),
        ("sd1", {"text_encoder_rate": 1e-4}, "has no effect without adapter.text_encoders"),
    ],
)
def test_what_does_not_fit_is_refused(drawn, studio, model, adapter, said):
    assert said in refused(drawn(model=getattr(studio, model), adapter=adapter))
