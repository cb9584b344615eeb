"""report.html: its numbers are those of the metrics, its text is escaped, its size is bounded."""

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
import torch

import train
import val
from data.index.index import DatasetIndex
from data.labels.findings import BAD_ROW, Finding
from data.labels.ledger import ScanReport
from engine.evaluation.analysis import split_errors
from engine.evaluation.fitness import Fitness
from engine.evaluation.matching import match_detections
from engine.evaluation.metrics import METRICS, score_detections
from engine.issues.issue import CheckedSplit
from engine.report.census import take_census
from engine.report.environment import machine_facts
from engine.report.page import FILE_NAME, ReportPage
from engine.report.subject import ScoredValidation, Subject
from engine.train.checkpoint import Progress
from engine.train.plots import Plots
from engine.train.resume import Remaining
from engine.train.trainer import Epoch
from models.detector import build_detector
from tests.helpers.html_page import HtmlPage, check_self_contained, photos_of
from tests.helpers.scoring import make_table
from tests.helpers.scripts import SMALL
from tests.helpers.steps import make_train_step
from tests.helpers.synthetic_index import index_of
from tests.helpers.tiny import TINY_MODEL, write_dataset, write_model
from tests.helpers.training import hook_training, started_from
from utils.config.settings import Hyperparameters, TrainConfig
from utils.detections import DetectionTable
from utils.distributed.context import DistributedContext
from utils.files.results_csv import ResultsTable

HOSTILE = "<script>alert(1)</script>"
MACHINE = machine_facts(DistributedContext.single())
MAX_REPORT_BYTES = 6_000_000


def make_index(root: Path, *, images: int, names, boxes_per_image: int, size=(120, 160), seed: int = 0) -> DatasetIndex:
    """Returns an index of ``images`` that share ten noisy files; every tenth image has no box."""
    rng = np.random.default_rng(seed)
    for number in range(10):
        pixels = rng.integers(0, 255, (*size, 3), dtype=np.uint8)
        cv2.imwrite(str(root / f"{number}.jpg"), pixels)
    counts = np.full(images, boxes_per_image)
    counts[::10] = 0
    total = int(counts.sum())
    height, width = size
    sides = rng.uniform(4, height / 2, (total, 2))
    boxes = np.c_[rng.uniform(0, 1, (total, 2)) * (np.array([width, height]) - sides), sides]
    paths = [f"{i % 10}.jpg" for i in range(images)]
    offsets = np.r_[0, np.cumsum(counts)]
    index = index_of(
        names=names,
        paths=paths,
        image_hw=np.tile(size, (images, 1)),
        offsets=offsets,
        boxes_xywh_px=boxes,
        classes=rng.integers(0, len(names), total),
    )
    return replace(index, root=root, report=ScanReport.of([Finding(HOSTILE, BAD_ROW, HOSTILE)]))


def make_detections(index: DatasetIndex, *, false_per_image: int, seed: int = 0):
    """Returns most objects, somewhat displaced, some with another class, and boxes anywhere."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(len(index)), np.diff(index.offsets))
    found = rng.random(image.size) < 0.8
    boxes = index.boxes_xywh_px[found] + rng.normal(0, 3, (int(found.sum()), 4))
    wrong = rng.integers(0, len(index.names), int(found.sum()))
    classes = np.where(rng.random(wrong.size) < 0.2, wrong, index.classes[found])
    far_image = np.repeat(np.arange(len(index)), false_per_image)
    far = np.c_[rng.uniform(0, 80, (far_image.size, 2)), rng.uniform(5, 40, (far_image.size, 2))]
    xywh = np.r_[boxes, far]
    xywh[:, 2:] = np.maximum(xywh[:, 2:], 1)
    xyxy = np.c_[xywh[:, :2], xywh[:, :2] + xywh[:, 2:]].clip(0, 120)
    scores = np.r_[rng.uniform(0.3, 1, boxes.shape[0]), rng.uniform(0, 0.7, far_image.size)]
    return make_table(
        image=np.r_[image[found], far_image],
        boxes=xyxy,
        scores=scores,
        classes=np.r_[classes, rng.integers(0, len(index.names), far_image.size)],
    )


def subject_of(index: DatasetIndex, train: DatasetIndex | None = None, **config) -> Subject:
    """``index``: of the validation images. ``train``: of the training images, whose figures take most of the time."""
    hyp = Hyperparameters(box=3.0)
    return Subject("run", TrainConfig(**config), hyp, MACHINE, 320, 32, train, CheckedSplit("val", index))


def write_page(folder: Path, subject: Subject, history: dict, validation: ScoredValidation | None = None) -> HtmlPage:
    report = ReportPage(folder, subject)
    if validation is not None:
        report.set_validation(validation)
    report.write(history)
    return check_self_contained((folder / FILE_NAME).read_text(encoding="utf-8"))


def scored(index: DatasetIndex, detections: DetectionTable, epoch: int = 2) -> ScoredValidation:
    result = score_detections(index.ground_truth(), detections, len(index.names))
    return ScoredValidation(result, detections, detections, epoch=epoch)


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    return make_index(tmp_path, images=30, names=(HOSTILE, "b&b", "c"), boxes_per_image=4)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[DatasetIndex, ScoredValidation, HtmlPage]:
    """A page with all of its sections, of an index of which images 3, 13 and 23 cannot be read, and what it shows."""
    folder = tmp_path_factory.mktemp("page")
    index = make_index(folder, images=30, names=(HOSTILE, "b&b", "c"), boxes_per_image=4)
    (folder / "3.jpg").unlink()
    validation = scored(index, make_detections(index, false_per_image=3))
    return index, validation, write_page(folder, subject_of(index, index, epochs=4, cos_lr=True), HISTORY, validation)


HISTORY = {
    "epoch": [1.0, 2.0],
    "time": [30.0, 61.0],
    "train/box": [3.0, 2.5],
    "val/box": [np.nan, 2.75],
    "metrics/AP": [np.nan, 0.5],
    "speed/data_wait": [0.25, 0.5],
}
HISTORY = {name: np.array(values) for name, values in HISTORY.items()}


def test_numbers_are_those_of_the_metrics(complete):
    index, validation, page = complete
    result = validation.result
    (scores,) = (rows for name, rows in page.tables.items() if name.startswith("Scores of each class"))
    assert scores[0][:2] == ["class", "objects"]
    by_name = {row[0]: row[1:] for row in scores[1:]}
    assert by_name["all"][1 : 1 + len(METRICS)] == [f"{result.metrics[m.name]:.3f}" for m in METRICS]
    for number, name in enumerate(index.names):
        expected = [f"{result.class_metrics[m.name][number]:.3f}" for m in METRICS]
        assert by_name[name][: 1 + len(METRICS)] == [str(result.class_targets[number]), *expected]
    summary = page.sections["Summary"]
    assert f"Recommended confidence threshold: {result.threshold:.3f}" in summary
    assert f"AP {result.ap:.3f}, AP50 {result.metrics['AP50']:.3f}" in summary
    assert "Epoch 2 of 4 is complete, after 1:01." in summary
    assert "38% of the time, training waits for images" in summary
    pairs = [(name, rows) for name, rows in page.tables.items() if name.startswith("Confused pairs")]
    between = result.confusion[:-1, :-1].copy()
    np.fill_diagonal(between, 0)
    assert sum(int(row[2]) for row in pairs[0][1][1:]) == between.sum()
    errors = split_errors(match_detections(index.ground_truth(), validation.scored, 3))
    (counts,) = (rows for name, rows in page.tables.items() if name.startswith("Errors of each class"))
    assert [row[1:] for row in counts[1:]] == [[str(n) for n in row] for row in errors.counts.tolist()]
    files = ["PR_curve", "F1_curve", "P_curve", "R_curve", "confusion_matrix", "errors"]
    shown = [a["alt"] for tag, a in page.tags if tag == "img" and a["class"] == "figure"]
    assert set(files) < set(shown)
    names = {f"{name}.png" for name in (*files, "results", "labels")}
    assert names == {path.name for path in index.root.glob("*.png")}
    assert all(cv2.imread(str(index.root / name)).std() > 5 for name in names)
    assert "after epoch 2" in (index.root / FILE_NAME).read_text(encoding="utf-8")


def test_settings_that_differ_come_first(complete):
    _, _, page = complete
    changed = page.tables["Settings that differ from their defaults"]
    expected = [["--epochs", "4", "100"], ["--cos-lr", "True", "False"], ["box", "3.0", "7.5"]]
    assert [row[:3] for row in changed[1:]] == expected
    assert torch.__version__ in page.sections["Settings and machine"]


def test_a_page_states_what_is_missing(index, tmp_path):
    page = write_page(tmp_path, subject_of(index), {})
    assert "No epoch is complete yet." in page.sections["Training"]
    assert "This page has no validation" in page.sections["Detections"]
    assert "This page has no validation" in page.sections["Summary"]
    page = write_page(tmp_path, subject_of(index), HISTORY, scored(index, make_table()))
    assert "No detection is correct at any confidence." in page.sections["Summary"]
    assert "There are none." in page.sections["Suspicious labels"]


def test_a_split_without_objects(tmp_path):
    empty = make_index(tmp_path, images=4, names=("a",), boxes_per_image=0)
    detections = make_table(image=[1], boxes=[[0, 0, 50, 50]], scores=[0.9], classes=[0])
    page = write_page(tmp_path, subject_of(empty, empty), {}, scored(empty, detections))
    assert "There are no objects in 4 validation images: nothing can be scored" in page.sections["Summary"]
    assert "The train split has no boxes." in page.sections["Data"]
    assert "1 spurious1.jpg" in page.sections["Worst images"].replace("\n", "")
    assert "nan" not in " ".join(page.sections.values())


def test_galleries_show_photos_unreadable_images_say_so_and_hostile_names_are_text(complete):
    index, _, page = complete
    assert page.sections["Worst images"].count("This image cannot be read") >= 2  # images 3 and 13
    photos = photos_of(page)
    assert len(photos) > 20
    assert all(photos)
    text = (index.root / FILE_NAME).read_text(encoding="utf-8")
    assert not re.search(r"https?://", text)
    assert all(HOSTILE in page.sections[name] for name in ("Data", "Precision, recall and F1"))
    assert text.count(HOSTILE) == 0


@pytest.mark.parametrize(
    ("images", "classes"),
    [(60, 100), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((300, 1203), (5000, 80)))],
)
def test_many_images_and_classes_stay_below_six_megabytes(tmp_path, images, classes):
    names = [f"a rather long class name {i}" for i in range(classes)]
    large = make_index(tmp_path, images=images, names=names, boxes_per_image=7, size=(480, 640))
    validation = scored(large, make_detections(large, false_per_image=20), epoch=1000)
    epochs = np.arange(1.0, 1001)
    history = {"epoch": epochs} | {f"train/loss{i}": np.random.default_rng(i).random(1000) for i in range(4)}
    page = write_page(tmp_path, subject_of(large, large), history, validation)
    assert (tmp_path / FILE_NAME).stat().st_size < MAX_REPORT_BYTES
    assert "the page would become too large" in page.sections["Worst images"]  # noise compresses badly
    (scores,) = (rows for name, rows in page.tables.items() if name.startswith("Scores of each class"))
    assert len(scores) == classes + 2


def test_a_failure_costs_one_warning(index, tmp_path, caplog):
    report = ReportPage(tmp_path / "absent", subject_of(index))
    for _ in range(2):
        report.write({})
    report.log_path()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "report cannot be written" in caplog.text


def test_small_boxes_get_a_warning_with_the_size_that_is_enough(index, tmp_path):
    small = Subject("run", TrainConfig(), None, MACHINE, 64, 32, None, CheckedSplit("train", index))
    page = write_page(tmp_path, small, {})
    assert take_census(index, "train", 64).median_side_px < 16
    better = int(re.search(r"--imgsz (\d+) or more", page.sections["Data"])[1])
    assert take_census(index, "train", better).median_side_px >= 16
    assert take_census(index, "train", better - 32).median_side_px < 16
    assert f"--imgsz {better}" in page.sections["Summary"]


def test_a_resumed_run_keeps_the_page_until_it_has_validated(index, tmp_path):
    (tmp_path / FILE_NAME).write_text("of the previous process")
    report = ReportPage(tmp_path, subject_of(index), keeps_earlier=True)
    report.write({})
    assert (tmp_path / FILE_NAME).read_text() == "of the previous process"
    report.set_validation(scored(index, make_detections(index, false_per_image=1), epoch=4))
    report.write({})
    assert "after epoch 4" in (tmp_path / FILE_NAME).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("remaining", "state", "is_written"),
    [
        (Remaining.REPORT, "has both epochs", False),
        (Remaining.REPORT, "has one epoch", True),
        (Remaining.REPORT, "missing", True),
        (Remaining.STEPS, "has one epoch", False),
    ],
)
def test_a_run_without_a_validation_writes_the_page_that_its_report_lacks(
    index, tmp_path, remaining, state, is_written
):
    """A callback has ended the run within an epoch. A page with all epochs may contain a validation; in a copy of the
    folder, results.csv may be the newer file."""

    class Loader:
        index = None

        def __len__(self) -> int:
            return 3

    page = tmp_path / FILE_NAME
    previous = "<!-- of the previous process -->"
    if state != "missing":
        epochs = 2 if "both" in state else 1
        ReportPage(tmp_path, subject_of(index)).write({name: values[:epochs] for name, values in HISTORY.items()})
        with page.open("a", encoding="utf-8") as file:
            file.write(previous)
    (tmp_path / "results.csv").write_text("epoch,time,metrics/AP\n1,1.0,0.6\n2,2.0,0.5\n")
    step = make_train_step(DistributedContext.single(), build_detector(TINY_MODEL, len(index.names)))
    progress = Progress(epoch=2, batch=1, best_epoch=1, best_fitness=0.6)
    trainer = hook_training(
        tmp_path, started_from=started_from(progress), progress=progress, step=step, loader=Loader()
    )
    trainer.run = replace(trainer.run, remaining=remaining)
    trainer.checkpointer.table = ResultsTable.read(tmp_path / "results.csv")
    hook = Plots(index, Fitness.parse("AP", list(index.names)), Mock())
    hook.start(trainer)
    hook.epoch_saved(trainer, Epoch(2))
    hook.finish(trainer)
    text = page.read_text(encoding="utf-8")
    assert text.endswith(previous) != is_written
    assert not is_written or "without a validation" in text
    assert not is_written or "The best AP was 0.600 in epoch 1; the newest, in epoch 2, is 0.500." in text


def test_training_and_validation_write_the_page_and_name_it(tmp_path, capsys):
    data = write_dataset(tmp_path / "set")
    model = write_model(tmp_path / "tiny.yaml")
    own = [str(a) for a in ("--data", data, "--cache-dir", tmp_path / "cache", "--project", tmp_path / "runs")]
    train.main([*own, "--model", str(model), *SMALL, "--no-noplots", "--epochs", "1"])
    *lines, done = capsys.readouterr().out.splitlines()
    assert f"report: {tmp_path / 'runs' / 'exp' / FILE_NAME}" in lines
    assert done.startswith("done: 1 epoch; best AP ")
    page = check_self_contained((tmp_path / "runs" / "exp" / FILE_NAME).read_text(encoding="utf-8"))
    assert "Epoch 1 of 1 is complete" in page.sections["Summary"]
    assert "Training images per second" in [attributes.get("alt") for _, attributes in page.tags]
    weights = str(tmp_path / "runs" / "exp" / "last.pt")
    more = ["--weights", weights, "--device", "cpu", "--workers", "0", "--name", "val"]
    val.main([*own, *more])
    assert f"report: {tmp_path / 'runs' / 'val' / FILE_NAME}\n" in capsys.readouterr().out
    page = check_self_contained((tmp_path / "runs" / "val" / FILE_NAME).read_text(encoding="utf-8"))
    assert "Training" not in page.sections
    assert (tmp_path / "runs" / "val" / "predictions.jpg").is_file()
    assert "Worst images" in page.sections
