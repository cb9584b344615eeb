"""results.csv: the results of a run, one row per epoch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.files.safe_io import open_regular, write_whole

_MAX_BYTES = 1 << 26
CONFIDENCE_COLUMN = "metrics/confidence"  # the threshold of precision, recall and F1


@dataclass
class ResultsTable:
    """The content of results.csv."""

    columns: list[str] = field(default_factory=lambda: ["epoch"])
    rows: dict[int, dict[str, str]] = field(default_factory=dict)  # by epoch, from 1; cells as text, without empty ones

    @classmethod
    def read(cls, path: Path) -> ResultsTable:
        """Reads a results.csv. Raises UserError for any other file."""
        try:
            with io.TextIOWrapper(open_regular(path, _MAX_BYTES), encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                rows = {int(row["epoch"]): {k: v for k, v in row.items() if v} for row in reader}
                columns = list(reader.fieldnames or ["epoch"])
            if "epoch" not in columns:  # and without rows
                raise KeyError("epoch")
            for row in rows.values():
                list(map(float, row.values()))
        except (TypeError, ValueError, KeyError, csv.Error):
            raise UserError(f"{path}: not a results file of this program; move it away") from None
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; a training writes it after its first epoch") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); move it away") from None
        return cls(columns, rows)

    @classmethod
    def read_if_exists(cls, path: Path) -> ResultsTable:
        """Returns an empty table if there is no file. Raises as `read` does."""
        return cls.read(path) if path.exists() else cls()

    def add(self, epoch: int, row: Mapping[str, float]) -> None:
        """Adds the row of an epoch, or replaces it. New columns are added to the header. An undefined metric has no
        value; a loss may be nan."""
        self.columns += [name for name in row if name not in self.columns]
        known = {name: value for name, value in row.items() if not (name.startswith("metrics/") and math.isnan(value))}
        self.rows[epoch] = {"epoch": str(epoch), **{name: f"{float(value):.8g}" for name, value in known.items()}}

    def keep(self, epochs: int) -> None:
        """Drops the rows after the first ``epochs`` epochs. Without any row, only the column of epochs remains."""
        self.rows = {epoch: row for epoch, row in self.rows.items() if epoch <= epochs}
        self.columns = self.columns if self.rows else ["epoch"]

    def write(self, path: Path, *, durable: bool = False) -> None:
        """Replaces the file as a whole, so that a crash cannot leave half a line. A cell without a value is empty.
        ``durable``: see `utils.files.safe_io.atomic_write`."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows[epoch] for epoch in sorted(self.rows))
        write_whole(path, out.getvalue(), durable=durable)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Reads the columns that have a value: float64 (rows,), nan where a cell is empty. Raises as `ResultsTable.read`
    does."""
    table = ResultsTable.read(path)
    rows = [table.rows[epoch] for epoch in sorted(table.rows)]
    known = [name for name in table.columns if any(name in row for row in rows)]
    return {name: np.array([float(row.get(name, "nan")) for row in rows]) for name in known}
