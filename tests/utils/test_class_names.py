from __future__ import annotations

import pytest

from engine.evaluation.fitness import Fitness
from tests.helpers.messages import refused
from utils.class_names import class_numbers, typed_classes


@pytest.mark.parametrize(
    ("words", "classes"),
    [
        (["0", "2"], ["0", "2"]),
        (["0,2"], [0, 2]),
        (["[0, 2]", "cat"], [0, 2, "cat"]),
        (["(1,)"], [1]),
        (["[1]", "1"], [1, "1"]),
        (["cat,dog"], ["cat,dog"]),
        (["[cat]", "0 2", "0,", "[0", ""], ["[cat]", "0 2", "0,", "[0", ""]),
    ],
)
def test_a_list_of_numbers_in_one_word_is_split_and_names_stay_whole(words, classes):
    """``--classes 0,1`` was one class of this name, which no data set has."""
    assert typed_classes(words) == classes


def chosen(word: str, names: list[str]) -> list[int]:
    """Returns the number of the class that ``word`` means, as two flags read it."""
    (number,) = class_numbers(typed_classes([word]), dict(enumerate(names)), "the data set")
    return [number, Fitness.parse(f"AP:{word}", names).class_index]


@pytest.mark.parametrize(("word", "number"), [("0", 0), ("1", 1), ("2", 0), ("3", 1), ("[1]", 1), ("(1,)", 1)])
def test_digits_mean_one_class_to_every_flag(word, number):
    """``--classes 2`` was refused, and ``--fitness AP:2`` the first class."""
    assert chosen(word, ["2", "3"]) == [number, number]
    assert chosen("1", ["0", "1"]) == [1, 1]


@pytest.mark.parametrize("flag", ["--classes", "--fitness"])
def test_a_name_that_is_the_number_of_another_class_is_refused(flag):
    names = ["1", "2"]
    with refused(f"{flag} 1: the data set has a class of this name, number 0, and another class of this number; ..."):
        if flag == "--fitness":
            Fitness.parse("AP:1", names)
        else:
            class_numbers(typed_classes(["1"]), dict(enumerate(names)), "the data set")
