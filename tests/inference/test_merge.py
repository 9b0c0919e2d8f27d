"""Adapters from anywhere: a PEFT folder without a run, what one weight's change is, and what is
refused.
"""

import json
from dataclasses import replace

import peft
import pytest
import torch
from tests.models import lora, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.errors import RunError, UsageError
from isotype.inference import merge as merging
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge


@pytest.fixture
def foreign(workshop, tmp_path):
    """`foreign(...)`: a PEFT folder as someone else would leave it, and the adapter's own logits on
    a few tokens.
    """

    def make(*, dtype=torch.float32, **settings):
        base = AutoModelForCausalLM.from_pretrained(workshop.base, dtype=dtype)
        model = lora(base, **settings)
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name or "lora_embedding" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(workshop.base, dtype=dtype), tmp_path / "adapter"
        )
        with torch.no_grad():
            return tmp_path / "adapter", loaded.eval()(input_ids=torch.arange(3, 20)[None]).logits

    return make


@pytest.mark.parametrize(
    "settings",
    [{"use_rslora": True, "use_dora": True}, {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}],
    ids=["rslora, dora", "embedding, modules_to_save"],
)  # fmt: skip
def test_a_peft_folder_is_merged_into_the_base_it_names(foreign, tmp_path, settings):
    folder, expected = foreign(**settings)
    merged = merge(load_run(folder), tmp_path / "merged")
    assert merged.dtype == "fp32"
    assert merged.merged_loss == pytest.approx(merged.adapter_loss, rel=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    with torch.no_grad():
        torch.testing.assert_close(
            plain(input_ids=torch.arange(3, 20)[None]).logits, expected, atol=1e-5, rtol=1e-5
        )


def test_rotary_parameters_of_the_run_are_in_the_merged_configuration(foreign, tmp_path):
    """`isotype merge --verify` found that config.json had the base's."""
    folder, _ = foreign()
    run = load_run(folder)
    rope = {"rope_type": "linear", "factor": 2.0}
    merge(replace(run, source=replace(run.source, rope=rope)), tmp_path / "merged")
    written = json.loads((tmp_path / "merged/config.json").read_text())
    assert written["rope_parameters"]["rope_type"] == "linear"
    assert written["rope_parameters"]["factor"] == 2.0


def test_a_merged_model_is_put_in_place_after_it_is_compared(foreign, tmp_path, monkeypatch):
    folder, _ = foreign()
    with monkeypatch.context() as there:
        there.setattr(merging, "_load_merged", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            merge(load_run(folder), tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    with monkeypatch.context() as there:
        there.setattr(merging, "TOLERANCE", -1.0)
        with pytest.raises(RunError, match=r"merged: the merged model's loss is"):
            merge(load_run(folder), tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    assert merge(load_run(folder), tmp_path / "merged").folder == tmp_path / "merged"


def test_the_precision_file_of_an_adapter_is_used(foreign, tmp_path):
    folder, _ = foreign()
    (folder / "precision.json").write_text(json.dumps({"precision": "bf16-lora"}))
    assert load_run(folder).precision.base == "bf16"
    (folder / "precision.json").write_text("{}")
    with pytest.raises(UsageError, match=r"precision\.json: not as isotype writes it"):
        load_run(folder)


def test_adapters_that_cannot_be_merged_are_refused(foreign, tmp_path):
    folder, _ = foreign(lora_bias=True, target_modules=["q_proj"])
    with pytest.raises(UsageError, match=r"q_proj: a bias of its own(.|\n)*merge_and_unload"):
        merge(load_run(folder), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_that_names_no_base_is_refused(foreign):
    folder, _ = foreign()
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": None})
    )
    with pytest.raises(UsageError, match="which model is this an adapter of"):
        load_run(folder)


@pytest.fixture
def merged_logits(tmp_path, workshop):
    """`merged_logits(base, ...)`: logits of a base with a random adapter, and of the two merged,
    loaded by transformers alone.
    """

    def make(base, **settings):
        base.save_pretrained(tmp_path / "base")
        AutoTokenizer.from_pretrained(workshop.base).save_pretrained(tmp_path / "base")
        model = lora(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
            init_lora_weights=False,
            **settings,
        )
        model.save_pretrained(tmp_path / "adapter")
        ids = torch.arange(3, 20)[None]
        with torch.no_grad():
            expected = model.eval()(input_ids=ids).logits
            merge(load_run(tmp_path / "adapter"), tmp_path / "merged")
            return (
                AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits,
                expected,
                model,
            )

    return make


def test_adapters_on_stacked_experts_are_merged(merged_logits):
    wanted = {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    got, expected, model = merged_logits(tiny("mixtral", num_local_experts=4), **wanted)
    assert sum(isinstance(m, peft.tuners.lora.ParamWrapper) for m in model.modules()) == 4
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_buffers_of_the_models_file_are_merged(merged_logits):
    """As the bias of GLM 4's router is."""
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    }
    base = tiny("glm4_moe", n_group=1, topk_group=1, first_k_dense_replace=1, **experts)
    for name, buffer in base.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.rand(buffer.shape)
    got, expected, _ = merged_logits(base, target_modules=["q_proj"])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
