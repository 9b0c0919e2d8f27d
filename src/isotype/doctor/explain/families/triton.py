"""Families of errors from Triton's compiler."""

from __future__ import annotations

import re

from ..family import Cause, Explained, Seen, family
from ..recognise import dtype_word


@family("EX020", "Triton branch")
def triton_branch(s: Seen) -> Explained:
    """A Triton variable changes dtype inside a run-time branch

    **Why it matters.** Triton gives each name one type after a branch taken at run time. A low-precision load that becomes fp32 inside
    `if` (a product with a float, a cast) compiles only when the branch is a constexpr, or when the inputs are fp32.

    **Example.** `x = tl.load(p)` (bf16), then under `if SCALE:` `x = scale * x` (fp32).

    **What to do.** Load as fp32 before the branch, `tl.load(p).to(tl.float32)`, and declare flags `tl.constexpr`.
    """
    name = s.words.get("name", "the value")
    left, right = s.dtype("left"), s.dtype("right")
    target = f"`{name}`" if "name" in s.words else "one arm of a conditional expression"
    return Explained(
        message=f"Triton: {target} is {left} before a branch and {right} inside it"
        if "name" in s.words
        else f"Triton: a conditional expression has a {left} and a {right} arm",
        causes=[
            Cause(
                name=f"{name} changes dtype in a branch",
                score=4,
                why=(
                    f"{name} is {left} when loaded and {right} after one side of a run-time branch (a product with an "
                    "fp32 value, or a cast): fp16/bf16 inputs fail where fp32 compiles"
                ),
                fix=(
                    f"load as fp32 before the branch:\n    {name if 'name' in s.words else 'x'} = "
                    "tl.load(ptr).to(tl.float32)\nand cast once at tl.store"
                ),
                because=f"the {s.words['block']} block is named in the text" if "block" in s.words else "the text names both types",
            ),
            Cause(
                name="flag is not constexpr",
                score=2,
                why="a flag that is not tl.constexpr makes the branch a run-time one",
                fix="declare the flag FLAG: tl.constexpr in the kernel's signature",
            ),
        ],
    )


@family("EX021", "Triton loop")
def triton_loop(s: Seen) -> Explained:
    """A Triton variable changes dtype inside a loop

    **Why it matters.** A loop-carried variable keeps the type it enters with. An accumulator made in the pointer's dtype becomes
    fp32 at the first addition;
    a Python float handed over by Inductor arrives as fp64.

    **Example.** `acc = tl.zeros([64], dtype=x.dtype)` with `acc += tl.sum(y.to(tl.float32))`.

    **What to do.** Start the accumulator as `tl.zeros(..., dtype=tl.float32)`; pin scalars with `.to(tl.float32)`.
    """
    name, left, right = s.words.get("name", "acc"), s.dtype("left"), s.dtype("right")
    causes = [
        Cause(
            name=f"accumulator {name} starts in another dtype",
            score=4,
            why=(
                f"the loop variable {name} starts as {left} and becomes {right} in the loop: the accumulator has the "
                "pointer's dtype, or an operand is wider"
            ),
            fix=(
                f"start the accumulator as fp32: {name} = tl.zeros(shape, dtype=tl.float32), or cast in the loop: "
                f"{name} += (...).to({name}.dtype)"
            ),
            because=f"{left} before the loop, {right} inside",
        )
    ]
    if "fp64" in (left, right):
        causes.append(
            Cause(
                name="Python float arrives as fp64",
                score=5,
                why=f"a Python float (Inductor hands them over as fp64) promotes {name} in the loop",
                fix="pin the scalar: scale = scale.to(tl.float32)",
                because="one of the two types is fp64",
            )
        )
    return Explained(message=f"Triton: loop variable `{name}` goes from {left} to {right}", causes=causes)


@family("EX022", "Triton dot", "Triton accumulator")
def triton_dot(s: Seen) -> Explained:
    """tl.dot with two dtypes

    **Why it matters.** `tl.dot` takes one dtype. Softmax probabilities, or an operand multiplied by a scalar, are fp32 while the
    other stays as loaded.

    **Example.** `tl.dot(p, v)` with fp32 `p` and bf16 `v`.

    **What to do.** Cast next to the dot: `tl.dot(p.to(v.dtype), v)`; the accumulator stays fp32.
    """
    if s.operator == "Triton accumulator":
        return Explained(
            message="Triton: tl.dot's accumulator is not fp32",
            causes=[
                Cause(
                    name="accumulator in low precision",
                    score=3,
                    why=(
                        "tl.dot sums in fp32 (or in fp16 where out_dtype says so) and never in bf16; the accumulator handed to it was "
                        "made in another dtype, often the output's"
                    ),
                    fix="acc = tl.zeros(shape, dtype=tl.float32); acc = tl.dot(a, b, acc); narrow once at tl.store",
                    because="the text names the accumulator's or the output's dtype",
                )
            ],
        )
    left, right = s.dtype("left"), s.dtype("right")
    pair = f"{left} and {right}" if s.dtypes else "two dtypes"
    return Explained(
        message=f"Triton: tl.dot of {pair}",
        causes=[
            Cause(
                name="operand of tl.dot promoted",
                score=3,
                why=(
                    f"the operands of tl.dot are {pair}: softmax probabilities or a scalar product promoted "
                    f"one side to fp32, or an fp32 parameter meets activations that autocast made {s.half}"
                ),
                fix="cast next to the dot: acc = tl.dot(p.to(v.dtype), v, acc); the accumulator stays fp32",
            )
        ],
    )


@family("EX023", "Triton math")
def triton_math(s: Seen) -> Explained:
    """A Triton math function on a low-precision value

    **Why it matters.** `tl.exp`, `tl.log`, `tl.rsqrt`, `tl.sin` have fp32 and fp64 forms only; a value as loaded from a bf16
    pointer fails to compile.

    **Example.** `tl.exp(tl.load(p))` with bf16 `p`.

    **What to do.** Widen at the load: `tl.load(p).to(tl.float32)`.
    """
    got = s.dtype("got")
    return Explained(
        message=f"Triton: a math function got {got}; it takes {s.words.get('ok', 'fp32')}",
        causes=[
            Cause(
                name="math function on the loaded dtype",
                score=3,
                why=(
                    f"exp, log, sqrt and the like take {s.words.get('ok', 'fp32')} and got {got}: the value keeps the "
                    "pointer's dtype since tl.load"
                ),
                fix="widen at the load: x = tl.load(ptr).to(tl.float32), and narrow once at tl.store",
                because=f"the text says {got}",
            )
        ],
    )


@family("EX024", "Triton store", "Triton fp8")
def triton_store(s: Seen) -> Explained:
    """A Triton store or format that this version or GPU does not take

    **Why it matters.** Older Triton casts nothing in a store through a block pointer; fp8 formats depend on the GPU (fp8e4nv
    needs compute capability 8.9).

    **Example.** `tl.store(block_ptr, acc)` with an fp32 accumulator and a bf16 output.

    **What to do.** Cast at the store, `acc.to(ptr.dtype.element_ty)`; use `fp8e5` or bf16 on older GPUs.
    """
    if s.operator == "Triton fp8":
        kind = s.words.get("dtype", "fp8")
        return Explained(
            message=f"Triton: {kind} is not available on this GPU",
            causes=[
                Cause(
                    name="fp8 format absent on this GPU",
                    score=3,
                    why=(
                        f"{kind} needs compute capability 8.9 (Ada, Hopper) or newer; an FP8 checkpoint or FP8 setting is "
                        "used on an older architecture"
                    ),
                    fix="load a bf16 checkpoint, or switch FP8 off; fp8e5 works on older hardware",
                    because=f"the text names {kind}",
                )
            ],
        )
    left, right = s.dtype("left"), s.dtype("right")
    return Explained(
        message=f"Triton: {right} value stored to a {left} block",
        causes=[
            Cause(
                name="store without a cast",
                score=3,
                why=(
                    f"the block pointer's element type is {left} and the value is {right} (an fp32 accumulator): this "
                    "Triton does not cast in tl.store through a block pointer"
                ),
                fix="cast at the store: tl.store(ptr, acc.to(ptr.dtype.element_ty))",
                because="the text names both types",
            )
        ],
    )


@family("EX033", "Triton assertion", "Triton operands")
def triton_types(s: Seen) -> Explained:
    """A Triton value has another type than the kernel's author meant

    **Why it matters.** Triton fixes types when it compiles. A Python float handed over by Inductor arrives as fp64, a sum of fp16 is
    fp32 or fp16 by the backend's choice, and a pointer takes integer offsets only.

    **Example.** `tl.static_assert(x.dtype == tl.float16)` after an fp32 sum; an offset computed with a float.

    **What to do.** Cast where the value is made; compute offsets in integers. In code that `torch.compile` wrote it is a fault of
    the compiler: keep that operation out of the graph, or upgrade torch.
    """
    generated = bool(re.search(r"inductor|triton_(?:poi|red|per|tem)_", s.text, re.IGNORECASE)) or "compile" in s.situation
    if s.operator == "Triton operands":
        pointer, other = s.words["pointer"], dtype_word(s.words["other"])
        message = f"Triton: {pointer} and {other} in one operation"
        name, why = (
            "offset that is not an integer",
            f"a pointer ({pointer}) is added to {other}: an offset, stride or size became a float (a Python float arrives as fp64)",
        )
        fix = "compute the offset in integers (//, not /; int(...) before the launch)"
    else:
        variable, only = s.words["name"], dtype_word(s.words["only"])
        message = f"Triton: {variable} is not {only} as the kernel asserts"
        name, why = (
            "static_assert on a dtype",
            f"the kernel asserts that {variable} is {only}, and this compiler or backend gives it another dtype (sums and "
            "promotions differ between them)",
        )
        fix = f"cast where it is made: {variable} = {variable}.to(tl.{s.words['only']})"
    if generated:
        fix = (
            "the kernel was written by torch.compile: upgrade torch and Triton together, or keep that operation eager "
            "(torch.compiler.disable); in a kernel of your own, " + fix
        )
    return Explained(message=message, causes=[Cause(name=name, score=3, why=why, fix=fix, because="the text names it")])
