"""Look-ups in configs/other_programs.yaml, the table that translates command lines, hyper-parameter files and Python
names of YOLOv5 and Ultralytics.

A flag is a word of a command line, such as ``--noval`` (options.py). An argument is a name and a value
(arguments.py) from the yolo command (``plots=False``), a hyper-parameter file (hyperparameters.py) or a keyword of the
Python API.

Commands are named after their settings: "train" for `settings.TrainConfig`.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml

from utils.config.commands import COMMANDS
from utils.config.flags import flag_actions, flag_name, max_values
from utils.config.settings import HYPERPARAMETERS, Hyperparameters
from utils.program_folders import CONFIGS
from utils.schema import build

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class CommandTable:
    """Translations for one command. Values of arguments are regular expressions that match `normalized` text.

    Args:
        same_flags: flag -> the words that mean the same here.
        arguments_to_flags: argument -> value -> the words that mean the same here.
        default_arguments: argument -> the value that requests what the command does anyway, whatever its flags.
        ignored_arguments: arguments without a meaning for this command, whatever their value. Files of Ultralytics
            have them all; as flags, which somebody has typed, they are refused or without effect.
        without_effect: flag -> why it has no effect.
        refused: flag -> why it does not exist, and what to write instead.
        refused_values: our flag -> value -> why the flag does not take this value here.
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
    """A YOLOv5 hyper-parameter that does not exist here or means something else.

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
        other_tasks: suffix of a weights name ("seg") -> why the weights are not supported.
        defaults_if_true, defaults_if_false: arguments that request the default behavior with this value.
        other_meaning: argument -> what it means elsewhere; our flag of the same name means something else.
        flags_with_value: flags without effect that are followed by a value.
        synonyms: name of a hyper-parameter -> its name here.
        modes: mode of the yolo command -> command.
        only_in_yolov5: keys that occur only in YOLOv5's hyper-parameter files.
        hyperparameters_of_yolov5: by name.
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
    modes: dict[str, str]
    only_in_yolov5: list[str]
    hyperparameters_of_yolov5: dict[str, YoloV5Hyperparameter]
    commands: dict[str, CommandTable]
    python: dict[str, dict[str, str]]


@functools.cache
def table() -> Table:
    """Reads configs/other_programs.yaml."""
    path = CONFIGS / "other_programs.yaml"
    values = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return build(Table, values, path.name)


def table_of(command: str) -> CommandTable:
    """Returns the translations for a command; empty for a command that no other program has."""
    return table().commands.get(command) or CommandTable()


def actions_of(command: str) -> dict[str, argparse.Action]:
    """Returns the argparse actions by flag of ours, including aliases."""
    return flag_actions(COMMANDS[command].settings)


def is_flag(word: str) -> bool:
    """Returns whether a word of a command line is a flag. Negative numbers are not."""
    return re.match(r"-[^\d.]", word) is not None


def equivalent_words(command: str, flag: str) -> list[str]:
    """Returns our words for a ``flag`` of another program, or ``flag`` itself if it is not in the table."""
    ours = table_of(command).same_flags.get(flag)
    return ours.split() if ours else [flag]


def hyperparameters_of(command: str) -> tuple[str, ...]:
    """Returns the names of the hyper-parameters that the command takes: all or none."""
    return HYPERPARAMETERS if "--set" in actions_of(command) else ()


def owner_of(command: str, name: str) -> type[DataclassInstance]:
    """Returns the dataclass whose field is the setting or hyper-parameter ``name`` of ``command``."""
    return Hyperparameters if name in hyperparameters_of(command) else COMMANDS[command].settings


def hyperparameter_of(command: str, name: str) -> str:
    """Returns our name of a hyper-parameter, or "" if the command takes none of this name."""
    name = table().synonyms.get(name, name)
    return name if name in hyperparameters_of(command) else ""


@dataclass(frozen=True)
class Meaning:
    """What the name of an argument means here; all fields are empty if neither this program nor the table has it.

    Args:
        hyperparameter: our name of the hyper-parameter.
        flag_words: our flag, with its value if the argument stands for one: ``--optimizer Adam`` for ``adam``.
        reason: why the command has neither.
    """

    hyperparameter: str = ""
    flag_words: Sequence[str] = ()
    reason: str = ""


def meaning_of(command: str, name: str) -> Meaning:
    """Looks up the name of an argument, ``batch_size`` or ``adam``, whatever its value is."""
    other_meaning = table().other_meaning.get(name)
    if other_meaning:
        return Meaning(reason=other_meaning)
    flag = flag_name(name)
    flag_words = equivalent_words(command, flag)
    hyperparameter = hyperparameter_of(command, name)
    if flag_words[0] in actions_of(command):
        return Meaning(hyperparameter, flag_words)
    return Meaning(hyperparameter, reason="" if hyperparameter else reason_for_refusal(command, flag))


def lists_argument(command: str, name: str) -> bool:
    """Returns whether the table translates some values of an argument."""
    command_table = table_of(command)
    by_value = (command_table.arguments_to_flags, command_table.default_arguments)
    return any(name in names for names in (*by_value, table().defaults_if_true, table().defaults_if_false))


def reason_for_refusal(command: str, flag: str) -> str:
    """Returns the reason why ``command`` has no ``flag``, or "" if the table has none."""
    command_table = table_of(command)
    return command_table.without_effect.get(flag) or command_table.refused.get(flag, "")


def max_typed_values(command: str, flag: str) -> int | None:
    """Returns how many words after a flag of ours or of another program are its values at most; None: any number. Flags
    that the table lacks, or translates with their value, take one."""
    our_words = equivalent_words(command, flag)
    our_flag = our_words[0]
    if len(our_words) > 1:  # --adam: the value is part of our words
        return 0
    if our_flag in table_of(command).without_effect:
        return 1 if our_flag in table().flags_with_value else 0
    action = actions_of(command).get(our_flag)
    return 1 if action is None else max_values(action)


def normalized(value: str) -> str:
    """Returns the value in lower case, a number in its shortest form, and an empty list as "none"."""
    try:
        return str(float(value)).removesuffix(".0")
    except ValueError:
        return "none" if value in ("[]", "()") else value.lower()


def python_hint(kind: str, name: str) -> str:
    """Returns what to write instead of ``name`` from the YOLOv5 or Ultralytics API, or "" if the table lacks it.
    ``kind``: "keyword", "package", "model", "result" or "argument"."""
    return table().python[kind].get(name, "")


def attribute_error(kind: str, owner: str, name: str) -> AttributeError:
    """Returns the error for a missing attribute, with what to write instead if other programs have the attribute.

    ``kind``: see `python_hint`. ``owner``: the object without the attribute, with an article.
    """
    message = f"{owner} has no attribute {name!r}"
    hint = "" if name.startswith("_") else python_hint(kind, name)
    if hint:
        message += f": {hint}"
    return AttributeError(message, name=name)


def other_task(weights: str) -> str:
    """Returns a message that weights such as ``yolov8n-seg.pt`` are not a detector's, or "" for other names."""
    match = re.fullmatch(rf"(yolo\w+)-({'|'.join(table().other_tasks)})(\.pt|\.ya?ml)?", weights)
    if match is None:
        return ""
    detector = match[1] + (match[3] or "")
    return f"{weights}: {table().other_tasks[match[2]]}; use {detector}"
