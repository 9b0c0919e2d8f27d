"""Small programs with a dtype fault, each with its repaired twin: `NAME(broken=True)` fails or
misbehaves, `NAME(broken=False)` is right.

They vary public failures: mask, rotary table, cache, adapter, checkpoint, optimizer, evaluation,
averaged weights.
"""

from __future__ import annotations

import contextlib
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

bf16 = torch.bfloat16


class Attention(nn.Module):
    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, bias=None, scale=None, mix=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if mix is not None:
            q, k = q * mix, k * mix
        if scale is not None:
            q = q * scale
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


def x_of(dtype=bf16, n=6, d=16, batch=1):
    torch.manual_seed(0)
    return torch.randn(batch, n, d).to(dtype)


def step(model, optimizer, x=None, autocast=False):
    with torch.autocast("cpu", bf16, enabled=autocast):
        loss = model(x_of(next(model.parameters()).dtype) if x is None else x).float().pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---- errors
def alibi_slopes(broken):
    model = Attention().to(bf16)
    slopes = torch.tensor([0.5, 0.25]).view(1, 2, 1, 1)
    distance = torch.arange(6).view(1, 1, 1, 6)
    bias = slopes * distance
    model(x_of(), bias=bias if broken else bias.to(bf16))


class XPos(nn.Module):
    def __init__(self, d: int, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("decay", torch.linspace(0.4, 1.4, d), persistent=False)

    def forward(self, x):
        return x * self.decay if self.keep else x * self.decay.to(x.dtype)


def xpos_scale_buffer(broken):
    model, xpos = Attention().to(bf16), XPos(8, keep=broken)
    model(x_of(), mix=xpos(torch.ones(1, 2, 6, 8, dtype=bf16)))


def fp32_head_on_bf16_trunk(broken):
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.v_head = nn.Linear(16, 16), nn.Linear(16, 1)

        def forward(self, x):
            h = torch.tanh(self.trunk(x))
            return self.v_head(h if broken else h.to(self.v_head.weight.dtype))

    model = Reward().to(bf16)
    model.v_head.float()
    model(x_of())


def conv_bias_dtype(broken):
    vae = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(bf16)
    pixels = torch.randn(1, 3, 8, 8)
    vae(pixels if broken else pixels.to(bf16))


def scatter_into_bf16(broken):
    class Combine(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.expert = nn.Linear(16, 2), nn.Linear(16, 16)

        def forward(self, x):
            weight = torch.sigmoid(self.gate(x).float())[..., :1]
            mixed = self.expert(x) * weight
            out = torch.zeros_like(x)
            index = torch.arange(x.shape[1]).view(1, -1, 1).expand_as(x)
            return out.scatter(1, index, mixed if broken else mixed.to(out.dtype))

    Combine().to(bf16)(x_of())


def image_features_into_embeddings(broken):
    class Multimodal(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.vision, self.post_norm = (
                nn.Embedding(8, 16),
                nn.Linear(4, 16),
                nn.LayerNorm(16),
            )

        def forward(self, ids, pixels):
            x = self.embed(ids).clone()
            features = self.post_norm(self.vision(pixels).float())
            x[ids == 7] = features if broken else features.to(x.dtype)
            return x

    model = Multimodal().to(bf16)
    model.post_norm.float()
    model(torch.tensor([[1, 7, 7, 2]]), torch.randn(2, 4, dtype=bf16))


def fused_adamw_gradient_dtype(broken):
    p = nn.Parameter(torch.randn(8, 8))
    p.grad_dtype = None
    optimizer = torch.optim.AdamW([p], fused=True)
    p.grad = torch.randn(8, 8, dtype=bf16 if broken else torch.float32)
    optimizer.step()


def embedding_ids_cast_with_the_batch(broken):
    model = nn.Embedding(8, 4).to(bf16)
    batch = {"ids": torch.tensor([[1, 2]])}
    if broken:
        batch = {key: value.to(bf16) for key, value in batch.items()}
    model(batch["ids"])


def python_check_in_a_library(broken):
    """Made above the dispatcher, before any op runs."""
    q = torch.randn(1, 2, 4, 8).to(bf16)
    mask = torch.zeros(4, 4, dtype=torch.float32 if broken else bf16)
    F.scaled_dot_product_attention(
        q,
        q,
        q,
        attn_mask=mask.expand(1, 2, 4, 4) if not broken else torch.zeros(4, 4, dtype=torch.float16),
    )


def default_dtype_in_generator(broken):
    @contextlib.contextmanager
    def building_in(dtype):
        old = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        if broken:
            yield
            torch.set_default_dtype(old)
        else:
            try:
                yield
            finally:
                torch.set_default_dtype(old)

    try:
        try:
            with building_in(bf16):
                raise OSError("shard missing")
        except OSError:
            pass
        nn.Linear(4, 4)(torch.ones(1, 4, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def recompute_under_global_switch(broken):
    switch = {"low": True}

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            with torch.autocast("cpu", bf16, enabled=switch["low"] or not broken):
                return self.down(F.silu(self.up(x)))

    layer = Layer()
    y = checkpoint(layer, x_of(torch.float32).requires_grad_(), use_reentrant=False)
    switch["low"] = False
    y.float().sum().backward()


def fused_attention(q, k, v):
    if q.dtype not in (torch.float16, bf16):
        raise RuntimeError("fused attention only supports fp16 and bf16 data types")
    return F.scaled_dot_product_attention(q, k, v)


def own_attention_check_after_fp32_norm(broken):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_norm, self.proj = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            q = self.q_norm(self.proj(x).to(self.q_norm.weight.dtype))
            q = (q if broken else q.to(x.dtype))[:, None]
            return fused_attention(q, q, q)

    model = Block().to(bf16)
    model.q_norm.float()
    model(x_of())


def fill_value_of_another_dtype(broken):
    scores = x_of(torch.float16)
    scores.masked_fill(scores > 0, torch.finfo(torch.float32 if broken else scores.dtype).min)


def validation_leaves_fp16_for_the_scaler(broken):
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def scaled_step():
        loss = model(x_of(model.weight.dtype)).float().pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    def log_validation(live):
        live.half()

    scaled_step()
    log_validation(model if broken else copy.deepcopy(model))
    scaled_step()


# ---- silent faults
def feed_forward_overflows_fp16(broken):
    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.wi, self.wo = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
            nn.init.constant_(self.wi.weight, 40.0)
            nn.init.constant_(self.wo.weight, 40.0)

        def forward(self, x):
            return self.wo(F.relu(self.wi(x)))

    dtype = torch.float16 if broken else bf16
    first = nn.Linear(16, 16)
    nn.init.eye_(first.weight)  # of random weights some overflow nowhere
    nn.init.zeros_(first.bias)
    model = nn.Sequential(first, FeedForward()).to(dtype)
    with torch.no_grad():
        model(x_of(dtype).abs())


def loader_returns_early_in_bf16(broken):
    def load(strict):
        old = torch.get_default_dtype()
        torch.set_default_dtype(bf16)
        try:
            model = nn.Linear(4, 4)
            if not strict:
                return model
        finally:
            if not broken:
                torch.set_default_dtype(old)
        torch.set_default_dtype(old)
        return model

    try:
        load(strict=False)
        nn.Linear(4, 4)(torch.ones(1, 4))
    finally:
        torch.set_default_dtype(torch.float32)


def adapter_output_left_in_fp32(broken):
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(16, 16).to(bf16)
            self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                delta = self.b(self.a(x.to(self.a.weight.dtype)))
            result = self.base(x) + delta
            return result if broken else result.to(x.dtype)

    net = nn.Sequential(Lora(), Lora(), nn.Linear(16, 16).to(bf16))
    with torch.autocast("cpu", bf16):
        net(x_of())


def ema_in_bf16(broken):
    model = nn.Linear(16, 16)
    average = [p.detach().clone().to(bf16 if broken else torch.float32) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(12):
        step(model, optimizer, x_of(torch.float32) + number)
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p.to(mean.dtype), 0.001)


def sgd_by_hand_in_bf16(broken):
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(bf16 if broken else torch.float32)
    for _ in range(8):
        loss = model(x_of(model.weight.dtype)).float().pow(2).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-1e-6)


def weight_decay_in_bf16(broken):
    model = nn.Linear(16, 16, bias=False).to(bf16 if broken else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01)
    for _ in range(6):
        step(model, optimizer)


def copied_back_from_fp32(broken):
    """Computed in fp32 and rounded to nearest on the way back; right with stochastic rounding."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.rand(64, 64).add(0.5).to(bf16))
    for _ in range(8):
        with torch.no_grad():
            new = p.float() - 1e-5 * torch.rand(64, 64)
            if not broken:
                bits = new.view(torch.int32) + torch.randint(
                    0, 1 << 16, new.shape, dtype=torch.int32
                )
                new = (bits & -65536).view(torch.float32)
            p.copy_(new)


def one_autocast_around_the_loop(broken):
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    with torch.autocast("cpu", bf16) if broken else contextlib.nullcontext():
        for _ in range(3):
            step(model, optimizer, autocast=True)


def rotary_by_autocast_product(broken):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer(
                "inv_freq", 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16), persistent=False
            )

        def forward(self, n):
            with torch.autocast("cpu", enabled=broken, dtype=bf16):
                angles = torch.arange(n)[:, None].float() @ self.inv_freq[None]
            return angles.cos(), angles.sin()

    with torch.autocast("cpu", bf16):
        Rotary()(2048)


def positions_made_in_bf16(broken):
    t = torch.arange(1024, dtype=bf16 if broken else torch.float32)
    (t[:, None] * torch.ones(8)).cos()


def timesteps_rounded(broken):
    t = torch.randint(0, 1000, (64,))
    t.to(bf16 if broken else torch.float32)


def inv_freq_rounded_with_the_model(broken):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer(
                "inv_freq", 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16), persistent=False
            )

        def forward(self, n):
            return torch.outer(torch.arange(n).float(), self.inv_freq.float()).cos()

    rotary = Rotary()
    if broken:
        rotary.to(bf16)
    rotary(4096)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, keep):
        ctx.save_for_backward(x, w)
        ctx.keep = keep
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dw = x.T @ g
        return g @ w.T, dw if ctx.keep else dw.to(bf16), None


def gradient_rounded_in_backward(broken):
    w = nn.Parameter(torch.randn(16, 16))
    Rounding.apply(x_of(torch.float32)[0], w, not broken).sum().backward()


def validation_casts_the_live_model(broken):
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def log_validation():
        live = model if broken else copy.deepcopy(model)
        live.to(torch.float16)
        with torch.no_grad():
            live(x_of(torch.float16))

    step(model, optimizer)
    log_validation()
    step(model, optimizer)


def double_from_numpy(broken):
    import numpy as np

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x, weight):
            return self.a(x) * weight

    weight = torch.from_numpy(np.linspace(0, 1, 16))
    Net()(x_of(torch.float32), weight if broken else weight.float())


def scale_in_python_is_fine(broken):
    del broken
    model = Attention().to(bf16)
    model(x_of(), scale=1 / math.sqrt(8))


# ---- silent: what is small is lost a little at a time
def gradients_accumulated_in_bf16(broken):
    model = nn.Linear(16, 16, bias=False).to(bf16 if broken else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(0)
    for _ in range(128):
        x = torch.randn(2, 16).abs().to(model.weight.dtype)
        (model(x).float().square().mean() / 128).backward()
    optimizer.step()


def metric_summed_in_bf16(broken):
    model, total = (
        nn.Linear(16, 1).to(bf16),
        torch.zeros((), dtype=bf16 if broken else torch.float32),
    )
    with torch.no_grad():
        for n in range(80):
            total += 0.3 + 0.01 * model(x_of(n=2)).float().abs().mean().to(total.dtype) + n / 10_000
    return total / 80


def residual_stream_in_place(broken):
    """Right in both forms: many additions in one forward are no accumulator."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(24))

        def forward(self, x):
            x = x.clone()
            for layer in self.layers:
                x += layer(x)
            return x

    model = Stack().to(bf16)
    with torch.no_grad():
        for _ in range(3):
            model(x_of())


def build_in_bf16():
    torch.set_default_dtype(bf16)
    return nn.Linear(16, 16)


def builder_never_restores(broken):
    model = build_in_bf16() if broken else nn.Linear(16, 16).to(bf16)
    with torch.no_grad():
        model(torch.ones(2, 16, dtype=bf16))
        return torch.linspace(0, 1, 5) * 3


def timestep_in_the_models_dtype(broken):
    t = torch.tensor([999.0, 501.0, 337.0])
    t = t.to(bf16) if broken else t
    angle = t[:, None].float() * torch.exp(-torch.arange(8) / 2)
    with torch.no_grad():
        nn.Linear(16, 16).to(bf16)(torch.cat([angle.sin(), angle.cos()], -1).to(bf16))


def log_probs_gathered_in_bf16(broken):
    """A preference loss of its own: each token's log-probability is rounded to bf16 before the sum."""
    torch.manual_seed(0)
    head = nn.Linear(32, 500, bias=False).to(bf16)
    logits = head(torch.randn(2, 200, 32, dtype=bf16) * 8)
    labels = torch.arange(400).view(2, 200, 1)
    logits = logits if broken else logits.float()
    (
        -logits.log_softmax(-1).gather(-1, labels).squeeze(-1).sum(-1)
    ).diff().sigmoid().log().sum().backward()


def logits_gathered_in_bf16(broken):
    """Right: what is gathered is a logit, and the logsumexp beside it is in fp32; a softmax in bf16
    elsewhere has the same shape.
    """
    torch.manual_seed(0)
    head = nn.Linear(32, 500, bias=False).to(bf16)
    logits = head(torch.randn(2, 200, 32, dtype=bf16) * 8)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    picked = logits.gather(-1, torch.arange(400).view(2, 200, 1)).squeeze(-1).float()
    ((picked - logits.float().logsumexp(-1)).sum() + entropy.float().sum()).backward()


def a_copy_evaluated_in_bf16(broken):
    """Right in both forms: the copy that is cast there and back is thrown away."""
    model = nn.Linear(16, 16)
    copied = copy.deepcopy(model).to(bf16)
    with torch.no_grad():
        copied(x_of())
    copied.to(torch.float32)
    model(x_of(torch.float32)).sum().backward()


def compensated_summation(broken):
    """Kahan: what an addition to a bf16 weight loses stays in the tensor that was added."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(bf16)
    rests = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(12):
        model.zero_grad()
        model(x_of()).float().pow(2).mean().backward()
        with torch.no_grad():
            for p, rest in zip(model.parameters(), rests, strict=True):
                if broken:
                    rest.copy_(-1e-4 * p.grad.sign())
                else:
                    rest.add_((-1e-4 * p.grad.float().sign()).bfloat16())
                before = p.clone()
                p.add_(rest)
                if not broken:
                    rest.add_(before.sub_(p))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(16).to(bf16))

    def forward(self, x):
        return torch.sin(100.0 * x * self.scale.float())


def sine_of_values_scaled_by_a_bf16_buffer(broken):
    """A 1-d bf16 buffer that is no table of frequencies: its products are not one position times
    the table.
    """
    Gate()(torch.randn(4, 16))


# ---- frozen layers of quantised checkpoints
class W8A8(nn.Linear):
    """As transformers runs a compressed-tensors checkpoint whose activations are rounded; `rounds`:
    how.
    """

    rounds = "no_grad"

    def forward(self, x):
        scale = x.detach().abs().amax(-1, keepdim=True) / 127
        if self.rounds == "no_grad":
            with torch.no_grad():
                x = (x / scale).round().clamp(-128, 127) * scale
        elif self.rounds == "round":
            x = (x / scale).round() * scale
        elif self.rounds == "straight through":
            x = x + ((x / scale).round() * scale - x).detach()
        return F.linear(x, self.weight)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = (
            base.requires_grad_(False),
            nn.Linear(16, 2, bias=False),
            nn.Linear(2, 16, bias=False),
        )

    def forward(self, x):
        return x + self.base(x) + self.b(self.a(x))


def adapters_on(rounds):
    model = nn.Sequential(Adapted(W8A8(16, 16, bias=False)), Adapted(W8A8(16, 16, bias=False)))
    for layer in model:
        layer.base.rounds = rounds
    for _ in range(2):
        model(x_of(torch.float32)).pow(2).mean().backward()


def activations_rounded_without_a_gradient(broken):
    adapters_on("no_grad" if broken else "not at all")


def activations_rounded_by_a_flat_operator(broken):
    adapters_on("round" if broken else "straight through")


def quantised_model_in_bf16(broken):
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = type(
                "Config", (), {"quantization_config": {"quant_method": "compressed-tensors"}}
            )()
            self.layers = nn.Sequential(Adapted(nn.Linear(16, 16)), Adapted(nn.Linear(16, 16)))

        def forward(self, x):
            return self.layers(x)

    model = Quantised().to(bf16)
    for layer in model.layers:
        if not broken:
            layer.base.weight = nn.Parameter(
                layer.base.weight.to(torch.float8_e4m3fn), requires_grad=False
            )
            layer.base.forward = lambda x, base=layer.base: F.linear(
                x, base.weight.to(x.dtype), base.bias
            )
    model(x_of()).float().pow(2).mean().backward()
