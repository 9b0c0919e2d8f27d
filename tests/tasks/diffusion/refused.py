"""The message of what a run cannot begin with."""

from __future__ import annotations

import pytest

from isotype.entry.train import refuse_incomplete
from isotype.errors import UsageError
from isotype.tasks.choose import task_of
from isotype.training.setup import settle


def refused(loaded) -> str:
    try:
        refuse_incomplete(loaded)
        settle(task_of(loaded.config), loaded.sources)
    except UsageError as error:
        return error.message
    pytest.fail("it was not refused")
