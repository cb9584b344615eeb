"""Translates arguments of YOLOv5 and Ultralytics: names with values, such as ``plots=False`` of the yolo command
(`utils.config.other_programs.table`)."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from utils.class_names import is_index_list
from utils.config.flags import choice_of, flag_name, float_or_text, int_or_text
from utils.config.other_programs.table import actions_of, meaning_of, normalized, reason_for_refusal, table, table_of

# What an argument sets a setting to: true or false for a switch, else the words of a command line, not checked.
SettingText = bool | str | list[str]

NOT_ONE_LINE = "its value is empty or has several lines"


@dataclass(frozen=True)
class Translation:
    """What an argument of another program means here. With all fields empty, it asks for what happens anyway.

    Args:
        settings: the settings and hyper-parameters that it sets, by their names here.
        without_effect: why it sets nothing, for the log.
        note: how a list was understood, for the log.
        refusal: why it is refused.
    """

    settings: Mapping[str, SettingText] = field(default_factory=dict)
    without_effect: str = ""
    note: str = ""
    refusal: str = ""


def translate_argument(command: str, name: str, value: str) -> Translation | None:
    """Returns what ``name=value`` means, or None if neither this program nor the table has an argument of this name.

    The first row that applies, for train:

    | argument | means | because |
    | --- | --- | --- |
    | ``erasing=0.4`` | nothing, with the reason | the command ignores the argument, whatever its value |
    | ``plots=False`` | ``--noplots`` | the table lists this value |
    | ``pretrained=True`` | nothing | it asks for what happens anyway |
    | ``half=False``, ``save_dir=a`` | nothing, or a refusal | it is no setting here: `_translate_unsupported` |
    | ``device=None`` | nothing | none leaves a setting at its default |
    | ``name=`` | a refusal | a value has one line |
    | ``lr=0.1`` | ``--set lr0=0.1`` | it is a hyper-parameter |
    | ``batch=16`` | ``--batch-size 16`` | it is a setting: `_translate_setting` |
    """
    text = normalized(value)
    if name in table_of(command).ignored_arguments:
        reason = reason_for_refusal(command, flag_name(name))
        return Translation(without_effect=reason or "belongs to another task or command")
    listed = translate_listed_value(command, name, value)
    if listed is not None:
        return listed
    if text == "true" and name in table().defaults_if_true:
        return _default_behavior(command, name)
    meaning = meaning_of(command, name)
    if not meaning.hyperparameter and not meaning.flag_words:
        return _translate_unsupported(command, name, value)
    if text == "none":
        return Translation()
    if len(value.splitlines()) != 1:
        return Translation(refusal=NOT_ONE_LINE)
    if not meaning.flag_words:
        return Translation({meaning.hyperparameter: value})
    return _translate_setting(command, meaning.flag_words, value)


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
    """Returns what a keyword's value of our setting ``name`` means in the other programs if our flag does not take it.
    Returns None for other values, for the caller to check. The first row that applies, for train:

    | keyword | means | because |
    | --- | --- | --- |
    | ``batch=0.7`` | ``--batch-size -1`` | the table lists this value |
    | ``cache="none"`` | None | it may be text of ours |
    | ``tracker="a.yaml"``, ``cfg=False`` | a refusal, or nothing | the argument has another meaning elsewhere |
    | ``cache=True`` | ``--cache ram`` | `_translate_foreign_value` |
    | ``cos_lr=True`` | None | switches take true and false |
    | ``optimizer="sgd"``, ``freeze="[3]"`` | ``--optimizer SGD``, ``--freeze 3 3`` | our flag writes it otherwise |
    """
    listed = translate_listed_value(command, name, value)
    if listed is not None or normalized(value) == "none":
        return listed
    action = actions_of(command)[flag_name(name)]
    if name in table().other_meaning and not _may_be_ours(value, action):
        return _translate_unsupported(command, name, value)
    foreign = _translate_foreign_value(command, action, value)
    if foreign is not None or isinstance(action, argparse.BooleanOptionalAction):
        return foreign
    respelled = _setting_of(value, action)
    is_same = respelled.settings[action.dest] in (value, [value])
    return None if is_same else respelled


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


def _translate_unsupported(command: str, name: str, value: str) -> Translation | None:
    """Translates an argument that is no setting here."""
    flag = flag_name(name)
    text = normalized(value)
    if text in ("false", "none") and name in table().defaults_if_false:  # half=False
        return _default_behavior(command, name)
    if text == "true" and flag in table_of(command).without_effect:  # verbose=True
        return _default_behavior(command, name)
    reason = meaning_of(command, name).reason
    return Translation(refusal=reason) if reason else None


def _translate_setting(command: str, flag_words: Sequence[str], value: str) -> Translation:
    """Translates an argument that is a setting, or stands for a value of it (`Meaning.flag_words`)."""
    action = actions_of(command)[flag_words[0]]
    text = normalized(value)
    if len(flag_words) > 1 or isinstance(action, argparse.BooleanOptionalAction):
        return _translate_switch(command, flag_words, text)
    foreign = _translate_foreign_value(command, action, value)
    if foreign is not None:  # cache=False, task=study
        return foreign
    if text in ("true", "false"):  # workers=True
        return Translation(refusal="must not be true or false")
    return _setting_of(value, action)  # batch=16


def _translate_switch(command: str, flag_words: Sequence[str], text: str) -> Translation:
    """Translates the `normalized` value of a switch, or of an argument that stands for a value: ``adam`` for
    ``--optimizer Adam``."""
    if text == "true":  # cos_lr=True, adam=True
        return _translation_to(command, flag_words)
    if text != "false":  # noval=1 is not --val-every 1
        return Translation(refusal="must be true or false")
    flag, *values = flag_words
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
    choices = tuple(action.choices or ())
    return normalized(value) != "false" and (not choices or choice_of(value, choices) in choices)


def _reason_to_refuse_value(command: str, action: argparse.Action, value: str) -> str:
    """Returns the table's reason why our flag does not take ``value`` or, if it `is_list`, one of its words. Returns ""
    if the table has none."""
    refused = [table_of(command).refused_values.get(flag, {}) for flag in action.option_strings]
    texts = [normalized(word) for word in words_of(value, action)]
    return next((reasons[text] for reasons in refused for text in texts if text in reasons), "")


def is_list(value: str, action: argparse.Action) -> bool:
    """Returns whether one text is several values: ``[0, 1]``, or ``0,1`` for a flag that takes several numbers or
    choices. Names can contain brackets, commas and spaces."""
    is_bracketed = re.fullmatch(r"\[.*\]|\(.*\)", value) is not None
    if action.dest == "classes":
        return is_index_list(value)
    if action.dest in ("device", "split"):
        return is_bracketed
    is_name = action.type is str and not action.choices
    if is_name or (action.nargs != "+" and action.dest != "imgsz"):
        return False
    return is_bracketed or re.search(r"[,\s]", value.strip()) is not None


def words_of(value: str, action: argparse.Action) -> list[str]:
    """Returns the words of one text if it `is_list`, else the text itself."""
    words = re.findall(r"[^\s,()\[\]'\"]+", value) if is_list(value, action) else []
    return words or [value]


def _setting_of(value: str, action: argparse.Action) -> Translation:
    """Returns the setting of a value, as the words that its flag takes: a list as several of them, and choices in our
    case. A flag that takes one size or layer gets the one that the list stands for."""
    if not is_list(value, action):
        text = choice_of(value, action.choices)
        return Translation({action.dest: [text] if action.nargs == "+" else text})
    words = [choice_of(word, action.choices) for word in words_of(value, action)]
    if action.dest == "freeze" and len(words) == 1:
        return _only_layer(words[0])
    if action.nargs == "+":
        return Translation({action.dest: words})
    if action.dest == "imgsz":
        return _larger_side(words)
    return Translation({action.dest: ",".join(words)})  # device=[0,1]


def _only_layer(layer: str) -> Translation:
    """Translates a ``freeze`` of [3], which is one layer: a number alone means all layers before it."""
    number = int_or_text(layer)
    has_layers_before = isinstance(number, int) and number > 0
    note = f"freezes layer {layer} only, not the layers before it" if has_layers_before else ""
    return Translation({"freeze": [layer, layer]}, note=note)


def _larger_side(sides: Sequence[str]) -> Translation:
    """Translates an ``imgsz`` of height and width for a command whose images are square. A side that is no number is
    kept for the caller's check to refuse."""

    def size(side: str) -> float:
        number = float_or_text(side)
        return math.inf if isinstance(number, str) or math.isnan(number) else number

    larger = max(sides, key=size)
    is_one_of_several = math.isfinite(size(larger)) and any(side != larger for side in sides)
    note = f"used as {larger}, the larger side" if is_one_of_several else ""
    return Translation({"imgsz": larger}, note=note)
