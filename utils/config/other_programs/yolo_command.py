"""Translates words of Ultralytics' yolo command, ``train model=yolov8n.pt epochs=3``, to the flags to write instead."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence

from utils.config.commands import COMMANDS
from utils.config.flags import first_words, flag_name, words_with_values
from utils.config.other_programs.arguments import flags_of_argument
from utils.config.other_programs.table import actions_of, flags_of_known_value, is_flag, same_flag, table, table_of
from utils.errors import Mistakes, UserError
from utils.schema import suggestion

_NUM_VALUES = {None: 1, "?": 1, "+": math.inf, 0: 0}  # maximum number of a flag's values, by argparse's nargs


def split_yolo_words(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the words that belong to flags and those of the yolo command: all words before the
    first flag, and words such as ``epochs=3`` after the last value that a flag takes. A command with positional
    arguments has none of the latter."""
    if any(field.metadata["positional"] for field in dataclasses.fields(COMMANDS[command].settings)):
        return list(arguments), []
    words_of_flags: list[str] = []
    yolo_words: list[str] = []
    num_values_left: float = 0  # that the last flag may still take
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        if is_flag(argument):
            words_of_flags.append(argument)
            num_values_left = 0 if separator else _max_values(command, name)
        elif num_values_left:
            words_of_flags.append(argument)
            num_values_left -= 1
        elif not words_of_flags or (separator and name.isidentifier()):
            yolo_words.append(argument)
        else:
            words_of_flags.append(argument)
    return words_of_flags, yolo_words


def _max_values(command: str, flag: str) -> float:
    """Returns how many values a flag of ours or of another program takes at most. Flags of other programs that the
    table drops or translates by their value take one."""
    ours = same_flag(command, flag)
    if len(ours) > 1:  # the value is part of our words
        return 0
    if ours[0] in table_of(command).without_effect:
        return 1 if flag in table().flags_with_value else 0
    action = actions_of(command).get(ours[0])
    return 1 if action is None else _NUM_VALUES[action.nargs]


def flags_of_yolo_words(command: str, words: Sequence[str], mistakes: Mistakes) -> list[str]:
    """Returns the flags equivalent to words of the yolo command, in the order of ``words``. Adds to ``mistakes`` what
    to write, and the words without an equivalent, by reason."""
    flags: list[str] = []
    translated: list[str] = []
    refused: dict[str, list[str]] = {}
    for word in words:
        try:
            flags += _flags_of_word(command, word)
            translated.append(word)
        except UserError as error:
            refused.setdefault(str(error), []).append(word)
    if translated:
        instead = f"write {shlex.join(flags)}" if flags else "leave this out"
        mistakes.add(f"{' '.join(translated)}: settings are flags here; {instead}")
    for reason, refused_words in refused.items():
        mistakes.add(f"{first_words(refused_words)}: {reason}")
    return flags


def _flags_of_word(command: str, word: str) -> list[str]:
    """Returns the flags equivalent to a word, or an empty list if none is needed. Raises UserError with the reason why
    there are none."""
    name, separator, value = word.partition("=")
    if not separator:
        # The yolo command's mode and task need not be named: ``yolo detect train``.
        if any(flags_of_known_value(command, argument, word) == [] for argument in ("mode", "task")):
            return []
        raise UserError("settings are flags here; see docs/migration.md")
    if name == "model" and value:
        is_architecture = value.endswith((".yaml", ".yml")) and "--model" in actions_of(command)
        return words_with_values("--model" if is_architecture else "--weights", [value])
    try:
        return flags_of_argument(command, name, value)
    except UserError as error:
        hint = suggestion(flag_name(name), actions_of(command), 0.75)
        raise UserError(str(error) or f"settings are flags here{hint}; see docs/migration.md") from None
