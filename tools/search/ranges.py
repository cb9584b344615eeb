"""What a search varies: YAML files with hyper-parameters and their ranges (``configs/search``).

lr0: [0.001, 0.03, log]      # from, to; with log, each factor of the range is equally likely
degrees: [0, 10]             # integers if the hyper-parameter is one, else floats
mosaic: {choice: [0, 0.5, 1]}
fliplr: 0.5                  # fixed, as in a recipe
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna

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
class Range:
    name: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_int: bool = False
    choices: tuple[Scalar, ...] = ()

    def suggest(self, trial: optuna.Trial) -> Scalar:
        """The value of this trial, also if it was suggested before."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        if self.is_int:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.is_log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.is_log)

    def __contains__(self, value: Scalar) -> bool:
        if self.choices:
            return value in self.choices
        return value is not None and self.low <= value <= self.high

    def plain(self) -> list | dict[str, list]:
        """As a ranges file says it."""
        if self.choices:
            return {"choice": list(self.choices)}
        return [self.low, self.high, *(["log"] if self.is_log else [])]


@dataclass(frozen=True)
class Space:
    ranges: dict[str, Range]
    base: Hyperparameters
    usual: Hyperparameters = Hyperparameters()  # what a recipe that leaves them out means

    def suggest(self, trial: optuna.Trial) -> dict[str, Scalar]:
        return {name: each.suggest(trial) for name, each in self.ranges.items()}

    def known_values(self, epochs: int) -> dict[str, Scalar]:
        """The fixed recipe's own values, as far as the ranges contain them; for null, what it means in a run of this
        length."""
        own = asdict(self.base)
        effective = own | {name: closing_epochs(own[name], epochs) for name in ("close_mosaic", "close_scale")}
        return {n: value for n, each in self.ranges.items() for value in (effective[n], own[n]) if value in each}

    def recipe(self, values: dict[str, Scalar]) -> dict[str, Any]:
        """A recipe for --hyp: ``values`` of the searched hyper-parameters, and others that differ from the defaults."""
        defaults, usual = asdict(Hyperparameters()), asdict(self.usual)
        own = asdict(self.base) | values
        return {k: v for k, v in own.items() if v != defaults[k] or v != usual[k] or k in values}

    def plain(self) -> dict[str, Any]:
        """What must not change while a search goes on."""
        fixed = {f"hyper-parameter {k}": v for k, v in self.recipe({}).items() if k not in self.ranges}
        return {f"the range of {name}": each.plain() for name, each in self.ranges.items()} | fixed


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
    fields = {field.name: field for field in dataclasses.fields(Hyperparameters)}
    for name in values:
        if name not in fields:
            raise UserError(f"{path}: {unknown_hyperparameter(str(name))}")
    ranges = {
        name: _range(name, value, f"{path}: {name}")
        for name, value in values.items()
        # A list of mappings is a value of ``albumentations``.
        if isinstance(value, dict) or (isinstance(value, list) and not all(isinstance(item, dict) for item in value))
    }
    if not ranges:
        raise UserError(f"{path}: has no range to search, only single values; a range is {FORMAT}")
    usual = read_recipe("auto", pretrained=bool(config.weights), keep_old=config.keep_old)
    own = {k: v for k, v in values.items() if k not in ranges}
    fixed = build(Hyperparameters, asdict(usual) | own, str(path))
    base = with_overrides(fixed, config.override)
    for item in config.override:
        if (name := item.partition("=")[0].strip()) in ranges:
            raise UserError(f"--set {item}: {path} searches {name}; remove one")
    return Space(ranges, base, usual)


def _range(name: str, value: Any, where: str) -> Range:
    is_int = typing.get_type_hints(Hyperparameters)[name] in (int, int | None)
    if isinstance(value, dict):
        choices = value.get("choice")
        if set(value) != {"choice"} or not isinstance(choices, list) or len(choices) < 2:
            raise UserError(f"{where}: expected {{choice: [two or more values]}}, got {value!r}")
        if any(isinstance(item, list | dict) for item in choices):
            raise UserError(f"{where}: choices must be single values")
        return Range(name, choices=tuple(_checked(name, item, where) for item in choices))
    numbers, scale = value[:2], value[2:]
    if scale not in ([], ["log"]) or len(numbers) < 2:
        raise UserError(f"{where}: expected {FORMAT}, got {value!r}")
    low, high = (_checked(name, number, where) for number in numbers)
    if low is None or high is None:
        raise UserError(f"{where}: null has no place in a range; use {{choice: [null, ...]}}, got {value!r}")
    if not low < high:
        raise UserError(f"{where}: the range must begin below its end, got {value!r}")
    if scale and low <= 0:
        raise UserError(f"{where}: a range with log must begin above 0, got {value!r}")
    return Range(name, low, high, bool(scale), is_int)


def _checked(name: str, value: Any, where: str) -> Scalar:
    """As the hyper-parameter holds it. Raises UserError for a value that it cannot have."""
    found = getattr(build(Hyperparameters, {name: value}, where.removesuffix(f": {name}")), name)
    if isinstance(found, float) and math.isnan(found):
        raise UserError(f"{where}: must be a number, got {value!r}")
    return found


def values_text(values: dict[str, Any]) -> Iterator[str]:
    """``name=value`` with four significant digits."""
    for name, value in values.items():
        yield f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
