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
    """Returns the flags with the effect of ``name=value``; empty if none is needed. For train:

    | argument | flags | because |
    | --- | --- | --- |
    | ``plots=False`` | ``--noplots`` | the table lists this value |
    | ``amp=True`` | none | it is so by default |
    | ``device=None`` | none | None leaves a setting at its default |
    | ``lr0=0.1`` | ``--set lr0=0.1`` | it is a hyper-parameter |
    | ``half=False`` | none | it has no flag here, and asks for nothing |
    | ``cos_lr=True`` | ``--cos-lr`` | the flag is a switch |
    | ``freeze=[0, 1]`` | ``--freeze 0 1`` | the flag takes values |

    Raises UserError that says why there are no such flags ("" if the reason is unknown).
    """
    listed_flags = flags_of_known_value(command, name, value)
    if listed_flags is not None:
        return listed_flags
    text = normalized(value)
    if text == "true" and name in table().defaults_if_true:
        return []
    hyperparameter = hyperparameter_of(command, name)
    flag, *fixed_words = same_flag(command, flag_name(name))
    action = None if name in table().other_meaning else actions_of(command).get(flag)
    if text == "none" and (hyperparameter or action):
        return []
    if len(value.splitlines()) != 1:
        raise UserError("its value is empty or has several lines")
    if hyperparameter:
        return ["--set", f"{hyperparameter}={value}"]
    if action is None:
        _check_without_effect(command, name, flag, text)
        return []
    is_switch = bool(fixed_words) or isinstance(action, argparse.BooleanOptionalAction) or action.nargs == "?"
    if is_switch and text in ("true", "false"):
        return [flag, *fixed_words] if text == "true" else _flags_to_switch_off(flag, action)
    refusal = table_of(command).refused_values.get(flag, {}).get(text)
    if refusal:
        raise UserError(refusal)
    return words_with_values(flag, _words(value, action))


def _flags_to_switch_off(flag: str, action: argparse.Action) -> list[str]:
    """Returns the flags for a switch that is false: none if that is its default."""
    is_on_by_default = isinstance(action, argparse.BooleanOptionalAction) and action.default is not False
    return [f"--no-{flag.removeprefix('--')}"] if is_on_by_default else []


def _check_without_effect(command: str, name: str, flag: str, text: str) -> None:
    """Raises UserError for an argument that has no flag here, unless its value, as ``text``, changes nothing."""
    asks_for_nothing = text in ("false", "none") and name in table().defaults_if_false
    is_on_anyway = text == "true" and flag in table_of(command).without_effect
    if not asks_for_nothing and not is_on_anyway:
        raise UserError(table().other_meaning.get(name) or reason_for_refusal(command, flag))


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
