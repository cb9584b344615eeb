"""Translates flags of YOLOv5 and Ultralytics with their values (`utils.config.other_programs.table`)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from utils.config.flags import first_words, words_of_settings
from utils.config.other_programs.arguments import (
    Translation,
    is_list,
    translate_argument,
    translate_listed_value,
    words_of,
)
from utils.config.other_programs.table import actions_of, hyperparameter_of, max_typed_values, normalized, table_of
from utils.config.other_programs.typed_words import Option


@dataclass(frozen=True)
class TranslatedOption:
    """What an option becomes.

    Args:
        words: in our flags.
        log_line: why the option has no effect, or what was made of its value; "" if it means the same here.
        mistake: why it is refused; "" if it is not.
    """

    words: list[str] = field(default_factory=list)
    log_line: str = ""
    mistake: str = ""


def translate_option(command: str, option: Option) -> TranslatedOption:
    """Translates one option. For train:

    | option | becomes | because |
    | --- | --- | --- |
    | ``--save-period -1`` | ``--save-period 0`` | `_translate_as_argument`: the table lists this value |
    | ``--task detect`` | nothing | `_translate_as_argument`: it says what happens anyway |
    | ``--save False`` | a mistake with the reason | what it asks for does not exist here |
    | ``--quiet`` | a log line | it has no effect |
    | ``--lr0 0.1`` | a mistake that suggests ``--set lr0=0.1`` | `_refusal` |
    | ``--noval`` | ``--val-every 0`` | `equivalent_words`: it has another name here |
    | ``--epochs 3`` | the same words | it is our flag, or not in the table |
    """
    translation = _translate_as_argument(command, option)
    if translation is not None:
        log_line = ""
        if translation.without_effect:
            log_line = f"{option.flag}: {translation.without_effect}"
        elif translation.note:
            log_line = f"{option.flag} {option.values[0]}: {translation.note}"
        return TranslatedOption(
            words=words_of_settings(translation.settings),
            log_line=log_line,
            mistake=_surplus_message(option, num_values=1),
        )
    if option.flag in table_of(command).without_effect:
        return _drop(command, option)
    refusal = _refusal(command, option)
    return TranslatedOption(mistake=refusal) if refusal else TranslatedOption(option.words_in_our_flags)


def _drop(command: str, option: Option) -> TranslatedOption:
    """Drops a flag without effect, with its value if it has one. Refuses ``--save False``, which asks for something
    else than what happens anyway; `_translate_as_argument` has handled the flags for which it does not."""
    reason = table_of(command).without_effect[option.flag]
    takes_value = max_typed_values(command, option.typed_flag) == 1
    if not takes_value and option.values and normalized(option.values[0]) == "false":
        return TranslatedOption(mistake=f"{option.flag} {option.values[0]}: {reason}")
    num_values = int(takes_value or option.is_joined)
    return TranslatedOption(log_line=f"{option.flag}: {reason}", mistake=_surplus_message(option, num_values))


def _surplus_message(option: Option, num_values: int) -> str:
    """Describes the words after the values of an option, or returns "" if there are none. The parser would take them
    for values of the flag before, because the option itself is translated or dropped."""
    surplus = option.values[num_values:]
    if not surplus:
        return ""
    understood = " ".join(option.words[: -len(surplus)])
    return f"unrecognized arguments: {first_words(surplus)} (after {understood})"


def _translate_as_argument(command: str, option: Option) -> Translation | None:
    """Returns what a flag with its first value means if these are an argument. Returns None for other options, for
    which `_refusal` or the parser gives a reason. The first row that applies:

    | option | means | because |
    | --- | --- | --- |
    | ``--noval`` | None | it has no value |
    | ``--task detect`` | nothing | the table lists this value |
    | ``--mode track`` | None | the tracker of ``--track`` would be replaced |
    | ``--epochs 3`` | None | `_may_be_argument`: our flag takes the value |
    | ``--freeze [3]`` | ``--freeze 3 3`` | `translate_argument`, unless it refuses the value |
    """
    if not option.values:
        return None
    name = _argument_name(option.typed_flag)
    value = option.values[0]
    listed = translate_listed_value(command, name, value)
    if listed is not None:
        is_mode = name == "mode" and bool(listed.settings)  # `--mode track`, which would replace the tracker of --track
        return None if is_mode else listed
    if not _may_be_argument(command, option.typed_flag, value):
        return None
    translation = translate_argument(command, name, value)
    return None if translation is None or translation.refusal else translation


def _may_be_argument(command: str, flag: str, value: str) -> bool:
    """Returns whether a flag with a value that the table does not list may be meant as an argument."""
    action = actions_of(command).get(flag)
    if action is not None:
        return is_list(value, action)  # --freeze [3]
    name = _argument_name(flag)
    if name == "pretrained" or hyperparameter_of(command, name):
        return False  # as flags, these are refused with any value
    # Keywords and files may set what belongs to other commands; a flag that does so is refused.
    is_ignored = name in table_of(command).ignored_arguments
    text = normalized(value)
    return text in ("false", "none") or (text == "true" and not is_ignored)


def _refusal(command: str, option: Option) -> str:
    """Returns the reason why the command does not take the option, or "" if the table has none."""
    flag = option.flag
    if flag in actions_of(command):
        reasons = table_of(command).refused_values.get(flag, {})
        action = actions_of(command)[flag]
        words = [word for value in option.values for word in words_of(value, action)]
        refused = [f"{word}: {reasons[normalized(word)]}" for word in words if normalized(word) in reasons]
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
