"""Reads the files that training or validation has written."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.schema import check

if TYPE_CHECKING:
    import numpy as np

    from engine.inference.predictor import Predictor

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
        from utils.files.results_csv import read_columns

        return read_columns(self.folder / "results.csv")

    @property
    def metrics(self) -> dict[str, float]:
        """The scores of the newest validation that was written to the folder (results.json) or, in the folder of a
        training without one, those of best.pt, by the names of results.csv without "metrics/": "AP", "AP50",
        "precision", "f1", ... A validation also has the AP by size ("ap_small", ...) and "best_confidence", the
        confidence of precision, recall and f1. nan if a score is undefined, for example without objects. Raises
        UserError if there are no scores, or their file is damaged."""
        results = self.folder / "results.json"
        if results.is_file():
            return _scores_in(results)
        from utils.files.torch_file import read_checkpoint

        stored = read_checkpoint(self.best).get("metrics") or {}
        scores = {name.removeprefix("metrics/"): stored[name] for name in stored if name.startswith("metrics/")}
        if not scores:
            raise UserError(f"{self.best}: contains no scores; lockstep.val computes them")
        return scores

    def load(self, **settings: Any) -> Predictor:
        """Loads the best weights, or the newest if there was no validation, as a model for detection, like
        `lockstep.load`."""
        from engine.inference.predictor import load

        return load(self.best if self.best.exists() else self.last, **settings)

    def _repr_html_(self) -> str:
        """Returns the display in notebooks: the scores, and the losses and AP of a training by epoch."""
        from markupsafe import Markup

        from engine.report.figures import history_charts
        from utils.drawing.draw import tile_images
        from utils.drawing.figures import Picture, chart_picture
        from utils.drawing.page import embed_image, number

        html = Markup("<p>{}</p>").format(self.folder)
        with contextlib.suppress(UserError):
            cells = [Markup("<tr><th>{}</th><td>{}</td></tr>").format(k, number(v)) for k, v in self.metrics.items()]
            html += Markup("<table>{}</table>").format(Markup("").join(cells))
        with contextlib.suppress(UserError):
            columns = {name: values for name, values in self.history.items() if name.startswith(_SHOWN_COLUMNS)}
            charts = [chart for group in history_charts(columns) for chart in group]
            if charts:
                sheet = tile_images([chart_picture(chart).pixels for chart in charts], _CHARTS_PER_ROW)
                html += embed_image(Picture(sheet).png, "png", "losses and AP by epoch", "", sheet.shape[1] / 2)
        return str(html)


def _scores_in(results: Path) -> dict[str, float]:
    """Returns the scores in the results.json of a validation, as `Run.metrics` does. Raises UserError if the file is
    damaged."""
    from engine.evaluation.metrics import METRICS

    try:
        content = check(json.loads(read_text(results)), dict, str(results))
    except ValueError as error:
        raise UserError(f"{results}: malformed JSON ({error})") from None
    keys = {metric.name: metric.name.lower() for metric in METRICS} | {name: name for name in _OTHER_SCORES}
    scores = {
        name: check(content[key], float | None, f"{results}: {key}") for name, key in keys.items() if key in content
    }
    return {name: math.nan if score is None else score for name, score in scores.items()}
