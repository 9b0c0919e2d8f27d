"""Reads properties of a model from its configuration: the model's class, whether it predicts the
next token, its attention implementation, and the settings of each layer.

The setting `model.rope_parameters` changes the configuration before the model is loaded. The names
of its keys and their meanings are those of `rope_parameters` in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from ..errors import UsageError
from ..wording import first_line

AUTO = "auto"
# the value of `model.attention` -> transformers' name. For `auto` no name is passed: transformers
# then uses sdpa if the class has it, else eager
IMPLEMENTATIONS = {
    AUTO: None,
    "sdpa": "sdpa",
    "eager": "eager",
    "flash": "flash_attention_2",
    "flex": "flex_attention",
}
_SETTINGS_BY_NAME = {name: setting for setting, name in IMPLEMENTATIONS.items()}
_ATTENTION_ERRORS = re.compile(
    r"attn_implementation|scaled_dot_product_attention|flex_attention|Flash ?Attention",
    re.IGNORECASE,
)


def attention_options(attention: str, device: torch.device) -> dict[str, Any]:
    """Returns the attention arguments for `from_pretrained`. Raises UsageError for an
    implementation that trains only on a GPU.
    """
    if attention in ("flash", "flex") and device.type == "cpu":
        raise UsageError(
            f"model.attention: {attention} trains on a GPU only, and this run is on the CPU",
            fix="model.attention: auto",
        )
    name = IMPLEMENTATIONS[attention]
    return {} if name is None else {"attn_implementation": name}


def has_attention(model: Any) -> bool:
    """Returns True if the model's configuration contains the name of its attention implementation.
    Configurations of transformers contain this name, but configurations of diffusers do not.
    """
    return hasattr(getattr(model, "config", None), "_attn_implementation")


def attention_setting(model: Any) -> str:
    """Returns the value of the setting `model.attention` that selects the implementation which
    `model` uses. If there is no such value, returns the name that transformers uses for the
    implementation.
    """
    name = getattr(model.config, "_attn_implementation", None) or "eager"
    return _SETTINGS_BY_NAME.get(name) or str(name)


def describe_attention(model: Any, requested: str) -> str:
    """Describes the attention implementation for the run's header. If it is not the requested
    implementation, the text contains the reason. The text is empty for a model that is not from
    transformers.
    """
    if not has_attention(model):
        return ""
    implementation = attention_setting(model)
    if requested != AUTO:
        return implementation
    base_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if implementation == "eager":
        reason = f"{type(base_model).__name__} has no sdpa"
    else:
        reason = "the best this family has"
    return f"{implementation} (auto: {reason})"


def explain_attention(model: str, attention: str, error: BaseException) -> UsageError | None:
    """Returns a short error for an implementation that the family or the machine does not support;
    None if the error has a different cause.
    """
    text = str(error)
    if attention == AUTO or not _ATTENTION_ERRORS.search(text):
        return None
    if attention == "flash" and ("install" in text or "package" in text):
        first = next(line.strip() for line in text.splitlines() if line.strip())
        return UsageError(
            f"model.attention: flash: {first}",
            fix="pip install flash-attn, or model.attention: auto",
        )
    family = re.match(r"(\w+) does not support", text.strip())
    family_name = family[1] if family else model
    return UsageError(
        f"model.attention: {attention}: {family_name} does not have it in transformers",
        fix="model.attention: auto",
    )


SCORE = "score"  # the head of transformers' sequence classifiers


def auto_class(config: Any, *, text_only: bool = False, has_score_head: bool = False) -> Any:
    """Returns the auto class of transformers for this configuration. This auto class uses the model
    class with which the model was released.

    A vision-language model is loaded with its released class, even if it is trained only on text.
    The adapter then has the names that servers of the released model expect.

    config          the model's configuration from transformers
    text_only       whether to return the family's text-only class, if it has one
    has_score_head  whether to return the family's sequence classifier, with one label
    Raises          UsageError for a family without a sequence classifier
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if has_score_head:
        family = getattr(config, "model_type", None) or "this model"
        if (
            is_vision_language(config)
            or family not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        ):
            raise UsageError(
                "train.objective: reward: transformers has no sequence classifier of text for"
                f" {family}",
                fix="Llama, Qwen, Gemma, ...",
            )
        config.num_labels = 1
        return AutoModelForSequenceClassification
    if is_vision_language(config) and not text_only:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def is_vision_language(config: Any) -> bool:
    """Returns True if the configuration belongs to a class that reads pictures and text and
    generates text.
    """
    family = getattr(config, "model_type", None) or ""
    multimodal_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family)
    text_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if not str(multimodal_class).endswith("ForConditionalGeneration"):
        return False
    class_name = (getattr(config, "architectures", None) or [multimodal_class])[0]
    return bool(text_class == multimodal_class or class_name != text_class)


DECODERS = "a decoder-only language model (Llama, Qwen, Gemma, ...)"
# the end of a class's name -> what a model of this class predicts
_NO_NEXT_TOKEN = {
    "ForSequenceClassification": "classes of a text", "ForTokenClassification": "classes of tokens", "ForMultipleChoice": "a choice",
    "ForQuestionAnswering": "places in a text",
}  # fmt: skip


def refuse_other_objectives(config: Any, name: str, *, has_score_head: bool = False) -> None:
    """Raises UsageError for a model that cannot be trained to predict the next token. This is a
    model whose positions attend to later positions, a model that needs an encoder's input, or a
    model whose head predicts classes.

    config          the model's configuration from transformers
    name            the model's name, for the error
    has_score_head  whether the run trains a classifier with one label
    """
    family = getattr(config, "model_type", "") or "this model"
    classes = getattr(config, "architectures", None) or []
    causal_class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    fix = DECODERS
    reason = ""
    predicted_output = next(
        (
            output
            for end, output in _NO_NEXT_TOKEN.items()
            if any(class_name.endswith(end) for class_name in classes)
        ),
        None,
    )
    if predicted_output is not None and not has_score_head:
        reason = (
            f"{classes[0]} answers with {predicted_output}: as a language model it would train without its"
            " head, which is dropped"
        )
        fix = (
            "the base that it was made from; train.objective: reward trains one score,"
            " attach(Trainer(...)) trains classes"
        )
    elif (
        classes
        and causal_class_name
        and classes[0] != causal_class_name
        and classes[0] == MODEL_MAPPING_NAMES.get(family)
        and not has_score_head
    ):
        # a file without a head would load as a language model with tied embeddings
        reason = f"{classes[0]} is a model without a head for tokens, as embedding models are saved"
        fix = (
            "the base that it was made from; a language model that was saved so: "
            "name its class with a head under architectures in config.json"
        )
    elif getattr(config, "is_encoder_decoder", False):
        reason = (
            f"{family} is an encoder-decoder (seq2seq) model, which is not offered yet: "
            "missing are batches with an input for the encoder and labels for the decoder"
        )
    elif family in ("xlnet", "cpmant"):
        reason = f"{family} does not predict the next token from those before it alone"
    elif family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (
        getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    ):
        reason = (
            f"{family} is an encoder: every position sees the later ones, so next-token training"
            " would teach it to copy"
        )
        fix = (
            f"{DECODERS}; a model that was trained as a decoder has is_decoder: true in config.json"
        )
    elif family in CONFIG_MAPPING_NAMES and not (
        # a model's custom code may have a next-token head
        causal_class_name or getattr(config, "auto_map", None) or is_vision_language(config)
    ):
        class_names = ", ".join(classes) or "config.json names no architecture"
        reason = f"{family} is no language model ({class_names}): transformers has no next-token head for it"
    if reason:
        raise UsageError(f"model {name}: {reason}", fix=fix)


def layer_settings(config: Any) -> list[Any]:
    """Returns one configuration per layer of the text model; if all layers have the same settings,
    every entry is the same configuration. The list is empty if the configuration does not contain
    the number of layers.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", 0)
    if count and hasattr(text, "per_layer_config"):
        return list(text.per_layer_config)
    return [text] * count


ROPE = "model.rope_parameters"


def apply_rope_parameters(config: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Changes the rotary parameters of a configuration. Returns all rotary parameters after the
    change, and also `max_position_embeddings` if a factor extends it.

    Raises  UsageError for a name or a type that transformers does not have, and for a model with no
            or several sets of rotary parameters
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

    rope_parameters = getattr(config, "rope_parameters", None)
    if (
        not isinstance(rope_parameters, dict)
        or not rope_parameters
        or config.get_text_config() is not config
    ):
        raise UsageError(
            f"{ROPE}: {config.model_type} has no rotary parameters of its own", fix=f"remove {ROPE}"
        )
    if any(isinstance(part, dict) for part in rope_parameters.values()):
        raise UsageError(
            f"{ROPE}: {config.model_type} has several, {', '.join(rope_parameters)}",
            fix="change the config.json in the model's folder",
        )
    if unknown := sorted(
        parameters.keys() - RopeParameters.__annotations__.keys() - rope_parameters.keys()
    ):
        raise UsageError(
            f"{ROPE}: {unknown[0]}: unknown",
            fix=f"one of {', '.join(RopeParameters.__annotations__)}",
        )
    types = ("default", *ROPE_INIT_FUNCTIONS)
    if (
        rope_type := parameters.get("rope_type", rope_parameters.get("rope_type", "default"))
    ) not in types:
        raise UsageError(
            f"{ROPE}: rope_type: {rope_type}: unknown", fix=f"one of {', '.join(types)}"
        )
    if rope_type == rope_parameters.get("rope_type", "default") and all(
        rope_parameters.get(key) == value for key, value in parameters.items()
    ):
        raise UsageError(
            f"{ROPE}: has no effect: the model has these already", fix=f"remove {ROPE}"
        )
    positions = int(
        parameters.get("original_max_position_embeddings")
        or getattr(config, "max_position_embeddings", 0)
        or 0
    )
    config.rope_parameters = {**rope_parameters, **parameters}
    try:
        config.standardize_rope_params()
        config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{ROPE}: {first_line(error).strip(chr(34))}") from error
    changed: dict[str, Any] = {"rope_parameters": config.rope_parameters}
    if positions and parameters.get("factor"):
        changed["max_position_embeddings"] = max(
            config.max_position_embeddings, int(positions * float(parameters["factor"]))
        )
        config.max_position_embeddings = changed["max_position_embeddings"]
    return changed
