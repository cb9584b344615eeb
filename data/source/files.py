"""Lists the files of a split: its images, and the label file of each of them, or the one for all.

The sizes and modification times of these files show whether the split has changed. The steps are in `listing`:

    images.py          the images in the folders and .txt lists (image_list.py) that the split names
    label_files.py     their label files, if each image has one; candidate_files.py: what its folder contains
    unused_labels.py   the label files that no image has, also in other folders (misplaced_labels.py) and formats
                       (unread_labels.py); the images to which one of them may belong (similar_names.py) are left out
    other_splits.py    the data set's other images: label files may be theirs
    equal_views.py     one image under several names, by symbolic links
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.image_io.file_kinds import image_suffixes
from data.image_io.shards import is_shard_path
from data.labels.findings import BAD_LABEL, Finding
from data.labels.label_format import FilesPerImage, ImageFile, LabelFile, LabelFormat, OtherImages
from data.source.dataset_spec import DatasetSpec, SplitSource
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.equal_views import without_equal_views
from data.source.listing.image_list import MAX_LIST_BYTES, is_image
from data.source.listing.images import SplitImages, find_images
from data.source.listing.label_files import FoundLabels, LabelSearch, ListedImage
from data.source.listing.other_splits import OtherSplits
from data.source.listing.unused_labels import UnusedLabels
from data.source.walk import Folders, stamp_of, walk
from utils.errors import UserError
from utils.files.paths import relative_name
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
    unusual_labels: dict[str, str] = field(default_factory=dict)  # see `FoundLabels`
    num_equal_views: int = 0  # number of images left out because symbolic links show them under another name
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
        return _list_one_label_file(split_images, label_format, spec, split)
    return _list_label_file_per_image(split_images, label_format, label_format.per_image, spec, split, folders)


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


def _list_one_label_file(
    split_images: SplitImages, label_format: LabelFormat, spec: DatasetSpec, split: str
) -> Listing:
    """Lists a split in a format with one label file for all images."""
    annotations = spec.split(split).annotations
    assert annotations is not None, "such a format is known by its annotations"
    label_file = LabelFile(relative_name(annotations, spec.root), stamp_of(annotations))
    all_images = [ListedImage(image, label_file) for image in split_images.sorted()]
    images = without_equal_views(all_images, split_images.views, spec.root, share_labels=True)
    if split in spec.originals:
        other_images = spec.originals[split].other_images
    else:
        other_images = OtherSplits(spec, split, split_images.images).images_in_label_file(split_images.missing)
    return Listing(
        images=[image.file for image in images],
        labels=[label_file],
        label_format=label_format,
        findings=split_images.findings,
        lists=split_images.lists,
        num_equal_views=len(all_images) - len(images),
        others=other_images,
    )


def _list_label_file_per_image(
    split_images: SplitImages,
    label_format: LabelFormat,
    files: FilesPerImage,
    spec: DatasetSpec,
    split: str,
    folders: Folders,
) -> Listing:
    """Lists a split in a format with one label file per image. Raises UserError if none of these can be read."""
    candidates = CandidateFiles(files, spec.split(split).annotations, folders)
    found_labels = _find_label_files(split_images, candidates, spec, split)
    findings = split_images.findings + found_labels.findings
    images = without_equal_views(found_labels.images, split_images.views, spec.root, share_labels=False)
    pairs = [(image.file, image.label) for image in images if image.label is not None]
    if not pairs:
        first = next(finding for finding in findings if finding.kind == BAD_LABEL)
        raise UserError(f"{spec.source}: no label file of '{split}' can be read; first {first.where}: {first.message}")
    return Listing(
        images=[image for image, _ in pairs],
        labels=[label for _, label in pairs],
        label_format=label_format,
        findings=findings,
        lists=split_images.lists,
        unusual_labels=found_labels.unusual,
        num_equal_views=len(found_labels.images) - len(images),
    )


def _find_label_files(
    split_images: SplitImages, candidates: CandidateFiles, spec: DatasetSpec, split: str
) -> FoundLabels:
    """Finds the label files of a split. Images to which a label file of another name may belong are left out."""
    search = LabelSearch(split_images.sorted(), candidates)
    if split in spec.originals:  # whose findings say which label files are unused
        return search.run_on_copy(spec.originals[split].unusual_labels)
    found = search.run()
    split_folders = [str(entry) for entry in spec.split(split).images if entry.is_dir()]
    unused = UnusedLabels(found, split_folders, OtherSplits(spec, split, split_images.images)).report()
    found.findings += unused.findings
    for image in unused.left_out:
        image.label = None
    return found


def shards_of(spec: DatasetSpec, split: str) -> Path | None:
    """Returns the index of the shards of a split; None for a split in files. Raises UserError for a mixture."""
    images = spec.split(split).images
    shards = [path for path in images if is_shard_path(path)]
    if shards and len(images) > 1:
        raise UserError(f"{spec.source}: '{split}': {shards[0]} must be the only entry; join data sets by their YAMLs")
    return shards[0] if shards else None


def without_empty(spec: DatasetSpec, splits: Iterable[str]) -> DatasetSpec:
    """Returns ``spec`` without those of ``splits`` whose folders have no image or whose lists are empty, and logs
    them."""
    suffixes = image_suffixes(spec.pixels)
    remaining = dict(spec.splits)
    for name in splits:
        entries = remaining[name].images if name in remaining else ()
        if entries and not any(_has_images(entry, suffixes) for entry in entries):
            del remaining[name]
            get_logger().info("%s: '%s' (%s) has no images and is left out", spec.source, name, entries[0])
    return replace(spec, splits=remaining)


def _has_images(entry: Path, suffixes: frozenset[str]) -> bool:
    """Returns whether an entry of a split, if it is a folder or a list, has images."""
    if entry.is_dir():
        return any(is_image(file.name, suffixes) for visit in walk(entry) for file in visit.entries)
    if entry.suffix.lower() == ".txt" and entry.is_file():
        return bool(read_text(entry, max_bytes=MAX_LIST_BYTES).strip())
    return entry.exists()
