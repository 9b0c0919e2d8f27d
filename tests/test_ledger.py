"""benchmarks/ledger.py: counts that can be worked out by hand, and every row of the peer with its place."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from isotype.config.load import load
from isotype.environment.hardware import by_name
from isotype.environment.planned import planned_for
from isotype.errors import UsageError
from isotype.ops.backend import using
from isotype.precision.precision import Precision
from isotype.tasks.language.outline import outline, step_outline
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import Checkpointing

pytestmark = pytest.mark.full

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the script's own folder, as when it is run
ledger_script, rows = importlib.import_module("ledger"), importlib.import_module("ledger_rows")
Launches, Rates, Row = rows.Launches, rows.Rates, rows.Row

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(run):
    with planned_for("cuda"), using("cpp"), Launches() as launches:
        run()
    return launches.rows


def test_a_product_reads_its_operands_writes_its_result_and_multiplies():
    (row,) = launched(lambda: of(8, 16) @ of(16, 32))
    assert (row.kind, row.flops, row.bytes) == ("product", 2 * 8 * 16 * 32, 2 * (8 * 16 + 16 * 32 + 8 * 32))
    y = of(8, 32)
    (row,) = launched(lambda: y.addmm_(of(8, 16), of(16, 32)))
    assert row.bytes == 2 * (8 * 16 + 16 * 32 + 2 * 8 * 32)
    assert row == replace(rows.product("forward", "", 8, 32, 16, adds=True), name=row.name)


def planned():
    config = load(None, ["precision.preset=bf16-lora", "adapter.r=16", "train.batch_size=1", "train.accumulate=1"]).config
    precision, architecture, none = Precision.preset("bf16-lora"), AutoConfig.for_model(**LLAMA), Checkpointing("none")
    made = outline(architecture, config, precision, device_type="cuda")
    largest = step_outline(config, precision, length=512, device_type="cuda")
    plan = plan_memory(made, config.train, precision, largest, checkpointing=none, device_type="cuda")
    return ledger_script.step_ledger(made, config.train, precision, by_name("h200"), largest, rank=16, checkpointing=none, memory=plan)


def test_every_row_of_the_peer_names_its_source_and_is_marked_as_not_measured():
    ledger = planned()
    assert all(row.source and (":" in row.source or "torch.optim" in row.source) for row in ledger.theirs)
    made = ledger.as_json()
    assert made["measured"] is False
    assert json.loads(json.dumps(made))["unsloth"]["seconds"] == ledger.seconds(ledger.theirs)
    text = ledger.as_text()
    assert "times are unmeasured" in text
    assert "unsloth/kernels/fast_lora.py:507" in text
    assert "Unsloth 2026.10.9" in text
    assert "the step" in text


def test_a_device_without_published_figures_is_refused_and_full_fine_tuning_has_no_peer():
    with pytest.raises(UsageError, match="no published"):
        ledger_script.rates_of(by_name("sm_90"))
    config = load(None, ["precision.preset=bf16-mixed", "adapter.kind=none", "train.batch_size=1", "train.accumulate=2"]).config
    precision, architecture = Precision.preset("bf16-mixed"), AutoConfig.for_model(**{**LLAMA, "vocab_size": 1000})
    made = outline(architecture, config, precision, device_type="cuda")
    largest = step_outline(config, precision, length=128, device_type="cuda")
    made_rows = ledger_script.recorded(made, config.train, precision, largest, checkpointing=Checkpointing("none"))
    # one launch of PyTorch's fused AdamW: weight, gradient and both moments of every element, three of them written too, in fp32
    (update,) = [r for r in made_rows if r.phase == "update"]
    assert (update.count, update.bytes) == (1, 7 * 4 * sum(p.numel() for p in made.model.parameters()))
