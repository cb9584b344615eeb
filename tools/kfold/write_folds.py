"""Writes the folds of a data set: the lists, the labels and the YAML for training each, and the table of all.

Folds are numbered from 1 in file names (`fold_name`) and messages, from 0 in the code.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.dataset.spec import DatasetSpec, FilesSplit
from data.index.index import DatasetIndex
from data.labels.yolo import YOLO
from data.listing.images import check_rows
from tools.experiment.experiment import SPLITS
from utils.errors import UserError
from utils.files.safe_io import write_csv, write_whole

FOLDS_CSV = "folds.csv"
FOLD_OUTPUTS = "fold*"  # pattern of this table, the lists and labels of each fold, and the folders of trainings


def write_folds(folder: Path, spec: DatasetSpec, index: DatasetIndex, *, group: np.ndarray, fold: np.ndarray) -> None:
    """Writes a YAML and lists of images for each fold to ``folder``, and finally the table with the fold of each image.
    If the table exists, all other files do, even after a power failure.

    The data set itself is not changed. Labels in YOLO's format are read from their own files. Others are written as
    COCO JSON, from the index, because a data set YAML has one annotation file for each split, and a fold takes images
    from several.

    ``group``, ``fold``: int64 (N,), group and fold of each image of ``index``. Raises UserError if two images from
    joined data sets, or with labels in a format other than YOLO's, have the same file name, or if a name contains line
    breaks or has spaces around it.
    """
    paths = [str(index.path(i)) for i in range(len(index))]
    check_rows(paths)
    source_splits = [spec.splits[name] for name in SPLITS if name in spec.splits]
    has_label_files = all(isinstance(split, FilesSplit) and split.label_format is YOLO for split in source_splits)
    if not has_label_files:
        _check_names_differ(paths, spec)
    for number in range(int(fold.max()) + 1):
        images = {"train": np.flatnonzero(fold != number), "val": np.flatnonzero(fold == number)}
        content = {"path": str(spec.root), **spec.content(), **_write_lists(folder, number, images, paths)}
        if not has_label_files:
            content["annotations"] = _write_annotations(folder, number, images, index)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_whole(data_of(folder, number), text, durable=True)
    rows = zip(index.paths, group.tolist(), (fold + 1).tolist(), strict=True)
    write_csv(folder / FOLDS_CSV, [("image", "group", "fold"), *rows], durable=True)


def _write_lists(folder: Path, number: int, images: dict[str, np.ndarray], paths: Sequence[str]) -> dict[str, str]:
    """Writes the image list of each split of a fold, and returns the files by split. ``images``: int64 (n,) by
    split."""
    lists: dict[str, str] = {}
    for split, numbers in images.items():
        lists[split] = f"{folder.absolute()}/{fold_name(number)}_{split}.txt"
        write_whole(lists[split], "".join(f"{paths[i]}\n" for i in numbers.tolist()), durable=True)
    return lists


def _write_annotations(folder: Path, number: int, images: dict[str, np.ndarray], index: DatasetIndex) -> dict[str, str]:
    """Writes the labels of each split of a fold as COCO JSON, and returns the files by split. ``images``: see
    `_write_lists`."""
    annotations: dict[str, str] = {}
    for split, numbers in images.items():
        annotations[split] = f"{folder.absolute()}/{fold_name(number)}_{split}.json"
        write_whole(annotations[split], json.dumps(_coco_content(index, numbers)), durable=True)
    return annotations


def data_of(folder: Path, number: int) -> Path:
    """Returns the path of the data set YAML for fold ``number``."""
    return folder / f"{fold_name(number)}.yaml"


def fold_name(number: int) -> str:
    """Returns the name of fold ``number`` in file names, and of the folder of its training."""
    return f"fold{number + 1}"


def _check_names_differ(paths: Sequence[str], spec: DatasetSpec) -> None:
    """Raises UserError for two images with the same file name, which a COCO JSON could not tell apart."""
    for name, count in Counter(map(os.path.basename, paths)).items():
        if count > 1:
            raise UserError(
                f"{spec.source}: two images are called {name}; with labels in COCO's or VOC's format, and in joined "
                "data sets, the images of all folds need different names"
            )


def _coco_content(index: DatasetIndex, images: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    """Returns COCO JSON for ``images``, int64 (n,).

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
        entries.append({"id": i, "file_name": os.path.basename(index.paths[i]), "height": height, "width": width})
    categories = [{"id": number, "name": name} for number, name in enumerate(index.names)]
    return {"images": entries, "categories": categories, "annotations": annotations}
