"""Folders that others can change are told from folders that only this user can change."""

import os
from pathlib import Path

import pytest

from tests.api import (
    NotPrivateError,
    check_private_folder,
    make_private_folder,
    open_private_folder,
    read_private_file,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has no modes")
AS_ROOT = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away"
)
STRANGER = 54321


@pytest.fixture
def cache(tmp_path) -> Path:
    return make_private_folder(tmp_path / "home" / "cache")


def test_a_folder_made_here_is_private(cache, tmp_path):
    assert cache.stat().st_mode & 0o077 == 0
    assert check_private_folder(cache) == cache.resolve()
    link = tmp_path / "link"
    link.symlink_to("home/../home")
    assert check_private_folder(link / "cache") == cache.resolve()
    (tmp_path / "again").symlink_to(tmp_path / "again")
    with pytest.raises((NotPrivateError, OSError)):
        check_private_folder(tmp_path / "again")


def test_folders_made_on_the_way_are_private_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        assert make_private_folder(tmp_path / "a" / "b" / "c").is_dir()
    finally:
        os.umask(umask)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_may_write_is_refused(cache, mode):
    cache.chmod(mode)
    with pytest.raises(NotPrivateError, match="others can write into"):
        check_private_folder(cache)


@pytest.mark.parametrize("through_link", [False, True])
def test_a_folder_below_one_that_others_may_write_is_refused(cache, tmp_path, through_link):
    path = cache
    if through_link:
        (tmp_path / "link").symlink_to(cache)
        path = tmp_path / "link"
    cache.parent.chmod(0o777)
    with pytest.raises(NotPrivateError, match=r"others can write into .*home"):
        check_private_folder(path)
    cache.parent.chmod(0o1777)  # others can add to it and replace nothing, as in /tmp
    assert check_private_folder(path) == cache.resolve()


@AS_ROOT
def test_what_another_user_owns_is_refused(cache, tmp_path):
    link = tmp_path / "planted"
    link.symlink_to(cache)
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(NotPrivateError, match=f"planted belongs to user {STRANGER}"):
        check_private_folder(link)
    os.chown(cache.parent, STRANGER, STRANGER)
    with pytest.raises(NotPrivateError, match=f"home belongs to user {STRANGER}"):
        check_private_folder(cache)
    os.chown(cache.parent, 0, 0)
    os.chown(cache, STRANGER, STRANGER)
    with pytest.raises(NotPrivateError, match=f"cache belongs to user {STRANGER}"):
        make_private_folder(cache)


def test_an_opened_folder_stays_the_same_folder(cache):
    (cache / "file").write_text("mine")
    with open_private_folder(cache) as opened:
        cache.rename(cache.with_name("moved"))
        make_private_folder(cache)
        (cache / "file").write_text("another")
        if Path("/proc/self/fd").is_dir():
            assert (opened / "file").read_text() == "mine"


def test_a_file_is_read_only_where_it_is_this_users_alone(cache):
    file = cache / "file"
    file.write_bytes(b"content")
    file.chmod(0o600)
    assert read_private_file(file) == b"content"
    (cache / "link").symlink_to(file)
    with pytest.raises(OSError):
        read_private_file(cache / "link")
    file.chmod(0o666)
    with pytest.raises(NotPrivateError, match="others can write file"):
        read_private_file(file)
    os.mkfifo(cache / "pipe", 0o600)
    with pytest.raises(NotPrivateError, match="is no file"):
        read_private_file(cache / "pipe")


@AS_ROOT
def test_a_file_of_another_user_is_refused(cache):
    file = cache / "file"
    file.write_bytes(b"content")
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(NotPrivateError, match=f"file belongs to user {STRANGER}"):
        read_private_file(file)


@AS_ROOT
def test_a_group_may_write_only_where_it_is_this_users_own(cache):
    cache.chmod(0o770)
    assert check_private_folder(cache) == cache.resolve()
    os.chown(cache, 0, STRANGER)
    with pytest.raises(NotPrivateError, match="others can write into"):
        check_private_folder(cache)
