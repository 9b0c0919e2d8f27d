"""Loads or builds a language model or vision-language model in the declared dtypes, and loads its
tokenizer. If loading fails, a short error with a fix is raised.

The processes of a sharded run load the model in the dtype of its files. transformers then maps the
files into memory, so that a weight is read only when it is used. Each process casts only the rows
that it keeps (`precision.parts`).
"""

from __future__ import annotations

import json
import os
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from ..config.schema import ModelSection
from ..config.sources import (
    closest_model_hint,
    config_file,
    gguf_file,
    is_folder_name,
    missing_folder_hint,
)
from ..data.records import parse_json
from ..dtypes import to_torch
from ..environment.hardware import out_of_memory_message
from ..environment.hub import cache_miss_error, is_unreachable, print_status
from ..environment.hub_kernels import HUB_KERNELS_NOTE, disable_hub_kernels
from ..environment.install import install_command
from ..errors import UsageError
from ..ops.packed.recognise import PACKED_TENSOR_NAMES
from ..precision.packing import DTYPES_ON_LOAD
from ..precision.parts import Part, loading_device
from ..precision.precision import Precision
from ..precision.quantised_base import check_base, quantisation_from_config
from ..runs.checkpoint.atomic_folder import find_damage, write_folder
from ..wording import first_line, pluralise
from .adapter import layers_to_quantise, unquantised_patterns
from .architecture import (
    AUTO,
    ROPE,
    SCORE,
    apply_rope_parameters,
    attention_options,
    auto_class,
    explain_attention,
    is_vision_language,
    refuse_other_objectives,
)
from .buffers import fill_buffers, mark_unfilled_memory, reset_dynamic_rope_tables
from .gguf import load_gguf_tokenizer, read_architecture
from .gguf import read_tensor_headers as gguf_parts
from .packed import (
    detect_file_dtype,
    from_pretrained,
    insert_placeholders,
    pack_placeholders,
    packed_load_options,
    quantise_layers,
    read_tensor_parts,
    weight_files,
)
from .processor import load_processor_template
from .tokens import add_tokens, align_special_tokens, grow_embeddings, grown_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Source:
    """The folder or hub id from which a base model is loaded, and the settings for loading it.

    text_only       whether to load the model as the family's text-only class, for an adapter that
                    was trained on that class (Qwen3.5, Llama 3.2 Vision, Llama 4)
    has_score_head  whether to load the model as a sequence classifier with one label. If the files
                    have no such head, it is initialised at random
    rope            `model.rope_parameters`
    """

    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    text_only: bool = False
    has_score_head: bool = False
    rope: Mapping[str, Any] | None = None


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Loads the tokenizer and adds the tokens of `model.add_tokens`. The tokenizer is the one that
    `model.tokenizer` names, or the model's own tokenizer if that setting is missing.

    If the tokenizer has no padding token, its end token is used for padding, or any other token if
    it has no end token. This is harmless, because padding has no weight in attention and no label.
    """
    name = section.tokenizer or section.name
    if name is None:
        raise UsageError(
            "model.tokenizer: a model built from model.config needs a tokenizer (a folder or"
            " hub id)"
        )
    revision = section.revision if section.tokenizer is None else None
    with explain_loading_errors(name, "tokenizer", revision):
        if (file := gguf_file(name)) is not None:
            tokenizer: PreTrainedTokenizerBase = load_gguf_tokenizer(file)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=section.trust_remote_code
            )
            tokenizer.chat_template = tokenizer.chat_template or load_processor_template(
                name, revision
            )
    if section.add_tokens:
        add_tokens(tokenizer, section.add_tokens)
    if tokenizer.pad_token_id is None:
        pad_token = (
            tokenizer.eos_token
            or tokenizer.unk_token
            or tokenizer.bos_token
            or tokenizer.convert_ids_to_tokens(0)
        )
        tokenizer.pad_token = pad_token
    return tokenizer


def base_source(
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path,
    seed: int,
    dtype: str,
) -> Source:
    """Returns the source of the base model.

    Some bases are initialised at random or get new tokens (`add_tokens`). Such a base is created
    once and saved as an ordinary model folder, so that it can be loaded again.
    """
    if section.init == "pretrained":
        if section.name is None:
            raise UsageError(
                "model.name: missing; give a folder or a hub id (or model.config with model.init:"
                " random)"
            )
        source = Source(
            section.name, section.revision, section.trust_remote_code, rope=section.rope_parameters
        )
        if section.add_tokens:
            return _with_added_tokens(source, section, tokenizer, folder)
        return source
    if section.rope_parameters is not None:
        raise UsageError(
            f"{ROPE}: has no effect with model.init: random", fix="rope_parameters in model.config"
        )
    if not (folder / "config.json").is_file():
        torch.manual_seed(seed)
        architecture = _random_config(section, tokenizer)
        model = auto_class(architecture).from_config(architecture, dtype=to_torch(dtype))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return Source(str(folder))


def load_architecture(
    section: ModelSection,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    has_score_head: bool = False,
) -> PretrainedConfig:
    """Reads the configuration of the model that a run loads or builds, without its weights.

    has_score_head  the same as in `Source`
    """
    if section.init == "random":
        assert tokenizer is not None, "a random model takes its vocabulary from the tokenizer"
        return _random_config(section, tokenizer)
    assert section.name is not None, "the command line asks for a model before anything is loaded"
    with explain_loading_errors(section.name, "model", section.revision):
        architecture = read_architecture(
            section.name, section.revision, trust_remote_code=section.trust_remote_code
        )
    refuse_other_objectives(architecture, section.name, has_score_head=has_score_head)
    if section.rope_parameters is not None:
        apply_rope_parameters(architecture, section.rope_parameters)
    if section.add_tokens and tokenizer is not None:
        return grown_config(architecture, tokenizer)
    return architecture


def _with_added_tokens(
    source: Source, section: ModelSection, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Source:
    """Saves a copy of the base with embedding rows for the added tokens, in the dtype of its files.
    The folder is written atomically.
    """
    if find_damage(folder) is not None:
        architecture = _architecture(source)
        if quantisation_from_config(architecture) is not None:
            raise UsageError(
                f"model.add_tokens: {source.name} is quantised before it is saved: its embeddings"
                " cannot grow",
                fix=(
                    "take the model that is not quantised; precision.base: nf4 quantises it when it"
                    " is loaded"
                ),
            )
        with explain_loading_errors(source.name, "model", source.revision):
            model = auto_class(architecture).from_pretrained(
                source.name,
                revision=source.revision,
                trust_remote_code=source.trust_remote_code,
                dtype="auto",
            )
        grow_embeddings(model, tokenizer, len(section.add_tokens))
        align_special_tokens(model, tokenizer)

        def fill(temporary_folder: Path) -> None:
            model.save_pretrained(temporary_folder)
            tokenizer.save_pretrained(temporary_folder)

        write_folder(folder, fill)
    return Source(str(folder), None, source.trust_remote_code, rope=source.rope)


def load_base(
    source: Source,
    precision: Precision,
    *,
    attention: str,
    device: torch.device,
    trainable: bool,
    keeps_file_dtype: bool = False,
    part: Part | None = None,
    notes: list[str] | None = None,
    full_modules: Sequence[str] = (),
    offload: str = "none",
) -> PreTrainedModel:
    """Loads the base model for `device`. If all weights are trained, they get the dtype
    `precision.trainable`. Otherwise they get the dtype `precision.base`; nf4, fp8 and int8 mean
    that they are quantised.

    keeps_file_dtype  whether weights may keep the dtype of their file. They are then read only when
                      they are used, and the caller casts them
    part              the rows of a sharded model that this process will keep; the weights then stay
                      on the CPU (`loading_device`)
    notes             a list to which this function appends lines for the run's header
    full_modules      the result of `modules_trained_in_full`; these modules are not quantised
    offload           the value of `model.offload`, which keeps blocks on the CPU
    Raises            UsageError for a base that does not agree with the precision, and for an
                      architecture that does not predict the next token
    """
    are_hub_kernels_off = disable_hub_kernels()
    loading_on = loading_device(device, part, offload)
    options = attention_options(attention, device)
    dtype = to_torch(precision.trainable if trainable else precision.unquantised)
    # transformers would load a quantised base without an error, and ignore the requested dtype
    architecture = _architecture(source)
    refuse_other_objectives(architecture, source.name, has_score_head=source.has_score_head)
    quantisation_notes = check_base(quantisation_from_config(architecture), precision, source.name)
    is_saved_quantised = bool(quantisation_notes)
    notes = [] if notes is None else notes
    notes += quantisation_notes
    if are_hub_kernels_off and precision.base == "nf4":
        notes.append(HUB_KERNELS_NOTE)
    options["dtype"] = dtype
    if is_saved_quantised and precision.base != "nf4":
        with explain_loading_errors(source.name, "model", source.revision):
            options |= packed_load_options(architecture, source.name, dtype) | {
                "device_map": {"": loading_on}
            }
    should_quantise = precision.base == "nf4" and not trainable
    should_pack = precision.base in DTYPES_ON_LOAD and not trainable and not is_saved_quantised
    if keeps_file_dtype and not (should_quantise or should_pack or is_saved_quantised):
        unconverted = _load_in_file_dtype(source, architecture, attention, options, notes)
        if unconverted is not None:
            return unconverted
    if should_quantise:
        if not is_saved_quantised:
            options["quantization_config"] = _nf4_config(
                source, architecture, precision, full_modules
            )
        options["device_map"] = {"": loading_on}
    model = _load_pretrained(source, architecture, attention, options, notes)
    if should_pack:
        quantise_layers(
            model,
            layers_to_quantise(model, unquantised_patterns(model, full_modules)),
            precision.base,
        )
    if "device_map" not in options:
        model.to(loading_on)
    # buffers keep the dtype that transformers gave them: a rotary table in half precision would be
    # wrong from position 256 on
    return model


# buffers of rotary embeddings, which are fp32 in a model of any dtype
_ALWAYS_FP32 = ("inv_freq", "original_inv_freq")


def _load_in_file_dtype(
    source: Source,
    architecture: PretrainedConfig,
    attention: str,
    options: dict[str, Any],
    notes: list[str],
) -> PreTrainedModel | None:
    """Loads the model with weights in the dtype of their files, and writes `options["dtype"]` into
    its configuration. Returns None if loading the model like this and casting it later could give
    other values than loading it in `options["dtype"]` at once.
    """
    with explain_loading_errors(source.name, "model", source.revision, attention):
        dtype = detect_file_dtype(source.name, source.revision)
    if dtype is None or dtype == options["dtype"]:
        return None
    model = _load_pretrained(source, architecture, attention, options | {"dtype": dtype}, notes)
    # buffers may have been computed in the dtype in which the model was loaded; a later cast of the
    # weights does not change them
    if any(
        buffer.is_floating_point() and full_name.rpartition(".")[2] not in _ALWAYS_FP32
        for full_name, buffer in model.named_buffers()
    ):
        return None
    for part in (
        model.config,
        *(getattr(model.config, name, None) for name in model.config.sub_configs),
    ):
        if part is not None:
            part.dtype = options["dtype"]
    return model


def _load_pretrained(
    source: Source,
    architecture: PretrainedConfig,
    attention: str,
    options: dict[str, Any],
    notes: list[str],
) -> PreTrainedModel:
    """Loads the model with transformers. Raises UsageError if the files lack a weight of the model."""
    with (
        explain_loading_errors(source.name, "model", source.revision, attention),
        mark_unfilled_memory(),
    ):
        model_class = auto_class(
            architecture, text_only=source.text_only, has_score_head=source.has_score_head
        )
        if source.has_score_head:
            options = options | {"num_labels": 1}
        if source.rope is not None:
            options = options | apply_rope_parameters(_architecture(source), source.rope)
        loaded_pair = from_pretrained(
            model_class,
            source.name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    model: PreTrainedModel
    model, loading_info = loaded_pair
    if scale_names := sorted(
        name
        for name in loading_info["unexpected_keys"]
        if name.rpartition(".")[2] in PACKED_TENSOR_NAMES
    ):
        # transformers would load the packed numbers without their scales
        problem = (
            f"{scale_names[0]} belongs to a packed weight, and config.json has no"
            " quantization_config"
        )
        raise UsageError(
            f"model {source.name}: {problem}",
            fix="take config.json again from where the files came",
        )
    mismatched = {
        str(key[0] if isinstance(key, tuple) else key) for key in loading_info["mismatched_keys"]
    }
    absent = sorted({*loading_info["missing_keys"], *mismatched})
    if source.has_score_head:
        if not isinstance(getattr(model, SCORE, None), torch.nn.Linear):
            raise UsageError(
                f"train.objective: reward: {type(model).__name__} has no linear {SCORE}",
                fix="Llama, Qwen, Gemma, ...",
            )
        absent = [name for name in absent if name != f"{SCORE}.weight" or name in mismatched]
    if absent:
        # transformers initialises these at random and only warns
        problem = (
            f"{pluralise(len(absent), 'weight is missing or has', 'weights are missing or have')}"
            f" another shape, {absent[0]} first"
        )
        class_names = (
            ", ".join(getattr(architecture, "architectures", None) or []) or "no class named"
        )
        raise UsageError(
            f"model {source.name}: {problem}: not a whole language model (config.json:"
            f" {class_names})"
        )
    if filled := fill_buffers(model, source.name):
        notes.append(
            f"{len(filled)} buffers that no file holds, {filled[0]} first, were computed by the"
            " model's constructor: plain transformers leaves them uninitialised, unless its code"
            " fills them in _init_weights"
        )
    reset_dynamic_rope_tables(model)
    return model


def _architecture(source: Source) -> PretrainedConfig:
    with explain_loading_errors(source.name, "model", source.revision):
        return read_architecture(
            source.name, source.revision, trust_remote_code=source.trust_remote_code
        )


def pack_outline(
    model: PreTrainedModel,
    architecture: PretrainedConfig,
    section: ModelSection,
    precision: Precision,
    full_modules: Sequence[str],
) -> None:
    """Packs the layers of a model on the meta device in the same way as loading the model would
    pack them. For a packed checkpoint, the headers of its files say which layers are packed. For
    any other model, the precision decides which layers are quantised. Raises UsageError.
    """
    quantisation = quantisation_from_config(architecture)
    if quantisation is None:
        quantise_layers(
            model,
            layers_to_quantise(model, unquantised_patterns(model, full_modules)),
            precision.base,
        )
        return
    assert section.name is not None
    assert quantisation.packing is not None
    with explain_loading_errors(section.name, "model", section.revision):
        file = gguf_file(section.name)
        if file is None:
            parts = read_tensor_parts(weight_files(section.name, section.revision))
        else:
            parts = gguf_parts(file)
        insert_placeholders(model, parts, quantisation.packing, section.name)
        pack_placeholders(model, quantisation.packing)


def require_bitsandbytes() -> None:
    """Raises UsageError with the install command if bitsandbytes is missing."""
    disable_hub_kernels()
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise UsageError(
            "precision.base: nf4 needs bitsandbytes", fix=install_command("quant")
        ) from None


def _nf4_config(
    source: Source,
    architecture: PretrainedConfig,
    precision: Precision,
    full_modules: Sequence[str],
) -> Any:
    require_bitsandbytes()
    from transformers import BitsAndBytesConfig

    skip_modules = None  # None: transformers chooses the layers that it does not quantise
    if full_modules or is_vision_language(architecture):
        model_class = auto_class(architecture, has_score_head=source.has_score_head)
        with explain_loading_errors(source.name, "model", source.revision), torch.device("meta"):
            skip_modules = unquantised_patterns(
                model_class.from_config(architecture, trust_remote_code=source.trust_remote_code),
                full_modules,
            )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=to_torch(precision.compute),
        bnb_4bit_quant_storage=torch.uint8,
        llm_int8_skip_modules=skip_modules,
    )


def read_config(value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """Returns `model.config` as a dictionary. If the setting is the name of a file, it reads this
    file. Raises UsageError.
    """
    if not isinstance(value, str):
        return value
    try:
        content = parse_json(config_file(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model.config: {value}: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"model.config: {value}: expected an object")
    return content


def _random_config(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    settings = read_config(section.config)
    if settings is None:
        if section.name is None:
            raise UsageError(
                "model.init: random needs model.config (or model.name, whose architecture is taken)"
            )
        with explain_loading_errors(section.name, "model", section.revision):
            config = read_architecture(
                section.name, section.revision, trust_remote_code=section.trust_remote_code
            )
        refuse_other_objectives(config, section.name)
        architecture: PretrainedConfig = config
        return architecture
    settings = dict(settings)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise UsageError("model.config: model_type is missing (llama, qwen2, gemma2, ...)")
    text = settings
    if isinstance(settings.get("text_config"), dict):
        text = settings["text_config"] = dict(settings["text_config"])
    text.setdefault("vocab_size", len(tokenizer))
    for role in ("pad_token_id", "bos_token_id", "eos_token_id"):
        text.setdefault(role, getattr(tokenizer, role))
    try:
        config = AutoConfig.for_model(kind, **settings)
    except (ValueError, TypeError) as error:
        raise UsageError(f"model.config: {first_line(error)}") from None
    refuse_other_objectives(config, "model.config")
    return config


def _announce_download(name: str, revision: str | None) -> None:
    """Prints that a model is being downloaded, which may take minutes. If the hub does not answer,
    earlier downloads are used at once.

    Raises  LocalEntryNotFoundError if the hub stops answering during the download
    """
    if is_folder_name(name) or Path(name).exists() or is_unreachable():
        return
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            hf_hub_download(name, "config.json", revision=revision)
            print_status(
                f"{name} is fetched from the hub, once; a large model takes minutes. It is kept in"
                f" {constants.HF_HUB_CACHE}"
            )
    except LocalEntryNotFoundError:
        raise
    # the hub answered with an error, or the name is no hub id; transformers then raises its own
    # error, which names the cause
    except (HfHubHTTPError, ValueError):
        return


@contextmanager
def explain_loading_errors(
    name: str, source_kind: str, revision: str | None, attention: str = AUTO
) -> Iterator[None]:
    """Converts errors of transformers and the hub to a short UsageError with a fix. The original
    error stays attached as its cause.
    """
    try:
        _announce_download(name, revision)
        yield
    except UsageError:
        raise
    # a malformed file, such as a list in place of an object, may raise any type of error
    except Exception as error:
        if out_of_memory_message(error) is not None:
            raise
        raise explain_attention(f"{source_kind} {name}", attention, error) or loading_error(
            name, source_kind, error
        ) from error


# names of exceptions that mean that the hub was not reached
_CONNECTION_ERRORS = {
    "ConnectionError",
    "ConnectError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ConnectTimeout",
}


def loading_error(name: str, source_kind: str, error: BaseException) -> UsageError:
    label = f"{source_kind} {name}"
    causes = [error]
    while (
        cause := causes[-1].__cause__ or causes[-1].__context__
    ) is not None and cause not in causes:
        causes.append(cause)
    kinds = {type(cause).__name__ for cause in causes}
    text = " ".join(str(cause) for cause in causes)
    absent = "backend tokenizer" in text or "does not appear to have a file named" in text
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        folder_content = _list_names(name) or "an empty folder"
        return UsageError(
            f"{label}: no config.json there ({folder_content})",
            fix="give the folder of a saved Hugging Face model",
        )
    if Path(name).exists() or "custom code" in text:
        return _damaged_folder_error(name, source_kind, error)
    if is_folder_name(name):
        return UsageError(
            f"{label}: no such folder{closest_model_hint(name) or missing_folder_hint(name)}"
        )
    # the error for a missing repository mentions gated repositories too
    if "GatedRepoError" in kinds or (
        "gated" in text.lower() and "RepositoryNotFoundError" not in kinds
    ):
        return UsageError(
            f"{label}: access is gated on the hub",
            fix=f"accept its terms at huggingface.co/{name}, then: hf auth login",
        )
    if "RepositoryNotFoundError" in kinds:
        message = f"{label}: neither a folder here nor a model on the hub{closest_model_hint(name)}"
        return UsageError(message, fix="check the spelling; for a private one: hf auth login")
    if kinds & _CONNECTION_ERRORS or "couldn't connect" in text.lower():
        hint = closest_model_hint(name) or f" ({Path.cwd() / name} does not exist)"
        return cache_miss_error(label, f"a local folder{hint}")
    if absent and constants.HF_HUB_OFFLINE:
        return cache_miss_error(label, "a local folder", is_partial=True)
    if "backend tokenizer" in text:
        return UsageError(
            f"{label}: it has no tokenizer.json",
            fix="model.tokenizer: a folder or hub id that has it",
        )
    return UsageError(f"{label}: {first_line(error)}")


_GENERATION_SETTINGS = os.path.join("transformers", "generation", "configuration_utils.py")
_FETCH_AGAIN = "get the folder again from where it came, or save it anew with save_pretrained"
# (a part of the error's type and text, the message, the fix). {error} is the error's first line,
# {files} are names in the folder
_FOLDER_FAULTS = (
    (
        "custom code",
        "it brings its own code, which is not run",
        "if you trust it: model.trust_remote_code: true",
    ),
    (
        "UnpicklingError",
        "its weights are a pickle with more in it than tensors: not opened",
        "a copy with model.safetensors",
    ),
    (
        "ignore_mismatched_sizes",
        "config.json and the weights do not have the same sizes",
        _FETCH_AGAIN,
    ),
    ("Error no file named", "it has no weights (model.safetensors)", _FETCH_AGAIN),
    (
        "backend tokenizer",
        "it has no tokenizer.json ({files})",
        "model.tokenizer: the folder that has it",
    ),
    ("SafetensorError", "its weights are damaged: {error}", _FETCH_AGAIN),
    (
        "Transformers does not recognize this architecture",
        "{error}",
        "a newer transformers may know it: pip install -U transformers",
    ),
    ("Should have a `model_type` key", "{error}", _FETCH_AGAIN),
)


def _damaged_folder_error(name: str, source_kind: str, error: BaseException) -> UsageError:
    """Returns the error for an existing folder that cannot be loaded. The error names the damaged
    file and a fix.
    """
    text = f"{type(error).__name__}: {error}"
    first_message = first_line(error)
    if any(
        frame.f_code.co_filename.endswith(_GENERATION_SETTINGS)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        return UsageError(
            f"{source_kind} {name}: its generation_config.json: {first_message}",
            fix="correct that file, or remove it: it is not needed to train",
        )
    for pattern, template, fix in _FOLDER_FAULTS:
        if pattern in text:
            message = template.format(error=first_message, files=_list_names(name))
            return UsageError(f"{source_kind} {name}: {message}", fix=fix)
    if isinstance(error, ImportError):
        command = f"pip install {error.name}" if error.name else None
        return UsageError(f"{source_kind} {name}: {first_message}", fix=command)
    if isinstance(error, ValueError | RuntimeError) and not isinstance(
        error, json.JSONDecodeError | UnicodeDecodeError
    ):
        # the error is about the model's type or a setting, so another copy of the folder would not
        # help
        return UsageError(f"{source_kind} {name}: {first_message}")
    if not isinstance(error, OSError):
        first_message = f"{type(error).__name__}: {first_message}"
    return UsageError(f"{source_kind} {name}: {first_message}", fix=_FETCH_AGAIN)


def _list_names(name: str) -> str:
    if Path(name).is_dir():
        return ", ".join(sorted(file.name for file in Path(name).iterdir())[:6])
    return "a file"
