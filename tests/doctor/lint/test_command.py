"""The command as a user runs it: options, configuration, suppressions, fixes, SARIF, bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.doctor.lint.command import lint_command
from isotype.errors import UsageError

BAD = """import torch


def under(build):
    torch.set_default_dtype(torch.bfloat16)
    model = build()
    torch.set_default_dtype(torch.float32){comment}
    return model


loaded = under(dict)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD.format(comment=""))
    return tmp_path


def run(*args):
    result = CliRunner().invoke(build_app(), ["lint", *args])
    return result


def codes(*paths, **options):
    return [f.code for f in lint_command([Path(p) for p in paths], **options).findings]


def test_exit_status_follows_fail_on(project):
    assert run("bad.py").exit_code == 1
    assert run("bad.py", "--fail-on", "error").exit_code == 0
    assert run("bad.py", "--ignore", "LT006").exit_code == 0


def test_json_names_the_place(project):
    report = json.loads(run("bad.py", "--json").stdout)
    assert report["findings"][0]["place"] == {"file": "bad.py", "line": 5, "column": 5, "symbol": "under"}
    assert report["files"] == 1


def test_sarif_points_to_file_line_and_page(project):
    log = json.loads(run("bad.py", "--sarif").stdout)
    (result,) = log["runs"][0]["results"]
    assert log["version"] == "2.1.0"
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "bad.py"},
        "region": {"startLine": 5, "startColumn": 5},
    }
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert rules[result["ruleIndex"]]["id"] == "LT006"
    assert "## Why" in rules[0]["help"]["markdown"]


@pytest.mark.parametrize(
    ("line", "comment", "expected"),
    [
        (5, "  # isotype: ignore[LT006] the process ends here", []),
        (5, "  # isotype: ignore[LT006]", ["LT099"]),
        (5, "  # isotype: ignore[LT004, LT006] both", ["LT099"]),
        (5, "  # isotype: ignore[LT900] what", ["LT006", "LT099"]),
        (5, "  # isotype: ignore", ["LT006", "LT099"]),
        (1, "  # isotype: ignore-file[LT006] a script", []),
        (1, "  # isotype: ignore[LT006] elsewhere", ["LT099", "LT006"]),
    ],
)
def test_suppressions(project, line, comment, expected):
    lines = BAD.format(comment="").splitlines()
    lines[line - 1] += comment
    (project / "bad.py").write_text("\n".join(lines) + "\n")
    assert codes("bad.py") == expected


def test_a_string_is_no_suppression(project):
    (project / "bad.py").write_text('TEXT = "# isotype: ignore-file[LT006] no"\n' + BAD.format(comment=""))
    assert codes("bad.py") == ["LT006"]


def test_pyproject_is_found_and_obeyed(project):
    (project / "src").mkdir()
    (project / "src" / "bad.py").write_text(BAD.format(comment=""))
    config = project / "pyproject.toml"
    config.write_text('[tool.isotype.lint]\nextend-select = ["LT006"]\nexclude = ["src"]\n')
    assert codes(".") == ["LT006"]
    config.write_text('[tool.isotype.lint]\nextend-select = ["LT006"]\n[tool.isotype.lint.per-file-ignores]\n"src/*" = ["LT006"]\n')
    assert codes("src") == []
    assert codes("bad.py") == ["LT006"]
    config.write_text('[tool.isotype.lint]\nselect = ["LT00"]\nignore = ["LT006"]\n')
    assert codes("bad.py") == []
    assert codes("bad.py", select=["LT"]) == []


def test_a_rule_below_its_mark_reports_on_a_file_that_is_named(project):
    """Whoever names one file asks about it; in a folder such a rule has to be selected or proved."""
    (project / "pyproject.toml").touch()
    assert codes("bad.py") == ["LT006"]
    assert codes(".") == []
    assert codes(".", select=["LT006"]) == ["LT006"]
    assert codes("bad.py", select=["LT"]) == [], "what is on by default and nothing else"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tool.isotype.lint]\nselct = []\n", "did you mean select"),
        ('[tool.isotype.lint]\nignore = "LT006"\n', "expected a list of strings"),
        ('[tool.isotype.lint]\nignore = ["LT906"]\n', "no rule LT906"),
        ("[tool.isotype.lint\n", "pyproject.toml"),
    ],
)
def test_bad_configuration_names_file_and_key(project, text, told):
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match=told):
        lint_command([Path("bad.py")])


def test_usage_errors(project):
    with pytest.raises(UsageError, match=r"nowhere\.py: no such file"):
        lint_command([Path("nowhere.py")])
    with pytest.raises(UsageError, match="--select: no rule LT90"):
        lint_command([Path("bad.py")], select=["LT90"])
    assert isinstance(run("bad.py", "--unsafe-fixes").exception, UsageError)
    assert isinstance(run("bad.py", "--json", "--sarif").exception, UsageError)


def test_a_file_that_cannot_be_parsed_is_a_finding(project):
    (project / "broken.py").write_text("import torch\ndef f(:\n")
    (project / "latin.py").write_bytes(b"x = '\xc2('\n")
    (project / "null.py").write_bytes(b"torch = 1\x00\n")
    (project / "other.py").write_text("def f(:\n")  # speaks of neither torch nor Triton: not looked at
    assert codes("broken.py", "latin.py", "null.py", "other.py") == ["LT000"] * 3


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python parses it")
def test_a_file_for_a_newer_python_is_no_error(project, monkeypatch):
    (project / "newer.py").write_text("import torch\n\ntype Pair[T] = tuple[T, T]\n")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "libcst", None)
        assert "error LT000 could not be parsed" in run("newer.py").stdout
    result = run("newer.py")
    assert result.exit_code == 0
    assert "note LT000 not looked at: its syntax is newer than Python 3.11" in result.stdout


def test_a_pipe_is_skipped_and_a_broken_link_is_reported(project):
    os.mkfifo(project / "pipe.py")
    (project / "gone.py").symlink_to("nowhere.py")
    found = lint_command([project])
    assert found.subject.startswith("2 files")
    assert [Path(f.place.file).name for f in found.findings if f.code != "LT006"] == ["gone.py"]


def test_fix_keeps_comments_line_ends_and_encoding(project):
    text = "# -*- coding: latin-1 -*-\r\n# Grüße\r\n" + BAD.format(comment="  # back again").replace("\n", "\r\n")
    (project / "bad.py").write_bytes(text.encode("latin-1"))
    run_ = lint_command([Path("bad.py")], fix="safe")
    fixed = (project / "bad.py").read_bytes().decode("latin-1")
    assert (run_.fixed, run_.findings) == (1, [])
    assert "    finally:\r\n        torch.set_default_dtype(torch.float32)  # back again\r\n" in fixed
    assert fixed.startswith("# -*- coding: latin-1 -*-\r\n# Grüße\r\n")
    assert "\n" not in fixed.replace("\r\n", "")


def test_rules_are_listed():
    listed = json.loads(run("--rules", "--json").stdout)["rules"]
    assert {"code": "LT009", "name": "norm-follows-weight-dtype", "severity": "warning", "on": False, "fix": "none"} in listed


def test_needs_no_torch(project):
    program = (
        "import sys; from pathlib import Path; from isotype.doctor.lint.command import lint_command;"
        "lint_command([Path('bad.py')]); sys.exit(any(m in sys.modules for m in ('torch', 'triton', 'libcst')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_failing_rule_costs_only_its_file(project, monkeypatch):
    from isotype.doctor.lint.rules.lt006_default_dtype_not_restored import DefaultDtypeNotRestored

    (project / "other.py").write_text(BAD.format(comment=""))
    visit = DefaultDtypeNotRestored.visit

    def failing(self, file):
        assert file.path != "bad.py"
        return visit(self, file)

    monkeypatch.setattr(DefaultDtypeNotRestored, "visit", failing)
    assert codes("bad.py", "other.py") == ["LT000", "LT006"]
