"""`subject(...)`: a prepared run, as `train` would hand it to the preflight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isotype.data.rows import LoadedData
from isotype.runs.folder import RunFolder
from isotype.tasks.choose import task_of
from isotype.training.schedule import Milestones
from isotype.training.setup import Subject, prepare


@pytest.fixture
def subject(configured, tmp_path):
    def make(folder_name: str = "run", **sections: Any) -> Subject:
        loaded = configured(folder_name, **sections)
        folder = tmp_path / folder_name
        folder.mkdir(exist_ok=True)
        task = task_of(loaded.config)
        prepared = prepare(task, loaded.sources, RunFolder(folder).base)
        plan = Milestones.of(loaded.config, rows=task.rows, eval_rows=task.eval_rows)
        return Subject(config=loaded.config, task=task, prepared=prepared, plan=plan, folder=folder)

    return make


@pytest.fixture
def with_data():
    """A subject with other rows or facts."""

    def change(subject: Subject, **changes: Any) -> Subject:
        data = subject.task.data
        fields = {name: getattr(data, name) for name in ("train", "eval", "prompts", "chat_template", "facts")}
        subject.task.data = LoadedData(**(fields | changes))
        return replace(subject)

    return change
