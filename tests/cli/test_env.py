"""`isotype doctor env`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from isotype.cli.app import build_app


def test_env_as_json_is_the_env_json_of_a_run():
    result = CliRunner().invoke(build_app(), ["doctor", "env", "--json"])
    answer = json.loads(result.output)
    assert answer["environment"]["packages"]["torch"]
    assert answer["environment"]["devices"][0]["kind"] == "cpu"
    assert result.exit_code == int(any(f["severity"] == "error" for f in answer["findings"]))
