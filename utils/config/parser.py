"""Builds the dataclasses of `utils.config.settings` from command lines and hyper-parameter files, and checks classes
and image sizes against what a model or a data set has."""

from __future__ import annotations

import dataclasses
import operator
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from utils.config.flags import build_parser, command_of, flag_actions, flag_name, given_values, required
from utils.config.settings import MAX_IMGSZ, Hyperparameters
from utils.config.yaml_files import load_yaml, parse_override
from utils.errors import Mistakes, UserError, all_mistakes
from utils.files.folders import CONFIGS
from utils.files.schema import DataclassT, build, suggestion


def _others() -> ModuleType:
    """Imports the translation of YOLOv5's and Ultralytics' flags, which most runs do not need."""
    from utils.config import other_programs

    return other_programs


def parse_config(cls: type[DataclassT], argv: Sequence[str] | None, description: str) -> DataclassT:
    """Parses a command line, also of YOLOv5. Raises UserError with what to write instead of a mistake."""
    build_parser(cls).description = description
    with all_mistakes() as mistakes:
        given, values, lines = _read(cls, argv, mistakes)
        if missing := [flag_name(name) for name in required(cls) if name not in values]:
            mistakes.add(f"the following arguments are required: {', '.join(missing)}")
    uses = Counter(action.dest for word in given if (action := flag_actions(cls).get(word.partition("=")[0])))
    several = [name for name, count in uses.items() if count > 1 and name != "override"]
    if lines := [*lines, *(f"{flag_name(name)}: given several times; used: {values[name]}" for name in several)]:
        from utils.logger import log_when_configured  # with logging, which --help does without

        log_when_configured(*lines)
    return cls(**values)


def given_flags(cls: type, argv: Sequence[str] | None) -> set[str]:
    """Returns the names of the fields that the command line sets explicitly."""
    with all_mistakes() as mistakes:
        _, values, _ = _read(cls, argv, mistakes)
    return set(values)


def _read(cls: type, argv: Sequence[str] | None, mistakes: Mistakes) -> tuple[list[str], dict[str, Any], list[str]]:
    """Translates and parses a command line. Returns it in flags of ``cls``, the values that it sets, and lines for the
    log."""
    words = sys.argv[1:] if argv is None else argv
    split = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words]
    given = [flag.replace("_", "-") + separator + value for flag, separator, value in split]
    if given and not given[0].startswith("-"):  # as in the yolo command
        raise UserError(f"{given[0]}: settings are flags here, such as --epochs 3; see docs/migration.md")
    of_our_flags = Mistakes()
    values = given_values(cls, given, of_our_flags)
    if not of_our_flags:
        return given, values, []
    # It has flags or values of another program, or mistakes.
    translated, lines = _others().translate_command_line(command_of(cls), given, mistakes)
    return translated, given_values(cls, translated, mistakes), lines


def hyperparameters_from(
    path: str, overrides: Sequence[str] = (), lines: list[str] | None = None, *, base: Hyperparameters | None = None
) -> Hyperparameters:
    """Reads the YAML at ``path`` ("": no values) over ``base`` (None: the defaults) and applies `with_overrides`.
    ``lines`` receives a line for the log that names what has no effect."""
    values = load_yaml(path) if path else {}
    if isinstance(values, dict) and not values.keys() <= {f.name for f in dataclasses.fields(Hyperparameters)}:
        values, unused = _others().translate_recipe(values, path)
        if unused and lines is not None:
            lines.append(f"{path}: without effect here: {', '.join(unused)}")
    return with_overrides(_changed(base or Hyperparameters(), values, path or "hyper-parameters"), overrides)


def with_overrides(hyp: Hyperparameters, overrides: Sequence[str]) -> Hyperparameters:
    """Returns ``hyp`` with each ``key=value`` of ``overrides`` replaced; values are parsed as YAML."""
    return _changed(hyp, dict(map(parse_override, overrides)), "--set")


def _changed(hyp: Hyperparameters, values: Any, where: str) -> Hyperparameters:
    """Returns ``hyp`` with ``values``, which are checked first. Errors begin with ``where``."""
    checked = build(Hyperparameters, values, where, unknown_hyperparameter)
    return dataclasses.replace(hyp, **{k: getattr(checked, k) for k in values or ()})


def unknown_hyperparameter(key: str) -> str:
    return _others().unknown_hyperparameter(key)


def read_recipe(
    hyp: str, overrides: Sequence[str] = (), *, pretrained: bool, keep_old: bool = False, lines: list[str] | None = None
) -> Hyperparameters:
    """Reads the recipe that ``--hyp`` names and applies ``key=value`` overrides. (The optimizer is chosen later, by the
    number of steps: `engine.optim.build.choose_optimizer`.)

    Args:
        hyp: "auto", the name of a recipe in configs/hyp, or a YAML file; what a file leaves out is as with "auto".
        pretrained, keep_old: whether the run starts from weights, and keeps their classes: what "auto" means.
    """
    usual = "keep_old" if keep_old else "finetune" if pretrained else "scratch"
    hyp = usual if hyp == "auto" else hyp
    recipes = {path.stem: path for path in sorted((CONFIGS / "hyp").glob("*.yaml"))}
    if hyp in recipes:
        return hyperparameters_from(str(recipes[hyp]), overrides)
    if not Path(hyp).suffix and not Path(hyp).exists():
        known = ", ".join(["auto", *recipes])
        raise UserError(f"--hyp {hyp}: no such recipe or file{suggestion(hyp, recipes)}; known: {known}")
    return hyperparameters_from(hyp, overrides, lines, base=hyperparameters_from(str(recipes[usual])))


def class_numbers(
    classes: Iterable[int | str], names: Mapping[int, str], owner: str, flag: str = "--classes"
) -> tuple[int, ...]:
    """Converts ``classes``, numbers or names, to numbers among ``names`` of ``owner`` ("the model").

    Raises TypeError for what is neither a number nor a name, UserError for a class that is not among ``names``.
    """
    numbers = {name: number for number, name in names.items()}
    found = []
    for c in classes:
        if isinstance(c, str) and c not in numbers:
            hint = suggestion(c, numbers) or f"; its classes: {', '.join(numbers)}"
            raise UserError(f"{flag} {c}: {owner} has no class of this name{hint}")
        number = numbers[c] if isinstance(c, str) else operator.index(c)
        if number not in names:
            raise UserError(f"{flag} {number}: {owner} has classes 0 to {len(names) - 1}")
        found.append(number)
    return tuple(found)


def typed_classes(words: Iterable[str]) -> list[int | str]:
    """Converts the words after ``--classes`` to class numbers and names."""
    return [int(word) if re.fullmatch("-?[0-9]{1,9}", word) else word for word in words]


def check_image_size(imgsz: int, stride: int, *, min_cells: int = 1, flag: str = "--imgsz") -> None:
    """Raises UserError unless ``imgsz``, the value of ``flag``, is a multiple of the model's largest ``stride``, at
    least ``min_cells`` times as large, and at most `MAX_IMGSZ`."""
    least = min_cells * stride
    below = max(imgsz // stride * stride, least)
    if imgsz < least:
        raise UserError(f"{flag} {imgsz}: too small for the model's stride {stride}; use {least} or more")
    if imgsz > MAX_IMGSZ:
        raise UserError(f"{flag} {imgsz}: too large; use {MAX_IMGSZ // stride * stride} or less")
    if imgsz % stride:
        raise UserError(
            f"{flag} {imgsz}: not a multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
