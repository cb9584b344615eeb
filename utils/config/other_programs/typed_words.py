"""Splits a command line into the words that are translated in different ways: flags with their values
(options.py), and words of the yolo command (yolo_words.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from utils.config.commands import COMMANDS
from utils.config.other_programs.table import equivalent_words, is_flag, max_typed_values


@dataclass(frozen=True)
class Option:
    """A flag and the words after it.

    Args:
        words: as typed.
        our_flag_words: what the flag is here (`equivalent_words`).
    """

    words: list[str]
    our_flag_words: list[str]

    @property
    def typed_flag(self) -> str:
        return self.words[0].partition("=")[0]

    @property
    def flag(self) -> str:
        """Our flag if the typed one has another name here, else the typed one."""
        return self.our_flag_words[0]

    @property
    def is_joined(self) -> bool:
        """Whether the first value is joined to the flag, as in ``--flag=value``."""
        return "=" in self.words[0]

    @property
    def values(self) -> list[str]:
        following = self.words[1:]
        return [self.words[0].partition("=")[2], *following] if self.is_joined else following

    @property
    def words_in_our_flags(self) -> list[str]:
        _, separator, value = self.words[0].partition("=")
        *first, last = self.our_flag_words
        return [*first, last + separator + value, *self.words[1:]]


@dataclass(frozen=True)
class TypedWords:
    """The words of a command line.

    Args:
        positional: positional arguments.
        options: flags with their values, and words after these that nothing takes.
        yolo_words: words of the yolo command: words such as ``epochs=3`` that no flag takes, and all words before the
            first flag of a command without positional arguments.
        unexpected: other words before the first flag.
    """

    positional: list[str] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    yolo_words: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def split_words(command: str, arguments: Sequence[str]) -> TypedWords:
    """Splits a command line without the word ``--``. A word that is no flag is, in this order:

    1. a value of the flag before it, if that takes another one;
    2. a positional argument, if the command has one more;
    3. a word of the yolo command: an assignment, or before the first flag if the command has no positional arguments;
    4. surplus, which is reported with the flag before it, or as unexpected if there is none.
    """
    num_positional = sum(bool(field.metadata["positional"]) for field in dataclasses.fields(COMMANDS[command].settings))
    typed = TypedWords()
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        is_assignment = bool(separator) and name.isidentifier()
        if is_flag(argument):
            typed.options.append(Option([argument], equivalent_words(command, name)))
        elif typed.options and _takes_another_value(command, typed.options[-1]):
            typed.options[-1].words.append(argument)
        elif len(typed.positional) < num_positional:
            typed.positional.append(argument)
        elif is_assignment or (not typed.options and num_positional == 0):
            typed.yolo_words.append(argument)
        elif typed.options:
            typed.options[-1].words.append(argument)
        else:
            typed.unexpected.append(argument)
    return typed


def _takes_another_value(command: str, option: Option) -> bool:
    limit = max_typed_values(command, option.typed_flag)
    return not option.is_joined and (limit is None or len(option.values) < limit)
