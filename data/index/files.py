"""Lists the files of a split with their sizes and modification times, which tell whether the split has changed.

Each folder is read once with `os.scandir`. Names that begin with a dot, such as the ``._x.jpg`` of macOS, are ignored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from data.image_io.decode import IMAGE_SUFFIXES
from data.index.dataset_yaml import FORMATS, DatasetSpec, SplitSource
from data.labels.findings import BAD_IMAGE, MISSING_IMAGE, REPEATED_IMAGE, UNSUPPORTED, Finding, relative_name
from data.labels.label_format import FileStamp, ImageFile, LabelFile, LabelFormat
from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.machine.limits import explanation

# Image formats that are not supported. They are reported; other files (txt, json, ...) are ignored.
_UNREAD = ".avif .cr2 .dng .exr .gif .heic .heif .jxl .nef .pfm .svg"
_MAX_LIST_BYTES = 1 << 31
NO_FILE = "a pipe or device, not a file; left out"
_UNREAD_SUFFIXES = frozenset(_UNREAD.split(" "))
T = TypeVar("T")


@dataclass(slots=True)
class Listing:
    """The files of a split."""

    images: list[ImageFile]  # sorted by name
    labels: list[LabelFile]  # one per image, or one for all
    label_format: LabelFormat
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # image names in each .txt list, in order


def list_split(spec: DatasetSpec, split: str) -> Listing:
    """Raises UserError when the split, its folder, its annotations or any image is missing."""
    source = spec.split(split)
    found: dict[str, ImageFile] = {}
    findings: list[Finding] = []
    lists: dict[Path, list[str]] = {}
    for entry in source.images:
        files: Iterable[tuple[str, ImageFile]]
        if entry.is_dir():
            files = _in_folder(entry, spec.root, findings)
        elif entry.suffix.lower() == ".txt" and entry.is_file():
            files = list(_in_list(entry, spec.root, findings))
            lists[entry] = [image.name for _, image in files]
        elif entry.exists():
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
        else:
            raise spec.missing(entry)
        for where, image in files:
            if image.name in found:
                findings.append(Finding(where, REPEATED_IMAGE, f"{image.name} is there already; used once"))
            else:
                found[image.name] = image
    if not found:
        searched = ", ".join(map(str, source.images))
        raise UserError(f"{searched}: no images found for '{split}' (looked for {' '.join(sorted(IMAGE_SUFFIXES))})")
    images = [found[name] for name in sorted(found)]
    label_format, labels = _list_labels(images, source, spec)
    return Listing(images, labels, label_format, findings, lists)


def _walk(folder: Path) -> Iterator[tuple[str, list[os.DirEntry]]]:
    """Yields (folder, its entries) for a folder and its subfolders. Symbolic links are followed, each folder once."""
    pending, seen = [str(folder)], set()
    while pending:
        current = pending.pop()
        real = os.path.realpath(current)
        if real in seen:
            continue
        seen.add(real)
        entries = _scan(current)
        pending += [entry.path for entry in entries if _query(entry.is_dir)]
        yield current, entries


def _scan(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if not e.name.startswith(".")]
    except OSError as error:
        if explanation(error):
            raise
        raise UserError(f"{folder}: cannot be listed ({error.strerror})") from None


def _query(call: Callable[..., T], *args: str) -> T | None:
    """The result of a call about a file; None if the file does not exist or is a dangling link.

    Raises OSError when the disk fails: the file may exist, and without it this would be another data set.
    """
    try:
        return call(*args)
    except OSError as error:
        if explanation(error):
            raise
        return None


def _stamp(file: os.DirEntry | Path) -> FileStamp | None:
    status = _query(file.stat)
    return FileStamp(status.st_size, status.st_mtime_ns) if status else None


def _in_folder(folder: Path, root: Path, findings: list[Finding]) -> Iterator[tuple[str, ImageFile]]:
    for current, entries in _walk(folder):
        base, key_base = relative_name(current, root), relative_name(current, folder)
        if not entries and os.path.splitext(current)[1].lower() in IMAGE_SUFFIXES:
            findings.append(Finding(base, BAD_IMAGE, "an empty folder, not a file; left out"))
        for entry in entries:
            if _query(entry.is_dir):
                continue
            name = entry.name if base == "." else f"{base}/{entry.name}"
            suffix = os.path.splitext(entry.name)[1].lower()
            if suffix in _UNREAD_SUFFIXES:
                findings.append(Finding(name, UNSUPPORTED, f"{suffix} is not read; convert it to JPEG or PNG"))
            if suffix not in IMAGE_SUFFIXES:
                continue
            stamp = _stamp(entry)
            if stamp is None or not _query(entry.is_file):
                kind, text = (MISSING_IMAGE, "a link to nothing") if stamp is None else (BAD_IMAGE, NO_FILE)
                findings.append(Finding(name, kind, text))
                continue
            key = entry.name if key_base == "." else f"{key_base}/{entry.name}"
            yield name, ImageFile(name, key, stamp)


def _in_list(file: Path, root: Path, findings: list[Finding]) -> Iterator[tuple[str, ImageFile]]:
    """Rows are absolute paths, or relative ones: to the list's folder if they begin with ``./``, else to the data
    set's folder first."""
    rows = read_text(file, most=_MAX_LIST_BYTES).splitlines()
    here = relative_name(file, root)
    folders = _Folders()
    for line, row in enumerate(rows, 1):
        row = row.strip()
        if not row:
            continue
        where = f"{here}:{line}"
        if os.path.splitext(row)[1].lower() not in IMAGE_SUFFIXES:
            findings.append(Finding(where, UNSUPPORTED, f"{row[:100]!r} is no path of an image"))
            continue
        bases = (file.parent, root) if row.startswith("./") else (root, file.parent)
        for base in bases:
            path = os.path.normpath(os.path.join(base, row))
            entry = folders.entry(path)
            stamp = entry and _stamp(entry)
            if stamp is None:
                continue
            if _query(entry.is_file):
                yield where, ImageFile(relative_name(path, root), os.path.basename(path), stamp)
            else:
                findings.append(Finding(where, BAD_IMAGE, f"{row}: {NO_FILE}"))
            break
        else:
            findings.append(Finding(where, MISSING_IMAGE, f"{row} not found"))


class _Folders:
    """Directory entries by path. Each folder is read once."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, os.DirEntry]] = {}  # by folder and name

    def entry(self, path: str) -> os.DirEntry | None:
        folder, name = os.path.split(path)
        if folder not in self._entries:
            status = _query(os.stat, folder)  # os.path.isdir returns False for a folder on a disk that fails
            entries = _scan(folder) if status and stat.S_ISDIR(status.st_mode) else []
            self._entries[folder] = {e.name: e for e in entries}
        return self._entries[folder].get(name)

    def stamp(self, path: str) -> FileStamp | None:
        entry = self.entry(path)
        return _stamp(entry) if entry else None

    def exists(self, path: str) -> bool:
        return self.stamp(path) is not None


def _list_labels(
    images: list[ImageFile], source: SplitSource, spec: DatasetSpec
) -> tuple[LabelFormat, list[LabelFile]]:
    annotations, label_format = source.annotations, source.label_format
    if label_format is None or (label_format.label_path is None and not annotations.is_file()):
        if not annotations.exists():
            raise spec.missing(annotations)
        known = " nor ".join(f.annotations for f in FORMATS if f.annotations)
        raise UserError(f"{annotations}: neither {known} (named by {spec.source})")
    if label_format.label_path is None:
        return label_format, [LabelFile(relative_name(annotations, spec.root), _stamp(annotations))]
    folders = _Folders()
    bases: dict[str, str] = {}  # relative names of folders, which are slow to find
    labels = []
    for image in images:
        path = label_format.label_path(image, spec.root, annotations, folders.exists)
        folder, name = os.path.split(path)
        if folder not in bases:
            base = relative_name(folder, spec.root)
            bases[folder] = "" if base == "." else base + "/"
        labels.append(LabelFile(bases[folder] + name, folders.stamp(path)))
    return label_format, labels
