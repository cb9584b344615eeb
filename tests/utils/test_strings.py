from __future__ import annotations

import numpy as np
import pytest

from utils.strings import counted, image_ids_of


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
