"""The tools that train on pictures: their files as keys with lines, and what their tables share.

The keys of a dataset are `dataset.N.KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..doctor.check import shell
from ..doctor.check.text_files import Tree, Unreadable, parse_scalar, read_json, read_toml
from ..errors import UsageError
from . import transforms as t
from .transforms import Draft, Given

DATASET = "dataset"
_PROGRAMS = (
    (
        re.compile(
            r"^(sdxl_|sd3_|flux_|lumina_|chroma_)?(train_network|train_db|train)\.py$|^fine_tune\.py$"
        ),
        "kohya",
    ),
    (re.compile(r"^train_(dreambooth|text_to_image)\w*\.py$"), "diffusers"),
)
# SimpleTuner's variables of config.env whose argument is not their name in small letters
_ARGUMENTS = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint", "DATALOADER_CONFIG": "data_backend_config", "TRAINING_SEED": "seed",
    "ACCELERATE_CONFIG_PATH": "accelerate_config", "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "MINIMUM_RESOLUTION": "minimum_image_size", "PUSH_CHECKPOINTS": "push_checkpoints_to_hub", "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs", "CHECKPOINTING_STEPS": "checkpoint_step_interval", "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id", "MODEL_NAME": "pretrained_model_name_or_path", "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "VALIDATION_STEPS": "validation_step_interval", "LR_SCHEDULE": "lr_scheduler", "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines", "TRAINER_DYNAMO_BACKEND": "dynamo_backend", "TRAINING_DYNAMO_BACKEND": "dynamo_backend",
}  # fmt: skip
_OTHER_NAMES = {  # older or shorter arguments
    "validation_steps": "validation_step_interval", "checkpointing_steps": "checkpoint_step_interval", "rank": "lora_rank",
    "validation_prompts": "validation_prompt", "max_steps": "max_train_steps",
}  # fmt: skip
_HIDDEN = "(secret)"
_SECRET = (
    r"[\w.-]*(?:(?<!bos_|eos_|pad_|unk_|sep_|cls_)token|[_-]auth"
    r"|(?:api[_-]?key|secret|passw|access[_-]?key|credential|webhook)[\w.-]*)"
)
_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{20,})\b"
)
_FLAG = re.compile(rf"(--?{_SECRET}[= ]+)\S+", re.I)


def tool_of_program(program: str) -> str | None:
    """The tool whose training script this is: `flux_train_network.py` is kohya's,
    `train_dreambooth_lora_flux.py` is diffusers'.
    """
    return next(
        (tool for pattern, tool in _PROGRAMS if pattern.match(program.rpartition("/")[2])), None
    )


def tool_of_tree(tree: Tree, tool: str | None) -> str | None:
    """`kohya`, `ai-toolkit` or `onetrainer` where a file is theirs; `tool` is what `identify` says
    of it.
    """
    data = tree.data
    if tool == "kohya":
        return tool
    if not isinstance(data, dict):
        return None
    names = {str(key) for one in (data, *data.values()) if isinstance(one, dict) for key in one}
    if {"datasets", "general"} <= set(data) or names & {"network_module", "network_dim"}:
        return "kohya"
    if {"job", "config"} <= set(data) and isinstance(data["config"], dict):
        return "ai-toolkit" if "process" in data["config"] else None
    if {"training_method", "train_dtype"} <= set(data):
        return "onetrainer"
    return None


def keys_of(tool: str, tree: Tree, path: Path) -> list[Given]:
    """The keys of a file of kohya, ai-toolkit or OneTrainer. Raises UsageError."""
    return list(
        {"kohya": _kohya, "ai-toolkit": _ai_toolkit, "onetrainer": _onetrainer}[tool](tree, path)
    )


def _kohya(tree: Tree, path: Path) -> Iterator[Given]:
    """Keys of all tables, as if there were none."""
    for key, value in tree.data.items():
        if isinstance(value, dict) and key != "general":
            for inner, one in value.items():
                yield Given(str(inner), one, tree.lines.get((key, inner)), str(inner))
        elif key not in ("general", "datasets"):
            yield Given(str(key), value, tree.lines.get((key,)), str(key))
    yield from _kohya_datasets(tree, "")


def kohya_dataset_file(named: object, beside: Path) -> Iterator[Given]:
    """The keys of the file of `--dataset_config`; nothing where it is not found. Raises UsageError
    for one that is broken.
    """
    if isinstance(named, str) and (file := _file(named, Path("."), beside.parent)) is not None:
        yield from _kohya_datasets(_tree(file, read_toml), f"{file.name}: ")


def _kohya_datasets(tree: Tree, shown: str) -> Iterator[Given]:
    """A subset has its own keys, those of its dataset, and those of [general]."""
    data = tree.data
    count = 0
    for i, dataset in enumerate(data.get("datasets", [])):
        for j, subset in enumerate(dataset.get("subsets", [])):
            outer = {
                **data.get("general", {}),
                **{key: value for key, value in dataset.items() if key != "subsets"},
            }
            for key, value in {**outer, **subset}.items():
                line = tree.lines.get(("datasets", i, "subsets", j, key)) or tree.lines.get(
                    ("datasets", i, key)
                )
                yield Given(
                    f"{DATASET}.{count}.{key}",
                    value,
                    line or tree.lines.get(("general", key)),
                    f"{shown}{key}",
                )
            count += 1


def _ai_toolkit(tree: Tree, path: Path) -> Iterator[Given]:
    processes = tree.data.get("config", {}).get("process") or []
    if not processes or not isinstance(processes[0], dict):
        raise UsageError(f"{path}: config.process: expected a list with one training process")
    yield from nested(processes[0], tree, ("config", "process", 0), listed="datasets")


def nested(
    node: Mapping[str, Any],
    tree: Tree,
    at: tuple[Any, ...] = (),
    before: str = "",
    *,
    whole: Sequence[str] = (),
    listed: str = "",
) -> Iterator[Given]:
    """`optimizer.lr`: a key for each value below `node`, which lies at `at`.

    whole   mappings that are one value
    listed  the key of a list of datasets
    """
    for key, value in node.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value and key not in whole:
            yield from nested(value, tree, (*at, key), f"{name}.", whole=whole, listed=listed)
        elif key == listed and isinstance(value, list):
            for i, entry in enumerate(value):
                for inner, one in entry.items() if isinstance(entry, dict) else ():
                    yield Given(
                        f"{DATASET}.{i}.{inner}",
                        one,
                        tree.lines.get((*at, key, i, inner)),
                        f"{listed}[{i}].{inner}",
                    )
        else:
            yield Given(name, value, tree.lines.get((*at, key)), name)


def _onetrainer(tree: Tree, path: Path) -> Iterator[Given]:
    concepts = tree.data.get("concepts")
    shown = "concepts"
    named = tree.data.get("concept_file_name")
    yield from nested({key: value for key, value in tree.data.items() if key != "concepts"}, tree)
    if concepts is None and isinstance(named, str):
        file = _file(named, path.parent, Path("."))
        concepts = None if file is None else _tree(file, read_json).data
        shown = Path(named).name
    for i, concept in enumerate(concepts or []):
        own = {key: value for key, value in concept.items() if not isinstance(value, dict)}
        for key, value in {
            **own,
            **(concept.get("image") or {}),
            **(concept.get("text") or {}),
        }.items():
            yield Given(f"{DATASET}.{i}.{key}", value, None, f"{shown}[{i}].{key}")


def _file(named: str, *folders: Path) -> Path | None:
    """A file that another one names: in one of the folders, or by its own name beside the last."""
    places = [
        *(folder / named for folder in folders),
        *(folder / Path(named).name for folder in folders),
    ]
    return next((found for found in places if found.is_file()), None)


def _tree(file: Path, reader: Callable[[str], Tree]) -> Tree:
    try:
        return reader(file.read_text(encoding="utf-8-sig"))
    except Unreadable as error:
        raise UsageError(f"{file}:{error.line}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def without_secret(given: Given) -> Given:
    """The key with its secrets hidden, whether a key's name says so, its text does, or a flag
    inside the text.
    """
    return replace(given, value=_hidden_in(given.name, given.value))


def _hidden_in(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden_in(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_hidden_in(name, inner) for inner in value]
    if re.fullmatch(_SECRET, name.rpartition(".")[2], re.I) and value not in (
        None,
        "",
        True,
        False,
    ):
        return _HIDDEN
    return hidden(value) if isinstance(value, str) else value


def hidden(text: str) -> str:
    """A text with the secrets in it hidden."""
    return _VALUE.sub(_HIDDEN, _FLAG.sub(rf"\1{_HIDDEN}", text))


def simpletuner_keys(read: Tree | str, config: Path) -> list[Given]:
    """The keys of SimpleTuner's JSON or TOML, or of the text of a config.env, and of the dataset
    file that it names.

    Lines of a config.env that are no assignments are skipped; a shell that sources it would run
    them. Raises UsageError.
    """
    found: dict[str, Given] = {}
    if isinstance(read, str):
        for name, assignment in shell.read_script(read).variables.items():
            if name == "TRAINER_EXTRA_ARGS":
                for key, value in shell.parse_options(assignment.value.split()).items():
                    key, written = _OTHER_NAMES.get(key, key), f"{name}: --{key}"
                    found[key] = Given(
                        key,
                        parse_scalar(value) if isinstance(value, str) else value,
                        assignment.line,
                        written,
                    )
            else:
                key = _ARGUMENTS.get(name, name.lower())
                found.setdefault(
                    _OTHER_NAMES.get(key, key),
                    Given(
                        _OTHER_NAMES.get(key, key),
                        parse_scalar(assignment.value),
                        assignment.line,
                        name,
                    ),
                )
    else:
        for written, value in read.data.items() if isinstance(read.data, dict) else ():
            key = str(written).lstrip("-").replace("-", "_")  # their names may begin with `--`
            found[key] = Given(
                _OTHER_NAMES.get(key, key), value, read.lines.get((written,)), str(written)
            )
    named = next(
        (given.value for given in found.values() if given.name == "data_backend_config"), None
    )
    return [*found.values(), *_simpletuner_datasets(named, config)]


def _simpletuner_datasets(named: object, config: Path) -> Iterator[Given]:
    """SimpleTuner is started some folders above its configuration, so the name is tried from each;
    nothing where it is not found.
    """
    if (
        not isinstance(named, str)
        or not named
        or (file := _file(named, config.parent, *config.absolute().parents[1:4], Path("."))) is None
    ):
        return
    tree = _tree(file, read_json)
    if not isinstance(tree.data, list) or not all(isinstance(entry, dict) for entry in tree.data):
        raise UsageError(f"{file}: expected a list of datasets")
    for i, entry in enumerate(tree.data):
        for key, value in entry.items():
            yield Given(
                f"{DATASET}.{i}.{key}",
                value,
                tree.lines.get((i, key)),
                f"{file.name}: {entry.get('id', i)}.{key}",
            )


# defaults of most: no schedule, nothing held out
NONE = {"train.schedule": "constant", "train.warmup": 0, "images.eval_split": 0.0}
PEFT = "PEFT's LoRA"
NOT_UPLOADED = "nothing is uploaded"
CACHED = "latents and text are always computed once and kept: images.cache"
BUCKETS = "buckets follow images.resolution and images.max_aspect"
NO_TEXT_ENCODER = (
    "adapter.text_encoders trains those of SDXL and Stable Diffusion only, with a LoRA"
)
DECIDES = t.changed("one of the keys that decide precision.preset")
ADAM = "train.beta1, train.beta2, train.epsilon, train.weight_decay"
DENSITIES = "diffusion.timesteps: logit_normal, uniform, mode"
MANY_WINDOWS = "so many windows of each picture are kept; one is drawn each time"
WINDOWS = t.when_on("images.crop", 4, note=MANY_WINDOWS)
TAG_ORDERS = t.when_on(
    "images.tag_orders", 8, note="so many random orders of a caption's tags are encoded"
)
_RATE_OF_ADAMW = 1e-4
_OWN_RATE = ("prodigy", "dadapt", "automagic")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def dataset(table: Mapping[str, t.Handler], of: str = "dataset") -> t.Handler:
    """A key of one dataset, `dataset.0.KEY`; `put_sources` makes the sources."""

    def handler(draft: Draft, given: Given) -> None:
        if known := table.get(given.name.split(".", 2)[2]):
            known(draft, given)
        else:
            t.not_offered(f"isotype import does not know this key of a {of}")(draft, given)

    return handler


def datasets_of(draft: Draft) -> list[dict[str, Any]]:
    """Each dataset's keys."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in draft.keys.items():
        if name.startswith(f"{DATASET}."):
            _, index, key = name.split(".", 2)
            found.setdefault(int(index), {})[key] = value
    return [found[index] for index in sorted(found)]


def source(
    name: object,
    *,
    caption: object = None,
    repeats: Any = 1,
    weight: Any = 1.0,
    resolution: Sequence[int] = (),
    draw: Any = None,
) -> dict[str, Any]:
    """A source of pictures with the settings that it has."""
    made: dict[str, Any] = {"name": str(name)}
    if caption:
        made["caption"] = str(caption)
    if (times := round(float(repeats or 1))) > 1:
        made["repeats"] = times
    if weight is not None and float(weight) != 1.0:
        made["weight"] = float(weight)
    if resolution:
        made["resolution"] = list(resolution)
    if draw and caption:
        made["draw"] = int(draw)
    return made


def put_sources(draft: Draft, sides: Mapping[str, list[dict[str, Any]]]) -> None:
    """`images.train` and its like, in the shortest form: a source that has the run's resolution
    only does not name it.
    """
    for side, sources in sides.items():
        for one in sources:
            if one.get("resolution") == [draft.settings.get("images.resolution")]:
                del one["resolution"]
            elif len(one.get("resolution", ())) == 1:
                one["resolution"] = one["resolution"][0]
        short = [one["name"] if len(one) == 1 else one for one in sources]
        if short:
            if len(short) == 1 and isinstance(short[0], str):
                draft.settings[side] = short[0]
            else:
                draft.settings[side] = short


def numbered_folders(folder: str, base: Path, **settings: Any) -> list[dict[str, Any]]:
    """kohya's `10_sks dog`: a folder's repeats, and its caption where pictures have no text file."""
    root = next((found for found in (Path(folder), base / folder) if found.is_dir()), None)
    made = []
    for inside in sorted(root.iterdir()) if root else ():
        if inside.is_dir() and (found := re.match(r"^(\d+)_(.*)$", inside.name)):
            named = not any(inside.glob("*.txt")) and any(
                path.suffix in _SUFFIXES for path in inside.iterdir()
            )
            one = source(
                f"{folder.rstrip('/')}/{inside.name}",
                caption=found[2] if named else None,
                **settings,
            )
            made.append(one | {"repeats": int(found[1])})
    return made


def largest_side(value: Any) -> int:
    """Of `512`, `"512,768"`, `[512, 768]`: width and height."""
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value))
    return max(int(float(part)) for part in parts)


def several(value: Any) -> list[int]:
    """`[512, 768, 1024]`, `"512,768"`: resolutions of which each picture comes in each."""
    return sorted(
        {
            largest_side(part)
            for part in (value if isinstance(value, list) else str(value).split(","))
        }
    )


def resolution(draft: Draft, given: Given) -> None:
    """`images.resolution` is the largest one; sources of others name theirs."""
    found = several(given.value)
    most = max(*found, int(draft.settings.get("images.resolution", 0)))
    draft.set(
        given,
        "images.resolution",
        most,
        f"resolution of the source: {found}" if found != [most] else "",
    )


def lokr(draft: Draft, given: Given) -> None:
    draft.set(given, "adapter.kind", "lokr", "PEFT's, on the linear layers")


def _optimizer_word(draft: Draft) -> str:
    return next(
        filter(
            None,
            map(
                draft.said,
                ("optimizer", "optimizer_type", "train.optimizer", "optimizer.optimizer"),
            ),
        ),
        "",
    )


def rate(draft: Draft, given: Given) -> None:
    """A learning rate. DAdapt and its like find their own, and 1.0 is their factor: AdamW gets a
    rate of its own in its place.
    """
    word = _optimizer_word(draft)
    if t.OPTIMIZERS.get(word) != "prodigy" and (
        word.startswith(_OWN_RATE) or float(given.value) > 0.05
    ):
        note = (
            f"{given.value} is the factor of {word or 'an optimizer'} that finds its own rate;"
            " AdamW would diverge with it"
        )
        draft.set(given, "train.learning_rate", _RATE_OF_ADAMW, note)
    else:
        draft.set(given, "train.learning_rate", t.as_number(given.value))


def text_rate(draft: Draft, given: Given) -> None:
    """A rate of text encoders, or one for each. The factor of an optimizer that finds its own rate
    is none.
    """
    rates = [
        float(one) for one in (given.value if isinstance(given.value, list) else [given.value])
    ]
    draft.settings["adapter.text_encoders"] = True
    if max(rates) > 0.05 or _optimizer_word(draft).startswith(_OWN_RATE):
        draft.changed(
            given,
            "of an optimizer that finds its own rate; adapter.text_encoders has"
            " train.learning_rate",
        )
    else:
        if min(rates) > 0:
            note = "with adapter.text_encoders"
        else:
            note = "one rate for all: a trained encoder has a rate above 0"
        draft.set(
            given,
            "adapter.text_encoder_rate",
            rates if len(set(rates)) > 1 and min(rates) > 0 else max(rates),
            note,
        )


def min_snr(draft: Draft, given: Given) -> None:
    """`snr_gamma`, `min_snr_gamma`"""
    draft.settings["diffusion.weighting"] = "min_snr"
    draft.set(given, "diffusion.snr_gamma", float(given.value), "with diffusion.weighting: min_snr")


def of_1000(target: str) -> t.Handler:
    """A timestep of 1000 as a share."""
    return t.to(target, lambda value: float(value) / 1000, "a share of 1000 timesteps")


def preset_of(draft: Draft, mixed: object, *, full: bool = False) -> None:
    """`precision.preset`, by the dtype of the products. full: weights in that dtype too."""
    adapter = draft.settings.get("adapter.kind") != "none"
    word = (
        str(mixed or "no")
        .lower()
        .replace("bfloat16", "bf16")
        .replace("float16", "fp16")
        .replace("bfloat_16", "bf16")
    )
    bf16 = "bf16-lora" if adapter else "bf16-pure" if full else "bf16-mixed"
    draft.default("precision.preset", {"bf16": bf16, "fp16": "fp16-mixed"}.get(word, "fp32"))


def without_text_encoders(draft: Draft) -> None:
    """Where there is no LoRA, text encoders have none."""
    for key in (
        ("adapter.text_encoders", "adapter.text_encoder_rate")
        if draft.settings.get("adapter.kind") != "lora"
        else ()
    ):
        draft.settings.pop(key, None)


def without_adapters_on_the_way(draft: Draft) -> None:
    """Every weight is trained: no adapter is written."""
    for key in ("run.adapters_every", "run.adapter_format"):
        draft.settings.pop(key, None)


# arguments that kohya's scripts and SimpleTuner have from diffusers' own
SCRIPT: dict[str, t.Handler] = {
    **t.carried(
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
    "learning_rate": rate,
    "gradient_checkpointing": t.either("train.gradient_checkpointing", "layers", "none"),
    "lr_scheduler": t.schedule_of(
        {**t.SCHEDULES, "cosine_with_restarts": ("cosine", "without restarts")}
    ),
    **t.each(min_snr, "snr_gamma min_snr_gamma"),
    **t.each(t.trackers, "report_to log_with"),
}
