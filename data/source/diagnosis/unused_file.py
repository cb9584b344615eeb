"""Explains a label file that no image uses: in which split it is lost, and which images are left out because of it.

`explain` compares the file with the images of all splits that may have label files in its folder, and takes the first
case that applies:

If its image exists, in a folder whose label files may be in the file's folder:

    image                                             what becomes of the file        message
    of this split, and uses a copy of the file        nothing
    of this split, without a label file               image left out, objects lost    if it labels ..., rename it
    of this split, and uses another file              reported                        ... uses ... instead
    of another split, or of none                      nothing
    of an unsupported kind                            lost                            ... is of an unsupported kind

Otherwise, by the file's name and folder:

    a list names its image, which is missing          objects lost (its row counts    ..., which a list names, is
                                                      as the lost image)              missing
    unlabeled images have a similar name              images left out, objects lost   if it labels ..., rename it
    a labeled image has its name, and no split        reported, unless it is a copy   is named like ...
    expects label files in its folder
    an image of no split has its name                 nothing
    its folder belongs to a missing or empty split    reported                        its image may be in ...
    its folder belongs to splits                      lost                            belongs to no image

"Lost" means that the file's image and objects count as lost. They do so in one of the splits to which the file may
belong (`_counting_split`), and only this split reports the file, besides those that leave out images.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from data.images.kinds import IMAGE_SUFFIXES, is_image
from data.labels.findings import IMAGE_ELSEWHERE, ORPHAN, SECOND_LABEL, Finding
from data.labels.image_names import ImageNames, loose, readings_of
from data.source.diagnosis.similar_names import loose_stem
from data.source.diagnosis.split_context import FolderOwner, SplitContext
from data.source.diagnosis.split_tables import SplitTables
from data.source.listing.candidate_files import CandidateFile
from data.source.listing.listing import ImageStatus, ListedImage
from utils.files.paths import path_of, relative_name

ImagesOfSplits = dict[SplitTables, list[ListedImage]]


class Explanation(NamedTuple):
    """What the split that is read reports about an unused label file."""

    finding: Finding
    unlabeled: Sequence[ListedImage] = ()  # images that the split leaves out because of the file


def explain(candidate: CandidateFile, context: SplitContext) -> Explanation | None:
    """Explains an unused label file. Returns None if the split that is read need not report it."""
    file = _UnusedFile.read(candidate, context)
    images = _existing_images(file, context)
    return _explain_with_image(file, images, context) if images else _explain_without_image(file, context)


class _UnusedFile(NamedTuple):
    """A label file that no image uses, and the names that its image may have."""

    candidate: CandidateFile
    name: str  # relative to the data set's folder
    stem: str  # loose
    named_image: str  # that the file names in its content, or ""
    image_stems: list[str]  # loose stems and names, beginning with `stem`

    @classmethod
    def read(cls, candidate: CandidateFile, context: SplitContext) -> _UnusedFile:
        candidates = context.own.candidates
        read_name = candidates.label_format.named_image
        named_image = "" if read_name is None else read_name(candidate.first_bytes())
        stem = loose_stem(candidate.name)
        image_stems = [stem]
        for parts in readings_of(named_image):
            image_stems += [loose(parts[-1]), loose_stem(parts[-1])]
        return cls(candidate, candidates.full_name(candidate), stem, named_image, image_stems)

    @property
    def folder(self) -> str:
        return self.candidate.folder


def _explain_with_image(file: _UnusedFile, image_names: Sequence[str], context: SplitContext) -> Explanation | None:
    """Explains a file whose images exist. ``image_names``: see `_existing_images`."""
    own = context.own
    labeled = own.images_named(image_names, ImageStatus.LABELED)
    if _is_copy(file, labeled, context):
        return None
    unlabeled = {split: split.images_named(image_names, ImageStatus.BACKGROUND) for split in context.splits}
    if unlabeled[own]:
        return _leave_out(file, unlabeled, context)
    if labeled:
        text = f"{labeled[0].name} uses {labeled[0].label.name} instead; remove one of the two"
        return Explanation(Finding(file.name, SECOND_LABEL, text))
    name = image_names[0]
    is_in_a_split = any(image in split.image_of_name for split in context.splits for image in image_names)
    if is_in_a_split or is_image(name, IMAGE_SUFFIXES):
        return None
    image_folder = os.path.dirname(path_of(name, own.candidates.folders.root))
    splits = [split for split in context.splits if image_folder in split.image_folders(file.folder)]
    return _lose(file, splits, f"{name} is of an unsupported kind", context)


def _explain_without_image(file: _UnusedFile, context: SplitContext) -> Explanation | None:
    """Explains a file whose image does not exist where its label file would be in the file's folder."""
    lists = [split for split in context.splits if split.missing_image(file.folder, file.image_stems)]
    if lists:
        return _lose_missing_image(file, lists, context)

    owner = context.owner_of(file.folder)
    namesakes = _labeled_namesakes(file, owner, context)
    labels_image_outside = context.labels_image_outside(file.folder, file.image_stems)
    unlabeled = _similar_unlabeled(file, owner, context, only_same_name=bool(namesakes) or labels_image_outside)
    if any(unlabeled.values()):
        return _leave_out(file, unlabeled, context)

    if namesakes:
        return _report_second(file, namesakes, owner, context)
    if labels_image_outside:
        return None
    if owner.missing is not None:
        location = "listed in" if owner.missing.suffix.lower() == ".txt" else "in"
        text = f"its image may be {location} {owner.missing}, which is empty or missing"
        return Explanation(Finding(file.name, IMAGE_ELSEWHERE, text))
    return _lose_without_image(file, owner, context)


# What becomes of the file


def _leave_out(file: _UnusedFile, unlabeled: ImagesOfSplits, context: SplitContext) -> Explanation | None:
    """Each split leaves out its ``unlabeled`` images, which the file may label. One of them loses the objects."""
    images = unlabeled.get(context.own)
    if not images:
        return None
    rename = f"if it labels {images[0].name}, which is left out, rename it to {images[0].label.name}"
    hint = _hint_at_unnamed_split(file.folder, context)
    finding = Finding(file.name, ORPHAN, f"belongs to no image; {rename}{hint}")
    if _counting_split([split for split, of_split in unlabeled.items() if of_split]) is context.own:
        finding = _with_lost_objects(finding, file, context)
    return Explanation(finding, images)


def _report_second(
    file: _UnusedFile, namesakes: Sequence[ListedImage], owner: FolderOwner, context: SplitContext
) -> Explanation | None:
    """One of the splits to which the file's folder belongs reports it, unless it is a copy of the labels of one of its
    ``namesakes``."""
    if _is_copy(file, namesakes, context) or _counting_split(owner.splits) is not context.own:
        return None
    hint = _hint_at_unnamed_split(file.folder, context)
    text = f"is named like {namesakes[0].name}, which has labels elsewhere; remove one of the two{hint}"
    return Explanation(Finding(file.name, SECOND_LABEL, text))


def _lose_without_image(file: _UnusedFile, owner: FolderOwner, context: SplitContext) -> Explanation | None:
    """One of the splits to which the file's folder belongs loses the file's image. The advice names a background of
    another split that the file may label."""
    remedy = "rename it like its image, or remove it"
    background = _background_of_other_split(file, owner, context)
    if background is not None:
        rename = f"if it labels {background.name}, a background of another split, rename it to {background.label.name}"
        remedy = f"{rename}; else {remedy}"
    hint = _hint_at_unnamed_split(file.folder, context)
    return _lose(file, owner.splits, f"belongs to no image; {remedy}{hint}", context)


def _lose(file: _UnusedFile, splits: Sequence[SplitTables], text: str, context: SplitContext) -> Explanation | None:
    """One of ``splits`` loses the file's image, which none of them has, with its objects. It only reports them if it
    names only lists, because the folder may contain the labels of many other images."""
    if not splits or _counting_split(splits) is not context.own:
        return None
    finding = Finding(file.name, ORPHAN, text)
    if context.own.folders:
        finding = _with_lost_objects(finding, file, context)._replace(lost_images=1)
    return Explanation(finding)


def _lose_missing_image(file: _UnusedFile, lists: Sequence[SplitTables], context: SplitContext) -> Explanation | None:
    """One of ``lists``, splits that name the missing image in a list, loses the objects. If none of their images
    exists, they cannot be read: each of the others reports the file, but none loses it."""
    missing = lists[0].missing_image(file.folder, file.image_stems)
    text = f"{missing}, which a list names, is missing"
    if _counting_split(lists) is context.own:
        return Explanation(_with_lost_objects(Finding(file.name, ORPHAN, text), file, context))
    if any(split.found.images for split in lists):
        return None
    return Explanation(Finding(file.name, IMAGE_ELSEWHERE, text))


def _with_lost_objects(finding: Finding, file: _UnusedFile, context: SplitContext) -> Finding:
    return finding._replace(lost_objects=context.own.candidates.num_objects(file.candidate))


def _counting_split(splits: Sequence[SplitTables]) -> SplitTables:
    """Returns the split in which an unused label file counts as lost, of those to which it may belong (at least one).
    Of the ones with images, or else of all, it is the first that names a folder, because files that no list names need
    not be losses, or else the first."""
    readable = [split for split in splits if split.found.images] or splits
    return next((split for split in readable if split.folders), readable[0])


def _hint_at_unnamed_split(folder: str, context: SplitContext) -> str:
    """Returns a hint for the files of a folder of the annotations that belongs to no split: it may have the labels of a
    split that the YAML does not name, which must be neither renamed nor removed. Returns "" for other folders."""
    annotations = context.own.candidates.annotations
    is_of_a_split = any(folder in split.own_folders for split in context.splits)
    if annotations is None or folder == str(annotations) or is_of_a_split:
        return ""
    name = relative_name(folder, context.own.candidates.folders.root)
    return f"; if {name} has the labels of another split, name this split in the YAML"


# The images that the file may label


def _existing_images(file: _UnusedFile, context: SplitContext) -> list[str]:
    """Returns the names of its images on the disk, whether or not a split has them, in folders whose label files may be
    in the file's. If the file names a folder, only images in that folder count."""
    folders = [folder for split in context.splits for folder in split.image_folders(file.folder)]
    names = context.images_on_disk.find(file.image_stems, list(dict.fromkeys(folders)))
    if len(names) <= 1 or not file.named_image:
        return names
    return [names[i] for i in ImageNames.of_single_names(names).find(file.named_image)] or names


def _is_copy(file: _UnusedFile, labeled: Sequence[ListedImage], context: SplitContext) -> bool:
    """Returns whether the label file of any of the images ``labeled`` has the labels of the file."""
    candidates = context.own.candidates
    paths = (path_of(image.label.name, candidates.folders.root) for image in labeled)
    return any(candidates.have_equal_labels(file.candidate.path, path) for path in paths)


def _labeled_namesakes(file: _UnusedFile, owner: FolderOwner, context: SplitContext) -> list[ListedImage]:
    """Returns the labeled images of its name, if no split expects label files in its folder, nor does this belong to a
    missing folder alone: the file may be another version of their labels."""
    if not owner.splits or context.is_expected(file.folder):
        return []
    return [split.labeled_of_stem[file.stem] for split in context.splits if file.stem in split.labeled_of_stem]


def _similar_unlabeled(
    file: _UnusedFile, owner: FolderOwner, context: SplitContext, *, only_same_name: bool
) -> ImagesOfSplits:
    """Returns, by split, the unlabeled images of a similar name that the file may label: only those of the same name in
    splits to which its folder does not belong, and none in these if the name is not distinctive
    (`SplitContext.is_distinctive`)."""
    splits = context.splits if context.is_distinctive(file.stem) else owner.splits
    similar: ImagesOfSplits = {}
    for split in splits:
        if not _is_searched_by(split, file, context):
            continue
        if only_same_name or split not in owner.splits:
            similar[split] = split.unlabeled.named(file.stem)
        else:
            similar[split] = split.unlabeled.resembling(file.stem)
    return similar


def _is_searched_by(split: SplitTables, file: _UnusedFile, context: SplitContext) -> bool:
    """Returns whether a split searches the file's folder for labels of its images. Where it expects no label files, it
    does not search for those of a name that one of its labeled images has."""
    if file.folder in split.expected:
        return True
    is_near = file.folder in split.nearby or file.folder in context.named_label_folders
    return is_near and file.stem not in split.labeled_of_stem


def _background_of_other_split(file: _UnusedFile, owner: FolderOwner, context: SplitContext) -> ListedImage | None:
    """Returns an unlabeled image of the same name in a split to which the file's folder does not belong. If the name
    is not distinctive, the image stays a background."""
    others = [split for split in context.splits if split not in owner.splits]
    return next((image for split in others for image in split.unlabeled.named(file.stem)), None)
