"""The hardware table: what generations can do, how devices are named, and what is found here."""

from __future__ import annotations

import pytest

from isotype.environment import hardware
from isotype.errors import UsageError

GiB = 1 << 30


@pytest.mark.parametrize(
    ("name", "bf16"),
    [("p100", "none"), ("v100", "none"), ("t4", "none"), ("a100", "native"), ("l4", "native"), ("h100", "native"), ("b200", "native"),
     ("mi50", "none"), ("mi250x", "native"), ("mi300x", "native"), ("cpu", "emulated"), ("cpu-amx", "native")],
)  # fmt: skip
def test_each_generation_has_its_kind_of_bf16(name, bf16):
    assert hardware.by_name(name).bf16 == bf16


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("H100", "H100 SXM"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("Tesla T4", "Tesla T4"), ("RTX 4090", "GeForce RTX 4090")],
)
def test_devices_are_found_in_the_spellings_people_use(spelling, name):
    assert hardware.by_name(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "generation"), [("sm_75", "turing"), ("8.0", "ampere"), ("sm_89", "ada"), ("gfx90a", "cdna2"), ("volta", "volta")]
)
def test_architectures_are_devices_too(spelling, generation):
    assert hardware.by_name(spelling).generation == generation


def test_an_unknown_device_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean h100"):
        hardware.by_name("h1000")


@pytest.mark.parametrize("device", ["mps", "xpu:0", "npu", "banana"])
def test_other_devices_are_refused_with_a_reason(device):
    with pytest.raises(UsageError, match=f"model.device: {device}: ") as refused:
        hardware.detect(device)
    assert "cpu" in refused.value.fix


@pytest.mark.parametrize(
    ("flags", "machine", "generation", "bf16"),
    [({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}, "x86_64", "cpu-amx", "native"),
     ({"avx2", "avx512f", "avx512_bf16"}, "x86_64", "cpu-avx512-bf16", "native"),
     ({"avx2", "avx512f"}, "x86_64", "cpu-avx512", "emulated"), ({"avx2"}, "x86_64", "cpu-avx2", "emulated"),
     ({"asimd", "bf16", "i8mm"}, "aarch64", "cpu-arm-bf16", "native"), (set(), "riscv64", "cpu", "emulated")],
)  # fmt: skip
def test_a_cpu_is_known_by_its_flags(flags, machine, generation, bf16):
    assert hardware.cpu_generation(flags, machine) == generation
    assert hardware.GENERATIONS[generation].bf16 == bf16


def test_the_cpu_of_this_machine_is_found_with_cores_and_memory():
    found = hardware.detect("cpu")
    assert found.kind == "cpu"
    assert found.cores >= 1
    assert found.memory > GiB


def test_every_device_agrees_with_its_generation():
    for name, device in hardware.DEVICES.items():
        generation = hardware.GENERATIONS[device.generation]
        assert (device.kind, device.bf16) == (generation.kind, generation.bf16), name
        assert device.bf16 == "native" or "bf16" not in device.peak_tflops, name
        if {"bf16", "fp32"} <= device.peak_tflops.keys():
            assert device.peak_tflops["bf16"] > device.peak_tflops["fp32"], name
