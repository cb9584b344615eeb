"""Sizes in a PyTorch zip file, checked against the file before anything in it is read or allocated."""

from __future__ import annotations

import zipfile
from pathlib import Path

from utils.errors import UserError
from utils.machine_limits import explanation


def open_zip(path: str | Path) -> zipfile.ZipFile:
    """The archive, for its caller to close. Raises UserError for what is none, or compresses or overstates entries.

    Torch stores entries as they are, so together they cannot exceed the file; one that inflates is no checkpoint.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        reading = error if isinstance(error, OSError) else error.__context__  # zipfile takes it for another file
        if isinstance(reading, OSError) and explanation(reading):  # no fault of the file's
            reading.filename = str(path)
            raise reading from None
        raise UserError(f"{path}: truncated, or not a PyTorch checkpoint (zip format, torch >= 1.6)") from None
    entries = archive.infolist()
    why = ""
    if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
        why = "its entries are compressed, which PyTorch's are not"
    elif min((e.header_offset for e in entries), default=0):  # torch would read that, and not what is checked here
        why = "something stands before the archive"
    elif len({e.filename for e in entries}) < len(entries):
        why = "two of its entries have the same name"
    elif sum(e.file_size for e in entries) > Path(path).stat().st_size:
        why = "its entries declare more data than the file has"
    if why:
        archive.close()
        raise UserError(f"{path}: refused: {why}")
    return archive
