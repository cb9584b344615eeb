"""Pairs the images of a split with their label files (rules D1 to D3).

The places of an image's label file follow from the image's path as written; links are not resolved. With the stem of
the image and the suffix of the format, it is

- YOLO txt: in the folder in which the last ``images`` of the path is ``labels``, or beside the image;
- in a folder that the data set names (``annotations:`` or ``labels:``): at the same path below it, without the folders
  up to the last ``images`` (or ``JPEGImages``) or up to the folder that the split names; or else directly in it:
  ``train/p/x.xml``, ``p/x.xml`` or ``x.xml`` for ``images/train/p/x.png``.

If two of these places have label files, the split is refused. A name that differs only in case or Unicode composition
counts if it is the only one. A file without a box, such as a caption or a list of classes, is no label file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from data.findings import ORPHAN, Finding
from data.folders import ABSENT, Folders, stamp_of
from data.formats.label_format import MAX_BYTES, Classes, Format, LabelFileError
from data.formats.table import YOLO, unread_formats
from data.listing import (
    IMAGE_FOLDERS,
    UNREADABLE,
    Listing,
    find_images,
    folder_of,
    image_tree,
    images_beside,
    images_of_other_splits,
    num_shared_parts,
    read_listing,
)
from data.spec import DatasetSpec, FilesSplit, JoinedSplit, ShardSplit
from utils.errors import UserError
from utils.files.paths import casefold_nfc, path_of, relative_name
from utils.files.safe_io import read_regular
from utils.strings import counted


def list_split(spec: DatasetSpec, split: str) -> Listing:
    """Lists the files of a split. A staged copy uses the listing of its original.

    Raises UserError if the split, a folder or list of it, or its labels are missing, if it has no image or no label
    file, or if it joins data sets or is in shards.
    """
    source = spec.split(split)
    if isinstance(source, JoinedSplit):
        raise UserError(
            f"{spec.source}: '{split}' joins other data sets, which are not copied; name one, or leave out --stage"
        )
    if isinstance(source, ShardSplit):
        raise UserError(f"{source.index}: shards can be neither listed nor copied; name a folder of images")
    if source.listing_file is not None:
        return read_listing(source.listing_file, spec.root)
    spec.check_split(split)
    is_bounded = spec.source == str(spec.root)  # a folder without a YAML was named: labels outside it are not read
    folders = Folders(spec.root, is_bounded=is_bounded)
    images, findings = find_images(spec, split, source, folders)
    others = images_of_other_splits(spec, split, source, folders)  # listed where it is used
    names = sorted(images)
    shared_images: list[str] = []
    lacks_split = False
    if source.label_format.is_per_image:
        label_of, places = pair(images, source, split, folders, named_by=spec.source)
        labels = []
        label_stamps = []
        for name in names:
            if name in label_of:
                label = label_of[name]
                stamp = stamp_of(path_of(label, spec.root))
                if stamp == ABSENT:
                    stamp = UNREADABLE
            else:
                label = folders.prefix(places[folder_of(name)]) + _label_name(name, source.label_format.suffix)
                stamp = ABSENT
            labels.append(label)
            label_stamps.append(stamp)
        if not label_of:
            raise UserError(
                f"{spec.source}: none of the {counted(len(names), 'image')} of '{split}' has a label file; expected "
                f"{path_of(labels[0], spec.root)} for {images[names[0]]}{unread_formats(str(spec.root), folders)}"
            )
        findings += _find_orphans(images, {*label_of.values()}, {*places.values()}, source, others, folders)
    else:
        assert source.annotations is not None
        labels = [folders.prefix(str(source.annotations)).rstrip("/")]
        label_stamps = [stamp_of(source.annotations)]
        other_images = [found for _, found in others]
        lacks_split = None in other_images
        shared_images = sorted({*names}.union(*filter(None, other_images)))
    return Listing(
        root=spec.root,
        named_root=spec.root.as_posix(),
        images=names,
        image_stamps=np.array([stamp_of(images[name]) for name in names], np.int64),
        label_format=source.label_format,
        labels=labels,
        label_stamps=np.array(label_stamps, np.int64),
        findings=findings,
        shared_images=shared_images,
        lacks_split=lacks_split,
    )


def pair(
    images: Mapping[str, str], source: FilesSplit, split: str, folders: Folders, *, named_by: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the label file of each image that has one; and the folder (absolute) in which the label files of images
    are or would be, by the start of the images' names.

    ``images``: paths by name, of ``source``; ``named_by``: the YAML or folder, for messages. Raises UserError if two
    places have label files, or if a file matches images of two folders.
    """
    label_of: dict[str, str] = {}
    places: dict[str, str] = {}
    image_of: dict[str, str] = {}  # the first image of each label file
    for start, found in _matches(images, source, folders):
        labeled = [place for place, labels in found.items() if labels]
        if len(labeled) > 1:  # captions and the like are no label files
            num_objects = {
                place: sum(_num_objects(label, folders.root, source.label_format) for label in found[place].values())
                for place in labeled
            }
            labeled = [place for place in labeled if num_objects[place]] or labeled[:1]
        if len(labeled) > 1:
            folder = path_of(start, folders.root)
            below = relative_name(folder, _entry_of(folder, source) or folder)
            counts = [
                (Path(place.removesuffix(f"/{below}")), source.label_format, len(found[place])) for place in labeled
            ]
            raise two_places(f"{named_by}: '{split}': {folder}", split, source.images, counts, folders.root)
        places[start] = labeled[0] if labeled else next(iter(found))
        for name, label in found[places[start]].items():
            first = image_of.setdefault(label, name)
            if folder_of(first) != start:
                raise UserError(
                    f"{named_by}: '{split}': {label} matches {first} and {name}; move the label files into folders "
                    f"like those of the images, or name one folder of images in a YAML, such as '{split}: "
                    f"{max(folder_of(first), start).rstrip('/')}', with "
                    f"'annotations: {relative_name(places[start], folders.root)}'"
                )
            label_of[name] = label
    return label_of, places


def two_places(
    subject: str, split: str, images: Sequence[Path], places: Sequence[tuple[Path, Format, int]], root: Path
) -> UserError:
    """Returns the error about ``subject``, which has labels in several places (rule D1), each with its format and its
    number of label files; ``images``: of the split."""
    entries = ", ".join(relative_name(entry, root) for entry in images)
    lines = [
        f"'{'labels' if label_format is YOLO else 'annotations'}: {{{split}: {relative_name(place, root)}}}' "
        f"({label_format.title}: {counted(count, 'file')})"
        for place, label_format, count in places
    ]
    return UserError(
        f"{subject} has labels in {len(places)} places; remove those of one, or write a YAML with 'path: {root}', "
        f"'{split}: [{entries}]', and {' or '.join(lines)}"
    )


def _matches(
    images: Mapping[str, str], source: FilesSplit, folders: Folders
) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    """Yields, for each folder of images, the start of their names, and the label files that are called like them: by
    place in which they may be, by image."""
    suffix = source.label_format.suffix
    names_in: dict[str, list[str]] = {}  # by their start
    for name in images:
        names_in.setdefault(folder_of(name), []).append(name)
    for start, names in names_in.items():
        folder = os.path.dirname(images[names[0]])
        if source.annotations is None:
            places = _yolo_places(folder, folders)
        else:
            places = _named_places(folder, source, folders)
        found: dict[str, dict[str, str]] = {place: {} for place in places}
        for place in places:
            if any(_label_names(place, suffix, folders)):
                prefix = folders.prefix(place)
                labels = {name: folders.find(place, _label_name(name, suffix)) for name in names}
                found[place] = {name: prefix + label for name, label in labels.items() if label is not None}
        yield start, found


def _yolo_places(image_folder: str, folders: Folders) -> list[str]:
    """Returns the folders in which YOLO's label files of the images in ``image_folder`` may be; the first need not
    exist."""
    parts = Path(image_folder).parts
    for i in reversed(range(num_shared_parts(image_folder, folders.root) if folders.is_bounded else 1, len(parts))):
        if casefold_nfc(parts[i]) == IMAGE_FOLDERS[0]:
            above = os.path.join(*parts[:i])
            below = ["labels", *parts[i + 1 :]]
            return [folders.find_below(above, below) or os.path.join(above, *below), image_folder]
    return [image_folder]


def _entry_of(image_folder: str, source: FilesSplit) -> str | None:
    """Returns the folder of a split that an image is in; None for an image of a list."""
    return next((str(entry) for entry in source.images if Path(image_folder).is_relative_to(entry)), None)


def _named_places(image_folder: str, source: FilesSplit, folders: Folders) -> list[str]:
    """Returns the existing folders below ``source.annotations`` in which the label files of the images in
    ``image_folder`` may be, or ``source.annotations`` itself."""
    root = str(folders.root)
    tops = [image_tree(image_folder, folders.root) or root, _entry_of(image_folder, source) or root, image_folder]
    below = [Path(image_folder).relative_to(top).parts for top in tops if Path(image_folder).is_relative_to(top)]
    places = [folders.find_below(str(source.annotations), list(parts)) for parts in below]
    existing = [place for place in places if place and os.path.isdir(place)]
    return list(dict.fromkeys(existing)) or [str(source.annotations)]


def _label_name(image: str, suffix: str) -> str:
    """Returns the name of an image's label file, without its folder."""
    return image.rpartition("/")[2].rpartition(".")[0] + suffix


def _label_names(folder: str, suffix: str, folders: Folders) -> Iterator[str]:
    """Yields the names of the label files in a folder, which need not exist."""
    names = folders.entries(folder) if os.path.isdir(folder) else ()
    return (name for name in names if name[-len(suffix) :].lower() == suffix)


def _num_objects(name: str, root: Path, label_format: Format) -> int:
    """Returns the number of rows of a label file; 0 for a file of another kind, or without a box among them; 1 if it
    cannot be read, since what it contains is unknown."""
    try:
        (entry,) = label_format.read(read_regular(path_of(name, root), MAX_BYTES), Classes(None))
    except (IsADirectoryError, LabelFileError):
        return 0
    except OSError:
        return 1
    return 0 if all(isinstance(row, Finding) for row in entry.rows) else len(entry.rows)


def _find_orphans(
    images: Mapping[str, str],
    used: set[str],
    places: set[str],
    source: FilesSplit,
    others: Iterable[tuple[FilesSplit, dict[str, str] | None]],
    folders: Folders,
) -> list[Finding]:
    """Returns a finding for each label file, in the label folders of the split, that no image has (rule D2). ``used``:
    label files of ``images``, which are in ``places``; ``others``: see `images_of_other_splits`.

    Images that have one may also be beside those of this split, as with a list of a part of the images, or in another
    split that names the folder of labels. If the images of such a split are missing, nothing is known about the files.
    """
    if source.annotations is not None:
        tops = [str(source.annotations)]
    else:  # also label folders of missing image folders
        entries = [str(entry) for entry in source.images if os.path.isdir(entry)]
        tops = [next(filter(os.path.isdir, _yolo_places(entry, folders))) for entry in entries]
    orphans = {
        folders.prefix(folder) + name
        for folder in places.union(*map(folders.walk, tops))
        for name in _label_names(folder, source.label_format.suffix, folders)
    } - used
    if not orphans:
        return []
    for other, other_images in [(source, images_beside(images, folders)), *others]:
        if other_images is None:
            return []
        for _, found in _matches(other_images, other, folders):
            orphans.difference_update(*(labels.values() for labels in found.values()))
    findings: list[Finding] = []
    for name in sorted(orphans):
        num_objects = _num_objects(name, folders.root, source.label_format)
        if num_objects:
            text = f"no image of its name; {counted(num_objects, 'object')}"
            findings.append(Finding(ORPHAN, text, name, number=num_objects, lost_objects=num_objects))
    return findings
