"""Realistic configurations in the tools' documented styles give no finding at all above a note, and each is understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotype.doctor.check import check
from isotype.finding import Severity

CLEAN = sorted(p for p in (Path(__file__).parent / "fixtures" / "clean").iterdir() if p.is_dir())


@pytest.mark.parametrize("folder", CLEAN, ids=lambda p: p.name)
def test_no_false_alarm(folder: Path):
    checked = check([str(folder)])
    assert not [(f.code, f.message, str(f.place)) for f in checked.findings if f.severity > Severity.NOTE]
    if not folder.name.startswith("repository"):
        assert checked.records, "not recognised"
        assert all(
            record.value("compute") or record.value("trained")
            for record in checked.records
            if record.tool != "hf" or record.facts.has("hf")
        )


def test_an_unreadable_file_counts_only_if_it_is_about_training(tmp_path: Path):
    (tmp_path / "chart.yaml").write_text("a: {{ .Values.x }\n")
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}\n')
    assert [(f.code, f.place.line) for f in check([str(tmp_path)]).findings] == [("CF099", 2)]


def test_values_made_at_run_time_are_not_guessed(tmp_path: Path):
    (tmp_path / "t.py").write_text("from trl import SFTConfig\nargs = SFTConfig(output_dir='o', bf16=supported(), fp16=not supported())\n")
    assert not check([str(tmp_path)], device="t4").findings


def test_functions_of_one_file_are_programs_of_their_own(tmp_path):
    """A file of tests: what one loads is not what another trains, and alternatives in one function are no contradiction."""
    (tmp_path / "test_training.py").write_text(
        "def test_bf16():\n"
        "    model = AutoModelForCausalLM.from_pretrained('a/b', dtype=torch.bfloat16)\n"
        "    args = TrainingArguments('o', bf16=True)\n"
        "def test_fp16():\n"
        "    model = AutoModelForCausalLM.from_pretrained('a/b')\n"
        "    args = TrainingArguments('o', fp16=True)\n"
        "def test_quantised(bits):\n"
        "    if bits == 4:\n"
        "        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)\n"
        "    else:\n"
        "        config = BitsAndBytesConfig(load_in_8bit=True)\n"
        "    model = AutoModelForCausalLM.from_pretrained('a/b', quantization_config=config)\n"
        "    model = get_peft_model(model, LoraConfig(r=4))\n"
        "    args = TrainingArguments('o', fp16=True)\n"
    )
    assert [f.render() for f in check([str(tmp_path)]).findings if f.severity > Severity.NOTE] == []
