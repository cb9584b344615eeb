"""What a search varies: YAML files with hyper-parameters and their ranges (``configs/search``).

lr0: [0.001, 0.03, log]      # from, to; with log, each factor of the range is equally likely
degrees: [0, 10]             # integers if the hyper-parameter is one, else floats
mosaic: {choice: [0, 0.5, 1]}
fliplr: 0.5                  # fixed, as in a recipe
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optuna import Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from utils.config.parser import read_recipe, unknown_hyperparameter, with_overrides
from utils.config.search_settings import SearchConfig
from utils.config.settings import Hyperparameters, closing_epochs
from utils.config.yaml_files import load_yaml
from utils.errors import UserError
from utils.files.folders import CONFIGS
from utils.files.schema import build, suggestion

FORMAT = "[FROM, TO], [FROM, TO, log], {choice: [...]} or a single value"
Scalar = float | int | None


@dataclass(frozen=True)
class Space:
    ranges: dict[str, BaseDistribution]
    written: dict[str, Any]  # the ranges as the file has them
    base: Hyperparameters
    usual: Hyperparameters  # what a recipe that leaves them out means

    def suggest(self, trial: Trial) -> dict[str, Scalar]:
        """The values of this trial, also if they were suggested before."""
        return {name: _suggested(trial, name, each) for name, each in self.ranges.items()}

    def known_values(self, epochs: int) -> dict[str, Scalar]:
        """The fixed recipe's own values that are in the ranges; for null, what it means in a run of this length."""
        own = asdict(self.base)
        effective = own | {name: closing_epochs(own[name], epochs) for name in ("close_mosaic", "close_scale")}
        return {n: value for n, each in self.ranges.items() for value in (effective[n], own[n]) if _holds(each, value)}

    def recipe(self, values: dict[str, Scalar]) -> dict[str, Any]:
        """A recipe for --hyp: ``values`` of the searched hyper-parameters, and others that differ from the defaults."""
        defaults, usual = asdict(Hyperparameters()), asdict(self.usual)
        own = asdict(self.base) | values
        return {k: v for k, v in own.items() if v != defaults[k] or v != usual[k] or k in values}

    def plain(self) -> dict[str, Any]:
        """What must not change while a search goes on."""
        fixed = {f"hyper-parameter {k}": v for k, v in self.recipe({}).items() if k not in self.ranges}
        return {f"the range of {name}": value for name, value in self.written.items()} | fixed


def _suggested(trial: Trial, name: str, distribution: BaseDistribution) -> Scalar:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    suggest = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return suggest(name, distribution.low, distribution.high, log=distribution.log)


def _holds(distribution: BaseDistribution, value: Scalar) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    return value is not None and distribution.low <= value <= distribution.high


def read_space(config: SearchConfig) -> Space:
    """The ranges of ``--hyp``, over the recipe that train.py would use with the file's single values and --set."""
    known = {path.stem: path for path in sorted((CONFIGS / "search").glob("*.yaml"))}
    path = known.get(config.hyp, Path(config.hyp))
    if not path.suffix and not path.exists():
        raise UserError(f"--hyp {config.hyp}: no such ranges or file{suggestion(config.hyp, known)}; known: "
                        f"{', '.join(known)}")  # fmt: skip
    values = load_yaml(path)
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: must be 'hyper-parameter: range' lines; a range is {FORMAT}")
    written = {
        name: value
        for name, value in values.items()
        # A list of mappings is a value of ``albumentations``.
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(item, dict) for item in value))
    }
    if not written:
        raise UserError(f"{path}: has no range to search, only single values; a range is {FORMAT}")
    usual = read_recipe("auto", pretrained=bool(config.weights), keep_old=config.keep_old)
    own = {k: v for k, v in values.items() if k not in written}
    fixed = build(Hyperparameters, asdict(usual) | own, str(path), unknown_hyperparameter)
    ranges = {name: _distribution(name, value, str(path)) for name, value in written.items()}
    base = with_overrides(fixed, config.override)
    for item in config.override:
        if (name := item.partition("=")[0].strip()) in ranges:
            raise UserError(f"--set {item}: {path} searches {name}; remove one")
    return Space(ranges, written, base, usual)


def _distribution(name: str, value: Any, path: str) -> BaseDistribution:
    def checked(item: Any) -> Scalar:
        """As the hyper-parameter holds it."""
        return getattr(build(Hyperparameters, {name: item}, path, unknown_hyperparameter), name)

    is_int = typing.get_type_hints(Hyperparameters).get(name) in (int, int | None)
    try:
        match value:
            case {"choice": [_, _, *_] as choices, **rest} if not rest and name != "albumentations":
                return CategoricalDistribution([checked(item) for item in choices])
            case [low, high] | [low, high, "log"] if None not in value:
                kind = IntDistribution if is_int else FloatDistribution
                return kind(checked(low), checked(high), log=len(value) == 3)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {name}: {error}") from None
    raise UserError(f"{path}: {name}: expected {FORMAT}, got {value!r}")


def values_text(values: dict[str, Any]) -> Iterator[str]:
    """``name=value`` with four significant digits."""
    for name, value in values.items():
        yield f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
