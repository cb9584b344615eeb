"""What all heads share: a branch of prediction layers and, on request, a second branch that is trained one-to-one.

A head with both branches needs no NMS (consistent dual assignments: YOLOv10, Wang et al. 2024, and YOLO26). The
one-to-many branch learns with many cells per target, which teaches the backbone well; the one-to-one branch, whose
features have no gradient, learns to find each object once, and gives the detections.

Legend: B images, L levels, C classes, N predictions over all levels.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from utils.config.settings import Hyperparameters

if TYPE_CHECKING:
    from models.losses.base import Criterion, LossSettings
    from models.losses.distillation import Teacher

ONE_TO_ONE = "one2one_"  # before the names of the second branch's layers, as in public state dicts
REFERENCE_SIZE = 640  # pixels of a typical canvas side, for the priors of the biases


class DetectionHead(nn.Module):
    """Base of the heads: a head owns its layers, decoding, loss and defaults.

    Its subclasses' methods need not know of the second branch. Their constructors take the channels and strides of the
    levels and the number of classes, then the arguments of the YAML row.
    """

    branch: ClassVar[tuple[str, ...]]  # the children that make up a branch
    validation_iou: ClassVar[float]  # NMS threshold in validation, as published
    unused_hyperparameters: ClassVar[frozenset[str]] = frozenset()  # of losses, that its loss does not read
    squares: ClassVar[bool] = False  # whether validation pads images to squares by default, as training does
    refines: ClassVar[bool] = False  # whether the loss differs in the last epochs, see `Criterion.set_closing`
    distills: ClassVar[bool] = False  # whether the head can teach and its loss learn from a teacher
    anchors: Tensor | None  # buffer (L, A, 2), widths and heights in strides; training fits it to the boxes

    def __init__(self, strides: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.strides, self.num_classes = strides, num_classes
        self.prefixes: tuple[str, ...] = ("",)
        self.register_buffer("anchors", None)

    def forward_branch(self, features: list[Tensor], *layers: nn.ModuleList) -> list[Tensor]:
        """Features, one per level, through a branch's children in the order of ``branch``: raw maps, one per level."""
        raise NotImplementedError

    def decode_branch(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Raw maps of one branch to boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C)."""
        raise NotImplementedError

    def reset_branch(self, *layers: nn.ModuleList) -> None:
        """Fills the biases of a branch's output layers."""
        raise NotImplementedError

    def branch_loss(self, settings: LossSettings) -> Criterion:
        """The loss of one branch, see `build_loss`."""
        raise NotImplementedError

    def branch_class_rows(self) -> dict[str, tuple[int, int]]:
        """Layers of the first branch whose output rows belong to classes: name to (groups, rows before the classes)."""
        raise NotImplementedError

    @property
    def is_end_to_end(self) -> bool:
        """Whether the detections come from a one-to-one branch and need no suppression."""
        return self.prefixes[-1] == ONE_TO_ONE

    @property
    def is_dual(self) -> bool:
        """Whether the head has both branches."""
        return len(self.prefixes) == 2

    def add_one_to_one(self) -> None:
        """Adds the second branch, equal to the first."""
        for name in self.branch:
            setattr(self, ONE_TO_ONE + name, copy.deepcopy(getattr(self, name)))
        self.prefixes = ("", ONE_TO_ONE)

    def keep_branch(self, *, one_to_one: bool) -> None:
        """Drops one of two branches, for inference."""
        dropped, kept = self.prefixes if one_to_one else self.prefixes[::-1]
        for name in self.branch:
            delattr(self, dropped + name)
        self.prefixes = (kept,)

    def _layers(self, prefix: str) -> list[nn.ModuleList]:
        return [getattr(self, prefix + name) for name in self.branch]

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Features, one per level, to raw maps, one per level; of two branches the one-to-many maps come first."""
        raw = []
        for prefix in self.prefixes:
            inputs = [x.detach() for x in features] if prefix == ONE_TO_ONE else features
            raw += self.forward_branch(inputs, *self._layers(prefix))
        return raw

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Raw maps, of two branches those of the one-to-one branch, to boxes float32 (B, N, 4), xyxy canvas pixels, and
        scores float32 (B, N, C) in [0, 1]."""
        return self.decode_branch(raw[-len(self.strides) :])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills biases with priors. Two branches start equal, so both first choose alike."""
        self.reset_branch(*self._layers(""))
        if self.is_dual:
            for first, second in zip(self._layers(""), self._layers(ONE_TO_ONE)):
                second.load_state_dict(first.state_dict())

    def build_loss(
        self,
        hyp: Hyperparameters,
        *,
        teacher: Teacher | None = None,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
    ) -> Criterion:
        """Builds the loss, on the head's device. Anchors are copied: call it when they are final. ``class_weights``:
        as in `LossSettings`."""
        from models.losses.base import DualAssignmentLoss, LossSettings

        settings = LossSettings(
            tuple(self.strides), self.num_classes, hyp, label_smoothing=label_smoothing, class_weights=class_weights
        )
        if teacher is not None:
            settings = replace(settings, taught=teacher.taught, unlabeled_only=teacher.unlabeled_only)
        loss = self.branch_loss(settings)
        if self.is_dual:
            taught = settings.taught if teacher is not None and teacher.is_dual else ()
            one = self.branch_loss(replace(settings, one_to_one=True, taught=taught))
            loss = DualAssignmentLoss(loss, one, gain=hyp.one2one)
        loss.teacher = teacher
        return loss

    def class_rows(self) -> dict[str, tuple[int, int]]:
        """Layers whose output rows belong to classes: local name to (groups, rows before the classes of a group)."""
        return {prefix + name: rows for prefix in self.prefixes for name, rows in self.branch_class_rows().items()}
