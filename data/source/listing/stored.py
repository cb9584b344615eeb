"""Stores the listing of a split as JSON. A copy (``--stage``) uses the stored listing of its original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.labels.findings import Finding
from data.labels.formats import LABEL_FORMATS
from data.source.listing.listing import ImageStatus, ListedImage, Listing
from data.split_files import FilesOfImage, FileStamp, ImageFile, LabelFile, OtherImages, SplitPlaces
from utils.files.safe_io import read_text

_MAX_BYTES = 1 << 34


def listing_text(listing: Listing) -> str:
    """Returns the JSON from which `read_listing` restores a listing."""
    content = {
        "images": listing.all_images,
        "format": listing.label_format.name,
        "findings": listing.findings,
        "unusual_labels": listing.unusual_labels,
        "others": listing.others,
        "shares_folders": listing.shares_folders,
    }
    return json.dumps(content, separators=(",", ":"))


def read_listing(path: Path) -> Listing:
    """Reads a listing from a file with the text of `listing_text`."""
    content = json.loads(read_text(path, max_bytes=_MAX_BYTES))
    formats = {label_format.name: label_format for label_format in LABEL_FORMATS}
    earlier, this, later, *names = content["others"]
    return Listing(
        all_images=[_listed_image(*row) for row in content["images"]],
        label_format=formats[content["format"]],
        findings=[_finding(row) for row in content["findings"]],
        unusual_labels=content["unusual_labels"],
        others=OtherImages(_places(*earlier), _places(*this), _places(*later), *names),
        shares_folders=content["shares_folders"],
    )


def _listed_image(file: list, status: str, label: list, reason: list | None, aliases: list) -> ListedImage:
    label_name, label_stamp = label
    return ListedImage(
        file=_image_file(*file),
        status=ImageStatus(status),
        label=LabelFile(label_name, _stamp(label_stamp)),
        reason=_finding(reason) if reason else None,
        aliases=_image_files(aliases),
    )


def _places(images: list, folders: list[str], missing: list[str]) -> SplitPlaces:
    return SplitPlaces(list(map(_image_files, images)), folders, missing)


def _image_files(rows: list[list]) -> FilesOfImage:
    return tuple(_image_file(*row) for row in rows)


def _image_file(name: str, name_in_split: str, stamp: list[int] | None) -> ImageFile:
    return ImageFile(name, name_in_split, _stamp(stamp))


def _stamp(values: list[int] | None) -> FileStamp | None:
    return None if values is None else FileStamp(*values)


def _finding(values: list[Any]) -> Finding:
    finding = Finding(*values)
    return finding._replace(xyxy_px=tuple(finding.xyxy_px))
