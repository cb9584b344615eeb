"""Lists the images of a split and their label files."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np

from data.dataset.spec import DatasetSpec, JoinedSplit, ShardSplit
from data.folders import ABSENT, Folders, stamp_of
from data.labels.findings import findings_of_json
from data.labels.formats import LABEL_FORMATS
from data.labels.label_format import UNREADABLE, Listing
from data.listing.images import SplitImages, find_images, images_beside, images_of_other_splits
from data.listing.labels import find_labels, find_orphans
from utils.errors import UserError
from utils.files.paths import path_of
from utils.files.safe_io import read_text
from utils.strings import counted

_MAX_BYTES = 1 << 34  # largest stored listing


def list_split(spec: DatasetSpec, split: str) -> Listing:
    """Lists the files of a split. A staged copy uses the listing of its original.

    Raises UserError if the split, a folder or list of it, or its annotations are missing, if it has no image or no
    label file, or if it joins data sets or is in shards.
    """
    source = spec.split(split)
    if isinstance(source, JoinedSplit):
        raise UserError(
            f"{spec.source}: '{split}' joins other data sets, which are not copied; name one, or leave out --stage"
        )
    if isinstance(source, ShardSplit):
        raise UserError(f"{source.index}: shards can be neither listed nor copied; name a folder of images")
    if split in spec.listings:
        return read_listing(spec.listings[split], spec.root)
    if source.annotations is not None and not source.annotations.exists():
        raise spec.missing_error(source.annotations)
    folders = Folders(spec.root)
    images = find_images(spec, split, folders)
    names = sorted(images.stamps)
    findings = images.findings
    json_images: list[str] = []
    other_images: list[str] | None = None
    if source.label_format.is_per_image:
        files = find_labels(spec, split, images, folders)
        labels = [files.expected[name] for name in names]
        label_stamps = [ABSENT] * len(names)
        for i, label in enumerate(labels):
            if label in files.used:
                stamp = stamp_of(path_of(label, spec.root))
                label_stamps[i] = UNREADABLE if stamp == ABSENT else stamp
        if not files.used:
            raise UserError(
                f"{spec.source}: none of the {counted(len(names), 'image')} of '{split}' has a label file; expected "
                f"{path_of(labels[0], spec.root)} for {path_of(names[0], spec.root)}"
            )
        findings = findings + find_orphans(spec, split, images, files, folders)
    else:
        assert source.annotations is not None
        labels = [folders.prefix(str(source.annotations)).rstrip("/")]
        label_stamps = [stamp_of(source.annotations)]
        json_images, other_images = _images_of_json(spec, split, images, folders)
    return Listing(
        root=spec.root,
        named_root=spec.root.as_posix(),
        images=names,
        image_stamps=np.array([images.stamps[name] for name in names], np.int64),
        label_format=source.label_format,
        labels=labels,
        label_stamps=np.array(label_stamps, np.int64),
        findings=findings,
        json_images=json_images,
        other_images=other_images,
    )


def _images_of_json(
    spec: DatasetSpec, split: str, images: SplitImages, folders: Folders
) -> tuple[list[str], list[str] | None]:
    """Returns `Listing.json_images` and `Listing.other_images`."""
    declared = SplitImages(dict(images.stamps), dict(images.folders))
    is_complete = True
    for _, other in images_of_other_splits(spec, split, folders):
        if other is None:
            is_complete = False
        else:
            declared.stamps |= other.stamps
            declared.folders |= other.folders
    others = sorted(images_beside(declared, spec, folders).stamps) if is_complete else None
    return sorted(declared.stamps), others


def listing_text(listing: Listing) -> str:
    """Returns the JSON from which `read_listing` restores a listing."""
    values = {item.name: getattr(listing, item.name) for item in fields(Listing) if item.name != "root"}
    values["label_format"] = listing.label_format.name
    return json.dumps(values, default=np.ndarray.tolist)


def read_listing(file: Path, root: Path) -> Listing:
    """Restores the `listing_text` in ``file`` for a data set in the folder ``root``."""
    values = json.loads(read_text(file, max_bytes=_MAX_BYTES))
    values["label_format"] = next(form for form in LABEL_FORMATS if form.name == values["label_format"])
    for key in ("image_stamps", "label_stamps"):
        values[key] = np.array(values[key], np.int64).reshape(-1, 2)
    values["findings"] = findings_of_json(values["findings"])
    return Listing(root=root, **values)
