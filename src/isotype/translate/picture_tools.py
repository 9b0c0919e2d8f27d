"""What the tables of kohya, ai-toolkit, OneTrainer and diffusers' scripts share: their files, sources of pictures, rates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..doctor.check.text_files import Tree, Unreadable, read_json, read_toml
from ..errors import UsageError
from .draft import Draft, Given
from .transforms import OPTIMIZERS, Handler, number, truth

DATASET = "dataset"
_PROGRAMS = (
    (re.compile(r"^(sdxl_|sd3_|flux_|lumina_|chroma_)?(train_network|train_db|train)\.py$|^fine_tune\.py$"), "kohya"),
    (re.compile(r"^train_(dreambooth|text_to_image)\w*\.py$"), "diffusers"),
)
_RATE_OF_ADAMW = 1e-4
_OWN_RATE = ("prodigy", "dadapt", "dadaptation", "automagic")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def tool_of_program(program: str) -> str | None:
    """The tool whose training script this is: `flux_train_network.py` is kohya's, `train_dreambooth_lora_flux.py` is diffusers'."""
    name = program.rpartition("/")[2]
    return next((tool for pattern, tool in _PROGRAMS if pattern.match(name)), None)


def tool_of_tree(tree: Tree, tool: str | None) -> str | None:
    """`kohya`, `ai-toolkit` or `OneTrainer` where a file is theirs."""
    if tool == "kohya" or {"datasets", "general"} <= set(tree.data if isinstance(tree.data, dict) else ()):
        return "kohya"
    if isinstance(tree.data, dict) and any(key in _flat(tree.data) for key in ("network_module", "network_dim")):
        return "kohya"
    if isinstance(tree.data, dict) and isinstance(tree.data.get("config"), dict) and {"job", "config"} <= set(tree.data):
        return "ai-toolkit" if "process" in tree.data["config"] else None
    return "onetrainer" if isinstance(tree.data, dict) and {"training_method", "train_dtype"} <= set(tree.data) else None


def _flat(data: Any) -> set[str]:
    inner = {str(key) for value in data.values() if isinstance(value, dict) for key in value}
    return {str(key) for key in data} | inner


def keys_of(tool: str, tree: Tree, path: Path) -> list[Given]:
    """The keys of a file of one of these tools; those of its datasets are `dataset.N.KEY`. Raises UsageError."""
    reader = {"kohya": _kohya, "ai-toolkit": _ai_toolkit, "onetrainer": _onetrainer}[tool]
    return list(reader(tree, path))


def _kohya(tree: Tree, path: Path) -> Iterator[Given]:
    """Keys of all tables, as if there were none; the dataset file that `dataset_config` names."""
    for key, value in tree.data.items():
        if isinstance(value, dict) and key != "general":
            for inner, one in value.items():
                yield Given(str(inner), one, tree.lines.get((key, inner)), str(inner))
        elif key not in ("general", "datasets"):
            yield Given(str(key), value, tree.lines.get((key,)), str(key))
    yield from kohya_datasets(tree, "")


def kohya_dataset_file(named: str, beside: Path) -> Iterator[Given]:
    """The keys of the file of `--dataset_config`; nothing where it is not found. Raises UsageError for one that is broken."""
    file = next((found for found in (Path(named), beside.parent / named, beside.parent / Path(named).name) if found.is_file()), None)
    if file is None:
        return
    try:
        yield from kohya_datasets(read_toml(file.read_text(encoding="utf-8-sig")), f"{file.name}: ")
    except Unreadable as error:
        raise UsageError(f"{file}:{error.line}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}") from None


def kohya_datasets(tree: Tree, shown: str) -> Iterator[Given]:
    """A subset has its own keys, those of its dataset, and those of [general]."""
    data, count = tree.data, 0
    for i, dataset in enumerate(data.get("datasets", [])):
        for j, subset in enumerate(dataset.get("subsets", [])):
            outer = {**data.get("general", {}), **{key: value for key, value in dataset.items() if key != "subsets"}}
            for key, value in {**outer, **subset}.items():
                line = tree.lines.get(("datasets", i, "subsets", j, key)) or tree.lines.get(("datasets", i, key))
                yield Given(f"{DATASET}.{count}.{key}", value, line or tree.lines.get(("general", key)), f"{shown}{key}")
            count += 1


def _ai_toolkit(tree: Tree, path: Path) -> Iterator[Given]:
    processes = tree.data.get("config", {}).get("process") or []
    if not processes or not isinstance(processes[0], dict):
        raise UsageError(f"{path}: config.process: expected a list with one training process")
    yield from _nested(processes[0], tree, ("config", "process", 0))


def _nested(node: dict[str, Any], tree: Tree, at: tuple[Any, ...], before: str = "") -> Iterator[Given]:
    for key, value in node.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _nested(value, tree, (*at, key), f"{name}.")
        elif key == "datasets" and isinstance(value, list):
            for i, entry in enumerate(value):
                for inner, one in entry.items() if isinstance(entry, dict) else ():
                    yield Given(f"{DATASET}.{i}.{inner}", one, tree.lines.get((*at, key, i, inner)), f"datasets[{i}].{inner}")
        else:
            yield Given(name, value, tree.lines.get((*at, key)), name)


def _onetrainer(tree: Tree, path: Path) -> Iterator[Given]:
    for key, value in tree.data.items():
        if isinstance(value, dict):
            yield from _nested(value, tree, (key,), f"{key}.")
        elif key != "concepts":
            yield Given(str(key), value, tree.lines.get((key,)), str(key))
    concepts, shown = tree.data.get("concepts"), "concepts"
    named = tree.data.get("concept_file_name")
    if concepts is None and isinstance(named, str):
        file = next((found for found in (path.parent / named, path.parent / Path(named).name, Path(named)) if found.is_file()), None)
        concepts, shown = (None if file is None else read_json(file.read_text(encoding="utf-8-sig")).data), Path(named).name
    for i, concept in enumerate(concepts or []):
        text, image = concept.get("text") or {}, concept.get("image") or {}
        flat = {**{k: v for k, v in concept.items() if not isinstance(v, dict)}, **image, **text}
        for key, value in flat.items():
            yield Given(f"{DATASET}.{i}.{key}", value, None, f"{shown}[{i}].{key}")


# --- what handlers share


def datasets_of(draft: Draft) -> list[dict[str, Any]]:
    """Each dataset's keys."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in draft.keys.items():
        if name.startswith(f"{DATASET}."):
            _, index, key = name.split(".", 2)
            found.setdefault(int(index), {})[key] = value
    return [found[index] for index in sorted(found)]


def side_of_square(value: Any) -> int:
    """Of `512`, `"512,512"`, `[512, 768, 1024]`: the largest, since a run has one resolution."""
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value))
    return max(int(float(part)) for part in parts)


def rate(optimizer_key: str) -> Handler:
    """A learning rate. DAdapt and its like find their own, and 1.0 is their factor: AdamW gets a rate of its own in its place."""

    def handler(draft: Draft, given: Given) -> None:
        word = str(draft.keys.get(optimizer_key) or "").lower()
        if OPTIMIZERS.get(word) == "prodigy":
            draft.set(given, "train.learning_rate", number(given.value))
        elif any(word.startswith(own) for own in _OWN_RATE) or float(given.value) > 0.05:
            note = f"{given.value} is the factor of {word or 'an optimizer'} that finds its own rate; AdamW would diverge with it"
            draft.set(given, "train.learning_rate", _RATE_OF_ADAMW, note)
        else:
            draft.set(given, "train.learning_rate", number(given.value))

    return handler


def min_snr(draft: Draft, given: Given) -> None:
    """`snr_gamma`, `min_snr_gamma`"""
    draft.settings["diffusion.weighting"] = "min_snr"
    draft.set(given, "diffusion.snr_gamma", float(given.value), "with diffusion.weighting: min_snr")


def preset_of(draft: Draft, mixed: object, *, full: bool = False) -> None:
    """`precision.preset`, by the dtype of the products. full: weights in that dtype too."""
    adapter = draft.settings.get("adapter.kind") != "none"
    word = str(mixed or "no").lower().replace("bfloat16", "bf16").replace("float16", "fp16").replace("bfloat_16", "bf16")
    if word == "bf16":
        draft.default("precision.preset", "bf16-lora" if adapter else "bf16-pure" if full else "bf16-mixed")
    elif word == "fp16":
        draft.default("precision.preset", "fp16-mixed")
    else:
        draft.default("precision.preset", "fp32")


def numbered_folders(folder: str, base: Path) -> list[dict[str, Any]]:
    """kohya's `10_sks dog`: a folder's repeats, and its caption where pictures have no text file."""
    root = next((found for found in (Path(folder), base / folder) if found.is_dir()), None)
    made = []
    for inside in sorted(root.iterdir()) if root else ():
        found = re.match(r"^(\d+)_(.*)$", inside.name)
        if found and inside.is_dir():
            source: dict[str, Any] = {"name": f"{folder.rstrip('/')}/{inside.name}", "repeats": int(found[1])}
            if not any(inside.glob("*.txt")) and any(path.suffix in _SUFFIXES for path in inside.iterdir()):
                source["caption"] = found[2]
            made.append(source)
    return made


def put_sources(draft: Draft, side: str, sources: Sequence[dict[str, Any]]) -> None:
    """`images.train` and its like, in the shortest form."""
    short = [one["name"] if len(one) == 1 else one for one in sources]
    if short:
        draft.settings[side] = short[0] if len(short) == 1 and isinstance(short[0], str) else short


def sample_lines(text: str) -> list[Any]:
    """Prompts of kohya's form, a line each: `a dog --n blurry --w 768 --h 768 --d 7 --s 30 --l 5`."""
    found: list[Any] = []
    for line in text.splitlines():
        words, *options = re.split(r"\s--(?=[a-z]+\s)", line.strip())
        if not words or words.startswith("#"):
            continue
        given = dict(option.split(" ", 1) for option in options if " " in option)
        made: dict[str, Any] = {"prompt": words.strip()}
        if "n" in given:
            made["negative"] = given["n"].strip()
        if sides := [int(given[side]) for side in ("w", "h") if side in given]:
            made["size"] = max(sides)
        for short, key in (("s", "steps"), ("d", "seed")):
            if short in given:
                made[key] = int(given[short])
        if "l" in given:
            made["guidance"] = float(given["l"])
        found.append(made if len(made) > 1 else made["prompt"])
    return found


def is_on(value: Any) -> bool:
    return value is not None and truth(value)
