"""Handles folders that only this user can change. Compiled code in such a folder may therefore be
executed.

A folder is private if no other user can replace this folder, a folder that contains it, or a link
in its path. The root user and the owner of `/` count as this user, because they can change every
file anyway.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OTHERS_WRITE_BITS = stat.S_IWGRP | stat.S_IWOTH
MAX_LINKS = 40  # the same limit as Linux has


class NotPrivateError(Exception):
    """Is raised if another user can change a folder or a file. The message names that user in one
    line.
    """


def temporary_folder() -> Path:
    """Returns the folder for this user's temporary files, for example `/tmp/isotype-1000`. It may
    not exist.
    """
    return Path(tempfile.gettempdir()) / f"isotype-{_user_name()}"


def make_private_folder(folder: Path) -> Path:
    """Creates the folder if it is missing, and returns its path with all links resolved.

    Raises  NotPrivateError if other users can change the folder, OSError if it cannot be created
    """
    missing = [parent for parent in folder.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return check_private_folder(folder)


def check_private_folder(folder: Path) -> Path:
    """Returns the folder's path with all links resolved. Raises NotPrivateError if other users can
    change the folder.
    """
    if not hasattr(os, "getuid"):  # Windows protects the user's folders by access control lists
        return folder.resolve()
    path = Path("/")
    pending_names = list(reversed(Path(os.path.abspath(folder)).parts[1:]))
    link_count = 0
    _refuse_folder(path, is_last=not pending_names)
    while pending_names:
        name = pending_names.pop()
        if name == "..":
            path = path.parent
            continue
        entry = path / name
        status = entry.lstat()
        if stat.S_ISLNK(status.st_mode):
            link_count += 1
            if link_count > MAX_LINKS:
                raise NotPrivateError(f"{folder}: too many links")
            _refuse_owner(entry, status)
            target = Path(os.readlink(entry))
            if target.is_absolute():
                path = Path("/")
            pending_names += reversed([part for part in target.parts if part != target.anchor])
        else:
            path = entry
        _refuse_folder(path, is_last=not pending_names)
    return path


@contextmanager
def open_private_folder(folder: Path) -> Iterator[Path]:
    """Opens the folder and returns a path to it. The path stays valid if the folder is renamed or
    replaced meanwhile.

    Raises  NotPrivateError where others can change it
    """
    path = check_private_folder(folder)
    if not hasattr(os, "getuid") or not Path("/proc/self/fd").is_dir():
        yield path
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid() or _others_can_write(status):
            raise NotPrivateError(f"{path} was replaced")
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


def read_private_file(file: Path) -> bytes:
    """Returns the content of a file that only this user can change.

    Raises  NotPrivateError for a link, for anything that is not a regular file, and for a file that
            others can write
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # not every system has them
        flags |= getattr(os, name, 0)
    handle = os.open(file, flags)
    with os.fdopen(handle, "rb") as opened:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivateError(f"{file.name} is no file")
        if hasattr(os, "getuid"):
            if status.st_uid != os.getuid():
                raise NotPrivateError(f"{file.name} belongs to {_owner_name(status)}")
            if _others_can_write(status):
                raise NotPrivateError(f"others can write {file.name}")
        return opened.read()


def _refuse_folder(path: Path, *, is_last: bool) -> None:
    """Raises NotPrivateError if other users can replace the files of this folder."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivateError(f"{path} is no folder")
    if is_last and status.st_uid != os.getuid():
        raise NotPrivateError(f"{path} belongs to {_owner_name(status)}")
    _refuse_owner(path, status)
    # in a folder with the sticky bit, such as /tmp, only the owner of a file can replace it
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    if _others_can_write(status) and (is_last or not is_sticky):
        raise NotPrivateError(f"others can write into {path}")


def _refuse_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.getuid(), 0, os.lstat("/").st_uid):
        raise NotPrivateError(f"{path} belongs to {_owner_name(status)}")


def _others_can_write(status: os.stat_result) -> bool:
    """Returns True if the file's permissions let another user write to it. Write permission for a
    group that only this user belongs to does not count, because many systems create such a group
    for each user.
    """
    writable = status.st_mode & OTHERS_WRITE_BITS
    if writable == stat.S_IWGRP:
        return not _is_own_group(status.st_gid)
    return bool(writable)


def _is_own_group(group: int) -> bool:
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.getuid())
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    is_named_for_user = entry.gr_name == user.pw_name and user.pw_gid == group
    return is_named_for_user and set(entry.gr_mem) <= {user.pw_name}


def _owner_name(status: os.stat_result) -> str:
    import pwd

    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return f"user {status.st_uid}"


def _user_name() -> str:
    if hasattr(os, "getuid"):
        return str(os.getuid())
    import getpass  # Windows has no numeric user ids

    return getpass.getuser()
