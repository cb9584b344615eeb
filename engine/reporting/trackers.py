"""What a run reports to: results.csv and TensorBoard on the main process, nothing elsewhere.

Which it is gets decided once, by `build_tracker`; no caller asks for its rank.
"""

from __future__ import annotations

import contextlib
import csv
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from utils.distributed.collectives import eval_mode, unwrap
from utils.errors import UserError
from utils.files.safe_io import open_regular, write_whole
from utils.logger import get_logger
from utils.structures import EvalResult

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


PR_POINTS = 127  # as many thresholds as TensorBoard shows


class Tracker(Protocol):
    """Epochs are numbered as the caller likes, in the order in which they are run."""

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        """One row of results; written again, it replaces the earlier one."""

    def truncate(self, epoch: int) -> None:
        """Forgets the results of ``epoch`` and later: called once with the epoch at which the run starts or resumes."""

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Numbers by step of the optimiser."""

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        """A picture: uint8 (H, W, 3) RGB."""

    def pr_curves(self, result: EvalResult, names: Sequence[str], epoch: int) -> None:
        """Precision against recall at IoU 0.5, one curve for each class that has ground truth."""

    def graph(self, model: nn.Module, example: Tensor) -> None:
        """The graph of the bare model, traced with ``example``; a model that cannot be traced costs one warning."""

    def close(self) -> None:
        """Flushes and releases the files."""


class NullTracker:
    """Drops everything: for processes other than the main one."""

    def epoch(self, epoch: int, row: dict[str, float]) -> None: ...

    def truncate(self, epoch: int) -> None: ...

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def image(self, tag: str, image: np.ndarray, step: int) -> None: ...

    def pr_curves(self, result: EvalResult, names: Sequence[str], epoch: int) -> None: ...

    def graph(self, model: nn.Module, example: Tensor) -> None: ...

    def close(self) -> None: ...


class CsvTracker(NullTracker):
    """Keeps results.csv alone."""

    def __init__(self, run_dir: Path) -> None:
        self._results = ResultsCsv(Path(run_dir) / "results.csv")

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        self._results.put(epoch, row)

    def truncate(self, epoch: int) -> None:
        self._results.truncate(epoch)


class TensorBoardTracker(CsvTracker):
    """Keeps results.csv and TensorBoard event files in the run's folder.

    A resumed run writes events of its own next to the earlier ones. Steps that were done twice came out the same, so
    nothing needs to be purged. Where the events cannot be written (a full disk), a warning says so and the run goes on
    without them.
    """

    def __init__(self, run_dir: Path, writer: Any) -> None:
        super().__init__(run_dir)
        self._writer = writer

    def epoch(self, epoch: int, row: dict[str, float]) -> None:
        super().epoch(epoch, row)
        self.scalars(epoch, row)
        with self._giving_up():
            self._writer.flush()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        with self._giving_up():
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)

    def image(self, tag: str, image: np.ndarray, step: int) -> None:
        with self._giving_up():
            self._writer.add_image(tag, image, step, dataformats="HWC")

    def pr_curves(self, result: EvalResult, names: Sequence[str], epoch: int) -> None:
        with self._giving_up():
            for index, name in enumerate(names):
                if result.class_targets[index] > 0:
                    counts = _pr_counts(result, index)
                    self._writer.add_pr_curve_raw(f"pr/{name}", *counts, epoch, num_thresholds=PR_POINTS)

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Ends the events, and not the run, when the disk refuses the block one."""
        try:
            yield
        except OSError as error:
            _say_off(error)
            writer, self._writer = self._writer, _NoWriter()
            with contextlib.suppress(OSError):
                writer.close()

    def graph(self, model: nn.Module, example: Tensor) -> None:
        try:
            with (
                eval_mode(unwrap(model)) as bare,
                warnings.catch_warnings(),  # of the tracer, which also prints
                contextlib.redirect_stdout(io.StringIO()),
            ):
                warnings.simplefilter("ignore")
                self._writer.add_graph(bare, example, use_strict_trace=False)
        except Exception as error:  # any kind, and a picture in TensorBoard is no reason to end a run
            get_logger().warning(
                "no model graph in TensorBoard: %s", (str(error).strip() or repr(error)).split("\n")[0]
            )

    def close(self) -> None:
        with self._giving_up():
            self._writer.close()


class _NoWriter:
    """In place of a SummaryWriter that has failed: takes any call and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _say_off(error: Exception) -> None:
    reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
    get_logger().warning("TensorBoard is off (%s); results.csv is kept", reason)


def _pr_counts(result: EvalResult, index: int) -> tuple[np.ndarray, ...]:
    """Class ``index`` at evenly spaced thresholds: tp, fp, tn, fn, precision, recall, each (PR_POINTS,)."""
    thresholds = np.linspace(0, 1, PR_POINTS)
    known = result.curve_confidence
    precision = np.interp(thresholds, known, np.nan_to_num(result.curve_precision[index]))
    recall = np.interp(thresholds, known, np.nan_to_num(result.curve_recall[index]))
    targets = float(result.class_targets[index])
    found = recall * targets
    false_alarms = np.where(precision > 0, found * (1 - precision) / np.maximum(precision, 1e-9), 0.0)
    return found, false_alarms, np.zeros(PR_POINTS), targets - found, precision, recall


def build_tracker(run_dir: Path, *, enabled: bool, tensorboard: bool = True) -> Tracker:
    """The tracker of this process.

    Args:
        run_dir: folder of results.csv and the event files; must exist.
        enabled: True on the main process; elsewhere nothing is kept.
        tensorboard: False keeps results.csv alone, as does a missing tensorboard package (with a line saying so).
    """
    if not enabled:
        return NullTracker()
    if not tensorboard:
        return CsvTracker(run_dir)
    try:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run_dir))
    except (ImportError, OSError) as error:
        _say_off(error)
        return CsvTracker(run_dir)
    return TensorBoardTracker(run_dir, writer)
