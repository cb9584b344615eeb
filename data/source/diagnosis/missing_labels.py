"""Reports what a data set contains in place of a split's label files, if none of them exists."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data.labels.findings import BAD_LABEL, MISSING_IMAGE, ORPHAN, UNREAD_LABELS, Finding
from data.labels.formats import LABEL_FORMATS
from data.labels.label_format import first_bytes
from data.labels.yolo import label_folders
from data.source.dataset_spec import DatasetSpec
from data.source.listing.listing import Listing
from data.source.missing_data import nearby_paths_hint
from data.source.other_exports import EXPORT_SUFFIXES, first_unread_export
from data.source.walk import walk
from utils.errors import UserError
from utils.files.paths import path_of, relative_name
from utils.strings import counted

_MAX_FOLDERS = 1000  # folders searched for label files if there are none in the expected ones
_MAX_OPENED_FILES = 100  # files of one kind that are opened per folder to recognize their content


class _Advice(NamedTuple):
    """Advice about files of one kind in a folder where no labels are read."""

    suffix: str
    is_per_image: bool  # whether each image has such a file, with the image's stem
    remedy: str  # see `LabelFiles.advice`
    is_labels: Callable[[bytes], bool] | None = None  # see `LabelFiles`; None if any such file is meant


class _Matches(NamedTuple):
    """The files of one kind in a folder, at least one."""

    files: list[Path]
    advice: _Advice


_LABELS_PER_IMAGE = tuple(
    _Advice(form.files.suffix, True, form.files.advice) for form in LABEL_FORMATS if form.per_image is not None
)
# In the folder that 'annotations' names, whose format has no such files.
_LABELS_IN_ANNOTATIONS = tuple(
    _Advice(form.files.suffix, True, "if they are YOLO txt, remove 'annotations' from the YAML", form.files.is_labels)
    for form in LABEL_FORMATS
    if form.per_image is not None and not form.per_image.in_annotations
)
# Files named like images come first: one JSON per image is not COCO JSON.
_OTHER_FILES = (
    _Advice(".json", True, "one JSON per image is not supported; convert them to YOLO txt or to one COCO JSON"),
    *(
        _Advice(form.files.suffix, False, form.files.advice, form.files.is_labels)
        for form in LABEL_FORMATS
        if form.per_image is None
    ),
    _Advice(".csv", False, "CSV is not supported; export the data set as YOLO txt, COCO JSON or Pascal VOC"),
)


def check_label_files(listing: Listing, spec: DatasetSpec, split: str) -> None:
    """Raises UserError if no image of a split has a label file, with a hint at what the data set contains instead."""
    if not listing.has_labels:
        raise UserError(_no_labels_message(listing, spec, split))


def _no_labels_message(listing: Listing, spec: DatasetSpec, split: str) -> str:
    """Returns the message about a split in which no image has a label file."""
    images = counted(len(listing.images), "image")
    doubtful = _findings_of(listing, BAD_LABEL)
    if doubtful:
        files = counted(len(doubtful), "image")
        message = f"'{split}' has {images} without a label file, and {files} whose labels can't be used"
        return f"{spec.source}: {message}, first {doubtful[0].where}: {doubtful[0].text}"
    missing = _findings_of(listing, MISSING_IMAGE)
    if len(missing) > len(listing.images):
        message = f"'{split}' has {images} without a label file, and {counted(len(missing), 'row')} without an image"
        advice = "if one row is a path as written, all must be"
        return f"{spec.source}: {message}, first {missing[0].where}: {missing[0].text}; {advice}"
    expected = path_of(listing.labels[0].name, spec.root)
    message = f"{spec.source}: '{split}' has {images} and no label file; the first was expected at {expected}"
    orphans = _findings_of(listing, ORPHAN)
    if orphans:
        count = counted(len(orphans), "label file")
        return f"{message}; {count} without an image, first {orphans[0].where}: {orphans[0].text}"
    hint = _hint_at_other_files(listing, spec, split)
    if hint:
        return f"{message}; {hint}"
    unread = _findings_of(listing, UNREAD_LABELS)
    if unread:
        return f"{message}; {unread[0].where} {unread[0].text}"
    return message + nearby_paths_hint(Path(expected))


def _findings_of(listing: Listing, kind: str) -> list[Finding]:
    return [finding for finding in listing.findings if finding.kind == kind]


def _hint_at_other_files(listing: Listing, spec: DatasetSpec, split: str) -> str:
    """Returns a hint about files that may be the split's label files, in other folders or of other formats in the
    annotations, or "" if there are none."""
    image = Path(path_of(listing.images[0].name, spec.root))
    label = Path(path_of(listing.labels[0].name, spec.root))
    stems = {os.path.splitext(os.path.basename(file.name))[0] for file in listing.images}

    annotations = spec.listed_splits[split].annotations
    if annotations is None:
        folders = _searched_folders(image, label, spec.root)
        labels_per_image = _LABELS_PER_IMAGE
    else:
        folders = _folders_below(annotations)
        labels_per_image = _LABELS_IN_ANNOTATIONS

    for folder in folders:
        files = [path for path in sorted(folder.glob("[!.]*.*")) if path.is_file()]
        matches = _first_kind(labels_per_image, files, stems)
        if matches is None:
            exports = [path for path in files if path.suffix.lower() in EXPORT_SUFFIXES]
            hint = first_unread_export(exports[:_MAX_OPENED_FILES])
            if hint:
                return hint
            matches = _first_kind(_OTHER_FILES, files, stems)
        if matches is not None:
            return _remedy(matches, image, spec.root, split)
    return ""


def _searched_folders(image: Path, label: Path, root: Path) -> Iterator[Path]:
    """Yields the folders that may contain label files, beginning near the first image and its expected label file."""
    yield image.parent
    yield label.parent
    if root not in image.parents:
        return
    above = [root] if image.parent == root else list(dict.fromkeys((image.parent.parent, root)))
    yield from above
    for folder in above:
        yield from sorted(folder.glob("[!.]*/"))
    yield from _folders_below(root)


def _folders_below(folder: Path) -> Iterator[Path]:
    """Yields a folder and the first folders below it."""
    for visit in itertools.islice(walk(folder), _MAX_FOLDERS):
        yield Path(visit.path)


def _first_kind(kinds: Iterable[_Advice], files: Sequence[Path], stems: Collection[str]) -> _Matches | None:
    """Returns those of the ``files`` of a folder that are of the first of ``kinds`` of which there are any. ``stems``:
    stems of the images."""
    for advice in kinds:
        matches = [path for path in files if path.suffix.lower() == advice.suffix]
        if advice.is_per_image:
            matches = [path for path in matches if path.stem in stems]
        is_labels = advice.is_labels
        if is_labels is not None:
            matches = [path for path in matches[:_MAX_OPENED_FILES] if is_labels(first_bytes(path))]
        if matches:
            return _Matches(matches, advice)
    return None


def _remedy(matches: _Matches, image: Path, root: Path, split: str) -> str:
    """Returns a hint that names files and what to do with them. ``image``: the first image of ``split``."""
    files, advice = matches
    source = str(files[0])
    entry = files[0]
    if advice.is_per_image:
        entry = files[0].parent
        source = f"{entry} has {counted(len(files), f'{advice.suffix} file')}"
    yaml_entry = f"{{{split}: {relative_name(entry, root)}}}"
    return f"{source}: {advice.remedy.format(move=_how_to_move(files[0], image, root), entry=yaml_entry)}"


def _how_to_move(text_file: Path, image: Path, root: Path) -> str:
    """Returns what to do with .txt files that have the names of images, such as ``text_file`` for ``image``."""
    folders = [Path(folder) for folder in label_folders(str(image.parent))]
    if text_file.parent in folders:
        return f"they have no row of YOLO txt (first: {text_file.name})"
    target = next((folder for folder in folders if folder.is_relative_to(root)), folders[0])
    return f"move them to {target}"
