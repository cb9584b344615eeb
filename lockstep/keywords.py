"""The settings of a command as keywords of a function: their values, and how `help`, notebooks and editors show them.

``device=0``, ``epochs="3"``, ``classes="cat"`` and Ultralytics' ``batch=16``, ``cache=True`` and ``amp=False`` mean the
same as on a command line.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from utils.config.aliases import advice
from utils.config.commands import COMMANDS
from utils.config.flags import override_of
from utils.config.parser import ParsedCommand, given_settings
from utils.config.plain_values import checked_setting, plain_value
from utils.config.settings import (
    HYPERPARAMETERS,
    ExportConfig,
    Hyperparameters,
    TrainConfig,
    ValConfig,
    default_of,
    field_by_alias,
)
from utils.config.tool_settings import CheckConfig
from utils.errors import UserError, all_mistakes
from utils.schema import hints_of, parse_hint, suggestion, type_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., Any])

# Settings that are not among the ``**settings``: parameters of the functions themselves, and ``override``, because
# hyper-parameters are keywords.
NOT_KEYWORDS: dict[type, tuple[str, ...]] = {
    TrainConfig: ("data", "callbacks", "resume", "override"),
    ValConfig: ("weights", "data"),
    ExportConfig: ("weights",),
    CheckConfig: ("data", "json"),
}


def parse_keywords(
    command: str, own_settings: Mapping[str, Any], keywords: Mapping[str, Any]
) -> ParsedCommand[DataclassInstance]:
    """Checks the arguments of a function.

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
            if keyword in ("resume", "pretrained") and value is False:  # what happens anyway
                continue
            with mistakes.collecting():
                name, checked = _setting_of_keyword(command, keyword, value)
                if checked is None and not (name in HYPERPARAMETERS and _is_optional(name)):
                    continue
                first = given_as.setdefault(name, keyword)
                if first != keyword and values[name] != checked:
                    raise UserError(f"{first}, {keyword}: both set {name}; give only one of them")
                values[name] = checked
        overrides = [override_of(name, values.pop(name)) for name in HYPERPARAMETERS if name in values]
        if overrides:
            values["override"] = overrides
        values |= {name: value for name, value in own_settings.items() if value is not None}
        with mistakes.collecting():
            parsed = given_settings(COMMANDS[command].settings, values)
    return parsed


def _is_optional(hyperparameter: str) -> bool:
    return parse_hint(hints_of(Hyperparameters)[hyperparameter]).is_optional


def _setting_of_keyword(command: str, keyword: str, value: Any) -> tuple[str, Any]:
    """Returns the name of the setting or hyper-parameter that a keyword sets, and its checked value; None stays None.
    Raises UserError for unknown keywords and wrong values."""
    cls = COMMANDS[command].settings
    fields = field_by_alias(cls)
    field = fields.get(keyword)
    plain = plain_value(keyword, value)
    if field is not None and field.name not in NOT_KEYWORDS[cls]:
        if plain is not None:
            plain = checked_setting(cls, field.name, _in_our_words(field, cls, plain), keyword)
        return field.name, plain
    if keyword in HYPERPARAMETERS and cls is TrainConfig:
        if plain is not None or _is_optional(keyword):
            plain = checked_setting(Hyperparameters, keyword, plain, keyword)
        return keyword, plain
    reason = flags_as_keywords(advice(keyword))
    known = [*fields, *HYPERPARAMETERS]
    raise UserError(f"{keyword}={value!r}: {reason or f'unknown{suggestion(keyword, known)}'}")


def _in_our_words(field: dataclasses.Field, cls: type[DataclassInstance], value: Any) -> Any:
    """Returns a value as our setting takes it: true and false of a setting that is no switch as the value of its flag
    alone and its default, and the devices of a list."""
    kind = type_of(field, cls)
    if isinstance(value, bool) and kind is not bool:
        if field.name == "amp":
            return "auto" if value else "off"
        if field.metadata["const"] is not None:
            return field.metadata["const"] if value else default_of(field)
    if field.name == "freeze" and isinstance(value, list) and len(value) == 1:
        return value * 2  # a list names layers; a number alone means all layers before it
    if field.name == "imgsz" and kind is int and isinstance(value, list) and len(set(value)) == 1:
        return value[0]  # imgsz=(640, 640)
    if field.name == "device" and isinstance(value, list):
        return ",".join(map(str, value))
    return value


def lists_settings(*configs: type[DataclassInstance]) -> Callable[[Function], Function]:
    """Makes `help` and notebooks list the settings that a function takes as ``**settings``: the fields of ``configs``.
    Editors and type checkers read their types in lockstep/settings.py."""
    fields = [field for config in configs for field in keyword_fields(config)]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *explicit, _ = signature.parameters.values()
        keywords = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(f), annotation=f.type)
            for f in fields
        ]
        # `inspect.signature` returns this; the type stubs of functions lack the attribute.
        function.__signature__ = signature.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
        lines = [f"    {field.name}: {keyword_help(field)}" for field in fields]
        title = "Settings (None means not given unless stated otherwise):"
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", title, *lines])
        return function

    return decorate


def keyword_fields(config: type[DataclassInstance]) -> list[dataclasses.Field]:
    """Returns the fields of ``config`` that are keywords of its function."""
    return [field for field in dataclasses.fields(config) if field.name not in NOT_KEYWORDS.get(config, ())]


def keyword_help(field: dataclasses.Field) -> str:
    """Returns the help text of a keyword: that of its flag, with other flags named as keywords, and null as None."""
    return re.sub(r"\bnull\b", "None", flags_as_keywords(field.metadata["help"]))


def flags_as_keywords(text: str) -> str:
    """Returns ``text`` with flags named as keywords."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda match: f"`{match[1].replace('-', '_')}`", text)
