"""Chooses the layers of a model that get an adapter. The result has the form of PEFT's settings,
which are names and patterns of modules, and names of parameters.

`all-linear` means the linear layers and stacked experts of the language part, without head and
routers, in every family.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.schema import AdapterSection
from ..errors import UsageError
from ..ops.packed import StackState
from ..precision.apply import is_quantised
from ..precision.vision import LANGUAGE, PROJECTOR, TOWER, VisionParts, vision_parts
from .architecture import SCORE
from .lora_names import PEFT_PREFIX

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


# a Mamba mixer passes the weights of these layers to its kernel or multiplies by them itself. The
# mixer never calls the layers, so adapters on them would get no gradient (PEFT refuses the first
# two names, except in Jamba). A quantised Jamba calls its dt_proj, but an adapter that was trained
# there would have no effect on the unquantised base
_NEVER_CALLED = dict.fromkeys(
    ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"),
    frozenset(("out_proj", "conv1d", "x_proj", "dt_proj")),
) | {"jamba": frozenset(("dt_proj",))}


def linear_names(model: PreTrainedModel) -> list[str]:
    """Returns the last parts of the names of the linear layers that can have an adapter, without
    the head. In a vision-language model only layers of the language part are included.
    """
    return sorted(
        {name.rpartition(".")[2] for name, _ in linear_layers(model, AdapterSection())}
        - _never_called(model)
    )


def linear_layers(
    model: PreTrainedModel, section: AdapterSection
) -> Iterator[tuple[str, nn.Linear]]:
    """Yields (name, layer) of the linear layers except the head, in the parts of the model that get
    an adapter.
    """
    if hasattr(model, "get_output_embeddings"):
        head = model.get_output_embeddings()
    else:
        head = None
    head = getattr(model, SCORE, head)
    parts = vision_parts(model)
    part_kinds = adapted_parts(section)
    return (
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
        and m is not head
        and (parts is None or parts.part_kind(name) in part_kinds)
    )


def adapted_parts(section: AdapterSection, mode: str = "lora") -> set[str]:
    """Returns the parts of a vision-language model that get an adapter, or are trained in full."""
    return {LANGUAGE} | {
        part
        for part, requested in ((TOWER, section.vision), (PROJECTOR, section.projector))
        if requested == mode
    }


def vision_modules(model: nn.Module, section: AdapterSection, mode: str) -> list[str]:
    """Returns the paths of the vision towers and projectors that are among `adapted_parts`."""
    parts = vision_parts(model)
    part_kinds = adapted_parts(section, mode)
    if parts is None:
        return []
    modules: list[str] = []
    if TOWER in part_kinds:
        modules += parts.towers
    if PROJECTOR in part_kinds:
        modules += parts.projectors(model)
    return modules


def refuse_other_parts(adapted: PeftModel, parts: VisionParts, section: AdapterSection) -> None:
    """Raises UsageError if `adapter.targets` selects layers of a part that must not have an
    adapter.
    """
    for name, _ in adapted.get_base_model().named_modules():
        part = parts.part_kind(name)
        if name.endswith(".lora_A") and part not in adapted_parts(section):
            if part == TOWER:
                key = "adapter.vision"
                mode = section.vision
            else:
                key = "adapter.projector"
                mode = section.projector
            raise UsageError(
                f"adapter.targets: {section.targets} chooses {name.removesuffix('.lora_A')} of the"
                f" {part}, which {key}: {mode} leaves without an adapter",
                fix=f"{key}: lora, or targets of the language part ({parts.language})",
            )


def picture_layers(model: Any, parts: VisionParts) -> list[str]:
    """Returns linear layers of the language part that do not run for rows without pictures. These
    are the cross-attention layers of Llama 3.2 Vision.
    """
    indices = getattr(model.config.get_text_config(), "cross_attention_layers", None) or ()
    prefixes = tuple(f"{parts.language}.layers.{i}." for i in indices)
    if prefixes:
        return [
            name
            for name, m in model.named_modules()
            if isinstance(m, nn.Linear) and name.startswith(prefixes)
        ]
    return []


def target_notes(model: PeftModel, section: AdapterSection) -> list[str]:
    """Returns messages about routers that have an adapter, and about linear layers to which
    `all-linear` gave no adapter.
    """
    adapted = [
        name for name, router in _find_routers(model.get_base_model()) if hasattr(router, "lora_A")
    ]
    if adapted:
        notes = [
            f"adapter.targets: {_abbreviate(adapted)}: a router that is adapted: all-linear leaves"
            " routers as they are"
        ]
    else:
        notes = []
    if section.targets != "all-linear" or section.start_from is not None:
        return notes
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    base: Any = model.get_base_model()
    modules: list[nn.Module] = list(base.modules())
    wrapped = {
        (module.parameter_name, module.get_base_layer())
        for module in modules
        if hasattr(module, "parameter_name") and isinstance(module, BaseTunerLayer)
    }
    peft_modules = {
        id(part)
        for module in modules
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        for part in module.modules()
    }
    routers = {id(router) for _, router in _find_routers(base)}
    parts = vision_parts(base)
    picture_layer_names = set() if parts is None else set(picture_layers(base, parts))
    unadapted = [
        name
        for name, layer in linear_layers(base, section)
        if id(layer) not in peft_modules
        and id(layer) not in routers
        and name not in picture_layer_names
    ]
    unadapted += [
        name
        for name in find_stacks(base)
        if (name.rpartition(".")[2], base.get_submodule(name.rpartition(".")[0])) not in wrapped
    ]
    reason = "one there could not be used, or not found again in its saved file"
    if unadapted:
        return [
            *notes,
            f"adapter.targets: all-linear gives {_abbreviate(unadapted)} no adapter: {reason}",
        ]
    return notes


def _abbreviate(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def _never_called(model: PreTrainedModel) -> frozenset[str]:
    return _NEVER_CALLED.get(getattr(model.config, "model_type", ""), frozenset())


def find_other_products(model: nn.Module) -> list[str]:
    """Finds linear layers whose forward is not exactly one matrix product, and returns the last
    parts of their names. For example, the routers of Llama 4 and Phi-MoE return several tensors,
    and DeepSeek V4's grouped output projection has one matrix per group.

    PEFT fails on such a layer, because it adds the adapter's output to the layer's output.
    """
    family_layers = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
        and type(m).__module__.startswith("transformers.models.")
        and type(m).forward is not nn.Linear.forward
    }
    layer_by_type = {type(layer): layer for layer in family_layers.values()}
    other_types = {kind for kind, layer in layer_by_type.items() if not _is_matrix_product(layer)}
    return sorted(
        {
            name.rpartition(".")[2]
            for name, layer in family_layers.items()
            if type(layer) in other_types
        }
    )


def _is_matrix_product(linear: nn.Linear) -> bool:
    weight = linear.weight
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            rows = linear(
                torch.zeros(2, linear.in_features, dtype=weight.dtype, device=weight.device)
            )
        except RuntimeError:  # the layer does not accept rows of this shape
            return False
    return isinstance(rows, torch.Tensor) and rows.shape == (2, linear.out_features)


def choose_targets(
    model: PreTrainedModel, section: AdapterSection
) -> tuple[str | list[str], list[str]]:
    """Returns (target modules, target parameters) for PEFT.

    If `adapter.targets` is `all-linear`, PEFT gets a list of names in place of this word for some
    models. One reason is that PEFT would select layers of Mamba models that it then refuses. In
    mixtures of experts the stacked expert weights are listed as target parameters, and routers get
    no adapter. PEFT would mistake some linear layers for the experts of an older checkpoint, and
    rename them. For these layers the weight is listed as a target parameter.

    For a vision-language model, PEFT gets a pattern. Names would not be enough, because layers in
    the vision tower can have the same names as layers in the language part (`q_proj` in Gemma 3).
    """
    parts = vision_parts(model)
    parameters = list(section.parameters)
    if section.targets != "all-linear":
        if isinstance(section.targets, str):
            modules = [section.targets]
        else:
            modules = list(section.targets)
        as_parameters = {
            name: stack_names
            for name in modules
            if (stack_names := _parameters_of_module(model, name))
        }
        module_names = [name for name in modules if name not in as_parameters]
        parameters += [
            name
            for stack_names in as_parameters.values()
            for name in stack_names
            if name not in parameters
        ]
        if isinstance(section.targets, str) and not as_parameters:
            return section.targets, parameters
        if parts is None:
            return module_names, parameters
        return _module_pattern(model, parts, section, module_names), parameters
    if _never_called(model):
        return linear_names(model), parameters
    stacked = find_stacks(model)
    if not stacked and parts is None:
        return "all-linear", parameters
    routers = {name for name, _ in _find_routers(model)}
    layers = {name: layer for name, layer in linear_layers(model, section) if name not in routers}
    renamed = _names_renamed_by_peft(model, layers)
    # PEFT cannot read the shape of bitsandbytes' weights
    parameter_names = [
        f"{last_two_names(name)}.weight"
        for name in sorted(renamed)
        if not is_quantised(w := layers[name].weight) or hasattr(w, "ds_shape")
    ]
    parameters += [
        name
        for name in sorted({last_two_names(name) for name in stacked} | set(parameter_names))
        if name not in parameters
    ]
    chosen = layers.keys() - renamed
    if parts is None:
        return _shorten_names(model, chosen), parameters
    last_names = sorted({name.rpartition(".")[2] for name in chosen})
    return _module_pattern(model, parts, section, last_names), parameters


def _module_pattern(
    model: nn.Module, parts: VisionParts, section: AdapterSection, names: Sequence[str]
) -> str:
    """Builds a pattern for modules of these names in the parts that get an adapter."""
    part_paths = [parts.language, *vision_modules(model, section, "lora")]
    whole_names = [
        name
        for name in (*part_paths, parts.head)
        if name in names or name.rpartition(".")[2] in names
    ]
    return "|".join(
        [
            rf"(?:{_join_alternatives(part_paths)})\.(?:.*\.)?(?:{_join_alternatives(names)})",
            *map(re.escape, whole_names),
        ]
    )


def _join_alternatives(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


def _shorten_names(model: nn.Module, names: Collection[str]) -> list[str]:
    """Shortens each name to its last part if every module with that last part is among `names`."""
    other_names = {
        name.rpartition(".")[2] for name, _ in model.named_modules() if name not in names
    }
    shortened = set()
    for name in names:
        last_name = name.rpartition(".")[2]
        shortened.add(name if last_name in other_names else last_name)
    return sorted(shortened)


def last_two_names(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def find_stacks(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that stack one matrix per expert of a mixture."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if has_stack(module)
        for name, p in module.named_parameters(recurse=False)
        if is_stack(p)
    ]


def _find_routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the routers of mixtures of experts. A router is a module next to the experts, and has
    one row of weights per expert.
    """
    for path, block in model.named_modules():
        experts = [child for child in map(_base_module, block.children()) if has_stack(child)]
        if not experts:
            continue
        for name, child in block.named_children():
            weight = _base_module(child)._parameters.get("weight")
            if _is_matrix(weight) and len(weight) == experts[0].num_experts:
                yield f"{path}.{name}", child


def has_stack(module: nn.Module) -> bool:
    """Returns True if this module holds the experts of a mixture as stacked parameters."""
    parameters = module.parameters(recurse=False) if hasattr(module, "num_experts") else ()
    return any(map(is_stack, parameters))


def is_stack(parameter: nn.Parameter) -> bool:
    """Returns True if this parameter stacks the matrices of all experts, packed or not."""
    return (parameter.dim() == 3 and parameter.is_floating_point()) or isinstance(
        getattr(parameter, "quant_state", None), StackState
    )


def _base_module(module: Any) -> Any:
    if hasattr(module, "lora_A"):
        return module.get_base_layer()
    return module


def _names_renamed_by_peft(model: nn.Module, layers: Iterable[str]) -> set[str]:
    """Returns the names of `layers` that PEFT would mistake for the experts of an older checkpoint.
    PEFT would replace these names by the names of the stacked experts.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers as convert,
    )

    config = LoraConfig(target_modules=list(layers))
    convert(config, model, None)
    return set(layers) - set(config.target_modules or ())


def _parameters_of_module(model: nn.Module, name: str) -> list[str]:
    """Returns the parameters for a name of `adapter.targets` that PEFT cannot adapt as a module.
    Such a parameter is a router's weight, or a stack of experts.
    """
    modules = [m for path, m in model.named_modules() if path == name or path.endswith(f".{name}")]
    family_modules = [
        module
        for module in modules
        if type(module).__module__.startswith("transformers.models.")
        and not isinstance(module, nn.Linear | nn.Embedding)
    ]
    if modules:
        if len(family_modules) == len(modules) and all(
            _is_matrix(module._parameters.get("weight")) for module in family_modules
        ):
            return [f"{name}.weight"]
        return []
    return sorted(
        {last_two_names(path) for path in find_stacks(model) if path.endswith(f".{name}")}
    )


def _is_matrix(weight: Any) -> bool:
    return weight is not None and weight.dim() == 2


def refuse_unknown_parameters(model: nn.Module, parameters: Sequence[str]) -> None:
    """Raises UsageError for a name in `adapter.parameters` if the model has no matrix and no stack
    of expert matrices of this name.
    """
    parameter_names = [
        path for path, p in model.named_parameters() if p.dim() in (2, 3) or is_stack(p)
    ]
    for name in parameters:
        if not any(path == name or path.endswith(f".{name}") for path in parameter_names):
            example_names = sorted({last_two_names(path) for path in find_stacks(model)}) or sorted(
                {last_two_names(path) for path in parameter_names}
            )
            raise UsageError(
                f"adapter.parameters: {name}: the model has no such matrix or stack",
                fix=f"one of {', '.join(example_names[:8])}",
            )


def refuse_settings_on_parameters(section: AdapterSection, parameters: Sequence[str]) -> None:
    """Raises UsageError for a setting that PEFT does not support for adapters on parameters."""
    for key, value, is_set in (
        ("dora", "true", section.dora),
        ("start", section.start, section.start != "default"),
        ("dropout", section.dropout, section.dropout),
    ):
        if parameters and is_set:
            raise UsageError(
                f"adapter.{key}: {value}: {parameters[0]} is adapted as a parameter, for which PEFT"
                f" has no {key}",
                fix=f"leave adapter.{key} out, or adapter.targets that name linear layers only",
            )


_LORA_SUFFIX = ".lora_A.weight"


def find_lost_layers(model: nn.Module, config: LoraConfig, layers: Iterable[str]) -> list[str]:
    """Returns the names of `layers` whose adapters PEFT would load under another name."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as converted,
    )

    names = {f"{PEFT_PREFIX}{layer}{_LORA_SUFFIX}": layer for layer in layers}
    loaded_names: set[Any] = set()
    # one layer at a time, because some conversions stack or split tensors that belong together
    for name in names:
        try:
            loaded_names |= set(converted(model, config, {name: torch.empty(1, 1)}))
        except (RuntimeError, ValueError, IndexError, KeyError):
            loaded_names.add(name)
    return [layer for name, layer in names.items() if name not in loaded_names]


def find_lost_stacks(model: nn.Module, config: LoraConfig) -> set[str]:
    """Returns the stacks of experts whose adapters PEFT would load under another name. Their names
    have the form that `adapter.parameters` accepts. PEFT puts one wrapper around the module for
    each of its stacks.
    """
    stacked = find_stacks(model)
    paths = {name.rpartition(".")[0] for name in stacked}
    lost = find_lost_layers(
        model, config, [layer for path in sorted(paths) for layer in (path, f"{path}.base_layer")]
    )
    lost_paths = {layer.removesuffix(".base_layer") for layer in lost}
    return {last_two_names(name) for name in stacked if name.rpartition(".")[0] in lost_paths}
