"""A trained model, the teacher, gives targets: its class scores by binary cross-entropy (Hinton et al. 2015), its boxes
by the losses of the boxes wherever it is confident (of the distributions of the sides, Localization Distillation, Zheng
et al. 2022).

With ``--teacher`` they add to the labels in all cells. With ``--keep-old`` the teacher keeps what an old model knows of
classes that the labels leave out (Learning without Forgetting, Li & Hoiem 2016; incremental detection, Shmelkov et al.
2017): it gives targets where a class is ignored because an image does not label it, but not in cells that are assigned
to a labeled object.

Legend: B images, N cells over all levels, O classes that both models have, R distance bins, T the teacher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div

from models.box_coding import distances_to_xyxy, expected_distances
from models.layers.ops import split_rows
from models.losses.base import IgnoredCells
from utils.boxes import iou

CONFIDENT = 0.1  # class score from which the teacher's box is a target


class Teacher(nn.Module):
    """Gives the raw maps of a detector for the classes that a model shares with it."""

    def __init__(self, detector: nn.Module, names: Sequence[str], *, dual: bool = False, unlabeled_only: bool = False):
        """``names``: the classes of the model that is taught; ``dual``: whether that has a one-to-one branch, which
        learns from the teacher's if it has one, too; ``unlabeled_only``: whether only classes that an image does not
        label are taught."""
        super().__init__()
        self.detector = detector.fuse(one_to_one=None)
        self.is_dual, self.unlabeled_only = dual and detector.head.is_dual, unlabeled_only
        self.taught = tuple(i for i, name in enumerate(names) if name in detector.names)  # of ``names``
        sides = 4 * detector.head.reg_max
        columns = [sides + detector.names.index(names[i]) for i in self.taught]
        self.register_buffer("channels", torch.tensor([*range(sides), *columns]), persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps (B, 4T + O, h, w), one per level, of one branch or of both, for images (B, 3, H, W)."""
        maps = self.detector(images)
        if not self.is_dual:
            maps = maps[: len(self.detector.strides)]
        return [level.index_select(1, self.channels) for level in maps]


def distill_maps(
    outputs: Sequence[Tensor],
    teacher_maps: Sequence[Tensor],
    taught: Tensor,
    ignored: IgnoredCells | None,
    centers: Tensor,
    strides: Tensor,
    *,
    unlabeled_only: bool,
) -> Distillation:
    """Compares outputs, box logits (B, N, 4R) and class logits (B, N, C), with the maps of a `Teacher`.

    Args:
        taught: int64 (O,), the classes of the maps among the C.
        ignored: cells without labels of some classes, but not those of objects.
        unlabeled_only: whether only these are compared; their boxes count in the normalizer like labeled objects.
    """
    outputs = outputs[0], outputs[1].index_select(-1, taught)
    teacher = split_rows(teacher_maps, teacher_maps[0].shape[1] - len(taught))
    zero = outputs[0].new_zeros(())
    if not unlabeled_only:
        return distill(outputs, teacher, None, centers, strides)._replace(weight=zero)
    if ignored is None:
        return Distillation(zero, zero, zero, zero)
    outputs, teacher = ([logits[ignored.images] for logits in both] for both in (outputs, teacher))
    return distill(outputs, teacher, ignored.cells.index_select(-1, taught), centers, strides)


class Distillation(NamedTuple):
    """Sums over the cells, (): 0 where both models have equal outputs."""

    box: Tensor  # 1 - CIoU, weighted by the teacher's score
    cls: Tensor  # Kullback-Leibler divergence of the class scores
    sides: Tensor  # the same of the distributions of the sides or, without the same bins, the mean error in cells
    weight: Tensor  # the scores of the boxes


def distill(
    outputs: Sequence[Tensor], teacher: Sequence[Tensor], taught: Tensor | None, centers: Tensor, strides: Tensor
) -> Distillation:
    """Compares the outputs of two models: box logits, (B, N, 4R) and (B, N, 4T), and class logits (B, N, O).
    ``taught``: bool (B, N, O), where a class is to be learned from the teacher; None: everywhere."""
    (boxes, classes), (old_boxes, old_classes) = outputs, teacher
    boxes, old_boxes = boxes.unflatten(-1, (4, -1)), old_boxes.unflatten(-1, (4, -1))
    score, where = old_classes.sigmoid(), None if taught is None else taught.float()
    cls, entropy = (
        binary_cross_entropy_with_logits(logits, score, where, reduction="none") for logits in (classes, old_classes)
    )
    best = (score if where is None else score * where).amax(-1)
    weight = best * (best > CONFIDENT)
    distances, old_distances = expected_distances(boxes), expected_distances(old_boxes)
    overlap = iou(
        distances_to_xyxy(distances, centers, strides), distances_to_xyxy(old_distances, centers, strides), kind="ciou"
    )
    if boxes.shape[-1] == old_boxes.shape[-1] > 1:
        error = kl_div(boxes.log_softmax(-1), old_boxes.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    else:
        error = (distances - old_distances).abs()
    box, sides = weight * (1 - overlap), weight * error.mean(-1)
    return Distillation(box.sum(), (cls - entropy).sum(), sides.sum(), weight.sum())
