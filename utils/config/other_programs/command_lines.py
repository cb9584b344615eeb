"""Translates command lines of YOLOv5 and Ultralytics (`utils.config.other_programs.table`)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from utils.config.flags import first_words, int_or_text
from utils.config.other_programs.arguments import (
    Translation,
    translate_argument,
    translate_listed_value,
    words_of_settings,
)
from utils.config.other_programs.table import (
    actions_of,
    hyperparameter_of,
    is_flag,
    max_values,
    normalized,
    same_flag,
    table_of,
)
from utils.config.other_programs.yolo_command import flags_of_yolo_words, split_words
from utils.errors import Mistakes


@dataclass(frozen=True)
class _Option:
    """The words of a command line from one flag to the next. Words before the first flag have the flag "".

    Args:
        words: as typed.
        our_flag_words: what the flag is here (`same_flag`).
    """

    words: list[str]
    our_flag_words: list[str]

    @property
    def typed_flag(self) -> str:
        return self.words[0].partition("=")[0]

    @property
    def flag(self) -> str:
        """Our flag if the typed one has another name here, else the typed one."""
        return self.our_flag_words[0]

    @property
    def is_joined(self) -> bool:
        """Whether the first value is joined to the flag, as in ``--flag=value``."""
        return "=" in self.words[0]

    @property
    def values(self) -> list[str]:
        following = self.words[1:]
        return [self.words[0].partition("=")[2], *following] if self.is_joined else following

    @property
    def words_in_our_flags(self) -> list[str]:
        _, separator, value = self.words[0].partition("=")
        *first, last = self.our_flag_words
        return [*first, last + separator + value, *self.words[1:]]


@dataclass(frozen=True)
class _TranslatedOption:
    """What an option becomes.

    Args:
        words: in our flags.
        log_line: why the option has no effect; "" if it has one.
        mistake: why it is refused; "" if it is not.
    """

    words: list[str] = field(default_factory=list)
    log_line: str = ""
    mistake: str = ""


def translate_command_line(command: str, arguments: Sequence[str], mistakes: Mistakes) -> tuple[list[str], list[str]]:
    """Returns the command line in our flags, and a log line for each flag that was dropped because it has no effect
    here. Adds to ``mistakes`` what is refused, with reasons, and what to write instead of words of the yolo command."""
    split = split_words(command, arguments)
    translated = flags_of_yolo_words(command, split.yolo_words, mistakes, flag_words=split.flag_words)
    log_lines: list[str] = []
    before_flags, *options = _split_options(command, split.flag_words)
    words = [*split.positional, *before_flags.values, *translated]  # the last flag may take all words after it
    for option in options:
        result = _translate_option(command, option)
        words += result.words
        if result.log_line:
            log_lines.append(result.log_line)
        if result.mistake:
            mistakes.add(result.mistake)
    return words, log_lines


def _translate_option(command: str, option: _Option) -> _TranslatedOption:
    """Translates one option. For train:

    | option | becomes | because |
    | --- | --- | --- |
    | ``--save-period -1`` | ``--save-period 0`` | `_translate_as_argument`: the table lists this value |
    | ``--task detect`` | nothing | `_translate_as_argument`: it says what happens anyway |
    | ``--save False`` | a mistake with the reason | what it asks for does not exist here |
    | ``--quiet`` | a log line | it has no effect |
    | ``--lr0 0.1`` | a mistake that suggests ``--set lr0=0.1`` | `_refusal` |
    | ``--noval`` | ``--val-every 0`` | `same_flag`: it has another name here |
    | ``--epochs 3`` | the same words | it is our flag, or not in the table |
    """
    translation = _translate_as_argument(command, option)
    if translation is not None:
        reason = translation.without_effect
        return _TranslatedOption(
            words=words_of_settings(translation.settings),
            log_line=f"{option.flag}: {reason}" if reason else "",
            mistake=_surplus_words(option, num_values=1),
        )
    reason = table_of(command).without_effect.get(option.flag, "")
    if reason and _is_switched_off(command, option):
        return _TranslatedOption(mistake=f"{option.flag} {option.values[0]}: {reason}")
    if reason:
        has_value = option.is_joined or max_values(command, option.typed_flag) == 1
        return _TranslatedOption(log_line=f"{option.flag}: {reason}", mistake=_surplus_words(option, int(has_value)))
    refusal = _refusal(command, option)
    return _TranslatedOption(mistake=refusal) if refusal else _TranslatedOption(option.words_in_our_flags)


def _is_switched_off(command: str, option: _Option) -> bool:
    """Returns whether a flag without effect has the value false. `_translate_as_argument` has handled the flags for
    which false is what happens anyway."""
    has_value = max_values(command, option.typed_flag) == 1  # which is dropped, whatever it is
    return not has_value and option.values[:1] != [] and normalized(option.values[0]) == "false"


def _surplus_words(option: _Option, num_values: int) -> str:
    """Describes the words after the values of an option, or returns "" if there are none. The parser would take them
    for values of the flag before, because the option itself is translated or dropped."""
    surplus = option.values[num_values:]
    if not surplus:
        return ""
    understood = " ".join(option.words[: -len(surplus)])
    return f"unrecognized arguments: {first_words(surplus)} (after {understood})"


def _split_options(command: str, arguments: Sequence[str]) -> list[_Option]:
    """Splits a command line before each flag."""
    options = [_Option([""], [""])]
    for argument in arguments:
        if is_flag(argument):
            options.append(_Option([argument], same_flag(command, argument.partition("=")[0])))
        else:
            options[-1].words.append(argument)
    return options


def _translate_as_argument(command: str, option: _Option) -> Translation | None:
    """Returns what a flag with its first value means if these are an argument, such as ``mode=train``. Returns None for
    other options, among them flags without meaning for the command, which only keywords and files may name."""
    if not option.values:
        return None
    name = _argument_name(option.typed_flag)
    value = option.values[0]
    text = normalized(value)
    action = actions_of(command).get(option.typed_flag)
    if action is not None and _is_list_of_numbers(value, action):  # --freeze [3]
        return translate_argument(command, name, value)
    listed = translate_listed_value(command, name, value)
    if name == "mode" and listed is not None and listed.settings:
        return None  # `--mode track` is no flag of the yolo command, and would replace what other flags set
    if action is not None or listed is not None:
        return listed
    if name == "pretrained" or hyperparameter_of(command, name):
        return None  # as flags, these are refused with any value
    is_ignored = name in table_of(command).ignored_arguments
    if text in ("false", "none") or (text == "true" and not is_ignored):
        translation = translate_argument(command, name, value)
        if translation is not None and not translation.refusal:
            return translation
    return None  # `_refusal` or the parser gives the reason


def _is_list_of_numbers(value: str, action: argparse.Action) -> bool:
    """Returns whether ``value`` is a list such as ``[0,1]``, which our flag takes as words."""
    return action.nargs == "+" and action.type is int_or_text and value.startswith(("[", "("))


def _refusal(command: str, option: _Option) -> str:
    """Returns the reason why the command does not take the option, or "" if the table has none."""
    flag = option.flag
    if flag in actions_of(command):
        reasons = table_of(command).refused_values.get(flag, {})
        refused = [f"{value}: {reasons[value]}" for value in option.values if value in reasons]
        return f"{flag} {'; '.join(refused)}" if refused else ""
    if flag in table_of(command).refused:
        return f"{flag}: {table_of(command).refused[flag]}"
    hyperparameter = hyperparameter_of(command, _argument_name(flag))
    if hyperparameter and flag.startswith("--"):
        value = option.values[0] if option.values else "VALUE"
        return f"{flag}: is a hyper-parameter; write --set {shlex.quote(f'{hyperparameter}={value}')}"
    return ""


def _argument_name(flag: str) -> str:
    """Returns the argument name of a flag: "batch_size" for ``--batch-size``."""
    return flag.removeprefix("--").replace("-", "_")
