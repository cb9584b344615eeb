"""Lists the files of a split with their sizes and modification times, which show whether the split has changed.

Names that begin with a dot, such as the ``._x.jpg`` of macOS, are ignored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from data.image_io.decode import ARRAY_SUFFIX, IMAGE_SUFFIXES, SHARDS, image_suffixes, unread_image, unread_summary
from data.labels.findings import (
    BAD_IMAGE,
    BAD_LISTED,
    MISSING_IMAGE,
    REPEATED_IMAGE,
    UNSUPPORTED,
    Finding,
    relative_name,
)
from data.labels.label_format import FileStamp, ImageFile, LabelFile, LabelFormat
from data.spec.dataset_spec import WITHOUT_VAL, DatasetSpec, SplitSource
from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.logger import get_logger
from utils.machine.limits import explanation

_MAX_LIST_BYTES = 1 << 31
NO_FILE = "a pipe or device, not a file; left out"
_MOST_TRIED = 10  # rows of a list that was written for another folder
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
    """Raises UserError if the split, its folder, its annotations or any image is missing, or it joins data sets."""
    source = spec.split(split)
    if source.parts:
        raise UserError(
            f"{spec.source}: '{split}' joins other data sets, which are not copied; name one, or leave out --stage"
        )
    found: dict[str, ImageFile] = {}
    findings: list[Finding] = []
    lists: dict[Path, list[str]] = {}
    suffixes = image_suffixes(spec.pixels)
    for entry in source.images:
        if entry.suffix == SHARDS:
            raise UserError(f"{entry}: is in shards, which are neither listed nor copied; name a folder of images")
        if entry == Path(entry.anchor):
            raise UserError(f"{spec.source}: '{split}' is {entry}, the whole disk; name the folder of its images")
        files: Iterable[tuple[str, ImageFile]]
        if entry.is_dir():
            files = _in_folder(entry, spec.root, findings, suffixes)
        elif entry.suffix.lower() == ".txt" and entry.is_file():
            files = list(_in_list(entry, spec.root, findings, suffixes))
            lists[entry] = [image.name for _, image in files]
        elif entry.exists():
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
        else:
            raise spec.missing_error(entry)
        for where, image in files:
            if image.name in found:
                findings.append(Finding(where, REPEATED_IMAGE, f"{image.name} is there already; used once"))
            else:
                found[image.name] = image
    if not found:
        searched, unread = ", ".join(map(str, source.images)), unread_files(findings)
        text = f"{searched}: no images found for '{split}' (looked for {' '.join(sorted(suffixes))})"
        text += f"; {unread_summary(unread)}" if unread else ""
        raise UserError(text + (f"; add some, or {WITHOUT_VAL}" if split == "val" else ""))
    images = [found[name] for name in sorted(found)]
    label_format, labels = _list_labels(images, source, spec)
    return Listing(images, labels, label_format, findings, lists)


def without_empty(spec: DatasetSpec, splits: Iterable[str]) -> DatasetSpec:
    """``spec`` without those of ``splits`` that are folders without any image."""
    suffixes = image_suffixes(spec.pixels)

    def is_empty(source: SplitSource) -> bool:
        entries = (entry for folder in source.images for _, found in _walk(folder) for entry in found)
        return all(map(Path.is_dir, source.images)) and not any(_is_image(entry.name, suffixes) for entry in entries)

    kept = {name: s for name, s in spec.splits.items() if name not in splits or not s.images or not is_empty(s)}
    return replace(spec, splits=kept)


def shards_of(spec: DatasetSpec, split: str) -> Path | None:
    """The index of the shards of a split; None for a split in files. Raises UserError for a mixture."""
    images = spec.split(split).images
    found = [path for path in images if path.suffix == SHARDS]
    if found and len(images) > 1:
        raise UserError(f"{spec.source}: '{split}': {found[0]} must be the only entry; join data sets by their YAMLs")
    return found[0] if found else None


def unread_files(findings: Iterable[Finding]) -> list[str]:
    """What `unread_summary` takes."""
    return [f"{finding.where}: {finding.text}" for finding in findings if finding.kind == UNSUPPORTED]


def _walk(folder: Path) -> Iterator[tuple[str, list[os.DirEntry]]]:
    """Folders and their entries, from ``folder`` on. Symbolic links are followed, each folder is read once."""
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
    """The result of a call about a file; None if it does not exist or is a dangling link. Raises OSError when the disk
    fails: without the file this would be another data set."""
    try:
        return call(*args)
    except OSError as error:
        if explanation(error):
            raise
        return None
    except ValueError:  # a null character in its name
        return None


def _stamp(file: os.DirEntry | Path) -> FileStamp | None:
    status = _query(os.stat, file)  # `DirEntry.stat` would keep its result, half the memory of a listing
    return FileStamp(status.st_size, status.st_mtime_ns) if status else None


def _in_folder(
    folder: Path, root: Path, findings: list[Finding], suffixes: frozenset[str]
) -> Iterator[tuple[str, ImageFile]]:
    for current, entries in _walk(folder):
        base, key_base = relative_name(current, root), relative_name(current, folder)
        if not entries and _is_image(current, suffixes):
            findings.append(Finding(base, BAD_IMAGE, "an empty folder, not a file; left out", lost_images=1))
        stems = set()  # of images next to which arrays are copies, which other programs cache
        if ARRAY_SUFFIX in suffixes:
            stems = {os.path.splitext(e.name)[0] for e in entries if _is_image(e.name, IMAGE_SUFFIXES)}
        for entry in entries:
            if _query(entry.is_dir):
                continue
            name = entry.name if base == "." else f"{base}/{entry.name}"
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ARRAY_SUFFIX and stem in stems:
                continue
            if suffix.lower() not in suffixes:
                if what := unread_image(entry.path):
                    findings.append(Finding(name, UNSUPPORTED, what))
                continue
            stamp = _stamp(entry)
            if stamp is None or not _query(entry.is_file):
                kind, text = (MISSING_IMAGE, "a link to nothing") if stamp is None else (BAD_IMAGE, NO_FILE)
                findings.append(Finding(name, kind, text, lost_images=1))
                continue
            key = entry.name if key_base == "." else f"{key_base}/{entry.name}"
            yield name, ImageFile(name, key, stamp)


def _in_list(
    file: Path, root: Path, findings: list[Finding], suffixes: frozenset[str]
) -> Iterator[tuple[str, ImageFile]]:
    """Rows are absolute paths, or relative ones: to the list's folder if they begin with ``./``, else to the data
    set's folder first. If none is an image, see `_elsewhere`."""
    rows = [(line, row.strip()) for line, row in enumerate(read_text(file, most=_MAX_LIST_BYTES).splitlines(), 1)]
    rows = [(line, row) for line, row in rows if row]
    here, folders = relative_name(file, root), _Folders()

    def as_written(row: str) -> str | None:
        if not _is_image(row, suffixes):
            return None
        bases = (file.parent, root) if row.startswith("./") else (root, file.parent)
        return next(filter(folders.exists, (os.path.normpath(os.path.join(base, row)) for base in bases)), None)

    find = as_written
    if rows and not any(as_written(row) for _, row in rows):
        folder, left_out = _elsewhere(rows, file, root, suffixes)

        def find(row: str) -> str | None:
            path = os.path.join(folder, *_parts(row)[left_out:])
            endings = ("",) if _is_image(row, suffixes) else (*suffixes, *map(str.upper, suffixes))
            found = [path + ending for ending in endings if folders.exists(path + ending)]
            return found[0] if len(found) == 1 else None

    for line, row in rows:
        where, path = f"{here}:{line}", find(row)
        if path is None:
            kind, text = MISSING_IMAGE, f"{row} not found"
            if find == as_written and not _is_image(row, suffixes):
                kind, text = BAD_LISTED, f"{row[:100]!r} is not the path of an image"
            findings.append(Finding(where, kind, text, lost_images=1))
        elif not _query(folders.entry(*os.path.split(path)).is_file):
            findings.append(Finding(where, BAD_IMAGE, f"{row}: {NO_FILE}", lost_images=1))
        else:
            stamp = folders.stamp(*os.path.split(path))
            yield where, ImageFile(relative_name(path, root), os.path.basename(path), stamp)


def _elsewhere(rows: list[tuple[int, str]], file: Path, root: Path, suffixes: frozenset[str]) -> tuple[Path, int]:
    """Where the images of a list are whose rows name none as written: with Windows separators, for another folder
    (``data/obj_train_data/a.jpg`` of CVAT, absolute paths of another machine), or without suffixes (VOC's ``000012``).

    The first of ``rows`` (line, text) that ends like the path of one image in the data set decides for all: returns the
    folder of the images, and how many first parts of rows to leave out. Raises UserError if none fits, or several do.
    """
    names = {_parts(row)[-1] for _, row in rows[:_MOST_TRIED]}
    of_voc = file.parent.parent.parent / "JPEGImages"  # next to ImageSets/Main; masks elsewhere have the same names
    base = of_voc if of_voc.is_dir() else root
    images = [
        os.path.join(folder, entry.name)
        for folder, entries in (_walk(base) if base.is_dir() else ())
        for entry in entries
        if _is_image(entry.name, suffixes) and {entry.name, os.path.splitext(entry.name)[0]} & names
    ]
    for line, row in rows[:_MOST_TRIED]:
        parts = _parts(row)
        for left_out in range(len(parts)):
            tail = os.sep + os.path.join(*parts[left_out:])
            fits = [p for p in images if (p if _is_image(row, suffixes) else os.path.splitext(p)[0]).endswith(tail)]
            if not fits:
                continue
            if len(fits) > 1:
                raise UserError(
                    f"{file}:{line}: {len(fits)} images fit {row[:200]!r}: {', '.join(sorted(fits)[:2])}"
                    f"{', ...' * (len(fits) > 2)}; name images by their paths relative to {root}"
                )
            folder = Path(fits[0]).parents[len(parts) - left_out - 1]
            text = "%s: no row names an image as it is written; rows are read as line %d: %s is %s"
            get_logger().info(text, file, line, row, relative_name(fits[0], root))
            return folder, left_out
    line, row = rows[0]
    text = f"{row[:200]!r} is not an image, and neither is any other row; give paths of images relative to {root}"
    raise UserError(f"{file}:{line}: {text}")


def _is_image(name: str, suffixes: frozenset[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes


def _parts(row: str) -> list[str]:
    return [part for part in row.replace("\\", "/").split("/") if part not in ("", ".", "..")] or [row]


class _Folders:
    """Directory entries by path. Each folder is read once."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, os.DirEntry]] = {}  # by folder and name

    def entry(self, folder: str, name: str) -> os.DirEntry | None:
        if folder not in self._entries:
            status = _query(os.stat, folder)  # os.path.isdir returns False for a folder on a disk that fails
            entries = _scan(folder) if status and stat.S_ISDIR(status.st_mode) else []
            self._entries[folder] = {e.name: e for e in entries}
        return self._entries[folder].get(name)

    def stamp(self, folder: str, name: str) -> FileStamp | None:
        entry = self.entry(folder, name)
        return _stamp(entry) if entry else None

    def exists(self, path: str) -> bool:
        return self.stamp(*os.path.split(path)) is not None


def _list_labels(
    images: list[ImageFile], source: SplitSource, spec: DatasetSpec
) -> tuple[LabelFormat, list[LabelFile]]:
    annotations, label_format = source.annotations, source.label_format
    if label_format is None or (label_format.label_path is None and not annotations.is_file()):
        if not annotations.exists():
            raise spec.missing_error(annotations)
        raise UserError(f"{annotations}: neither a COCO .json nor a folder of VOC .xml (named by {spec.source})")
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
        labels.append(LabelFile(bases[folder] + name, folders.stamp(folder, name)))
    return label_format, labels
