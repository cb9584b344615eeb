"""Names cache files on the disk, so that later runs find them, and removes old and unusable ones."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path
from typing import NamedTuple

from data.index.index import DatasetIndex, digest_of
from utils.errors import UserError
from utils.files.locks import FileLock
from utils.logger import get_logger

_SUFFIXES = (".lmdb", ".complete", ".pixels")
_VERSION = 8  # part of each file name; increase it when the layout of a file or `read_source` changes


class CacheName(NamedTuple):
    """The name of a cache file, which identifies the data set, the version of its images, and the selected images.

    Labels and class names are not part of it, so that editing them causes no decoding. With a size and a suffix it is,
    for example, ``lockstep-1000-train-KEY-CONTENT-SELECTION-IMAGES-640.lmdb``.
    """

    key: str  # identifies user, data set and split, whatever the content
    content: str  # digest of the image files of the split, their pixel format, and the version of this code
    selection: str  # digest of the settings that select images
    images: str  # digest of the selected images

    @classmethod
    def of(cls, index: DatasetIndex) -> CacheName:
        """Names the caches of the images of ``index``."""
        return cls(
            key=f"lockstep-{os.getuid()}-{index.cache_key}",
            content=digest_of(_VERSION, index.image_files, index.pixels.content())[:16],
            selection=digest_of(index.selection)[:16],
            images=index.image_digest()[:16],
        )

    def path(self, folder: Path, imgsz: int, suffix: str) -> Path:
        """Returns the path of the file with images of size ``imgsz``, 0 for full size. ``suffix``: ends its name.

        A file of the same images that was written with other settings is reused.
        """
        path = folder / f"{'-'.join(self)}-{imgsz}{suffix}"
        same_images = f"{glob.escape(self.key)}-{self.content}-*-{self.images}-{imgsz}{suffix}"
        return path if path.exists() else next(folder.glob(same_images), path)

    def replaces(self, name: str) -> bool:
        """Returns whether the file ``name``, with the same key, is out of date: its images have changed, or the same
        settings now select others. Caches for other settings are kept, because runs may alternate between settings."""
        if f"-{self.content}-" not in name:
            return True
        return f"-{self.selection}-" in name and f"-{self.images}-" not in name

    def remove_older(self, folder: Path) -> None:
        """Removes the caches that this one replaces, except caches that are being filled.

        A process that reads a removed cache keeps its mapping until it ends.
        """
        for path in folder.glob(f"{glob.escape(self.key)}-*"):
            if path.suffix in _SUFFIXES and self.replaces(path.name):
                with contextlib.suppress(OSError), FileLock(path.with_suffix(".lock")) as lock:
                    holder = lock.acquire()
                    if not holder:
                        path.unlink()
                        lock.path.unlink()


def discard(flag: str, reason: Exception, *files: Path) -> None:
    """Removes the ``files`` of a cache, the last of which cannot be used, and logs a warning.

    Raises UserError if a file cannot be removed.
    """
    cause = reason.strerror if isinstance(reason, OSError) else reason
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{flag}: {file}: cannot be used ({cause}), nor removed ({error.strerror})") from None
    get_logger().warning("%s: %s cannot be used (%s); it is created again", flag, files[-1], cause)
