"""Keyword arguments of the Python API as checked settings of the commands.

``device=0``, ``epochs="3"`` and ``classes="cat"`` mean the same as on a command line. Values that a setting does not
take, such as ``cache=True`` and ``optimizer="sgd"``, mean the same as in Ultralytics (utils/config/other_programs).
Settings reach the command as values, because no flag sets, for example, an empty list (utils/config/settings_file.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from utils.config.commands import COMMANDS
from utils.config.flags import flag_name, int_or_text
from utils.config.other_programs.arguments import translate_argument
from utils.config.other_programs.table import actions_of, hyperparameters_of, normalized, python_hint
from utils.config.parser import ParsedCommand, given_settings
from utils.config.plain_values import number_as_bool, plain_value
from utils.config.settings import ExportConfig, Hyperparameters, TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.config.yaml_files import parse_yaml_value
from utils.errors import Mistakes, UserError, all_mistakes
from utils.schema import bounds_of, check, hints_of, parse_hint, suggestion, type_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Settings that are not among the ``**settings``: parameters of the functions themselves, and ``override``, because
# hyper-parameters are keywords.
NOT_KEYWORDS: dict[type, tuple[str, ...]] = {
    TrainConfig: ("data", "callbacks", "resume", "override"),
    ValConfig: ("weights", "data"),
    ExportConfig: ("weights",),
    CheckConfig: ("data", "json"),
}

_YAML_END = "...\n"  # after a document that is a number
_LISTS_IN_ULTRALYTICS = ("device", "imgsz")  # settings with one value here


def keyword_fields(config: type[DataclassInstance]) -> list[dataclasses.Field]:
    """Returns the fields of ``config`` that are keywords of its function."""
    return [field for field in dataclasses.fields(config) if field.name not in NOT_KEYWORDS.get(config, ())]


def keyword_help(field: dataclasses.Field) -> str:
    """Returns the help text of a keyword: that of its flag, with other flags named as keywords, and null as None."""
    text = re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: f"`{flag[1].replace('-', '_')}`", field.metadata["help"])
    return re.sub(r"\bnull\b", "None", text)


def parse_keywords(
    command: str, own_settings: Mapping[str, Any], keywords: Mapping[str, Any]
) -> ParsedCommand[DataclassInstance]:
    """Checks the arguments of a function. Prints a line for each keyword of Ultralytics that has no effect.

    Args:
        own_settings: the settings that the function's own parameters give, by field.
        keywords: its ``**settings``, including hyper-parameters. None is the value null of a hyper-parameter that has
            it; any other known keyword that is None is skipped.

    Raises UserError that lists the mistakes: unknown names, wrong values, and names of one setting with two values.
    """
    with all_mistakes() as mistakes:
        values = _values_of_keywords(command, keywords, mistakes)
        names = [name for name in hyperparameters_of(command) if name in values]
        if names:
            values["override"] = [_override(name, values.pop(name)) for name in names]
        with mistakes.collecting():
            parsed = given_settings(COMMANDS[command].settings, {**values, **own_settings})
    return parsed


def _values_of_keywords(command: str, keywords: Mapping[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    """Returns the checked values of the settings and hyper-parameters that ``keywords`` set, by name."""
    values: dict[str, Any] = {}
    keyword_by_setting: dict[str, str] = {}
    for name, value in keywords.items():
        if _requests_nothing(name, value, keywords):
            continue
        with mistakes.collecting():
            for setting, setting_value in _settings_of_keyword(command, name, value).items():
                first_name = keyword_by_setting.setdefault(setting, name)
                if first_name != name and values[setting] != setting_value:
                    raise UserError(f"{first_name}, {name}: both set {setting}; give only one of them")
                values[setting] = setting_value
    return values


def _requests_nothing(name: str, value: Any, keywords: Mapping[str, Any]) -> bool:
    """Returns whether a keyword of Ultralytics describes what happens anyway: ``resume=False``, and ``pretrained``, if
    it says whether the ``keywords`` name ``weights``."""
    if name == "pretrained":
        names_weights = bool(plain_value("weights", keywords.get("weights")))
        return value is names_weights
    return name == "resume" and value is False


def _override(name: str, value: Any) -> str:
    """Returns a hyper-parameter as ``--set`` takes it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return f"{name}={text.removesuffix(_YAML_END).strip()}"


def _settings_of_keyword(command: str, name: str, value: Any) -> dict[str, Any]:
    """Returns the checked values of the settings and hyper-parameters that a keyword sets: one, unless a keyword of
    Ultralytics means several or none."""
    field = _fields_by_keyword(COMMANDS[command].settings).get(name)
    hint = python_hint("keyword", field.name if field else name)
    if hint and value is not None:
        raise UserError(f"{name}={value!r}: {hint}")
    plain = plain_value(name, value)
    if name in hyperparameters_of(command):
        is_unset = plain is None and not parse_hint(hints_of(Hyperparameters)[name]).is_optional
        return {} if is_unset else {name: _checked(command, name, name, plain)}
    if field is not None:
        return {} if plain is None else _setting(command, name, field, plain)
    if flag_name(name) in actions_of(command):  # no_check, as in --no-check: check=False
        raise UserError(f"{name}={value!r}: {_unknown(command, name)}")
    return _ultralytics_settings(command, name, plain)


@functools.cache
def _fields_by_keyword(cls: type[DataclassInstance]) -> dict[str, dataclasses.Field]:
    """Returns the fields of ``cls`` by their names and by their other names, such as ``batch`` for ``batch_size``."""
    fields: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(cls):
        aliases = [alias.removeprefix("--").replace("-", "_") for alias in field.metadata["aliases"]]
        fields |= dict.fromkeys([field.name, *aliases], field)
    return fields


def _setting(command: str, name: str, field: dataclasses.Field, value: Any) -> dict[str, Any]:
    """Returns the value of the setting ``field``. A value that the setting does not take may be one of Ultralytics, or
    one that the table refuses with a reason."""
    kind = type_of(field, COMMANDS[command].settings)
    is_list = isinstance(value, list)
    if is_list and typing.get_origin(kind) is not list:
        return _list_as_one_value(command, name, value)
    try:
        checked = _checked(command, name, field.name, value)
    except UserError:
        if not _may_be_of_ultralytics(value, kind):
            raise
        if not is_list:
            return _ultralytics_settings(command, name, value)
        translated = [_ultralytics_settings(command, name, element) for element in value]
        return {field.name: [element for settings in translated for element in settings.get(field.name, [])]}
    if field.name == "freeze" and is_list and len(checked) == 1:
        checked = _only_layer(checked)
    return {field.name: checked}


def _checked(command: str, keyword: str, setting: str, value: Any) -> Any:
    """Returns the value of a setting or hyper-parameter, converted to its type. Raises UserError that begins with
    ``keyword``."""
    is_hyperparameter = setting in hyperparameters_of(command)
    owner = Hyperparameters if is_hyperparameter else COMMANDS[command].settings
    field = _fields_by_keyword(owner)[setting]
    if not is_hyperparameter:
        converted = _converted(value, type_of(field, owner))
    else:
        converted = parse_yaml_value(value, keyword) if isinstance(value, str) else value
    return check(converted, hints_of(owner)[setting], keyword, bounds_of(field))


def _converted(value: Any, kind: Any) -> Any:
    """Converts a plain value to the type of a setting as a command line does: numbers to text and text to numbers, one
    value to a list, and 0 and 1 to false and true. Returns others unchanged, for `check` to refuse."""
    if typing.get_origin(kind) is list:
        (element_type,) = typing.get_args(kind)
        elements = value if isinstance(value, list) else [value]
        return [_converted(element, element_type) for element in elements]
    if kind is bool:
        return number_as_bool(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is int and isinstance(value, str):
        return int_or_text(value)
    return value


def _may_be_of_ultralytics(value: Any, kind: Any) -> bool:
    """Returns whether the table may be asked for a value that a setting of type ``kind`` does not take."""
    if kind is bool:  # the table drops a false that is the default, but it may be another value in a resumed run
        return False
    if isinstance(value, list):
        return all(isinstance(element, str) and _is_given(element) for element in value)
    is_list_as_text = isinstance(value, str) and value.startswith(("[", "("))
    if is_list_as_text and typing.get_origin(kind) is not list:  # a list says what it becomes (`_list_as_one_value`)
        return False
    return isinstance(value, str | int | float) and _is_given(value)


def _is_given(value: str | float) -> bool:
    """Returns whether the table does not take ``value`` for none, which means not given there."""
    return normalized(str(value)) != "none"


def _only_layer(layers: list[int]) -> list[int]:
    """Returns the value of ``freeze`` for a list of one layer, which a number alone would not mean."""
    (layer,) = layers
    if layer > 0:
        last = layer - 1
        print(
            f"freeze={layers!r} freezes layer {layer} only; freeze={layer} would freeze "
            f"{f'layers 0 to {last}' if last else 'layer 0'}",
            flush=True,
        )
    return layers * 2


def _list_as_one_value(command: str, name: str, values: list[Any]) -> dict[str, Any]:
    """Returns the setting for a list that Ultralytics writes for what is one value here: ``device=[0, 1]``. Raises
    UserError for other names and for an empty list."""
    if name not in _LISTS_IN_ULTRALYTICS or not values:
        raise UserError(f"{name}={values!r}: must be one value, not a list")
    settings = _ultralytics_settings(command, name, values)
    if name == "imgsz" and any(size != values[0] for size in values):
        print(f"{name}={values!r}: used as {name}={settings[name]}, the larger one", flush=True)
    return settings


def _ultralytics_settings(command: str, name: str, value: Any) -> dict[str, Any]:
    """Returns our settings and hyper-parameters for a keyword with the name or the kind of value that Ultralytics uses;
    none if it is None."""
    translation = translate_argument(command, name, str(value))
    if translation is None:
        raise UserError(f"{name}={value!r}: {_unknown(command, name)}")
    if value is None:
        return {}
    if translation.refusal:
        raise UserError(f"{name}={value!r}: {translation.refusal}")
    if translation.without_effect:
        print(f"{name}={value!r}: without effect ({translation.without_effect})", flush=True)
    return {setting: _checked(command, name, setting, text) for setting, text in translation.settings.items()}


def _unknown(command: str, name: str) -> str:
    """Describes an unknown keyword, with the closest keyword of ``command``."""
    known = [*_fields_by_keyword(COMMANDS[command].settings), *hyperparameters_of(command)]
    return f"unknown{suggestion(name, known)}"
