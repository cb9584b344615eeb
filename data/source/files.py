"""Lists the files of a split: its images and their label files, or the one label file for all. An image that is left
out stays in the listing, with the reason.

The sizes and modification times of these files reveal whether the split has changed. The steps, in order, are modules
of `listing`; the result is defined in listing.py, and stored for a copy by stored.py.

All splits:

    images.py          finds the images in the folders and .txt lists of the split, each under one name
    aliases.py         finds images that links to folders show under several names
    image_list.py      finds the images of a list's rows, which are exact paths (list_rows.py) or, if none is, resolved
                       by relocated_lists.py, which refuses images that other splits name by their folder or by
                       an exact row (splits_of_images.py)

A split with a label file for each image:

    label_files.py     finds each image's label file among the files of its label folder (candidate_files.py)
    unusual_labels.py  finds label files in other folders or with other names, for images without one
                       (both return `FoundLabels`, found_labels.py, and unite the names of each image by
                       united_names.py)
    label_folders.py   checks the folders that may contain label files for files that belong to no image

If a listed image is missing, an image has no label file, or a label file no image, `diagnosis.unused_labels` then finds
the unused label files and leaves out the images to which one of them may belong.

A split with one label file for all images:

    other_images.py    lists the images of other splits (other_splits.py) and of none, which the label file may name
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from data.source.dataset_spec import DatasetSpec, FilesSplit, JoinedSplit, JsonSplit, ShardSplit, folders_of
from data.source.diagnosis.split_context import SplitContext
from data.source.diagnosis.unused_labels import NO_DIAGNOSIS, diagnose_labels
from data.source.listing.images import SplitImages, find_images
from data.source.listing.label_files import find_labels
from data.source.listing.label_folders import are_all_labeled
from data.source.listing.listing import ImageStatus, ListedImage, Listing, leave_out
from data.source.listing.other_images import images_in_label_file
from data.source.listing.stored import read_listing
from data.source.walk import Folders, stamp_of
from data.split_files import LabelFile
from utils.errors import UserError
from utils.files.paths import relative_name


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
    found = find_labels(split_images, label_format.per_image, split_spec.annotations)
    diagnosis = NO_DIAGNOSIS
    if split_images.missing or not are_all_labeled(found, folders_of(split_spec)):
        diagnosis = diagnose_labels(SplitContext(spec, split, found, split_images.missing))
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


def _unusable_annotations(annotations: Path | None, spec: DatasetSpec) -> UserError:
    """Returns the error about annotations that are missing or in no known format."""
    if annotations is not None and not annotations.exists():
        return spec.missing_error(annotations)
    return UserError(f"{annotations}: neither a COCO .json nor a folder of VOC .xml (named by {spec.source})")


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
