"""The ledger: counts that can be worked out by hand, savings that show, and every row of the peer with its place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from isotype.config.load import load
from isotype.environment.hardware import by_name
from isotype.environment.planned import planned_for
from isotype.errors import UsageError
from isotype.model.host_embedding import outlined_on_host
from isotype.ops.backend import using
from isotype.precision.precision import Precision
from isotype.tasks.language.outline import outline, step_outline
from isotype.training.ledger import unsloth
from isotype.training.ledger.record import Launches
from isotype.training.ledger.rows import Rates, Row, attention, grouped, product, step_seconds, waiting, work
from isotype.training.ledger.step import by_part, rates_of, recorded, shapes_of, step_ledger
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import Checkpointing

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
RATES = Rates(flops=1e15, bandwidth=4e12)


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
    assert row == replace(product("forward", "", 8, 32, 16, adds=True), name=row.name)


def test_views_and_memory_that_is_handed_out_are_no_launches():
    x, ids, table = of(8, 16), torch.zeros(4, dtype=torch.long, device="meta"), of(1000, 16)
    assert launched(lambda: (x.t(), x.view(4, 32), x[2:], x.expand(3, 8, 16), torch.empty_like(x), x.detach())) == []
    (row,) = launched(lambda: x.copy_(of(8, 16)))
    assert row.bytes == 2 * 2 * 8 * 16
    (row,) = launched(x.zero_)
    assert row.bytes == 2 * 8 * 16
    # the rows that are looked up, not the table
    (row,) = launched(lambda: torch.nn.functional.embedding(ids, table))
    assert row.bytes == 2 * 2 * 4 * 16 + 8 * 4
    # from host memory they come through the bus, while the launch waits
    (row,) = launched(lambda: torch.nn.functional.embedding(ids, outlined_on_host(table)))
    assert (row.kind, row.bytes) == ("host read", 2 * 4 * 16)
    assert work([row], RATES)["forward"] == row.bytes / (RATES.host * RATES.copy)


def test_causal_attention_computes_half_of_its_scores():
    row = attention("forward", "a", 2, 8, 2, 128, 64)
    assert row.flops == 2 * 2 * 8 * 128 * 128 * 64 * 2 / 2
    assert attention("backward", "a", 2, 8, 2, 128, 64).flops == 2.5 * row.flops


def test_time_is_the_larger_of_work_and_bytes():
    work = Row(phase="forward", name="x", kind="product", bytes=1.0, flops=8e14)
    assert RATES.seconds(work) == pytest.approx(1.0)
    moved = Row(phase="forward", name="x", kind="memory", bytes=4e12 * RATES.memory, count=3)
    assert RATES.seconds(moved) == pytest.approx(3.0)


def test_equal_rows_are_one_row_with_their_count():
    row = Row(phase="forward", name="x", kind="memory", bytes=1.0)
    assert grouped([row, replace(row, phase="backward"), replace(row, count=2)]) == [replace(row, count=3), replace(row, phase="backward")]


ALL = {"keep_attention": True, "keep_projections": True, "halves": True}


def planned(kind="layers", length=8192, keep=False, preset="nf4-lora", layers=2, family=None, embedding="device", **kept):
    if preset == "nf4-lora":
        pytest.importorskip("bitsandbytes")
    given = [f"precision.preset={preset}", "adapter.r=16", "train.batch_size=1", "train.accumulate=1", f"model.embedding={embedding}"]
    config = load(None, given).config
    precision, architecture = Precision.preset(preset), AutoConfig.for_model(**{**LLAMA, **(family or {}), "num_hidden_layers": layers})
    made = outline(architecture, config, precision, device_type="cuda")
    kept = {"keep_attention": keep, **kept}
    what = Checkpointing(kind, tuple(range(layers)), layers, "asked", **kept) if kind != "none" else Checkpointing(kind)
    largest = step_outline(config, precision, length=length, device_type="cuda")
    plan = plan_memory(made, config.train, precision, largest, checkpointing=what, device_type="cuda")
    assert plan.not_simulated is None
    return step_ledger(made, config.train, precision, by_name("h200"), largest, rank=16, checkpointing=what, memory=plan)


def parts(ledger, side="rows"):
    return by_part(getattr(ledger, side), ledger.rates)


def flops(rows, phase, kind="product", least=0):
    return sum(r.flops * r.count for r in rows if r.phase == phase and r.kind == kind and r.flops >= least)


def test_a_step_is_counted_as_by_hand_and_its_savings_show():
    # of more than one tile, backward makes gate and up again itself
    ledger = planned(length=2048)
    t, h, i, q, k = 2048, 512, 1792, 512, 128
    base = 2 * t * 2 * (h * q + 2 * h * k + q * h + 3 * h * i)  # two layers
    head = 2 * 2 * (t - 1) * h * 128256
    adapters = 2 * t * 2 * 16 * sum(a + b for a, b in [(h, q), (h, k), (h, k), (q, h), (h, i), (h, i), (i, h)])
    # gate's and up's adapters are columns of their products, each beside the other's zeros
    beside = 2 * t * 2 * 16 * 2 * i
    assert flops(ledger.rows, "forward") == pytest.approx(base + head + adapters + beside)
    # the recompute leaves down's base product out, and its adapter's second product
    down = 2 * 2 * t * i * h
    assert flops(ledger.rows, "recompute", least=2 * t * h * k) == pytest.approx(base - down + beside + 2 * t * 2 * 16 * 2 * i)
    assert flops(ledger.theirs, "recompute", least=2 * t * h * k) == pytest.approx(base)
    assert flops(ledger.theirs, "forward") == pytest.approx(base + head * t / (t - 1) + adapters)
    mine, theirs = parts(ledger), parts(ledger, "theirs")
    assert mine["recompute: base products"] < theirs["recompute: base products"]
    assert mine["backward: adapters"] < 0.7 * theirs["backward: adapters"]
    # one launch a weight instead of three
    widened = [r for r in ledger.rows if r.name.startswith("widen_4bit")]
    assert sum(r.count for r in widened) < sum(r.count for r in ledger.theirs if r.name.startswith("dequantise"))


def test_kept_attention_is_not_computed_again_and_nothing_kept_is_recomputed():
    again, kept, none = planned(), planned(keep=True), planned("none")
    assert flops(again.rows, "recompute", "attention") == flops(again.rows, "forward", "attention") > 0
    assert flops(kept.rows, "recompute", "attention") == 0
    assert not [r for r in none.rows if r.phase == "recompute"]
    assert none.peak > kept.peak > again.peak


def test_memory_of_tiles_and_of_host_memory_shows():
    offloaded = planned("layers+offload", keep=True, layers=4)
    assert offloaded.peak < planned("layers", keep=True, layers=4).peak


def test_an_embedding_in_host_memory_is_ours_alone_and_the_text_says_what_the_peer_would_have():
    device, host = (planned("none", 512, embedding=where) for where in ("device", "host"))
    assert device.peak - host.peak == pytest.approx(host.on_host, abs=64)
    assert host.on_host == 2 * 128256 * 512
    assert device.their_peak == host.their_peak
    assert "offload_embedding" in host.as_text()
    assert "offload_embedding" not in device.as_text()
    assert host.as_json()["unsloth"]["peak_with_its_embedding_on_the_host"] == host.their_peak - host.on_host
    more = step_seconds(host.rows, host.rates) - step_seconds(device.rows, device.rates)
    assert 0 < more < 2 * 512 * 512 / (RATES.host * RATES.copy)


def test_with_everything_kept_each_saving_is_counted_and_what_it_costs_too():
    ledger, less = planned("layers+offload", 2048, layers=4, **ALL), planned("layers+offload", 2048, keep=True, layers=4)
    t, h, i, q, k = 2048, 512, 1792, 512, 128
    # of the base products gate's and up's alone are left in the recompute, with their adapters' columns
    assert flops(ledger.rows, "recompute", least=2 * t * h * k) == pytest.approx(4 * 2 * 2 * t * (h + 32) * i)
    assert set(ledger.savings) == {
        "adapters inside the product or before it", "products of a recompute whose output nobody reads",
        "the residual's sum and gradient in the norm", "query, key and value kept", "the residual between attention and MLP kept",
        "attention's output kept",
    }  # fmt: skip
    assert all(saved > 0 for saved in ledger.savings.values())
    kept = ("query, key and value kept", "the residual between attention and MLP kept")
    seconds = [sum(work(one.rows, one.rates).values()) for one in (less, ledger)]
    assert seconds[0] - seconds[1] == pytest.approx(sum(ledger.savings[name] for name in kept))
    # bytes that wait in host memory: the layer's input, q, k, v, attention's output and logsumexp, the residual between
    out = sum(r.bytes * r.count for r in ledger.rows if r.kind == "copy" and r.phase == "forward")
    assert out == 4 * t * (2 * (h + q + 2 * k + q + h) + 4 * 4)
    theirs = sum(r.bytes * r.count for r in ledger.theirs if r.kind == "copy" and r.phase == "forward")
    assert theirs == 4 * t * 2 * h
    assert "copies to and from the host at 54 GB/s, ours: forward" in ledger.as_text()
    assert "query, key and value kept" in ledger.as_text()
    assert ledger.as_json()["savings"] == ledger.savings


@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "gemma2", "head_dim": 128, "query_pre_attn_scalar": 128, "hidden_activation": "gelu_pytorch_tanh"},
        {"model_type": "granite", "residual_multiplier": 0.22},
        {"model_type": "olmo2"},
    ],
    ids=lambda family: family["model_type"],
)
def test_halves_of_other_families_compute_less_again_on_a_gpu(family):
    kept, everything = (planned("layers", 2048, preset="bf16-lora", family=family, **more) for more in ({"keep": True}, ALL))
    assert flops(everything.rows, "recompute", "attention") == flops(kept.rows, "recompute", "attention") == 0
    # query, key and value of a layer; where norms of queries and keys read their products (OLMo 2), those are made again
    saved = flops(kept.rows, "recompute") - flops(everything.rows, "recompute")
    assert saved == 0 if family["model_type"] == "olmo2" else saved >= 2 * 2 * 2048 * 512 * (512 + 2 * 128)
    assert flops(everything.rows, "forward") == flops(kept.rows, "forward")


def test_copies_that_take_longer_than_the_work_beside_them_are_waited_for():
    rows = [
        Row(phase="forward", name="mm 1 x 1 x 1", kind="product", bytes=1.0, flops=8e14),
        Row(phase="forward", name="out", kind="copy", bytes=3 * RATES.host * RATES.copy),
        Row(phase="recompute", name="mm 1 x 1 x 1", kind="product", bytes=1.0, flops=4e14),
        Row(phase="backward", name="mm 1 x 1 x 1", kind="product", bytes=1.0, flops=4e14),
        Row(phase="backward", name="in", kind="copy", bytes=0.9 * RATES.host * RATES.copy),
    ]
    assert waiting(rows, RATES) == pytest.approx({"forward": 2.0, "backward": 0.0, "update": 0.0})
    assert step_seconds(rows, RATES) == pytest.approx(4.0)
    assert by_part(rows, RATES)["forward: waiting for copies"] == pytest.approx(2.0)


@pytest.mark.parametrize(("name", "host"), [("h200", 64e9), ("a100", 32e9), ("mi300x", 64e9)])
def test_the_host_is_as_far_as_the_devices_bus(name, host):
    assert rates_of(by_name(name)).host == host


def test_every_row_of_the_peer_names_its_source_and_is_marked_as_not_measured():
    ledger = planned("none", 512)
    assert all(row.source and (":" in row.source or "torch.optim" in row.source) for row in ledger.theirs)
    made = ledger.as_json()
    assert made["measured"] is False
    assert json.loads(json.dumps(made))["unsloth"]["seconds"] == ledger.seconds(ledger.theirs)
    text = ledger.as_text()
    assert "times are unmeasured" in text
    assert "unsloth/kernels/fast_lora.py:507" in text
    assert "Unsloth 2026.10.9" in text
    assert "the step" in text


def test_tiles_of_the_peers_loss_follow_its_source():
    shapes = shapes_of(AutoConfig.for_model(**LLAMA), rows=1, length=4096, rank=16, nf4=True)
    tiles = unsloth.LossTiles.of
    # 256 MiB of fp32 logits: 4,096 rows and eight tiles of the vocabulary, the last narrower
    assert tiles(shapes) == tiles(replace(shapes, length=16384)) == unsloth.LossTiles(rows=4096, columns=16384)
    assert sum(row.name == "head: logits in fp32" for row in unsloth.head(shapes)) == 8
    # fewer tokens or a smaller vocabulary: rows of all words, 512 x 151,936 logits at least
    assert tiles(replace(shapes, length=2048)) == unsloth.LossTiles(rows=512, columns=128256)
    assert tiles(replace(shapes, vocabulary=32000)) == unsloth.LossTiles(rows=2048, columns=32000)
    assert tiles(replace(shapes, length=256)) == unsloth.LossTiles(rows=256, columns=128256)


def test_every_tile_of_the_peers_loss_multiplies_the_whole_vocabulary_once():
    for length in (300, 4096, 6000):
        shapes = shapes_of(AutoConfig.for_model(**LLAMA), rows=1, length=length, rank=16, nf4=True)
        assert flops(unsloth.head(shapes), "forward") == 2 * 2 * length * shapes.hidden * shapes.vocabulary


def test_a_device_without_published_figures_is_refused_and_full_fine_tuning_has_no_peer():
    with pytest.raises(UsageError, match="no published"):
        rates_of(by_name("sm_90"))
    config = load(None, ["precision.preset=bf16-mixed", "adapter.kind=none", "train.batch_size=1", "train.accumulate=2"]).config
    precision, architecture = Precision.preset("bf16-mixed"), AutoConfig.for_model(**{**LLAMA, "vocab_size": 1000})
    made = outline(architecture, config, precision, device_type="cuda")
    largest = step_outline(config, precision, length=128, device_type="cuda")
    rows = recorded(made, config.train, precision, largest, checkpointing=Checkpointing("none"))
    # each trained tensor once
    assert sum(r.count for r in rows if r.phase == "update" and r.name.startswith("adamw_")) == len(list(made.model.parameters()))
