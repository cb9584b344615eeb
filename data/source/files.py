"""Lists the files of a split: its images and their label files, or the one label file for all. An image that is left
out stays in the listing, with the reason.

The sizes and modification times of these files reveal whether the split has changed. The steps are in `listing`:

    images.py          finds the images in the folders and .txt lists (image_list.py) of the split, each under one name;
                       aliases.py finds images that symbolic links show under several names
    label_files.py     finds each image's label file among the files of its label folder (candidate_files.py)
    unusual_labels.py  finds label files in other folders or with other names, for images without one
    label_folders.py   checks the folders that may contain label files for files that belong to no image
    other_images.py    lists the data set's other images, which one label file for all may name
    listing.py         defines the result, all images with their status; stored.py stores it for a copy

If an image has no label file, or a label file no image, `diagnosis.unused_labels` finds the unused label files and
leaves out the images to which one of them may belong.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from data.image_io.file_kinds import image_suffixes
from data.source.dataset_spec import DatasetSpec, FilesSplit, JoinedSplit, JsonSplit, ListedSplit, ShardSplit, Split
from data.source.diagnosis.split_context import OtherSplits
from data.source.diagnosis.unused_labels import NO_DIAGNOSIS, diagnose_labels
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.images import SplitImages, find_images
from data.source.listing.label_files import find_label_files
from data.source.listing.label_folders import are_all_labeled
from data.source.listing.listing import ImageStatus, ListedImage, Listing, leave_out
from data.source.listing.other_images import has_images, images_in_label_file, share_labels
from data.source.listing.stored import read_listing
from data.source.listing.unusual_labels import find_unusual_labels
from data.source.walk import Folders, stamp_of
from data.split_files import LabelFile
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.logger import get_logger


def list_split(spec: DatasetSpec, split: str) -> Listing:
    """Lists the files of a split. A staged copy uses the listing of its original.

    Raises UserError if the split, its folder, its annotations or any image is missing, if no label file can be read, or
    if the split joins data sets or is in shards.
    """
    split_spec = spec.split(split)
    if isinstance(split_spec, JoinedSplit):
        raise UserError(
            f"{spec.source}: '{split}' joins other data sets, which are not copied; name one, or leave out --stage"
        )
    if isinstance(split_spec, ShardSplit):
        raise UserError(f"{split_spec.index}: shards can be neither listed nor copied; name a folder of images")
    if split in spec.listings:
        return read_listing(spec.listings[split])
    with _paused_collector():
        split_images = find_images(spec, split, Folders(spec.root))
        if isinstance(split_spec, JsonSplit):
            return _list_with_one_file(split_images, split_spec, spec, split)
        return _list_with_own_files(split_images, split_spec, spec, split)


@contextlib.contextmanager
def _paused_collector() -> Iterator[None]:
    """Pauses cyclic garbage collection. A listing creates several objects per image, none of them in a cycle, and each
    collection visits all of them, which takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unusable_annotations(annotations: Path | None, spec: DatasetSpec) -> UserError:
    """Returns the error about annotations that are missing or in no known format."""
    if annotations is not None and not annotations.exists():
        return spec.missing_error(annotations)
    return UserError(f"{annotations}: neither a COCO .json nor a folder of VOC .xml (named by {spec.source})")


def _list_with_one_file(split_images: SplitImages, split_spec: JsonSplit, spec: DatasetSpec, split: str) -> Listing:
    """Lists a split with one label file for all images. Raises UserError if the label file does not exist."""
    if not split_spec.annotations.is_file():
        raise _unusable_annotations(split_spec.annotations, spec)
    label_file = LabelFile(relative_name(split_spec.annotations, spec.root), stamp_of(split_spec.annotations))
    images = [
        ListedImage(image, ImageStatus.LABELED, label_file, aliases=tuple(split_images.aliases.get(image.name, ())))
        for image in split_images.sorted()
    ]
    return Listing(
        all_images=images,
        label_format=split_spec.label_format,
        findings=split_images.findings,
        others=images_in_label_file(spec, split, split_images),
        shares_folders=spec.shares_folders(split),
    )


def _list_with_own_files(split_images: SplitImages, split_spec: FilesSplit, spec: DatasetSpec, split: str) -> Listing:
    """Lists a split with a label file for each image. Images to which a label file of another name may belong are left
    out. Raises UserError if no image is left."""
    label_format = split_spec.label_format
    if label_format is None or label_format.per_image is None:
        raise _unusable_annotations(split_spec.annotations, spec)
    candidates = CandidateFiles(
        label_format.per_image, split_spec.annotations, split_images.folders, split_images.other_files
    )
    found = find_label_files(split_images, candidates)
    if found.without_usual_label:
        found = find_unusual_labels(found)
    diagnosis = NO_DIAGNOSIS
    split_folders = [str(entry) for entry in split_spec.images if entry.is_dir()]
    if not are_all_labeled(found, split_folders):
        diagnosis = diagnose_labels(found, split_folders, OtherSplits(spec, split, split_images))
    images = leave_out(found.images, diagnosis.reasons)
    listing = Listing(
        all_images=images,
        label_format=label_format,
        findings=split_images.findings + found.findings + diagnosis.findings,
        unusual_labels=found.unusual,
        shares_folders=spec.shares_folders(split),
    )
    if not listing.images:
        first = next(image.reason for image in images if image.reason is not None)
        raise UserError(f"{spec.source}: no label file of '{split}' can be read; first, {first.where}: {first.message}")
    return listing


def without_empty(spec: DatasetSpec, splits: Iterable[str]) -> DatasetSpec:
    """Returns ``spec`` without those of ``splits`` whose folders or lists are missing or contain no images, and logs
    each. A missing one is logged as a warning, because its name may be misspelled."""
    left_out: dict[str, Split] = {}
    for name in splits:
        entries = _image_entries(spec, name) if name in spec.splits else []
        if not entries or any(has_images(entry, image_suffixes(part.pixels)) for part, entry in entries):
            continue
        left_out[name] = spec.splits[name]
        consequence = "is left out"
        if name == "val":
            consequence += ", and part of 'train' is held out in its place"
        consequence += _note_on_losses(spec, name)
        missing = [(part, entry) for part, entry in entries if not entry.exists()]
        if missing:
            part, entry = missing[0]
            get_logger().warning("%s; '%s' %s", part.missing_error(entry), name, consequence)
        else:
            get_logger().info("%s: '%s' (%s) has no images and %s", spec.source, name, entries[0][1], consequence)
    remaining = {name: split for name, split in spec.splits.items() if name not in left_out}
    return replace(spec, splits=remaining, left_out=left_out)


def _image_entries(spec: DatasetSpec, split: str) -> list[tuple[DatasetSpec, Path]]:
    """Returns the folders, lists and shards of a split, each with the data set that names it."""
    entries: list[tuple[DatasetSpec, Path]] = []
    for part in spec.parts_of(split):
        part_split = part.splits[split]
        paths = part_split.images if isinstance(part_split, ListedSplit) else part_split.paths
        entries += [(part, path) for path in paths]
    return entries


def warn_of_unused_splits(spec: DatasetSpec, used: Collection[str]) -> None:
    """Logs a warning about each split that is not in ``used`` and could not be read, or has no images although its
    labels may be in annotations of the others. If ``used`` is empty, any split may be used: only the latter are logged.
    """
    for name in spec.splits:
        note = _note_on_losses(spec, name)
        if name in used or not (used or note):
            continue
        try:
            spec.check_split(name)
            entries = _image_entries(spec, name) if note else []
            empty = [entry for part, entry in entries if not has_images(entry, image_suffixes(part.pixels))]
        except UserError as error:
            get_logger().warning("%s; '%s' is not used here%s", error, name, note)
            continue
        if empty:
            get_logger().warning("%s: '%s' has no images in %s%s", spec.source, name, empty[0], note)


def _note_on_losses(spec: DatasetSpec, split: str) -> str:
    """Returns a note for the log if other splits have labels where those of ``split``, whose images are missing, may
    be; else ""."""
    listed_splits = spec.listed_splits
    annotations = listed_splits[split].annotations if split in listed_splits else None
    others = [other.annotations for name, other in listed_splits.items() if name != split]
    if annotations is None or not any(share_labels(annotations, other) for other in others):
        return ""
    return f"; labels in {annotations} that may be of its images do not count as lost"
