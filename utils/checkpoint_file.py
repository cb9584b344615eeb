"""Checkpoint files: plain tensors and plain data that load with ``weights_only=True``, replaced atomically."""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from utils.errors import UserError

FORMAT = "lockstep"
VERSION = 1


def write_checkpoint(content: dict[str, Any], path: str | Path) -> None:
    """Writes beside ``path``, fsyncs, renames: a reader sees the old file or the new one, never a torn one.

    Raises OSError (a full disk, say) with the old file untouched and the temporary one removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, "version": VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):  # torch's zip writer reports a failed write so
            raise OSError(f"{path}: could not be written ({str(error).splitlines()[0]})") from error
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_checkpoint(path: str | Path) -> bool:
    """True when ``path`` holds a checkpoint that this program wrote (of any version)."""
    try:
        read_checkpoint(path)
    except UserError:
        return False
    return True


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of one of our checkpoints, on the CPU. Raises UserError for anything else, running no code."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: truncated, or not a checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path}: not a checkpoint of this program (it holds foreign objects)") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged checkpoint ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this program")
    if content["version"] > VERSION:
        raise UserError(f"{path}: written by a newer version (format {content['version']}); update this program")
    return content
