"""The hardware table: what generations can do, how devices are named, what is found here; how
threads wait, and what is want of memory.
"""

from __future__ import annotations

import errno
import os

import pytest

from isotype.environment import hardware
from isotype.errors import UsageError

GiB = 1 << 30


def test_each_generation_has_its_kind_of_bf16():
    kinds = {
        "none": "p100 v100 t4 mi50",
        "native": "a100 l4 h100 b200 mi250x mi300x cpu-amx",
        "emulated": "cpu",
    }
    for bf16, names in kinds.items():
        assert {hardware.lookup_hardware(name).bf16 for name in names.split()} == {bf16}


def test_devices_are_found_in_the_spellings_people_use():
    for spelling, name in {
        "H100": "H100 SXM", "NVIDIA A100-SXM4-80GB": "A100 80GB", "Tesla T4": "Tesla T4", "RTX 4090": "GeForce RTX 4090",
        "rtx-3060-12gb": "GeForce RTX 3060", "rtx3060-8gb": "GeForce RTX 3060 8GB", "RTX_4060_Ti_16GB": "GeForce RTX 4060 Ti 16GB",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "GeForce RTX 4070 Ti Super",
    }.items():  # fmt: skip
        assert hardware.lookup_hardware(spelling).name == name
    for spelling, generation in {
        "sm_75": "turing",
        "8.0": "ampere",
        "sm_89": "ada",
        "gfx90a": "cdna2",
        "volta": "volta",
    }.items():
        assert hardware.lookup_hardware(spelling).generation == generation
    with pytest.raises(UsageError, match="did you mean rtx3060"):
        hardware.lookup_hardware("rtx3060-24gb")
    with pytest.raises(UsageError, match="did you mean h100"):
        hardware.lookup_hardware("h1000")


@pytest.mark.parametrize("device", ["mps", "xpu:0", "banana"])
def test_other_devices_are_refused(device):
    with pytest.raises(UsageError, match=f"model.device: {device}: ") as refused:
        hardware.detect(device)
    assert "cpu" in refused.value.fix


def test_a_cpu_is_known_by_its_flags():
    for flags, machine, generation, bf16 in (
        ("avx2 avx512f avx512_bf16 amx_bf16 amx_tile", "x86_64", "cpu-amx", "native"),
        ("avx2 avx512f avx512_bf16", "x86_64", "cpu-avx512-bf16", "native"),
        ("avx2 avx512f", "x86_64", "cpu-avx512", "emulated"),
        ("avx2", "x86_64", "cpu-avx2", "emulated"),
        ("asimd bf16 i8mm", "aarch64", "cpu-arm-bf16", "native"),
        ("", "riscv64", "cpu", "emulated"),
    ):
        assert hardware.cpu_generation(flags.split(), machine) == generation
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


@pytest.mark.parametrize(
    ("load", "always", "passive"), [(0.1, False, False), (0.1, True, True), (2.0, False, True)]
)
def test_threads_sleep_on_shared_cores(load, always, passive):
    environ = {"PATH": "/bin"}
    load *= os.cpu_count() or 1
    assert (
        hardware.wait_passively(is_forced=always, load=load, environ=environ, is_torch_loaded=False)
        is passive
    )
    assert environ.get("OMP_WAIT_POLICY") == ("PASSIVE" if passive else None)


def test_what_the_user_has_set_stays_and_nothing_is_set_once_torch_is_loaded():
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        environ = {name: "1"}
        assert not hardware.wait_passively(is_forced=True, environ=environ, is_torch_loaded=False)
        assert environ == {name: "1"}
    environ = {}
    assert not hardware.wait_passively(is_forced=True, environ=environ, is_torch_loaded=True)
    assert environ == {}


def test_an_error_for_want_of_memory_is_told_from_the_same_words_for_another_reason():
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
    ):
        assert hardware.out_of_memory_message(error)
        assert hardware.out_of_memory_message(ValueError(str(error))) is None
