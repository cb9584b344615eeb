"""Reads the ranges of a search: YAML files with hyper-parameters and their ranges (``configs/search``).

lr_factor: [0.3, 3, log]     # from, to; with log, the logarithm is uniform
degrees: [0, 10]             # integers if the hyper-parameter is one, else floats
mosaic: {choice: [0, 0.5, 1]}
fliplr: 0.5                  # fixed, as in a recipe
"""

from __future__ import annotations

import shlex
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optuna import Trial
from optuna.distributions import CategoricalChoiceType as Scalar
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from utils.config.epochs import closing_epochs
from utils.config.recipes import read_recipe, unknown_key, with_overrides
from utils.config.settings import Hyperparameters
from utils.config.tool_settings import SearchConfig
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.program_folders import CONFIGS
from utils.schema import build, suggestion

RANGE_SYNTAX = "[FROM, TO], [FROM, TO, log], {choice: [...]} or a single value"
Distribution = CategoricalDistribution | FloatDistribution | IntDistribution


@dataclass(frozen=True)
class Space:
    """The hyper-parameters of a search: their ranges, and the values of the others."""

    ranges: dict[str, Distribution]
    written: dict[str, Any]  # the ranges as written in the file
    base: Hyperparameters  # the recipe without ranges: the file's single values and --set
    train_defaults: Hyperparameters  # the values that train.py uses for hyper-parameters that a recipe omits
    epochs: int  # of each training, on which the meaning of a null depends

    def suggest(self, trial: Trial) -> dict[str, Scalar]:
        """Returns the values for ``trial``, the same in repeated calls."""
        return {name: _suggested(trial, name, distribution) for name, distribution in self.ranges.items()}

    def baseline_values(self) -> dict[str, Scalar]:
        """Returns the base recipe's values that are in the ranges.

        A null that is not a choice of its range is replaced by its meaning in a run of ``epochs``.
        """
        base = asdict(self.base)
        effective = base | {name: closing_epochs(base[name], self.epochs) for name in ("close_mosaic", "close_scale")}
        known: dict[str, Scalar] = {}
        for name, distribution in self.ranges.items():
            for value in (effective[name], base[name]):  # the recipe's own value wins if both are in the range
                if _contains(distribution, value):
                    known[name] = value
        return known

    def recipe(self, values: dict[str, Scalar]) -> dict[str, Any]:
        """Returns a recipe for --hyp: ``values`` of the searched hyper-parameters, and other non-default values."""
        defaults = asdict(Hyperparameters())
        train_defaults = asdict(self.train_defaults)
        recipe = asdict(self.base) | values
        return {
            name: value
            for name, value in recipe.items()
            if value != defaults[name] or value != train_defaults[name] or name in values
        }

    def is_baseline(self, values: dict[str, Scalar]) -> bool:
        """Returns whether ``values``, of all ranges, are those of the base recipe."""
        return values == self.baseline_values()

    def to_dict(self) -> dict[str, Any]:
        """Returns the ranges and the fixed hyper-parameters, which must not change while a search continues."""
        content = {f"the range of {name}": value for name, value in self.written.items()}
        for name, value in self.recipe({}).items():
            if name not in self.ranges:
                content[f"hyper-parameter {name}"] = value
        return content


def _is_range(value: Any) -> bool:
    """Returns whether a value of the YAML file is a range. A list of mappings is no range, but a value of
    ``albumentations``."""
    if isinstance(value, list):
        return not all(isinstance(item, dict) for item in value)
    return isinstance(value, dict)


def _suggested(trial: Trial, name: str, distribution: Distribution) -> Scalar:
    """Returns the value of a hyper-parameter in this trial."""
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(name, distribution.low, distribution.high, log=distribution.log)
    return trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)


def _contains(distribution: Distribution, value: Scalar) -> bool:
    """Returns whether ``distribution`` can draw ``value``."""
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    return isinstance(value, (int, float)) and distribution.low <= value <= distribution.high


def read_space(config: SearchConfig) -> Space:
    """Reads the ranges of ``--hyp``, on top of the recipe that train.py would use with its single values and --set.

    Raises UserError.
    """
    known = {path.stem: path for path in sorted((CONFIGS / "search").glob("*.yaml"))}
    path = known.get(config.hyp, Path(config.hyp))
    if not config.hyp or (not path.suffix and not path.exists()):
        hint = suggestion(config.hyp, known)
        raise UserError(f"--hyp {shlex.quote(config.hyp)}: no such ranges or file{hint}; known: {', '.join(known)}")
    values = load_yaml(path)
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: must be 'hyper-parameter: range' lines; a range is {RANGE_SYNTAX}")
    written = {name: value for name, value in values.items() if _is_range(value)}
    if not written:
        raise UserError(f"{path}: has no range to search, only single values; a range is {RANGE_SYNTAX}")
    train_defaults = read_recipe("auto", pretrained=bool(config.weights), keep_old=config.keep_old)
    single_values = {name: value for name, value in values.items() if name not in written}
    fixed = build(Hyperparameters, asdict(train_defaults) | single_values, str(path), unknown_key)
    ranges = {name: _distribution(name, value, str(path)) for name, value in written.items()}
    base = with_overrides(fixed, config.override)
    for item in config.override:
        name = item.partition("=")[0].strip()
        if name in ranges:
            raise UserError(f"--set {item}: {path} searches {name}; remove one")
    return Space(ranges, written, base, train_defaults, config.epochs)


def _distribution(name: str, value: Any, path: str) -> Distribution:
    """Builds the distribution for the range ``value`` of a hyper-parameter. Raises UserError."""

    def checked(item: Any) -> Any:
        """Returns ``item`` converted to the type of the hyper-parameter. Raises UserError."""
        return getattr(build(Hyperparameters, {name: item}, path, unknown_key), name)

    def interval(low: Any, high: Any, *, log: bool = False) -> IntDistribution | FloatDistribution:
        """Builds the distribution from ``low`` to ``high``. Raises UserError."""
        start = checked(low)
        end = checked(high)
        if start > end:
            raise UserError(f"{path}: {name}: the range ends at {end}, below its start {start}")
        if log and start <= 0:
            raise UserError(f"{path}: {name}: a range with log must start above 0, not at {start}")
        return interval_type(start, end, log=log)

    is_int = typing.get_type_hints(Hyperparameters).get(name) in (int, int | None)
    interval_type = IntDistribution if is_int else FloatDistribution
    try:
        match value:
            case {"choice": [*choices]} if len(value) == 1 and len(choices) > 1 and name != "albumentations":
                return CategoricalDistribution([checked(item) for item in choices])
            case [low, high] if None not in value:
                return interval(low, high)
            case [low, high, "log"] if None not in value:
                return interval(low, high, log=True)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {name}: {error}") from None
    raise UserError(f"{path}: {name}: expected {RANGE_SYNTAX}, got {value!r}")


def values_text(values: dict[str, Any]) -> Iterator[str]:
    """Yields ``name=value`` with four significant digits."""
    for name, value in values.items():
        yield f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
