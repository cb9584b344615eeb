"""Reports the result of a search: the best recipe, a table of the trials, and their fitness as a figure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.search.ranges import Space, values_text
from tools.search.study import best_of, rank, reason_of
from utils.drawing.figures import Chart, Line, Picture, chart_picture
from utils.files.safe_io import write_csv, write_whole
from utils.strings import counted

BEST_YAML = "best.yaml"
TRIALS_CSV = "trials.csv"
TRIALS_PNG = "trials.png"
PRINTED_TRIALS = 10
STATE_NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def write_report(
    folder: Path, trials: Sequence[FrozenTrial], space: Space, *, fitness: str, unit: str, command: str
) -> list[str]:
    """Writes the report into ``folder`` and returns its lines for the terminal.

    Args:
        fitness: name of the fitness.
        unit: interval at which a trial reports its fitness: "epoch" or "fold".
        command: command line of a training, to which --hyp with the best recipe is added.
    """
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    baselines = [frozen for frozen in complete if space.is_baseline(frozen.params)]
    write_csv(folder / TRIALS_CSV, _rows(trials, space, fitness, unit))
    write_whole(folder / TRIALS_PNG, _figure(complete, baselines, fitness).png)
    lines = [_count_by_state(trials), *_table(complete, baselines, fitness)]
    best = best_of(trials)
    if best is not None:
        recipe = folder / BEST_YAML
        best_command = f"{command} --hyp {shlex.quote(str(recipe))}"
        header = f"# Trial {best.number} of {folder}: {fitness} {best.value:.4f}.\n# command: {best_command}\n"
        write_whole(recipe, header + yaml.safe_dump(space.recipe(best.params), sort_keys=False))
        lines.append(f"the best recipe: {best_command}")
    return [*lines, f"all trials: {folder / TRIALS_CSV} and {folder / TRIALS_PNG}"]


def _count_by_state(trials: Sequence[FrozenTrial]) -> str:
    """Returns a line with the number of trials by state."""
    counts = {state: sum(frozen.state == state for frozen in trials) for state in STATE_NAMES}
    summary = ", ".join(f"{count} {STATE_NAMES[state]}" for state, count in counts.items() if count)
    return f"{counted(len(trials), 'trial')}: {summary}"


def _table(complete: Sequence[FrozenTrial], baselines: Sequence[FrozenTrial], fitness: str) -> Iterator[str]:
    """Yields a header, and a line for each of the best trials."""
    yield f"trial  {fitness:>10}  hyper-parameters"
    for frozen in sorted(complete, key=rank)[:PRINTED_TRIALS]:
        label = "  (baseline)" if frozen in baselines else ""
        yield f"{frozen.number:>5}  {frozen.value:10.4f}  {' '.join(values_text(frozen.params))}{label}"


def last_step(frozen: FrozenTrial) -> int:
    """Returns the last epoch, or fold, for which a trial has reported its fitness."""
    return max(frozen.intermediate_values, default=0)


def _rows(trials: Sequence[FrozenTrial], space: Space, fitness: str, unit: str) -> Iterator[tuple[Any, ...]]:
    yield "trial", "state", fitness, f"{unit}s", "seconds", *space.ranges, "reason"
    for frozen in trials:
        yield (
            frozen.number,
            STATE_NAMES[frozen.state],
            "" if frozen.value is None else f"{frozen.value:.6f}",
            last_step(frozen),
            "" if frozen.duration is None else f"{frozen.duration.total_seconds():.1f}",  # pauses included
            *(frozen.params.get(name, "") for name in space.ranges),
            reason_of(frozen),
        )


def _figure(complete: Sequence[FrozenTrial], baselines: Sequence[FrozenTrial], fitness: str) -> Picture:
    """Draws the fitness of the complete trials, the best so far, and a baseline if there is one."""
    numbers = np.array([frozen.number for frozen in complete], np.float64)
    values = np.array([frozen.value for frozen in complete], np.float64)
    lines = [Line("trial", numbers, values), Line("best so far", numbers, np.maximum.accumulate(values))]
    if baselines:
        lines.append(Line("baseline", numbers, np.full_like(values, baselines[0].value)))
    return chart_picture(Chart("Complete trials", lines, "trial", fitness, x_is_whole=True))
