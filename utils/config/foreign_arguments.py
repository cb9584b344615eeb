"""Translates arguments of YOLOv5 and Ultralytics: names with values, such as ``plots=False`` of the yolo command
(`utils.config.other_programs`)."""

from __future__ import annotations

import argparse
import re

from utils.config.flags import flag_name, int_or_text
from utils.config.other_programs import (
    actions_of,
    flags_of_known_value,
    hyperparameter_of,
    normalized,
    reason,
    same_flag,
    table,
    table_of,
)
from utils.errors import UserError


def flags_of_argument(command: str, name: str, value: str) -> list[str]:
    """Returns the flags with the effect of ``name=value``; empty if none is needed. Raises UserError that says why if
    there are none."""
    known_flags = flags_of_known_value(command, name, value)
    if known_flags is not None:
        return known_flags
    hyperparameter = hyperparameter_of(command, name)
    flag, *fixed_words = same_flag(command, flag_name(name))
    action = None if name in table().other_meaning else actions_of(command).get(flag)
    if normalized(value) == "none" and (hyperparameter or action):
        return []
    if normalized(value) == "true" and name in table().defaults_if_true:
        return []
    if len(value.splitlines()) != 1:
        raise UserError("its value is empty or has several lines")
    if hyperparameter:
        return ["--set", f"{hyperparameter}={value}"]
    if action is None:
        _check_without_effect(command, name, normalized(value))
        return []
    if normalized(value) in ("true", "false") and (fixed_words or _is_switch(action) or action.nargs == "?"):
        return _switched(flag, fixed_words, action, is_on=normalized(value) == "true")
    refusal = table_of(command).refused_values.get(flag, {}).get(normalized(value))
    if refusal:
        raise UserError(refusal)
    first, *more = _words(value, action)
    return [f"{flag}={first}", *more] if first.startswith("-") else [flag, first, *more]


def _check_without_effect(command: str, name: str, text: str) -> None:
    """Raises UserError (why; "" if unknown) unless an argument without a flag changes nothing. ``text``: its normalized
    value."""
    flag = flag_name(name)
    is_off = text in ("false", "none") and name in table().defaults_if_false
    is_on_anyway = text == "true" and flag in table_of(command).without_effect
    if not is_off and not is_on_anyway:
        raise UserError(table().other_meaning.get(name) or reason(command, flag))


def _is_switch(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _switched(flag: str, fixed_words: list[str], action: argparse.Action, *, is_on: bool) -> list[str]:
    """Returns the words that turn a flag on or off; none if it is off by default."""
    if is_on:
        return [flag, *fixed_words]
    is_off_by_default = not _is_switch(action) or action.default is False
    return [] if is_off_by_default else [f"--no-{flag.removeprefix('--')}"]


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
