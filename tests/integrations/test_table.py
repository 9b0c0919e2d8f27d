"""The tables of docs/trainers.md are those that benchmarks/dropin.py makes of its results, and the
results hold what the page promises.
"""

import json

import pytest
from benchmarks import attach_peers, dropin
from packaging.version import Version

from tests.api import TESTED_VERSIONS

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def results():
    return json.loads(dropin.RESULTS.read_text())


@pytest.fixture(scope="module")
def cells(results):
    return results["curves"]


def test_the_page_has_the_tables_of_the_results(results, cells):
    page = dropin.PAGE.read_text(encoding="utf-8")

    def between(begin, end):
        return page.split(begin)[1].split(end)[0].strip()

    assert between(*dropin.MARKS) == dropin.table(cells)
    assert between(*dropin.SPEED_MARKS) == dropin.speed_table(results["speed"])
    assert between(*dropin.LINE_MARKS) == dropin.line_table(results["line"])
    for one in results["line"]:
        assert one["attached"]["peak_mib"] <= 1.1 * one["unwatched"]["peak_mib"]
    assert f"{results['overhead'][0]['own']:.1%}" in page


def test_versions_of_other_tools_are_accepted_and_gave_the_plain_losses():
    results = json.loads(attach_peers.RESULTS.read_text())
    page = attach_peers.PAGE.read_text(encoding="utf-8")
    assert set(results) == {peer.name for peer in attach_peers.PEERS}
    table = page.split(attach_peers.MARKS[0])[1].split(attach_peers.MARKS[1])[0].strip()
    assert table == attach_peers.format_table(results)
    for package, (minimum, limit) in TESTED_VERSIONS.items():
        for peer in attach_peers.PEERS:
            assert Version(minimum) <= Version(peer.pins[package]) < Version(limit)
            assert peer.pins[package] == results[peer.name]["versions"][package]
    rows = [row for result in results.values() for row in result["trainers"]]
    compared = [row for row in rows if "error" not in row]
    assert all(row["error"].startswith("without attach") for row in rows if "error" in row)
    assert all(row["difference"] <= 1e-5 and not row["left"] for row in compared)
    assert all(row["difference_bf16"] <= 0.02 for row in compared)


def test_every_trainer_was_tried_in_every_form_and_none_failed(cells):
    from tests.integrations.trainers import TRAINERS

    assert {(c["trainer"], c["form"], c["checkpointing"]) for c in cells} == {
        (name, form, checkpointing)
        for name in TRAINERS
        for form in dropin.FORMS
        for checkpointing in (False, True)
    }
    assert [c for c in cells if "failed" in c] == []
    assert all(c["loss"] <= 1e-5 for c in cells if c.get("precision") == "fp32")
    assert all(c["loss"] <= 2e-3 for c in cells if c.get("precision") == "nf4-lora")


# one cell a trainer; those in test_attach.py are not repeated
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("CPO", "qlora"), ("GKD", "full"),
        *(pytest.param(*cell, marks=pytest.mark.full) for cell in (
            ("KTO", "lora"), ("Distillation", "lora"),
            ("ORPO", "lora"), ("Seq2SeqTrainer", "lora"), ("RLOO", "full"), ("Reward", "lora"), ("OnlineDPO", "lora"),
        )),
    ],
)  # fmt: skip
def test_a_slice_of_the_table_is_as_its_results_say(name, form, tmp_path):
    cell = dropin.one_cell(name, form, False, tmp_path)
    assert cell["steps"] == 3
    assert cell["loss"] <= (2e-3 if form == "qlora" else 1e-5)
    assert cell["places"] >= 13
    if name in ("Distillation", "GKD"):
        assert cell["heads"] == ["linear_divergence"]


@pytest.mark.parametrize(
    "name",
    [
        "SFT",
        pytest.param("DPO", marks=pytest.mark.full),
        pytest.param("GRPO", marks=pytest.mark.full),
    ],
)
def test_bf16_losses_and_gradients_are_no_farther_from_fp64_than_the_unmodified_trainers(
    name, tmp_path
):
    """Of a checkpoint in bf16: of one in fp32 the unmodified trainer keeps an fp32 residual stream,
    and Isotype's is in compute.
    """
    found = dropin.bf16_errors(name, tmp_path)
    assert found["gradient"]["attached"] <= 1.1 * found["gradient"]["unmodified"]
    assert found["loss"]["attached"] <= 1.1 * found["loss"]["unmodified"]
