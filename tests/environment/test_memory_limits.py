"""The smallest limit of memory counts, wherever it is set."""

import subprocess
import sys

import pytest

from tests.api import memory_limits

GiB = 1 << 30
ASK = "from isotype.environment.memory_limits import usable_memory; print(usable_memory())"


def write(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/user/job", {"user/job/memory.max": 3 * GiB}, 3 * GiB),
        ("0::/user/job", {"user/job/memory.max": "max", "user/memory.max": 2 * GiB}, 2 * GiB),
        ("0::/", {"memory.max": 5 * GiB}, 5 * GiB),
        ("0::/elsewhere", {"memory.max": 4 * GiB}, 4 * GiB),
        ("4:memory:/a/b", {"memory/a/memory.limit_in_bytes": GiB}, GiB),
        ("5:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": GiB}, GiB),
        ("4:cpu:/a", {"memory/a/memory.limit_in_bytes": GiB}, None),
    ],
)
def test_each_control_group_around_the_process_counts(
    tmp_path, monkeypatch, group, files, expected
):
    whole = memory_limits.usable_memory()
    write(tmp_path / "process", "cgroup", f"9:name=systemd:/\n{group}\n")
    for path, limit in files.items():
        file = tmp_path / "groups" / path
        write(file.parent, file.name, f"{limit}\n")
    monkeypatch.setattr(memory_limits, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory_limits, "PROCESS", tmp_path / "process")
    assert memory_limits.usable_memory() == (expected or whole)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
@pytest.mark.parametrize("option", ["-v", "-d"])
def test_a_limit_of_the_shell_counts(option):
    command = f"ulimit {option} {2 << 20}; exec {sys.executable} -c '{ASK}'"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert 1.5 * GiB < int(answer.stdout) <= 2 * GiB
