"""Divides a data set into folds.

Legend: N images in all, K folds.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.dataset.spec import DatasetSpec, ShardSplit
from data.flat_strings import FlatStrings
from data.folds.assign import assign_folds, class_counts, rare_classes
from data.folds.groups import groups_of
from data.folds.held_out import scan_settings
from data.index.index import DatasetIndex, concatenated
from data.index.load import load_index
from engine.evaluation.fitness import Fitness
from tools.experiment.experiment import SPLITS
from tools.kfold.write_folds import FOLDS_CSV, write_folds
from utils.config.search_settings import KfoldConfig
from utils.errors import UserError
from utils.logger import get_logger
from utils.strings import counted


def make_folds(config: KfoldConfig, spec: DatasetSpec, folder: Path, fitness: Fitness) -> None:
    """Divides the training and validation images, unless ``folder`` already contains the folds.

    Raises UserError if they cannot be divided, or a fold would have nothing to score.
    """
    if (folder / FOLDS_CSV).is_file():
        return
    spec.split("train")
    _check_no_shards(spec)
    index = joined_index(spec, config)
    group = groups_of(index, config.groups, config.near_duplicates)
    fold = assign_folds(group, class_counts(index), config.folds, config.seed)
    _check_scorable(index, fitness, group=group, fold=fold, num_folds=config.folds)  # before any fold is trained
    warning = rare_classes(index, config.folds)
    if warning:
        get_logger().warning("%s", warning)
    # Each training selects classes itself.
    all_classes = _with_all_classes(index, spec, config) if spec.classes or spec.class_of else index
    write_folds(folder, spec, all_classes, group=group, fold=fold)
    images = counted(len(index), "image")
    groups = counted(group.max() + 1, "group")
    get_logger().info("%s in %s, %d folds; lists: %s", images, groups, config.folds, folder)


def joined_index(spec: DatasetSpec, config: KfoldConfig) -> DatasetIndex:
    """Joins the usable images of `SPLITS` into one split, with each image once. Raises the errors of `load_index`."""
    indexes = [load_index(spec, split, scan_settings(config)) for split in SPLITS if split in spec.splits]
    paths = [os.path.normpath(path) for index in indexes for path in index.paths]
    joined = replace(indexes[0], **concatenated(indexes), paths=FlatStrings.of(paths), image_ids=None, category_ids=())
    first_position: dict[str, int] = {}
    for position, path in enumerate(paths):
        first_position.setdefault(path, position)
    return joined.take(np.array(list(first_position.values())))


def _check_no_shards(spec: DatasetSpec) -> None:
    """Raises UserError if any split of the data set, or of the data sets that it joins, is in shards."""
    for split in spec.splits:
        if any(isinstance(part.split(split), ShardSplit) for part in spec.parts_of(split)):
            raise UserError(f"{spec.source}: is in shards; folds are lists of files, so name the folder of the images")


def _check_scorable(
    index: DatasetIndex, fitness: Fitness, *, group: np.ndarray, fold: np.ndarray, num_folds: int
) -> None:
    """Raises UserError if a fold has no object that ``fitness`` counts. ``group``, ``fold``: int64 (N,)."""
    counts = class_counts(index)
    objects = counts.sum(1) if fitness.class_index is None else counts[:, fitness.class_index]
    empty = np.flatnonzero(np.bincount(fold, objects, minlength=num_folds) == 0)
    if len(empty):
        missing = "object" if fitness.class_index is None else "object of this class"
        raise UserError(
            f"--folds {num_folds} --fitness {fitness.name}: fold {empty[0] + 1} has no {missing} to score; "
            f"{len(np.unique(group[objects > 0]))} of {group.max() + 1} groups of images have one; use fewer folds"
        )


def _with_all_classes(index: DatasetIndex, spec: DatasetSpec, config: KfoldConfig) -> DatasetIndex:
    """Returns the images of ``index`` with the boxes of all classes."""
    labeled = joined_index(spec.as_labeled(), replace(config, single_cls=False))
    position_of = {path: position for position, path in enumerate(labeled.paths)}
    return labeled.take(np.array([position_of[path] for path in index.paths], np.int64))
