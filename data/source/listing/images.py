"""Finds the images of a split, which names folders and .txt lists (`image_list`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from data.image_io.file_kinds import ARRAY_SUFFIX, IMAGE_SUFFIXES, image_suffixes, unread_image, unread_summary
from data.image_io.shards import is_shard_path
from data.labels.findings import BAD_IMAGE, MISSING_IMAGE, REPEATED_IMAGE, UNSUPPORTED, Finding
from data.labels.label_format import ImageFile
from data.source.dataset_spec import WITHOUT_VAL, DatasetSpec
from data.source.listing.image_list import NO_FILE, is_image, read_image_list
from data.source.missing_data import labels_without_images
from data.source.walk import Folders, Visit, query, stamp_of, walk
from utils.errors import UserError
from utils.files.paths import relative_name


@dataclass(slots=True)
class SplitImages:
    """Collects the images of a split, and what else its folders and lists say."""

    images: dict[str, ImageFile] = field(default_factory=dict)  # by name
    missing: list[str] = field(default_factory=list)  # names in lists of images that do not exist
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # image names in each .txt list, in order
    views: dict[str, list[str]] = field(default_factory=dict)  # prefixes of the names in a folder, by its real path

    def sorted(self) -> list[ImageFile]:
        """Returns the images by name."""
        return [self.images[name] for name in sorted(self.images)]

    def add(self, image: ImageFile, location: str) -> None:
        """Adds an image, once. ``location``: where the split names it, for the finding about a repetition."""
        if image.name in self.images:
            message = f"{image.name} is there already; used once"
            self.findings.append(Finding(location, REPEATED_IMAGE, message))
        else:
            self.images[image.name] = image

    def add_list(self, file: Path, folders: Folders, suffixes: frozenset[str]) -> None:
        """Adds the images of a list."""
        content = read_image_list(file, folders, suffixes)
        for location, image in content.images:
            self.add(image, location)
        self.lists[file] = [image.name for _, image in content.images]
        self.missing += content.missing
        self.findings += content.findings

    def add_folder(self, folder: Path, folders: Folders, suffixes: frozenset[str]) -> None:
        """Adds the images in and below a folder."""
        for visit in walk(folder):
            prefix = folders.name_in(visit.path)
            views = self.views.setdefault(visit.real, [])
            if prefix not in views:
                views.append(prefix)
            self._report_no_files(visit, prefix, suffixes)
            below_split = relative_name(visit.path, folder)
            key_prefix = "" if below_split == "." else f"{below_split}/"
            non_images = self._add_entries(visit.entries, prefix, key_prefix, suffixes)
            folders.keep_non_images(visit.path, non_images)

    def _report_no_files(self, visit: Visit, prefix: str, suffixes: frozenset[str]) -> None:
        """Reports what is named like an image and not read: an empty folder, and hidden files in a folder."""
        if not visit.entries and is_image(visit.path, suffixes):
            message = "an empty folder, not a file"
            name = prefix.rstrip("/") or "."
            self.findings.append(Finding(name, BAD_IMAGE, message, lost_images=1, consequence="left out"))
        for entry in visit.hidden:
            if is_image(entry.name, suffixes) and query(entry.is_file):
                message = "is hidden, as its name begins with a dot; rename it"
                self.findings.append(Finding(prefix + entry.name, UNSUPPORTED, message))

    def _add_entries(
        self, entries: list[os.DirEntry], prefix: str, key_prefix: str, suffixes: frozenset[str]
    ) -> list[os.DirEntry]:
        """Adds the images among the entries of a folder, and returns the other files. ``prefix`` and ``key_prefix``:
        how names and keys of images in the folder begin (`ImageFile`)."""
        cached_stems = set()  # an array with the stem of an image is a copy that another program has cached
        if ARRAY_SUFFIX in suffixes:
            cached_stems = {os.path.splitext(e.name)[0] for e in entries if is_image(e.name, IMAGE_SUFFIXES)}
        non_images = []
        for entry in entries:
            if query(entry.is_dir):
                continue
            name = prefix + entry.name
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ARRAY_SUFFIX and stem in cached_stems:
                continue
            if suffix.lower() in suffixes:
                self._add_file(entry, name, key_prefix + entry.name)
                continue
            non_images.append(entry)
            reason = unread_image(entry.path)
            if reason:
                self.findings.append(Finding(name, UNSUPPORTED, reason))
        return non_images

    def _add_file(self, entry: os.DirEntry, name: str, key: str) -> None:
        """Adds an entry that is named like an image, unless it is no file."""
        stamp = stamp_of(entry)
        if stamp is None:
            self.findings.append(Finding(name, MISSING_IMAGE, "a link to nothing", lost_images=1))
        elif not query(entry.is_file):
            self.findings.append(Finding(name, BAD_IMAGE, NO_FILE, lost_images=1, consequence="left out"))
        else:
            self.add(ImageFile(name, key, stamp), name)


def find_images(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split, at least one. Raises UserError if there is none, or an entry is missing."""
    suffixes = image_suffixes(spec.pixels)
    split_images = SplitImages()
    for entry in spec.split(split).images:
        if is_shard_path(entry):
            raise UserError(f"{entry}: is in shards, which are neither listed nor copied; name a folder of images")
        if entry == Path(entry.anchor):
            raise UserError(f"{spec.source}: '{split}' is {entry}, the whole disk; name the folder of its images")
        if entry.is_dir():
            split_images.add_folder(entry, folders, suffixes)
        elif _is_list(entry):
            split_images.add_list(entry, folders, suffixes)
        elif entry.exists():
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
        else:
            raise spec.missing_error(entry)
    if not split_images.images:
        raise _no_images(spec, split, split_images)
    return split_images


def _is_list(entry: Path) -> bool:
    return entry.suffix.lower() == ".txt" and entry.is_file()


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


def find_valid_images(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split without refusing anything: its mistakes are reported when it is used itself."""
    suffixes = image_suffixes(spec.pixels)
    split_images = SplitImages()
    for entry in spec.split(split).images:
        with contextlib.suppress(UserError):
            if entry.is_dir():
                split_images.add_folder(entry, folders, suffixes)
            elif _is_list(entry):
                split_images.add_list(entry, folders, suffixes)
    return split_images
