"""`subject(...)`: a prepared run, as `train` would hand it to the preflight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from isotype.data.rows import LoadedData
from isotype.runs.folder import RunFolder
from isotype.training.loop import Plan
from isotype.training.preflight.subject import Subject
from isotype.training.setup import prepare


@pytest.fixture
def subject(configured, tmp_path):
    def make(folder_name: str = "run", **sections: Any) -> Subject:
        loaded = configured(folder_name, **sections)
        folder = tmp_path / folder_name
        folder.mkdir(exist_ok=True)
        prepared = prepare(loaded.config, loaded.sources, RunFolder(folder))
        plan = Plan.of(loaded.config, rows=len(prepared.data.train), eval_rows=len(prepared.data.eval))
        return Subject(config=loaded.config, prepared=prepared, plan=plan, folder=folder)

    return make


@pytest.fixture
def with_data():
    """A subject with other rows or facts."""

    def change(subject: Subject, **changes: Any) -> Subject:
        data = subject.prepared.data
        fields = {name: getattr(data, name) for name in ("train", "eval", "prompts", "chat_template", "facts")}
        subject.prepared.data = LoadedData(**(fields | changes))
        return replace(subject)

    return change
