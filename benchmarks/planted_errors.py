"""A copy of a data set of YOLO txt labels with planted errors, for `label_errors.py`.

Of all boxes, equal numbers are dropped, moved by 30 % of their width and height (in a random diagonal direction, kept
inside the image), and given another class. Copies of training images, encoded again at 3/4 of their size, are added to
the other splits with their correct labels.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import yaml

from data.image_io.decode import read_image
from data.index.dataset_yaml import load_dataset_spec
from data.index.files import list_split
from data.labels.label_format import FileStamp

KINDS = ("dropped", "moved", "swapped")
SHIFT = 0.3  # of the width and height of a box


class Planted(NamedTuple):
    """An error. Boxes are cx, cy, w, h as fractions of the image."""

    kind: str
    image: str  # relative to the copy
    box: list[float]  # as labeled now; of a dropped box, as it was
    class_id: int  # as labeled now; of a dropped box, as it was


def plant(data: str, out: Path, *, fraction: float, duplicates: int, seed: int) -> tuple[Path, list[Planted], list]:
    """Writes the copy to the new folder ``out``.

    Returns:
        its YAML, the planted errors, and the pairs of names of duplicated images.
    """
    spec, rng = load_dataset_spec(data), np.random.default_rng(seed)
    planted: list[Planted] = []
    copied: dict[str, list[tuple[str, list[list[float]]]]] = {}
    for split in spec.splits:
        listing = list_split(spec, split)
        for kind in ("images", "labels"):
            (out / kind / split).mkdir(parents=True)
        copied[split] = []
        for image, label in zip(listing.images, listing.labels):
            name = f"images/{split}/{Path(image.name).name}"
            shutil.copyfile(spec.root / image.name, out / name)
            copied[split].append((name, _rows(spec.root / label.name, label.stamp)))
    boxes = [
        (split, i, j) for split, files in copied.items() for i, (_, rows) in enumerate(files) for j in range(len(rows))
    ]
    chosen = rng.permutation(len(boxes))[: 3 * round(fraction * len(boxes))].reshape(3, -1)
    kind_of = {boxes[n]: kind for kind, numbers in zip(KINDS, chosen.tolist()) for n in numbers}
    for split, files in copied.items():
        for i, (name, rows) in enumerate(files):
            kept = []
            for j, row in enumerate(rows):
                kind = kind_of.get((split, i, j))
                row = _damaged(row, kind, len(spec.names), rng)
                if kind:
                    planted.append(Planted(kind, name, row[1:], int(row[0])))
                if kind != "dropped":
                    kept.append(row)
            _write_rows(out / _label_name(name), kept)
    others = [split for split in copied if split != "train"]
    pairs = []
    for n, i in enumerate(rng.permutation(len(copied["train"]))[:duplicates].tolist()):
        name, rows = copied["train"][i]
        target = f"images/{others[n % len(others)]}/copy{n}.jpg"
        small = cv2.resize(read_image(out / name), None, fx=0.75, fy=0.75, interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(out / target), small[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 80])
        _write_rows(out / _label_name(target), rows)
        pairs.append([name, target])
    path = out / "data.yaml"
    content = {split: f"images/{split}" for split in copied} | {"names": list(spec.names)}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    (out / "planted.json").write_text(json.dumps({"errors": [p._asdict() for p in planted], "duplicates": pairs}))
    return path, planted, pairs


def _label_name(image: str) -> str:
    return str(Path(image.replace("images/", "labels/", 1)).with_suffix(".txt"))


def _rows(path: Path, stamp: FileStamp | None) -> list[list[float]]:
    if stamp is None:
        return []
    return [[float(v) for v in line.split()] for line in path.read_text().splitlines() if line.strip()]


def _write_rows(path: Path, rows: list[list[float]]) -> None:
    path.write_text("".join(f"{int(c)} " + " ".join(f"{v:.6f}" for v in box) + "\n" for c, *box in rows))


def _damaged(row: list[float], kind: str | None, classes: int, rng: np.random.Generator) -> list[float]:
    class_id, cx, cy, w, h = row
    if kind == "swapped":
        class_id = (class_id + int(rng.integers(1, classes))) % classes
    if kind == "moved":
        cx, cy = (
            float(np.clip(center + SHIFT * side * rng.choice((-1, 1)), side / 2, 1 - side / 2))
            for center, side in ((cx, w), (cy, h))
        )
    return [class_id, cx, cy, w, h]
