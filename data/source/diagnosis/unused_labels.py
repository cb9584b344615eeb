"""Diagnoses a split that does not have exactly one label file per image: label files used by no image or by several,
and files in other formats that seem to contain the labels of an image.

An unlabeled image to which such a file may belong is left out: as a background, it would teach the model to ignore its
objects. Splits may share folders of label files. Each file is therefore judged with the images of all of them, in the
same way whichever split is read, so that it is lost at most once. The first question with the answer "yes" decides:

1. Does another split use the file? It is none of this split's.
2. Is its image on the disk, in a folder whose label files may be in the file's folder? `_of_existing_images`: a copy of
   the image's labels is ignored, a second label file reported; an unlabeled image is left out, as in 4.
3. Does its folder belong to a missing folder of another split alone? It is reported, but not lost.
4. May it label unlabeled images? Each split leaves out its own; the objects are lost in the first of these splits.
5. Is it named like another image, which has labels or is in no split (`_is_of_another_image`)? It is ignored.
6. Does its folder also belong to a missing folder or list? It is reported, but not lost.
7. Else it is lost in one of the splits to which its folder belongs (`FolderOwner.charged`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import OF_MISSING_FOLDER, ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.labels.image_names import ImageNames, loose, readings_of
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import SplitContext, SplitLabels
from data.source.diagnosis.unread_labels import unread_labels
from data.source.listing.candidate_files import Candidate
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of


class Diagnosis(NamedTuple):
    """The unused label files of a split, and the images that are left out because of them."""

    findings: list[Finding]
    reasons: dict[str, Finding]  # findings because of which images are left out, by image name


NO_DIAGNOSIS = Diagnosis([], {})  # for a split with exactly one label file per image


class _Unlabeled(NamedTuple):
    """The unlabeled images of a split that an unused label file may label."""

    images: Sequence[ListedImage]
    is_charged: bool  # whether the objects of the file are lost in this split, not in another one


_Explanation = Finding | _Unlabeled | None  # None if this split need not report the file


def diagnose_labels(context: SplitContext) -> Diagnosis:
    """Reports the label files that are not used by exactly one image of the split, and labels in other formats."""
    found = context.own.found
    explanations = {file: _explain(file, context) for file in _unused_files(context)}
    similar = {file: e.images for file, e in explanations.items() if isinstance(e, _Unlabeled)}
    images_of = _assign_images_once(similar)
    findings: list[Finding] = []
    reasons: dict[str, Finding] = {}
    for file, explanation in explanations.items():
        if isinstance(explanation, Finding):
            findings.append(explanation)
        elif isinstance(explanation, _Unlabeled):
            finding = _of_unlabeled_images(file, explanation, images_of[file], context.own)
            reasons |= dict.fromkeys(images_of[file], finding)
            findings.append(finding)
    findings += _shared_labels(found.images)

    unread = unread_labels(found, left_out=reasons)
    findings += dict.fromkeys(unread.values())  # images of one stem have the same finding
    return Diagnosis(findings, reasons | unread if found.is_any_labeled else {})


def _unused_files(context: SplitContext) -> Iterator[Candidate]:
    """Yields the unused label files in the expected and nearby folders of the split."""
    own = context.own
    for folder in (*own.expected, *own.nearby):
        is_skipped = folder in own.expected and folder not in own.usual and not own.candidates.contains_labels(folder)
        if is_skipped:  # such as captions beside the images
            continue
        for file in own.candidates.files(folder):
            if not context.is_used_by_another(file) and own.candidates.is_label_file(file):
                yield file


def _explain(file: Candidate, context: SplitContext) -> _Explanation:
    """Answers the questions of this module, from the second on, about an unused label file."""
    own = context.own
    stems = _stems_of_its_image(file, own)
    existing = _existing_images(file, stems, context)
    if existing:
        return _of_existing_images(existing, file, context)
    owner = context.owner_of(file.folder)
    if owner.missing is not None and not owner.splits:
        return _of_missing_folder(file, owner.missing, own)
    is_of_another = _is_of_another_image(file, stems, context)
    unlabeled = [
        (labels, _similar_images(file, labels, only_same_name=is_of_another or labels not in owner.splits))
        for labels in context.splits
    ]
    if any(images for _, images in unlabeled):
        return _share_of(own, unlabeled)
    if is_of_another:
        return None
    if owner.missing is not None:
        return _of_missing_folder(file, owner.missing, own)
    if owner.charged is own:
        return _without_image(file, "belongs to no image; rename it like its image, or remove it", own)
    return None


def _share_of(own: SplitLabels, unlabeled: Sequence[tuple[SplitLabels, Sequence[ListedImage]]]) -> _Unlabeled | None:
    """Returns the images of a split that a file may label, or None if there is none. ``unlabeled``: by split."""
    affected = [(labels, images) for labels, images in unlabeled if images]
    for labels, images in affected:
        if labels is own:
            return _Unlabeled(images, is_charged=affected[0][0] is own)
    return None


# Images that exist


def _stems_of_its_image(file: Candidate, own: SplitLabels) -> list[str]:
    """Returns the loose stems that the image of a label file may have, beginning with the stem of the file itself."""
    stems = [loose_stem(file.name)]
    for parts in readings_of(_named_image(file, own)):
        stems += [loose(parts[-1]), loose_stem(parts[-1])]
    return stems


def _named_image(file: Candidate, own: SplitLabels) -> str:
    """Returns the image that a file names in its content, or ""."""
    named_image = own.candidates.label_format.named_image
    return "" if named_image is None else named_image(file.first_bytes())


def _existing_images(file: Candidate, stems: Sequence[str], context: SplitContext) -> list[str]:
    """Returns the names of the images on the disk to which a file belongs, whether or not a split has them. Of several
    images, these are the ones whose folders the file names, if it names any."""
    folders = [folder for labels in context.splits for folder in labels.image_folders(file.folder)]
    names = context.images_on_disk.find(stems, list(dict.fromkeys(folders)))
    named = _named_image(file, context.own)
    if len(names) <= 1 or not named:
        return names
    return [names[i] for i in ImageNames.of_single_names(names).find(named)] or names


def _of_existing_images(names: Sequence[str], file: Candidate, context: SplitContext) -> _Explanation:
    """Returns what is known about an unused label file of the existing images ``names``."""
    own = context.own
    root = own.candidates.folders.root
    labeled = own.images_named(names, ImageStatus.LABELED)
    if any(own.candidates.have_equal_labels(file.path, path_of(image.label.name, root)) for image in labeled):
        return None  # a copy
    unlabeled = [(labels, labels.images_named(names, ImageStatus.BACKGROUND)) for labels in context.splits]
    share = _share_of(own, unlabeled)
    if share is not None:
        return share
    if labeled:
        message = f"{labeled[0].name} uses {labeled[0].label.name} instead; remove one of the two"
        return Finding(own.candidates.full_name(file), SECOND_LABEL, message)
    is_in_a_split = any(name in labels.image_of_name for labels in context.splits for name in names)
    if is_in_a_split or os.path.splitext(names[0])[1].lower() in IMAGE_SUFFIXES:
        return None  # an image of another split, or of a supported kind in no list, or it has a finding already
    image_folder = os.path.dirname(path_of(names[0], root))
    if own is next(labels for labels in context.splits if image_folder in labels.image_folders(file.folder)):
        return _without_image(file, f"its image, {names[0]}, is not read", own)
    return None


# Images with similar names


def _is_of_another_image(file: Candidate, stems: Sequence[str], context: SplitContext) -> bool:
    """Returns whether a file is named like an image of no split or, in a folder where no split expects label files,
    like a labeled image: it may be an older version of its labels."""
    if not context.stems_elsewhere.isdisjoint(stems):
        return True
    if any(file.folder in labels.expected for labels in context.splits):
        return False
    return any(file.folder in labels.nearby and stems[0] in labels.labeled_stems for labels in context.splits)


def _similar_images(file: Candidate, labels: SplitLabels, *, only_same_name: bool) -> Sequence[ListedImage]:
    """Returns the unlabeled images of a split that a file may label: those of the same name or, unless
    ``only_same_name``, the one of a similar name. There are none in a folder where the split expects no label files
    if a labeled image has the same name."""
    stem = loose_stem(file.name)
    is_expected = file.folder in labels.expected
    if not is_expected and (file.folder not in labels.nearby or stem in labels.labeled_stems):
        return ()
    return labels.unlabeled.named(stem) if only_same_name else labels.unlabeled.resembling(stem)


def _assign_images_once(similar: Mapping[Candidate, Sequence[ListedImage]]) -> dict[Candidate, list[str]]:
    """Returns the names of the images that each file resembles. An image is assigned to its first file only, so that it
    is counted as lost once."""
    assigned: set[str] = set()
    images_of: dict[Candidate, list[str]] = {}
    for file, images in similar.items():
        images_of[file] = [image.name for image in images if image.name not in assigned]
        assigned.update(images_of[file])
    return images_of


# Findings


def _without_image(file: Candidate, message: str, own: SplitLabels) -> Finding:
    """Returns the finding about a label file whose image no split has.

    It counts as one lost image. If the split names only lists, nothing is lost, because the folder may contain the
    labels of many other images.
    """
    is_of_split = bool(own.folders)
    return Finding(
        where=own.candidates.full_name(file),
        kind=ORPHAN,
        text=message,
        lost_images=int(is_of_split),
        lost_objects=own.candidates.num_objects(file) if is_of_split else 0,
    )


def _of_missing_folder(file: Candidate, missing: Path, own: SplitLabels) -> Finding:
    """Returns the finding about a label file whose image may be in a folder or list without images."""
    message = f"belongs to no image that is here; its image may be in {missing}, which has no images"
    return Finding(own.candidates.full_name(file), OF_MISSING_FOLDER, message)


def _of_unlabeled_images(file: Candidate, unlabeled: _Unlabeled, left_out: Sequence[str], own: SplitLabels) -> Finding:
    """Returns the finding about a label file that may belong to unlabeled images. ``left_out``: names of the images
    that are left out because of it, not already because of another file, if any image of the split is labeled."""
    first = unlabeled.images[0]
    return Finding(
        where=own.candidates.full_name(file),
        kind=ORPHAN,
        text=f"belongs to no image; if it labels {first.name}, which is left out, rename it to {first.label.name}",
        lost_images=len(left_out) if own.found.is_any_labeled else 0,
        lost_objects=own.candidates.num_objects(file) if left_out and unlabeled.is_charged else 0,
    )


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
