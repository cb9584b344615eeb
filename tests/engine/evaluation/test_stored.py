"""An evaluation in a file: all of it comes back, and reading the file runs nothing."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch
from torch.utils._pytree import tree_map

from engine.evaluation.metrics import score_detections
from engine.evaluation.result import Evaluation, Preview
from engine.evaluation.stored import read_evaluation, write_evaluation
from tests.helpers.scoring import random_case
from tests.helpers.tiny import make_batch
from utils.detections import Detections


def in_arrays(evaluation: Evaluation) -> dict:
    return tree_map(lambda v: v.numpy() if isinstance(v, torch.Tensor) else v, asdict(evaluation))


def test_an_evaluation_comes_back_bit_for_bit(tmp_path):
    truth, table, num_classes = random_case(1)
    result, *rest = score_detections(truth, table, num_classes)
    result.extras["val/box"] = 0.1
    boxes = torch.rand(2, 3, 4)
    preview = Preview.of(make_batch(2), Detections(boxes, boxes[..., 0], torch.ones(2, 3).long(), torch.ones(2).long()))
    evaluation = Evaluation(result, *rest, for_ap=table, detected=table.take(slice(5)), preview=preview)
    write_evaluation(evaluation, tmp_path / "scores")
    read = read_evaluation(tmp_path / "scores")
    (tmp_path / "scores").unlink()  # as a run does, before it has used all of it
    np.testing.assert_equal(in_arrays(read), in_arrays(evaluation))
    assert read.for_ap.scores.dtype == table.scores.dtype
