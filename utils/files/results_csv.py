"""results.csv: the results of a run, one row per epoch. Checkpoints store the rows, and the file is written from them.
Needs no torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from utils.errors import UserError, os_reason
from utils.files.safe_io import csv_cell, open_regular, write_whole

_MAX_BYTES = 1 << 26
CONFIDENCE_COLUMN = "metrics/confidence"  # the threshold of precision, recall and F1


class ResultsTable:
    """The content of results.csv: ``rows``, by epoch from 1, whose values are by column; an undefined metric is nan."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, float]], location: str = "rows") -> ResultsTable:
        """Returns the table of ``rows`` (`as_rows`). Raises UserError, with their ``location``, for other values."""
        table = cls()
        try:
            for row in rows:
                table.add(int(row["epoch"]), {str(name): float(value) for name, value in row.items()})
        except (TypeError, ValueError, KeyError, AttributeError):
            raise UserError(f"{location}: damaged results") from None
        return table

    @classmethod
    def read(cls, path: Path) -> ResultsTable:
        """Reads a results.csv, whose empty cells are nan. Raises UserError for any other file."""
        try:
            with io.TextIOWrapper(open_regular(path, _MAX_BYTES), encoding="utf-8", newline="") as file:
                rows = csv.DictReader(file)
                return cls.of({name: float(cell or "nan") for name, cell in row.items()} for row in rows)
        except (TypeError, ValueError, csv.Error, UserError):
            raise UserError(f"{path}: not a results file of this program; move it away") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None

    def add(self, epoch: int, row: Mapping[str, float]) -> None:
        """Adds the row of an epoch, or replaces it."""
        self.rows[epoch] = {**row, "epoch": epoch}

    def as_rows(self) -> list[dict[str, float]]:
        """Returns the rows in the order of epochs, each with its ``epoch``."""
        return [dict(self.rows[epoch]) for epoch in sorted(self.rows)]

    def _defined(self) -> list[dict[str, float]]:
        """Returns the rows in the order of epochs, without undefined metrics; a loss may be nan."""
        return [
            {name: value for name, value in row.items() if not (name.startswith("metrics/") and math.isnan(value))}
            for row in self.as_rows()
        ]

    def _columns(self) -> list[str]:
        """Returns "epoch", then the other columns in the order of their first value."""
        return [*dict.fromkeys(["epoch", *(name for row in self.rows.values() for name in row)])]

    def as_columns(self) -> dict[str, np.ndarray]:
        """Returns the columns that have a value: float64 (rows,), nan where a cell is empty."""
        rows = self._defined()
        known = set().union(*rows)
        columns = [name for name in self._columns() if name in known]
        return {name: np.array([row.get(name, math.nan) for row in rows], np.float64) for name in columns}

    def write(self, path: Path) -> None:
        """Replaces the file as a whole, so that neither a crash nor a power cut can leave half a line. A cell without a
        value is empty."""
        out = io.StringIO()
        columns = self._columns()
        writer = csv.DictWriter(out, columns, lineterminator="\n")
        writer.writerow({name: csv_cell(name) for name in columns})
        for row in self._defined():
            writer.writerow({name: f"{float(value):.8g}" for name, value in row.items()})
        write_whole(path, out.getvalue(), durable=True)
