"""Lists the images of a split and their label files (rules D1 to D4 of docs/data.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.dataset.spec import DatasetSpec, JoinedSplit, JsonSplit, ShardSplit
from data.labels.findings import Finding
from data.labels.formats import LABEL_FORMATS, LabelFormat
from data.labels.label_format import LabelRequest
from data.listing.folders import Folders, stamp_of
from data.listing.images import SplitImages, find_images, find_images_beside, find_other_images
from data.listing.labels import find_labels, find_orphans
from utils.errors import UserError
from utils.files.safe_io import read_text

_MAX_BYTES = 1 << 34  # largest stored listing


@dataclass(frozen=True)
class Listing:
    """The images of a split, sorted by name, and their label files. Names are relative to `root`, with ``/``."""

    root: Path  # the data set's folder
    images: list[str]  # N
    image_stamps: np.ndarray  # int64 (N, 2): size in bytes, modification time in ns
    label_format: LabelFormat
    labels: list[str]  # N: each image's label file, or where it would be; or one name: a JSON for all images
    label_stamps: np.ndarray  # int64 (len(labels), 2); (-1, -1) where no file exists (a background)
    findings: list[Finding]  # about images and label files that are not used; `Finding.image` is -1
    json_images: list[str] = field(default_factory=list)  # JSON only: images of all splits that name it, sorted
    # JSON only: images beside them, of no split that names it, sorted; None if a split that names it has no images here
    other_images: list[str] | None = None

    def label_request(self, names: tuple[str, ...] | None) -> LabelRequest:
        """Returns the request to read the labels. ``names``: class names; None if every object is of class 0."""
        return LabelRequest(
            images=self.images,
            labels=self.labels,
            label_stamps=self.label_stamps,
            root=self.root,
            names=names,
            json_images=self.json_images,
            other_images=self.other_images,
        )

    def content(self) -> str:
        """Returns the JSON from which `read_listing` restores the listing."""
        return json.dumps(
            {
                "images": self.images,
                "image_stamps": self.image_stamps.tolist(),
                "label_format": self.label_format.name,
                "labels": self.labels,
                "label_stamps": self.label_stamps.tolist(),
                "findings": self.findings,
                "json_images": self.json_images,
                "other_images": self.other_images,
            }
        )


def read_listing(file: Path, root: Path) -> Listing:
    """Restores the `Listing.content` in ``file`` for a data set in the folder ``root``."""
    values = json.loads(read_text(file, max_bytes=_MAX_BYTES))
    values["label_format"] = next(form for form in LABEL_FORMATS if form.name == values["label_format"])
    for key in ("image_stamps", "label_stamps"):
        values[key] = np.array(values[key], np.int64).reshape(-1, 2)
    findings = [Finding(*finding) for finding in values["findings"]]
    values["findings"] = [finding._replace(xyxy_px=tuple(finding.xyxy_px)) for finding in findings]
    return Listing(root=root, **values)


def list_split(spec: DatasetSpec, split: str) -> Listing:
    """Lists the files of a split. A staged copy uses the listing of its original.

    Raises UserError if the split, a folder or list of it, or its annotations are missing, if it has no image, or if it
    joins data sets or is in shards.
    """
    split_spec = spec.split(split)
    if isinstance(split_spec, JoinedSplit):
        raise UserError(
            f"{spec.source}: '{split}' joins other data sets, which are not copied; name one, or leave out --stage"
        )
    if isinstance(split_spec, ShardSplit):
        raise UserError(f"{split_spec.index}: shards can be neither listed nor copied; name a folder of images")
    if split in spec.listings:
        return read_listing(spec.listings[split], spec.root)
    if split_spec.annotations is not None and not split_spec.annotations.exists():
        raise spec.missing_error(split_spec.annotations)
    folders = Folders(spec.root)
    images = find_images(spec, split, folders)
    names = sorted(images.stamps)
    image_stamps = np.array([images.stamps[name] for name in names], np.int64)
    if isinstance(split_spec, JsonSplit):
        json_images, other_images = _images_of_json(spec, split, images, folders)
        return Listing(
            root=spec.root,
            images=names,
            image_stamps=image_stamps,
            label_format=split_spec.label_format,
            labels=[folders.prefix(str(split_spec.annotations)).rstrip("/")],
            label_stamps=np.array([stamp_of(split_spec.annotations)], np.int64),
            findings=images.findings,
            json_images=json_images,
            other_images=other_images,
        )
    labels = find_labels(split_spec, images, folders)
    return Listing(
        root=spec.root,
        images=names,
        image_stamps=image_stamps,
        label_format=split_spec.label_format,
        labels=labels.names,
        label_stamps=labels.stamps,
        findings=images.findings + find_orphans(spec, split, images, labels, folders),
    )


def _images_of_json(
    spec: DatasetSpec, split: str, images: SplitImages, folders: Folders
) -> tuple[list[str], list[str] | None]:
    """Returns `Listing.json_images` and `Listing.other_images`. ``images``: those of ``split``."""
    annotations = spec.listed_splits[split].annotations
    of_json = SplitImages(stamps=dict(images.stamps), folders=dict(images.folders))
    is_complete = True
    for name, other in (spec.splits | spec.left_out).items():
        if name == split or not isinstance(other, JsonSplit) or other.annotations != annotations:
            continue
        other_images = find_other_images(spec, name, folders)
        if other_images is None:
            is_complete = False
        else:
            of_json.stamps |= other_images.stamps
            of_json.folders |= other_images.folders
    beside = sorted(find_images_beside(of_json, spec, folders).stamps) if is_complete else None
    return sorted(of_json.stamps), beside
