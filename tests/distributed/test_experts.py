"""Mixtures of experts on two real processes (gloo), which replicate or share the model, against one
process.
"""

import pytest
from transformers import AutoTokenizer

from isotype.tasks.choose import train
from tests.distributed.processes import run, succeeds
from tests.models import MIXTURES, save_with_tokenizer, tiny
from tests.published import write_experts
from tests.results import close_runs, same_records

pytestmark = pytest.mark.timeout(900)
STEPS = {"steps": 4, "batch_size": 1, "accumulate": 4, "learning_rate": 1e-3, "eval_every": 2}
FULL = {"adapter": {"kind": "none"}}
CASES = {
    "fp32 lora": ({"precision": {"preset": "fp32"}}, 2e-6, 2e-5),
    "fp32 lora balanced": (
        {"precision": {"preset": "fp32"}, "train": {"aux_loss": 0.5}},
        2e-6,
        2e-5,
    ),
    "fp32 full": ({"precision": {"preset": "fp32"}, **FULL}, 2e-6, 2e-5),
    "bf16-lora recomputed": (
        {"precision": {"preset": "bf16-lora"}, "train": {"gradient_checkpointing": "layers"}},
        2e-5,
        2e-3,
    ),
    "bf16-mixed full": ({"precision": {"preset": "bf16-mixed"}, **FULL}, 2e-5, 2e-3),
}


@pytest.fixture
def mixture(workshop, configured, tmp_path):
    """`mixture(family, folder, ...)`: the configuration of a run on a tiny mixture of which every
    pass leaves experts without a row.
    """

    def make(family, folder, **sections):
        # a pass has one row of at most 64 tokens, and 24 experts that fit none
        changes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 80) | {
            "num_experts_per_tok": 1
        }
        base = save_with_tokenizer(family, workshop.base, tmp_path / family, **changes)
        sections["train"] = STEPS | sections.get("train", {})
        return configured(folder, **{**sections, "model": {"name": str(base)}})

    return make


def cases():
    """All but those of the family without a balancing loss."""
    for case in CASES:
        for kind in ("shard", "replicate"):
            for family in MIXTURES:
                if not (case == "fp32 lora balanced" and family == "deepseek_v3"):
                    yield case, kind, family


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind", "family"), cases())
def test_two_processes_make_the_run_of_one(case, kind, family, mixture, tmp_path):
    sections, loss, weight = CASES[case]
    assert train(mixture(family, "one", **sections)) == 0
    mixture(family, "two", **sections, parallel={"kind": kind})
    succeeds(2, tmp_path / "two.yaml")
    close_runs(tmp_path / "one", tmp_path / "two", loss=loss, weight=weight)
    same_records(tmp_path / "one", tmp_path / "two", sums="fp32")


PACKED = {
    "gpt_oss": ("mxfp4", {"num_local_experts": 4}),
    "deepseek_v3": ("fp8-block", {"moe_intermediate_size": 48}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "killed"),
    [
        pytest.param("gpt_oss", "shard", False, marks=pytest.mark.full),
        *(
            pytest.param(*case, True, marks=pytest.mark.full)
            for case in (("gpt_oss", "shard"), ("gpt_oss", "replicate"), ("deepseek_v3", "shard"))
        ),
    ],
)
def test_adapters_on_packed_experts_are_those_of_one_process(
    family, kind, killed, configured, workshop, tmp_path
):
    tokenizer, (form, sizes) = AutoTokenizer.from_pretrained(workshop.base), PACKED[family]
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
        **ids,
        **sizes,
    }
    base = tmp_path / family
    write_experts(tiny(family, **sizes), base, form, layers=form != "mxfp4")
    tokenizer.save_pretrained(base)
    sections = {
        "model": {"name": str(base)}, "precision": {"preset": "auto"}, "run": {"save_every": 2},
        "train": STEPS | {"gradient_checkpointing": "layers"},
    }  # fmt: skip
    assert train(configured("one", **sections)) == 0
    configured("two", **sections, parallel={"kind": kind})
    succeeds(2, tmp_path / "two.yaml")
    close_runs(tmp_path / "one", tmp_path / "two", loss=2e-5, weight=2e-3)
    same_records(tmp_path / "one", tmp_path / "two", sums="fp32")
    if killed:
        configured("killed", **sections, parallel={"kind": kind})
        assert run(2, tmp_path / "killed.yaml", fault=[1, 4, "die"])[0] == 1
        succeeds(2, resume=tmp_path / "killed")
        adapter = "adapter/adapter_model.safetensors"
        assert (tmp_path / "killed" / adapter).read_bytes() == (
            tmp_path / "two" / adapter
        ).read_bytes()
