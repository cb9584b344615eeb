"""--fitness and --patience: the best epoch, early stopping, and the confidence with the best F1."""

from __future__ import annotations

import numpy as np
import pytest

from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import score_detections
from tests.helpers.messages import refused
from tests.helpers.scoring import coco_evaluate, random_case

NAMES = ("RBC", "WBC", "a:b", "AP50")


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("ap50", NAMES, ("AP50", "AP50")),
        ("f1:0", NAMES, ("f1", "F1:RBC", 0)),
        ("AP75:a:b", NAMES, ("AP75", "AP75:a:b", 2)),
        ("AP50", NAMES, ("AP50", "AP50")),  # a metric, also if a class has this name
        ("1", ["1", "2"], ("AP", "AP:1", 0)),  # numbers follow a metric, so this is a name
        ("AP:[1]", ["1", "2"], ("AP", "AP:2", 1)),
    ],
)
def test_a_fitness_is_a_metric_or_that_of_a_class(text, names, expected):
    assert Fitness.parse(text, names) == Fitness(*expected)


@pytest.mark.parametrize("text", ["AP:RBD", "AP:9", "AP:", "1"])
def test_an_unknown_metric_or_class_is_refused(text):
    with refused("--fitness ..."):
        Fitness.parse(text, NAMES)


def test_the_fitness_of_a_class_is_that_of_pycocotools():
    gt, table, classes = random_case(3)
    _, precision = coco_evaluate(gt, table)
    result = score_detections(gt, table, classes).result
    names = [f"c{number}" for number in range(classes)]
    for number in range(classes - 1):  # the last class has no object
        assert Fitness.parse(f"AP:c{number}", names).score_of(result) == pytest.approx(
            precision[:, :, number, 0].mean()
        )
        assert Fitness.parse(f"AP75:c{number}", names).score_of(result) == pytest.approx(
            precision[5, :, number, 0].mean()
        )
    assert Fitness.parse("AP", names).score_of(result) == result.ap
    assert np.isnan(Fitness.parse(names[-1], names).score_of(result))
    with refused("--fitness AP:c3: the validation images have no object of this class to score"):
        Fitness.parse(names[-1], names).check_objects(gt)
