"""What hostile files are given to, as a user's command would: configurations, data, weights,
adapters, run folders.

A target takes a folder of its own and a source of chance, makes one input and feeds it. It may
raise IsotypeError; all else is a fault.
"""

import contextlib
import csv
import gzip
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from isotype.errors import IsotypeError

from .mutate import TEXTS, mutated_bytes, mutated_json
from .workshop import Workshop

ROWS: tuple[Any, ...] = (
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"},
                  {"role": "assistant", "content": "Yes."}], "id": 3},
    {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]}, {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Sun."}], "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"prompt": "One and one is", "completion": " two."},
    {"text": "A line of text that is learnt whole."},
)  # fmt: skip


@dataclass(frozen=True)
class Material:
    """Good files to begin with, and the settings that read them."""

    workshop: Workshop

    @cached_property
    def run(self) -> Path:
        return self.workshop.undisturbed()[0]

    @cached_property
    def config(self) -> dict[str, Any]:
        from isotype.config.load import load

        return load(self.run / "resolved.yaml").config.model_dump()

    @cached_property
    def tokenizer(self) -> Any:
        from isotype.config.schema import ModelSection
        from isotype.model.load import load_tokenizer

        return load_tokenizer(ModelSection(name=str(self.workshop.base)))

    @cached_property
    def small_weights(self) -> tuple[dict[str, Any], bytes]:
        """The header and the bytes of a whole file with three tensors and a note."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for i, (dtype, shape) in enumerate((("F32", [4, 2]), ("BF16", [3]), ("U8", []))):
            header[f"model.layers.{i}.weight"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": ([0, 32], [32, 38], [38, 39])[i],
            }
        return header, bytes(range(39))

    def model(self) -> Any:
        """A fresh base on which the run's adapter fits."""
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.workshop.base))


def configuration(material: Material, folder: Path, draw: random.Random) -> None:
    """`isotype train FILE section.key=value`, up to where a model would be loaded; what is accepted
    must be written and read the same.
    """
    from isotype.config.load import load
    from tests.api import resolved_yaml

    file = folder / "run.yaml"
    if draw.random() < 0.5:
        file.write_bytes(mutated_bytes((material.run / "resolved.yaml").read_bytes(), draw))
    else:
        text = json.dumps(mutated_json(material.config, draw))
        file.write_bytes(
            text.encode() if draw.random() < 0.8 else mutated_bytes(text.encode(), draw)
        )
    key = draw.choice(
        (
            "train.steps",
            "model.name",
            "model.config.hidden_size",
            "data.train",
            "precision.preset",
            "run.folder",
        )
    )
    overrides = [f"{key}={draw.choice(TEXTS)}"] if draw.random() < 0.1 else []
    loaded = load(file, overrides)
    again = folder / "again.yaml"
    again.write_text(resolved_yaml(loaded, {}, {}), encoding="utf-8")
    if load(again).config != loaded.config:
        raise AssertionError("the configuration does not read back as it was written")


ENDINGS = (".parquet", ".parquet", ".csv", ".csv", ".tsv", ".json", ".jsonl", ".jsonl.gz", ".txt")
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TAKEN = 6  # rows that a run's first steps would take


def recipes(material: Material, folder: Path, draw: random.Random) -> None:
    """`data.train` with packing, a stream, weights or a template, up to the first rows of a run."""
    from isotype.config.schema import DataSection, RunConfig
    from isotype.config.sources import check_data
    from isotype.data.load import load_data
    from isotype.tasks.language.batches import row_feed

    sources: list[Any] = [str(_file(folder, i, draw)) for i in range(draw.choice((1, 1, 2)))]
    settings: dict[str, Any] = {
        "max_length": draw.choice((4, 16, 48)),
        "packing": draw.random() < 0.4,
        "stream": draw.random() < 0.4,
    }
    if len(sources) > 1 and draw.random() < 0.8:
        sources = [{"name": name, "weight": draw.choice((1, 2.5, 1e9, 1e-9))} for name in sources]
    if settings["stream"]:
        settings["shuffle_buffer"] = draw.randint(1, 6)
    if draw.random() < 0.15:
        template = folder / "template.jinja"
        template.write_bytes(mutated_bytes(TEMPLATE.encode(), draw))
        settings["chat_template"] = str(template)
    if draw.random() < 0.1:
        settings["columns"] = {draw.choice(("prompt", "text", "messages")): draw.choice(TEXTS)}
    section = DataSection(
        train=sources,
        eval_split=draw.choice((0.0, 0.5)),
        loss_on=draw.choice(("assistant", "all")),
        **settings,
    )
    check_data(RunConfig.model_validate({"data": section.model_dump(), "train": {"steps": 3}}), {})
    row_feed(load_data(section, material.tokenizer, seed=0), seed=0, shuffle=True).take(TAKEN)


def _file(folder: Path, number: int, draw: random.Random) -> Path:
    ending = draw.choice(ENDINGS)
    good = draw.choice(ROWS)
    # mostly good, so that much of it comes as far as batches
    rows = [good] * draw.randint(3, 12) + [mutated_json(draw.choice((good, good, *ROWS)), draw)] * (
        draw.random() < 0.4
    )
    lines = "\n".join(json.dumps(row) for row in rows).encode("utf-8", "surrogatepass")
    content = {
        ".parquet": lambda: _parquet(rows, good),
        ".csv": lambda: _table(draw, ","),
        ".tsv": lambda: _table(draw, "\t"),
        ".json": lambda: b"[" + lines.replace(b"\n", b", ") + b"]",
        ".jsonl": lambda: lines,
        ".jsonl.gz": lambda: gzip.compress(lines, mtime=0),
        ".txt": lambda: " ".join(draw.choices(TEXTS, k=9)).encode("utf-8", "surrogatepass"),
    }[ending]()
    file = folder / f"data_{number}{ending}"
    file.write_bytes(content if draw.random() < 0.75 else mutated_bytes(content, draw))
    return file


def _parquet(rows: list[Any], good: Any) -> bytes:
    """The rows as a table where their types go together, else rows that are good."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        table = pa.Table.from_pylist([good] * 3)
    with io.BytesIO() as out:
        try:
            pq.write_table(table, out)
        except pa.ArrowException:  # a struct without fields cannot be written
            pq.write_table(pa.Table.from_pylist([{"text": "a line"}] * 3), out)
        return out.getvalue()


def _table(draw: random.Random, delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    header = draw.choice(
        (
            ("prompt", "completion"),
            ("text",),
            ("instruction", "input", "output"),
            tuple(draw.choices(TEXTS, k=2)),
        )
    )
    writer.writerow(header)
    for _ in range(draw.randint(0, 12)):
        width = len(header) if draw.random() < 0.995 else draw.randint(1, 4)
        writer.writerow([text or "x" for text in draw.choices(TEXTS, k=width)])
    return out.getvalue().encode("utf-8", "ignore" if draw.random() < 0.9 else "surrogatepass")


def weights(material: Material, folder: Path, draw: random.Random) -> None:
    """A safetensors file: as part of a checkpoint that is sealed and whole."""
    from isotype.runs.checkpoint.store import STATE, TENSORS, CheckpointStore
    from tests.api import seal

    header, body = material.small_weights
    good = _safetensors(header, body)
    size = len(good) - len(body) - 8
    kind = draw.randrange(3)
    if kind == 0:
        content = mutated_bytes(good[: 8 + size], draw) + body
    elif kind == 1:
        content = (
            draw.randbytes(8) + good[8:]
            if draw.random() < 0.5
            else draw.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + good[8:]
        )
    else:
        content = _safetensors(mutated_json(header, draw), body)
    checkpoint = folder / "step_3"
    checkpoint.mkdir()
    (checkpoint / TENSORS).write_bytes(content)
    (checkpoint / STATE).write_text("{}")
    seal(checkpoint)
    CheckpointStore(folder).load(3)


def _safetensors(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def adapter(material: Material, folder: Path, draw: random.Random) -> None:
    """`adapter.start_from: FOLDER`, onto a base it may not be for."""
    from isotype.model.adapter import load_adapter

    place = folder / "adapter"
    place.mkdir()
    config = (material.run / "adapter/adapter_config.json").read_bytes()
    tensors = (material.run / "adapter/adapter_model.safetensors").read_bytes()
    kind = draw.randrange(5)
    if kind < 3:
        config = json.dumps(mutated_json(json.loads(config), draw)).encode()
    elif kind == 3:
        config = mutated_bytes(config, draw)
    if kind == 4:
        size = int.from_bytes(tensors[:8], "little")
        tensors = _safetensors(
            mutated_json(json.loads(tensors[8 : 8 + size]), draw), tensors[8 + size :]
        )
    (place / "adapter_config.json").write_bytes(config)
    (place / draw.choice(("adapter_model.safetensors",) * 9 + ("adapter_model.bin",))).write_bytes(
        tensors
    )
    load_adapter(material.model(), place)


def run_folder(material: Material, folder: Path, draw: random.Random) -> None:
    """Somebody's run: listed, reported, and held as `train --resume` does; its settings, preflight
    record and checkpoint read.
    """
    from isotype.config.load import load
    from isotype.runs.checkpoint.store import CheckpointStore
    from isotype.runs.folder import LOCK, RunFolder
    from tests.api import SEAL, Metrics, _describe_run, compare, read_run, read_skipped, seal

    place = folder / "run"
    shutil.copytree(
        material.run, place, ignore=shutil.ignore_patterns("adapter", "base", "step_9", "report*")
    )
    files = sorted(p for p in place.rglob("*") if p.is_file() and p.name != LOCK)
    for file in draw.sample(files, draw.randint(1, 3)):
        _damage(file, folder, draw)
    run = RunFolder(place)
    for read in (lambda: read_run(place), lambda: _describe_run(place)):
        with contextlib.suppress(IsotypeError):
            read()
    with run.lock():
        if draw.random() < 0.3:
            from tests.api import page_render as render

            render(read_run(place))
        read_skipped(place / "preflight.json")
        Metrics(run.metrics).cut_after(6)
        store = CheckpointStore(run.checkpoints)
        for step in store.steps():
            if draw.random() < 0.8:  # sealed by the stranger, so that its checksums are right
                with contextlib.suppress(OSError):
                    store.path(step).joinpath(SEAL).unlink(missing_ok=True)
                    seal(store.path(step))
        newest, _ = store.find_newest_intact()
        if newest is not None:
            store.load(newest)
        loaded = load(place / "resolved.yaml", resolved=True)
        compare(load(place / "resolved.yaml").config, loaded.config, auto_preset="fp32")


def _damage(file: Path, folder: Path, draw: random.Random) -> None:
    kind = draw.randrange(30)
    if kind == 0:
        file.unlink()
        target = folder / draw.choice(("outside", "outside_folder", "run"))
        if target.name == "outside_folder":
            target.mkdir(exist_ok=True)
        file.symlink_to(target)
    elif kind == 1:
        file.unlink()
        if draw.random() < 0.5:
            file.mkdir()
        elif draw.random() < 0.2:
            os.mkfifo(file)
    elif kind < 18 and file.suffix in (".json", ".jsonl"):
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(mutated_json(json.loads(lines[at]), draw))
        file.write_text("\n".join(lines) + "\n")
    else:
        file.write_bytes(mutated_bytes(file.read_bytes(), draw))


Target = Callable[[Material, Path, random.Random], None]
# share of all inputs: an adapter takes a model, a run folder is copied, a configuration is a line
TARGETS: dict[str, tuple[Target, float]] = {
    "configuration": (configuration, 0.12),
    "data rows": (recipes, 0.5),
    "safetensors headers": (weights, 0.33),
    "adapters": (adapter, 0.03),
    "run folders": (run_folder, 0.02),
}
