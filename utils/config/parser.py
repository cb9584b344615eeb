"""Reads settings into the dataclasses of `utils.config.settings`: from a command line, and by name, from keywords of
Python and lines of the yolo command.

    parse_command                   the words of a command line, or a `settings_word` of our own
      flags.build_parser            argparse, with a flag for each field, and hidden ones for those of other programs
    parse_keywords, _yolo_answer    names and values
      settings_of                   names of other programs are replaced by ours
    checked_setting                 every value, by the type and the bounds of its field
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import shlex
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Generic

from utils.config.aliases import LEFT_OUT, MODES, instead_of, our_name, same_settings
from utils.config.commands import COMMANDS, command_of
from utils.config.flags import build_parser, flags_as_keywords, override_of, shown_name, words_of_settings
from utils.config.plain_values import number_as_bool, plain_value
from utils.config.settings import HYPERPARAMETERS, Hyperparameters, TrainConfig, default_of, field_by_alias
from utils.errors import Mistakes, UserError, all_mistakes
from utils.schema import DataclassT, build, check, hints_of, parse_hint, suggestion, type_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NOT_GIVEN: list[str] = []  # value of a setting that no word sets; a list, because `--set` adds to it


@dataclass(frozen=True)
class ParsedCommand(Generic[DataclassT]):
    """The settings of a command, and which of them its user has given."""

    config: DataclassT
    explicit_flags: frozenset[str]  # names of the settings that are given


def parse_command(cls: type[DataclassT], argv: Sequence[str] | None) -> ParsedCommand[DataclassT]:
    """Parses a command line, which may use YOLOv5's flags, or a single argument, a `settings_word`.
    ``argv`` None means this process's own. Raises UserError that lists the mistakes and what to write instead."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].startswith("@{"):
        stored = json.loads(argv[0][1:])
        return ParsedCommand(build(cls, stored, "settings"), frozenset(stored))
    command = command_of(cls).name
    if _is_yolo_line(command, argv):
        raise UserError(_yolo_answer(command, argv))
    end = argv.index("--") if "--" in argv else len(argv)  # from there on, no word is a flag
    words = [*(re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv[:end]), *argv[end:]]

    fields = {field.name: field for field in dataclasses.fields(cls)}
    parsed = argparse.Namespace(**dict.fromkeys(fields, _NOT_GIVEN))
    parser = build_parser(cls)
    with all_mistakes() as mistakes:
        with mistakes.collecting():
            # Raises UserError at a flag that lacks its value, or has one and takes none.
            _, unknown = parser.parse_known_args(words, parsed)
            unknown = [word for word in unknown if word != "--"]
            if unknown:
                mistakes.add(parser.unknown_message(unknown))
            required = [field for field in fields.values() if default_of(field) is MISSING]
            missing = [shown_name(field) for field in required if getattr(parsed, field.name) is _NOT_GIVEN]
            if missing:
                mistakes.add(f"the following arguments are required: {', '.join(missing)}")
        values = {name: value for name, value in vars(parsed).items() if value is not _NOT_GIVEN}
        for name, value in values.items():
            if isinstance(value, list) and len(value) == 1:
                value = value[0]
            with mistakes.collecting():
                values[name] = checked_setting(cls, name, value, shown_name(fields[name]))
    return ParsedCommand(cls(**values), frozenset(values))


def parse_config(cls: type[DataclassT], argv: Sequence[str] | None) -> DataclassT:
    """Returns the settings of `parse_command`."""
    return parse_command(cls, argv).config


def settings_word(config: DataclassInstance, names: Collection[str] | None = None) -> str:
    """Returns the only argument, ``@{...}``, of a command that this program starts with the settings ``names`` (None:
    all) of ``config``. Flags cannot say them all: none sets an empty list, or resets a setting of a resumed run to its
    default without naming it."""
    values = dataclasses.asdict(config)
    return "@" + json.dumps({name: value for name, value in values.items() if names is None or name in names})


def parse_keywords(
    cls: type[DataclassT], own_settings: Mapping[str, Any], keywords: Mapping[str, Any]
) -> ParsedCommand[DataclassT]:
    """Checks the arguments of a function of the package lockstep.

    Args:
        own_settings: the settings that the function's own parameters give, by field; None: not given.
        keywords: its ``**settings``, including hyper-parameters. None sets an optional hyper-parameter to null;
            for other known keywords it means not given.

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
                if value is not None:
                    values[name] = checked_setting(cls, name, value, name)
    overrides = [override_of(name, values.pop(name)) for name in HYPERPARAMETERS if name in values]
    if overrides:
        values["override"] = overrides
    return ParsedCommand(cls(**values), frozenset(values))


def _is_yolo_line(command: str, words: Sequence[str]) -> bool:
    """Returns whether a command line begins like one of the yolo command, ``train model=yolov8n.pt epochs=3`` or
    ``train resume model=last.pt``, whose mode may be left out."""
    is_first = words[:1] and (words[0] in (*MODES, "detect", "resume") or re.match(r"[a-z][a-z0-9_]*=", words[0]))
    return bool(is_first) and command in MODES.values()


def _yolo_answer(command: str, words: Sequence[str]) -> str:
    """Returns a message with the command line for a line of the yolo command, and the settings that it leaves out. Our
    own flags at its end stay as they are."""
    num_settings = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    mode = next((word for word in words if word in MODES), command)
    target = COMMANDS[MODES.get(mode, mode)]
    fields = field_by_alias(target.settings)
    is_scratch = "pretrained=false" in map(str.lower, words)
    values: dict[str, Any] = {}
    mistakes = Mistakes()
    for word in words[:num_settings]:
        name, separator, text = word.partition("=")
        if word in (*MODES, "detect") or (name in ("mode", "task") and text in (*MODES, "detect")):
            continue
        if name == "model" and not ("model" in fields and (is_scratch or text.endswith((".yaml", ".yml")))):
            name = "weights"
        # There, nms puts NMS into the graph; here it chooses a head that needs NMS.
        if name == "nms" and "layout" in fields and text.lower() == "true":
            name, text = "layout", "end2end"
        takes_text = name in fields and type_of(fields[name], target.settings) is str
        value: Any = text if separator else True
        if text.lower() in ("true", "false", "none"):
            value = {"true": True, "false": False, "none": None}[text.lower()]
        elif name in fields and (text.startswith(("[", "(")) or ("," in text and not takes_text)):
            value = [part.strip(" '\"") for part in text.strip("[]()").split(",")]
        with mistakes.collecting():
            values |= settings_of(target.settings, name, value)
    if values.get("resume") == "":  # resume model=last.pt
        values["resume"] = values.pop("weights", "")
    if mode == "track":
        values.setdefault("track", "botsort")
    line = shlex.join([*words_of_settings(values), *words[num_settings:]])
    message = f"the mode is the program here, and settings are flags; write {target.typed} {line}"
    return f"{message} (without {'; '.join(mistakes.messages)})" if mistakes else message


def settings_of(cls: type[DataclassInstance], name: str, value: Any, *, is_keyword: bool = False) -> dict[str, Any]:
    """Returns the settings and hyper-parameters that a name and a value set, by our names, converted and checked.

    Args:
        name: ours, an alias, or a name of another program.
        value: any value of Python, or text. None sets an optional hyper-parameter to null, and nothing else.
        is_keyword: only keywords are known (`utils.config.settings.setting`).

    Raises UserError that begins with ``name`` for an unknown name and a wrong value.
    """
    fields = {
        known: field for known, field in field_by_alias(cls).items() if field.metadata["is_keyword"] or not is_keyword
    }
    hyperparameters = HYPERPARAMETERS if issubclass(cls, TrainConfig) else ()
    plain = plain_value(name, value)
    same = same_settings(name, plain, cls.__dataclass_fields__)
    if same is not None:
        return same
    ours = our_name(name, {*fields, *hyperparameters})
    if ours in fields:
        field = fields[ours]
        if plain is None:
            return {}
        return {field.name: checked_setting(cls, field.name, plain, name)}
    if ours in hyperparameters:
        if plain is None and not parse_hint(hints_of(Hyperparameters)[ours]).is_optional:
            return {}
        return {ours: checked_setting(Hyperparameters, ours, plain, name)}
    command = command_of(cls).name
    left_out = LEFT_OUT.get(command, {}).get(name)
    if left_out:
        from utils.logger import log_when_configured  # imports logging, which --help does not need

        log_when_configured(f"{name}: {left_out}; left out")
        return {}
    instead = instead_of(command).get(name)
    raise UserError(f"{name}: {instead or f'unknown{suggestion(name, [*fields, *hyperparameters], 0.75)}'}")


def checked_setting(owner: type[DataclassInstance], name: str, value: Any, location: str) -> Any:
    """Returns the value of the setting ``name`` of ``owner``, converted and checked. ``value``: a `plain_value`, or
    the words of a command line; a single one is no list. Raises UserError that begins with ``location``."""
    field = owner.__dataclass_fields__[name]
    if owner is not Hyperparameters:
        convert = field.metadata["convert"]
        value = _converted(value if convert is None else convert(value, location), field, type_of(field, owner))
    elif isinstance(value, str):
        from utils.config.yaml_files import parse_yaml_value  # not needed for --help

        value = parse_yaml_value(value, location)
    return check(value, hints_of(owner)[name], location, field.metadata["bounds"])


def _converted(value: Any, field: dataclasses.Field, kind: Any) -> Any:
    """Converts a value to the type of a setting: numbers to text and text to numbers, one value to a list, 0 and 1 to
    false and true, true and false of a setting that is no switch to the value of its flag alone and its default, and
    words to the case of the choices. Returns others unchanged, for `check` to refuse."""
    if typing.get_origin(kind) is list:
        (element_type,) = typing.get_args(kind)
        elements = value if isinstance(value, list) else [value]
        return [_converted(element, field, element_type) for element in elements]
    if kind is bool:
        return number_as_bool(value)
    if isinstance(value, bool) and field.metadata["const"] is not None:
        return field.metadata["const"] if value else default_of(field)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is int and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    choices = field.metadata["bounds"].choices or ()
    return next((c for c in choices if isinstance(value, str) and c.lower() == value.lower()), value)
