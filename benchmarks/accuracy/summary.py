"""Differences between variants: by data set, mean and worst, with a bootstrap interval.

Each draw resamples the data sets, the seeds of each variant within each set, and the images, which are the same for all
runs on a set, so that an image's difficulty for both sides cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.accuracy.bootstrap import draw_images, resampled_ap
from benchmarks.accuracy.runs import DataCopy, stored_result
from benchmarks.accuracy.variants import Variant
from benchmarks.coco_scores import read_detections
from engine.evaluation.metrics import nanmean


@dataclass(frozen=True)
class VariantScores:
    """Scores of the runs of one variant on one data set.

    AP is measured on val or, if there is a test split, is the mean over val and test.
    """

    ap: np.ndarray  # float64 (K,), K seeds
    drawn: np.ndarray  # float64 (K, S), on S draws of the images
    train_cpu_s: np.ndarray  # float64 (K,)


def read_runs(
    folder: Path, variant: Variant, data: DataCopy, draws: int, seeds: Sequence[int] = (), suffix: str = ""
) -> VariantScores | None:
    """Reads the runs of the variant in ``folder`` with ``seeds``, by default all; None if none has ended.

    ``suffix``: which of their scores (`SCORED`); runs without it are left out.
    """
    ap = []
    drawn = []
    seconds = []
    for result in sorted(folder.glob("*/result.json")):
        if seeds and result.parent.name not in map(str, seeds):
            continue
        values = stored_result(result.parent, variant)
        if not all(f"{split}{suffix}" in values for split in data.gt):
            continue
        ap.append(np.mean([values[f"{split}{suffix}"] for split in data.gt]))
        seconds.append(values["train_cpu_s"])
        parts = []
        for number, (split, gt) in enumerate(data.gt.items()):
            table = read_detections(result.parent / f"{split}{suffix}.json", gt, data.classes)
            times = draw_images(gt.num_images, draws, seed=number)
            parts.append(nanmean(resampled_ap(gt, table, len(data.classes), times), axis=1))
        drawn.append(np.mean(parts, axis=0))
    return VariantScores(np.array(ap), np.array(drawn), np.array(seconds)) if ap else None


def difference(
    base: dict[str, VariantScores], other: dict[str, VariantScores], seed: int = 0
) -> tuple[dict[str, float], np.ndarray]:
    """Returns the differences of seed means by data set, and bootstrap draws of their mean over sets (S,)."""
    names = [name for name in base if name in other]
    by_set = {name: float(other[name].ap.mean() - base[name].ap.mean()) for name in names}
    rng = np.random.Generator(np.random.Philox(seed))
    draws = next(iter(base.values())).drawn.shape[1]
    values = np.stack([_seed_draws(other[n].drawn, rng) - _seed_draws(base[n].drawn, rng) for n in names])
    chosen = rng.integers(len(names), size=(len(names), draws))
    return by_set, np.take_along_axis(values, chosen, axis=0).mean(axis=0)


def _seed_draws(drawn: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the mean over resampled seeds for each draw of images: (S,) from (K, S)."""
    chosen = rng.integers(len(drawn), size=drawn.shape)
    return np.take_along_axis(drawn, chosen, axis=0).mean(axis=0)


def table(base: str, all_runs: dict[str, dict[str, VariantScores]]) -> str:
    """Returns Markdown: AP of each variant by set (mean and standard deviation of the seeds), then differences."""
    sets = list(dict.fromkeys(name for runs in all_runs.values() for name in runs))
    lines = [f"| variant | {' | '.join(sets)} | CPU s |", "| --- " * (len(sets) + 2) + "|"]
    for variant, runs in all_runs.items():
        cells = [_ap_cell(runs[name]) if name in runs else "" for name in sets]
        lines.append(f"| {variant} | {' | '.join(cells)} | {sum(r.train_cpu_s.mean() for r in runs.values()):.0f} |")
    lines += ["", f"| minus {base} | {' | '.join(sets)} | mean | worst | 95 % interval |"]
    lines.append("| --- " * (len(sets) + 4) + "|")
    for variant, runs in all_runs.items():
        if variant == base or not set(runs) & set(all_runs[base]):
            continue
        by_set, drawn = difference(all_runs[base], runs)
        low, high = np.quantile(drawn, (0.025, 0.975))
        cells = [f"{by_set[name]:+.4f}" if name in by_set else "" for name in sets]
        mean = np.mean(list(by_set.values()))
        worst = min(by_set.values())
        lines.append(f"| {variant} | {' | '.join(cells)} | {mean:+.4f} | {worst:+.4f} | {low:+.4f} to {high:+.4f} |")
    return "\n".join(lines)


def _ap_cell(runs: VariantScores) -> str:
    spread = f" ±{runs.ap.std(ddof=1):.3f}" if len(runs.ap) > 1 else ""
    return f"{runs.ap.mean():.4f}{spread} ({len(runs.ap)})"
