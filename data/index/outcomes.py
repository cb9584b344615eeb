"""Decides for each image of a split whether it is used, or left out for one reason.

The arrays of the index, the losses of the findings, and hence the ledger depend on this decision alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.labels import findings as kinds
from data.labels.clean import CleanBoxes
from data.labels.findings import Finding
from data.labels.label_format import LabelSource


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Scan outcomes of N images."""

    is_used: np.ndarray  # bool (N,)
    is_incomplete: np.ndarray  # bool (N,): a labeled object is unusable, so the image is not a background
    findings: list[Finding]  # sorted by image and row, each with its losses


def decide_outcomes(
    scan_findings: Sequence[Finding], boxes: CleanBoxes, source: LabelSource, num_labeled: Sequence[int]
) -> Outcomes:
    """Decides for each image whether it is used, and assigns each loss to a finding.

    Args:
        scan_findings: all findings about the images and their rows.
        boxes: the usable rows.
        source: the labels; its ``images`` are numbered as in ``scan_findings`` and ``boxes``.
        num_labeled: number of labeled rows of each image, usable or not.
    """
    findings = sorted(scan_findings, key=_order)
    # The finding because of which an image is left out: the first about the image itself, else one about a row.
    reason_of = {f.image: f for f in reversed(findings) if f.kind in kinds.IMAGE_LOST}
    for image, row in _unusable_rows(findings, boxes).items():
        if image not in reason_of:
            reason_of[image] = _unusable_labels(row, source)
            findings.append(reason_of[image])
    findings.sort(key=_order)
    is_used = np.ones(len(num_labeled), bool)
    is_used[list(reason_of)] = False
    is_incomplete = np.zeros(len(num_labeled), bool)
    is_incomplete[[f.image for f in findings if f.kind in kinds.ROW_LOST]] = True
    return Outcomes(is_used, is_incomplete, _with_losses(findings, reason_of, num_labeled))


def _order(finding: Finding) -> tuple[int, int]:
    return finding.image, finding.row_number


def _unusable_rows(findings: Sequence[Finding], boxes: CleanBoxes) -> dict[int, Finding]:
    """Returns, by image, a finding about a row that makes the whole image unusable: a number that is not finite, or the
    first lost row of an image without any usable object. As a background, such an image would teach the model to ignore
    its objects."""
    with_object = set(np.unique(boxes.image[~boxes.crowd]).tolist())
    rows = {f.image: f for f in reversed(findings) if f.kind in kinds.ROW_LOST and f.image not in with_object}
    return rows | {f.image: f for f in reversed(findings) if f.kind == kinds.NOT_FINITE}


def _unusable_labels(row: Finding, source: LabelSource) -> Finding:
    """Returns the finding about an image that is left out because of a row."""
    if row.kind == kinds.NOT_FINITE:
        reason = "a number is not finite"
    else:
        reason = f"no row can be used: {row.cause or row.text}"
    return Finding(
        where=source.where(row.image, row.row_number),
        kind=kinds.BAD_LABEL,
        text=reason,
        consequence="image left out",
        image=row.image,
    )


def _with_losses(
    findings: Sequence[Finding], reason_of: dict[int, Finding], num_labeled: Sequence[int]
) -> list[Finding]:
    """Returns the findings with their losses. The reason for leaving out an image gets all of its labeled objects; in
    other images, each lost row gets one object, since no row is lost for two reasons."""
    with_losses = []
    for finding in findings:
        if finding.image in reason_of:
            if finding is reason_of[finding.image]:
                finding = finding._replace(lost_images=1, lost_objects=num_labeled[finding.image])
        elif finding.kind in kinds.ROW_LOST:
            finding = finding._replace(lost_objects=1)
        with_losses.append(finding)
    return with_losses
