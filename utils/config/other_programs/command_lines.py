"""Translates command lines of YOLOv5 and Ultralytics (`utils.config.other_programs.table`)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from utils.config.other_programs.table import (
    actions_of,
    flags_of_known_value,
    hyperparameter_of,
    same_flag,
    table,
    table_of,
)
from utils.errors import Mistakes

_IS_FLAG = re.compile(r"-[^\d.]").match  # negative numbers are not flags


@dataclass(frozen=True)
class _Option:
    """The words of a command line from one flag to the next. Words before the first flag have the flag ""."""

    words: list[str]

    @property
    def flag(self) -> str:
        return self.words[0].partition("=")[0]

    @property
    def is_joined(self) -> bool:
        """Whether the first value is joined to the flag, as in ``--flag=value``."""
        return "=" in self.words[0]

    @property
    def values(self) -> list[str]:
        following = self.words[1:]
        return [self.words[0].partition("=")[2], *following] if self.is_joined else following


def translate_command_line(command: str, arguments: Sequence[str], mistakes: Mistakes) -> tuple[list[str], list[str]]:
    """Returns the command line in our flags, and a log line for each flag that was dropped because it has no effect
    here. For train:

    | option | becomes | because |
    | --- | --- | --- |
    | ``--noval`` | ``--val-every 0`` | `same_flag`: it has another name here |
    | ``--quiet`` | nothing, and a log line | it has no effect |
    | ``--lr0 0.1`` | nothing, and a mistake that suggests ``--set lr0=0.1`` | `_refusal` |
    | ``--epochs 3`` | the same words | it is our flag, or not in the table |

    For detect, ``--tracker botsort.yaml`` becomes ``--track botsort``: the flag is refused, except with this value.
    """
    words: list[str] = []
    log_lines: list[str] = []
    before_flags, *options = _split_options(command, arguments)
    words += before_flags.values
    for option in options:
        reason = table_of(command).without_effect.get(option.flag)
        flags = _flags_of_option(command, option)
        refusal = _refusal(command, option)
        if reason:
            log_lines.append(f"{option.flag}: {reason}")
            words += _values_of_others(option)
        elif flags:
            words += flags
        elif refusal:
            mistakes.add(refusal)
        else:
            words += option.words
    return words, log_lines


def _values_of_others(option: _Option) -> list[str]:
    """Returns the words after a flag without effect that are not its value, so that the parser refuses them."""
    has_value = option.is_joined or option.flag in table().flags_with_value
    return option.values[1:] if has_value else option.values


def _split_options(command: str, arguments: Sequence[str]) -> list[_Option]:
    """Splits a command line before each flag, and replaces flags that have another name here with ours."""
    options = [_Option([""])]
    for argument in arguments:
        if not _IS_FLAG(argument):
            options[-1].words.append(argument)
            continue
        flag, separator, value = argument.partition("=")
        words = same_flag(command, flag)
        words[-1] += separator + value
        options.append(_Option(words))
    return options


def _flags_of_option(command: str, option: _Option) -> list[str]:
    """Returns our flags for a refused flag with its value, such as ``--tracker bytetrack.yaml``, or an empty list if
    there are none."""
    if option.flag not in table_of(command).refused or option.flag in actions_of(command) or not option.values:
        return []
    return flags_of_known_value(command, _argument_name(option.flag), option.values[0]) or []


def _refusal(command: str, option: _Option) -> str:
    """Returns the reason why the command does not take the option, or "" if the table has none."""
    flag = option.flag
    if flag in actions_of(command):
        reasons = table_of(command).refused_values.get(flag, {})
        refused = [f"{value}: {reasons[value]}" for value in option.values if value in reasons]
        return f"{flag} {'; '.join(refused)}" if refused else ""
    if flag in table_of(command).refused:
        return f"{flag}: {table_of(command).refused[flag]}"
    hyperparameter = hyperparameter_of(command, _argument_name(flag))
    if hyperparameter and flag.startswith("--"):
        value = option.values[0] if option.values else "VALUE"
        return f"{flag}: is a hyper-parameter; write --set {shlex.quote(f'{hyperparameter}={value}')}"
    return ""


def _argument_name(flag: str) -> str:
    """Returns the argument name of a flag: "batch_size" for ``--batch-size``."""
    return flag.removeprefix("--").replace("-", "_")
