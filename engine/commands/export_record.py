"""The record of the files that a run has exported itself (``--export``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from utils.config.export_formats import EXPORT_FORMATS
from utils.errors import UserError
from utils.files.checksum import sha256_of, sha256_of_tree
from utils.files.safe_io import read_text, write_whole
from utils.logger import get_logger
from utils.schema import build

EXPORT_RECORD = ".exports"  # in the folder of a run
MAX_RECORD_BYTES = 1 << 16


@dataclass(frozen=True)
class ExportedFile:
    """An export of a run. Unlike times, checksums also identify the files in a copy of the run's folder."""

    weights_sha256: str  # checksum of the checkpoint
    sha256: str  # checksum of the file, or of the folder
    replaces: str = ""  # sha256 of the earlier export that it replaces, which a killed run leaves in place; "": none


@dataclass(frozen=True)
class _Content:
    """The content of the record."""

    files: dict[str, ExportedFile] = field(default_factory=dict)  # by format


class ExportRecord:
    """The files that a run has exported from its checkpoint ``best``, and from earlier ones of the same name.

    A file that is not in the record, or has changed since, belongs to the user: the run does not replace it.
    """

    def __init__(self, best: Path) -> None:
        self._best = best
        self._path = best.with_name(EXPORT_RECORD)
        self._checksum = sha256_of(best)
        self._files = self._read()

    def missing(self, formats: Sequence[str]) -> list[str]:
        """Returns the ``formats`` that the run has yet to export from this checkpoint. Leaves out, with a warning, a
        format whose place is taken by a file of the user."""
        missing = []
        for name in formats:
            path = self._path_of(name)
            recorded = self._files.get(name)
            if not path.exists():
                missing.append(name)
                continue
            sha256 = "" if recorded is None else sha256_of_tree(path)
            if recorded is None or sha256 not in (recorded.sha256, recorded.replaces):
                get_logger().warning(
                    "--export %s: %s is not an export of this run, and stays; remove it to have it exported", name, path
                )
            elif sha256 != recorded.sha256 or recorded.weights_sha256 != self._checksum:
                missing.append(name)
        return missing

    def add(self, name: str, file: Path) -> None:
        """Records ``file`` before it becomes the export of the format ``name``, so that after a kill in between, the
        next start recognizes either file as the run's own. The caller holds the lock of the folder, so that no other
        process changes the record."""
        path = self._path_of(name)
        earlier = sha256_of_tree(path) if path.exists() else ""
        exported = ExportedFile(self._checksum, sha256_of_tree(file), replaces=earlier)
        self._files = self._read() | {name: exported}  # it may have changed before the folder was locked
        self._write()

    def _path_of(self, name: str) -> Path:
        """Returns the path of an export without options (`engine.export.exporter.file_path`)."""
        return self._best.with_name(self._best.stem + EXPORT_FORMATS[name].suffix)

    def _read(self) -> dict[str, ExportedFile]:
        """Returns the files in the record; none if it is missing or damaged."""
        try:
            stored = json.loads(read_text(self._path, MAX_RECORD_BYTES))
            return dict(build(_Content, stored, str(self._path)).files)
        except (UserError, ValueError, RecursionError):
            return {}

    def _write(self) -> None:
        """Writes the record. The formats are exported even if the disk is full."""
        content = _Content(self._files)
        try:
            write_whole(self._path, json.dumps(asdict(content)))
        except OSError as error:
            get_logger().warning("%s: cannot be written (%s)", self._path, error.strerror or error)
