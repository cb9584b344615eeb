"""Command lines for the settings of `utils.config.commands`: one flag per field, or a positional argument."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import keyword
import math
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
from utils.schema import check, hints_of, suggestion, type_of

_MANY_FLAGS = 60  # --help of a command with so many shows the first ones


def flag_name(name: str) -> str:
    """Returns the flag of the field ``name``, such as ``--batch-size``, or ``--from`` for ``from_`` ("from" is a
    keyword)."""
    stem = name.removesuffix("_")
    return "--" + (stem if keyword.iskeyword(stem) else name).replace("_", "-")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors, with suggestions for misspelled flags."""

    def unknown_message(self, words: Sequence[str], arguments: Sequence[str]) -> str:
        """Describes the ``words`` of the command line ``arguments`` that `parse_known_args` did not recognize."""
        flags = [word for word in words if word.startswith("-")]
        descriptions = [flag + self._hint(flag.partition("=")[0]) for flag in flags]
        if not flags:  # otherwise these words are probably values of the unknown flags
            more = f" and {len(words) - 1} more" if len(words) > 1 else ""
            descriptions = [f"{words[0]}{more}{self._flag_before(words[0], arguments)}"]
        return f"unrecognized arguments: {', '.join(descriptions)}"

    def _flag_before(self, word: str, arguments: Sequence[str]) -> str:
        """Returns how many values the flag takes that is the last one before ``word``."""
        typed = [flag for flag in arguments[: arguments.index(word)] if flag.startswith("-")]
        flag = typed[-1].partition("=")[0] if typed else ""
        action = self._option_string_actions.get(flag)
        if action is None or action.nargs == "+":
            return ""
        if isinstance(action, argparse.BooleanOptionalAction):
            on, off = flag_name(action.dest), flag_name(f"no_{action.dest}")
            return f" ({flag} takes no value; {on} is on, {off} is off)"
        return f" ({flag} takes one value; a pattern such as '*.jpg' belongs in quotes)"

    def _hint(self, flag: str) -> str:
        """Returns a suggestion for an unknown flag, or "" if nothing is similar."""
        actions = self._option_string_actions
        if flag in actions:
            return " (write flags before '--')"
        key = flag.removeprefix("--").replace("-", "_")
        named = [f"{name}=VALUE" for name in HYPERPARAMETERS if name.startswith(key) and "--set" in actions]
        if named:
            return f" (hyper-parameters follow --set: {', '.join(named)})"
        completions = [known for known in actions if known.startswith(flag)]
        return suggestion(flag, completions or actions, 0.0 if len(completions) == 1 else 0.75)

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


_NOT_GIVEN: list[str] = []  # value of a setting that no word sets; a list, because `--set` adds to it
_YAML_END = "...\n"  # after a document that is a number
_NEGATIVE_NUMBER = re.compile(r"-\d+").fullmatch


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
    """Adds the flag of a field: a switch, several words for a list, or one word, which ``const`` makes optional."""
    kind = type_of(field, owner)
    metadata = field.metadata
    default = default_of(field)
    options: dict[str, Any] = {"help": metadata["help"], "dest": field.name}
    options["default"] = None if default is MISSING else default
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        choices = metadata["bounds"].choices
        (element_type,) = typing.get_args(kind) or (kind,)
        options["type"] = functools.partial(choice_of, choices=choices) if choices else element_type
        options["choices"] = choices
        if typing.get_origin(kind) is list:
            options["nargs"] = "+"
        elif metadata["const"] is not None:
            options |= {"nargs": "?", "const": metadata["const"]}
        if field.name == "override":
            options |= {"action": "extend", "metavar": "KEY=VALUE"}
    group.add_argument(flag_name(field.name), *metadata["aliases"], **options)


@functools.cache
def flag_actions(cls: type) -> dict[str, argparse.Action]:
    """Returns the argparse actions by flag, including aliases."""
    actions = build_parser(cls)._option_string_actions
    return {name: action for name, action in actions.items() if action.dest not in ("help", "help_all")}


def given_values(cls: type, arguments: Sequence[str], mistakes: Mistakes) -> dict[str, Any]:
    """Parses a command line in our flags. Returns the checked values of the fields that it sets, and adds errors,
    including missing values of required settings, to ``mistakes``."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = hints_of(cls)
    parsed = argparse.Namespace(**dict.fromkeys(fields, _NOT_GIVEN))
    parser = build_parser(cls)
    with mistakes.collecting():
        # Raises UserError at a word that is no value of its flag; then nobody knows what the words after it set.
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
            values[name] = check(value, hints[name], shown_name(field), field.metadata["bounds"])
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
            words += [flag, *map(str, value)]
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


def _looks_like_flag(value: str) -> bool:
    """Returns whether argparse takes a word for a flag."""
    return value.startswith("-") and not _NEGATIVE_NUMBER(value)
