"""Finds the label files of images that have none in the usual folder under the usual name.

It tries the format's other folders, names in another case or composition of accents, the image's whole name before the
suffix (``0003.jpg.txt``), and the image that the label file itself names. A match is used if it is the only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from data.labels.findings import BAD_LABEL, Finding
from data.labels.image_names import ImageNames, loose
from data.source.listing.candidate_files import CandidateFile, CandidateFiles
from data.source.listing.found_labels import FoundLabels, ImageGroup, with_label
from data.source.listing.listing import ImageStatus, ListedImage
from data.source.listing.united_names import UnitedNames, unite_names
from data.split_files import ImageFile


class _NamingFile(NamedTuple):
    """A file that names its image in its content."""

    file: CandidateFile
    image_name: str  # as written in the file


def with_unusual_labels(found: FoundLabels) -> FoundLabels:
    """Returns ``found`` with the label files in other folders or under other names. An image with several matching
    files is left out."""
    found = _assign_files(found, _similarly_named(found))
    return _assign_files(found, _naming_their_image(found))


def _assign_files(found: FoundLabels, choices: Mapping[str, Sequence[CandidateFile]]) -> FoundLabels:
    """Assigns to each image the only file among its ``choices``, which are the matching files by image name."""
    choices = {name: files for name, files in choices.items() if files}
    if not choices:
        return found
    images: list[ListedImage] = []
    chosen: list[ListedImage] = []
    findings = list(found.findings)
    for image in found.images:
        if choices.keys().isdisjoint(file.name for file in image.files):
            images.append(image)
        else:
            united = _image_with_files(image, choices, found.candidates)
            chosen += united.images
            findings += united.findings
    used: dict[str, list[str]] = {}  # names of label files, by folder
    for files in choices.values():
        for file in files:
            used.setdefault(file.folder, []).append(file.name)
    unusual = {image.name: image.label.name for image in chosen if image.status is ImageStatus.LABELED}
    return replace(
        found,
        images=sorted([*images, *chosen], key=attrgetter("file.name")),
        candidates=found.candidates.excluding(used),
        findings=findings + [image.reason for image in chosen if image.reason is not None],
        unusual=found.unusual | unusual,
    )


def _image_with_files(
    image: ListedImage, choices: Mapping[str, Sequence[CandidateFile]], candidates: CandidateFiles
) -> UnitedNames:
    """Returns an unlabeled image with the only matching file, or once per file if its names have different ones. If one
    name has several matching files, the image is left out."""
    same_image: list[ListedImage] = []
    for image_file in image.files:
        files = choices.get(image_file.name, ())
        if len(files) > 1:
            return UnitedNames([image.leave_out(_several_files(image_file.name, files, candidates))], [])
        if files:
            file = files[0]
            same_image.append(with_label(image_file, candidates.full_name(file), Path(file.path)))
        else:
            same_image.append(image._replace(file=image_file))
    return unite_names(same_image, candidates)


def _similarly_named(found: FoundLabels) -> dict[str, Sequence[CandidateFile]]:
    """Returns, by name of each image without a usual label file, the files that are in the format's other folders or
    have a similar name. Two images may share a file."""
    return {
        image.name: _files_named_like(image, group, found.candidates)
        for group in found.groups
        for image in group.images
        if image.name in found.without_usual_label
    }


def _files_named_like(image: ImageFile, group: ImageGroup, candidates: CandidateFiles) -> Sequence[CandidateFile]:
    """Returns the files that, judging by their names, may be the label file of an image."""
    usual_name = image.stem + candidates.label_format.suffix
    name_with_image_suffix = image.base_name + candidates.label_format.suffix
    matches: list[CandidateFile] = []
    for folder in group.label_folders:
        by_name = candidates.by_loose_name(folder)
        similar = by_name.get(loose(usual_name)) or by_name.get(loose(name_with_image_suffix)) or []
        exact = [file for file in similar if file.name == usual_name]
        for file in exact or similar:
            # Outside the usual folder, a file must contain labels; an empty file counts if others there contain labels.
            is_usual = folder == group.usual_label_folder
            if is_usual or candidates.contains_labels(folder) or candidates.is_label_file(file):
                matches.append(file)
    return candidates.without_copies(matches)


def _naming_their_image(found: FoundLabels) -> dict[str, Sequence[CandidateFile]]:
    """Returns, by a name of each image without a label file, the files that name it in their content, if the format can
    do so."""
    files_of: dict[int, list[_NamingFile]] = {}  # by position in ``found.images``
    images = ImageNames([file.name for file in image.files] for image in found.images)
    for naming in _naming_files(found):
        matches = list(images.find(naming.image_name))
        if len(matches) > 1:
            matches = _with_label_folder(naming.file.folder, matches, found)
        if len(matches) == 1 and found.images[matches[0]].status is ImageStatus.BACKGROUND:
            files_of.setdefault(matches[0], []).append(naming)
    choices: dict[str, Sequence[CandidateFile]] = {}
    for i, files in files_of.items():
        choices |= _choices_by_name(found.images[i], files, found.candidates)
    return choices


def _naming_files(found: FoundLabels) -> Iterator[_NamingFile]:
    """Yields the files that name an image, in all label folders, each folder under one name."""
    candidates = found.candidates
    named_image = candidates.label_format.named_image
    if named_image is None:
        return
    label_folders = [folder for group in found.groups for folder in group.label_folders]
    for folder in dict.fromkeys(map(candidates.folders.first_name, label_folders)):
        for file in candidates.files(folder):
            image_name = named_image(file.first_bytes())
            if image_name:
                yield _NamingFile(file, image_name)


def _with_label_folder(folder: str, matches: list[int], found: FoundLabels) -> list[int]:
    """Returns those of the images ``matches``, by position, whose usual label folder is ``folder``, or all if there is
    no such image."""
    real = found.candidates.folders.real
    groups = [group for group in found.groups if real(group.usual_label_folder) == real(folder)]
    names = {name for group in groups for name in group.names}
    return [i for i in matches if any(file.name in names for file in found.images[i].files)] or matches


def _choices_by_name(
    image: ListedImage, files: Sequence[_NamingFile], candidates: CandidateFiles
) -> dict[str, Sequence[CandidateFile]]:
    """Returns the files that name an image, by its usual name if they have the same labels, else by the name that they
    give it: links may show an image in two folders, each with its own labels."""
    different = candidates.without_copies([naming.file for naming in files])
    if len(different) == 1:
        return {image.name: different}
    files_of_name: dict[str, list[CandidateFile]] = {}
    for naming in files:
        files_of_name.setdefault(_closest_name(image, naming.image_name), []).append(naming.file)
    return {name: candidates.without_copies(same_name) for name, same_name in files_of_name.items()}


def _closest_name(image: ListedImage, name: str) -> str:
    """Returns the name of an image whose folders agree best with those in ``name``: the usual one if several do."""
    names = ImageNames.of_single_names(file.name for file in image.files)
    closest = max(range(len(names)), key=partial(names.agreement, name))
    return image.files[closest].name


def _several_files(image: str, files: Sequence[CandidateFile], candidates: CandidateFiles) -> Finding:
    names = [candidates.full_name(file) for file in files]
    return Finding(
        where=image,
        kind=BAD_LABEL,
        text=f"its labels may be in {' or '.join(names[:3])}; keep one of them",
        consequence="left out",
        lost_images=1,
        lost_objects=max(map(candidates.num_objects, files)),
    )
