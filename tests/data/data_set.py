"""A data set that a test writes file by file and opens as commands do."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
import yaml

from data.index import DatasetIndex, IndexSettings
from data.load import load_index
from data.open import open_data
from data.spec import DatasetSpec, DataSource
from utils.distributed.context import DistributedContext
from utils.errors import UserError

BOX = "0 0.5 0.5 0.2 0.2\n"
HW = (60, 80)  # of an image, unless a test says otherwise


@functools.cache
def image_bytes(suffix: str = ".png", hw: tuple[int, int] = HW) -> bytes:
    """Returns an image of noise."""
    pixels = np.random.default_rng(hw[0] * hw[1]).integers(0, 255, (*hw, 3), np.uint8)
    return cv2.imencode(suffix, pixels)[1].tobytes()


def voc(*objects: tuple[str, float, float, float, float], hw: tuple[int, int] | None = HW) -> str:
    """Returns a Pascal VOC file of objects: name, xmin, ymin, xmax, ymax."""
    size = "" if hw is None else f"<size><width>{hw[1]}</width><height>{hw[0]}</height></size>"
    rows = ""
    for name, *corners in objects:
        box = "".join(f"<{tag}>{v}</{tag}>" for tag, v in zip(("xmin", "ymin", "xmax", "ymax"), corners))
        rows += f"<object><name>{name}</name><bndbox>{box}</bndbox></object>\n"
    return f"<annotation>{size}\n{rows}</annotation>"


def coco(
    entries: Sequence[tuple[str, Sequence[Sequence[float]]]],
    *,
    categories: Sequence[dict[str, Any]] = ({"id": 1, "name": "a"}, {"id": 2, "name": "b"}),
    hw: tuple[int, int] = HW,
) -> dict[str, Any]:
    """Returns a COCO JSON of file names with their boxes (category id, x, y, w, h). Image ids begin at 100."""
    images = [
        {"id": 100 + i, "file_name": name, "height": hw[0], "width": hw[1]} for i, (name, _) in enumerate(entries)
    ]
    boxes = [(100 + i, *box) for i, (_, boxes) in enumerate(entries) for box in boxes]
    annotations = [
        {"id": number, "image_id": image_id, "category_id": category, "bbox": bbox}
        for number, (image_id, category, *bbox) in enumerate(boxes)
    ]
    return {"images": images, "annotations": annotations, "categories": list(categories)}


class Counts(NamedTuple):
    """What became of the images and labeled objects of a split."""

    used_images: int
    used_objects: int
    lost_images: int = 0
    lost_objects: int = 0


class DataSet:
    """A data set in the folder ``root``, with the YAML data.yaml and the classes a and b."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data.yaml"

    def images(self, *names: str, hw: tuple[int, int] = HW) -> None:
        for name in names:
            self.file(name, image_bytes(Path(name).suffix, hw))

    def file(self, name: str, content: str | bytes | dict[str, Any] = BOX) -> Path:
        """Writes a file; a dict becomes JSON."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def write(self, files: str) -> None:
        """Writes images and label files; "labels/x.txt:2" has two boxes, a label file without a number has one."""
        for name, _, number in (word.partition(":") for word in files.split()):
            if name.lower().endswith((".txt", ".xml")):
                objects = [("a", 5, 5, 20, 20 + i) for i in range(int(number or 1))]
                rows = "".join(f"0 0.5 0.5 0.2 0.{2 + i}\n" for i in range(len(objects)))
                self.file(name, rows if name.lower().endswith(".txt") else voc(*objects))
            else:
                self.images(name)

    def pairs(self, *names: str, rows: str = BOX) -> None:
        """Writes images ``images/NAME.png``, each with its YOLO txt in ``labels``."""
        for name in names:
            self.images(f"images/{name}.png")
            self.file(f"labels/{name}.txt", rows)

    def three_formats(self, objects: dict[str, list[tuple]]) -> None:
        """Writes images of the split train, by stem with their objects (class, x, y, w, h in pixels), which are in YOLO
        txt, in the folder voc, and in all.json."""
        entries = []
        for stem, rows in objects.items():
            centers = [(c, (x + w / 2) / 80, (y + h / 2) / 60, w / 80, h / 60) for c, x, y, w, h in rows]
            self.pairs(f"train/{stem}", rows="".join(" ".join(map(repr, row)) + "\n" for row in centers))
            self.file(f"voc/{stem}.xml", voc(*(("ab"[c], x, y, x + w, y + h) for c, x, y, w, h in rows)))
            entries.append((f"{stem}.png", [(c + 1, *box) for c, *box in rows]))
        self.file("all.json", coco(entries[::-1]))

    def yaml(self, **content: Any) -> Path:
        """Writes the YAML, by default with the splits images/train and images/val."""
        if not content.keys() & {"train", "val", "test"}:
            content |= {"train": "images/train", "val": "images/val"}
        self.file("data.yaml", yaml.safe_dump({"names": ["a", "b"]} | content, allow_unicode=True, sort_keys=False))
        return self.data

    def index(self, split: str = "train", **options: Any) -> DatasetIndex:
        return load(self.data, split, **options)

    def counts(self, split: str = "train", **options: Any) -> Counts:
        return counts(self.index(split, **options))


def open_set(data: Path | str, splits: Iterable[str] = (), **options: Any) -> DatasetSpec:
    """Opens a data set. ``options``: of `DataSource`."""
    return open_data(DataSource(str(data), tuple(splits), **options), DistributedContext.single())


def load(data: Path | str | DatasetSpec, split: str = "train", *, max_bad: float = 1.0, **options: Any) -> DatasetIndex:
    """Opens a data set and reads a split, whatever it loses, or ``max_bad``. ``options``: of `IndexSettings`."""
    spec = data if isinstance(data, DatasetSpec) else open_set(data, [split])
    settings = IndexSettings(**{"progress": False, "workers": 0} | options)
    return load_index(spec, split, settings, max_bad=max_bad)


def counts(index: DatasetIndex) -> Counts:
    report = index.report
    return Counts(report.used_images, report.used_objects, report.lost_images, report.lost_objects)


def told(index: DatasetIndex) -> str:
    """Returns the boxes of each image, the numbers of lost images and objects, and where the findings about them are,
    such as "images/x.png:1 lost 0+2 labels/y.txt"."""
    report = index.report
    words = [f"{name}:{count}" for name, count in num_boxes(index).items()]
    if report.lost_images or report.lost_objects:
        places = [finding.where for finding in report.findings if finding.lost_images or finding.lost_objects]
        words += [f"lost {report.lost_images}+{report.lost_objects}", *places]
    return " ".join(words)


def places(index: DatasetIndex, kind: str) -> list[str]:
    """Returns where the findings of a kind are."""
    return [finding.where for finding in index.report.findings if finding.kind == kind]


def num_boxes(index: DatasetIndex) -> dict[str, int]:
    """Returns the number of boxes of each image, by name."""
    return dict(zip(index.paths, np.diff(index.offsets).tolist(), strict=True))


def boxes(index: DatasetIndex) -> dict[str, list[tuple]]:
    """Returns the class name and x, y, w, h in pixels of each box, by the image's stem."""
    result = {}
    for i, path in enumerate(index.paths):
        rows = slice(index.offsets[i], index.offsets[i + 1])
        names = [index.names[c] if c >= 0 else "" for c in index.classes[rows].tolist()]
        sides = np.round(index.boxes_xywh_px[rows], 2).tolist()
        result[Path(path).stem] = [(name, *box) for name, box in zip(names, sides, strict=True)]
    return result


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch, user: int = 12345) -> None:
    """Makes ``folder`` one of another user than this process's, which only root can do in earnest."""
    if os.getuid() == 0:
        os.chown(folder, user, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: user)


def refusal(call: Callable[[], object]) -> str:
    """Returns the message with which a call is refused, which must be a single line."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert message.strip()
    assert "\n" not in message
    return message
