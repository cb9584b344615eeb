"""Translates arguments of YOLOv5 and Ultralytics: names with values, such as ``plots=False`` of the yolo command
(`utils.config.other_programs.table`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass

from utils.config.flags import flag_name, int_or_text
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


def flags_of_argument(command: str, name: str, value: str) -> list[str]:
    """Returns the flags with the effect of ``name=value``; empty if none is needed. Raises UserError that says why if
    there are none ("" if the reason is unknown)."""
    flag, *fixed_words = same_flag(command, flag_name(name))
    argument = _Argument(
        command=command,
        name=name,
        value=value,
        hyperparameter=hyperparameter_of(command, name),
        flag=flag,
        fixed_words=fixed_words,
        action=None if name in table().other_meaning else actions_of(command).get(flag),
    )
    for rule in _RULES:
        flags = rule(argument)
        if flags is not None:
            return flags
    return _flag_with_value(argument)


@dataclass(frozen=True, kw_only=True)
class _Argument:
    """An argument, and what it sets here."""

    command: str
    name: str
    value: str
    hyperparameter: str  # our name; "" if it is none
    flag: str
    fixed_words: list[str]  # that follow the flag: its value here, if the argument is a switch elsewhere
    action: argparse.Action | None  # of the flag; None if we have no flag of this meaning

    @property
    def text(self) -> str:
        """The value as the table compares it."""
        return normalized(self.value)


def _known_value(argument: _Argument) -> list[str] | None:
    return flags_of_known_value(argument.command, argument.name, argument.value)


def _value_none(argument: _Argument) -> list[str] | None:
    is_known = argument.hyperparameter or argument.action
    return [] if is_known and argument.text == "none" else None


def _true_by_default(argument: _Argument) -> list[str] | None:
    return [] if argument.text == "true" and argument.name in table().defaults_if_true else None


def _odd_text(argument: _Argument) -> None:
    """Raises UserError for a value that no command line can hold."""
    if len(argument.value.splitlines()) != 1:
        raise UserError("its value is empty or has several lines")


def _hyperparameter(argument: _Argument) -> list[str] | None:
    return ["--set", f"{argument.hyperparameter}={argument.value}"] if argument.hyperparameter else None


def _without_flag(argument: _Argument) -> list[str] | None:
    """Raises UserError for an argument that we have no flag for, unless it changes nothing."""
    if argument.action is not None:
        return None
    is_off = argument.text in ("false", "none") and argument.name in table().defaults_if_false
    is_on_anyway = argument.text == "true" and argument.flag in table_of(argument.command).without_effect
    if is_off or is_on_anyway:
        return []
    other_meaning = table().other_meaning.get(argument.name)
    raise UserError(other_meaning or reason_for_refusal(argument.command, argument.flag))


def _switch(argument: _Argument) -> list[str] | None:
    """Returns the words that turn a flag on or off; none if it is off by default."""
    action = argument.action
    if action is None or argument.text not in ("true", "false"):
        return None
    if not (argument.fixed_words or _is_switch(action) or action.nargs == "?"):
        return None
    if argument.text == "true":
        return [argument.flag, *argument.fixed_words]
    is_off_by_default = not _is_switch(action) or action.default is False
    return [] if is_off_by_default else [f"--no-{argument.flag.removeprefix('--')}"]


def _refused_value(argument: _Argument) -> None:
    """Raises UserError for a value that our flag does not have."""
    refusal = table_of(argument.command).refused_values.get(argument.flag, {}).get(argument.text)
    if refusal:
        raise UserError(refusal)


# Tried in this order. Each returns our flags, raises UserError because there are none, or leaves the argument to the
# next by returning None.
_RULES: tuple[Callable[[_Argument], list[str] | None], ...] = (
    _known_value,
    _value_none,
    _true_by_default,
    _odd_text,
    _hyperparameter,
    _without_flag,
    _switch,
    _refused_value,
)


def _flag_with_value(argument: _Argument) -> list[str]:
    assert argument.action is not None, "`_without_flag` has ended the others"
    first, *more = _words(argument.value, argument.action)
    return [f"{argument.flag}={first}", *more] if first.startswith("-") else [argument.flag, first, *more]


def _is_switch(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _words(value: str, action: argparse.Action) -> list[str]:
    """Returns the words after a flag that give it ``value``: several if the flag takes a list and the value is one,
    such as ``[0, 1]`` or ``0,1``, else one."""
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
    """Returns whether ``value`` is to be split. Names may have commas and spaces, but not those of classes."""
    if value.startswith(("[", "(")):
        return True
    return action.nargs == "+" and (action.type is int_or_text or (action.dest == "classes" and "," in value))
