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
from typing import Any, Generic

from utils.config.flags import build_parser, command_of, flag_actions, flag_name, given_values, required
from utils.config.settings import MAX_IMGSZ, Hyperparameters
from utils.config.yaml_files import load_yaml, parse_override
from utils.errors import Mistakes, UserError, all_mistakes
from utils.files.program_folders import CONFIGS
from utils.schema import DataclassT, build, suggestion


@dataclasses.dataclass(frozen=True)
class ParsedCommand(Generic[DataclassT]):
    """A command line."""

    config: DataclassT  # its settings
    explicit_flags: frozenset[str]  # names of the settings that it gives


def parse_command(cls: type[DataclassT], argv: Sequence[str] | None, description: str) -> ParsedCommand[DataclassT]:
    """Parses a command line, also of YOLOv5. Raises UserError with what to write instead of a mistake."""
    build_parser(cls).description = description
    with all_mistakes() as mistakes:
        words, values, log_lines = _read(cls, argv, mistakes)
        missing = [flag_name(name) for name in required(cls) if name not in values]
        if missing:
            mistakes.add(f"the following arguments are required: {', '.join(missing)}")
    for name in _repeated_fields(cls, words):
        log_lines.append(f"{flag_name(name)}: given several times; used: {values[name]}")
    if log_lines:
        from utils.logger import log_when_configured  # with logging, which --help does without

        log_when_configured(*log_lines)
    return ParsedCommand(cls(**values), frozenset(values))


def parse_config(cls: type[DataclassT], argv: Sequence[str] | None, description: str) -> DataclassT:
    """Returns the settings of `parse_command`."""
    return parse_command(cls, argv, description).config


def _repeated_fields(cls: type, words: Sequence[str]) -> list[str]:
    """Returns the fields that a command line sets more than once. ``--set`` may be repeated."""
    actions = flag_actions(cls)
    flags = [word.partition("=")[0] for word in words]
    counts = Counter(actions[flag].dest for flag in flags if flag in actions)
    return [name for name, count in counts.items() if count > 1 and name != "override"]


def _read(cls: type, argv: Sequence[str] | None, mistakes: Mistakes) -> tuple[list[str], dict[str, Any], list[str]]:
    """Translates and parses a command line. Returns it in flags of ``cls``, the values that it sets, and lines for the
    log."""
    words = [_with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    if words and not words[0].startswith("-"):  # as in the yolo command
        raise UserError(f"{words[0]}: settings are flags here, such as --epochs 3; see docs/migration.md")
    untranslated = Mistakes()
    values = given_values(cls, words, untranslated)
    if not untranslated:
        return words, values, []
    # There are flags or values of another program, or mistakes. Most runs do not need their table.
    from utils.config.foreign_command_lines import translate_command_line

    words, log_lines = translate_command_line(command_of(cls), words, mistakes)
    return words, given_values(cls, words, mistakes), log_lines


def _with_dashes(word: str) -> str:
    """Writes the flag in ``--batch_size=8`` with dashes; other words stay as they are."""
    if not word.startswith("--"):
        return word
    flag, separator, value = word.partition("=")
    return flag.replace("_", "-") + separator + value


def hyperparameters_from(
    path: str, overrides: Sequence[str] = (), lines: list[str] | None = None, *, base: Hyperparameters | None = None
) -> Hyperparameters:
    """Reads the YAML at ``path`` ("": no values) over ``base`` (None: the defaults) and applies `with_overrides`.
    ``lines`` receives a line for the log that names what has no effect."""
    values = load_yaml(path) if path else {}
    if isinstance(values, dict) and not values.keys() <= {f.name for f in dataclasses.fields(Hyperparameters)}:
        from utils.config.foreign_recipes import translate_recipe

        values, unused = translate_recipe(values, path)
        if unused and lines is not None:
            lines.append(f"{path}: without effect here: {', '.join(unused)}")
    return with_overrides(_changed(base or Hyperparameters(), values, path or "hyper-parameters"), overrides)


def with_overrides(hyp: Hyperparameters, overrides: Sequence[str]) -> Hyperparameters:
    """Returns ``hyp`` with each ``key=value`` of ``overrides`` replaced; values are parsed as YAML."""
    return _changed(hyp, dict(map(parse_override, overrides)), "--set")


def _changed(hyp: Hyperparameters, values: Any, location: str) -> Hyperparameters:
    """Returns ``hyp`` with ``values``, which are checked first. Errors begin with ``location``."""
    checked = build(Hyperparameters, values, location, unknown_hyperparameter)
    return dataclasses.replace(hyp, **{k: getattr(checked, k) for k in values or ()})


def unknown_hyperparameter(key: str) -> str:
    """Says what ``key`` is instead of a hyper-parameter."""
    from utils.config import foreign_recipes

    return foreign_recipes.unknown_hyperparameter(key)


def read_recipe(
    hyp: str, overrides: Sequence[str] = (), *, pretrained: bool, keep_old: bool = False, lines: list[str] | None = None
) -> Hyperparameters:
    """Reads the recipe that ``--hyp`` names and applies ``key=value`` overrides. (The optimizer is chosen later, by the
    number of steps: `engine.optim.build.resolve_optimizer`.)

    Args:
        hyp: "auto", the name of a recipe in configs/hyp, or a YAML file; what a file leaves out is as with "auto".
        pretrained, keep_old: whether the run starts from weights, and keeps their classes: what "auto" means.
    """
    if keep_old:
        automatic = "keep_old"
    elif pretrained:
        automatic = "finetune"
    else:
        automatic = "scratch"
    recipes = {path.stem: path for path in sorted((CONFIGS / "hyp").glob("*.yaml"))}
    recipe = automatic if hyp == "auto" else hyp
    if recipe in recipes:
        return hyperparameters_from(str(recipes[recipe]), overrides)
    if not Path(hyp).suffix and not Path(hyp).exists():
        known = ", ".join(["auto", *recipes])
        raise UserError(f"--hyp {hyp}: no such recipe or file{suggestion(hyp, recipes)}; known: {known}")
    return hyperparameters_from(hyp, overrides, lines, base=hyperparameters_from(str(recipes[automatic])))


def class_numbers(
    classes: Iterable[int | str], names: Mapping[int, str], owner: str, flag: str = "--classes"
) -> tuple[int, ...]:
    """Converts ``classes``, numbers or names, to numbers among ``names`` of ``owner`` ("the model").

    Raises TypeError for what is neither a number nor a name, UserError for a class that is not among ``names``.
    """
    number_by_name = {name: number for number, name in names.items()}
    numbers: list[int] = []
    for c in classes:
        if isinstance(c, str) and c not in number_by_name:
            hint = suggestion(c, number_by_name) or f"; its classes: {', '.join(number_by_name)}"
            raise UserError(f"{flag} {c}: {owner} has no class of this name{hint}")
        number = number_by_name[c] if isinstance(c, str) else operator.index(c)
        if number not in names:
            raise UserError(f"{flag} {number}: {owner} has classes 0 to {len(names) - 1}")
        numbers.append(number)
    return tuple(numbers)


def typed_classes(words: Iterable[str]) -> list[int | str]:
    """Converts the words after ``--classes`` to class numbers and names."""
    return [int(word) if re.fullmatch("-?[0-9]{1,9}", word) else word for word in words]


def check_image_size(imgsz: int, stride: int, *, min_cells: int = 1, flag: str = "--imgsz") -> None:
    """Raises UserError unless ``imgsz``, the value of ``flag``, is a multiple of the model's largest ``stride``, at
    least ``min_cells`` times as large, and at most `MAX_IMGSZ`."""
    min_size = min_cells * stride
    below = max(imgsz // stride * stride, min_size)
    if imgsz < min_size:
        raise UserError(f"{flag} {imgsz}: too small for the model's stride {stride}; use {min_size} or more")
    if imgsz > MAX_IMGSZ:
        raise UserError(f"{flag} {imgsz}: too large; use {MAX_IMGSZ // stride * stride} or less")
    if imgsz % stride:
        raise UserError(
            f"{flag} {imgsz}: not a multiple of the model's stride {stride}; use {below} or {below + stride}"
        )
