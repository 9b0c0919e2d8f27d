"""Checks before the first step that every process has the same versions, configuration, data,
weights and run folder.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from contextlib import suppress
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn

from ..config.schema import RunConfig
from ..errors import UsageError
from .world import World

SAMPLED_ELEMENTS = 64  # number of elements of each tensor that are hashed
# seconds that the other processes wait to see a file of the first process, because network folders
# show new files late
SHARED_FOLDER_TIMEOUT = 10.0

COMPARED_PACKAGES = (
    "isotype", "torch", "transformers", "peft", "bitsandbytes", "numpy", "tokenizers", "diffusers", "accelerate", "safetensors",
)  # fmt: skip
MODEL_SETTINGS = "settings of the model"

# what differs between the processes -> what the user can do
_FIXES = {
    "versions": "install the same versions on every machine: isotype doctor env shows them",
    "configuration": "give every process the same file and settings",
    MODEL_SETTINGS: "the same config.json on every machine, or model.revision: COMMIT",
    "data": "the same files on every machine: compare their checksums",
    "weights": "the same model folder on every machine, or model.revision: COMMIT",
}


def refuse_differences(world: World, **facts: str) -> None:
    """Compares the texts in `facts` with those of rank 0. Raises a UsageError that names the ranks
    whose texts differ.

    facts  a text with the values of this process for each of the names `versions`, `configuration`,
           `data`, `weights` and MODEL_SETTINGS
    """
    facts_of_first: dict[str, str] = world.run_on_first(lambda: facts)
    differences = {
        name: _first_difference(name, text, facts_of_first[name])
        for name, text in facts.items()
        if text != facts_of_first[name]
    }
    reports = world.gather([socket.gethostname(), differences])
    for name in facts:
        ranks = [
            rank
            for rank, (_, differences_of_rank) in enumerate(reports)
            if name in differences_of_rank
        ]
        if ranks:
            host, differences_of_rank = reports[ranks[0]]
            raise UsageError(
                f"rank {', '.join(map(str, ranks))} ({host}) and rank 0 ({reports[0][0]}) have"
                f" different {name}{differences_of_rank[name]}",
                fix=_FIXES[name],
            )


def _first_difference(name: str, text: str, text_of_first: str) -> str:
    """Returns the first line in which two texts differ, for the message. Returns "" if the texts
    are hashes.
    """
    if name not in ("versions", "configuration", MODEL_SETTINGS):
        return ""
    lines = zip_longest(text.splitlines(), text_of_first.splitlines(), fillvalue="")
    return next(f": {theirs} and {ours}" for theirs, ours in lines if theirs != ours)


def refuse_folder_of_another_machine(world: World, folder: Path) -> None:
    """Raises UsageError if a process does not find the file that the first process writes to
    `folder`.
    """
    if world.size == 1:
        return
    file = folder / ".seen_by_all"
    if world.is_first:
        file.write_text(secrets.token_hex(8))
    sees = _wait_for_file(file, world.run_on_first(file.read_text))
    everyone = world.gather([sees, socket.gethostname()])
    if world.is_first:
        file.unlink(missing_ok=True)
    ranks_without_file = [
        f"rank {rank} on {host}" for rank, (sees_file, host) in enumerate(everyone) if not sees_file
    ]
    if ranks_without_file:
        raise UsageError(
            f"run.folder: {folder} is not the same folder for {ranks_without_file[0]} as for rank 0 on"
            f" {everyone[0][1]}",
            fix="give a folder that all machines share: --out FOLDER",
        )


def fingerprint_of_weights(model: nn.Module) -> str:
    """Hashes some elements of every parameter. Returns the hash. The hash is different if the
    weights come from another model file or from another seed.
    """
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        flat = p.detach().flatten()
        sampled_elements = (
            flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS].cpu().contiguous()
        )
        digest.update(f"{name} {p.dtype} {list(p.shape)}".encode())
        digest.update(sampled_elements.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def versions() -> str:
    """Lists the versions of the packages that influence the numeric results of a run, one per line.
    A line looks like `torch 2.13.0`.
    """
    return version_lines(*COMPARED_PACKAGES)


def version_lines(*packages: str) -> str:
    """Returns a text with the name and version of each of the given packages, one per line.
    Packages that are not installed are left out.
    """
    lines: list[str] = []
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            lines.append(f"{name} {metadata.version(name)}")
    return "\n".join(lines)


def configuration_lines(config: RunConfig) -> str:
    """Lists every key that must be the same in all processes, with its value, one per line."""
    return "\n".join(
        f"{section}.{key}: {value!r}"
        for section, values in config.model_dump().items()
        for key, value in values.items()
        if (section, key) != ("parallel", "timeout")
    )


def _wait_for_file(file: Path, text: str) -> bool:
    deadline = time.monotonic() + SHARED_FOLDER_TIMEOUT
    while True:
        with suppress(OSError):
            if file.read_text() == text:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
