"""Labels of many images in flat arrays."""

import numpy as np
import pytest

from utils.labels import LabelArrays, image_ids_of, ragged_ranges


def test_boxes_know_their_images():
    labels = type("Labels", (LabelArrays,), {})()
    labels.offsets = np.array([0, 2, 2, 5])
    labels.classes = np.array([0, 0, 1, 0, 2])
    labels.crowd = np.array([False, False, False, False, True])
    assert labels.image_of_box.tolist() == [0, 0, 2, 2, 2]
    assert labels.images_per_class(4).tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0), (), (1,)])
def test_ragged_ranges_are_those_of_a_loop(counts):
    first = np.array([5, 9, 0][: len(counts)], np.int64)
    numbers, owner = ragged_ranges(first, np.array(counts, np.int64))
    expected = [(i, first[i] + k) for i, count in enumerate(counts) for k in range(count)]
    assert list(zip(owner.tolist(), numbers.tolist())) == expected


@pytest.mark.parametrize(
    ("stems", "ids"),
    [
        (["000000000139", "7"], (139, 7)),
        ([], ()),
        (["1", "01"], ("1", "01")),  # one number
        (["1", "a"], ("1", "a")),
        (["1", "clip_000002"], ("1", "clip_000002")),
        (["1", "\u0662"], ("1", "\u0662")),  # an Arabic digit
        (["1", "-2"], ("1", "-2")),
        (["1", "9" * 19], ("1", "9" * 19)),  # beyond int64
        (["1", ""], ("1", "")),
    ],
)
def test_image_ids_are_numbers_if_all_stems_are(stems, ids):
    assert image_ids_of(stems) == ids
