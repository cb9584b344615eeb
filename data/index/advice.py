"""Finds what a user should know about the labels of a scanned split: advice, which is a warning, and notes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import PurePosixPath

from data.index.read_images import ScannedImage
from data.labels import findings as kinds
from data.labels.findings import Finding
from data.labels.image_names import loose
from data.labels.label_format import LabelSource
from data.source.dataset_spec import DatasetSpec
from data.source.files import Listing
from utils.errors import UserError, one_line
from utils.strings import counted

_MAX_EMPTY_FRACTION = 0.5  # if more of the labeled images have no object, a note asks whether that is intended
_MAX_NAMED_OTHERWISE_FRACTION = 0.1  # if more label files name another image, a warning says so
# Notes about labels that are corrected, by kind of finding.
_CORRECTIONS = {
    kinds.REVERSED: "boxes with corners in the wrong order, or negative sides, which are used",
    kinds.SCALED: "images with labels for another size, which are scaled",
    kinds.TURNED: "images with labels of the unturned photo, which are turned",
}


def check_names_fit(unknown: Sequence[Finding], num_known: int, spec: DatasetSpec, split: str, ids_advice: str) -> None:
    """Raises UserError if most objects have a class that is not among the names.

    Args:
        unknown: the findings about these objects.
        num_known: number of all other objects, whether they can be used or not.
        ids_advice: advice about the numbers of the classes; "": none.
    """
    if len(unknown) <= num_known:
        return
    first = unknown[0]
    message = (
        f"{spec.source}: the names don't match the labels: {len(unknown):,} of {len(unknown) + num_known:,} objects "
        f"in '{split}' have a class that is not in 'names' (first: {first.where}: {first.text})"
    )
    raise UserError(f"{message}; {ids_advice}" if ids_advice else message)


def files_named_otherwise(source: LabelSource, images: Sequence[ScannedImage]) -> list[Finding]:
    """Returns findings about label files that have the name of one image of the split and name another one inside."""
    named = {i: image.named_image for i, image in enumerate(images) if image.named_image}
    if not named:
        return []
    stem_of = [loose(PurePosixPath(image.name).stem) for image in source.images]
    stems = set(stem_of)
    findings = []
    for i, name in named.items():
        stem = loose(PurePosixPath(name.replace("\\", "/")).stem)
        if stem != stem_of[i] and stem in stems:
            message = f"it names {one_line(name)[:200]}, its own name is that of {source.images[i].name}"
            findings.append(Finding(source.where(i), kinds.NAMED_OTHERWISE, message, i))
    return findings


def advice_if_named_otherwise(named_otherwise: Sequence[Finding], num_images: int) -> str:
    """Returns a message if many label files name another image than they are called like; else ""."""
    if len(named_otherwise) <= _MAX_NAMED_OTHERWISE_FRACTION * num_images:
        return ""
    count = f"{len(named_otherwise):,} of {counted(num_images, 'label file')}"
    first = f"{named_otherwise[0].where}: {named_otherwise[0].text}"
    return f"{count} name another image than they are called like, which decides; first {first}"


def unlisted_images(source: LabelSource, listing: Listing) -> str:
    """Returns which images the one label file of a split does not name: they are not labeled; "" if there are none."""
    unlisted = [finding.where for finding in source.findings if finding.kind == kinds.UNLISTED]
    if not unlisted:
        return ""
    count = f"{len(unlisted):,} of {counted(len(listing.images), 'image')}"
    return f"{listing.labels[0].name} doesn't name {count}, which are left out, first {unlisted[0]}"


def is_label_file_doubtful(source: LabelSource, listing: Listing, spec: DatasetSpec, split: str) -> bool:
    """Returns whether the one label file of a split seems to be that of other images: it names less than half of them,
    and no other split may have the others."""
    return len(source.images) < len(listing.images) / 2 and not shares_folders(spec, split)


def shares_folders(spec: DatasetSpec, split: str) -> bool:
    """Returns whether a split with another label file has images in the same folder: that file may name the others."""
    this = spec.split(split)
    others = [source.images for source in spec.splits.values() if source.annotations != this.annotations]
    pairs = itertools.product(this.images, itertools.chain.from_iterable(others))
    return any(a.is_relative_to(b) or b.is_relative_to(a) for a, b in pairs)


def notes_on_labels(findings: Sequence[Finding], images: Sequence[ScannedImage]) -> list[str]:
    """Returns notes about labels that are used: corrections, and label files without an object."""
    notes = []
    for kind, description in _CORRECTIONS.items():
        corrected = [finding for finding in findings if finding.kind == kind]
        if corrected:
            notes.append(f"{description}: {len(corrected):,}, first {corrected[0].where}: {corrected[0].message}")
    labeled = [image.num_labeled for image in images if image.num_labeled is not None]
    empty = labeled.count(0)
    if any(labeled) and empty > _MAX_EMPTY_FRACTION * len(labeled):
        notes.append(
            f"{empty:,} of {counted(len(labeled), 'labeled image')} have no object: an empty label file, or no "
            "annotation; if that is not meant, write the labels again"
        )
    return notes
