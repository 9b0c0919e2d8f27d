"""Kernels that are built beside the imports and the data of a run."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.api import builds

pytestmark = pytest.mark.skipif(builds.cpu_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source whose functions return a number, and an empty folder for its library."""
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "op"
    folder.mkdir()
    file = folder / "cpu.cpp"
    file.write_text('extern "C" int answer() { return 7; }\n')
    return file


def count_builds(monkeypatch) -> list:
    calls = []
    build = builds.build

    def counted(*arguments):
        calls.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(builds, "build", counted)
    return calls


def test_a_library_that_is_being_built_is_waited_for(source, monkeypatch):
    calls = count_builds(monkeypatch)
    builds.start_builds([source])
    assert builds.load_or_build_library(source).answer() == 7
    assert builds.load_or_build_library(source).answer() == 7
    assert len(calls) == 1


def test_as_many_compilers_run_at_a_time_as_there_are_processors(source, monkeypatch):
    sources = []
    for name in ("a", "b", "c", "d"):
        folder = source.parent.with_name(name)
        folder.mkdir()
        sources.append(folder / "cpu.cpp")
        sources[-1].write_text(source.read_text())
    both_run = threading.Barrier(2, timeout=20)
    running = []
    most = []
    build = builds.build

    def meet(*arguments):
        running.append(arguments)
        most.append(len(running))
        both_run.wait()
        build(*arguments)
        running.pop()

    monkeypatch.setattr(builds, "build", meet)
    monkeypatch.setattr(builds, "count_cores", lambda: 2)
    builds.start_builds(sources)
    deadline = time.monotonic() + 20
    while len(most) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [builds.load_or_build_library(file).answer() for file in sources] == [7] * 4
    assert len(most) == 4, "each is built once"
    assert max(most) == 2


def test_builds_start_without_torch(source):
    program = f"""
        import sys
        from pathlib import Path
        from isotype.ops import builds
        builds.start_builds([Path({str(source)!r})])
        builds._early_builds[Path({str(source)!r})].result()
        raise SystemExit("torch" in sys.modules)
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=55)
    assert process.returncode == 0
    assert list(source.parents[1].glob("cache/*.so"))


def test_the_compilers_error_is_raised_where_the_library_is_needed(source, monkeypatch):
    calls = count_builds(monkeypatch)
    source.write_text("no C++\n")
    builds.start_builds([source])
    with pytest.raises(builds.BuildError, match=r"failed after .* error"):
        builds.load_or_build_library(source)
    assert len(calls) == 1


def test_a_process_that_ends_leaves_no_compiler_and_no_incomplete_file(source, tmp_path):
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\necho > "$last"\n'
        "exec sleep 60\n"
    )
    compiler.chmod(0o700)
    program = f"""
        from pathlib import Path
        import time
        from isotype.ops import builds
        builds.start_builds([Path({str(source)!r})])
        while not list(Path({str(tmp_path / "cache")!r}).glob("*.tmp")):
            time.sleep(0.05)
        raise SystemExit(3)
    """
    start = time.monotonic()
    environment = {"CXX": str(compiler), "ISOTYPE_CACHE": str(tmp_path / "cache")}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        timeout=55,
    )
    assert process.returncode == 3
    assert time.monotonic() - start < 50
    assert not list((tmp_path / "cache").glob("*.tmp"))
