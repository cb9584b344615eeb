"""``--data FOLDER``: reads a folder without a YAML as a data set, in one of these layouts:

=========== ==================================================== =====================================================
YOLO        images/train, images/val or train/images, val/images labels in place of images, classes.txt or a names YAML
CVAT        train.txt, val.txt with the images' paths            label files beside the images, obj.names
LabelImg    one folder of images                                 label files beside the images, classes.txt
COCO        train2017, images/train or train, or one folder      annotations/instances_train2017.json and the like
Roboflow    train, valid, test                                   _annotations.coco.json or .xml in each
Pascal VOC  JPEGImages, with ImageSets/Main/train.txt            Annotations
=========== ==================================================== =====================================================

A folder whose only entry is a subfolder stands for that subfolder. Nothing outside is read but what a list names. Rule
D1 (`complete_place`) decides where the labels of a split are. Any other folder is refused with the YAML to write.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data.dataset.spec import CLASS_KEYS, SPLITS
from data.folders import Folders, read_rows
from data.images.kinds import IMAGE_SUFFIXES, suffix_of
from data.labels.formats import COCO, VOC, YOLO, LabelFormat, format_of
from data.labels.label_format import MAX_BYTES
from data.labels.places import complete_place, voc_places, yolo_places
from data.labels.voc import object_names
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.paths import casefold_nfc
from utils.files.safe_io import read_regular, read_text

_SPLIT_NAME = re.compile(r"(train|val|test)(ing|val|id|idation)?([-_ ]?\d+)?", re.IGNORECASE)
_IMAGE_FOLDERS = ("images", "JPEGImages", "Images")
_ANNOTATION_FOLDERS = ("Annotations", "annotations")
_NAME_LISTS = ("classes.txt", "obj.names", "_darknet.labels")
# Beginnings of COCO JSONs that name no split; the last is Label Studio's.
_JSON_NAMES = ("_annotations", "annotations", "instances", "result.json")
_LAYOUTS: dict[LabelFormat | None, str] = {YOLO: "YOLO txt", VOC: "Pascal VOC", COCO: "COCO JSON"}
_OTHER_LAYOUT = (
    "data set {folder}: in no layout that --data FOLDER reads (docs/formats.md; YOLO txt needs a classes.txt, with one "
    "class a line); write a YAML: 'path: {folder}', 'train: <folder of images>', 'names: [<class>, ...]', and for COCO "
    "or Pascal VOC 'annotations: <JSON or folder>'; for LabelMe, CVAT, CSV or Hugging Face: python -m tools.convert "
    "{quoted} out.json"
)


def split_of(name: str) -> str:
    """Returns the split that a folder or file is named after, such as "val" for "Valid" or "val2017", or ""."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1].lower() if match else ""


class _Source(NamedTuple):
    """The images of a split, and where their labels are."""

    images: Path  # folder or list
    annotations: Path | None  # COCO JSON, folder of Pascal VOC, or None for YOLO txt
    is_labeled: bool = True


def read_folder(folder: Path) -> tuple[Any, Path, str]:
    """Reads the YAML in ``folder`` or, without one that names images, the folder's layout.

    Returns the content of the YAML, unchecked, or values as in one, with paths as Path; the YAML or the folder, for
    messages; and a line for the log. Raises UserError if the folder is in no known layout, or in several.
    """
    folder = _unpacked(folder)
    yaml = _own_yaml(folder)
    values = load_yaml(yaml, text_under=CLASS_KEYS) if yaml else {}
    if yaml is not None and _names_images(values):
        return values, yaml, f"{folder}: its YAML is {yaml.name}"
    folders = Folders(folder)
    sources = _find_sources(folders)
    annotations = {split: source.annotations for split, source in sources.items() if source.is_labeled}
    formats = {format_of(place) for place in annotations.values()} or {YOLO}
    found: dict[str, Any] = {"path": folder}
    if YOLO not in formats:  # else splits without labels are refused when they are used
        sources = {split: sources[split] for split in annotations}
        found["annotations"] = annotations
    images = {split: source.images for split, source in sources.items()}
    if formats == {VOC}:
        found["names"] = values.get("names") or _names_in_voc(filter(None, annotations.values()), folders)
    elif formats == {YOLO}:
        named = [folder / name for name in (*_IMAGE_FOLDERS, "labels")]
        found["names"] = values.get("names") or _listed_names([folder, *images.values(), *named])
    if len(formats) > 1 or found.get("names") == []:
        raise UserError(_OTHER_LAYOUT.format(folder=folder, quoted=shlex.quote(str(folder))))
    used = ", ".join(f"{split} {path.relative_to(folder)}" for split, path in images.items())
    return values | found | images, folder, f"{folder}: {_LAYOUTS[formats.pop()]}; {used}"


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


# Images


def _find_sources(folders: Folders) -> dict[str, _Source]:
    """Returns the images and labels of each split: of the folders that are named after splits or, if none of them has
    labels, of the lists, which may be those of another export or of a part of a folder. Without either, all images are
    of the splits after which JSONs are named, or for training."""
    folder = folders.root
    sources: dict[str, _Source] = {}
    for find_images in (_split_folders, _split_lists):
        found = {split: _source_of(split, images, folders) for split, images in find_images(folder).items()}
        sources = found or sources
        if any(source.is_labeled for source in found.values()):
            return sources
    if sources:
        return sources
    images = _images_in(folder)
    jsons = [path for place in _json_folders(folder, images) for path in sorted(place.glob("*.json"))]
    splits = dict.fromkeys(filter(None, map(_split_in, jsons))) or ["train"]
    return {split: _source_of(split, images, folders) for split in splits}


def _split_folders(folder: Path) -> dict[str, Path]:
    """Returns the folder of the images of each split. Raises UserError if a split has two."""
    parents = [folder, *(folder / name for name in _IMAGE_FOLDERS)]
    paths = [path for parent in parents if parent.is_dir() for path in sorted(parent.iterdir()) if path.is_dir()]
    return _by_split(folder, {path: path.name for path in paths})


def _split_lists(folder: Path) -> dict[str, Path]:
    """Returns the list of the images of each split. Raises UserError if a split has two."""
    paths = sorted((*folder.glob("*.txt"), *folder.glob("ImageSets/Main/*.txt")))
    return _by_split(folder, {path: path.stem for path in paths if split_of(path.stem) and _is_list(path)})


def _by_split(folder: Path, names: dict[Path, str]) -> dict[str, Path]:
    """Returns the images in a folder, or a list, by the split after which it is named. ``names``: by folder or list."""
    found: dict[str, Path] = {}
    for path, name in names.items():
        split = split_of(name)
        if split:
            images = _images_in(path)
            other = found.setdefault(split, images)
            if not other.samefile(images):
                reason = f"{other} and {images} are both '{split}'"
                raise UserError(f"data set {folder}: {reason}; rename one, or write a YAML with 'train:' and 'val:'")
    return {split: found[split] for split in SPLITS if split in found}


def _is_list(path: Path) -> bool:
    """Returns whether a .txt file named after a split is its list, and not the label file of an image beside it, or
    Pascal VOC's trainval.txt beside train.txt."""
    if path.name == "trainval.txt" and path.with_name("train.txt").exists():
        return False
    return path.stat().st_size > 0 and not any(path.with_suffix(suffix).exists() for suffix in IMAGE_SUFFIXES)


def _images_in(path: Path) -> Path:
    """Returns the folder of images in the folder of a split or data set, or ``path`` itself."""
    return next((path / name for name in _IMAGE_FOLDERS if (path / name).is_dir()), path)


# Labels


def _source_of(split: str, images: Path, folders: Folders) -> _Source:
    """Returns ``images``, a folder or list, with their labels. Raises UserError if there are a COCO JSON and other
    labels, or if several places have labels, and none has them for every image (rule D1)."""
    json = _find_json(split, images, folders)
    counts = {place: _count_files(images, place, folders) for place in (*_voc_folders(images, folders), None)}
    labeled = {place: count for place, count in counts.items() if count[0]}
    if not labeled:
        return _Source(images, json, is_labeled=json is not None)
    try:
        if json:
            raise UserError(f"ambiguous label locations: {json} or a file per image; keep the labels of one")
        return _Source(images, complete_place(labeled, lambda place: str(place or "YOLO txt")))
    except UserError as error:
        raise UserError(f"data set {folders.root}: '{split}': {error}, or write a YAML") from None


def _find_json(split: str, images: Path, folders: Folders) -> Path | None:
    """Returns the COCO JSON of a split, or None. Raises UserError if it may be one of several."""
    for place in _json_folders(folders.root, images):
        files = [place / name for name in folders.entries(str(place)) if name.endswith(".json")]
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
    return None


def _json_folders(folder: Path, images: Path) -> list[Path]:
    """Returns the folders in which a COCO JSON of ``images`` may be."""
    annotations = [folder / name for name in reversed(_ANNOTATION_FOLDERS)]
    places = dict.fromkeys((images, _split_folder(images), *annotations, folder))
    return [place for place in places if place.is_dir() and place.is_relative_to(folder)]


def _voc_folders(images: Path, folders: Folders) -> list[Path]:
    """Returns the folders in which the Pascal VOC of ``images`` may be."""
    split_folder = _split_folder(images)
    found: list[Path] = []
    for parent in dict.fromkeys((split_folder.parent, folders.root)):
        for voc_folder in (parent / name for name in _ANNOTATION_FOLDERS):
            if voc_folder.is_dir() and voc_folder.is_relative_to(folders.root):
                of_split = voc_folder / split_folder.name
                found.append(of_split if of_split.is_dir() else voc_folder)
    return [*found, images] if images.is_dir() else found


def _split_folder(images: Path) -> Path:
    """Returns ``train`` for ``train/images``, and other paths as they are."""
    return images.parent if images.name in _IMAGE_FOLDERS else images


def _split_in(path: Path) -> str:
    """Returns the split that a file's name contains, as in instances_val2017.json, or ""."""
    return next(filter(None, map(split_of, re.split(r"[_.]", path.stem))), "")


def _count_files(images: Path, annotations: Path | None, folders: Folders) -> tuple[int, int]:
    """Returns the number of images that have a label file, and of all. ``annotations``: as in `_Source`. The images of
    a list have the files of their names in any folder."""
    suffix = ".txt" if annotations is None else ".xml"
    if images.is_file():
        stems = {_stem(row.rpartition("/")[2]) for _, row in read_rows(images)}
        label_folders = folders.walk(str(annotations or folders.root))
        label_stems = {stem for folder in label_folders for stem in folders.stems(folder, [suffix])}
        return len(stems & label_stems), len(stems)
    labeled = 0
    total = 0
    for folder in folders.walk(str(images)):
        stems = folders.stems(folder, IMAGE_SUFFIXES)
        if annotations is None:
            places = yolo_places(folder, folders, is_bounded=True)
        else:
            places = voc_places(folder, str(annotations), str(images), folders)
        labeled += max(len(stems & folders.stems(place, [suffix])) for place in places)
        total += len(stems)
    return labeled, total


def _stem(name: str) -> str:
    """Returns the name of an image without its suffix, which VOC's lists leave out, in lower case."""
    return casefold_nfc(name.rpartition(".")[0] if suffix_of(name) in IMAGE_SUFFIXES else name)


# Classes


def _names_in_voc(voc_folders: Iterable[Path], folders: Folders) -> list[str]:
    """Returns the classes of all objects in folders of Pascal VOC, sorted."""
    names: set[str] = set()
    for folder in dict.fromkeys(path for top in voc_folders for path in folders.walk(str(top))):
        for name, entry in folders.entries(folder).items():
            if suffix_of(name) == ".xml":
                names |= object_names(read_regular(entry.path, MAX_BYTES))
    return sorted(names)


def _listed_names(folders: Iterable[Path]) -> list[str]:
    """Returns the classes that the first list of names in ``folders`` has, an empty list without one."""
    for path in (folder / name for folder in folders for name in _NAME_LISTS):
        if path.is_file():
            return [line.strip() for line in read_text(path).splitlines() if line.strip()]
    return []
