"""Errors of layers with weights: convolutions, recurrent layers, norms."""

from __future__ import annotations

from ....finding import Severity
from ..family import Cause, Explained, Seen, family
from .causes import outside_autocast


@family("EX003", "convolution", "recurrent layer")
def convolution(s: Seen) -> Explained:
    """A convolution's or recurrent layer's input and parameters differ

    **Why it matters.** Convolutions check the input against the bias first, then the weight. In diffusion training the VAE is often
    kept in fp32 while pixels or latents are cast to the training dtype, or the reverse.

    **Example.** `vae.encode(pixel_values.to(torch.bfloat16))` with an fp32 VAE.

    **What to do.** Cast at the border: `vae.encode(pixels.to(vae.dtype))`, and the latents to the denoiser's dtype after it.
    """
    left, right = s.dtype("left", s.dtype("expected")), s.dtype("right", s.dtype("got"))
    layer = s.operator
    causes = []
    if "backward" in s.situation or "grad_output" in " ".join(s.words.values()):
        causes.append(
            Cause(
                name="gradient and weight differ",
                score=5,
                why=(
                    f"in backward the gradient is {left} and the saved weight {right}: fp16 or fp32 weights under another "
                    "mixed precision, or a custom backward without casts"
                ),
                fix=(
                    "make the weights the dtype mixed precision uses (or fp32), and cast saved tensors to "
                    "grad_output.dtype in a custom backward"
                ),
                because="the failing call is a backward",
            )
        )
    vae = s.situation.mentions(r"vae|autoencoder|encode\(|decode\(|first_stage")
    if layer == "convolution" and not vae:
        causes.append(
            Cause(
                name="input and convolution in two dtypes",
                score=2,
                why=f"the input is {left} and the convolution's parameters {right}: one of them was cast and the other was not",
                fix="cast the input where it enters: x.to(conv.weight.dtype), or the convolution with the rest of its model",
            )
        )
    if vae:
        causes.append(
            Cause(
                name="VAE or image encoder in another dtype",
                score=4,
                why=(
                    f"the input is {left} and the layer's parameters {right}: a VAE (or image encoder) kept in one dtype "
                    "while pixels or latents are cast to another"
                ),
                fix="cast the input at the border: vae.encode(pixel_values.to(vae.dtype)), and latents.to(transformer.dtype) after it",
                because=f"{vae.code or vae.function} at {vae.file}:{vae.line}",
            )
        )
    causes += list(outside_autocast(s))
    causes.append(
        Cause(
            name="input not cast to the layer's dtype",
            score=1.5,
            why=f"a {layer} got {left} and has {right} parameters, outside autocast",
            fix=f"layer(x.to(next(layer.parameters()).dtype)), or run under {s.autocast}",
        )
    )
    return Explained(message=f"{layer}: {left} input, {right} parameters", causes=causes)


@family("EX004", "norm", "slow norm")
def norm(s: Seen) -> Explained:
    """A norm's weight and its input differ

    **Why it matters.** On a CPU a low-precision norm weight does not go with an fp32 input (only the reverse is allowed); on CUDA the
    layer norm refuses both. `rms_norm` only warns, and takes its slow path.

    **Example.** A model cast to bf16 whose embedding output is fp32, on a CPU.

    **What to do.** Keep norm weights fp32, or cast the norm's input; under autocast `layer_norm` computes in fp32 by itself.
    """
    want, got = s.dtype("expected", s.dtype("left")), s.dtype("got", s.dtype("right"))
    if s.operator == "slow norm":
        return Explained(
            message=f"rms_norm: {want} input, {got} weight: the fused path is not taken",
            severity=Severity.WARNING,
            causes=[
                Cause(
                    name="norm weight in another dtype",
                    score=2,
                    why=f"the norm's weight is {got} and its input {want}; the result is right, but computed by the slow path",
                    fix=(
                        "cast the norm's weight to the input's dtype, norm.to(x.dtype), or accept the slower path: it is a "
                        "warning, not an error"
                    ),
                )
            ],
        )
    what = s.words.get("what", "parameter")
    return Explained(
        message=f"norm: {what} must be {want}"
        if "expected" in s.dtypes and "got" not in s.dtypes
        else f"norm: {want} expected, {got} found",
        causes=[
            *outside_autocast(s),
            Cause(
                name="norm weight and input differ",
                score=3,
                why=(
                    "the norm's weight (parameter) and its input have two dtypes: the model was cast to half precision "
                    f"and its input was not, or the norm's weight was kept fp32; expected {want}"
                ),
                fix=(
                    "keep one rule: norm.float() and x.float() inside the norm with the output cast back, or "
                    "x.to(norm.weight.dtype) before it; under torch.autocast layer_norm computes in fp32"
                ),
                because=f"the text asks for {want}",
            ),
            Cause(
                name="half-precision model on a CPU",
                score=1,
                why="a model made for a GPU in half precision is run on a CPU",
                fix="model.float() on a CPU, or bf16 under torch.autocast('cpu', torch.bfloat16)",
            ),
        ],
    )
