"""Translates arguments of YOLOv5 and Ultralytics: names with values, such as ``plots=False`` of the yolo command
(`utils.config.other_programs.table`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from utils.config.flags import flag_name, int_or_text, words_with_values
from utils.config.other_programs.table import (
    actions_of,
    flags_of_known_value,
    hyperparameter_of,
    normalized,
    reason_for_refusal,
    same_flag,
    table,
    table_of,
)
from utils.errors import UserError


@dataclass(frozen=True)
class _Argument:
    """An argument of a command, and our flag or hyper-parameter of the same name."""

    command: str
    name: str
    value: str

    @property
    def text(self) -> str:
        """The value as the table spells it."""
        return normalized(self.value)

    @property
    def is_ignored(self) -> bool:
        """Whether the command has no use for the argument, whatever its value."""
        return self.name in table_of(self.command).ignored_arguments

    @property
    def listed_flags(self) -> list[str] | None:
        """Our flags if the table lists this value, else None."""
        return flags_of_known_value(self.command, self.name, self.value)

    @property
    def hyperparameter(self) -> str:
        """Our hyper-parameter of the same name, or ""."""
        return hyperparameter_of(self.command, self.name)

    @property
    def our_words(self) -> list[str]:
        """Our flag of the same name, with its value if it is fixed: ``--optimizer Adam`` for ``--adam``."""
        return same_flag(self.command, flag_name(self.name))

    @property
    def action(self) -> argparse.Action | None:
        """The action of our flag, or None if there is no such flag or it means something else."""
        if self.name in table().other_meaning:
            return None
        return actions_of(self.command).get(self.our_words[0])

    @property
    def is_ours(self) -> bool:
        """Whether we have a flag or a hyper-parameter of this name."""
        return self.hyperparameter != "" or self.action is not None

    @property
    def is_default(self) -> bool:
        """Whether the value is true, which is the default here."""
        return self.text == "true" and self.name in table().defaults_if_true

    @property
    def is_switch(self) -> bool:
        """Whether true and false are values of our flag."""
        if len(self.our_words) > 1:
            return True  # the argument stands for one value of our flag
        action = self.action
        return isinstance(action, argparse.BooleanOptionalAction) or (action is not None and action.nargs == "?")

    @property
    def is_without_effect(self) -> bool:
        """Whether the value requests nothing, or the default behavior."""
        if self.text in ("false", "none"):
            return self.name in table().defaults_if_false
        return self.text == "true" and self.our_words[0] in table_of(self.command).without_effect

    @property
    def refusal(self) -> str:
        """The reason why our flag does not take the value, or "" if the table has none."""
        return table_of(self.command).refused_values.get(self.our_words[0], {}).get(self.text, "")


class _Rule(NamedTuple):
    """A row of `_RULES`."""

    example: str  # an argument that the rule handles, of train, or of val for a refused value
    applies: Callable[[_Argument], bool]
    flags: Callable[[_Argument], list[str]]  # raises UserError for a refused argument


def _refuse_unknown(argument: _Argument) -> NoReturn:
    """Raises UserError with the reason why the command has no flag with the meaning of this argument, or "" if the
    table has none."""
    other_meaning = table().other_meaning.get(argument.name)
    raise UserError(other_meaning or reason_for_refusal(argument.command, argument.our_words[0]))


def _refuse_lines(_: _Argument) -> NoReturn:
    raise UserError("its value is empty or has several lines")


def _refuse_value(argument: _Argument) -> NoReturn:
    raise UserError(argument.refusal)


def _refuse_switch(_: _Argument) -> NoReturn:
    raise UserError("must not be true or false")


def _listed_flags(argument: _Argument) -> list[str]:
    return argument.listed_flags or []


def _flags_with_override(argument: _Argument) -> list[str]:
    return ["--set", f"{argument.hyperparameter}={argument.value}"]


def _flags_of_switch(argument: _Argument) -> list[str]:
    return argument.our_words


def _no_flags(_: _Argument) -> list[str]:
    return []


def _flags_to_switch_off(argument: _Argument) -> list[str]:
    """Returns the flags for a switch that is false, or none if false is its default."""
    action = argument.action
    is_on_by_default = isinstance(action, argparse.BooleanOptionalAction) and action.default is not False
    return [f"--no-{argument.our_words[0].removeprefix('--')}"] if is_on_by_default else []


def _flags_with_value(argument: _Argument) -> list[str]:
    """Returns our flag with the value of an argument."""
    assert argument.action is not None, "an earlier rule handles arguments without a flag"
    return words_with_values(argument.our_words[0], _words(argument.value, argument.action))


# Rules that translate an argument to flags. The first one that applies decides, so each rule may assume that none above
# it applies.
_RULES = (
    _Rule("erasing=0.4", lambda argument: argument.is_ignored, _no_flags),
    _Rule("plots=False", lambda argument: argument.listed_flags is not None, _listed_flags),
    _Rule("pretrained=True", lambda argument: argument.is_default, _no_flags),
    _Rule("device=None", lambda argument: argument.text == "none" and argument.is_ours, _no_flags),
    _Rule("name=", lambda argument: len(argument.value.splitlines()) != 1, _refuse_lines),
    _Rule("lr0=0.1", lambda argument: argument.hyperparameter != "", _flags_with_override),
    _Rule("half=False", lambda argument: not argument.is_ours and argument.is_without_effect, _no_flags),
    _Rule("half=True", lambda argument: not argument.is_ours, _refuse_unknown),
    _Rule("cos_lr=True", lambda argument: argument.is_switch and argument.text == "true", _flags_of_switch),
    _Rule("cos_lr=False", lambda argument: argument.is_switch and argument.text == "false", _flags_to_switch_off),
    _Rule("task=study", lambda argument: argument.refusal != "", _refuse_value),
    _Rule("workers=True", lambda argument: argument.text in ("true", "false"), _refuse_switch),
    _Rule("batch=16", lambda argument: argument.action is not None, _flags_with_value),
)


def flags_of_argument(command: str, name: str, value: str) -> list[str]:
    """Returns the flags equivalent to ``name=value`` by `_RULES`, or an empty list if none is needed. Raises UserError
    with the reason why there are no such flags ("" if unknown)."""
    argument = _Argument(command, name, value)
    rule = next(rule for rule in _RULES if rule.applies(argument))
    return rule.flags(argument)


def _words(value: str, action: argparse.Action) -> list[str]:
    """Returns the words that pass ``value`` to a flag: several if the flag takes a list and the value is a list such as
    ``[0, 1]`` or ``0,1``, else one."""
    if not _is_list(value, action):
        matches = [choice for choice in action.choices or () if choice.lower() == value.lower()]
        return matches[:1] or [value]
    words = [word.strip("'\"") for word in re.split(r"[,\s]+", value.strip("[]() "))]
    if action.dest == "freeze" and len(words) == 1 and words[0] != value:
        return words * 2  # [3] is one layer, but a number alone means all layers before it
    if action.nargs == "+":
        return words
    if action.dest == "imgsz":  # height and width; images are square here
        return [max(words, key=lambda word: (len(word), word))]
    return [",".join(words)]


def _is_list(value: str, action: argparse.Action) -> bool:
    """Returns whether ``value`` should be split. Names can contain commas and spaces, except class names."""
    if value.startswith(("[", "(")):
        return True
    return action.nargs == "+" and (action.type is int_or_text or (action.dest == "classes" and "," in value))
