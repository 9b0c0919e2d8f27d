"""What a kernel's launches hand its pointers decides whether bf16 ever comes there."""

import pytest

from isotype.doctor.lint.command import lint_command

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
KERNEL = """@triton.jit
def fold(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty)
    for start in range(0, n, BLOCK):
        total += tl.load(x_ptr + start + cols)
    tl.store(y_ptr + cols, total)


"""
CHOSEN = """@triton.jit
def arctanh(x_ptr, n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    if WIDE:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, n, BLOCK):
            total += tl.load(x_ptr + start + cols).to(tl.float32)
    else:
        total = tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty)
        for start in range(0, n, BLOCK):
            total += tl.load(x_ptr + start + cols)
    tl.store(x_ptr + cols, total)


"""
LOOP = """@triton.jit
def balance(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    f = tl.zeros((BLOCK,), dtype=x.dtype)
    for _ in range(n):
        f = x - tl.max(x + f, axis=0)
    tl.store(y_ptr + cols, f)


"""
COUNT = """@triton.jit
def count(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    total = tl.full((), value=0, dtype=out_ptr.dtype.element_ty)
    for start in range(0, n, BLOCK):
        total += tl.sum(tl.load(x_ptr + start + cols))
    tl.store(out_ptr, total)


"""
CAST = "def sin(x):\n    x32 = x.contiguous().to(torch.float32)\n    fold[(1,)](x32, torch.empty_like(x32), x.numel(), BLOCK=1024)\n"
HELPED = """def prepare(x):
    return x.float(), x.dtype


def sin(x):
    wide, dtype = prepare(x)
    fold[(1,)](wide, torch.empty_like(wide), x.numel(), BLOCK=1024)
"""
NAMED = "def sin(x_fp32):\n    fold[(1,)](x_fp32, torch.empty_like(x_fp32), x_fp32.numel(), BLOCK=1024)\n"
SAVED = """class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.float()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        fold[(1,)](x, dy, x.numel(), BLOCK=1024)
        return dy
"""


@pytest.fixture
def told(tmp_path):
    """Codes told of these files, in a project."""

    def lint(*, possible=False, **files):
        (tmp_path / "pyproject.toml").touch()
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(HEAD + text)
        return [
            f.code
            for f in lint_command([tmp_path], select=["LT020", "LT022", "LT024"], possible=possible).findings
            if f.code.startswith("LT02")
        ]

    return lint


@pytest.mark.parametrize("launch", [CAST, HELPED, NAMED, SAVED])
def test_a_launch_that_casts(told, launch):
    assert told(kernels=KERNEL) == [], "nobody launches it"
    assert told(kernels=KERNEL, possible=True) == ["LT024"]
    assert told(kernels=KERNEL + CAST.replace(".to(torch.float32)", "")) == ["LT024"]
    assert told(kernels=KERNEL + launch) == []


@pytest.mark.parametrize(
    "launch",
    [
        CAST.replace(".to(torch.float32)", ""),
        CAST + CAST.replace("def sin", "def out").replace(".to(torch.float32)", ""),
        SAVED.replace("x = x.float()", "x = x.contiguous()"),
    ],
)
def test_a_launch_that_hands_bf16(told, launch):
    assert told(kernels=KERNEL + launch) == ["LT024"]


def test_a_launch_that_is_not_followed(told):
    launch = CAST.replace("x32 = x.contiguous().to(torch.float32)", "x32 = narrow(x)")
    assert told(kernels=KERNEL + launch) == []
    assert told(kernels=KERNEL + launch, possible=True) == ["LT024"]


def test_launches_of_another_file(told):
    assert told(kernels=KERNEL, ops="from .kernels import fold\n\n\n" + CAST) == []
    assert told(kernels=KERNEL, ops="from .kernels import fold\n\n\n" + CAST.replace(".to(torch.float32)", "")) == ["LT024"]
    other = KERNEL.replace("x_ptr.dtype.element_ty", "tl.float32")
    assert told(kernels=KERNEL + CAST, ops=other + CAST.replace(".to(torch.float32)", "")) == [], "a kernel of its own of that name"


def test_a_flag_chosen_by_the_dtype(told):
    launch = "def run(x):\n    wide = x.dtype in (torch.float16, torch.bfloat16)\n    arctanh[(1,)](x, x.numel(), BLOCK=64, WIDE=wide)\n"
    assert told(kernels=CHOSEN + launch) == []
    assert told(kernels=CHOSEN + launch.replace("x.dtype in (torch.float16, torch.bfloat16)", "x.numel() > 64")) == ["LT024"]
    assert told(kernels=CHOSEN.replace(".to(tl.float32)", "") + launch) == ["LT024"], "the other branch does not cast either"


@pytest.mark.parametrize(("dtype", "expected"), [("torch.float32", []), ("x.dtype", ["LT020"])])
def test_a_loop_over_what_the_launch_cast(told, dtype, expected):
    launch = f"def run(x):\n    x = x.to({dtype})\n    balance[(1,)](x, torch.empty_like(x), 3, BLOCK=64)\n"
    assert told(kernels=LOOP + launch) == expected


@pytest.mark.parametrize(("dtype", "expected"), [("torch.int64", []), ("torch.float32", []), ("x.dtype", ["LT024"])])
def test_a_sum_into_what_the_launch_made(told, dtype, expected):
    launch = f"def run(x):\n    out = torch.zeros((), dtype={dtype}, device=x.device)\n    count[(1,)](x, out, x.numel(), BLOCK=64)\n"
    assert told(kernels=COUNT + launch) == expected


def test_a_kernel_that_nothing_launches(told):
    left_over = KERNEL.replace("def fold", "def left_over")
    assert told(kernels=left_over + KERNEL + CAST) == []
    assert told(kernels=left_over + KERNEL + CAST, possible=True) == ["LT024", "LT024"]


DOT = """@triton.jit
def product(dy_ptr, w_ptr, dx_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(dx_ptr + at, tl.dot(tl.load(dy_ptr + at), tl.load(w_ptr + at)))


class Project(torch.autograd.Function):
    @staticmethod
    {decorator}def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x @ w.t()

    @staticmethod
    {other}def backward(ctx, dy):
        (w,) = ctx.saved_tensors
        dx = torch.empty_like(dy)
        product[(1,)](dy, {weight}, dx, 64)
        return dx, None


def project(x, w):
    return Project.apply(x, w)
"""
ATOMIC = """@triton.jit
def scatter(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + cols, tl.load(x_ptr + tl.program_id(0) * BLOCK + cols))


def column_sums(x):
    out = torch.zeros_like(x[0]{dtype})
    scatter[(x.shape[0],)](x, out, x.numel(), BLOCK=64)
    return out
"""


def test_a_launch_from_an_undecorated_function_mixes_dtypes(told):
    undecorated = {"decorator": "", "other": ""}
    assert told(kernels=DOT.format(weight="w", **undecorated)) == ["LT022"]
    assert told(kernels=DOT.format(weight="w.to(dy.dtype)", **undecorated), possible=True) == []
    forward = "@torch.amp.custom_fwd(device_type='cuda', cast_inputs=torch.bfloat16)\n    "
    decorators = {"decorator": forward, "other": "@torch.amp.custom_bwd(device_type='cuda')\n    "}
    assert told(kernels=DOT.format(weight="w", **decorators), possible=True) == []


def test_an_atomic_sum_into_a_low_precision_buffer(told):
    assert told(kernels=ATOMIC.format(dtype="")) == ["LT024"]
    assert told(kernels=ATOMIC.format(dtype=", dtype=torch.float32"), possible=True) == []


REREAD = """@triton.jit
def gradient(x_ptr, dx_ptr, y, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols).to(tl.float32)
    tl.store(dx_ptr + cols, tl.exp(x))
    {back}


def backward(x, y):
    dx = torch.empty_like(x)
    gradient[(1,)](x, dx, y, x.numel(), BLOCK=64)
    return dx
"""


def test_what_was_stored_in_low_precision_is_read_back(told):
    assert told(kernels=REREAD.format(back="tl.store(dx_ptr + y, tl.load(dx_ptr + y).to(tl.float32) - 1.0)")) == ["LT024"]
    assert told(kernels=REREAD.format(back="tl.store(dx_ptr + y, tl.exp(tl.load(x_ptr + y).to(tl.float32)) - 1.0)"), possible=True) == []


DOT_ELSEWHERE = """@triton.jit
def product(do_ptr, states_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    do = tl.load(do_ptr + i[:, None] * BLOCK + i[None, :])
    states = tl.load(states_ptr + i[:, None] * BLOCK + i[None, :])
    tl.store(out_ptr + i[:, None] * BLOCK + i[None, :], tl.dot(do, states{cast}))


def states_of(x):
    return torch.zeros((x.shape[0], 64), device=x.device, dtype=torch.bfloat16)


def states_backward(do, states):
    out = torch.empty_like(do)
    product[(1,)](do, states, out, BLOCK=64)
    return out
"""
FUNCTION_ELSEWHERE = """import torch
from .kernels import states_backward, states_of


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        needed = any(ctx.needs_input_grad)
        states = states_of(x)
        if needed:
            ctx.save_for_backward(states)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        if len(ctx.saved_tensors) == 0:
            raise RuntimeError("forward ran without gradients")
        (states,) = ctx.saved_tensors
        return states_backward(dy, states)
"""


def test_a_function_of_another_file_launches_through_a_helper(told):
    """The saved states are bf16 whatever the input is; the helper that launches and the Function stand in two files."""
    assert told(kernels=DOT_ELSEWHERE.format(cast=""), scan=FUNCTION_ELSEWHERE) == ["LT022"]
    assert told(kernels=DOT_ELSEWHERE.format(cast=".to(do.dtype)"), scan=FUNCTION_ELSEWHERE, possible=True) == []
