"""Paths, and file names relative to a folder: `relative_name` and `path_of` are inverses.

Both treat paths as text and so keep symbolic links. Therefore `normal_path` first resolves ``..`` as the kernel does:
after a symbolic link, ``..`` is the folder above the link's target, not above the link.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from utils.errors import UserError


def normal_path(path: str | os.PathLike) -> Path:
    """Returns the absolute path of the same file without ``..``. Keeps symbolic links, except those before a ``..``.
    What cannot be accessed, or is longer than file systems allow, is taken for no link."""
    path = Path(path).absolute()
    if ".." not in path.parts:
        return path
    folder = Path(path.anchor)
    for part in path.parts[1:]:
        if part != "..":
            folder = folder / part
        elif os.path.islink(folder):  # Path.is_symlink would raise without access, or for too long a name
            folder = Path(os.path.realpath(folder)).parent
        else:
            folder = folder.parent
    return folder


def relative_name(path: str | os.PathLike, root: str | os.PathLike) -> str:
    """Returns ``path`` relative to the folder ``root``, with ``/``. The result begins with ``..`` if it is outside, and
    is absolute on another drive.

    `path_of` is the inverse. No other function may join such a name with its folder: if the folder's path contains a
    symbolic link, the kernel would resolve the leading ``..`` to another folder.
    """
    path = os.fspath(path)
    root = os.fspath(root)
    if ".." in path:
        path = normal_path(path)
    if ".." in root:
        root = normal_path(root)
    try:
        return os.path.relpath(path, root).replace(os.sep, "/")
    except ValueError:  # on another drive of Windows
        return str(path).replace(os.sep, "/")


def path_of(name: str, root: str | os.PathLike) -> str:
    """Returns the absolute path of the file that `relative_name` calls ``name``, relative to the folder ``root``."""
    return os.path.normpath(os.path.join(root, name))


def casefold_nfc(name: str) -> str:
    """Normalizes a name so that names that differ only in case or in the composition of accents become equal."""
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def is_inside(path: str | os.PathLike, folder: str | os.PathLike) -> bool:
    """Returns whether ``path`` is ``folder`` or below it, after resolving all symbolic links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_output_folder(folder: Path) -> None:
    """Raises UserError unless ``folder`` exists or can be created, and can be written. For use before long work, since
    the system refuses some folders only when they are written."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UserError(f"{existing}: is not a folder; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{existing}: cannot be written; choose another folder")


def check_new_path(path: Path) -> None:
    """Raises UserError unless ``path`` does not exist and can be created (`check_output_folder`)."""
    if os.path.lexists(path):
        raise UserError(f"{path}: exists; remove it, or choose another name")
    check_output_folder(path.absolute().parent)
