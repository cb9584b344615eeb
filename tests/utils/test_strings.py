from __future__ import annotations

import numpy as np
import pytest

from utils.errors import first_line
from utils.strings import aligned, class_difference, counted, format_duration, image_ids_of


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "image", "0 images"), (1, "image", "1 image"), (1_234_567, "image", "1,234,567 images"),
     (1, "class", "1 class"), (2, "class", "2 classes"), (2, "box", "2 boxes"), (2, "batch", "2 batches"),
     (2, "epoch", "2 epochs"), (np.int64(1), "process", "1 process"),
     (2, "category", "2 categories"), (2, "key", "2 keys")],
)  # fmt: skip
def test_counts_agree_with_their_nouns(count, noun, text):
    assert counted(count, noun) == text


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


TABLE = [("name", "AP"), ("a", "0.5"), ("longer", "-")]


@pytest.mark.parametrize(
    ("left", "lines"),
    [(False, ["  name   AP", "     a  0.5", "longer    -"]), (True, ["name    AP", "a       0.5", "longer  -"])],
)
def test_columns_of_a_table_are_as_wide_as_their_widest_cell(left, lines):
    assert aligned(TABLE, left=left) == lines


@pytest.mark.parametrize(
    ("names", "others", "difference"),
    [
        (("a", "b"), ["a", "b"], ""),
        (["a"], ["a", "b"], "1 class against 2"),
        (["a", "b"], ["a", "c"], "class 1 is 'b' against 'c'"),
        (["\xe9"], ["e\u0301"], r"class 0 is '\xe9' against 'e\u0301', which look the same"),
    ],
)
def test_the_first_difference_between_class_names_is_described(names, others, difference):
    assert class_difference(names, others) == difference


@pytest.mark.parametrize(("error", "line"), [(ValueError(" one\ntwo"), "one"), (ValueError(), "ValueError")])
def test_an_error_is_described_by_its_first_line_or_its_type(error, line):
    assert first_line(error) == line


@pytest.mark.parametrize(("seconds", "duration"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_durations_are_rounded_to_seconds(seconds, duration):
    assert format_duration(seconds) == duration
