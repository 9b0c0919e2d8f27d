"""What a trained LoRA says about itself: the metadata of its file, and its model card."""

import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isotype.config.schema import ImagesSection
from isotype.tasks.choose import choose_task, train
from tests.api import add_metadata, collect_pictures, prepare_data


def read_metadata(file):
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


def test_a_lora_and_its_card_say_what_they_are(drawn, studio, tmp_path):
    loaded = drawn(
        model=studio.sdxl,
        images={"trigger": "sks style"},
        adapter={"r": 4, "alpha": 8.0},
        train={"steps": 2, "eval_every": 2},
        run={"adapter_format": "comfyui", "samples": ["sks style, a red circle"]},
    )
    assert train(loaded) == 0
    adapter = tmp_path / "run/adapter"
    for name in ("pytorch_lora_weights.safetensors", "comfyui.safetensors"):
        metadata = read_metadata(adapter / name)
        expected = {
            "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
            "modelspec.prediction_type": "epsilon",
            "modelspec.trigger_phrase": "sks style",
            "modelspec.resolution": "32x32",
            "ss_base_model_version": "sdxl_base_v1-0",
            "ss_sd_model_name": "sdxl",
            "ss_network_dim": "4",
            "ss_network_alpha": "8",
            "ss_steps": "2",
            "ss_v2": "False",
        }
        assert {key: metadata.get(key) for key in expected} == expected
        (tags,) = json.loads(metadata["ss_tag_frequency"]).values()
        assert list(tags) == ["sks style"]
        assert str(tmp_path) not in json.dumps(metadata)
        assert str(studio.sdxl) not in json.dumps(metadata)
    card = (adapter / "README.md").read_text()
    assert "More Information Needed" not in card
    assert str(studio.sdxl) not in card
    for text in (
        "* base: `sdxl`",
        "| trigger words | sks style |",
        "| rank | 4 |",
        "| alpha | 8 |",
        "| steps | 2 |",
        "* sks style, a red circle",
        "| compute | fp32 |",
        "load_lora_weights(FOLDER)",
    ):
        assert text in card, text
    assert "base_model:" not in card, "the base is a folder, not a repository of the hub"


def test_metadata_is_written_in_one_order(tmp_path, drawn):
    """The library's order differs between processes."""
    import torch

    facts = {f"ss_{i}": str(i) for i in range(30)}
    contents = []
    for entries in (facts, dict(reversed(facts.items()))):
        file = tmp_path / "a.safetensors"
        save_file({"a": torch.arange(3.0), "b": torch.ones(2)}, file, metadata={"format": "pt"})
        add_metadata(file, entries)
        contents.append(file.read_bytes())
        assert read_metadata(file) == {"format": "pt", **facts}
        assert load_file(file)["a"].tolist() == [0, 1, 2]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(("share", "expected"), [(None, 0), (0.05, 1), (0.0, 0), (0.5, 6)])
def test_of_few_pictures_none_is_held_out_by_default(studio, share, expected):
    pictures = collect_pictures(ImagesSection(train=str(studio.pictures), eval_split=share), seed=0)
    assert (len(pictures.train), len(pictures.eval)) == (12 - expected, expected)


def test_the_plan_says_that_none_is_held_out(drawn):
    def lines(share):
        loaded = drawn(images={"eval_split": share})
        task = choose_task(loaded.config)
        prepare_data(task, loaded.sources)
        return [line for line in task.plan_lines() if "none is held out" in line]

    assert len(lines(None)) == 1
    assert lines(0.0) == lines(0.2) == []
