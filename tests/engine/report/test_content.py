"""report.html: its numbers are those of the metrics, and its text is escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

import train
import val
from data.findings import NO_LABEL, Finding, ScanReport
from data.index import DatasetIndex
from engine.evaluation.analysis import split_errors
from engine.evaluation.metrics import METRICS, score_detections
from engine.evaluation.result import Evaluation
from engine.report.advice import Subject
from engine.report.content import FILE_NAME, report_content
from tests.helpers.html_page import HtmlPage, check_self_contained, photos_of
from tests.helpers.scoring import make_table
from tests.helpers.scripts import SMALL
from tests.helpers.synthetic_index import index_of
from tests.helpers.tiny import write_dataset, write_model
from utils.boxes import xywh_to_xyxy
from utils.config.settings import TrainConfig
from utils.detections import DetectionTable
from utils.drawing.page import write_page

HOSTILE = "<script>alert(1)</script>"
HISTORY = {
    "epoch": np.array([1.0, 2.0]),
    "time": np.array([30.0, 61.0]),
    "train/box": np.array([3.0, 2.5]),
    "val/box": np.array([np.nan, 2.75]),
    "metrics/AP": np.array([0.6, 0.5]),
}


def make_index(root: Path, *, images: int, names, boxes_per_image: int, size=(120, 160)) -> DatasetIndex:
    """Returns an index of ``images`` that share ten noisy files; every tenth image has no box."""
    rng = np.random.default_rng(0)
    for number in range(10):
        cv2.imwrite(str(root / f"{number}.jpg"), rng.integers(0, 255, (*size, 3), dtype=np.uint8))
    counts = np.full(images, boxes_per_image)
    counts[::10] = 0
    total = int(counts.sum())
    sides = rng.uniform(4, size[0] / 2, (total, 2))
    index = index_of(
        names=names,
        paths=[f"{i % 10}.jpg" for i in range(images)],
        image_hw=np.tile(size, (images, 1)),
        offsets=np.r_[0, np.cumsum(counts)],
        boxes_xywh_px=np.c_[rng.uniform(0, 1, (total, 2)) * (np.array(size[::-1]) - sides), sides],
        classes=rng.integers(0, len(names), total),
    )
    return replace(index, root=root)


def make_detections(index: DatasetIndex) -> DetectionTable:
    """Returns most objects, somewhat displaced, some with another class, and three boxes anywhere in each image."""
    rng = np.random.default_rng(0)
    found = np.flatnonzero(rng.random(len(index.classes)) < 0.8)
    image = np.r_[index.image_of_box[found], np.repeat(np.arange(len(index)), 3)]
    far = rng.uniform(5, 80, (len(image) - len(found), 4))
    xywh = np.r_[index.boxes_xywh_px[found] + rng.normal(0, 1, (len(found), 4)), far]
    classes = rng.integers(0, len(index.names), len(xywh))
    is_right = np.flatnonzero(rng.random(len(found)) < 0.8)
    classes[is_right] = index.classes[found][is_right]
    scores = np.r_[rng.uniform(0.3, 1, len(found)), rng.uniform(0, 0.7, len(far))]
    return make_table(image=image, boxes=xywh_to_xyxy(xywh).clip(0, 120), scores=scores, classes=classes)


def evaluation(index: DatasetIndex, detections: DetectionTable) -> Evaluation:
    scores = score_detections(index.ground_truth(), detections, len(index.names))
    return Evaluation(*scores, for_ap=detections, detected=detections, preview=None)


def page_of(folder: Path, index: DatasetIndex, scored: Evaluation | None) -> HtmlPage:
    subject = Subject(
        title="run",
        folder=folder,
        config=TrainConfig(epochs=4, data=HOSTILE),
        stride=32,
        train=index,
        validated=index,
        split="val",
        epoch=1,
        best_epoch=1,
    )
    write_page(folder / FILE_NAME, report_content(subject, scored, HISTORY))
    return check_self_contained((folder / FILE_NAME).read_text(encoding="utf-8"))


def test_numbers_are_those_of_the_metrics_and_hostile_names_are_text(tmp_path):
    index = make_index(tmp_path, images=30, names=(HOSTILE, "b&b", "c"), boxes_per_image=4)
    index = replace(index, report=ScanReport.of([Finding(NO_LABEL, "no label file", "0.jpg")]))  # images 0, 10, 20
    (tmp_path / "3.jpg").unlink()  # images 3, 13 and 23 cannot be read
    table = make_detections(index)
    scored = evaluation(index, table.take(np.flatnonzero(table.image_index != 10)))
    page = page_of(tmp_path, index, scored)
    result = scored.result
    objects = result.class_targets.sum()
    (scores,) = (rows for name, rows in page.tables.items() if name.startswith("Scores of each class"))
    by_name = {row[0]: row[1:] for row in scores[1:]}
    assert by_name["all"][1 : 1 + len(METRICS)] == [f"{result.metrics[m.name]:.3f}" for m in METRICS]
    for number, name in enumerate(index.names):
        expected = [f"{result.class_metrics[m.name][number]:.3f}" for m in METRICS]
        assert by_name[name][: 1 + len(METRICS)] == [str(result.class_targets[number]), *expected]

    text = page.sections["Result"]
    found = {*scored.detected.image_index[scored.detected.scores > result.threshold].tolist()} & {0, 20}
    right = float((result.class_metrics["recall"] * result.class_targets).sum())
    shown = int((scored.detected.scores > result.threshold).sum())
    for figure in (
        f" 3 without a label file as showing no object; the model finds objects in {len(found)} of them",
        f"{right:.0f} of {objects} objects ({right / objects:.0%})",
        f"{right:.0f} of {shown} detections are right ({right / shown:.0%})",
        f"{result.ap:.3f} ±",
        f"Label {len(found)} images without a label file",
        f"{result.threshold:.3f}",
    ):
        assert figure in text
    errors = split_errors(scored.shown)
    costs = [float(cost) for cost in re.findall(r": (0\.\d{3}) of AP50", text)]
    assert costs == [round(float(cost), 3) for cost in sorted(errors.cost, reverse=True) if cost >= 0.01]
    missed = re.search(rf"(\d+) of {objects} objects are missed", text)
    assert int(missed[1]) == errors.counts[:, -1].sum()
    between = result.confusion[:-1, :-1].copy()
    np.fill_diagonal(between, 0)
    (pairs,) = (rows for name, rows in page.tables.items() if name.startswith("Confused pairs"))
    assert sum(int(row[2]) for row in pairs[1:]) == between.sum()
    files = {"PR_curve", "F1_curve", "P_curve", "R_curve", "confusion_matrix", "errors", "results"}
    assert files == {path.stem for path in tmp_path.glob("*.png")}
    assert all(cv2.imread(str(tmp_path / f"{name}.png")).std() > 5 for name in files)
    assert "This image cannot be read" in page.text
    assert len(photos_of(page)) > 10
    assert HOSTILE not in (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    assert HOSTILE in page.sections["Classes"]


def test_a_split_without_objects_and_a_page_without_a_validation(tmp_path):
    empty = make_index(tmp_path, images=4, names=("a",), boxes_per_image=0)
    assert "Errors" not in page_of(tmp_path, empty, None).sections
    page = page_of(
        tmp_path, empty, evaluation(empty, make_table(image=[1], boxes=[[0, 0, 50, 50]], scores=[0.9], classes=[0]))
    )
    assert "1 spurious" in page.sections["Result"]
    assert "nan" not in " ".join(page.sections.values())


@pytest.mark.parametrize("images", [1, 10])
def test_few_validation_images_prove_nothing(tmp_path, images):
    index = make_index(tmp_path, images=30, names=("a",), boxes_per_image=2).take(np.r_[1:10, 11][:images])
    text = page_of(tmp_path, index, evaluation(index, make_detections(index))).sections["Result"]
    assert ("nothing about other images" in text) == (images < 10)
    assert ("±" in text) == (images == 10)


def test_a_run_and_the_validation_of_its_best_weights_show_the_same_result(tmp_path, capsys):
    data = write_dataset(tmp_path / "set")
    model = write_model(tmp_path / "tiny.yaml")
    own = [str(a) for a in ("--data", data, "--cache-dir", tmp_path / "cache", "--project", tmp_path / "runs")]
    train.main([*own, "--model", str(model), *SMALL, "--plots", "--epochs", "1"])
    weights = str(tmp_path / "runs" / "exp" / "best.pt")
    val.main([*own, "--weights", weights, "--device", "cpu", "--workers", "0", "--name", "val"])
    assert f"report: {tmp_path / 'runs' / 'val' / FILE_NAME}\n" in capsys.readouterr().out
    assert (tmp_path / "runs" / "val" / "predictions.jpg").is_file()
    of_run, of_validation = (
        check_self_contained((tmp_path / "runs" / name / FILE_NAME).read_text(encoding="utf-8"))
        for name in ("exp", "val")
    )
    for section in ("Errors", "Classes", "Training"):  # val.py's has the curves of the run
        assert of_run.sections[section] == of_validation.sections[section]
