"""Finds the label file of each image in formats with one per image: in the folder where the format expects it, with the
image's name and the format's suffix, or else where `unusual_labels` searches for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from data.labels.findings import BAD_LABEL, Finding
from data.labels.label_format import FilesPerImage
from data.source.listing.candidate_files import CandidateFiles
from data.source.listing.found_labels import FoundLabels, ImageGroup, with_label
from data.source.listing.images import SplitImages
from data.source.listing.listing import ImageStatus, ListedImage, leave_out
from data.source.listing.united_names import UnitedNames, unite_names
from data.source.listing.unusual_labels import with_unusual_labels
from data.source.walk import access_problem
from data.split_files import ImageFile, LabelFile
from utils.files.paths import path_of


def find_labels(split_images: SplitImages, label_format: FilesPerImage, annotations: Path | None) -> FoundLabels:
    """Finds the label files of a split's images. ``annotations``: the folder of the label files, if the data set names
    one."""
    candidates = CandidateFiles(label_format, annotations, split_images.folders, split_images.other_files)
    found = _find_usual_labels(split_images, candidates)
    if not found.without_usual_label:
        return found
    return _without_inaccessible_labels(with_unusual_labels(found))


def _find_usual_labels(split_images: SplitImages, candidates: CandidateFiles) -> FoundLabels:
    """Finds the label files in the usual folders that have the images' names. ``candidates``: all files."""
    groups = _group_by_folder([*split_images.sorted(), *split_images.all_aliases], candidates)
    images: list[ListedImage] = []
    used: dict[str, list[str]] = {}  # names of label files, by folder
    for group in groups:
        in_group, used_in_group = _with_usual_labels(group, candidates)
        images += in_group
        used.setdefault(group.usual_label_folder, []).extend(used_in_group)
    findings: list[Finding] = []
    if split_images.aliases:
        images, findings = _unite_aliases(images, split_images.aliases, candidates)
    if len(groups) > 1:
        images.sort(key=attrgetter("file.name"))
    unlabeled = [image for image in images if image.status is ImageStatus.BACKGROUND]
    return FoundLabels(
        images=images,
        groups=groups,
        candidates=candidates.excluding(used),
        without_usual_label=frozenset(file.name for image in unlabeled for file in image.files),
        findings=findings + [image.reason for image in images if image.reason is not None],
        unusual={},
    )


def _with_usual_labels(group: ImageGroup, candidates: CandidateFiles) -> tuple[list[ListedImage], list[str]]:
    """Returns the images of a group, each with the label file of the same name in the usual label folder, and the names
    of these label files."""
    entries = candidates.entries(group.usual_label_folder)
    prefix = candidates.folders.name_in(group.usual_label_folder)
    image_prefix = len(group.images[0].name) - len(group.images[0].base_name)
    suffix = candidates.label_format.suffix
    images: list[ListedImage] = []
    label_names: list[str] = []
    for image in group.images:
        name = image.name[image_prefix:].rpartition(".")[0] + suffix  # much faster than its `stem`
        entry = entries.get(name)
        if entry is None:
            images.append(ListedImage(image, ImageStatus.BACKGROUND, LabelFile(prefix + name, None)))
        else:
            images.append(with_label(image, prefix + name, entry))
            label_names.append(name)
    return images, label_names


def _unite_aliases(
    images: Sequence[ListedImage], aliases: Mapping[str, Sequence[ImageFile]], candidates: CandidateFiles
) -> UnitedNames:
    """Merges ``images``, which has each image under each of its names, into one entry per label file. ``aliases``: see
    `find_aliases`."""
    image_of_name = {image.name: image for image in images}
    united = UnitedNames([], [])
    for usual_name, others in aliases.items():
        names = (usual_name, *(other.name for other in others))
        image = unite_names([image_of_name.pop(name) for name in names], candidates)
        united.images.extend(image.images)
        united.findings.extend(image.findings)
    united.images.extend(image_of_name.values())  # those with one name
    return united


def _without_inaccessible_labels(found: FoundLabels) -> FoundLabels:
    """Leaves out the images without a label file whose usual label folder is inaccessible or a broken link: their label
    files may be there."""
    candidates = found.candidates
    problems = {
        candidates.folders.name_in(group.usual_label_folder): access_problem(group.usual_label_folder)
        for group in found.groups
        if not candidates.entries(group.usual_label_folder)
    }
    reasons: dict[str, Finding] = {}  # by image name
    for image in found.images:
        folder, separator, _ = image.label.name.rpartition("/")
        problem = problems.get(folder + separator)
        if problem and image.status is ImageStatus.BACKGROUND:
            text = f"its folder cannot be read ({problem}); {image.name} is left out"
            reasons[image.name] = Finding(image.label.name, BAD_LABEL, text, lost_images=1)
    return replace(found, images=leave_out(found.images, reasons), findings=[*found.findings, *reasons.values()])


def _group_by_folder(images: Sequence[ImageFile], candidates: CandidateFiles) -> list[ImageGroup]:
    """Groups images by their folder and their folder within the split, which determine their label folders."""
    groups: dict[tuple[str, str], ImageGroup] = {}
    for image in images:
        folder_names = (image.name.rpartition("/")[0], image.name_in_split.rpartition("/")[0])
        group = groups.get(folder_names)
        if group is None:
            name, below_split = folder_names
            folder = path_of(name, candidates.folders.root)
            group = ImageGroup(folder, candidates.label_folders(folder, below_split), [])
            groups[folder_names] = group
        group.images.append(image)
    return list(groups.values())
