"""Takes away the access to a folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def deny_access(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes the content of a folder inaccessible, also for root."""
    for name in ("stat", "listdir", "scandir"):
        plain = getattr(os, name)

        def checked(path=".", *args, plain=plain, **kwargs):
            if not isinstance(path, int):
                inside = Path(path).is_relative_to(folder) if plain.__name__ != "stat" else folder in Path(path).parents
                if inside:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return plain(path, *args, **kwargs)

        patch.setattr(os, name, checked)
