"""Lists the images in the folders and .txt lists that a split names. Names of images are relative to the data set's
folder.

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
from data.folders import Folders
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
_MAX_LIST_BYTES = 1 << 31
_MAX_LISTING_BYTES = 1 << 34
IMAGE_FOLDERS = ("images", "jpegimages")  # folders that separate images from labels, in lower case


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


def find_images(
    spec: DatasetSpec, split: str, source: FilesSplit, folders: Folders
) -> tuple[dict[str, str], list[Finding]]:
    """Returns the images of a split, at least one: their paths by name; and findings about what is none.

    Raises UserError if there is no image, or for an entry that is neither a folder nor a list.
    """
    suffixes = image_suffixes(spec.pixels)
    images: dict[str, str] = {}
    findings: list[Finding] = []
    for entry in source.images:
        if os.path.isdir(entry):
            for folder in folders.walk(str(entry)):
                images |= _images_in(folder, suffixes, folders, findings)
        elif entry.suffix.lower() == ".txt" and entry.is_file():
            images |= images_of_list(entry, suffixes, folders, findings)
        else:
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
    if not images:
        message = f"{', '.join(map(str, source.images))}: no images found for '{split}'"
        if findings:
            message += f"; first of {counted(len(findings), 'finding')}: {findings[0]}"
        raise UserError(f"{message}; add some, or {WITHOUT_VAL}" if split == "val" else message)
    return images, findings


def images_below(top: str, suffixes: frozenset[str], folders: Folders) -> dict[str, str]:
    """Returns the paths of the images in the folder ``top`` and those below it, by name. Folders that cannot be listed
    are skipped."""
    images: dict[str, str] = {}
    for folder in folders.walk(top, skips_unlisted=True):
        images |= _images_in(folder, suffixes, folders, [])
    return images


def images_beside(names: Iterable[str], folders: Folders) -> dict[str, str]:
    """Returns the paths of the images called ``names`` and those beside them, by name: all in the last folder
    ``images`` or ``JPEGImages`` of their paths, or else in the folder above theirs. They may be of any split, or of
    none."""
    names = list(names)
    trees = set()
    for folder in {path_of(prefix, folders.root) for prefix in set(map(folder_of, names))}:
        is_below = Path(folder).is_relative_to(folders.root) and folder != str(folders.root)
        trees.add(image_tree(folder, folders.root) or (os.path.dirname(folder) if is_below else folder))
    suffixes = IMAGE_SUFFIXES.union(map(suffix_of, names))
    return {name: path for tree in sorted(trees) for name, path in images_below(tree, suffixes, folders).items()}


def images_of_other_splits(
    spec: DatasetSpec, split: str, source: FilesSplit, folders: Folders
) -> Iterator[tuple[FilesSplit, dict[str, str] | None]]:
    """Yields the other splits that name the same label file as ``split``, or a folder of labels in or around its own,
    with their images; None if a split has no images here. Its mistakes are reported when it is listed."""
    labels = source.annotations
    for name, other in (spec.splits | spec.left_out).items():
        if name == split or not isinstance(other, FilesSplit) or labels is None or other.annotations is None:
            continue
        if other.annotations.is_relative_to(labels) or labels.is_relative_to(other.annotations):
            images = None
            if name not in spec.left_out:
                with contextlib.suppress(UserError):
                    images, _ = find_images(spec, name, other, folders)
            yield other, images


def image_tree(image_folder: str, root: Path) -> str:
    """Returns the last folder ``images`` or ``JPEGImages`` of a path, or "" if there is none; in the data set's folder
    ``root``, only those below it count."""
    parts = Path(image_folder).parts
    for end in range(len(parts), num_shared_parts(image_folder, root), -1):
        if casefold_nfc(parts[end - 1]) in IMAGE_FOLDERS:
            return os.path.join(*parts[:end])
    return ""


def num_shared_parts(path: str, root: Path) -> int:
    """Returns how many leading parts a path shares with the data set's folder: all of the folder's, or one."""
    return len(root.parts) if Path(path).is_relative_to(root) else 1


def _images_in(
    folder: str, suffixes: frozenset[str], folders: Folders, findings: list[Finding]
) -> Iterator[tuple[str, str]]:
    """Yields name and path of each image in a folder, not of those in its subfolders; adds to ``findings``."""
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
            # Methods of `DirEntry` look up nothing but links, for some of which they raise.
            if os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file():
                yield prefix + name, entry.path
            elif not os.path.isdir(entry.path):
                findings.append(Finding(MISSING_IMAGE, "not a file that can be read", prefix + name, lost_images=1))
        elif suffix in UNREAD_SUFFIXES:
            unread.setdefault(suffix, []).append(name)
    for suffix, names in unread.items():
        text = unread_text(suffix, len(names))
        findings.append(Finding(UNSUPPORTED, text, prefix + names[0], number=len(names)))


def images_of_list(file: Path, suffixes: frozenset[str], folders: Folders, findings: list[Finding]) -> dict[str, str]:
    """Returns the paths of the images that the rows of a list name, by name. Other rows are added to ``findings``."""
    images: dict[str, str] = {}
    list_name = folders.prefix(str(file)).rstrip("/")
    for line, row, paths in rows_of_list(file, suffixes, folders):
        where = f"{list_name}:{line}"
        if len(paths) != 1:
            text = f"{len(paths)} images are called" if paths else "no image"
            findings.append(Finding(MISSING_IMAGE, f"{text} {row[:200]}", where, lost_images=1))
            continue
        folder, base_name = os.path.split(paths[0])
        name = folders.prefix(folder) + base_name
        if name in images:
            findings.append(Finding(DUPLICATE, f"{name} is listed twice; used once", where))
        images[name] = paths[0]
    return images


def rows_of_list(file: Path, suffixes: frozenset[str], folders: Folders) -> list[tuple[int, str, list[str]]]:
    """Returns the number, the text, and the paths of the images that it may mean, of each row of a list. Raises
    UserError if it cannot be read."""
    lines = enumerate(read_text(file, max_bytes=_MAX_LIST_BYTES).splitlines(), 1)
    rows = [(line, row.strip().replace("\\", "/")) for line, row in lines if row.strip()]
    stems: dict[str, list[str]] | None = None
    found: list[list[str]] = []
    for _, row in rows:
        path = os.path.join(file.parent if row.startswith("./") else folders.root, row)
        paths = _image_at(str(normal_path(path)) if ".." in path else os.path.normpath(path), suffixes, folders)
        if not paths and "/" not in row:
            if stems is None:
                stems = _images_by_stem(file, suffixes, folders)
            paths = stems.get(_stem(row, suffixes), [])
        found.append(paths)
    if not any(found):
        parts_of = [[part for part in row.split("/") if part not in ("", ".", "..")] for _, row in rows]

        def images_without(dropped: int, parts: list[str]) -> list[str]:
            return _image_at(str(folders.root.joinpath(*parts[dropped:])), suffixes, folders)

        numbers = (number for parts in parts_of for number in range(len(parts)) if images_without(number, parts))
        dropped = next(numbers, None)
        if dropped is not None:
            message = "%s: no row is a path as written; all are read below %s, dropping %s"
            get_logger().info(message, file, folders.root, counted(dropped, "leading folder"))
            found = [images_without(dropped, parts) for parts in parts_of]
    return [(line, row, paths) for (line, row), paths in zip(rows, found, strict=True)]


def _image_at(path: str, suffixes: frozenset[str], folders: Folders) -> list[str]:
    """Returns the path of the image at ``path``, or of the only one that differs in case or composition; or nothing."""
    if suffix_of(path) not in suffixes:
        return []
    if os.path.isfile(path):
        return [path]
    folder, name = os.path.split(path)
    other = os.path.join(folder, folders.find(folder, name) or "")
    return [other] if os.path.isfile(other) else []


def _images_by_stem(file: Path, suffixes: frozenset[str], folders: Folders) -> dict[str, list[str]]:
    """Returns the paths of the data set's images by stem; for a list in Pascal VOC's ImageSets, of those in JPEGImages
    if one is there."""
    tops = [str(folders.root)]
    if file.parent.parent.name == "ImageSets":
        tops.append(str(file.parent.parent.parent / "JPEGImages"))
    paths_of: dict[str, list[str]] = {}
    for top in tops:
        of_top: dict[str, list[str]] = {}
        for path in images_below(top, suffixes, folders).values():
            of_top.setdefault(_stem(os.path.basename(path), suffixes), []).append(path)
        paths_of |= of_top
    return paths_of


def _stem(name: str, suffixes: frozenset[str]) -> str:
    """Returns the name of an image without its suffix, which lists of Pascal VOC leave out."""
    return os.path.splitext(name)[0] if suffix_of(name) in suffixes else name


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
