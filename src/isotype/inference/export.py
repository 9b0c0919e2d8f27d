"""Exports the result of a language run. This is its adapter, or the whole model, which is merged
first if necessary.

A merge may take minutes, so unsupported models are refused before the merge.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..model.adapter_settings import ADAPTER_CONFIG_FILE
from ..model.gguf import read_architecture
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.folder import detect_model_folder, split_run_and_adapter
from .adapter_file import export_vllm, read_settings
from .gguf_file import TYPES, export_adapter, export_model, llama_cpp, refuse_model, tokenizer_keys
from .loaded import LoadedRun, find_result, load_run
from .merge import merge
from .ollama import CONVERTED, modelfile, write_for_converter

Export = tuple[dict[str, Any], list[str]]


def export_language(
    run: Path,
    out: Path,
    *,
    to: str,
    kind: str | None,
    name: str,
    load: Callable[[Path], LoadedRun] = load_run,
) -> Export:
    """Writes `out`. Returns the data that `--json` prints, and the lines for the terminal.

    run     the run folder, or the folder of an adapter or a model
    out     the file or folder to write
    to      vllm, gguf or ollama
    name    the adapter's name in vLLM, or the model's name in Ollama
    kind    the GGUF type of the whole model. None means that only the adapter is written to a GGUF
            file; a model without an adapter is written in the type that keeps its values
    load    loads the run for a merge
    Raises  UsageError
    """
    result = _find_result_folder(run)
    has_adapter = (result / ADAPTER_CONFIG_FILE).is_file()
    if to == "vllm":
        return _export_to_vllm(run, result, out, name)
    if to == "gguf" and has_adapter and kind is None:
        layers = export_adapter(result, out)
        serve = f"llama-server -m BASE.gguf --lora {out}"
        lines = [f"exported  {layers} layers to {out}", f"serve     {serve}"]
        return {"file": str(out), "layers": layers}, lines
    if kind is not None and kind not in TYPES:
        raise UsageError(
            f"--type {kind}: expected {', '.join(TYPES)}: llama.cpp's own program makes the others",
            fix=_conversion_command(run, result, kind),
        )
    base = str(result)
    if has_adapter:
        base = str(read_settings(result).get("base_model_name_or_path"))
    tokenizer = result if (result / "tokenizer_config.json").is_file() else base
    config = read_architecture(base)
    uses_converter = to == "ollama" and (config.architectures or ["?"])[0] in CONVERTED
    if uses_converter and kind is not None:
        raise UsageError(
            f"--type has no effect for {config.model_type}, which Ollama converts",
            fix="ollama create --quantize q8_0",
        )
    if not uses_converter:
        import_module("gguf")  # a missing package is reported before the merge
        command = _conversion_command(run, result, kind or "F16")
        refuse_model(config, command)
        tokenizer_keys(tokenizer, config.vocab_size, command)
    content = ""
    if to == "ollama":
        content = modelfile(tokenizer, "." if uses_converter else "./model.gguf")
    with _merge_temporarily(run, result, out.absolute().parent, load) as folder:
        kind = kind or _lossless_type(folder)
        if to == "gguf":
            tensors = export_model(folder, out, kind)
            facts = {"file": str(out), "tensors": tensors, "type": kind}
            return facts, [f"exported  {tensors} tensors in {kind} to {out}"]
        _write_ollama_folder(folder, out, content, kind=None if uses_converter else kind)
    create = f"ollama create {name.lower()} -f {out / 'Modelfile'}"
    return {"folder": str(out), "command": create}, [f"exported  {out}", f"create    {create}"]


def _find_result_folder(run: Path) -> Path:
    """Returns the folder of the adapter or model to export. Raises UsageError if the run has
    neither."""
    if detect_model_folder(run) is not None:
        return run.absolute()
    folder, intermediate = split_run_and_adapter(run)
    result = find_result(folder, intermediate)
    if result is None:
        raise UsageError(f"{folder}: no result yet", fix=f"isotype train --resume {folder}")
    return result


def _export_to_vllm(run: Path, result: Path, out: Path, name: str) -> Export:
    if not (result / ADAPTER_CONFIG_FILE).is_file():
        raise UsageError(
            f"{run}: every weight was trained: there is no adapter",
            fix=f"vllm serve {result} takes the model as it is",
        )
    command = export_vllm(result, out, name)
    lines = [f"exported  {out}", f"serve     {command}"]
    return {"folder": str(out), "command": command}, lines


def _conversion_command(run: Path, result: Path, kind: str) -> str:
    """Returns the command that runs llama.cpp's converter. If there is an adapter, the command
    merges it first.
    """
    if (result / ADAPTER_CONFIG_FILE).is_file():
        return f"isotype merge {run} --out merged && {llama_cpp('merged', kind)}"
    return llama_cpp(result, kind)


def _lossless_type(folder: Path) -> str:
    """Returns the GGUF type that keeps the values of a model. This is BF16 for bf16 weights, and
    F16 for other weights.
    """
    dtype = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
    return "BF16" if dtype == "bfloat16" else "F16"


def _write_ollama_folder(model: Path, out: Path, modelfile_text: str, *, kind: str | None) -> None:
    """Writes weights and Modelfile. `kind` is the GGUF type; None means safetensors for Ollama's
    converter."""

    def write_contents(folder: Path) -> None:
        if kind is None:
            ignore = shutil.ignore_patterns("DONE")
            shutil.copytree(model, folder, dirs_exist_ok=True, ignore=ignore)
            write_for_converter(folder)
        else:
            export_model(model, folder / "model.gguf", kind)
        (folder / "Modelfile").write_text(modelfile_text, encoding="utf-8")

    write_folder(out, write_contents, next_action="export again")


@contextmanager
def _merge_temporarily(
    run: Path, result: Path, parent: Path, load: Callable[[Path], LoadedRun]
) -> Iterator[Path]:
    """Yields a folder with the whole model. An adapter is merged into a temporary folder first."""
    if not (result / ADAPTER_CONFIG_FILE).is_file():
        yield result
        return
    with tempfile.TemporaryDirectory(dir=parent, prefix=".merged-") as temporary:
        merge(load(run), Path(temporary) / "model")
        yield Path(temporary) / "model"
