"""Uploads the result of a finished run to a repository of the hub (`run.push_to_hub`).

Missing permissions are found before the run. If the upload fails, the run is still finished, and
the message has the command that repeats the upload.
"""

from __future__ import annotations

import shlex
import tempfile
from contextlib import ExitStack
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from ..config.kind import DIFFUSION, detect_run_kind
from ..config.schema import RunConfig
from ..errors import IsotypeError, UsageError
from ..model.card import merged_card, plain_card
from ..report.record import read_run
from ..runs.folder import RunFolder

HUB_FILE = "hub.json"  # file in the run folder that names the run's repository


def check_push(config: RunConfig, resumed_folder: Path | None) -> str | None:
    """Checks the settings of the upload before the run. Returns the full name of the repository, or
    None if nothing is uploaded.

    resumed_folder  the run folder of a resumed run
    Raises  UsageError for settings without effect, for a token that is missing, refused or
            read-only, and for a repository that exists and is not the run's
    """
    run = config.run
    if run.push_to_hub is None:
        if run.push_merged or not run.push_private:
            key = "push_merged: true" if run.push_merged else "push_private: false"
            raise UsageError(
                f"run.{key} has no effect without run.push_to_hub", fix="run.push_to_hub: ORG/NAME"
            )
        return None
    if run.push_merged and (config.adapter.kind == "none" or detect_run_kind(config) == DIFFUSION):
        if config.adapter.kind == "none":
            reason = "there is no adapter to merge"
        else:
            reason = "adapters of pictures are pushed as they are"
        raise UsageError(f"run.push_merged: {reason}", fix="leave it out: the result is pushed")
    setting = f"run.push_to_hub: {run.push_to_hub}"
    if get_token() is None:
        raise UsageError(
            f"{setting}: no token of the hub is here",
            fix="hf auth login, or HF_TOKEN=... with a token that may write",
        )
    api = HfApi()
    try:
        user = api.whoami()
        if "/" in run.push_to_hub:
            name = run.push_to_hub
        else:
            name = f"{user['name']}/{run.push_to_hub}"
        if (user.get("auth", {}).get("accessToken") or {}).get("role") == "read":
            raise UsageError(
                f"{setting}: the token may only read",
                fix="https://huggingface.co/settings/tokens makes one that may write",
            )
        previous_name = (
            RunFolder(resumed_folder).read_json(HUB_FILE).get("repository")
            if resumed_folder
            else None
        )
        if previous_name != name and api.repo_exists(name):
            raise UsageError(
                f"{setting}: {name} exists, and is not this run's: nothing of it is overwritten",
                fix="give another name",
            )
    except UsageError:
        raise
    except (HfHubHTTPError, ValueError) as error:  # ValueError: an invalid name
        fix = "a token that may write, and a name as ORG/NAME"
        raise UsageError(
            f"{setting}: {constants.ENDPOINT} said: {_shorten_error(error)}", fix=fix
        ) from None
    except Exception as error:  # errors of the HTTP library below the client
        raise UsageError(
            f"{setting}: {constants.ENDPOINT} cannot be reached: {_shorten_error(error)}",
            fix="check the network",
        ) from None
    return name


def push(folder: Path, config: RunConfig, name: str) -> str:
    """Uploads the result of the run in `folder`, and returns a line that reports success or
    failure. Raises nothing.
    """
    run = config.run
    result = next(path for path in (folder / "adapter", folder / "model") if path.is_dir())
    upload_folder = folder / "merged" if run.push_merged else result
    private_option = ["--private"] if run.push_private else []
    repeat_command = shlex.join(["hf", "upload", name, str(upload_folder), ".", *private_option])
    if run.push_merged:
        repeat_command = f"isotype merge {folder} && {repeat_command}"
    try:
        with ExitStack() as stack:
            if run.push_merged:
                result = _merge_adapter(
                    folder,
                    result,
                    Path(
                        stack.enter_context(
                            tempfile.TemporaryDirectory(dir=folder, prefix=".push-")
                        )
                    ),
                )
            api = HfApi()
            ignore_patterns = ["DONE"]
            commit_message = f"Trained by Isotype: {folder.name}"
            api.create_repo(name, private=run.push_private, exist_ok=True)
            RunFolder(folder).write_json(HUB_FILE, {"repository": name})
            if detect_run_kind(config) == DIFFUSION:
                record = read_run(folder)
                step = record.result.get("of_step")
                card = plain_card(
                    base=str(config.model.name),
                    data=record.data,
                    precision=record.precision,
                    step=step,
                ).encode()
                api.upload_file(
                    path_or_fileobj=card,
                    path_in_repo="README.md",
                    repo_id=name,
                    commit_message=commit_message,
                )
                ignore_patterns.append(
                    "README.md"
                )  # the README of the libraries, whose fields are empty
            api.upload_folder(
                folder_path=result,
                repo_id=name,
                ignore_patterns=ignore_patterns,
                commit_message=commit_message,
            )
    except Exception as error:  # a failed upload does not make the finished run fail
        return f"warning   not pushed to {name}: {_shorten_error(error)}; {repeat_command}"
    visibility = "private" if run.push_private else "public"
    return f"pushed    {result.name} to {constants.ENDPOINT}/{name}, {visibility}"


def _merge_adapter(folder: Path, adapter: Path, temporary: Path) -> Path:
    from .loaded import load_run
    from .merge import merge

    merged = merge(load_run(folder, as_served=False), temporary / "merged")
    card = merged_card(
        (adapter / "README.md").read_text(encoding="utf-8"), merged.dtype, merged.noise
    )
    (merged.folder / "README.md").write_text(card, encoding="utf-8")
    return merged.folder


def _shorten_error(error: Exception) -> str:
    text = error.message if isinstance(error, IsotypeError) else str(error)
    return " ".join(text.split())[:300] or type(error).__name__
