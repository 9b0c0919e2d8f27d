"""One step of Unsloth's released code for a Llama of these shapes, launch by launch, each row with the file and line that does it.

Read from unsloth 2026.8.19 (commit 015bdef0d94a) and unsloth_zoo 2026.8.13 (ce232d6cef9c): its defaults, gradient checkpointing "unsloth",
no dropout, rows without padding. Where a choice depends on what is installed, the faster one is counted: cuDNN's attention, and a compiled
loss that reads and writes its logits as rarely as ours. Adapters are fp32 there too; casts of them are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .rows import Row, attention, memory, product

LORA, UTILS, LLAMA = "unsloth/kernels/fast_lora.py", "unsloth/kernels/utils.py", "unsloth/models/llama.py"
NORM, ROPE, SWIGLU = "unsloth/kernels/rms_layernorm.py", "unsloth/kernels/rope_embedding.py", "unsloth/kernels/swiglu.py"
LOSS, CHECKPOINT = "unsloth_zoo/fused_losses/cross_entropy_loss.py", "unsloth_zoo/gradient_checkpointing.py"


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of a step: rows x length tokens through `layers` layers; heads of `depth`; `nf4` base weights; rank of every adapter."""

    rows: int
    length: int
    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    depth: int
    vocabulary: int
    rank: int
    nf4: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each projection."""
        q, k = self.heads * self.depth, self.key_heads * self.depth
        return {
            "q": (q, self.hidden), "k": (k, self.hidden), "v": (k, self.hidden), "o": (self.hidden, q),
            "gate": (self.inner, self.hidden), "up": (self.inner, self.hidden), "down": (self.hidden, self.inner),
        }  # fmt: skip


def _widened(s: Shapes, phase: str, out: int, features: int) -> Iterator[Row]:
    if not s.nf4:
        return
    n = out * features
    scales = n / 64
    yield memory(phase, "dequantise: scales", scales + 4 * scales, source=f"{UTILS}:731")
    yield memory(phase, "dequantise: offset", 8 * scales, source=f"{UTILS}:739")
    yield memory(phase, "dequantise: weight", n / 2 + 4 * scales + 2 * n, source=f"{UTILS}:747")


def _matmul_lora(s: Shapes, phase: str, out: int, features: int, at: str) -> Iterator[Row]:
    """X W^T + s (X A^T) B^T: utils.py:1128 to 1170."""
    yield from _widened(s, phase, out, features)
    yield product(phase, "base product", s.tokens, out, features, source=f"{UTILS}:1159 from {at}")
    yield product(phase, "adapter: X A", s.tokens, s.rank, features, source=f"{UTILS}:1166")
    yield product(phase, "adapter: += XA B", s.tokens, out, s.rank, adds=True, source=f"{UTILS}:1167")


def layer_forward(s: Shapes, phase: str) -> Iterator[Row]:
    th, ti = 2 * s.tokens * s.hidden, 2 * s.tokens * s.inner
    w = s.widths
    q = 2 * s.tokens * w["q"][0]
    k = 2 * s.tokens * w["k"][0]
    yield memory(phase, "norm", 2 * th, source=f"{NORM}:164, {LLAMA}:825")
    for name, line in (("q", 397), ("k", 398), ("v", 399)):
        yield from _matmul_lora(s, phase, *w[name], f"{LORA}:{line}")
    yield memory(phase, "rope: q, in place", 2 * q, source=f"{ROPE}:276")
    yield memory(phase, "rope: k, in place", 2 * k, source=f"{ROPE}:277")
    yield attention(phase, "attention", s.rows, s.heads, s.key_heads, s.length, s.depth, source=f"{LLAMA}:766")
    yield from _matmul_lora(s, phase, *w["o"], f"{LORA}:606")
    yield memory(phase, "residual add", 3 * th, source=f"{LLAMA}:838")
    yield memory(phase, "norm", 2 * th, source=f"{NORM}:164, {LLAMA}:842")
    yield from _matmul_lora(s, phase, *w["gate"], f"{LORA}:93")
    yield from _matmul_lora(s, phase, *w["up"], f"{LORA}:94")
    yield memory(phase, "swiglu", 3 * ti, source=f"{SWIGLU}:47, {LORA}:95")
    yield from _matmul_lora(s, phase, *w["down"], f"{LORA}:96")
    yield memory(phase, "residual add", 3 * th, source=f"{LLAMA}:844")


def _adapter_gradients(s: Shapes, out: int, features: int, at: str) -> Iterator[Row]:
    """dA = X^T (dY B^T) and dB = (A^T X^T) dY: four products."""
    yield product("backward", "adapter: dY B", s.tokens, s.rank, out, source=at)
    yield product("backward", "adapter: dA", features, s.rank, s.tokens, source=at)
    yield product("backward", "adapter: X A again", s.rank, s.tokens, features, source=at)
    yield product("backward", "adapter: dB", s.rank, out, s.tokens, source=at)


def _input_gradient(s: Shapes, out: int, features: int, at: str, *, adds: bool) -> Iterator[Row]:
    """dX (+)= dY W, and dX += (dY B^T) A^T."""
    yield from _widened(s, "backward", out, features)
    yield product("backward", "base product", s.tokens, features, out, adds=adds, source=at)
    yield product("backward", "adapter: dY B again", s.tokens, s.rank, out, source=at)
    yield product("backward", "adapter: dX += dXA A", s.tokens, features, s.rank, adds=True, source=at)


def layer_backward(s: Shapes) -> Iterator[Row]:
    th, ti = 2 * s.tokens * s.hidden, 2 * s.tokens * s.inner
    w = s.widths
    q, k = 2 * s.tokens * w["q"][0], 2 * s.tokens * w["k"][0]
    # the gradient of down's input is a matmul_lora with A and B exchanged
    yield from _widened(s, "backward", *w["down"])
    yield product("backward", "base product", s.tokens, s.inner, s.hidden, source=f"{LORA}:156")
    yield product("backward", "adapter: dY B", s.tokens, s.rank, s.hidden, source=f"{LORA}:156, {UTILS}:1166")
    yield product("backward", "adapter: += dXA A", s.tokens, s.inner, s.rank, adds=True, source=f"{LORA}:156, {UTILS}:1167")
    yield memory("backward", "swiglu backward, in place", 6 * ti, source=f"{SWIGLU}:112, {LORA}:157")
    yield from _adapter_gradients(s, *w["down"], f"{LORA}:172")
    yield from _adapter_gradients(s, *w["up"], f"{LORA}:180")
    yield from _adapter_gradients(s, *w["gate"], f"{LORA}:188")
    yield from _input_gradient(s, *w["up"], f"{LORA}:194", adds=False)
    yield from _input_gradient(s, *w["gate"], f"{LORA}:201", adds=True)
    yield memory("backward", "norm backward, in place", 3 * th, source=f"{NORM}:209")
    yield memory("backward", "residual gradient", 3 * th, source=f"{LLAMA}:844")
    yield from _adapter_gradients(s, *w["o"], f"{LORA}:639")
    yield from _input_gradient(s, *w["o"], f"{LORA}:643", adds=False)
    yield attention("backward", "attention backward", s.rows, s.heads, s.key_heads, s.length, s.depth, source=f"{LLAMA}:766")
    yield memory("backward", "rope backward: q, in place", 2 * q, source=f"{ROPE}:222")
    yield memory("backward", "rope backward: k, in place", 2 * k, source=f"{ROPE}:222")
    for name, line in (("q", 476), ("k", 484), ("v", 492)):
        yield from _adapter_gradients(s, *w[name], f"{LORA}:{line}")
    for name, line in (("q", 498), ("k", 506), ("v", 514)):
        yield from _input_gradient(s, *w[name], f"{LORA}:{line}", adds=name != "q")
    yield memory("backward", "norm backward, in place", 3 * th, source=f"{NORM}:209")
    yield memory("backward", "residual gradient", 3 * th, source=f"{LLAMA}:838")


def loss_chunks(s: Shapes) -> int:
    """One chunk for up to 4 GiB of fp32 logits, else a multiple of four: cross_entropy_loss.py:140 to 174."""
    exact = s.tokens * s.vocabulary * 4 / 2**30 / 4
    return 1 if exact <= 1 else -int(-exact // 4) * 4


def head(s: Shapes) -> Iterator[Row]:
    n = loss_chunks(s)
    chunk = s.tokens / n
    logits = 2 * chunk * s.vocabulary
    for _ in range(n):
        yield product("forward", "head: logits", round(chunk), s.vocabulary, s.hidden, source=f"{LOSS}:102")
        yield memory("forward", "head: loss", logits, source=f"{LOSS}:124")
        yield memory("forward", "head: gradient of logits", 2 * logits, source=f"{LOSS}:124")
        yield product("forward", "head: dX", round(chunk), s.hidden, s.vocabulary, source=f"{LOSS}:329")
    yield memory("backward", "head: dX scaled", 4 * s.tokens * s.hidden, source=f"{LOSS}:527")


def step(s: Shapes) -> list[Row]:
    """Every launch of one micro-batch and the update of fp32 adapters with one fused AdamW."""
    rows: list[Row] = []
    th = 2 * s.tokens * s.hidden
    rows.append(memory("forward", "embedding", 2 * th, source=f"{LLAMA}:956"))
    for _ in range(s.layers):
        rows.append(Row(phase="forward", name="layer's input to the host", kind="copy", bytes=th, source=f"{CHECKPOINT}:854"))
        rows += layer_forward(s, "forward")
    rows.append(memory("forward", "norm", 2 * th, source=f"{LLAMA}:1228"))
    rows += head(s)
    rows.append(memory("backward", "norm backward, in place", 3 * th, source=f"{NORM}:209"))
    for _ in range(s.layers):
        rows.append(Row(phase="backward", name="layer's input from the host", kind="copy", bytes=th, source=f"{CHECKPOINT}:934"))
        rows += layer_forward(s, "recompute")
        rows += layer_backward(s)
    trained = sum(s.rank * (out + features) for out, features in s.widths.values()) * s.layers
    rows.append(memory("update", "AdamW", 28 * trained, source="torch.optim.AdamW(fused=True)"))
    return rows


def peak_bytes(s: Shapes, held: int) -> int:
    """What is held (weights, adapters, gradients, states) and the larger of two moments: the loss, and the backward of a layer.

    Layers' inputs wait in host memory, with two buffers on the device (gradient_checkpointing.py:854, 934). In the loss the logits of a
    chunk and their gradient are alive in bf16. In a layer's MLP backward: its input, both normed inputs, the residual between, attention's
    output, dY and dX; q, k and v; X, e, g (fast_lora.py:110) and DW (fast_lora.py:156), whose gradients are written over them; one widened
    weight and the global buffer of another (utils.py:1158).
    """
    th, ti = 2 * s.tokens * s.hidden, 2 * s.tokens * s.inner
    q, k = 2 * s.tokens * s.widths["q"][0], 2 * s.tokens * s.widths["k"][0]
    loss = 2 * 2 * s.tokens // loss_chunks(s) * s.vocabulary + 3 * th
    widened = 2 * 2 * s.inner * s.hidden if s.nf4 else 0
    layer = 6 * th + 2 * q + 2 * k + 3 * ti + widened
    return held + 2 * th + max(loss, layer)
