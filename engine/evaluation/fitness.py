"""The fitness: the score that decides which epoch of a run is the best (``--fitness``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.evaluation.metrics import METRICS
from engine.evaluation.result import EvalResult
from utils.class_names import class_numbers
from utils.errors import UserError
from utils.labels import GroundTruth
from utils.schema import suggestion


@dataclass(frozen=True)
class Fitness:
    """The number that decides which epoch is the best: a metric of all classes, or of one."""

    metric: str  # a name of `METRICS`
    name: str  # for display: the metric and the class
    class_index: int | None = None  # None: all classes

    @classmethod
    def parse(cls, value: str, names: Sequence[str]) -> Fitness:
        """Parses ``--fitness``: a metric in any case, ``METRIC:CLASS``, or the name of a class, which means its AP.
        After ``METRIC:``, a class is given by name or number. Raises UserError for a metric or a class that does not
        exist."""
        titles = {metric.name: metric.title for metric in METRICS}
        metrics = {name.lower(): name for name in titles}
        metric = metrics.get(value.lower())
        if metric is not None:
            return cls(metric, titles[metric])
        prefix, _, class_name = value.partition(":")
        if value in names:  # alone, digits are never a number
            metric = "AP"
            index = names.index(value)
        elif class_name and prefix.lower() in metrics:
            metric = metrics[prefix.lower()]
            (index,) = class_numbers([class_name], dict(enumerate(names)), "the data set", flag="--fitness")
        else:
            hint = suggestion(value, [*titles.values(), *names])
            known = ", ".join(titles.values())
            raise UserError(f"--fitness {value}: neither a metric ({known}) nor a class of the data set{hint}")
        return cls(metric, f"{titles[metric]}:{names[index]}", index)

    @property
    def column(self) -> str:
        """Name of the column in results.csv."""
        return f"metrics/{self.metric if self.class_index is None else self.name}"

    def score_of(self, result: EvalResult) -> float:
        """Returns the fitness of ``result``; nan if there is nothing to score."""
        if self.class_index is None:
            return result.metrics[self.metric]
        return float(result.class_metrics[self.metric][self.class_index])

    def check_objects(self, truth: GroundTruth) -> None:
        """Raises UserError if the validation split has no object of the class, so that no epoch could be the best."""
        if self.class_index is not None and not (~truth.crowd & (truth.classes == self.class_index)).any():
            raise UserError(f"--fitness {self.name}: the validation images have no object of this class to score")
