"""Each rule of the report's text speaks on the numbers that it is about, and on no others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.evaluation.analysis import KINDS, ErrorSplit
from engine.evaluation.fitness import Fitness
from engine.evaluation.result import EvalResult
from engine.issues.issue import CheckedSplit
from engine.report.advice import how_it_went, what_to_do, where_it_is_wrong
from engine.report.census import Census
from engine.report.run_facts import RunFacts
from engine.report.subject import Subject
from tests.helpers.synthetic_index import index_of
from utils.config.settings import Hyperparameters, TrainConfig, ValConfig

AP = Fitness("AP", "AP")


def facts_of(
    *,
    epochs: int = 0,
    names: Sequence[str] = ("a", "b"),
    tile: int = 0,
    fitness: Fitness = AP,
    best_epoch: int | None = None,
    batches: int = 0,
    settings: dict[str, Any] | None = None,
    **facts: Any,
) -> RunFacts:
    """Returns the facts of a run of ``epochs`` (0: of a validation), of which nothing else is known but ``facts``.
    Without ``best_epoch``, it is the one with the highest fitness."""
    index = index_of(names=names, paths=[], image_hw=[], offsets=[0], boxes_xywh_px=[], classes=[])
    config = TrainConfig(epochs=epochs, **(settings or {})) if epochs else ValConfig(weights="best.pt")
    facts = {"history": {}, "train": None, **facts}
    if best_epoch is None:
        values = facts["history"].get(fitness.column)
        best_epoch = -1 if values is None else int(np.nanargmax(values)) + 1
    subject = Subject(
        title="run",
        config=config,
        hyp=None,
        machine=(),
        imgsz=320,
        stride=32,
        train=None,
        validated=CheckedSplit("val", replace(index, tile=tile)),
        fitness=fitness,
        batches=batches,
        best_epoch=best_epoch,
    )
    return RunFacts(subject=subject, **facts)


NOTHING = facts_of()


def history(**columns: list[float]) -> dict[str, np.ndarray]:
    length = len(next(iter(columns.values())))
    renamed = {name.replace("__", "/"): np.array(values, float) for name, values in columns.items()}
    return {"epoch": np.arange(1.0, length + 1), "time": np.arange(1.0, length + 1) * 60, **renamed}


def census(boxes: list[int], side: float) -> Census:
    return Census("train", 10, 0, np.array(boxes), np.array(boxes), np.full(sum(boxes), side), np.zeros((2, 2), int), 3)


def scored(*targets: int, ap: float = 0.5) -> EvalResult:
    classes = len(targets)
    curve = np.zeros((len(targets), 2))
    return EvalResult(
        metrics={"AP": ap, "AP50": ap, "f1": 0.5, "precision": 0.5, "recall": 0.5},
        class_metrics={"AP": np.full(classes, ap), "recall": np.full(classes, 0.5)},
        threshold=0.4, shown_confidence=0.4, ap_small=np.nan, ap_medium=np.nan,
        ap_large=np.nan, class_targets=np.array(targets), confusion=np.zeros((classes + 1, classes + 1), np.int64),
        curve_confidence=np.array([0.0, 1]), curve_precision=curve + 0.5,
        curve_recall=curve + 0.5, pr_recall=np.zeros(101), pr_precision=np.zeros((classes, 101)), num_images=2,
    )  # fmt: skip


def costs(**given: float) -> ErrorSplit:
    cost = np.array([given.get(kind, 0.0) for kind in KINDS])
    return ErrorSplit(0.5, np.zeros((2, 6), int), np.tile(cost, (2, 1)), cost, 0.0, 0.0)


def joined(lines: list[str]) -> str:
    return " ".join(lines)


def test_there_is_no_advice_without_facts():
    assert [*how_it_went(NOTHING)] == ["This page has no validation, so it says nothing about the detections."]
    assert [*where_it_is_wrong(NOTHING)] == []
    assert [*what_to_do(NOTHING)] == []


@pytest.mark.parametrize(
    ("ap", "rises"), [([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], True), ([0.1, 0.5, 0.6, 0.6, 0.6, 0.6], False)]
)
def test_more_epochs_are_advised_while_ap_rises(ap, rises):
    given = {"history": history(metrics__AP=ap), "last": Path("my runs/exp2/last.pt")}
    facts = facts_of(epochs=6, **given)
    assert ("AP was still rising" in joined(how_it_went(facts))) == rises
    assert ("--resume 'my runs/exp2/last.pt' --epochs 12 continues this run" in joined(what_to_do(facts))) == rises
    assert "--resume" not in joined(what_to_do(facts_of(epochs=7, **given)))


def test_a_fall_after_the_best_epoch_is_named():
    facts = facts_of(epochs=6, history=history(metrics__AP=[0.1, 0.5, 0.6, 0.5, 0.45, 0.4]))
    assert "The best AP was 0.600 in epoch 3; the newest, in epoch 6, is 0.400." in joined(how_it_went(facts))
    assert "AP has fallen by 0.200 since the best epoch." in joined(how_it_went(facts))


@pytest.mark.parametrize(("newest", "named"), [(0.4, True), (0.6, False)])
def test_the_threshold_of_best_pt_is_named_if_another_epoch_is_the_newest(newest, named):
    scores = {"f1": [0.3, 0.7, 0.5], "precision": [0.3, 0.8, 0.5], "recall": [0.3, 0.625, 0.5]}
    columns = {f"metrics__{name}": values for name, values in scores.items()}
    columns |= {"metrics__AP": [0.1, 0.5, newest], "metrics__confidence": [0.2, 0.31, 0.4]}
    summary = joined(how_it_went(facts_of(epochs=3, history=history(**columns), result=scored(600, 600))))
    assert "Recommended confidence threshold: 0.400 (the best mean F1, 0.500); there precision is 0.500" in summary
    own = "best.pt, of epoch 2, has a threshold of its own: 0.310 (F1 0.700, precision 0.800, recall 0.625)."
    assert (own in summary) == named
    del columns["metrics__confidence"]  # as in a run that an earlier version started
    older = facts_of(epochs=3, history=history(**columns), result=scored(600, 600))
    assert "best.pt" not in joined(how_it_went(older))


@pytest.mark.parametrize(("ap", "best_epoch"), [([0.6, 0.5, 0.2, 0.3], 4), ([0.6, 0.5, 0.3, 0.2], 3)])
def test_the_best_epoch_is_that_of_the_run_after_scores_stopped_being_comparable(ap, best_epoch):
    """At another size, the epochs before are better; the run has forgotten them, and best.pt is of a later one."""
    scores = {f"metrics__{name}": ap for name in ("AP", "f1", "precision", "recall")}
    columns = history(metrics__confidence=[0.1, 0.2, 0.3, 0.4], **scores)
    facts = facts_of(epochs=4, history=columns, best_epoch=best_epoch, result=scored(600, 600))
    summary = joined(how_it_went(facts))
    assert ("The best AP was 0.300 in epoch 3; the newest, in epoch 4, is 0.200." in summary) == (best_epoch == 3)
    assert ("best.pt, of epoch 3, has a threshold of its own: 0.300" in summary) == (best_epoch == 3)
    assert ("fallen by 0.100" in summary) == (best_epoch == 3)
    assert not {"0.600", "rising"} & set(summary.split())
    forgotten = facts_of(epochs=4, history=columns, best_epoch=-1, result=scored(600, 600))
    assert not {"The", "best.pt,", "rising", "fallen"} & set(joined(how_it_went(forgotten)).split())


@pytest.mark.parametrize(("val", "overfits"), [([3, 2.5, 2, 2, 2.2, 2.5], True), ([3, 2.5, 2, 1.9, 1.8, 1.7], False)])
def test_overfitting_is_a_rising_validation_loss(val, overfits):
    columns = history(train__box=[3, 2.5, 2, 1.5, 1.2, 1], val__box=val)
    facts = facts_of(epochs=6, history=columns)
    assert ("overfits" in joined(how_it_went(facts))) == overfits
    assert ("Against overfitting" in joined(what_to_do(facts))) == overfits


@pytest.mark.parametrize(("waits", "advised"), [([0.3, 0.4, 0.3], True), ([0.9, 0.1, 0.1], False)])
def test_waiting_for_data_is_judged_by_the_median(waits, advised):
    facts = facts_of(epochs=3, history=history(speed__data_wait=waits))
    assert ("training waits for images" in joined(what_to_do(facts))) == advised


def test_small_boxes_and_rare_classes_are_named():
    advised = joined(what_to_do(replace(NOTHING, train=census([100, 7], 8.0))))
    assert "--imgsz 640" in advised
    assert "fewer than 50 training boxes; label more: b (7)." in advised
    assert [*what_to_do(replace(NOTHING, train=census([100, 70], 30.0)))] == []


def test_suspicious_labels_and_backgrounds_are_counted():
    advised = joined(what_to_do(replace(NOTHING, suspects=3, backgrounds=2)))
    assert "Check 3 labels" in advised
    assert "Check 2 images without labels that have detections" in advised


def test_imbalance_is_named_unless_something_is_done_about_it():
    facts = facts_of(names=("a", "b", "c"), train=census([2000, 0, 60], 30.0))
    assert "a has 33 times as many training boxes as c: --repeat-factor" in joined(what_to_do(facts))
    assert "--image-weights" in joined(what_to_do(facts))
    balancing = facts_of(
        epochs=1, names=("a", "b", "c"), train=census([2000, 0, 60], 30.0), settings={"cls_pw": 1.0, "time": 1.0}
    )
    assert "times as many" not in joined(what_to_do(balancing))
    assert "times as many" not in joined(what_to_do(replace(facts, train=census([500, 0, 60], 30.0))))


def test_changes_within_the_interval_of_few_objects_give_no_advice():
    """17 epochs on 8 images, scored on 2: AP 0.622 after 0.55."""
    ap = [0.5, 0.52, 0.55, 0.54, 0.622, 0.55]
    few = facts_of(epochs=6, history=history(metrics__AP=ap), result=scored(6, 6, ap=0.55))
    many = replace(few, result=scored(600, 600, ap=0.55))
    assert "With 12 objects, AP is known to about ±0.28: on other images it may differ" in joined(how_it_went(few))
    assert [*what_to_do(few)] == []
    assert not {"rising", "fallen"} & set(joined(how_it_went(few)).split())
    assert "rising" in joined(how_it_went(many))
    assert [*what_to_do(many)] == ["Train longer: --resume last.pt --epochs 12 continues this run."]


def draws_of(means: list[float], *, shared: float, own: float) -> dict[int, np.ndarray]:
    """Returns AP of 2 classes on 400 draws, by epoch: what is hard in a draw is ``shared`` by the epochs, or an epoch's
    ``own``."""
    rng = np.random.default_rng(0)
    common = rng.normal(0, shared, (400, 2))
    return {epoch: mean + common + rng.normal(0, own, (400, 2)) for epoch, mean in enumerate(means, 1)}


@pytest.mark.parametrize(("own", "rises"), [(0.01, True), (0.2, False)])
@pytest.mark.parametrize("class_index", [None, 1])
def test_epochs_with_few_objects_are_compared_on_the_same_draws_of_images(own, rises, class_index):
    """AP rises from 0.5 to 0.6; one AP of 64 objects is known to 0.12."""
    ap = [0.3, 0.4, 0.45, 0.5, 0.55, 0.6]
    fitness = Fitness("AP", "AP") if class_index is None else Fitness("AP", "AP:b", class_index)
    column = fitness.column.replace("/", "__")
    result = replace(scored(32, 32, ap=0.6), num_images=60)
    given = {"epochs": 6, "fitness": fitness, "result": result, "history": history(**{column: ap})}
    assert [*what_to_do(facts_of(**given))] == []
    given["ap_of_draws"] = draws_of(ap, shared=0.2, own=own)
    paired = facts_of(**given)
    assert ("was still rising" in joined(how_it_went(paired))) == rises
    assert ("--resume last.pt --epochs 12" in joined(what_to_do(paired))) == rises
    falling = {"history": history(**{column: ap[::-1]}), "ap_of_draws": draws_of(ap[::-1], shared=0.2, own=own)}
    fallen = facts_of(**given | falling)
    assert ("has fallen by 0.300 since the best epoch" in joined(how_it_went(fallen))) == rises
    resumed = replace(paired, ap_of_draws={6: paired.ap_of_draws[6]})
    tiny = replace(paired, result=replace(result, num_images=2))
    f1 = facts_of(**given | {"fitness": Fitness("f1", "F1"), "history": history(metrics__f1=ap)})
    for unknown in (resumed, tiny, f1):
        assert [*what_to_do(unknown)] == []


def test_few_steps_are_named():
    facts = facts_of(epochs=4, batches=9, settings={"weights": "a.pt"})
    assert "Train longer: the run has only 36 steps; fine-tuning needs about 100: --epochs 12." in [*what_to_do(facts)]


def test_classes_without_boxes_are_not_divided_by(recwarn):
    """Neither the only class with boxes, nor one that an earlier class without boxes precedes."""
    for boxes in ([0, 500, 0], [0, 0, 0], [500, 0, 60]):
        facts = facts_of(names=("a", "b", "c"), train=census(boxes, 30.0))
        assert "inf" not in joined(what_to_do(facts))
        assert "times as many" not in joined(what_to_do(facts))
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]  # NumPy's


def test_classes_that_the_data_set_does_not_label_need_no_labels():
    facts = facts_of(names=("old", "b", "c"), train=census([0, 7, 900], 30.0), ignored=("old",))
    assert "1 class with fewer than 50 training boxes; label more: b (7)." in [*what_to_do(facts)]


def test_a_set_with_tiles_is_not_advised_to_cut_tiles():
    facts = facts_of(train=census([100, 70], 8.0), tile=640)
    assert "or smaller tiles ('tile: 320' in the data set's YAML)." in joined(what_to_do(facts))


def test_without_validation_objects_the_one_thing_to_do_is_to_label_them():
    facts = facts_of(result=scored(0, 0), train=census([44, 44], 8.0), suspects=3, epochs=6)
    assert "no objects in 2 validation images" in joined(how_it_went(facts))
    (advised,) = what_to_do(facts)
    assert advised.startswith("Label the objects in the validation images")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"location": 0.05, "duplicate": 0.05}, ["location", "duplicate"]),
        ({"location": 0.05, "duplicate": 0.03}, ["location"]),
        ({"missed": 0.009}, []),
    ],
)
def test_kinds_of_errors_that_cost_about_the_same_are_named_together(given, named):
    remedies = {"location": "boxes are inaccurate", "duplicate": "objects are detected twice"}
    advised = [*what_to_do(replace(NOTHING, result=scored(600, 600), errors=costs(**given)))]
    assert len(advised) == len(named)
    for line, kind in zip(advised, named, strict=True):
        assert line.startswith(f"{given[kind]:.3f} of AP50 is lost because {remedies[kind]}")


@pytest.mark.parametrize(
    ("sides", "advised"),
    [
        ([40.0] * 10, ""),
        ([31.0] + [300.0] * 19, ""),
        ([31.0] * 2 + [300.0] * 8, "; 20% of the boxes have sides below 32 px and need a larger --imgsz"),
        ([], ""),
    ],
)
def test_a_larger_size_is_advised_for_inaccurate_boxes_only_where_some_are_small(sides, advised):
    data = census([len(sides), 0], 0.0)._replace(sides_px=np.array(sides))
    for facts in (replace(NOTHING, data=data), NOTHING):
        facts = replace(facts, result=scored(600, 600), errors=costs(location=0.05))
        expected = "0.050 of AP50 is lost because boxes are inaccurate: check that labels are tight and consistent"
        assert [*what_to_do(facts)] == [f"{expected}{advised if facts.data else ''}."]


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 of 9 objects of class b is"), (2, "2 of 9 objects of class b are")]
)
def test_the_most_frequent_confusion_is_named(count, words):
    result = scored(9, 9)
    result.confusion[0, 1] = count
    assert f"{words} mistaken for a." in joined(where_it_is_wrong(replace(NOTHING, result=result)))


@pytest.mark.parametrize(("fliplr", "is_advised"), [(0.5, True), (0.0, False)])
def test_flips_are_named_for_confused_classes_that_they_exchange(fliplr, is_advised):
    facts = facts_of(epochs=1, names=("left arrow", "right arrow"), result=scored(9, 9), errors=costs(**{"class": 0.1}))
    facts = replace(facts, subject=replace(facts.subject, hyp=Hyperparameters(fliplr=fliplr)))
    assert "fliplr" not in joined(what_to_do(facts))
    facts.result.confusion[0, 1] = 4
    advice = joined(what_to_do(facts))
    assert ("--set fliplr=0." in advice) == is_advised
    assert ("compare the labels" in advice) != is_advised
