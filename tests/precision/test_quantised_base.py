"""Bases that came quantised: read from a configuration and from layers, shown in a line, accepted
or refused with the reason.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig

from isotype import optimize
from isotype.cli.app import build_app
from isotype.errors import UsageError
from isotype.precision import PRESETS
from isotype.tasks.choose import train
from tests.api import (
    Quantisation,
    check_base,
    detect_quantisation,
    quantisation_from_config,
    unquantised_share,
)
from tests.models import lora, quantised, tiny

pytest.importorskip("bitsandbytes")

NF4 = PRESETS["nf4-lora"]
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# what BitsAndBytesConfig was given -> what is read, and said of it
GIVEN = {
    "nf4": ({**FOUR_BIT, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16},
            Quantisation("bitsandbytes", "nf4", "bf16", "uint8", True)),
    "library defaults": ({"load_in_4bit": True}, Quantisation("bitsandbytes", "fp4", "fp32", "uint8", False)),
    "other dtypes": ({**FOUR_BIT, "bnb_4bit_compute_dtype": torch.float16, "bnb_4bit_quant_storage": torch.bfloat16},
                     Quantisation("bitsandbytes", "nf4", "fp16", "bf16", False)),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory, workshop):
    """A tiny model saved quantised, once for each way."""
    folder = tmp_path_factory.mktemp("quantised")
    config = json.loads((workshop.base / "config.json").read_text())
    tiny(hidden_size=64, intermediate_size=128, vocab_size=config["vocab_size"]).save_pretrained(
        folder / "dense"
    )
    made = {}
    for name, given in {
        **{k: v[0] for k, v in GIVEN.items()},
        "int8": {"load_in_8bit": True},
    }.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder / "dense",
            quantization_config=BitsAndBytesConfig(**given),
            device_map={"": "cpu"},
            dtype=torch.bfloat16,
        )
        model.save_pretrained(folder / name)
        made[name] = (folder / name, model)
    return made


@pytest.mark.parametrize("name", GIVEN)
def test_file_and_layers_say_the_same(saved, name):
    _, model = saved[name]
    assert quantisation_from_config(model.config) == detect_quantisation(model) == GIVEN[name][1]


def test_quantisation_of_other_libraries_is_recognised():
    assert quantisation_from_config(PretrainedConfig()) is None
    assert detect_quantisation(tiny()) is None
    found = quantisation_from_config(
        PretrainedConfig(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    )
    assert str(found) == "int4 by awq, one scale per 128 values of a row"
    assert quantisation_from_config(
        PretrainedConfig(quantization_config={"quant_method": "hqq"})
    ).unread_reason.startswith("quantised by hqq")


def test_a_base_that_contradicts_the_precision_is_refused_with_the_reason():
    for found, precision, message in (
        (
            Quantisation("bitsandbytes", "fp4", "fp32", "uint8", False),
            NF4,
            "its weights are fp4, and no precision declares fp4",
        ),
        (Quantisation("hqq", "hqq", unread_reason="quantised by hqq"), NF4, "quantised by hqq"),
        (Quantisation("gptq", "int4"), NF4, "its weights are int4 already, declared base nf4"),
        (
            GIVEN["nf4"][1],
            PRESETS["bf16-lora"],
            r"nf4 already, declared base bf16(.|\n)*precision\.preset: auto",
        ),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            check_base(found, precision, "some/model")
        assert len(str(caught.value).splitlines()) == 2


def test_a_base_that_fits_the_precision_gives_a_header_line():
    (line,) = check_base(GIVEN["other dtypes"][1], NF4, "some/model")
    assert (
        "nf4 by bitsandbytes, not double-quantised, products in fp16, stored in bf16; here products are in bf16"
        in line
    )


def test_a_folder_saved_in_nf4_is_trained_on_under_the_declared_precision(
    saved, configured, tmp_path, workshop, capsys
):
    model = {"name": str(saved["other dtypes"][0]), "tokenizer": str(workshop.base)}
    assert train(configured(model=model, precision={"preset": "nf4-lora"}, train={"steps": 2})) == 0
    assert "base: nf4 by bitsandbytes" in (out := " ".join(capsys.readouterr().out.split()))
    assert "the base came quantised: nf4" in out
    observed = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert observed["violations"] == []
    assert observed["observed"]["base"] == {"nf4": 14, "bf16": 7}
    assert observed["declared"]["base"] == {
        "value": "nf4",
        "reason": "preset nf4-lora",
        "rest": "bf16",
    }


@pytest.mark.parametrize(("name", "preset"), [("library defaults", "nf4-lora"), ("nf4", "fp32")])
def test_other_folders_are_refused_by_train_and_plan_alike(
    saved, name, preset, configured, workshop, tmp_path
):
    from typer.testing import CliRunner

    loaded = configured(
        model={"name": str(saved[name][0]), "tokenizer": str(workshop.base)},
        precision={"preset": preset},
    )
    with pytest.raises(UsageError, match="its weights are") as caught:
        train(loaded)
    planned = CliRunner().invoke(build_app(), ["plan", str(tmp_path / "run.yaml")])
    assert isinstance(planned.exception, UsageError)
    assert str(planned.exception) == str(caught.value)


def test_stacked_experts_are_counted_as_unquantised_and_embeddings_and_head_are_not():
    share, largest = unquantised_share(
        quantised(tiny("mixtral", num_local_experts=4, num_experts_per_tok=2))
    )
    assert share > 0.5
    assert "experts" in largest
    assert unquantised_share(lora(quantised(tiny()), modules_to_save=["lm_head"])) == (0.0, "")


def test_a_base_that_is_mostly_not_quantised_needs_consent(configured, workshop, tmp_path, capsys):
    config = json.loads((workshop.base / "config.json").read_text())
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": config["vocab_size"]}
    tiny("mixtral", hidden_size=64, intermediate_size=128, **sizes).save_pretrained(
        tmp_path / "moe"
    )
    model = {"name": str(tmp_path / "moe"), "tokenizer": str(workshop.base)}
    with pytest.raises(
        UsageError,
        match=r"% of the base's matrices stay bf16, not nf4, such as .*experts.*(.|\n)*model\.allow_unquantised: true",
    ):
        train(configured(model=model, precision={"preset": "nf4-lora"}))
    model["allow_unquantised"] = True
    assert (
        train(
            configured("second", model=model, precision={"preset": "nf4-lora"}, train={"steps": 2})
        )
        == 0
    )
    assert "of its matrices are not quantised" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_model_of_ones_own_is_described_in_the_manifest(kind):
    notes = optimize(
        lora(quantised(tiny(), kind=kind, compute=torch.float32, double=False)), NF4
    ).notes
    (line,) = [note for note in notes if note.startswith("base: ")]
    assert line.startswith(f"base: {kind} by bitsandbytes")
    assert ("declared nf4" in line) == (kind != "nf4")
    assert kind == "int8" or "declared products in bf16" in line


def test_eight_bit_layers_run_pefts_code_and_are_named_with_the_reason():
    manifest = optimize(lora(quantised(tiny(), kind="int8")), NF4)
    placed = [entry for entry in manifest.entries if entry.part == "lora"]
    assert {entry.op for entry in placed} == {None}
    assert all("activations" in entry.reason for entry in placed)
