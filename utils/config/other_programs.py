"""Translates command lines, hyper-parameter files and Python names of YOLOv5 and Ultralytics, by
configs/other_programs.yaml.

A flag is a word of a command line, such as ``--noval``. An argument is a name and a value: of the yolo command
(``plots=False``), of a hyper-parameter file, or a keyword of the Python API.

Commands are named as their settings are: "train" for `settings.TrainConfig`.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from utils.config.flags import flag_actions, flag_name, given_values, whole_number
from utils.config.search_settings import KfoldConfig, SearchConfig
from utils.config.settings import DetectConfig, ExportConfig, Hyperparameters, TrainConfig, ValConfig
from utils.config.yaml_files import parse_override
from utils.errors import Mistakes, UserError, all_mistakes, one_line
from utils.files.folders import CONFIGS
from utils.files.schema import build, suggestion

_IS_FLAG = re.compile(r"-[^\d.]").match  # negative numbers are not flags
_CONFIGS: dict[str, type] = {
    "train": TrainConfig,
    "val": ValConfig,
    "detect": DetectConfig,
    "export": ExportConfig,
    "kfold": KfoldConfig,
    "search": SearchConfig,
}
_MAX_SHOWN_CHARACTERS = 40  # of a value in the log
HYPERPARAMETERS = tuple(field.name for field in fields(Hyperparameters))


@dataclass(frozen=True)
class CommandTable:
    """Translations for one command. Values of arguments are regular expressions that match `_normalized` text.

    Args:
        same_flags: flag -> the words that mean the same here.
        arguments_to_flags: argument -> value -> the words that mean the same here; "{}" is the value.
        default_arguments: argument -> the value that asks for what is done here by default.
        ignored_arguments: arguments without a meaning for this command, whatever their value.
        without_effect: flag -> why it changes nothing.
        refused: flag -> why it does not exist, and what to write instead.
        refused_values: flag of ours -> value -> why it is not one of the flag's values here.
    """

    same_flags: dict[str, str] = field(default_factory=dict)
    arguments_to_flags: dict[str, dict[str, str]] = field(default_factory=dict)
    default_arguments: dict[str, str] = field(default_factory=dict)
    ignored_arguments: list[str] = field(default_factory=list)
    without_effect: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    refused_values: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class YoloV5Hyperparameter:
    """A hyper-parameter of YOLOv5 that does not exist here, or means something else.

    Args:
        default: regular expression of the values that have no effect.
        reason: why it is not supported.
    """

    default: str
    reason: str


@dataclass(frozen=True)
class Table:
    """The content of configs/other_programs.yaml.

    Args:
        reasons: texts that the file repeats.
        other_tasks: ending of a name of weights ("seg") -> why they are not supported.
        defaults_if_true, defaults_if_false: arguments that ask with this value for what is done here anyway.
        other_meaning: argument -> what it means elsewhere; our flag of this name means something else.
        flags_with_value: flags without effect that are followed by a value.
        synonyms: name of a hyper-parameter -> its name here.
        only_in_yolov5: keys that show that a hyper-parameter file is YOLOv5's.
        commands: by name.
        python: "keyword", "package", "model", "result" or "argument" -> name -> what to write instead.
    """

    reasons: dict[str, str]
    other_tasks: dict[str, str]
    defaults_if_true: list[str]
    defaults_if_false: list[str]
    other_meaning: dict[str, str]
    flags_with_value: list[str]
    synonyms: dict[str, str]
    only_in_yolov5: list[str]
    hyperparameters_of_yolov5: dict[str, YoloV5Hyperparameter]
    commands: dict[str, CommandTable]
    python: dict[str, dict[str, str]]


@functools.cache
def _table() -> Table:
    path = CONFIGS / "other_programs.yaml"
    values = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return build(Table, values, path.name)


def table_of(command: str) -> CommandTable:
    return _table().commands[command]


def actions_of(command: str) -> dict[str, argparse.Action]:
    """Returns the argparse action of each of our flags, by every name of the flag."""
    return flag_actions(_CONFIGS[command])


# Flags of command lines.


@dataclass(frozen=True)
class _Option:
    """The words of a command line from one flag to the next. Those before the first flag have the flag ""."""

    words: list[str]

    @property
    def flag(self) -> str:
        return self.words[0].partition("=")[0]

    @property
    def is_joined(self) -> bool:
        """Whether the first value follows the flag as in ``--flag=value``."""
        return "=" in self.words[0]

    @property
    def values(self) -> list[str]:
        following = self.words[1:]
        return [self.words[0].partition("=")[2], *following] if self.is_joined else following


def translate_command_line(command: str, arguments: Sequence[str], mistakes: Mistakes) -> tuple[list[str], list[str]]:
    """Returns the command line in our flags, and a line for the log about each flag that was left out as it changes
    nothing. Flags and values that the command does not have are noted, with what to write instead, and left out."""
    words: list[str] = []
    log_lines: list[str] = []
    before_flags, *options = _split_options(command, arguments)
    words += before_flags.values
    for option in options:
        if reason := table_of(command).without_effect.get(option.flag):
            log_lines.append(f"{option.flag}: {reason}")
            has_value = option.is_joined or option.flag in _table().flags_with_value
            words += option.values[1:] if has_value else option.values
        elif flags := _flags_of_option(command, option):
            words += flags
        elif refusal := _refusal(command, option):
            mistakes.add(refusal)
        else:
            words += option.words
    return words, log_lines


def _split_options(command: str, arguments: Sequence[str]) -> list[_Option]:
    """Splits a command line before each flag, and writes flags that have another name here by ours."""
    options = [_Option([""])]
    for argument in arguments:
        if not _IS_FLAG(argument):
            options[-1].words.append(argument)
            continue
        flag, separator, value = argument.partition("=")
        words = _same_flag(command, flag)
        words[-1] += separator + value
        options.append(_Option(words))
    return options


def _same_flag(command: str, flag: str) -> list[str]:
    """Returns our words for a ``flag`` of another program, or ``flag`` itself if it is not in the table."""
    ours = table_of(command).same_flags.get(flag)
    return ours.split() if ours else [flag]


def _flags_of_option(command: str, option: _Option) -> list[str]:
    """Returns our flags for a refused flag with its value, such as ``--tracker bytetrack.yaml``; empty if there are
    none."""
    name = option.flag.removeprefix("--").replace("-", "_")
    if option.flag not in table_of(command).refused or option.flag in actions_of(command) or not option.values:
        return []
    return _flags_of_known_value(command, name, option.values[0]) or []


def _refusal(command: str, option: _Option) -> str:
    """Says why the command does not take the option; "" if the table does not know a reason."""
    flag = option.flag
    if flag in actions_of(command):
        reasons = table_of(command).refused_values.get(flag, {})
        refused = [f"{value}: {reasons[value]}" for value in option.values if value in reasons]
        return f"{flag} {'; '.join(refused)}" if refused else ""
    if flag in table_of(command).refused:
        return f"{flag}: {table_of(command).refused[flag]}"
    hyperparameter = _hyperparameter(command, flag.removeprefix("--").replace("-", "_"))
    if hyperparameter and flag.startswith("--"):
        value = option.values[0] if option.values else "VALUE"
        return f"{flag}: is a hyper-parameter; write --set {shlex.quote(f'{hyperparameter}={value}')}"
    return ""


def _hyperparameter(command: str, name: str) -> str:
    """Returns our name of a hyper-parameter, or "" if it is unknown or the command takes no hyper-parameters."""
    name = _table().synonyms.get(name, name)
    return name if name in HYPERPARAMETERS and "--set" in actions_of(command) else ""


def reason(command: str, flag: str) -> str:
    """Returns why ``command`` has no ``flag``, or "" if the table does not say."""
    table = table_of(command)
    return table.without_effect.get(flag) or table.refused.get(flag, "")


# Arguments of the yolo command, which are also keywords of Python and lines of hyper-parameter files.


def flags_of_argument(command: str, name: str, value: str) -> list[str]:
    """Flags with the effect of ``name=value``; empty if none is needed. Raises UserError (why) if none exist."""
    normalized = _normalized(value)
    known_flags = _flags_of_known_value(command, name, value)
    if known_flags is not None:
        return known_flags
    hyperparameter = _hyperparameter(command, name)
    flag, *fixed_words = _same_flag(command, flag_name(name))
    action = None if name in _table().other_meaning else actions_of(command).get(flag)
    is_unset = normalized == "none" and (hyperparameter or action)
    if is_unset or (normalized == "true" and name in _table().defaults_if_true):
        return []
    if len(value.splitlines()) != 1:
        raise UserError("its value is empty or has several lines")
    if hyperparameter:
        return ["--set", f"{hyperparameter}={value}"]
    if action is None:
        _check_without_effect(command, name, normalized)
        return []
    if normalized in ("true", "false") and (fixed_words or _is_switch(action) or action.nargs == "?"):
        return _switched(flag, fixed_words, action, is_on=normalized == "true")
    if refusal := table_of(command).refused_values.get(flag, {}).get(normalized):
        raise UserError(refusal)
    first, *more = _words(value, action)
    return [f"{flag}={first}", *more] if first.startswith("-") else [flag, first, *more]


def _flags_of_known_value(command: str, name: str, value: str) -> list[str] | None:
    """Looks up the argument with this value in the command's table. Returns our flags, or None if it is not listed."""
    table = table_of(command)
    normalized = _normalized(value)
    if name in table.ignored_arguments:
        return []
    if name in table.default_arguments and re.fullmatch(table.default_arguments[name], normalized):
        return []
    for pattern, flags in table.arguments_to_flags.get(name, {}).items():
        if re.fullmatch(pattern, normalized):
            return flags.replace("{}", value).split()
    return None


def _check_without_effect(command: str, name: str, normalized: str) -> None:
    """Raises UserError (why; "" if unknown) unless an argument for which there is no flag changes nothing."""
    flag = flag_name(name)
    is_off = normalized in ("false", "none") and name in _table().defaults_if_false
    is_on_anyway = normalized == "true" and flag in table_of(command).without_effect
    if not is_off and not is_on_anyway:
        raise UserError(_table().other_meaning.get(name) or reason(command, flag))


def _is_switch(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _switched(flag: str, fixed_words: list[str], action: argparse.Action, *, is_on: bool) -> list[str]:
    """Returns the words that turn a flag on or off; none if it is off by default."""
    if is_on:
        return [flag, *fixed_words]
    is_off_by_default = not _is_switch(action) or action.default is False
    return [] if is_off_by_default else [f"--no-{flag.removeprefix('--')}"]


def _words(value: str, action: argparse.Action) -> list[str]:
    """Splits a value, or a list such as ``[0, 1]``, into words after a flag: one word unless the flag takes several."""
    takes_list = action.nargs == "+" and (action.type is whole_number or (action.dest == "classes" and "," in value))
    if not takes_list and not value.startswith(("[", "(")):
        matches = [choice for choice in action.choices or () if choice.lower() == value.lower()]
        return [matches[0] if matches else value]
    words = [word.strip("'\"") for word in re.split(r"[,\s]+", value.strip("[]() "))]
    if action.dest == "freeze" and len(words) == 1 and words[0] != value:
        return words * 2  # [3] is one layer, but a number alone means all layers before it
    if action.nargs == "+":
        return words
    if action.dest == "imgsz":  # height and width; images are square here
        return [max(words, key=lambda word: (len(word), word))]
    return [",".join(words)]


def _normalized(value: str) -> str:
    """Returns the value in lower case, a number in one way of writing, and an empty list as none."""
    try:
        return str(float(value)).removesuffix(".0")
    except ValueError:
        return "none" if value in ("[]", "()") else value.lower()


# Hyper-parameter files.


def translate_recipe(values: dict[Any, Any], location: str) -> tuple[dict[Any, Any], list[str]]:
    """Splits the ``values`` of a hyper-parameter file into those that exist here, and descriptions of the others.

    Raises UserError, which begins with ``location`` and names all lines without an equivalent, with reasons.
    """
    is_yolov5 = not values.keys().isdisjoint(_table().only_in_yolov5)
    kept: dict[Any, Any] = {}
    unused: list[str] = []
    problems: list[str] = []
    for key, value in values.items():
        shown = one_line(f"{key} {str(value)[:_MAX_SHOWN_CHARACTERS]}")
        other = _table().hyperparameters_of_yolov5.get(key) if is_yolov5 else None
        if other is not None:
            if re.fullmatch(other.default, _normalized(str(value))):
                unused.append(f"{shown} ({other.reason})")
            else:
                problems.append(f"'{key}': {other.reason}; remove it")
        elif key in HYPERPARAMETERS:
            kept[key] = value
        elif _has_effect(str(key), str(value)):
            problems.append(unknown_hyperparameter(str(key)))
        else:
            unused.append(shown)
    if problems:
        raise UserError(f"{location}: {'; '.join(problems)}")
    return kept, unused


def _has_effect(name: str, value: str) -> bool:
    """Returns whether an argument changes a training, or is unknown."""
    try:
        with all_mistakes() as mistakes:
            words, _ = translate_command_line("train", flags_of_argument("train", name, value), mistakes)
            settings = given_values(TrainConfig, words, mistakes)
        overrides = dict(parse_override(item) for item in settings.pop("override", ()))
        hyp = build(Hyperparameters, overrides, "--set")
    except UserError:
        return True
    return TrainConfig(**settings) != TrainConfig() or hyp != Hyperparameters()


def unknown_hyperparameter(key: str) -> str:
    """Says what ``key`` is instead of a hyper-parameter."""
    flag = flag_name(key)
    our_flag = _same_flag("train", flag)[0]
    if synonym := _table().synonyms.get(key):
        return f"unknown key '{key}' (did you mean '{synonym}'?)"
    if our_flag in actions_of("train"):
        return f"'{key}': is a flag, not a hyper-parameter; give it as {our_flag}"
    other = _table().hyperparameters_of_yolov5.get(key)
    why_unsupported = other.reason if other else reason("train", flag)
    if why_unsupported:
        return f"'{key}': {why_unsupported}; remove it"
    return f"unknown key '{key}'{suggestion(key, HYPERPARAMETERS)}"


# Names.


def python_hint(kind: str, name: str) -> str:
    """Returns what to write instead of ``name``, which programs for YOLOv5 and Ultralytics use; "" if it is unknown.
    ``kind``: "keyword", "package", "model", "result" or "argument"."""
    return _table().python[kind].get(name, "")


def other_task(weights: str) -> str:
    """Says that weights such as ``yolov8n-seg.pt`` are not of a detector; "" for other names."""
    match = re.fullmatch(rf"(yolo\w+)-({'|'.join(_table().other_tasks)})(\.pt|\.ya?ml)?", weights)
    if match is None:
        return ""
    detector = match[1] + (match[3] or "")
    return f"{weights}: {_table().other_tasks[match[2]]}; use {detector}"
