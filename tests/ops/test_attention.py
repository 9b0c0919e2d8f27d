"""attention: beside PyTorch's own at every layout, mask and head sharing, and what its blocks could
hide.
"""

import pytest
import torch
import torch.nn.functional as F

from isotype.ops import attention, cpp
from isotype.ops.attention import Documents
from isotype.ops.attention.op import attention_reference, uses_cpp_kernels
from tests.ops.trials import FACTOR, error

needs_compiler = pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")
# batch, query heads, key heads, queries, keys, head size: below, at and past a block of 64; the
# last two share work by key heads
SHAPES = [
    (2, 4, 4, 128, 128, 64),
    (1, 4, 2, 77, 77, 96),
    (2, 4, 1, 70, 131, 16),
    (1, 2, 2, 65, 40, 80),
    (8, 4, 2, 33, 33, 32),
    (16, 1, 1, 3, 5, 128),
]


def plain(query, key, value, *, mask=None, causal=False, scale=None):
    shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared
    )


def drawn(shape, seed=0):
    batch, heads, key_heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(seed)

    def states(count, positions):
        # heads behind positions, as a projection leaves them
        return (
            torch.randn(batch, positions, count, size, generator=generator)
            .bfloat16()
            .transpose(1, 2)
        )

    mask = torch.rand(batch, 1, queries, keys, generator=generator) < 0.4
    mask[..., 0] = True
    return (
        states(heads, queries),
        states(key_heads, keys),
        states(key_heads, keys),
        states(heads, queries),
        mask,
    )


def run(f, inputs, dy, dtype=torch.bfloat16, **options):
    leaves = [t.to(dtype).detach().requires_grad_() for t in inputs]
    out = f(*leaves, **options)
    return out, *torch.autograd.grad(out, leaves, dy.to(dtype))


@needs_compiler
def test_output_and_gradients_are_as_near_to_fp64_as_pytorchs(subtests):
    for shape, masked in zip(
        SHAPES,
        ["causal", "mask and causal", "full", "mask", "causal", "mask and causal"],
        strict=True,
    ):
        *inputs, dy, mask = drawn(shape)
        options = {
            "causal": "causal" in masked,
            "mask": mask if "mask" in masked else None,
            "scale": 0.3 if masked == "full" else None,
        }
        both = (
            options
            if masked != "mask and causal"
            else {"mask": mask & torch.ones(shape[3:5], dtype=torch.bool).tril()}
        )
        with subtests.test(masked, shape=shape):
            assert uses_cpp_kernels(torch.bfloat16, *inputs, options["mask"])
            truth = run(attention_reference, inputs, dy, torch.float64, **options)
            theirs = run(plain, inputs, dy, **both)
            ours = run(attention, inputs, dy, **options)
            for got, their, true in zip(ours, theirs, truth, strict=True):
                assert (got.dtype, got.shape) == (torch.bfloat16, true.shape)
                assert error(got, true) <= FACTOR * error(their, true)


@needs_compiler
def test_a_query_that_attends_to_nothing_gives_zeros_and_no_gradient():
    *inputs, dy, mask = drawn(SHAPES[1])
    mask[:, :, 5:70] = False
    out, dq, *others = run(attention, inputs, dy, mask=mask)
    assert not out[:, :, 5:70].any()
    assert not dq[:, :, 5:70].any()
    assert all(t.isfinite().all() for t in (out, dq, *others))


@needs_compiler
def test_large_scores_neither_overflow_nor_vanish():
    *inputs, dy, _ = drawn(SHAPES[1])
    inputs[0] = inputs[0] * 300
    truth, ours = (
        run(attention_reference, inputs, dy, torch.float64, causal=True),
        run(attention, inputs, dy, causal=True),
    )
    theirs = run(plain, inputs, dy, causal=True)
    for got, their, true in zip(ours, theirs, truth, strict=True):
        assert got.isfinite().all()
        assert error(got, true) <= FACTOR * error(their, true)


@needs_compiler
def test_saves_no_matrix_of_queries_by_keys():
    *inputs, _, _ = drawn((1, 2, 2, 256, 256, 16))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        attention(*(t.requires_grad_() for t in inputs), causal=True)
    assert max(saved) == 2 * 256 * 16


@needs_compiler
@pytest.mark.parametrize("window", [None, 9, 70])
def test_documents_and_windows_are_computed_by_the_kernels(window):
    """Beside the reference with a mask. Documents begin inside blocks, and one fills several."""
    shape = (2, 4, 2, 203, 203, 32)
    *inputs, dy, _ = drawn(shape)
    documents = Documents.from_lengths([3, 130, 70, 1, 64, 138])
    assert uses_cpp_kernels(torch.bfloat16, *inputs, None)
    options = {"causal": True, "window": window}
    mask = documents.mask(2, 203)
    truth = run(attention_reference, inputs, dy, torch.float64, mask=mask, **options)
    ours = run(attention, inputs, dy, documents=documents, **options)
    allowed = mask.tril() if window is None else mask.tril().triu(1 - window)
    theirs = run(plain, inputs, dy, mask=allowed)
    for got, their, true in zip(ours, theirs, truth, strict=True):
        assert error(got, true) <= FACTOR * error(their, true)


@needs_compiler
def test_a_document_changes_nothing_in_the_next_one():
    *inputs, dy, _ = drawn((1, 2, 2, 150, 150, 16))
    documents = Documents.from_lengths([70, 80])
    first = run(attention, inputs, dy, causal=True, documents=documents)
    changed = [t.clone() for t in inputs]
    for tensor in changed:
        tensor[:, :, :70] = 7.0
    second = run(attention, changed, dy, causal=True, documents=documents)
    alone = run(attention, [t[:, :, 70:] for t in inputs], dy[:, :, 70:], causal=True)
    for one, two, third in zip(first, second, alone, strict=True):
        assert torch.equal(one[:, :, 70:], two[:, :, 70:])
        assert error(third.double(), one[:, :, 70:].double()) < 1e-2
