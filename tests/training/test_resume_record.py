"""resumes.json keeps what every resume changed, whatever happens between its being said and the first step."""

from __future__ import annotations

import json

from isotype.runs.folder import RunFolder
from isotype.training.resume import Changed, had_other_rows, record_resume

RATE, ROWS = Changed("settings", "train.learning_rate: 0.002 -> 0.001"), Changed("rows", "the rows are others")


def test_changes_are_kept_with_the_step_after_which_they_hold(tmp_path):
    folder = RunFolder(tmp_path)
    record_resume(folder, 2, [])
    assert folder.read_json("resumes.json") == {"steps": [2]}
    record_resume(folder, 6, [RATE])
    record_resume(folder, 6, [RATE, ROWS])  # killed before it went on, and resumed again
    assert had_other_rows(folder)
    kept = [{"after_step": 6, "of": one.of, "what": one.what} for one in (RATE, ROWS)]
    assert folder.read_json("resumes.json") == {"steps": [2, 6, 6], "changes": kept}
    record_resume(folder, 4, [])  # the checkpoint of step 6 was damaged: step 5 is done again, with the later settings
    assert folder.read_json("resumes.json") == {"steps": [2, 4], "changes": [one | {"after_step": 4} for one in kept]}
    record_resume(folder, None, [])
    assert not had_other_rows(folder)
    assert not (tmp_path / "resumes.json").exists()


def test_a_damaged_record_is_begun_again(tmp_path):
    folder = RunFolder(tmp_path)
    for content in ("{", "[]", json.dumps({"steps": ["x", 1], "changes": [3, {"after_step": "x"}]})):
        (tmp_path / "resumes.json").write_text(content)
        record_resume(folder, 3, [])
        assert folder.read_json("resumes.json")["steps"][-1] == 3
