"""Finds the images in the folders and .txt lists (`image_list`) that a split names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from data.images.kinds import ARRAY_SUFFIX, IMAGE_SUFFIXES, UNREAD_SUFFIXES, image_suffixes, is_image, unread_reason
from data.labels.findings import BAD_IMAGE, MISSING_IMAGE, REPEATED_IMAGE, UNSUPPORTED, Finding
from data.source.dataset_spec import WITHOUT_VAL, DatasetSpec
from data.source.listing.aliases import find_aliases
from data.source.listing.image_list import find_images_of_rows
from data.source.listing.list_rows import ImageList, ImageLists, is_list, read_rows
from data.source.listing.relocated_lists import RelocatedLists
from data.source.missing_data import labels_without_images
from data.source.walk import (
    NO_FILE,
    Folders,
    Visit,
    access_problem,
    false_if_denied,
    none_if_missing,
    stamp_of,
    status_of,
    walk,
)
from data.split_files import FileStamp, ImageFile
from utils.errors import UserError
from utils.files.paths import path_of, relative_name
from utils.logger import get_logger
from utils.strings import counted

_SAMPLE_SIZE = 20  # files per folder and suffix that are opened to decide whether any of them are images
_MAX_MEASURED = 1000  # files whose sizes are compared to also open the largest, which is the likeliest image
T = TypeVar("T")
OtherFiles = dict[str, dict[str, os.DirEntry]]  # files other than images, by folder (absolute) and name


@dataclass(slots=True)
class SplitImages:
    """Collects the images of a split, and the other files and problems in its folders and lists."""

    folders: Folders  # directory entries on the disk
    suffixes: frozenset[str]  # of images
    images: dict[str, ImageFile] = field(default_factory=dict)  # by name, each image once
    aliases: dict[str, list[ImageFile]] = field(default_factory=dict)  # images under other names, see `find_aliases`
    missing: list[str] = field(default_factory=list)  # names in lists, as written, of images that are not found
    findings: list[Finding] = field(default_factory=list)
    real_folders: dict[str, str] = field(default_factory=dict)  # real paths, by the prefixes of image names
    walked_folders: set[str] = field(default_factory=set)  # real paths
    other_files: OtherFiles = field(default_factory=dict)  # in the walked folders
    notes: list[str] = field(default_factory=list)  # for the log, about lists
    warnings: list[str] = field(default_factory=list)  # for the log, about lists

    def add(self, image: ImageFile, location: str, repetition: str = "") -> None:
        """Adds an image that the split names at ``location``. A repeated image becomes a finding with the text
        ``repetition``, by default that it is listed twice."""
        if image.name in self.images:
            text = repetition or f"{image.name} is listed twice; used once"
            self.findings.append(Finding(location, REPEATED_IMAGE, text))
        else:
            self.images[image.name] = image

    def separate_aliases(self) -> None:
        """Moves the other names of images to `aliases`. Call this after all images have been added."""
        if len(set(self.real_folders.values())) == len(self.real_folders):  # fast path for the usual case
            return
        self.aliases = find_aliases(self.images, self.real_folders, self.folders.root)
        for image in self.all_aliases:
            del self.images[image.name]

    @property
    def all_aliases(self) -> list[ImageFile]:
        """The images under their other names."""
        return [image for aliases in self.aliases.values() for image in aliases]

    @property
    def names(self) -> set[str]:
        """All names of all images."""
        return {*self.images, *(image.name for image in self.all_aliases)}

    def sorted(self) -> list[ImageFile]:
        """Returns the images, sorted by name."""
        return [self.images[name] for name in sorted(self.images)]


def find_images(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split, at least one, and logs how its lists are read.

    Raises UserError if there is no image, or if an entry is missing.
    """
    entries = spec.listed_splits[split].images
    for entry in entries:
        if not entry.exists():
            raise spec.missing_error(entry)
        if not entry.is_dir() and not is_list(entry):
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
    split_images = SplitImages(folders, image_suffixes(spec.pixels))
    lists = ImageLists(spec, split, folders)
    relocated_lists = RelocatedLists(spec, split, lists)
    for entry in entries:
        _read_entry(split_images, entry, lists, relocated_lists)
    for note in split_images.notes:
        get_logger().info(note)
    for warning in split_images.warnings:
        get_logger().warning(warning)
    if not split_images.images:
        raise _no_images(spec, split, split_images)
    split_images.separate_aliases()
    return split_images


def find_images_leniently(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of another split without raising for its mistakes, which are reported when that split is used.

    Logs a warning for a folder or list that cannot be read; the images of such a folder then seem to belong to no
    split. If no row of a list can be resolved to an image, all are `SplitImages.missing`.
    """
    split_images = SplitImages(folders, image_suffixes(spec.pixels))
    lists = ImageLists(spec, split, folders)
    relocated_lists = RelocatedLists(spec, split, lists)
    for entry in spec.listed_splits[split].images:
        try:
            _read_entry(split_images, entry, lists, relocated_lists)
        except UserError as error:
            get_logger().warning("%s: '%s': not all images could be listed: %s", spec.source, split, error)
            split_images.missing += _rows_of_unresolved_list(entry)
    split_images.separate_aliases()
    return split_images


def _rows_of_unresolved_list(entry: Path) -> list[str]:
    """Returns the names in a list none of whose rows names an image. A folder, or an unreadable list, has none."""
    try:
        return [row.name for row in read_rows(entry)] if is_list(entry) else []
    except UserError:
        return []


def _read_entry(split_images: SplitImages, entry: Path, lists: ImageLists, relocated_lists: RelocatedLists) -> None:
    """Adds the images of a folder or list that the split names."""
    if false_if_denied(entry.is_dir):
        for visit in walk(entry):
            _add_folder(split_images, visit, split_folder=entry)
    elif is_list(entry):
        _add_list(split_images, lists.read(entry), relocated_lists)


def _add_list(split_images: SplitImages, image_list: ImageList, relocated_lists: RelocatedLists) -> None:
    """Adds the images that a list names, and the findings about its rows."""
    found = find_images_of_rows(image_list, relocated_lists)
    for image, _, location, repetition in found.images:
        split_images.add(image, location, repetition)
    root = split_images.folders.root
    for folder in {listed.image.name.rpartition("/")[0] for listed in found.images}:
        split_images.real_folders[f"{folder}/" if folder else ""] = os.path.realpath(path_of(folder, root))
    split_images.findings += found.findings
    split_images.missing += found.missing
    split_images.notes += found.notes
    split_images.warnings += found.warnings


def _add_folder(split_images: SplitImages, visit: Visit, split_folder: Path) -> None:
    """Adds the content of a folder, without its subfolders. ``split_folder``: the folder that the split names."""
    prefix = split_images.folders.name_in(visit.path)
    below_split = relative_name(visit.path, split_folder)
    prefix_in_split = "" if below_split == "." else f"{below_split}/"
    suffixes = split_images.suffixes
    findings = list(_images_not_read(visit, prefix, suffixes))
    cached_stems = _cached_stems(visit.entries, suffixes)
    other_files: dict[str, os.DirEntry] = {}
    for entry in visit.entries:
        name = entry.name
        stem, dot, ending = name.rpartition(".")  # much faster than os.path.splitext; names do not begin with a dot
        suffix = dot + ending
        if suffix == ARRAY_SUFFIX and stem in cached_stems:
            continue
        if suffix.lower() in suffixes:
            finding = _add_file(split_images, entry, prefix + name, prefix_in_split + name)
            if finding is not None:
                findings.append(finding)
            continue
        if none_if_missing(entry.is_dir):
            continue
        if entry.is_symlink() and _may_be_folder(suffix.lower()) and status_of(entry) is None:
            # One image stands for all in the folder, whose number is unknown.
            reason = f"{access_problem(entry)}; the link may lead to a folder of images"
            findings.append(Finding(prefix + name, MISSING_IMAGE, reason, lost_images=1))
            continue
        other_files[name] = entry
    split_images.other_files[visit.path] = other_files
    split_images.real_folders[prefix] = visit.real
    if visit.real not in split_images.walked_folders:  # else already walked under another name
        split_images.walked_folders.add(visit.real)
        split_images.findings += [*findings, *_unsupported_images(other_files, prefix)]


def _may_be_folder(suffix: str) -> bool:
    """Returns whether a name with ``suffix``, in lower case, may be that of a folder rather than a file."""
    return suffix not in IMAGE_SUFFIXES | UNREAD_SUFFIXES | {ARRAY_SUFFIX}


def _images_not_read(visit: Visit, prefix: str, suffixes: frozenset[str]) -> Iterator[Finding]:
    """Yields findings about entries that are named like images but not read: empty folders and hidden files."""
    if not visit.entries and is_image(visit.path, suffixes):
        name = prefix.rstrip("/") or "."
        yield Finding(name, BAD_IMAGE, "an empty folder, not a file", lost_images=1, consequence="left out")
    for entry in visit.hidden:
        if is_image(entry.name, suffixes) and none_if_missing(entry.is_file):
            yield Finding(prefix + entry.name, UNSUPPORTED, "is hidden because its name begins with a dot; rename it")


def _unsupported_images(files: Mapping[str, os.DirEntry], prefix: str) -> Iterator[Finding]:
    """Yields findings about images among the ``files`` of a folder that have no supported suffix.

    Files with an unknown suffix are opened, first a sample, because there may be millions that are not images.
    """
    names_of: dict[str, list[str]] = {}  # by suffix
    for name in files:
        names_of.setdefault(os.path.splitext(name)[1].lower(), []).append(name)
    for names in names_of.values():
        reasons = {name: unread_reason(files[name].path) for name in _sample_of(names, files)}
        if not any(reasons.values()):
            continue
        for name in names:
            reason = reasons[name] if name in reasons else unread_reason(files[name].path)
            if reason:
                yield Finding(prefix + name, UNSUPPORTED, reason)


def _sample_of(names: Sequence[str], files: Mapping[str, os.DirEntry]) -> set[str]:
    """Returns evenly spaced ``names``, and the largest file of a larger evenly spaced sample."""
    if len(names) <= _SAMPLE_SIZE:
        return set(names)
    largest = max(spread(names, _MAX_MEASURED), key=lambda name: _size_of(files[name]))
    return {*spread(names, _SAMPLE_SIZE), largest}


def _size_of(file: os.DirEntry) -> int:
    stamp = stamp_of(file)
    return stamp.size if stamp else 0


def spread(items: Sequence[T], count: int) -> Sequence[T]:
    """Returns ``count`` evenly spaced items, or all if there are no more."""
    if len(items) <= count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def _cached_stems(entries: Iterable[os.DirEntry], suffixes: frozenset[str]) -> set[str]:
    """Returns the stems of images if arrays are also read as images. An array with such a stem is a copy cached by
    another program."""
    if ARRAY_SUFFIX not in suffixes:
        return set()
    return {os.path.splitext(entry.name)[0] for entry in entries if is_image(entry.name, IMAGE_SUFFIXES)}


def _add_file(split_images: SplitImages, entry: os.DirEntry, name: str, name_in_split: str) -> Finding | None:
    """Adds an entry that is named like an image, unless it is a folder. Returns a finding if it is not a regular file.
    ``name``, ``name_in_split``: see `ImageFile`."""
    status = status_of(entry)  # a single disk access: folders may contain millions of images
    if status is None:
        return Finding(name, MISSING_IMAGE, access_problem(entry), lost_images=1)
    if stat.S_ISREG(status.st_mode):
        split_images.add(ImageFile(name, name_in_split, FileStamp(status.st_size, status.st_mtime_ns)), name)
        return None
    if stat.S_ISDIR(status.st_mode):
        return None
    return Finding(name, BAD_IMAGE, NO_FILE, lost_images=1, consequence="left out")


def _no_images(spec: DatasetSpec, split: str, split_images: SplitImages) -> UserError:
    """Returns the error about a split without images, with what its folders contain instead."""
    searched = ", ".join(map(str, spec.listed_splits[split].images))
    message = f"{searched}: no images found for '{split}' (looked for {' '.join(sorted(image_suffixes(spec.pixels)))})"
    unread = unread_files(split_images.findings)
    message += (
        f"; {counted(len(unread), 'file')} left out, first {unread[0]}" if unread else labels_without_images(spec.root)
    )
    lost = [finding for finding in split_images.findings if finding.lost_images]
    if lost:
        message += f"; {counted(len(lost), 'image')} left out, first {lost[0].where}: {lost[0].text}"
    if split == "val":
        message += f"; add some, or {WITHOUT_VAL}"
    return UserError(message)


def unread_files(findings: Iterable[Finding]) -> list[str]:
    """Returns the files of unsupported kinds, formatted for messages."""
    return [f"{finding.where}: {finding.text}" for finding in findings if finding.kind == UNSUPPORTED]
