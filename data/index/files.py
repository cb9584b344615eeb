"""The files of a split with their sizes and modification times: what tells that nothing has changed.

Folders are read whole, one `os.scandir` each, rather than asking for every file by name. Names that begin with a dot
(among them the ``._x.jpg`` that macOS leaves) are not part of a data set.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data.image_io.decode import IMAGE_SUFFIXES
from data.index.dataset_yaml import FORMATS, DatasetSpec, SplitSource
from data.labels.findings import BAD_IMAGE, MISSING_IMAGE, REPEATED_IMAGE, UNSUPPORTED, Finding, relative_name
from data.labels.label_format import FileStamp, ImageFile, LabelFile, LabelFormat
from utils.errors import UserError
from utils.files.safe_io import read_regular
from utils.machine.limits import explanation

# Pictures that users may expect to be read; they are told, other files (txt, json, ...) are none of our business.
_UNREAD = ".avif .cr2 .dng .exr .gif .heic .heif .jxl .nef .pfm .svg"
_MOST_OF_A_LIST = 1 << 31  # bytes
NO_FILE = "a pipe or device, not a file; left out"
_UNREAD_SUFFIXES = frozenset(_UNREAD.split(" "))


@dataclass(slots=True)
class Listing:
    """Images sorted by name, which doesn't depend on the file system; one label file each unless all share one."""

    images: list[ImageFile]
    labels: list[LabelFile]  # one per image, or one for all
    label_format: LabelFormat
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # names that each .txt list gives, in its order


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
        places = ", ".join(map(str, source.images))
        raise UserError(f"{places}: no images found for '{split}' (looked for {' '.join(sorted(IMAGE_SUFFIXES))})")
    images = [found[name] for name in sorted(found)]
    label_format, labels = _list_labels(images, source, spec)
    return Listing(images, labels, label_format, findings, lists)


def _walk(folder: Path) -> Iterator[tuple[str, list[os.DirEntry]]]:
    """(folder, its entries) for a folder and those inside it, symbolic links followed, each real folder once."""
    pending, seen = [str(folder)], set()
    while pending:
        current = pending.pop()
        real = os.path.realpath(current)
        if real in seen:
            continue
        seen.add(real)
        entries = _scan(current)
        pending += [entry.path for entry in entries if _is_folder(entry)]
        yield current, entries


def _is_directory(path: str) -> bool:
    """Unlike ``os.path.isdir``, which takes a folder on a disk that fails for none."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if explanation(error):
            error.filename = path
            raise
        return False


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if explanation(error):
            raise
        return False  # a link to itself


def _scan(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if not e.name.startswith(".")]
    except OSError as error:
        if explanation(error):
            error.filename = folder
            raise
        raise UserError(f"{folder}: cannot be listed ({error.strerror})") from None


def _is_regular(entry: os.DirEntry) -> bool:
    """Whether it can be read to its end; a pipe would keep its reader waiting."""
    try:
        return entry.is_file()
    except OSError as error:
        if explanation(error):
            raise
        return False


def _stamp(entry: os.DirEntry | Path) -> FileStamp | None:
    try:
        status = entry.stat()
    except OSError as error:
        if explanation(error):  # the file may well be there: without it the data set would be another
            raise
        return None  # a dangling link, or gone since
    return FileStamp(status.st_size, status.st_mtime_ns)


def _in_folder(folder: Path, root: Path, findings: list[Finding]) -> Iterator[tuple[str, ImageFile]]:
    for current, entries in _walk(folder):
        base, key_base = relative_name(current, root), relative_name(current, folder)
        if not entries and os.path.splitext(current)[1].lower() in IMAGE_SUFFIXES:
            findings.append(Finding(base, BAD_IMAGE, "an empty folder, not a file; left out"))
        for entry in entries:
            if _is_folder(entry):
                continue
            name = entry.name if base == "." else f"{base}/{entry.name}"
            suffix = os.path.splitext(entry.name)[1].lower()
            if suffix in _UNREAD_SUFFIXES:
                findings.append(Finding(name, UNSUPPORTED, f"{suffix} is not read; convert it to JPEG or PNG"))
            if suffix not in IMAGE_SUFFIXES:
                continue
            stamp = _stamp(entry)
            if stamp is None or not _is_regular(entry):
                kind, text = (MISSING_IMAGE, "a link to nothing") if stamp is None else (BAD_IMAGE, NO_FILE)
                findings.append(Finding(name, kind, text))
                continue
            key = entry.name if key_base == "." else f"{key_base}/{entry.name}"
            yield name, ImageFile(name, key, stamp)


def _in_list(file: Path, root: Path, findings: list[Finding]) -> Iterator[tuple[str, ImageFile]]:
    """Rows are paths: absolute, from the list's own folder (``./`` in front), or from the data set's folder."""
    try:
        rows = read_regular(file, most=_MOST_OF_A_LIST).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    here = relative_name(file, root)
    folders = _StampedFolders()
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
            stamp = folders.stamp(path)
            if stamp is not None and not folders.is_regular(path):
                findings.append(Finding(where, BAD_IMAGE, f"{row}: {NO_FILE}"))
                break
            if stamp is not None:
                yield where, ImageFile(relative_name(path, root), os.path.basename(path), stamp)
                break
        else:
            findings.append(Finding(where, MISSING_IMAGE, f"{row} not found"))


class _StampedFolders:
    """Stamps of files by path, each folder read once."""

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, os.DirEntry]] = {}

    def stamp(self, path: str) -> FileStamp | None:
        folder, name = os.path.split(path)
        if folder not in self._folders:
            entries = _scan(folder) if _is_directory(folder) else []
            self._folders[folder] = {e.name: e for e in entries}
        entry = self._folders[folder].get(name)
        return _stamp(entry) if entry else None

    def exists(self, path: str) -> bool:
        return self.stamp(path) is not None

    def is_regular(self, path: str) -> bool:
        """Of a path that has a stamp."""
        folder, name = os.path.split(path)
        return _is_regular(self._folders[folder][name])


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
    folders = _StampedFolders()
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
