"""What to do next: a table of conditions, each with its sentence and the command line that does it. A run that begins
logs what is known then; its report, and that of a validation, show what follows from the result."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.index import DatasetIndex
from data.spec import DEMO
from engine.evaluation.analysis import BACKGROUND, BOTH, CLASS, DUPLICATE, LOCATION, MISSED
from engine.optim.schedule import enough_epochs, few_steps_warning, random_weights_warning, step_plan
from engine.report.summary import LARGEST_ADVISED, MIN_COST, Subject, Validated, imgsz_for_boxes, small_boxes
from models.detector import Detector
from utils.class_names import class_key
from utils.config.flags import words_of_settings
from utils.config.settings import TrainConfig, changed_settings
from utils.process.launch import typed_command
from utils.strings import counted, listed

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
    folder: Path  # of the run or the validation
    validated: Validated | None = None  # None: before a validation
    weights_names: Sequence[str] = ()  # classes of the weights from which a run begins; empty: not known
    model: Detector | None = None  # of a run that begins

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
    """Returns the rows of `ADVICE` whose conditions hold. Those that need a run or a validation do not without one.

    A command stands in the first row that it belongs to.
    """
    found: list[Advice] = []
    for rule in ADVICE:
        reason = rule.condition(facts)
        if reason:
            command = rule.command(facts)
            is_known = any(command == row.command for row in found)
            found.append(Advice(rule.sentence.format(reason), "" if is_known else command))
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


def _unlearned_classes(facts: Facts) -> str:
    """Classes that the weights and the data set name and no training image labels are background to the loss."""
    run = facts.run
    train = facts.subject.train
    if run is None or run.keep_old or train is None:
        return ""
    known = {class_key(name) for name in facts.weights_names}
    labeled = _labeled_classes(train)
    ignored = train.names_ignored_everywhere()
    unlearned = [name for name in train.names if class_key(name) in known and name not in (*labeled, *ignored)]
    if not unlearned:
        return ""
    return f"no training image labels {listed(unlearned)}, known to {run.weights}"


def _labeled_classes(train: DatasetIndex) -> list[str]:
    return [name for name, boxes in zip(train.names, train.boxes_per_class(len(train.names))) if boxes]


def _largest_error(facts: Facts) -> str:
    return _AGAINST_ERRORS.get(facts.largest_error, "")


def _unlabeled_images(facts: Facts) -> str:
    number = 0 if facts.validated is None else facts.validated.unlabeled
    return f"{counted(number, 'image')} without a label file" if number else ""


def _contradicted_labels(facts: Facts) -> str:
    number = 0 if facts.validated is None else facts.validated.label_errors
    return counted(number, "label") if number else ""


def _train_command(facts: Facts, **changes: Any) -> str:
    """Returns the command line that has begun the run, with other settings: it begins a new one."""
    run = facts.run
    if run is None:
        return ""
    command = facts.subject.command or run
    settings = {"data": command.data} | changed_settings(command) | changes
    for name in ("resume", "exist_ok"):
        settings.pop(name, None)
    words = words_of_settings({name: value for name, value in settings.items() if name not in changes or value != ""})
    words = ["--set" if word == "--override" else word for word in words]
    return f"{typed_command('train')} {shlex.join(words)}"


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


def _kept_classes(facts: Facts) -> str:
    train = facts.subject.train
    model = facts.model
    if train is None or model is None or not model.head.distills:  # there is no teacher for other heads
        return ""
    return _train_command(facts, keep_old=True, classes=_labeled_classes(train), freeze=[len(model.model) - 1])


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
    split = "train" if subject.is_held_out else subject.split  # as the data set names it
    words = [subject.config.data, "--split", split, "--weights", weights]
    return f"{typed_command('check')} {shlex.join(words)}"


class Rule(NamedTuple):
    """A row of the table of advice. Its condition returns what is the case, which takes the place of {} in the
    sentence, or "" if nothing is."""

    condition: Callable[[Facts], str]
    sentence: str
    command: Callable[[Facts], str]  # returns the command line; "" if none does what the sentence says


ADVICE = (
    Rule(_unlabeled_images, "Label {} in which the model finds objects, or add an empty file for each.", _check_labels),
    Rule(_random_weights, "Start from weights: {}.", _from_weights),
    Rule(_small_boxes, "Use larger images: {}.", _larger_images),
    Rule(_few_steps, "Train longer: {}.", _longer_run),
    Rule(_unlearned_classes, "Keep what the weights know: {}. Training will unlearn them.", _kept_classes),
    Rule(_largest_error, "Against the largest error: {}.", _against_largest_error),
    Rule(_contradicted_labels, "Check {} that the model contradicts, below.", _check_labels),
)
