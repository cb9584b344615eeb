"""Reads the files that training or validation has written."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config.words import attribute_error
from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.machine.packages import require_package
from utils.schema import check

if TYPE_CHECKING:
    import numpy as np

    from engine.inference.predict import Predictor

# Numbers of results.json that `Run.metrics` has in addition to the metrics.
_OTHER_SCORES = ("best_confidence", "ap_small", "ap_medium", "ap_large")
_SHOWN_COLUMNS = ("epoch", "train/", "val/", "metrics/AP")  # prefixes of the results.csv columns shown in notebooks
_CHARTS_PER_ROW = 4


class Run:
    """The folder of a training or validation run. Each attribute reads its file anew."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def best(self) -> Path:
        """Path of the best epoch's weights, which exist only after a validation."""
        return self.folder / "best.pt"

    @property
    def last(self) -> Path:
        """Path of the newest checkpoint, from which `lockstep.resume` continues."""
        return self.folder / "last.pt"

    @property
    def report(self) -> Path:
        """Path of report.html, which ``plots=False`` omits."""
        return self.folder / "report.html"

    @property
    def history(self) -> dict[str, np.ndarray]:
        """The columns of results.csv: float64 (epochs,), nan where there is no value. Raises UserError if the file does
        not exist."""
        from utils.files.results_csv import ResultsTable

        return ResultsTable.read(self.folder / "results.csv").as_columns()

    @property
    def metrics(self) -> dict[str, float]:
        """The scores of the newest validation that was written to the folder (results.json) or, in the folder of a
        training without one, those of best.pt, by the names of results.csv without "metrics/": "AP", "AP50",
        "precision", "f1", ... A validation also has the AP by size ("ap_small", ...) and "best_confidence", the
        confidence of precision, recall and f1. nan if a score is undefined, for example without objects. Raises
        UserError if there are no scores, or their file is damaged."""
        from engine.evaluation.metrics import METRICS

        content = self._results()
        if content is not None:
            keys = {metric.name: metric.name.lower() for metric in METRICS} | {name: name for name in _OTHER_SCORES}
            return self._scores(content, keys)
        from utils.files.torch_file import read_checkpoint

        stored = read_checkpoint(self.best).get("metrics") or {}
        scores = {name.removeprefix("metrics/"): stored[name] for name in stored if name.startswith("metrics/")}
        if not scores:
            raise UserError(f"{self.best}: contains no scores; lockstep.val computes them")
        return scores

    @property
    def class_metrics(self) -> dict[str, dict[str, float]]:
        """The scores of each class in the newest validation that was written to the folder, and its numbers of "images"
        and "instances", by the names of `metrics`. Raises UserError as `metrics` does."""
        from engine.evaluation.metrics import METRICS

        content = self._results()
        if content is None:
            raise UserError(f"{self.folder}: contains no scores of classes; lockstep.val computes them")
        keys = {name: name for name in ("images", "instances")} | {metric.name: metric.column for metric in METRICS}
        rows = check(content.get("classes"), list[dict[str, Any]], f"{self._results_json}: classes")
        return {str(row.get("class")): self._scores(row, keys) for row in rows}

    def to_df(self) -> Any:
        """Returns `class_metrics` as a pandas DataFrame with a row for each class. Raises UserError as it does, and if
        pandas is not installed."""
        pandas = require_package("pandas", "to_df()", "use class_metrics")
        return pandas.DataFrame.from_dict(self.class_metrics, orient="index")

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError with the replacement, if there is one. Python calls it for missing attributes."""
        raise attribute_error("run", "a run", name)

    @property
    def _results_json(self) -> Path:
        return self.folder / "results.json"

    def _results(self) -> dict[str, Any] | None:
        """Reads the results of the newest validation; None if there are none. Raises UserError if they are damaged."""
        if not self._results_json.is_file():
            return None
        try:
            return check(json.loads(read_text(self._results_json)), dict[str, Any], str(self._results_json))
        except ValueError as error:
            raise UserError(f"{self._results_json}: malformed JSON ({error})") from None

    def _scores(self, content: dict[str, Any], keys: dict[str, str]) -> dict[str, float]:
        """Returns scores of results.json by their names, given their keys in ``content``; nan for null."""
        scores = {
            name: check(content[key], float | None, f"{self._results_json}: {key}")
            for name, key in keys.items()
            if key in content
        }
        return {name: math.nan if score is None else score for name, score in scores.items()}

    def load(self, **settings: Any) -> Predictor:
        """Loads the best weights, or the newest if there was no validation, as a model for detection, like
        `lockstep.load`."""
        from engine.inference.predict import load

        return load(self.best if self.best.exists() else self.last, **settings)

    def _repr_html_(self) -> str:
        """Returns the display in notebooks: the scores, and the losses and AP of a training by epoch."""
        from markupsafe import Markup

        from engine.report.figures import history_charts
        from utils.drawing.draw import tile_images
        from utils.drawing.page import Picture, embed, number

        html = Markup("<p>{}</p>").format(self.folder)
        with contextlib.suppress(UserError):
            cells = [Markup("<tr><th>{}</th><td>{}</td></tr>").format(k, number(v)) for k, v in self.metrics.items()]
            html += Markup("<table>{}</table>").format(Markup("").join(cells))
        with contextlib.suppress(UserError):
            columns = {name: values for name, values in self.history.items() if name.startswith(_SHOWN_COLUMNS)}
            charts = history_charts(columns)
            if charts:
                sheet = tile_images([*charts.values()], _CHARTS_PER_ROW)
                html += embed(Picture("losses and AP by epoch", sheet, density=2))
        return str(html)
