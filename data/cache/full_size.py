"""Holds the images that tiles are cut from, decoded at full size, in a file per split and node (`data.cache.mapped`).

Only the file's size is checked, and its end: the file's name, which is written last. Unlike in `--cache disk`, an
image has no checksum, because a tile reads a small part of it: bytes that change after the file is complete are not
found.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial

import numpy as np

from data.cache.decoding import Decoding
from data.cache.mapped import MappedImages, decode_into, pixel_offsets
from data.cache.named_files import CacheName, discard
from data.index.index import DatasetIndex
from utils.files.locks import FileLock
from utils.files.temporary_folder import temporary_folder
from utils.machine.resources import check_space
from utils.program_folders import cache_folder


def open_full_size_cache(index: DatasetIndex, decoding: Decoding, *, cache_dir: str) -> MappedImages:
    """Fills the node's file in the folder ``cache_dir`` if necessary, and maps it.

    The file gets its name once it is complete, and stays for later runs until the data set changes. Call this under
    `torch_distributed_zero_first`. Raises UserError if there is not enough disk space, or an image cannot be decoded.
    """
    folder = cache_folder(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    name = CacheName.of(index)
    path = name.path(folder, 0, ".pixels")
    source_hw = index.image_hw.astype(np.int32)
    open_file = partial(MappedImages, path, source_hw, index.pixels, end=os.fsencode(path.name))
    name.remove_older(folder)
    with contextlib.suppress(OSError):  # before taking the lock, which is impossible in a read-only folder
        return open_file()
    with FileLock(path.with_suffix(".lock")).wait(f"another run that fills {path}"):
        try:
            return open_file()
        except FileNotFoundError:
            pass
        except OSError as error:
            discard("tile", error, path)
        size = int(pixel_offsets(source_hw, index.pixels)[-1])
        free = shutil.disk_usage(folder).free
        check_space("tile", size, free=free, place=folder, remedy="choose another --cache-dir")
        with temporary_folder(path) as temporary, open(temporary / "pixels", "x+b") as file:
            decode_into(file.fileno(), index, source_hw, decoding, title=f"tile: {path}")
            os.pwrite(file.fileno(), os.fsencode(path.name), size)
            os.fsync(file.fileno())
            os.replace(temporary / "pixels", path)
        return open_file()  # while locked: a run whose images differ removes the file
