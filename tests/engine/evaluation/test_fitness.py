"""--fitness and --patience: the best epoch, early stopping, and the confidence with the best F1."""

from __future__ import annotations

import numpy as np
import pytest

import train
from engine.evaluation.fitness import Fitness
from engine.evaluation.metrics import score_detections
from tests.helpers.messages import refused
from tests.helpers.scoring import coco_evaluate, random_case
from tests.helpers.scripts import SMALL, error_of
from tests.helpers.tiny import write_dataset, write_model

NAMES = ("RBC", "WBC", "a:b", "AP50")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AP", ("AP", "AP")), ("ap50", ("AP50", "AP50")), ("F1", ("f1", "F1")), ("AP:WBC", ("AP", "AP:WBC", 1)),
        ("f1:0", ("f1", "F1:RBC", 0)), ("RBC", ("AP", "AP:RBC", 0)), ("a:b", ("AP", "AP:a:b", 2)),
        ("AP75:a:b", ("AP75", "AP75:a:b", 2)), ("AP:AP50", ("AP", "AP:AP50", 3)),
        ("AP50", ("AP50", "AP50")),  # a metric, also if a class has this name
    ],
)  # fmt: skip
def test_a_fitness_is_a_metric_or_that_of_a_class(text, expected):
    assert Fitness.parse(text, NAMES) == Fitness(*expected)


def test_digits_alone_are_the_name_of_a_class():
    """Numbers follow a metric, so "1" is not the second class."""
    assert Fitness.parse("1", ["1", "2"]) == Fitness("AP", "AP:1", 0)
    assert Fitness.parse("AP:[1]", ["1", "2"]) == Fitness("AP", "AP:2", 1)
    with refused("--fitness 1: neither a metric (...) nor a class of the data set (did you mean 'F1'?)"):
        Fitness.parse("1", NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("AP:RBD", "--fitness RBD: the data set has no class of this name (did you mean 'RBC'?)"),
        ("AP:9", "--fitness 9: the data set has classes 0 to 3"),
        ("AP5", "--fitness AP5: neither a metric (...) nor a class of the data set (did you mean 'AP75'?)"),
        ("AP:", "--fitness AP:: neither a metric (...) nor a class of the data set (did you mean 'AP'?)"),
        ("", "--fitness : neither a metric (...) nor a class of the data set"),
        ("mAP:RBC", "--fitness mAP:RBC: neither a metric (...) nor a class of the data set (did you mean 'RBC'?)"),
    ],
)
def test_an_unknown_metric_or_class_is_refused(text, message):
    with refused(message):
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


@pytest.fixture(scope="module")
def root_and_flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("fitness")
    data = write_dataset(root / "set", train=12, val=6)
    model = write_model(root / "tiny.yaml")
    flags = ["--data", data, "--model", model, *SMALL, "--project", root, "--cache-dir", root]
    learning = ["--set", "ema_tau=3", "lr0=0.02", "mosaic=0", "scale=0"]
    early = ["--epochs", "30", "--fitness", "AP50:dark", "--patience", "3", *learning]
    return root, [str(flag) for flag in (*flags, *early)]


def test_a_resumed_run_keeps_its_fitness_and_an_unknown_class_leaves_no_folder(root_and_flags, capsys):
    root, flags = root_and_flags
    train.main([*flags, "--fitness", "AP", "--name", "old", "--epochs", "1"])
    line = error_of(capsys, train.main, "--resume", root / "old" / "last.pt", "--epochs", "3", "--fitness", "F1")
    assert "--fitness F1: the run has 'AP'" in line
    line = error_of(capsys, train.main, *flags, "--fitness", "AP:drak", "--name", "unknown")
    assert "--fitness drak: the data set has no class of this name (did you mean 'dark'?)" in line
    assert not (root / "unknown").exists()
