"""COCO's 80 classes and their category ids, which differ from their class indices in YOLO labels."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from utils.class_names import class_key
from utils.config.yaml_files import load_yaml
from utils.program_folders import CONFIGS

_UNUSED_IDS = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
COCO_IDS = tuple(number for number in range(1, 91) if number not in _UNUSED_IDS)  # by class index in YOLO labels
_OTHER_NAMES = {  # from Pascal VOC; Darknet also uses them for COCO
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}


def coco_category_ids(names: Sequence[str], labeled: Collection[str] = ()) -> tuple[int, ...] | None:
    """Returns the COCO category ids of ``names``, or None unless the classes are COCO's.

    ``labeled``: all classes of the data set, including those that are not in ``names``; empty: the same as ``names``.
    """
    if len(labeled or names) != len(COCO_IDS):
        return None
    of_coco = load_yaml(CONFIGS / "data" / "coco.yaml")["names"]
    id_of = {of_coco[number]: category_id for number, category_id in enumerate(COCO_IDS)}
    if {_coco_name(name) for name in labeled or names} != id_of.keys():
        return None
    if not all(_coco_name(name) in id_of for name in names):  # merged classes have other names
        return None
    return tuple(id_of[_coco_name(name)] for name in names)


def _coco_name(name: str) -> str:
    key = class_key(name)
    return _OTHER_NAMES.get(key, key)
