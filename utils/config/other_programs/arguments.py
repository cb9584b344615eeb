"""Translates arguments of YOLOv5 and Ultralytics: names with values, such as ``plots=False`` of the yolo command
(`utils.config.other_programs.table`)."""

from __future__ import annotations

import argparse
import re

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


def flags_of_argument(command: str, name: str, value: str) -> list[str]:
    """Returns the flags equivalent to ``name=value``, or an empty list if none is needed. Raises UserError with the
    reason why there are no such flags ("" if unknown)."""
    if name in table_of(command).ignored_arguments:  # erasing=0.4
        return []
    listed_flags = flags_of_known_value(command, name, value)
    if listed_flags is not None:  # plots=False
        return listed_flags
    if _is_true(value) and name in table().defaults_if_true:  # pretrained=True
        return []
    hyperparameter = hyperparameter_of(command, name)
    action = _action(command, name)
    if normalized(value) == "none" and (hyperparameter or action):  # device=None
        return []
    if len(value.splitlines()) != 1:  # name=
        raise UserError("its value is empty or has several lines")
    if hyperparameter:  # lr=0.1
        return ["--set", f"{hyperparameter}={value}"]
    if action is None:
        _check_without_effect(command, name, value)
        return []
    return _flags_of_setting(command, name, value, action)


def _is_true(value: str) -> bool:
    return normalized(value) == "true"


def _is_false(value: str) -> bool:
    return normalized(value) == "false"


def _our_words(command: str, name: str) -> list[str]:
    """Returns our flag of the same meaning, with its value if the argument stands for one: ``--optimizer Adam`` for
    ``adam``."""
    return same_flag(command, flag_name(name))


def _action(command: str, name: str) -> argparse.Action | None:
    """Returns the action of our flag, or None if there is no such flag or it means something else."""
    if name in table().other_meaning:
        return None
    return actions_of(command).get(_our_words(command, name)[0])


def _check_without_effect(command: str, name: str, value: str) -> None:
    """Raises UserError unless an argument without a flag here requests nothing, or the default behavior. The message is
    the reason why there is no flag, or "" if the table has none."""
    flag = _our_words(command, name)[0]
    if normalized(value) in ("false", "none") and name in table().defaults_if_false:  # half=False
        return
    if _is_true(value) and flag in table_of(command).without_effect:  # verbose=True
        return
    raise UserError(table().other_meaning.get(name) or reason_for_refusal(command, flag))


def _flags_of_setting(command: str, name: str, value: str, action: argparse.Action) -> list[str]:
    """Returns the flags for a value of our setting, whose ``action`` parses it. Raises UserError for a value that the
    setting does not take."""
    our_words = _our_words(command, name)
    flag = our_words[0]
    is_on_or_off = isinstance(action, argparse.BooleanOptionalAction)
    stands_for_value = len(our_words) > 1
    if stands_for_value or is_on_or_off or action.nargs == "?":
        if _is_true(value):  # cos_lr=True
            return our_words
        if _is_false(value):  # cos_lr=False
            return [f"--no-{flag.removeprefix('--')}"] if is_on_or_off and action.default is not False else []
    refusal = table_of(command).refused_values.get(flag, {}).get(normalized(value))
    if refusal:  # task=study
        raise UserError(refusal)
    if _is_true(value) or _is_false(value):  # workers=True
        raise UserError("must not be true or false")
    return words_with_values(flag, _words(value, action))  # batch=16


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
