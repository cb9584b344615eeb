"""Holds out validation images of the training split (``--val-fraction``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from data.folds.assign import assign_folds, class_counts
from data.folds.groups import groups_of
from data.index import DatasetIndex, IndexSettings
from data.load import load_index
from data.spec import DatasetSpec
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext, broadcast_object, torch_distributed_zero_first
from utils.errors import UserError
from utils.logger import get_logger
from utils.machine.resources import available_cores
from utils.strings import counted

MAX_FOLDS = 20  # maximum number of folds from which `validation_images` takes some
MAX_DEVIATION = 0.5  # relative deviation from the requested fraction above which a warning is logged


def index_to_divide(spec: DatasetSpec, split: str, config: TrainConfig) -> DatasetIndex:
    """Returns the index of a split that will be divided, without repeated boxes. Raises the errors of `load_split`."""
    workers = available_cores() if config.workers < 0 else config.workers
    settings = replace(IndexSettings.of_run(config, workers=workers), repeats=False)
    return load_index(spec, split, settings, max_bad=config.max_bad)


def validation_images(index: DatasetIndex, fraction: float) -> list[str]:
    """Divides the images into at most `MAX_FOLDS` folds, in which near-duplicates and copies stay together and every
    class is spread evenly, and returns the names of those in the first few: about this ``fraction`` of all. Raises
    UserError if all images are in one group."""
    group = groups_of(index, "", near_duplicates=True)
    max_folds = min(int(group.max()) + 1, MAX_FOLDS)
    if max_folds < 2:
        images = counted(len(index), "training image")
        raise UserError(f"--val-fraction: {images}: near-duplicates and copies stay together, so none can be held out")
    held_out = max(Fraction(fraction).limit_denominator(max_folds), Fraction(1, max_folds))
    fold = assign_folds(group, class_counts(index), held_out.denominator, seed=0)
    return [index.paths[i] for i in np.flatnonzero(fold < held_out.numerator).tolist()]


def _log_share(fraction: float, num_held_out: int, num_images: int) -> None:
    """Logs how many images are held out, as a warning if their share is far from ``fraction``."""
    message = "--val-fraction %g: %d of %d training images are held out for validation"
    share = num_held_out / num_images
    if abs(share - fraction) <= MAX_DEVIATION * fraction:
        get_logger().info(message, fraction, num_held_out, num_images)
        return
    message += (
        " (%.0f %%): near-duplicates and copies stay together, in groups that are too few or too large for this "
        "fraction; to choose the validation images yourself, add a 'val' split"
    )
    get_logger().warning(message, fraction, num_held_out, num_images, 100 * share)


def hold_out_validation(
    ctx: DistributedContext, config: TrainConfig, spec: DatasetSpec, names: Sequence[str]
) -> DatasetSpec:
    """Returns the data set with the validation images of ``--val-fraction``: ``names`` if a run is resumed, else newly
    chosen ones."""
    if "val" in spec.splits:
        raise UserError(
            f"--val-fraction {config.val_fraction:g}: {spec.source} has a 'val' split; leave out one of the two"
        )
    with torch_distributed_zero_first(ctx):
        if ctx.is_main and not names:
            index = index_to_divide(spec, "train", config)
            names = validation_images(index, config.val_fraction)
            _log_share(config.val_fraction, len(names), len(index))
    return spec.hold_out(broadcast_object(ctx, names))
