"""Kernels are checked before their first use on a device, and a wrong one is left to PyTorch."""

import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isotype import ops
from isotype.ops import cpp
from tests.api import (
    LORA_CASES,
    OP_CASES,
    _kernels,
    backend,
    kernels_unavailable_reason,
    note_wrong_kernels,
    trust,
)
from tests.gpu import kernels as triton_kernels
from tests.models import tiny

pytestmark = pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")

CPU = torch.device("cpu")
CASES = {**OP_CASES, **LORA_CASES}
CPP_FUNCTIONS = [
    (kernels, function)
    for kernels in _kernels.values()
    if any(case.kernels == kernels.op for case in CASES.values())
    for function in kernels.functions
    if function != "native"
]


# op -> the functions that compute nothing on a CPU without bf16 instructions
NEEDS_BF16 = {
    "lora": ("shrink", "expand", "gradient"),
    "experts": ("multiply", "shrink", "expand", "gradient"),
}


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache without results, and kernels that this process has not loaded yet."""
    libraries = {kernels.source: kernels.library for kernels in _kernels.values()}
    load = cpp.load_or_build_library
    monkeypatch.setattr(
        cpp, "load_or_build_library", lambda source: libraries.get(source) or load(source)
    )
    monkeypatch.setattr(trust, "library_folder", lambda: tmp_path)
    monkeypatch.setattr(cpp, "_fallback_reasons", {})
    monkeypatch.setattr(cpp, "_wrong_kernels", {})
    for kernels in _kernels.values():
        monkeypatch.setattr(kernels, "library", None)
        monkeypatch.setattr(kernels, "is_built", False)
        monkeypatch.setattr(kernels, "_has_bf16_instructions", None)
        monkeypatch.setattr(kernels, "calls", {})
    monkeypatch.setattr("isotype.lora.products._availability", {})
    trust.warn_of_wrong_kernel.cache_clear()
    tmp_path.chmod(0o700)
    return tmp_path


def plant_in_cpp(monkeypatch, kernels, name):
    """Replaces a function of the library by one that computes nothing."""
    load = cpp.load_or_build_library

    def load_wrong(source):
        library = load(source)
        if source != kernels.source:
            return library
        functions = {function: getattr(library, function) for function in kernels.functions}

        def compute_nothing(*_):
            pass

        return SimpleNamespace(**{**functions, name: compute_nothing})

    monkeypatch.setattr(cpp, "load_or_build_library", load_wrong)


@pytest.mark.parametrize(
    ("kernels", "name"),
    CPP_FUNCTIONS,
    ids=[f"{kernels.op}-{name}" for kernels, name in CPP_FUNCTIONS],
)
def test_a_wrong_cpp_kernel_is_left_out(fresh, monkeypatch, capsys, kernels, name):
    if name in NEEDS_BF16.get(kernels.op, ()) and not kernels.has_bf16_instructions():
        pytest.skip("no AVX512-BF16")
    if kernels.op == "experts" and name == "multiply":
        groups = importlib.import_module("isotype.ops.experts.groups")
        monkeypatch.setattr(groups, "_max_rows_per_expert", lambda: 1024)
    kernels.library = None
    for file in fresh.glob(f"checked-{kernels.op}-*"):
        file.unlink()
    plant_in_cpp(monkeypatch, kernels, name)
    assert not kernels.load()
    assert list(cpp.wrong_kernels()) == [kernels.op]
    if kernels.op == "lora":
        assert kernels_unavailable_reason() == cpp.wrong_kernels()["lora"]
    line = capsys.readouterr().err.splitlines()[-1]  # a slow build prints a line before
    assert line.startswith(f"isotype: {kernels.op}: its kernel is wrong on this device (")
    assert "`isotype proof --device cpu --part" in line


def test_every_op_with_kernels_has_a_case():
    triton_files = Path(cpp.__file__).parent.glob("*/triton.py")
    assert {file.parent.name for file in triton_files} == set(TRITON_FUNCTIONS)
    folders = {file.parent.name for file in Path(cpp.__file__).parent.glob("*/*")}
    with_kernels = {op for op in _kernels if op in folders} | {"lora", *TRITON_FUNCTIONS}
    assert with_kernels <= {case.kernels for case in CASES.values()}


def test_the_result_is_stored_and_a_wrong_kernel_is_a_note_of_the_manifest(fresh, monkeypatch):
    from isotype import optimize

    kernels = _kernels["rms_norm"]
    plant_in_cpp(monkeypatch, kernels, "backward")
    manifest = optimize(tiny("llama"))
    (note,) = [note for note in manifest.notes if "its kernel is wrong" in note]
    assert note.startswith(
        "rms_norm: its kernel is wrong on this device (rms_norm in torch.float32"
    )
    assert any(entry.op == "rope" for entry in manifest.entries), "the other ops are placed"
    (file,) = fresh.glob("checked-rms_norm-*.json")
    assert json.loads(file.read_text())["reason"]
    # a later process reads the result and computes in PyTorch
    monkeypatch.setattr(trust, "check_kernels", lambda *_: pytest.fail("checked again"))
    monkeypatch.setattr(cpp, "_fallback_reasons", {})
    assert not kernels.load()
    x = torch.randn(4, 8)
    weight = torch.ones(8)
    torch.testing.assert_close(
        ops.rms_norm(x, weight), torch.nn.functional.rms_norm(x, (8,), eps=1e-6)
    )
    note_wrong_kernels(manifest)
    assert manifest.notes.count(note) == 1


@pytest.mark.parametrize("content", ["", "[1]", '{"op": "rms_norm"}'])
def test_a_damaged_result_is_checked_again(fresh, content):
    kernels = _kernels["rms_norm"]
    assert kernels.load()
    (file,) = fresh.glob("checked-rms_norm-*.json")
    file.write_text(content)
    kernels.library = None
    assert kernels.load()
    assert json.loads(file.read_text())["reason"] == ""


def test_a_changed_fact_is_checked_again(fresh, monkeypatch):
    kernels = _kernels["rms_norm"]
    assert kernels.load()
    kernels.library = None
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert kernels.load()
    assert len(list(fresh.glob("checked-rms_norm-*.json"))) == 2


def test_without_the_check_nothing_is_stored_and_the_manifest_says_so(fresh, monkeypatch):
    from isotype import optimize

    monkeypatch.setenv("ISOTYPE_SKIP_KERNEL_CHECK", "1")
    plant_in_cpp(monkeypatch, _kernels["rms_norm"], "forward")
    manifest = optimize(tiny("llama"))
    assert "kernels: not checked on this device, because of --skip-kernel-check" in manifest.notes
    assert not list(fresh.glob("checked-*"))


def test_the_check_is_independent_of_the_callers_modes(fresh):
    """The first use may be in inference mode, under autocast and in a checkpointed layer."""
    from torch.utils.checkpoint import checkpoint

    kernels = _kernels["rms_norm"]
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert kernels.load()
    kernels.library = None
    for file in fresh.glob("checked-*"):
        file.unlink()
    checkpoint(ops.rms_norm, x, weight, use_reentrant=False).sum().backward()
    assert kernels.library is not None
    assert list(fresh.glob("checked-rms_norm-*.json"))


# --- Triton kernels, in the interpreter

TRITON_FUNCTIONS = {
    "adamw": ["adamw_"],
    "cross_entropy": [
        "cross_entropy_forward",
        "cross_entropy_backward",
        "row_values",
        "row_value_gradients",
    ],
    "experts": ["activate", "backward", "combine_", "gradient_"],
    "gated": ["gated_forward", "gated_backward"],
    "linear_divergence": ["divergences"],
    "modulation": [
        "modulated_layer_norm_forward",
        "modulated_layer_norm_backward",
        "gated_residual_forward",
        "gated_residual_backward",
    ],
    "packed": ["widen_", "widen_4bit"],
    "rms_norm": ["rms_norm_forward", "rms_norm_backward"],
    "rope": ["rotate_query_and_key"],
}


# above 1.5 s, where other functions of the same op, and other ops, are tested every day
LONG = ("gradient_", "row_value_gradients")
LONG_OPS = ("experts", "linear_divergence")


def make_wrong(function):
    """Returns a function that scales each result, or each tensor that it changes, by 1.05."""

    def wrong(*arguments, **options):
        tensors = [x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
        before = [(x, x.clone()) for x in tensors]
        results = function(*arguments, **options)
        returned = results if isinstance(results, tuple) else (results,)
        changed = [x for x in returned if isinstance(x, torch.Tensor)]
        changed += [x for x, old in before if not torch.equal(x, old)]
        for x in changed:
            if x.is_floating_point():
                x *= 1.05
        return results

    return wrong


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, name, marks=[pytest.mark.full] if name in LONG else [])
        for op, names in TRITON_FUNCTIONS.items()
        for name in names
    ],
)
def test_a_wrong_triton_kernel_is_found(monkeypatch, op, name):
    pytest.importorskip("triton")
    module = importlib.import_module(f"isotype.ops.{op}.triton")
    monkeypatch.setattr(module, name, make_wrong(getattr(module, name)))
    with triton_kernels("cpu"):
        assert "error" in trust.check_kernels(op, CPU, [torch.bfloat16])


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[pytest.mark.full] if op in LONG_OPS else [])
        for op in sorted(TRITON_FUNCTIONS)
    ],
)
def test_right_triton_kernels_pass(op):
    pytest.importorskip("triton")
    with triton_kernels("cpu"):
        assert trust.check_kernels(op, CPU, [torch.float32]) == ""


def test_triton_kernels_are_checked_once_for_each_device_and_dtype(fresh, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "_triton_verdicts", {})
    monkeypatch.setattr(backend, "kernel_unavailable_reason", lambda _: "")
    # the interpreter and the forced back end hold for one thread
    monkeypatch.setattr(trust, "run_in_clean_thread", lambda function: function())
    module = importlib.import_module("isotype.ops.rms_norm.triton")
    monkeypatch.setattr(module, "rms_norm_forward", make_wrong(module.rms_norm_forward))
    with triton_kernels("cpu"):
        reason = backend.triton_blocked_reason("rms_norm", CPU, torch.float32)
        assert reason.startswith("rms_norm in torch.float32, gradient of x: error 5")
        assert not backend.triton_blocked_reason("rope", CPU, torch.float32)
        monkeypatch.setattr(trust, "check_kernels", lambda *_: pytest.fail("checked again"))
        assert backend.triton_blocked_reason("rms_norm", CPU, torch.float32) == reason
        backend._triton_verdicts.clear()
        assert backend.triton_blocked_reason("rms_norm", CPU, torch.float32) == reason
    assert capsys.readouterr().err.count("rms_norm: its kernel is wrong") == 1


def test_no_check_begins_in_a_backward(monkeypatch):
    """On a GPU it would wait for the thread that computes gradients, which waits for the check."""
    monkeypatch.setattr(backend, "_triton_verdicts", {})
    monkeypatch.setattr(backend, "kernel_unavailable_reason", lambda _: "")
    monkeypatch.setattr(trust, "find_disagreement", lambda *_: pytest.fail("checked"))
    reasons = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(
        lambda _: reasons.append(backend.triton_blocked_reason("rope", CPU, torch.float32))
    )
    x.sum().backward()
    assert reasons == ["a backward is running, in which no kernel can be checked"]
    assert not backend._triton_verdicts


def test_no_check_begins_while_a_cuda_graph_is_captured(monkeypatch):
    """The check allocates memory in another thread, which makes the capture fail."""
    monkeypatch.setattr(backend, "_triton_verdicts", {})
    monkeypatch.setattr(backend, "_unavailable_reasons", {CPU: ""})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(trust, "find_disagreement", lambda *_: pytest.fail("checked"))
    reason = backend.triton_blocked_reason("rope", CPU, torch.float32)
    assert reason == "a CUDA graph is captured, in which no kernel can be checked"
    assert not backend._triton_verdicts


def test_an_error_of_a_check_is_raised_in_the_callers_thread():
    caller = threading.get_ident()
    threads = []

    def fail():
        threads.append(threading.get_ident())
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        trust.run_in_clean_thread(fail)
    assert threads != [caller]
