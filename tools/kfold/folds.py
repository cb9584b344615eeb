"""Divides a data set into folds, and writes the lists, the labels and the YAML for training each, and a table of all.

Folds are numbered from 1 in file names (`fold_name`) and messages, from 0 in the code. Legend: N images, K folds.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.dataset.spec import DatasetSpec, FilesSplit, ShardSplit
from data.flat_strings import FlatStrings
from data.folds.assign import assign_folds, class_counts, rare_classes
from data.folds.groups import groups_of
from data.folds.held_out import index_to_divide
from data.index.index import DatasetIndex, concatenated
from data.labels.yolo import YOLO
from data.listing.images import check_rows
from engine.evaluation.fitness import Fitness
from tools.experiment.experiment import SPLITS
from utils.config.tool_settings import KfoldConfig
from utils.errors import UserError
from utils.files.paths import relative_name
from utils.files.safe_io import write_csv, write_whole
from utils.logger import get_logger
from utils.strings import counted

FOLDS_CSV = "folds.csv"


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
    """Joins the usable images of `SPLITS` into one split, with each image once. Raises the errors of `load_split`."""
    indexes = [index_to_divide(spec, split, config) for split in SPLITS if split in spec.splits]
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


def write_folds(folder: Path, spec: DatasetSpec, index: DatasetIndex, *, group: np.ndarray, fold: np.ndarray) -> None:
    """Writes a YAML and lists of images for each fold to ``folder``, and finally the table with the fold of each image.
    If the table exists, all other files do, even after a power failure.

    Labels in YOLO's format are read from their own files. Others are written as COCO JSON, from the index, because a
    data set YAML has one annotation file for each split, and a fold takes images from several.

    ``group``, ``fold``: int64 (N,), group and fold of each image of ``index``. Raises UserError for a name with line
    breaks or outer spaces.
    """
    paths = [str(index.path(i)) for i in range(len(index))]
    check_rows(paths)
    source_splits = [spec.splits[name] for name in SPLITS if name in spec.splits]
    has_label_files = all(isinstance(split, FilesSplit) and split.label_format is YOLO for split in source_splits)
    for number in range(int(fold.max()) + 1):
        # With the folder of the data set, no image's name is the end of another's.
        base = spec.root if has_label_files else spec.root.parent
        content: dict[str, Any] = {"path": str(base), **spec.content()}
        annotations: dict[str, str] = {}
        for split, images in (("train", np.flatnonzero(fold != number)), ("val", np.flatnonzero(fold == number))):
            file = f"{folder.absolute()}/{fold_name(number)}_{split}"
            content[split] = f"{file}.txt"
            write_whole(content[split], "".join(f"{paths[i]}\n" for i in images.tolist()), durable=True)
            if not has_label_files:
                annotations[split] = f"{file}.json"
                write_whole(annotations[split], json.dumps(_coco_content(index, images, base)), durable=True)
        if annotations:
            content["annotations"] = annotations
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_whole(data_of(folder, number), text, durable=True)
    rows = zip(index.paths, group.tolist(), (fold + 1).tolist(), strict=True)
    write_csv(folder / FOLDS_CSV, [("image", "group", "fold"), *rows], durable=True)


def data_of(folder: Path, number: int) -> Path:
    """Returns the path of the data set YAML for fold ``number``."""
    return folder / f"{fold_name(number)}.yaml"


def fold_name(number: int) -> str:
    """Returns the name of fold ``number`` in file names, and of the folder of its training."""
    return f"fold{number + 1}"


def _coco_content(index: DatasetIndex, images: np.ndarray, base: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns COCO JSON for ``images``, int64 (n,), whose names are relative to ``base``.

    An image with an unusable label gets an unusable annotation. Otherwise its tiles without objects would count as
    background, and so would the image in a training on some of the classes.
    """
    truth = index.ground_truth()  # splits an ignore region of all classes into one of each class
    rows = np.flatnonzero(np.isin(truth.image_of_box, images))
    columns = {
        "id": rows,
        "image_id": truth.image_of_box[rows],
        "category_id": truth.classes[rows],
        "bbox": truth.boxes_xywh_px[rows],
        "area": truth.area_px[rows],
        "iscrowd": truth.crowd[rows].astype(int),
    }
    annotations = [dict(zip(columns, values)) for values in zip(*(column.tolist() for column in columns.values()))]
    incomplete = images[index.incomplete[images]]
    unused_id = len(truth.classes)
    for number, i in enumerate(incomplete.tolist(), unused_id):
        annotations.append({"id": number, "image_id": i, "category_id": None, "bbox": None})
    entries = []
    for i in images.tolist():
        height, width = index.image_hw[i].tolist()
        entries.append({"id": i, "file_name": relative_name(index.path(i), base), "height": height, "width": width})
    categories = [{"id": number, "name": name} for number, name in enumerate(index.names)]
    return {"images": entries, "categories": categories, "annotations": annotations}
