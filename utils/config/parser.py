"""Reads the settings of a command from the words of a command line or the keywords of a Python function.

A command line has a flag for each field of the command's dataclass (utils/config/settings.py), and hidden ones for the
words of other programs (words.py). Each value is converted and checked by the type and the bounds of its field
(`_checked_setting`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn

from utils.address import as_address, full_address
from utils.config.commands import COMMANDS, command_of
from utils.config.flags import flag_name, flags_as_keywords, override_of, shown_name, words_of_settings
from utils.config.settings import (
    FIRST_SETTINGS,
    HYPERPARAMETERS,
    REQUIRED,
    TOPICS,
    Hyperparameters,
    TrainConfig,
    default_of,
)
from utils.config.words import ALIASES, ANSWERS, LEFT_OUT, MODES, Sets
from utils.errors import UserError, all_mistakes
from utils.schema import (
    DataclassT,
    build,
    check,
    hints_of,
    number_as_bool,
    parse_hint,
    plain_value,
    suggestion,
    type_of,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MANY_FLAGS = 50  # at least this many flags: `--help` lists only `FIRST_SETTINGS`
_STORED = "@"  # the only argument of a command whose settings are in the variable
_VARIABLE = "LOCKSTEP_SETTINGS"  # not an argument, which every user of the machine can read: addresses may have logins
_PYTHON_WORDS = {"true": True, "false": False, "none": None}
_NOT_GIVEN: list[str] = []  # value of a setting that no word sets; a list, because `--set` adds to it


@dataclass(frozen=True)
class ParsedCommand(Generic[DataclassT]):
    """The settings of a command, and which of them its user has given."""

    config: DataclassT
    explicit_flags: frozenset[str]  # names of the settings that are given


def parse_command(cls: type[DataclassT], argv: Sequence[str] | None) -> ParsedCommand[DataclassT]:
    """Parses a command line, or reads the settings of `settings_of_child`. ``argv`` None means this process's own.
    Raises UserError that lists the mistakes and what to write instead."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == [_STORED] and _VARIABLE in os.environ:
        content = json.loads(os.environ.pop(_VARIABLE))  # not for the processes that this one starts
        stored = {name: as_address(value) for name, value in content.items()}
        return ParsedCommand(build(cls, stored, "settings"), frozenset(stored))
    end = argv.index("--") if "--" in argv else len(argv)  # from there on, no word is a flag
    words = [*(re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv[:end]), *argv[end:]]

    if "--help-all" in words[:end]:
        build_parser(cls, all_flags=True).parse_args(["--help"])
    parser = build_parser(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    parsed = argparse.Namespace(**dict.fromkeys(fields, _NOT_GIVEN))
    values: dict[str, Any] = {}
    with all_mistakes() as mistakes:
        with mistakes.collecting():
            # Raises UserError at a flag that lacks its value, or has one and takes none.
            _, unknown = parser.parse_known_args(words, parsed)
            unknown = [word for word in unknown if word != "--"]
            if unknown and (re.match(r"\w+=", unknown[0]) or unknown[0] in (*MODES, "detect", "resume")):
                raise UserError(f"settings are flags: {_as_flags(cls, argv)}; see docs/migration.md")
            if unknown:
                mistakes.add(parser.unknown_message(unknown))
            required = [field for field in fields.values() if default_of(field) is REQUIRED]
            missing = [shown_name(field) for field in required if getattr(parsed, field.name) is _NOT_GIVEN]
            if missing:
                mistakes.add(f"the following arguments are required: {', '.join(missing)}")
        for name, value in vars(parsed).items():
            if value is not _NOT_GIVEN:
                with mistakes.collecting():
                    values |= _settings_of_flag(cls, name, value)
    return ParsedCommand(cls(**values), frozenset(values))


def _as_flags(cls: type[DataclassInstance], words: Sequence[str]) -> str:
    """Returns a line of the yolo command, such as ``train data=a.yaml rect=True``, as a command line of ours."""
    settings: dict[str, Any] = {}
    others: list[str] = []  # such as flags
    with all_mistakes() as mistakes:
        for word in words:
            name, _, value = word.partition("=")
            if word in MODES:
                cls = COMMANDS[MODES[word]].settings
            elif word == "resume":
                settings[word] = ""
            elif value:
                name = "weights" if name == "model" and value.endswith(".pt") else name
                with mistakes.collecting():
                    settings |= settings_of(cls, name, _PYTHON_WORDS.get(value.lower(), value))
            elif word != "detect":
                others.append(word)
    return f"{command_of(cls).typed} {shlex.join([*words_of_settings(settings), *others])}"


def _settings_of_flag(cls: type[DataclassInstance], name: str, value: Any) -> dict[str, Any]:
    """Returns the settings that a flag, of ours or of another program, sets to what the parser has read. A flag that
    does not take any text reads ``True``, ``False`` and ``None`` as Python's values. Raises UserError."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    field = vocabulary(cls).fields.get(name)
    if field is not None and name not in cls.__dataclass_fields__:
        raise UserError(f"{flag_name(name)}: is a hyper-parameter; write --set {field.name}={value}")
    choices = field.metadata["bounds"].choices or () if field else ()
    if field is None or (choices and value not in choices) or field.metadata["usage"].const is not None:
        value = _PYTHON_WORDS.get(str(value).lower(), value)
    return settings_of(cls, name, value, location=shown_name(field) if field else flag_name(name))


def parse_config(cls: type[DataclassT], argv: Sequence[str] | None) -> DataclassT:
    """Returns the settings of `parse_command`."""
    return parse_command(cls, argv).config


def settings_of_child(config: DataclassInstance, names: Collection[str] | None = None) -> tuple[str, dict[str, str]]:
    """Returns the only argument, and the environment variable, of a command that this program starts with the settings
    ``names`` (None: all) of ``config``. Flags cannot say them all: none sets an empty list, or resets a setting of a
    resumed run to its default without naming it."""
    given = {
        name: full_address(value)
        for name, value in dataclasses.asdict(config).items()
        if names is None or name in names
    }
    return _STORED, {_VARIABLE: json.dumps(given)}


def parse_keywords(
    cls: type[DataclassT], own_settings: Mapping[str, Any], keywords: Mapping[str, Any]
) -> ParsedCommand[DataclassT]:
    """Checks the arguments of a function of the package lockstep.

    Args:
        own_settings: the settings that the function's own parameters give, by field.
        keywords: its ``**settings``, including hyper-parameters. None means not given, unless a setting can be null.

    Raises UserError that lists the mistakes: unknown names, wrong values, and names of one setting with two values.
    """
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}  # the keyword that has given a setting
    with all_mistakes() as mistakes:
        for keyword, value in keywords.items():
            with mistakes.collecting():
                for name, checked in settings_of(cls, keyword, value, is_keyword=True).items():
                    first = given_as.setdefault(name, keyword)
                    if values.setdefault(name, checked) != checked:
                        raise UserError(f"{first}, {keyword}: both set {name}; give only one of them")
        mistakes.messages = [flags_as_keywords(message) for message in mistakes.messages]
        for name, value in own_settings.items():
            with mistakes.collecting():
                values[name] = _checked_setting(cls, name, plain_value(name, value), name)
    overrides = [override_of(name, values.pop(name)) for name in HYPERPARAMETERS if name in values]
    if overrides:
        values["override"] = overrides
    return ParsedCommand(cls(**values), frozenset(values))


def settings_of(
    cls: type[DataclassInstance], name: str, value: Any, *, location: str = "", is_keyword: bool = False
) -> dict[str, Any]:
    """Returns the settings and hyper-parameters that a name and a value set, by our names, converted and checked.

    Args:
        cls: the settings of a command.
        name: ours, an alias, or a name of another program.
        value: any value of Python, or text. None sets what can be null, and nothing else.
        location: the name in messages, if it is another one.
        is_keyword: only keywords are known (`utils.config.settings.setting`).

    Raises UserError that begins with the name for an unknown one and a wrong value.
    """
    location = location or name
    plain = plain_value(location, value)
    fields, answers = vocabulary(cls)
    if is_keyword:
        fields = {known: field for known, field in fields.items() if field.metadata["usage"].is_keyword}
    is_true = plain is not None and plain is not False
    answer = answers.get((name, is_true))
    if isinstance(answer, Sets) and isinstance(plain, bool):
        return {answer.name: answer.value}
    if name in fields:
        name = fields[name].name
        owner = cls if name in cls.__dataclass_fields__ else Hyperparameters
        if plain is None and not parse_hint(hints_of(owner)[name]).is_optional:
            return {}
        return {name: _checked_setting(owner, name, plain, location)}
    if not isinstance(answer, str):
        is_known = (name, not is_true) in answers
        answer = "leave it out" if is_known else f"unknown{suggestion(name, fields, 0.75)}"
    if not answer.startswith(LEFT_OUT):
        raise UserError(f"{location}: {answer}")
    from utils.logger import log_when_configured  # imports logging, which --help does not need

    log_when_configured(f"{location}: {answer}")
    return {}


def _checked_setting(owner: type[DataclassInstance], name: str, value: Any, location: str) -> Any:
    """Returns the value of the setting ``name`` of ``owner``, converted and checked. ``value``: a `plain_value`, or
    the words of a command line; one word is not wrapped in a list. Raises UserError that begins with ``location``."""
    field = owner.__dataclass_fields__[name]
    convert = field.metadata["usage"].convert
    value = _converted(value if convert is None else convert(value, location), field, type_of(field, owner))
    return as_address(check(value, hints_of(owner)[name], location, field.metadata["bounds"]))


def _converted(value: Any, field: dataclasses.Field, kind: Any) -> Any:
    """Converts a value to the type of a setting: numbers to text and text to numbers, one value to a list, 0 and 1 to
    false and true, true and false of a setting that is no switch to the value of its flag alone and its default, and
    words to the case of the choices. Returns others unchanged, for `check` to refuse."""
    const = field.metadata["usage"].const
    if typing.get_origin(kind) is list:
        (element_type,) = typing.get_args(kind)
        elements = value if isinstance(value, list) else [value]
        return [_converted(element, field, element_type) for element in elements]
    if kind is bool:
        return number_as_bool(value, kind)
    if isinstance(value, bool):
        if const is None:
            return value
        return const if value else default_of(field)
    if kind is str and isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        return value
    if kind is int:
        with contextlib.suppress(ValueError):
            return int(value)
    choices = field.metadata["bounds"].choices or ()
    return next((choice for choice in choices if choice.lower() == value.lower()), value)


class _Vocabulary(NamedTuple):
    """The words that a command knows."""

    fields: dict[str, dataclasses.Field]  # settings, and hyper-parameters of a command that trains, by all their names
    answers: dict[tuple[str, bool], Sets | str]  # by words of other programs, given as true or as false


@functools.cache
def vocabulary(cls: type[DataclassInstance]) -> _Vocabulary:
    command = command_of(cls).name
    kinds = (Hyperparameters, cls) if issubclass(cls, TrainConfig) else (cls,)
    fields = {field.name: field for kind in kinds for field in dataclasses.fields(kind)}
    aliases = {**ALIASES["flag"], **ALIASES.get(command, {})}
    other_names = {name: fields[ours] for name, ours in aliases.items() if ours in fields and name not in fields}
    answers: dict[tuple[str, bool], Sets | str] = {}
    for word, answer in {**ANSWERS["flag"], **ANSWERS.get(command, {})}.items():
        name, separator, value = word.partition("=")
        if isinstance(answer, str) or (answer.name in fields and (separator or name not in fields)):
            answers[name, value != "False"] = answer
    return _Vocabulary(fields | other_names, answers)


def names_of(cls: type[DataclassInstance], field: dataclasses.Field) -> list[str]:
    """Returns the name of a setting of the command ``cls``, then its other ones."""
    return [name for name, known in vocabulary(cls).fields.items() if known is field]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are UserErrors, with suggestions for misspelled flags."""

    own_flags: Sequence[str] = ()  # those that are suggested

    def unknown_message(self, words: Sequence[str]) -> str:
        """Describes the ``words`` that `parse_known_args` did not recognize."""
        flags = [word for word in words if word.startswith("-")]
        if flags:  # other words are probably their values
            descriptions = [as_address(flag) + self._nearest(flag.partition("=")[0]) for flag in flags]
            return f"unrecognized arguments: {', '.join(descriptions)}"
        shown = f"{' '.join(map(as_address, words[:3]))}{' ...' if len(words) > 3 else ''}"
        return f"unrecognized arguments: {shown} (no flag takes these; a pattern such as '*.jpg' belongs in quotes)"

    def _nearest(self, flag: str) -> str:
        """Returns a suggestion for an unknown flag, or "" if nothing is similar."""
        known = list(self.own_flags)
        if "--set" in known:
            known += map(flag_name, HYPERPARAMETERS)
        completions = [name for name in known if name.startswith(flag)]
        return suggestion(flag, completions or known, 0.6 if completions else 0.75)

    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("ignored explicit argument", "takes no value, got"))


@functools.cache
def build_parser(cls: type, *, all_flags: bool = False) -> Parser:
    """Creates the parser of a command with the settings ``cls``: one flag per field, or also a positional argument if
    the field is ``positional``. Booleans have ``--x`` and ``--no-x``. The help of a command with many flags lists
    `FIRST_SETTINGS` unless ``all_flags``."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    positional = [field for field in fields.values() if field.metadata["usage"].positional]
    flags = [field for field in fields.values() if not field.metadata["usage"].positional]
    shows_all = all_flags or len(flags) < _MANY_FLAGS
    command = command_of(cls)
    required = [flag_name(field.name) + " " + field.name.upper() for field in flags if default_of(field) is REQUIRED]
    parser = Parser(
        prog=command.typed,
        usage=" ".join(["%(prog)s", *map(shown_name, positional), *required, "[flags]"]),
        description=command.description + ("" if shows_all else " --help-all lists all flags."),
        epilog=f"example: {command.typed} {command.example}",
        allow_abbrev=False,
    )
    parser.add_argument("--help-all", action="help", help="show all flags and exit")
    for field in positional:
        action = parser.add_argument(
            field.name, metavar=field.metadata["usage"].positional, help=field.metadata["help"]
        )
        action.required = False  # the parser of settings lists missing ones, with all other mistakes
        parser.add_argument(flag_name(field.name), dest=field.name, help=argparse.SUPPRESS)  # as in train.py --data
    in_topics = {name for names in TOPICS.values() for name in names.split()}
    others = " ".join(field.name for field in flags if field.name not in in_topics)
    for topic, names in {**TOPICS, "other": others}.items():
        group = parser.add_argument_group(topic)
        for field in [fields[name] for name in names.split() if fields.get(name) in flags]:
            _add_flag(group, field, cls, is_shown=shows_all or field.name in FIRST_SETTINGS.split())
    parser.own_flags = list(parser._option_string_actions)
    known, answers = vocabulary(cls)
    for name in dict.fromkeys([name for name, _ in answers] + [*known]):
        flag = flag_name(name)
        answer = answers.get((name, True))
        if flag in parser.own_flags:
            continue
        if isinstance(answer, Sets):  # takes no value: it could be a positional argument
            options: dict[str, Any] = {"action": "store_const", "dest": answer.name, "const": answer.value}
        else:
            options = {"nargs": "?", "dest": name, "const": "VALUE" if name in known else "True"}
        parser.add_argument(flag, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)
    return parser


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field, cls: type[DataclassInstance], *, is_shown: bool
) -> None:
    """Adds the flag of a field: a switch, several words for a list, or one word, which ``const`` makes optional. The
    parser returns words, which are converted and checked as values from Python are (`checked_setting`)."""
    usage = field.metadata["usage"]
    kind = type_of(field, cls)
    default = default_of(field)
    choices = field.metadata["bounds"].choices
    options: dict[str, Any] = {"dest": field.name, "help": argparse.SUPPRESS}
    if is_shown:
        stated = "" if default in (None, "", [], REQUIRED) else f" (default: {default})"
        options["help"] = field.metadata["help"] + stated
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is list:
        options["nargs"] = "+"
    elif usage.const is not None:
        options |= {"nargs": "?", "const": usage.const}
    if choices:
        options["metavar"] = f"{{{','.join(choices)}}}"
    group.add_argument(*map(flag_name, names_of(cls, field)), **{**options, **usage.options})
