"""Checksums of files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a file, in hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_tree(path: Path) -> str:
    """Returns the sha256 of a file, or for a folder, of its sorted file names and their checksums. Files
    whose names begin with a dot, which file managers add, do not count."""
    if not path.is_dir():
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            digest.update(f"{file.relative_to(path)}\0{sha256_of(file)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
