"""Manages the folder of a run. This module locks the folder for one process, replaces its small
files atomically, and checks folders from an untrusted source.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from ..config.load import LoadedConfig, load
from ..config.schema import RunConfig
from ..config.sources import first_source_name
from ..errors import UsageError
from .checkpoint.atomic_folder import write_text
from .value_limits import MAX_BYTES, parse_json

RESOLVED = "resolved.yaml"
LOG = "log.txt"  # the printed output of the run and of all its resumed parts


def default_run_name(config: RunConfig) -> str:
    """Returns the name `MODEL-DATA-TIME`, in characters that every file system accepts."""
    model = config.model.name or str(
        (config.model.config or {}).get("model_type", "model")
        if isinstance(config.model.config, dict)
        else "model"
    )
    parts = [
        Path(model).name,
        Path(first_source_name(config.data.train or config.images.train)).stem,
        time.strftime("%Y%m%d-%H%M%S"),
    ]
    return "-".join(
        "".join(
            character if character.isalnum() or character in "._" else "-" for character in part
        )
        for part in parts
    )


class RunFolder:
    """Gives access to the paths and the small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.base = path / "base"
        self.adapters = path / "adapters"
        self.metrics = path / "metrics.jsonl"

    @property
    def is_run(self) -> bool:
        return os.path.isfile(self.path / RESOLVED)  # False for a name that is too long

    def adapter_steps(self) -> list[int]:
        """Returns the steps of `adapters/step_N`, in order."""
        steps = (folder.name.removeprefix("step_") for folder in self.adapters.glob("step_*"))
        return sorted(int(step) for step in steps if step.isdecimal())

    def write_json(self, name: str, content: Any) -> None:
        write_text(self.path / name, json.dumps(content, indent=1, default=str) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the JSON object in a file of the run. The result is empty if the file cannot be
        read or does not contain a JSON object.
        """
        try:
            content = parse_json(read_inside(self.path, self.path / name))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write_text(self, name: str, text: str) -> None:
        write_text(self.path / name, text)

    def write_samples(
        self, step: int, samples: Sequence[tuple[dict[str, Any], tuple[str, bytes] | None]]
    ) -> list[dict[str, Any]]:
        """Writes the samples of one step. Each sample is a dictionary and, if the sample has a
        file, the suffix and the bytes of this file. Returns the dictionaries of all samples. If a
        sample has a file, the name of the file is added to its dictionary.
        """
        self.samples.mkdir(exist_ok=True)
        rows = []
        for position, (facts, file) in enumerate(samples):
            if file is not None:
                facts = {**facts, "file": f"samples/step_{step}_{position}{file[0]}"}
                (self.path / facts["file"]).write_bytes(file[1])
            rows.append(facts)
        self.write_json(f"samples/step_{step}.json", {"step": step, "samples": rows})
        return rows

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the folder for this process. If no run begins and the folder stays empty, the
        folders that were created for it are removed again.

        Raises  UsageError if another run uses the folder, if it is not writable, or if a link in it
                leads outside
        """
        created_folders = [
            path for path in (self.path, *self.path.parents) if not os.path.lexists(path)
        ]
        created_lock = not os.path.lexists(self.path / LOCK)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_unsafe_entries(self.path)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except UsageError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or error
            if self.is_run:
                fix = "make it writable, or resume a copy of it"
            else:
                fix = "give a folder that can be written: --out FOLDER"
            raise UsageError(f"run.folder: {str(self.path)[:200]!r}: {reason}", fix=fix) from None
        try:
            acquire_lock(lock, self.path)
            # On a full disk the process id is not recorded. The run itself reports the full disk.
            with suppress(OSError):
                os.truncate(lock, 0)
                os.write(lock, str(os.getpid()).encode())
            try:
                yield
            finally:
                if created_lock and not self.is_run:
                    self._remove_created(created_folders)
        finally:
            os.close(lock)  # this also releases the lock, as a kill does

    def _remove_created(self, created_folders: list[Path]) -> None:
        """Removes the lock file if the folder holds nothing else, then the empty folders among
        `created_folders`, the innermost first.
        """
        with suppress(OSError):
            if not set(os.listdir(self.path)) - {LOCK}:
                os.unlink(self.path / LOCK)
                for path in created_folders:
                    path.rmdir()


def open_inside(folder: Path, path: Path, *, max_bytes: int | None = None) -> IO[bytes]:
    """Opens a file of a run folder from an untrusted source. No file outside the folder is opened.

    Raises  OSError for a link that leads out of the folder, for a pipe or a device, and for a file
            of more than `max_bytes`; the folder itself may be a link
    """
    resolved = path.resolve()
    if not resolved.is_relative_to(folder.resolve()):
        raise OSError(errno.ELOOP, "a link out of the run's folder: not followed", str(path))
    # does not follow a link that replaced the file meanwhile, and does not wait for a pipe
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # not every system has them
        flags |= getattr(os, name, 0)
    handle = os.open(resolved, flags)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        os.close(handle)
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB", str(path))
    return os.fdopen(handle, "rb")


def read_inside(folder: Path, path: Path) -> str:
    """Returns the text of a file of a run folder, opened by `open_inside`."""
    with open_inside(folder, path, max_bytes=MAX_BYTES) as file:
        return file.read(MAX_BYTES).decode("utf-8", "replace")


def require_run(path: Path) -> Path:
    """Returns the folder if it holds a run. Otherwise raises UsageError, which suggests a run with
    a similar name.
    """
    if (path / RESOLVED).is_file():
        return path
    if path.parent.is_dir():
        sibling_runs = [file.parent.name for file in path.parent.glob(f"*/{RESOLVED}")]
    else:
        sibling_runs = []
    nested_runs = (
        sorted(file.parent for file in path.glob(f"*/{RESOLVED}")) if path.is_dir() else []
    )
    similar = get_close_matches(path.name, sibling_runs, n=1)
    if not path.exists():
        complaint = "no such folder"
    elif nested_runs:
        complaint = f"holds runs, but is none: {', '.join(str(run) for run in nested_runs[:4])}"
    else:
        complaint = (
            f"no {RESOLVED} there: not a run folder, or a run that stopped before its first step"
        )
    adapter = next(
        (
            folder
            for folder in (path, path / "adapter")
            if (folder / "adapter_config.json").is_file()
        ),
        None,
    )
    if adapter is not None and not nested_runs:
        raise UsageError(
            f"{path}: {complaint}; {adapter} is a PEFT adapter",
            fix=f"PeftModel.from_pretrained(base, {str(adapter)!r}) loads it, without a run",
        )
    if similar:
        fix = f"did you mean {path.parent / similar[0]}?"
    else:
        fix = f"isotype ls {path.parent if path.parent.is_dir() else '.'} lists the runs"
    raise UsageError(f"{path}: {complaint}", fix=None if nested_runs else fix)


def split_run_and_adapter(path: Path) -> tuple[Path, Path | None]:
    """Returns the run's folder and, if `path` is an adapter that the run wrote during training
    (`RUN/adapters/step_N`), the adapter's folder.
    """
    run = path.absolute().parent.parent
    is_intermediate_adapter = path.absolute().parent.name == "adapters" and RunFolder(run).is_run
    return (run, path) if is_intermediate_adapter else (path, None)


def locate_base(name: str, saved: Path) -> str:
    """Returns the path of a base model whose name may be relative to the folder in which its run
    was trained. A command may be started in another folder. Names of the hub and names of other
    folders are returned unchanged.

    saved  the folder of the run, or of an adapter in it
    """
    saved = Path(os.path.abspath(saved))
    run = next((path for path in (saved, *saved.parents[:2]) if RunFolder(path).is_run), None)
    if run is None or Path(name).expanduser().is_absolute():
        return name
    return _locate_relative(name, run, load(run / RESOLVED, resolved=True).config)


def with_located_base(config: RunConfig, run: Path) -> RunConfig:
    """Returns the configuration of the run in the folder `run`, in which `model.name` is the result
    of `locate_base`.
    """
    name = config.model.name
    if name is None or Path(name).expanduser().is_absolute():
        return config
    name = _locate_relative(name, Path(os.path.abspath(run)), config)
    return config.model_copy(update={"model": config.model.model_copy(update={"name": name})})


def _locate_relative(name: str, run: Path, config: RunConfig) -> str:
    """Returns the path of a base with a relative name, or the name if no such path exists."""
    start = _folder_of_training(run, config)
    if start is None or start == Path.cwd():
        return name
    base = start / name
    return str(base) if base.exists() else name


def _folder_of_training(run: Path, config: RunConfig) -> Path | None:
    """Returns the working directory in which a run was started; None if it is not known.

    It is the part of the run's path that precedes `run.folder`. So the result is correct after the
    folder with both run and base was moved, too. If `run.folder` is absolute, the directory is read
    from env.json.
    """
    setting = Path(config.run.folder.replace("{name}", "*"))
    if setting.is_absolute():
        folder = RunFolder(run).read_json("env.json").get("folder")
        return Path(folder) if isinstance(folder, str) and os.path.isabs(folder) else None
    if not run.match(str(setting)):
        return None
    return Path(*run.parts[: -len(setting.parts)])


def detect_run_kind(path: Path) -> str:
    """Returns the kind of the run, from its plan.json. A run of an older version, whose plan.json
    names no kind, is `language`.
    """
    return str(
        RunFolder(split_run_and_adapter(path)[0]).read_json("plan.json").get("task", "language")
    )


def detect_model_folder(path: Path) -> str | None:
    """Returns `adapter` for the folder of a PEFT adapter, `model` for the folder of a Hugging Face
    model; None for a run and for other folders.
    """
    if (path / RESOLVED).is_file() or split_run_and_adapter(path)[1] is not None:
        return None
    config_files = {"adapter": "adapter_config.json", "model": "config.json"}
    return next((kind for kind, file in config_files.items() if (path / file).is_file()), None)


def refuse_non_empty(out: Path) -> None:
    """Raises UsageError if the folder `out`, which is to be written, already has files or is a
    file.
    """
    if out.is_file():
        raise UsageError(f"{out}: is a file", fix="--out another folder")
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out}: not empty", fix="--out another folder")


LOCK = ".lock"


def acquire_lock(handle: int, path: Path) -> None:
    """Locks the run folder `path`, whose lock file is open as `handle`. Raises UsageError if
    another process has the lock, or has just released the lock and removed the lock file.
    """
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_acquired = os.fstat(handle).st_nlink > 0
    except OSError:
        is_acquired = False
    if not is_acquired:
        raise UsageError(
            f"run.folder: {path} is in use by another run",
            fix="wait for it, or give another folder: --out FOLDER",
        )


def is_locked(path: Path) -> bool:
    """Returns True if a process trains in this folder now."""
    try:
        import fcntl

        # does not wait for a pipe of that name
        handle = os.open(path / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def find_training_process(path: Path) -> int | None:
    """Returns the id of the process that trains in this folder now. Returns None if no process
    trains in this folder, or if the process belongs to another machine, container or user.

    The number in the lock file counts only if the process with that id has the file open.
    """
    if not is_locked(path):
        return None
    lock = path / LOCK
    try:
        process = int(lock.read_text(encoding="ascii"))
        open_files = os.listdir(f"/proc/{process}/fd")
    except (OSError, ValueError):
        return None
    for handle in open_files:
        with suppress(OSError):  # closed meanwhile
            if os.path.samefile(f"/proc/{process}/fd/{handle}", lock):
                return process
    return None


TRUST_VARIABLE = "ISOTYPE_TRUST_REMOTE_CODE"


def refuse_remote_code(loaded: LoadedConfig, folder: Path) -> None:
    """Raises UsageError if the run's configuration file says `trust_remote_code: true` and the user
    has not confirmed it for this command.
    """
    if (
        not loaded.config.model.trust_remote_code
        or os.environ.get(TRUST_VARIABLE) == "1"
        or "model.trust_remote_code" in loaded.command_line_keys
    ):
        return
    raise UsageError(
        f"{folder}: its model {loaded.config.model.name} brings its own code, and a run folder"
        " cannot consent to running it",
        fix=(
            f"if you trust both: {TRUST_VARIABLE}=1 isotype ..., or model.trust_remote_code=true with"
            " --resume"
        ),
    )


def refuse_unsafe_entries(folder: Path) -> None:
    """Raises UsageError if the folder holds a link that leads outside, a pipe, a device or a socket.

    A run would write outside the folder through the link, or wait for the pipe forever. The folder
    itself may be a link.
    """
    root = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UsageError(
                    f"{path}: a link out of the run's folder, to {os.readlink(path)}: nothing is"
                    " written through it",
                    fix="put the files themselves there, or make the whole run folder a link",
                )
            if not path.is_file() and not path.is_dir() and path.exists():
                raise UsageError(f"{path}: neither a file nor a folder", fix="remove it")
