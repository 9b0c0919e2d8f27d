"""Attaches a LoRA adapter through PEFT, freezes all other weights, and saves the adapter as a plain
PEFT folder.

In a vision-language model the adapter is on the language part, and on towers and projectors if
`adapter.vision` and `adapter.projector` select them.

PEFT trains a copy of each module in `modules_to_save`. A packed weight has no gradient, so these
modules are not quantised in a 4-bit base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ..config.schema import AdapterSection, RunConfig
from ..dtypes import to_torch
from ..environment.hardware import out_of_memory_message
from ..environment.hub_kernels import disable_hub_kernels
from ..errors import UsageError
from ..lora.attach import lora_layers
from ..lora.quantised import PackedLinear
from ..ops.packed import dequantise_packed
from ..precision.apply import declared_dtype, is_quantised
from ..precision.precision import Precision
from ..precision.vision import vision_parts
from ..wording import first_line, pluralise
from .adapter_settings import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    check_patterns,
    read_adapter_config,
)
from .architecture import SCORE
from .initialisation import describe_ordinary_adapter, initialise_adapter, to_ordinary_adapter
from .lora_names import PEFT_PREFIX
from .targets import (
    adapted_parts,
    choose_targets,
    find_lost_layers,
    find_lost_stacks,
    find_other_products,
    last_two_names,
    linear_layers,
    linear_names,
    picture_layers,
    refuse_other_parts,
    refuse_settings_on_parameters,
    refuse_unknown_parameters,
    vision_modules,
)
from .tokens import token_modules

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


def attach_adapter(
    model: PreTrainedModel,
    section: AdapterSection,
    *,
    seed: int,
    new_tokens: bool = False,
    task_type: str | None = "CAUSAL_LM",
    targets: list[str] | None = None,
    has_pictures: bool = False,
    token_ids: Sequence[int] = (),
) -> PeftModel:
    """Wraps `model` in a PeftModel with one trainable adapter, which is new or loaded from
    `adapter.start_from`.

    new_tokens    whether to train embedding and head completely; tied weights stay tied
    has_pictures  whether rows have pictures; without them, layers that only read pictures get no
                  adapter
    token_ids     the ids of `adapter.train_tokens`
    task_type     PEFT's task type; None for a model that needs no wrapper for a task
    targets       replaces `adapter.targets`, for models whose linear layers PEFT cannot choose
    """
    disable_hub_kernels()  # PEFT imports bitsandbytes
    from peft import LoraConfig

    if task_type == "CAUSAL_LM" and hasattr(model, SCORE):
        task_type = "SEQ_CLS"
    torch.manual_seed(seed)
    if section.start_from is not None:
        return _continue_adapter(model, Path(section.start_from), new_tokens=new_tokens)
    if section.kind == "lokr":
        return _attach_lokr(model, section, targets or [])
    _refuse_tokens_trained_in_full(model, section, new_tokens=new_tokens, token_ids=token_ids)
    full_modules, is_tied = _choose_full_modules(model, section, new_tokens=new_tokens)
    refuse_packed_modules(model, full_modules, "adapter.modules_to_save")
    if section.dora:
        _refuse_dora_on_packed_layers(model)
    if targets is None:
        modules, parameters = choose_targets(model, section)
    else:
        modules, parameters = targets, []
    refuse_settings_on_parameters(section, parameters)
    refuse_unknown_parameters(model, section.parameters)
    token_indices = None
    if token_ids:
        token_indices = {token_modules(model)[0][0]: list(token_ids)}
    config = LoraConfig(
        task_type=task_type,
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT takes a float, its annotation says int
        lora_dropout=section.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
        modules_to_save=full_modules or None,
        trainable_token_indices=token_indices,
        ensure_weight_tying=is_tied,
    )
    layer_names = linear_names(model)  # read before PEFT replaces layers
    lost_layers = _find_lost_targets(model, config, section)
    if section.targets == "all-linear":
        _exclude_layers(model, config, section, lost_layers, has_pictures=has_pictures)
    adapted = _wrap_with_peft(model, config, section, layer_names)
    _refuse_misplaced_adapters(model, adapted, section, lost_layers)
    refuse_unmatched_patterns(adapted, section)
    if section.start != "default":
        initialise_adapter(adapted, section.start)
    if section.dora:
        _compute_dora_magnitudes(adapted)
    return adapted


def _continue_adapter(model: PreTrainedModel, folder: Path, *, new_tokens: bool) -> PeftModel:
    """Loads the adapter of `adapter.start_from`. For a model on the meta device only the adapter's
    settings are read, not its weights.
    """
    if new_tokens:
        raise UsageError(
            "model.add_tokens with adapter.start_from is not offered yet",
            fix="merge the adapter first: isotype merge",
        )
    if next(model.parameters()).device.type == "meta":
        return _attach_outline(model, folder)
    return load_adapter(model, folder, setting="adapter.start_from")


def _refuse_tokens_trained_in_full(
    model: PreTrainedModel, section: AdapterSection, *, new_tokens: bool, token_ids: Sequence[int]
) -> None:
    """Raises UsageError for `adapter.train_tokens` if the whole embedding is trained."""
    if not token_ids:
        return
    if new_tokens or set(token_modules(model)[0]) & set(section.modules_to_save):
        raise UsageError(
            "adapter.train_tokens: the embedding is trained in full",
            fix="remove adapter.train_tokens",
        )


def _choose_full_modules(
    model: PreTrainedModel, section: AdapterSection, *, new_tokens: bool
) -> tuple[list[str], bool]:
    """Returns the names of the modules that are trained in full. The second result is True if the
    embedding and the head are trained for new tokens and share their weights.
    """
    full_modules = list(section.modules_to_save)
    is_tied = False
    if new_tokens:
        names, is_tied = token_modules(model)
        full_modules += [name for name in names if name not in full_modules]
    if vision_parts(model) is not None:
        full_modules += vision_modules(model, section, "full")
    return full_modules, is_tied


def _refuse_dora_on_packed_layers(model: PreTrainedModel) -> None:
    for name, module in model.named_modules():
        if type(module) is PackedLinear:
            raise UsageError(
                f"adapter.dora: {name} is packed, and PEFT takes DoRA's lengths off dense and nf4"
                " weights",
                fix="adapter.dora: false",
            )


def _find_lost_targets(
    model: PreTrainedModel, config: LoraConfig, section: AdapterSection
) -> list[str]:
    """Finds linear layers whose adapters PEFT could not load from a saved file. In a
    vision-language model only the parts that get an adapter are searched.
    """
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    lost_layers = find_lost_layers(model, config, linear)
    if vision_parts(model) is None:
        return lost_layers
    adaptable = {name for name, _ in linear_layers(model, section)}
    return [name for name in lost_layers if name in adaptable]


def _exclude_layers(
    model: PreTrainedModel,
    config: LoraConfig,
    section: AdapterSection,
    lost_layers: list[str],
    *,
    has_pictures: bool,
) -> None:
    """Excludes some layers from `all-linear`. These are layers on which an adapter would fail or
    have no effect, and layers whose adapter could not be loaded from its saved file.
    """
    excluded = find_other_products(model) + lost_layers
    parts = vision_parts(model)
    if parts is not None:
        if not has_pictures:
            excluded += picture_layers(model, parts)
        # the pattern of last names also matches a tower's patch embedding, a convolution with the
        # name of a linear layer
        last_names = {name.rpartition(".")[2] for name, _ in linear_layers(model, section)}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in last_names and not isinstance(module, nn.Linear):
                excluded.append(name)
    config.exclude_modules = excluded or None
    lost_parameters = {f"{last_two_names(name)}.weight" for name in lost_layers}
    lost_parameters |= find_lost_stacks(model, config)
    parameters = [name for name in config.target_parameters or () if name not in lost_parameters]
    config.target_parameters = parameters or None


def _wrap_with_peft(
    model: PreTrainedModel, config: LoraConfig, section: AdapterSection, layer_names: list[str]
) -> PeftModel:
    """Adds PEFT's layers. Raises UsageError for targets that PEFT does not accept."""
    from peft import get_peft_model

    try:
        adapted: PeftModel = get_peft_model(model, config)
    except ValueError as error:
        fix = f"adapter.targets: all-linear, or some of: {', '.join(layer_names)}"
        if section.dropout and "lora_dropout" in str(error):
            fix = (
                "adapter.dropout: 0; PEFT adapts experts and routers of this family as parameters,"
                " for which it has no dropout"
            )
        raise UsageError(
            f"adapter.targets: {section.targets}: {first_line(error)}", fix=fix
        ) from error
    except IndexError as error:
        # PEFT 0.20 reads the sizes of a packed parameter from the shape of its bytes
        if not config.target_parameters or Version(version("peft")) >= Version("0.21"):
            raise
        raise UsageError(
            f"adapter.targets: {section.targets}: PEFT {version('peft')} cannot adapt packed experts",
            fix="pip install -U 'peft>=0.21', or adapter.targets: [q_proj, k_proj, v_proj, o_proj]",
        ) from error
    return adapted


def _refuse_misplaced_adapters(
    model: PreTrainedModel, adapted: PeftModel, section: AdapterSection, lost_layers: list[str]
) -> None:
    """Raises UsageError for adapters on parts that must not have one, and for adapters that PEFT
    could not load from their saved file.
    """
    parts = vision_parts(model)
    if parts is not None:
        refuse_other_parts(adapted, parts, section)
    lost = [name for name in lost_layers if hasattr(model.get_submodule(name), "lora_A")]
    if lost:
        raise UsageError(
            f"adapter.targets: {section.targets}: PEFT {version('peft')} does not find the saved"
            f" adapter of {lost[0]} again ({len(lost)} such): it renames it as a checkpoint's",
            fix="adapter.targets: all-linear leaves these layers out",
        )


def _attach_lokr(model: Any, section: AdapterSection, targets: list[str]) -> PeftModel:
    from peft import LoKrConfig, get_peft_model

    config = LoKrConfig(
        r=section.r,
        alpha=section.alpha,  # type: ignore[arg-type]  # PEFT takes a float, its annotation says int
        target_modules=targets,
        decompose_factor=section.factor or -1,
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
    )
    try:
        adapted: PeftModel = get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(f"adapter.targets: {section.targets}: {first_line(error)}") from error
    return adapted


def refuse_unmatched_patterns(adapted: nn.Module, section: AdapterSection) -> None:
    """Raises UsageError for a rank or alpha pattern that matches no adapted module. PEFT would
    ignore it.
    """
    names = []
    for name, layer in lora_layers(adapted):
        if hasattr(layer, "parameter_name"):
            name = f"{name}.{layer.parameter_name}"
        names.append(name)
    for key, patterns in (
        ("rank_pattern", section.rank_pattern),
        ("alpha_pattern", section.alpha_pattern),
    ):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                example_names = ", ".join(sorted({name.rpartition(".")[2] for name in names})[:8])
                raise UsageError(
                    f"adapter.{key}: {pattern}: no adapted module has that name",
                    fix=f"the end of one: {example_names}",
                )


def _compute_dora_magnitudes(adapted: nn.Module) -> None:
    """Computes DoRA's magnitudes in fp32. PEFT stores them in the base's dtype. Rounding to bf16
    would give each magnitude a relative error of up to 2^-9. Such an error is about as large as the
    changes that training makes to the magnitudes.
    """
    for _, layer in lora_layers(adapted):
        weight = layer.base_layer.weight
        if not isinstance(layer.base_layer, nn.Linear) or weight.is_meta:
            continue
        if is_quantised(weight):
            dense = dequantise_packed(weight.data, weight.quant_state, torch.float32)
        else:
            dense = weight.data.float()
        matrices = (
            layer.lora_A["default"].weight.data.float(),
            layer.lora_B["default"].weight.data.float(),
        )
        merged = torch.addmm(dense, matrices[1], matrices[0], alpha=float(layer.scaling["default"]))
        layer.lora_magnitude_vector["default"].weight.data = merged.norm(dim=1)


def _attach_outline(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Adds an adapter to a model on the meta device. The adapter's settings are those of the saved
    adapter in `folder`. Raises UsageError for settings that PEFT does not accept.
    """
    from peft import PeftConfig, get_peft_model

    check_adapter(model, folder, "adapter.start_from")
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        refuse_packed_modules(model, read_modules_to_save(folder), f"adapter.start_from: {folder}")
        # a saved adapter is marked for inference, and this run trains it further
        settings.inference_mode = False
        wrapped: PeftModel = get_peft_model(model, settings)
        return wrapped
    except UsageError:
        raise
    except Exception as error:  # damaged settings make PEFT raise any type of error
        raise UsageError(f"adapter.start_from: {folder}: {first_line(error)}") from error


def freeze_vision(model: Any, section: AdapterSection, precision: Precision) -> list[str]:
    """Freezes the vision towers and projectors that the configuration does not select, and casts
    them to the dtype of frozen weights. This is for a run that trains every other weight. Returns a
    line for the run's header.
    """
    parts = vision_parts(model)
    if parts is None:
        return []
    frozen = {
        name: p
        for name, p in model.named_parameters()
        if parts.part_kind(name) not in adapted_parts(section, "full")
    }
    for name, parameter in frozen.items():
        parameter.requires_grad = False
        parameter.data = parameter.data.to(
            to_torch(declared_dtype(model, name, parameter, precision))
        )
    count = sum(p.numel() for p in frozen.values())
    if frozen:
        return [
            f"adapter.vision, adapter.projector: {pluralise(count, 'weight')} of tower and projector"
            " stay frozen"
        ]
    return []


def check_vision(model: Any, section: AdapterSection, *, has_pictures: bool) -> None:
    """Raises UsageError if `adapter.vision` or `adapter.projector` has no effect."""
    for key, mode in (("adapter.vision", section.vision), ("adapter.projector", section.projector)):
        if mode == "none":
            continue
        parts = vision_parts(model)
        reason = None
        if parts is None:
            reason = f"{type(model).__name__} has no vision tower"
        elif key == "adapter.projector" and not parts.projectors(model):
            reason = f"the projector of {type(model).__name__} is part of its tower"
        elif not has_pictures:
            reason = "no row has a picture, and the tower does not run"
        elif section.start_from is not None:
            reason = "the layers of adapter.start_from go on"
        elif mode == "lora" and section.kind == "none":
            raise UsageError(f"{key}: lora needs adapter.kind: lora", fix=f"{key}: full")
        if reason is not None:
            raise UsageError(f"{key}: {mode} has no effect: {reason}", fix=f"{key}: none")


def check_lora_branch(config: RunConfig, precision: Precision) -> None:
    """Raises UsageError if `model.lora_branch: fp32` would have no effect. This check runs before
    anything is loaded.
    """
    reasons = {
        "adapter.kind: none, which trains no adapter": config.adapter.kind == "none",
        "adapter.kind: lokr, which PEFT computes": config.adapter.kind == "lokr",
        "model.optimize: false, which leaves the adapter to PEFT": not config.model.optimize,
        "precision.compute: fp32, which the adapter has already": precision.compute == "fp32",
    }
    for reason, applies in reasons.items():
        if applies and config.model.lora_branch != "compute":
            raise UsageError(
                f"model.lora_branch: fp32 has no effect with {reason}",
                fix="model.lora_branch: compute",
            )


def refuse_packed_experts_without_ops(model: nn.Module) -> None:
    """Raises UsageError for adapters on packed experts if `model.optimize` is false, because PEFT's
    code cannot compute such adapters.
    """
    for name, layer in lora_layers(model):
        if hasattr(layer, "parameter_name") and is_quantised(layer.get_param()):
            raise UsageError(
                f"model.optimize: false: {name} is an adapter on packed experts, and PEFT's code"
                " cannot compute it",
                fix="model.optimize: true, or adapter.targets of attention alone",
            )


def load_adapter(model: PreTrainedModel, folder: Path, *, setting: str = "adapter") -> PeftModel:
    """Loads a saved PEFT adapter into `model`, with trainable weights. Accepts only safetensors,
    because a pickle can run code.

    Raises  UsageError for an adapter that is damaged, of another kind, or for a different model
            (PEFT ignores weights that do not match)
    """
    disable_hub_kernels()  # PEFT imports bitsandbytes
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    label = f"{setting}: {folder}"
    weights = folder / ADAPTER_FILE
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        raise UsageError(f"{label} has no adapter_config.json: not a PEFT folder")
    if not weights.is_file():
        message = f"{label} has no adapter_model.safetensors"
        if not (folder / "adapter_model.bin").is_file():
            raise UsageError(message)
        raise UsageError(
            f"{message}: adapter_model.bin is a pickle, which can run code",
            fix=(
                "convert it where you trust it:"
                " PeftModel.from_pretrained(...).save_pretrained(FOLDER)"
            ),
        )
    fetch_again = "get the adapter again from where it came"
    check_adapter(model, folder, setting)
    try:
        with safe_open(weights, framework="pt") as file:
            saved = set(file.keys())
        settings = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # a damaged config.json may raise any type of error
        raise UsageError(
            f"{label} cannot be read: {type(error).__name__}: {first_line(error)}", fix=fetch_again
        ) from error
    base = settings.base_model_name_or_path
    refuse_packed_modules(model, read_modules_to_save(folder), label)
    if base:
        fix = f"take the base model it was trained on ({base})"
    else:
        fix = "take the base model it was trained on"
    try:
        # low_cpu_mem_usage would leave weights that the file lacks on the meta device
        loaded = PeftModel.from_pretrained(model, str(folder), config=settings, is_trainable=True)
    except Exception as error:
        if out_of_memory_message(error) is not None:
            raise
        raise UsageError(
            f"{label} does not fit this model: {first_line(error)}", fix=fix
        ) from error
    expected = set(get_peft_model_state_dict(loaded))
    different = sorted(saved ^ expected)
    if different:
        owner = "adapter" if different[0] in saved else "model"
        raise UsageError(
            f"{label} does not fit this model: {different[0]} is only in the {owner}"
            f" ({len(different)} such)",
            fix=fix,
        )
    _restore_wider_values(loaded, weights)
    return loaded


def check_adapter(model: nn.Module, folder: Path, setting: str) -> None:
    """Raises UsageError for settings of a saved adapter that are outside their ranges, and for
    patterns that take too long to match the model's modules.
    """
    settings = read_adapter_config(folder, setting)
    names = (name for name, _ in model.named_modules())
    check_patterns(settings, names, f"{setting}: {folder / ADAPTER_CONFIG_FILE}")


def is_trained_on_text_class(folder: Path) -> bool:
    """Returns True if a saved adapter was trained on the text-only class of a vision-language
    family. In this class the layers are named `model.layers`, in the released class
    `model.language_model.layers`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
            return any(name.startswith(f"{PEFT_PREFIX}model.layers.") for name in file.keys())  # noqa: SIM118  # not a dictionary
    except (OSError, SafetensorError):
        return False  # `load_adapter` reports what is wrong with the file


def _restore_wider_values(model: PeftModel, weights: Path) -> None:
    """Loads the fully trained modules a second time, in the dtype of the saved file, if this dtype
    is wider than the base's dtype.

    PEFT copies these modules in the base's dtype and rounds the file's values to this dtype.
    Without the second loading, fp32 weights that were trained on a bf16 base would be loaded as
    bf16. Tied weights stay tied.
    """
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        stored = set(file.keys())
        for name, parameter in model.named_parameters():
            key = name.replace(".modules_to_save.default.", ".")
            if key == name or key not in stored:
                continue
            value = file.get_tensor(key)
            if (
                value.is_floating_point()
                and torch.promote_types(value.dtype, parameter.dtype) != parameter.dtype
            ):
                parameter.data = value.to(parameter.device)


def save_adapter(model: PeftModel, folder: Path, precision: Precision) -> None:
    """Saves the adapter as a plain PEFT folder, in the dtype of `precision.save_adapter`."""
    dtype = to_torch(precision.save_adapter)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    state = {
        name: t.to(dtype) if name in trained else t
        for name, t in to_ordinary_adapter(model, model.state_dict()).items()
    }
    for config in model.peft_config.values():
        for key, value in vars(config).items():
            # PEFT writes sets of names in an order that differs between processes
            if isinstance(value, set):
                setattr(config, key, sorted(value))
    model.save_pretrained(str(folder), state_dict=state)
    describe_ordinary_adapter(model, folder)


def trainable_share(model: nn.Module) -> tuple[int, int]:
    """Returns (trainable elements, all elements). For a packed 4-bit weight it counts the unpacked
    elements.
    """
    trainable = total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        element_count = parameter.numel() if state is None else state.shape.numel()
        total += element_count
        if parameter.requires_grad:
            trainable += element_count
    return trainable, total


def modules_trained_in_full(section: AdapterSection) -> list[str]:
    """Returns the names of the modules that the run's adapter trains in full, in the form of
    `modules_to_save`.
    """
    if section.kind == "none":
        return []
    if section.start_from is None:
        return list(section.modules_to_save)
    return read_modules_to_save(Path(section.start_from))


def read_modules_to_save(folder: Path) -> list[str]:
    """Returns the `modules_to_save` of a saved adapter. The result is empty for a folder that
    cannot be read; `load_adapter` refuses such a folder later.
    """
    try:
        settings = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    names = settings.get("modules_to_save") if isinstance(settings, dict) else None
    if isinstance(names, list):
        return [name for name in names if isinstance(name, str)]
    return []


def find_modules(model: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    """Returns the modules that PEFT trains in full for these names, by their paths."""
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path.endswith(tuple(names))
    }


def unquantised_patterns(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Returns patterns for the layers that are not quantised, in the form of
    `llm_int8_skip_modules`. The vision tower and the projector are among these layers. These parts
    are small compared with the whole model, and 4-bit weights would make their results less exact
    than the results of other layers.

    model  the model before it is quantised, for example on the meta device
    names  `modules_trained_in_full`
    """
    vision = vision_modules(model, AdapterSection(vision="full", projector="full"), "full")
    return sorted({*get_keys_to_not_convert(model), *find_modules(model, names), *vision})


def layers_to_quantise(model: PreTrainedModel, skip_modules: Sequence[str]) -> set[nn.Module]:
    patterns = [*skip_modules, *(model._keep_in_fp32_modules or ())]
    return {
        m
        for full_name, m in model.named_modules()
        if type(m) is nn.Linear and should_convert_module(full_name, patterns)
    }


def skip_modules_from_config(config: Any) -> list[str] | None:
    """Returns the list `llm_int8_skip_modules` of a base that was saved quantised, or None if the
    base has no such list.
    """
    quantisation = config.quantization_config
    if isinstance(quantisation, dict):
        skip_modules = quantisation.get("llm_int8_skip_modules")
    else:
        skip_modules = getattr(quantisation, "llm_int8_skip_modules", None)
    return None if skip_modules is None else list(skip_modules)


def refuse_packed_modules(model: nn.Module, names: Collection[str], setting: str) -> None:
    """Raises UsageError if a module that must be trained in full has packed weights, as in a base
    that was saved quantised.
    """
    for path, module in find_modules(model, names).items():
        packed = next((name for name, p in module.named_parameters() if is_quantised(p)), None)
        if packed is not None:
            raise UsageError(
                f"{setting}: {path}.{packed} was saved quantised, and packed weights cannot be"
                " trained",
                fix=(
                    "leave it out, or give the model it was quantised from: nf4-lora leaves"
                    " unquantised what is trained in full"
                ),
            )
