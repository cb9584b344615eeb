"""Writes collected annotations as a data set: for each split a COCO JSON and, unless the split has a folder of its own,
a list of its images; and a YAML.

The files are written to a temporary folder inside the folder of the output, and read back there as training reads them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from data.labels.coco import read_coco
from data.labels.label_format import LabelRequest
from data.source.dataset_yaml import load_dataset_spec
from data.source.files import list_split
from data.source.listing.image_list import is_row
from tools.convert.annotations import AnnotatedImage, Annotations
from tools.convert.values import image_size
from utils.errors import UserError
from utils.files.paths import path_of
from utils.files.safe_io import write_whole


class _WrittenSplit(NamedTuple):
    """The images of a split, and the files that describe it."""

    images: list[Path]
    entry: Path  # folder of the images, or a list of them, for the YAML
    json_file: Path


def write_dataset(annotations: Annotations, folder: Path, out: Path) -> Counter[str]:
    """Writes the files of ``out`` to ``folder``, from where they are moved to the parent of both. Returns the number of
    boxes written, by class.

    Raises UserError if a path cannot be written, or if training would not find all images and objects.
    """
    names = annotations.class_names()
    splits = _write_splits(annotations.images_by_split(), names, folder, out)
    classes: dict[str, Any] = {"names": names}
    if annotations.ignored:
        classes["ignore"] = sorted(annotations.ignored)
    yaml_file = folder / out.with_suffix(".yaml").name
    check_file = folder / f".{yaml_file.name}"  # the YAML as it has to be while the files are in ``folder``
    _write_yaml(yaml_file, {"path": ".", **_entries(splits, folder, out.parent), **classes})
    _write_yaml(check_file, {"path": "..", **_entries(splits, out.parent), **classes})
    try:
        written = _count_boxes(splits, names)
        unread = _unread_images(splits, check_file)
    except UserError as error:
        reason = str(error).replace(check_file.name, yaml_file.name).replace(f"{folder.name}/", "")
        raise UserError(f"{out}: training could not read it: {reason}") from None
    check_file.unlink()
    for name, expected in annotations.num_objects.items():
        if written[name] != expected:
            raise UserError(f"{out}: would have {written[name]} of {expected} objects of '{name}'")
    if unread:
        raise UserError(f"{unread[0]}: training would not find this image; rename it or its folder")
    return written


def _write_splits(
    images_by_split: Mapping[str, Sequence[AnnotatedImage]], names: Sequence[str], folder: Path, out: Path
) -> dict[str, _WrittenSplit]:
    """Writes the COCO JSON of each split and, if images of other splits are in its folder, the list of its images."""
    splits: dict[str, _WrittenSplit] = {}
    for split, annotated in images_by_split.items():
        json_file = folder / (out.name if len(images_by_split) == 1 else f"{out.stem}-{split}.json")
        images = [image.path for image in annotated]
        others = [image.path for other, rest in images_by_split.items() if other != split for image in rest]
        base = _folder_of(images, others)
        write_whole(json_file, json.dumps(_coco(annotated, names, base)))
        entry = base
        if entry is None:
            entry = json_file.with_suffix(".txt")
            _write_list(entry, [_relative(image, folder, out.parent) for image in images])
        splits[split] = _WrittenSplit(images, entry, json_file)
    return splits


def _write_list(file: Path, rows: Sequence[str]) -> None:
    """Writes a list of images. Raises UserError for a path that it cannot contain."""
    for row in rows:
        if not is_row(row):
            reason = "has a line break or outer spaces, or is not UTF-8, so it cannot be in a list of images"
            raise UserError(f"{row!r}: {reason}; rename it")
    write_whole(file, "".join(f"{row}\n" for row in rows))


def _folder_of(images: Sequence[Path], others: Sequence[Path]) -> Path | None:
    """Returns the folder of a split's images, to which their names in the JSON are relative. Returns None if it also
    contains images of other splits: the split is then a list, and the names have no folders."""
    base = Path(os.path.commonpath([image.parent for image in images]))
    if not any(other.is_relative_to(base) for other in others):
        return base
    for name, count in Counter(image.name for image in images).items():
        if count > 1:
            raise UserError(
                f"{base / name}: several images have this name, and images of other splits are next to them; give each "
                "split its folder"
            )
    return None


def _coco(images: Sequence[AnnotatedImage], names: Sequence[str], base: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Returns the content of a COCO JSON. ``base``: see `_folder_of`."""
    entries: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    category_ids = {name: i for i, name in enumerate(names, 1)}
    for number, annotated in enumerate(images, 1):
        path = annotated.path
        if "\\" in path.name:
            raise UserError(rf"{path.name!r}: has a \, which separates folders in a COCO JSON; rename the image")
        width, height = annotated.size or image_size(path)
        name = path.relative_to(base).as_posix() if base else path.name
        entries.append({"id": number, "file_name": name, "width": width, "height": height})
        for box in annotated.boxes:
            w = box.x2 - box.x1
            h = box.y2 - box.y1
            annotation = {
                "id": len(annotations) + 1,
                "image_id": number,
                "category_id": category_ids[box.name],
                "bbox": [box.x1, box.y1, w, h],
                "area": w * h,
                "iscrowd": int(box.crowd),
            }
            annotations.append(annotation)
    categories = [{"id": i, "name": name} for name, i in category_ids.items()]
    return {"images": entries, "annotations": annotations, "categories": categories}


def _entries(splits: Mapping[str, _WrittenSplit], *folders: Path) -> dict[str, Any]:
    """Returns the YAML's entries of the splits and of their annotations, relative to ``folders`` (`_relative`). Raises
    UserError if a YAML cannot contain a path."""
    images = {name: _yaml_path(_relative(split.entry, *folders)) for name, split in splits.items()}
    annotations = {name: _yaml_path(_relative(split.json_file, *folders)) for name, split in splits.items()}
    return {**images, "annotations": annotations}


def _yaml_path(path: str) -> str:
    """Returns ``path``. Raises UserError if a YAML cannot contain it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: is not UTF-8, so it cannot be in a YAML; rename it") from None
    return path


def _relative(path: Path, *folders: Path) -> str:
    """Returns ``path`` relative to the first of ``folders`` that contains it, so that the YAML's folder can be
    moved."""
    folder = next(filter(path.is_relative_to, folders), None)
    return path.relative_to(folder).as_posix() if folder else str(path)


def _write_yaml(file: Path, content: Mapping[str, Any]) -> None:
    write_whole(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _count_boxes(splits: Mapping[str, _WrittenSplit], names: Sequence[str]) -> Counter[str]:
    """Counts the boxes in the COCO JSONs by class, as training reads them."""
    entries = [entry for split in splits.values() for entry in read_coco(split.json_file, tuple(names)).images]
    return Counter(names[int(row[0])] for entry in entries for row in entry.labels.rows)


def _unread_images(splits: Mapping[str, _WrittenSplit], yaml_file: Path) -> list[Path]:
    """Returns the images that training would not find, or whose labels it would not find."""
    read = set(_images_read(yaml_file))
    unread = [image for split in splits.values() for image in split.images if str(image) not in read]
    if unread:  # by this name; a symbolic link may give it another one
        read = {os.path.realpath(path) for path in read}
        unread = [image for image in unread if os.path.realpath(image) not in read]
    return unread


def _images_read(yaml_file: Path) -> Iterator[str]:
    """Yields the absolute paths of the images that have labels or are backgrounds, as training reads the data set."""
    spec = load_dataset_spec(yaml_file).as_labeled()
    for split in spec.splits:
        listing = list_split(spec, split)
        request = LabelRequest(
            images=listing.images,
            files=listing.labels,
            root=spec.root,
            names=spec.names,
            others=listing.others,
            aliases=listing.aliases,
        )
        for image in listing.label_format.read(request).images:
            yield path_of(image.name, spec.root)
