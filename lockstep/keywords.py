"""Keyword arguments of the Python API as checked settings of the commands.

``device=0``, ``epochs="3"``, ``classes="cat"`` and Ultralytics' ``batch=16``, ``cache=True`` and ``amp=False`` mean the
same as on a command line. Settings reach the command as values, because no flag sets, for example, an empty list
(utils/config/settings_file.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.signatures import NOT_KEYWORDS, flags_as_keywords
from utils.config.aliases import advice
from utils.config.commands import COMMANDS
from utils.config.flags import in_own_case, override_of
from utils.config.parser import ParsedCommand, given_settings
from utils.config.plain_values import checked_setting, plain_value
from utils.config.settings import HYPERPARAMETERS, Hyperparameters, TrainConfig, default_of, field_by_alias
from utils.errors import Mistakes, UserError, all_mistakes
from utils.schema import hints_of, parse_hint, suggestion, type_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
    with all_mistakes() as mistakes:
        values = _values_of_keywords(command, keywords, mistakes)
        names = [name for name in HYPERPARAMETERS if name in values]
        if names:
            values["override"] = [override_of(name, values.pop(name)) for name in names]
        values |= {name: value for name, value in own_settings.items() if value is not None}
        with mistakes.collecting():
            parsed = given_settings(COMMANDS[command].settings, values)
    return parsed


def _values_of_keywords(command: str, keywords: Mapping[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    """Returns the checked values of the settings and hyper-parameters that ``keywords`` set, by name."""
    values: dict[str, Any] = {}
    keyword_by_setting: dict[str, str] = {}
    for name, value in keywords.items():
        if name in ("resume", "pretrained") and value is False:  # what happens anyway
            continue
        with mistakes.collecting():
            setting = _setting_of_keyword(command, name, value)
            if setting is None:
                continue
            first_name = keyword_by_setting.setdefault(setting.name, name)
            if first_name != name and values[setting.name] != setting.value:
                raise UserError(f"{first_name}, {name}: both set {setting.name}; give only one of them")
            values[setting.name] = setting.value
    return values


class _Setting(NamedTuple):
    name: str
    value: Any


def _setting_of_keyword(command: str, name: str, value: Any) -> _Setting | None:
    """Returns the setting or hyper-parameter that a keyword sets, with its checked value; None if it is not given."""
    cls = COMMANDS[command].settings
    fields = field_by_alias(cls)
    field = fields.get(name)
    plain = plain_value(name, value)
    if field is not None and field.name not in NOT_KEYWORDS.get(cls, ()):
        if plain is None:
            return None
        return _Setting(field.name, checked_setting(cls, field.name, _in_our_words(field, cls, plain), name))
    if name in HYPERPARAMETERS and cls is TrainConfig:
        if plain is None and not parse_hint(hints_of(Hyperparameters)[name]).is_optional:
            return None
        return _Setting(name, checked_setting(Hyperparameters, name, plain, name))
    reason = flags_as_keywords(advice(name))
    known = [*fields, *HYPERPARAMETERS]
    raise UserError(f"{name}={value!r}: {reason or f'unknown{suggestion(name, known)}'}")


def _in_our_words(field: dataclasses.Field, cls: type[DataclassInstance], value: Any) -> Any:
    """Returns a value as our setting takes it: true and false of a setting that is no switch as the value of its flag
    alone and its default, choices in their own case, and the devices of a list."""
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
    return in_own_case(value, field.metadata["bounds"].choices)
