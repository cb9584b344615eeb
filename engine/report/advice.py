"""What to do next: a table of conditions, each with its sentence and the command line that does it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.dataset.spec import DEMO
from engine.evaluation.analysis import BACKGROUND, BOTH, CLASS, DUPLICATE, LOCATION, MISSED
from engine.optim.schedule import enough_epochs, few_steps_warning, random_weights_warning, step_plan
from engine.report.summary import LARGEST_ADVISED, MIN_COST, Subject, Validated, imgsz_for_boxes, small_boxes
from utils.config.commands import COMMANDS
from utils.config.flags import words_of_settings
from utils.config.settings import TrainConfig, changed_settings
from utils.strings import counted

MAX_DATA_WAIT = 0.2  # fraction of the time; more waiting for images is mentioned
MIN_RISE = 0.005  # of AP in the last third of a run, that more epochs may continue
_AGAINST_ERRORS = {
    CLASS: "compare the labels of the confused classes, and add images of them",
    LOCATION: "check that labels are tight and consistent",
    BOTH: "check that the labels of these objects are complete",
    DUPLICATE: "check for objects that are labeled twice",
    BACKGROUND: "check for missing labels, or add images without objects",
    MISSED: "add images of such objects, or train with larger images or a larger model",
}


@dataclass(frozen=True)
class Facts:
    """What is known when advice is given."""

    subject: Subject
    history: Mapping[str, np.ndarray]  # the columns of results.csv, float64 (epochs,)
    validated: Validated | None  # None: before a validation
    folder: Path  # of the run or the validation

    @property
    def run(self) -> TrainConfig | None:
        """Settings of the run; None for the validation of a checkpoint."""
        config = self.subject.config
        return config if isinstance(config, TrainConfig) else None

    @property
    def largest_error(self) -> int:
        """The kind of error that costs most; -1 if none costs `MIN_COST`."""
        if self.validated is None:
            return -1
        cost = np.nan_to_num(self.validated.errors.cost)
        return int(cost.argmax()) if cost.max() >= MIN_COST else -1


class Advice(NamedTuple):
    """A sentence, and the command line that does what it says; "" if none does."""

    sentence: str
    command: str


def advise(facts: Facts) -> list[Advice]:
    """Returns the rows of `ADVICE` whose conditions hold. Those that need a run or a validation do not without one."""
    found = []
    for condition, sentence, command in ADVICE:
        reason = condition(facts)
        if reason:
            found.append(Advice(sentence.format(reason), command(facts)))
    return found


def _few_steps(facts: Facts) -> str:
    run = facts.run
    if run is None or run.time or not facts.subject.batches:
        return ""
    return few_steps_warning(step_plan(run, facts.subject.batches), run)


def _random_weights(facts: Facts) -> str:
    run = facts.run
    train = facts.subject.train
    if run is None or train is None or run.data == DEMO:
        return ""
    return random_weights_warning(len(train), weights=run.weights, model=run.model)


def _small_boxes(facts: Facts) -> str:
    subject = facts.subject
    return "" if subject.train is None else small_boxes(subject.train, imgsz=subject.imgsz, stride=subject.stride)


def _largest_error(facts: Facts) -> str:
    return _AGAINST_ERRORS.get(facts.largest_error, "")


def _contradicted_labels(facts: Facts) -> str:
    number = 0 if facts.validated is None else facts.validated.label_errors
    return counted(number, "label") if number else ""


def _still_rising(facts: Facts) -> str:
    subject = facts.subject
    fitness = facts.history.get(subject.fitness.column, np.zeros(0))
    fitness = fitness[np.isfinite(fitness)]
    third = len(fitness) // 3
    is_complete = subject.epochs > 0 and len(facts.history.get("epoch", ())) >= subject.epochs
    if not is_complete or not third or _few_steps(facts):
        return ""
    rise = float(fitness[-third:].max() - fitness[:-third].max())
    error = 0.0 if facts.validated is None else float(np.nan_to_num(facts.validated.ap_error))
    return subject.fitness.name if rise > max(MIN_RISE, 2 * error) else ""


def _overfits(facts: Facts) -> str:
    """Over the last third, the training loss falls and the validation loss rises, by more than 2 % each."""
    history = facts.history
    names = [name.removeprefix("train/") for name in history if name.startswith("train/")]
    shared = [name for name in names if f"val/{name}" in history]
    if not shared:
        return ""
    losses = np.array([np.sum([history[f"{head}/{name}"] for name in shared], axis=0) for head in ("train", "val")])
    train, val = losses[:, np.isfinite(losses).all(0)]
    third = len(train) // 3
    rises = third >= 2 and bool(val[-1] > 1.02 * val[-third - 1] and train[-1] < 0.98 * train[-third - 1])
    return "the validation loss rises while the training loss falls" if rises else ""


def _data_wait(facts: Facts) -> str:
    waits = facts.history.get("speed/data_wait", np.zeros(0))
    if not np.isfinite(waits).any() or np.nanmedian(waits) <= MAX_DATA_WAIT:
        return ""
    return f"{np.nanmedian(waits):.0%}"


def _train_command(facts: Facts, **changes: Any) -> str:
    """Returns the command line of the run with other settings, which begins a new one."""
    run = facts.run
    if run is None:
        return ""
    settings = {"data": run.data} | changed_settings(run) | changes
    for name in ("resume", "exist_ok"):
        settings.pop(name, None)
    words = words_of_settings({name: value for name, value in settings.items() if name not in changes or value != ""})
    words = ["--set" if word == "--override" else word for word in words]
    return f"{COMMANDS['train'].typed} {shlex.join(words)}"


def _longer_run(facts: Facts) -> str:
    run = facts.run
    assert run is not None, "a run has few steps"
    return _train_command(facts, epochs=enough_epochs(step_plan(run, facts.subject.batches), run))


def _from_weights(facts: Facts) -> str:
    return _train_command(facts, weights="yolox_s", model="")


def _larger_images(facts: Facts) -> str:
    subject = facts.subject
    assert subject.train is not None, "the sides of its boxes are known"
    imgsz = imgsz_for_boxes(subject.train, imgsz=subject.imgsz, stride=subject.stride)
    return _train_command(facts, imgsz=imgsz) if imgsz <= LARGEST_ADVISED else ""


def _against_largest_error(facts: Facts) -> str:
    subject = facts.subject
    if facts.largest_error != MISSED:
        return _check_labels(facts)
    is_known = _few_steps(facts) or _small_boxes(facts)  # their commands come first
    return "" if is_known or 2 * subject.imgsz > LARGEST_ADVISED else _train_command(facts, imgsz=2 * subject.imgsz)


def _check_labels(facts: Facts) -> str:
    subject = facts.subject
    weights = subject.config.weights
    if facts.run is not None:
        weights = str(facts.folder / ("best.pt" if subject.best_epoch > 0 else "last.pt"))
    words = [subject.config.data, "--split", subject.split, "--weights", weights]
    return f"{COMMANDS['check'].typed} {shlex.join(words)}"


def _more_epochs(facts: Facts) -> str:
    words = ["--resume", str(facts.folder / "last.pt"), "--epochs", str(2 * facts.subject.epochs)]
    return f"{COMMANDS['train'].typed} {shlex.join(words)}"


def _cached_images(facts: Facts) -> str:
    return _train_command(facts, cache="ram")


def _no_command(facts: Facts) -> str:
    return ""


# Conditions, which return what is the case, or "" if nothing is; sentences about it; and command lines.
ADVICE: tuple[tuple[Callable[[Facts], str], str, Callable[[Facts], str]], ...] = (
    (_few_steps, "Train longer: {}.", _longer_run),
    (_random_weights, "Start from weights: {}.", _from_weights),
    (_small_boxes, "Use larger images: {}.", _larger_images),
    (_largest_error, "Against the largest error: {}.", _against_largest_error),
    (_contradicted_labels, "Check {} that the model contradicts, below.", _check_labels),
    (_still_rising, "{} was still rising: train longer.", _more_epochs),
    (_overfits, "More images, stronger augmentation or a smaller model: {}.", _no_command),
    (_data_wait, "Training waits for images {} of the time: more --workers, or a cache.", _cached_images),
)
