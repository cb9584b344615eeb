"""What the losses of all heads share.

A loss returns sums over a shard of the batch and one normalizer (`LossOutput`). No loss waits for the device or has a
shape that depends on values. Images contribute independently, so the sums of shards add up to the whole batch's.

Label smoothing (Szegedy et al. 2016) spreads the part eps of a positive cell's class score evenly over all C classes.
The sum over classes stays the same, so it changes neither the normalizer nor the background, and nothing for one class.

Reproducibility: the forward pass scatters by maximum only, which does not depend on the order. In the backward pass,
selecting rows of logits becomes an indexed addition. In the anchor-free loss only one term of each sum is not 0; in the
anchor loss there may be several (two targets in one cell), and CUDA fixes their order only under
torch.use_deterministic_algorithms.

Legend: B images, K target slots, C classes, S any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from utils.boxes import cxcywh_to_xyxy, scale_boxes
from utils.config.settings import Hyperparameters
from utils.structures import LossOutput, Targets, pad_targets

if TYPE_CHECKING:
    from models.losses.distillation import Teacher
    from models.losses.regions import IgnoredCells

NO_OBJECT = -1e4  # a logit whose softplus is 0 in any floating-point type


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the losses of all heads depend on."""

    strides: tuple[int, ...]
    num_classes: int
    hyp: Hyperparameters
    label_smoothing: float = 0.0
    one_to_one: bool = False  # whether a target is assigned to one cell
    class_weights: Tensor | None = None  # float32 (C,), of the classes' cross-entropies; None: 1, see `class_weights`
    taught: tuple[int, ...] = ()  # classes of which a teacher gives targets, see `models.losses.distillation`
    unlabeled_only: bool = False  # whether it does so only where an image does not label them


class Criterion(nn.Module):
    """Base of the losses."""

    settings: LossSettings
    names: tuple[str, ...]  # of ``LossOutput.parts``
    gains: tuple[float, ...]  # of the same terms

    def __init__(self) -> None:
        super().__init__()
        self.teacher: Teacher | None = None

    def forward(
        self, raw: Sequence[Tensor], targets: Targets, teacher_maps: Sequence[Tensor] | None = None
    ) -> LossOutput:
        """The loss of a shard of the batch.

        Args:
            raw: maps of the head, one per level, on the device of the targets' rows.
            teacher_maps: `teacher_maps` of the same images; only a loss with a teacher reads them.
        """
        raise NotImplementedError

    def teacher_maps(self, images: Tensor) -> list[Tensor] | None:
        """The maps of the teacher for ``images`` (B, 3, H, W); None without one."""
        return None if self.teacher is None else self.teacher(images)

    def ignored_cells(self, raw: Sequence[Tensor], targets: Targets) -> IgnoredCells | None:
        """The cells in regions that are to be ignored; None if there are no regions."""
        if targets.ignore is None:
            return None
        from models.losses.regions import ignored_cells

        return ignored_cells(targets.ignore, raw, self.settings.strides, self.settings.num_classes)

    def weighted(self, terms: Sequence[Tensor], normalizer: Tensor) -> LossOutput:
        """The output of a loss that is the sum of ``terms``, () each, times their gains."""
        parts = [gain * term for gain, term in zip(self.gains, terms, strict=True)]
        return LossOutput(sum(parts), normalizer, torch.stack(parts).detach())

    def compile_terms(self) -> None:
        """Compiles what training, not validation, computes on the device, for all sizes at once. By default nothing is
        compiled."""

    def set_closing(self, closing: bool) -> None:
        """Called with True in the last epochs, which have no mosaic: a loss may then refine its boxes."""


def class_weights(counts: np.ndarray, power: float) -> Tensor:
    """Weights float32 (C,) of the classes' cross-entropies, proportional to 1 / frequency ** power (1: Cui et al. 2019;
    1/2: Mahajan et al. 2018).

    A weight multiplies the whole term of its class, in the background too, so that scores stay unbiased. Each cell has
    one such term of every class, however frequent: therefore the mean over classes is 1 (over boxes, a class with one
    box could outweigh all others). A class without boxes has the weight 1 and does not count.

    Args: counts: int (C,), boxes.
    """
    weights, seen = np.ones(len(counts)), counts > 0
    inverse = (counts[seen] / counts.sum()) ** -float(power)
    weights[seen] = inverse * len(inverse) / inverse.sum()
    return torch.from_numpy(weights.astype(np.float32))


def canvas_targets(level: Tensor, stride: int, targets: Tensor, max_targets: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets in a fixed shape: labels int64 (B, K), boxes (B, K, 4) xyxy canvas pixels, and mask bool (B, K), False
    for padding.

    Args:
        level: raw map (B, D, h, w) of one level, ``stride`` pixels per cell.
        targets: (M, 6), the rows of `Targets`; ``max_targets`` is theirs.
    """
    padded, mask = pad_targets(targets, level.shape[0], max_targets)
    boxes = scale_boxes(cxcywh_to_xyxy(padded[..., 1:]), level.shape[3] * stride, level.shape[2] * stride)
    return padded[..., 0].long(), boxes, mask


def smooth_labels(scores: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
    """Class targets (*S, C): ``scores`` (*S) at ``labels`` (*S), a part of each spread over all classes."""
    num_classes, eps = settings.num_classes, settings.label_smoothing
    one_hot = labels[..., None] == torch.arange(num_classes, device=labels.device)
    return scores[..., None] * (one_hot * (1 - eps) + eps / num_classes)
