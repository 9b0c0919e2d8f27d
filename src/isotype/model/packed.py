"""Loads a checkpoint that was published quantised. A linear layer or a stack of experts is packed
if the file has packed tensors for it.

transformers loads the file, but uses Isotype's quantiser instead of its own. transformers still
renames the keys, finds the shards and chooses the devices. Each tensor is copied from the file to
the device unchanged. No layer is ever dequantised. transformers' own quantisers need kernel
packages, dequantise the model at its first forward, or read some files wrongly. For example, they
read FP8 blocks wrongly if the size of the matrix is not a multiple of the block size. A table in
`docs/lora.md` lists these cases.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import str_to_torch_dtype
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..config.sources import gguf_file
from ..errors import UsageError
from ..instance_method import InstanceMethod
from ..lora.quantised import PackedLinear, PackedWeight
from ..ops.packed import StackState, pack_along_rows, pack_weight
from ..ops.packed.formats import Layout
from ..ops.packed.recognise import (
    SERVING_TENSORS,
    TORCHAO_NAMES,
    TensorHeader,
    build_state,
    is_packed,
    recognise_layout,
)
from ..optimize.experts import packed_forward
from ..precision.packing import Packing
from ..precision.quantised_base import quantisation_from_config, refuse_unquantisable
from . import gguf
from .architecture import auto_class

METHOD = "isotype"  # the quantization method of a model that Isotype packed itself
_DTYPES = str_to_torch_dtype | {"F8_E8M0": torch.float8_e8m0fnu}  # safetensors' name -> dtype


def packed_load_options(config: Any, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments with which `from_pretrained` loads this checkpoint and keeps its
    weights packed. If these arguments contain a `state_dict`, call `from_pretrained` with None in
    place of the name.

    config  the configuration of a packed model
    dtype   the dtype of the weights that the file does not pack
    """
    quantisation = quantisation_from_config(config)
    assert quantisation is not None
    assert quantisation.packing is not None
    AUTO_QUANTIZER_MAPPING[METHOD] = _PackedQuantizer
    packed_config = _PackedConfig(quantisation.packing, name)
    file = gguf_file(name)
    state_dict_option = {} if file is None else {"state_dict": gguf.load_tensors(file, dtype)}
    if file is not None:
        packed_config.parts = {
            tensor_name: TensorHeader(tensor.dtype, tuple(tensor.shape))
            for tensor_name, tensor in state_dict_option["state_dict"].items()
        }
    return {
        "config": plain_config(config),
        "quantization_config": packed_config,
    } | state_dict_option


def plain_config(config: Any) -> Any:
    """Copies a configuration without its quantisation."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


class _PackedConfig(QuantizationConfigMixin):
    """The configuration that transformers passes to `_PackedQuantizer`."""

    parts: Mapping[str, TensorHeader] | None = None  # the tensors of a file that is not safetensors

    def __init__(self, packing: Packing, name: str) -> None:
        self.quant_method = METHOD  # not in transformers' enumeration
        self.packing, self.name = packing, name


class _PackedPlaceholder(nn.Module):
    """Takes the place of a packed layer until its tensors are loaded. Each tensor is a parameter in
    the dtype and shape of the file, so that transformers casts nothing.
    """

    bias: nn.Parameter | None

    def __init__(
        self, linear: nn.Linear, layout: Layout, parts: Mapping[str, TensorHeader]
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.layout = layout
        for name, part in parts.items():
            _register_placeholder(self, name, part)
        self.register_parameter("bias", linear.bias)

    def tensors(self) -> dict[str, Tensor]:
        return {
            TORCHAO_NAMES.get(name, name): p.data
            for name, p in self._parameters.items()
            if p is not None and name != "bias"
        }


class _PackedQuantizer(HfQuantizer):
    """Implements a quantiser for transformers. transformers calls its methods before and after it
    loads the weights.
    """

    quantization_config: Any

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        return

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Iterable[str] = (), **kwargs: Any
    ) -> Any:
        packed_config = self.quantization_config
        if packed_config.parts is not None:
            parts = packed_config.parts
        else:
            parts = read_tensor_parts(checkpoint_files or ())
        insert_placeholders(model, parts, packed_config.packing, packed_config.name)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        absent = [
            f"{full_name}.{name}"
            for full_name, placeholder in _placeholders(model)
            for name, p in placeholder.named_parameters()
            if p.is_meta
        ]
        if not absent:
            pack_placeholders(model, self.quantization_config.packing)
        self.remove_quantization_config(model)
        return model


def read_tensor_parts(files: Iterable[str | Path]) -> dict[str, TensorHeader]:
    """Reads the dtype and shape of every tensor, by its name, from the headers of safetensors
    files.
    """
    parts = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise UsageError(
                f"{file}: packed weights are read from safetensors files",
                fix="a copy with model.safetensors",
            )
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                parts[name] = slice_header(tensors.get_slice(name))
    return parts


def slice_header(part: Any) -> TensorHeader:
    """Returns the dtype and shape of a tensor in an open safetensors file.

    part  the result of `get_slice`
    """
    return TensorHeader(_DTYPES.get(part.get_dtype(), torch.uint8), tuple(part.get_shape()))


INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def detect_file_dtype(name: str, revision: str | None) -> torch.dtype | None:
    """Returns fp32, bf16 or fp16 if all floating-point tensors in the model's safetensors files
    have this one dtype. Otherwise returns None.

    name  a folder, or a hub id whose files are downloaded as by `from_pretrained`
    """
    dtypes = {
        part.dtype
        for part in read_tensor_parts(weight_files(name, revision)).values()
        if part.dtype.is_floating_point
    }
    return next(
        (dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtypes == {dtype}),
        None,
    )


def weight_files(name: str, revision: str | None) -> list[str]:
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(name, INDEX_FILE, **options)
    if index is None:
        names = {SINGLE_FILE}
    else:
        names = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    files = [cached_file(name, file_name, **options) for file_name in sorted(names)]
    if None in files:
        return []
    return [file for file in files if file is not None]


def insert_placeholders(
    model: Any, names: Mapping[str, TensorHeader], packing: Packing, model_name: str
) -> None:
    """Replaces each linear layer that is packed in the files by a `_PackedPlaceholder`.

    Raises  UsageError for packed tensors that belong to no linear layer, and for those that
            `recognise` refuses
    """
    packed = group_packed_tensors(names)
    expert_owners = insert_expert_placeholders(model, packed, names, packing, model_name)
    if not packed and not expert_owners:
        raise UsageError(
            f"model {model_name}: config.json says that its weights are {packing}, and its files"
            " have no packed tensor",
            fix="remove quantization_config from config.json if these are plain weights",
        )
    mapping = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    model_state = model.state_dict()
    tied = set(model.all_tied_weights_keys)
    for owner, parts in packed.items():
        if owner in expert_owners:
            continue
        renamed, pattern = rename_source_key(
            f"{owner}.weight", renamings, converters, model.base_model_prefix, model_state
        )
        path = renamed.removesuffix(".weight")
        layer = _find_submodule(model, path)
        if pattern is not None or not isinstance(layer, nn.Linear):
            if pattern is not None:
                reason = "transformers joins or cuts this weight"
            else:
                reason = f"a {type(layer).__name__}, not a linear layer"
            raise UsageError(
                f"model {model_name}: {owner} is packed ({', '.join(sorted(parts))}): {reason}: not"
                " offered",
                fix=_DENSE_FIX,
            )
        if f"{path}.weight" in tied:
            raise UsageError(
                f"model {model_name}: {owner} is packed, and config.json ties it to another weight",
                fix="tie_word_embeddings: false there",
            )
        insert_placeholder(model, path, layer, parts, packing, f"model {model_name}: {owner}")
    activation_keys = rf"\.({'|'.join(SERVING_TENSORS)})$"
    model._keys_to_ignore_on_load_unexpected = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        activation_keys,
    }


def group_packed_tensors(names: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """Returns the tensors of each layer whose weight is packed, by the path of the layer."""
    owners: dict[str, dict[str, TensorHeader]] = {}
    for tensor_name, part in names.items():
        owner, _, last = tensor_name.rpartition(".")
        owners.setdefault(owner, {})[last] = part
    return {owner: parts for owner, parts in owners.items() if is_packed(parts)}


def insert_placeholder(
    model: nn.Module,
    path: str,
    layer: nn.Linear,
    parts: Mapping[str, TensorHeader],
    packing: Packing,
    label: str,
) -> None:
    """Replaces `layer` by a `_PackedPlaceholder` for these tensors. Raises UsageError for tensors that
    `recognise` refuses.
    """
    weight_parts = {
        name: part for name, part in parts.items() if name != "bias" and name not in SERVING_TENSORS
    }
    layout = recognise_layout(label, weight_parts, packing, (layer.out_features, layer.in_features))
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, _PackedPlaceholder(layer, layout, weight_parts))


_DENSE_FIX = "a base that is not quantised, or precision.preset: nf4-lora on it"


def pack_placeholders(model: nn.Module, packing: Packing) -> None:
    """Replaces each `_PackedPlaceholder`, whose tensors are now loaded, by a `PackedLinear`. The
    model may be on the meta device.
    """
    for path, placeholder in list(_placeholders(model)):
        tensors = placeholder.tensors()
        state = build_state(path, placeholder.layout, packing.dtype_name, tensors)
        weight, state = pack_along_rows(tensors[placeholder.layout.packed_tensor[0]], state)
        bias = None if placeholder.bias is None else placeholder.bias.data
        layer = PackedLinear(placeholder.in_features, placeholder.out_features, weight, state, bias)
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
        del tensors, weight
    pack_experts(model, packing)


def quantise_layers(model: nn.Module, layers: Collection[nn.Module], dtype_name: str) -> None:
    """Packs these linear layers as fp8 or int8, one at a time, on their device. The layers may be
    on the meta device. Raises UsageError.
    """
    refuse_unquantisable(dtype_name, "the model")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child in layers:
                weight, state = pack_weight(child.weight.data, dtype_name)
                setattr(
                    parent,
                    name,
                    PackedLinear(child.in_features, child.out_features, weight, state, child.bias),
                )
                child.weight = None  # type: ignore[assignment]  # frees its memory


def load_packed(
    name: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Any:
    """Loads a causal language model whose weights were published quantised, from a folder or hub
    id. The model is frozen. Its packed layers contain the packed data of the file unchanged, and
    compute correct gradients for their inputs. transformers loads all other modules as usual.

    dtype    the dtype of the weights that the file does not pack
    options  further arguments of transformers' `from_pretrained`
    Raises   UsageError for a base that is not packed, and for a packing that is not supported
    """
    config = gguf.read_architecture(
        name, **{key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    )
    quantisation = quantisation_from_config(config)
    if quantisation is None or quantisation.packing is None:
        if quantisation is None:
            reason = "is not quantised"
        else:
            reason = (
                quantisation.unread_reason
                or f"is {quantisation.weight_format}, which transformers loads with bitsandbytes"
            )
        raise UsageError(
            f"model {name}: {reason}", fix="transformers.AutoModelForCausalLM.from_pretrained"
        )
    arguments = (
        {"dtype": dtype, "device_map": {"": torch.device(device)}}
        | packed_load_options(config, name, dtype)
        | options
    )
    return from_pretrained(auto_class(config), name, **arguments).requires_grad_(False)


def from_pretrained(model_class: Any, name: str, **options: Any) -> Any:
    """Calls transformers' `from_pretrained`. The options may include those that
    `packed_load_options` returns.
    """
    if "state_dict" not in options:
        return model_class.from_pretrained(name, **options)
    options["config"].name_or_path = name
    # an auto class needs a name, so the model's own class is called
    loaded = model_class._model_mapping[type(options["config"])].from_pretrained(None, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config.name_or_path = name
    return loaded


def _placeholders(model: nn.Module) -> list[tuple[str, _PackedPlaceholder]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, _PackedPlaceholder)
    ]


def _find_submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _register_placeholder(module: nn.Module, name: str, part: TensorHeader) -> None:
    module.register_parameter(
        name,
        nn.Parameter(torch.empty(part.shape, dtype=part.dtype, device="meta"), requires_grad=False),
    )


# --- packed experts. A file stores experts stacked (gpt-oss), or as one linear layer per expert
# (Qwen3-MoE, DeepSeek). transformers' code computes with stacks [E O K]. Here a stack stays packed:
# the packed tensors of all experts are concatenated

_SEPARATE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)$")
# a stack of experts -> the weights that it consists of
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# key in a module's `__dict__` for the layouts of its stacks, while a model is loaded
_PLAN_ATTRIBUTE = "_isotype_packed"
_BLOCKS_SUFFIX = ".gate_up_proj_blocks"


def insert_expert_placeholders(
    model: Any,
    packed: Mapping[str, Mapping[str, TensorHeader]],
    names: Mapping[str, TensorHeader],
    packing: Packing,
    model_name: str,
) -> set[str]:
    """Replaces the stacked expert weights of each mixture-of-experts layer by parameters for the
    packed tensors of the file.

    packed  the packed tensors of each layer, by the path of the layer
    names   all tensors of the files
    ->      the paths in `packed` that belong to experts
    Raises  UsageError for a mixture-of-experts layer that does not use transformers' stacked
            experts
    """
    layouts_by_path: dict[str, dict[str, Layout]] = {}
    for path in [
        name.removesuffix(_BLOCKS_SUFFIX) for name in sorted(names) if name.endswith(_BLOCKS_SUFFIX)
    ]:
        layouts_by_path[path] = _place_expert_blocks(
            _find_stacked_experts(model, path, model_name), path, names, model_name
        )
    separate = {
        owner: match["experts"] for owner in packed if (match := _SEPARATE_EXPERT.match(owner))
    }
    for path in dict.fromkeys(separate.values()):
        layouts_by_path[path] = _place_expert_layers(
            _find_stacked_experts(model, path, model_name), path, packed, packing, model_name
        )
    for path, layouts_by_stack in layouts_by_path.items():
        module: Any = model.get_submodule(path)
        for stack in layouts_by_stack:
            delattr(module, stack)
        # otherwise transformers would initialise the stacks, which were deleted
        vars(module)[_PLAN_ATTRIBUTE], module._is_hf_initialized = layouts_by_stack, True
    return {*layouts_by_path, *separate}


def _find_stacked_experts(model: nn.Module, path: str, model_name: str) -> Any:
    module = _find_submodule(model, path)
    is_stacked = all(
        hasattr(module, flag)
        for flag in ("num_experts", "_apply_gate", "is_transposed", "gate_up_proj", "down_proj")
    )
    if (
        not is_stacked
        or not getattr(module, "has_gate", False)
        or getattr(module, "has_post_expert_norm", False)
    ):
        class_name = "no such module" if module is None else type(module).__name__
        raise UsageError(
            f"model {model_name}: {path} are packed experts, and the model's code has other ones"
            f" there ({class_name})",
            fix=_DENSE_FIX,
        )
    return module


def _place_expert_blocks(
    module: Any, path: str, names: Mapping[str, TensorHeader], model_name: str
) -> dict[str, Layout]:
    """Prepares the experts of gpt-oss: `_blocks` uint8[E O K/32 16] and `_scales` uint8[E O K/32]
    replace a stack whose shape is [E K O] in transformers' code.
    """
    layouts_by_stack = {}
    for stack in _STACKS:
        experts, columns, rows = getattr(module, stack).shape
        shapes = {
            f"{stack}_blocks": (experts, rows, columns // 32, 16),
            f"{stack}_scales": (experts, rows, columns // 32),
        }
        for name, shape in shapes.items():
            part = names.get(f"{path}.{name}")
            if part is None or tuple(part.shape) != shape:
                if part is None:
                    problem = "is missing"
                else:
                    problem = f"is {list(part.shape)}, expected {list(shape)}"
                raise UsageError(
                    f"model {model_name}: {path}.{name} {problem}",
                    fix="get the files again from where they came",
                )
            _register_placeholder(module, name, part)
        layouts_by_stack[stack] = Layout(
            "mxfp4", (rows, columns), ("weight_packed", torch.uint8, (rows, columns // 2)), (1, 32)
        )
    return layouts_by_stack


def _place_expert_layers(
    module: Any,
    path: str,
    packed: Mapping[str, Mapping[str, TensorHeader]],
    packing: Packing,
    model_name: str,
) -> dict[str, Layout]:
    """Prepares experts that the file stores as one linear layer per expert. Each expert gets
    parameters under its name in the file, so that transformers does not stack the experts.
    """
    layouts_by_stack: dict[str, Layout] = {}
    if module.is_transposed or not module.is_concatenated:
        raise UsageError(
            f"model {model_name}: {path} are packed one by one, and the model's code interleaves"
            " them",
            fix=_DENSE_FIX,
        )
    for stack, layers in _STACKS.items():
        _, rows, columns = getattr(module, stack).shape
        shape = (rows // len(layers), columns)
        for expert in range(module.num_experts):
            for layer in layers:
                owner = f"{path}.{expert}.{layer}"
                parts = {
                    name: part
                    for name, part in packed.get(owner, {}).items()
                    if name not in SERVING_TENSORS
                }
                layout = recognise_layout(f"model {model_name}: {owner}", parts, packing, shape)
                if layouts_by_stack.setdefault(stack, layout) != layout:
                    raise UsageError(
                        f"model {model_name}: {owner} is packed in another way than expert 0",
                        fix=_DENSE_FIX,
                    )
                holder = module._modules.setdefault(str(expert), nn.Module())
                holder.add_module(layer, nn.Module())
                for name, part in parts.items():
                    _register_placeholder(holder.get_submodule(layer), name, part)
    return layouts_by_stack


def pack_experts(model: nn.Module, packing: Packing) -> None:
    """Stacks the loaded tensors of packed experts, one layer at a time. Also replaces the layer's
    forward by one that computes with the packed stacks. The model may be on the meta device.
    """
    for path, module in list(model.named_modules()):
        layouts_by_stack: dict[str, Layout] | None = vars(module).pop(_PLAN_ATTRIBUTE, None)
        for stack, layout in (layouts_by_stack or {}).items():
            expert_tensors = list(_expert_pieces(module, path, stack))
            pieces = [
                [
                    build_state(piece_name, layout, packing.dtype_name, t)
                    for piece_name, t in named_tensors
                ]
                for named_tensors in expert_tensors
            ]
            tensors = {
                name: torch.stack(
                    [
                        torch.stack([piece.tensors[name] for piece in named_tensors])
                        for named_tensors in pieces
                    ]
                )
                for name in pieces[0][0].tensors
            }
            main = torch.stack(
                [
                    torch.stack([t[layout.packed_tensor[0]] for _, t in named_tensors])
                    for named_tensors in expert_tensors
                ]
            )
            del expert_tensors, pieces
            for name in (f"{stack}_blocks", f"{stack}_scales"):
                module._parameters.pop(name, None)
            for expert in module._modules.values():
                for layer in _STACKS[stack]:
                    getattr(expert, "_modules", {}).pop(layer, None)
            state = StackState(
                layout,
                packing.dtype_name,
                tensors,
                experts=main.shape[0],
                pieces=main.shape[1],
                transposed=bool(module.is_transposed),
            )
            module.register_parameter(stack, PackedWeight(main, state))
        if layouts_by_stack:
            for name in [name for name in module._modules if name.isdecimal()]:
                del module._modules[name]
            InstanceMethod(packed_forward, module).install()


def _expert_pieces(
    module: Any, path: str, stack: str
) -> Iterator[list[tuple[str, dict[str, Tensor]]]]:
    """Yields for every expert a list of (name, tensors), one for each packed matrix. The expert's
    matrix consists of the rows of these matrices.
    """
    blocks, scales = (
        module._parameters.get(f"{stack}_{suffix}") for suffix in ("blocks", "scales")
    )
    for expert in range(module.num_experts):
        if blocks is not None:
            yield [
                (
                    f"{path}.{stack}[{expert}]",
                    {
                        "weight_packed": blocks.data[expert].flatten(1),
                        "weight_scale": scales.data[expert],
                    },
                )
            ]
            continue
        layers = {layer: module._modules[str(expert)]._modules[layer] for layer in _STACKS[stack]}
        yield [
            (
                f"{path}.{expert}.{name}",
                {part: p.data for part, p in layer._parameters.items() if p is not None},
            )
            for name, layer in layers.items()
        ]
