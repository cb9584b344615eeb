"""Translates arguments of YOLOv5 and Ultralytics: names with values, such as ``plots=False`` of the yolo command
(`utils.config.other_programs.table`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from utils.config.flags import flag_name, int_or_text
from utils.config.other_programs.table import (
    actions_of,
    hyperparameter_of,
    normalized,
    reason_for_refusal,
    same_flag,
    table,
    table_of,
)

# What an argument sets a setting to: true or false for a switch, else the words of a command line, not checked.
SettingText = bool | str | list[str]

NOT_ONE_LINE = "its value is empty or has several lines"


@dataclass(frozen=True)
class Translation:
    """What an argument of another program means here. With all fields empty, it asks for what happens anyway.

    Args:
        settings: the settings and hyper-parameters that it sets, by their names here.
        without_effect: why it sets nothing, for the log.
        refusal: why it is refused.
    """

    settings: Mapping[str, SettingText] = field(default_factory=dict)
    without_effect: str = ""
    refusal: str = ""


def translate_argument(command: str, name: str, value: str) -> Translation | None:
    """Returns what ``name=value`` means, or None if neither this program nor the table has an argument of this name."""
    text = normalized(value)
    if name in table_of(command).ignored_arguments:  # erasing=0.4
        reason = reason_for_refusal(command, flag_name(name))
        return Translation(without_effect=reason or "belongs to another task or command")
    listed = translate_listed_value(command, name, value)
    if listed is not None:  # plots=False
        return listed
    if text == "true" and name in table().defaults_if_true:  # pretrained=True
        return _default_behavior(command, name)
    hyperparameter = hyperparameter_of(command, name)
    action = None if name in table().other_meaning else actions_of(command).get(_our_words(command, name)[0])
    if not hyperparameter and action is None:
        return _translate_without_setting(command, name, value)
    if text == "none":  # device=None
        return Translation()
    if len(value.splitlines()) != 1:  # name=
        return Translation(refusal=NOT_ONE_LINE)
    if action is None:  # lr=0.1
        return Translation({hyperparameter: value})
    return _translate_setting(command, name, value, action)


def translate_listed_value(command: str, name: str, value: str) -> Translation | None:
    """Looks up an argument with its value in the command's table. Returns None if it is not listed."""
    command_table = table_of(command)
    text = normalized(value)
    if name in command_table.default_arguments and re.fullmatch(command_table.default_arguments[name], text):
        return _default_behavior(command, name)
    for pattern, words in command_table.arguments_to_flags.get(name, {}).items():
        if re.fullmatch(pattern, text):
            return _translation_to(command, words.split())
    return None


def translate_value(command: str, name: str, value: str) -> Translation | None:
    """Returns what a keyword's value of our setting ``name`` means in the other programs if our flag does not take it:
    ``cache=True``, ``optimizer=sgd``. Returns None for other values, for the caller to check."""
    listed = translate_listed_value(command, name, value)
    if listed is not None or normalized(value) == "none":  # batch=0.7; "none" may be text of ours
        return listed
    action = actions_of(command)[flag_name(name)]
    if name in table().other_meaning and not _may_be_ours(value, action):  # tracker=bytetrack.yaml, cfg=False
        return _translate_without_setting(command, name, value)
    return _translate_foreign_value(command, action, value) or _respell(value, action)


def _our_words(command: str, name: str) -> list[str]:
    """Returns our flag of the same meaning, with its value if the argument stands for one: ``--optimizer Adam`` for
    ``adam``."""
    return same_flag(command, flag_name(name))


def _default_behavior(command: str, name: str) -> Translation:
    """Returns the translation of an argument that asks for what happens anyway, with the reason if the table says that
    other values would not change it."""
    return Translation(without_effect=table_of(command).without_effect.get(flag_name(name), ""))


def _translation_to(command: str, words: Sequence[str]) -> Translation:
    """Returns what ``words`` of the table set: our flag, with its value unless it is a switch or has a ``const``."""
    flag, *values = words
    action = actions_of(command)[flag]
    if isinstance(action, argparse.BooleanOptionalAction):
        return Translation({action.dest: not flag.startswith("--no-")})
    return Translation({action.dest: values[0] if values else str(action.const)})


def _translate_without_setting(command: str, name: str, value: str) -> Translation | None:
    """Translates an argument that is no setting here."""
    flag = flag_name(name)
    text = normalized(value)
    if text in ("false", "none") and name in table().defaults_if_false:  # half=False
        return _default_behavior(command, name)
    if text == "true" and flag in table_of(command).without_effect:  # verbose=True
        return _default_behavior(command, name)
    refusal = table().other_meaning.get(name) or reason_for_refusal(command, flag)
    return Translation(refusal=refusal) if refusal else None


def _translate_setting(command: str, name: str, value: str, action: argparse.Action) -> Translation:
    """Translates an argument that is the setting whose flag has this ``action``, or stands for a value of it."""
    our_words = _our_words(command, name)
    text = normalized(value)
    if len(our_words) > 1 or isinstance(action, argparse.BooleanOptionalAction):
        return _translate_switch(command, our_words, text)
    foreign = _translate_foreign_value(command, action, value)
    if foreign is not None:  # cache=False, task=study
        return foreign
    if text in ("true", "false"):  # workers=True
        return Translation(refusal="must not be true or false")
    return Translation({action.dest: _text_of_setting(value, action)})  # batch=16


def _translate_switch(command: str, our_words: Sequence[str], text: str) -> Translation:
    """Translates the `normalized` value of a switch, or of an argument that stands for a value: ``adam`` for
    ``--optimizer Adam``."""
    if text == "true":  # cos_lr=True, adam=True
        return _translation_to(command, our_words)
    if text != "false":  # noval=1 is not --val-every 1
        return Translation(refusal="must be true or false")
    flag, *values = our_words
    action = actions_of(command)[flag]
    return Translation() if values or action.default is False else Translation({action.dest: False})


def _translate_foreign_value(command: str, action: argparse.Action, value: str) -> Translation | None:
    """Translates a value that our flag does not take but the other programs do: true and false of a flag that may be
    given without a value, or a value with a reason to refuse it. Returns None for others."""
    text = normalized(value)
    if action.nargs == "?" and text in ("true", "false"):
        setting = action.const if text == "true" else action.default
        return Translation() if setting is None else Translation({action.dest: str(setting)})
    refusal = _reason_to_refuse_value(command, action, value)
    return Translation(refusal=refusal) if refusal else None


def _may_be_ours(value: str, action: argparse.Action) -> bool:
    """Returns whether a value may be meant for our flag, rather than for a flag of the same name elsewhere."""
    return normalized(value) != "false" and (not action.choices or _own_case(value, action) in tuple(action.choices))


def _respell(value: str, action: argparse.Action) -> Translation | None:
    """Translates a choice in another case, and several choices or numbers in one text: ``optimizer=sgd``,
    ``freeze=0,1``. Returns None for a value that stays as it is."""
    is_list = action.nargs == "+" and (action.choices is not None or action.type is not str)
    text = _text_of_setting(value, action) if is_list else _own_case(value, action)
    return None if text in (value, [value]) else Translation({action.dest: text})


def _reason_to_refuse_value(command: str, action: argparse.Action, value: str) -> str:
    """Returns the table's reason why our flag does not take ``value``, or "" if it has none."""
    refused = [table_of(command).refused_values.get(flag, {}) for flag in action.option_strings]
    return next((reasons[normalized(value)] for reasons in refused if normalized(value) in reasons), "")


def _text_of_setting(value: str, action: argparse.Action) -> str | list[str]:
    """Returns the text of a value as a flag takes it: a list if the flag takes several words, and ``[0, 1]`` or ``0,1``
    as several of them."""
    takes_list = action.nargs == "+"
    if not _is_list(value, action):
        text = _own_case(value, action)
        return [text] if takes_list else text
    words = [word.strip("'\"") for word in re.split(r"[,\s]+", value.strip("[]() "))]
    if action.dest == "freeze" and len(words) == 1 and words[0] != value.strip():
        return words * 2  # [3] is one layer, but a number alone means all layers before it
    if takes_list:
        return words
    if action.dest == "imgsz":  # height and width; images are square here
        return max(words, key=lambda word: (len(word), word))
    return ",".join(words)  # device=[0,1], split=[val]


def _own_case(value: str, action: argparse.Action) -> str:
    """Returns the choice of our flag that ``value`` is in another case, or else ``value``."""
    return next((choice for choice in action.choices or () if choice.lower() == value.lower()), value)


def _is_list(value: str, action: argparse.Action) -> bool:
    """Returns whether ``value`` should be split. Names can contain brackets, commas and spaces, except class names."""
    is_bracketed = value.startswith(("[", "("))
    if action.nargs == "+":
        return is_bracketed or action.type is int_or_text or (action.dest == "classes" and "," in value)
    if action.dest == "imgsz":
        return is_bracketed or "," in value  # imgsz=640,480
    is_name = action.type is str and not action.choices and action.dest != "device"
    return is_bracketed and not is_name
