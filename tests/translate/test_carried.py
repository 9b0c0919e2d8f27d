"""Every setting of the schema that a tool has too is carried: the schema's keys are gone through
for each tool, and a new key fails here until a table takes it or a line below leaves it out.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest

from isotype.config.load import load
from isotype.config.schema import RunConfig
from isotype.data.chat import NAMED_TEMPLATES
from isotype.translate import Fate, translate
from tests.api import TEMPLATES, TOOLS, ConfigDraft, SourceKey, transforms

from .configurations import AXOLOTL, AXOLOTL_LORA, FACTORY, TUNE, UNSLOTH

# sections that these tools do not have, or that several keys decide together
_SECTIONS = ("images", "diffusion", "distil", "precision")
# settings that none of these tools has, and one that stands in the entries of data.train
_NOBODY = (
    "data.roles data.eval_seed model.vae adapter.serve_as adapter.serve_from "
    "model.config model.lora_branch model.allow_unquantised model.offload data.thoughts data.on_bad_row data.cache adapter.factor "
    "adapter.train_tokens adapter.text_encoders adapter.text_encoder_rate train.decay train.ema train.checkpointed_layers "
    "train.keep_attention train.memory train.stop_on run.adapters_every run.adapters_keep run.adapter_format run.sample_every "
    "run.samples run.sample_tokens run.sample_steps run.sample_size run.sample_frames run.sample_guidance run.observe_every run.report "
    "run.push_merged "
    "parallel.kind parallel.timeout"
)  # fmt: skip
_LEFT_OUT = {
    "axolotl": (
        "model.optimize data.format data.columns data.min_pixels data.max_pixels data.limit data.shuffle_buffer "
        "adapter.rank_pattern adapter.alpha_pattern adapter.projector "
        "train.aux_loss"
    ),
    "llamafactory": (
        "model.init model.rope_parameters data.columns data.shuffle adapter.parameters"
    ),
    "trl": (
        "model.init model.add_tokens model.rope_parameters data.format data.columns data.min_pixels data.max_pixels "
        "data.template_kwargs data.shuffle "
        "data.shuffle_buffer adapter.parameters adapter.plus adapter.start_from adapter.projector train.aux_loss"
    ),
    "torchtune": (
        "model.revision model.init model.tokenizer model.add_tokens model.attention model.rope_parameters model.optimize "
        "model.trust_remote_code data.eval_split data.min_pixels data.max_pixels data.template_kwargs "
        "data.limit data.stream data.shuffle_buffer "
        "adapter.parameters adapter.rslora adapter.rank_pattern adapter.alpha_pattern adapter.plus adapter.start "
        "adapter.modules_to_save adapter.start_from adapter.vision adapter.projector preference.simpo_gamma "
        "preference.desirable_weight preference.undesirable_weight preference.center_rewards_coefficient preference.nll train.steps "
        "train.min_learning_rate train.aux_loss train.embedding_noise train.deterministic train.patience "
        "run.save run.push_to_hub run.push_private"
    ),
}  # fmt: skip
# values that a key of another tool may have, and keys that decide what becomes of others
_VALUES: list[Any] = [
    True, False, 1, 2, 0.5, "a", "a/b", "all", "chatml", "no", "cpu", "dpo", "pissa", "wandb", "cosine", "adamw", "cosine_with_min_lr",
    ["a"], [0.9, 0.95], {"a": "b"}, {"min_lr_rate": 0.1}, [{"path": "a.json", "type": "completion", "field": "b"}],
    "torchtune.datasets.alpaca_dataset", "torchtune.rlhf.loss.DPOLoss", "flash_attention_2", "pt",
]  # fmt: skip
_BESIDE: list[dict[str, Any]] = [
    {},
    {"rl": "dpo", "stage": "dpo", "trl_method": "dpo", "push_to_hub": True, "output_dir": "a"},
    {"rl": "simpo", "stage": "dpo", "pref_loss": "simpo", "trl_method": "cpo", "loss_type": "simpo"},
    {"rl": "kto", "stage": "kto", "trl_method": "kto", "lr_scheduler_type": "cosine_with_min_lr"},
    {"reward_model": True, "stage": "rm", "trl_method": "reward", "run_val_every_n_steps": "5"},
]  # fmt: skip


def schema_keys() -> set[str]:
    return {
        f"{section}.{key}"
        for section, field in RunConfig.model_fields.items()
        if section not in _SECTIONS
        for key in field.annotation.model_fields  # type: ignore[union-attr]
    }


def reached(tool: str) -> set[str]:
    """The settings that some value of some key of the tool becomes."""
    found: set[str] = set()
    for key, value, beside in itertools.product(TOOLS[tool].HANDLERS, _VALUES, _BESIDE):
        draft = ConfigDraft(source_values={**beside, key: value})
        with suppress(Exception):  # a value that this key cannot have
            TOOLS[tool].HANDLERS[key](draft, SourceKey(key, value, 1))
        found |= set(draft.settings)
    return found


@pytest.mark.parametrize("tool", _LEFT_OUT)
def test_every_setting_is_carried_or_left_out_by_name(tool: str) -> None:
    left_out = {*_NOBODY.split(), *_LEFT_OUT[tool].split()}
    assert schema_keys() - reached(tool) == left_out


_BY_NAME = {
    "axolotl": ("a.yml", AXOLOTL + AXOLOTL_LORA + "chat_template: NAME\n"),
    "llamafactory": ("a.yaml", FACTORY.replace("template: llama3", "template: NAME")),
    "unsloth": (
        "a.py",
        UNSLOTH.replace("LOAD", "False").replace(
            "trainer = ",
            "from unsloth.chat_templates import get_chat_template\n"
            'tokenizer = get_chat_template(tokenizer, chat_template="NAME", mapping={"role": "from"})\ntrainer = ',
        ),
    ),
    "unsloth by position": (
        "b.py",
        UNSLOTH.replace("LOAD", "False").replace(
            "trainer = ", 'tokenizer = get_chat_template(tokenizer, "NAME")\ntrainer = '
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", _BY_NAME)
def test_a_template_by_name_is_carried(tool: str, tmp_path) -> None:
    file, text = _BY_NAME[tool]
    for theirs in (
        "chatml",
        "llama3",
        "llama-3",
        "gemma",
        "gemma-3",
        "mistral",
        "zephyr",
        "a.jinja",
    ):
        (tmp_path / file).write_text(text.replace("NAME", theirs))
        result = translate(tmp_path / file)
        (tmp_path / "result.yaml").write_text(result.text)
        got = load(tmp_path / "result.yaml").config.data.chat_template
        assert got == TEMPLATES.get(theirs.replace("-", "_"), theirs)
        assert got in (*NAMED_TEMPLATES, "a.jinja")
    (tmp_path / file).write_text(text.replace("NAME", "vicuna"))
    result = translate(tmp_path / file)
    (outcome,) = (one for one in result.outcomes if one.source_key.value == "vicuna")
    assert outcome.fate == Fate.NOT_OFFERED
    assert "not vicuna" in outcome.note


def test_a_template_of_torchtune_and_of_a_files_text(tmp_path) -> None:
    tune = TUNE.replace("  max_seq_len: 4096\n", "  max_seq_len: 4096\n  prompt_template: NAME\n")
    for theirs, ours in (
        ("torchtune.models.mistral.MistralChatTemplate", "mistral"),
        ("torchtune.data.ChatMLTemplate", "chatml"),
        ("null", None),
    ):
        (tmp_path / "a.yaml").write_text(tune.replace("NAME", theirs))
        (tmp_path / "result.yaml").write_text(translate(tmp_path / "a.yaml").text)
        assert load(tmp_path / "result.yaml").config.data.chat_template == ours
    text = AXOLOTL + 'chat_template: jinja\nchat_template_jinja: "{{ messages[0] }}"\n'
    (tmp_path / "a.yml").write_text(text)
    result = translate(tmp_path / "a.yml")
    assert "chat_template" not in result.text.replace("chat_template_jinja", "")
    fates = {one.source_key.name: one.fate for one in result.outcomes}
    assert fates["chat_template_jinja"] == Fate.NOT_OFFERED


def test_a_template_beside_plain_text_is_left_out(tmp_path) -> None:
    for file, text in (
        ("a.yaml", FACTORY.replace("stage: sft", "stage: pt")),
        ("a.yml", AXOLOTL.replace("type: alpaca", "type: completion") + "chat_template: chatml\n"),
    ):
        (tmp_path / file).write_text(text)
        result = translate(tmp_path / file)
        (tmp_path / "result.yaml").write_text(result.text)
        assert load(tmp_path / "result.yaml").config.data.chat_template is None


def test_names_of_templates_are_those_of_the_run() -> None:
    assert set(TEMPLATES.values()) == set(NAMED_TEMPLATES) == set(transforms._TEMPLATE_ALIASES)


def test_an_upload_and_new_tokens_are_carried(tmp_path) -> None:
    text = (
        FACTORY
        + "push_to_hub: true\nhub_model_id: me/x\nhub_private_repo: false\nadd_special_tokens: <a>,<b>\n"
    )
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "result.yaml").write_text(translate(tmp_path / "a.yaml").text)
    config = load(tmp_path / "result.yaml").config
    assert (config.run.push_to_hub, config.run.push_private) == ("me/x", False)
    assert config.model.add_tokens == ["<a>", "<b>"]
    (tmp_path / "a.yaml").write_text(FACTORY + "push_to_hub: true\n")
    (tmp_path / "result.yaml").write_text(translate(tmp_path / "a.yaml").text)
    assert load(tmp_path / "result.yaml").config.run.push_to_hub == "sft"
    (tmp_path / "a.yaml").write_text(FACTORY + "hub_model_id: me/x\n")
    (tmp_path / "result.yaml").write_text(translate(tmp_path / "a.yaml").text)
    assert load(tmp_path / "result.yaml").config.run.push_to_hub is None
