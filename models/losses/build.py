"""Which loss a model has."""

from __future__ import annotations

from torch import nn

from models.losses.anchor import AnchorLoss
from models.losses.anchor_free import AnchorFreeLoss
from models.losses.base import PairLoss
from models.losses.yolox import ObjectnessLoss
from utils.config.settings import Hyperparameters


def build_criterion(model: nn.Module, hyp: Hyperparameters, *, label_smoothing: float = 0.0) -> nn.Module:
    """The loss for the model's head, on the model's device. Anchors are copied: build it when they are final."""
    many = _branch_criterion(model, hyp, label_smoothing, one_to_one=False)
    if not model.head.is_pair:
        return many
    return PairLoss(many, _branch_criterion(model, hyp, label_smoothing, one_to_one=True), gain=hyp.one2one)


def _branch_criterion(model: nn.Module, hyp: Hyperparameters, label_smoothing: float, *, one_to_one: bool) -> nn.Module:
    head = model.head
    common = {
        "strides": model.strides,
        "num_classes": model.num_classes,
        "hyp": hyp,
        "label_smoothing": label_smoothing,
    }
    if head.kind == "anchor":
        return AnchorLoss(anchors=head.anchors, **common, one_to_one=one_to_one)
    if head.kind == "anchor_free":
        return AnchorFreeLoss(reg_max=head.reg_max, **common, one_to_one=one_to_one)
    if head.kind == "objectness":
        return ObjectnessLoss(**common, one_to_one=one_to_one)
    raise ValueError(f"no loss for a head of kind {head.kind!r}")
