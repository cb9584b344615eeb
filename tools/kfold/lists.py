"""The data set of each fold: lists of images and a YAML in the run's folder. The data set itself is never written to.

Labels in YOLO's format are read from their own files. Others are written as COCO JSON, from the index: a data set YAML
has one annotation file for each split, and a fold takes images of several.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import yaml

from data.folds import SPLITS
from data.index.index import DatasetIndex
from data.labels.yolo import YOLO
from data.spec.dataset_spec import DatasetSpec
from utils.errors import UserError
from utils.files.safe_io import write_csv, write_whole

TABLE = "folds.csv"


def write_folds(folder: Path, spec: DatasetSpec, index: DatasetIndex, group: np.ndarray, fold: np.ndarray) -> None:
    """Writes the lists of all folds to ``folder``, and last the table that says which fold each image belongs to.

    Args:
        group, fold: int64 (N,), of the images of ``index``.

    Raises UserError if labels that are not in YOLO's format, or are of joined data sets, belong to images of the same
    file name, or if a name has line breaks, or spaces around it.
    """
    names = [os.path.basename(path) for path in index.paths]
    is_yolo = all(spec.splits[split].label_format is YOLO for split in SPLITS if split in spec.splits)
    if not is_yolo and len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise UserError(
            f"{spec.source}: two images are called {twice}; with labels in COCO's or VOC's format, and in joined "
            "data sets, the images of all folds need different names"
        )
    paths = [str(index.path(i)) for i in range(len(index))]
    if broken := next((path for path in paths if path.strip().splitlines() != [path]), None):
        raise UserError(f"{spec.source}: {broken!r}: lists cannot hold such a name; rename the image and its label")
    for number in range(int(fold.max()) + 1):
        content = {"path": str(spec.root), **spec.content()}
        for split, chosen in zip(SPLITS, (fold != number, fold == number)):
            images, stem = np.flatnonzero(chosen), folder.absolute() / f"fold{number + 1}_{split}"
            content[split] = f"{stem}.txt"
            write_whole(f"{stem}.txt", "".join(f"{paths[i]}\n" for i in images.tolist()))
            if not is_yolo:
                content.setdefault("annotations", {})[split] = f"{stem}.json"
                write_whole(f"{stem}.json", json.dumps(_coco(index, images, index.names)))
        write_whole(data_of(folder, number), yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    write_csv(folder / TABLE, [("image", "group", "fold"), *zip(index.paths, group.tolist(), (fold + 1).tolist())])


def data_of(folder: Path, number: int) -> Path:
    """The data set YAML of fold ``number``, from 0."""
    return folder / f"fold{number + 1}.yaml"


def _coco(index: DatasetIndex, images: np.ndarray, names: tuple[str, ...]) -> dict[str, list[dict]]:
    annotations, truth = [], index.ground_truth()  # which has a region of each class in place of one of all
    for i in images.tolist():
        for row in range(*truth.offsets[i : i + 2]):
            annotations.append(
                {
                    "id": int(row),
                    "image_id": i,
                    "category_id": int(truth.classes[row]),
                    "bbox": truth.boxes_xywh_px[row].tolist(),
                    "area": float(truth.area_px[row]),
                    "iscrowd": int(truth.crowd[row]),
                }
            )
    sizes = index.image_hw.tolist()
    return {
        "images": [
            {"id": i, "file_name": os.path.basename(index.paths[i]), "height": sizes[i][0], "width": sizes[i][1]}
            for i in images.tolist()
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(names)],
        "annotations": annotations,
    }
