"""Reliability and calibration error compared with counting, and for detections that are calibrated by construction."""

import numpy as np
import pytest

from engine.evaluation.analysis import measure_calibration
from engine.evaluation.matching import known_outcomes, match_detections, sort_by_class
from tests.helpers.scoring import random_case


def outcomes_of(scores, true_positive):
    """The outcomes of detections of one class."""
    order = np.argsort(-scores, kind="stable")
    return known_outcomes(np.zeros(scores.size, dtype=np.int64), scores[order], true_positive[order], 1)


@pytest.mark.parametrize("seed", range(4))
def test_calibration_equals_counting(seed):
    """For detections with crowd, ties and scores on the edges of bins."""
    gt, table, num_classes = random_case(seed, crowd_share=0.4, rounding=2)
    outcomes = sort_by_class(match_detections(gt, table, num_classes))
    tp, fp = outcomes.at_first_iou()
    assert not (tp | fp).all()  # some lie in a crowd region
    threshold = 0.35
    calibration = measure_calibration(outcomes, threshold, bins=10)
    for part, lowest in ((calibration.scored, -1.0), (calibration.shown, threshold)):
        bins = [[] for _ in range(10)]
        for score, good, bad in zip(outcomes.scores, tp, fp):
            if (good or bad) and score >= lowest:
                place = max(k for k in range(10) if score >= np.linspace(0, 1, 11)[k])
                bins[place].append((score, good))
        total = sum(map(len, bins))
        error = bias = 0.0
        for k, members in enumerate(bins):
            assert part.counts[k] == len(members)
            if not members:
                assert np.isnan(part.confidence[k])
                assert np.isnan(part.precision[k])
                continue
            confidence, precision = np.mean([s for s, _ in members]), np.mean([g for _, g in members])
            assert part.confidence[k] == pytest.approx(confidence)
            assert part.precision[k] == pytest.approx(precision)
            error += len(members) / total * abs(confidence - precision)
            bias += len(members) / total * (confidence - precision)
        assert part.error == pytest.approx(error)
        assert part.bias == pytest.approx(bias)


def test_calibrated_confidences_have_almost_no_error():
    rng = np.random.default_rng(0)
    scores = rng.random(200_000)
    honest = measure_calibration(outcomes_of(scores, rng.random(scores.size) < scores), 0.5)
    assert honest.scored.error < 0.01
    assert abs(honest.shown.bias) < 0.01
    boasting = measure_calibration(outcomes_of(scores, rng.random(scores.size) < scores / 2), 0.5)
    assert boasting.scored.error == pytest.approx(0.25, abs=0.01)
    assert boasting.shown.bias == pytest.approx(0.375, abs=0.01)


def test_certain_true_positives_have_no_error():
    part = measure_calibration(outcomes_of(np.ones(5), np.ones(5, dtype=bool)), 1.0).scored
    assert (part.error, part.bias, part.counts[-1]) == (0, 0, 5)


@pytest.mark.filterwarnings("error")
def test_no_detections_have_no_error():
    calibration = measure_calibration(outcomes_of(np.zeros(0), np.zeros(0, dtype=bool)), 0.5)
    assert np.isnan([calibration.scored.error, calibration.shown.bias]).all()
