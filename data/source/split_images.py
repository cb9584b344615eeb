"""Finds the images of a split: "which files belong to it" is answered here.

A split names folders and .txt lists (`data.source.image_list`). The label file of a split may also have the labels of
other images: those of other splits, and of none (`other_images`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from data.image_io.decode import ARRAY_SUFFIX, IMAGE_SUFFIXES, image_suffixes, unread_image, unread_summary
from data.image_io.shards import is_shard_path
from data.labels.findings import BAD_IMAGE, MISSING_IMAGE, REPEATED_IMAGE, UNSUPPORTED, Finding
from data.labels.label_format import ImageFile, OtherImages
from data.source.dataset_spec import WITHOUT_VAL, DatasetSpec, labels_without_images
from data.source.image_list import NO_FILE, is_image, read_image_list
from data.source.walk import Folders, Visit, query, stamp_of, walk
from utils.errors import UserError
from utils.files.paths import path_of, relative_name

_MAX_FOLDERS = 1000  # folders next to those of a split that are searched for images with the same labels


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

    def add_list(self, file: Path, root: Path, folders: Folders, suffixes: frozenset[str]) -> None:
        """Adds the images of a list."""
        content = read_image_list(file, root, folders, suffixes)
        for location, image in content.images:
            self.add(image, location)
        self.lists[file] = [image.name for _, image in content.images]
        self.missing += content.missing
        self.findings += content.findings

    def add_folder(self, folder: Path, folders: Folders, suffixes: frozenset[str]) -> None:
        """Adds the images below a folder."""
        for visit in walk(folder):
            prefix = folders.name_in(visit.path)
            views = self.views.setdefault(visit.real, [])
            if prefix not in views:
                views.append(prefix)
            if not visit.entries and is_image(visit.path, suffixes):
                finding = Finding(
                    where=prefix.rstrip("/") or ".",
                    kind=BAD_IMAGE,
                    text="an empty folder, not a file",
                    consequence="left out",
                    lost_images=1,
                )
                self.findings.append(finding)
            for entry in visit.hidden:
                if is_image(entry.name, suffixes) and query(entry.is_file):
                    message = "is hidden, as its name begins with a dot; rename it"
                    self.findings.append(Finding(prefix + entry.name, UNSUPPORTED, message))
            key_base = relative_name(visit.path, folder)
            key_prefix = "" if key_base == "." else f"{key_base}/"
            others = self._add_entries(visit.entries, prefix, key_prefix, suffixes)
            folders.keep_besides(visit.path, others)

    def _add_entries(
        self, entries: list[os.DirEntry], prefix: str, key_prefix: str, suffixes: frozenset[str]
    ) -> list[os.DirEntry]:
        """Adds the images among the entries of a folder, and returns the other files."""
        cached_stems = set()  # an array with the stem of an image is a copy that another program has cached
        if ARRAY_SUFFIX in suffixes:
            cached_stems = {os.path.splitext(e.name)[0] for e in entries if is_image(e.name, IMAGE_SUFFIXES)}
        others = []
        for entry in entries:
            if query(entry.is_dir):
                continue
            name = prefix + entry.name
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ARRAY_SUFFIX and stem in cached_stems:
                continue
            if suffix.lower() not in suffixes:
                others.append(entry)
                reason = unread_image(entry.path)
                if reason:
                    self.findings.append(Finding(name, UNSUPPORTED, reason))
                continue
            stamp = stamp_of(entry)
            if stamp is None:
                self.findings.append(Finding(name, MISSING_IMAGE, "a link to nothing", lost_images=1))
            elif not query(entry.is_file):
                self.findings.append(Finding(name, BAD_IMAGE, NO_FILE, lost_images=1, consequence="left out"))
            else:
                self.add(ImageFile(name, key_prefix + entry.name, stamp), name)
        return others


def find_images(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split, at least one. Raises UserError if there is none, or an entry is missing."""
    suffixes = image_suffixes(spec.pixels)
    found = SplitImages()
    for entry in spec.split(split).images:
        if is_shard_path(entry):
            raise UserError(f"{entry}: is in shards, which are neither listed nor copied; name a folder of images")
        if entry == Path(entry.anchor):
            raise UserError(f"{spec.source}: '{split}' is {entry}, the whole disk; name the folder of its images")
        if entry.is_dir():
            found.add_folder(entry, folders, suffixes)
        elif _is_list(entry):
            found.add_list(entry, spec.root, folders, suffixes)
        elif entry.exists():
            raise UserError(f"{entry}: neither a folder nor a .txt list of images (named by {spec.source})")
        else:
            raise spec.missing_error(entry)
    if not found.images:
        raise _no_images(spec, split, found)
    return found


def _is_list(entry: Path) -> bool:
    return entry.suffix.lower() == ".txt" and entry.is_file()


def _no_images(spec: DatasetSpec, split: str, found: SplitImages) -> UserError:
    """Makes the error about a split without images, with what its folders have instead."""
    searched = ", ".join(map(str, spec.split(split).images))
    message = f"{searched}: no images found for '{split}' (looked for {' '.join(sorted(image_suffixes(spec.pixels)))})"
    unread = unread_files(found.findings)
    message += f"; {unread_summary(unread)}" if unread else labels_without_images(spec.root)
    if split == "val":
        message += f"; add some, or {WITHOUT_VAL}"
    return UserError(message)


def unread_files(findings: Iterable[Finding]) -> list[str]:
    """Returns the files of unsupported kinds, as `unread_summary` takes them."""
    return [f"{finding.where}: {finding.text}" for finding in findings if finding.kind == UNSUPPORTED]


def images_as_far_as_listed(spec: DatasetSpec, split: str, folders: Folders) -> SplitImages:
    """Returns the images of a split, whose mistakes are reported only when that split itself is used."""
    suffixes = image_suffixes(spec.pixels)
    found = SplitImages()
    for entry in spec.split(split).images:
        with contextlib.suppress(UserError):
            if entry.is_dir():
                found.add_folder(entry, folders, suffixes)
            elif _is_list(entry):
                found.add_list(entry, spec.root, folders, suffixes)
    return found


def other_images(spec: DatasetSpec, split: str, found: SplitImages, folders: Folders) -> OtherImages:
    """Returns the images besides those of ``split`` (``found``) that its label file may name."""
    this = spec.split(split)
    others = []
    images: dict[str, ImageFile] = {}
    missing: list[str] = []
    for other, source in spec.splits.items():
        is_same = _real_paths(source.images) == _real_paths(this.images)  # it has no other images
        if source.annotations != this.annotations or is_same:
            continue
        others.append(other)
        found_there = images_as_far_as_listed(spec, other, folders)
        images |= {image.name: image._replace(stamp=None) for image in found_there.images.values()}
        missing += found_there.missing
    known = {*found.images, *images}
    of_no_split = [ImageFile(name, "", None) for name in images_beside(spec, split, known, folders)]
    of_splits = [images[name] for name in sorted(images) if name not in found.images]
    splits = list(spec.splits)
    return OtherImages(
        images=[*of_splits, *of_no_split],
        missing=found.missing,
        missing_elsewhere=missing,
        is_first=not any(splits.index(other) < splits.index(split) for other in others),
    )


def _real_paths(entries: Iterable[Path]) -> list[str]:
    return sorted(map(os.path.realpath, entries))


def images_beside(spec: DatasetSpec, split: str, known: Collection[str], folders: Folders) -> list[str]:
    """Returns the names of images that no split names, next to the folders of ``split`` or to the images of its lists,
    sorted: its label file may have their labels, too. ``known``: names of images to leave out."""
    suffixes = image_suffixes(spec.pixels)
    split_entries = {entry for source in spec.splits.values() for entry in source.images}
    entries = spec.split(split).images
    places = {entry.parent for entry in entries if entry.is_dir()}
    if not all(entry.is_dir() for entry in entries):
        places |= {Path(path_of(folder, spec.root)) for folder in {name.rpartition("/")[0] for name in known}}
    names: set[str] = set()
    for place in sorted(places):
        if not place.is_relative_to(spec.root):
            continue
        place_entries = list(folders.entries(str(place)).values())
        inner = [Path(entry.path) for entry in place_entries if query(entry.is_dir)]
        below = itertools.chain.from_iterable(walk(path) for path in inner if path not in split_entries)
        visits = itertools.chain([Visit(str(place), "", place_entries, [])], below)
        for visit in itertools.islice(visits, _MAX_FOLDERS):
            prefix = folders.name_in(visit.path)
            names |= {prefix + entry.name for entry in visit.entries if is_image(entry.name, suffixes)}
    return sorted(names.difference(known))
