"""Translates words of Ultralytics' yolo command, ``train model=yolov8n.pt epochs=3``, to the flags to write instead."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from utils.config.commands import COMMANDS
from utils.config.flags import first_words, flag_name, words_of_settings
from utils.config.other_programs.arguments import (
    NOT_ONE_LINE,
    SettingText,
    Translation,
    translate_argument,
    translate_listed_value,
)
from utils.config.other_programs.options import translate_option
from utils.config.other_programs.table import actions_of, equivalent_words, lists_argument, other_task, owner_of, table
from utils.config.other_programs.typed_words import Option
from utils.config.plain_values import checked_setting
from utils.config.settings import WEIGHTS_SUFFIXES
from utils.errors import Mistakes
from utils.schema import suggestion

_YAMLS = (".yaml", ".yml")
_LONG_DASHES = ("\N{EN DASH}", "\N{EM DASH}", "\N{HYPHEN}", "\N{MINUS SIGN}")
_MIN_SIMILARITY = 0.8  # of flags; "--a" and "--amp", which share the dashes, are less similar


@dataclass(frozen=True)
class _TranslatedWords:
    """What words of the yolo command become.

    Args:
        flags: our flags, with their values.
        understood: the words that the flags replace.
        refused: the other words, by reason.
    """

    flags: list[str]
    understood: list[str]
    refused: dict[str, list[str]]


def flags_of_yolo_words(
    command: str, words: Sequence[str], mistakes: Mistakes, *, options: Sequence[Option]
) -> list[str]:
    """Returns the flags equivalent to words of the yolo command. Adds to ``mistakes`` what to write, and the words
    without an equivalent, by reason. Raises them at once if the words name another command, as ``lockstep detect train
    epochs=3`` does, because what this command requires does not matter then.

    ``options``: what is typed besides. The line for another command ends with those that it has.
    """
    other_command = _other_command(command, words)
    if other_command:
        translated = _translate_words(other_command, words, mistakes)
        _add_mistakes(translated, _line_for(other_command, translated.flags, options), mistakes)
        mistakes.raise_any()
    translated = _translate_words(command, words, mistakes)
    _add_mistakes(translated, shlex.join(translated.flags), mistakes)
    return translated.flags


def words_of_mode(mode: str) -> list[str]:
    """Returns the command for a mode of the yolo command, and the flags that it needs; nothing for other words."""
    command = table().modes.get(mode)
    if command is None:
        return []
    translation = translate_listed_value(command, "mode", mode)
    return [command, *words_of_settings(translation.settings if translation else {})]


def _other_command(command: str, words: Sequence[str]) -> str:
    """Returns the command for the mode that is among ``words``, or "" if ``command`` is for this mode."""
    for word in words:
        mode = word.removeprefix("mode=")
        if _is_mode(word) and translate_listed_value(command, "mode", mode) is None:
            return table().modes[mode]
    return ""


def _is_mode(word: str) -> bool:
    """Returns whether a word is a mode of the yolo command, ``train`` or ``mode=train``."""
    return word.removeprefix("mode=") in table().modes


def _translate_words(command: str, words: Sequence[str], mistakes: Mistakes) -> _TranslatedWords:
    """Translates words for the right ``command``. Adds wrong values of its settings to ``mistakes``."""
    settings: dict[str, SettingText] = {}
    understood: list[str] = []
    refused: dict[str, list[str]] = {}
    for word in words:
        translation = _translate_word(command, word)
        if translation.refusal:
            refused.setdefault(translation.refusal, []).append(word)
            continue
        with mistakes.collecting():
            for setting, text in translation.settings.items():  # no advice to write what the flag refuses
                checked_setting(owner_of(command, setting), setting, text, word)
            if _is_mode(word):  # its settings are defaults, wherever it stands: track without tracker=
                settings = {**translation.settings, **settings}
            else:
                settings |= translation.settings
            understood.append(word)
    if settings.get("resume") == "" and "weights" in settings:  # model=last.pt resume=True
        settings["resume"] = settings.pop("weights")
    return _TranslatedWords(words_of_settings(settings), understood, refused)


def _add_mistakes(translated: _TranslatedWords, line: str, mistakes: Mistakes) -> None:
    """Adds the advice to write ``line`` instead of the words that it replaces, and the reasons for refused words."""
    if translated.understood:
        advice = f"settings are flags here; write {line}" if line else "not needed here; leave this out"
        mistakes.add(f"{' '.join(translated.understood)}: {advice}")
    for reason, words in translated.refused.items():
        mistakes.add(f"{first_words(words)}: {reason}")


def _line_for(command: str, flags: Sequence[str], options: Sequence[Option]) -> str:
    """Returns the line of another command to write instead, and which of the typed ``options`` it does not have."""
    words = list(flags)
    missing: list[str] = []
    for option in options:
        if _takes(command, option):
            words += option.words
        else:
            missing.append(option.typed_flag)
    line = f"{COMMANDS[command].typed} {shlex.join(words)}".strip()
    return f"{line} (it has no {', '.join(missing)})" if missing else line


def _takes(command: str, option: Option) -> bool:
    """Returns whether a command, which need not be the typed one, has the flag of an option, or translates it with its
    value, as ``--plots False`` to ``--noplots``."""
    option = Option(option.words, equivalent_words(command, option.typed_flag))
    if option.flag in actions_of(command):
        return True
    translated = translate_option(command, option)
    if translated.words:
        return translated.words[0].partition("=")[0] in actions_of(command)
    return not translated.log_line and not translated.mistake


def _translate_word(command: str, word: str) -> Translation:
    """Translates a word of the yolo command. An unknown one is refused, too."""
    if word.startswith(_LONG_DASHES):  # pasted from formatted text
        return Translation(refusal=f"begins with another dash; write --{word.lstrip(''.join(_LONG_DASHES))}")
    name, separator, value = word.partition("=")
    if not separator:
        return _translate_bare_word(command, word)
    if name == "model" and value and "--weights" in actions_of(command):
        return _translate_model(command, value)
    translation = translate_argument(command, name, value)
    if translation is not None:
        return translation
    if not value and lists_argument(command, name):  # mode=
        return Translation(refusal=NOT_ONE_LINE)
    hint = suggestion(flag_name(name), actions_of(command), _MIN_SIMILARITY)
    return Translation(refusal=f"settings are flags here{hint}; see docs/migration.md")


def _translate_bare_word(command: str, word: str) -> Translation:
    """Translates a word without a value: a mode or task, ``yolo detect train``, or what may be true, ``resume``."""
    for argument in ("mode", "task"):
        listed = translate_listed_value(command, argument, word)
        if listed is not None:
            return listed
    translation = translate_argument(command, word, "True")
    if translation is not None and not translation.refusal:
        return translation
    if word.endswith(WEIGHTS_SUFFIXES) and "--weights" in actions_of(command):
        return Translation(refusal="is not expected here; --weights takes checkpoints")
    hint = suggestion(flag_name(word), actions_of(command), _MIN_SIMILARITY)
    return Translation(refusal=f"is not expected here{hint}; settings are flags (--help lists them)")


def _translate_model(command: str, model: str) -> Translation:
    """Translates ``model=yolov8n.pt``, weights, and ``model=yolov8n.yaml``, a model without weights."""
    task_reason = other_task(model)
    if task_reason:  # yolov8n-seg.pt
        return Translation(refusal=task_reason.removeprefix(f"{model}: "))
    if not model.endswith(_YAMLS):
        return Translation({"weights": model})
    if "--model" in actions_of(command):
        return Translation({"model": model})
    return Translation(refusal=f"is not trained; {flag_name('weights')} takes a checkpoint")
