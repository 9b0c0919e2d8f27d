"""Exports the result of a run on text: chooses between its adapter and the whole model, which is
merged first where it has to be.

What can be refused is refused before the merge, which may take minutes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..model.gguf import read_architecture
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.folder import run_and_result, without_run
from .adapter_file import SETTINGS, export_vllm, read_settings
from .gguf_file import TYPES, export_adapter, export_model, llama_cpp, refuse_model, tokenizer_keys
from .loaded import load_run, result_of
from .merge import merge
from .ollama import CONVERTED, modelfile, write_for_converter

Written = tuple[dict[str, Any], list[str]]


def export_language(run: Path, out: Path, *, to: str, kind: str | None, name: str) -> Written:
    """Writes `out`; returns what was written, for `--json`, and as lines.

    to      vllm, gguf or ollama
    kind    of the whole model; None: gguf writes an adapter alone, and a model in the type that
            keeps its values
    Raises  UsageError
    """
    result: Path | None = run.absolute()
    if without_run(run) is None:
        folder, on_the_way = run_and_result(run)
        if (result := result_of(folder, on_the_way)) is None:
            raise UsageError(f"{folder}: no result yet", fix=f"isotype train --resume {folder}")
    assert result is not None
    adapter = (result / SETTINGS).is_file()
    if to == "vllm":
        if not adapter:
            raise UsageError(
                f"{run}: every weight was trained: there is no adapter",
                fix=f"vllm serve {result} takes the model as it is",
            )
        command = export_vllm(result, out, name)
        return {"folder": str(out), "command": command}, [
            f"exported  {out}",
            f"serve     {command}",
        ]
    if to == "gguf" and adapter and kind is None:
        layers = export_adapter(result, out)
        serve = f"llama-server -m BASE.gguf --lora {out}"
        return {"file": str(out), "layers": layers}, [
            f"exported  {layers} layers to {out}",
            f"serve     {serve}",
        ]
    if kind is not None and kind not in TYPES:
        if adapter:
            made = f"isotype merge {run} --out merged && {llama_cpp('merged', kind)}"
        else:
            made = llama_cpp(result, kind)
        raise UsageError(
            f"--type {kind}: expected {', '.join(TYPES)}: llama.cpp's own program makes the others",
            fix=made,
        )
    if adapter:
        base = str(read_settings(result).get("base_model_name_or_path"))
    else:
        base = str(result)
    tokenizer = result if (result / "tokenizer_config.json").is_file() else base
    config = read_architecture(base)
    command = llama_cpp("merged" if adapter else result, kind or "F16")
    command = f"isotype merge {run} --out merged && {command}" if adapter else command
    converted = to == "ollama" and (config.architectures or ["?"])[0] in CONVERTED
    if converted and kind is not None:
        raise UsageError(
            f"--type has no effect for {config.model_type}, which Ollama converts",
            fix="ollama create --quantize q8_0",
        )
    if not converted:
        import_module("gguf")  # where it is missing, the command says so before a merge
        refuse_model(config, command)
        tokenizer_keys(tokenizer, config.vocab_size, command)
    if to == "ollama":
        content = modelfile(tokenizer, "." if converted else "./model.gguf")
    else:
        content = ""
    with _whole(run, result, out.absolute().parent) as folder:
        if kind is None:  # the type that keeps the file's values; F16 of fp32 ones
            dtype = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
            kind = "BF16" if dtype == "bfloat16" else "F16"
        if to == "gguf":
            tensors = export_model(folder, out, kind)
            return {"file": str(out), "tensors": tensors, "type": kind}, [
                f"exported  {tensors} tensors in {kind} to {out}"
            ]

        def fill(aside: Path) -> None:
            if converted:
                shutil.copytree(
                    folder, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("DONE")
                )
                write_for_converter(aside)
            else:
                export_model(folder, aside / "model.gguf", kind)
            (aside / "Modelfile").write_text(content, encoding="utf-8")

        write_folder(out, fill, then="export again")
    create = f"ollama create {name.lower()} -f {out / 'Modelfile'}"
    return {"folder": str(out), "command": create}, [f"exported  {out}", f"create    {create}"]


@contextmanager
def _whole(run: Path, result: Path, beside: Path) -> Iterator[Path]:
    """The model's folder; an adapter is merged into a temporary one."""
    if not (result / SETTINGS).is_file():
        yield result
        return
    with tempfile.TemporaryDirectory(dir=beside, prefix=".merged-") as aside:
        merge(load_run(run), Path(aside) / "model")
        yield Path(aside) / "model"
