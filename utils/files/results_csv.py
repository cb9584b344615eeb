"""results.csv, with this program's column names or those that scripts for other programs expect."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.files.safe_io import open_regular

MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class ColumnNames:
    """The columns of another program's file, in its order; our other columns follow under their own names."""

    ours: dict[str, str] = field(default_factory=dict)  # our name by theirs
    first_epoch: int = 1  # the number of the first epoch
    width: int = 0  # cells are padded to this many characters


# Learning rates: both programs list the biases first, then decayed weights, then norms.
NAMES = {
    "lockstep": ColumnNames(),
    "ultralytics": ColumnNames(
        {
            "epoch": "epoch",
            "time": "time",
            **{f"train/{part}_loss": f"train/{part}" for part in ("box", "cls", "dfl")},
            "metrics/precision(B)": "metrics/precision",
            "metrics/recall(B)": "metrics/recall",
            "metrics/mAP50(B)": "metrics/AP50",
            "metrics/mAP50-95(B)": "metrics/AP",
            **{f"val/{part}_loss": f"val/{part}" for part in ("box", "cls", "dfl")},
            **{"lr/pg0": "lr/bias", "lr/pg1": "lr/weight", "lr/pg2": "lr/norm"},
        }
    ),
    "yolov5": ColumnNames(
        {
            "epoch": "epoch",
            **{f"train/{part}_loss": f"train/{part}" for part in ("box", "obj", "cls")},
            "metrics/precision": "metrics/precision",
            "metrics/recall": "metrics/recall",
            "metrics/mAP_0.5": "metrics/AP50",
            "metrics/mAP_0.5:0.95": "metrics/AP",
            **{f"val/{part}_loss": f"val/{part}" for part in ("box", "obj", "cls")},
            **{"x/lr0": "lr/bias", "x/lr1": "lr/weight", "x/lr2": "lr/norm"},
        },
        first_epoch=0,
        width=20,
    ),
}


@dataclass
class ResultsTable:
    """The content of a file, under our names, whichever names the file has."""

    names: str  # key of `NAMES`
    columns: list[str] = field(default_factory=lambda: ["epoch"])
    rows: dict[int, dict[str, str]] = field(default_factory=dict)  # by epoch, from 1; cells as text, without empty ones

    @classmethod
    def read(cls, path: Path, names: str = "lockstep") -> ResultsTable:
        """``names``: of a file whose header does not tell. Raises UserError for a file that is not such a table."""
        try:
            with io.TextIOWrapper(open_regular(path, MOST_BYTES), encoding="utf-8", newline="") as file:
                header, *cells = [row for row in csv.reader(file) if row] or [["epoch"]]
            names = _names_of(header) or names
            style = NAMES[names]
            if style.width:
                header, *cells = [[cell.strip() for cell in row] for row in (header, *cells)]
            columns = [style.ours.get(column, column) for column in header]
            number = columns.index("epoch")
            rows = {int(row[number]) + 1 - style.first_epoch: dict(zip(columns, row, strict=True)) for row in cells}
            for text in filter(None, itertools.chain(*cells)):
                float(text)
            if len(rows) < len(cells) or len(set(columns)) < len(columns):
                raise ValueError("an epoch or a column twice")
        except (TypeError, ValueError, IndexError, csv.Error):
            raise UserError(f"{path}: not a results file of this program; move it away") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); move it away") from None
        if style.first_epoch != 1:
            rows = {epoch: row | {"epoch": str(epoch)} for epoch, row in rows.items()}
        return cls(names, columns, {epoch: {k: v for k, v in row.items() if v} for epoch, row in rows.items()})

    def add(self, epoch: int, row: Mapping[str, float]) -> None:
        """Adds or replaces a row; a column that is new joins the header."""
        self.columns += [name for name in row if name not in self.columns]
        self.rows[epoch] = {"epoch": str(epoch), **{name: f"{float(value):.8g}" for name, value in row.items()}}

    def text(self) -> str:
        """The content of the file. A cell without a value is empty."""
        style = NAMES[self.names]
        ours = [*style.ours.values(), *(name for name in self.columns if name not in style.ours.values())]
        theirs = {ours: theirs for theirs, ours in style.ours.items()}
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_padded([theirs.get(name, name) for name in ours], style.width))
        for epoch, row in sorted(self.rows.items()):
            shown = row | {"epoch": str(epoch - 1 + style.first_epoch)} if style.first_epoch != 1 else row
            writer.writerow(_padded([shown.get(name, "") for name in ours], style.width))
        return out.getvalue()


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of results.csv that have a value, by our names: float64 (rows,), nan where a cell is empty. Raises
    UserError as `ResultsTable.read`."""
    table = ResultsTable.read(path)
    rows = [table.rows[epoch] for epoch in sorted(table.rows)]
    known = [name for name in table.columns if any(name in row for row in rows)]
    return {name: np.array([float(row.get(name, "nan")) for row in rows]) for name in known}


def _names_of(header: Sequence[str]) -> str | None:
    """The names that a header has: those of the program with columns that only it has; None if there are none."""
    given = {column.strip() for column in header}
    shared = {column for style in NAMES.values() for column in style.ours.values()}
    found = {name: len((style.ours.keys() - shared) & given) for name, style in NAMES.items()}
    best = max(found, key=lambda name: found[name])
    return best if found[best] else "lockstep" if len(given) > 1 else None


def _padded(cells: Sequence[str], width: int) -> list[str]:
    """An empty cell stays empty: pandas takes spaces for text."""
    return [f"{cell:>{width}}" if cell else "" for cell in cells] if width else list(cells)
