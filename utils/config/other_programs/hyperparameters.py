"""Translates hyper-parameter files of YOLOv5 and Ultralytics (`utils.config.other_programs.table`)."""

from __future__ import annotations

import re
from typing import Any

from utils.config.other_programs.arguments import SettingText, translate_argument
from utils.config.other_programs.table import meaning_of, normalized, owner_of, table
from utils.config.plain_values import checked_setting
from utils.config.settings import HYPERPARAMETERS
from utils.errors import Mistakes, UserError, one_line
from utils.schema import suggestion

_MAX_SHOWN_CHARACTERS = 40  # per value in the log


def translate_recipe(values: dict[Any, Any], location: str, mistakes: Mistakes) -> tuple[dict[Any, Any], list[str]]:
    """Splits the ``values`` of a hyper-parameter file into those that exist here and descriptions of those without
    effect. Adds each key without an equivalent to ``mistakes``, with the reason."""
    is_yolov5 = not values.keys().isdisjoint(table().only_in_yolov5)
    kept: dict[Any, Any] = {}
    unused: list[str] = []
    for key, value in values.items():
        text = str(value)
        shown = one_line(f"{key} {text[:_MAX_SHOWN_CHARACTERS]}")
        if len(text) > _MAX_SHOWN_CHARACTERS:
            shown += "..."
        other = table().hyperparameters_of_yolov5.get(key) if is_yolov5 else None
        if other is not None:
            if re.fullmatch(other.default, normalized(text)):
                unused.append(f"{shown} ({other.reason})")
            else:
                mistakes.add(f"{location}: '{key}': {other.reason}; remove it")
        elif key in HYPERPARAMETERS:
            kept[key] = value
        elif _has_effect(str(key), str(value)):
            mistakes.add(f"{location}: {unknown_hyperparameter(str(key))}")
        else:
            unused.append(shown)
    return kept, unused


def _has_effect(name: str, value: str) -> bool:
    """Returns whether an argument is unknown or refused, or sets something to another value than the default."""
    translation = translate_argument("train", name, value)
    if translation is None or translation.refusal:
        return True
    return not all(_is_default(setting, text) for setting, text in translation.settings.items())


def _is_default(setting: str, text: SettingText) -> bool:
    """Returns whether ``text`` is the default of a setting or hyper-parameter; False if it is no value of it."""
    owner = owner_of("train", setting)
    try:
        return checked_setting(owner, setting, text, setting) == getattr(owner(), setting)
    except UserError:
        return False


def unknown_hyperparameter(key: str) -> str:
    """Returns a message about ``key``, which is not a hyper-parameter: what it is, or what was probably meant."""
    meaning = meaning_of("train", key)
    if meaning.hyperparameter:
        return f"unknown key '{key}' (did you mean '{meaning.hyperparameter}'?)"
    if meaning.flag_words:
        return f"'{key}': is a flag, not a hyper-parameter; give it as {meaning.flag_words[0]}"
    other = table().hyperparameters_of_yolov5.get(key)
    reason = other.reason if other else meaning.reason
    if reason:
        return f"'{key}': {reason}; remove it"
    return f"unknown key '{key}'{suggestion(key, HYPERPARAMETERS)}"
