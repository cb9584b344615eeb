"""Checkpoint files: plain tensors and plain data that load with ``weights_only=True``, replaced atomically."""

from __future__ import annotations

import pickle
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch

from utils.errors import UserError
from utils.machine_limits import explanation
from utils.torch_zip import open_zip
from utils.whole_file import replacing

FORMAT = "lockstep"
VERSION = 1
_KINDS = {
    **dict.fromkeys(("version", "imgsz"), int),
    **dict.fromkeys(("model_spec", "model", "ema", "optimizer", "scaler", "progress", "run"), dict),
    **dict.fromkeys(("config", "hyp", "data", "metrics"), dict),
    "names": list,
}


def write_checkpoint(content: dict[str, Any], path: str | Path) -> None:
    """Replaces ``path`` whole, and durably. Raises OSError (a full disk, say) with the old file untouched."""
    with replacing(path, durable=True) as file:
        sink = _Sink(file)
        try:
            torch.save({"format": FORMAT, "version": VERSION, **content}, sink)
        except RuntimeError as error:
            raise sink.error or error from None


class _Sink:
    """Passes writes on and keeps the system's error, of which torch's zip writer tells only that there was one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _check_sums(path: Path) -> None:
    """Raises UserError where an entry's checksum is wrong, at which torch does not look."""
    with open_zip(path) as archive:
        try:
            wrong = archive.testzip()
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) and explanation(error):  # no fault of the file's
                error.filename = str(path)
                raise
            raise UserError(f"{path}: damaged checkpoint ({str(error)[:100]})") from None
        if wrong is not None:
            raise UserError(f"{path}: damaged checkpoint (the checksum of its entry {wrong[:100]} is wrong)")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of one of our checkpoints, on the CPU. Raises UserError for anything else, running no code."""
    path = Path(path)
    _check_sums(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of odd kinds of tensors, which are refused below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path}: not a checkpoint of this program (it holds foreign objects)") from None
    except Exception as error:  # the unpickler has no error of its own for what it cannot make sense of
        if isinstance(error, OSError) and explanation(error):  # no fault of the file's
            error.filename = str(path)
        if explanation(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged checkpoint ({reason})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this program")
    for key, kind in _KINDS.items():
        if not isinstance(content.get(key, kind()), kind) and (key, content[key]) != ("ema", None):
            raise UserError(f"{path}: damaged checkpoint ('{key}' is no {kind.__name__})")
    for key in ("model", "ema"):
        for name, tensor in (content.get(key) or {}).items():
            if not (isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided):
                raise UserError(f"{path}: damaged checkpoint ('{key}' holds '{str(name)[:100]}', which is no weight)")
    if content.get("version", 0) > VERSION:
        raise UserError(f"{path}: written by a newer version (format {content['version']}); update this program")
    return content
