"""results.csv with the column names of other programs, as their users' scripts read it."""

import csv
import io

import numpy as np
import pytest

from engine.report.trackers import CsvTracker
from utils.drawing.plots import run_charts
from utils.errors import UserError
from utils.files.results_csv import NAMES, ResultsTable, read_columns

ROWS = {
    1: {"time": 3.5, "train/box": 1.25, "train/cls": 2.5, "train/dfl": 0.75, "lr/weight": 0.01, "lr/norm": 0.02,
        "lr/bias": 0.03, "speed/data_wait": 0.5},
    2: {"time": 7.0, "train/box": 1.0, "train/cls": 1 / 3, "train/dfl": float("nan"), "metrics/precision": 0.5,
        "metrics/recall": 0.25, "metrics/f1": 0.4, "metrics/AP50": 0.3, "metrics/AP": 0.2, "val/box": 4.0,
        "lr/weight": 0.1, "lr/norm": 0.2, "lr/bias": 0.3, "speed/data_wait": 0.0},
}  # fmt: skip
# The headers that the two programs write, of detection models.
ULTRALYTICS = (
    "epoch,time,train/box_loss,train/cls_loss,train/dfl_loss,metrics/precision(B),metrics/recall(B),metrics/mAP50(B),"
    "metrics/mAP50-95(B),val/box_loss,val/cls_loss,val/dfl_loss,lr/pg0,lr/pg1,lr/pg2"
)
YOLOV5 = (
    "               epoch,      train/box_loss,      train/obj_loss,      train/cls_loss,   metrics/precision,"
    "      metrics/recall,     metrics/mAP_0.5,metrics/mAP_0.5:0.95,        val/box_loss,        val/obj_loss,"
    "        val/cls_loss,               x/lr0,               x/lr1,               x/lr2"
)


def written(path, names):
    tracker = CsvTracker(path, names)
    for epoch, row in ROWS.items():
        tracker.epoch(epoch, row)
    return path


@pytest.mark.parametrize(("names", "header"), [("ultralytics", ULTRALYTICS), ("yolov5", YOLOV5)])
def test_the_columns_of_the_other_program_come_first_and_ours_follow(tmp_path, names, header):
    lines = written(tmp_path / "results.csv", names).read_text().splitlines()
    assert lines[0].startswith(header + ",")
    ours = {name.strip() for name in lines[0][len(header) + 1 :].split(",")}
    assert ours == {"metrics/f1", "speed/data_wait"} | ({"time", "train/dfl"} if names == "yolov5" else set())


def test_values_are_under_their_names_and_unknown_ones_are_empty(tmp_path):
    one, two = csv.DictReader(io.StringIO(written(tmp_path / "a.csv", "ultralytics").read_text()))
    assert (one["epoch"], two["epoch"]) == ("1", "2")
    assert one["metrics/mAP50-95(B)"] == one["val/dfl_loss"] == two["val/dfl_loss"] == ""
    assert (float(two["metrics/mAP50-95(B)"]), float(two["metrics/mAP50(B)"])) == (0.2, 0.3)
    assert [float(one[f"lr/pg{n}"]) for n in range(3)] == [0.03, 0.01, 0.02]  # biases, weights, norms
    text = written(tmp_path / "b.csv", "yolov5").read_text().replace(" ", "")
    one, two = csv.DictReader(io.StringIO(text))
    assert (one["epoch"], two["epoch"]) == ("0", "1")  # YOLOv5 counts from 0
    assert one["train/obj_loss"] == two["train/obj_loss"] == ""  # this head has no objectness
    assert (float(two["metrics/mAP_0.5:0.95"]), float(two["val/box_loss"]), float(two["x/lr0"])) == (0.2, 4.0, 0.3)


@pytest.mark.parametrize("names", ["ultralytics", "yolov5"])
def test_pandas_reads_numbers_only(tmp_path, names):
    """As the plotting functions of both programs do: every column is a float or missing."""
    pandas = pytest.importorskip("pandas")
    data = pandas.read_csv(written(tmp_path / "results.csv", names))
    assert data.columns[0].strip() == "epoch"
    assert data.values.astype("float").shape == (2, len(data.columns))


@pytest.mark.parametrize("names", NAMES)
def test_all_readers_find_the_same_under_our_names(tmp_path, names):
    plain = read_columns(written(tmp_path / "plain.csv", "lockstep"))
    other = read_columns(written(tmp_path / "other.csv", names))
    for name, values in plain.items():
        assert np.array_equal(values, other[name], equal_nan=True), name
    assert other.keys() == plain.keys()  # columns without any value are no columns
    assert {len(chart.lines) for chart in run_charts({"a": plain, "b": other})} == {2}


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("asked", NAMES)
def test_a_resumed_run_keeps_the_names_and_ends_with_the_same_file(tmp_path, names, asked):
    whole = written(tmp_path / "whole.csv", names)
    resumed = CsvTracker(tmp_path / "resumed.csv", names)
    resumed.epoch(1, ROWS[1])
    resumed.epoch(2, {"time": 6.0, "train/box": 9.0})
    resumed = CsvTracker(tmp_path / "resumed.csv", asked)
    resumed.start({}, 2)
    resumed.epoch(2, ROWS[2])
    assert (tmp_path / "resumed.csv").read_bytes() == whole.read_bytes()


def test_a_new_run_in_an_old_folder_has_the_names_asked_for(tmp_path):
    tracker = CsvTracker(written(tmp_path / "results.csv", "yolov5"), "ultralytics")
    tracker.start({}, 1)
    tracker.epoch(1, ROWS[1])
    assert (tmp_path / "results.csv").read_text().startswith("epoch,time,train/box_loss")


@pytest.mark.parametrize("text", ["epoch,x/lr0\n0.5,1\n", "epoch,lr/pg0\n1,a\n", "epoch,lr/pg0,lr/bias\n1,2,3\n"])
def test_a_damaged_file_is_one_line(tmp_path, text):
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(UserError, match="not a results file"):
        ResultsTable.read(tmp_path / "results.csv")
