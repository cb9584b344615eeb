"""Pairs of classes that a mirrored image exchanges."""

from __future__ import annotations

import pytest

from utils.mirrored_classes import mirrored_classes


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
        (["flecha izquierda", "flecha derecha"], "fliplr", [("flecha izquierda", "flecha derecha")]),
        (["virage à gauche", "virage à droite"], "fliplr", [("virage à gauche", "virage à droite")]),
        (["Linksabbieger", "Rechtsabbieger"], "fliplr", [("Linksabbieger", "Rechtsabbieger")]),
        (["strzałka w prawo", "strzałka w lewo"], "fliplr", [("strzałka w lewo", "strzałka w prawo")]),
        (["налево", "направо", "прямо"], "fliplr", [("налево", "направо")]),
        (["sol el", "SAĞ EL"], "fliplr", [("sol el", "SAĞ EL")]),
        (["左转", "右转", "向上", "向下"], "fliplr", [("左转", "右转")]),
        (["좌회전", "우회전"], "fliplr", [("좌회전", "우회전")]),
        (["left arrow", "right hand", "up", "down", "L", "R", "leftover"], "fliplr", []),
        (["left", "right"], "flipud", []),
        ([], "fliplr", []),
    ],
)
def test_classes_are_a_pair_if_a_flip_exchanges_their_only_different_words(names, flip, pairs):
    assert mirrored_classes(names, flip) == pairs
