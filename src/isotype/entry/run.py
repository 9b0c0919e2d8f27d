"""`Run`: access to a run folder from Python: its metrics, its result, its report, and its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..report.record import RunRecord, read_run

if TYPE_CHECKING:
    import pandas

    from ..inference.loaded import Conversation, LoadedRun


class Run:
    """A finished or unfinished run. Each access reads the files again. A notebook displays it as the picture of its report.

    Raises  UsageError when the folder holds nothing of a run
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._loaded: LoadedRun | None = None
        self._conversation: Conversation | None = None
        read_run(self.folder)

    def __repr__(self) -> str:
        loss = self.record.best_evaluation
        return f"<isotype.Run {self.folder}: {self.status}" + (f", best evaluation loss {loss:.4f}>" if loss is not None else ">")

    @property
    def record(self) -> RunRecord:
        """Everything in the run folder, as the report reads it."""
        return read_run(self.folder)

    @property
    def status(self) -> str:
        """done, running, failed, interrupted or stopped."""
        return self.record.status

    @property
    def result(self) -> Mapping[str, Any]:
        """result.json: steps, losses, the check of the saved result."""
        return self.record.result

    @property
    def metrics(self) -> pandas.DataFrame:
        """metrics.jsonl as a table: a row a step and a row an evaluation, one column a key."""
        import pandas

        return pandas.DataFrame(self.record.metrics)

    @property
    def adapter(self) -> Path:
        """The PEFT folder that the run saved. Raises UsageError when there is none."""
        return self._saved("adapter")

    @property
    def model(self) -> Path:
        """The model's folder that a run of every weight saved. Raises UsageError when there is none."""
        return self._saved("model")

    def _saved(self, what: str) -> Path:
        folder = self.folder / what
        if not folder.is_dir():
            other = {"adapter": "model", "model": "adapter"}[what]
            hint = f"run.{other} is what it saved" if (self.folder / other).is_dir() else f"its status is {self.status}"
            raise UsageError(f"{self.folder}: no {what} there: {hint}")
        return folder

    def load(self) -> LoadedRun:
        """Model, tokenizer, precision and device, as trained; loaded once."""
        if self._loaded is None:
            from ..inference.loaded import load_run

            self._loaded = load_run(self.folder)
        return self._loaded

    def chat(self, text: str, *, max_new_tokens: int = 256, temperature: float = 0.0, top_p: float = 1.0) -> str:
        """Returns the answer. Earlier turns are part of the conversation until `forget`. The settings of the first call apply."""
        if self._conversation is None:
            from ..inference.loaded import Conversation

            self._conversation = Conversation(
                self.load(), max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, stream=False
            )
        return self._conversation.say(text)

    def forget(self) -> None:
        """The next `chat` begins a new conversation."""
        self._conversation = None

    @property
    def report(self) -> Path:
        """report.html, made anew; report.png lies beside it."""
        from ..report import write_report

        return write_report(self.folder).page

    def _repr_png_(self) -> bytes | None:
        from ..report import write_report

        drawn = write_report(self.folder).picture
        return drawn.read_bytes() if drawn is not None else None
