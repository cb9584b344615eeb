"""results.csv as readers find it."""

import csv
import io

import numpy as np
import pytest

from engine.run.results_csv import ResultsTable, read_columns
from utils.errors import UserError

ROWS = {
    1: {"time": 3.5, "train/box": 1.25, "train/cls": 2.5, "train/dfl": 0.75, "lr/weight": 0.01, "lr/norm": 0.02,
        "lr/bias": 0.03, "speed/data_wait": 0.5},
    2: {"time": 7.0, "train/box": 1.0, "train/cls": 1 / 3, "train/dfl": float("nan"), "metrics/precision": 0.5,
        "metrics/recall": 0.25, "metrics/f1": 0.4, "metrics/AP50": 0.3, "metrics/AP": 0.2, "val/box": 4.0,
        "lr/weight": 0.1, "lr/norm": 0.2, "lr/bias": 0.3, "speed/data_wait": 0.0},
}  # fmt: skip


def test_columns_that_appear_later_are_empty_before(tmp_path):
    table = ResultsTable()
    for epoch, row in ROWS.items():
        table.add(epoch, row)
    table.write(tmp_path / "results.csv")
    one, two = csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text()))
    assert (one["epoch"], two["epoch"]) == ("1", "2")
    assert (one["metrics/AP"], float(two["metrics/AP"])) == ("", 0.2)
    columns = read_columns(tmp_path / "results.csv")
    assert np.array_equal(columns["metrics/AP"], [np.nan, 0.2], equal_nan=True)
    assert "train/obj" not in columns  # columns without any value are no columns
    (tmp_path / "empty.csv").touch()  # by a power cut
    assert ResultsTable.read(tmp_path / "empty.csv") == ResultsTable()
    before = (tmp_path / "results.csv").read_bytes()
    ResultsTable.read(tmp_path / "results.csv").write(tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_bytes() == before


@pytest.mark.parametrize("text", ["epoch,lr\nx,1\n", "epoch,lr\n1,a\n", "lr\n1\n", None])
def test_another_or_missing_file_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "results.csv").write_text(text)
    with pytest.raises(UserError, match=r"results\.csv: "):
        ResultsTable.read(tmp_path / "results.csv")
