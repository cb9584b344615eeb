"""Damaged images that the scan did not find, but whose decoder warns when they are used. They count for ``--max-bad``.

Their names are in a file next to the index cache, to which all ranks and workers of a machine append. Each of them
counts all damaged images, and a later run on the same files starts with the known ones. Machines with separate cache
folders count separately.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

from data.index.index import DatasetIndex
from utils.errors import UserError
from utils.files.folders import cache_folder
from utils.files.safe_io import make_own_folder, open_own
from utils.logger import get_logger

_MAX_BYTES = 10_000  # per image: its path and the warning


class DamagedImages:
    """Picklable: a copy in a worker appends to the same file."""

    def __init__(self, index: DatasetIndex, split: str, *, cache_dir: str, max_bad: float) -> None:
        """``max_bad``: largest fraction of images that may be damaged, including those that the scan left out."""
        self.split = split
        self._root = index.root
        self._images, self._left_out = len(index), index.report.bad_images
        self._max_bad = max_bad
        self._path = cache_folder(cache_dir) / f"{split}-{index.fingerprint}.damaged"
        self._read_bytes = 0
        self._known: dict[str, str] = {}  # warnings of the decoder by name
        self._reported = 0  # of them

    def add(self, path: str, warning: str) -> None:
        """Records a warning of the decoder of the image at ``path``, once per image."""
        name = os.path.relpath(path, self._root)
        self._refresh()
        if name in self._known:
            return
        line = b"\n" + json.dumps([name, warning]).encode() + b"\n"  # after an incomplete line
        try:
            self._append(line)
        except OSError:  # the cache folder is not writable: use the machine's temporary folder
            folder = Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")
            self._path = folder / self._path.name
            try:
                make_own_folder(folder)
                self._append(line)
            except OSError as error:
                where, reason = error.filename or folder, str(error.strerror).lower()
                raise UserError(f"{where}: {reason}; name a writable folder with --cache-dir or TMPDIR") from None

    def check(self, *, log: bool = True) -> None:
        """Logs images that were added since the last call, if ``log``. Raises UserError when there are too many."""
        self._refresh()
        new = list(self._known.items())[self._reported :]
        if not new:
            return
        self._reported = len(self._known)
        for name, warning in new if log else ():
            get_logger().warning(
                "%s: %s is damaged (%s); it is used as decoded",
                self.split, os.path.normpath(os.path.join(self._root, name)), warning,
            )  # fmt: skip
        bad, total = len(self._known) + self._left_out, self._images + self._left_out
        if bad > self._max_bad * total:
            raise UserError(
                f"'{self.split}': {bad} of {total} images are damaged or left out (--max-bad is {self._max_bad:g}; "
                f"first: {next(iter(self._known))}); the damaged ones are listed in {self._path}; --verify full leaves "
                "them out"
            )

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", opener=open_own) as file:  # buffered: a line is one write, completed if it is short
            file.write(line)

    def _refresh(self) -> None:
        """Reads complete lines that have been added."""
        begin = self._read_bytes  # several threads may read the same lines, which is harmless
        try:
            status = os.lstat(self._path)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES * (self._images + 1):
                self._path.unlink()  # not written by this class; a pipe would block its writer
                return
            if status.st_size <= begin:
                return
            with open(self._path, "rb", opener=open_own) as file:
                file.seek(begin)
                text = file.read()
        except OSError:
            return
        text = text[: text.rfind(b"\n") + 1]
        self._read_bytes = begin + len(text)
        for line in text.splitlines():
            try:
                name, warning = json.loads(line)
            except (ValueError, TypeError, RecursionError):  # two machines wrote at the same time
                continue
            if not (isinstance(name, str) and isinstance(warning, str)):
                continue
            self._known.setdefault(name, warning)
