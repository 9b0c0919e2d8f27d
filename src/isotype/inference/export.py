"""Exports the result of a language run. This is its adapter, or the whole model.

For a GGUF file, base and adapter are added in fp32, one weight at a time, and the sum is rounded
once. No merged model is written to the disk. Unsupported models are refused before the model is
loaded, since this may take minutes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config.sources import gguf_file
from ..dtypes import to_torch
from ..errors import UsageError
from ..model.adapter_settings import ADAPTER_CONFIG_FILE
from ..model.export import embedding_and_head, write_config
from ..model.served import COMPRESSED_FORMATS, GGUF_FORMATS, ServedFormat
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.folder import detect_model_folder, split_run_and_adapter
from .adapter_file import export_vllm, read_base_name
from .compressed_folder import write_weights
from .gguf_file import (
    BASE_TYPE,
    TYPES,
    WeightToWrite,
    export_adapter,
    export_model,
    llama_cpp,
    read_base_architecture,
    refuse_model,
    tokenizer_keys,
)
from .llama_quantize import QUANTISED_TYPES, find_program, quantise_file
from .loaded import LoadedRun, find_result, load_run
from .merge import build_plain_model, merge, merged_dtype, refuse_unmergeable
from .ollama import CONVERTED, modelfile, write_for_converter
from .run_weights import RunWeights, is_tied

COMPRESSED = "compressed-tensors"
Export = tuple[dict[str, Any], list[str]]  # (what `--json` prints, the lines for the terminal)


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
    to      vllm, gguf, ollama or compressed-tensors
    name    the adapter's name in vLLM, or the model's name in Ollama
    kind    the format of compressed-tensors. For GGUF, it is the type of the whole model, or `base`
            for the types that the base's GGUF file has. llama-quantize writes the types in
            QUANTISED_TYPES. If `kind` is None, only the adapter is written to a GGUF file; a model
            without an adapter is written in the type that keeps its values
    load    a function that loads the run for a merge
    Raises  UsageError
    """
    result = _find_result_folder(run)
    has_adapter = (result / ADAPTER_CONFIG_FILE).is_file()
    if to == "vllm":
        return _export_to_vllm(run, result, out, name)
    if to == COMPRESSED:
        return _export_compressed(run, result, out, kind, load)
    if to == "gguf" and has_adapter and kind is None:
        layers = export_adapter(result, out)
        serve = f"llama-server -m BASE.gguf --lora {out}"
        lines = [f"exported  {layers} layers to {out}", f"serve     {serve}"]
        return {"file": str(out), "layers": layers}, lines
    base = str(result)
    if has_adapter:
        base = read_base_name(result)
    if kind is not None:
        kind = _parse_type(kind, run, result, base)
    tokenizer = result if (result / "tokenizer_config.json").is_file() else base
    config = read_base_architecture(base)
    uses_converter = to == "ollama" and (config.architectures or ["?"])[0] in CONVERTED
    if uses_converter and kind is not None:
        raise UsageError(
            f"--type has no effect for {config.model_type}, which Ollama converts",
            fix="ollama create --quantize q8_0",
        )
    if not uses_converter:
        import_module("gguf")  # a missing package is reported before the merge
        if kind in QUANTISED_TYPES:
            find_program(kind)
        command = _conversion_command(run, result, kind or "F16")
        refuse_model(config, command)
        tokenizer_keys(tokenizer, config.vocab_size, command)
    content = ""
    if to == "ollama":
        content = modelfile(tokenizer, "." if uses_converter else "./model.gguf")
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".merged-") as temporary:
        folder = result
        weights = None
        if has_adapter and uses_converter:
            folder = Path(temporary) / "model"
            merge(load(run), folder)
        elif has_adapter:
            folder = Path(temporary)
            weights = _merge_lazily(load(run), folder, kind)
        kind = kind or _lossless_type(folder)
        write = _select_writer(folder, kind, weights, base)
        if to == "gguf":
            tensors = write(out)
            facts = {"file": str(out), "tensors": tensors, "type": kind}
            return facts, [f"exported  {tensors} tensors in {_type_text(kind)} to {out}"]
        _write_ollama_folder(folder, out, content, None if uses_converter else write)
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


def _export_compressed(
    run: Path, result: Path, out: Path, kind: str | None, load: Callable[[Path], LoadedRun]
) -> Export:
    """Writes a folder in a format of compressed-tensors. Without `kind`, the format is the one for
    which the run was trained, or the one in which its base was published.
    """
    if not (result / ADAPTER_CONFIG_FILE).is_file():
        raise UsageError(
            f"{run}: --to {COMPRESSED} writes the result of a run with an adapter",
            fix="llm-compressor quantises a whole model",
        )
    formats = " or ".join(COMPRESSED_FORMATS)
    if kind is not None and kind.lower() not in COMPRESSED_FORMATS:
        raise UsageError(f"--type {kind}: expected {', '.join(COMPRESSED_FORMATS)}")
    loaded = load(run)
    name = (kind or loaded.precision.served or loaded.precision.base).lower()
    if name not in COMPRESSED_FORMATS:
        raise UsageError(
            f"{run}: its base was not published in a format that can be written; expected --type"
            f" {formats}",
            fix="--type fp8",
        )
    weights = RunWeights(loaded)
    if weights.served is not None and weights.served.name == name:
        served = weights.served
    else:
        served = ServedFormat(name, loaded.model, weights.trained_values)
    dtype, _ = merged_dtype(loaded.precision, loaded.model)
    counts: list[int] = []

    def write_contents(folder: Path) -> None:
        skipped = _write_settings(loaded, weights, folder)
        counts.append(write_weights(folder, weights, served, dtype, skipped=skipped))

    write_folder(out, write_contents, next_action="export again")
    command = f"vllm serve {out}"
    facts = {"folder": str(out), "format": name, "layers": counts[0], "command": command}
    lines = [f"exported  {counts[0]} layers in {name} to {out}", f"serve     {command}"]
    return facts, lines


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


def _parse_type(kind: str, run: Path, result: Path, base: str) -> str:
    """Returns the type of `--type` in its usual spelling. Raises UsageError for a type that cannot
    be written."""
    if kind.lower() == BASE_TYPE:
        if gguf_file(base) is None:
            raise UsageError(
                f"--type {BASE_TYPE}: {base} is no GGUF file", fix=f"--type {' or '.join(TYPES)}"
            )
        return BASE_TYPE
    if kind.upper() not in (*TYPES, *QUANTISED_TYPES):
        raise UsageError(
            f"--type {kind}: expected {', '.join((*TYPES, *QUANTISED_TYPES))}",
            fix=_conversion_command(run, result, kind),
        )
    return kind.upper()


def _select_writer(
    folder: Path, kind: str, weights: dict[str, WeightToWrite] | None, base: str
) -> Callable[[Path], int]:
    """Returns the function that writes a GGUF file of a type to a path."""
    if kind in QUANTISED_TYPES:
        return partial(_write_quantised, folder, kind=kind, weights=weights)
    base_file = gguf_file(base) if kind == BASE_TYPE else None
    return partial(export_model, folder, kind=kind, weights=weights, base=base_file)


def _write_quantised(
    folder: Path, out: Path, *, kind: str, weights: dict[str, WeightToWrite] | None
) -> int:
    """Writes a model in a type of llama-quantize, and returns the number of its tensors.

    The program reads an F16 file, which is written beside `out` and removed afterwards. In a test
    with an adapter that changes the weights only a little, F16 kept the whole change, and BF16 lost
    5.7% of its effect on the loss.
    """
    program = find_program(kind)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".quantise-") as temporary:
        source = Path(temporary) / "f16.gguf"
        quantised = Path(temporary) / out.name
        tensors = export_model(folder, source, "F16", weights)
        quantise_file(program, source, quantised, kind)
        quantised.replace(out)
    return tensors


def _type_text(kind: str) -> str:
    return "the types of the base" if kind == BASE_TYPE else kind


def _write_ollama_folder(
    model: Path, out: Path, modelfile_text: str, write: Callable[[Path], int] | None
) -> None:
    """Writes weights and Modelfile.

    write  a function that writes a GGUF file. None means that the safetensors files are copied for
           Ollama's converter
    """

    def write_contents(folder: Path) -> None:
        if write is None:
            ignore = shutil.ignore_patterns("DONE")
            shutil.copytree(model, folder, dirs_exist_ok=True, ignore=ignore)
            write_for_converter(folder)
        else:
            write(folder / "model.gguf")
        (folder / "Modelfile").write_text(modelfile_text, encoding="utf-8")

    write_folder(out, write_contents, next_action="export again")


def _merge_lazily(run: LoadedRun, folder: Path, kind: str | None) -> dict[str, WeightToWrite]:
    """Writes the configuration and the tokenizer of a run's merged model into `folder`. Returns its
    weights, each of which is computed in fp32 when it is read.

    kind  the GGUF type of the file. A run that was trained for this type gets the weights before
          their rounding, because the writer rounds them in the same way
    """
    weights = RunWeights(run)
    skipped = _write_settings(run, weights, folder)
    is_served = weights.served is not None
    is_served_type = kind is not None and kind == GGUF_FORMATS.get(run.precision.served)
    read = weights.unrounded if is_served_type else weights.trained
    return {
        name: WeightToWrite(
            weights.shape(name), partial(read, name), is_served or name in weights.changed_names
        )
        for name in weights.parameters
        if name != skipped
    }


def _write_settings(run: LoadedRun, weights: RunWeights, folder: Path) -> str | None:
    """Writes the configuration and the tokenizer of a run's merged model. Returns the name of the
    head if it shares the embedding's weight and is therefore not stored.
    """
    refuse_unmergeable(weights.inner)
    dtype, _ = merged_dtype(run.precision, run.model)
    plain = build_plain_model(run, weights.inner, dtype)
    plain.config.architectures = [type(plain).__name__]
    plain.config.save_pretrained(folder)
    plain.generation_config.save_pretrained(folder)
    tied = is_tied(weights)
    write_config(folder, to_torch(dtype), tied=tied)
    run.tokenizer.save_pretrained(str(folder))
    names = embedding_and_head(plain)
    return names[1] if tied and names is not None else None
