"""The differences between an exported file and its checkpoint, and how large they may be.

AP alone is not enough: a model that has learned nothing has AP 0, whatever its file computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.formats.resolved_export import ResolvedExport
from utils.strings import counted


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest differences that are allowed."""

    min_iou: float  # lowest IoU of a match
    missing: float  # fraction of detections without a match; one detection is allowed in any case
    box: float  # difference of a side, as a fraction of the longer side of the box
    score: float
    on_average: bool  # whether ``box`` and ``score`` limit the mean over the matches, instead of each
    ap: float
    f1: float = math.inf
    # Whether AP may also differ by its paired spread (`Parity.ap_spread`). In few images, rounding moves whole steps of
    # AP. Only for precisions whose other limits demand the same detections, one by one.
    ap_may_spread: bool = True


FLOAT32 = Tolerance(min_iou=0.9, missing=0.01, box=1e-3, score=1e-4, on_average=False, ap=0.001)
FLOAT16 = Tolerance(min_iou=0.9, missing=0.05, box=0.01, score=0.01, on_average=True, ap=0.003)
INT8 = Tolerance(min_iou=0.5, missing=0.25, box=0.1, score=0.1, on_average=True, ap=0.015, f1=0.02, ap_may_spread=False)


def tolerance_of(options: ResolvedExport) -> Tolerance:
    """Returns the tolerance for the precision of an export."""
    if options.int8:
        return INT8
    return FLOAT16 if options.half else FLOAT32


@dataclass(frozen=True)
class Parity:
    """Differences between an exported model and its checkpoint, over all images of a check."""

    images: int
    matched: int
    missing: int  # detections of either model without a match
    box: float  # largest difference
    mean_box: float
    score: float
    mean_score: float
    ap: float  # of the exported model
    ap_checkpoint: float
    ap_spread: float  # twice the standard error of the difference of the two APs over the images; 0: not computed
    f1: float  # of the exported model, at `threshold`
    f1_checkpoint: float
    threshold: float
    worst_image: str

    @property
    def summary(self) -> str:
        return (
            f"{counted(self.images, 'image')}: AP {self.ap:.4f} (checkpoint {self.ap_checkpoint:.4f}), F1 at "
            f"{self.threshold:.3f} {self.f1:.4f} ({self.f1_checkpoint:.4f}); "
            f"detections: {self.matched} match, {self.missing} do not; boxes differ by at most {self.box:.1e} of their "
            f"size, scores by {self.score:.1e}"
        )

    def violations(self, allowed: Tolerance) -> list[str]:
        """Returns a message for each value that is out of tolerance, as NaN always is."""
        messages = []
        if not self.matched:
            messages.append("it has none of the checkpoint's detections")
        box = self.mean_box if allowed.on_average else self.box
        score = self.mean_score if allowed.on_average else self.score
        on_average = " on average" if allowed.on_average else ""
        if not box <= allowed.box:
            messages.append(f"boxes differ by {box:.2g} of their size{on_average} (allowed: {allowed.box:g})")
        if not score <= allowed.score:
            messages.append(f"scores differ by {score:.2g}{on_average} (allowed: {allowed.score:g})")
        total = self.matched + self.missing
        if self.missing > 1 and self.missing / total > allowed.missing:
            messages.append(
                f"{self.missing} of {total} detections have no counterpart of their class (allowed: "
                f"{allowed.missing:.0%})"
            )
        ap_limit = max(allowed.ap, self.ap_spread)
        if not abs(self.ap - self.ap_checkpoint) <= ap_limit:
            messages.append(f"AP is {self.ap:.4f} instead of {self.ap_checkpoint:.4f} (allowed: {ap_limit:.2g})")
        if not abs(self.f1 - self.f1_checkpoint) <= allowed.f1:
            messages.append(f"F1 is {self.f1:.4f} instead of {self.f1_checkpoint:.4f} (allowed: {allowed.f1:g})")
        return messages
