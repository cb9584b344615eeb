"""Decides which entry of a label file each image gets (`match_entries`). Several splits may share the file.

The whole rule, for the splits images/train and images/val:

    file name of an entry    its image, if it exists              lost, if no image gets the entry
    images/train/7.png       this image (rule 1)                  in train
    7.png                    that directly in the folder of one   in train, the first split
                             split (rule 1), or the only one
                             anywhere (rule 2)
    train/7.png              that in train, or the only 7.png     in train
    /old/disk/train/7.png    anywhere (rule 2)                    in train
    test/7.png               the only 7.png, and it is reported   nothing if images/test is missing, or if it has this
                             (rule 3)                             image but is no split; else in train, as 7.png
    two of these for one     the one that fits better, or none    in the split of the image; nothing if its own name is
    image                    (rule 4)                             repeated with the same labels

The second column is decided here, by the names that `data.labels.image_names` finds and the folders that
`data.labels.image_entries` compares; the last one by `data.labels.unmatched_entries`, with the places where missing
images would be (`data.labels.image_places`).

The rules, in this order. In the examples, the splits are images/train and images/val, and 7.png is an image of train.

1. An entry whose file name is literally that of an image, relative to the data set's folder or to its split's, is of
   this image: "images/train/7.png", or "7.png" if val has no 7.png.
2. Any other entry is a candidate for the only image that it matches by name (`ImageNames`): "train/7.png",
   "D:/set/train/7.png" and "test/7.png" are candidates for 7.png.
3. A candidate is in another folder if its folders contradict that of the image's split, as "test/7.png" does if other
   entries are called "train/1.png" and the like. Either 7.png was moved from test to train, or the entry is of another
   image, which is missing. Such candidates are used, and reported, unless their folders repeat names of the images' own
   entries, as if each split were numbered from 0: then none of them is used. This is so if "test/1.png" and
   "test/2.png" are entries besides "train/1.png" and "train/2.png".
4. Of several candidates for an image, the likeliest is used, which has the most folders in common with it; one in
   another folder only if all are. If several are equally likely and have different labels, none is used: they are a
   conflict. For example, "a/7.png" and "b/7.png" are, if no entry is called "train/1.png" or the like. If several
   images have conflicts, entries in the same folders that are used for other images are reported.
5. All other entries are of no image. For what is lost with them, see `data.labels.unmatched_entries`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import attrgetter
from typing import NamedTuple

from data.labels.image_entries import Candidate, ImageEntry, ImageNumber, NameMatch, NameMatcher
from data.labels.image_names import loose
from data.labels.image_places import PlaceKind
from data.labels.known_images import KnownImage, SplitOrder, known_images
from data.labels.label_format import LabelRequest
from data.labels.unmatched_entries import UnmatchedEntry, explain_unmatched
from data.split_files import ImageFile

_MAX_REPEATED_ENTRY_SHARE = 0.01  # of the names in other folders, see `_do_names_repeat`


class Conflict(NamedTuple):
    """Entries of which one is probably that of an image of the split, but none is used."""

    image: int  # position in ``LabelRequest.images``
    entries: list[ImageEntry]  # that are equally likely
    num_labeled: int  # annotations of all candidates for the image
    is_of_earlier: bool  # whether an earlier split has the image as well


class MatchedEntries(NamedTuple):
    """The entries of a label file, matched with images."""

    entry_of: dict[int, ImageEntry]  # entries of the split's images, by position in ``LabelRequest.images``
    in_other_folders: list[int]  # those of these images whose entry is, or may be, of an image in another folder
    conflicts: list[Conflict]
    unmatched: list[UnmatchedEntry]  # entries that no image of any split gets
    are_of_earlier: bool  # whether an earlier split has images in the file


def match_entries(entries: Sequence[ImageEntry], request: LabelRequest) -> MatchedEntries:
    """Matches entries with images by the rules above."""
    images = known_images(request)
    position_of = _match_literally(entries, images)
    literal_positions = set(position_of.values())
    literal = {image: entries[position] for image, position in position_of.items()}

    matcher = NameMatcher(images, request.others, entries)
    matches = [matcher.match(entry) for position, entry in enumerate(entries) if position not in literal_positions]
    candidates = [match for match in matches if isinstance(match, Candidate)]
    in_other_folders = _in_other_folders(candidates, [images[i] for i in literal])
    usable = [candidate for candidate in candidates if candidate.number not in literal]
    if _do_names_repeat(matches, in_other_folders, literal, images):
        usable = [candidate for candidate in usable if candidate not in in_other_folders]
    choice = _choose(usable, in_other_folders)
    reported = in_other_folders | choice.doubtful()
    used_or_conflicting = {*choice.used.values()}.union(*(rivals.all for rivals in choice.conflicting.values()))

    entry_of = literal | {i: candidate.entry for i, candidate in choice.used.items()}
    of_this = range(len(request.images))
    return MatchedEntries(
        entry_of={i: entry_of[i] for i in of_this if i in entry_of},
        in_other_folders=[i for i in of_this if i in choice.used and choice.used[i] in reported],
        conflicts=[_conflict(i, images[i], choice.conflicting[i]) for i in of_this if i in choice.conflicting],
        unmatched=[
            explain_unmatched(match, entry_of, matcher.names) for match in matches if match not in used_or_conflicting
        ],
        are_of_earlier=any(SplitOrder.EARLIER in images[i].splits for i in entry_of),
    )


# Rule 1: literal names.


def _match_literally(entries: Sequence[ImageEntry], images: Sequence[KnownImage]) -> dict[ImageNumber, int]:
    """Returns, by image, the position of the entry whose file name is the image's name relative to the data set's
    folder or to its split's.

    Read in these two ways, a name may be that of two images, "train/0.jpg" and "val/train/0.jpg". It is read in the way
    in which more entries name an image, because a label file usually has one. If an image has several entries, the
    first one with annotations is preferred: without any, the image would be a background.
    """
    in_split = _with_unique_names(images, attrgetter("name_in_split"))
    in_root = _with_unique_names(images, attrgetter("name"))
    file_names = [entry.normal_name for entry in entries]
    is_in_root = sum(name in in_root for name in file_names) > sum(name in in_split for name in file_names)
    position_of: dict[ImageNumber, int] = {}
    unread = list(range(len(entries)))
    for image_of_name in (in_root, in_split) if is_in_root else (in_split, in_root):
        found: dict[ImageNumber, int] = {}
        for position in unread:
            image = image_of_name.get(file_names[position])
            if image is None or image in position_of:
                continue
            if image not in found or (entries[position].num_labeled and not entries[found[image]].num_labeled):
                found[image] = position
        position_of |= found
        unread = [position for position in unread if file_names[position] not in image_of_name]
    return position_of


def _with_unique_names(images: Sequence[KnownImage], name_of: Callable[[ImageFile], str]) -> dict[str, ImageNumber]:
    """Returns images by their names. Names that several images share are left out: in a list, or relative to folders
    of several splits."""
    images_of_name: dict[str, set[ImageNumber]] = {}
    for i, image in enumerate(images):
        for file in image.files:
            images_of_name.setdefault(name_of(file), set()).add(i)
    return {name: min(numbers) for name, numbers in images_of_name.items() if len(numbers) == 1}


# Rule 3: candidates in other folders.


def _in_other_folders(candidates: Sequence[Candidate], literal: Iterable[KnownImage]) -> set[Candidate]:
    """Returns the candidates whose folders contradict that of their image's split.

    They are in the folder of another split or in a missing one. Folders that the data set does not have may also be
    those of another machine, or from before a folder was renamed, unless other entries call the image's split as it is
    called. The data set's folder has no name that they could call. ``literal``: images that an entry names literally.
    """
    named_folders = {image.split_folder for image in literal}
    named_folders |= {candidate.image.split_folder for candidate in candidates if candidate.names_split_folder}
    named_folders.discard("")
    return {
        candidate
        for candidate in candidates
        if _is_of_another_split(candidate)
        or (candidate.has_other_folder and candidate.image.split_folder in named_folders)
    }


def _is_of_another_split(candidate: Candidate) -> bool:
    """Returns whether the folders of a candidate are those of another split than its image's, or a missing folder."""
    place = candidate.place
    if place.kind is PlaceKind.SPLITS:
        return candidate.image.splits.isdisjoint(place.splits)
    return place.kind is PlaceKind.ELSEWHERE


def _do_names_repeat(
    matches: Iterable[NameMatch],
    in_other_folders: Set[Candidate],
    literal: Mapping[ImageNumber, ImageEntry],
    images: Sequence[KnownImage],
) -> bool:
    """Returns whether the other folders have the same names as the images' own entries, as if each split were numbered
    from 0: then the entries in other folders are of missing images.

    For example, the images are train/0.png to train/9.png, and the entries train/0.png to train/5.png, and test/0.png
    to test/9.png. Four entries of test are candidates for images without another entry, but six repeat names. Single
    repetitions do not count: images may have been copied before they were moved.

    Args:
        matches: all entries without a literal name.
        in_other_folders: those of them that are candidates in other folders.
        literal: entries with literal names, by their image.
        images: all images.
    """
    if not in_other_folders:
        return False
    other_folders = {candidate.entry.folder for candidate in in_other_folders}
    candidates = [match for match in matches if isinstance(match, Candidate)]
    entries_with_image = [(entry, images[i]) for i, entry in literal.items()]
    entries_with_image += [(candidate.entry, candidate.image) for candidate in candidates]
    folders_of_name = _folders_of_names(entries_with_image, in_other_folders)
    folders_of_names_there = [folders for folders in folders_of_name.values() if not other_folders.isdisjoint(folders)]
    num_repeated = sum(len(folders) > 1 for folders in folders_of_names_there)

    without_image = [match.entry for match in matches if not isinstance(match, Candidate)]
    num_namesakes = _count_namesakes(
        [entry for entry in without_image if entry.folder in other_folders],
        images,
        {*literal, *(candidate.number for candidate in candidates if candidate not in in_other_folders)},
    )
    num_names = len(folders_of_names_there) + num_namesakes
    return num_repeated + num_namesakes > max(1, _MAX_REPEATED_ENTRY_SHARE * num_names)


def _folders_of_names(
    entries_with_image: Iterable[tuple[ImageEntry, KnownImage]], in_other_folders: Set[Candidate]
) -> dict[str, set[str]]:
    """Returns the folders of entries by the names of their images in the split, so that subfolders are told apart.
    Folders that have nothing to do with the candidates ``in_other_folders`` are left out: they may repeat names."""
    other_folders = {candidate.entry.folder for candidate in in_other_folders}
    split_folders = {candidate.image.split_folder for candidate in in_other_folders}
    folders_of_name: dict[str, set[str]] = {}
    for entry, image in entries_with_image:
        if entry.folder in other_folders or image.split_folder in split_folders:
            folders_of_name.setdefault(image.files[0].name_in_split, set()).add(entry.folder)
    return folders_of_name


def _count_namesakes(entries: Iterable[ImageEntry], images: Sequence[KnownImage], with_entry: Set[ImageNumber]) -> int:
    """Counts the ``entries`` with whose file name there are images, all of them ``with_entry``."""
    images_of_name: dict[str, set[ImageNumber]] = {}
    for i, image in enumerate(images):
        images_of_name.setdefault(_loose_file_name(image.files[0].name), set()).add(i)
    namesakes = [images_of_name.get(_loose_file_name(entry.normal_name)) for entry in entries]
    return sum(numbers <= with_entry for numbers in namesakes if numbers)


def _loose_file_name(path: str) -> str:
    return loose(path.rpartition("/")[2])


# Rule 4: several candidates for one image.


class _Rivals(NamedTuple):
    """The candidates for an image, of which none is used."""

    all: list[Candidate]
    likeliest: list[Candidate]  # that are equally likely


class _Choice(NamedTuple):
    """The candidates that are used, and those that are in conflict, by image."""

    used: dict[ImageNumber, Candidate]
    conflicting: dict[ImageNumber, _Rivals]

    def doubtful(self) -> set[Candidate]:
        """Returns the used candidates in folders of conflicting ones, if several images have conflicts: then these
        folders probably have images of the same names, of which only some are here."""
        if len(self.conflicting) <= 1:
            return set()
        folders = {rival.entry.folder for rivals in self.conflicting.values() for rival in rivals.all}
        return {
            candidate
            for candidate in self.used.values()
            if not candidate.names_split_folder and candidate.entry.folder in folders
        }


def _choose(candidates: Iterable[Candidate], in_other_folders: Set[Candidate]) -> _Choice:
    """Chooses one candidate for each image. Of several, those ``in_other_folders`` are left out unless all are: they
    are no conflict, because they may all be of missing images."""
    candidates_of: dict[ImageNumber, list[Candidate]] = {}
    for candidate in candidates:
        candidates_of.setdefault(candidate.number, []).append(candidate)
    choice = _Choice({}, {})
    for image, all_rivals in candidates_of.items():
        rivals = [candidate for candidate in all_rivals if candidate not in in_other_folders] or all_rivals
        likeliest = _likeliest(rivals)
        if len(likeliest) == 1:
            choice.used[image] = likeliest[0]
        elif likeliest[0] not in in_other_folders:
            choice.conflicting[image] = _Rivals(rivals, likeliest)
    return choice


def _likeliest(rivals: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidate that fits an image best, and all others that fit it as well but have other folders and
    other labels."""
    if len(rivals) == 1:
        return [*rivals]
    best = max(rivals, key=_fit)
    if best.names_split_folder:
        return [best]
    others = [
        rival
        for rival in rivals
        if _fit(rival) == _fit(best)
        and loose(rival.entry.folder) != loose(best.entry.folder)
        and not rival.entry.has_labels_of(best.entry)
    ]
    return [best, *others]


def _fit(candidate: Candidate) -> tuple[int, bool, int]:
    """Returns how well a candidate fits its image, compared with others: by the number of folders in common, then one
    with annotations, then the one with the fewest folders, because a file of several splits may name an image of
    another split with the same file name in another folder."""
    return candidate.num_common_folders, candidate.entry.num_labeled > 0, -candidate.entry.file_name.count("/")


def _conflict(number: int, image: KnownImage, rivals: _Rivals) -> Conflict:
    """Returns the conflict of ``rivals`` for an image. ``number``: its position among those of the split."""
    return Conflict(
        image=number,
        entries=[rival.entry for rival in rivals.likeliest],
        num_labeled=sum(rival.entry.num_labeled for rival in rivals.all),
        is_of_earlier=SplitOrder.EARLIER in image.splits,
    )
