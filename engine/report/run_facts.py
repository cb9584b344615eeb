"""The facts of a report's summary: the numbers from which its sentences follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.evaluation.analysis import ErrorSplit
from engine.evaluation.metrics import nanmean
from engine.evaluation.result import EvalResult
from engine.report.census import Census, CensusSection
from engine.report.subject import Subject
from engine.report.validation import ValidationSections
from utils.config.settings import Hyperparameters
from utils.files.results_csv import CONFIDENCE_COLUMN
from utils.mirrored_classes import mirrored_classes

RISING_AP = 0.005  # smallest rise that more epochs may continue
FALLING_AP = 0.02  # smallest fall since the best epoch that is mentioned
FEW_OBJECTS = 100  # with fewer in the validation split, changes of AP may be chance
SIGNIFICANT_FRACTION = 0.975  # of the draws of the images, as in a two-sided interval of 95 %
MIN_IMAGES = 10  # with fewer images, draws do not show the range of chance


@dataclass(frozen=True)
class RunFacts:
    """Input of the rules of advice.py; None or empty where it is unknown."""

    subject: Subject
    history: dict[str, np.ndarray]  # columns of results.csv, float (epochs,)
    train: Census | None
    data: Census | None = None  # the training census if there is one, else the validation census
    result: EvalResult | None = None
    errors: ErrorSplit | None = None
    suspects: int = 0  # probable label errors
    backgrounds: int = 0  # images without objects that have detections
    last: Path = Path("last.pt")  # the checkpoint that continues the run
    # AP of each class on draws of the images, float64 (S, C), by epoch; epochs of other processes are missing.
    ap_of_draws: Mapping[int, np.ndarray] = field(default_factory=dict)
    ignored: Sequence[str] = ()  # classes that the training images do not label, such as the old ones of --keep-old

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epochs at which a column of the history is known, and its values there."""
        values = self.history.get(name)
        if values is None:
            return np.zeros(0), np.zeros(0)
        known = np.isfinite(values)
        return self.history["epoch"][known], values[known]

    def best_row(self) -> dict[str, float] | None:
        """Returns the row of the history of the run's best epoch; None if there is none, or thresholds are unknown."""
        rows = np.flatnonzero(self.history.get("epoch", np.zeros(0)) == self.subject.best_epoch)
        if CONFIDENCE_COLUMN not in self.history or not rows.size:
            return None
        return {name: float(column[rows[0]]) for name, column in self.history.items()}

    @property
    def objects(self) -> int:
        """Number of labeled objects of the validation; 0 before it."""
        return 0 if self.result is None else int(self.result.class_targets.sum())

    @property
    def scored_result(self) -> EvalResult | None:
        """The result, if there are objects to score."""
        return self.result if self.objects else None

    def flipped_confusions(self) -> list[tuple[str, str, int, str]]:
        """Returns the confused pairs of classes that a flip of the training exchanges: both names, the number of
        objects mistaken for the other, and the flip. If the settings of the training are unknown, images were perhaps
        flipped horizontally, but not vertically."""
        if self.scored_result is None:
            return []
        names = self.subject.names
        hyp = self.subject.hyp or Hyperparameters()
        confused = []
        for flip in ("fliplr", "flipud"):
            for one, other in mirrored_classes(names, flip) if getattr(hyp, flip) else ():
                i, j = names.index(one), names.index(other)
                count = int(self.scored_result.confusion[[i, j], [j, i]].sum())
                if count:
                    confused.append((one, other, count, flip))
        return confused

    def interval_halfwidth(self, ap: float) -> float:
        """Returns half the width of the 95 % interval of an AP, as if it were the fraction of detected objects; 0 for
        many objects."""
        if not 0 < self.objects < FEW_OBJECTS:
            return 0.0
        return 1.96 * float(np.sqrt(ap * (1 - ap) / self.objects))

    def fitness_values(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epochs whose fitness is known and comparable, and the fitness.

        If an epoch before the run's best one has a higher fitness, the validation images or their size have changed
        between the two (`Progress.forget_best`); then only the best epoch and later ones are comparable.
        """
        epochs, values = self.column(self.subject.fitness.column)
        best_epoch = self.subject.best_epoch
        if best_epoch < 0:
            return np.zeros(0), np.zeros(0)
        is_earlier = epochs < best_epoch
        if (values[is_earlier] > values[epochs == best_epoch].max(initial=-np.inf)).any():
            return epochs[~is_earlier], values[~is_earlier]
        return epochs, values

    def is_rising(self) -> bool:
        """Returns whether the best fitness of the last third exceeds the best before it by more than `RISING_AP`
        and chance."""
        _, values = self.fitness_values()
        third = values.size // 3
        if not third:
            return False
        newest = values.size - third + int(np.argmax(values[-third:]))
        before = int(np.argmax(values[:-third]))
        return self._is_significantly_higher(newest, before, margin=RISING_AP)

    def has_fallen(self) -> bool:
        """Returns whether the best fitness exceeds the newest by more than `FALLING_AP` and chance."""
        _, values = self.fitness_values()
        return self._is_significantly_higher(int(np.argmax(values)), len(values) - 1, margin=FALLING_AP)

    def _is_significantly_higher(self, high: int, low: int, *, margin: float) -> bool:
        """Returns whether the fitness in row ``high`` of `fitness_values` exceeds that in row ``low`` by more than
        ``margin`` and chance.

        Both are scored on the same images, so the difficulty of the images cancels: the difference is not chance if the
        AP is higher on `SIGNIFICANT_FRACTION` of the draws of these images. If draws are unknown, or the fitness is not
        an AP, the interval of one AP decides.
        """
        epochs, values = self.fitness_values()
        difference = float(values[high] - values[low])
        if difference <= margin:
            return False
        high_draws = self.ap_of_draws.get(int(epochs[high]))
        low_draws = self.ap_of_draws.get(int(epochs[low]))
        has_enough_images = self.result is not None and self.result.num_images >= MIN_IMAGES
        is_ap = self.subject.fitness.metric == "AP"
        if is_ap and has_enough_images and high_draws is not None and low_draws is not None:
            is_higher = self._fitness_of_draws(high_draws) > self._fitness_of_draws(low_draws)
            return bool(np.mean(is_higher) >= SIGNIFICANT_FRACTION)
        return difference > self.interval_halfwidth(float(values[high]))

    def _fitness_of_draws(self, ap: np.ndarray) -> np.ndarray:
        """Computes the fitness, an AP, on each draw: float64 (S,) from the AP of the classes (S, C)."""
        if self.subject.fitness.class_index is None:
            return nanmean(ap, axis=1)
        return ap[:, self.subject.fitness.class_index]

    def overfits(self) -> bool:
        """Returns whether, over the last third, the training loss falls and the validation loss rises by more than 2 %
        each."""
        columns = [name.removeprefix("train/") for name in self.history if name.startswith("train/")]
        shared = [name for name in columns if f"val/{name}" in self.history]
        if not shared:
            return False
        train = np.sum([self.history[f"train/{name}"] for name in shared], axis=0)
        val = np.sum([self.history[f"val/{name}"] for name in shared], axis=0)
        is_known = np.isfinite(train) & np.isfinite(val)
        train = train[is_known]
        val = val[is_known]
        third = len(train) // 3
        if third < 2:
            return False
        return bool(val[-1] > 1.02 * val[-third - 1] and train[-1] < 0.98 * train[-third - 1])


def collect_facts(
    subject: Subject,
    history: dict[str, np.ndarray],
    data: CensusSection,
    validation: ValidationSections | None,
    *,
    ap_of_draws: Mapping[int, np.ndarray],
    last: Path,
) -> RunFacts:
    """Collects the facts from the sections of a page. Arguments: see `RunFacts`."""
    train = next((split.index for split in subject.splits if split.name == "train"), None)
    facts = RunFacts(
        subject=subject,
        history=history,
        train=next((census for census in data.censuses if census.split == "train"), None),
        data=data.censuses[0],
        last=last,
        ap_of_draws=ap_of_draws,
        ignored=() if train is None else tuple(train.names_ignored_everywhere()),
    )
    if validation is None:
        return facts
    return replace(
        facts,
        result=validation.result,
        errors=validation.errors.split,
        suspects=len(validation.labels.issues),
        backgrounds=validation.worst.errors.backgrounds(),
    )
