"""Merges an adapter into its base model. This module dequantises the base, adds the adapter in
fp32, casts the sum once, measures the rounding error of the cast, and checks the result.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..config.kind import FORMAT_OF_OBJECTIVE
from ..config.schema import DataSection
from ..data.load import load_data
from ..data.pictures import Pictures
from ..data.rows import Row
from ..dtypes import to_torch
from ..errors import RunError, UsageError
from ..model.architecture import apply_rope_parameters, auto_class
from ..model.export import (
    digest_tensors,
    embedding_and_head,
    refuse_difference,
    refuse_wrong_tying,
    unshare_memory,
    write_config,
)
from ..model.gguf import read_architecture
from ..model.load import Source
from ..model.processor import build_picture_reader, copy_files
from ..model.served import ServedFormat, round_frozen, serve_adapters
from ..model.tokens import align_special_tokens
from ..ops.packed import dequantise_packed
from ..optimize.fp32_layers import has_fp32_layers
from ..precision.precision import Precision
from ..precision.vision import vision_parts
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.folder import detect_model_folder, refuse_non_empty
from ..tasks.language.objective import NextToken
from ..tasks.language.result import evaluate, load_result
from .loaded import LoadedRun

# relative difference of losses: a wrong merge exceeds it by far, rounding of every weight to 8 bits
# stays below it
TOLERANCE = 0.05
COMPARED_ROWS = 16  # number of rows on which the losses are compared


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    why      the reason for this dtype
    weights  the number of merged weights
    noise    rounding error of the cast, relative to the adapter's change, over all merged weights
    rows     number of rows on which both losses were computed
    """

    folder: Path
    dtype: str
    why: str
    weights: int
    noise: float
    adapter_loss: float
    merged_loss: float
    rows: int


def merge(run: LoadedRun, out: Path, *, dtype: str | None = None) -> MergeResult:
    """Merges a run's adapter and writes a Hugging Face folder. Raises UsageError if there is no
    adapter, and RunError SV001 if the loss of the merged model differs.
    """
    from peft import PeftModel

    if not isinstance(run.model, PeftModel):
        if detect_model_folder(run.folder) == "model":
            raise UsageError(f"{run.folder}: a model, without an adapter to merge")
        raise UsageError(
            f"{run.folder}: this run trained every weight: {run.folder / 'model'} is merged already"
        )
    reason = "as asked"
    if dtype is None:
        dtype, reason = merged_dtype(run.precision, run.model)
    refuse_non_empty(out)
    base: Any = run.model.get_base_model()
    served = None
    if run.precision.served:
        served = ServedFormat(run.precision.served, run.model)
    state, noise, count = merged_state(run.model, to_torch(dtype), served)
    rows = _load_rows(run)
    serve_adapters(run.model, round_frozen(run.model, run.precision))
    adapter_loss = _loss(run.model, run, rows)

    def fill(folder: Path) -> None:
        plain = build_plain_model(run, base, dtype)
        names = embedding_and_head(plain)
        # if embedding or head was trained, weights that are tied in the base may differ now
        tied = (
            names
            and names[0] in state
            and (names[1] not in state or state[names[0]].data_ptr() == state[names[1]].data_ptr())
        )
        # with an untied head nothing may be tied when the folder is loaded, not even the head's
        # bias
        plain.save_pretrained(
            folder, state_dict=unshare_memory(state) if tied is False else dict(state)
        )
        write_config(folder, to_torch(dtype), tied=tied)
        if names:
            refuse_wrong_tying(folder, *names)
        run.tokenizer.save_pretrained(str(folder))
        if vision_parts(base) is not None:
            copy_files(run.source.name, run.source.revision, folder)
        facts = {
            "base": run.source.name,
            "run": str(run.folder),
            "dtype": dtype,
            "merge_noise": noise,
        }
        (folder / "merge.json").write_text(json.dumps(facts, indent=1) + "\n")

    merged_loss = math.nan

    def compare(folder: Path) -> None:
        nonlocal merged_loss
        merged_model = _load_merged(folder, run, dtype)
        refuse_difference(
            out, digest_tensors(state, to_torch(dtype)), merged_model, to_torch(dtype)
        )
        merged_loss = _loss(merged_model, run, rows)
        refuse_other_loss(out, merged_loss, adapter_loss)

    write_folder(out, fill, check=compare, next_action="merge again")
    return MergeResult(out, dtype, reason, count, noise, adapter_loss, merged_loss, len(rows[0]))


def build_plain_model(run: LoadedRun, base: Any, dtype: str) -> Any:
    """Returns the architecture of a run's merged model on the meta device, without adapters and
    without quantisation. `config` and `generation_config` of this model are saved with the merged
    weights.
    """
    trust = run.source.trust_remote_code
    config = read_architecture(run.source.name, run.source.revision, trust_remote_code=trust)
    if run.source.rope is not None:
        apply_rope_parameters(config, run.source.rope)
    with torch.device("meta"):
        plain = auto_class(config, text_only=vision_parts(base) is None).from_config(
            config, dtype=to_torch(dtype), trust_remote_code=trust
        )
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain.generation_config.eos_token_id = base.generation_config.eos_token_id
    align_special_tokens(plain, run.tokenizer)
    return plain


def refuse_other_loss(out: Path, merged_loss: float, adapter_loss: float) -> None:
    """Raises RunError SV001 if the merged model's loss differs from the loss of the adapter on its
    base.
    """
    if not abs(merged_loss - adapter_loss) <= TOLERANCE * max(1.0, abs(adapter_loss)):
        raise RunError(
            f"{out}: the merged model's loss is {merged_loss:.4f} where the adapter's is"
            f" {adapter_loss:.4f}",
            code="SV001",
            fix="merge into a wider dtype: --dtype fp32",
        )


def merged_dtype(precision: Precision, model: nn.Module | None = None) -> tuple[str, str]:
    """Returns the dtype of a merged model, and the reason. This is the dtype that `precision.save`
    sets. Without this setting, it is the dtype of the base, or of the unquantised parts of a packed
    base. If layers of `model` compute in fp32 because they overflow in fp16, it is bf16.
    """
    if model is not None and has_fp32_layers(model):
        return "bf16", "some layers overflow in fp16 (fp32_layers.json)"
    if precision.save_model != precision.save_adapter:
        return precision.save_model, f"precision.save: {precision.save}"
    if precision.packed:
        return (
            precision.unquantised,
            f"the dtype of what the {precision.base} base leaves unquantised",
        )
    return precision.base, "the base's dtype in the run (precision.base)"


@torch.no_grad()
def merged_state(
    model: Any, dtype: torch.dtype, served: ServedFormat | None = None
) -> tuple[dict[str, Tensor], float, int]:
    """Returns the state dict of the merged model, the rounding error of the merge relative to the
    adapter's effect, and the number of merged weights. Base and adapter are added in fp32, whatever
    the base's dtype.

    served  the format for which the run was trained; matrices are rounded to it before the cast
    """
    inner = model.get_base_model()
    refuse_unmergeable(inner)
    state: dict[str, Tensor] = {}
    effect = error = 0.0
    count = 0
    # a parameter may have two names (tied head and embedding): it is cast once and shared
    unchanged: dict[int, Tensor] = {}
    layers = adapted_weights(inner)
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        plain_name = strip_adapter_name(name)
        if plain_name is None:
            continue
        layer = layers.get(plain_name)
        if layer is None and id(parameter) in unchanged:
            state[plain_name] = unchanged[id(parameter)]
            continue
        value = dequantise(parameter)
        exact_weight = value if layer is None else merged_weight(layer, value)
        if served is not None:
            exact_weight = served.round(exact_weight, parameter)
        if layer is None:
            value = exact_weight
        else:
            delta = exact_weight - value
            value = exact_weight.to(dtype)
            effect += float(delta.double().square().sum())
            error += float((value.double() - exact_weight.double()).square().sum())
            count += 1
        state[plain_name] = value.to(dtype).contiguous().cpu()
        if layer is None:
            unchanged[id(parameter)] = state[plain_name]
    persistent = inner.state_dict(keep_vars=True)
    # such as the constants of Apertus' activation and the router bias of DeepSeek V3
    for name, buffer in inner.named_buffers(remove_duplicate=False):
        if name in persistent and (plain_name := strip_adapter_name(name)) is not None:
            if buffer.is_floating_point():
                buffer = buffer.to(dtype)
            state[plain_name] = buffer.contiguous().cpu()
    noise = (error / effect) ** 0.5 if effect else 0.0
    return state, noise, count


def merged_weight(layer: Any, weight: Tensor) -> Tensor:
    """Returns the base's weight with every active adapter merged into it. Both are fp32."""
    merged = weight
    # trained rows of the embedding, or of a head that shares its weight
    if hasattr(layer, "trainable_tokens_delta"):
        merged = weight.clone()
        for adapter, rows in layer.token_indices.items():
            merged[rows] = layer.trainable_tokens_delta[adapter].detach().to(merged)
        return merged
    for adapter in layer.active_adapters:
        if hasattr(layer, "lokr_w1"):
            merged = merged + _delta(layer, adapter)
        elif adapter in layer.lora_variant:  # DoRA scales each row of the sum
            merged = layer.lora_variant[adapter].merge_safe(layer, adapter, merged)
        elif adapter in layer.lora_A or adapter in layer.lora_embedding_A:
            merged = merged + _delta(layer, adapter)
    return merged


def _delta(layer: Any, adapter: str) -> Tensor:
    """Returns the matrix that one adapter adds to the weight of a layer, in fp32."""
    from peft.tuners.lora import ParamWrapper

    if not isinstance(layer, ParamWrapper):
        delta: Tensor = layer.get_delta_weight(adapter)
        return delta.float()
    # PEFT returns the change of a bare parameter in the parameter's dtype
    parameter = layer.get_param()
    narrow = parameter.data
    # for a packed parameter these are bytes; PEFT reads only the dtype
    parameter.data = narrow.float()
    try:
        wide: Tensor = layer.get_delta_weight(adapter)
        return wide
    finally:
        parameter.data = narrow


def adapted_weights(inner: nn.Module) -> dict[str, Any]:
    """Returns a mapping of each adapted weight's name in the plain model to PEFT's layer. The
    adapters of stacked experts and routers are attached to parameters, not to modules.
    """
    layers = {}
    for name, layer in inner.named_modules():
        if hasattr(layer, "base_layer") and (
            hasattr(layer, "get_delta_weight") or hasattr(layer, "trainable_tokens_delta")
        ):
            layers[f"{_strip_wrappers(name)}.{getattr(layer, 'parameter_name', 'weight')}"] = layer
    return layers


def _strip_wrappers(name: str) -> str:
    return re.sub(r"(\.token_adapter|\.base_layer)+(?=\.|$)", "", name)


def refuse_unmergeable(model: nn.Module) -> None:
    """Raises UsageError for a layer whose adapter cannot be merged into one weight, such as an
    adapter with its own bias.
    """
    from peft.tuners import lokr, lora
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    four_bit = getattr(lora, "Linear4bit", lora.Linear)
    mergeable = (
        lora.Linear,
        lora.Embedding,
        lora.Conv2d,
        four_bit,
        lora.ParamWrapper,
        lokr.Linear,
        TrainableTokensLayer,
    )
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        has_several = len(layer.active_adapters) > 1 and any(
            adapter in getattr(layer, "lora_variant", ()) for adapter in layer.active_adapters
        )
        has_bias = any(getattr(layer, "lora_bias", {}).values())
        if type(layer) not in mergeable or has_several or has_bias:
            if has_several:
                complaint = "several adapters, one with DoRA"
            elif has_bias:
                complaint = "a bias of its own (lora_bias)"
            else:
                complaint = type(layer).__name__
            raise UsageError(
                f"{name}: {complaint}: isotype merges LoRA, rsLoRA, DoRA and LoKr of one weight",
                fix="PEFT's own model.merge_and_unload()",
            )


def dequantise(parameter: Tensor) -> Tensor:
    """Returns a parameter in fp32, dequantised if necessary."""
    state: Any = getattr(parameter, "quant_state", None)
    if state is not None:
        return dequantise_packed(parameter.data, state, torch.float32)
    return parameter.detach().float()


def strip_adapter_name(name: str) -> str | None:
    """Returns a parameter's name without PEFT's wrappers; None for parameters that the plain model
    does not have.
    """
    if (
        ".lora_" in name
        or ".lokr_" in name
        or ".original_module." in name
        or ".trainable_tokens_" in name
    ):
        return None
    return _strip_wrappers(name).replace(".modules_to_save.default.", ".")


def _load_rows(run: LoadedRun) -> tuple[list, Pictures | None]:
    """Returns the rows on which the losses are compared, and their pictures. These are evaluation
    or training rows of the run, or random tokens for an adapter without data.
    """
    data = run.config.data
    model = cast(Any, run.model)
    if data.train is None:
        vocabulary_size = model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        token_rows = torch.randint(0, vocabulary_size, (16, 32), generator=generator).tolist()
        return [Row(tuple(ids), tuple(ids), 0) for ids in token_rows], None
    section = DataSection(**{**data.model_dump(), "limit": min(data.limit or 64, 64)})
    loaded = load_data(
        section,
        run.tokenizer,
        seed=run.config.train.seed,
        objective_format=FORMAT_OF_OBJECTIVE.get(run.config.train.objective),
        pictures=build_picture_reader(run.config.model, section, run.tokenizer),
    )
    return list((loaded.eval or loaded.train)[:COMPARED_ROWS]), loaded.pictures


def _loss(
    model: nn.Module, run: LoadedRun, rows_and_pictures: tuple[list, Pictures | None]
) -> float:
    checked_rows, pictures = rows_and_pictures
    return evaluate(
        model,
        checked_rows,
        batch_size=4,
        pad_id=run.tokenizer.pad_token_id,
        device=run.device,
        loss_dtype=run.precision.loss,
        objective=NextToken(run.config, pictures),
    ).loss


def _load_merged(out: Path, run: LoadedRun, dtype: str) -> nn.Module:
    # fp32 products of half-precision weights do not exist, so the merged model computes in the
    # dtype of its weights
    computes_in_own_dtype = run.precision.compute == "fp32" or has_fp32_layers(run.model)
    compute = dtype if computes_in_own_dtype else run.precision.compute
    precision = run.precision.but(
        base=dtype, trainable=dtype, compute=compute, generate=compute, save=dtype
    )
    source = Source(str(out), trust_remote_code=run.source.trust_remote_code)
    return load_result(out, source, precision, config=run.config.model, device=run.device)
