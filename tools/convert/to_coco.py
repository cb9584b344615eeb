"""Converts the export of an annotation tool to a COCO JSON for each split, and a YAML.

The written data set is opened as training opens it, and must have as many boxes of each class as were collected.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from PIL import Image

from data.dataset.spec import SPLITS, DataSource
from data.images.kinds import IMAGE_SUFFIXES
from data.index.index import IndexSettings
from data.index.load import load_index
from data.labels.findings import BAD_IMAGE, BAD_LABEL, Finding, ScanReport
from data.listing.images import check_rows
from data.open import open_data
from tools.convert.collect import AnnotatedImage, Entry, collect, files_below
from tools.convert.csv_table import is_csv, read_csv
from tools.convert.cvat import is_cvat, read_cvat
from tools.convert.hugging_face import is_image_folder, is_parquet, read_image_folder, read_parquet
from tools.convert.labelme import is_labelme, read_labelme
from tools.train_line import train_line
from utils.config.settings import TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError
from utils.files.paths import check_new_path, normal_path, relative_name
from utils.files.safe_io import open_regular, write_whole
from utils.strings import aligned, counted

_HEAD_BYTES = 1 << 16  # enough to recognize a format


class Format(NamedTuple):
    """An annotation format."""

    title: str
    suffix: str
    fits: Callable[[bytes], bool]  # whether a file with this beginning has the format
    read: Callable[[Path], Iterator[Entry]]  # raises UserError for a malformed file
    is_per_image: bool = False  # whether each image has a file of its own


FORMATS = {
    "cvat": Format("CVAT", ".xml", is_cvat, read_cvat),
    "labelme": Format("LabelMe", ".json", is_labelme, read_labelme, is_per_image=True),
    "csv": Format("CSV", ".csv", is_csv, read_csv),
    "huggingface": Format("Hugging Face", ".parquet", is_parquet, read_parquet),
    "imagefolder": Format("Hugging Face image folder", ".jsonl", is_image_folder, read_image_folder),
}


def convert(source: Path, out: Path, format_name: str = "auto", *, max_bad: float = TrainConfig.max_bad) -> list[str]:
    """Writes the objects of ``source``, a file or folder, as the data set ``out``: ``out.json`` or a JSON for each
    split, lists of their images, ``out.yaml``, and the folder ``out`` for images from parquet files.

    Returns lines about what was written and what is lost, and the command that trains. Raises UserError, and leaves
    nothing behind, if the annotations cannot be read, or if more than the fraction ``max_bad`` is lost.
    """
    if out.suffix.lower() != ".json":
        raise UserError(f"{out}: the output must end in .json")
    source = normal_path(source)
    out = normal_path(out)
    root = source if source.is_dir() else source.parent
    annotation_format, files, others = _annotation_files(source, format_name)
    image_folder = out.with_suffix("")  # of images in parquet files
    is_parquet_format = annotation_format.suffix == ".parquet"
    for path in (out, out.with_suffix(".yaml"), *([image_folder] if is_parquet_format else [])):
        check_new_path(path)
    with _removed_on_failure() as created:
        if is_parquet_format:
            created.append(image_folder)
        entries, lost = _read(annotation_format, files, root, image_folder)
        images, unused = collect(entries, root)
        num_boxes = Counter(box.name for image in images for box in image.boxes)
        report = ScanReport.of([*lost, *unused], used_images=len(images), used_objects=num_boxes.total())
        if report.has_lost_too_much(max_bad) or not num_boxes:
            raise UserError(f"{source}: {report.loss_summary()} (--max-bad is {max_bad:g})")
        splits = _write(images, sorted(num_boxes), root, out, created)
        _check(out, num_boxes, max_bad)
    sizes = ", ".join(f"{split} {counted(len(of_split), 'image')}" for split, of_split in splits.items())
    lines = [f"{annotation_format.title}: {sizes}", *aligned([(name, f"{num_boxes[name]:,}") for name in num_boxes])]
    groups = sum(box.is_group for image in images for box in image.boxes)
    if groups:
        lines.append(f"{counted(groups, 'box')} around groups: regions to ignore")
    if others:
        lines.append(f"{counted(len(others), f'{annotation_format.suffix} file')} of another kind, first {others[0]}")
    lines += [line for _, line in report.lines()]
    return [*lines, train_line(out.with_suffix(".yaml"), splits, max_bad=max_bad)]


def _annotation_files(source: Path, format_name: str) -> tuple[Format, list[Path], list[Path]]:
    """Returns the format of an export, its annotation files, and the other files with their suffix. Raises UserError
    unless there is exactly one format."""
    files_of: dict[str, list[Path]] = {}
    candidates = list(files_below(source)) if source.is_dir() else [source]
    for file in candidates:
        for name, known in FORMATS.items():
            if file.suffix.lower() == known.suffix and format_name in ("auto", name):
                with open_regular(file) as opened:
                    if known.fits(opened.read(_HEAD_BYTES)):
                        files_of.setdefault(name, []).append(file)
    if not files_of:
        titles = ", ".join(known.title for name, known in FORMATS.items() if format_name in ("auto", name))
        raise UserError(f"{source}: expected annotations of {titles}; docs/formats.md names what reads other formats")
    if len(files_of) > 1:
        raise UserError(f"{source}: has several formats ({', '.join(files_of)}); choose one with --from")
    ((name, files),) = files_of.items()
    suffix = FORMATS[name].suffix
    return FORMATS[name], files, [f for f in candidates if f.suffix.lower() == suffix and f not in set(files)]


@contextlib.contextmanager
def _removed_on_failure() -> Iterator[list[Path]]:
    """Yields a list for the paths that the block creates, and removes these if it fails."""
    created: list[Path] = []
    try:
        yield created
    except BaseException:
        for path in created:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        raise


def _read(
    annotation_format: Format, files: Sequence[Path], root: Path, image_folder: Path
) -> tuple[list[Entry], list[Finding]]:
    """Reads all annotation files, and writes the images that parquet files contain to ``image_folder``. Returns the
    entries and what is lost. Raises UserError for a malformed file, unless it is about one image."""
    entries: list[Entry] = []
    findings: list[Finding] = []
    for file in files:
        try:
            for number, entry in enumerate(annotation_format.read(file)):
                if annotation_format.suffix == ".parquet":
                    suffix = _suffix_of(entry)
                    if not suffix:
                        text = "not an image of a known kind"
                        finding = Finding(entry.where, BAD_IMAGE, text, lost_images=1, lost_objects=len(entry.boxes))
                        findings.append(finding)
                        continue
                    folder = image_folder / file.parent.relative_to(root)
                    entry.path = folder / f"{file.stem}-{number:06}{suffix}"
                    check_new_path(entry.path)
                    folder.mkdir(parents=True, exist_ok=True)
                    write_whole(entry.path, entry.content)
                    entry.content = b""
                entries.append(entry)
        except UserError as error:
            if not annotation_format.is_per_image:
                raise
            findings.append(Finding(str(file), BAD_LABEL, str(error).removeprefix(f"{file}: "), lost_images=1))
    return entries, findings


def _suffix_of(entry: Entry) -> str:
    """Returns the suffix of an image in a parquet file, by its name or else its content; "" if it is not read."""
    suffix = Path(entry.image).suffix.lower()
    if suffix not in IMAGE_SUFFIXES:
        with contextlib.suppress(OSError), Image.open(io.BytesIO(entry.content)) as image:
            suffix = f".{image.format}".lower()
    return suffix if suffix in IMAGE_SUFFIXES else ""


def _write(
    images: Sequence[AnnotatedImage], names: Sequence[str], root: Path, out: Path, created: list[Path]
) -> dict[str, list[AnnotatedImage]]:
    """Writes a JSON and a list of images for each split, and the YAML; adds them to ``created``. Returns the images by
    split. Raises UserError for a path that a list cannot contain."""
    # Images in this folder are named by more than their file name, which may not be unique.
    base = root.parent if out.is_relative_to(root) else out.parent
    splits = {split: [image for image in images if image.split == split] for split in SPLITS}
    splits = {split: of_split for split, of_split in splits.items() if of_split}
    content: dict[str, Any] = {"path": os.path.relpath(base, out.parent)}
    annotations: dict[str, str] = {}

    def write(file: Path, text: str) -> str:
        check_new_path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        created.append(file)
        write_whole(file, text)
        return relative_name(file, base)

    for split, of_split in splits.items():
        file = out if len(splits) == 1 else out.with_name(f"{out.stem}-{split}.json")
        rows = [relative_name(image.path, base) for image in of_split]
        annotations[split] = write(file, json.dumps(_coco(of_split, rows, names)))
        rows = [str(image.path) if row.startswith("../") else row for row, image in zip(rows, of_split)]
        check_rows(rows)
        content[split] = write(file.with_suffix(".txt"), "".join(f"{row}\n" for row in rows))
    content |= {"annotations": annotations, "names": list(names)}
    write(out.with_suffix(".yaml"), yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return splits


def _coco(images: Sequence[AnnotatedImage], rows: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Returns the content of a COCO JSON. ``rows``: names of the images."""
    category_ids = {name: number for number, name in enumerate(names, 1)}
    records: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, (image, row) in enumerate(zip(images, rows), 1):
        record: dict[str, Any] = {"id": image_id, "file_name": row}
        if image.size_wh:
            record |= {"width": image.size_wh[0], "height": image.size_wh[1]}
        records.append(record)
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
    categories = [{"id": number, "name": name} for name, number in category_ids.items()]
    return {"images": records, "annotations": annotations, "categories": categories}


def _check(out: Path, expected: Counter[str], max_bad: float) -> None:
    """Opens the written data set as training does. Raises UserError if that fails, or if boxes are missing that no
    finding explains."""
    spec = open_data(DataSource(str(out.with_suffix(".yaml"))), DistributedContext.single())
    missing = Counter(expected)
    num_lost = 0
    for split in spec.splits:
        index = load_index(spec, split, IndexSettings(max_bad=max_bad))
        missing.subtract(spec.names[number] for number in index.classes.tolist())
        num_lost += index.report.lost_objects
    if min(missing.values()) < 0 or missing.total() != num_lost:
        differences = {name: number for name, number in missing.items() if number}
        raise UserError(f"{out}: {num_lost} objects are lost, but the numbers of boxes differ by {differences}")
