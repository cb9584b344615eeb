"""A data set whose objects are in YOLO txt, Pascal VOC and COCO JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

Rows = Sequence[tuple[int, int, int, int, int]]  # class, x1, y1, x2, y2 in whole pixels


def write_image(path: Path, height: int, width: int) -> None:
    """Writes an image of noise, which depends on its size alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(height * width).integers(0, 255, (height, width, 3), np.uint8)
    path.write_bytes(cv2.imencode(path.suffix, pixels)[1].tobytes())


def yolo_text(rows: Rows, height: int, width: int) -> str:
    """Returns the content of a YOLO txt file."""
    text = ""
    for c, x1, y1, x2, y2 in rows:
        shares = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
        text += f"{c} {' '.join(f'{v:.17g}' for v in shares)}\n"
    return text


def voc_text(rows: Rows, names: Sequence[str], height: int, width: int) -> str:
    """Returns the content of a Pascal VOC file."""
    objects = ""
    for c, *corners in rows:
        box = "".join(f"<{tag}>{v}</{tag}>" for tag, v in zip(("xmin", "ymin", "xmax", "ymax"), corners))
        objects += f"<object><name>{names[c]}</name><pose>x</pose><bndbox>{box}</bndbox></object>\n"
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation>{size}\n{objects}</annotation>\n"


def write_three_formats(
    root: Path, names: Sequence[str], sizes: Mapping[str, tuple[int, int]], objects: Mapping[str, Rows]
) -> None:
    """Writes images/train, labels/train, voc and instances.json. Images that ``objects`` lacks have no label file."""
    categories = [{"id": 10 * (i + 1), "name": name, "supercategory": "x"} for i, name in enumerate(names)]
    coco: dict[str, Any] = {"info": {"year": 2020}, "images": [], "annotations": [], "categories": categories}
    for number, (name, (height, width)) in enumerate(sorted(sizes.items(), reverse=True)):
        write_image(root / "images" / "train" / name, height, width)
        coco["images"].append({"id": 100 - number, "file_name": name, "height": height, "width": width})
        for c, x1, y1, x2, y2 in objects.get(name, ()):
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
            ids = {"id": len(coco["annotations"]), "image_id": 100 - number, "category_id": 10 * (c + 1)}
            coco["annotations"].append(ids | box)
        if name in objects:
            for path, text in (
                ((root / "labels" / "train" / name).with_suffix(".txt"), yolo_text(objects[name], height, width)),
                ((root / "voc" / name).with_suffix(".xml"), voc_text(objects[name], names, height, width)),
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    (root / "instances.json").write_text(json.dumps(coco))
