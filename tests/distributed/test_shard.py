"""A model that two real processes share (gloo) against one process: losses, weights, observed
dtypes, fused ops in place, checkpoints.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.tasks.choose import train
from tests.api import refuse_two_dtypes, refuse_weights_of_another_unit
from tests.distributed.processes import run, succeeds
from tests.distributed.test_launchers import on_two_machines
from tests.models import save_with_tokenizer, tiny
from tests.published import FORMATS, write
from tests.results import close_runs, read, same_records, trained_tensors

pytestmark = pytest.mark.timeout(900)
FULL = {"adapter": {"kind": "none"}}
STEPS = {"steps": 4, "batch_size": 2, "accumulate": 4, "learning_rate": 1e-3, "eval_every": 2}
CASES: dict[str, tuple[dict, float, float]] = {
    "fp32 full mixture": (
        {
            "precision": {"preset": "fp32"},
            "run": {"sample_every": 2},
            "train": {"steps": 2},
            **FULL,
        },
        2e-6,
        2e-5,
    ),
    "fp32 lora": ({"precision": {"preset": "fp32"}}, 2e-6, 2e-5),
    "bf16-mixed full": ({"precision": {"preset": "bf16-mixed"}, **FULL}, 2e-5, 2e-3),
    "bf16-lora": ({"precision": {"preset": "bf16-lora"}}, 2e-5, 2e-3),
    "bf16-lora recomputed": (
        {"precision": {"preset": "bf16-lora"}, "train": {"gradient_checkpointing": "layers"}},
        2e-5,
        2e-3,
    ),
    "nf4-lora recomputed": (
        {"precision": {"preset": "nf4-lora"}, "train": {"gradient_checkpointing": "layers"}},
        2e-5,
        2e-3,
    ),
    "fp8 recomputed": (
        {
            "precision": {"preset": "bf16-lora", "base": "fp8"},
            "train": {"gradient_checkpointing": "layers"},
        },
        2e-5,
        2e-3,
    ),
    # sums in bf16 depend on how the micro-batches are divided over the processes
    "bf16-pure full": ({"precision": {"preset": "bf16-pure", "grads": "fp32"}, **FULL}, 2e-5, 2e-3),
    "bf16-pure full, bf16 sums": ({"precision": {"preset": "bf16-pure"}, **FULL}, 5e-3, 2e-2),
    "fp16-mixed full": ({"precision": {"preset": "fp16-mixed"}, **FULL}, 2e-5, 2e-3),
    "schedule-free full": (
        {
            "precision": {"preset": "fp32"},
            "train": {"optimizer": "schedule-free", "schedule": "constant"},
            **FULL,
        },
        2e-6,
        2e-5,
    ),
    "packed": ({"data": {"packing": True}}, 2e-6, 2e-5),
    "stream": ({"data": {"stream": True, "shuffle_buffer": 16}}, 2e-6, 2e-5),
    "early stopping": ({"train": {"patience": 1, "learning_rate": 1e-9}}, 2e-6, 2e-5),
    "accumulate not divided": ({"train": {"batch_size": 4, "accumulate": 1}}, 2e-6, 2e-5),
}


def test_trained_weights_of_two_dtypes_in_one_unit_are_refused():
    layer = tiny().model.layers[0]
    layer.input_layernorm.requires_grad_(False).bfloat16()
    # frozen ones may have another
    refuse_two_dtypes("model.layers.0", dict(layer.named_parameters()))
    layer.input_layernorm.requires_grad_(True)
    with pytest.raises(
        UsageError,
        match=r"model.layers.0 has trained weights of two dtypes, .* and input_layernorm.weight in bf16",
    ):
        refuse_two_dtypes("model.layers.0", dict(layer.named_parameters()))


def test_a_weight_that_two_layers_share_is_refused():
    first, second = tiny().model.layers
    second.mlp.up_proj = first.mlp.up_proj
    of_first = {id(p) for p in first.parameters()}
    with pytest.raises(
        UsageError, match=r"model.layers.1.mlp.up_proj.weight is a weight of another layer too"
    ):
        refuse_weights_of_another_unit("model.layers.1", second, of_first)
    refuse_weights_of_another_unit("model.layers.1", tiny().model.layers[1], of_first)


@pytest.mark.full
def test_bf16_weights_of_two_shards_are_those_of_one_process(configured, tmp_path):
    """The sums stay fp32 although FSDP narrows them, and rounding noise belongs to the element: the
    weights are equal bit for bit.
    """
    sections = {
        "precision": {"preset": "bf16-pure", "grads": "fp32"},
        "train": STEPS,
        **FULL,
    }
    assert train(configured("one", **sections)) == 0
    configured("two", **sections, parallel={"kind": "shard"})
    said = succeeds(2, tmp_path / "two.yaml")
    assert "gloo: shard (parallel.kind), each computes 2 x 2 rows of each step" in said
    close_runs(tmp_path / "one", tmp_path / "two", loss=2e-5, weight=0.0)
    same_records(tmp_path / "one", tmp_path / "two", sums="fp32")
    parts = [
        load_file(tmp_path / f"two/checkpoints/step_4/{name}")
        for name in ("tensors.safetensors", "tensors.1.safetensors")
    ]
    whole = trained_tensors(tmp_path / "two")["model.norm.weight"]
    assert [len(part["model.model.norm.weight"]) for part in parts] == [len(whole) / 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(
            case,
            kind,
            marks=[] if (case, kind) == ("fp32 full mixture", "shard") else pytest.mark.full,
        )
        for kind in ("shard", "replicate")
        for case in CASES
        if (case, kind) != ("bf16-pure full", "shard")  # a test of its own below
    ],
)
def test_two_processes_make_the_run_of_one(case, kind, configured, workshop, tmp_path):
    sections, loss, weight = CASES[case]
    sections = {**sections, "train": STEPS | sections.get("train", {})}
    if case.endswith("mixture"):
        base = save_with_tokenizer("qwen3_moe", workshop.base, tmp_path / "base")
        sections["model"] = {"name": str(base)}
    assert train(configured("one", **sections)) == 0
    configured("two", **sections, parallel={"kind": kind})
    succeeds(2, tmp_path / "two.yaml")
    close_runs(tmp_path / "one", tmp_path / "two", loss=loss, weight=weight)
    same_records(tmp_path / "one", tmp_path / "two", sums="fp32")
    if "run" in sections:
        assert read(tmp_path / "one", "samples/step_2") == read(tmp_path / "two", "samples/step_2")


@pytest.mark.slow
def test_a_packed_run_of_a_tied_model_begins_with_the_weights_that_the_preflight_found(
    configured, workshop, tmp_path
):
    """The trial of packing gathers the tied weight, which stays gathered after a forward without a
    backward.
    """
    base = tmp_path / "base"
    shutil.copytree(workshop.base, base)
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
    steps = {"steps": 2, "batch_size": 2, "accumulate": 1, "eval_every": 2}
    sections = {
        "model": {"name": str(base)},
        "data": {"packing": True},
        "precision": {"preset": "fp32"},
        "train": steps,
        **FULL,
    }
    configured("two", **sections, parallel={"kind": "shard"})
    succeeds(2, tmp_path / "two.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        (2, "shard", 1, "replicate"),
        pytest.param((2, "shard", 1, "replicate", 4, "shard"), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {"optimizer": "schedule-free", "schedule": "constant"}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
@pytest.mark.full
def test_a_run_goes_on_in_another_number_of_parts(path, more, configured, tmp_path):
    steps = STEPS | {"steps": 6} | more
    assert train(configured("whole", train=steps, **FULL)) == 0
    configured(
        "moved", train=steps, run={"save_every": 2, "keep": 9}, parallel={"kind": path[1]}, **FULL
    )
    folder = tmp_path / "moved"
    assert run(path[0], tmp_path / "moved.yaml")[0] == 0
    for number, (count, kind) in enumerate(zip(path[2::2], path[3::2], strict=True), 1):
        for step in range(2 * number + 2, 7, 2):
            shutil.rmtree(folder / f"checkpoints/step_{step}", ignore_errors=True)
        resolved = folder / "resolved.yaml"
        before = path[2 * number - 1]
        resolved.write_text(resolved.read_text().replace(f"kind: {before}", f"kind: {kind}", 1))
        succeeds(count, resume=folder) if count > 1 else (
            train(load(resolved, [], {}, resolved=True), resume=folder),
            "",
        )
    close_runs(tmp_path / "whole", folder, loss=2e-6, weight=2e-5)


@pytest.mark.slow
def test_the_same_number_of_shards_resumes_bit_for_bit_after_a_kill(configured, tmp_path):
    sections = {
        "train": {"steps": 2, "batch_size": 2, "eval_every": 2},
        "run": {"save_every": 1, "sample_every": 0, "samples": []},
        "adapter": {"dropout": 0.1},
        "parallel": {"kind": "shard"},
    }
    configured("whole", **sections)
    succeeds(2, tmp_path / "whole.yaml")
    configured("killed", **sections)
    status, said = run(2, tmp_path / "killed.yaml", fault=[1, 2, "die"])
    assert status == 1
    assert "rank 1 on " in said
    assert f"last good checkpoint: {tmp_path / 'killed/checkpoints/step_1'}" in said
    assert said.count("isotype: ") == 1
    succeeds(2, resume=tmp_path / "killed")
    for name in (
        "adapter/adapter_model.safetensors",
        "checkpoints/step_2/tensors.safetensors",
        "checkpoints/step_2/tensors.1.safetensors",
    ):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


@pytest.mark.parametrize(
    ("form", "kind"),
    [("fp8-block", "shard"), pytest.param("awq", "replicate", marks=pytest.mark.full)],
)
@pytest.mark.full
def test_a_published_base_is_that_of_one_process(form, kind, configured, workshop, tmp_path):
    """Packed layers on two processes, each with half of the rows."""
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    write(
        tiny(hidden_size=64, intermediate_size=80, vocab_size=len(tokenizer), **ids),
        tokenizer,
        tmp_path / "base",
        form,
    )
    steps = {"steps": 4, "batch_size": 1, "accumulate": 4, "learning_rate": 1e-3, "eval_every": 2}
    same = {
        "model": {"name": str(tmp_path / "base")},
        "precision": {"preset": "fp32", "base": FORMATS[form][0]},
        "train": steps,
    }
    assert train(configured("one", **same)) == 0
    configured("two", **same, parallel={"kind": kind})
    succeeds(2, tmp_path / "two.yaml")
    close_runs(tmp_path / "one", tmp_path / "two", loss=2e-6, weight=2e-5)


@pytest.mark.full
@pytest.mark.slow
def test_each_of_two_machines_has_the_model_and_two_processes_share_it(configured, tmp_path):
    """Imitated by two torchruns on one machine. Weights are bf16, whose fp32 sums FSDP narrows only
    after they crossed the machines.
    """
    sections = {
        "precision": {"preset": "bf16-pure", "grads": "fp32"},
        "train": STEPS,
        **FULL,
    }
    assert train(configured("one", **sections)) == 0
    configured("four", **sections, parallel={"kind": "hybrid"})
    statuses, said = on_two_machines(2, given={"config": str(tmp_path / "four.yaml")})
    assert statuses == [0, 0], said
    assert (
        "4 on 2 machines, started by torchrun, gloo: hybrid (parallel.kind), each computes 1 x 2 rows of each step"
        in said
    )
    close_runs(tmp_path / "one", tmp_path / "four", loss=2e-5, weight=2e-3)
    same_records(tmp_path / "one", tmp_path / "four", sums="fp32")
    assert sorted(
        path.name for path in (tmp_path / "four/checkpoints/step_4").glob("tensors*")
    ) == [
        "tensors.1.safetensors",
        "tensors.safetensors",
    ]
