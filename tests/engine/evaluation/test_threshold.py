"""The confidence with the best F1: found by validation in training, stored in the checkpoint."""

import dataclasses

import pytest

import train
from engine.evaluation import evaluator
from tests.helpers.scripts import SMALL
from tests.helpers.tiny import write_dataset, write_model
from utils.files.checkpoint import read_checkpoint


def test_checkpoints_store_the_threshold_of_their_validation(tmp_path, monkeypatch):
    true_score = evaluator.score_detections
    scores = iter([({"AP": 0.9, "f1": 0.6}, 0.375), ({"AP": 0.1, "f1": 0.4}, 0.5)])

    def score(*arguments):
        result, (metrics, confidence) = true_score(*arguments), next(scores)
        return dataclasses.replace(result, metrics=result.metrics | metrics, best_confidence=confidence)

    monkeypatch.setattr(evaluator, "score_detections", score)
    data, model = write_dataset(tmp_path / "set"), write_model(tmp_path / "tiny.yaml")
    common = ["--project", str(tmp_path / "runs"), "--data", str(data), "--model", str(model)]
    train.main([*common, *SMALL, "--epochs", "3", "--val-every", "2"])
    folder = tmp_path / "runs/exp"
    stored = {name: read_checkpoint(folder / name)["progress"]["confidence"] for name in ("best.pt", "last.pt")}
    assert stored == {"best.pt": 0.375, "last.pt": 0.5}


@pytest.mark.parametrize(("f1", "threshold"), [(0.5, 0.25), (0.0, None), (float("nan"), None)])
def test_no_threshold_is_stored_without_detections(f1, threshold):
    empty = {f.name: None for f in dataclasses.fields(evaluator.EvalResult)}
    assert evaluator.EvalResult(**empty | {"metrics": {"f1": f1}, "best_confidence": 0.25}).threshold == threshold
