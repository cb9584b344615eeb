"""``--data FOLDER``: reads a folder without a YAML as a data set, in one of these layouts:

=========== ==================================================== =====================================================
YOLO        images/train, images/val or train/images, val/images labels in place of images, classes.txt or a names YAML
CVAT        train.txt, val.txt with the images' paths            label files beside the images, obj.names
LabelImg    one folder of images                                 label files beside the images, classes.txt
COCO        train2017, images/train or train, or one folder      annotations/instances_train2017.json and the like
Roboflow    train, valid, test                                   _annotations.coco.json or .xml in each
Pascal VOC  JPEGImages, with ImageSets/Main/train.txt            Annotations
=========== ==================================================== =====================================================

A folder of which everything is in one subfolder, as after unpacking an archive, is that subfolder. Nothing outside is
read but what a list names. Where a split's images or labels may be in several places, those count that have a label for
each image. `_WAYS` answers other folders.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.dataset.spec import SPLITS
from data.folders import Folders
from data.images.kinds import IMAGE_SUFFIXES, suffix_of
from data.labels.categories import COCO_JSON
from data.labels.json_files import load_json
from data.labels.label_format import MAX_BYTES
from data.labels.match import match_entries
from data.labels.places import complete_place, voc_places, yolo_places
from data.labels.voc import object_names
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.paths import casefold_nfc
from utils.files.safe_io import read_regular, read_text
from utils.strings import listed

_SPLIT_NAME = re.compile(r"(train|val|test)(ing|val|id|idation)?([-_ ]?\d+)?", re.IGNORECASE)
_IMAGE_FOLDERS = ("images", "JPEGImages", "Images")
_ANNOTATION_FOLDERS = ("Annotations", "annotations")
_WITH_LABELS = ("labels", "ImageSets")  # folders beside those of images
_NAME_LISTS = ("classes.txt", "obj.names", "_darknet.labels")
_JSON_NAMES = ("_annotations", "annotations", "instances")  # beginnings of COCO JSONs that name no split


def split_of(name: str) -> str:
    """Returns the split that a folder or file is named after, such as "val" for "Valid" or "val2017", or ""."""
    match = _SPLIT_NAME.fullmatch(name)
    return match[1].lower() if match else ""


class _Source(NamedTuple):
    """Where the images of a split may be, and their labels."""

    images: Path  # folder or list
    annotations: Path | None  # COCO JSON, folder of Pascal VOC, or None for YOLO txt

    @property
    def is_coco(self) -> bool:
        return self.annotations is not None and suffix_of(self.annotations) == ".json"


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
    folders = Folders(folder)
    places = _find_images(folder)
    sources, has_labels = _find_sources(places, folders)
    annotations = {split: source.annotations for split, source in sources.items() if source.annotations is not None}
    if annotations:
        sources = {split: source for split, source in sources.items() if split in annotations}
        values["annotations"] = annotations
        has_voc = any(path.is_dir() for path in annotations.values())
        if has_voc and "names" not in values:
            values["names"] = _names_in_voc(sources.values(), folders)
        layout = "Pascal VOC" if has_voc else "COCO JSON"
    else:
        images = [source.images for source in sources.values()]
        named = [folder / name for name in (*_IMAGE_FOLDERS, "labels")]
        values.setdefault("names", _listed_names([folder, *images, *named]))
        layout = "YOLO txt"
        is_labeled = has_labels or any(path.is_file() for path in images)
        if not values["names"] or not is_labeled:
            raise UserError(f"data set {folder}: {_way(folder, folders, is_labeled=is_labeled)}")
    used = ", ".join(f"{split} {source.images.relative_to(folder)}" for split, source in sources.items())
    note = f"{folder}: {layout}; {used}"
    others = _not_used(folder, sources.values(), [place for of_split in places.values() for place in of_split])
    if others:
        note += f"; not used: {listed(others)}"
    return {**values, **{split: source.images for split, source in sources.items()}}, folder, note


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


def _find_images(folder: Path) -> dict[str, list[Path]]:
    """Returns where the images of each split may be: folders and lists that are named like it, or else, for JSONs that
    are named like splits, or for training, the folder of all images."""
    parents = [folder, *(folder / name for name in _IMAGE_FOLDERS)]
    found = [path for parent in parents if parent.is_dir() for path in sorted(parent.iterdir()) if path.is_dir()]
    found += [path for path in sorted((*folder.glob("*.txt"), *folder.glob("ImageSets/Main/*.txt"))) if _is_list(path)]
    places: dict[str, list[Path]] = {}
    for path in found:
        split = split_of(path.stem if path.is_file() else path.name)
        if not split or (path.stem == "trainval" and "train" in places):
            continue
        images = _images_in(path)
        if not any(images.samefile(other) for other in places.get(split, ())):
            places.setdefault(split, []).append(images)
    if places:
        return places
    images = _images_in(folder)
    all_images = [images]
    if images != folder and any(suffix_of(path.name) in IMAGE_SUFFIXES for path in folder.iterdir()):
        all_images.append(folder)
    jsons = [path for place in _json_folders(folder, images) for path in sorted(place.glob("*.json"))]
    return {split: all_images for split in map(_split_in, jsons) if split} or {"train": all_images}


def _is_list(path: Path) -> bool:
    """Returns whether a .txt file named after a split is a list, not the label file of an image beside it."""
    return path.stat().st_size > 0 and not any(path.with_suffix(suffix).exists() for suffix in IMAGE_SUFFIXES)


def _images_in(path: Path) -> Path:
    """Returns the folder of images in the folder of a split or data set, or ``path`` itself."""
    return next((path / name for name in _IMAGE_FOLDERS if (path / name).is_dir()), path)


# Labels


def _find_sources(places: dict[str, list[Path]], folders: Folders) -> tuple[dict[str, _Source], bool]:
    """Returns the source of each split: folders or, if none has labels, lists, which may be those of another export or
    of a part of a folder. Also returns whether one has labels."""
    sources: dict[str, _Source] = {}
    has_labels = False
    for is_kind in (Path.is_dir, Path.is_file):
        of_kind = {split: [path for path in places.get(split, ()) if is_kind(path)] for split in SPLITS}
        chosen = {split: _choose(split, paths, folders) for split, paths in of_kind.items() if paths}
        sources = chosen or sources
        has_labels = any(source.is_coco or _count(source, folders)[0] for source in sources.values())
        if has_labels:
            break
    return sources, has_labels


def _choose(split: str, places: list[Path], folders: Folders) -> _Source:
    """Returns the source of a split: of several with labels, the one that has them for each image. Raises UserError if
    it is not known which counts."""
    sources = [_Source(images, path) for images in places for path in _find_annotations(folders, split, images)]
    counts = {source: _count(source, folders) for source in sources if not source.is_coco}
    counts = {source: count for source, count in counts.items() if count[0]}
    of_json = [source for source in sources if source.is_coco]
    if len(of_json) == 1 and not counts:  # it need not be read
        return of_json[0]
    counts = {source: _count(source, folders) for source in of_json} | counts
    labeled = {source.images for source, count in counts.items() if count[0]} or set(places)
    separate = [path for path in places if path.is_dir() and path in labeled and path != folders.root]
    if len(separate) > 1:
        reason = f"{separate[0]} and {separate[1]} are both '{split}'"
        raise UserError(f"data set {folders.root}: {reason}; rename one, or write a YAML with 'train:' and 'val:'")
    try:
        if not any(count for count, _ in counts.values()):
            return _Source(places[0], None)
        return complete_place(counts, lambda source: " with ".join(str(path) for path in source if path))
    except UserError as error:
        raise UserError(f"data set {folders.root}: '{split}': {error}, or write a YAML") from None


def _find_annotations(folders: Folders, split: str, images: Path) -> Iterator[Path | None]:
    """Yields the COCO JSON of a split, if there is one; the folders that may be its Pascal VOC; and None, for YOLO txt.
    Raises UserError if several JSONs may be that of the split."""
    folder = folders.root
    for place in _json_folders(folder, images):
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
            yield candidates[0]
            break
    above = images.parent if images.name in _IMAGE_FOLDERS else images
    for top in dict.fromkeys((above.parent, folder)):
        for voc_folder in (top / name for name in _ANNOTATION_FOLDERS):
            if voc_folder.is_dir() and voc_folder.is_relative_to(folder):
                below = voc_folder / above.name
                yield below if below.is_dir() else voc_folder
    if images.is_dir() and any(folders.stems(path, [".xml"]) for path in folders.walk(str(images))):
        yield images
    yield None


def _json_folders(folder: Path, images: Path) -> list[Path]:
    """Returns the folders in which a COCO JSON of ``images`` may be."""
    above = images.parent if images.name in _IMAGE_FOLDERS else images
    places = dict.fromkeys((images, above, *(folder / name for name in reversed(_ANNOTATION_FOLDERS)), folder))
    return [place for place in places if place.is_dir() and place.is_relative_to(folder)]


def _split_in(path: Path) -> str:
    """Returns the split that a file's name contains, as in instances_val2017.json, or ""."""
    return next(filter(None, map(split_of, re.split(r"[_.]", path.stem))), "")


def _count(source: _Source, folders: Folders) -> tuple[int, int]:
    """Returns the number of images with labels, and of all; for a COCO JSON, of all that are there or named."""
    if source.annotations is None or not source.is_coco:
        counts = [(labeled, total) for _, labeled, total in _label_places(source, folders)]
        return sum(labeled for labeled, _ in counts), sum(total for _, total in counts)
    try:
        content: Any = load_json(source.annotations, COCO_JSON)
        names = [entry["file_name"] for entry in content["images"]]
    except (UserError, LookupError, TypeError):  # no COCO JSON
        return 0, 0
    images = _rows(source.images)
    images = images or [folders.prefix(folder) + name for folder, name in _images(source.images, folders)]
    found = match_entries(names, images)
    return len(set(found[found >= 0].tolist())), max(len(names), len(images))


def _rows(file: Path) -> list[str]:
    """Returns the rows of a list, none for a folder."""
    if not file.is_file():
        return []
    return [row.strip() for row in read_text(file).replace("\\", "/").splitlines() if row.strip()]


def _images(place: Path, folders: Folders) -> Iterator[tuple[str, str]]:
    """Yields the folder and name of each image in and below a folder."""
    for folder in folders.walk(str(place)):
        for name in folders.entries(folder):
            if suffix_of(name) in IMAGE_SUFFIXES:
                yield folder, name


def _label_places(source: _Source, folders: Folders) -> Iterator[tuple[str, int, int]]:
    """Yields for each folder of images, or for a list, the folder with label files for most of them, the number of
    these images, and of all."""
    suffix = ".txt" if source.annotations is None else ".xml"
    if source.images.is_file():
        stems = {_stem(row.rpartition("/")[2]) for row in _rows(source.images)}
        top = str(source.annotations or folders.root)
        found = {stem for folder in folders.walk(top) for stem in folders.stems(folder, [suffix])}
        yield top, len(stems & found), len(stems)
        return
    for folder in folders.walk(str(source.images)):
        stems = folders.stems(folder, IMAGE_SUFFIXES)
        if not stems:
            continue
        if source.annotations is None:
            places = yolo_places(folder, folders, is_bounded=True)
        else:
            places = voc_places(folder, str(source.annotations), str(source.images), folders)
        counts = [len(stems & folders.stems(place, [suffix])) for place in places]
        yield places[counts.index(max(counts))], max(counts), len(stems)


def _stem(name: str) -> str:
    """Returns the name of an image without its suffix, which VOC's lists leave out, in lower case."""
    return casefold_nfc(name.rpartition(".")[0] if suffix_of(name) in IMAGE_SUFFIXES else name)


def _names_in_voc(sources: Iterable[_Source], folders: Folders) -> list[str]:
    """Returns the classes of all objects in the folders of Pascal VOC of ``sources``, sorted."""
    names: set[str] = set()
    for source in sources:
        is_list = source.images.is_file()
        for place, _, _ in [] if source.is_coco else _label_places(source, folders):
            for folder in folders.walk(place) if is_list else [place]:
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


# Messages


def _not_used(folder: Path, sources: Collection[_Source], places: Iterable[Path]) -> list[str]:
    """Returns the names of the ``places`` of images, of other subfolders, and of JSONs beside those in use, that
    contain nothing of ``sources``."""
    used = [path for source in sources for path in source if path is not None]
    others = list(places)
    if not any(source.images.is_file() for source in sources):  # lists name images in any folder
        others += [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in _WITH_LABELS]
    for json_folder in {path.parent for path in used if suffix_of(path) == ".json"}:
        others += sorted(json_folder.glob("*.json"))
    return [
        str(path.relative_to(folder))
        for path in dict.fromkeys(others)
        if path.name[0] != "." and not any(path.is_relative_to(u) or u.is_relative_to(path) for u in used)
    ]


_CONVERT = "python -m tools.convert {command_folder} out.json"
_YAML = "write a YAML: 'path: {folder}', 'train: {images}', 'annotations: {{train: {place}}}'"
# Files that are found: the end of their names, and whether the rest is the name of an image; what they are; and the
# line to type.
_WAYS = (
    (".txt", True, "YOLO txt", "labels of images/a.jpg are in labels/a.txt{renames}"),
    (".json", True, "LabelMe", _CONVERT),
    (".xml", True, "Pascal VOC", _YAML + ", 'names: [<class>, ...]'"),
    ("annotations.xml", False, "CVAT", _CONVERT),
    (".xml", False, "Pascal VOC", "no image has this name; objects of a.jpg are in a.xml"),
    (".json", False, "a COCO JSON", _YAML),
    (".csv", False, "a table", _CONVERT),
    (".parquet", False, "Hugging Face", _CONVERT),
    (".jsonl", False, "Hugging Face", _CONVERT),
)
_OTHERWISE = "write a YAML: 'train: <folder of images>', 'val: <folder of images>', 'names: [<class>, ...]'"


def _way(folder: Path, folders: Folders, *, is_labeled: bool) -> str:
    """Returns why a folder is not read, and the line of `_WAYS` for what is in it, by the names of its files."""
    if is_labeled:
        return "its YOLO txt have no class names; add classes.txt, with one class a line"
    images = list(_images(folder, folders))
    stems = {_stem(name) for _, name in images}
    image_folders = {folders.prefix(place).rstrip("/") for place, _ in images}
    files = [(place, name) for place in folders.walk(str(folder)) for name in folders.entries(place)]
    image_folder = image_folders.pop() if len(image_folders) == 1 else ""
    for suffix, is_named, title, line in _WAYS:
        for place, name in files:
            if name.lower().endswith(suffix) and (casefold_nfc(os.path.splitext(name)[0]) in stems) == is_named:
                file = folders.prefix(place) + name
                renames = [
                    f"{path} to {expected}"
                    for path, expected in ((image_folder, "images"), (os.path.dirname(file), "labels"))
                    if image_folder and path not in ("", expected)
                ]
                way = line.format(
                    folder=folder,
                    command_folder=shlex.quote(str(folder)),
                    images=image_folder or ".",
                    place=os.path.dirname(file) or "." if is_named else file,
                    renames=f": rename {' and '.join(renames)}" if renames else "",
                )
                return f"no layout that --data FOLDER reads (docs/formats.md); for {title} ({file}): {way}"
    return f"no layout that --data FOLDER reads (docs/formats.md); {_OTHERWISE}"
