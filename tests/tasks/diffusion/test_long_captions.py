"""Captions of Stable Diffusion and SDXL that are read in two or three windows of the CLIP encoder.
The tiny pipelines have windows of 8 tokens: begin, 6 tokens of the caption, end.
"""

import shutil

import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from PIL import Image
from tokenizers.processors import TemplateProcessing

from isotype.tasks.choose import train
from tests.tasks.diffusion.models import encoded, tokenizer

ENCODERS = {"kind": "lora", "r": 4, "text_encoders": True}
LONG = "red circle on white a green square a red square on a green circle a"  # 15 tokens
WINDOWS = ("red circle on white a green", "square a red square on a", "green circle a")


@pytest.fixture(params=["sd1", "sdxl"])
def pipeline(request, studio, tmp_path):
    """A pipeline whose tokenizers have a begin token, as CLIP's have."""
    folder = shutil.copytree(getattr(studio, request.param), tmp_path / request.param)
    bounded = tokenizer(8)
    bounded.bos_token = "<pad>"
    bounded.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A </s>", special_tokens=[("<pad>", 0), ("</s>", 1)]
    )
    for part in folder.glob("tokenizer*"):
        bounded.save_pretrained(part)
        assert transformers.AutoTokenizer.from_pretrained(part)("a").input_ids == [0, 3, 1]
    return folder


@pytest.fixture
def captioned(studio, tmp_path):
    folder = shutil.copytree(studio.pictures, tmp_path / "pictures")
    for i, file in enumerate(sorted(folder.glob("*.txt"))):
        if i % 2 == 0:
            file.write_text(LONG)
    return folder


def embeddings(pipe, caption):
    """Text and pooled text of a caption of at most one window, by diffusers' pipeline."""
    outputs = pipe.encode_prompt(
        caption, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    if len(outputs) > 2:
        return outputs[0][0], outputs[2][0]
    return outputs[0][0], None


@pytest.mark.parametrize("trains_encoders", [False, True])
def test_each_window_is_encoded_as_a_caption_of_its_own(
    drawn, pipeline, captioned, trains_encoders
):
    adapter = {"adapter": ENCODERS} if trains_encoders else {}
    loaded = drawn(
        model=pipeline,
        images={"train": str(captioned)},
        diffusion={"max_text_length": 18},
        **adapter,
    )
    task = encoded(loaded)
    folder = task.run.folder
    family = folder.family
    pipe = DiffusionPipeline.from_pretrained(pipeline)
    with torch.no_grad():
        text = family.encode_text(pipe, [LONG, "a"], max_length=18)
        expected = [embeddings(pipe, window) for window in WINDOWS]
    assert text["text"].shape[:2] == (2, 24)
    torch.testing.assert_close(text["text"][0], torch.cat([hidden for hidden, _ in expected]))
    if "pooled" in text:
        torch.testing.assert_close(text["pooled"][0], expected[0][1])
    assert not any("are not learnt" in line for line in task.plan_lines())


def test_what_lies_beyond_the_windows_is_counted(drawn, pipeline, captioned):
    loaded = drawn(
        model=pipeline, images={"train": str(captioned)}, diffusion={"max_text_length": 12}
    )
    (line,) = [line for line in encoded(loaded).plan_lines() if "are not learnt" in line]
    assert "longer than the 14 tokens that are read (up to 17)" in line


@pytest.mark.full
@pytest.mark.parametrize(
    "pipeline", [pytest.param("sd1", marks=pytest.mark.full), "sdxl"], indirect=True
)
@pytest.mark.parametrize("trains_encoders", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_run_on_long_captions_trains_draws_and_resumes(
    drawn, pipeline, captioned, tmp_path, trains_encoders
):
    adapter = {"adapter": ENCODERS} if trains_encoders else {}
    loaded = drawn(
        model=pipeline,
        images={"train": str(captioned)},
        diffusion={"max_text_length": 12},
        run={"samples": [LONG], "sample_every": 2},
        train={"steps": 2},
        **adapter,
    )
    assert train(loaded) == 0
    assert Image.open(tmp_path / "run/samples/step_2_0.png").size == (32, 32)
