"""Command lines for the settings of `utils.config.commands`: one flag per field, or a positional argument."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import keyword
import math
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from utils.config.commands import command_of
from utils.config.settings import FIRST_SETTINGS, HYPERPARAMETERS, TOPICS, changed_settings, default_of
from utils.errors import Mistakes, UserError
from utils.schema import Bounds, check, hints_of, suggestion, type_of

_MAX_SHOWN_WORDS = 8  # of `first_words`
_MANY_FLAGS = 60  # --help of a command with so many shows the first ones


def flag_name(name: str) -> str:
    """Returns the flag of the field ``name``, such as ``--batch-size``, or ``--from`` for ``from_`` ("from" is a
    keyword)."""
    stem = name.removesuffix("_")
    return "--" + (stem if keyword.iskeyword(stem) else name).replace("_", "-")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors, with suggestions for misspelled flags."""

    def unknown_message(self, words: Sequence[str], arguments: Sequence[str]) -> str:
        """Describes the ``words`` of the command line ``arguments`` that `parse_known_args` did not recognize: each
        flag with its values, and the closest known flag."""
        groups: list[list[str]] = []
        for word in words:
            if word.startswith("-") or not groups:
                groups.append([])
            groups[-1].append(word)
        descriptions = [self._describe_unknown(group, arguments) for group in groups]
        return f"unrecognized arguments: {', '.join(descriptions)}"

    def _describe_unknown(self, words: Sequence[str], arguments: Sequence[str]) -> str:
        """Describes an unknown flag with its values, or words that no flag takes."""
        shown = first_words(words)
        name = words[0].partition("=")[0]
        if name.startswith("-"):
            return shown + self._hint(name)
        typed_flag = self._flag_before(words[0], arguments)
        flag = typed_flag.partition("=")[0]
        # The shell may have replaced a pattern by matching files.
        if flag == "--source" and os.path.exists(words[0]):
            return f"{shown} (if you meant a pattern such as '*.jpg', put it in quotes)"
        action = self._option_string_actions.get(flag)
        if isinstance(action, argparse.BooleanOptionalAction):
            opposite = next(other for other in action.option_strings if _is_negative(other) != _is_negative(flag))
            effect = "on" if _is_negative(flag) else "off"
            return f"{shown} ({flag} takes no value; {opposite} switches it {effect})"
        if action is not None and max_values(action) is None:  # only joined to its first value does it take one
            return f"{shown} (write {flag} and its values as words of their own, without '=')"
        return f"{shown} ({flag} takes one value)" if flag else shown

    def _flag_before(self, word: str, arguments: Sequence[str]) -> str:
        """Returns the flag, as typed, after whose values ``word`` is, before the next flag; "" if there is none."""
        for index, typed_flag in enumerate(arguments):
            if not typed_flag.startswith("-"):
                continue
            flag, is_joined, _ = typed_flag.partition("=")
            action = self._option_string_actions.get(flag)
            limit = max_values(action) if action else 1
            num_values = 0 if is_joined else limit
            following = list(itertools.takewhile(lambda other: not other.startswith("-"), arguments[index + 1 :]))
            if num_values is not None and word in following[num_values:]:
                return typed_flag
        return ""

    def _hint(self, flag: str) -> str:
        """Returns a suggestion for a flag that is misspelled, abbreviated, that of a positional argument, or a
        hyper-parameter, or "" if nothing is similar. argparse does not recognize a correct flag after ``--``."""
        actions = self._option_string_actions
        if flag in actions:
            return " (write flags before '--')"
        positional = [action for action in self._actions if not action.option_strings]
        if flag in (flag_name(action.dest) for action in positional):
            words = " ".join(str(action.metavar) for action in positional)
            return f" (has no flag here: {self.prog} {words})"
        key = flag.removeprefix("--").replace("-", "_")
        named = [name for name in HYPERPARAMETERS if name.startswith(key) and "--set" in actions]
        hint = f" (hyper-parameters follow --set: {', '.join(f'{name}=VALUE' for name in named)})" if named else ""
        if key in named:
            return hint
        completions = [known for known in actions if known.startswith(flag)]
        if len({actions[known].dest for known in completions}) == 1:
            return f" (did you mean '{completions[0]}'?)"
        return suggestion(flag, actions, 0.75) or hint

    def format_help(self, *, all_flags: bool = False) -> str:
        """Returns the text of --help: of a command with many flags, only those of `FIRST_SETTINGS`, unless
        ``all_flags``."""
        has_few = len(self._actions) < _MANY_FLAGS
        first_settings = FIRST_SETTINGS.split()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            shown = [
                action
                for action in group._group_actions
                if all_flags or has_few or action.dest in first_settings or not action.option_strings
            ]
            if shown:
                formatter.start_section(group.title)
                formatter.add_arguments(shown)
                formatter.end_section()
        if not all_flags and not has_few:
            formatter.add_text(f"{self.prog} --help-all lists all flags")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("ignored explicit argument", "takes no value, got"))


def first_words(words: Sequence[str]) -> str:
    """Returns the ``words`` for a message, or the first ones and how many follow."""
    shown = " ".join(words[:_MAX_SHOWN_WORDS])
    if len(words) > _MAX_SHOWN_WORDS:
        shown += f" and {len(words) - _MAX_SHOWN_WORDS} more"
    return shown


def max_values(action: argparse.Action) -> int | None:
    """Returns how many words after a flag are its values at most; None: any number."""
    if action.nargs == "+":
        return None
    return 0 if action.nargs == 0 else 1


def _is_negative(flag: str) -> bool:
    """Returns whether a flag of a switch sets it to false."""
    return flag.startswith("--no-")


class ListedChoices(tuple):
    """Choices that --help lists. argparse accepts any word; `check` reports a wrong one together with other
    mistakes."""

    __slots__ = ()

    def __contains__(self, _: object) -> bool:
        return True


def int_or_text(word: str) -> int | str:
    """Converts ``word`` to an integer. Returns other words unchanged for `check` to report with the other mistakes."""
    with contextlib.suppress(ValueError):
        return int(word)
    return word


def float_or_text(word: str) -> float | str:
    """Converts ``word`` to a float. Returns other words unchanged, as `int_or_text` does."""
    with contextlib.suppress(ValueError):
        return float(word)
    return word


_NOT_GIVEN: list[str] = []  # value of a setting that no word sets; a list, because `_ExtendTexts` adds to it
_YAML_END = "...\n"  # after a document that is a number
_JSON_LIST = '["'  # start of a word that is a JSON list of strings
_NEGATIVE_NUMBER = re.compile(r"-\d+").fullmatch
_READERS = {int: int_or_text, float: float_or_text, str: str}


class _StoreTexts(argparse.Action):
    """Stores the words after a flag, or the elements of a single word that is a JSON list. `words_of_settings` writes
    such a list if one of its elements looks like a flag."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        texts = values
        if len(values) == 1 and values[0].startswith(_JSON_LIST):
            with contextlib.suppress(ValueError, RecursionError):
                texts = json.loads(values[0])
        setattr(namespace, self.dest, self._combined(getattr(namespace, self.dest), texts))

    def _combined(self, earlier: list[str], texts: list[str]) -> list[str]:
        """Returns the value of a flag that is given again. ``earlier``: the value so far."""
        return texts


class _ExtendTexts(_StoreTexts):
    """Adds to the words of the same flag before."""

    def _combined(self, earlier: list[str], texts: list[str]) -> list[str]:
        return [*earlier, *texts]


class _HelpAll(argparse.Action):
    """Prints the help of all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_help(all_flags=True), sys.stdout)
        parser.exit()


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Leaves out empty defaults, whose meaning most help texts state."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "", []) else super()._get_help_string(action)


@functools.cache
def build_parser(cls: type) -> Parser:
    """Creates the parser of a command with the settings ``cls``: one flag per field, or a positional argument if the
    field is ``positional``. Booleans have ``--x`` and ``--no-x``."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    command = command_of(cls)
    required = [
        field.metadata["positional"] or f"{flag_name(field.name)} {field.name.upper()}"
        for field in required_fields(cls)
    ]
    parser = Parser(
        prog=command.typed,
        usage=" ".join(["%(prog)s", *required, "[flags]"]),
        description=command.description,
        epilog=f"example: {command.typed} {command.example}",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--help-all", action=_HelpAll, nargs=0, help="show all flags and exit", default=argparse.SUPPRESS
    )
    for field in fields.values():
        if field.metadata["positional"]:
            action = parser.add_argument(field.name, metavar=field.metadata["positional"], help=field.metadata["help"])
            action.required = False  # `given_values` lists missing ones, with all other mistakes
    for topic, names in TOPICS.items():
        topic_fields = [fields[name] for name in names.split() if name in fields]
        topic_fields = [field for field in topic_fields if not field.metadata["positional"]]
        if topic_fields:
            group = parser.add_argument_group(topic)
            for field in topic_fields:
                _add_flag(group, field, cls)
    return parser


def required_fields(cls: type) -> list[dataclasses.Field]:
    """Returns the fields without a default."""
    return [field for field in dataclasses.fields(cls) if default_of(field) is MISSING]


def shown_name(field: dataclasses.Field) -> str:
    """Returns the name of a setting in messages: its flag, or a positional argument's name in --help."""
    return field.metadata["positional"] or flag_name(field.name)


def _add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field, owner: type) -> None:
    """Adds the flag of a field: a switch, several words for a list, or one word, which ``const`` makes optional. Words
    that are no numbers stay text, for `check` to report."""
    kind = type_of(field, owner)
    origin = typing.get_origin(kind) or kind
    metadata = field.metadata
    default = default_of(field)
    bounds: Bounds = metadata["bounds"]
    choices = None if bounds.choices is None else ListedChoices(bounds.choices)
    options: dict[str, Any] = {"help": metadata["help"], "dest": field.name}
    options["default"] = None if default is MISSING else default
    if origin is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif origin is list:
        (element_type,) = typing.get_args(kind)
        options |= {"nargs": "+", "type": _READERS[element_type], "choices": choices}
        if element_type is str:
            options["action"] = _StoreTexts
        if field.name == "override":
            options |= {"action": _ExtendTexts, "metavar": "KEY=VALUE"}
    else:
        options |= {"type": _READERS[origin], "choices": choices}
        if metadata["const"] is not None:
            options |= {"nargs": "?", "const": metadata["const"]}
    group.add_argument(flag_name(field.name), *metadata["aliases"], **options)


@functools.cache
def flag_actions(cls: type) -> dict[str, argparse.Action]:
    """Returns the argparse actions by flag, including aliases."""
    actions = build_parser(cls)._option_string_actions
    return {name: action for name, action in actions.items() if action.dest not in ("help", "help_all")}


def given_values(cls: type, arguments: Sequence[str], mistakes: Mistakes) -> dict[str, Any]:
    """Parses a command line in our flags. Returns the checked values of the fields that it sets, and adds errors,
    including missing values of required settings, to ``mistakes``. Raises UserError for the value ``--``, which
    argparse would drop."""
    _check_single_values(arguments)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = hints_of(cls)
    parsed = argparse.Namespace(**dict.fromkeys(fields, _NOT_GIVEN))
    parser = build_parser(cls)
    with mistakes.collecting():
        # Raises UserError at a flag without its value; then nobody knows what the words after it set.
        _, unknown = parser.parse_known_args(arguments, parsed)
        if unknown:
            mistakes.add(parser.unknown_message(unknown, arguments))
        missing = [shown_name(field) for field in required_fields(cls) if getattr(parsed, field.name) is _NOT_GIVEN]
        if missing:
            mistakes.add(f"the following arguments are required: {', '.join(missing)}")
    values = {name: value for name, value in vars(parsed).items() if value is not _NOT_GIVEN}
    for name, value in values.items():
        field = fields[name]
        with mistakes.collecting():
            bounds = field.metadata["bounds"]
            values[name] = check(in_own_case(value, bounds.choices), hints[name], shown_name(field), bounds)
    return values


def choice_of(word: str, choices: Iterable[str] | None) -> str:
    """Returns the one of ``choices`` that ``word`` is in another case, or else ``word``."""
    return next((choice for choice in choices or () if choice.lower() == word.lower()), word)


def in_own_case(value: Any, choices: Iterable[str] | None) -> Any:
    """Returns a word, or the words of a list, as the ``choices`` that they are in another case. Returns other values
    unchanged."""
    if isinstance(value, list):
        return [in_own_case(element, choices) for element in value]
    return choice_of(value, choices) if isinstance(value, str) else value


def _check_single_values(arguments: Sequence[str]) -> None:
    """Raises UserError for the value ``--`` joined to a flag, as in ``--flag=--``, or after the word ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    joined = [word.partition("=")[2] for word in arguments[:end] if word.startswith("-")]
    if "--" in [*joined, *arguments[end + 1 :]]:
        raise UserError("'--' ends the flags, so it cannot be a value; write './--' for a file of this name")


def flags_of(config: Any) -> list[str]:
    """Returns the command line for the settings ``config``."""
    return words_of_settings(changed_settings(config))


def words_of_settings(settings: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that set settings and hyper-parameters, by name, as users type them. Text
    of a hyper-parameter is YAML. No flag sets an empty list."""
    words: list[str] = []
    for name, value in settings.items():
        flag = flag_name(name)
        if name in HYPERPARAMETERS:
            words += ["--set", f"{name}={value}" if isinstance(value, str) else override_of(name, value)]
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            words += _words_of_list(flag, [str(element) for element in value])
        elif name == "resume" and value == "":  # the newest run
            words.append(flag)
        else:
            text = str(value)
            words += [f"{flag}={text}"] if _looks_like_flag(text) else [flag, text]
    return words


def as_flag(name: str, value: Any) -> str:
    """Returns a setting or hyper-parameter as it is typed on a command line."""
    return shlex.join(words_of_settings({name: value}))


def override_of(name: str, value: Any) -> str:
    """Returns a hyper-parameter as ``--set`` takes it."""
    import yaml  # not needed for --help

    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return f"{name}={text.removesuffix(_YAML_END).strip()}"


def _words_of_list(flag: str, values: Sequence[str]) -> list[str]:
    if not any(_looks_like_flag(value) or value.startswith(_JSON_LIST) for value in values):
        return [flag, *values]
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{flag}={values[0]}"]
    return [f"{flag}={json.dumps(values)}"]  # `_StoreTexts`


def _looks_like_flag(value: str) -> bool:
    """Returns whether argparse takes a word for a flag."""
    return value.startswith("-") and not _NEGATIVE_NUMBER(value)
