"""Sends each row of metrics.jsonl and each round of samples to the trackers of a run. The trackers
are TensorBoard and Weights & Biases.

A tracker must not change the results of a run, so the random state is restored after each call. If
a tracker fails, for example because of a full disk or a network failure, one line is printed and
the tracker is switched off.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config.yaml_text import write_value
from ..runs.checkpoint.atomic_folder import write_text
from ..wording import first_line
from .task import Sample, preserve_random_state

PrintLine = Callable[[str], None]  # prints one line of text to the terminal and the log
WANDB_ID_FILE = "wandb_id"
INIT_TIMEOUT = 30  # seconds to wait for the service before the run continues without it


class Trackers:
    """Opens the trackers of `run.trackers` in the run folder, and prints where each one writes.

    settings  the run's configuration as a dictionary of sections
    """

    def __init__(
        self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], print_line: PrintLine
    ) -> None:
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        self._print_line = print_line
        with preserve_random_state():
            for name in dict.fromkeys(names):
                tracker = (
                    TensorBoard(folder, settings)
                    if name == TensorBoard.name
                    else WeightsAndBiases(folder, settings, print_line)
                )
                self._trackers.append(tracker)
                print_line(f"tracker   {tracker.name}: {tracker.address}")

    def log_row(self, row: Mapping[str, Any]) -> None:
        """Sends the numbers of a row of metrics.jsonl."""
        prefix = "eval" if row.get("event") == "evaluation" else "train"
        values = {
            f"{prefix}/{key.removeprefix('eval_')}": float(value)
            for key, value in row.items()
            if key != "step" and isinstance(value, int | float)
        }
        if values:
            self._call_each(lambda tracker: tracker.log_scalars(int(row["step"]), values))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._call_each(lambda tracker: tracker.log_samples(step, samples))

    def close(self, exit_status: int) -> None:
        self._call_each(lambda tracker: tracker.close(exit_status))
        self._trackers.clear()

    def _call_each(self, call: Callable[[Any], None]) -> None:
        with preserve_random_state():
            for tracker in list(self._trackers):
                try:
                    call(tracker)
                except Exception as error:  # an error of a service must not stop the run
                    self._trackers.remove(tracker)
                    self._print_line(
                        f"tracker   {tracker.name} failed and is switched off: {first_line(error)}"
                    )


class TensorBoard:
    """Writes scalars with names such as `train/loss` and `eval/loss`. `address` is the command with
    which the user can view them.

    The file is opened when the first row is written. A resumed run tells TensorBoard the step of
    its first row, so that TensorBoard hides older points from this step on.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder / "tensorboard"
        self._settings = settings
        self._writer: Any = None
        self.address = f"tensorboard --logdir {folder}"

    def _open(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step if step else None)
            rows = [
                f"| {section}.{key} | {write_value(value)} |"
                for section, part in self._settings.items()
                for key, value in part.items()
            ]
            self._writer.add_text(
                "settings", "\n".join(["| key | value |", "|---|---|", *rows]), step
            )
        return self._writer

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a killed run keeps its curves

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for index, sample in enumerate(samples):
            # Markdown shows text that is indented by four spaces unchanged
            prompt, output = sample.lines()
            indented_output = "\n".join(
                "    " + line for line in (output or "(nothing)").splitlines()
            )
            self._open(step).add_text(
                f"samples/{index}", f"**{prompt}**\n\n{indented_output}", step
            )

    def close(self, exit_status: int) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Writes the step as a metric in each row. wandb's own step counter is not used, because it
    cannot go back to an earlier step when a run is resumed from a checkpoint.
    """

    name = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], print_line: PrintLine) -> None:
        import wandb

        self._wandb = wandb
        self._table = wandb.Table
        mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
        try:
            self._run = self._start(folder, settings, mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            print_line(f"tracker   wandb is not reached ({first_line(error)}): going on offline")
            mode = "offline"
            self._run = self._start(folder, settings, mode)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        write_text(folder / WANDB_ID_FILE, self._run.id + "\n")
        if mode == "online":
            self.address = str(self._run.url or "")
        else:
            self.address = f"{mode}, wandb sync {Path(self._run.dir).parent}"

    def _start(self, folder: Path, settings: Mapping[str, Any], mode: Any) -> Any:
        file = folder / WANDB_ID_FILE
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "isotype"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder),
            id=file.read_text(encoding="utf-8").strip() if file.is_file() else None,
            resume="allow",
            mode=mode,
            config=dict(settings),
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                init_timeout=INIT_TIMEOUT,
            ),
        )

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        records = [sample.to_dict() for sample in samples]
        columns = list(dict.fromkeys(key for record in records for key in record))
        rows = [[step, *[record.get(key) or "" for key in columns]] for record in records]
        self._run.log({"step": step, "samples": self._table(columns=["step", *columns], data=rows)})

    def close(self, exit_status: int) -> None:
        self._run.finish(exit_code=exit_status)


def has_wandb_key() -> bool:
    """Returns True if wandb would find an API key without asking the user. This function looks for
    the key in wandb's environment variable and in the netrc file.
    """
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
