"""AdamW as one kernel: the reference's update, noise that keeps the mean, and machine code for GPUs
that are not here.
"""

import itertools
from contextlib import contextmanager

import pytest
import torch

# library ops import it on their first call, which must not happen while launches are trapped
import torch._dynamo

pytest.importorskip("triton")

from isotype.ops.backend import force_backend
from isotype.testing import compile_matrix
from isotype.testing.interpreter import interpreted
from tests.api import AdamwHyperparameters, adamw_, adamw_module, adamw_reference_, draw_noise_bits
from tests.api import adamw_triton as triton
from tests.gpu import everywhere, kernels

NUMBERS = AdamwHyperparameters(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)


def tensors(n, weight, gradient, state, device="cpu"):
    g = torch.Generator().manual_seed(n)
    w, dw, mean, square = (torch.randn(n, generator=g) for _ in range(4))
    made = w.to(weight), dw.to(gradient), (mean / 8).to(state), (square.square() / 8).to(state)
    return [t.to(device) for t in made]


NARROW = (torch.float32, torch.bfloat16)
BACKENDS = ("triton", "cpp", "eager")


@contextmanager
def backend(name):
    """Runs ops with this implementation on a CPU."""
    if name == "triton":
        with interpreted(), force_backend("triton"):
            yield
    else:
        with force_backend(name):
            yield


@everywhere
def test_triton_kernel_equals_reference(device, subtests):
    for dtypes in itertools.product((*NARROW, torch.float16), NARROW, NARROW):
        for seed in (None, 5):
            want, got = (
                tensors(2500 if device == "cpu" else 100_001, *dtypes, device) for _ in range(2)
            )
            adamw_reference_(*want, NUMBERS, seed)
            with kernels(device):
                adamw_(*got, NUMBERS, seed=seed)
            with subtests.test(f"{dtypes} {seed}"):
                compare(got, want)


def test_cpp_kernel_equals_reference(subtests):
    """The tensors have more than one block and an incomplete last vector."""
    dtypes = (*NARROW, torch.float16)
    for weight, gradient, state in itertools.product(dtypes, dtypes, dtypes):
        for seed in (None, 5):
            want, got = (tensors(16_384 + 37, weight, gradient, state) for _ in range(2))
            adamw_reference_(*want, NUMBERS, seed)
            with force_backend("cpp"):
                adamw_(*got, NUMBERS, seed=seed)
            with subtests.test(f"{weight} {gradient} {state} {seed}"):
                compare(got, want)


def compare(got, want):
    for mine, theirs in zip(got, want, strict=True):
        # one fp32 operation may round to the other side, and with it the one narrowing
        torch.testing.assert_close(mine, theirs, rtol=2 * torch.finfo(mine.dtype).eps, atol=1e-6)
        if mine.dtype == torch.bfloat16:  # other noise would change a third of the elements
            assert float((mine == theirs).float().mean()) > 0.99


def update_fp64(weight, gradient, mean, square, h):
    """Loshchilov and Hutter's update with their own order of operations, in fp64."""
    weight, gradient, mean, square = (t.double() for t in (weight, gradient, mean, square))
    gradient = gradient * h.gradient_scale
    mean = h.beta1 * mean + (1 - h.beta1) * gradient
    square = h.beta2 * square + (1 - h.beta2) * gradient**2
    mean_hat = mean / (1 - h.beta1**h.step)
    square_hat = square / (1 - h.beta2**h.step)
    decayed = weight - h.lr * h.weight_decay * weight
    return decayed - h.lr * mean_hat / (square_hat.sqrt() + h.eps), mean, square


@pytest.mark.parametrize("name", ["cpp", "eager"])
def test_error_beside_fp64(name):
    """The error of fp32 tensors is at most a few roundings. The mean error of bf16 tensors is that
    of their noise.
    """
    h = NUMBERS._replace(lr=1e-3, gradient_scale=0.5)
    for dtype, seed in ((torch.float32, None), (torch.bfloat16, 3)):
        weight, gradient, mean, square = tensors(100_000, dtype, dtype, dtype)
        want = update_fp64(weight, gradient, mean, square, h)
        with force_backend(name):
            adamw_(weight, gradient, mean, square, h, seed=seed)
        eps = torch.finfo(dtype).eps
        for mine, exact in zip((weight, mean, square), want, strict=True):
            error = mine.double() - exact
            size = exact.abs() + 0.1  # sums of terms of this size cancel
            assert float((error / size).abs().max()) < (8 if dtype == torch.float32 else 1.01) * eps
            if seed is not None:  # unbiased: 100,000 independent errors of at most an eps each
                assert abs(float((error / size).mean())) < 4 * eps / 100_000**0.5


def rounded(value, lr, seed):
    """What becomes of weights of `value` that the update moves up by `lr`, from zero moments."""
    weight = torch.full((4096,), value, dtype=torch.bfloat16)
    gradient = -torch.ones(4096)
    numbers = AdamwHyperparameters(lr=lr, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=1)
    adamw_(weight, gradient, torch.zeros(4096), torch.zeros(4096), numbers, seed=seed)
    return weight


@pytest.mark.parametrize("name", BACKENDS)
def test_noise_keeps_the_mean_differs_by_seed_and_repeats_itself(name):
    step = 2.0**-10  # an eighth of the way from 1 to the next bf16
    with backend(name):
        first, again, other = (rounded(1.0, step, seed) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    deviation = 2.0**-7 * (0.125 * 0.875 / 4096) ** 0.5
    assert abs(float(first.double().mean()) - 1 - step) < 4 * deviation
    # neighbours are independent: of pairs, both rise as often as the product of their chances
    up = (first > 1).double().view(-1, 4)
    assert torch.allclose(
        up.t() @ up / len(up) - torch.diag(up.mean(0)),
        torch.full((4, 4), 1 / 64, dtype=torch.float64).fill_diagonal_(0),
        atol=0.02,
    )


def test_all_implementations_draw_the_same_noise():
    results = []
    for name in BACKENDS:
        with backend(name):
            results.append(rounded(1.0, 2.0**-10, 7))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_noise_bits_are_uniform_and_independent():
    """Each of the 48 bits of an element is set half of the time, alone and in pairs, and does not
    depend on the neighbour's bits or on those of the next seed.
    """
    n = 1 << 17
    columns = []
    for seed in (11, 12):
        for bits in draw_noise_bits(seed, 5, n, torch.device("cpu")):
            columns += [(bits >> k & 1).float() for k in range(16)]
    signs = torch.stack(columns) * 2 - 1
    limit = 5 / n**0.5
    assert float(signs.mean(1).abs().max()) < limit
    products = signs @ signs.t() / n
    assert float((products - torch.eye(len(signs))).abs().max()) < limit
    neighbours = signs[:, 1:] @ signs[:, :-1].t() / n
    assert float(neighbours.abs().max()) < limit


def test_parts_of_a_tensor_are_rounded_like_the_whole(monkeypatch):
    """The parts of several processes, and the chunks of plain PyTorch, begin at any element."""
    monkeypatch.setattr(adamw_module, "CHUNK", 1000)
    whole = tensors(5000, *[torch.bfloat16] * 3)
    adamw_(*whole, NUMBERS, seed=9)
    for name in ("cpp", "eager"):
        parts = tensors(5000, *[torch.bfloat16] * 3)
        with force_backend(name):
            for start, end in ((0, 1237), (1237, 5000)):
                views = [t[start:end] for t in parts]
                adamw_(*views, NUMBERS, seed=9, first_index=start)
        assert all(
            float((a == b).float().mean()) > 0.999 for a, b in zip(parts, whole, strict=True)
        )


def test_results_do_not_depend_on_the_number_of_threads():
    results = []
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        made = tensors(100_000, *[torch.bfloat16] * 3)
        with force_backend("cpp"):
            adamw_(*made, NUMBERS, seed=9)
        results.append(made)
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_exact_values_stay_and_infinities_stay(name):
    with backend(name):
        assert rounded(-1.5, 0.0, 3).unique().tolist() == [-1.5]
        assert rounded(3e38, 1e38, 3).unique().tolist() == [float("inf")]  # not nan
        assert rounded(float("nan"), 0.0, 3).isnan().all()


def test_bf16_moments_follow_small_changes_only_with_stochastic_rounding():
    """After a large gradient, the second moment falls by a thousandth at each step. bf16 rounded to
    nearest would keep it.
    """
    for seed, low, high in ((1, 0.85, 1.15), (None, 1.5, 2.5)):
        weight, gradient = torch.zeros(4096), torch.zeros(4096)
        mean, square = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(2))
        for step in range(1, 701):
            h = AdamwHyperparameters(0.0, 0.9, 0.999, 1e-8, 0.0, step)
            key = None if seed is None else step
            adamw_(weight, gradient, mean, square, h, seed=key)
        ratio = float(square.double().mean()) / 0.999**700
        assert low < ratio < high


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_kernel_compiles_for_every_dtype_and_target(stochastic):
    def run(weight, gradient, mean, square):
        triton.adamw_(weight, gradient, mean, square, NUMBERS, 12345 if stochastic else None)

    compile_matrix(
        run,
        tuple(tensors(300, *[torch.float32] * 3)),
        targets=["sm_80", "sm_90", "sm_100", "gfx942"],
        fail_on="note",
        binary=True,
    )


def test_fp32_tensors_need_no_noise(monkeypatch):
    """A seed for fp32 weights changes nothing, and drawing noise for them takes most of the time."""
    first = tensors(100, *[torch.float32] * 3)
    second = tensors(100, *[torch.float32] * 3)
    adamw_reference_(*first, NUMBERS, None)
    monkeypatch.delattr(adamw_module, "draw_noise_bits")
    adamw_reference_(*second, NUMBERS, 1)
    assert all(map(torch.equal, first, second))
