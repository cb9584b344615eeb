"""Command lines for the settings of `utils.config.commands`: one flag per field, or a positional argument."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import keyword
import math
import re
import shlex
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from utils.config.aliases import LEFT_OUT, RENAMED, instead_of, switches
from utils.config.commands import command_of
from utils.config.settings import FIRST_SETTINGS, HYPERPARAMETERS, TOPICS, changed_settings, default_of
from utils.errors import UserError
from utils.schema import suggestion, type_of

_MANY_FLAGS = 50  # --help of a command with so many shows the first ones
_YAML_END = "...\n"  # after a document that is a number


def flag_name(name: str) -> str:
    """Returns the flag of the field ``name``, such as ``--batch-size``, or ``--from`` for ``from_`` ("from" is a
    keyword)."""
    stem = name.removesuffix("_")
    return "--" + (stem if keyword.iskeyword(stem) else name).replace("_", "-")


def shown_name(field: dataclasses.Field) -> str:
    """Returns the name of a setting in messages: its flag, or a positional argument's name in --help."""
    return field.metadata["positional"] or flag_name(field.name)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors, with suggestions for misspelled flags."""

    def unknown_message(self, words: Sequence[str]) -> str:
        """Describes the ``words`` that `parse_known_args` did not recognize."""
        flags = [word for word in words if word.startswith("-")]
        if flags:  # other words are probably their values
            descriptions = [flag + self._nearest(flag.partition("=")[0]) for flag in flags]
            return f"unrecognized arguments: {', '.join(descriptions)}"
        shown = f"{' '.join(words[:3])}{' ...' if len(words) > 3 else ''}"
        return f"unrecognized arguments: {shown} (no flag takes these; a pattern such as '*.jpg' belongs in quotes)"

    def _nearest(self, flag: str) -> str:
        """Returns a suggestion for an unknown flag, or "" if nothing is similar."""
        actions = self._option_string_actions.items()
        known = [name for name, action in actions if not isinstance(action, _ForeignFlag)]
        if "--set" in known:
            known += map(flag_name, HYPERPARAMETERS)
        completions = [name for name in known if name.startswith(flag)]
        return suggestion(flag, completions or known, 0.6 if completions else 0.75)

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("ignored explicit argument", "takes no value, got"))


class _ForeignFlag(argparse.Action):
    """A flag of another program: it is refused with what to do ``instead``, in which VALUE is the flag's, or left out
    for a ``reason`` that is logged, or sets ``settings``."""

    def __init__(
        self, *, settings: Mapping[str, Any] | None = None, reason: str = "", instead: str = "", **options: Any
    ) -> None:
        super().__init__(**options)
        self._settings = settings or {}
        self._reason = reason
        self._instead = instead

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        if self._instead:
            raise UserError(f"{flag}: {self._instead.replace('VALUE', value or 'VALUE')}")
        if self._reason:
            from utils.logger import log_when_configured  # imports logging, which --help does not need

            log_when_configured(f"{flag}{f' {value}' if value else ''}: {self._reason}; left out")
        for name, setting in self._settings.items():
            setattr(namespace, name, setting)


class _HelpAll(argparse.Action):
    """Prints the help of all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        build_parser(self.const, all_flags=True).print_help()
        parser.exit()


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Leaves out empty defaults, whose meaning most help texts state, and the second of two equal image sides."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        is_one_value = action.nargs == "+" and isinstance(action.default, int)
        return default_metavar if is_one_value else super()._format_args(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "", []) else super()._get_help_string(action)


@functools.cache
def build_parser(cls: type, *, all_flags: bool = False) -> Parser:
    """Creates the parser of a command with the settings ``cls``: one flag per field, or a positional argument if the
    field is ``positional``. Booleans have ``--x`` and ``--no-x``. The help of a command with many flags lists
    `FIRST_SETTINGS` unless ``all_flags``."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    positional = [field for field in fields.values() if field.metadata["positional"]]
    flags = [field for field in fields.values() if not field.metadata["positional"]]
    shows_all = all_flags or len(flags) < _MANY_FLAGS
    command = command_of(cls)
    required = [flag_name(field.name) + " " + field.name.upper() for field in flags if default_of(field) is MISSING]
    parser = Parser(
        prog=command.typed,
        usage=" ".join(["%(prog)s", *map(shown_name, positional), *required, "[flags]"]),
        description=command.description + ("" if shows_all else " --help-all lists all flags."),
        epilog=f"example: {command.typed} {command.example}",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    help_all = "show all flags and exit"
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, const=cls, help=help_all, default=argparse.SUPPRESS)
    for field in positional:
        action = parser.add_argument(field.name, metavar=field.metadata["positional"], help=field.metadata["help"])
        action.required = False  # the parser of settings lists missing ones, with all other mistakes
    for topic, names in TOPICS.items():
        group = parser.add_argument_group(topic)
        for field in [fields[name] for name in names.split() if fields.get(name) in flags]:
            is_shown = shows_all or field.name in FIRST_SETTINGS.split()
            help_text = field.metadata["help"] if is_shown else argparse.SUPPRESS
            _add_flag(group, [flag_name(field.name), *field.metadata["aliases"]], field, cls, help_text)
    _add_foreign_flags(parser, cls)
    return parser


def _add_foreign_flags(parser: Parser, cls: type) -> None:
    """Adds flags of other programs (aliases.py), which --help does not list. Those that are ours, too, are ours."""
    command = command_of(cls).name
    fields = {field.name: field for field in dataclasses.fields(cls)}

    def add(name: str, **options: Any) -> None:
        if flag_name(name) not in parser._option_string_actions:
            hidden = argparse.SUPPRESS
            parser.add_argument(
                flag_name(name), action=_ForeignFlag, dest=hidden, default=hidden, help=hidden, **options
            )

    for name, settings in switches(fields):
        add(name, settings=settings, nargs=0)
    for name, ours in {**dict(zip(HYPERPARAMETERS, HYPERPARAMETERS)), **RENAMED}.items():
        if ours in fields and name not in fields:
            _add_flag(parser, [flag_name(name)], fields[ours], cls, argparse.SUPPRESS)
        elif ours in HYPERPARAMETERS and "override" in fields:
            add(name, instead=f"is a hyper-parameter; write --set {ours}=VALUE", nargs="?")
    for name, reason in LEFT_OUT.get(command, {}).items():
        add(name, reason=reason, nargs="?")
    for name, reason in instead_of(command).items():
        add(name, instead=reason, nargs="?")


def _add_flag(
    group: argparse._ActionsContainer, names: Sequence[str], field: dataclasses.Field, owner: type, help_text: str
) -> None:
    """Adds the flag of a field: a switch, several words for a list, or one word, which ``const`` makes optional. The
    parser returns words, which are converted and checked as values from Python are (`checked_setting`)."""
    kind = type_of(field, owner)
    default = default_of(field)
    options: dict[str, Any] = {"help": help_text, "dest": field.name}
    options["default"] = None if default is MISSING else default
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        choices = field.metadata["bounds"].choices
        if choices:
            options["metavar"] = f"{{{','.join(choices)}}}"
        if typing.get_origin(kind) is list:
            options["nargs"] = "+"
        elif field.metadata["const"] is not None:
            options |= {"nargs": "?", "const": field.metadata["const"]}
    group.add_argument(*names, **{**options, **field.metadata["flag"]})


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
        elif value == "" or re.match(r"-(?!\d+$)", str(value)):  # the value of a flag alone, or like a flag
            words.append(f"{flag}={value}")
        else:
            words += [flag, str(value)]
    return words


def as_flag(name: str, value: Any) -> str:
    """Returns a setting or hyper-parameter as it is typed on a command line."""
    return shlex.join(words_of_settings({name: value}))


def unused_lines(table: Iterable[tuple[str, bool, str]], given: Mapping[str, str]) -> list[str]:
    """Returns a line for each row of a table of settings without effect whose settings are ``given``, which has their
    flags by name. A row has names, whether they have no effect, and the reason, which follows "does nothing"."""
    lines = []
    for names, is_unused, reason in table:
        flags = [given[name] for name in names.split() if name in given]
        if is_unused and flags:
            lines.append(f"{' and '.join(flags)} {'do' if len(flags) > 1 else 'does'} nothing{reason}")
    return lines


def override_of(name: str, value: Any) -> str:
    """Returns a hyper-parameter as ``--set`` takes it."""
    import yaml  # not needed for --help

    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return f"{name}={text.removesuffix(_YAML_END).strip()}"


def flags_as_keywords(text: str) -> str:
    """Returns ``text`` with our flags named as keywords of Python."""
    return re.sub(r"--([a-z][a-z0-9-]*)(?![\w=])", lambda match: f"`{match[1].replace('-', '_')}`", text)
