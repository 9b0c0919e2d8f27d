"""One step of Unsloth's released code for a Llama of these shapes, launch by launch, each row with
the file and line that does it.

Read from unsloth 2026.10.9 and unsloth_zoo 2026.10.9 as their wheels have them: their defaults on a
card of more than 24 GiB, gradient checkpointing "unsloth", no dropout, rows without padding. Where
a choice depends on what is installed, the faster one is counted: its own NF4 kernel, cuDNN's
attention. Its compiled layers are counted as the uncompiled ones, whose kernels they call: norms,
rotary embedding, 4-bit weights and products stay calls of their own there. Adapters are fp32 there
too; casts of them are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ledger_rows import Row, attention, memory, product

LORA, UTILS, LLAMA = (
    "unsloth/kernels/fast_lora.py",
    "unsloth/kernels/utils.py",
    "unsloth/models/llama.py",
)
NORM, ROPE, SWIGLU = (
    "unsloth/kernels/rms_layernorm.py",
    "unsloth/kernels/rope_embedding.py",
    "unsloth/kernels/swiglu.py",
)
NF4 = "unsloth/kernels/nf4.py"
LOSS, CHECKPOINT = (
    "unsloth_zoo/fused_losses/fused_linear.py",
    "unsloth_zoo/gradient_checkpointing.py",
)

VERSION = "2026.10.9"


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of a step: rows x length tokens through `layers` layers; heads of `depth`; `nf4` base
    weights; rank of every adapter.
    """

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
    """One launch: 4 bits and two levels of scales in, bf16 out."""
    if s.nf4:
        n = out * features
        yield memory(
            phase,
            "dequantise",
            n / 2 + n / 64 + 4 * n / 64 / 256 + 2 * n,
            source=f"{NF4}:91, {UTILS}:984",
        )


def _matmul_lora(s: Shapes, phase: str, out: int, features: int, at: str) -> Iterator[Row]:
    """X W^T + s (X A^T) B^T: utils.py:1859 to 1900."""
    yield from _widened(s, phase, out, features)
    yield product(phase, "base product", s.tokens, out, features, source=f"{UTILS}:1891 from {at}")
    yield product(phase, "adapter: X A", s.tokens, s.rank, features, source=f"{UTILS}:1897")
    yield product(
        phase, "adapter: += XA B", s.tokens, out, s.rank, adds=True, source=f"{UTILS}:1898"
    )


def layer_forward(s: Shapes, phase: str) -> Iterator[Row]:
    th, ti = 2 * s.tokens * s.hidden, 2 * s.tokens * s.inner
    w = s.widths
    q = 2 * s.tokens * w["q"][0]
    k = 2 * s.tokens * w["k"][0]
    yield memory(phase, "norm", 2 * th, source=f"{NORM}:699, {LLAMA}:1213")
    for name, line in (("q", 813), ("k", 814), ("v", 815)):
        yield from _matmul_lora(s, phase, *w[name], f"{LORA}:{line}")
    yield memory(
        phase, "rope: q and k, in place", 2 * q + 2 * k, source=f"{ROPE}:363, {LLAMA}:1119"
    )
    yield attention(
        phase, "attention", s.rows, s.heads, s.key_heads, s.length, s.depth, source=f"{LLAMA}:1155"
    )
    yield from _matmul_lora(s, phase, *w["o"], f"{LORA}:1062")
    yield memory(phase, "residual add", 3 * th, source=f"{LLAMA}:1228")
    yield memory(phase, "norm", 2 * th, source=f"{NORM}:699, {LLAMA}:1231")
    yield from _matmul_lora(s, phase, *w["gate"], f"{LORA}:417")
    yield from _matmul_lora(s, phase, *w["up"], f"{LORA}:418")
    yield memory(phase, "swiglu", 3 * ti, source=f"{SWIGLU}:52, {LORA}:419")
    yield from _matmul_lora(s, phase, *w["down"], f"{LORA}:420")
    yield memory(phase, "residual add", 3 * th, source=f"{LLAMA}:1235")


def _adapter_gradients(
    s: Shapes, out: int, features: int, at: int, *, narrow_at: int
) -> Iterator[Row]:
    """dY B^T, which the gradient of the input uses again; dA = X^T (dY B^T); dB = (A^T X^T) dY of
    two products.
    """
    yield product("backward", "adapter: dY B", s.tokens, s.rank, out, source=f"{LORA}:{narrow_at}")
    yield product("backward", "adapter: dA", features, s.rank, s.tokens, source=f"{LORA}:{at}")
    yield product(
        "backward", "adapter: X A again", s.rank, s.tokens, features, source=f"{LORA}:{at + 1}"
    )
    yield product("backward", "adapter: dB", s.rank, out, s.tokens, source=f"{LORA}:{at + 1}")


def _input_gradient(s: Shapes, out: int, features: int, at: int, *, adds: bool) -> Iterator[Row]:
    """dX (+)= dY W, and dX += (dY B^T) A^T."""
    yield from _widened(s, "backward", out, features)
    yield product(
        "backward", "base product", s.tokens, features, out, adds=adds, source=f"{LORA}:{at}"
    )
    yield product(
        "backward",
        "adapter: dX += dXA A",
        s.tokens,
        features,
        s.rank,
        adds=True,
        source=f"{LORA}:{at + 2}",
    )


def layer_backward(s: Shapes) -> Iterator[Row]:
    th, ti = 2 * s.tokens * s.hidden, 2 * s.tokens * s.inner
    w = s.widths
    q, k = 2 * s.tokens * w["q"][0], 2 * s.tokens * w["k"][0]
    # the gradient of down's input is a matmul_lora with A and B exchanged
    yield from _widened(s, "backward", *w["down"])
    yield product(
        "backward", "base product", s.tokens, s.inner, s.hidden, source=f"{LORA}:507, {UTILS}:1891"
    )
    yield product(
        "backward", "adapter: dY B", s.tokens, s.rank, s.hidden, source=f"{LORA}:507, {UTILS}:1897"
    )
    yield product(
        "backward",
        "adapter: += dXA A",
        s.tokens,
        s.inner,
        s.rank,
        adds=True,
        source=f"{LORA}:507, {UTILS}:1898",
    )
    yield memory(
        "backward", "swiglu backward, in place", 6 * ti, source=f"{SWIGLU}:126, {LORA}:522"
    )
    yield from _adapter_gradients(s, *w["down"], 535, narrow_at=535)
    yield from _adapter_gradients(s, *w["up"], 548, narrow_at=538)
    yield from _adapter_gradients(s, *w["gate"], 553, narrow_at=539)
    yield from _input_gradient(s, *w["up"], 565, adds=False)
    yield from _input_gradient(s, *w["gate"], 570, adds=True)
    yield memory("backward", "norm backward, in place", 3 * th, source=f"{NORM}:812")
    yield memory("backward", "residual gradient", 3 * th, source=f"{LLAMA}:1235")
    yield from _adapter_gradients(s, *w["o"], 1102, narrow_at=1098)
    yield from _input_gradient(s, *w["o"], 1108, adds=False)
    yield attention(
        "backward",
        "attention backward",
        s.rows,
        s.heads,
        s.key_heads,
        s.length,
        s.depth,
        source=f"{LLAMA}:1155",
    )
    yield memory("backward", "rope backward: q and k", 2 * q + 2 * k, source=f"{ROPE}:372")
    for name, narrow, line in (("q", 905, 916), ("k", 906, 920), ("v", 907, 924)):
        yield from _adapter_gradients(s, *w[name], line, narrow_at=narrow)
    for name, line in (("q", 935), ("k", 940), ("v", 945)):
        yield from _input_gradient(s, *w[name], line, adds=name != "q")
    yield memory("backward", "norm backward, in place", 3 * th, source=f"{NORM}:812")
    yield memory("backward", "residual gradient", 3 * th, source=f"{LLAMA}:1228")


@dataclass(frozen=True, kw_only=True)
class LossTiles:
    """How the loss is cut: `rows` of hidden states against `columns` of the vocabulary, with fp32
    logits of one tile.
    """

    rows: int
    columns: int

    @classmethod
    def of(cls, s: Shapes) -> LossTiles:
        """From 4,096 tokens on, and with more than 32,768 words, tiles of 256 MiB
        (fused_linear.py:1088, 1323); below, rows of the whole vocabulary, as many as hold tokens x
        hidden / vocabulary, 512 or 512 x 151,936 logits, and 4,096 at most (fused_linear.py:140).
        """
        if s.tokens >= 4096 and s.vocabulary > 2 * 16384:
            rows = min(4096, s.tokens)
            return cls(rows=rows, columns=2**28 // (4 * rows) // 16384 * 16384)
        at_least = min(max(_power_of_two(512 * 151936 / s.vocabulary), 512), 4096)
        rows = min(
            max(_power_of_two(s.tokens * s.hidden / s.vocabulary), at_least),
            4096,
            2**31 // (4 * s.vocabulary),
        )
        return cls(rows=min(rows, s.tokens), columns=s.vocabulary)


def _power_of_two(value: float) -> int:
    """The largest at or below `value`, 1 at least."""
    return 1 << max(int(value).bit_length() - 1, 0)


def head(s: Shapes) -> Iterator[Row]:
    tiles = LossTiles.of(s)
    tiled = tiles.columns < s.vocabulary
    for start in range(0, s.tokens, tiles.rows):
        n = min(tiles.rows, s.tokens - start)
        for first in range(0, s.vocabulary, tiles.columns):
            c = min(tiles.columns, s.vocabulary - first)
            line, reads, writes, dx = (
                (1133, 1137, 1148, 1158) if tiled else (1348, 1032, 1354, 1360)
            )
            yield product(
                "forward", "head: logits in fp32", n, c, s.hidden, out=4, source=f"{LOSS}:{line}"
            )
            yield memory("forward", "head: loss", 4 * n * c, source=f"{LOSS}:{reads}")
            yield memory(
                "forward", "head: gradient of logits", 6 * n * c, source=f"{LOSS}:{writes}"
            )
            yield product(
                "forward",
                "head: dX in fp32",
                n,
                s.hidden,
                c,
                out=4,
                adds=tiled,
                source=f"{LOSS}:{dx}",
            )
        if tiled:
            yield memory("forward", "head: zeros for dX", 4 * n * s.hidden, source=f"{LOSS}:1129")
            yield memory(
                "forward",
                "head: dX with the target's term",
                8 * n * s.hidden,
                source=f"{LOSS}:1176",
            )
        else:
            yield memory(
                "forward",
                "head: dX scaled and copied",
                14 * n * s.hidden,
                source=f"{LOSS}:1362, {LOSS}:1364",
            )
    yield memory("backward", "head: dX scaled", 4 * s.tokens * s.hidden, source=f"{LOSS}:1711")


def step(s: Shapes) -> list[Row]:
    """Every launch of one micro-batch and the update of fp32 adapters with one fused AdamW."""
    rows: list[Row] = []
    th = 2 * s.tokens * s.hidden
    rows.append(memory("forward", "embedding", 2 * th, source=f"{LLAMA}:1399"))
    for _ in range(s.layers):
        rows.append(
            Row(
                phase="forward",
                name="layer's input to the host",
                kind="copy",
                bytes=th,
                source=f"{CHECKPOINT}:1506",
            )
        )
        rows += layer_forward(s, "forward")
    rows.append(memory("forward", "norm", 2 * th, source=f"{LLAMA}:1681"))
    rows += head(s)
    rows.append(memory("backward", "norm backward, in place", 3 * th, source=f"{NORM}:812"))
    for _ in range(s.layers):
        rows.append(
            Row(
                phase="backward",
                name="layer's input from the host",
                kind="copy",
                bytes=th,
                source=f"{CHECKPOINT}:1601",
            )
        )
        rows += layer_forward(s, "recompute")
        rows += layer_backward(s)
    trained = sum(s.rank * (out + features) for out, features in s.widths.values()) * s.layers
    rows.append(memory("update", "AdamW", 28 * trained, source="torch.optim.AdamW(fused=True)"))
    return rows


def peak_bytes(s: Shapes, held: int) -> int:
    """What is held (weights, adapters, gradients, states) and the larger of two moments: the loss,
    and the backward of a layer.

    Layers' inputs wait in host memory, with two buffers on the device
    (gradient_checkpointing.py:1305, 1313). In the loss: the fp32 logits of a tile, whose bytes take
    their gradient, dX of its rows in fp32, the hidden states, and dX twice when it is scaled. In a
    layer's MLP backward: both normed inputs, attention's output, the residual between, the layer's
    output and its gradient; q, k and v; e, g and DW (fast_lora.py:507), whose gradients are written
    over them; one widened weight and the scratch of another (utils.py:956, 975).
    """
    th, ti = 2 * s.tokens * s.hidden, 2 * s.tokens * s.inner
    q, k = 2 * s.tokens * s.widths["q"][0], 2 * s.tokens * s.widths["k"][0]
    tiles = LossTiles.of(s)
    loss = 4 * tiles.rows * (tiles.columns + s.hidden) + 3 * th
    widened = 2 * 2 * s.inner * s.hidden if s.nf4 else 0
    layer = 6 * th + 2 * q + 2 * k + 3 * ti + widened
    return held + 2 * th + max(loss, layer)
