"""Diagnoses a split that does not have exactly one label file per image: label files used by no image or by several,
and files in other formats that seem to contain the labels of an image.

An unlabeled image to which such a file may belong is left out: as a background, it would teach the model to ignore its
objects. Splits may share folders of label files. Each file is therefore compared with the images of all of them, in the
same way whichever split is read. A file that another split uses does not concern this split. For any other file, the
first of `_EXPLANATIONS` that applies determines the splits to which it may belong. One of them is charged with it
(`split_to_charge`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import IMAGE_ELSEWHERE, ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import SplitContext, SplitLabels, split_to_charge
from data.source.diagnosis.unread_labels import unread_labels
from data.source.diagnosis.unused_file import ImagesOfSplits, UnusedFile
from data.source.listing.candidate_files import Candidate
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of, relative_name


class Diagnosis(NamedTuple):
    """The unused label files of a split, and the images that are left out because of them."""

    findings: list[Finding]
    reasons: dict[str, Finding]  # findings because of which images are left out, by image name


NO_DIAGNOSIS = Diagnosis([], {})  # for a split with exactly one label file per image


class _Explanation(NamedTuple):
    """Why a label file is not used, and what the split that is read reports about it. It need not report a file for
    which the finding is None."""

    splits: Sequence[SplitLabels] = ()  # to which the file may belong; one of them is charged with it
    if_charged: Finding | None = None  # the finding if this is the split that is read
    if_not_charged: Finding | None = None  # the finding if it is another one
    loses_objects: bool = False  # whether the charged split loses the file's objects
    unlabeled: Sequence[ListedImage] = ()  # images that the split leaves out because of the file


_IGNORED = _Explanation()


def diagnose_labels(context: SplitContext) -> Diagnosis:
    """Reports the label files that are not used by exactly one image of the split, and labels in other formats."""
    found = context.own.found
    findings: list[Finding] = []
    reasons: dict[str, Finding] = {}
    for candidate in _unused_files(context):
        file = UnusedFile(candidate, context)
        explanation = _explain(file)
        finding = _finding(explanation, file)
        if finding is None:
            continue
        left_out = [image.name for image in explanation.unlabeled if image.name not in reasons]
        if left_out and found.is_any_labeled:  # else they are backgrounds
            finding = finding._replace(lost_images=len(left_out))
        findings.append(finding)
        reasons |= dict.fromkeys(left_out, finding)
    findings += _shared_labels(found.images)

    unread = unread_labels(found, left_out=reasons)
    findings += dict.fromkeys(unread.values())  # images of one stem have the same finding
    return Diagnosis(findings, reasons | unread if found.is_any_labeled else {})


def _unused_files(context: SplitContext) -> Iterator[Candidate]:
    """Yields the unused label files that this split may have to report: those in its expected and nearby folders and in
    those of missing images and, in label folders of other splits, those with the name of an unlabeled image, if the
    name determines the split."""
    own = context.own
    searched = dict.fromkeys((*own.expected, *own.nearby, *own.missing_images))
    for folder in searched:
        is_skipped = folder in own.expected and folder not in own.usual and not own.candidates.contains_labels(folder)
        if is_skipped:  # such as captions beside the images
            continue
        for file in own.candidates.files(folder):
            if _is_unused(file, context):
                yield file
    if own.unlabeled.is_empty:
        return
    for folder in context.named_label_folders:
        if folder not in searched:
            for file in own.candidates.files(folder):
                stem = loose_stem(file.name)
                if own.unlabeled.named(stem) and context.tells_split(stem) and _is_unused(file, context):
                    yield file


def _is_unused(file: Candidate, context: SplitContext) -> bool:
    return not context.is_used_by_another(file) and context.own.candidates.is_label_file(file)


def _explain(file: UnusedFile) -> _Explanation:
    """Returns the first of `_EXPLANATIONS` that applies to an unused label file."""
    for explain in _EXPLANATIONS:
        explanation = explain(file)
        if explanation is not None:
            return explanation
    return _IGNORED


def _finding(explanation: _Explanation, file: UnusedFile) -> Finding | None:
    """Returns what the split that is read reports about an unused label file, or None if it need not report it."""
    if not explanation.splits or split_to_charge(explanation.splits) is not file.own:
        return explanation.if_not_charged
    finding = explanation.if_charged
    if finding is not None and explanation.loses_objects:
        return finding._replace(lost_objects=file.num_objects)
    return finding


# Explanations: each returns None if it does not apply to the file.


def _copy(file: UnusedFile) -> _Explanation | None:
    """Its image uses a copy of the file: it is ignored."""
    labeled = file.existing_in(file.own, ImageStatus.LABELED)
    return _IGNORED if any(map(file.has_labels_of, labeled)) else None


def _unlabeled_image(file: UnusedFile) -> _Explanation | None:
    """Its image is unlabeled: it is left out."""
    unlabeled = {labels: file.existing_in(labels, ImageStatus.BACKGROUND) for labels in file.context.splits}
    images_of = {labels: images for labels, images in unlabeled.items() if images}
    return _leaving_out(images_of, file) if file.own in images_of else None


def _second_labels(file: UnusedFile) -> _Explanation | None:
    """Its image uses another label file."""
    labeled = file.existing_in(file.own, ImageStatus.LABELED)
    if not labeled:
        return None
    message = f"{labeled[0].name} uses {labeled[0].label.name} instead; remove one of the two"
    return _Explanation([file.own], Finding(file.name, SECOND_LABEL, message))


def _existing_image(file: UnusedFile) -> _Explanation | None:
    """Its image exists: nothing is lost, unless the image is of an unsupported kind. It may be an image of another
    split or of none, or have a finding of its own."""
    if not file.existing_images:
        return None
    name = file.existing_images[0]
    is_in_a_split = any(
        image in labels.image_of_name for labels in file.context.splits for image in file.existing_images
    )
    if is_in_a_split or os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
        return _IGNORED
    image_folder = os.path.dirname(path_of(name, file.own.candidates.folders.root))
    splits = [labels for labels in file.context.splits if image_folder in labels.image_folders(file.folder)]
    return _without_image(splits, file, f"{name} is of an unsupported kind")


def _missing_image_of_list(file: UnusedFile) -> _Explanation | None:
    """A list names its image, which is missing: its objects are lost in the split of the list, where the row counts as
    the lost image. If no image of that split exists, each of the others reports the file, but none loses it."""
    splits = [labels for labels in file.context.splits if labels.missing_image(file.folder, file.stems_of_image)]
    if not splits:
        return None
    message = f"{splits[0].missing_image(file.folder, file.stems_of_image)}, which a list names, is missing"
    has_images = any(labels.found.images for labels in splits)
    return _Explanation(
        splits,
        if_charged=Finding(file.name, ORPHAN, message),
        if_not_charged=None if has_images else Finding(file.name, IMAGE_ELSEWHERE, message),
        loses_objects=True,
    )


def _similar_unlabeled_image(file: UnusedFile) -> _Explanation | None:
    """Unlabeled images have a similar name: each split leaves out its own, see `UnusedFile.similar_unlabeled`."""
    return _leaving_out(file.similar_unlabeled, file) if file.similar_unlabeled else None


def _labeled_namesake(file: UnusedFile) -> _Explanation | None:
    """It is named like a labeled image, in a folder where no split expects label files: it is reported as a second
    label file of the image, unless it is a copy or the folder belongs to a missing folder alone."""
    if not file.labeled_namesakes:
        return None
    if any(map(file.has_labels_of, file.labeled_namesakes)):
        return _IGNORED
    image = file.labeled_namesakes[0].name
    message = f"is named like {image}, which has labels elsewhere; remove one of the two{_hint_at_unnamed_split(file)}"
    return _Explanation(file.owner.splits, Finding(file.name, SECOND_LABEL, message))


def _image_of_no_split(file: UnusedFile) -> _Explanation | None:
    """It is named like an image of no split: it is ignored."""
    return _IGNORED if file.is_of_image_outside else None


def _missing_split(file: UnusedFile) -> _Explanation | None:
    """Its folder belongs to a missing folder or list: it is reported, but not lost."""
    missing = file.owner.missing
    if missing is None:
        return None
    place = "listed in" if missing.suffix.lower() == ".txt" else "in"
    message = f"its image may be {place} {missing}, which is empty or missing"
    return _Explanation([file.own], Finding(file.name, IMAGE_ELSEWHERE, message))


def _lost(file: UnusedFile) -> _Explanation | None:
    """Its folder belongs to splits: it is lost in one of them."""
    splits = file.owner.splits
    if not splits:
        return None
    remedy = "rename it like its image, or remove it"
    namesake = file.background_of_other_split
    if namesake is not None:
        rename = f"if it labels {namesake.name}, a background of another split, rename it to {namesake.label.name}"
        remedy = f"{rename}; else {remedy}"
    return _without_image(splits, file, f"belongs to no image; {remedy}{_hint_at_unnamed_split(file)}")


_EXPLANATIONS = (
    # Its image exists, in a folder whose label files may be in the file's folder.
    _copy,
    _unlabeled_image,
    _second_labels,
    _existing_image,
    # It does not. The others depend on the file's name and folder.
    _missing_image_of_list,
    _similar_unlabeled_image,
    _labeled_namesake,
    _image_of_no_split,
    _missing_split,
    _lost,
)


# Parts of explanations


def _leaving_out(images_of: ImagesOfSplits, file: UnusedFile) -> _Explanation:
    """Explains a file that may label the unlabeled images ``images_of`` splits: each leaves out its own, and one of
    them loses the objects."""
    if file.own not in images_of:
        return _IGNORED
    unlabeled = images_of[file.own]
    first = unlabeled[0]
    rename = f"if it labels {first.name}, which is left out, rename it to {first.label.name}"
    finding = Finding(file.name, ORPHAN, f"belongs to no image; {rename}{_hint_at_unnamed_split(file)}")
    return _Explanation(list(images_of), finding, finding, loses_objects=True, unlabeled=unlabeled)


def _hint_at_unnamed_split(file: UnusedFile) -> str:
    """Returns a hint for a folder of the annotations that belongs to no split: it may have the labels of a split that
    the YAML does not name, which must be neither renamed nor removed."""
    annotations = file.own.candidates.annotations
    is_of_a_split = any(file.folder in labels.own_folders for labels in file.context.splits)
    if annotations is None or file.folder == str(annotations) or is_of_a_split:
        return ""
    folder = relative_name(file.folder, file.own.candidates.folders.root)
    return f"; if {folder} has the labels of another split, name this split in the YAML"


def _without_image(splits: Sequence[SplitLabels], file: UnusedFile, message: str) -> _Explanation:
    """Explains a file of ``splits`` whose image none of them has.

    It counts as one lost image. If the split that is charged names only lists, nothing is lost, because the folder may
    contain the labels of many other images.
    """
    is_lost = bool(file.own.folders)
    finding = Finding(file.name, ORPHAN, message, lost_images=int(is_lost))
    return _Explanation(splits, finding, loses_objects=is_lost)


def _shared_labels(images: Sequence[ListedImage]) -> list[Finding]:
    """Returns findings about the label files that several images share."""
    owners: dict[str, list[str]] = {}  # names of images, by label file
    for image in images:
        if image.status is ImageStatus.LABELED:
            owners.setdefault(image.label.name, []).append(image.name)
    findings = []
    for name, image_names in owners.items():
        if len(image_names) > 1:
            shown = " and ".join(image_names[:2])
            message = f"used for {shown}; remove all but one of the images, or give each its own labels"
            findings.append(Finding(name, SHARED_LABEL, message))
    return findings
