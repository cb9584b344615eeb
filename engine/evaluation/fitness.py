"""The fitness of an epoch: the one number that decides which epoch is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.evaluation.metrics import METRICS
from utils.errors import UserError
from utils.files.schema import suggestion
from utils.structures import EvalResult, GroundTruth

CLASS_METRIC = "AP"  # of a class that is named without a metric


@dataclass(frozen=True)
class Fitness:
    """A metric of all classes, or of one."""

    metric: str  # a name of `METRICS`
    name: str  # of the metric and the class, for readers
    class_index: int | None = None

    @classmethod
    def parse(cls, text: str, names: Sequence[str]) -> Fitness:
        """``--fitness``: a metric, ``METRIC:CLASS``, or a class, which means its AP. Upper and lower case of metrics
        are the same. A class is a name, or its number.

        Raises UserError for a metric or a class that does not exist.
        """
        titles = {metric.name: "F1" if metric.name == "f1" else metric.name for metric in METRICS}
        metrics = {name.lower(): name for name in titles}
        if metric := metrics.get(text.lower()):
            return cls(metric, titles[metric])
        kind, _, wanted = text.partition(":")
        metric = metrics.get(kind.lower()) if wanted and text not in names else None
        if metric is None:
            metric, wanted = CLASS_METRIC, text
            if text not in names:
                hint = suggestion(text, [*titles.values(), *names])
                known = ", ".join(titles.values())
                raise UserError(f"--fitness {text}: neither a metric ({known}) nor a class of the data set{hint}")
        index = _class_index(wanted, names)
        if index is None:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise UserError(
                f"--fitness {text}: no class '{wanted}'{suggestion(wanted, names)}; the classes are {shown}"
            )
        return cls(metric, f"{titles[metric]}:{names[index]}", index)

    @property
    def column(self) -> str:
        """Its name in results.csv."""
        return f"metrics/{self.metric}" if self.class_index is None else f"metrics/{self.name}"

    def of(self, result: EvalResult) -> float:
        """nan if there is nothing to score."""
        if self.class_index is None:
            return result.metrics[self.metric]
        return float(result.class_metrics[self.metric][self.class_index])

    def check_objects(self, truth: GroundTruth) -> None:
        """Raises UserError if the validation split has no object of the class, so that no epoch could be the best."""
        if self.class_index is not None and not (~truth.crowd & (truth.classes == self.class_index)).any():
            raise UserError(f"--fitness {self.name}: the validation images have no object of this class to score")


def _class_index(wanted: str, names: Sequence[str]) -> int | None:
    """The class of this name or, unless there is one, of this number."""
    if wanted in names:
        return list(names).index(wanted)
    return int(wanted) if wanted.isascii() and wanted.isdecimal() and int(wanted) < len(names) else None
