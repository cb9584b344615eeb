"""Weights with which samples are drawn, from tiles, ``--repeat-factor`` and ``--image-weights``.

Tiles and ``--repeat-factor`` determine how many times per epoch a sample occurs (`sample_weights`), in the order of the
epoch as well as in mosaic and mixup. ``--image-weights`` draws the order of an epoch at random instead, with the
product of these weights and `image_weights`.
"""

from __future__ import annotations

import numpy as np

from data.index import DatasetIndex
from data.samples.readers import SampleReader
from data.samples.tiles import TiledIndex
from utils.errors import UserError
from utils.labels import LabelArrays
from utils.logger import get_logger
from utils.strings import counted

_LOGGED_CLASSES = 5  # number of the rarest classes in the log
_WHOLE_TOLERANCE = 1e-9  # a weight this close to a whole number differs from it by rounding errors only


def sample_weights(reader: SampleReader, *, tile_backgrounds: float, repeat_factor: float) -> np.ndarray:
    """Returns how often each training sample occurs in an epoch, on average: float64 (N,), 0 for never.

    The sum is a whole number: the number of samples in an epoch. Logs how tiles and repetitions change that number.

    Args:
        tile_backgrounds: see `tile_weights`.
        repeat_factor: threshold of `repeat_factors`; 0 to repeat no sample.

    Raises UserError as `check_tiles` does.
    """
    noun = "image"
    weights = np.ones(len(reader.sample_index))
    if reader.tiles is not None:
        noun = "tile"
        check_tiles(reader.tiles)
        weights = tile_weights(reader.tiles, tile_backgrounds)
        _log_tiles(reader.tiles, weights)
    if repeat_factor:
        weights = _repeated_weights(repeat_factor, reader.sample_index, weights, noun=noun)
    return with_whole_sum(weights)


def with_whole_sum(weights: np.ndarray) -> np.ndarray:
    """Returns ``weights``, float64 (N,), not negative, adjusted so that their sum is the nearest whole number.

    Only fractional parts change, all by the same factor: 1, 0.3, 0.3 become 1, 0.5, 0.5. Or, if a part would exceed 1,
    all distances from 1 change by the same factor: 0.2, 0.6, 0.95 become 0.36, 0.68, 0.96. The whole part of each
    weight stays, so a sample with a weight of 1 occurs exactly once in each epoch. If there are fractional parts, their
    new sum is at least 1: otherwise a sample meant for a few epochs would never occur. It then occurs in more epochs
    than its weight implies.
    """
    nearest = np.rint(weights)
    weights = np.where(np.abs(weights - nearest) < _WHOLE_TOLERANCE, nearest, weights)
    whole = np.floor(weights)
    fractions = weights - whole
    sum_of_fractions = fractions.sum()
    if sum_of_fractions == 0:
        return weights
    wanted = max(round(weights.sum()) - whole.sum(), 1)
    scale = wanted / sum_of_fractions
    if fractions.max() * scale <= 1:
        return whole + fractions * scale
    has_fraction = fractions > 0
    count = has_fraction.sum()
    # The distance of each fraction from 1 shrinks by one factor, chosen so that the sum is the wanted one.
    moved = 1 - (1 - fractions) * ((count - wanted) / (count - sum_of_fractions))
    return whole + np.where(has_fraction, moved, 0.0)


def tile_weights(tiles: TiledIndex, backgrounds: float) -> np.ndarray:
    """Returns how often each tile occurs in an epoch, on average: float64 (N,).

    A tile with an object occurs once. Tiles without one occur, all together, at most ``backgrounds`` times as often as
    those with one (`with_whole_sum` rounds less than one occurrence up to one), and never if the labels of their image
    are incomplete: they may show an object.
    """
    is_background = ~tiles.has_object & ~tiles.tile_index.incomplete
    max_backgrounds = backgrounds * tiles.has_object.sum()
    times = min(max_backgrounds / max(is_background.sum(), 1), 1.0)
    return np.where(tiles.has_object, 1.0, np.where(is_background, times, 0.0))


def check_tiles(tiles: TiledIndex) -> None:
    """Raises UserError if no tile has an object; warns if some objects are too large for any tile."""
    side = tiles.side
    if not tiles.has_object.any():
        raise UserError(f"tile {side}: no tile shows {100 * tiles.visibility:.0f} % of an object; use larger tiles")
    objects_wh = tiles.image_index.boxes_xywh_px[~tiles.image_index.crowd, 2:]
    largest_shown = np.minimum(objects_wh, side).prod(1)
    hidden = int((largest_shown < tiles.visibility * objects_wh.prod(1)).sum())
    if hidden:
        get_logger().warning(
            "tile %d: %d of %s are so large that no tile shows %.0f %% of them; they are not learned; use larger tiles",
            side,
            hidden,
            counted(len(objects_wh), "object"),
            100 * tiles.visibility,
        )


def _log_tiles(tiles: TiledIndex, weights: np.ndarray) -> None:
    """Logs the number of tiles, and how many of them an epoch has with ``weights``, float64 (N,)."""
    get_logger().info(
        "tile %d: %s of %s, %d with objects; an epoch has %d without objects",
        tiles.side,
        counted(len(tiles.tile_index), "tile"),
        counted(len(tiles.image_index), "image"),
        tiles.has_object.sum(),
        round(with_whole_sum(weights)[~tiles.has_object].sum()),
    )


def repeat_factors(threshold: float, labels: LabelArrays, num_classes: int, weights: np.ndarray) -> np.ndarray:
    """Returns the factor by which each image is repeated in an epoch, for rare classes: float64 (N,), at least 1.

    A class in a fraction f < ``threshold`` of the images gets the factor sqrt(threshold / f), and an image gets the
    largest factor of its classes (LVIS, Gupta et al. 2019). Crowd regions do not count. ``weights``: how often each
    image occurs in an epoch without these factors; f is the fraction of these occurrences.
    """
    image_factors = np.ones(len(labels.offsets) - 1)
    image_counts = np.maximum(labels.images_per_class(num_classes, weights), 1)
    class_factors = np.sqrt(threshold * weights.sum() / image_counts).clip(min=1)
    is_object = ~labels.crowd
    np.maximum.at(image_factors, labels.image_of_box[is_object], class_factors[labels.classes[is_object]])
    return image_factors


def _repeated_weights(threshold: float, index: DatasetIndex, weights: np.ndarray, *, noun: str) -> np.ndarray:
    """Returns ``weights`` times their `repeat_factors`, and logs the mean factors of the rarest classes.

    ``noun``: name of an entry of the index, "image" or "tile".
    """
    repeated = weights * repeat_factors(threshold, index, len(index.names), weights)
    images = index.images_per_class(len(index.names), weights)
    rarest = [c for c in np.argsort(images, kind="stable").tolist() if images[c]][:_LOGGED_CLASSES]
    mean_factors = index.images_per_class(len(index.names), repeated)[rarest] / images[rarest]
    summaries = [
        f"{index.names[c]} ({counted(round(images[c]), noun)}) {factor:.1f} times"
        for c, factor in zip(rarest, mean_factors)
    ]
    total = counted(round(with_whole_sum(repeated).sum()), noun)
    get_logger().info("--repeat-factor %g: %s per epoch; %s", threshold, total, ", ".join(summaries))
    return repeated


def inverse_frequency_weights(counts: np.ndarray) -> np.ndarray:
    """Returns class weights float64 (C,), inversely proportional to the label counts int64 (C,), that sum to C."""
    inverse = 1 / np.maximum(counts, 1)
    return inverse * len(counts) / inverse.sum()


def image_weights(class_weights: np.ndarray, labels: LabelArrays) -> np.ndarray:
    """Returns the weight with which each image is drawn, float64 (N,).

    The weight is the sum of the class weights (C,), not negative, over the image's labels, without crowd regions.
    Images without labels get the mean of the others, so that the fraction of background images does not change.
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
