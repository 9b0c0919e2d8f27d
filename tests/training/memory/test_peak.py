"""Peaks of real processes: what a process counts as its own, what an update and a norm allocate, and
the plan of each preset beside the peak of its run.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.api import (
    AdamwHyperparameters,
    adamw_,
    gradient_norm,
    overhead_memory,
    release_mapped_pages,
    setup,
)

from isotype.ops.cpp import cpu_compiler
from isotype.tasks.choose import train

MIB = 1 << 20
STATUS = Path("/proc/self/status")
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's /proc")


def peak_of(function):
    """The bytes by which a call raises the highest resident size of this process."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    function()
    return resident("VmHWM") - before


def resident(field):
    return int(STATUS.read_text().partition(field + ":")[2].split()[0]) * 1024


def test_norm_of_bf16_gradients_makes_no_fp32_copy():
    gradient = torch.ones(32 * MIB, dtype=torch.bfloat16)
    gradient_norm([gradient[:10]])
    norms = []
    assert peak_of(lambda: norms.append(gradient_norm([gradient]))) < 32 * MIB
    assert float(norms[0]) == pytest.approx((32 * MIB) ** 0.5)


@pytest.mark.skipif(cpu_compiler() is None, reason="needs a C++ compiler")
def test_update_of_bf16_weights_allocates_nothing():
    tensors = [torch.ones(32 * MIB, dtype=torch.bfloat16) for _ in range(4)]
    h = AdamwHyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)
    adamw_(*(t[:100] for t in tensors), h, seed=1)
    assert peak_of(lambda: adamw_(*tensors, h, seed=1)) < 16 * MIB


def test_the_overhead_is_measured_before_weights_are_mapped_from_a_file():
    """A mapped weight takes no memory until it is read. Subtracting it from the present size would
    leave too little for libraries.
    """
    assert overhead_memory(0) == 0
    assert overhead_memory(400 * MIB) > 400 * MIB


def mapped_and_read(path):
    """The bytes of a file of 32 MiB, mapped privately and read once."""
    path.write_bytes(bytes(range(256)) * (32 * MIB // 256))
    mapped = torch.from_file(str(path), shared=False, size=32 * MIB, dtype=torch.uint8)
    assert int(mapped[:256].max()) == 255
    mapped.sum()
    return mapped


def test_mapped_pages_are_released_and_read_again(tmp_path):
    mapped = mapped_and_read(tmp_path / "weights.safetensors")
    before = resident("RssFile")
    assert release_mapped_pages() >= 32 * MIB
    assert before - resident("RssFile") > 24 * MIB
    assert torch.equal(mapped[-256:], torch.arange(256, dtype=torch.uint8))


def test_a_written_mapping_is_not_released(tmp_path):
    mapped = mapped_and_read(tmp_path / "weights.safetensors")
    mapped[5] = 77
    release_mapped_pages()
    assert int(mapped[5]) == 77


def test_a_mapping_whose_written_pages_are_swapped_out_is_not_released(tmp_path, monkeypatch):
    mapped = mapped_and_read(tmp_path / "weights.safetensors")
    mapped[5] = 77
    text = Path("/proc/self/smaps").read_text()
    start = text.index(str(tmp_path / "weights.safetensors"))
    swapped = re.sub(r"Anonymous: +\d+ kB", "Anonymous: 0 kB", text[start:], count=1)
    swapped = re.sub(r"Swap: +\d+ kB", "Swap: 4 kB", swapped, count=1)
    (tmp_path / "smaps").write_text(text[:start] + swapped)
    monkeypatch.setattr("isotype.runs.mapped_files.SMAPS", tmp_path / "smaps")
    release_mapped_pages()
    assert int(mapped[5]) == 77


@pytest.mark.parametrize(
    ("base", "count"), [pytest.param("bf16", 0, marks=pytest.mark.full), ("int8", 1)]
)
def test_a_packed_base_releases_the_pages_of_its_file(base, count, configured, monkeypatch):
    released = []
    monkeypatch.setattr(setup, "release_mapped_pages", lambda: released.append(1))
    precision = {"preset": "bf16-lora", "base": base}
    assert train(configured("run", precision=precision, train={"steps": 1})) == 0
    assert len(released) == count


@pytest.mark.full
def test_memory_of_the_parent_process_is_not_counted():
    block = torch.ones(512 * MIB)  # 2 GiB
    code = "import torch; from isotype.training.step import peak_memory as p; print(p(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < block.nbytes


@pytest.mark.full
@pytest.mark.slow
def test_plan_is_within_5_percent_of_the_peak(tmp_path, subtests):
    """In the preflight, in the first step and in later steps, with freed memory returned."""
    file = tmp_path / "rows.json"
    full = ["bf16-pure/none", "bf16-mixed/none"]
    cases = [*full, "bf16-lora/lora", "nf4-lora/lora", "int8/lora", "fp8/lora"]
    command = [sys.executable, "-m", "benchmarks.memory", "--json", str(file), "--cases", *cases]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for case, row in json.loads(file.read_text()).items():
        with subtests.test(case):
            assert 0.95 < row["measured / planned"] < 1.05
