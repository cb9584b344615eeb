"""Diagnoses a split that does not have exactly one label file per image: label files used by no image or by several,
and files in other formats that seem to contain the labels of an image.

An unlabeled image to which such a file may belong is left out: as a background, it would teach the model to ignore its
objects. Splits may share folders of label files. Each file is therefore compared with the images of all of them, in the
same way whichever split is read. Of the splits to which it may belong, its objects are lost in one, see
`split_to_charge`. The first question with the answer "yes" decides:

1. Does another split use the file? It is none of this split's.
2. Is its image on the disk, in a folder whose label files may be in the file's folder? `_of_existing_images`: a copy of
   the image's labels is ignored, a second label file reported; an unlabeled image is left out, as in 4.
3. Does a list name its image, which is missing? Its objects are lost; the row of the list counts as the image. If no
   image of that split exists, the file is reported by each of the others, but not lost.
4. May it label unlabeled images? Each split leaves out its own. These are images of a similar name, or only those of
   the same name if the file's folder is not the split's, or if 5 or 6 holds as well. Splits to which the folder does
   not belong are asked only if its name tells the split (`SplitContext.tells_split`).
5. Is it in a folder where no split expects label files, and named like a labeled image? It is reported as a second
   label file of that image, unless it is a copy or the folder belongs to a missing folder alone.
6. Is it named like an image of no split (`SplitContext.is_of_image_outside`)? It is ignored.
7. Does its folder belong to a missing folder or list? It is reported, but not lost.
8. Else it is lost in one of the splits to which its folder belongs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from data.image_io.file_kinds import IMAGE_SUFFIXES
from data.labels.findings import IMAGE_ELSEWHERE, ORPHAN, SECOND_LABEL, SHARED_LABEL, Finding
from data.labels.image_names import ImageNames, loose, readings_of
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import FolderOwner, SplitContext, SplitLabels, split_to_charge
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
    is_charged: bool  # whether the objects of the file are lost in this split


_Explanation = Finding | _Unlabeled | None  # None if this split need not report the file


def diagnose_labels(context: SplitContext) -> Diagnosis:
    """Reports the label files that are not used by exactly one image of the split, and labels in other formats."""
    found = context.own.found
    findings: list[Finding] = []
    reasons: dict[str, Finding] = {}
    for file in _unused_files(context):
        explanation = _explain(file, context)
        if isinstance(explanation, Finding):
            findings.append(explanation)
        elif isinstance(explanation, _Unlabeled):
            left_out = [image.name for image in explanation.images if image.name not in reasons]
            finding = _of_unlabeled_images(file, explanation, num_left_out=len(left_out), own=context.own)
            findings.append(finding)
            reasons |= dict.fromkeys(left_out, finding)
    findings += _shared_labels(found.images)

    unread = unread_labels(found, left_out=reasons)
    findings += dict.fromkeys(unread.values())  # images of one stem have the same finding
    return Diagnosis(findings, reasons | unread if found.is_any_labeled else {})


def _unused_files(context: SplitContext) -> Iterator[Candidate]:
    """Yields the unused label files that this split may have to report: those in its expected and nearby folders and in
    those of missing images and, in label folders of other splits, those with the name of an unlabeled image that tells
    its split."""
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


def _explain(file: Candidate, context: SplitContext) -> _Explanation:
    """Answers the questions of this module, from the second on, about an unused label file."""
    own = context.own
    stems = _stems_of_its_image(file, own)
    existing = _existing_images(file, stems, context)
    if existing:
        return _of_existing_images(existing, file, context)
    lists = [labels for labels in context.splits if labels.missing_image(file.folder, stems)]
    if lists:
        return _of_missing_image(file, stems, split_to_charge(lists), own)
    owner = context.owner_of(file.folder)
    asked = context.splits if context.tells_split(loose_stem(file.name)) else owner.splits
    labeled = _labeled_namesakes(file, owner, context)
    is_of_image_outside = context.is_of_image_outside(file, stems)
    similar: dict[SplitLabels, Sequence[ListedImage]] = {}
    for labels in asked:
        only_same_name = bool(labeled) or is_of_image_outside or labels not in owner.splits
        similar[labels] = _similar_images(file, labels, context, only_same_name=only_same_name)
    if any(similar.values()):
        return _unlabeled_in(own, similar)
    if labeled:
        return _of_labeled_images(file, labeled, own) if split_to_charge(owner.splits) is own else None
    if is_of_image_outside:
        return None
    if owner.missing is not None:
        return _of_missing_entry(file, owner.missing, own)
    if owner.splits and split_to_charge(owner.splits) is own:
        return _without_image(file, "belongs to no image; rename it like its image, or remove it", own)
    return None


def _unlabeled_in(own: SplitLabels, images_of: Mapping[SplitLabels, Sequence[ListedImage]]) -> _Unlabeled | None:
    """Returns the unlabeled images of this split that a file may label, or None if there is none. ``images_of``: those
    of all splits to which it may belong."""
    images = images_of.get(own)
    if not images:
        return None
    affected = [labels for labels in images_of if images_of[labels]]
    return _Unlabeled(images, is_charged=split_to_charge(affected) is own)


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
    images_of = {labels: labels.images_named(names, ImageStatus.BACKGROUND) for labels in context.splits}
    unlabeled = _unlabeled_in(own, images_of)
    if unlabeled is not None:
        return unlabeled
    if labeled:
        message = f"{labeled[0].name} uses {labeled[0].label.name} instead; remove one of the two"
        return Finding(own.candidates.full_name(file), SECOND_LABEL, message)
    is_in_a_split = any(name in labels.image_of_name for labels in context.splits for name in names)
    if is_in_a_split or os.path.splitext(names[0])[1].lower() in IMAGE_SUFFIXES:
        return None  # an image of another split, or of a supported kind in no list, or it has a finding already
    image_folder = os.path.dirname(path_of(names[0], root))
    splits = [labels for labels in context.splits if image_folder in labels.image_folders(file.folder)]
    if split_to_charge(splits) is own:
        return _without_image(file, f"{names[0]} is of an unsupported kind", own)
    return None


# Images with similar names


def _labeled_namesakes(file: Candidate, owner: FolderOwner, context: SplitContext) -> list[ListedImage]:
    """Returns the labeled images that a file is named like, if it is in a folder where no split expects label files: it
    may be an older version of their labels."""
    if not owner.splits or context.is_expected(file.folder):
        return []
    stem = loose_stem(file.name)
    return [labels.labeled_of_stem[stem] for labels in context.splits if stem in labels.labeled_of_stem]


def _similar_images(
    file: Candidate, labels: SplitLabels, context: SplitContext, *, only_same_name: bool
) -> Sequence[ListedImage]:
    """Returns the unlabeled images of a split that a file may label: those of the same name or, unless
    ``only_same_name``, the one of a similar name. There are none in a folder where the split expects no label files
    if a labeled image has the same name."""
    stem = loose_stem(file.name)
    if file.folder not in labels.expected:
        is_searched = file.folder in labels.nearby or file.folder in context.named_label_folders
        if not is_searched or stem in labels.labeled_of_stem:
            return ()
    return labels.unlabeled.named(stem) if only_same_name else labels.unlabeled.resembling(stem)


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


def _of_labeled_images(file: Candidate, images: Sequence[ListedImage], own: SplitLabels) -> Finding | None:
    """Returns the finding about a label file that is named like labeled images, or None for a copy of their labels."""
    root = own.candidates.folders.root
    if any(own.candidates.have_equal_labels(file.path, path_of(image.label.name, root)) for image in images):
        return None
    message = f"is named like {images[0].name}, which has labels elsewhere; remove one of the two"
    return Finding(own.candidates.full_name(file), SECOND_LABEL, message)


def _of_missing_image(file: Candidate, stems: Sequence[str], owner: SplitLabels, own: SplitLabels) -> Finding | None:
    """Returns the finding about a label file whose image is missing, although a list of the split ``owner`` names it.
    The row of the list counts as the lost image."""
    name = own.candidates.full_name(file)
    message = f"{owner.missing_image(file.folder, stems)}, which a list names, is missing"
    if owner is own:
        return Finding(name, ORPHAN, message, lost_objects=own.candidates.num_objects(file))
    return None if owner.found.images else Finding(name, IMAGE_ELSEWHERE, message)


def _of_missing_entry(file: Candidate, missing: Path, own: SplitLabels) -> Finding:
    """Returns the finding about a label file whose image may be in a missing folder or list of another split."""
    place = "listed in" if missing.suffix.lower() == ".txt" else "in"
    message = f"its image may be {place} {missing}, which is empty or missing"
    return Finding(own.candidates.full_name(file), IMAGE_ELSEWHERE, message)


def _of_unlabeled_images(file: Candidate, unlabeled: _Unlabeled, *, num_left_out: int, own: SplitLabels) -> Finding:
    """Returns the finding about a label file that may belong to unlabeled images. ``num_left_out``: how many of them
    are not already left out because of another file. They are backgrounds if no image of the split is labeled."""
    first = unlabeled.images[0]
    return Finding(
        where=own.candidates.full_name(file),
        kind=ORPHAN,
        text=f"belongs to no image; if it labels {first.name}, which is left out, rename it to {first.label.name}",
        lost_images=num_left_out if own.found.is_any_labeled else 0,
        lost_objects=own.candidates.num_objects(file) if unlabeled.is_charged else 0,
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
