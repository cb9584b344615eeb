"""Compares runs: settings that differ, curves over each other, and AP by class with the uncertainty of each difference.

python -m tools.compare runs/train/a runs/train/b
python -m tools.compare a/best.pt b.onnx --data DATA.yaml
torchrun --nproc_per_node 2 -m tools.compare runs/train/a runs/train/b

The first run is the baseline. All are scored on the same images; the 95 % interval of a difference comes from drawing
those images anew (see `tools.bootstrap`). It covers the choice of the images, not the training seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from utils.config.parser import parse_config
from utils.config.settings import CompareConfig, ValConfig
from utils.entrypoint import run_main
from utils.errors import UserError
from utils.strings import aligned, counted

if TYPE_CHECKING:
    from utils.distributed.context import DistributedContext

TEMPLATE = "tools/compare.html"
UNCOMPARED = frozenset(("name", "project", "exist_ok", "tracker"))  # settings
SHARED = (  # settings of val.py
    *("data", "task", "classes", "imgsz", "batch_size", "device"),
    *("workers", "single_cls", "max_bad", "cache_dir", "offline", "trust"),
)


@dataclass(frozen=True)
class Entry:
    """One of the runs: a folder with best.pt, or a model's file."""

    label: str
    weights: Path
    results: Path | None  # its results.csv


class Difference(NamedTuple):
    """Of an AP to the baseline's, with its 95 % interval."""

    ap: float
    change: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def interval(self) -> str:
        """In words."""
        if np.isnan(self.low):
            return "not known: too few images"
        return f"{self.low:+.4f} .. {self.high:+.4f}{'' if self.is_certain else '  (may be zero)'}"


Tables = dict[str, list[tuple[str, float, Difference, str]]]  # by title; see `Comparison.tables`


@dataclass(frozen=True)
class Comparison:
    """Of the first of ``entries``, which has the AP ``baseline`` (1 + C,) for ``names``, with each other."""

    entries: Sequence[Entry]
    changed: Mapping[str, Sequence[Any]]  # settings
    names: Sequence[str]
    baseline: np.ndarray
    found: Sequence[Sequence[Difference]]
    draws: int
    images: int

    def tables(self) -> Tables:
        """By title, a table for each run after the first: class, baseline, difference, and its interval in words.
        Classes without objects are left out."""
        first, *others = self.entries
        how = f"intervals: {self.draws} draws of {counted(self.images, 'image')}"
        return {
            f"AP of {entry.label} against {first.label}; {how}": [
                (name, before, d, d.interval)
                for name, before, d in zip(self.names, self.baseline.tolist(), row)
                if not np.isnan(before)
            ]
            for entry, row in zip(others, self.found)
        }

    def content(self) -> dict[str, Any]:
        """What comparison.json holds."""
        classes = [
            {name: {k: _known(v) for k, v in d._asdict().items()} for name, d in zip(self.names, row)}
            for row in self.found
        ]
        return {
            "runs": [entry.label for entry in self.entries],
            "settings": {name: [_plain(v) for v in row] for name, row in self.changed.items()},
            "images": self.images,
            "draws": self.draws,
            "baseline": {name: _known(ap) for name, ap in zip(self.names, self.baseline.tolist())},
            "differences": [{"run": e.label, "classes": each} for e, each in zip(self.entries[1:], classes)],
        }


def entries_of(paths: Sequence[str]) -> list[Entry]:
    """Raises UserError for a folder without best.pt, and for a run that is named twice."""
    entries = []
    for path in map(Path, paths):
        if path.is_dir() and not path.name.endswith("_openvino_model"):
            weights, results = path / "best.pt", path / "results.csv"
            if not weights.is_file():
                raise UserError(f"{path}: has no best.pt; name the folder of a run, or a model's file")
            entries.append(Entry(str(path), weights, results if results.is_file() else None))
        else:
            entries.append(Entry(str(path), path, None))
    if len(entries) < 2:
        raise UserError("name at least two runs to compare")
    files = [entry.weights.resolve() for entry in entries]
    if twice := [entry.label for i, entry in enumerate(entries) if files[i] in files[:i]]:
        raise UserError(f"{twice[0]}: is named twice")
    return entries


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs, with the value in each; None where a run has none."""
    names = dict.fromkeys(name for of_run in settings for name in of_run if name not in UNCOMPARED)
    values = {name: [of_run.get(name) for of_run in settings] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def differences(aps: Sequence[np.ndarray], draws: Sequence[np.ndarray], num_images: int) -> list[list[Difference]]:
    """For each run after the first, the differences for all classes together and for each class.

    Args:
        aps: for each run, AP of all classes and of each: float64 (1 + C,), nan without objects.
        draws: the same on each draw of images: float64 (S, 1 + C).
        num_images: that are drawn.
    """
    from tools.bootstrap import difference_interval

    rows = []
    for ap, drawn in zip(aps[1:], draws[1:]):
        changes = drawn - draws[0]
        intervals = [difference_interval(changes[:, column], num_images) for column in range(changes.shape[1])]
        rows.append([Difference(*row) for row in zip(ap.tolist(), (ap - aps[0]).tolist(), *zip(*intervals))])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_config(CompareConfig, argv, __doc__.split("\n")[0])
    entries = entries_of(config.runs)
    from engine.input_files import check_scoring_files

    check_scoring_files([str(entry.weights) for entry in entries], config.data, (config.task,), config.classes)
    from utils.distributed.context import DistributedContext, report_errors_once

    ctx = DistributedContext.from_environment(config.device)
    with ctx.closing(), report_errors_once(ctx):
        compare(config, entries, ctx)


def compare(config: CompareConfig, entries: Sequence[Entry], ctx: DistributedContext) -> None:
    """Scores the runs. All processes call it; the main one prints the comparison, and writes comparison.json,
    comparison.html and curves.png."""
    from engine.val.validate import open_models, score
    from tools.bootstrap import class_outcomes, draw_images, mean_ap, resampled_ap
    from utils.distributed.collectives import torch_distributed_zero_first
    from utils.files.folders import check_run_dir
    from utils.logger import configure_logging, get_logger

    configure_logging(ctx.is_main)
    validation = ValConfig(
        weights=[str(entry.weights) for entry in entries], **{name: getattr(config, name) for name in SHARED}
    )
    models, spec = open_models(validation, ctx)
    with torch_distributed_zero_first(ctx):  # before the work, as in val.py
        if ctx.is_main:
            check_run_dir(config.project, config.name, config.exist_ok)
    settings = [{**model.info.get("config", {}), **model.info.get("hyp", {})} for model in models]  # files: none
    changed = differing_settings(settings)
    for line in format_settings(changed, entries):
        get_logger().info("%s", line)
    # Padding changes scores a little, so runs of the same size get the canvas that a file of fixed size needs.
    canvases = {max(model.input_hw): model.input_hw for model in models if model.input_hw}
    aps, draws, times = [], [], None
    for model in models:
        canvas_hw = model.input_hw or canvases.get(config.imgsz or model.imgsz)
        result, evaluator, index = score(validation, model, spec, canvas_hw, ctx)
        if result is None:
            continue
        gt = evaluator.ground_truth
        times = draw_images(gt.num_images, config.draws, config.seed) if times is None else times
        drawn = resampled_ap(class_outcomes(gt, evaluator.detections, len(index.names)), times)
        aps.append(np.r_[result.ap, result.class_ap])
        draws.append(np.column_stack([mean_ap(drawn), drawn]))
    if ctx.is_main:
        names = ("all", *(f"all (class {c})" if name == "all" else name for c, name in enumerate(index.names)))
        found = differences(aps, draws, times.shape[1])
        write_comparison(config, Comparison(entries, changed, names, aps[0], found, *times.shape))


def write_comparison(config: CompareConfig, compared: Comparison) -> None:
    """Prints the differences, and writes them with settings and curves into a new folder."""
    from utils.drawing.figures import chart_svg, grid_figure, save_figure
    from utils.drawing.page import Table, write_page
    from utils.drawing.plots import run_charts
    from utils.files.folders import increment_path
    from utils.files.results_csv import read_columns
    from utils.files.safe_io import write_whole
    from utils.logger import get_logger

    tables, labels = compared.tables(), [entry.label for entry in compared.entries]
    for line in format_differences(tables):
        get_logger().info("%s", line)
    folder = increment_path(config.project, config.name, config.exist_ok)
    write_whole(folder / "comparison.json", json.dumps(compared.content(), indent=1, allow_nan=False) + "\n")
    charts = run_charts({e.label: read_columns(e.results) for e in compared.entries if e.results is not None})
    if not config.noplots and (figure := grid_figure(charts, 4, shares_legend=True)):
        save_figure(figure, folder / "curves.png")
    columns = ("class", "baseline", "AP", "change", "95 % interval")
    settings = [(name, *map(str, values)) for name, values in compared.changed.items()]
    write_page(
        folder / "comparison.html",
        TEMPLATE,
        "Comparison",
        " against ".join(reversed(labels)) if len(labels) == 2 else ", ".join(labels),
        tables=[
            Table(columns, [(name, ap, d.ap, f"{d.change:+.4f}", text) for name, ap, d, text in rows], title)
            for title, rows in tables.items()
        ],
        settings=Table(("setting", *labels), settings, "Settings that differ"),
        figures=[chart_svg(chart) for chart in charts],
    )
    get_logger().info("results are in %s", folder)


def format_settings(changed: Mapping[str, Sequence[Any]], entries: Sequence[Entry]) -> list[str]:
    """A line a setting, a column a run."""
    if not changed:
        return ["the runs have the same settings"]
    rows = [("settings that differ", *(entry.label for entry in entries))]
    rows += [(name, *map(str, values)) for name, values in changed.items()]
    return aligned(rows, left=True)


def format_differences(tables: Tables) -> list[str]:
    """The lines of the tables."""
    lines = []
    for title, rows in tables.items():
        cells = [(name, f"{before:.4f}", f"{d.ap:.4f}", f"{d.change:+.4f}") for name, before, d, _ in rows]
        texts = ["95 % interval", *(text for *_, text in rows)]
        lines += [title, *map("{}  {}".format, aligned([("class", "baseline", "AP", "change"), *cells]), texts)]
    return lines


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    return value if isinstance(value, str | int | float | bool | list | dict | type(None)) else str(value)


if __name__ == "__main__":
    run_main(main)
