"""The error of a LoRA step whose frozen base computes its products in int8, as a processor with VNNI
or AMX could compute them. The errors of loss and adapter gradients are compared with fp64, beside
those of a base in bf16.

    python benchmarks/int8_base.py MODEL.gguf [--texts 12] [--tokens 96]

Weights have one scale per output feature, activations and their gradients one scale per token, as
in LLM.int8() without its outlier features. For the gradient of the input, the scales of the weights
are multiplied into dy before it is rounded. Sums are exact here: they are computed in fp64. Four
ways are compared:

    bf16       weights, activations and results in bf16, sums in fp32
    weights    int8 weights, activations in bf16
    forward    int8 products in forward, bf16 products in backward
    both       int8 products in forward and backward

The error of a loss is its distance from the fp64 loss; the error of the gradients is the norm of the
difference of all adapter gradients divided by the norm of the fp64 gradients. The table gives the
medians over all texts.

Source  LLM.int8(), arXiv 2208.07339 (scales of rows and columns)
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK = 16
WAYS = ("bf16", "weights", "forward", "both")


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the int8 values of x as fp64, and the scale of each row."""
    x_fp64 = x.double()
    scale = x_fp64.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x_fp64 / scale).round(), scale


class BaseProduct(torch.autograd.Function):
    """Computes x Wᵀ and its gradient with respect to x in one of the ways of the table."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: str) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(weight)
        if way == "fp64":
            return x @ weight.t()
        if way == "bf16":
            return (x.float() @ weight.float().t()).bfloat16()
        weight_int8, weight_scale = quantise_rows(weight)
        if way == "weights":
            return (x.double() @ (weight_int8 * weight_scale).t()).bfloat16()
        x_int8, x_scale = quantise_rows(x)
        return ((x_int8 @ weight_int8.t()) * x_scale * weight_scale.t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        if ctx.way == "fp64":
            return dy @ weight, None, None
        if ctx.way in ("bf16", "forward"):
            return (dy.float() @ weight.float()).bfloat16(), None, None
        weight_int8, weight_scale = quantise_rows(weight)
        if ctx.way == "weights":
            return (dy.double() @ (weight_int8 * weight_scale)).bfloat16(), None, None
        dy_int8, dy_scale = quantise_rows(dy.double() * weight_scale.t())
        return ((dy_int8 @ weight_int8) * dy_scale).bfloat16(), None, None


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter, whose base product is computed in `way`."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.way = "bf16"
        features = base.in_features
        a = torch.randn(RANK, features, generator=generator, dtype=torch.float64) / features**0.5
        b = torch.randn(base.out_features, RANK, generator=generator, dtype=torch.float64) * 0.01
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight.to(x.dtype)
        branch = (x.double() @ self.a.t()) @ self.b.t()
        y = BaseProduct.apply(x.reshape(-1, x.shape[-1]), weight, self.way)
        result: Tensor = y.view(*x.shape[:-1], -1) + branch.to(x.dtype)
        return result


def adapt_model(model: nn.Module) -> list[AdaptedLinear]:
    """Replaces the linear layers of the blocks by adapted ones, and freezes all other weights."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    layers = []
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path != "lm_head":
            parent, _, name = path.rpartition(".")
            layer = AdaptedLinear(module, generator)
            setattr(model.get_submodule(parent), name, layer)
            layers.append(layer)
    return layers


def measure(model: Any, layers: list[AdaptedLinear], tokens: Tensor, way: str) -> Any:
    """Returns the loss and all adapter gradients as one vector."""
    for layer in layers:
        layer.way = way
        layer.a.grad = layer.b.grad = None
    hidden = model.model(input_ids=tokens).last_hidden_state.double()
    logits = hidden[0, :-1] @ model.lm_head.weight.double().t()
    loss = nn.functional.cross_entropy(logits, tokens[0, 1:])
    loss.backward()
    parameters = [parameter for layer in layers for parameter in (layer.a, layer.b)]
    gradients = [
        parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None
    ]
    return loss.item(), torch.cat(gradients)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, name = options.model.parent, options.model.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float64)
    # the weights of all ways are the same bf16 numbers
    model.to(torch.bfloat16).to(torch.float64)
    layers = adapt_model(model)
    if not layers:
        parser.error(f"{options.model} has no dense linear layers")
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 2000]
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    for text in texts[: options.texts]:
        tokens = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
        convert_weights(model, torch.float64)
        exact_loss, exact_gradients = measure(model, layers, tokens, "fp64")
        convert_weights(model, torch.bfloat16)
        for way in WAYS:
            loss, gradients = measure(model, layers, tokens, way)
            losses[way].append(abs(loss - exact_loss))
            errors[way].append(
                ((gradients - exact_gradients).norm() / exact_gradients.norm()).item()
            )
        print(
            f"{len(errors['both'])} texts, {len(layers)} layers, loss {exact_loss:.3f}", flush=True
        )
    print("way       error of the loss   error of the gradients   gradients beside bf16")
    for way in WAYS:
        loss_error = statistics.median(losses[way])
        gradient_error = statistics.median(errors[way])
        ratio = statistics.median(x / y for x, y in zip(errors[way], errors["bf16"]))
        print(f"{way:8} {loss_error:18.2e} {gradient_error:24.4f} {ratio:23.2f}")


def convert_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the frozen weights. The adapters stay in fp64."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


if __name__ == "__main__":
    main()
