"""What each command does with a run in each state: the table of docs/distributed.md ("How a run continues")."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.checkpoint.progress import PendingEpoch, Progress
from engine.run.complete_record import record_reported
from engine.run.launch_record import record_launch
from engine.run.plan import plan_run
from engine.run.run import EndedRun, NewRun, Remaining, RunSettings
from tests.helpers.messages import matches
from tests.helpers.run_checkpoints import STORED, name_newest_run, save_checkpoint
from utils.config.settings import AUTO, Hyperparameters, TrainConfig
from utils.distributed.context import DistributedContext
from utils.errors import UserError

LAUNCHER = "job"
ALL = frozenset(item.name for item in fields(TrainConfig))


@dataclass(frozen=True)
class State:
    """The state in which a command finds the run. It has 10 epochs, a patience of 5, and callbacks."""

    progress: Progress | None  # in last.pt; None: there is none
    end_reason: str = ""  # how the message begins that says why it has ended
    settings: dict[str, Any] = field(default_factory=dict)  # that it has instead of these
    is_validated: bool = True
    is_pending: bool = False
    by_callback: bool = False
    reported: int | None = None  # epochs


IN_EPOCH_4 = Progress(epoch=3, batch=2, best_epoch=3)
AFTER_EPOCH_3 = Progress(epoch=3, best_epoch=2)
ALL_DONE = Progress(epoch=10, best_epoch=9)
STALLED = Progress(epoch=7, best_epoch=2)
DONE = "all epochs are done (10); to train longer: --resume "
CUT = "all epochs are done (3); to train longer: --resume "
NO_BETTER = "stopped early after epoch 7: no better AP in 5 epochs (--patience 5); to continue, wait for longer: "
NO_TIME = "--time 2: no further epoch fits (10 epochs took 1:00:00); to train longer: --resume "
STOPPED = "a callback has ended it after 3 epochs; to continue: --resume "
NO_LAST = "its report after 10 epochs is written, and there is no last.pt to continue from; restore it to continue"
TIME = {"time": 2.0}
LEAVES_OUT = {"val_every": 5}

STATES = {
    "nothing saved": State(None),
    "in an epoch": State(IN_EPOCH_4),
    "between epochs": State(AFTER_EPOCH_3),
    "epoch 3 unscored": State(AFTER_EPOCH_3, is_pending=True),
    "last epoch unscored": State(ALL_DONE, is_pending=True),
    "epoch 3 left out": State(AFTER_EPOCH_3, settings=LEAVES_OUT, is_validated=False),
    "all done": State(ALL_DONE, DONE),
    "all done, reported": State(ALL_DONE, DONE, reported=10),
    "a copy's report": State(ALL_DONE, DONE, reported=9),
    "cut to 3 epochs": State(IN_EPOCH_4, CUT, {"epochs": 3}),
    "cut to 3, reported": State(IN_EPOCH_4, CUT, {"epochs": 3}, reported=3),
    "patience": State(STALLED, NO_BETTER),
    "patience, reported": State(STALLED, NO_BETTER, reported=7),
    "time": State(ALL_DONE, NO_TIME, TIME),
    "time, reported": State(ALL_DONE, NO_TIME, TIME, reported=10),
    "callback": State(AFTER_EPOCH_3, STOPPED, by_callback=True),
    "callback, reported": State(AFTER_EPOCH_3, STOPPED, by_callback=True, reported=3),
    "callback in an epoch": State(
        IN_EPOCH_4, "a callback has ended it after epoch 4, batch 2 of 10; to continue: ", by_callback=True
    ),
    "callback in on_start": State(Progress(), "a callback has ended it after 0 epochs; ", by_callback=True),
    "callback, unscored": State(AFTER_EPOCH_3, STOPPED, is_pending=True, by_callback=True),
    "callback, of --time": State(AFTER_EPOCH_3, STOPPED, TIME, by_callback=True),
    "callback, left out": State(AFTER_EPOCH_3, STOPPED, LEAVES_OUT, is_validated=False, by_callback=True, reported=3),
    "callback + patience": State(STALLED, NO_BETTER, by_callback=True),
    "no last.pt, reported": State(None, NO_LAST, reported=10),
}

# Columns: ``again``: see `commands`; ``--resume last.pt``, and torchrun's restart of that; what is added to ``--resume
# auto``. The restart finds "callback" only where a callback has ended the run once more: the start before has saved the
# run as one that trains. ``score`` trains on if epochs are left after the scores; ``report`` scores what is unscored.
# "left out": not validated, because of --val-every.
TABLE = """
                     again    last.pt restart  epochs=20 patience=9 time=9   epochs=5 epochs=3 time=0.5 imgsz=320
nothing saved        start    missing missing  start     start      start    start    start    start    start
in an epoch          train    train   train    train     train      train    train    report   train    train
between epochs       train    train   train    train     train      train    train    report   train    train
epoch 3 unscored     score    score   score    score     score      score    score    score    score    score
last epoch unscored  score    score   score    score     score      score    score    score    score    score
epoch 3 left out     train    train   train    train     train      train    train    score    train    train
all done             report   ended   report   train     report     train    report   report   report   other
all done, reported   complete ended   complete train     complete   train    complete complete complete other
a copy's report      report   ended   report   train     report     train    report   report   report   other
cut to 3 epochs      report   ended   report   train     report     train    train    report   report   other
cut to 3, reported   complete ended   complete train     complete   train    train    complete complete other
patience             report   ended   report   report    train      report   report   report   report   other
patience, reported   complete ended   complete complete  train      complete complete complete complete other
time                 report   ended   report   train     report     train    report   report   report   other
time, reported       complete ended   complete train     complete   train    complete complete complete other
callback             report   train   report   train     report     train    report   report   train    other
callback, reported   complete train   complete train     complete   train    complete complete train    other
callback in an epoch report   train   report   train     report     train    report   report   train    other
callback in on_start report   train   report   train     report     train    report   report   train    other
callback, unscored   report   score   report   score     report     score    report   report   score    other
callback, of --time  report   train   report   train     report     train    report   report   report   other
callback, left out   complete train   complete train     complete   train    complete report   train    other
callback + patience  report   ended   report   report    train      report   report   report   report   other
no last.pt, reported complete missing complete no last   complete   no last  complete complete no last  other
"""

# The lines with which commands are refused, by their name in the table.
REFUSALS = {
    "missing": "{folder}/last.pt: no such checkpoint",
    "ended": "{folder}/last.pt: {end_reason}...",
    "other": "--imgsz 320: the run in {folder} has ended, with 640; start a new run with another --name; this one: "
    "{end_reason}...",
    "no last": "{folder}: the run has ended after 10 epochs, and there is no last.pt to continue from; restore it to "
    "continue, or repeat the command with the earlier --epochs, --time and --patience",
}


def rows() -> dict[str, dict[str, str]]:
    """Returns the cells of `TABLE` by state and column."""
    header, *lines = TABLE.strip("\n").splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", header)]
    ends = [*starts[1:], None]
    columns = [slice(start, end) for start, end in zip(starts, ends)]
    names = header.split()
    return {
        line[: starts[0]].strip(): {name: line[column].strip() for name, column in zip(names, columns)}
        for line in lines
    }


@dataclass(frozen=True)
class Command:
    """A command line in the run's folder."""

    config: TrainConfig
    explicit_flags: frozenset[str]
    launcher: str = ""  # `LAUNCHER`: torchrun repeats it


def commands(folder: Path, config: TrainConfig) -> dict[str, list[Command]]:
    """Returns the commands of each column of `TABLE`, for a run with the settings ``config``."""
    named = Command(TrainConfig(resume=str(folder / "last.pt")), frozenset({"resume"}))
    again = [
        Command(replace(config, resume=AUTO), ALL),
        Command(config, ALL, LAUNCHER),
        *(changed(config, name, value) for name, value in [("patience", 2), ("callbacks", ""), ("export", ["onnx"])]),
        Command(TrainConfig(project=config.project, resume=AUTO), frozenset({"project", "resume"})),
    ]
    result = {"again": again, "last.pt": [named], "restart": [replace(named, launcher=LAUNCHER)]}
    for name in ("epochs=20", "patience=9", "time=9", "epochs=5", "epochs=3", "time=0.5", "imgsz=320"):
        setting, value = name.split("=")
        result[name] = [changed(config, setting, yaml.safe_load(value))]
    return result


def changed(config: TrainConfig, name: str, value: Any) -> Command:
    """Returns ``--resume auto`` with another value of one setting."""
    typed = TrainConfig(**{"project": config.project, "resume": AUTO, name: value})
    return Command(typed, frozenset({"project", "resume", name}))


def make_run(folder: Path, state: State) -> TrainConfig:
    """Makes ``folder`` that of a run in ``state``, and returns the settings of the run."""
    settings = {"project": str(folder.parent), "epochs": 10, "patience": 5, "callbacks": "hooks:Hooks"}
    config = TrainConfig(**{**settings, **state.settings})
    folder.mkdir()
    name_newest_run(folder, "run")
    record_launch(folder, "run", [LAUNCHER])
    if state.progress is not None:
        pending = PendingEpoch(row={}, is_closing=False, progress=state.progress, ema={})
        save_checkpoint(
            folder / "last.pt",
            state.progress,
            config=config,
            run=replace(STORED["run"], seconds=3600.0),
            metrics={"AP": 0.5} if state.is_validated else {},
            pending=pending if state.is_pending else None,
            ended_by_callback=state.by_callback,
        )
    if state.reported is not None:
        stored = {"run_id": "run", **asdict(RunSettings(config, Hyperparameters()))}
        (folder / "settings.yaml").write_text(yaml.safe_dump(stored))
        record_reported(folder, "run", state.reported)
    return config


def outcome(folder: Path, state: State, command: Command) -> str:
    """Returns what `plan_run` decides, by its name in `TABLE`."""
    ctx = replace(DistributedContext.single(), launcher_identity=command.launcher)
    try:
        with ExitStack() as stack:
            plan = plan_run(ctx, command.config, command.explicit_flags, stack)
    except UserError as error:
        return refusal(str(error), folder, state)
    if isinstance(plan, NewRun):
        return "start"
    if isinstance(plan, EndedRun):
        return "complete"
    if plan.remaining is Remaining.REPORT:
        assert plan.startup_messages[-1] == f"writing the report: {plan.end_reason}"
        return "report"
    assert plan.startup_messages[0].startswith(f"resuming {folder}/last.pt after ")
    is_scored_first = plan.lacks_scores
    return "score" if is_scored_first else "train"


def refusal(message: str, folder: Path, state: State) -> str:
    """Returns the name of the line ``message`` in `REFUSALS`, or the line itself."""
    for name, line in REFUSALS.items():
        if matches(message, line.format(folder=folder, end_reason=state.end_reason)):
            return name
    return message


@pytest.mark.parametrize("name", STATES)
def test_the_table_says_what_each_command_does_with_a_run(tmp_path, name):
    state = STATES[name]
    folder = tmp_path / "exp"
    config = make_run(folder, state)
    outcomes = {
        column: {outcome(folder, state, command) for command in alike}
        for column, alike in commands(folder, config).items()
    }
    assert outcomes == {column: {cell} for column, cell in rows()[name].items()}


@pytest.mark.parametrize("name", [name for name, state in STATES.items() if state.end_reason])
def test_a_run_that_has_ended_says_why(tmp_path, name):
    state = STATES[name]
    folder = tmp_path / "exp"
    config = make_run(folder, state)
    with ExitStack() as stack:
        plan = plan_run(DistributedContext.single(), replace(config, resume=AUTO), ALL, stack)
    assert not isinstance(plan, NewRun)
    assert plan.end_reason.startswith(state.end_reason)


def test_the_table_has_every_state():
    assert rows().keys() == STATES.keys()
