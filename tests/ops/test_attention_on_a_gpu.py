"""attention on CUDA: which back end, what each of PyTorch's operators is called with, and the
results of what a CPU can run of it.
"""

import itertools
from collections import OrderedDict

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from isotype.ops.attention import op
from tests.api import Documents, attention_reference, gpu, plan_device
from tests.api import attention_attention as attention
from tests.gpu import DEVICE, on_a_gpu
from tests.host_reads import NoHostReads
from tests.ops.trials import FACTOR, error

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
ADA, BLACKWELL, CONSUMER_BLACKWELL = (8, 9), (10, 0), (12, 0)
CHOICES = [
    # what is asked for, and the back end on Hopper, Ampere and Turing
    ({}, "cudnn", "flash", "sdpa"),
    ({"depth": 256}, "flash", "flash", "sdpa"),
    ({"depth": 512}, "sdpa", "sdpa", "sdpa"),
    ({"depth": 60}, "sdpa", "sdpa", "sdpa"),
    ({"is_packed": True}, "flash", "flash", "sdpa"),
    ({"window": 100}, "flash", "flash", "sdpa"),
    ({"causal": False}, "flash", "flash", "sdpa"),
    ({"softcap": 50.0}, "flex", "flex", "plain"),
    ({"softcap": 50.0, "is_packed": True}, "flex", "flex", "plain"),
    ({"has_mask": True}, "sdpa", "sdpa", "sdpa"),
    ({"dtype": torch.float32}, "sdpa", "sdpa", "sdpa"),
    ({"keys": 200}, "sdpa", "sdpa", "sdpa"),
]


def of(shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


@pytest.fixture
def pretend(monkeypatch):
    """`pretend(capability, **asked)`: the back end on a GPU of this capability, with a cuDNN that
    serves and kernels that run.
    """
    monkeypatch.setattr(gpu, "cudnn_version", lambda: 92200)
    monkeypatch.setattr(gpu, "has_flash", lambda: True)
    monkeypatch.setattr(gpu, "kernel_unavailable_reason", lambda device: "")
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)

    def chosen(capability, depth=128, keys=256, dtype=torch.bfloat16, **asked):
        monkeypatch.setattr(gpu, "capability", lambda device: capability)
        asked = {
            "causal": True,
            "has_mask": False,
            "window": None,
            "softcap": None,
            "is_packed": False,
            **asked,
        }
        return gpu.choose_gpu_backend(
            dtype, of((1, 8, 256, depth), dtype), of((1, 2, keys, depth), dtype), **asked
        )

    return chosen


def test_the_back_end_follows_from_shapes_and_device(pretend, subtests):
    for asked, *expected in CHOICES:
        with subtests.test(str(asked)):
            assert [
                pretend(capability, **asked) for capability in (HOPPER, AMPERE, TURING)
            ] == expected
    # PyTorch's check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    for depth, small in ((192, "flash"), (200, "sdpa"), (224, "sdpa"), (232, "flash")):
        with subtests.test("a head size without a backward on small GPUs", depth=depth):
            assert [
                pretend(c, depth, is_packed=True)
                for c in ((8, 6), ADA, CONSUMER_BLACKWELL, (12, 1))
            ] == [small] * 4
            assert [pretend(c, depth, is_packed=True) for c in (AMPERE, HOPPER, BLACKWELL)] == [
                "flash"
            ] * 3


def test_flex_attention_is_compiled_once_for_all_lengths(monkeypatch):
    graphs, runs = [], []

    def counting(graph, inputs):
        graphs.append(graph)

        def run(*args):
            runs.append(graph)
            return graph.forward(*args)

        return run

    attend = gpu.compile_any_length(flex_attention, counting)
    monkeypatch.setattr(gpu, "_flex_functions", lambda on_gpu: (attend, create_block_mask))
    monkeypatch.setattr(gpu, "_block_masks", OrderedDict())
    lengths = range(32, 32 * 11, 32)
    for positions in lengths:
        q, k, v = (torch.randn(1, n, positions, 16) for n in (2, 1, 1))
        out = gpu.flex_attention_softcapped(q, k, v, None, True, 0.25, None, 50.0, None)
    torch.testing.assert_close(
        out, written_out(q, k, v, causal=True, softcap=50.0), rtol=1e-4, atol=1e-5
    )
    # one graph for the first length, one for any other. Past Dynamo's limit of 8 a call would run
    # none
    assert len(graphs) <= 4
    assert len(runs) == len(lengths)


DOCUMENTS, PACKED = (
    Documents.from_lengths([100, 0, 156, 200, 56]),
    Documents.from_lengths([10, 14, 5, 19]),
)


@pytest.mark.parametrize(
    ("options", "operator"),
    [
        ({}, "_scaled_dot_product_cudnn_attention"),
        ({"window": 100, "documents": True}, "_flash_attention"),
    ],
    ids=["cudnn", "flash"],
)
def test_one_operator_a_pass_no_mask_no_repeated_heads_and_nothing_read_on_the_host(
    options, operator
):
    q, k, v = of((2, 8, 256, 64)), of((2, 2, 256, 64)), of((2, 2, 256, 64))
    options = {
        **options,
        **({"documents": DOCUMENTS.to(torch.device("meta"))} if options.get("documents") else {}),
    }
    with plan_device("cuda"), NoHostReads() as mode:
        out = attention(q, k, v, causal=True, **options)
        out.backward(torch.empty_like(out))
    assert out.shape == q.shape
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]
    heavy = [name.split(".")[1] for name in mode.seen if "attention" in name]
    assert heavy == [
        operator + ("_forward" if operator.startswith("_flash") else ""),
        f"{operator}_backward",
    ]
    assert not [
        name
        for name in mode.seen
        if any(word in name for word in ("mm", "where", "softmax", "expand", "repeat"))
    ]


def drawn(dtype, batch=2, heads=4, keys=2, positions=24, depth=16):
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, n, positions, depth, generator=g).to(dtype).requires_grad_()
        for n in (heads, keys, keys)
    ]


def written_out(q, k, v, *, causal, window=None, softcap=None, documents=None, mask=None):
    """Every score by itself."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None]
    allowed = (i >= j if causal else torch.ones_like(i >= j)) & (
        (i - j < window) if window else True
    )
    allowed = allowed if mask is None else allowed & mask
    allowed = allowed if documents is None else allowed & documents.mask(q.shape[0], q.shape[2])
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def test_windows_softcaps_and_documents_are_what_they_say():
    for options in ({"causal": False, "softcap": 3.0}, {"causal": True, "window": 5}):
        results = []
        for attend in (attention, written_out):
            leaves = drawn(torch.float64)
            out = attend(*leaves, **options, documents=PACKED)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        torch.testing.assert_close(*results)


def test_flex_attention_computes_the_softcap():
    q, k, v = (x.detach() for x in drawn(torch.float32))
    mask = torch.rand(2, 1, 24, 24) < 0.7
    mask |= torch.eye(24, dtype=torch.bool)
    got = gpu.flex_attention_softcapped(q, k, v, mask, True, 0.25, 5, 3.0, PACKED)
    want = written_out(q, k, v, causal=True, window=5, softcap=3.0, documents=PACKED, mask=mask)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize(("window", "packed"), list(itertools.product([None, 100], [False, True])))
def test_on_a_gpu_every_back_end_is_as_near_to_fp64_as_pytorchs(dtype, depth, window, packed):
    documents = DOCUMENTS.to(torch.device(DEVICE)) if packed else None
    inputs = [x.detach().to(DEVICE) for x in drawn(dtype, positions=256, depth=depth)]

    def run(op, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = op(*leaves)
        return [
            out,
            *torch.autograd.grad(
                out,
                leaves,
                torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out),
            ),
        ]

    allowed = torch.ones(256, 256, dtype=torch.bool, device=DEVICE).tril()
    allowed = allowed if window is None else op.mask_outside_window(allowed, window)
    mask = allowed if documents is None else allowed & documents.mask(2, 256)
    truth = run(lambda *x: attention_reference(*x, mask=mask), torch.float64)
    theirs = run(lambda *x: attention_reference(*x, mask=mask), dtype)
    ours = run(lambda *x: attention(*x, causal=True, window=window, documents=documents), dtype)
    for mine, plain, exact in zip(ours, theirs, truth, strict=True):
        assert error(mine, exact) <= 2 * FACTOR * error(plain, exact)


@on_a_gpu
def test_on_a_gpu_a_softcap_is_computed():
    q, k, v = (
        x.detach().to(DEVICE, torch.bfloat16) for x in drawn(torch.float32, positions=256, depth=64)
    )
    got = attention(q, k, v, causal=True, softcap=20.0)
    want = attention_reference(q.double(), k.double(), v.double(), causal=True, softcap=20.0)
    assert error(got, want) < 1e-2
