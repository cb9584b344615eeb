"""Converts the export of an annotation tool to COCO JSON and a YAML."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from data.labels.coco import read_coco
from data.source.dataset_yaml import load_dataset_spec
from data.source.diagnosis.other_exports import EXPORT_SUFFIXES, first_unread_export
from data.source.listing.image_list import is_row
from data.source.open import ARCHIVES
from tools.convert.annotations import AnnotatedImage, Annotations
from tools.convert.csv_table import unknown_columns
from tools.convert.formats import FORMATS, detect
from tools.convert.source_images import files_below
from tools.convert.values import image_size
from utils.config.commands import COMMANDS
from utils.errors import UserError
from utils.files.paths import normal_path
from utils.files.safe_io import write_whole
from utils.files.temporary_folder import temporary_folder
from utils.strings import aligned, counted


def convert(source: Path, out: Path, name: str = "auto") -> list[str]:
    """Writes the objects of ``source`` as COCO JSON, and a data set YAML. ``name``: a format of `FORMATS`, or "auto".
    Returns a table of the objects by class. Raises UserError if something cannot be read, or would be lost."""
    _check_paths(source, out)
    source = normal_path(source)
    out = normal_path(out)
    name, files = _annotation_files(source, name)
    reader = FORMATS[name]
    if reader.check is not None:
        reader.check(source, files)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _all_or_nothing(out.parent, out.stem) as folder:
        annotations = Annotations(source, extracted=folder / out.stem)
        if reader.is_per_image and source.is_dir():
            files = _with_damaged(files, source, name, annotations)
        for file in files:
            reader.read(file, annotations)
        if not annotations.num_objects:
            reason = f"{counted(len(files), 'file')} of {reader.title} without objects"
            raise UserError(f"{source}: {'; '.join(filter(None, (reason, annotations.skipped_summary())))}")
        annotations.drop_left_out()
        written = _write_files(annotations, folder, out)
        expected = annotations.num_objects
        missing = {name: expected[name] - written[name] for name in expected if written[name] != expected[name]}
        if missing:
            raise UserError(f"{source}: these objects would be missing in {out}: {missing}")
    return _table(reader.title, annotations, written, out)


def _check_paths(source: Path, out: Path) -> None:
    """Raises UserError unless ``source`` can be read, and ``out`` and its YAML written."""
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if out.suffix.lower() != ".json":
        raise UserError(f"{out}: the output must end in .json")
    if source.suffix.lower() in ARCHIVES and source.is_file():
        raise UserError(f"{source}: an archive; unpack it and name the folder")
    for path in (out, out.with_suffix(".yaml")):
        _check_new(path)


def _with_damaged(files: Sequence[Path], source: Path, name: str, annotations: Annotations) -> list[Path]:
    """Returns ``files``, which are named after images, and unrecognized files next to them that are also named after an
    image, in order: the latter are damaged or empty, and reading them raises an error."""
    recognized = set(files)
    folders = {file.parent for file in files}
    candidates = files_below(source, FORMATS[name].suffixes)
    return [
        file
        for file in candidates
        if file in recognized or (file.parent in folders and annotations.source_images.has_stem(file.stem))
    ]


def _check_new(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path}: exists; remove it, or choose another name")


@contextmanager
def _all_or_nothing(folder: Path, stem: str) -> Iterator[Path]:
    """Yields a temporary folder whose files move to ``folder`` if the block succeeds."""
    with temporary_folder(folder / stem) as temporary:
        yield temporary
        for path in sorted(temporary.iterdir()):
            _check_new(folder / path.name)
        for path in sorted(temporary.iterdir()):  # the YAML last
            path.rename(folder / path.name)


def _write_files(annotations: Annotations, folder: Path, out: Path) -> Counter[str]:
    """Writes the files of ``out`` to ``folder``, and returns the number of boxes written, by class."""
    names = annotations.class_names()
    written: Counter[str] = Counter()
    content: dict[str, Any] = {"path": "."}
    annotation_files = {}
    images_by_split = annotations.images_by_split()
    split_of_image = {annotated.path: split for split, images in images_by_split.items() for annotated in images}
    for split, images in images_by_split.items():
        path = folder / (out.name if len(images_by_split) == 1 else f"{out.stem}-{split}.json")
        others = [image for image, other_split in split_of_image.items() if other_split != split]
        base = _folder_of([annotated.path for annotated in images], others)
        entry = base
        if entry is None:
            entry = path.with_suffix(".txt")
            rows = [_relative(annotated.path, folder, out.parent) for annotated in images]
            _check_rows(rows)
            write_whole(entry, "".join(f"{row}\n" for row in rows))
        content[split] = _yaml_path(_relative(entry, folder, out.parent))
        write_whole(path, json.dumps(_coco(images, names, base)))
        annotation_files[split] = path.name
        for annotated, entry_read in zip(images, read_coco(path, tuple(names)).images, strict=True):
            _check_name(annotated.path, entry_read.file_name)
            written.update(names[int(row[0])] for row in entry_read.labels.rows)
    content |= {"names": names, "annotations": annotation_files}
    if annotations.ignored:
        content["ignore"] = sorted(annotations.ignored)
    write_whole(folder / out.with_suffix(".yaml").name, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return written


def _annotation_files(source: Path, name: str) -> tuple[str, list[Path]]:
    """Returns the format of an export, and its annotation files. Raises UserError unless there is exactly one
    format."""
    files_of = detect(source)
    if name != "auto":
        if name not in files_of:
            raise UserError(f"{source}: has no file of {FORMATS[name].title}{_instead(files_of)}")
        return name, files_of[name]
    if len(files_of) > 1:
        raise UserError(f"{source}: has files of several formats{_instead(files_of)}")
    if not files_of:
        if _is_dataset(source):
            typed = f"{COMMANDS['train'].typed} --data {shlex.quote(str(source))}"
            raise UserError(f"{source}: training reads it as it is, without conversion: {typed}")
        files = list(files_below(source, EXPORT_SUFFIXES)) if source.is_dir() else [source]
        message = first_unread_export(files) or unknown_columns(files)
        if message:
            raise UserError(message)
        known = f"no format is recognized; formats are {', '.join(FORMATS)}"
        instead = "if the tool that made it writes YOLO txt, COCO JSON or Pascal VOC, export one of these"
        raise UserError(f"{source}: {known}; {instead}")
    return next(iter(files_of.items()))


def _is_dataset(source: Path) -> bool:
    """Returns whether a folder is in a format that ``--data`` reads."""
    if not source.is_dir():
        return False
    try:
        load_dataset_spec(source)
    except UserError:
        return False
    return True


def _instead(files_of: Mapping[str, list[Path]]) -> str:
    """Returns a hint with the formats that were found; "" if there are none."""
    if not files_of:
        return ""
    return f"; found: {', '.join(f'--from {name} ({files[0].name})' for name, files in files_of.items())}"


def _relative(path: Path, *folders: Path) -> str:
    """Returns ``path`` relative to the first of ``folders`` that contains it, so that the YAML's folder can be
    moved."""
    folder = next(filter(path.is_relative_to, folders), None)
    return path.relative_to(folder).as_posix() if folder else str(path)


def _check_rows(rows: Sequence[str]) -> None:
    """Raises UserError for a path that a list cannot contain."""
    for row in rows:
        if not is_row(row):
            reason = "has a line break or outer spaces, or is not UTF-8, so it cannot be in a list of images"
            raise UserError(f"{row!r}: {reason}; rename it")


def _check_name(image: Path, name_read: str) -> None:
    """Raises UserError if the name of an image, as read from the COCO JSON, is that of another file."""
    if os.path.basename(name_read) != image.name:
        reason = r"has a \, which separates folders in a COCO JSON"
        raise UserError(f"{image.name!r}: {reason}; rename the image")


def _yaml_path(path: str) -> str:
    """Returns ``path``. Raises UserError if a YAML cannot contain it."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: is not UTF-8, so it cannot be in a YAML; rename it") from None
    return path


def _folder_of(images: list[Path], others: Sequence[Path]) -> Path | None:
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


def _coco(images: Sequence[AnnotatedImage], names: list[str], base: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Returns the content of a COCO JSON. ``base``: see `_folder_of`."""
    entries: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    category_ids = {name: i for i, name in enumerate(names, 1)}
    for number, annotated in enumerate(images, 1):
        path = annotated.path
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


def _table(title: str, annotations: Annotations, written: Counter[str], out: Path) -> list[str]:
    """Returns a table of the objects by class, and notes about objects that are ignored or left out."""
    rows = [(name, str(annotations.num_objects[name]), str(written[name])) for name in annotations.class_names()]
    lines = aligned([("class", "export", out.suffix.lstrip(".")), *rows])
    images_by_split = annotations.images_by_split()
    sizes = ", ".join(f"{split} {counted(len(images), 'image')}" for split, images in images_by_split.items())
    lines += [f"{name}: its boxes are regions to ignore" for name in sorted(annotations.ignored)]
    used = list(chain.from_iterable(images_by_split.values()))
    groups = sum(box.crowd for annotated in used for box in annotated.boxes)
    if groups:
        lines.append(f"{counted(groups, 'box')} around groups: regions to ignore")
    if annotations.skipped:
        lines.append(annotations.skipped_summary())
    backgrounds = sum(not annotated.boxes for annotated in used)
    if backgrounds:
        lines.append(f"{counted(backgrounds, 'image')} without objects: background")
    left_out = annotations.num_left_out()
    if left_out:
        lines.append(f"{counted(left_out, 'image')} without usable labels: left out of training")
    return [
        f"{title}: {sizes}",
        *lines,
        f"train: {COMMANDS['train'].typed} --data {shlex.quote(str(out.with_suffix('.yaml')))}",
    ]
