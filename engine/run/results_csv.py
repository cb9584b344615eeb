"""results.csv: the results of a run, one row per epoch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.errors import UserError, os_reason
from utils.files.safe_io import open_regular, write_whole

_MAX_BYTES = 1 << 26
CONFIDENCE_COLUMN = "metrics/confidence"  # the threshold of precision, recall and F1


@dataclass
class ResultsTable:
    """The content of results.csv."""

    columns: list[str] = field(default_factory=lambda: ["epoch"])
    rows: dict[int, dict[str, float]] = field(default_factory=dict)  # by epoch, from 1; without empty cells

    @classmethod
    def read(cls, path: Path) -> ResultsTable:
        """Reads a results.csv. Raises UserError for any other file."""
        try:
            with io.TextIOWrapper(open_regular(path, _MAX_BYTES), encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                rows = [{name: float(cell) for name, cell in row.items() if cell} for row in reader]
                columns = list(reader.fieldnames or ["epoch"])
            return cls(columns, {int(row["epoch"]): row for row in rows})
        except (TypeError, ValueError, KeyError, csv.Error):
            raise UserError(f"{path}: not a results file of this program; move it away") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({os_reason(error)})") from None

    @classmethod
    def read_if_exists(cls, path: Path) -> ResultsTable:
        """Returns an empty table if there is no file. Raises as `read` does."""
        return cls.read(path) if path.exists() else cls()

    def add(self, epoch: int, row: Mapping[str, float]) -> None:
        """Adds the row of an epoch, or replaces it. New columns are added to the header. An undefined metric has no
        value; a loss may be nan."""
        self.columns += [name for name in row if name not in self.columns]
        known = {name: value for name, value in row.items() if not (name.startswith("metrics/") and math.isnan(value))}
        self.rows[epoch] = {"epoch": epoch, **known}

    def keep(self, epochs: int) -> None:
        """Drops the rows after the first ``epochs`` epochs. Without any row, only the column of epochs remains."""
        self.rows = {epoch: row for epoch, row in self.rows.items() if epoch <= epochs}
        self.columns = self.columns if self.rows else ["epoch"]

    def write(self, path: Path) -> None:
        """Replaces the file as a whole, so that neither a crash nor a power cut can leave half a line. A cell without a
        value is empty."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.columns, lineterminator="\n")
        writer.writeheader()
        for epoch in sorted(self.rows):
            writer.writerow({name: f"{float(value):.8g}" for name, value in self.rows[epoch].items()})
        write_whole(path, out.getvalue(), durable=True)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Reads the columns that have a value: float64 (rows,), nan where a cell is empty. Raises as `ResultsTable.read`
    does."""
    table = ResultsTable.read(path)
    rows = [table.rows[epoch] for epoch in sorted(table.rows)]
    known = [name for name in table.columns if any(name in row for row in rows)]
    return {name: np.array([row.get(name, math.nan) for row in rows]) for name in known}
