"""Addresses of objects in stores (``s3://``, ``gs://``, ``az://``, ``https://``), which `utils.store` reads."""

from __future__ import annotations

import re
from pathlib import Path

SHARDS = ".shards"  # suffix of an index of images in shards
# By folder of the cache: the address of the folder of a store that it mirrors. Known to this process and its workers
# only: a file that says so might come from anyone.
MIRRORS: dict[Path, str] = {}
_URL = re.compile(r"(s3|s3a|gs|az|azure|abfs|abfss|https?)://[^/]+", re.IGNORECASE)


def is_url(text: str) -> bool:
    """Whether ``text`` is the address of an object or folder in a store."""
    return _URL.match(text) is not None


def store_of(url: str) -> str:
    """The store of ``url``: its scheme, and its bucket or host."""
    return _URL.match(url)[0]
