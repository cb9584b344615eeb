"""Reads the content of image files, on the disk or in shards."""

from __future__ import annotations

import os

from data.image_io.file_kinds import MAX_IMAGE_BYTES
from data.image_io.shards import read_member, shard_index
from utils.errors import UserError
from utils.files.safe_io import read_regular
from utils.machine.limits import raise_if_limit


def read_bytes(path: str | os.PathLike) -> bytes:
    """Returns the content of an image file, or of an image in shards.

    Raises UserError, or OSError when the disk fails.
    """
    index = shard_index(path)
    if index is not None:
        return read_member(path, index)
    try:
        return read_regular(path, max_bytes=MAX_IMAGE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such image") from None
    except OSError as error:
        raise_if_limit(error, path)
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
