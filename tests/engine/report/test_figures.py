"""Charts of results.csv and of a validation."""

from __future__ import annotations

import numpy as np
import pytest

from engine.report.figures import confusion_picture

NAMES = ("Katze", "größer", "снег", "猫")


@pytest.mark.filterwarnings("error")
def test_confusion_matrices_show_names_as_text_and_the_worst_of_many_classes():
    given = ("a", "$\\frac$", "_hidden", "x" * 300)
    shown = ("a", "$\\frac$", " _hidden", "x" * 39 + "…")
    pictures = [confusion_picture(np.eye(5, dtype=int), names, "t").pixels for names in (given, shown)]
    assert np.array_equal(*pictures)
    assert confusion_picture(np.eye(91, dtype=int), [f"c{i}" for i in range(90)], "t").pixels.std() > 5
