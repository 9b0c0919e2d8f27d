"""The preflight as a whole: it leaves nothing behind, raises no false alarm, and refuses with a
record.
"""

import json
import re

import pytest
from tests.api import CODES, PHASES, Outcome, parse_skips, preflight
from tests.api import check_CHECKS as CHECKS
from tests.api import checks_CHECKS as LANGUAGE_CHECKS
from tests.commands import ask, invoke
from tests.models import FAMILIES, SIZES
from tests.results import same_result

from isotype import pages
from isotype.errors import PreflightError, UsageError
from isotype.tasks.choose import train
from isotype.training import run

WIDER: dict[str, dict] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
TINY_RATE = {
    "precision": {"preset": "bf16-pure", "rounding": "nearest"},
    "adapter": {"kind": "none"},
    "train": {"learning_rate": 1e-7},
}

OF_TRAINERS = {"PF023", "PF024"}  # checks of trainers to which Isotype is attached


@pytest.mark.parametrize(
    "settings",
    [
        {
            "precision": {"preset": "bf16-lora"},
            "train": {"optimizer": "adamw8bit", "steps": 3},
            "adapter": {"r": 64, "dropout": 0.1},
        },
        pytest.param(
            {"precision": {"preset": "fp16-mixed"}, "adapter": {"kind": "none"}},
            marks=pytest.mark.full,
        ),
    ],
    ids=["adamw8bit-dropout", "fp16-mixed"],
)
def test_a_run_with_preflight_is_bit_identical_to_one_without(
    configured, tmp_path, monkeypatch, settings
):
    assert train(configured("with", **settings)) == 0
    monkeypatch.setattr(run, "preflight", lambda subject, skips, *, world: Outcome())
    assert train(configured("without", **settings)) == 0
    assert not (tmp_path / "without/preflight.json").exists()
    same_result(tmp_path / "with", tmp_path / "without")


@pytest.mark.parametrize(
    ("preset", "adapter"),
    [
        ("bf16-mixed", "lora"),
        ("bf16-pure", "none"),
        ("nf4-lora", "modules_to_save"),
        ("fp16-mixed", "none"),
    ],
)
def test_right_runs_get_no_finding_of_any_check(subject, preset, adapter):
    sections = {
        "none": {"kind": "none"},
        "lora": {},
        "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
    }[adapter]
    outcome = preflight(subject(precision={"preset": preset}, adapter=sections), {})
    assert outcome.findings == []
    assert set(outcome.checked_codes) == set(CODES) - OF_TRAINERS


@pytest.mark.full
@pytest.mark.parametrize("preset", ["fp32", "bf16-pure", "fp16-mixed"])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "mixtral", "qwen3_moe"])
def test_no_false_alarm_in_any_family(subject, workshop, family, preset):
    sizes = {k: v for k, v in SIZES.items() if k != "vocab_size" and not k.endswith("_id")}
    settings = {"model_type": family, **sizes, **FAMILIES.get(family, {}), **WIDER.get(family, {})}
    # softcapped scores and sinks: eager is all that they have
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    model = {
        "init": "random",
        "name": None,
        "config": settings,
        "tokenizer": str(workshop.base),
        "attention": attention,
    }
    assert (
        preflight(
            subject(model=model, adapter={"kind": "none"}, precision={"preset": preset}), {}
        ).findings
        == []
    )


def test_every_code_is_a_check_with_a_page():
    every = [
        check
        for group in (CHECKS, LANGUAGE_CHECKS)
        for checks in group.values()
        for check in checks
    ]
    assert {code for check in every for code in check.codes} == set(CODES) - OF_TRAINERS
    assert {*CHECKS, *LANGUAGE_CHECKS} <= set(PHASES)
    for code in CODES:
        text = pages.page(code)
        assert text is not None, code
        assert text.startswith(f"# {code}: ")
        for part in ("**Why it matters.**", "**Example.**", "**What to do.**"):
            assert part in text, (code, part)


def test_a_refused_run_is_exit_3_leaves_its_record_and_can_be_given_again(configured, tmp_path):
    configured(**TINY_RATE)
    refused = invoke("train", tmp_path / "run.yaml", "--json")
    assert isinstance(refused.exception, PreflightError)
    assert re.search(r"PF003(.|\n)*--skip PF003", str(refused.exception))
    assert refused.exception.exit_status == 3
    assert json.loads(refused.stdout)["preflight"]["findings"][0]["code"] == "PF003"
    record = json.loads((tmp_path / "run/preflight.json").read_text())
    assert record["refused"] is True
    assert record["findings"][0]["code"] == "PF003"
    assert set(record["seconds"]) == {"static"}
    assert not (tmp_path / "run/resolved.yaml").exists()
    ask("train", tmp_path / "run.yaml", "--skip", "PF003=a test")
    record = json.loads((tmp_path / "run/preflight.json").read_text())
    assert record["skipped"] == [{"code": "PF003", "check": CODES["PF003"], "reason": "a test"}]
    assert "PF003" not in record["checks"]


def test_a_resumed_run_repeats_the_static_checks_and_keeps_its_skips(configured, tmp_path):
    sections = TINY_RATE | {"train": TINY_RATE["train"] | {"schedule": "constant"}}
    assert train(configured(**sections), skips={"PF003": "a test"}) == 0
    longer = sections | {"train": sections["train"] | {"steps": 8}}
    assert train(configured(**longer), resume=tmp_path / "run") == 0
    record = json.loads((tmp_path / "run/preflight.json").read_text())
    assert set(record["seconds"]) == {"static", "data", "memory", "real"}
    assert [set(again["seconds"]) for again in record["resumed"]] == [{"static"}]


# --- `--skip` wants a known code and a reason.


def test_anything_else_is_a_usage_error(subtests):
    for given, said in (
        (["PF004"], "a reason is needed"),
        (["PF004= "], "a reason is needed"),
        (["PF04=x"], "did you mean PF0"),
        (["nonsense=x"], "one of: PF001"),
        (["PF004=x", "PF004=y"], "given twice"),
        (["PF008=x"], "cannot be skipped"),
    ):
        with subtests.test(given), pytest.raises(UsageError, match=said):
            parse_skips(given)
