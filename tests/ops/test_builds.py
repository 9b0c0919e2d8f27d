"""Kernels that are built beside the imports and the data of a run."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from tests.api import cpp

pytestmark = pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")


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
    builds = []
    build = cpp.build

    def counted(*arguments):
        builds.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(cpp, "build", counted)
    return builds


def test_a_library_that_is_being_built_is_waited_for(source, monkeypatch):
    builds = count_builds(monkeypatch)
    cpp.start_builds([source])
    assert cpp.load_or_build_library(source).answer() == 7
    assert cpp.load_or_build_library(source).answer() == 7
    assert len(builds) == 1


def test_kernels_may_be_registered_while_builds_are_started(source, monkeypatch):
    class Growing:
        library = None

        @property
        def source(self):
            kernels[f"op {len(kernels)}"] = Growing()
            return source

    kernels = {"op 0": Growing()}
    monkeypatch.setattr(cpp, "_kernels", kernels)
    monkeypatch.setattr(cpp, "_fallback_reasons", {"op 0": "for the test"})
    cpp.start_builds([])
    assert len(kernels) == 2


def test_the_compilers_error_is_raised_where_the_library_is_needed(source, monkeypatch):
    builds = count_builds(monkeypatch)
    source.write_text("no C++\n")
    cpp.start_builds([source])
    with pytest.raises(cpp.BuildError, match=r"failed after .* error"):
        cpp.load_or_build_library(source)
    assert len(builds) == 1


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
        from isotype.ops import cpp
        cpp.start_builds([Path({str(source)!r})])
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
