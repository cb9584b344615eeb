"""Writes collected annotations as a data set: for each split a COCO JSON and, unless the split has a folder of its own,
a list of its images; and a YAML.

The files are written to a temporary folder inside the folder of the output, and scanned there as training scans them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from data.dataset.spec import DatasetSpec
from data.dataset.yaml_file import checked_path, is_yaml, load_dataset_spec
from data.index.index_settings import IndexSettings
from data.index.scan import ScanResult, scan_split
from data.labels.findings import FITTED, Finding
from data.labels.ledger import ScanReport
from data.listing.images import check_rows
from data.listing.listing import list_split
from tools.convert.annotations import AnnotatedImage, Annotations
from tools.convert.values import image_size
from utils.errors import UserError
from utils.files.paths import path_of
from utils.files.safe_io import write_whole
from utils.strings import counted


class WrittenDataset(NamedTuple):
    """What a data set contains, and what training leaves out or converts."""

    num_boxes: Counter[str]  # in the COCO JSONs, by class
    notes: list[str]  # lines about images and boxes that training leaves out, scales or turns


class _WrittenSplit(NamedTuple):
    """The images of a split, and the files that describe it."""

    images: list[AnnotatedImage]
    images_path: Path  # folder of the images, or a list of them
    json_file: Path


class _Scans(NamedTuple):
    """A data set as training reads it, before it selects classes."""

    spec: DatasetSpec
    by_split: dict[str, ScanResult]

    def paths_of(self, split: str) -> list[str]:
        """Returns the absolute paths of the images with labels and of the backgrounds, without symbolic links."""
        images = self.by_split[split].source.images
        return [os.path.realpath(path_of(name, self.spec.root)) for name in images]

    def num_boxes(self) -> Counter[str]:
        """Counts the boxes by class, whether training uses them or not."""
        sources = [scan.source for scan in self.by_split.values()]
        labels = [source.read(i) for source in sources for i in range(len(source.images))]
        return Counter(self.spec.names[int(row[0])] for raw in labels if raw is not None for row in raw.rows)


def write_dataset(annotations: Annotations, folder: Path, out: Path, max_bad: float) -> WrittenDataset:
    """Writes the files of ``out`` to ``folder``, from where they are moved to the parent of both.

    Raises UserError if a path cannot be written, if training would not find all images and objects, or if more than the
    fraction ``max_bad`` of them is unusable.
    """
    names = annotations.class_names()
    splits = _write_splits(annotations.images_by_split(), names, folder, out)
    classes: dict[str, Any] = {"names": names}
    ignored = annotations.ignored_classes()
    if ignored:
        classes["ignore"] = ignored
    yaml_file = folder / out.with_suffix(".yaml").name
    before_the_move = {"path": "..", **_yaml_splits(splits, out.parent), **classes}
    after_the_move = {"path": ".", **_yaml_splits(splits, folder, out.parent), **classes}
    _write_yaml(yaml_file, before_the_move)
    scans = _scan(yaml_file, out)
    _check_listed(splits, scans)
    num_boxes = scans.num_boxes()
    for name, expected in annotations.num_objects.items():
        if num_boxes[name] != expected:
            raise UserError(f"{out}: has {num_boxes[name]} of {expected} objects of '{name}'")
    notes = _notes(splits, scans, out, max_bad)
    _write_yaml(yaml_file, after_the_move)
    return WrittenDataset(num_boxes, notes)


def _write_splits(
    images_by_split: Mapping[str, Sequence[AnnotatedImage]], names: Sequence[str], folder: Path, out: Path
) -> dict[str, _WrittenSplit]:
    """Writes the COCO JSON of each split and, if images of other splits are in its folder, the list of its images."""
    splits: dict[str, _WrittenSplit] = {}
    for split, annotated in images_by_split.items():
        json_file = folder / (out.name if len(images_by_split) == 1 else f"{out.stem}-{split}.json")
        paths = [image.path for image in annotated]
        others = [image.path for other, rest in images_by_split.items() if other != split for image in rest]
        base = _folder_of(paths, others)
        write_whole(json_file, json.dumps(_coco(annotated, names, base)))
        images_path = base
        if images_path is None:
            images_path = json_file.with_suffix(".txt")
            rows = [_relative(path, folder, out.parent) for path in paths]
            check_rows(rows)
            write_whole(images_path, "".join(f"{row}\n" for row in rows))
        splits[split] = _WrittenSplit(list(annotated), images_path, json_file)
    return splits


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
    image_records: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    category_ids = {name: i for i, name in enumerate(names, 1)}
    for number, annotated in enumerate(images, 1):
        path = annotated.path
        if "\\" in path.name:
            raise UserError(rf"{path.name!r}: has a \, which separates folders in a COCO JSON; rename the image")
        name = path.relative_to(base).as_posix() if base else path.name
        image_records.append({"id": number, "file_name": name, **_size_record(annotated)})
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
    return {"images": image_records, "annotations": annotations, "categories": categories}


def _size_record(annotated: AnnotatedImage) -> dict[str, int]:
    """Returns the width and height of an image; empty if they can't be read, as the scan then leaves the image out and
    reports it."""
    try:
        width, height = annotated.size or image_size(annotated.path)
    except UserError:
        return {}
    return {"width": width, "height": height}


def _yaml_splits(splits: Mapping[str, _WrittenSplit], *folders: Path) -> dict[str, Any]:
    """Returns the paths of the splits and of their annotations in the YAML, relative to ``folders`` (`_relative`).
    Raises UserError if a YAML cannot contain a path."""
    images = {name: _yaml_path(_relative(split.images_path, *folders)) for name, split in splits.items()}
    annotations = {name: _yaml_path(_relative(split.json_file, *folders)) for name, split in splits.items()}
    return {**images, "annotations": annotations}


def _yaml_path(path: str) -> str:
    """Returns ``path``. Raises UserError if a YAML cannot contain it, or would not read it as this path."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: is not UTF-8, so it cannot be in a YAML; rename it") from None
    if is_yaml(path) or checked_path(path, path) != Path(path):
        reason = "in a YAML, a suffix .yaml, outer spaces and a leading ~ have a meaning"
        raise UserError(f"{path!r}: would not be read as this path ({reason}); rename it")
    return path


def _relative(path: Path, *folders: Path) -> str:
    """Returns ``path`` relative to the first of ``folders`` that contains it, so that the YAML's folder can be
    moved."""
    folder = next(filter(path.is_relative_to, folders), None)
    return path.relative_to(folder).as_posix() if folder else str(path)


def _write_yaml(file: Path, content: Mapping[str, Any]) -> None:
    write_whole(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _scan(yaml_file: Path, out: Path) -> _Scans:
    """Scans all splits, with the classes of the labels. Raises UserError if a split cannot be read."""
    try:
        spec = load_dataset_spec(yaml_file).as_labeled()
        scans = {split: scan_split(spec, split, list_split(spec, split), IndexSettings()) for split in spec.splits}
    except UserError as error:
        reason = str(error).replace(f"{yaml_file.parent.name}/", "")  # the files are not there afterwards
        raise UserError(f"{out}: training could not read it: {reason}") from None
    return _Scans(spec, scans)


def _check_listed(splits: Mapping[str, _WrittenSplit], scans: _Scans) -> None:
    """Raises UserError for an image that training would not find, or whose labels it would not find."""
    listed = {path for split in splits for path in scans.paths_of(split)}
    for split in splits.values():
        for image in split.images:
            if os.path.realpath(image.path) not in listed:
                raise UserError(f"{image.path}: training would not find this image; rename it or its folder")


def _notes(splits: Mapping[str, _WrittenSplit], scans: _Scans, out: Path, max_bad: float) -> list[str]:
    """Returns `WrittenDataset.notes`. Raises UserError if training would refuse a split."""
    notes: list[str] = []
    for name, split in splits.items():
        scan = scans.by_split[name]
        findings = _located(scan.findings, scans.paths_of(name), split.images)
        used = scan.index.report
        report = ScanReport.of(findings, used_images=used.used_images, used_objects=used.used_objects)
        if report.has_lost_too_much(max_bad):
            raise UserError(
                f"{out}: training would refuse '{name}': {report.loss_summary()} (--max-bad is {max_bad:g})"
            )
        if report.lost_share:
            notes.append(f"'{name}': {report.loss_summary()}")
        fitted = [finding for finding in findings if finding.kind == FITTED and finding.row_number < 0]
        if fitted:
            first = f"first {fitted[0].where}: {fitted[0].text}"
            notes.append(f"{FITTED}: {counted(len(fitted), 'image')} of '{name}', {first}")
    return notes


def _located(findings: Iterable[Finding], paths: Sequence[str], images: Iterable[AnnotatedImage]) -> list[Finding]:
    """Returns findings that name the export instead of the COCO JSON. ``paths``: see `_Scans.paths_of`."""
    name_of = {os.path.realpath(image.path): f"{image.path.name} (labeled in {image.location})" for image in images}
    return [
        finding if finding.image < 0 else finding._replace(where=name_of.get(paths[finding.image], finding.where))
        for finding in findings
    ]
