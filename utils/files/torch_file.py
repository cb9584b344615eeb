"""Reads PyTorch files (torch >= 1.6) as data: a zip archive of raw storages and one pickle.

No code in a file is run (`utils.files.pickle_program`), and the memory that it can request is bounded by its size.
Tensors are views of the storages, which are entries of the archive.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from utils.errors import UserError, first_line, os_reason
from utils.files.pickle_program import Record, read_program
from utils.files.safe_io import open_regular
from utils.machine.limits import raise_if_limit

MAX_PICKLE_BYTES = 64 * 2**20
MAX_DIMENSIONS = 16
MAX_AMPLIFICATION = 16  # tensor bytes per file byte: float16 to float32, and some shared storages
STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_IS_FOLDER = 0x10  # among an entry's attributes
_READ_BYTES = 1 << 24
# Errors that zipfile raises for an archive that is damaged, or that the disk fails to read.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError, ValueError)


class TorchFile:
    """A context manager that opens a PyTorch file for reading data only. Raises UserError, beginning with the path, for
    other files and for contradictions in the file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open_checkpoint(path)
        try:
            self._zip = open_zip(self._file, path)
            self._entries = {entry.filename: entry for entry in self._zip.infolist()}
            self._allowance = MAX_AMPLIFICATION * os.fstat(self._file.fileno()).st_size
            self._storages: dict[str, Tensor] = {}
            self.content = self._read_content()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check_sums(self) -> None:
        """Raises UserError if the checksum of any entry is wrong, even if nothing refers to the entry."""
        try:
            wrong = self._zip.testzip()
        except _ZIP_ERRORS as error:
            raise_if_limit(error, self.path)
            raise UserError(f"{self.path}: damaged checkpoint ({str(error)[:100]})") from None
        if wrong is not None:
            raise UserError(f"{self.path}: damaged checkpoint (the checksum of its entry {wrong[:100]} is wrong)")

    def view(self, value: Any) -> Tensor | None:
        """Returns the tensor of a record as a view of its storage, or None for other values. Raises UserError if the
        file's tensors are far larger than the file."""
        if isinstance(value, Record) and value.calls("_rebuild_parameter", "_rebuild_parameter_with_state"):
            value = value.args[0] if value.args else None
        if not isinstance(value, Record):
            return None
        if value.calls("_rebuild_tensor", "_rebuild_tensor_v2"):
            return self._tensor(value)
        if value.kind.module == "torch._utils" and value.kind.name.startswith("_rebuild"):
            raise self.refuse(f"a tensor is of a kind that no detector has ({value.kind})")
        return None

    def _tensor(self, record: Record) -> Tensor:
        try:
            storage, offset, size, stride = record.args[:4]
            if len(size) > MAX_DIMENSIONS:
                raise ValueError
            flat = self._bytes_of(storage.key).view(STORAGE_DTYPES[storage.kind])
            view = flat.as_strided(size, stride, offset).detach()  # torch checks that it is within the storage
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError):
            raise self.refuse("a tensor does not match the stored data") from None
        self._allowance -= max(view.element_size(), 4) * view.numel()
        if self._allowance < 0:
            raise self.refuse("its tensors declare far more data than the file has")
        return view

    def refuse(self, reason: str) -> UserError:
        return UserError(f"{self.path}: refused: {reason}")

    def _bytes_of(self, key: str) -> Tensor:
        """Reads the bytes of a storage, uint8, once, because many tensors can be views of it."""
        if key not in self._storages:
            entry = self._entries[f"{self._folder}data/{key}"]
            content = torch.empty(entry.file_size, dtype=torch.uint8, device="cpu")
            target = content.numpy().data
            position = 0
            with self._reading(entry.filename), self._zip.open(entry) as source:
                while part := source.read(_READ_BYTES):
                    target[position : position + len(part)] = part
                    position += len(part)
            self._storages[key] = content
        return self._storages[key]

    def _read(self, entry: str) -> bytes:
        with self._reading(entry):
            return self._zip.read(entry)

    @contextlib.contextmanager
    def _reading(self, entry: str) -> Iterator[None]:
        try:
            yield
        except _ZIP_ERRORS as error:
            raise_if_limit(error, self.path)
            raise UserError(f"{self.path}: damaged (entry {entry[:100]} cannot be read)") from None

    def _read_content(self) -> Any:
        pickles = [name for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise UserError(f"{self.path}: not a PyTorch checkpoint (no data.pkl inside)")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = self._folder + "byteorder"
        if order in self._entries and self._read(order) != b"little":
            raise self.refuse("it was written on a big-endian machine")
        if self._entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise self.refuse(f"its object graph exceeds {MAX_PICKLE_BYTES >> 20} MiB")
        program = self._read(pickles[0])
        try:
            return read_program(program)
        except pickle.UnpicklingError as error:
            raise self.refuse(first_line(error)) from None


def open_checkpoint(path: str | Path) -> BinaryIO:
    """Opens a checkpoint, once for everything that is read from it: a training process may replace the file
    meanwhile."""
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such checkpoint") from None
    except OSError as error:
        raise_if_limit(error, path)
        raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None


def open_zip(file: BinaryIO, path: str | Path) -> zipfile.ZipFile:
    """Opens the zip archive in a file from `open_checkpoint`, which the caller closes. PyTorch stores entries
    uncompressed, so together they cannot exceed the file. Raises UserError for anything else."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        # zipfile also raises BadZipFile if reading fails.
        raise_if_limit(error if isinstance(error, OSError) else error.__context__ or error, path)
        raise UserError(f"{path}: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)") from None
    reason = _contradiction(archive.infolist(), os.fstat(file.fileno()).st_size)
    if reason:
        raise UserError(f"{path}: refused: {reason}")
    return archive


def _contradiction(entries: list[zipfile.ZipInfo], file_bytes: int) -> str:
    """Returns the property of ``entries``, in an archive of ``file_bytes``, that PyTorch never writes, or ""."""
    if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
        return "its entries are compressed, but PyTorch's never are"
    if any(not e.filename or e.is_dir() or e.external_attr & _IS_FOLDER for e in entries):  # torch reads nothing
        return "it holds folders or entries without a name"
    if min((e.header_offset for e in entries), default=0):  # torch would read that data, which is not checked here
        return "there is data before the archive"
    if len({e.filename for e in entries}) < len(entries):
        return "two of its entries have the same name"
    if sum(e.file_size for e in entries) > file_bytes:
        return "its entries declare more data than the file has"
    return ""
