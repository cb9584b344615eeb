"""Detections as annotation files that labeling tools import, one function a format (`FORMATS`).

All files describe the images in the folder ``images`` next to them, so that the folder is a data set that can be moved,
zipped and trained on. Boxes are in pixels of the upright image, from its top left corner, unless the format asks for
something else; none of the formats but COCO and Label Studio has scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import yaml

from utils.boxes import scale_boxes, xyxy_to_xywh
from utils.config.settings import DetectConfig
from utils.drawing.detection_writer import FRACTION_DIGITS, DetectionFiles, write_yolo_labels
from utils.files.safe_io import write_whole
from utils.strings import image_ids_of
from utils.structures import DetectionTable

# Of pixels: the precision of a float32 box. With boxes rounded to thousandths of a pixel, one of BCCD crossed IoU 0.95
# (AP 0.5929 became 0.5935).
BOX_DIGITS = 5
SCORE_DIGITS = 8
LABEL_STUDIO_IMAGES = "/data/local-files/?d=images/"
_NOT_IN_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


class AnnotatedImage(NamedTuple):
    """An image and what was found in it."""

    name: str  # file in the folder images
    image_hw: tuple[int, int]  # upright, pixels
    found: DetectionTable  # of this image alone, original pixels

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    def rows(self, boxes: np.ndarray, digits: int = BOX_DIGITS) -> list[tuple[int, list[float], float]]:
        """Class, rounded box and score of each detection, with its box taken from ``boxes`` (n, 4)."""
        scores = np.round(self.found.scores, SCORE_DIGITS).tolist()
        return list(zip(self.found.classes.tolist(), np.round(boxes, digits).tolist(), scores))


class Annotated(NamedTuple):
    """The images of a run, which have different stems."""

    folder: Path  # with the subfolder images
    names: tuple[str, ...]  # of the classes
    model: str  # its name, for formats that store it
    images: Sequence[AnnotatedImage]


def write_yolo(run: Annotated) -> None:
    """labels/STEM.txt, classes.txt (a name a line, for LabelImg and Label Studio's converter) and data.yaml."""
    for image in run.images:
        write_yolo_labels(run.folder / "labels" / f"{image.stem}.txt", image.image_hw, image.found)
    write_whole(run.folder / "classes.txt", "".join(f"{' '.join(name.split())}\n" for name in run.names))
    content = {"train": "images", "val": "images", "names": dict(enumerate(run.names))}
    write_whole(run.folder / "data.yaml", yaml.safe_dump(content, allow_unicode=True, sort_keys=False))


def write_coco(run: Annotated) -> None:
    """annotations.json: categories are numbered from 1; image ids are `image_ids_of` if these are numbers, else from 1;
    each annotation has a ``score``, which readers of annotations ignore."""
    ids = image_ids_of([image.stem for image in run.images])
    if any(isinstance(i, str) for i in ids):
        ids = tuple(range(1, len(ids) + 1))
    images, annotations = [], []
    for image_id, image in zip(ids, run.images):
        height, width = image.image_hw
        images.append({"id": image_id, "file_name": image.name, "width": width, "height": height})
        rows = image.rows(xyxy_to_xywh(image.found.boxes_xyxy_px))
        annotations += [
            {"id": number, "image_id": image_id, "category_id": c + 1, "bbox": box, "area": box[2] * box[3],
             "iscrowd": 0, "segmentation": [], "score": score}
            for number, (c, box, score) in enumerate(rows, len(annotations) + 1)
        ]  # fmt: skip
    categories = [{"id": c + 1, "name": name, "supercategory": ""} for c, name in enumerate(run.names)]
    content = {"info": {}, "licenses": [], "images": images, "annotations": annotations, "categories": categories}
    write_whole(run.folder / "annotations.json", json.dumps(content, ensure_ascii=False))


def write_voc(run: Annotated) -> None:
    """Annotations/STEM.xml in Pascal VOC's format.

    Corners are written unrounded and unshifted, so that the width is xmax - xmin, as `data.labels.voc` and annotation
    tools (LabelImg, CVAT) have them; VOC's own files count pixels from 1 and include the last one.
    """
    folder = run.folder / "Annotations"
    folder.mkdir(exist_ok=True)
    for image in run.images:
        root = ElementTree.Element("annotation")
        _elements(root, {"folder": "images", "filename": image.name})
        _element(_element(root, "source"), "database", "Unknown")
        height, width = image.image_hw
        _elements(_element(root, "size"), {"width": width, "height": height, "depth": 3})
        _element(root, "segmented", "0")
        for c, corners, _ in image.rows(image.found.boxes_xyxy_px):
            entry = _element(root, "object")
            _elements(entry, {"name": run.names[c], "pose": "Unspecified", "truncated": 0, "difficult": 0})
            _elements(_element(entry, "bndbox"), dict(zip(("xmin", "ymin", "xmax", "ymax"), corners)))
        _write_xml(folder / f"{image.stem}.xml", root)


def write_label_studio(run: Annotated) -> None:
    """labelstudio.json, tasks with predictions, and labelstudio.xml, the labeling interface that they fit.

    Tasks refer to images as Label Studio's local file server serves them if the run's folder is its document root.
    """
    tasks = []
    for image in run.images:
        height, width = image.image_hw
        percent = scale_boxes(xyxy_to_xywh(image.found.boxes_xyxy_px), 100 / width, 100 / height)
        common = {"type": "rectanglelabels", "from_name": "label", "to_name": "image", "image_rotation": 0}
        common |= {"original_width": width, "original_height": height}
        regions = []
        for number, (c, box, score) in enumerate(image.rows(percent, FRACTION_DIGITS - 2)):
            value = dict(zip(("x", "y", "width", "height"), box)) | {"rotation": 0, "rectanglelabels": [run.names[c]]}
            regions.append({"id": f"box{number}", **common, "value": value, "score": score})
        mean = float(image.found.scores.mean()) if regions else 0.0
        prediction = {"model_version": run.model, "score": round(mean, SCORE_DIGITS), "result": regions}
        source = LABEL_STUDIO_IMAGES + quote(image.name, errors="surrogateescape")
        tasks.append({"data": {"image": source}, "predictions": [prediction]})
    write_whole(run.folder / "labelstudio.json", json.dumps(tasks, ensure_ascii=False))
    root = ElementTree.Element("View")
    _element(root, "Image", name="image", value="$image")
    labels = _element(root, "RectangleLabels", name="label", toName="image")
    for name in run.names:
        _element(labels, "Label", value=name)
    _write_xml(run.folder / "labelstudio.xml", root, declaration=False)  # Label Studio refuses one


def write_cvat(run: Annotated) -> None:
    """annotations.xml, "CVAT for images 1.1"."""
    root = ElementTree.Element("annotations")
    _element(root, "version", "1.1")
    task = _element(_element(root, "meta"), "task")
    _elements(task, {"name": run.folder.name, "size": len(run.images), "mode": "annotation"})
    labels = _element(task, "labels")
    for name in run.names:
        _elements(_element(labels, "label"), {"name": name, "type": "rectangle", "attributes": ""})
    for number, image in enumerate(run.images):
        height, width = map(str, image.image_hw)
        entry = _element(root, "image", id=str(number), name=image.name, width=width, height=height)
        for c, corners, _ in image.rows(image.found.boxes_xyxy_px):
            position = {tag: repr(value) for tag, value in zip(("xtl", "ytl", "xbr", "ybr"), corners)}
            _element(entry, "box", label=run.names[c], source="auto", occluded="0", **position, z_order="0")
    _write_xml(run.folder / "annotations.xml", root)


def _elements(parent: ElementTree.Element, texts: Mapping[str, str | float]) -> None:
    """New last children of ``parent`` by tag."""
    for tag, text in texts.items():
        _element(parent, tag, str(text))


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
FORMATS: dict[str, Callable[[Annotated], None]] = {
    "yolo": write_yolo,
    "coco": write_coco,
    "voc": write_voc,
    "labelstudio": write_label_studio,
    "cvat": write_cvat,
}


def write_annotations(config: DetectConfig, files: DetectionFiles) -> None:
    """The files of ``config.save_format``, next to ``files``."""
    images = [AnnotatedImage(*each) for each in files.annotated]
    run = Annotated(files.run_dir, files.names, Path(config.weights).stem, images)
    for name in dict.fromkeys(config.save_format):
        FORMATS[name](run)
