"""results.csv: one row an epoch, complete whenever anyone looks."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from utils.errors import UserError
from utils.regular_file import open_regular
from utils.whole_file import write_whole

MOST_BYTES = 1 << 26


class ResultsCsv:
    """Rows by epoch, kept in memory and on disk alike.

    A run has some hundred short rows, so each change writes the whole file beside itself and renames it: no crash
    leaves a torn line, and a column that first appears late (metrics, when epochs pass without validation) takes its
    place in the one header, with empty cells above. Rows that a former process wrote are read at construction.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = ["epoch"]
        self._rows: dict[int, dict[str, str]] = {}
        if self.path.exists():
            self._read()

    def put(self, epoch: int, row: dict[str, float]) -> None:
        """Adds or replaces the row of ``epoch``. Raises UserError when the file cannot be written."""
        self._columns += [name for name in row if name not in self._columns]
        self._rows[epoch] = {"epoch": str(epoch), **{name: f"{float(value):.8g}" for name, value in row.items()}}
        self._write()

    def truncate(self, epoch: int) -> None:
        """Removes the rows of ``epoch`` and later, which a run that starts at ``epoch`` will write again."""
        kept = {number: row for number, row in self._rows.items() if number < epoch}
        if len(kept) == len(self._rows):
            return
        self._rows = kept
        if not kept:
            self._columns = ["epoch"]
            self.path.unlink(missing_ok=True)
        else:
            self._write()

    def _read(self) -> None:
        try:
            with io.TextIOWrapper(open_regular(self.path, MOST_BYTES), encoding="utf-8", newline="") as file:
                columns, *cells = [row for row in csv.reader(file) if row] or [["epoch"]]
            number = columns.index("epoch")
            rows = {int(row[number]): dict(zip(columns, row, strict=True)) for row in cells}
            for text in (text for row in rows.values() for text in row.values() if text):
                float(text)
            if len(rows) < len(cells) or len(set(columns)) < len(columns):
                raise ValueError("an epoch or a column twice")
        except (TypeError, ValueError, IndexError, csv.Error):
            raise UserError(f"{self.path}: not a results file of this program; move it away") from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror or error}); move it away") from None
        self._rows = {epoch: {k: v for k, v in row.items() if v} for epoch, row in rows.items()}
        self._columns = columns

    def _write(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows[epoch] for epoch in sorted(self._rows))
        try:
            write_whole(self.path, text.getvalue())
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror or error})") from None
