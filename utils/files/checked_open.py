"""Opening files only if they are what they should be.

A pipe blocks whoever opens it, and a device has no end. Where other users may create files, as in /dev/shm or in the
folder of temporary files, one of them may have taken the name of ours.
"""

from __future__ import annotations

import errno
import os
import stat

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_REASONS = {  # why a file is not opened, for the user
    errno.EISDIR: "is a folder, not a file",
    errno.EINVAL: "is a pipe or device, not a file",
    errno.ENXIO: "is a pipe or device, not a file",  # opened for writing, without a reader
    errno.ELOOP: "is a symbolic link",
}


def open_descriptor(path: str | os.PathLike, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
    """An open regular file and its status. Raises OSError, with a reason for the user, for anything else."""
    # Without O_NONBLOCK, opening a pipe would wait for the process at its other end.
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, _REASONS[number], os.fspath(path))
    return handle, status


def open_file(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """`open_descriptor` as an ``opener`` of `open`."""
    return open_descriptor(path, flags)[0]


def open_direct(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file, but not through a symbolic link; also an ``opener`` of `open`.

    Raises PermissionError, with a reason for the user, if there is something else.
    """
    try:
        return open_descriptor(path, flags | os.O_NOFOLLOW)[0]
    except OSError as error:
        if error.errno not in _REASONS:
            raise
        raise PermissionError(errno.EPERM, _REASONS[error.errno], os.fspath(path)) from None


def open_own(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Like `open_direct`, and raises PermissionError for a file that `check_owner` refuses."""
    handle = open_direct(path, flags)
    try:
        check_owner(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_own_folder(path: str | os.PathLike) -> None:
    """Creates a folder that only this user may enter, unless it exists.

    Raises OSError, with a reason for the user, if there is something else, or a folder that `check_owner` refuses or
    that others may write to.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "is not a folder", os.fspath(path)) from None
        check_owner(path, status)
        if status.st_mode & OTHERS_WRITE:
            raise PermissionError(errno.EPERM, "may be written by other users", os.fspath(path)) from None


def check_owner(path: str | os.PathLike, status: os.stat_result) -> None:
    """Raises PermissionError if a file or folder belongs to another user.

    Root and the owner of the folder that contains it are trusted: they could replace it anyway, and network file
    systems may show one owner for all files.
    """
    if status.st_uid not in (os.geteuid(), 0, os.stat(os.path.dirname(path) or ".").st_uid):
        raise PermissionError(errno.EPERM, f"belongs to another user (uid {status.st_uid})", os.fspath(path))
