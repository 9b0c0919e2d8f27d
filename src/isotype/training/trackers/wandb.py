"""Weights & Biases: online if a key is configured, else files in RUN/wandb, which `wandb sync` sends later.

`WANDB_MODE` and wandb's other variables have their usual effect. The id is stored in the run folder, so that a resumed run continues the
same curve.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...runs.checkpoint.atomic_folder import write_text
from ..task import Sample

ID = "wandb_id"
TIMEOUT = 30  # seconds to wait for the service before going on without it


class WeightsAndBiases:
    """Writes the step as a metric of each row, since wandb's own step counter cannot go back to the checkpoint of a resumed run."""

    name = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], say: Any) -> None:
        import wandb

        self._wandb, self._table = wandb, wandb.Table
        mode = os.environ.get("WANDB_MODE") or ("online" if key_is_known() else "offline")
        try:
            self._run = self._start(folder, settings, mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            say(f"tracker   wandb is not reached ({next(iter(str(error).splitlines()), '')}): going on offline")
            mode = "offline"
            self._run = self._start(folder, settings, mode)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        write_text(folder / ID, self._run.id + "\n")
        self.address = str(self._run.url or "") if mode == "online" else f"{mode}, wandb sync {Path(self._run.dir).parent}"

    def _start(self, folder: Path, settings: Mapping[str, Any], mode: Any) -> Any:
        file = folder / ID
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "isotype"), name=os.environ.get("WANDB_NAME", folder.resolve().name), dir=str(folder),
            id=file.read_text(encoding="utf-8").strip() if file.is_file() else None, resume="allow", mode=mode, config=dict(settings),
            settings=self._wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, init_timeout=TIMEOUT),
        )  # fmt: skip

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        made = [one.as_json() for one in samples]
        columns = list(dict.fromkeys(key for one in made for key in one))
        rows = [[step, *[one.get(key) or "" for key in columns]] for one in made]
        self._run.log({"step": step, "samples": self._table(columns=["step", *columns], data=rows)})

    def close(self, exit_status: int) -> None:
        self._run.finish(exit_code=exit_status)


def key_is_known() -> bool:
    """Whether wandb would find a key without asking: in its variable or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
