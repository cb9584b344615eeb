"""Converts the export of an annotation tool to COCO JSON and a YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from data.dataset.yaml_file import load_dataset_spec
from data.labels.json_files import load_json
from tools.convert.annotations import Annotations
from tools.convert.csv_table import unknown_columns
from tools.convert.extracted_images import ExtractedImages
from tools.convert.formats import FORMATS, Format, detect
from tools.convert.source_images import SourceImages, files_below
from tools.convert.write_dataset import WrittenDataset, write_dataset
from tools.train_line import train_line
from utils.config.commands import COMMANDS
from utils.config.settings import TrainConfig
from utils.errors import UserError
from utils.files.paths import check_new_path, normal_path
from utils.files.safe_io import open_regular
from utils.files.temporary_folder import creating_folder, temporary_folder
from utils.strings import aligned, counted

ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
EXPORT_SUFFIXES = frozenset({".json", ".ndjson", ".jsonl", ".csv"})
_COCO = re.compile(rb'"(annotations|images|categories|licenses)"\s*:\s*\[\s*\{')


def convert(source: Path, out: Path, format_name: str = "auto", *, max_bad: float = TrainConfig.max_bad) -> list[str]:
    """Writes the objects of ``source`` as COCO JSON, and a data set YAML.

    Args:
        format_name: a format of `FORMATS`, or "auto".
        max_bad: see `IndexSettings`.

    Returns a table of the objects by class, lines about what is left out, and the command that trains. Raises UserError
    if annotations cannot be read, or if more than ``max_bad`` of a split is unusable.
    """
    _check_paths(source, out)
    source = normal_path(source)
    out = normal_path(out)
    annotation_format, files = _annotation_files(source, format_name)
    if annotation_format.check is not None:
        annotation_format.check(source, files)
    with _all_or_nothing(out.parent, out.stem) as folder:
        root = source if source.is_dir() else source.parent
        extracted = ExtractedImages(folder / out.stem, root)
        annotations = Annotations(SourceImages(root), extracted, is_per_image=annotation_format.is_per_image)
        if annotation_format.is_per_image and source.is_dir():
            files = _with_unrecognized(files, source, annotation_format, annotations.source_images)
        for file in files:
            annotation_format.read(file, annotations)
        if not annotations.num_objects:
            reason = f"{counted(len(files), 'file')} of {annotation_format.title} without objects"
            raise UserError(f"{source}: {'; '.join(filter(None, (reason, annotations.skipped.summary())))}")
        annotations.drop_left_out()
        written = write_dataset(annotations, folder, out, max_bad)
    return [
        *_table(annotation_format.title, annotations, written, out),
        train_line(out.with_suffix(".yaml"), annotations.images_by_split(), max_bad=max_bad),
    ]


def _check_paths(source: Path, out: Path) -> None:
    """Raises UserError if ``source`` is an archive, or ``out`` and its YAML cannot be written."""
    if out.suffix.lower() != ".json":
        raise UserError(f"{out}: the output must end in .json")
    if source.suffix.lower() in ARCHIVES and source.is_file():
        raise UserError(f"{source}: an archive; unpack it and name the folder")
    for path in (out, out.with_suffix(".yaml")):
        check_new_path(path)


def _with_unrecognized(
    files: Sequence[Path], source: Path, annotation_format: Format, images: SourceImages
) -> list[Path]:
    """Returns ``files`` and the unrecognized files that seem to be of their format, in order: those next to recognized
    ones (reading a damaged one raises an error) and, if blank files are valid, those in `_blank_folders`. All are named
    after images."""
    recognized = set(files)
    files_of_folder: dict[Path, list[Path]] = {}
    for file in files_below(source, annotation_format.suffixes):
        if file in recognized or images.has_stem(file.stem):
            files_of_folder.setdefault(file.parent, []).append(file)
    folders = {file.parent for file in recognized}
    if annotation_format.may_be_blank:
        folders |= _blank_folders(files_of_folder, folders, images)
    return [file for folder, in_folder in files_of_folder.items() if folder in folders for file in in_folder]


def _blank_folders(
    files_of_folder: Mapping[Path, Sequence[Path]], recognized: Iterable[Path], images: SourceImages
) -> set[Path]:
    """Returns the folders whose files are all blank, as in a split without objects, unless an image of them has a file
    in one of the folders ``recognized``."""
    labeled = {images.find_of_file(file) for folder in recognized for file in files_of_folder[folder]}
    return {
        folder
        for folder, files in files_of_folder.items()
        if all(map(_is_blank, files)) and labeled.isdisjoint(map(images.find_of_file, files))
    }


def _is_blank(file: Path) -> bool:
    """Returns whether a file has no content but white space."""
    return not _head(file).strip()


def _head(file: Path) -> bytes:
    """Returns the beginning of a file, b"" if it cannot be read."""
    try:
        with open_regular(file) as opened:
            return opened.read(4096)
    except OSError:
        return b""


@contextmanager
def _all_or_nothing(folder: Path, stem: str) -> Iterator[Path]:
    """Yields a temporary folder whose files move to ``folder``, which is created, if the block succeeds."""
    with creating_folder(folder), temporary_folder(folder / stem) as temporary:
        yield temporary
        for path in sorted(temporary.iterdir()):
            check_new_path(folder / path.name)
        for path in sorted(temporary.iterdir()):  # the YAML last
            path.rename(folder / path.name)


def _annotation_files(source: Path, format_name: str) -> tuple[Format, list[Path]]:
    """Returns the format of an export, and its annotation files. Raises UserError unless there is exactly one format,
    or some files that may have the format that is named."""
    files_of = detect(source)
    if format_name != "auto":
        files = files_of.get(format_name, [])
        if not files_of:  # such as a CreateML JSON that begins with many images without objects
            files = _files_with_content(source, FORMATS[format_name].suffixes)
        if not files:
            hint = _found_hint(files_of) or _blank_hint(source)
            raise UserError(f"{source}: has no file of {FORMATS[format_name].title}{hint}")
        return FORMATS[format_name], files
    if len(files_of) > 1:
        raise UserError(f"{source}: has files of several formats{_found_hint(files_of)}")
    if not files_of:
        if _is_dataset(source):
            typed = f"{COMMANDS['train'].typed} --data {shlex.quote(str(source))}"
            raise UserError(f"{source}: training reads it as it is, without conversion: {typed}")
        files = list(files_below(source, EXPORT_SUFFIXES)) if source.is_dir() else [source]
        message = unknown_columns(files)
        if message:
            raise UserError(message)
        for file in files:
            if _COCO.search(_head(file)):
                instead = "give --data the folder that has it and the images, or a YAML that names it in 'annotations:'"
                raise UserError(f"{file}: COCO JSON, which {COMMANDS['train'].title} reads as it is; {instead}")
        if source.suffix.lower() == ".json":
            load_json(source, "JSON")  # raises UserError if it is malformed
        known = f"no format is recognized{_blank_hint(source)}; formats for --from are {', '.join(FORMATS)}"
        instead = "if the tool that made it writes YOLO txt, COCO JSON or Pascal VOC, export one of these"
        raise UserError(f"{source}: {known}; {instead}")
    ((format_name, files),) = files_of.items()
    return FORMATS[format_name], files


def _files_with_content(source: Path, suffixes: Sequence[str]) -> list[Path]:
    """Returns the files at ``source``, a file or a folder, with one of ``suffixes``, except blank ones."""
    files = files_below(source, suffixes) if source.is_dir() else [source]
    return [file for file in files if file.suffix.lower() in suffixes and not _is_blank(file)]


def _is_dataset(source: Path) -> bool:
    """Returns whether a folder is in a format that ``--data`` reads."""
    if not source.is_dir():
        return False
    try:
        load_dataset_spec(source)
    except UserError:
        return False
    return True


def _found_hint(files_of: Mapping[str, list[Path]]) -> str:
    """Returns a hint with the formats that were found; "" if there are none."""
    if not files_of:
        return ""
    return f"; found: {', '.join(f'--from {name} ({files[0].name})' for name, files in files_of.items())}"


def _blank_hint(source: Path) -> str:
    """Returns a hint at files that may be annotations without any content; "" if there are none."""
    suffixes = {suffix for known in FORMATS.values() for suffix in known.suffixes}
    files = files_below(source, suffixes) if source.is_dir() else [source]
    blank = list(filter(_is_blank, files))
    return f"; {counted(len(blank), 'file')} without content, first {blank[0]}" if blank else ""


def _table(title: str, annotations: Annotations, written: WrittenDataset, out: Path) -> list[str]:
    """Returns a table of the objects by class, and notes about objects that are ignored or left out."""
    names = annotations.class_names()
    rows = [(name, str(annotations.num_objects[name]), str(written.num_boxes[name])) for name in names]
    lines = aligned([("class", "export", out.suffix.lstrip(".")), *rows])
    images_by_split = annotations.images_by_split()
    sizes = ", ".join(f"{split} {counted(len(images), 'image')}" for split, images in images_by_split.items())
    lines += [f"{name}: its boxes are regions to ignore" for name in annotations.ignored_classes()]
    used = list(chain.from_iterable(images_by_split.values()))
    groups = sum(box.crowd for annotated in used for box in annotated.boxes)
    if groups:
        lines.append(f"{counted(groups, 'box')} around groups: regions to ignore")
    skipped = annotations.skipped.summary()
    if skipped:
        lines.append(skipped)
    backgrounds = sum(not annotated.boxes for annotated in used)
    if backgrounds:
        lines.append(f"{counted(backgrounds, 'image')} without objects: background")
    num_left_out = annotations.num_left_out()
    if num_left_out:
        lines.append(f"{counted(num_left_out, 'image')} without usable labels: left out of training")
    lines += written.notes
    return [f"{title}: {sizes}", *lines]
