"""Converts the export of an annotation tool to a COCO JSON for each split, and a YAML.

What cannot be used becomes a finding, of the kinds of the scan. The written data set is opened as training opens it,
and must have as many objects as were written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from data.dataset.folder import split_of
from data.dataset.spec import SPLITS, DataSource
from data.images.kinds import IMAGE_SUFFIXES
from data.images.verify import check_image
from data.index.load import load_index
from data.labels.clean import MIN_SIDE_PX
from data.labels.findings import BAD_BOX, BAD_LABEL, BAD_ROW, NO_LABEL, ORPHAN, Finding, ScanReport
from data.labels.match import AMBIGUOUS, match_entries
from data.listing.images import check_rows
from data.open import open_data
from tools.convert.csv_table import read_csv
from tools.convert.cvat import read_cvat
from tools.convert.entry import MAX_TEXT, Box, Entry
from tools.convert.hugging_face import read_image_folder, read_parquet
from tools.convert.labelme import read_labelme
from tools.train_line import train_line
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError, one_line
from utils.files.paths import check_new_path, normal_path, relative_name
from utils.files.safe_io import open_regular, write_whole
from utils.strings import aligned, counted

_HEAD_BYTES = 1 << 16  # enough to recognize a format


class Format(NamedTuple):
    """An annotation format."""

    title: str
    suffix: str
    mark: bytes  # what a file of this format has near its beginning, in lower case
    read: Callable[[Path], Iterator[Entry]]  # raises UserError for a malformed file
    is_per_image: bool = False  # whether each image has a file of its own


FORMATS = {
    "cvat": Format("CVAT", ".xml", b"<annotations>", read_cvat),
    "labelme": Format("LabelMe", ".json", b'"shapes"', read_labelme, is_per_image=True),
    "csv": Format("CSV", ".csv", b"xmin", read_csv),
    "huggingface": Format("Hugging Face", ".parquet", b"par1", read_parquet),
    "imagefolder": Format("Hugging Face image folder", ".jsonl", b'"file_name"', read_image_folder),
}


@dataclass(slots=True)
class AnnotatedImage:
    """An image, and its boxes in pixels."""

    path: Path
    split: str
    where: str  # its first entry
    size_wh: tuple[int, int] | None = None
    boxes: list[Box] = field(default_factory=list)
    has_lost: bool = False  # whether an object of it cannot be used


def convert(source: Path, out: Path, format_name: str = "auto", *, max_bad: float = TrainConfig.max_bad) -> list[str]:
    """Writes the objects of ``source``, a file or folder, as the data set ``out``: ``out.json`` or a JSON for each
    split, lists of their images, ``out.yaml``, and the folder ``out`` for images from parquet files.

    Returns lines about what was written and what is lost, and the command that trains. Raises UserError, and leaves
    no file behind, if the annotations cannot be read, or if more than the fraction ``max_bad`` is lost.
    """
    if out.suffix.lower() != ".json":
        raise UserError(f"{out}: the output must end in .json")
    source = normal_path(source)
    out = normal_path(out)
    root = source if source.is_dir() else source.parent
    known, files, others = _annotation_files(source, format_name)
    image_folder = out.with_suffix("")  # of images in parquet files
    for path in (out, out.with_suffix(".yaml"), *([image_folder] if known.suffix == ".parquet" else [])):
        check_new_path(path)
    created: list[Path] = []
    try:
        entries: list[Entry] = []
        findings: list[Finding] = []
        for file in files:
            try:
                for number, entry in enumerate(known.read(file)):
                    if entry.content:
                        created.append(image_folder)
                        suffix = ".jpg" if entry.content.startswith(b"\xff\xd8") else ".png"
                        entry.path = image_folder / file.parent.relative_to(root) / f"{file.stem}-{number:06}{suffix}"
                        entry.path.parent.mkdir(parents=True, exist_ok=True)
                        write_whole(entry.path, entry.content)
                        entry.content = b""
                    entries.append(entry)
            except UserError as error:
                if not known.is_per_image:
                    raise
                findings.append(Finding(BAD_LABEL, str(error).removeprefix(f"{file}: "), str(file), lost_images=1))
        images = collect(entries, root, findings)
        num_boxes = Counter(box.name for image in images for box in image.boxes)
        report = ScanReport.of(findings, used_images=len(images), used_objects=num_boxes.total())
        if not num_boxes and not (report.lost_images or report.lost_objects):
            raise UserError(f"{source}: its annotations have no box")
        if report.has_lost_too_much(max_bad) or not num_boxes:
            raise UserError(f"{source}: {report.loss_summary()} (--max-bad is {max_bad:g})")
        sizes = _write(images, sorted(num_boxes), root, out, created)
        spec = open_data(DataSource(str(out.with_suffix(".yaml"))), DistributedContext.single())
        reports = [load_index(spec, split, max_bad=max_bad).report for split in spec.splits]
        num_read = sum(written.objects for written in reports)
        if num_read != num_boxes.total():
            raise UserError(f"{out}: {num_boxes.total()} objects were written, but {num_read} are read")
    except BaseException:
        for path in created:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        raise
    shown = ", ".join(f"{split} {counted(count, 'image')}" for split, count in sizes.items())
    lines = [f"{known.title}: {shown}", *aligned([(name, f"{count:,}") for name, count in num_boxes.items()])]
    groups = sum(box.is_group for image in images for box in image.boxes)
    if groups:
        lines.append(f"{counted(groups, 'box')} around groups: regions to ignore")
    if others:
        lines.append(f"{counted(len(others), f'{known.suffix} file')} of another kind, first {others[0]}")
    lines += [line for _, line in report.lines()]
    return [*lines, train_line(out.with_suffix(".yaml"), list(sizes), max_bad=max_bad)]


def _files_below(folder: Path) -> list[Path]:
    """Returns the files of a folder, sorted, except hidden ones and those in hidden folders."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _annotation_files(source: Path, format_name: str) -> tuple[Format, list[Path], list[Path]]:
    """Returns the format of an export, its annotation files, and the other files with their suffix. Raises UserError
    unless there is exactly one format."""
    files_of: dict[str, list[Path]] = {}
    formats = {name: known for name, known in FORMATS.items() if format_name in ("auto", name)}
    candidates = _files_below(source) if source.is_dir() else [source]
    for file in candidates:
        for name, known in formats.items():
            if file.suffix.lower() == known.suffix:
                with open_regular(file) as opened:
                    if known.mark in opened.read(_HEAD_BYTES).lower():
                        files_of.setdefault(name, []).append(file)
    if not files_of:
        titles = ", ".join(known.title for known in formats.values())
        raise UserError(f"{source}: expected annotations of {titles}; docs/formats.md names what reads other formats")
    if len(files_of) > 1:
        raise UserError(f"{source}: has several formats ({', '.join(files_of)}); choose one with --from")
    ((name, files),) = files_of.items()
    suffix = FORMATS[name].suffix
    return FORMATS[name], files, [f for f in candidates if f.suffix.lower() == suffix and f not in set(files)]


def collect(entries: Sequence[Entry], root: Path, findings: list[Finding]) -> list[AnnotatedImage]:
    """Returns the labeled images and backgrounds below the folder ``root``, sorted by path, and adds what is lost to
    ``findings``. Raises UserError for an image in two splits.

    An image is the file that its name denotes in the folder of the annotation file, or else the one whose path ends
    with the name (rule D5).
    """
    paths = [path for path in _files_below(root) if path.suffix.lower() in IMAGE_SUFFIXES]
    names = {True: [relative_name(path, root) for path in paths]}
    names[False] = [os.path.splitext(name)[0] for name in names[True]]
    path_of = dict(zip(names[True], paths))
    matches = {has: match_entries([entry.image for entry in entries], of_kind) for has, of_kind in names.items()}
    images: dict[Path, AnnotatedImage] = {}
    unknown: set[str] = set()  # names of images that are not found
    for position, entry in enumerate(entries):
        beside = relative_name(entry.file.parent / entry.image.replace("\\", "/"), root)
        number = int(matches[entry.has_suffix][position])
        path = entry.path or path_of.get(beside) or (paths[number] if number >= 0 else None)
        if path is None and not entry.needs_image:
            continue
        if path is None:
            reason = "fits several files" if number == AMBIGUOUS else f"is not found below {root}"
            text = f"image {one_line(entry.image)[:MAX_TEXT]!r} {reason}"
            lost = len(entry.boxes)
            is_first = entry.image not in unknown
            findings.append(Finding(ORPHAN, text, entry.where, number=lost, lost_images=is_first, lost_objects=lost))
            unknown.add(entry.image)
            continue
        split = split_of(entry.split) or _split_of_paths(path, entry.file, root)
        image = images.setdefault(path, AnnotatedImage(path, split, entry.where))
        if image.split != split:
            raise UserError(
                f"{entry.where}: {path.name} is in '{split}' here, and in '{image.split}' in {image.where}; remove one"
            )
        if not entry.is_labeled:
            findings.append(Finding(NO_LABEL, "its objects are null: a background", entry.where))
        _add_boxes(entry, image, findings)
    for path in paths:
        if path not in images:
            findings.append(Finding(NO_LABEL, "is not in the annotations: left out", str(path)))
    for path, image in list(images.items()):
        if image.has_lost and not image.boxes:  # as a background, it would teach the model to ignore its objects
            del images[path]
            findings.append(Finding(BAD_LABEL, f"{path.name} has no usable box", image.where, lost_images=1))
    return [images[path] for path in sorted(images)]


def _split_of_paths(image: Path, file: Path, root: Path) -> str:
    """Returns the split that a folder of the image or of its annotation file is named after, or the beginning of the
    name of a file with several images, such as ``train-00000-of-00001.parquet``; "train" if there is none."""
    names = [*image.parent.relative_to(root).parts] if image.is_relative_to(root) else []
    names += file.parent.relative_to(root).parts
    if file.suffix.lower() != ".json":  # LabelMe's file is called like its image
        names.append(file.name.lstrip("_").replace(".", "-").partition("-")[0])
    return next(filter(None, map(split_of, names)), "train")


def _add_boxes(entry: Entry, image: AnnotatedImage, findings: list[Finding]) -> None:
    """Adds the boxes of an entry to its image, in pixels, and those that are lost to ``findings``."""
    size_wh = entry.size_wh
    boxes = entry.boxes
    if entry.is_normalized:
        try:
            size_wh = image.size_wh or check_image(image.path).size_hw[::-1]
        except UserError as error:
            boxes = [str(error)] * len(boxes)
    if size_wh and image.size_wh and size_wh != image.size_wh:
        boxes = [f"states the size {size_wh}, and {image.where} the size {image.size_wh}"] * len(boxes)
    image.size_wh = image.size_wh or size_wh
    scale_x, scale_y = image.size_wh if entry.is_normalized and image.size_wh else (1, 1)
    for number, box in enumerate(boxes):
        kind = BAD_ROW
        problem = box if isinstance(box, str) else ""
        if not isinstance(box, str):
            x1, y1, x2, y2 = box.x1 * scale_x, box.y1 * scale_y, box.x2 * scale_x, box.y2 * scale_y
            if x2 - x1 >= MIN_SIDE_PX and y2 - y1 >= MIN_SIDE_PX and math.isfinite(x1 + y1 + x2 + y2):
                image.boxes.append(Box(box.name, x1, y1, x2, y2, box.is_group))
                continue
            kind = BAD_BOX
            problem = f"x1 y1 x2 y2: {x1:g} {y1:g} {x2:g} {y2:g}"
        image.has_lost = True
        where = f"{entry.where}: object {number}" if len(boxes) > 1 else entry.where
        findings.append(Finding(kind, problem, where, lost_objects=1))


def _write(
    images: Sequence[AnnotatedImage], names: Sequence[str], root: Path, out: Path, created: list[Path]
) -> dict[str, int]:
    """Writes a JSON and a list of images for each split, and the YAML; adds them to ``created``. Returns the number of
    images by split. Raises UserError for a path that a list cannot contain."""
    # Images in this folder are named by more than their file name, which may not be unique.
    base = root.parent if out.is_relative_to(root) else out.parent
    category_ids = {name: number for number, name in enumerate(names, 1)}
    content: dict[str, Any] = {"path": os.path.relpath(base, out.parent)}
    annotations_of: dict[str, str] = {}
    sizes: dict[str, int] = {}

    def write(file: Path, text: str) -> str:
        check_new_path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        created.append(file)
        write_whole(file, text)
        return relative_name(file, base)

    for split in SPLITS:
        of_split = [image for image in images if image.split == split]
        if not of_split:
            continue
        sizes[split] = len(of_split)
        records: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        rows: list[str] = []
        for image_id, image in enumerate(of_split, 1):
            name = relative_name(image.path, base)
            rows.append(str(image.path) if name.startswith("../") else name)
            records.append({"id": image_id, "file_name": name})
            if image.size_wh:
                records[-1] |= {"width": image.size_wh[0], "height": image.size_wh[1]}
            for box in image.boxes:
                w = box.x2 - box.x1
                h = box.y2 - box.y1
                annotation = {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": category_ids[box.name],
                    "bbox": [box.x1, box.y1, w, h],
                    "area": w * h,
                    "iscrowd": int(box.is_group),
                }
                annotations.append(annotation)
        check_rows(rows)
        categories = [{"id": number, "name": name} for name, number in category_ids.items()]
        coco = {"images": records, "annotations": annotations, "categories": categories}
        file = out if len({image.split for image in images}) == 1 else out.with_name(f"{out.stem}-{split}.json")
        annotations_of[split] = write(file, json.dumps(coco))
        content[split] = write(file.with_suffix(".txt"), "".join(f"{row}\n" for row in rows))
    content |= {"annotations": annotations_of, "names": list(names)}
    write(out.with_suffix(".yaml"), yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return sizes
