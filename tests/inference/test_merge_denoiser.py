"""A diffusion run's LoRA merged into its denoiser: a pipeline's folder of its own."""

import json

import pytest
import torch

pytest.importorskip("diffusers")

from tests.tasks.diffusion.conftest import drawn, studio  # noqa: F401  # fixtures

from isotype.cli.merge import merge
from isotype.errors import UsageError
from isotype.inference.diffusion import merge_denoiser, random_batch
from isotype.tasks.choose import task_of, train
from isotype.tasks.diffusion.families import Asked


@pytest.mark.parametrize("family", ["sd3", pytest.param("sdxl", marks=pytest.mark.full)])
def test_a_merged_pipeline_is_the_adapter_on_its_base(drawn, studio, tmp_path, capsys, family):  # noqa: F811
    from diffusers import DiffusionPipeline

    loaded = drawn(model=getattr(studio, family), train={"learning_rate": 1e-2, "eval_every": 4})
    assert train(loaded) == 0
    capsys.readouterr()
    merge(tmp_path / "run", tmp_path / "merged", None, json_output=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["dtype"], said["noise"] < 1e-3) == ("fp32", True)
    assert said["rows"] == 4
    assert said["merged_loss"] == pytest.approx(said["adapter_loss"], rel=1e-5)

    task = task_of(loaded.config)
    task.check(loaded_precision())
    batch = random_batch(task, torch.device("cpu"))
    noisy, _ = task.objective.mixed(batch.latents, batch.noise, batch.sigma)

    def predicted(pipe):
        with torch.no_grad():
            denoiser = getattr(pipe, task.folder.denoiser_part).float()
            return task.folder.family.predict(
                denoiser, noisy, task.objective.time(batch.sigma), batch.text, Asked(downscale=task.downscale)
            )

    merged = DiffusionPipeline.from_pretrained(tmp_path / "merged")
    base = DiffusionPipeline.from_pretrained(getattr(studio, family))
    plain = predicted(base)
    base.load_lora_weights(tmp_path / "run/adapter")
    torch.testing.assert_close(predicted(merged), predicted(base), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, predicted(base), rtol=1e-4, atol=1e-5), "the adapter does something"
    with pytest.raises(UsageError, match="not empty"):
        merge_denoiser(tmp_path / "run", tmp_path / "merged")


def loaded_precision():
    from isotype.precision import Precision

    return Precision.preset("fp32").but(vae="fp32", text_encoder="fp32", timesteps="fp32", latents="fp32")
