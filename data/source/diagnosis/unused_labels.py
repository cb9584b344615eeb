"""Diagnoses a split that does not have exactly one label file per image: label files used by no image or by several,
and files in other formats that seem to contain the labels of an image.

An unlabeled image to which such a file may belong is left out: as a background, it would teach the model to ignore its
objects. Splits may share folders of label files. Each file is therefore compared with the images of all of them, in the
same way whichever split is read (unused_file.py). A file that another split uses does not concern this split.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data.labels.findings import SHARED_LABEL, Finding
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import SplitContext
from data.source.diagnosis.unread_labels import unread_labels
from data.source.diagnosis.unused_file import explain
from data.source.listing.candidate_files import CandidateFile
from data.source.listing.listing import ImageStatus, ListedImage


class Diagnosis(NamedTuple):
    """The unused label files of a split, and the images that are left out because of them."""

    findings: list[Finding]
    reasons: dict[str, Finding]  # findings because of which images are left out, by image name


NO_DIAGNOSIS = Diagnosis([], {})  # for a split with exactly one label file per image


def diagnose_labels(context: SplitContext) -> Diagnosis:
    """Reports the label files that are not used by exactly one image of the split, and labels in other formats."""
    found = context.own.found
    findings: list[Finding] = []
    reasons: dict[str, Finding] = {}
    for candidate in _unused_files(context):
        explanation = explain(candidate, context)
        if explanation is None:
            continue
        finding = explanation.finding
        left_out = [image.name for image in explanation.unlabeled if image.name not in reasons]
        if left_out and found.is_any_labeled:  # else they are backgrounds
            finding = finding._replace(lost_images=len(left_out))
        findings.append(finding)
        reasons |= dict.fromkeys(left_out, finding)
    findings += _shared_labels(found.images)

    unread = unread_labels(found, left_out=reasons)
    findings += dict.fromkeys(unread.values())  # images of one stem have the same finding
    return Diagnosis(findings, reasons | unread if found.is_any_labeled else {})


def _unused_files(context: SplitContext) -> Iterator[CandidateFile]:
    """Yields the unused label files that this split may have to report."""
    for file in _searched_files(context):
        if not context.is_used_by_another(file) and context.own.candidates.is_label_file(file):
            yield file


def _searched_files(context: SplitContext) -> Iterator[CandidateFile]:
    """Yields the candidates in this split's expected and nearby folders and in those of missing images and, in label
    folders of other splits, those with the distinctive name of an unlabeled image."""
    own = context.own
    searched = dict.fromkeys((*own.expected, *own.nearby, *own.missing_images))
    for folder in searched:
        is_skipped = folder in own.expected and folder not in own.usual and not own.candidates.contains_labels(folder)
        if not is_skipped:  # else such as captions beside the images
            yield from own.candidates.files(folder)
    if own.unlabeled.is_empty:
        return
    others = [folder for folder in context.named_label_folders if folder not in searched]
    for file in itertools.chain.from_iterable(map(own.candidates.files, others)):
        stem = loose_stem(file.name)
        if own.unlabeled.named(stem) and context.is_distinctive(stem):
            yield file


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
