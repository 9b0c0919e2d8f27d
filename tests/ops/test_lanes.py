"""lanes.h: every narrow value is widened and narrowed as PyTorch does it, and a source is built
once.
"""

import math
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from isotype.ops import cpp as ops_cpp
from tests.api import builds, kernel_folder, temporary_folder

pytestmark = pytest.mark.skipif(builds.cpu_compiler() is None, reason="no C++ compiler")


class Probe(ops_cpp.CppKernels):
    def __init__(self) -> None:
        super().__init__(__file__, convert="ddppi")
        self.source = Path(__file__).parent / "lanes_probe.cpp"


@pytest.fixture(scope="module")
def probe():
    made = Probe()
    assert made.load(), ops_cpp.fallback_reasons()
    return made


def same(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_narrow_value_is_widened_exactly_and_narrowing_is_pytorchs_to_nearest_even(
    probe, dtype
):
    narrow = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    y = torch.empty(narrow.shape)
    probe("convert", dtype, torch.float32, narrow, y, narrow.numel())
    same(y, narrow.float())
    exact = narrow.float()
    ordered = exact[exact.isfinite()].sort().values
    ties = (ordered[1:].double() + ordered[:-1].double()).div(2).float()
    special = torch.tensor(
        [
            65504.0,
            65519.99,
            65520.0,
            65536.0,
            3.4e38,
            math.inf,
            -math.inf,
            math.nan,
            1e-45,
            -0.0,
            6e-8,
            2.9e-8,
            3e-8,
        ]
    )
    random = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(torch.float32)
    x = torch.cat(
        (
            exact,
            ties,
            ties.nextafter(torch.tensor(math.inf)),
            ties.nextafter(torch.tensor(-math.inf)),
            special,
            -special,
            random,
        )
    )
    y = torch.empty(x.shape, dtype=dtype)
    probe("convert", torch.float32, dtype, x, y, x.numel())
    same(y, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_last_values_of_a_row_are_converted_and_nothing_after_them_is_written(probe, dtype):
    for count in range(1, 35):
        for source, target in ((dtype, torch.float32), (torch.float32, dtype)):
            x = torch.linspace(-3, 5, count).to(source)
            y = torch.full((count + 20,), 77.0, dtype=target)
            probe("convert", source, target, x, y, count)
            assert torch.equal(y[:count], x.to(target))
            assert (y[count:] == 77.0).all()


def test_a_source_is_built_once_and_a_long_build_prints_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "new" / "folder"))
    monkeypatch.setattr(builds, "BUILD_MESSAGE_DELAY_S", 0.0)
    source = Path(__file__).parent / "lanes_probe.cpp"
    builds.load_or_build_library(source)
    (built,) = (tmp_path / "new" / "folder").glob("*.so")
    assert built.parent.stat().st_mode & 0o077 == 0
    assert (
        f"compiling C++ kernels for this processor, once; they are kept in {built.parent}"
        in capsys.readouterr().err
    )
    before = built.stat().st_ino
    builds.load_or_build_library(source)
    assert built.stat().st_ino == before
    assert not list(built.parent.glob("*.tmp"))
    assert capsys.readouterr().err == ""


PROBE = Path(__file__).parent / "lanes_probe.cpp"


@pytest.fixture(scope="module")
def built_folder(tmp_path_factory) -> Path:
    """A folder with the library of `PROBE`, which the tests copy."""
    folder = tmp_path_factory.mktemp("built") / "kept"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ISOTYPE_CACHE", str(folder))
        builds.load_or_build_library(PROBE)
    return folder


@pytest.fixture
def kept(built_folder, tmp_path, monkeypatch) -> Path:
    """A folder with one good library, of `PROBE`."""
    folder = tmp_path / "kept"
    shutil.copytree(built_folder, folder)
    monkeypatch.setenv("ISOTYPE_CACHE", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


def only_library(folder: Path) -> Path:
    (file,) = folder.glob("*.so")
    return file


def planted(folder: Path) -> Path:
    """A library that leaves a file behind when it is loaded, under the name of the good one."""
    source = folder.with_name("planted.cpp")
    trace = folder.with_name("ran")
    source.write_text(
        "#include <cstdio>\n__attribute__((constructor)) static void run()"
        f' {{ std::fclose(std::fopen("{trace}", "w")); }}\n'
    )
    library = only_library(folder)
    library.unlink()
    compiler = builds.cpu_compiler()
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    return trace


@pytest.mark.parametrize("way", ["folder", "parent", pytest.param("link", marks=pytest.mark.full)])
def test_a_library_where_others_can_write_is_not_loaded(way, kept, tmp_path, monkeypatch, capsys):
    trace = planted(kept)
    name = only_library(kept)
    content = name.read_bytes()
    digest = builds.checksum(content)  # a stranger can compute it too
    name.rename(name.with_name(f"{name.stem.rpartition('-')[0]}-{digest}.so"))
    if way == "folder":
        kept.chmod(0o777)
    elif way == "parent":
        tmp_path.chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    else:
        shared = tmp_path / "shared"
        shared.mkdir()
        (shared / "link").symlink_to(kept)
        shared.chmod(0o777)
        monkeypatch.setenv("ISOTYPE_CACHE", str(shared / "link"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept" / "home"))
    kernel_folder.warn_of_shared_folder.cache_clear()
    builds.load_or_build_library(PROBE)
    assert not trace.exists()
    assert "kept elsewhere: others can write into" in capsys.readouterr().err


def test_a_planted_link_in_the_temporary_folder_is_not_followed(kept, tmp_path, monkeypatch):
    trace = planted(kept)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o777)  # a temporary folder without its sticky bit: a link can be exchanged
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("ISOTYPE_CACHE", "none")
    temporary_folder().symlink_to(kept)
    with pytest.raises(builds.BuildError, match=r"that only this user can change"):
        builds.load_or_build_library(PROBE)
    assert not trace.exists()


def test_a_library_that_others_can_write_or_that_is_damaged_is_built_again(kept):
    for damage in ("writable", "changed"):
        library = only_library(kept)
        written = library.stat().st_mtime_ns
        if damage == "writable":
            library.chmod(0o777)
        else:
            library.write_bytes(library.read_bytes()[:-1] + b"?")
        builds.load_or_build_library(PROBE)
        rebuilt = only_library(kept)
        assert rebuilt.stat().st_mode & 0o077 == 0
        assert rebuilt.stat().st_mtime_ns > written
        assert builds.checksum(rebuilt.read_bytes()) == rebuilt.stem.rpartition("-")[2]


def test_a_good_library_stays_where_it_cannot_be_loaded_now(kept, monkeypatch):
    library = only_library(kept)
    content = library.read_bytes()

    def without_descriptors(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: Too many open files")

    monkeypatch.setattr(builds.ctypes, "CDLL", without_descriptors)
    with pytest.raises(builds.BuildError, match=r"does not load: .*Too many open files"):
        builds.load_or_build_library(PROBE)
    assert library.read_bytes() == content
