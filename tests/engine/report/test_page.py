"""report.html: its numbers are those of the metrics, it is about best.pt, its text is escaped, its size is bounded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

import train
import val
from data.findings import NO_LABEL, Finding, ScanReport
from data.index import DatasetIndex
from engine.evaluation.metrics import METRICS, score_detections
from engine.evaluation.result import Evaluation
from engine.report.page import FILE_NAME, ReportPage, machine_facts
from engine.report.summary import Subject
from tests.helpers.html_page import HtmlPage, check_self_contained, photos_of
from tests.helpers.scoring import make_table
from tests.helpers.scripts import SMALL
from tests.helpers.synthetic_index import index_of
from tests.helpers.tiny import write_dataset, write_model
from utils.config.settings import Hyperparameters, TrainConfig
from utils.detections import DetectionTable
from utils.distributed.context import DistributedContext

HOSTILE = "<script>alert(1)</script>"
HISTORY = {
    "epoch": np.array([1.0, 2.0]),
    "time": np.array([30.0, 61.0]),
    "train/box": np.array([3.0, 2.5]),
    "val/box": np.array([np.nan, 2.75]),
    "metrics/AP": np.array([0.6, 0.5]),
    "metrics/confidence": np.array([0.31, 0.42]),
    "speed/data_wait": np.array([0.25, 0.5]),
}


def make_index(root: Path, *, images: int, names, boxes_per_image: int, size=(120, 160), seed: int = 0) -> DatasetIndex:
    """Returns an index of ``images`` that share ten noisy files; every tenth image has no box."""
    rng = np.random.default_rng(seed)
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


def make_detections(index: DatasetIndex, *, false_per_image: int, seed: int = 0) -> DetectionTable:
    """Returns most objects, somewhat displaced, some with another class, and boxes anywhere."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(len(index)), np.diff(index.offsets))
    found = rng.random(image.size) < 0.8
    boxes = index.boxes_xywh_px[found] + rng.normal(0, 3, (int(found.sum()), 4))
    wrong = rng.integers(0, len(index.names), int(found.sum()))
    far_image = np.repeat(np.arange(len(index)), false_per_image)
    far = np.c_[rng.uniform(0, 80, (far_image.size, 2)), rng.uniform(5, 40, (far_image.size, 2))]
    xywh = np.r_[boxes, far]
    xywh[:, 2:] = np.maximum(xywh[:, 2:], 1)
    return make_table(
        image=np.r_[image[found], far_image],
        boxes=np.c_[xywh[:, :2], xywh[:, :2] + xywh[:, 2:]].clip(0, 120),
        scores=np.r_[rng.uniform(0.3, 1, len(boxes)), rng.uniform(0, 0.7, far_image.size)],
        classes=np.r_[
            np.where(rng.random(wrong.size) < 0.2, wrong, index.classes[found]),
            rng.integers(0, len(index.names), far_image.size),
        ],
    )


def subject_of(index: DatasetIndex, train_index: DatasetIndex | None = None, **config) -> Subject:
    return Subject(
        title="run",
        config=TrainConfig(**config),
        hyp=Hyperparameters(box=3.0),
        machine=machine_facts(DistributedContext.single()),
        imgsz=320,
        stride=32,
        train=train_index,
        validated=index,
        split="val",
    )


def evaluation(index: DatasetIndex, detections: DetectionTable) -> Evaluation:
    scores = score_detections(index.ground_truth(), detections, len(index.names))
    return Evaluation(*scores, for_ap=detections, detected=detections, preview=None)


def read_page(folder: Path) -> HtmlPage:
    return check_self_contained((folder / FILE_NAME).read_text(encoding="utf-8"))


def test_numbers_are_those_of_the_metrics_and_hostile_names_are_text(tmp_path):
    index = make_index(tmp_path, images=30, names=(HOSTILE, "b&b", "c"), boxes_per_image=4)
    (tmp_path / "3.jpg").unlink()  # images 3, 13 and 23 cannot be read
    scored = evaluation(index, make_detections(index, false_per_image=3))
    report = ReportPage(tmp_path, subject_of(index, index, epochs=4))
    report.set_progress(epochs=4, best_epoch=1)
    assert report.set_validation(scored, 1)
    report.write(HISTORY)
    page = read_page(tmp_path)
    result = scored.result
    (scores,) = (rows for name, rows in page.tables.items() if name.startswith("Scores of each class"))
    by_name = {row[0]: row[1:] for row in scores[1:]}
    assert by_name["all"][1 : 1 + len(METRICS)] == [f"{result.metrics[m.name]:.3f}" for m in METRICS]
    for number, name in enumerate(index.names):
        expected = [f"{result.class_metrics[m.name][number]:.3f}" for m in METRICS]
        assert by_name[name][: 1 + len(METRICS)] == [str(result.class_targets[number]), *expected]
    summary = page.sections["Result"]
    assert f"{result.ap:.3f} ±" in summary
    assert f"{result.threshold:.3f}" in summary
    right = float((result.class_metrics["recall"] * result.class_targets).sum())
    shown = int((scored.detected.scores > result.threshold).sum())
    assert f"{right:.0f} of {result.class_targets.sum()} objects ({right / result.class_targets.sum():.0%})" in summary
    assert f"{right:.0f} of {shown} detections are right ({right / shown:.0%})" in summary
    f1 = np.nan_to_num(result.curve_f1)
    assert by_name["all"][-2] == f"{f1.mean(0).max():.3f}"
    assert [by_name[name][-2] for name in index.names] == [f"{best:.3f}" for best in f1.max(1)]
    assert [row[:2] + row[-1:] for row in page.tables["Checkpoints"][1:]] == [
        ["best.pt", "1", "0.310"],
        ["last.pt", "2", "0.420"],
    ]
    between = result.confusion[:-1, :-1].copy()
    np.fill_diagonal(between, 0)
    (pairs,) = (rows for name, rows in page.tables.items() if name.startswith("Confused pairs"))
    assert sum(int(row[2]) for row in pairs[1:]) == between.sum()
    assert [row[:3] for row in page.tables["Settings that differ from their defaults"][1:]] == [
        ["--epochs", "4", "100"],
        ["box", "3.0", "7.5"],
    ]
    files = {"PR_curve", "F1_curve", "P_curve", "R_curve", "confusion_matrix", "errors", "results", "labels"}
    assert files == {path.stem for path in tmp_path.glob("*.png")}
    assert all(cv2.imread(str(tmp_path / f"{name}.png")).std() > 5 for name in files)
    assert "This image cannot be read" in page.text
    assert len(photos_of(page)) > 10
    text = (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    assert text.count(HOSTILE) == 0
    assert HOSTILE in page.sections["Classes"]
    assert not re.search(r"https?://", text)


def test_images_without_a_label_file_come_before_the_scores_and_all_advice(tmp_path):
    index = make_index(tmp_path, images=30, names=("a", "b"), boxes_per_image=4)
    index = replace(index, report=ScanReport.of([Finding(NO_LABEL, "no label file", "0.jpg")]))  # images 0, 10, 20
    table = make_detections(index, false_per_image=5)
    scored = evaluation(index, table.take(np.flatnonzero(table.image_index != 10)))
    found = {*scored.detected.image_index[scored.detected.scores > scored.result.threshold].tolist()} & {0, 20}
    report = ReportPage(tmp_path, subject_of(index, epochs=4))
    report.set_validation(scored, 1)
    report.write(HISTORY)
    summary = read_page(tmp_path).sections["Result"]
    said = summary.index("Of 30 images, the scores take 3 without a label file")
    assert f"finds objects in {len(found)} of them" in summary
    assert said < summary.index(f"{scored.result.ap:.3f} ±")
    first = summary.partition("What to do next")[2].strip()
    assert first.startswith(f"Label {len(found)} images without a label file")


def test_the_page_stays_with_the_best_epoch(tmp_path):
    index = make_index(tmp_path, images=12, names=("a",), boxes_per_image=2)
    report = ReportPage(tmp_path, subject_of(index, epochs=4))
    aps = []
    for epoch, (best_epoch, false_per_image) in enumerate([(1, 5), (2, 1), (2, 9), (4, 2)], 1):
        scored = evaluation(index, make_detections(index, false_per_image=false_per_image))
        report.set_progress(epochs=4, best_epoch=best_epoch)
        assert report.set_validation(scored, epoch) == (epoch == best_epoch)
        aps.append(f"{scored.result.ap:.3f}")
        if epoch >= 3:
            report.write({"epoch": np.arange(1.0, epoch + 1)})
            assert aps[best_epoch - 1] in read_page(tmp_path).sections["Result"]
    assert len({*aps}) == 4


def test_a_split_without_objects_and_a_page_without_a_validation(tmp_path):
    empty = make_index(tmp_path, images=4, names=("a",), boxes_per_image=0)
    report = ReportPage(tmp_path, subject_of(empty, empty))
    report.write({})
    assert "Errors" not in read_page(tmp_path).sections
    report.set_validation(evaluation(empty, make_table(image=[1], boxes=[[0, 0, 50, 50]], scores=[0.9], classes=[0])))
    report.write({})
    page = read_page(tmp_path)
    assert "1 spurious" in page.sections["Result"]
    assert "nan" not in " ".join(page.sections.values())


def test_training_and_validation_write_the_page_and_name_it(tmp_path, capsys):
    data = write_dataset(tmp_path / "set")
    model = write_model(tmp_path / "tiny.yaml")
    own = [str(a) for a in ("--data", data, "--cache-dir", tmp_path / "cache", "--project", tmp_path / "runs")]
    train.main([*own, "--model", str(model), *SMALL, "--plots", "--epochs", "1"])
    weights = str(tmp_path / "runs" / "exp" / "last.pt")
    val.main([*own, "--weights", weights, "--device", "cpu", "--workers", "0", "--name", "val"])
    assert f"report: {tmp_path / 'runs' / 'val' / FILE_NAME}\n" in capsys.readouterr().out
    assert "Training" in read_page(tmp_path / "runs" / "val").sections  # the curves of the run
    assert (tmp_path / "runs" / "val" / "predictions.jpg").is_file()
