"""``--image-weights`` and ``--repeat-factor``: how often images are seen, by the classes that they have."""

from __future__ import annotations

import numpy as np

from data.index.index import DatasetIndex
from utils.logger import get_logger
from utils.strings import counted as number_of
from utils.structures import LabelArrays

_NAMED_CLASSES = 5  # the rarest, in the log


def inverse_frequency_weights(counts: np.ndarray) -> np.ndarray:
    """Class weights float64 (C,) of sum C, inversely proportional to the number of labels int64 (C,), at least 1."""
    inverse = 1 / np.maximum(counts, 1)
    return inverse * len(counts) / inverse.sum()


def image_weights(class_weights: np.ndarray, labels: LabelArrays) -> np.ndarray:
    """The weight with which each image is drawn, float64 (N,): the sum of the class weights (C,), not negative, of its
    labels, without crowd regions. Images without labels get the mean of the others, so that the fraction of background
    images stays the same."""
    counted, offsets = ~labels.crowd, labels.offsets
    of_label = np.where(counted, class_weights[labels.classes], 0.0)
    cumulative = np.concatenate([[0.0], np.cumsum(of_label)])
    has_label = np.diff(np.concatenate([[0], np.cumsum(counted)])[offsets]) > 0
    weights = np.diff(cumulative[offsets]).clip(min=0)
    if weights[has_label].sum() <= 0:
        return np.ones(len(offsets) - 1)
    return np.where(has_label, weights, weights[has_label].mean())


def repeat_factors(threshold: float, labels: LabelArrays, num_classes: int) -> np.ndarray:
    """How often an epoch should have each image, so that rare classes are seen more often: float64 (N,), at least 1.

    A class in a fraction f < ``threshold`` of the images gets the factor sqrt(threshold / f), an image the largest
    factor of its classes (LVIS, Gupta et al. 2019). Crowd regions do not count.
    """
    factors = np.ones(len(labels.offsets) - 1)
    of_class = np.sqrt(threshold * len(factors) / np.maximum(labels.images_per_class(num_classes), 1)).clip(min=1)
    np.maximum.at(factors, labels.image_of_box[~labels.crowd], of_class[labels.classes[~labels.crowd]])
    return factors


def logged_repeat_factors(threshold: float, index: DatasetIndex) -> np.ndarray:
    """`repeat_factors` of the images, with a line in the log."""
    factors = repeat_factors(threshold, index, len(index.names))
    images = index.images_per_class(len(index.names))
    rarest = [c for c in np.argsort(images, kind="stable").tolist() if images[c]][:_NAMED_CLASSES]
    pairs = np.unique(np.stack([index.classes, index.image_of_box], 1)[~index.crowd], axis=0)
    times = np.bincount(pairs[:, 0], factors[pairs[:, 1]], minlength=len(images))[rarest] / images[rarest]
    texts = (f"{index.names[c]} ({number_of(int(images[c]), 'image')}) {n:.1f} times" for c, n in zip(rarest, times))
    repeated = number_of(round(factors.sum()), "image")
    get_logger().info("--repeat-factor %g: %s per epoch; %s", threshold, repeated, ", ".join(texts))
    return factors
