"""Each known contradiction is found, at a line, and its repair is quiet."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from isotype.finding import Finding, Severity
from tests.api import check_check as check

from .contradictions import CASES, Case


def run(folder: Path, files: dict[str, str], case: Case) -> list[Finding]:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return check([str(folder)], device=case.device).findings


@pytest.mark.parametrize("code", sorted({case.code for case in CASES.values()}))
def test_found_and_quiet_when_repaired(code: str, tmp_path: Path):
    for name, case in CASES.items():
        if case.code == code:
            found_and_quiet(name, case, tmp_path / name.replace("/", " "))


def found_and_quiet(name: str, case: Case, folder: Path) -> None:
    bad, good = run(folder / "bad", case.bad, case), run(folder / "good", case.good, case)
    found = [f for f in bad if f.code == case.code]
    assert found, (name, [(f.code, f.message) for f in bad])
    assert all((f.severity == Severity.NOTE) == case.note for f in found), name
    assert found[0].cause, name
    assert found[0].fix, name
    assert found[0].place.file is None or os.path.basename(found[0].place.file) in case.bad, name
    repaired = [f for f in good if f.severity > Severity.NOTE or f.code == case.code]
    assert not repaired, (name, [(f.code, f.severity, f.message) for f in repaired])


def test_backward_and_steps_inside_an_autocast_region(tmp_path: Path):
    folder = Path(__file__).parent / "fixtures/autocast"
    found = [f for f in check([str(folder / "bad.py")]).findings if f.code == "CF018"]
    rows = {f"{f.place.line} {f.severity} {f.place.symbol}: {f.message}" for f in found}
    assert rows == set((folder / "expected.txt").read_text().splitlines())
    assert not check([str(folder / "good.py")]).findings
    (tmp_path / "test_step.py").write_text((folder / "bad.py").read_text())
    assert not check([str(tmp_path)]).findings


def test_a_run_of_isotype_is_its_plans(tmp_path: Path):
    told = {
        "template": "chatml",
        "stage": "sft",
        "fp16": True,
        "bf16": True,
        "finetuning_type": "lora",
    }
    for name in ("data.json", "plan.json", "manifest.json", "env.json", "resolved.yaml"):
        (tmp_path / name).write_text(json.dumps(told))
    assert not check([str(tmp_path)]).findings
    (tmp_path / "env.json").unlink()
    assert any(f.severity > Severity.NOTE for f in check([str(tmp_path)]).findings)
    (tmp_path / "run.yaml").write_text("model:\n  name: m\ntrain:\n  batch_size: four\n")
    (own,) = check([str(tmp_path / "run.yaml")]).findings
    assert (own.severity, own.fix) == (Severity.NOTE, f"isotype plan {own.place.file}")


def test_a_checkpoint_that_disagrees_with_its_config(tmp_path: Path):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(4)
    )
    config = tmp_path / "config.json"
    for word, codes in (("float16", {"CF046"}), ("bfloat16", set())):
        config.write_text(
            json.dumps(
                {
                    "architectures": ["A"],
                    "hidden_size": 8,
                    "model_type": "llama",
                    "torch_dtype": word,
                }
            )
        )
        assert {f.code for f in check([str(tmp_path)]).findings} == codes


def test_a_safetensors_header(tmp_path: Path):
    tensors = {"a": ("BF16", [2, 3], [0, 12]), "b": ("F32", [4], [12, 28])}
    described = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": at}
        for name, (dtype, shape, at) in tensors.items()
    }
    header = json.dumps({"__metadata__": {}} | described).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(28))
    (tmp_path / "args.json").write_text('{"output_dir": "o", "fp16": true, "logging_steps": 1}')
    assert "CF003" in {f.code for f in check([str(tmp_path)]).findings}
    file.write_bytes(b"12")
    assert [f.code for f in check([str(file)]).findings] == ["CF099"]


FULL = {
    "output_dir": "o",
    "bf16": True,
    "learning_rate": 1e-5,
    "model_init_kwargs": {"dtype": "bfloat16"},
    "fsdp": "full_shard",
}


def test_accelerate_makes_trained_weights_fp32_under_fsdp_and_mixed_precision(tmp_path: Path):
    """prepare_model of accelerate 1.10 to 1.15, FSDP1 and FSDP2: without mixed precision, or
    without FSDP, the weights stay bf16.
    """
    without_fsdp = {key: value for key, value in FULL.items() if key != "fsdp"}
    rows = (
        (FULL | {"fsdp_config": {"version": 2}}, "fp32"),
        (FULL, "fp32"),
        (FULL | {"bf16": False}, "bf16"),
        (without_fsdp, "bf16"),
    )
    for settings, trained in rows:
        (tmp_path / "training_args.json").write_text(json.dumps(settings))
        checked = check([str(tmp_path)])
        assert [r.value("trained") for r in checked.records] == [trained]
        assert ("CF004" in {f.code for f in checked.findings}) == (trained == "bf16")
