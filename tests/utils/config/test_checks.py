from __future__ import annotations

import pytest

from utils.config.checks import typed_classes


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        (["0", "2"], [0, 2]),
        (["0,2"], [0, 2]),
        (["[0, 2]", "cat"], [0, 2, "cat"]),
        (["(1,)"], [1]),
        (["-1"], [-1]),
        (["cat,dog"], ["cat,dog"]),
        (["[cat]", "0 2", "0,", "[0", ""], ["[cat]", "0 2", "0,", "[0", ""]),
    ],
)
def test_numbers_in_one_word_are_classes_and_names_stay_whole(words, classes):
    """``--classes 0,1`` was one class of this name, which no data set has."""
    assert typed_classes(words) == classes
