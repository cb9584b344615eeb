from __future__ import annotations

import numpy as np
import pytest

from utils.strings import aligned, counted, format_duration


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "image", "0 images"), (1, "image", "1 image"), (1_234_567, "image", "1,234,567 images"),
     (1, "class", "1 class"), (2, "class", "2 classes"), (2, "box", "2 boxes"), (2, "batch", "2 batches"),
     (2, "epoch", "2 epochs"), (np.int64(1), "process", "1 process"),
     (2, "category", "2 categories"), (2, "key", "2 keys")],
)  # fmt: skip
def test_counts_agree_with_their_nouns(count, noun, text):
    assert counted(count, noun) == text


TABLE = [("name", "AP"), ("a", "0.5"), ("longer", "-")]


@pytest.mark.parametrize(
    ("left", "lines"),
    [(False, ["  name   AP", "     a  0.5", "longer    -"]), (True, ["name    AP", "a       0.5", "longer  -"])],
)
def test_columns_of_a_table_are_as_wide_as_their_widest_cell(left, lines):
    assert aligned(TABLE, left=left) == lines


@pytest.mark.parametrize(("seconds", "duration"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_durations_are_rounded_to_seconds(seconds, duration):
    assert format_duration(seconds) == duration
