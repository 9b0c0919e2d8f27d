"""What a restart by torchrun finds."""

from __future__ import annotations

import pytest

from isotype.distributed.rank import run_to_go_on_with
from isotype.errors import UsageError


def test_only_a_restart_continues_a_run(tmp_path):
    first = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = first | {"TORCHELASTIC_RESTART_COUNT": "1"}
    folder = str(tmp_path)
    assert run_to_go_on_with(folder, again) is None  # it died before the run was begun
    (tmp_path / "resolved.yaml").touch()
    assert run_to_go_on_with(folder, again) == tmp_path
    assert run_to_go_on_with(folder, first) is None
    assert run_to_go_on_with(folder, {}) is None


def test_a_folder_with_the_time_in_its_name_is_refused():
    assert run_to_go_on_with("runs/{name}", {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    with pytest.raises(UsageError, match="another name at each start"):
        run_to_go_on_with("runs/{name}", {"TORCHELASTIC_MAX_RESTARTS": "3"})
