"""Images that the scan took for sound and whose decoders complain when they are used: named, counted, held against
``--max-bad``.

The names are in a file beside the index cache, which every rank and worker of a machine appends to, so each counts what
all have met; a later run on the same files knows them from its start. On machines with cache folders of their own each
counts what its processes met.
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
from utils.files.safe_io import open_regular
from utils.logger import get_logger

_MOST_BYTES = 10_000  # an image: its path and what its decoder said


class DamagedImages:
    """Picklable: a copy in a worker appends to the same file."""

    def __init__(self, index: DatasetIndex, split: str, *, cache_dir: str, max_bad: float) -> None:
        """``max_bad``: largest share of images that may be damaged, together with those that the scan left out."""
        self.split = split
        self._root = index.root
        self._images, self._left_out = len(index), index.report.bad_images
        self._max_bad = max_bad
        self._path = cache_folder(cache_dir) / f"{split}-{index.fingerprint}.damaged"
        self._read = 0  # bytes
        self._known: dict[str, str] = {}  # complaints by name
        self._said = 0  # of them

    def add(self, path: str, complaint: str) -> None:
        """Notes that the decoder of the image at ``path`` complained; once is enough."""
        name = os.path.relpath(path, self._root)
        self._refresh()
        if name in self._known:
            return
        line = b"\n" + json.dumps([name, complaint]).encode() + b"\n"  # half a line before it is not to swallow it
        try:
            self._append(line)
        except OSError:  # the cache folder cannot be written: a file of the machine's, for this user
            folder = Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")
            self._path = folder / self._path.name
            folder.mkdir(mode=0o700, exist_ok=True)
            self._append(line)

    def check(self, *, aloud: bool = True) -> None:
        """Names images that have become known since the last call, if ``aloud``. UserError when they are too many."""
        self._refresh()
        new = list(self._known.items())[self._said :]
        if not new:
            return
        self._said = len(self._known)
        for name, complaint in new if aloud else ():
            get_logger().warning(
                "%s: %s is damaged (%s); what its decoder made of it is used",
                self.split, os.path.normpath(os.path.join(self._root, name)), complaint,
            )  # fmt: skip
        bad, total = len(self._known) + self._left_out, self._images + self._left_out
        if bad > self._max_bad * total:
            raise UserError(
                f"'{self.split}': {bad} of {total} images are damaged or left out (max_bad allows a share of "
                f"{self._max_bad:g}; first: {next(iter(self._known))}); the damaged ones are listed in {self._path}; "
                "--verify full leaves them out"
            )

    def _append(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab") as file:  # buffered: a line is one write, and a short one is completed
            file.write(line)

    def _refresh(self) -> None:
        """Reads the whole lines that have been added."""
        begin = self._read  # several threads may read the same lines: that does no harm
        try:
            status = os.stat(self._path)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES * (self._images + 1):
                self._path.unlink()  # none of our making; a pipe would keep its writer waiting
                return
            if status.st_size <= begin:
                return
            with open_regular(self._path) as file:
                file.seek(begin)
                text = file.read()
        except OSError:
            return
        text = text[: text.rfind(b"\n") + 1]
        self._read = begin + len(text)
        for line in text.splitlines():
            try:
                name, complaint = json.loads(line)
            except (ValueError, TypeError, RecursionError):  # two machines wrote at once
                continue
            if not (isinstance(name, str) and isinstance(complaint, str)):
                continue
            self._known.setdefault(name, complaint)
