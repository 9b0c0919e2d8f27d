"""Opens the files of a model or adapter: a folder of Hugging Face, a folder of PEFT, a safetensors
file or a GGUF file. Only headers and settings are read. Imports no torch, except for GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ...config.kind import PIPELINE_FILE
from ...config.sources import is_lfs_pointer, lfs_fix
from ...errors import UsageError
from ...model.adapter_settings import ADAPTER_CONFIG_FILE
from ...precision.safetensors_header import check_positions, read_safetensors_header
from ...runs.value_limits import parse_json

MODEL = "model"
ADAPTER = "adapter"
SAFETENSORS = "safetensors file"
GGUF = "GGUF file"
CONFIG_FILE = "config.json"
_FETCH_AGAIN = "get the file again from where it came"
_MAX_SETTINGS_BYTES = 32 << 20  # largest size of a JSON file of settings
# the files of weights in the order in which transformers and diffusers look for them
_FILE_STEMS = {MODEL: ("model", "diffusion_pytorch_model"), ADAPTER: ("adapter_model",)}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")  # endings of files that contain pickles


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    dtype       Isotype's name of the dtype (`bf16`); for a tensor of a GGUF file, the kind as ggml
                writes it, such as `BF16` or the kind of blocks `Q4_K`
    shape       the shape in the file; for GGUF blocks, the shape of the values
    offset      the position of its first byte in the file
    size_bytes  the number of bytes of the tensor in the file
    row_bytes   the number of bytes of one row in a GGUF file; 0 in other files, and for kinds that
                cannot be decoded
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int
    row_bytes: int = 0

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass
class Checkpoint:
    """Describes the files of a model or adapter, without their weights.

    kind         MODEL, ADAPTER, SAFETENSORS or GGUF
    tensors      the tensors by their names
    settings     the content of the JSON files of a folder, by the name of the file
    metadata     the texts in the headers of safetensors files
    fields       the settings in the header of a GGUF file
    stale_files  files of weights in the folder that the index does not name
    missing_index  whether the weights are in several files without an index
    duplicates   names of tensors that two files have
    """

    path: Path
    kind: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    stale_files: list[str] = field(default_factory=list)
    missing_index: bool = False
    duplicates: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return self.settings.get(CONFIG_FILE, {})

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()})


def is_checkpoint(path: Path) -> bool:
    """Returns True for the path of a model, an adapter, a safetensors file or a GGUF file."""
    if path.is_dir():
        if (path / ADAPTER_CONFIG_FILE).is_file():
            return True
        has_weights = any(path.glob("*.safetensors"))
        return has_weights and (path / CONFIG_FILE).is_file()
    return path.is_file() and path.suffix in (".safetensors", ".gguf")


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder or file. Raises UsageError for a path that is no model or adapter, and for a
    damaged file.
    """
    path = path.expanduser()
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.is_file():
        return _open_file(path)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not (path / CONFIG_FILE).is_file():
        if len(ggufs) > 1:
            raise UsageError(
                f"{path}: {len(ggufs)} GGUF files", fix=f"isotype inspect {ggufs[0]}, for example"
            )
        return _open_gguf(ggufs[0])
    return _open_folder(path)


def _open_file(path: Path) -> Checkpoint:
    _refuse_pointer(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix == ".safetensors":
        checkpoint = Checkpoint(path, SAFETENSORS)
        _add_file(checkpoint, path)
        return checkpoint
    if path.suffix in _PICKLES:
        raise UsageError(
            f"{path}: a pickle, which can run code when it is opened",
            fix="the same weights as .safetensors: model.save_pretrained(FOLDER) writes them",
        )
    raise UsageError(
        f"{path}: not a format of weights",
        fix="a folder of Hugging Face or PEFT, a .safetensors file or a .gguf file",
    )


def _refuse_pointer(path: Path) -> None:
    if is_lfs_pointer(path):
        raise UsageError(
            f"{path}: a Git LFS pointer, without the content of the file", fix=lfs_fix(path)
        )


def _open_gguf(path: Path) -> Checkpoint:
    from ...model.gguf_header import read_header

    _refuse_pointer(path)
    try:
        header = read_header(path, with_lists=True)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: no whole GGUF file: {error}", fix=_FETCH_AGAIN) from None
    tensors = {
        name: StoredTensor(
            name, entry.kind, entry.shape, path, entry.offset, entry.size, entry.row_bytes
        )
        for name, entry in header.tensors.items()
    }
    if not tensors:
        raise UsageError(f"{path}: a GGUF file without tensors", fix=_FETCH_AGAIN)
    return Checkpoint(path, GGUF, tensors, fields=header.fields)


def _open_folder(path: Path) -> Checkpoint:
    kind = ADAPTER if (path / ADAPTER_CONFIG_FILE).is_file() else MODEL
    checkpoint = Checkpoint(path, kind)
    _refuse_other_folder(path)
    for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE, "generation_config.json"):
        if (path / name).is_file():
            checkpoint.settings[name] = read_settings(path / name)
    for file in _weight_files(checkpoint):
        _refuse_pointer(file)
        _add_file(checkpoint, file)
    return checkpoint


def _refuse_other_folder(path: Path) -> None:
    """Raises UsageError for a folder without weights that can be read. The message suggests the
    path that the user may have meant.
    """
    if (path / PIPELINE_FILE).is_file():
        parts = [part.name for part in sorted(path.iterdir()) if is_checkpoint(part)]
        raise UsageError(
            f"{path}: a pipeline of diffusers, which has several models",
            fix=f"isotype inspect {path}/PART, with one of: {', '.join(parts)}",
        )
    if any(path.glob("*.safetensors")):
        return
    for name in ("adapter", "model"):
        if is_checkpoint(path / name):
            raise UsageError(f"{path}: the folder of a run", fix=f"isotype inspect {path / name}")
    pickles = [file.name for file in sorted(path.iterdir()) if file.suffix in _PICKLES]
    if pickles:
        raise UsageError(
            f"{path}: its weights are in {pickles[0]}, a pickle, which can run code when it is"
            " opened",
            fix="the same weights as .safetensors: model.save_pretrained(FOLDER) writes them",
        )
    if not any(path.iterdir()):
        raise UsageError(f"{path}: the folder is empty", fix="the folder that holds the weights")
    raise UsageError(
        f"{path}: no .safetensors file and no .gguf file there",
        fix="the folder that holds the weights",
    )


def read_settings(file: Path) -> dict[str, Any]:
    """Reads a JSON file of settings. Raises UsageError for a file that is no JSON object."""
    try:
        if file.stat().st_size > _MAX_SETTINGS_BYTES:
            raise ValueError(f"it has more than {_MAX_SETTINGS_BYTES:,} bytes")
        settings = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: {error}", fix=_FETCH_AGAIN) from None
    return settings


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Returns the files of weights that transformers loads, and records the files that it ignores."""
    folder = checkpoint.path
    all_files = sorted(folder.glob("*.safetensors"))
    for stem in _FILE_STEMS[checkpoint.kind]:
        index = folder / f"{stem}.safetensors.index.json"
        single = folder / f"{stem}.safetensors"
        parts = [file for file in all_files if file.name.startswith(f"{stem}-")]
        if single.is_file():
            files = [single]
        elif index.is_file():
            files = _indexed_files(index)
        elif parts:
            files = parts
            checkpoint.missing_index = True
        else:
            continue
        checkpoint.stale_files = [file.name for file in parts if file not in files]
        return files
    return all_files


def _indexed_files(index: Path) -> list[Path]:
    """Returns the files that an index names. Raises UsageError for a file that does not exist."""
    weight_map = read_settings(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index}: weight_map: not a mapping of tensors", fix=_FETCH_AGAIN)
    files = []
    for name in sorted({str(name) for name in weight_map.values()}):
        file = index.parent / name
        if Path(name).name != name:
            raise UsageError(f"{index}: weight_map: {name!a:.60}: not a file of this folder")
        if not file.is_file():
            tensors = [tensor for tensor, owner in weight_map.items() if owner == name]
            raise UsageError(
                f"{index}: weight_map: {tensors[0]} is in {name}, which does not exist"
                f" ({len(tensors)} tensors)",
                fix=f"fetch {name} from where the folder came",
            )
        files.append(file)
    return files


def _add_file(checkpoint: Checkpoint, file: Path) -> None:
    """Adds the tensors of a safetensors file. Raises UsageError for a damaged file."""
    try:
        header = read_safetensors_header(file)
        check_positions(file, header.tensors.items())
    except (OSError, ValueError) as error:
        message = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{file}: no whole safetensors file: {message}", fix=_FETCH_AGAIN
        ) from None
    if not header.tensors:
        raise UsageError(f"{file}: a safetensors file without tensors", fix=_FETCH_AGAIN)
    checkpoint.metadata |= header.metadata
    for name, entry in header.tensors.items():
        if name in checkpoint.tensors:
            checkpoint.duplicates.append(name)
        checkpoint.tensors[name] = StoredTensor(
            name, entry.dtype_name, entry.shape, file, entry.offset, entry.size
        )
