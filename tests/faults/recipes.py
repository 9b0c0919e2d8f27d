"""Hostile data under the settings that read it differently: tables, archives, streams, packing, weights, templates."""

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

from .material import ROWS, Material
from .mutate import TEXTS, mutated_bytes, mutated_json

ENDINGS = (".parquet", ".parquet", ".csv", ".csv", ".tsv", ".json", ".jsonl", ".jsonl.gz", ".txt")
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TAKEN = 6  # rows that a run's first steps would take


def recipes(material: Material, folder: Path, draw: random.Random) -> None:
    """`data.train` with packing, a stream, weights or a template, up to the first rows of a run."""
    from isotype.config.schema import DataSection
    from isotype.tasks.language.batches import row_feed

    sources: list[Any] = [str(_file(folder, i, draw)) for i in range(draw.choice((1, 1, 2)))]
    settings: dict[str, Any] = {"max_length": draw.choice((4, 16, 48)), "packing": draw.random() < 0.4, "stream": draw.random() < 0.4}
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
    section = DataSection(train=sources, eval_split=draw.choice((0.0, 0.5)), loss_on=draw.choice(("assistant", "all")), **settings)
    loaded = load(section, material.tokenizer)
    row_feed(loaded, seed=0, shuffle=True).take(TAKEN)


def load(section: Any, tokenizer: Any) -> Any:
    from isotype.config.schema import RunConfig
    from isotype.config.sources import check_data
    from isotype.data.load import load_data

    check_data(RunConfig.model_validate({"data": section.model_dump(), "train": {"steps": 3}}), {})
    return load_data(section, tokenizer, seed=0)


def _file(folder: Path, number: int, draw: random.Random) -> Path:
    ending = draw.choice(ENDINGS)
    good = draw.choice(ROWS)
    # mostly good, so that much of it comes as far as batches
    rows = [good] * draw.randint(3, 12) + [mutated_json(draw.choice((good, good, *ROWS)), draw)] * (draw.random() < 0.4)
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
    header = draw.choice((("prompt", "completion"), ("text",), ("instruction", "input", "output"), tuple(draw.choices(TEXTS, k=2))))
    writer.writerow(header)
    for _ in range(draw.randint(0, 12)):
        width = len(header) if draw.random() < 0.995 else draw.randint(1, 4)
        writer.writerow([text or "x" for text in draw.choices(TEXTS, k=width)])
    return out.getvalue().encode("utf-8", "ignore" if draw.random() < 0.9 else "surrogatepass")
