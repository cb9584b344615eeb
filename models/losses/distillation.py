"""Distillation: a trained model, the teacher, gives targets in addition to the labels.

Its class scores are targets of a binary cross-entropy (Hinton et al. 2015). Where it is confident, its boxes are
targets of the box losses (for distributions of sides, Localization Distillation, Zheng et al. 2022).

With ``--teacher`` the student learns from it in all cells. With ``--keep-old`` an old model teaches the classes that
the labels leave out, so that they are not forgotten (Learning without Forgetting, Li & Hoiem 2016; incremental
detection, Shmelkov et al. 2017): it gives targets where a class is ignored because an image does not label it, but not
in cells that are assigned to a labeled object.

Legend: B images, N cells over all levels, C classes of the student, O classes that both models have, R distance bins of
the student, T distance bins of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div

from models.box_coding import distances_to_xyxy, expected_distances
from models.layers.ops import split_rows
from models.losses.ignored_cells import IgnoredCells
from utils.boxes import iou
from utils.class_names import class_key

MIN_TEACHER_SCORE = 0.1  # class score from which a box of the teacher is a target


class _Head(Protocol):
    """The part of an `AnchorFreeHead` that losses use."""

    is_dual: bool
    reg_max: int


class _Detector(Protocol):
    """The part of a `Detector` that losses use."""

    @property
    def head(self) -> _Head: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def strides(self) -> Sequence[int]: ...
    def fuse(self, *, one_to_one: bool | None) -> nn.Module: ...


class Teacher(nn.Module):
    """Runs a fused detector and returns its raw maps, reduced to the classes of the student."""

    channels: Tensor  # int64 (4T + O,), channels of the detector's maps that are returned

    def __init__(
        self, detector: _Detector, names: Sequence[str], *, dual: bool = False, unlabeled_only: bool = False
    ) -> None:
        """Copies ``detector``, which has an anchor-free head.

        Args:
            detector: the teacher.
            names: classes of the student. Names are compared without case and outer spaces.
            dual: whether the student has a one-to-one branch; it learns from the teacher's, if there is one.
            unlabeled_only: whether the student learns only classes that an image does not label.
        """
        super().__init__()
        self.detector = detector.fuse(one_to_one=None)
        self.num_levels = len(detector.strides)
        self.is_dual = dual and detector.head.is_dual
        self.unlabeled_only = unlabeled_only
        number_in_teacher = {class_key(name): number for number, name in enumerate(detector.names)}
        # Indices into ``names``.
        self.distilled_classes = tuple(i for i, name in enumerate(names) if class_key(name) in number_in_teacher)
        num_sides = 4 * detector.head.reg_max
        class_channels = [num_sides + number_in_teacher[class_key(names[i])] for i in self.distilled_classes]
        self.register_buffer("channels", torch.tensor([*range(num_sides), *class_channels]), persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> list[Tensor]:
        """Returns maps (B, 4T + O, h, w), one per level, of one branch or of both, for images (B, channels, H, W)."""
        maps = self.detector(images)
        if not self.is_dual:
            maps = maps[: self.num_levels]
        return [level.index_select(1, self.channels) for level in maps]


def distill_maps(
    outputs: Sequence[Tensor],
    teacher_maps: Sequence[Tensor],
    distilled_classes: Tensor,
    ignored: IgnoredCells | None,
    centers: Tensor,
    strides: Tensor,
    *,
    unlabeled_only: bool,
) -> Distillation:
    """Compares outputs, box logits (B, N, 4R) and class logits (B, N, C), with the maps of a `Teacher`.

    Args:
        outputs: the student's box and class logits.
        teacher_maps: (B, 4T + O, h, w), one per level.
        distilled_classes: int64 (O,), the maps' classes among the C.
        ignored: cells in which some classes have no labels, except those assigned to objects.
        centers, strides: centers and strides of the cells, see `models.box_coding.cell_centers`.
        unlabeled_only: whether to compare only in these; their boxes then count in the normalizer like labeled ones.
    """
    student = (outputs[0], outputs[1].index_select(-1, distilled_classes))
    teacher = split_rows(teacher_maps, teacher_maps[0].shape[1] - len(distilled_classes))
    zero = student[0].new_zeros(())
    if not unlabeled_only:
        return distill(student, teacher, None, centers, strides)._replace(weight=zero)
    if ignored is None:
        return Distillation(zero, zero, zero, zero)
    student_rows, teacher_rows = ([logits[ignored.images] for logits in pair] for pair in (student, teacher))
    return distill(student_rows, teacher_rows, ignored.cells.index_select(-1, distilled_classes), centers, strides)


class Distillation(NamedTuple):
    """Sums over cells, () each; the first three are 0 where both models have equal outputs."""

    box: Tensor  # 1 - CIoU, weighted by the teacher's score
    cls: Tensor  # Kullback-Leibler divergence of the class scores
    sides: Tensor  # divergence of the side distributions; with one bin, or different bins, mean error in cells
    weight: Tensor  # the teacher's scores


def distill(
    student: Sequence[Tensor], teacher: Sequence[Tensor], is_distilled: Tensor | None, centers: Tensor, strides: Tensor
) -> Distillation:
    """Compares the outputs of two models: box logits, (B, N, 4R) and (B, N, 4T), and class logits (B, N, O) each.

    ``is_distilled``: bool (B, N, O), where the student learns a class from the teacher; None: everywhere.
    """
    student_boxes, student_classes = student
    teacher_boxes, teacher_classes = teacher
    student_sides = student_boxes.unflatten(-1, (4, -1))
    teacher_sides = teacher_boxes.unflatten(-1, (4, -1))
    score = teacher_classes.sigmoid()
    class_mask = None if is_distilled is None else is_distilled.float()
    cross_entropy, entropy = (
        binary_cross_entropy_with_logits(logits, score, class_mask, reduction="none")
        for logits in (student_classes, teacher_classes)
    )
    best = (score if class_mask is None else score * class_mask).amax(-1)
    weight = best * (best > MIN_TEACHER_SCORE)
    student_distances = expected_distances(student_sides)
    teacher_distances = expected_distances(teacher_sides)
    overlap = iou(
        distances_to_xyxy(student_distances, centers, strides),
        distances_to_xyxy(teacher_distances, centers, strides),
        kind="ciou",
    )
    if student_sides.shape[-1] == teacher_sides.shape[-1] > 1:
        student_log, teacher_log = student_sides.log_softmax(-1), teacher_sides.log_softmax(-1)
        error = kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(-1)
    else:
        error = (student_distances - teacher_distances).abs()
    box = weight * (1 - overlap)
    sides = weight * error.mean(-1)
    return Distillation(box.sum(), (cross_entropy - entropy).sum(), sides.sum(), weight.sum())
