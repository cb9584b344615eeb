"""Finds the images of a split, which names folders and .txt lists (`image_list`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data.image_io.file_kinds import ARRAY_SUFFIX, IMAGE_SUFFIXES, image_suffixes, unread_image, unread_summary
from data.image_io.shards import is_shard_path
from data.labels.findings import BAD_IMAGE, MISSING_IMAGE, REPEATED_IMAGE, UNSUPPORTED, Finding
from data.labels.label_format import ImageFile
from data.source.dataset_spec import WITHOUT_VAL, DatasetSpec
from data.source.listing.image_list import NO_FILE, NamedImage, is_image, read_image_list
from data.source.missing_data import labels_without_images
from data.source.walk import Folders, Visit, none_if_missing, stamp_of, walk
from utils.errors import UserError
from utils.files.paths import relative_name

OtherFiles = dict[str, dict[str, os.DirEntry]]  # files other than images, by folder (absolute) and name


@dataclass(frozen=True, slots=True)
class SplitImages:
    """Holds the images of a split, and what else its folders and lists say."""

    images: dict[str, ImageFile]  # by name
    missing: list[str]  # names in lists of images that do not exist
    findings: list[Finding]
    lists: dict[Path, list[str]]  # image names in each .txt list, in order
    aliases: dict[str, list[str]]  # prefixes of the names in a folder, by its real path
    other_files: OtherFiles  # in the folders of the images, if the split names folders

    def sorted(self) -> list[ImageFile]:
        """Returns the images by name."""
        return [self.images[name] for name in sorted(self.images)]


def find_images(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split, at least one. Raises UserError if there is none, or an entry is missing."""
    entries = spec.split(split).images
    for entry in entries:
        if is_shard_path(entry):
            raise UserError(f"{entry}: is in shards, which are neither listed nor copied; name a folder of images")
        if entry == Path(entry.anchor):
            raise UserError(f"{spec.source}: '{split}' is {entry}, the whole disk; name the folder of its images")
        if not entry.exists():
            raise spec.missing_error(entry)
        if not entry.is_dir() and not _is_list(entry):
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
    split_images = _read_entries(entries, folders, image_suffixes(spec.pixels))
    if not split_images.images:
        raise _no_images(spec, split, split_images)
    return split_images


def find_valid_images(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split without refusing anything: its mistakes are reported when it is used itself."""
    return _read_entries(spec.split(split).images, folders, image_suffixes(spec.pixels), ignored=UserError)


def _is_list(entry: Path) -> bool:
    return entry.suffix.lower() == ".txt" and entry.is_file()


def _read_entries(
    entries: Iterable[Path], folders: Folders, suffixes: frozenset[str], *, ignored: type[UserError] | None = None
) -> SplitImages:
    """Returns the images of folders and lists. ``ignored``: errors for which the rest of an entry is left out."""
    content: list[NamedImage | Finding] = []
    missing: list[str] = []
    lists: dict[Path, list[str]] = {}
    aliases: dict[str, list[str]] = {}
    other_files: OtherFiles = {}
    for entry in entries:
        with contextlib.suppress(*([ignored] if ignored else [])):
            if entry.is_dir():
                for folder in _read_folder(entry, folders, suffixes):
                    content += folder.content
                    other_files[folder.path] = folder.other_files
                    names = aliases.setdefault(folder.real_path, [])
                    if folder.prefix not in names:
                        names.append(folder.prefix)
            elif _is_list(entry):
                image_list = read_image_list(entry, folders, suffixes)
                content += [*image_list.images, *image_list.findings]
                missing += image_list.missing
                lists[entry] = [image.file.name for image in image_list.images]
    images, findings = _each_once(content)
    return SplitImages(images, missing, findings, lists, aliases, other_files)


def _each_once(content: Iterable[NamedImage | Finding]) -> tuple[dict[str, ImageFile], list[Finding]]:
    """Returns the images by name, and the findings, with one for each repetition of an image."""
    images: dict[str, ImageFile] = {}
    findings: list[Finding] = []
    for each in content:
        if isinstance(each, Finding):
            findings.append(each)
        elif each.file.name in images:
            findings.append(Finding(each.location, REPEATED_IMAGE, f"{each.file.name} is there already; used once"))
        else:
            images[each.file.name] = each.file
    return images, findings


class _FolderContent(NamedTuple):
    """What a folder of images has, without the folders in it."""

    path: str  # absolute
    real_path: str  # without symbolic links
    prefix: str  # of names of files in it, relative to the data set's folder
    content: list[NamedImage | Finding]
    other_files: dict[str, os.DirEntry]  # by name


def _read_folder(folder: Path, folders: Folders, suffixes: frozenset[str]) -> Iterator[_FolderContent]:
    """Yields what a folder, and each folder below it, has."""
    for visit in walk(folder):
        prefix = folders.name_in(visit.path)
        below_split = relative_name(visit.path, folder)
        key_prefix = "" if below_split == "." else f"{below_split}/"
        content: list[NamedImage | Finding] = [*_images_not_read(visit, prefix, suffixes)]
        cached_stems = _cached_stems(visit.entries, suffixes)
        other_files: dict[str, os.DirEntry] = {}
        for entry in visit.entries:
            stem, suffix = os.path.splitext(entry.name)
            if none_if_missing(entry.is_dir) or (suffix == ARRAY_SUFFIX and stem in cached_stems):
                continue
            if suffix.lower() in suffixes:
                content.append(_read_image(entry, prefix + entry.name, key_prefix + entry.name))
                continue
            other_files[entry.name] = entry
            reason = unread_image(entry.path)
            if reason:
                content.append(Finding(prefix + entry.name, UNSUPPORTED, reason))
        yield _FolderContent(visit.path, visit.real, prefix, content, other_files)


def _images_not_read(visit: Visit, prefix: str, suffixes: frozenset[str]) -> Iterator[Finding]:
    """Yields findings about what is named like an image and not read: an empty folder, and hidden files in a folder."""
    if not visit.entries and is_image(visit.path, suffixes):
        name = prefix.rstrip("/") or "."
        yield Finding(name, BAD_IMAGE, "an empty folder, not a file", lost_images=1, consequence="left out")
    for entry in visit.hidden:
        if is_image(entry.name, suffixes) and none_if_missing(entry.is_file):
            yield Finding(prefix + entry.name, UNSUPPORTED, "is hidden, as its name begins with a dot; rename it")


def _cached_stems(entries: Iterable[os.DirEntry], suffixes: frozenset[str]) -> set[str]:
    """Returns the stems of images, if arrays are images, too: an array of the same stem is a copy that another program
    has cached."""
    if ARRAY_SUFFIX not in suffixes:
        return set()
    return {os.path.splitext(entry.name)[0] for entry in entries if is_image(entry.name, IMAGE_SUFFIXES)}


def _read_image(entry: os.DirEntry, name: str, key: str) -> NamedImage | Finding:
    """Returns an entry that is named like an image, unless it is no file. ``name``, ``key``: see `ImageFile`."""
    stamp = stamp_of(entry)
    if stamp is None:
        return Finding(name, MISSING_IMAGE, "a link to nothing", lost_images=1)
    if not none_if_missing(entry.is_file):
        return Finding(name, BAD_IMAGE, NO_FILE, lost_images=1, consequence="left out")
    return NamedImage(name, ImageFile(name, key, stamp))


def _no_images(spec: DatasetSpec, split: str, split_images: SplitImages) -> UserError:
    """Makes the error about a split without images, with what its folders have instead."""
    searched = ", ".join(map(str, spec.split(split).images))
    message = f"{searched}: no images found for '{split}' (looked for {' '.join(sorted(image_suffixes(spec.pixels)))})"
    unread = unread_files(split_images.findings)
    message += f"; {unread_summary(unread)}" if unread else labels_without_images(spec.root)
    if split == "val":
        message += f"; add some, or {WITHOUT_VAL}"
    return UserError(message)


def unread_files(findings: Iterable[Finding]) -> list[str]:
    """Returns the files of unsupported kinds, as `unread_summary` takes them."""
    return [f"{finding.where}: {finding.text}" for finding in findings if finding.kind == UNSUPPORTED]
