"""Prints the output of a run. In a terminal, the output consists of a header, a progress line that
is updated in place, the evaluations and the samples. If the output is not a terminal, only plain
lines are printed.

This module also handles the signals that end a run (Ctrl-C, SIGTERM, a closed terminal). It also
silences libraries that would print between the lines.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..wording import remove_control_characters
from .task import HeaderRows, MetricNames, Sample

# parts of the live line that are left out of a narrow terminal, the first one first
_OPTIONAL_PARTS = ("changed ", "grad ", "lr ")
PLAIN_PROGRESS_LINES = 60  # approximate number of progress lines of a run without a terminal


def format_duration(seconds: float) -> str:
    minutes, remaining_seconds = divmod(int(seconds + 0.5), 60)
    hours, remaining_minutes = divmod(minutes, 60)
    return (
        f"{hours}:{remaining_minutes:02d}:{remaining_seconds:02d}"
        if hours
        else f"{remaining_minutes}:{remaining_seconds:02d}"
    )


def format_progress(
    step: int, total: int, row: dict[str, Any], seconds_left: float | None, names: MetricNames
) -> str:
    """Returns the progress line of a step. An example:

    `step 12/200  loss 2.314  lr 2.0e-04  grad 0.83  changed 98%  3,120 tok/s  1.20 GB  ETA 0:42`
    """
    parts = [
        f"step {step}/{total}",
        f"loss {row['loss']:.4f}",
        f"lr {row['learning_rate']:.1e}",
        f"grad {row['grad_norm']:.3g}",
    ]
    parts[2:2] = [
        f"{name} {row[name]:.3g}" for name in names.live_line if row.get(name) is not None
    ]
    if row.get("share_changed") is not None:
        parts.append(f"changed {row['share_changed']:.0%}")
    parts.append(
        f"{row[f'{names.units}_per_second']:,.{0 if row[f'{names.units}_per_second'] >= 100 else 2}f}"
        f" {names.unit}/s"
    )
    if row.get("memory_bytes"):
        parts.append(f"{row['memory_bytes'] / 1e9:.2f} GB")
    if row.get("promotions"):
        parts.append(f"{row['promotions']} promotions")
    if row.get("overflow"):
        parts.append(f"overflow at loss scale {row['loss_scale']:,.0f}: step skipped, scale halved")
    if seconds_left is not None:
        parts.append(f"ETA {format_duration(seconds_left)}")
    return "  ".join(parts)


def fit_progress(line: str, width: int) -> str:
    """Shortens the progress line to the width of the terminal. The share of changed elements, the
    gradient norm and the learning rate are left out first. The memory and the remaining time are
    always shown.
    """
    parts = line.split("  ")
    for name in _OPTIONAL_PARTS:
        if len("  ".join(parts)) <= width:
            break
        parts = [part for part in parts if not part.startswith(name)]
    while len("  ".join(parts)) > width and len(parts) > 4:
        del parts[2]  # a measure of the objective, between the loss and the speed
    return "  ".join(parts)


class _UnreadOutputConsole(Console):
    """A console that stops printing when nothing reads its output any more. The run continues, and
    its files still contain everything that is no longer printed.

    This happens when the process that reads the output ends, for example with `| head` (EPIPE), or
    when the terminal is closed (EIO). A process in the background gets no SIGHUP then (`disown`),
    and in the foreground the write may fail before the signal arrives.

    The console of the library `rich` would end the process with status 1.
    """

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        _redirect_to_null(self.file.fileno())
        message = (
            "warning   the output is no longer read: the run continues, and metrics.jsonl in its"
            " folder has the steps"
        )
        try:
            print(message, file=sys.stderr, flush=True)
        except OSError:  # the same pipe (`2>&1 |`) or the same terminal
            _redirect_to_null(sys.stderr.fileno())


def _redirect_to_null(*streams: int) -> None:
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null_device, stream)
    os.close(null_device)


class RunConsole:
    """Prints the output of a run to stdout. With `--json`, stdout contains only JSON, so the output
    goes to stderr.

    is_verbose  whether to print the details of the header too
    result      a dictionary with the run's status, its folder and more; it is empty until
                `report_result` is called
    """

    def __init__(self, *, json_output: bool = False, is_verbose: bool = False) -> None:
        self.console = _UnreadOutputConsole(
            file=sys.stderr if json_output else sys.stdout, highlight=False, soft_wrap=True
        )
        self.result: Mapping[str, Any] = {}
        self._prints_json = json_output
        self._is_verbose = is_verbose
        self._is_silent = False
        self._live: Live | None = None
        self._last_plain_step = 0
        self._log: Path | None = None
        self._unlogged_lines: list[str] = []  # lines from before the run had a log

    def silence(self) -> None:
        """Stops printing, because another process of the run prints."""
        self._is_silent = self.console.quiet = True

    def start_log(self, file: Path) -> None:
        """Appends every line to `file`, including the lines that were printed before."""
        self._log = file
        lines = self._unlogged_lines
        self._unlogged_lines = []
        self._write_log("\n".join(lines))

    def _write_log(self, text: str) -> None:
        if self._log is None:
            self._unlogged_lines.append(text)
        elif not self._is_silent:
            try:
                with self._log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                    log.write(f"{text}\n")
            # the run continues without a log; a full disk ends it at its next checkpoint
            except OSError:
                self._log = Path(os.devnull)

    def report_result(self, result: Mapping[str, Any]) -> None:
        """Stores the result. With `--json`, also prints it to stdout as one JSON object."""
        self.result = result
        if self._prints_json and not self._is_silent:
            print(json.dumps(result))

    def __enter__(self) -> RunConsole:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_live_line()

    def print_line(self, text: str = "", style: str | None = None) -> None:
        self.console.print(Text(text), style=style)
        self._write_log(remove_control_characters(text))

    def print_header(self, rows: HeaderRows) -> None:
        for label, text in rows:
            lines = _format_header_row(label, text)
            self._show_header_row(lines)
            self._write_log(lines)

    def print_details(self, rows: HeaderRows, hint: HeaderRows) -> None:
        """Writes the details of the header to the log. With `--verbose`, also prints them.

        hint  the rows that are printed in place of the details
        """
        for label, text in rows:
            lines = _format_header_row(label, text)
            self._write_log(lines)
            if self._is_verbose:
                self._show_header_row(lines)
        if not self._is_verbose:
            for label, text in hint:
                self._show_header_row(_format_header_row(label, text))

    def _show_header_row(self, lines: str) -> None:
        shown = wrap_header(lines, self.console.width) if self.console.is_terminal else lines
        self.console.print(Text.assemble((shown[:10], "bold"), shown[10:]))

    def print_progress(
        self,
        step: int,
        total: int,
        row: dict[str, Any],
        seconds_left: float | None,
        names: MetricNames,
    ) -> None:
        if self._is_silent:
            return
        line = format_progress(step, total, row, seconds_left, names)
        self._write_log(line)
        if self.console.is_terminal or self.console.is_jupyter:
            if self._live is None:
                self._live = Live(console=self.console, refresh_per_second=4, transient=False)
                self._live.start()
            fitted = fit_progress(line, self.console.width)
            self._live.update(Text(fitted, no_wrap=True, overflow="ellipsis"))
        elif step in (1, total) or step - self._last_plain_step >= total / PLAIN_PROGRESS_LINES:
            self._last_plain_step = step
            self.console.print(Text(line))

    def end_live_line(self) -> None:
        """Ends the progress line, so that later output begins on a new line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def print_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self.print_line(f"  samples at step {step}", style="dim")
        for sample in samples[:3]:
            prompt, output = sample.lines()
            self.print_line(f"    > {_shorten(prompt)}", style="dim")
            self.print_line(f"    {_shorten(output) or '(nothing)'}")


def _format_header_row(label: str, text: str) -> str:
    return remove_control_characters(f"{label:<10}{text}").replace("\n", f"\n{'':<10}")


def _shorten(text: str) -> str:
    one_line = remove_control_characters(" ".join(text.split()))
    return one_line if len(one_line) <= 160 else one_line[:159] + "…"


def wrap_header(lines: str, width: int, *, indent: int = 10) -> str:
    """Breaks the lines of a header row between words, so that they fit into the terminal.
    Continuation lines are indented, so that they begin below the text.

    indent  the number of blanks before each continuation line, which is the width of a label
    """
    wrapped = []
    for line in lines.split("\n"):
        continuation = " " * max(indent, len(line) - len(line.lstrip()))
        pieces = textwrap.wrap(
            line,
            max(width, 40),
            subsequent_indent=continuation,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
        wrapped += pieces or [line]
    return "\n".join(wrapped)


class Interrupt:
    """A context manager. Within its block, the signals SIGINT, SIGTERM, SIGHUP and SIGUSR1 set the
    attribute `is_requested` to true. SIGHUP means a closed terminal or a broken connection. SIGUSR1
    can come from Slurm (`sbatch --signal=USR1@120`).

    While `is_training` is true, the loop saves a checkpoint after the current step and stops. A
    second signal stops the loop at once. Before training begins, a signal raises KeyboardInterrupt,
    because tokenising may take hours.
    """

    def __init__(self) -> None:
        self.is_requested = self.is_training = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
                self._previous_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
                self._previous_handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._warn)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def begin(self) -> None:
        """Marks the start of training. Raises KeyboardInterrupt if an earlier KeyboardInterrupt was
        caught by a library or lost in a `__del__` method.
        """
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_training = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_immediate = self.is_requested or not self.is_training
        self.is_requested = True
        if is_immediate:
            raise KeyboardInterrupt

    def _warn(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGUSR1. SLURM may send this signal both to a process and to its launcher, so it
        may arrive twice.
        """
        if not self.is_requested:
            self._handle(number, frame)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGHUP. The signal may arrive twice, because both the kernel and the shell may
        send it. Nothing is printed, because the terminal is closed and printing would fail.
        """
        _redirect_to_null(*(stream for stream in (1, 2) if stat.S_ISCHR(os.fstat(stream).st_mode)))
        if not self.is_requested:
            self._handle(number, frame)


def quiet_libraries() -> None:
    """Switches off the progress bars and the advice of libraries, because they would break the
    progress line. Errors are still printed.

    The progress bars for downloads from the hub stay on. The hub's library shows them only in a
    terminal. A download may take minutes, and it ends before the first step.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    has_download_bars = not are_progress_bars_disabled()
    transformers.utils.logging.disable_progress_bar()  # its own, and the hub's
    if has_download_bars:
        enable_progress_bars()
    for library in ("peft", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)
    for module in ("transformers", "peft", "torch"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    # peft asks the hub at each save whether the vocabulary was changed, which no run does
    warnings.filterwarnings(
        "ignore",
        message="Unable to fetch remote file|Could not find a config file in",
        module="peft",
    )
    # this advice is for new adapters; a saved adapter is loaded unchanged, and Isotype's merge
    # decides whether the head stays tied
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", module="peft")
    # PEFT writes these patterns itself for stacked experts and applies them. It still warns,
    # because its check does not count the experts' parameters as modules
    warnings.filterwarnings(
        "ignore",
        message=r"The following (rank|alpha)_pattern keys did not match .*\['\.\*",
        module="peft",
    )


@contextmanager
def silence_library_warnings() -> Iterator[None]:
    """Hides warnings that libraries print because the tensors of a model contain no data. Also
    hides PyTorch's log messages about operators that need data.
    """
    operators = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = operators.disabled
    operators.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        operators.disabled = was_disabled
