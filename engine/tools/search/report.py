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

from engine.tools.search.ranges import Space, values_text
from engine.tools.search.study import REASON, SharedStudy, best_of
from utils.drawing import page
from utils.drawing.charts import FAINT, Line, line_chart
from utils.files.safe_io import write_csv, write_whole
from utils.strings import counted

BEST, TABLE, PAGE = "best.yaml", "trials.csv", "search.html"
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
    _page(folder, trials, best, weights, fitness, unit).write(folder / PAGE)
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


def seconds_of(frozen: FrozenTrial) -> float | None:
    """From its first to its last process, pauses included; None if it has not ended."""
    return frozen.duration.total_seconds() if frozen.duration is not None else None


def reached(frozen: FrozenTrial) -> int:
    """The last epoch, or fold, after which it has reported its fitness."""
    return max(frozen.intermediate_values, default=0)


def _rows(trials: Sequence[FrozenTrial], space: Space, fitness: str, unit: str) -> Iterator[tuple[Any, ...]]:
    yield "trial", "state", fitness, f"{unit}s", "seconds", *space.ranges, "reason"
    for frozen in trials:
        seconds = seconds_of(frozen)
        yield (
            frozen.number,
            STATES[frozen.state],
            "" if frozen.value is None else f"{frozen.value:.6f}",
            reached(frozen),
            "" if seconds is None else f"{seconds:.1f}",
            *(frozen.params.get(name, "") for name in space.ranges),
            frozen.user_attrs.get(REASON, ""),
        )


def _page(
    folder: Path,
    trials: Sequence[FrozenTrial],
    best: FrozenTrial | None,
    weights: dict[str, float],
    fitness: str,
    unit: str,
) -> page.Page:
    out = page.Page(f"Search {folder.name}", f"{counted(len(trials), 'trial')}, fitness {fitness}")
    found = "No trial is complete yet."
    if best is not None:
        found = f"The best trial is {best.number}: {fitness} {best.value:.4f}. {BEST} is its recipe for --hyp."
    baseline = trials[0].value if trials and trials[0].state == TrialState.COMPLETE else None
    if baseline is not None:
        found += f" The baseline, trial 0 with the recipe's own values, has {baseline:.4f}."
    out.section("Summary", found, page.bullets(format_trials(trials, fitness)[:1]))
    complete = [frozen for frozen in trials if frozen.state == TrialState.COMPLETE]
    values = np.array([frozen.value for frozen in complete], np.float64)
    numbers = np.array([frozen.number for frozen in complete], np.float64)
    lines = [Line("trial", numbers, values), Line("best so far", numbers, np.maximum.accumulate(values))]
    lines += [Line("baseline", numbers, np.full_like(values, baseline))] if baseline is not None else []
    out.section(
        "Trials",
        line_chart(lines, title="Complete trials", x_label="trial", y_label=fitness, x_is_whole=True),
        page.table(
            ("trial", "state", fitness, f"{unit}s", *(best.params if best else ()), "reason"),
            [
                (t.number, STATES[t.state] + ("" if t.number else ", baseline"), t.value, reached(t),
                 *(_cell(t.params.get(name)) for name in (best.params if best else ())), t.user_attrs.get(REASON, ""))
                for t in trials
            ],
            "All trials",
        ),
    )  # fmt: skip
    ranked = sorted(trials, key=lambda frozen: frozen is best)  # the best one is drawn over the others
    steps = [
        Line(f"trial {t.number}", *map(np.array, zip(*sorted(t.intermediate_values.items()))),
             "s0 strong" if t is best else FAINT)
        for t in ranked
        if t.intermediate_values
    ]  # fmt: skip
    title = f"Each trial {unit} by {unit}; the best one is strong"
    chart = line_chart(steps, title=title, x_label=unit, y_label=fitness, x_is_whole=True)
    out.section(f"{unit.capitalize()}s", chart)
    rows = [(name, value, f"{value:.0%}") for name, value in weights.items()]
    note = f"They need {LEAST_TRIALS} complete trials."
    out.section("Importances", page.bars(rows, "Part in whether a trial is among the best") if rows else note)
    return out


def _cell(value: float | int | None) -> float | int | str:
    """``value`` with four significant digits: the table's own format has three decimals."""
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else value
