"""Lists the images in the folders and .txt lists that a split names.

A row of a list (rule D4) is an absolute path, one relative to the data set's folder or, with a leading ``./``, to the
list's folder; ``\\`` is ``/``. A row without a folder may also be the name or stem of the only such image of the data
set (in Pascal VOC's ImageSets, of the one in JPEGImages). If no row is any of these, the first row whose end is a path
in the data set's folder decides how many leading folders all rows drop.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from data.findings import DUPLICATE, MISSING_IMAGE, UNSUPPORTED, Finding, findings_of_json
from data.folders import ABSENT, Folders, read_rows, stamp_of
from data.formats.label_format import Format
from data.formats.table import FORMATS
from data.images.kinds import ARRAY_SUFFIX, IMAGE_SUFFIXES, UNREAD_SUFFIXES, image_suffixes, suffix_of, unread_text
from data.spec import WITHOUT_VAL, DatasetSpec, FilesSplit
from utils.errors import UserError
from utils.files.paths import casefold_nfc, normal_path, path_of
from utils.files.safe_io import read_text
from utils.logger import get_logger
from utils.strings import counted

UNREADABLE = (0, -1)  # stamp of a label that exists but is no file, such as a folder or a broken link
_MAX_LISTING_BYTES = 1 << 34
_IMAGE_TREES = ("images", "jpegimages")


@dataclass(slots=True)
class SplitImages:
    """The images of a split. Names are relative to the data set's folder."""

    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)  # size and modification time (ns), by name
    folders: dict[str, str] = field(default_factory=dict)  # of the images (absolute), by the start of their names
    entries: dict[str, str] = field(default_factory=dict)  # folders of the split that they are in, for those in one
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class Listing:
    """The images of a split, sorted by name, and their label files, as `data.pairing.list_split` finds them.

    Names are relative to `root`, with ``/``. Labels, fingerprints and messages follow from the listing; only for
    entries without an image does the scan look for files again.
    """

    root: Path  # the data set's folder
    named_root: str  # the same with ``/``; of a staged copy, that of the original, which absolute names in labels have
    images: list[str]  # N
    image_stamps: np.ndarray  # int64 (N, 2): size in bytes, modification time in ns
    label_format: Format
    labels: list[str]  # N: each image's label file, or where it would be; or one name: a file for all images
    label_stamps: np.ndarray  # int64 (len(labels), 2); `ABSENT` (a background) or `UNREADABLE`: no file
    findings: list[Finding]  # about images and label files that are not used; `Finding.image` is -1
    shared_images: list[str] = field(default_factory=list)  # one file only: images of all splits that name it, sorted
    lacks_split: bool = False  # one file only: whether a split that names it has no images here


def folder_of(name: str) -> str:
    """Returns the start of a name up to its last ``/``, "" or "a/b/"."""
    return name[: name.rfind("/") + 1]


def find_images(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split, at least one. Raises UserError if there is none, or if an entry is missing."""
    entries = spec.listed_splits[split].images
    images = SplitImages()
    suffixes = image_suffixes(spec.pixels)
    for entry in entries:
        if os.path.isdir(entry):
            for folder in folders.walk(str(entry)):
                _add_folder(images, folder, str(entry), suffixes, folders)
        elif not os.path.exists(entry):
            raise spec.missing_error(entry)
        elif entry.suffix.lower() == ".txt" and entry.is_file():
            _add_list(images, entry, suffixes, folders)
        else:
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
    if not images.stamps:
        message = f"{', '.join(map(str, entries))}: no images found for '{split}'"
        if images.findings:
            message += f"; first of {counted(len(images.findings), 'finding')}: {images.findings[0]}"
        raise UserError(f"{message}; add some, or {WITHOUT_VAL}" if split == "val" else message)
    return images


def images_below(top: str, suffixes: frozenset[str], folders: Folders) -> SplitImages:
    """Returns the images in the folder ``top`` and those below it, without stamps. Folders that cannot be listed are
    skipped."""
    found = SplitImages()
    for folder in folders.walk(top, skips_unlisted=True):
        _add_folder(found, folder, top, suffixes, folders, is_stamped=False)
    return found


def images_of_list(file: Path, suffixes: frozenset[str], folders: Folders) -> SplitImages:
    """Returns the images that a list names, which may be none. Raises UserError if it cannot be read."""
    found = SplitImages()
    _add_list(found, file, suffixes, folders)
    return found


def images_beside(names: Iterable[str], folders: Folders) -> SplitImages:
    """Returns the images called ``names`` and those beside them, without stamps: all in the last folder ``images`` or
    ``JPEGImages`` of their paths, or else in the folder above theirs. They may be of other splits, or of none."""
    names = list(names)
    suffixes = IMAGE_SUFFIXES.union(map(suffix_of, names))
    trees = set()
    for folder in {path_of(prefix, folders.root) for prefix in set(map(folder_of, names))}:
        is_below = Path(folder).is_relative_to(folders.root) and folder != str(folders.root)
        trees.add(image_tree(folder, folders.root) or (os.path.dirname(folder) if is_below else folder))
    beside = SplitImages()
    for tree in sorted(trees):
        below = images_below(tree, suffixes, folders)
        beside.stamps |= below.stamps
        beside.folders |= below.folders
    return beside


def images_of_other_splits(
    spec: DatasetSpec, split: str, folders: Folders
) -> Iterator[tuple[FilesSplit, SplitImages | None]]:
    """Yields the other splits that name the same label file as ``split``, or a folder of labels in or around its own,
    with their images; None if a split has no images here. Its mistakes are reported when it is listed."""
    labels = spec.listed_splits[split].annotations
    for name, other in (spec.splits | spec.left_out).items():
        if name == split or not isinstance(other, FilesSplit) or labels is None or other.annotations is None:
            continue
        if other.annotations.is_relative_to(labels) or labels.is_relative_to(other.annotations):
            images = None
            if name not in spec.left_out:
                with contextlib.suppress(UserError):
                    images = find_images(spec, name, folders)
            yield other, images


def image_tree(image_folder: str, root: Path) -> str:
    """Returns the last folder ``images`` or ``JPEGImages`` of a path, or "" if there is none; in the data set's folder
    ``root``, only those below it count."""
    parts = Path(image_folder).parts
    for end in range(len(parts), num_shared_parts(image_folder, root), -1):
        if casefold_nfc(parts[end - 1]) in _IMAGE_TREES:
            return os.path.join(*parts[:end])
    return ""


def num_shared_parts(path: str, root: Path) -> int:
    """Returns how many parts a path shares with the data set's folder: all of its own, or only the first."""
    return len(root.parts) if Path(path).is_relative_to(root) else 1


def _add_folder(
    images: SplitImages,
    folder: str,
    entry_folder: str,
    suffixes: frozenset[str],
    folders: Folders,
    *,
    is_stamped: bool = True,
) -> None:
    """Adds the images in ``folder``, which is ``entry_folder`` or below it, not those in its subfolders.
    ``is_stamped``: whether their stamps are needed, for which each file is looked up."""
    entries = folders.entries(folder)
    prefix = folders.prefix(folder)
    cached: set[str] = set()  # stems of images that other programs cache as arrays
    if ARRAY_SUFFIX in suffixes:
        cached = {stem for stem, suffix in map(os.path.splitext, entries) if suffix.lower() in IMAGE_SUFFIXES}
    unread: dict[str, list[str]] = {}  # by suffix
    for name, entry in entries.items():
        stem, _, ending = name.rpartition(".")  # much faster than os.path.splitext; names do not begin with a dot
        suffix = f".{ending.lower()}" if stem else ""
        if suffix in suffixes and not (suffix == ARRAY_SUFFIX and stem in cached):
            if not is_stamped and not entry.is_symlink() and entry.is_file():
                images.stamps[prefix + name] = ABSENT
            elif (stamp := stamp_of(entry)) != ABSENT:
                images.stamps[prefix + name] = stamp
            elif not os.path.isdir(entry.path):  # `DirEntry.is_dir` raises for some links
                text = "a broken link" if entry.is_symlink() else "not a file that can be read"
                images.findings.append(Finding(MISSING_IMAGE, text, prefix + name, lost_images=1))
        elif suffix in UNREAD_SUFFIXES:
            unread.setdefault(suffix, []).append(name)
        elif not suffix and entry.is_symlink() and not os.path.exists(entry):  # probably to a folder of images
            images.findings.append(Finding(MISSING_IMAGE, "a broken link", prefix + name, lost_images=1))
    images.folders[prefix] = folder
    images.entries.setdefault(prefix, entry_folder)
    for suffix, names in unread.items():
        text = unread_text(suffix, len(names))
        images.findings.append(Finding(UNSUPPORTED, text, prefix + names[0], number=len(names)))


def _add_list(images: SplitImages, file: Path, suffixes: frozenset[str], folders: Folders) -> None:
    """Adds the images that the rows of a list name. A row without an image is a finding, and so is a repeated one."""
    rows = read_rows(file)
    paths = _paths_of_rows([row for _, row in rows], file, suffixes, folders)
    dropped = None  # number of leading folders that all rows drop
    if all(stamp_of(path) == ABSENT for path in paths):
        dropped = _num_dropped([row for _, row in rows], folders)
    if dropped is not None:
        message = "%s: no row is a path as written; all are read below %s, dropping %s"
        get_logger().info(message, file, folders.root, counted(dropped, "leading folder"))
        paths = [str(folders.root.joinpath(*_parts(row)[dropped:])) for _, row in rows]

    list_name = folders.prefix(str(file)).rstrip("/")
    row_of_name: dict[str, str] = {}
    for (line, row), path in zip(rows, paths, strict=True):
        stamp = stamp_of(path)
        folder, base_name = os.path.split(path)
        if stamp == ABSENT:
            base_name = folders.find(folder, base_name) or base_name
            stamp = stamp_of(os.path.join(folder, base_name))
        name = folders.prefix(folder) + base_name
        # Without the dropped folders, rows of different images may be equal.
        is_other_image = dropped is not None and row_of_name.get(name, row) != row
        where = f"{list_name}:{line}"
        if stamp == ABSENT or is_other_image or suffix_of(base_name) not in suffixes:
            images.findings.append(Finding(MISSING_IMAGE, f"no image {row[:200]}", where, lost_images=1))
        elif name in row_of_name:
            images.findings.append(Finding(DUPLICATE, f"{name} is listed twice; used once", where))
        else:
            row_of_name[name] = row
            images.stamps[name] = stamp
            images.folders[folders.prefix(folder)] = folder


def _paths_of_rows(rows: Iterable[str], file: Path, suffixes: frozenset[str], folders: Folders) -> list[str]:
    """Returns the absolute paths that rows of the list ``file`` mean. They need not exist."""
    path_of_stem: dict[str, str] | None = None
    paths: list[str] = []
    for row in rows:
        path = os.path.join(file.parent if row.startswith("./") else folders.root, row)
        path = str(normal_path(path)) if ".." in path else os.path.normpath(path)
        if "/" not in row and stamp_of(path) == ABSENT:
            if path_of_stem is None:
                path_of_stem = _unique_stems(file, suffixes, folders)
            path = path_of_stem.get(_stem(row, suffixes), path)
        paths.append(path)
    return paths


def _unique_stems(file: Path, suffixes: frozenset[str], folders: Folders) -> dict[str, str]:
    """Returns the paths of the images that a row without a folder may mean, by stem: those of the data set's images
    whose stem is unique, and those in JPEGImages for a list in Pascal VOC's ImageSets."""
    paths_of: dict[str, list[str]] = {}
    voc_folder = str(file.parent.parent.parent / "JPEGImages")
    is_voc = file.parent.parent.name == "ImageSets" and os.path.isdir(voc_folder)
    for top in (voc_folder, str(folders.root)) if is_voc else (str(folders.root),):
        found = images_below(top, suffixes, folders)
        for name in found.stamps:
            base_name = name.rpartition("/")[2]
            paths = paths_of.setdefault(_stem(base_name, suffixes), [])
            if not (is_voc and paths and os.path.dirname(paths[0]) == voc_folder):
                paths.append(os.path.join(found.folders[folder_of(name)], base_name))
    return {stem: paths[0] for stem, paths in paths_of.items() if len(paths) == 1}


def _stem(name: str, suffixes: frozenset[str]) -> str:
    """Returns the name of an image without its suffix, which lists of Pascal VOC leave out."""
    return os.path.splitext(name)[0] if suffix_of(name) in suffixes else name


def _num_dropped(rows: Iterable[str], folders: Folders) -> int | None:
    """Returns how many leading folders the first row must drop to be a path in the data set's folder; None if no row
    ever is."""
    for row in rows:
        parts = _parts(row)
        for dropped in range(len(parts)):
            if stamp_of(folders.root.joinpath(*parts[dropped:])) != ABSENT:
                return dropped
    return None


def _parts(row: str) -> list[str]:
    return [part for part in row.split("/") if part not in ("", ".", "..")]


def check_rows(paths: Iterable[str]) -> None:
    """Raises UserError for a path that a list to be written cannot contain."""
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            is_row = False
        else:
            is_row = path.splitlines() == [path.strip().replace("\\", "/")]
        if not is_row:
            reason = "has a line break, a backslash or outer spaces, or is not UTF-8, so no list can name it"
            raise UserError(f"{path!r}: {reason}; rename it, and its label file")


def listing_text(listing: Listing) -> str:
    """Returns the JSON from which `read_listing` restores a listing."""
    values = {item.name: getattr(listing, item.name) for item in fields(Listing) if item.name != "root"}
    values["label_format"] = listing.label_format.name
    return json.dumps(values, default=np.ndarray.tolist)


def read_listing(file: Path, root: Path) -> Listing:
    """Restores the `listing_text` in ``file`` for a data set in the folder ``root``."""
    values = json.loads(read_text(file, max_bytes=_MAX_LISTING_BYTES))
    values["label_format"] = next(form for form in FORMATS if form.name == values["label_format"])
    for key in ("image_stamps", "label_stamps"):
        values[key] = np.array(values[key], np.int64).reshape(-1, 2)
    values["findings"] = findings_of_json(values["findings"])
    return Listing(root=root, **values)
