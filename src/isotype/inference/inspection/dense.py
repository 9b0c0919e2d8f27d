"""Opens the weights of a checkpoint for a comparison: each weight dequantised, under the name that
transformers gives it. Weights are read one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ...dtypes import format_dtype
from ...errors import UsageError
from ...model.adapter import load_adapter
from ...model.adapter_settings import ADAPTER_CONFIG_FILE
from ...model.architecture import auto_class
from ...ops.packed import dequantise_packed
from ...ops.packed.recognise import TORCHAO_NAMES, build_state, recognise_layout
from ...precision.apply import weight_shape
from ...precision.packing import Packing
from ...runs.folder import locate_base
from ...training.console import silence_library_warnings
from ...wording import first_line
from ..adapter_file import LoraPair, read_changes
from ..merge import adapted_weights, dequantise, merged_weight, refuse_unmergeable
from ..run_weights import plain_parameters
from ..verify.gguf_model import open_gguf, read_gguf_header, read_tensor_values
from ..verify.written_model import WrittenTensor, open_folder
from .checkpoint import ADAPTER, GGUF, MODEL, Checkpoint, StoredTensor, open_checkpoint
from .loading import (
    Loading,
    ask_transformers,
    find_linear,
    group_by_owner,
    has_codes,
    tensor_headers,
    weight_parts,
)

# dtype -> the kind, with the name in GGUF files, as which it is compared
_KINDS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "fp64": "F32"}
_QUANT_STATE = "weight.quant_state."
_NOT_A_WEIGHT = ("rotary_emb.inv_freq",)  # tensors that a module computes itself


@dataclass
class DenseWeights:
    """The weights of a checkpoint by their names in transformers.

    label      what the weights are, for the report
    skipped    the names of tensors that are not compared, with the reason
    aliases    for each tied weight, the weight that has the same values
    changes    for the name of each weight that an adapter changes, a function that returns what the
               adapter adds. `tensors` contains the sums
    base       the weights to which the adapter's changes were added
    config     the configuration of the model in transformers; None if it was not read
    is_loaded  whether the names are those of the loaded class, where experts are stacked
    computed   the names of weights that no file has: they are computed in fp32 from the adapter
    """

    label: str
    tensors: dict[str, WrittenTensor]
    skipped: dict[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    base: DenseWeights | None = None
    config: Any = None
    is_loaded: bool = False
    computed: frozenset[str] = frozenset()

    def find(self, name: str) -> WrittenTensor | None:
        return self.tensors.get(name) or self.tensors.get(self.aliases.get(name, ""))


def open_two(
    first: Checkpoint, second: Checkpoint, base: Path | None
) -> tuple[DenseWeights, DenseWeights]:
    """Opens the weights of two checkpoints. A weight gets the same name in both.

    base    the base model of an adapter, in place of the one in adapter_config.json
    Raises  UsageError for two checkpoints that cannot be compared
    """
    kinds = {first.kind, second.kind}
    if kinds == {GGUF}:
        return _open_gguf_alone(first), _open_gguf_alone(second)
    if kinds == {ADAPTER}:
        return _open_adapter_alone(first), _open_adapter_alone(second)
    if first.kind == GGUF:
        second_weights = _open_other(second, base)
        return _open_gguf_like(first, second_weights), second_weights
    if second.kind == GGUF:
        first_weights = _open_other(first, base)
        return first_weights, _open_gguf_like(second, first_weights)
    if first.kind == ADAPTER:
        first_weights = _open_other(first, base)
        return first_weights, _open_like(second, first_weights)
    second_weights = _open_other(second, base)
    return _open_like(first, second_weights), second_weights


def _open_like(checkpoint: Checkpoint, other: DenseWeights) -> DenseWeights:
    """Opens a checkpoint. Its weights get the names that they have in `other`. If `other` is a
    model that transformers has loaded, transformers also converts the weights of this folder to the
    names of the model class.
    """
    if not other.is_loaded or checkpoint.kind != MODEL:
        return _open_other(checkpoint, None)
    shapes = {name: tensor.shape for name, tensor in other.tensors.items()}
    with silence_library_warnings():
        written = open_folder(checkpoint.path, shapes, text_only=False)
    weights = DenseWeights(str(checkpoint.path), dict(written.tensors), aliases=other.aliases)
    for name in written.unexpected:
        weights.skipped[name] = "the class has no such weight"
    return weights


def _open_other(checkpoint: Checkpoint, base: Path | None) -> DenseWeights:
    """Opens a checkpoint that is no GGUF file."""
    if checkpoint.kind == ADAPTER:
        return _open_adapted(checkpoint, base)
    if checkpoint.kind == MODEL:
        return _open_model(checkpoint)
    weights = DenseWeights(str(checkpoint.path), {})
    _add_plain(weights, checkpoint.tensors.values())
    return weights


def _open_model(checkpoint: Checkpoint) -> DenseWeights:
    loading = ask_transformers(checkpoint)
    weights = DenseWeights(f"{checkpoint.path}", {}, aliases=loading.ties, config=loading.config)
    packed_names = set()
    for owner, parts in group_by_owner(checkpoint.tensors.values()).items():
        if not has_codes(parts):
            continue
        names = {tensor.name for part, tensor in parts.items() if part != "bias"}
        packed_names |= names
        if owner in loading.scales.missing:
            weights.skipped[owner] = loading.scales.missing[owner]
            continue
        try:
            tensor = _open_packed(owner, parts, loading)
        except UsageError as error:
            weights.skipped[owner] = error.message
            continue
        weights.tensors[f"{owner}.weight"] = tensor
    plain = [t for t in checkpoint.tensors.values() if t.name not in packed_names]
    orphaned = set(loading.scales.orphaned)
    _add_plain(weights, (tensor for tensor in plain if tensor.name not in orphaned))
    if loading.model is not None:
        weights.tensors = _rename(loading.model, weights.tensors)
    return weights


def _add_plain(weights: DenseWeights, tensors: Iterable[StoredTensor]) -> None:
    """Adds tensors of floating-point numbers."""
    for tensor in tensors:
        kind = _KINDS.get(tensor.dtype)
        if kind is None:
            weights.skipped[tensor.name] = f"{tensor.dtype} numbers"
        elif not tensor.name.endswith(_NOT_A_WEIGHT):
            read = partial(_read_plain, tensor)
            weights.tensors[tensor.name] = WrittenTensor(tensor.name, kind, tensor.shape, read)


def _read_stored(tensor: StoredTensor) -> Tensor:
    file = _open_file(tensor.file, tensor.file.stat().st_mtime_ns)
    value: Tensor = file.get_tensor(tensor.name)
    return value


@lru_cache(8)
def _open_file(path: Path, _changed: int) -> Any:
    """Opens a safetensors file. The file stays open, because reading a header of several megabytes
    again for each tensor would be slow.
    """
    return safe_open(path, framework="pt")


def _read_plain(tensor: StoredTensor) -> Tensor:
    return _read_stored(tensor).float()


def _rename(model: Any, tensors: Mapping[str, WrittenTensor]) -> dict[str, WrittenTensor]:
    """Renames the tensors of a file as transformers does when it loads them. Weights that
    transformers joins or splits keep their names.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    renamed = {}
    for name, tensor in tensors.items():
        new_name, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        renamed[name if pattern else new_name] = tensor
    return renamed


def _open_packed(owner: str, parts: Mapping[str, StoredTensor], loading: Loading) -> WrittenTensor:
    """Returns a quantised weight, which is dequantised when it is read. Raises UsageError for a
    format that Isotype cannot read.
    """
    state_name = next((name for name in parts if name.startswith(_QUANT_STATE)), None)
    if state_name is not None:
        state = _read_nf4_state(parts[state_name])
        shape = tuple(state["shape"])
        read = partial(_read_nf4, parts)
        return WrittenTensor(owner, str(state["quant_type"]), shape, read)
    packing = None if loading.quantisation is None else loading.quantisation.packing
    if packing is None:
        raise UsageError("config.json does not say how it is quantised")
    layer_shape = _layer_shape(owner, parts, loading.model)
    if layer_shape is None:
        raise UsageError("the shape of its weight is not known")
    read = partial(_read_packed, owner, parts, packing, layer_shape)
    return WrittenTensor(owner, packing.dtype_name, layer_shape, read)


def _layer_shape(
    owner: str, parts: Mapping[str, StoredTensor], model: Any
) -> tuple[int, int] | None:
    """Returns the shape of a layer's weight. It is read from the model class, or computed from the
    layer's tensors.
    """
    layer = find_linear(model, owner)
    if layer is not None:
        return layer.out_features, layer.in_features
    weight = parts.get("weight") or parts.get("weight_packed") or parts.get("_weight_qdata")
    if weight is None or len(weight.shape) != 2 or weight.dtype == "int32":
        return None
    rows, columns = weight.shape
    return rows, columns * 2 if weight.dtype == "uint8" else columns


def _read_packed(
    owner: str, parts: Mapping[str, StoredTensor], packing: Packing, shape: tuple[int, int]
) -> Tensor:
    used = weight_parts(parts)
    layout = recognise_layout(owner, tensor_headers(used), packing, shape)
    tensors = {TORCHAO_NAMES.get(name, name): _read_stored(tensor) for name, tensor in used.items()}
    state = build_state(owner, layout, packing.dtype_name, tensors)
    return dequantise_packed(tensors[layout.packed_tensor[0]], state, torch.float32)


def _read_nf4_state(tensor: StoredTensor) -> dict[str, Any]:
    """Reads the settings of a 4-bit weight, which bitsandbytes stores as the bytes of a JSON text.
    Raises UsageError.
    """
    try:
        state: dict[str, Any] = json.loads(bytes(_read_stored(tensor).tolist()))
        return {"quant_type": state["quant_type"], "shape": list(state["shape"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{tensor.name}: {error}") from None


def _read_nf4(parts: Mapping[str, StoredTensor]) -> Tensor:
    from bitsandbytes.functional import QuantState

    tensors = {
        name.removeprefix("weight."): _read_stored(tensor)
        for name, tensor in parts.items()
        if name.startswith("weight.")
    }
    state = QuantState.from_dict(tensors, device=torch.device("cpu"))
    return dequantise_packed(_read_stored(parts["weight"]), state, torch.float32)


# --- adapters


def _open_adapted(checkpoint: Checkpoint, base: Path | None) -> DenseWeights:
    """Opens an adapter with its base: the base's weights plus the changes by the adapter."""
    base_path = base if base is not None else _base_path(checkpoint)
    base_checkpoint = open_checkpoint(base_path)
    if base_checkpoint.kind != MODEL:
        raise UsageError(f"{base_path}: a {base_checkpoint.kind}, expected the folder of a model")
    try:
        pairs, full_weights = _read_adapter(checkpoint)
    except UsageError:
        return _open_with_peft(checkpoint, base_path)
    base_weights = _open_model(base_checkpoint)
    tensors = dict(base_weights.tensors)
    for name, pair in pairs.items():
        stored = base_weights.find(name)
        if stored is None or stored.shape != pair.shape:
            problem = "does not have it" if stored is None else f"has {list(stored.shape)} there"
            raise UsageError(
                f"{checkpoint.path}: the adapter changes {name}, and {base_path} {problem}",
                fix="--base FOLDER: the model that the adapter was trained on",
            )
        read = partial(_add_pair, stored, pair)
        tensors[name] = WrittenTensor(name, "F32", stored.shape, read)
    tensors |= _full_tensors(full_weights)
    tied_names = full_weights.keys() | pairs.keys()
    return DenseWeights(
        f"{base_path} + {checkpoint.path}",
        tensors,
        base_weights.skipped,
        {name: tied for name, tied in base_weights.aliases.items() if name not in tied_names},
        changes={name: pair.change for name, pair in pairs.items()},
        base=base_weights,
        config=base_weights.config,
        computed=frozenset(pairs),
    )


def _open_with_peft(checkpoint: Checkpoint, base_path: Path) -> DenseWeights:
    """Loads a base with an adapter that is more than pairs of matrices for linear layers, such as
    DoRA, or adapters of stacked experts. Raises UsageError for an adapter that PEFT does not load.
    """
    try:
        config = AutoConfig.from_pretrained(base_path, trust_remote_code=False)
        model = auto_class(config).from_pretrained(base_path, dtype="auto", use_safetensors=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{base_path}: {first_line(error)}") from None
    adapted = load_adapter(model, checkpoint.path, setting="isotype inspect --against")
    refuse_unmergeable(adapted)
    inner: Any = adapted.get_base_model()
    layers = adapted_weights(inner)
    parameters = plain_parameters(inner)
    base = DenseWeights(str(base_path), {})
    weights = DenseWeights(
        f"{base_path} + {checkpoint.path}",
        {},
        aliases=dict(inner.all_tied_weights_keys),
        changes={name: partial(_layer_change, layers[name], parameters[name]) for name in layers},
        base=base,
        config=config,
        is_loaded=True,
        computed=frozenset(layers),
    )
    for name, parameter in parameters.items():
        kind = _KINDS.get(format_dtype(parameter.dtype), "F32")
        shape = weight_shape(parameter)
        base.tensors[name] = WrittenTensor(name, kind, shape, partial(dequantise, parameter))
        weights.tensors[name] = base.tensors[name]
        if name in layers:
            read = partial(_read_layer, layers[name], parameter)
            weights.tensors[name] = WrittenTensor(name, "F32", shape, read)
    return weights


def _read_layer(layer: Any, parameter: Tensor) -> Tensor:
    return merged_weight(layer, dequantise(parameter))


def _layer_change(layer: Any, parameter: Tensor) -> Tensor:
    value = dequantise(parameter)
    return merged_weight(layer, value) - value


def _read_adapter(checkpoint: Checkpoint) -> tuple[dict[str, LoraPair], dict[str, Tensor]]:
    pairs, full_weights = read_changes(checkpoint.path, "isotype inspect --against")
    return {f"{pair.module}.weight": pair for pair in pairs}, full_weights


def _base_path(checkpoint: Checkpoint) -> Path:
    """Returns the folder of an adapter's base. Raises UsageError if it is not on this machine."""
    settings = checkpoint.settings.get(ADAPTER_CONFIG_FILE, {})
    name = settings.get("base_model_name_or_path")
    path = None
    if isinstance(name, str):
        path = Path(locate_base(name, checkpoint.path)).expanduser()
    if path is None or not path.exists():
        raise UsageError(
            f"{checkpoint.path}/{ADAPTER_CONFIG_FILE}: base_model_name_or_path: {name}: not a folder"
            " on this machine",
            fix="--base FOLDER",
        )
    return path


def _full_tensors(full_weights: Mapping[str, Tensor]) -> dict[str, WrittenTensor]:
    """Returns the weights of modules that were trained in full."""
    return {
        name: WrittenTensor(name, "F32", tuple(value.shape), value.float)
        for name, value in full_weights.items()
    }


def _add_pair(stored: WrittenTensor, pair: LoraPair) -> Tensor:
    return stored.read() + pair.change()


def _open_adapter_alone(checkpoint: Checkpoint) -> DenseWeights:
    """Opens the changes of an adapter, without its base."""
    pairs, full_weights = _read_adapter(checkpoint)
    weights = DenseWeights(f"the changes of {checkpoint.path}", {}, computed=frozenset(pairs))
    for name, pair in pairs.items():
        kind = _KINDS.get(format_dtype(pair.b.dtype), "F32")
        weights.tensors[name] = WrittenTensor(name, kind, pair.shape, pair.change)
    weights.tensors |= _full_tensors(full_weights)
    return weights


# --- GGUF files


def _open_gguf_alone(checkpoint: Checkpoint) -> DenseWeights:
    """Opens a GGUF file. The weights keep the names that they have in the file."""
    header = read_gguf_header(checkpoint.path)
    tensors = {
        name: WrittenTensor(
            name, entry.kind, entry.shape, partial(read_tensor_values, checkpoint.path, entry)
        )
        for name, entry in header.tensors.items()
    }
    return DenseWeights(str(checkpoint.path), tensors)


def _open_gguf_like(checkpoint: Checkpoint, other: DenseWeights) -> DenseWeights:
    """Opens a GGUF file. Its weights get the names that they have in the other checkpoint. Raises
    UsageError for a file of another architecture, and for an adapter.
    """
    if other.config is None:
        raise UsageError(
            f"{checkpoint.path}: a GGUF file is compared with the folder of a model, or with another"
            " GGUF file"
        )
    if checkpoint.fields.get("general.type") == "adapter":
        raise UsageError(
            f"{checkpoint.path}: a GGUF file of an adapter is not compared",
            fix="isotype verify RUN --file FILE",
        )
    written = open_gguf(checkpoint.path, other.config, other.tensors, _refuse_base)
    weights = DenseWeights(str(checkpoint.path), dict(written.tensors), aliases=other.aliases)
    for name in written.unexpected:
        weights.skipped[name] = "the other side has no tensor of this name"
    return weights


def _refuse_base(name: str) -> Tensor:
    raise AssertionError(name)
