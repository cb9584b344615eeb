from __future__ import annotations

import numpy as np
import pytest

from utils.errors import first_line
from utils.strings import aligned, class_difference, counted, format_duration, image_ids_of


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "image", "0 images"), (1, "image", "1 image"), (1_234_567, "image", "1,234,567 images"),
     (1, "class", "1 class"), (2, "class", "2 classes"), (2, "box", "2 boxes"), (2, "batch", "2 batches"),
     (2, "epoch", "2 epochs"), (np.int64(1), "process", "1 process")],
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


def test_tables_class_names_errors_and_durations():
    rows = [("name", "AP"), ("a", "0.5"), ("longer", "-")]
    assert aligned(rows) == ["  name   AP", "     a  0.5", "longer    -"]
    assert aligned(rows, left=True) == ["name    AP", "a       0.5", "longer  -"]
    assert class_difference(("a", "b"), ["a", "b"]) == ""
    assert class_difference(["a"], ["a", "b"]) == "1 class against 2"
    assert class_difference(["a", "b"], ["a", "c"]) == "class 1 is 'b' against 'c'"
    alike = class_difference(["\xe9"], ["e\u0301"])
    assert alike == r"class 0 is '\xe9' against 'e\u0301', which look the same"
    assert [first_line(error) for error in (ValueError(" one\ntwo"), ValueError())] == ["one", "ValueError"]
    assert [format_duration(s) for s in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]
