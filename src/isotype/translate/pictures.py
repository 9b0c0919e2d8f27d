"""Reads the configuration files of tools that train on pictures, and returns their keys with the
line of each key. The module also defines handlers that several of these tools use. The keys of the
N-th dataset are named `dataset.N.KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..doctor.check import shell
from ..doctor.check.text_files import Tree, UnreadableError, parse_scalar, read_json, read_toml
from ..errors import UsageError
from . import transforms
from .transforms import ConfigDraft, SourceKey

DATASET_PREFIX = "dataset"
_PROGRAM_PATTERNS = (
    (
        re.compile(
            r"^(sdxl_|sd3_|flux_|lumina_|chroma_)?(train_network|train_db|train)\.py$|^fine_tune\.py$"
        ),
        "kohya",
    ),
    (re.compile(r"^train_(dreambooth|text_to_image)\w*\.py$"), "diffusers"),
)
# SimpleTuner's variables of config.env -> arguments. All other arguments have the name of their
# variable in lower case
_SIMPLETUNER_VARIABLES = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint", "DATALOADER_CONFIG": "data_backend_config", "TRAINING_SEED": "seed",
    "ACCELERATE_CONFIG_PATH": "accelerate_config", "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "MINIMUM_RESOLUTION": "minimum_image_size", "PUSH_CHECKPOINTS": "push_checkpoints_to_hub", "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs", "CHECKPOINTING_STEPS": "checkpoint_step_interval", "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id", "MODEL_NAME": "pretrained_model_name_or_path", "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "VALIDATION_STEPS": "validation_step_interval", "LR_SCHEDULE": "lr_scheduler", "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines", "TRAINER_DYNAMO_BACKEND": "dynamo_backend", "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}  # fmt: skip
_SIMPLETUNER_ALIASES = {  # older or shorter names of arguments -> arguments
    "validation_steps": "validation_step_interval", "checkpointing_steps": "checkpoint_step_interval", "rank": "lora_rank",
    "validation_prompts": "validation_prompt", "max_steps": "max_train_steps",
}  # fmt: skip
_REDACTED = "(secret)"
_SECRET_NAME = (
    r"[\w.-]*(?:(?<!bos_|eos_|pad_|unk_|sep_|cls_)token|[_-]auth"
    r"|(?:api[_-]?key|secret|passw|access[_-]?key|credential|webhook)[\w.-]*)"
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,})\b"
)
_SECRET_FLAG = re.compile(rf"(--?{_SECRET_NAME}[= ]+)\S+", re.I)


def detect_program_tool(program: str) -> str | None:
    """Returns the tool to which a training script belongs. For example, `flux_train_network.py`
    belongs to kohya, and `train_dreambooth_lora_flux.py` belongs to diffusers.
    """
    return next(
        (tool for pattern, tool in _PROGRAM_PATTERNS if pattern.match(program.rpartition("/")[2])),
        None,
    )


def detect_tree_tool(tree: Tree, tool: str | None) -> str | None:
    """Returns `kohya`, `ai-toolkit` or `onetrainer` for a file of these tools, else None. `tool` is
    the result of `identify_tool`.
    """
    data = tree.data
    if tool == "kohya":
        return tool
    if not isinstance(data, dict):
        return None
    names = {
        str(key)
        for mapping in (data, *data.values())
        if isinstance(mapping, dict)
        for key in mapping
    }
    if {"datasets", "general"} <= set(data) or names & {"network_module", "network_dim"}:
        return "kohya"
    if {"job", "config"} <= set(data) and isinstance(data["config"], dict):
        return "ai-toolkit" if "process" in data["config"] else None
    if {"training_method", "train_dtype"} <= set(data):
        return "onetrainer"
    return None


def read_picture_keys(tool: str, tree: Tree, path: Path) -> list[SourceKey]:
    """Returns the keys of a file of kohya, ai-toolkit or OneTrainer. Raises UsageError."""
    return list(
        {"kohya": _kohya_keys, "ai-toolkit": _ai_toolkit_keys, "onetrainer": _onetrainer_keys}[
            tool
        ](tree, path)
    )


def _kohya_keys(tree: Tree, path: Path) -> Iterator[SourceKey]:
    """Yields the keys of all TOML tables in a file. The keys are yielded without the names of their
    tables.
    """
    for key, value in tree.data.items():
        if isinstance(value, dict) and key != "general":
            for inner, inner_value in value.items():
                yield SourceKey(str(inner), inner_value, tree.lines.get((key, inner)), str(inner))
        elif key not in ("general", "datasets"):
            yield SourceKey(str(key), value, tree.lines.get((key,)), str(key))
    yield from _kohya_subset_keys(tree, "")


def kohya_dataset_keys(file_name: object, config: Path) -> Iterator[SourceKey]:
    """Yields the keys of the file that `--dataset_config` names. If the file does not exist, yields
    nothing. Raises UsageError if the file cannot be read.
    """
    if (
        isinstance(file_name, str)
        and (file := find_file(file_name, Path("."), config.parent)) is not None
    ):
        yield from _kohya_subset_keys(read_tree(file, read_toml), f"{file.name}: ")


def _kohya_subset_keys(tree: Tree, label_prefix: str) -> Iterator[SourceKey]:
    """Yields the keys of every subset in a dataset configuration of kohya. A subset inherits the
    keys of its dataset and of [general].
    """
    data = tree.data
    count = 0
    for i, dataset in enumerate(data.get("datasets", [])):
        for j, subset in enumerate(dataset.get("subsets", [])):
            inherited = {
                **data.get("general", {}),
                **{key: value for key, value in dataset.items() if key != "subsets"},
            }
            for key, value in {**inherited, **subset}.items():
                line = tree.lines.get(("datasets", i, "subsets", j, key)) or tree.lines.get(
                    ("datasets", i, key)
                )
                yield SourceKey(
                    f"{DATASET_PREFIX}.{count}.{key}",
                    value,
                    line or tree.lines.get(("general", key)),
                    f"{label_prefix}{key}",
                )
            count += 1


def _ai_toolkit_keys(tree: Tree, path: Path) -> Iterator[SourceKey]:
    processes = tree.data.get("config", {}).get("process") or []
    if not processes or not isinstance(processes[0], dict):
        raise UsageError(f"{path}: config.process: expected a list with one training process")
    yield from nested_keys(processes[0], tree, ("config", "process", 0), dataset_list="datasets")


def nested_keys(
    node: Mapping[str, Any],
    tree: Tree,
    position: tuple[Any, ...] = (),
    prefix: str = "",
    *,
    mapping_values: Sequence[str] = (),
    dataset_list: str = "",
) -> Iterator[SourceKey]:
    """Yields a key such as `optimizer.lr` for each value in a nested mapping.

    position        the path of `node` in the file, from which the lines of the keys are found
    mapping_values  keys whose value is a mapping that is not split into further keys
    dataset_list    the key of the list of datasets
    """
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and key not in mapping_values:
            yield from nested_keys(
                value,
                tree,
                (*position, key),
                f"{name}.",
                mapping_values=mapping_values,
                dataset_list=dataset_list,
            )
        elif key == dataset_list and isinstance(value, list):
            for i, entry in enumerate(value):
                for inner, inner_value in entry.items() if isinstance(entry, dict) else ():
                    yield SourceKey(
                        f"{DATASET_PREFIX}.{i}.{inner}",
                        inner_value,
                        tree.lines.get((*position, key, i, inner)),
                        f"{dataset_list}[{i}].{inner}",
                    )
        else:
            yield SourceKey(name, value, tree.lines.get((*position, key)), name)


def _onetrainer_keys(tree: Tree, path: Path) -> Iterator[SourceKey]:
    concepts = tree.data.get("concepts")
    label = "concepts"
    file_name = tree.data.get("concept_file_name")
    yield from nested_keys(
        {key: value for key, value in tree.data.items() if key != "concepts"}, tree
    )
    concept_tree = tree
    position: tuple[Any, ...] = ("concepts",)
    if concepts is None and isinstance(file_name, str):
        label = Path(file_name).name
        file = find_file(file_name, path.parent, Path("."))
        if file is not None:
            concept_tree = read_tree(file, read_json)
            concepts = concept_tree.data
            position = ()
    for i, concept in enumerate(concepts or []):
        values: dict[tuple[str, ...], Any] = {
            (key,): value for key, value in concept.items() if not isinstance(value, dict)
        }
        for part in ("image", "text"):
            values |= {(part, key): value for key, value in (concept.get(part) or {}).items()}
        for inner, value in values.items():
            line = concept_tree.lines.get((*position, i, *inner))
            key = inner[-1]
            yield SourceKey(f"{DATASET_PREFIX}.{i}.{key}", value, line, f"{label}[{i}].{key}")


def find_file(file_name: str, *folders: Path) -> Path | None:
    """Finds a file that another file names. The function searches in the given folders, first for
    the path of the file and then for its name only. Returns None if there is no such file.
    """
    candidates = [
        *(folder / file_name for folder in folders),
        *(folder / Path(file_name).name for folder in folders),
    ]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read_tree(file: Path, reader: Callable[[str], Tree]) -> Tree:
    """Reads a file that a configuration names. Raises UsageError."""
    try:
        return reader(file.read_text(encoding="utf-8-sig"))
    except UnreadableError as error:
        raise UsageError(f"{file}:{error.line}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def redact_key(source_key: SourceKey) -> SourceKey:
    """Returns a copy of the key in which every secret in the value is replaced. A secret is
    recognised by the name of the key, by the form of the secret, or by a command-line flag before
    it.
    """
    return replace(source_key, value=_redact_value(source_key.name, source_key.value))


def _redact_value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redact_value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redact_value(name, inner) for inner in value]
    if re.fullmatch(_SECRET_NAME, name.rpartition(".")[2], re.I) and value not in (
        None,
        "",
        True,
        False,
    ):
        return _REDACTED
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Replaces all secrets in a text."""
    return _SECRET_VALUE.sub(_REDACTED, _SECRET_FLAG.sub(rf"\1{_REDACTED}", text))


def simpletuner_keys(tree: Tree | str, config: Path) -> list[SourceKey]:
    """Returns the keys of a configuration file of SimpleTuner (JSON, TOML or config.env), together
    with the keys of the dataset file that this configuration names. Raises UsageError.

    A config.env is a shell script. This function reads only the lines that assign a value, and runs
    nothing.
    """
    keys: dict[str, SourceKey] = {}
    if isinstance(tree, str):
        for name, assignment in shell.read_script(tree).variables.items():
            if name == "TRAINER_EXTRA_ARGS":
                for key, value in shell.parse_options(assignment.value.split()).items():
                    key, name_in_file = _SIMPLETUNER_ALIASES.get(key, key), f"{name}: --{key}"
                    keys[key] = SourceKey(
                        key,
                        parse_scalar(value) if isinstance(value, str) else value,
                        assignment.line,
                        name_in_file,
                    )
            else:
                key = _SIMPLETUNER_VARIABLES.get(name, name.lower())
                keys.setdefault(
                    _SIMPLETUNER_ALIASES.get(key, key),
                    SourceKey(
                        _SIMPLETUNER_ALIASES.get(key, key),
                        parse_scalar(assignment.value),
                        assignment.line,
                        name,
                    ),
                )
    else:
        for name_in_file, value in tree.data.items() if isinstance(tree.data, dict) else ():
            # names in the file may begin with `--`
            key = str(name_in_file).lstrip("-").replace("-", "_")
            keys[key] = SourceKey(
                _SIMPLETUNER_ALIASES.get(key, key),
                value,
                tree.lines.get((name_in_file,)),
                str(name_in_file),
            )
    dataset_file = next(
        (
            source_key.value
            for source_key in keys.values()
            if source_key.name == "data_backend_config"
        ),
        None,
    )
    return [*keys.values(), *_simpletuner_dataset_keys(dataset_file, config)]


def _simpletuner_dataset_keys(file_name: object, config: Path) -> Iterator[SourceKey]:
    """Yields the keys of SimpleTuner's dataset file. If the file does not exist, yields nothing.
    The path of the dataset file is relative to the folder in which SimpleTuner is started. This
    folder is above the folder of the configuration. So the function looks for the file in each
    folder above the configuration.
    """
    if (
        not isinstance(file_name, str)
        or not file_name
        or (file := find_file(file_name, config.parent, *config.absolute().parents[1:4], Path(".")))
        is None
    ):
        return
    tree = read_tree(file, read_json)
    if not isinstance(tree.data, list) or not all(isinstance(entry, dict) for entry in tree.data):
        raise UsageError(f"{file}: expected a list of datasets")
    for i, entry in enumerate(tree.data):
        for key, value in entry.items():
            yield SourceKey(
                f"{DATASET_PREFIX}.{i}.{key}",
                value,
                tree.lines.get((i, key)),
                f"{file.name}: {entry.get('id', i)}.{key}",
            )


# defaults that most of these tools share: constant learning rate, no held-out pictures
COMMON_DEFAULTS = {"train.schedule": "constant", "train.warmup": 0, "images.eval_split": 0.0}
PEFT_LORA_NOTE = "PEFT's LoRA"
NOT_UPLOADED_NOTE = "nothing is uploaded"
CACHED_NOTE = "latents and text are always computed once and kept: images.cache"
BUCKETS_NOTE = "buckets follow images.resolution and images.max_aspect"
NO_TEXT_ENCODER_NOTE = (
    "adapter.text_encoders trains those of SDXL and Stable Diffusion only, with a LoRA"
)
note_precision_key = transforms.report_changed("one of the keys that decide precision.preset")
ADAM_SETTINGS_NOTE = "train.beta1, train.beta2, train.epsilon, train.weight_decay"
TIMESTEPS_NOTE = "diffusion.timesteps: logit_normal, uniform, mode"
RANDOM_CROPS_NOTE = "so many windows of each picture are kept; one is drawn each time"
set_random_crops = transforms.set_if_enabled("images.crop", 4, note=RANDOM_CROPS_NOTE)
set_tag_orders = transforms.set_if_enabled(
    "images.tag_orders", 8, note="so many random orders of a caption's tags are encoded"
)
# the learning rate for AdamW in place of the rate of an optimizer that finds its own
_ADAMW_RATE = 1e-4
_RATE_FINDERS = ("prodigy", "dadapt", "automagic")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def dataset_handler(
    table: Mapping[str, transforms.Handler], label: str = "dataset"
) -> transforms.Handler:
    """Returns a handler for the keys of datasets, such as `dataset.0.KEY`. The handler does not set
    the sources of the pictures, because `set_sources` does this.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if key_handler := table.get(source_key.name.split(".", 2)[2]):
            key_handler(draft, source_key)
        else:
            transforms.report_not_offered(f"isotype import does not know this key of a {label}")(
                draft, source_key
            )

    return handler


def collect_datasets(draft: ConfigDraft) -> list[dict[str, Any]]:
    """Returns the keys and values of each dataset."""
    datasets: dict[int, dict[str, Any]] = {}
    for name, value in draft.source_values.items():
        if name.startswith(f"{DATASET_PREFIX}."):
            _, index, key = name.split(".", 2)
            datasets.setdefault(int(index), {})[key] = value
    return [datasets[index] for index in sorted(datasets)]


def picture_source(
    name: object,
    *,
    caption: object = None,
    repeats: Any = 1,
    weight: Any = 1.0,
    resolution: Sequence[int] = (),
    draw: Any = None,
    frames: int = 1,
) -> dict[str, Any]:
    """Returns an entry of `images.train`, with only the settings that differ from the defaults.
    `frames` is always included; `set_sources` removes it if it is that of the run.
    """
    settings: dict[str, Any] = {"name": str(name), "frames": frames}
    if caption:
        settings["caption"] = str(caption)
    if (repeat_count := round(float(repeats or 1))) > 1:
        settings["repeats"] = repeat_count
    if weight is not None and float(weight) != 1.0:
        settings["weight"] = float(weight)
    if resolution:
        settings["resolution"] = list(resolution)
    if draw and caption:
        settings["draw"] = int(draw)
    return settings


def set_sources(draft: ConfigDraft, sources_by_setting: Mapping[str, list[dict[str, Any]]]) -> None:
    """Sets `images.train` and similar settings, and leaves out everything that is not needed. If
    the only resolution of a source is the resolution of the run, the entry of this source contains
    no resolution. The same applies to the number of frames.
    """
    for setting, sources in sources_by_setting.items():
        for source in sources:
            if source.get("frames") == draft.settings.get("images.frames", 1):
                del source["frames"]
            if source.get("resolution") == [draft.settings.get("images.resolution")]:
                del source["resolution"]
            elif len(source.get("resolution", ())) == 1:
                source["resolution"] = source["resolution"][0]
        entries = [source["name"] if len(source) == 1 else source for source in sources]
        if entries:
            if len(entries) == 1 and isinstance(entries[0], str):
                draft.settings[setting] = entries[0]
            else:
                draft.settings[setting] = entries


def read_numbered_folders(folder: str, base: Path, **settings: Any) -> list[dict[str, Any]]:
    """Reads folders with kohya's names, such as `10_sks dog`. The number in the name tells how
    often each picture is repeated. The text in the name is the caption of the pictures, if the
    folder contains no text files.
    """
    root = next((match for match in (Path(folder), base / folder) if match.is_dir()), None)
    sources = []
    for subfolder in sorted(root.iterdir()) if root else ():
        if subfolder.is_dir() and (match := re.match(r"^(\d+)_(.*)$", subfolder.name)):
            needs_caption = not any(subfolder.glob("*.txt")) and any(
                path.suffix in _SUFFIXES for path in subfolder.iterdir()
            )
            source = picture_source(
                f"{folder.rstrip('/')}/{subfolder.name}",
                caption=match[2] if needs_caption else None,
                **settings,
            )
            sources.append(source | {"repeats": int(match[1])})
    return sources


def largest_side(value: Any) -> int:
    """Returns the larger of width and height, which are given as `512`, `"512,768"` or `[512,
    768]`.
    """
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value))
    return max(int(float(part)) for part in parts)


def parse_resolutions(value: Any) -> list[int]:
    """Returns the resolutions in `[512, 768, 1024]` or `"512,768"`, sorted. Each picture is used
    once in each of these resolutions.
    """
    parts = value if isinstance(value, list) else str(value).split(",")
    return sorted({largest_side(part) for part in parts})


def convert_resolution(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Sets `images.resolution` to the largest resolution. For sources with other resolutions, the
    resolution is set in the entry of the source.
    """
    resolutions = parse_resolutions(source_key.value)
    largest = max(*resolutions, int(draft.settings.get("images.resolution", 0)))
    draft.set(
        source_key,
        "images.resolution",
        largest,
        f"resolution of the source: {resolutions}" if resolutions != [largest] else "",
    )


def set_lokr(draft: ConfigDraft, source_key: SourceKey) -> None:
    draft.set(source_key, "adapter.kind", "lokr", "PEFT's, on the linear layers")


def _optimizer_name(draft: ConfigDraft) -> str:
    return next(
        filter(
            None,
            map(
                draft.lowercase_value,
                ("optimizer", "optimizer_type", "train.optimizer", "optimizer.optimizer"),
            ),
        ),
        "",
    )


def convert_rate(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates a learning rate. DAdapt and similar optimizers find their learning rate
    themselves. For these optimizers, the rate in the file is only a factor by which the rate that
    they find is multiplied. The factor is usually 1.0. Isotype replaces these optimizers by AdamW,
    with a learning rate that is usual for AdamW.
    """
    optimizer = _optimizer_name(draft)
    if transforms.OPTIMIZERS.get(optimizer) != "prodigy" and (
        optimizer.startswith(_RATE_FINDERS) or float(source_key.value) > 0.05
    ):
        note = (
            f"{source_key.value} is the factor of {optimizer or 'an optimizer'} that finds its own rate;"
            " AdamW would diverge with it"
        )
        draft.set(source_key, "train.learning_rate", _ADAMW_RATE, note)
    else:
        draft.set(source_key, "train.learning_rate", transforms.parse_number(source_key.value))


def convert_text_encoder_rate(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates the learning rate of the text encoders, which may be a list with one rate for each
    encoder. If the optimizer finds its learning rate itself, the value is only a factor and is not
    used.
    """
    values = source_key.value if isinstance(source_key.value, list) else [source_key.value]
    rates = [float(value) for value in values]
    draft.settings["adapter.text_encoders"] = True
    if max(rates) > 0.05 or _optimizer_name(draft).startswith(_RATE_FINDERS):
        draft.report_changed(
            source_key,
            "of an optimizer that finds its own rate; adapter.text_encoders has"
            " train.learning_rate",
        )
    else:
        value: list[float] | float = rates if len(set(rates)) > 1 else rates[0]
        draft.set(source_key, "adapter.text_encoder_rate", value, "with adapter.text_encoders")


def convert_min_snr(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `snr_gamma` and `min_snr_gamma`."""
    draft.settings["diffusion.weighting"] = "min_snr"
    draft.set(
        source_key,
        "diffusion.snr_gamma",
        float(source_key.value),
        "with diffusion.weighting: min_snr",
    )


def convert_timestep(target: str) -> transforms.Handler:
    """Returns a handler for a timestep between 0 and 1000. The handler divides the timestep by
    1000.
    """
    return transforms.convert_to(
        target, lambda value: float(value) / 1000, "a share of 1000 timesteps"
    )


def set_default_preset(
    draft: ConfigDraft, mixed_precision: object, *, half_weights: bool = False
) -> None:
    """Sets `precision.preset` if it is not set. The preset follows from the dtype of matrix
    products (`mixed_precision`). `half_weights` is true if the weights have the same dtype as the
    matrix products.
    """
    has_adapter = draft.settings.get("adapter.kind") != "none"
    dtype_name = (
        str(mixed_precision or "no")
        .lower()
        .replace("bfloat16", "bf16")
        .replace("float16", "fp16")
        .replace("bfloat_16", "bf16")
    )
    if has_adapter:
        bf16_preset = "bf16-lora"
    elif half_weights:
        bf16_preset = "bf16-pure"
    else:
        bf16_preset = "bf16-mixed"
    presets = {"bf16": bf16_preset, "fp16": "fp16-mixed"}
    draft.set_default("precision.preset", presets.get(dtype_name, "fp32"))


def set_start(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates the LoRA file with which a run starts. A file that is not .safetensors cannot be
    read.
    """
    if not source_key.value:
        draft.report_no_effect(source_key, "no file is named")
    elif Path(str(source_key.value)).suffix in (".ckpt", ".pt", ".pth", ".bin"):
        draft.report_not_offered(source_key, "adapter.start_from takes a .safetensors file")
    else:
        draft.set(source_key, "adapter.start_from", str(source_key.value))


def drop_new_adapter_settings(draft: ConfigDraft) -> None:
    """Removes the settings of a new adapter if the run starts with an existing adapter, whose file
    has its own ranks and alphas.
    """
    if "adapter.start_from" not in draft.settings:
        return
    names = ("r", "alpha", "dropout", "targets", "dora", "rslora", "start")
    dropped = [f"adapter.{name}" for name in names if f"adapter.{name}" in draft.settings]
    for key in dropped:
        del draft.settings[key]
    if dropped:
        draft.notes.append(
            f"{', '.join(dropped)}: left out, because the adapter of adapter.start_from keeps its"
            " own ranks, alphas and targets"
        )


def set_vae(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates the file or folder of another VAE. `model.vae` does not take a name on the hub."""
    name = str(source_key.value or "")
    if not name:
        draft.report_no_effect(source_key, "no VAE is named")
    elif name.endswith(".safetensors") or name.startswith((".", "/", "~")):
        draft.set(source_key, "model.vae", name)
    else:
        draft.report_not_offered(
            source_key,
            "model.vae takes a file or a folder: download it. The VAE computes in fp32, so that a"
            " VAE made for fp16 is not needed",
        )


def drop_text_encoders(draft: ConfigDraft) -> None:
    """Removes the settings of the text encoders, unless a LoRA adapter is trained."""
    if draft.settings.get("adapter.kind") != "lora":
        for key in ("adapter.text_encoders", "adapter.text_encoder_rate"):
            draft.settings.pop(key, None)


def drop_adapter_files(draft: ConfigDraft) -> None:
    """Removes the settings about adapter files. The settings must be removed for a run that trains
    every weight.
    """
    for key in ("run.adapters_every", "run.adapter_format"):
        draft.settings.pop(key, None)


# arguments of diffusers' scripts that kohya's scripts and SimpleTuner also have
DIFFUSERS_KEYS: dict[str, transforms.Handler] = {
    **transforms.copy_values(
        model="name=pretrained_model_name_or_path revision",
        diffusion="noise_offset guidance=guidance_scale",
        train=(
            "steps=max_train_steps batch_size=train_batch_size"
            " accumulate=gradient_accumulation_steps warmup=lr_warmup_steps"
            " weight_decay=adam_weight_decay beta1=adam_beta1 beta2=adam_beta2 epsilon=adam_epsilon"
            " clip=max_grad_norm seed"
        ),
        run="folder=output_dir keep=checkpoints_total_limit",
    ),
    "learning_rate": convert_rate,
    "gradient_checkpointing": transforms.convert_switch(
        "train.gradient_checkpointing", "layers", "none"
    ),
    "lr_scheduler": transforms.schedule_converter(
        {**transforms.SCHEDULES, "cosine_with_restarts": ("cosine", "without restarts")}
    ),
    **transforms.same_handler(convert_min_snr, "snr_gamma min_snr_gamma"),
    **transforms.same_handler(transforms.convert_trackers, "report_to log_with"),
}
