"""Keeps what an old model knows of classes that the labels leave out, while another learns new ones (``--keep-old``).

Where a class is ignored because an image does not label it, the output of that model, the teacher, is the target: its
class scores by binary cross-entropy (Learning without Forgetting, Li & Hoiem 2016), its boxes by the losses of the
boxes wherever it is confident (incremental detection, Shmelkov et al. 2017; of the distributions of the sides,
Localization Distillation, Zheng et al. 2022). Cells that are assigned to a labeled object learn from the label alone.

Legend: B images, N cells over all levels, C classes, O classes of the teacher, which are the first of the C, R distance
bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div

from models.box_coding import distances_to_xyxy, expected_distances
from utils.boxes import iou

CONFIDENT = 0.1  # class score from which the teacher's box is a target


class Distillation(NamedTuple):
    """Sums over the cells, (): 0 where both models have equal outputs."""

    box: Tensor  # 1 - CIoU, weighted by the teacher's score
    cls: Tensor  # Kullback-Leibler divergence of the class scores
    sides: Tensor  # the same of the distributions of the sides or, without bins, the mean absolute error in cells
    weight: Tensor  # the scores of the boxes, which count like those of labeled objects


def distill(
    outputs: Sequence[Tensor], teacher: Sequence[Tensor], unlabeled: Tensor, centers: Tensor, strides: Tensor
) -> Distillation:
    """Compares the outputs of two models.

    Args:
        outputs: box logits (B, N, 4R) and class logits (B, N, C).
        teacher: its, (B, N, 4R) and (B, N, O).
        unlabeled: bool (B, N, C), where a class is to be learned from the teacher.
        centers, strides: as from `cell_centers`.
    """
    (boxes, classes), (old_boxes, old_classes) = outputs, teacher
    boxes, old_boxes = boxes.unflatten(-1, (4, -1)), old_boxes.unflatten(-1, (4, -1))
    classes, taught = classes[..., : old_classes.shape[-1]], unlabeled[..., : old_classes.shape[-1]].float()
    score = old_classes.sigmoid()
    cls, entropy = (
        binary_cross_entropy_with_logits(logits, score, taught, reduction="none") for logits in (classes, old_classes)
    )
    best = (score * taught).amax(-1)
    weight = best * (best > CONFIDENT)
    distances, old_distances = expected_distances(boxes), expected_distances(old_boxes)
    overlap = iou(
        distances_to_xyxy(distances, centers, strides), distances_to_xyxy(old_distances, centers, strides), kind="ciou"
    )
    if boxes.shape[-1] > 1:
        error = kl_div(boxes.log_softmax(-1), old_boxes.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    else:
        error = (distances - old_distances).abs()
    box, sides = weight * (1 - overlap), weight * error.mean(-1)
    return Distillation(box.sum(), (cls - entropy).sum(), sides.sum(), weight.sum())
