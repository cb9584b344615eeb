"""Translates arguments of YOLOv5 and Ultralytics: names with values, such as ``plots=False`` of the yolo command
(`utils.config.other_programs.table`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from utils.config.flags import flag_name, int_or_text, words_of_flag, words_with_values
from utils.config.other_programs.table import (
    HYPERPARAMETERS,
    SettingText,
    actions_of,
    hyperparameter_of,
    normalized,
    reason_for_refusal,
    same_flag,
    settings_of_known_value,
    settings_of_words,
    table,
    table_of,
)
from utils.errors import UserError


def settings_of_argument(command: str, name: str, value: str) -> dict[str, SettingText]:
    """Returns the settings and hyper-parameters that ``name=value`` sets, by their names here; none if it asks for what
    happens anyway. Raises UserError with the reason why there are none ("" if unknown)."""
    if name in table_of(command).ignored_arguments:  # erasing=0.4
        return {}
    listed = settings_of_known_value(command, name, value)
    if listed is not None:  # plots=False
        return listed
    if _is_true(value) and name in table().defaults_if_true:  # pretrained=True
        return {}
    hyperparameter = hyperparameter_of(command, name)
    action = _action(command, name)
    if normalized(value) == "none" and (hyperparameter or action):  # device=None
        return {}
    if len(value.splitlines()) != 1:  # name=
        raise UserError("its value is empty or has several lines")
    if hyperparameter:  # lr=0.1
        return {hyperparameter: value}
    if action is None:
        _check_without_effect(command, name, value)
        return {}
    return _value_of_setting(command, name, value, action)


def words_of_settings(settings: Mapping[str, SettingText]) -> list[str]:
    """Returns the words of a command line for the result of `settings_of_argument`."""
    words: list[str] = []
    for name, value in settings.items():
        if name in HYPERPARAMETERS:
            words += ["--set", f"{name}={value}"]
        elif value == "":  # --resume
            words.append(flag_name(name))
        elif isinstance(value, str):  # in two words, as users type it
            words += words_with_values(flag_name(name), [value])
        else:
            words += words_of_flag(name, value)
    return words


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


def _value_of_setting(command: str, name: str, value: str, action: argparse.Action) -> dict[str, SettingText]:
    """Returns the value of the setting whose flag has this ``action``. Raises UserError for a value that the setting
    does not take."""
    our_words = _our_words(command, name)
    stands_for_value = len(our_words) > 1
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    if stands_for_value or is_switch or action.nargs == "?":
        if _is_true(value):  # cos_lr=True
            return settings_of_words(command, our_words)
        if _is_false(value):  # adam=False, cos_lr=False
            if stands_for_value:
                return {}
            if is_switch:
                return {} if action.default is False else {action.dest: False}
            return {} if action.default is None else {action.dest: str(action.default)}  # cache=False: --cache none
    if stands_for_value:  # noval=1 is not --val-every 1
        raise UserError("must be true or false")
    refusal = table_of(command).refused_values.get(our_words[0], {}).get(normalized(value))
    if refusal:  # task=study
        raise UserError(refusal)
    if _is_true(value) or _is_false(value):  # workers=True
        raise UserError("must not be true or false")
    return {action.dest: _text_of_setting(value, action)}  # batch=16


def _text_of_setting(value: str, action: argparse.Action) -> str | list[str]:
    """Returns the text of a value as a flag takes it: a list if the flag takes several words, and ``[0, 1]`` or ``0,1``
    as several of them."""
    takes_list = action.nargs == "+"
    if not _is_list(value, action):
        text = next((choice for choice in action.choices or () if choice.lower() == value.lower()), value)
        return [text] if takes_list else text
    words = [word.strip("'\"") for word in re.split(r"[,\s]+", value.strip("[]() "))]
    if action.dest == "freeze" and len(words) == 1 and words[0] != value:
        return words * 2  # [3] is one layer, but a number alone means all layers before it
    if takes_list:
        return words
    if action.dest == "imgsz":  # height and width; images are square here
        return max(words, key=lambda word: (len(word), word))
    return ",".join(words)


def _is_list(value: str, action: argparse.Action) -> bool:
    """Returns whether ``value`` should be split. Names can contain commas and spaces, except class names."""
    if value.startswith(("[", "(")):
        return True
    return action.nargs == "+" and (action.type is int_or_text or (action.dest == "classes" and "," in value))
