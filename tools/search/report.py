"""Reports the result of a search: the best recipe, a table of the trials, and their fitness as a figure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.experiment.experiment import Experiment
from tools.search.ranges import Space, values_text
from utils.drawing.figures import Chart, Line, Picture, chart_picture
from utils.files.safe_io import write_csv, write_whole
from utils.strings import counted

BEST_YAML = "best.yaml"
TRIALS_CSV = "trials.csv"
TRIALS_PNG = "trials.png"
PRINTED_TRIALS = 10
REASON = "reason"  # attribute of a trial: why it failed
STATE_NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def write_report(
    experiment: Experiment, trials: Sequence[FrozenTrial], space: Space, *, unit: str, command: str
) -> list[str]:
    """Writes the report into the folder of ``experiment`` and returns its lines for the terminal.

    Args:
        unit: interval at which a trial reports its fitness: "epoch" or "fold".
        command: command line of a training, to which --hyp with the best recipe is added.
    """
    folder = experiment.folder
    fitness = experiment.fitness.name
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    baselines = [frozen for frozen in complete if space.is_baseline(frozen.params)]
    write_csv(folder / TRIALS_CSV, _rows(trials, space, fitness, unit))
    write_whole(folder / TRIALS_PNG, _figure(complete, baselines, fitness).png)
    counts = Counter(STATE_NAMES[frozen.state] for frozen in trials)
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    lines = [f"{counted(len(trials), 'trial')}: {summary}", *_table(complete, baselines, fitness)]
    best = best_of(trials)
    if best is not None:
        lines += _spread(complete, best, fitness)
        recipe = folder / BEST_YAML
        best_command = f"{command} --hyp {shlex.quote(str(recipe))}"
        header = f"# Trial {best.number} of {folder}: {fitness} {best.value:.4f}.\n# command: {best_command}\n"
        write_whole(recipe, header + yaml.safe_dump(space.recipe(best.params), sort_keys=False))
        lines.append(f"the best recipe: {best_command}")
    return [*lines, f"all trials: {folder / TRIALS_CSV} and {folder / TRIALS_PNG}"]


def _table(complete: Sequence[FrozenTrial], baselines: Sequence[FrozenTrial], fitness: str) -> Iterator[str]:
    """Yields a header, and a line for each of the best trials."""
    yield f"trial  {fitness:>10}  hyper-parameters"
    for frozen in sorted(complete, key=rank)[:PRINTED_TRIALS]:
        label = "  (baseline)" if frozen in baselines else ""
        yield f"{frozen.number:>5}  {frozen.value:10.4f}  {' '.join(values_text(frozen.params))}{label}"


def _spread(complete: Sequence[FrozenTrial], best: FrozenTrial, fitness: str) -> Iterator[str]:
    """Yields how certain it is that the ``best`` trial is the best, if there are others to compare it with."""
    values = sorted((frozen.value for frozen in complete if frozen.value is not None), reverse=True)
    if len(values) < 2:
        return
    yield (
        f"trial {best.number} leads by {values[0] - values[1]:.4f}; the {fitness} of complete trials has a standard "
        f"deviation of {np.std(values, ddof=1):.4f}. Another --seed may change as much: repeat the best with several"
    )


def rank(frozen: FrozenTrial) -> tuple[float, int]:
    """Returns a sort key of complete trials: by descending fitness, then by number."""
    assert frozen.value is not None, "a complete trial has a fitness"
    return -frozen.value, frozen.number


def best_of(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Returns the complete trial with the highest fitness, the first one of a tie; None if none is complete."""
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    return min(complete, key=rank, default=None)


def _rows(trials: Sequence[FrozenTrial], space: Space, fitness: str, unit: str) -> Iterator[tuple[Any, ...]]:
    yield "trial", "state", fitness, f"{unit}s", "seconds", *space.ranges, "reason"
    for frozen in trials:
        yield (
            frozen.number,
            STATE_NAMES[frozen.state],
            "" if frozen.value is None else f"{frozen.value:.6f}",
            max(frozen.intermediate_values, default=0),
            "" if frozen.duration is None else f"{frozen.duration.total_seconds():.1f}",  # pauses included
            *(frozen.params.get(name, "") for name in space.ranges),
            frozen.user_attrs.get(REASON, ""),
        )


def _figure(complete: Sequence[FrozenTrial], baselines: Sequence[FrozenTrial], fitness: str) -> Picture:
    """Draws the fitness of the complete trials, the best so far, and a baseline if there is one."""
    numbers = np.array([frozen.number for frozen in complete], np.float64)
    values = np.array([frozen.value for frozen in complete], np.float64)
    lines = [Line("trial", numbers, values), Line("best so far", numbers, np.maximum.accumulate(values))]
    if baselines:
        lines.append(Line("baseline", numbers, np.full_like(values, baselines[0].value)))
    return chart_picture(Chart("Complete trials", lines, "trial", fitness, x_is_whole=True))
