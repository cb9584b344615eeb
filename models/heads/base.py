"""Base class of the heads: a branch of prediction layers and, optionally, a second branch with one-to-one assignment.

A head with both branches needs no NMS (consistent dual assignments: YOLOv10, Wang et al. 2024, and YOLO26). The
one-to-many branch learns from many cells per target, which trains the backbone well. The one-to-one branch, whose input
features are detached, learns to find each object once and gives the detections.

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
    from models.losses.base import BranchLoss, Criterion, LossSettings
    from models.losses.distillation import Teacher

ONE_TO_ONE = "one2one_"  # prefix of the second branch's layers, as in public state dicts
REFERENCE_SIZE = 640  # pixels of a typical canvas side, for the priors of the biases


class DetectionHead(nn.Module):
    """Base of the heads: a head defines its layers, decoding, loss and defaults.

    Subclasses do not handle the second branch. Their constructors take the channels and strides of the levels and the
    number of classes, then the arguments of the YAML row.
    """

    branch: ClassVar[tuple[str, ...]]  # names of the children that make up a branch, each a ModuleList
    validation_iou: ClassVar[float]  # NMS threshold in validation, as published
    unused_hyperparameters: ClassVar[frozenset[str]] = frozenset()  # loss hyper-parameters that its loss does not read
    square_letterbox: ClassVar[bool] = False  # whether validation pads images to squares by default, as training does
    refines: ClassVar[bool] = False  # whether the loss differs in the last epochs, see `Criterion.set_no_mosaic`
    distills: ClassVar[bool] = False  # whether the head can be a teacher, and its loss can learn from one
    anchors: Tensor | None  # buffer (L, A, 2), widths and heights in strides; training fits it to the boxes
    reg_max: int = 1  # R, bins of a box side's distribution; 1: sides are predicted directly

    def __init__(self, strides: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.strides = strides
        self.num_classes = num_classes
        self.prefixes: tuple[str, ...] = ("",)  # name prefixes of the branches' layers
        self.register_buffer("anchors", None)

    def forward_branch(self, features: list[Tensor], *layers: nn.ModuleList) -> list[Tensor]:
        """Runs a branch, ``layers`` in the order of ``branch``, on features, one per level: raw maps, one per level."""
        raise NotImplementedError

    def decode_branch(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes the raw maps of one branch: boxes float32 (B, N, 4), xyxy canvas pixels; scores float32 (B, N, C)."""
        raise NotImplementedError

    def reset_branch(self, *layers: nn.ModuleList) -> None:
        """Fills the biases of a branch's output layers."""
        raise NotImplementedError

    def branch_loss(self, settings: LossSettings) -> BranchLoss:
        """Creates the loss of one branch, see `build_loss`."""
        raise NotImplementedError

    def branch_class_rows(self) -> dict[str, tuple[int, int]]:
        """Lists the first branch's layers whose output rows belong to classes: name to (groups, rows before the
        classes of a group)."""
        raise NotImplementedError

    @property
    def is_end_to_end(self) -> bool:
        """True if the detections come from a one-to-one branch and need no NMS."""
        return self.prefixes[-1] == ONE_TO_ONE

    @property
    def is_dual(self) -> bool:
        """True if the head has both branches."""
        return len(self.prefixes) == 2

    def add_one_to_one(self) -> None:
        """Adds the second branch as a copy of the first."""
        for name in self.branch:
            setattr(self, ONE_TO_ONE + name, copy.deepcopy(getattr(self, name)))
        self.prefixes = ("", ONE_TO_ONE)

    def keep_branch(self, *, one_to_one: bool) -> None:
        """Keeps one of two branches, for inference."""
        dropped, kept = self.prefixes if one_to_one else self.prefixes[::-1]
        for name in self.branch:
            delattr(self, dropped + name)
        self.prefixes = (kept,)

    def _layers(self, prefix: str) -> list[nn.ModuleList]:
        return [getattr(self, prefix + name) for name in self.branch]

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        """Computes raw maps, one per level, from features, one per level. With two branches, the one-to-many maps come
        first."""
        raw: list[Tensor] = []
        for prefix in self.prefixes:
            inputs = [x.detach() for x in features] if prefix == ONE_TO_ONE else features
            raw += self.forward_branch(inputs, *self._layers(prefix))
        return raw

    def decode(self, raw: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Decodes raw maps; with two branches, the one-to-one branch's.

        Returns boxes float32 (B, N, 4), xyxy canvas pixels, and scores float32 (B, N, C) in [0, 1].
        """
        return self.decode_branch(raw[-len(self.strides) :])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills biases with priors. Two branches start equal, so that their first assignments agree."""
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
        """Creates the loss of the head, which shares the head's anchors: the head must be on its device already, and
        anchors that are loaded later also change the loss."""
        from models.losses.base import DualAssignmentLoss, LossSettings  # inference needs no losses

        settings = LossSettings(
            strides=tuple(self.strides),
            num_classes=self.num_classes,
            hyp=hyp,
            label_smoothing=label_smoothing,
            class_weights=class_weights,
        )
        if teacher is not None:
            settings = replace(
                settings, distilled_classes=teacher.distilled_classes, unlabeled_only=teacher.unlabeled_only
            )
        first_loss = self.branch_loss(settings)
        loss: Criterion = first_loss
        if self.is_dual:
            distilled = settings.distilled_classes if teacher is not None and teacher.is_dual else ()
            one_to_one_loss = self.branch_loss(replace(settings, one_to_one=True, distilled_classes=distilled))
            loss = DualAssignmentLoss(first_loss, one_to_one_loss)
        loss.teacher = teacher
        return loss

    def class_rows(self) -> dict[str, tuple[int, int]]:
        """Lists all layers whose output rows belong to classes: local name to (groups, rows before the classes of a
        group)."""
        return {prefix + name: rows for prefix in self.prefixes for name, rows in self.branch_class_rows().items()}


def output_bias(layer: nn.Module) -> Tensor:
    """Returns the bias of an output convolution, or of the last layer of a sequence that ends in one."""
    last = layer[-1] if isinstance(layer, nn.Sequential) else layer
    if not isinstance(last, nn.Conv2d) or last.bias is None:
        raise TypeError(f"needs a convolution with a bias, got {type(last).__name__}")
    return last.bias
