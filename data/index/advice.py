"""Derives messages about the labels of a scanned split: advice, which is logged as warnings, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from data.index.read_images import ImageContent, SplitContent
from data.labels import findings as kinds
from data.labels.findings import Finding
from data.labels.image_names import loose
from data.labels.label_format import LabelSource
from data.labels.misread import ids_from_1, too_dark
from data.labels.rows import CLASS
from data.source.dataset_spec import DatasetSpec
from utils.errors import UserError, one_line
from utils.strings import counted

_MAX_EMPTY_FRACTION = 0.5  # of the labeled images; above this, a note asks whether it is intended
_MIN_NAMED_FRACTION = 0.5  # of the images; below this, a warning asks whether the label file is theirs
_MAX_NAMED_OTHERWISE_FRACTION = 0.1  # of the images; above this, a warning is logged
# Notes about labels that are corrected, by kind of finding.
_CORRECTIONS = {
    kinds.REVERSED: "boxes with corners in the wrong order, or negative sides, which are used",
    kinds.SCALED: "images with labels for another size, which are scaled",
    kinds.TURNED: "images with labels of the unturned photo, which are turned",
}


def check_names_fit(content: SplitContent, num_used: int, spec: DatasetSpec, split: str) -> None:
    """Raises UserError if most objects have a class that is not among the names. ``num_used``: number of usable
    objects."""
    unknown = content.findings_of(kinds.UNKNOWN_CLASS)
    num_lost = sum(finding.kind in kinds.ROW_LOST for finding in content.findings)  # including unknown classes
    num_objects = num_used + num_lost
    if len(unknown) <= num_objects - len(unknown):
        return
    first = unknown[0]
    message = (
        f"{spec.source}: the names don't match the labels: {len(unknown):,} of {num_objects:,} objects in '{split}' "
        f"have a class that is not in 'names' (first: {first.where}: {first.text})"
    )
    ids_advice = _ids_advice(content, spec)
    raise UserError(f"{message}; {ids_advice}" if ids_advice else message)


def advice_on_scan(content: SplitContent, box_advice: str, spec: DatasetSpec) -> list[str]:
    """Returns messages about labels or images that are probably misread, and what to do. ``box_advice``: the result of
    `misread_boxes`."""
    advice = [
        _ids_advice(content, spec),
        box_advice,
        too_dark(max(image.max_value for image in content.images), spec.pixels.bits),
        _filename_mismatches(content.findings_of(kinds.NAMED_OTHERWISE), len(_numbers_labeled(content))),
    ]
    unlisted = _unlisted_images(content)
    if unlisted and _is_label_file_doubtful(content):
        advice.append(f"{unlisted}: is it the label file of these images?")
    return [message for message in advice if message]


def notes_on_scan(content: SplitContent) -> list[str]:
    """Returns notes about labels that are used as they are or corrected, and not covered by `advice_on_scan`."""
    notes = []
    for kind, description in _CORRECTIONS.items():
        corrected = content.findings_of(kind)
        if corrected:
            notes.append(f"{description}: {len(corrected):,}, first {corrected[0].where}: {corrected[0].message}")
    labeled = _numbers_labeled(content)
    empty = labeled.count(0)
    if any(labeled) and empty > _MAX_EMPTY_FRACTION * len(labeled):
        notes.append(
            f"{empty:,} of {counted(len(labeled), 'labeled image')} have no objects: an empty label file, or no "
            "annotations; if that is not intended, export the labels again"
        )
    unlisted = _unlisted_images(content)
    if unlisted and not _is_label_file_doubtful(content):
        notes.append(unlisted)
    earlier = [finding for finding in content.source.findings if finding.consequence == kinds.COUNTED_EARLIER]
    if earlier:
        notes.append(
            f"{counted(len(earlier), 'loss')} may belong to an earlier split, which counts them, first "
            f"{earlier[0].where}: {earlier[0].text}"
        )
    elsewhere = [finding for finding in content.source.findings if finding.kind == kinds.IMAGE_ELSEWHERE]
    if elsewhere:
        count = counted(len(elsewhere), "annotated image")
        notes.append(
            f"{count} not found, which may be in a missing folder or in no split: not counted as lost, first "
            f"{elsewhere[0].where}: {elsewhere[0].message}"
        )
    in_other_folders = [finding for finding in content.source.findings if finding.kind == kinds.OTHER_FOLDER]
    if in_other_folders:
        count = counted(len(in_other_folders), "image")
        notes.append(
            f"the label file names {count} in other folders; unless images were moved, these may be other images, "
            f"first {in_other_folders[0].where}: {in_other_folders[0].text}"
        )
    return notes


def _ids_advice(content: SplitContent, spec: DatasetSpec) -> str:
    """Returns advice about the class indices, or "" if there is none."""
    unknown = [finding.class_id for finding in content.findings_of(kinds.UNKNOWN_CLASS)]
    return ids_from_1(unknown, content.table[:, CLASS], len(spec.names))


def files_named_otherwise(source: LabelSource, images: Sequence[ImageContent]) -> list[Finding]:
    """Returns findings about label files that are named like one image of the split but name another one inside."""
    named = {i: image.named_image for i, image in enumerate(images) if image.named_image}
    if not named:
        return []
    stem_of = [loose(PurePosixPath(image.name).stem) for image in source.images]
    stems = set(stem_of)
    findings = []
    for i, name in named.items():
        stem = loose(PurePosixPath(name.replace("\\", "/")).stem)
        if stem != stem_of[i] and stem in stems:
            message = f"it names {one_line(name)[:200]}, but is named like {source.images[i].name}"
            findings.append(Finding(source.where(i), kinds.NAMED_OTHERWISE, message, i))
    return findings


def _numbers_labeled(content: SplitContent) -> list[int]:
    """Returns the number of objects that each image's labels name, of the images that have labels."""
    return [image.num_labeled for image in content.images if image.num_labeled is not None]


def _filename_mismatches(mismatches: Sequence[Finding], num_label_files: int) -> str:
    """Returns a message if many label files name another image in their content, else ""."""
    if len(mismatches) <= _MAX_NAMED_OTHERWISE_FRACTION * num_label_files:
        return ""
    count = f"{len(mismatches):,} of {counted(num_label_files, 'label file')}"
    first = f"{mismatches[0].where}: {mismatches[0].text}"
    return f"{count} declare a <filename> other than their own name, which is used; first {first}"


def _unlisted_images(content: SplitContent) -> str:
    """Returns a message about the images that the split's one label file does not name, or "" if it names all."""
    listing = content.listing
    unlisted = [finding.where for finding in content.source.findings if finding.kind == kinds.UNLISTED]
    if not unlisted:
        return ""
    count = f"{len(unlisted):,} of {counted(len(listing.images), 'image')}"
    return f"{listing.labels[0].name} doesn't name {count}, which are left out, first {unlisted[0]}"


def _is_label_file_doubtful(content: SplitContent) -> bool:
    """Returns whether the split's one label file seems to belong to other images: it names few of the split's images,
    and no other label file may name the rest."""
    names_few = len(content.source.images) < _MIN_NAMED_FRACTION * len(content.listing.images)
    return names_few and not content.listing.shares_folders
