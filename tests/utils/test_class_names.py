from __future__ import annotations

import pytest

from engine.evaluation.fitness import Fitness
from tests.helpers.messages import refused
from utils.class_names import class_numbers, typed_classes
from utils.mirrored_classes import mirrored_classes


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        (["0,2"], [0, 2]),
        (["[0, 2]", "cat"], [0, 2, "cat"]),
        (["(1,)"], [1]),
        (["[1]", "1"], [1, "1"]),
        (["[cat]", "0 2", "0,", "[0", ""], ["[cat]", "0 2", "0,", "[0", ""]),
    ],
)
def test_a_list_of_numbers_in_one_word_is_split_and_names_stay_whole(words, classes):
    """``--classes 0,1`` was one class of this name, which no data set has."""
    assert typed_classes(words) == classes


@pytest.mark.parametrize(("word", "number"), [("0", 0), ("1", 1), ("2", 0), ("3", 1), ("[1]", 1), ("(1,)", 1)])
def test_digits_mean_one_class_to_every_flag(word, number):
    """``--classes 2`` was refused, and ``--fitness AP:2`` the first class."""
    names = ["2", "3"]
    assert class_numbers(typed_classes([word]), dict(enumerate(names)), "the data set") == (number,)
    assert Fitness.parse(f"AP:{word}", names).class_index == number


def test_a_name_that_is_the_number_of_another_class_is_refused():
    with refused("--classes 1: the data set has a class of this name, number 0, and another class of this number; ..."):
        class_numbers(["1"], {0: "1", 1: "2"}, "the data set")


@pytest.mark.parametrize(
    ("names", "flip", "pairs"),
    [
        (["left arrow", "stop", "right arrow"], "fliplr", [("left arrow", "right arrow")]),
        (
            ["Left shoe", "right_shoe", "hand L", "hand R"],
            "fliplr",
            [("Left shoe", "right_shoe"), ("hand L", "hand R")],
        ),
        (["thumb up", "thumb-down", "left"], "flipud", [("thumb up", "thumb-down")]),
        (["Linksabbieger", "Rechtsabbieger"], "fliplr", [("Linksabbieger", "Rechtsabbieger")]),
        (["左转", "右转", "向上", "向下"], "fliplr", [("左转", "右转")]),
        (["left arrow", "right hand", "up", "down", "L", "R", "leftover"], "fliplr", []),
        (["left", "right"], "flipud", []),
    ],
)
def test_classes_are_a_pair_if_a_flip_exchanges_their_only_different_words(names, flip, pairs):
    assert mirrored_classes(names, flip) == pairs
