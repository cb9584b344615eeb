"""Detections as annotation files that labeling tools import, one class a format (`FORMATS`).

All files describe the images in the folder ``images`` next to them, so that the folder is a data set that can be moved,
zipped and trained on. Boxes are in pixels of the upright image, from its top left corner, unless the format asks for
something else; none of the formats but COCO and Label Studio has scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import yaml

from utils.boxes import scale_boxes, xyxy_to_xywh
from utils.drawing.yolo_labels import FRACTION_DIGITS, write_yolo_labels
from utils.files.safe_io import write_whole
from utils.strings import image_ids_of
from utils.structures import DetectionTable

# Of pixels: the precision of a float32 box. With boxes rounded to thousandths of a pixel, one of BCCD crossed IoU 0.95
# (AP 0.5929 became 0.5935).
BOX_DIGITS = 5
SCORE_DIGITS = 8
_NOT_IN_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class AnnotatedImage:
    """An image and what was found in it."""

    name: str  # file in the folder images
    image_hw: tuple[int, int]  # upright, pixels
    found: DetectionTable  # of this image alone, original pixels

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    def rows(self, boxes: np.ndarray) -> list[tuple[int, list[float], float]]:
        """Class, box and rounded score of each detection, with its box taken from ``boxes`` (n, 4)."""
        scores = np.round(self.found.scores, SCORE_DIGITS).tolist()
        return list(zip(self.found.classes.tolist(), boxes.tolist(), scores))

    def pixel_rows(self) -> list[tuple[int, list[float], float]]:
        """As `rows`, with the corners x1, y1, x2, y2 in pixels."""
        return self.rows(np.round(self.found.boxes_xyxy_px, BOX_DIGITS))


class AnnotationFormat:
    """Writes the annotations of a run's images into its folder.

    Args:
        folder: with the subfolder images.
        names: of the classes.
        model: name of the model, for formats that store it.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], model: str) -> None:
        self.folder, self.names, self.model = folder, names, model

    def add(self, image: AnnotatedImage) -> list[Path]:
        """Takes the next image and returns the files that were written. Images have different stems."""
        raise NotImplementedError

    def close(self) -> list[Path]:
        """Writes what describes all images together, and returns these files. Must be called after the last image."""
        return []


class YoloAnnotations(AnnotationFormat):
    """labels/STEM.txt, classes.txt (a name a line, for LabelImg and Label Studio's converter) and data.yaml."""

    def add(self, image: AnnotatedImage) -> list[Path]:
        path = self.folder / "labels" / f"{image.stem}.txt"
        write_yolo_labels(path, image.image_hw, image.found)
        return [path]

    def close(self) -> list[Path]:
        classes, data = self.folder / "classes.txt", self.folder / "data.yaml"
        write_whole(classes, "".join(f"{' '.join(name.split())}\n" for name in self.names))
        content = {"train": "images", "val": "images", "names": dict(enumerate(self.names))}
        write_whole(data, yaml.safe_dump(content, allow_unicode=True, sort_keys=False))
        return [classes, data]


class CocoAnnotations(AnnotationFormat):
    """annotations.json: categories are numbered from 1; image ids are `image_ids_of` if these are numbers, else from 1;
    each annotation has a ``score``, which readers of annotations ignore."""

    def __init__(self, folder: Path, names: tuple[str, ...], model: str) -> None:
        super().__init__(folder, names, model)
        self._images: list[AnnotatedImage] = []

    def add(self, image: AnnotatedImage) -> list[Path]:
        self._images.append(image)
        return []

    def close(self) -> list[Path]:
        ids = image_ids_of([image.stem for image in self._images])
        if any(isinstance(i, str) for i in ids):
            ids = tuple(range(1, len(ids) + 1))
        images, annotations = [], []
        for image_id, image in zip(ids, self._images):
            height, width = image.image_hw
            images.append({"id": image_id, "file_name": image.name, "width": width, "height": height})
            boxes = np.round(xyxy_to_xywh(image.found.boxes_xyxy_px), BOX_DIGITS)
            annotations += [
                {"id": number, "image_id": image_id, "category_id": c + 1, "bbox": box, "area": box[2] * box[3],
                 "iscrowd": 0, "segmentation": [], "score": score}
                for number, (c, box, score) in enumerate(image.rows(boxes), len(annotations) + 1)
            ]  # fmt: skip
        categories = [{"id": c + 1, "name": name, "supercategory": ""} for c, name in enumerate(self.names)]
        content = {"info": {}, "licenses": [], "images": images, "annotations": annotations, "categories": categories}
        path = self.folder / "annotations.json"
        write_whole(path, json.dumps(content, ensure_ascii=False))
        return [path]


class VocAnnotations(AnnotationFormat):
    """Annotations/STEM.xml in Pascal VOC's format.

    Corners are written unrounded and unshifted, so that the width is xmax - xmin, as `data.labels.voc` and annotation
    tools (LabelImg, CVAT) have them; VOC's own files count pixels from 1 and include the last one.
    """

    def add(self, image: AnnotatedImage) -> list[Path]:
        root = ElementTree.Element("annotation")
        for tag, text in (("folder", "images"), ("filename", image.name)):
            _element(root, tag, text)
        _element(_element(root, "source"), "database", "Unknown")
        size = _element(root, "size")
        for tag, number in zip(("width", "height", "depth"), (*image.image_hw[::-1], 3)):
            _element(size, tag, str(number))
        _element(root, "segmented", "0")
        for c, corners, _ in image.pixel_rows():
            entry = _element(root, "object")
            fields = {"name": self.names[c], "pose": "Unspecified", "truncated": "0", "difficult": "0"}
            for tag, text in fields.items():
                _element(entry, tag, text)
            box = _element(entry, "bndbox")
            for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), corners):
                _element(box, tag, repr(value))
        path = self.folder / "Annotations" / f"{image.stem}.xml"
        path.parent.mkdir(exist_ok=True)
        _write_xml(path, root)
        return [path]


class LabelStudioAnnotations(AnnotationFormat):
    """labelstudio.json, tasks with predictions, and labelstudio.xml, the labeling interface that they fit.

    Tasks refer to images as Label Studio's local file server serves them if the run's folder is its document root.
    """

    IMAGES = "/data/local-files/?d=images/"

    def __init__(self, folder: Path, names: tuple[str, ...], model: str) -> None:
        super().__init__(folder, names, model)
        self._tasks: list[dict[str, Any]] = []

    def add(self, image: AnnotatedImage) -> list[Path]:
        height, width = image.image_hw
        percent = scale_boxes(xyxy_to_xywh(image.found.boxes_xyxy_px), 100 / width, 100 / height)
        common = {"type": "rectanglelabels", "from_name": "label", "to_name": "image", "image_rotation": 0}
        common |= {"original_width": width, "original_height": height}
        regions = []
        for number, (c, box, score) in enumerate(image.rows(np.round(percent, FRACTION_DIGITS - 2))):
            value = dict(zip(("x", "y", "width", "height"), box)) | {"rotation": 0, "rectanglelabels": [self.names[c]]}
            regions.append({"id": f"box{number}", **common, "value": value, "score": score})
        mean = float(image.found.scores.mean()) if regions else 0.0
        prediction = {"model_version": self.model, "score": round(mean, SCORE_DIGITS), "result": regions}
        self._tasks.append(
            {"data": {"image": self.IMAGES + quote(image.name, errors="surrogateescape")}, "predictions": [prediction]}
        )
        return []

    def close(self) -> list[Path]:
        tasks, interface = self.folder / "labelstudio.json", self.folder / "labelstudio.xml"
        write_whole(tasks, json.dumps(self._tasks, ensure_ascii=False))
        root = ElementTree.Element("View")
        _element(root, "Image", name="image", value="$image")
        labels = _element(root, "RectangleLabels", name="label", toName="image")
        for name in self.names:
            _element(labels, "Label", value=name)
        _write_xml(interface, root, declaration=False)  # Label Studio refuses one
        return [tasks, interface]


class CvatAnnotations(AnnotationFormat):
    """annotations.xml, "CVAT for images 1.1"."""

    def __init__(self, folder: Path, names: tuple[str, ...], model: str) -> None:
        super().__init__(folder, names, model)
        self._images: list[ElementTree.Element] = []

    def add(self, image: AnnotatedImage) -> list[Path]:
        height, width = (str(side) for side in image.image_hw)
        number = str(len(self._images))
        entry = ElementTree.Element("image", id=number, name=_xml_text(image.name), width=width, height=height)
        for c, corners, _ in image.pixel_rows():
            position = {tag: repr(value) for tag, value in zip(("xtl", "ytl", "xbr", "ybr"), corners)}
            _element(entry, "box", label=self.names[c], source="auto", occluded="0", **position, z_order="0")
        self._images.append(entry)
        return []

    def close(self) -> list[Path]:
        root = ElementTree.Element("annotations")
        _element(root, "version", "1.1")
        task = _element(_element(root, "meta"), "task")
        for tag, text in (("name", self.folder.name), ("size", str(len(self._images))), ("mode", "annotation")):
            _element(task, tag, text)
        labels = _element(task, "labels")
        for name in self.names:
            label = _element(labels, "label")
            for tag, text in (("name", name), ("type", "rectangle"), ("attributes", None)):
                _element(label, tag, text)
        root.extend(self._images)
        path = self.folder / "annotations.xml"
        _write_xml(path, root)
        return [path]


def _element(parent: ElementTree.Element, tag: str, text: str | None = None, **attributes: str) -> ElementTree.Element:
    """A new last child of ``parent``."""
    child = ElementTree.SubElement(parent, tag, {key: _xml_text(value) for key, value in attributes.items()})
    child.text = None if text is None else _xml_text(text)
    return child


def _xml_text(text: str) -> str:
    """``text`` without characters that XML cannot hold."""
    return _NOT_IN_XML.sub("?", text)


def _write_xml(path: Path, root: ElementTree.Element, *, declaration: bool = True) -> None:
    ElementTree.indent(root)
    write_whole(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=declaration) + b"\n")


# The names are the choices of --save-format (utils/config/settings.py).
FORMATS: dict[str, type[AnnotationFormat]] = {
    "yolo": YoloAnnotations,
    "coco": CocoAnnotations,
    "voc": VocAnnotations,
    "labelstudio": LabelStudioAnnotations,
    "cvat": CvatAnnotations,
}


class AnnotationFiles:
    """The files of several formats. ``formats``: their names; the rest as in `AnnotationFormat`."""

    def __init__(self, formats: Sequence[str], folder: Path, names: tuple[str, ...], model: str) -> None:
        self._formats = [FORMATS[name](folder, names, model) for name in dict.fromkeys(formats)]

    def add(self, name: str, image_hw: tuple[int, int], found: DetectionTable) -> None:
        """As `AnnotatedImage` has them."""
        image = AnnotatedImage(name, image_hw, found)
        for each in self._formats:
            each.add(image)

    def close(self) -> None:
        for each in self._formats:
            each.close()
