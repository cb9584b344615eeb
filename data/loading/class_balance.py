"""``--image-weights`` and ``--repeat-factor``: how often an image comes, depending on its classes."""

from __future__ import annotations

import numpy as np

from data.index.index import DatasetIndex
from utils.labels import LabelArrays
from utils.logger import get_logger
from utils.strings import counted

_LOGGED_CLASSES = 5  # number of the rarest classes in the log


def inverse_frequency_weights(counts: np.ndarray) -> np.ndarray:
    """Returns class weights float64 (C,), inversely proportional to the label counts int64 (C,), with the sum C."""
    inverse = 1 / np.maximum(counts, 1)
    return inverse * len(counts) / inverse.sum()


def image_weights(class_weights: np.ndarray, labels: LabelArrays) -> np.ndarray:
    """Returns the weight with which each image is drawn, float64 (N,).

    It is the sum of the class weights (C,), not negative, of the image's labels, without crowd regions. Images without
    labels get the mean of the others, so that the fraction of background images does not change.
    """
    offsets = labels.offsets
    is_object = ~labels.crowd
    label_weights = np.where(is_object, class_weights[labels.classes], 0.0)
    cumulative = np.concatenate([[0.0], np.cumsum(label_weights)])
    has_label = np.diff(np.concatenate([[0], np.cumsum(is_object)])[offsets]) > 0
    weights = np.diff(cumulative[offsets]).clip(min=0)
    if weights[has_label].sum() <= 0:
        return np.ones(len(offsets) - 1)
    return np.where(has_label, weights, weights[has_label].mean())


def repeat_factors(threshold: float, labels: LabelArrays, num_classes: int, weights: np.ndarray) -> np.ndarray:
    """Returns how much more often each image should come in an epoch, for rare classes: float64 (N,), at least 1.

    A class in a fraction f < ``threshold`` of the images gets the factor sqrt(threshold / f), and an image gets the
    largest factor of its classes (LVIS, Gupta et al. 2019). Crowd regions do not count. ``weights``: how often each
    image comes without these factors; f is a fraction of the images that come.
    """
    image_factors = np.ones(len(labels.offsets) - 1)
    image_counts = np.maximum(labels.images_per_class(num_classes, weights), 1)
    class_factors = np.sqrt(threshold * weights.sum() / image_counts).clip(min=1)
    is_object = ~labels.crowd
    np.maximum.at(image_factors, labels.image_of_box[is_object], class_factors[labels.classes[is_object]])
    return image_factors


def repeated_weights(threshold: float, index: DatasetIndex, weights: np.ndarray, *, noun: str) -> np.ndarray:
    """Returns ``weights`` times their `repeat_factors`, and logs what these mean for the rarest classes.

    ``noun``: what the index lists, "image" or "tile".
    """
    repeated = weights * repeat_factors(threshold, index, len(index.names), weights)
    images = index.images_per_class(len(index.names), weights)
    rarest = [c for c in np.argsort(images, kind="stable").tolist() if images[c]][:_LOGGED_CLASSES]
    mean_factors = index.images_per_class(len(index.names), repeated)[rarest] / images[rarest]
    summaries = [
        f"{index.names[c]} ({counted(round(images[c]), noun)}) {factor:.1f} times"
        for c, factor in zip(rarest, mean_factors)
    ]
    total = counted(round(repeated.sum()), noun)
    get_logger().info("--repeat-factor %g: %s per epoch; %s", threshold, total, ", ".join(summaries))
    return repeated
