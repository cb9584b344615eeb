"""Writes a data set as a COCO JSON and a list of images for each split, and a YAML. The images stay where they are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from data.index import DatasetIndex, IndexSettings
from data.listing import check_rows
from data.load import load_index
from data.open import open_data
from data.spec import SPLITS, DataSource
from tools.convert.hugging_face import LabeledImage, find_tables, read_tables
from tools.train_line import train_line
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import check_new_path, normal_path, relative_name
from utils.files.safe_io import write_whole


def convert(source: str, out: Path, *, max_bad: float = TrainConfig.max_bad) -> str:
    """Writes ``source``, anything that --data reads or a folder of Hugging Face, as the data set ``out``: ``out.json``
    or a JSON for each split, lists of their images, ``out.yaml``, and the folder ``out`` for images from parquet files.

    Logs what is read and lost, and returns the command that trains. Raises UserError, and leaves no
    file behind, if the data set cannot be read, or if more than the fraction ``max_bad`` is lost.
    """
    if out.suffix.lower() != ".json":
        raise UserError(f"{out}: the output must end in .json")
    out = normal_path(out)
    tables = find_tables(Path(source))
    image_folder = out.with_suffix("")  # of images in parquet files
    for path in (out, out.with_suffix(".yaml"), *([image_folder] if tables else [])):
        check_new_path(path)
    created: list[Path] = [image_folder] if tables else []
    try:
        content: dict[str, Any] = {}
        if tables:
            root = normal_path(source)
            root = root if root.is_dir() else root.parent
            splits = read_tables(tables, root, image_folder)
            found = {box["name"] for images in splits.values() for image in images for box in image.boxes}
            names = sorted(found - {None})
        else:
            spec = open_data(DataSource(source), DistributedContext.single())
            root = spec.root
            indexes = {split: load_index(spec, split, max_bad=max_bad) for split in spec.splits}
            splits = {split: list(_images_of(index)) for split, index in indexes.items()}
            names = list(spec.names)
            content = {key: value for key, value in spec.content().items() if key not in ("names", "classes")}
        _write(splits, names, content, root, out, created)
        if tables:  # is checked as training checks it
            spec = open_data(DataSource(str(out.with_suffix(".yaml"))), DistributedContext.single())
            for split in spec.splits:
                load_index(spec, split, IndexSettings(use_cache=False), max_bad=max_bad)
    except BaseException:
        for path in created:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        raise
    return train_line(out.with_suffix(".yaml"), list(splits), max_bad=max_bad)


def _images_of(index: DatasetIndex) -> Iterator[LabeledImage]:
    """Yields the images of an index with their boxes."""
    truth = index.ground_truth()  # splits an ignore region of all classes into one of each class
    for i in range(len(index)):
        boxes = [
            {"name": index.names[c], "bbox": bbox, "area": area, "iscrowd": int(crowd)}
            for c, bbox, area, crowd in zip(
                *(
                    values[truth.offsets[i] : truth.offsets[i + 1]].tolist()
                    for values in (truth.classes, truth.boxes_xywh_px, truth.area_px, truth.crowd)
                )
            )
        ]
        height, width = index.image_hw[i].tolist()
        yield LabeledImage(Path(index.path(i)), boxes, (height, width))


def _write(
    splits: dict[str, list[LabeledImage]],
    names: Sequence[str],
    content: dict[str, Any],
    root: Path,
    out: Path,
    created: list[Path],
) -> None:
    """Writes a JSON and a list of images for each split, and the YAML; adds them to ``created``. Images that nobody has
    labeled are in the lists alone. Raises UserError for a path that a list cannot contain."""
    # Images in this folder are named by more than their file name, which may not be unique.
    base = root.parent if out.is_relative_to(root) else out.parent
    category_ids = {name: number for number, name in enumerate(names, 1)}

    def write(file: Path, text: str) -> str:
        check_new_path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        created.append(file)
        write_whole(file, text)
        return relative_name(file, base)

    lists: dict[str, str] = {}
    annotations_of: dict[str, str] = {}
    for split in (split for split in SPLITS if splits.get(split)):
        records: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        rows: list[str] = []
        for image_id, image in enumerate(splits[split], 1):
            name = relative_name(image.path, base)
            rows.append(str(image.path) if name.startswith("../") else name)
            if image.is_labeled:
                size = dict(zip(("height", "width"), image.size_hw or ()))
                records.append({"id": image_id, "file_name": name, **size})
            for box in image.boxes:
                ids = {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_ids.get(box["name"])}
                annotations.append(ids | {key: value for key, value in box.items() if key != "name"})
        check_rows(rows)
        categories = [{"id": number, "name": name} for name, number in category_ids.items()]
        coco = {"images": records, "annotations": annotations, "categories": categories}
        file = out if len(splits) == 1 else out.with_name(f"{out.stem}-{split}.json")
        annotations_of[split] = write(file, json.dumps(coco))
        lists[split] = write(file.with_suffix(".txt"), "".join(f"{row}\n" for row in rows))
    content = {"path": os.path.relpath(base, out.parent), **lists, "annotations": annotations_of} | content
    content["names"] = list(names)
    write(out.with_suffix(".yaml"), yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
