"""Finds the label file of each image, where a format has one per image, and the label files that no image has.

A label file is where its format expects it, with the image's name and the format's suffix. Where there is none, other
readings are tried: the format's other folders, names in another case or composition of accents, the image's whole name
before the suffix (``0003.jpg.txt``), and the image that the file itself names. The only one that fits is taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from data.image_io.decode import IMAGE_SUFFIXES, is_image_name
from data.labels.findings import BAD_LABEL, ORPHAN, SECOND_LABEL, SHARED_LABEL, UNREAD_LABELS, Finding
from data.labels.image_names import ImageNames, loose
from data.labels.label_format import MAX_BYTES, FilesPerImage, ImageFile, LabelFile
from data.labels.other_formats import format_of_labels
from data.source.walk import Folders, query, stamp_of
from utils.files.paths import path_of
from utils.files.safe_io import open_regular, read_regular

_HEAD = 4096  # bytes that suffice to recognize a file with labels
_SAMPLED = 20  # files of a folder that are opened to decide whether it has labels


@dataclass(slots=True)
class FoundLabels:
    """The label files of a split."""

    files: list[LabelFile | None]  # one per image; None: its labels cannot be read, so the image must be left out
    findings: list[Finding]
    taken: dict[str, str]  # unusually named label files, by the names of their images


@dataclass(slots=True)
class _Group:
    """The images of a folder."""

    folder: str  # absolute
    places: list[str]  # folders in which their labels may be, the usual one first
    members: list[int]
    missing: list[int] = field(default_factory=list)  # members without a label file in the usual place


class OtherSplits(Protocol):
    """Answers questions about the data set's other splits, which are listed only if the search asks."""

    is_first: bool  # whether the data set names no split before this one

    @property
    def stems(self) -> frozenset[str]:
        """`loose` names, without suffix, of other images whose labels may be where this split's are."""

    @property
    def folders_before(self) -> frozenset[str]:
        """The folders (absolute) of the images of splits that the data set names before this one."""


class LabelSearch:
    """Searches for the label files of a split.

    Args:
        images: sorted by name.
        files: how the label files of the format are found.
        root: the data set's folder.
        annotations: the folder of the labels; None: where the format expects them.
        folders: entries on the disk; a walk through the images has stored the other files next to them.
        entries: the folders that the split names (absolute), without its lists.
        others: the data set's other splits.
        taken: for a copy, `FoundLabels.taken` of the original, which has also reported the findings.
    """

    def __init__(
        self,
        images: Sequence[ImageFile],
        files: FilesPerImage,
        *,
        root: Path,
        annotations: Path | None,
        folders: Folders,
        entries: Sequence[str],
        others: OtherSplits,
        taken: Mapping[str, str] | None = None,
    ) -> None:
        self._images = images
        self._format = files
        self._root = root
        self._annotations = annotations
        self._folders = folders
        self._entries = entries
        self._others = others
        self._taken_before = taken
        self._files: list[LabelFile | None] = [None] * len(images)
        self._findings: list[Finding] = []
        self._used: dict[str, set[str]] = {}  # file names by folder
        self._shared: set[str] = set()  # names of label files that several images have
        self._taken: dict[str, str] = {}  # see `FoundLabels`
        self._free_names: dict[str, dict[str, list[str]]] = {}  # by folder and loose name
        self._holding: dict[str, bool] = {}  # see `_holds_labels`
        self._on_disk: dict[str, dict[str, str]] = {}  # names of images by folder and loose stem
        self._doubtful: set[int] = set()  # images without a label file to which an unused one may belong

    def run(self) -> FoundLabels:
        """Returns the label files, and what is wrong with them."""
        groups = self._grouped()
        for group in groups:
            self._find_usual(group)
        if self._taken_before is not None:
            self._take_as_before(groups, self._taken_before)
            return FoundLabels(self._files, [], self._taken)
        if any(group.missing for group in groups):
            self._find_otherwise(groups)
        self._list_unused(groups)
        self._list_shared()
        is_labeled = any(file is not None and file.stamp for file in self._files)
        for group in groups:
            self._list_unread(group, max_files=len(self._images) if is_labeled else _SAMPLED)
        if is_labeled:
            for i in self._doubtful:
                self._files[i] = None
        return FoundLabels(self._files, self._findings, self._taken)

    def _grouped(self) -> list[_Group]:
        """Groups the images by their folders."""
        groups: dict[tuple[str, str], _Group] = {}
        for i, image in enumerate(self._images):
            folders = (image.name.rpartition("/")[0], image.key.rpartition("/")[0])
            group = groups.get(folders)
            if group is None:
                path = path_of(folders[0], self._root)
                group = _Group(path, self._format.folders(path, folders[1], self._annotations), [])
                groups[folders] = group
            group.members.append(i)
        return list(groups.values())

    def _find_usual(self, group: _Group) -> None:
        """Finds the label files of a group in its usual place, under the images' names."""
        place = group.places[0]
        entries = self._folders.besides(place)
        prefix = self._folders.name_in(place)
        begin = len(self._folders.name_in(group.folder))
        used = self._used.setdefault(place, set())
        for i in group.members:
            name = os.path.splitext(self._images[i].name)[0][begin:] + self._format.suffix
            entry = entries.get(name)
            if entry is None:
                group.missing.append(i)
                self._files[i] = LabelFile(prefix + name, None)
                continue
            self._files[i] = self._existing(i, prefix + name, entry)
            if name in used:
                self._shared.add(prefix + name)
            used.add(name)

    def _take_as_before(self, groups: Sequence[_Group], taken: Mapping[str, str]) -> None:
        """Gives missing images the label files that the original has ``taken`` for them."""
        for i in (i for group in groups for i in group.missing):
            image = self._images[i].name
            if image in taken:
                name = self._taken[image] = taken[image]
                self._files[i] = LabelFile(name, self._folders.stamp(path_of(name, self._root)))

    def _find_otherwise(self, groups: Sequence[_Group]) -> None:
        """Finds the missing label files by other readings."""
        claims: dict[tuple[str, str], list[int]] = {}  # images by folder and name of a label file
        for group in groups:
            for i in group.missing:
                fits = self._readings(i, group)
                if len(fits) == 1:
                    claims.setdefault(fits[0], []).append(i)
                elif fits:
                    self._refuse(i, fits)
        for (place, name), owners in claims.items():
            for i in owners:
                self._take(i, place, name)
        if self._format.named_image is not None:
            for i, fits in self._claims_by_content(groups, self._format.named_image).items():
                if len(fits) == 1:
                    self._take(i, *fits[0])
                else:
                    self._refuse(i, fits)

    def _readings(self, image: int, group: _Group) -> list[tuple[str, str]]:
        """Returns folders and names of the files that may be the labels of an image."""
        base = self._images[image].name.rpartition("/")[2]
        usual_name = os.path.splitext(base)[0] + self._format.suffix
        fits: list[tuple[str, str]] = []
        for place in group.places:
            free = self._free(place)
            names = free.get(loose(usual_name)) or free.get(loose(base + self._format.suffix)) or []
            if usual_name in names:
                names = [usual_name]
            if place != group.places[0]:
                names = [name for name in names if self._holds_labels(place) or self._has_labels(place, name)]
            fits += [(place, name) for name in names]
        return _different(fits)

    def _claims_by_content(
        self, groups: Sequence[_Group], named_image: Callable[[bytes], str]
    ) -> dict[int, list[tuple[str, str]]]:
        """Returns folders and names of the label files that name an image without labels, by image."""
        missing = [i for group in groups for i in group.missing if self._is_unlabeled(i)]
        names = ImageNames([self._images[i].name for i in missing])
        claims: dict[int, list[tuple[str, str]]] = {}
        for place in dict.fromkeys(place for group in groups for place in group.places):
            for name in self._free_files(place):
                named = named_image(_head(os.path.join(place, name)))
                fits = names.find(named) if named else []
                if len(fits) == 1:
                    claims.setdefault(missing[fits[0]], []).append((place, name))
        return {i: _different(fits) for i, fits in claims.items()}

    def _take(self, image: int, place: str, name: str) -> None:
        """Makes a file the label file of an image."""
        full_name = self._full_name(place, name)
        self._taken[self._images[image].name] = full_name
        self._files[image] = self._existing(image, full_name, self._folders.besides(place)[name])
        used = self._used.setdefault(place, set())
        if name in used:
            self._shared.add(full_name)
        used.add(name)

    def _existing(self, image: int, name: str, entry: os.DirEntry) -> LabelFile | None:
        """Returns the label file of an image; None, with a finding, if it is a dangling link."""
        stamp = stamp_of(entry)
        if stamp is None:
            message = f"a link to nothing; {self._images[image].name} is left out"
            self._findings.append(Finding(name, BAD_LABEL, message, lost_images=1))
            return None
        return LabelFile(name, stamp)

    def _refuse(self, image: int, fits: Sequence[tuple[str, str]]) -> None:
        """Leaves out an image that has several label files."""
        for place, name in fits:
            self._used.setdefault(place, set()).add(name)
        self._files[image] = None
        names = [self._full_name(place, name) for place, name in fits]
        message = f"its labels may be in {' or '.join(names[:3])}: keep one of them; left out"
        objects = max(self._num_objects(*each) for each in fits)
        finding = Finding(self._images[image].name, BAD_LABEL, message, lost_images=1, lost_objects=objects)
        self._findings.append(finding)

    def _free_files(self, place: str) -> list[str]:
        """Returns the names of the files in a folder that have the suffix of label files and that no image has."""
        entries = self._folders.besides(place)
        used = self._used.get(place, set())
        if len(entries) == len(used):
            return []
        suffix = self._format.suffix
        free = entries.keys() - used if used else entries
        names = [name for name in free if name[-len(suffix) :].lower() == suffix]
        return sorted(name for name in names if not query(entries[name].is_dir))

    def _free(self, place: str) -> dict[str, list[str]]:
        """Returns `_free_files` by their loose names. They are cached once all usual label files are known."""
        if place not in self._free_names:
            by_name: dict[str, list[str]] = {}
            for name in self._free_files(place):
                by_name.setdefault(loose(name), []).append(name)
            self._free_names[place] = by_name
        return self._free_names[place]

    def _holds_labels(self, place: str) -> bool:
        """Returns whether some of the free files in a folder have labels: those next to images may be captions."""
        if place not in self._holding:
            names = [name for names in self._free(place).values() for name in names]
            sample = names[:: len(names) // _SAMPLED + 1]
            self._holding[place] = any(self._has_labels(place, name) for name in sample)
        return self._holding[place]

    def _has_labels(self, place: str, name: str) -> bool:
        return self._format.is_labels(_head(os.path.join(place, name)))

    def _list_unused(self, groups: Sequence[_Group]) -> None:
        """Reports the label files that no image has."""
        groups_of: dict[str, list[_Group]] = {}
        for group in groups:
            places = group.places if group.missing else (group.places[0], group.folder)
            for place in dict.fromkeys(places):
                groups_of.setdefault(place, []).append(group)
        for place, owners in groups_of.items():
            is_usual = any(place == group.places[0] for group in owners)
            for name in self._free_files(place) if is_usual or self._holds_labels(place) else ():
                head = _head(os.path.join(place, name))
                if self._format.is_labels(head):
                    self._report(place, name, head, owners)
        for place, mirrored, is_of_all in self._places_around(groups_of):
            for name in self._free_files(place):
                stem = self._stem(name)
                if stem in self._images_on_disk(mirrored) or stem in self._labeled:
                    continue
                is_mine = stem in self._unlabeled or not is_of_all
                if not is_mine and not (self._others.is_first and stem not in self._others.stems):
                    continue
                if self._has_labels(place, name):
                    self._report_orphan(place, name)

    def _report(self, place: str, name: str, head: bytes, groups: Sequence[_Group]) -> None:
        """Reports a file with labels, unless nothing is wrong with it. ``groups``: those whose labels may be in
        ``place``."""
        if not any(map(self._lists_unused, groups)):
            return
        stems = {self._stem(name)}
        if self._format.named_image is not None:
            named = self._format.named_image(head)
            if named:
                stems |= {loose(named), self._stem(named)}
        for group in groups:
            on_disk = self._images_on_disk(group.folder)
            images = [on_disk[stem] for stem in stems if stem in on_disk]
            if images:
                self._report_of_image(place, name, self._folders.name_in(group.folder) + images[0])
                return
        if self._annotations is None or stems.isdisjoint(self._others.stems):
            self._report_orphan(place, name)

    def _lists_unused(self, group: _Group) -> bool:
        """Returns whether this split reports label files without an image in a folder. If several splits list images in
        one folder, the first split does: they would be a large fraction of a small split."""
        return self._folders.was_walked(group.folder) or group.folder not in self._others.folders_before

    def _report_of_image(self, place: str, name: str, image: str) -> None:
        """Reports a file with labels of an image that exists, but has another label file or is not read."""
        i = self._positions.get(image)
        if i is None:
            if os.path.splitext(image)[1].lower() not in IMAGE_SUFFIXES:
                self._add_orphan(place, name, f"its image, {image}, is not read")
            return  # the image is in no list, or has a finding of its own
        used = self._files[i]
        if self._is_unlabeled(i):
            self._report_orphan(place, name)
        elif used and not _are_equal(os.path.join(place, name), path_of(used.name, self._root)):
            message = f"{image} has {used.name}, which is used; remove one of the two"
            self._findings.append(Finding(self._full_name(place, name), SECOND_LABEL, message))

    def _report_orphan(self, place: str, name: str) -> None:
        """Reports a file with labels that belongs to no image. Unlabeled images with a similar name are left out: as a
        background, such an image would teach the model to ignore its objects."""
        images = self._resembling(self._stem(name))
        if not images:
            self._add_orphan(place, name, "belongs to no image; rename it like its image, or remove it")
            return
        num_left_out = len({*images} - self._doubtful)
        self._doubtful.update(images)
        image = self._images[images[0]].name
        expected = self._expected_label(images[0])
        message = f"belongs to no image; if it is that of {image}, which is left out, rename it to {expected}"
        self._add_orphan(place, name, message, images_left_out=num_left_out)

    def _expected_label(self, image: int) -> str:
        """Returns the name of the label file that an unlabeled image should have."""
        file = self._files[image]
        assert file is not None, "an unlabeled image has an expected label file"
        return file.name

    def _add_orphan(self, place: str, name: str, message: str, images_left_out: int = 0) -> None:
        """Adds a finding. It counts as the images that are left out because of it. Without such an image it counts as
        one, unless the split lists its images: then the folder may hold the labels of many other images."""
        is_lost = images_left_out > 0 or bool(self._entries)
        images = max(images_left_out, 1) if is_lost else 0
        objects = self._num_objects(place, name) if is_lost else 0
        finding = Finding(self._full_name(place, name), ORPHAN, message, lost_images=images, lost_objects=objects)
        self._findings.append(finding)

    def _num_objects(self, place: str, name: str) -> int:
        return self._format.num_objects(_content(os.path.join(place, name)) or b"")

    def _resembling(self, stem: str) -> list[int]:
        """Returns the images without labels whose loose stem is ``stem``; else the only one that has another sign or
        other leading zeros, or that begins or ends with it, or the other way around."""
        if stem in self._unlabeled:
            return self._unlabeled[stem]
        fits = {*self._unlabeled_by_part.get(stem, ()), *self._unlabeled_plain.get(_plain(stem), ())}
        fits.update(i for part in _parts(stem) for i in self._unlabeled.get(part, ()))
        return list(fits) if len(fits) == 1 else []

    def _places_around(self, seen: Container[str]) -> Iterator[tuple[str, str, bool]]:
        """Yields folders, none of them in ``seen``, in which label files may be by mistake: below and above those of
        the split; each with the folder whose images it is for, and whether other splits may have labels there."""
        for entry in self._entries:
            usual = self._format.folders(entry, "", self._annotations)[0]
            if usual == entry:
                around = [(folder, folder) for folder in self._folders.walked_below(entry)]
            else:
                around = list(self._below(usual, entry))
            is_of_all = self._annotations is not None
            yield from ((place, mirrored, is_of_all) for place, mirrored in around if place not in seen)
            folder = entry
            while self._annotations is None and os.path.basename(folder) != "images":
                folder = os.path.dirname(folder)
                place = self._format.folders(folder, "", None)[0]
                if place == folder or Path(folder) in self._root.parents:
                    break
                if place not in seen:
                    yield place, folder, True

    def _below(self, labels: str, images: str) -> Iterator[tuple[str, str]]:
        """Yields ``labels`` and the folders below, each with the folder of ``images`` that it mirrors."""
        pending = [(labels, images)]
        while pending:
            place, mirrored = pending.pop()
            yield place, mirrored
            entries = self._folders.entries(place)
            used = self._used.get(place, set())
            for name in sorted(entries.keys() - used) if len(entries) > len(used) else ():
                if query(entries[name].is_dir) and not entries[name].is_symlink():
                    pending.append((os.path.join(place, name), os.path.join(mirrored, name)))

    def _list_unread(self, group: _Group, max_files: int) -> None:
        """Reports files that have the names of unlabeled images and seem to have labels, but in another format or with
        another suffix. These images are left out. ``max_files``: files per folder that are opened."""
        unlabeled = {self._image_stem(i): i for i in group.missing if self._is_unlabeled(i) and i not in self._doubtful}
        places = dict.fromkeys((group.places[0], group.folder))
        for place in places if unlabeled else ():
            unused = self._folders.besides(place).keys() - self._used.get(place, set())
            names = sorted(name for name in unused if not is_image_name(name))
            named = [name for name in names if self._stem_of_unread(name) in unlabeled]
            for name in named[:max_files]:
                i = unlabeled[self._stem_of_unread(name)]
                kind = format_of_labels(_head(os.path.join(place, name)))
                if not kind or i in self._doubtful:
                    continue
                self._doubtful.add(i)
                message = (
                    f"seems to have the labels of {self._images[i].name}, which is left out ({kind}; labels are read "
                    f"from {self._expected_label(i)}, which may be empty)"
                )
                self._findings.append(Finding(self._full_name(place, name), UNREAD_LABELS, message, lost_images=1))

    def _stem_of_unread(self, name: str) -> str:
        """Returns the loose stem of the image to which ``00.json``, ``00.png.json``, ``00.txt.bak`` or ``00`` may
        belong."""
        stem = self._stem(name)
        begin, suffix = os.path.splitext(stem)
        return begin if suffix == self._format.suffix or is_image_name(stem) else stem

    def _full_name(self, place: str, name: str) -> str:
        return self._folders.name_in(place) + name

    def _stem(self, name: str) -> str:
        return loose(os.path.splitext(name)[0])

    def _images_on_disk(self, folder: str) -> dict[str, str]:
        """Returns the names of all images in a folder, including unread ones, by loose stem and by loose name."""
        if folder not in self._on_disk:
            names = [name for name in self._folders.entries(folder) if is_image_name(name)]
            self._on_disk[folder] = {loose(name): name for name in names} | {self._stem(name): name for name in names}
        return self._on_disk[folder]

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {image.name: i for i, image in enumerate(self._images)}

    @cached_property
    def _unlabeled(self) -> dict[str, list[int]]:
        """The images without a label file by loose stem."""
        by_stem: dict[str, list[int]] = {}
        for i in range(len(self._files)):
            if self._is_unlabeled(i):
                by_stem.setdefault(self._image_stem(i), []).append(i)
        return by_stem

    @cached_property
    def _unlabeled_by_part(self) -> dict[str, list[int]]:
        """The images without a label file by the `_parts` of their loose stems."""
        by_part: dict[str, list[int]] = {}
        for stem, images in self._unlabeled.items():
            for part in _parts(stem):
                by_part.setdefault(part, []).extend(images)
        return by_part

    @cached_property
    def _unlabeled_plain(self) -> dict[str, list[int]]:
        """The images without a label file by the `_plain` form of their loose stems."""
        by_plain: dict[str, list[int]] = {}
        for stem, images in self._unlabeled.items():
            by_plain.setdefault(_plain(stem), []).extend(images)
        return by_plain

    @cached_property
    def _labeled(self) -> frozenset[str]:
        """The loose stems of the images with a label file."""
        return frozenset(self._image_stem(i) for i in range(len(self._files)) if not self._is_unlabeled(i))

    def _is_unlabeled(self, image: int) -> bool:
        file = self._files[image]
        return file is not None and file.stamp is None

    def _image_stem(self, image: int) -> str:
        return self._stem(self._images[image].name.rpartition("/")[2])

    def _list_shared(self) -> None:
        """Reports the label files that several images have."""
        if not self._shared:
            return
        owners: dict[str, list[str]] = {}
        for image, file in zip(self._images, self._files):
            if file is not None and file.name in self._shared:
                owners.setdefault(file.name, []).append(image.name)
        for name, images in owners.items():
            shared = " and ".join(images[:2])
            message = f"used for {shared}; remove all but one of the images, or give each its own labels"
            self._findings.append(Finding(name, SHARED_LABEL, message))


def _parts(stem: str) -> set[str]:
    """Returns the beginnings and ends of a name, cut at punctuation: ``0000`` and ``7436`` for ``0000_7436``."""
    signs = [i for i, character in enumerate(stem) if not character.isalnum()]
    return {stem[:i] for i in signs} | {stem[i + 1 :] for i in signs} - {""}


def _plain(stem: str) -> str:
    """Normalizes punctuation and leading zeros, so that ``img-007`` and ``img 7`` are equal."""
    return re.sub(r"0+(?=\d)", "", re.sub(r"[\W_]+", "_", stem))


def _different(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the first of ``files``, folders and names, if all have the same content, else all."""
    if len(files) < 2:
        return files
    first, *others = (os.path.join(*each) for each in files)
    are_equal = all(_are_equal(first, other) for other in others)
    return files[:1] if are_equal else files


def _are_equal(first: str, second: str) -> bool:
    """Returns whether two files have the same content. What cannot be read is equal to nothing."""
    content = _content(first)
    return content is not None and content == _content(second)


def _head(path: str) -> bytes:
    """Returns the beginning of a file; nothing if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _content(path: str) -> bytes | None:
    try:
        return read_regular(path, most=MAX_BYTES)
    except OSError:
        return None
