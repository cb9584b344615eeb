"""results.csv as readers find it."""

from __future__ import annotations

import csv
import io

import numpy as np

from utils.files.results_csv import ResultsTable, read_columns


def test_columns_that_appear_later_are_empty_before(tmp_path):
    table = ResultsTable()
    table.add(1, {"time": 3.5, "train/dfl": float("nan"), "metrics/recall": float("nan")})
    table.add(2, {"time": 7.0, "train/dfl": 1 / 3, "metrics/AP": 0.2})
    path = tmp_path / "results.csv"
    ResultsTable.of(table.as_rows()).write(path)
    one, two = csv.DictReader(io.StringIO(path.read_text()))
    assert (one["epoch"], one["train/dfl"], one["metrics/AP"]) == ("1", "nan", "")
    assert float(two["metrics/AP"]) == 0.2
    columns = read_columns(path)
    assert np.array_equal(columns["metrics/AP"], [np.nan, 0.2], equal_nan=True)
    assert "metrics/recall" not in columns  # columns without any value are no columns
    before = path.read_bytes()
    ResultsTable.read(path).write(path)
    assert path.read_bytes() == before
