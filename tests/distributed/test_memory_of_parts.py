"""The memory of the processes that share a model, while they read it and while they train it."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.processes import ended, start

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
MOST = 1.3  # times the model as the run holds it


@pytest.fixture(scope="module")
def large(workshop):
    """A Llama of 52 million parameters, saved in bf16: 104 MB."""
    folder = workshop.folder / "large"
    shutil.copytree(workshop.base, folder)
    config = AutoConfig.from_pretrained(folder)
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    for name, value in (sizes | {"head_dim": 128}).items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder, sum(p.numel() for p in model.parameters())


def measured(what, processes, folder):
    files = [str(folder / name) for name in ("run.yaml", "result.json", "tiny.yaml")]
    status, said = ended(
        start(
            processes,
            "-m",
            "tests.distributed.measured",
            what,
            *files[: 3 if what == "loading" else 2],
        )
    )
    assert status == 0, said
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "adapter", "processes", "bytes_a_weight"), [
    ("bf16-mixed", "none", 3, 4.0),  # the files' bf16 becomes fp32
    ("bf16-lora", "lora", 2, 2.0),  # the files' own dtype
])  # fmt: skip
def test_a_machine_never_holds_much_more_than_the_model(
    preset, adapter, processes, bytes_a_weight, large, configured, tmp_path
):
    base, elements = large
    settings = {
        "precision": {"preset": preset},
        "adapter": {"kind": adapter},
        "parallel": {"kind": "shard"},
    }
    settings["train"] = {"batch_size": 6, "accumulate": 1}
    configured("tiny", **settings)
    configured("run", model={"name": str(base)}, **settings)
    found = measured("loading", processes, tmp_path)
    # processes of a machine read one after the other, each beside the parts of those before
    most = max(sum(end for _, end in found[:rank]) + peak for rank, (peak, _) in enumerate(found))
    model = elements * bytes_a_weight
    print(
        preset,
        {
            "most": most / model,
            "a process": [[round(number / model, 3) for number in one] for one in found],
        },
    )
    assert most <= MOST * model
    assert min(end for _, end in found) >= 0.8 * model / processes  # it was measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "preset", "adapter", "recompute"),
    [
        (1, "bf16-lora", "lora", "none"),
        (2, "bf16-mixed", "none", "layers"),
        (2, "bf16-lora", "lora", "none"),
    ],
)
def test_the_planned_memory_of_a_process_is_the_measured_one(
    processes, preset, adapter, recompute, large, configured, tmp_path
):
    settings = {
        "precision": {"preset": preset},
        "adapter": {"kind": adapter},
        "parallel": {"kind": "shard"},
    }
    settings["train"] = {"batch_size": 2, "accumulate": 2, "gradient_checkpointing": recompute}
    configured("run", model={"name": str(large[0])}, **settings)
    found = measured("steps", processes, tmp_path)
    print(
        preset,
        {name: value >> 20 for name, value in found["planned"].items() if value},
        [value >> 20 for value in found["measured"]],
    )
    for taken in found["measured"]:
        assert found["planned"]["peak"] == pytest.approx(taken, rel=0.15)
