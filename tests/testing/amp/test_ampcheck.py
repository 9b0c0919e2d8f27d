"""ampcheck as a whole: silent on right functions, and on faults it names code, function and line."""

from pathlib import Path

import faulty_functions
import pytest
import torch
import torch.nn.functional as F
from faulty_functions import FAULTY, autocast_off_without_casts
from right_functions import RIGHT, RMSNorm, Router, drawn

from isotype import OpContract
from isotype.errors import UsageError
from isotype.finding import Severity
from isotype.pages import page
from isotype.testing import ConformanceError, ampcheck

SOURCE = Path(faulty_functions.__file__).read_text().splitlines()


def some(names, *, of):
    """The first name of each kind in every run, the others in the full one."""
    kinds = [of(name) for name in names]
    return [
        pytest.param(name, marks=[pytest.mark.full] if of(name) in kinds[:at] else [])
        for at, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", some(list(RIGHT), of=lambda name: list(RIGHT).index(name) % 6))
def test_silent_on_right_functions(name):
    function, inputs = RIGHT[name]
    report = ampcheck(function, inputs, raises=False)
    assert report.codes() == [], report.render()
    assert report.ok
    assert report.tried >= 14


@pytest.mark.parametrize("seed", [28, pytest.param(29, marks=pytest.mark.full)])
def test_rows_that_a_router_sends_elsewhere_are_no_rounding_of_weights(seed):
    """Of seed 28 some rows' two best experts are so near that bf16 chooses otherwise than fp64."""
    torch.manual_seed(seed)
    assert ampcheck(Router(), (drawn(6, 8),), raises=False).codes() == []


@pytest.mark.parametrize("name", some(list(FAULTY), of=lambda name: FAULTY[name][2]))
def test_finds_the_fault_and_its_line(name):
    function, inputs, code = FAULTY[name]
    report = ampcheck(function, inputs, raises=False)
    found = [f for f in report.at_least(Severity.WARNING) if f.code == code]
    assert found, report.render()
    assert found[0].place.line, report.render()
    assert "# HERE" in SOURCE[found[0].place.line - 1], found[0].render()
    assert found[0].cause
    assert found[0].fix
    assert page(code), f"{code} has no page"


def test_as_an_assertion_it_raises_with_the_report():
    with pytest.raises(ConformanceError, match=r"AC001[\s\S]*faulty_functions.py") as caught:
        ampcheck(autocast_off_without_casts, (drawn(4, 8), drawn(6, 8)))
    assert isinstance(caught.value, AssertionError)
    assert caught.value.report.codes() == ["AC001"]


def test_a_function_that_runs_nowhere_is_a_usage_error():
    with pytest.raises(UsageError, match=r"runs under no dtype combination.*test_ampcheck.py"):
        ampcheck(lambda x: x @ torch.zeros(3, 3), (drawn(4, 8),))


def test_what_cannot_be_run_is_a_usage_error():
    for function, inputs, message in (
        (F.silu, 3, "at least one floating"),
        (F.silu, (), "at least one floating"),
        (3, drawn(2), "call a int"),
    ):
        with pytest.raises(UsageError, match=message):
            ampcheck(function, inputs)


def rms_norm_reference(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rms_norm(x, weight):
    return RMSNorm.apply(x, weight, 1e-6)


class HalfHearted(RMSNorm):
    """The mean of squares in bf16."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.bfloat16().square().mean(-1, keepdim=True) + eps).float()
        ctx.save_for_backward(x, weight, rstd)
        return (x.float() * rstd * weight.float()).to(x.dtype)


def test_a_result_worse_than_the_references_is_reported():
    ampcheck(rms_norm, (drawn(4, 8), drawn(8)), reference=rms_norm_reference)
    report = ampcheck(
        lambda x, w: HalfHearted.apply(x, w, 1e-6),
        (drawn(4, 8), drawn(8)),
        reference=rms_norm_reference,
        raises=False,
    )
    assert "AC006" in report.codes()
    assert "the reference at the same dtypes" in report.render()


def low_rank_reference(x, lora_a, lora_b):
    return x @ lora_a.t() @ lora_b.t()


class LowRank(torch.autograd.Function):
    """Both products in one function; `factor` is the mistake in the gradient of lora_a."""

    factor = 1.0

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, lora_a, lora_b):
        low = x @ lora_a.t()
        ctx.save_for_backward(x, lora_a, lora_b, low)
        return low @ lora_b.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, d):
        x, lora_a, lora_b, low = ctx.saved_tensors
        d_low = d @ lora_b
        gradients = (d_low @ lora_a, ctx._forward_cls.lora_a_gradient(d_low, x), d.t() @ low)
        tensors = (x, lora_a, lora_b)
        return tuple(g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True))

    @classmethod
    def lora_a_gradient(cls, d_low, x):
        return cls.factor * d_low.t() @ x


class TwiceTheGradient(LowRank):
    factor = 2.0


class ForgottenTerm(LowRank):
    @classmethod
    def lora_a_gradient(cls, d_low, x):
        return (d_low * (d_low > 0)).t() @ x


def test_gradient_that_is_another_function_is_not_called_imprecise():
    inputs = (drawn(6, 8), drawn(3, 8, seed=1), drawn(5, 3, seed=2))
    assert ampcheck(LowRank, inputs, reference=low_rank_reference).ok
    for function, cause in (
        (TwiceTheGradient, "it is 2 times the reference's gradient"),
        (ForgottenTerm, "backward is not the derivative of this forward"),
    ):
        report = ampcheck(function, inputs, reference=low_rank_reference, raises=False)
        (finding,) = report.at_least(Severity.WARNING)
        assert finding.code == "AC023", report.render()
        assert finding.message.endswith(
            "gradient of lora_a is another function than the reference's"
        )
        assert cause in finding.cause
        assert "bf16" not in finding.cause
    assert page("AC023")


def test_another_eps_is_another_function():
    """The difference is the same in fp64, so no rounding explains it."""

    def with_eps(eps):
        return lambda x, weight: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    arguments = (drawn(4, 16), drawn(16, seed=1))
    report = ampcheck(with_eps(1e-3), arguments, reference=with_eps(1e-6), raises=False)
    assert report.codes() == ["AC023"], report.render()
    assert "fp64" in report.findings[0].cause


def test_factors_of_one_adapter_share_a_dtype():
    dtypes = set()

    def record_dtypes(x, lora_a, lora_b):
        dtypes.add((lora_a.dtype, lora_b.dtype))
        return low_rank_reference(x, lora_a, lora_b)

    # the first factor has as many rows as the input, so that it would be taken for an input
    inputs = (drawn(3, 8), drawn(3, 8, seed=1), drawn(5, 3, seed=2))
    assert ampcheck(record_dtypes, inputs, reference=low_rank_reference).ok
    assert {left == right for left, right in dtypes} == {True}

    def record_core_dtypes(t1, w1_a, w1_b):
        dtypes.add((t1.dtype, w1_a.dtype))
        return w1_b @ t1 @ w1_a

    inputs = (drawn(3, 3), drawn(3, 8, seed=1), drawn(5, 3, seed=2))
    ampcheck(record_core_dtypes, inputs, reference=lambda t1, w1_a, w1_b: w1_b @ t1 @ w1_a)
    assert {left == right for left, right in dtypes} == {True}


@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_rows_of_a_captured_tensor_bound_the_rows_of_the_inputs(rows):
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    row_counts = set()

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            logits = (x @ weight.t()).flatten(0, -2)
            row_counts.add(logits.shape[0])
            gradient = logits.float().softmax(-1)
            gradient[torch.arange(len(labels)), labels] -= (
                1  # reads as many rows as there are labels
            )
            ctx.save_for_backward(x, weight, gradient.to(x.dtype))
            return F.cross_entropy(logits[: len(labels)].float(), labels)

        @staticmethod
        def backward(ctx, d):
            x, weight, gradient = ctx.saved_tensors
            gradient = gradient * d.to(gradient.dtype) / len(labels)
            return (gradient @ weight).view_as(x), gradient.t() @ x.flatten(0, -2)

    def loss_of_rows(x, weight):
        return Loss.apply(x, weight) * (labels >= 0).any()

    for function in (loss_of_rows, Loss.apply):
        report = ampcheck(function, (drawn(*rows, 8), drawn(4, 8, seed=1)), raises=False)
        assert row_counts == {6}
        if report.skipped:
            assert "refers to a tensor of shape [6]" in "".join(report.skipped)
            assert f"  not checked  {report.skipped[0]}" in report.render()


def test_reference_decides_which_combinations_must_run():
    def picky(x, w):
        same = x.dtype == w.dtype or torch.is_autocast_enabled("cpu")
        return F.linear(x, w) if same else torch.mm(x.double(), w)

    def plain(x, w):
        dtype = torch.promote_types(x.dtype, w.dtype)
        return F.linear(x.to(dtype), w.to(dtype))

    inputs = (drawn(4, 8), drawn(6, 8))
    # plain PyTorch refuses mixed dtypes as well
    assert ampcheck(picky, inputs, raises=False).codes() == []
    assert ampcheck(picky, inputs, reference=plain, raises=False).codes() == ["AC001"]


NORM = OpContract(
    "x: F[*n d], weight: W[d] -> F[*n d]",
    inside="fp32",
    grads={"x": "F", "weight": "W"},
    autocast="ignored",
)


class WideGradient(RMSNorm):
    @staticmethod
    def backward(ctx, d):
        dx, dw, _ = RMSNorm.backward(ctx, d)
        return dx, dw.float(), None


def test_a_gradient_of_another_dtype_than_the_contracts_is_reported():
    inputs = [(drawn(4, 8), drawn(8)), (drawn(2, 3, 8), drawn(8))]
    # both samples
    assert ampcheck(rms_norm, inputs, reference=rms_norm_reference, contract=NORM).tried == 2 * 50
    report = ampcheck(
        lambda x, w: WideGradient.apply(x, w, 1e-6),
        (drawn(4, 8), drawn(8)),
        contract=NORM,
        raises=False,
    )
    (finding,) = report.at_least(Severity.WARNING)
    assert finding.code == "AC014"
    assert "weight in fp32; its contract says bf16" in finding.message
    assert "WideGradient.backward" in str(finding.place)


BROKEN = [
    (
        "x: F[*n d], weight: W[d] -> fp32[*n d]",
        "ignored",
        "returns its output in bf16; its contract says fp32",
    ),
    (
        "x: F[*n d], weight: W[d] -> F[*n d]",
        "follows",
        "returns its output in fp32; its contract says bf16",
    ),
    (
        "x: F[*n d], weight: W[d] -> F[*n d]",
        "fp32",
        "returns its output in bf16; its contract says fp32",
    ),
    ("x: F[*n d], weight: W[d] -> F[d]", "ignored", "2 dimensions where"),
    (
        "x: F[*n d], weight: W[d] -> F[*n d], fp32[*n]",
        "ignored",
        "returns 1 floating outputs; 2 are declared",
    ),
]


def test_an_output_that_breaks_the_contract_is_reported():
    for signature, autocast, message in BROKEN:
        report = ampcheck(
            rms_norm,
            (drawn(4, 8), drawn(8)),
            contract=OpContract(signature, autocast=autocast),
            raises=False,
        )
        assert "AC014" in report.codes()
        assert message in report.render()


def test_contract_inside_fp32_is_held_to_one_rounding():
    inputs = (drawn(64, 64, scale=3.0), drawn(64))
    ampcheck(rms_norm_reference, inputs, reference=rms_norm_reference)
    # the same function is no worse than the reference in bf16, but not fp32 inside: three roundings
    # and more
    worse = ampcheck(
        lambda x, w: rms_norm_reference(x, w) * (1 + 2**-6),
        inputs,
        reference=rms_norm_reference,
        contract=NORM,
        raises=False,
    )
    assert "AC023" in worse.codes()


def test_random_functions_are_not_compared_across_dtypes():
    report = ampcheck(lambda x: F.dropout(x, 0.5), drawn(4, 8))
    assert any("seeds" in why for why in report.skipped)


def test_under_no_grad_it_still_differentiates():
    with torch.no_grad():
        assert "AC008" in ampcheck(*FAULTY["gradient overwritten"][:2], raises=False).codes()


def gemma_norm(x, w, *, widened: bool):
    x_fp32 = x.float()
    n_fp32 = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (n_fp32 * (1.0 + w.float())).to(x.dtype) if widened else n_fp32.to(x.dtype) * (1 + w)


def test_a_weight_rounded_before_its_use_is_seen_without_a_reference():
    inputs = (drawn(4, 32), (drawn(32, seed=1) * 0.02).detach().requires_grad_())
    report = ampcheck(lambda x, w: gemma_norm(x, w, widened=False), inputs, raises=False)
    assert report.codes() == ["AC022"], report.render()
    assert page("AC022")
    assert ampcheck(lambda x, w: gemma_norm(x, w, widened=True), inputs).ok


def test_a_formula_unstable_in_fp32_gets_no_advice_to_widen():
    def focal(logits):
        return (
            (1 - torch.sigmoid(logits)).pow(2).mul(torch.log(torch.sigmoid(logits) + 1e-8)).mean()
        )

    def stable(logits):
        return (torch.sigmoid(-logits).pow(2) * F.logsigmoid(logits)).mean()

    logits = torch.linspace(-20, 20, 640).view(16, 40)
    findings = [
        f
        for f in ampcheck(focal, (logits,), reference=stable, raises=False).findings
        if f.code == "AC006"
    ]
    assert findings
    assert any("stable form" in f.fix for f in findings), [f.render() for f in findings]


class _FailsInsideAutocastOnly(torch.autograd.Function):
    """dot takes operands of one dtype, and the product before it is bf16 where autocast is on."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch.autocast("cpu", enabled=False):
            return x @ w.t()

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        dx = d @ w
        return dx * (0 * torch.dot(dx.flatten(), x.flatten()) + 1), d.t() @ x


def test_a_backward_that_fails_inside_the_region_only_is_a_warning():
    """Trainers run backward outside."""
    report = ampcheck(_FailsInsideAutocastOnly, (drawn(4, 8), drawn(6, 8)), raises=False)
    failures = [f for f in report.findings if f.code == "AC002"]
    assert failures, report.render()
    assert all("backward inside" in (f.observed or "") + f.render() for f in failures)
    assert {f.severity for f in failures} <= {Severity.NOTE, Severity.WARNING}


class CircularConvolution(torch.autograd.Function):
    """`BlockCircularConvolution` of peft 0.21.2, for one block. No FFT accepts bf16, and its gradient
    of x is that of another function.
    """

    @staticmethod
    def forward(ctx, x, kernel):
        ctx.save_for_backward(x, kernel)
        return torch.fft.fft(torch.fft.ifft(x) * torch.fft.fft(kernel)).real

    @staticmethod
    def backward(ctx, gradient):
        x, kernel = ctx.saved_tensors
        spectrum = torch.fft.fft(gradient)
        kernel_gradient = torch.fft.fft(spectrum * torch.fft.ifft(x)).real
        return torch.fft.fft(spectrum * torch.fft.ifft(kernel)).real, kernel_gradient.sum(0)


def circular_convolution(x, kernel):
    positions = torch.arange(x.shape[-1])
    return x @ kernel[(positions[:, None] - positions) % x.shape[-1]]


def test_operators_that_do_not_accept_a_dtype():
    report = ampcheck(
        CircularConvolution,
        (torch.randn(4, 8), torch.randn(8)),
        reference=circular_convolution,
        raises=False,
    )
    by_code = {finding.code: finding for finding in report.findings}
    assert by_code["AC001"].cause == "an operator in this line does not accept bf16"
    assert "backward ran outside autocast" in by_code["AC002"].cause
    assert by_code["AC002"].fix.startswith("cast the operator's input to fp32")
    assert "gradient of x" in by_code["AC023"].message
    assert "gradient of kernel" not in by_code["AC023"].message

    def join(x, y):
        return torch.cat([x, y])

    def index_rows(x, y):
        return torch.nn.functional.pad(x, (0, 0, 0, len(y))) + torch.nn.functional.pad(
            y, (0, 0, len(x), 0)
        )

    report = ampcheck(
        join, (torch.randn(4, 8), torch.randn(3, 8)), reference=index_rows, raises=False
    )
    (finding,) = report.findings
    assert "under autocast to fp16 it accepts only fp16 and fp32" in finding.cause


def test_values_that_were_rounded_before_they_are_subtracted():
    """Without autocast, `LigerFusedLinearJSDLoss` 0.8.5 keeps log-probabilities in fp16."""

    def divergence(x, y):
        log_x = x.log_softmax(-1).float()
        log_y = y.log_softmax(-1).float()
        return (log_x.exp() * (log_x - log_y)).sum(-1)

    def reference(x, y):
        wide = torch.promote_types(x.dtype, torch.float32)
        log_x = x.log_softmax(-1, dtype=wide)
        return (log_x.exp() * (log_x - y.log_softmax(-1, dtype=wide))).sum(-1)

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    inputs = (x, x + 0.05 * torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
    report = ampcheck(divergence, inputs, reference=reference, raises=False)
    causes = {finding.cause for finding in report.findings if finding.code == "AC006"}
    assert any("were rounded to" in str(cause) for cause in causes), report.render()
    assert not any("formula itself" in str(cause) for cause in causes)
