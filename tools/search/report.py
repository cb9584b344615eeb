"""What a search has found: the best recipe, a table of the trials, which hyper-parameters matter, and a page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from tools.search.ranges import Space, values_text
from tools.search.study import REASON, SharedStudy, best_of
from utils.drawing import page
from utils.drawing.figures import Chart, Line, chart_svg
from utils.files.safe_io import write_csv, write_whole
from utils.strings import counted

BEST, TABLE, PAGE = "best.yaml", "trials.csv", "search.html"
TEMPLATE = "tools/search/page.html"
SHOWN = 10  # trials in the printed table
LEAST_TRIALS = 10  # complete ones from which importances are estimated
STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "ended early",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def write_report(folder: Path, study: SharedStudy, space: Space, fitness: str, unit: str, command: str) -> list[str]:
    """Writes the report into ``folder`` and returns its lines for the terminal.

    Args:
        fitness: its name.
        unit: after which a trial reports its fitness: "epoch" or "fold".
        command: that trains with the best recipe, without --hyp.
    """
    trials = study.trials()
    best, weights = best_of(trials), importances(study.study, trials)
    write_csv(folder / TABLE, _rows(trials, space, fitness, unit))
    lines = format_trials(trials, fitness)
    if weights:
        lines.append("importance: " + ", ".join(f"{name} {value:.0%}" for name, value in weights.items()))
    else:
        lines.append(f"importances need {LEAST_TRIALS} complete trials")
    if best is not None:
        recipe = folder / BEST
        line = f"{command} --hyp {shlex.quote(str(recipe))}"
        text = f"# Trial {best.number} of {folder}: {fitness} {best.value:.4f}.\n# command: {line}\n"
        write_whole(recipe, text + yaml.safe_dump(space.recipe(best.params), sort_keys=False))
        lines.append(f"the best recipe: {line}")
    subtitle = f"{counted(len(trials), 'trial')}, fitness {fitness}"
    content = _content(trials, best, weights, fitness, unit)
    page.write_page(folder / PAGE, TEMPLATE, f"Search {folder.name}", subtitle, **content)
    return [*lines, f"all trials: {folder / TABLE} and {folder / PAGE}"]


def importances(study: optuna.Study, trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """How much each hyper-parameter decides whether a trial is among the best (PED-ANOVA, Watanabe et al. 2023), the
    most important first; they add up to 1. Empty if there are too few trials to tell."""
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    if len(complete) < LEAST_TRIALS or len({frozen.value for frozen in complete}) < 2:
        return {}
    found = optuna.importance.get_param_importances(study)
    return {} if any(math.isnan(value) for value in found.values()) else found


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


def _content(
    trials: Sequence[FrozenTrial], best: FrozenTrial | None, weights: dict[str, float], fitness: str, unit: str
) -> dict[str, Any]:
    """What page.html shows."""
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    baseline = complete[0].value if complete and complete[0].number == 0 else None
    numbers, values = np.array([(t.number, t.value) for t in complete], np.float64).reshape(-1, 2).T
    lines = [Line("trial", numbers, values), Line("best so far", numbers, np.maximum.accumulate(values))]
    lines += [Line("baseline", numbers, np.full_like(values, baseline))] if baseline is not None else []
    by_unit = [
        Line(f"trial {t.number}", *np.array(sorted(steps.items())).T, "strong" if t is best else "faint")
        for t in sorted(trials, key=lambda frozen: frozen is not best)
        if (steps := t.intermediate_values)
    ]
    title = f"Each trial {unit} by {unit}; the best one is strong"
    columns = ("trial", "state", fitness, f"{unit}s", "hyper-parameters")
    rows = [(t.number, _state(t), t.value, reached(t), " ".join(values_text(t.params))) for t in trials]
    return {
        "best": best,
        "baseline": baseline,
        "fitness": fitness,
        "recipe": BEST,
        "counts": format_trials(trials, fitness)[0],
        "complete": chart_svg(Chart("Complete trials", lines, "trial", fitness, x_is_whole=True)),
        "trials": page.Table(columns, rows, "All trials"),
        "unit": unit,
        "by_unit": chart_svg(Chart(title, by_unit, unit, fitness, x_is_whole=True)),
        "importances": page.Bars(
            [(name, [value], f"{value:.0%}") for name, value in weights.items()],
            "Part in whether a trial is among the best",
        ),
        "least": LEAST_TRIALS,
    }


def _state(frozen: FrozenTrial) -> str:
    reason = f": {frozen.user_attrs[REASON]}" if REASON in frozen.user_attrs else ""
    return STATES[frozen.state] + reason + ("" if frozen.number else ", baseline")
