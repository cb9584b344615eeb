"""``--data FOLDER``: reads a folder without a YAML as a data set, in one of these layouts:

=========== ==================================================== =====================================================
YOLO        images/train, images/val or train/images, val/images labels in place of images, classes.txt or a names YAML
CVAT        train.txt, val.txt with the images' paths            label files beside the images, obj.names
LabelImg    one folder of images                                 label files beside the images, classes.txt
COCO        train2017, images/train or train, or one folder      annotations/instances_train2017.json and the like
Roboflow    train, valid, test                                   _annotations.coco.json or .xml in each
Pascal VOC  JPEGImages, with ImageSets/Main/train.txt            Annotations
=========== ==================================================== =====================================================

A folder of which everything is in one subfolder, as after unpacking an archive, is that subfolder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data.dataset.spec import SPLITS
from data.images.kinds import IMAGE_SUFFIXES
from data.labels.label_format import MAX_BYTES
from data.labels.voc import object_names
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.safe_io import read_regular, read_text

_SPLIT_NAME = re.compile(r"(train|val|test)(ing|val|id|idation)?([-_ ]?\d+)?", re.IGNORECASE)
_IMAGE_FOLDERS = ("images", "JPEGImages", "Images")
_LABEL_FOLDERS = ("labels", "annotations", "Annotations", "ImageSets")
_NAME_LISTS = ("classes.txt", "obj.names", "_darknet.labels")
_JSON_NAMES = ("_annotations", "annotations", "instances")  # beginnings of COCO JSONs that name no split
_ANY_XML = "*.[xX][mM][lL]"


def split_of(name: str) -> str:
    """Returns the split that a folder or file is named after, such as "val" for "Valid" or "val2017", or ""."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1].lower() if match else ""


def read_folder(folder: Path, known_names: Sequence[str] = ()) -> tuple[dict[Any, Any], Path, str]:
    """Reads the YAML in ``folder`` or, without one that names images, the folder's layout.

    ``known_names`` take the place of names that would have to be read from all labels, or from an annotation file.
    Returns the values as in a YAML, with paths as Path; the YAML or the folder, for messages; and a line for the log.
    Raises UserError if the folder is in no known layout.
    """
    folder = _unpacked(folder)
    yaml = _own_yaml(folder)
    values = load_yaml(yaml, text_under=frozenset({"names", "classes", "ignore"})) if yaml else {}
    known = {"names": list(known_names)} if known_names else {}
    if yaml is not None and _names_images(values):
        return values | known if known else values, yaml, f"{folder}: its YAML is {yaml.name}"
    values |= {"path": folder, **known}
    splits = _find_splits(folder)
    found = {name: _find_annotations(folder, name, images) for name, images in splits.items()}
    annotations = {name: path for name, path in found.items() if path is not None}
    others: list[str] = []  # splits and folders that are not used
    if annotations:
        others += [name for name in splits if name not in annotations]
        splits = {name: splits[name] for name in annotations}
        values["annotations"] = annotations
        voc_folders = [path for path in annotations.values() if path.is_dir()]
        if voc_folders and "names" not in values:
            values["names"] = _names_in_voc(voc_folders)
        layout = "Pascal VOC" if voc_folders else "COCO JSON"
    else:
        values.setdefault("names", _listed_names([folder, *splits.values(), folder / "labels"]))
        layout = "YOLO txt"
    if not annotations and not values["names"]:
        raise UserError(
            f"data set {folder}: no layout that --data FOLDER reads (docs/formats.md); for YOLO, add "
            "classes.txt with one class a line, else write a YAML: 'train: <folder of images>', 'val: <folder of "
            "images>', 'names: [<class>, ...]'"
        )
    used = ", ".join(f"{name} {path.relative_to(folder)}" for name, path in splits.items())
    others += _other_folders(folder, splits.values())
    note = f"{folder}: {layout}; {used}"
    if others:
        note += f"; not used: {', '.join(others)}"
    return {**values, **splits}, folder, note


def _unpacked(folder: Path) -> Path:
    """Returns the innermost folder that contains everything in ``folder``."""
    while True:
        inside = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
        if len(inside) != 1 or not inside[0].is_dir() or split_of(inside[0].name) or inside[0].name in _IMAGE_FOLDERS:
            return folder
        folder = inside[0]


def _own_yaml(folder: Path) -> Path | None:
    """Returns the YAML that describes the data of a folder: one named like a data set, or else the only one with a
    split or names. Raises UserError if there are several."""
    yamls = sorted(
        path for path in folder.iterdir() if path.suffix.lower() in (".yaml", ".yml") and path.name[0] != "."
    )
    for path in yamls:
        if path.stem in ("data", "dataset", folder.name):
            return path
    describing = [path for path in yamls if _describes_data(path)]
    if len(describing) > 1:
        names = ", ".join(path.name for path in describing)
        raise UserError(f"data set {folder}: several YAMLs describe a data set: {names}; name one of them")
    return describing[0] if describing else None


def _describes_data(yaml: Path) -> bool:
    """Returns whether a YAML has a split or names; False if it is malformed, as YAMLs of other programs may be."""
    try:
        values = load_yaml(yaml)
    except UserError:
        return False
    return isinstance(values, dict) and not values.keys().isdisjoint((*SPLITS, "names"))


def _names_images(values: Any) -> bool:
    """Returns whether the content of a YAML names images, or is malformed: reading it then says how."""
    return not isinstance(values, dict) or "names" not in values or not values.keys().isdisjoint(SPLITS)


def _find_splits(folder: Path) -> dict[str, Path]:
    """Returns the image folders by split, else the image lists by split, else all images as the training split. Raises
    UserError if two belong to the same split."""
    parents = [folder, *(folder / name for name in _IMAGE_FOLDERS)]
    found = [path for parent in parents if parent.is_dir() for path in sorted(parent.iterdir()) if path.is_dir()]
    if not any(split_of(path.name) for path in found):
        found = [
            path for path in sorted((*folder.glob("*.txt"), *folder.glob("ImageSets/Main/*.txt"))) if _is_list(path)
        ]
    splits: dict[str, Path] = {}
    for path in found:
        split = split_of(path.stem if path.is_file() else path.name)
        if not split or (path.stem == "trainval" and "train" in splits):
            continue
        if split in splits and not path.samefile(splits[split]):
            reason = f"{splits[split]} and {path} are both '{split}'"
            raise UserError(f"data set {folder}: {reason}; rename one, or write a YAML with 'train:' and 'val:'")
        splits[split] = path
    splits = splits or {"train": folder}
    return {split: _images_in(splits[split]) for split in SPLITS if split in splits}


def _is_list(path: Path) -> bool:
    """Returns whether a .txt file named after a split is a list, not the label file of an image beside it."""
    return path.stat().st_size > 0 and not any(path.with_suffix(suffix).exists() for suffix in IMAGE_SUFFIXES)


def _images_in(path: Path) -> Path:
    """Returns the folder of images in the folder of a split or data set, or ``path`` itself."""
    return next((path / name for name in _IMAGE_FOLDERS if (path / name).is_dir()), path)


def _other_folders(folder: Path, used: Iterable[Path]) -> list[str]:
    """Returns the names of subfolders that are neither used nor named like folders of labels."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]
    used = list(used)
    if any(path.is_file() for path in used):  # lists name images in any of them
        return []
    return [
        path.name
        for path in paths
        if path.name not in _LABEL_FOLDERS and not any(other.is_relative_to(path) for other in used)
    ]


def _find_annotations(folder: Path, split: str, images: Path) -> Path | None:
    """Returns the COCO JSON of a split, or its folder of Pascal VOC, or None if there is neither. Raises UserError if
    several JSONs may be that of the split."""
    above = images.parent if images.name in _IMAGE_FOLDERS else images
    for place in dict.fromkeys((images, above, folder / "annotations", folder / "Annotations", folder)):
        files = sorted(place.glob("*.json"))
        of_split = [path for path in files if _split_in(path) == split]
        of_all = [path for path in files if not _split_in(path) and path.name.startswith(_JSON_NAMES)]
        candidates = of_split or of_all
        # COCO also has captions and keypoints of the same images.
        candidates = [path for path in candidates if path.name.startswith("instances")] or candidates
        if len(candidates) > 1:
            names = ", ".join(path.name for path in candidates)
            raise UserError(f"{place}: several JSONs may be of '{split}': {names}; write a YAML with 'annotations:'")
        if candidates:
            return candidates[0]
    for top in (above.parent, folder):
        for name in ("Annotations", "annotations"):
            for place in (top / name / above.name, top / name):
                if next(place.rglob(_ANY_XML), None):
                    return place
    return images if images.is_dir() and next(images.glob(_ANY_XML), None) else None


def _split_in(path: Path) -> str:
    """Returns the split that a file's name contains, as in instances_val2017.json, or ""."""
    return next(filter(None, map(split_of, re.split(r"[_.]", path.stem))), "")


def _names_in_voc(folders: Iterable[Path]) -> list[str]:
    """Returns the classes of all objects in folders of Pascal VOC, sorted."""
    names: set[str] = set()
    for path in sorted({path for folder in folders for path in folder.rglob(_ANY_XML)}):
        names |= object_names(read_regular(path, MAX_BYTES))
    return sorted(names)


def _listed_names(folders: Iterable[Path]) -> list[str]:
    """Returns the classes that the first list of names in ``folders`` has, an empty list without one."""
    for path in (folder / name for folder in folders for name in _NAME_LISTS):
        if path.is_file():
            return [line.strip() for line in read_text(path).splitlines() if line.strip()]
    return []
