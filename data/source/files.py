"""Lists the files of a split with their sizes and modification times, which show whether the split has changed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from data.image_io.decode import image_suffixes
from data.image_io.shards import is_shard_path
from data.labels.findings import BAD_LABEL, Finding
from data.labels.image_names import loose
from data.labels.label_format import FilesPerImage, ImageFile, LabelFile, LabelFormat, OtherImages
from data.source.dataset_spec import DatasetSpec, SplitSource
from data.source.image_list import MAX_LIST_BYTES, is_image
from data.source.label_files import FoundLabels, LabelSearch
from data.source.split_images import SplitImages, find_images, images_as_far_as_listed, images_beside, other_images
from data.source.unused_labels import UnusedLabels
from data.source.walk import Folders, stamp_of, walk
from utils.errors import UserError
from utils.files.paths import path_of, relative_name
from utils.files.safe_io import read_text
from utils.logger import get_logger


@dataclass(slots=True)
class Listing:
    """Holds the files of a split."""

    images: list[ImageFile]  # sorted by name
    labels: list[LabelFile]  # one per image, or one for all
    label_format: LabelFormat
    findings: list[Finding] = field(default_factory=list)
    lists: dict[Path, list[str]] = field(default_factory=dict)  # image names in each .txt list, in order
    taken: dict[str, str] = field(default_factory=dict)  # see `FoundLabels`
    hidden: int = 0  # number of images left out because symbolic links show them under another name
    others: OtherImages = OtherImages()  # images that one label file for all may name, too


def list_split(spec: DatasetSpec, split: str) -> Listing:
    """Lists the files of a split.

    Raises UserError if the split, its folder, its annotations or any image is missing, or it joins data sets.
    """
    source = spec.split(split)
    if source.parts:
        raise UserError(
            f"{spec.source}: '{split}' joins other data sets, which are not copied; name one, or leave out --stage"
        )
    folders = Folders(spec.root)
    split_images = find_images(spec, split, folders)
    label_format = _label_format(source, spec)
    if split in spec.originals:
        split_images.findings += spec.originals[split].findings
    if label_format.per_image is None:
        return _list_one_label_file(split_images, label_format, spec, split, folders)
    return _list_files_per_image(split_images, label_format, label_format.per_image, spec, split, folders)


def _list_one_label_file(
    split_images: SplitImages, label_format: LabelFormat, spec: DatasetSpec, split: str, folders: Folders
) -> Listing:
    """Lists a split in a format with one label file for all images."""
    annotations = spec.split(split).annotations
    assert annotations is not None, "such a format is known by its annotations"
    all_images = split_images.sorted()
    kept = _without_equal_views(all_images, None, split_images.views, spec.root)
    if split in spec.originals:
        others = spec.originals[split].others
    else:
        others = other_images(spec, split, split_images, folders)
    return Listing(
        images=[all_images[i] for i in kept],
        labels=[LabelFile(relative_name(annotations, spec.root), stamp_of(annotations))],
        label_format=label_format,
        findings=split_images.findings,
        lists=split_images.lists,
        hidden=len(all_images) - len(kept),
        others=others,
    )


def _list_files_per_image(
    split_images: SplitImages,
    label_format: LabelFormat,
    files: FilesPerImage,
    spec: DatasetSpec,
    split: str,
    folders: Folders,
) -> Listing:
    """Lists a split in a format with one label file per image. Raises UserError if none of these can be read."""
    all_images = split_images.sorted()
    found_labels = _find_label_files(all_images, files, spec, split, folders)
    findings = split_images.findings + found_labels.findings
    kept = _without_equal_views(all_images, found_labels.files, split_images.views, spec.root)
    files_of_kept = [(all_images[i], found_labels.files[i]) for i in kept]
    pairs = [(image, file) for image, file in files_of_kept if file is not None]
    if not pairs:
        first = next(finding for finding in findings if finding.kind == BAD_LABEL)
        raise UserError(f"{spec.source}: no label file of '{split}' can be read; first {first.where}: {first.text}")
    return Listing(
        images=[image for image, _ in pairs],
        labels=[file for _, file in pairs],
        label_format=label_format,
        findings=findings,
        lists=split_images.lists,
        taken=found_labels.taken,
        hidden=len(all_images) - len(kept),
    )


def without_empty(spec: DatasetSpec, splits: Iterable[str]) -> DatasetSpec:
    """Returns ``spec`` without those of ``splits`` whose folders have no image or whose lists are empty, and logs
    them."""
    suffixes = image_suffixes(spec.pixels)

    def has_images(entry: Path) -> bool:
        if entry.is_dir():
            return any(is_image(each.name, suffixes) for visit in walk(entry) for each in visit.entries)
        if entry.suffix.lower() == ".txt" and entry.is_file():
            return bool(read_text(entry, most=MAX_LIST_BYTES).strip())
        return entry.exists()

    kept = dict(spec.splits)
    for name in splits:
        images = kept[name].images if name in kept else ()
        if images and not any(map(has_images, images)):
            del kept[name]
            get_logger().info("%s: '%s' (%s) has no images and is left out", spec.source, name, images[0])
    return replace(spec, splits=kept)


def shards_of(spec: DatasetSpec, split: str) -> Path | None:
    """Returns the index of the shards of a split; None for a split in files. Raises UserError for a mixture."""
    images = spec.split(split).images
    shards = [path for path in images if is_shard_path(path)]
    if shards and len(images) > 1:
        raise UserError(f"{spec.source}: '{split}': {shards[0]} must be the only entry; join data sets by their YAMLs")
    return shards[0] if shards else None


def _label_format(source: SplitSource, spec: DatasetSpec) -> LabelFormat:
    """Returns the format of the labels of a split. Raises UserError if its annotations are missing or of no format."""
    annotations = source.annotations
    label_format = source.label_format
    if label_format is not None and (label_format.per_image or annotations is None or annotations.is_file()):
        return label_format
    assert annotations is not None, "without annotations, the format is YOLO txt"
    if not annotations.exists():
        raise spec.missing_error(annotations)
    raise UserError(f"{annotations}: neither a COCO .json nor a folder of VOC .xml (named by {spec.source})")


def _find_label_files(
    images: list[ImageFile], files: FilesPerImage, spec: DatasetSpec, split: str, folders: Folders
) -> FoundLabels:
    """Finds the label files of a split. Images to which a label file of another name may belong are left out."""
    source = spec.split(split)
    search = LabelSearch(images, files, source.annotations, folders)
    if split in spec.originals:  # whose findings say which label files are unused
        return search.run_on_copy(spec.originals[split].taken)
    found = search.run()
    unused = UnusedLabels(
        found,
        label_format=files,
        annotations=source.annotations,
        folders=folders,
        entries=[str(entry) for entry in source.images if entry.is_dir()],
        others=_OtherSplits(spec, split, {image.name for image in images}),
    ).report()
    found.findings += unused.findings
    for i in unused.left_out:
        found.files[i] = None
    return found


class _OtherSplits:
    """Lists the other splits when asked; implements `data.source.unused_labels.OtherSplits`."""

    def __init__(self, spec: DatasetSpec, split: str, split_images: Collection[str]) -> None:
        self._spec = spec
        self._split = split
        self._split_images = split_images
        self.is_first = split == next(iter(spec.splits))

    @cached_property
    def stems(self) -> frozenset[str]:
        annotations = self._spec.split(self._split).annotations
        names: list[str] = []
        for other, source in self._spec.splits.items():
            if other != self._split and _share_labels(annotations, source.annotations):
                names += images_as_far_as_listed(self._spec, other, Folders(self._spec.root)).images
        if annotations is not None:
            names += images_beside(self._spec, self._split, self._split_images, Folders(self._spec.root))
        return frozenset(loose(os.path.splitext(name.rpartition("/")[2])[0]) for name in names)

    @cached_property
    def folders_before(self) -> frozenset[str]:
        names: set[str] = set()
        for other in itertools.takewhile(lambda name: name != self._split, self._spec.splits):
            images = images_as_far_as_listed(self._spec, other, Folders(self._spec.root)).images
            names |= {name.rpartition("/")[0] for name in images}
        return frozenset(path_of(name, self._spec.root) for name in names)


def _share_labels(first: Path | None, second: Path | None) -> bool:
    """Returns whether the label files of two splits may be in the same folder. None: they are next to the images."""
    if first is None or second is None:
        return first is None and second is None
    return first.is_relative_to(second) or second.is_relative_to(first)


def _without_equal_views(
    images: list[ImageFile], labels: list[LabelFile | None] | None, views: dict[str, list[str]], root: Path
) -> list[int]:
    """Returns the positions of ``images`` without those that symbolic links show under another name as well.

    Args:
        labels: one per image (None: it cannot be read); None: one file has those of all.
        views: see `SplitImages`.
    """
    real_of = {prefix: real for real, prefixes in views.items() if len(prefixes) > 1 for prefix in prefixes}
    positions_of: dict[tuple[str, str], list[int]] = {}
    for i, image in enumerate(images if real_of else ()):
        folder, separator, name = image.name.rpartition("/")
        real = real_of.get(folder + separator)
        if real:
            positions_of.setdefault((real, name), []).append(i)
    dropped: set[int] = set()
    for (real, _), positions in positions_of.items():
        kept = _labeled_views(positions, labels, root) if labels else []
        dropped.update(positions)
        dropped.difference_update(kept or [_usual_view(positions, images, real, root)])
    return [i for i in range(len(images)) if i not in dropped]


def _labeled_views(positions: list[int], labels: list[LabelFile | None], root: Path) -> list[int]:
    """Returns, of the ``positions`` of one image, those with label files of their own; if some of these cannot be read
    and no other has any, one of them, as the image is no background."""
    with_file: dict[str, int] = {}  # by the real path of the label file
    unreadable = []
    for i in positions:
        file = labels[i]
        if file is None:
            unreadable.append(i)
        elif file.stamp is not None:
            with_file.setdefault(os.path.realpath(path_of(file.name, root)), i)
    return list(with_file.values()) or unreadable[:1]


def _usual_view(positions: list[int], images: list[ImageFile], real: str, root: Path) -> int:
    """Returns the position of the view that no symbolic link is part of, as a label file is likely to name it; else
    the first. ``real``: real path of the folder."""
    real_root = os.path.realpath(root)
    for i in positions:
        folder = images[i].name.rpartition("/")[0]
        if os.path.normpath(os.path.join(real_root, folder)) == real:
            return i
    return positions[0]
