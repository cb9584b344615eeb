"""Asks a trained model for the label errors of a whole data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from data.check.issues import Issue
from data.check.scanned import CheckedSplit
from data.image_io.decode import read_image
from data.index.index import DatasetIndex
from engine.evaluation.label_errors import find_label_errors
from engine.evaluation.metrics import score_detections
from engine.inference.predictor import Predictor
from utils.logger import progress
from utils.machine.threads import map_ahead
from utils.structures import DetectionTable, EvalResult

BATCH = 16  # images, which are also read ahead
PER_LABEL = 3  # detections per image for each of its labels, at least: a label that none is left for looks spurious


def detect_all(predictor: Predictor, index: DatasetIndex) -> DetectionTable:
    """All detections in the images of ``index``, which threads read ahead."""
    images = map_ahead(
        lambda i: read_image(index.path(i), None, predictor.model.pixels), range(len(index)), threads=BATCH // 2
    )
    batches, count = iter(lambda: list(islice(images, BATCH)), []), -(-len(index) // BATCH)
    tables = [
        t for batch in progress(batches, desc="detecting", total=count, unit="batch") for t in predictor.detect(batch)
    ]
    return DetectionTable.concatenate(replace(t, image_index=t.image_index + i) for i, t in enumerate(tables))


def label_issues(
    predictor: Predictor, splits: Sequence[CheckedSplit], least_score: float
) -> tuple[list[Issue], dict[str, DetectionTable], dict[str, EvalResult]]:
    """The label errors of all splits with a score of at least ``least_score``, the most probable first, and by split
    the detections and their scores."""
    most_labels = max(int(np.diff(split.index.offsets).max(initial=0)) for split in splits)
    max_det = max(predictor.settings.max_det, PER_LABEL * most_labels)
    predictor.settings = replace(predictor.settings, max_det=max_det)
    issues, tables, results = [], {}, {}
    for split in splits:
        table = tables[split.name] = detect_all(predictor, split.index)
        truth = replace(split.index.ground_truth(), max_det=max_det)
        result = results[split.name] = score_detections(truth, table, len(split.index.names))
        issues += find_label_errors(split, table, result.class_metrics, least_score)
    return sorted(issues, key=lambda issue: -issue.score), tables, results
