"""What to do next: five rules, each with its sentence and the command line that does it. A run that begins logs what is
known then; its report, and that of a validation, show what follows from the result."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.index import DatasetIndex
from data.spec import DEMO
from engine.evaluation.analysis import BACKGROUND, BOTH, CLASS, DUPLICATE, LOCATION, MISSED, ErrorSplit
from engine.optim.schedule import step_plan
from utils.config.flags import words_of_settings
from utils.config.settings import TrainConfig, ValConfig, changed_settings
from utils.process.launch import typed_command
from utils.strings import counted

# With fewer training images, pretrained weights give a much higher AP than random ones: on 140 and 296 images, 0.68 and
# 0.83 from YOLOX-nano, 0.15 and 0.37 from random weights (20 epochs, 320 px).
MANY_IMAGES = 1000
# Validation AP on BCCD by steps of batch 16: from random weights (160 px) 0.00 after 65 and 0.52 after 390, from
# yolov8n.pt (320 px) 0.48 after 39, 0.60 after 117 and 0.63 after 260. The demo set, from random weights (128 px): AP50
# 0.93 after 260.
ENOUGH_STEPS = 250
# From yolov8n.pt at 160 px on five sets of 140 to 240 images: 90 to 150 steps lose 0.02 to 0.06 AP against 180 to 300
# (benchmarks/LOG.md), and beyond 300 some sets gain and others lose.
ENOUGH_STEPS_FROM_WEIGHTS = 300
ABOUT = 0.8  # fraction of these numbers, which are rough, that is enough
SMALL_PX = 16.0  # two cells of stride 8, the finest of most models
LARGEST_ADVISED = 2048  # px; with larger images, few GPUs have memory for a batch
MIN_COST = 0.01  # AP50; kinds of errors that cost less are not mentioned
AGAINST_ERRORS = {
    CLASS: "compare the labels of the confused classes, and add images of them",
    LOCATION: "check that labels are tight and consistent",
    BOTH: "check that the labels of these objects are complete",
    DUPLICATE: "check for objects that are labeled twice",
    BACKGROUND: "check for missing labels, or add images without objects",
    MISSED: "add images of such objects, or train with larger images or a larger model",
}


@dataclass(frozen=True)
class Subject:
    """The run or checkpoint that a report is about."""

    title: str
    folder: Path  # of the run or the validation
    config: TrainConfig | ValConfig
    stride: int
    train: DatasetIndex | None  # None: not known, for the validation of a checkpoint
    validated: DatasetIndex
    split: str  # name of the validated split
    is_held_out: bool = False  # the validated images are a part of the data set's training split
    command: TrainConfig | None = None  # the settings that have begun the run, some of them open; None: ``config``
    batches: int = 0  # per epoch; 0 for the validation of a checkpoint
    epoch: int = 0  # of the run, after which it was validated; 0: not yet, or the validation of a checkpoint
    best_epoch: int = -1  # of best.pt, see `Progress`; -1: none


class Known(NamedTuple):
    """What is known from a validation."""

    errors: ErrorSplit  # of the detections above the threshold
    label_errors: int  # labels that the model contradicts
    unlabeled: int  # images without a label file in which it finds objects above the threshold


class Advice(NamedTuple):
    """A sentence, and the command line that does what it says; "" if none does."""

    sentence: str
    command: str


def advise(subject: Subject, known: Known | None = None) -> list[Advice]:
    """Returns what the rules of `ADVICE` say. A command stands in the first row that it belongs to.

    ``known``: None before a validation.
    """
    found: list[Advice] = []
    for rule in ADVICE:
        advice = rule(subject, known)
        if advice is not None:
            is_repeated = any(advice.command == row.command for row in found)
            found.append(advice._replace(command="") if is_repeated else advice)
    return found


def _labels(subject: Subject, known: Known | None) -> Advice | None:
    sentences = []
    if known is not None and known.unlabeled:
        images = counted(known.unlabeled, "image")
        sentences.append(
            f"Label {images} without a label file in which the model finds objects, or add an empty file for each."
        )
    if known is not None and known.label_errors:
        sentences.append(f"Check {counted(known.label_errors, 'label')} that the model contradicts, below.")
    return Advice(" ".join(sentences), _check_command(subject)) if sentences else None


def _random_weights(subject: Subject, _: Known | None) -> Advice | None:
    run = subject.config
    train = subject.train
    if not isinstance(run, TrainConfig) or run.weights or run.data == DEMO or train is None:
        return None
    if len(train) >= MANY_IMAGES:
        return None
    reason = f"on {counted(len(train), 'image')}, pretrained ones give more than random ones, in fewer epochs"
    return Advice(f"Start from weights: {reason}.", _train_command(subject, weights="yolox_s", model=""))


def _small_boxes(subject: Subject, _: Known | None) -> Advice | None:
    if subject.train is None:
        return None
    text, imgsz = small_boxes(subject.train, imgsz=subject.config.imgsz, stride=subject.stride)
    command = _train_command(subject, imgsz=imgsz) if imgsz else ""
    return Advice(f"Use larger images: {text}.", command) if text else None


def small_boxes(train: DatasetIndex, *, imgsz: int, stride: int) -> tuple[str, int]:
    """Describes that half of the boxes are too small for most models at ``imgsz``, with the remedy: larger images, or
    (smaller) tiles; "" if they are not.

    Also returns the smallest multiple of ``stride`` at which the median side reaches `SMALL_PX`; 0 if it is too large.
    """
    sides = np.sqrt(train.sides_at(imgsz).prod(1))
    median = float(np.median(sides)) if sides.size else math.inf
    if median >= SMALL_PX:
        return "", 0
    larger = math.ceil(imgsz * SMALL_PX / median / stride) * stride
    remedies = []
    if larger <= LARGEST_ADVISED:
        remedies.append(f"use --imgsz {larger} or more")
    if train.tile:
        tile = max(int(train.tile * median / SMALL_PX // stride), 1) * stride
        remedies.append(f"use smaller tiles ('tile: {tile}' in the data set's YAML)")
    else:
        tile = imgsz if remedies else 640
        remedies.append(f"cut large images into tiles ('tile: {tile}' in the data set's YAML)")
    text = f"half of the boxes have sides below {median:.3g} px at --imgsz {imgsz}, too small for most models"
    return f"{text}; {', or '.join(remedies)}", larger if larger <= LARGEST_ADVISED else 0


def _few_steps(subject: Subject, _: Known | None) -> Advice | None:
    run = subject.config
    if not isinstance(run, TrainConfig) or run.time or not subject.batches:
        return None
    steps = step_plan(run, subject.batches)
    enough = ENOUGH_STEPS_FROM_WEIGHTS if run.weights else ENOUGH_STEPS
    if steps.total >= ABOUT * enough:
        return None
    epochs = -(-enough // steps.per_epoch)
    kind = "Fine-tuning" if run.weights else "Training from random weights"
    length = counted(steps.total, "step")
    sentence = f"Train longer: the run has only {length}. {kind} needs about {enough}: --epochs {epochs}."
    return Advice(sentence, _train_command(subject, epochs=epochs))


def _largest_error(subject: Subject, known: Known | None) -> Advice | None:
    cost = np.zeros(1) if known is None else np.nan_to_num(known.errors.cost)
    if cost.max() < MIN_COST:
        return None
    kind = int(cost.argmax())
    command = _check_command(subject)
    if kind == MISSED:
        imgsz = 2 * subject.config.imgsz
        is_known = _few_steps(subject, known) or _small_boxes(subject, known)  # their commands come first
        command = "" if is_known or imgsz > LARGEST_ADVISED else _train_command(subject, imgsz=imgsz)
    return Advice(f"Against the largest error: {AGAINST_ERRORS[kind]}.", command)


ADVICE = (_labels, _random_weights, _small_boxes, _few_steps, _largest_error)


def _train_command(subject: Subject, **changes: Any) -> str:
    """Returns the command line that has begun the run, with other settings: it begins a new one. "" if the subject is
    no run."""
    run = subject.command or subject.config
    if not isinstance(run, TrainConfig):
        return ""
    settings = {"data": run.data} | changed_settings(run) | changes
    for name in ("resume", "exist_ok"):
        settings.pop(name, None)
    words = words_of_settings({name: value for name, value in settings.items() if name not in changes or value != ""})
    words = ["--set" if word == "--override" else word for word in words]
    return f"{typed_command('train')} {shlex.join(words)}"


def _check_command(subject: Subject) -> str:
    weights = subject.config.weights
    if isinstance(subject.config, TrainConfig):
        weights = str(subject.folder / ("best.pt" if subject.best_epoch > 0 else "last.pt"))
    split = "train" if subject.is_held_out else subject.split  # as the data set names it
    words = [subject.config.data, "--split", split, "--weights", weights]
    return f"{typed_command('check')} {shlex.join(words)}"
