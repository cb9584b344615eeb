"""Translates words of Ultralytics' yolo command, ``train model=yolov8n.pt epochs=3``, to the flags to write instead."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence

from utils.config.commands import COMMANDS
from utils.config.flags import first_words, flag_name
from utils.config.other_programs.arguments import settings_of_argument, words_of_settings
from utils.config.other_programs.table import (
    SettingText,
    actions_of,
    is_flag,
    max_values,
    other_task,
    settings_of_known_value,
    table,
)
from utils.errors import Mistakes, UserError
from utils.schema import suggestion

_YAMLS = (".yaml", ".yml")
_MIN_SIMILARITY = 0.8  # of flags; "--a" and "--amp", which share the dashes, are less similar


def split_yolo_words(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the words that belong to flags or are positional arguments, and those of the yolo
    command: other words before the first flag, and other words such as ``epochs=3`` after it."""
    num_positional = sum(bool(field.metadata["positional"]) for field in dataclasses.fields(COMMANDS[command].settings))
    takes_positional = num_positional > 0
    our_words: list[str] = []
    yolo_words: list[str] = []
    num_values: int | None = 0  # that the last flag may still take; None: any number
    is_before_flags = True
    for argument in arguments:
        name, separator, _ = argument.partition("=")
        is_assignment = bool(separator) and name.isidentifier()
        if is_flag(argument):
            our_words.append(argument)
            num_values = 0 if separator else max_values(command, name)
            is_before_flags = False
        elif num_values is None:
            our_words.append(argument)
        elif num_values > 0:
            our_words.append(argument)
            num_values -= 1
        elif num_positional > 0:
            our_words.append(argument)
            num_positional -= 1
        elif is_assignment or (is_before_flags and not takes_positional):
            yolo_words.append(argument)
        else:
            our_words.append(argument)
    return our_words, yolo_words


def flags_of_yolo_words(command: str, words: Sequence[str], mistakes: Mistakes) -> list[str]:
    """Returns the flags equivalent to words of the yolo command. Adds to ``mistakes`` what to write, and the words
    without an equivalent, by reason. Raises them at once if the words name another command, as ``lockstep detect train
    epochs=3`` does, because what this command requires does not matter then."""
    other_command = _other_command(command, words)
    if other_command:
        _translate_words(other_command, words, mistakes, prefix=f"{COMMANDS[other_command].typed} ")
        mistakes.raise_any()
    return _translate_words(command, words, mistakes)


def _other_command(command: str, words: Sequence[str]) -> str:
    """Returns the command for the mode that is among ``words``, or "" if ``command`` is for this mode."""
    for word in words:
        mode = word.removeprefix("mode=")
        if mode in table().modes and settings_of_known_value(command, "mode", mode) is None:
            return table().modes[mode]
    return ""


def _translate_words(command: str, words: Sequence[str], mistakes: Mistakes, prefix: str = "") -> list[str]:
    """Implements `flags_of_yolo_words` for the right ``command``. ``prefix``: how the line to write begins."""
    settings: dict[str, SettingText] = {}
    translated: list[str] = []
    refused: dict[str, list[str]] = {}
    for word in words:
        try:
            settings |= _settings_of_word(command, word)
            translated.append(word)
        except UserError as error:
            refused.setdefault(str(error), []).append(word)
    if settings.get("resume") == "" and "weights" in settings:  # model=last.pt resume=True
        settings["resume"] = settings.pop("weights")
    flags = words_of_settings(settings)
    if translated:
        line = f"{prefix}{shlex.join(flags)}".strip()
        advice = f"settings are flags here; write {line}" if line else "not needed here; leave this out"
        mistakes.add(f"{' '.join(translated)}: {advice}")
    for reason, refused_words in refused.items():
        mistakes.add(f"{first_words(refused_words)}: {reason}")
    return flags


def _settings_of_bare_word(command: str, word: str) -> dict[str, SettingText]:
    """Returns what a word without a value sets: a mode or task, ``yolo detect train``, or what may be true, ``resume``.
    Raises UserError for other words."""
    for argument in ("mode", "task"):
        listed = settings_of_known_value(command, argument, word)
        if listed is not None:
            return listed
    with contextlib.suppress(UserError):
        return settings_of_argument(command, word, "True")
    raise UserError("settings are flags here; see docs/migration.md")


def _settings_of_word(command: str, word: str) -> dict[str, SettingText]:
    """Returns what a word sets; nothing if it asks for what happens anyway. Raises UserError with the reason why it has
    no equivalent."""
    name, separator, value = word.partition("=")
    if not separator:
        return _settings_of_bare_word(command, word)
    if name == "model" and value:
        task_reason = other_task(value)
        if task_reason:  # yolov8n-seg.pt
            raise UserError(task_reason)
        if not value.endswith(_YAMLS):
            return {"weights": value}
        if "--model" in actions_of(command):
            return {"model": value}
        raise UserError(f"is not trained; {flag_name('weights')} takes a checkpoint")
    try:
        return settings_of_argument(command, name, value)
    except UserError as error:
        hint = suggestion(flag_name(name), actions_of(command), _MIN_SIMILARITY)
        raise UserError(str(error) or f"settings are flags here{hint}; see docs/migration.md") from None
