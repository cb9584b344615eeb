"""What a search has found: the best recipe, a table of the trials, and their fitness as a figure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.search.ranges import Space, values_text
from tools.search.study import REASON, SharedStudy, best_of
from utils.drawing.figures import Chart, Line, Picture, chart_picture
from utils.files.safe_io import write_csv, write_whole
from utils.strings import counted

BEST, TABLE, FIGURE = "best.yaml", "trials.csv", "trials.png"
SHOWN = 10  # trials in the printed table
STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "ended early",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def write_report(folder: Path, study: SharedStudy, space: Space, fitness: str, unit: str, command: str) -> list[str]:
    """Writes the report into ``folder`` and returns its lines for the terminal. ``command``: trains with the best
    recipe, without --hyp."""
    trials = study.trials()
    write_csv(folder / TABLE, _rows(trials, space, fitness, unit))
    write_whole(folder / FIGURE, _figure(trials, fitness).png)
    lines = format_trials(trials, fitness)
    if (best := best_of(trials)) is not None:
        recipe = folder / BEST
        line = f"{command} --hyp {shlex.quote(str(recipe))}"
        text = f"# Trial {best.number} of {folder}: {fitness} {best.value:.4f}.\n# command: {line}\n"
        write_whole(recipe, text + yaml.safe_dump(space.recipe(best.params), sort_keys=False))
        lines.append(f"the best recipe: {line}")
    return [*lines, f"all trials: {folder / TABLE} and {folder / FIGURE}"]


def format_trials(trials: Sequence[FrozenTrial], fitness: str) -> list[str]:
    """A line for each of the best trials, and the numbers of those that ended early or failed."""
    complete = sorted(
        (frozen for frozen in trials if frozen.state == TrialState.COMPLETE), key=lambda t: (-t.value, t.number)
    )
    counts = {state: sum(frozen.state == state for frozen in trials) for state in STATES}
    summary = ", ".join(f"{count} {STATES[state]}" for state, count in counts.items() if count)
    lines = [f"{counted(len(trials), 'trial')}: {summary}", f"trial  {fitness:>10}  hyper-parameters"]
    lines += [
        f"{t.number:>5}  {t.value:10.4f}  {' '.join(values_text(t.params))}{'' if t.number else '  (baseline)'}"
        for t in complete[:SHOWN]
    ]
    return lines


def reached(frozen: FrozenTrial) -> int:
    """The last epoch, or fold, after which it has reported its fitness."""
    return max(frozen.intermediate_values, default=0)


def _rows(trials: Sequence[FrozenTrial], space: Space, fitness: str, unit: str) -> Iterator[tuple[Any, ...]]:
    yield "trial", "state", fitness, f"{unit}s", "seconds", *space.ranges, "reason"
    for frozen in trials:
        yield (
            frozen.number,
            STATES[frozen.state],
            "" if frozen.value is None else f"{frozen.value:.6f}",
            reached(frozen),
            "" if frozen.duration is None else f"{frozen.duration.total_seconds():.1f}",  # pauses included
            *(frozen.params.get(name, "") for name in space.ranges),
            frozen.user_attrs.get(REASON, ""),
        )


def _figure(trials: Sequence[FrozenTrial], fitness: str) -> Picture:
    """The fitness of the complete trials, and the best so far; that of the recipe's own values, if known."""
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    numbers, values = np.array([(t.number, t.value) for t in complete], np.float64).reshape(-1, 2).T
    lines = [Line("trial", numbers, values), Line("best so far", numbers, np.maximum.accumulate(values))]
    if complete and complete[0].number == 0:
        lines.append(Line("baseline", numbers, np.full_like(values, values[0])))
    return chart_picture(Chart("Complete trials", lines, "trial", fitness, x_is_whole=True))
