"""Keyword arguments of the Python API as checked settings of the commands.

A keyword is first translated: names of Ultralytics, and values that a setting has only there, such as ``cache=True``
and ``optimizer="sgd"`` (utils/config/other_programs). Then its value is checked; ``device=0``, ``epochs="3"`` and
``classes="cat"`` mean the same as on a command line. Settings reach the command as values, because no flag sets, for
example, an empty list (utils/config/settings_file.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.signatures import flags_as_keywords
from utils.config.commands import COMMANDS
from utils.config.flags import flag_name, override_of
from utils.config.other_programs.arguments import Translation, translate_argument, translate_value
from utils.config.other_programs.table import actions_of, hyperparameters_of, owner_of, python_hint
from utils.config.parser import ParsedCommand, given_settings
from utils.config.plain_values import checked_setting, plain_value
from utils.config.settings import Hyperparameters
from utils.errors import Mistakes, UserError, all_mistakes
from utils.schema import hints_of, parse_hint, suggestion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def parse_keywords(
    command: str, own_settings: Mapping[str, Any], keywords: Mapping[str, Any]
) -> ParsedCommand[DataclassInstance]:
    """Checks the arguments of a function. Prints a line for each keyword of Ultralytics that has no effect.

    Args:
        own_settings: the settings that the function's own parameters give, by field; None: not given.
        keywords: its ``**settings``, including hyper-parameters. None sets an optional hyper-parameter to null;
            for other known keywords it means not given.

    Raises UserError that lists the mistakes: unknown names, wrong values, and names of one setting with two values.
    """
    with all_mistakes() as mistakes:
        values = _values_of_keywords(command, keywords, mistakes)
        names = [name for name in hyperparameters_of(command) if name in values]
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
        if _asks_for_default(name, value, keywords):
            continue
        with mistakes.collecting():
            for setting, setting_value in _settings_of_keyword(command, name, value).items():
                first_name = keyword_by_setting.setdefault(setting, name)
                if first_name != name and values[setting] != setting_value:
                    raise UserError(f"{first_name}, {name}: both set {setting}; give only one of them")
                values[setting] = setting_value
    return values


def _asks_for_default(name: str, value: Any, keywords: Mapping[str, Any]) -> bool:
    """Returns whether a keyword of Ultralytics asks for what happens anyway: ``resume=False``, or a ``pretrained`` that
    agrees with whether the ``keywords`` name ``weights``."""
    if name == "pretrained":
        try:
            names_weights = bool(plain_value("weights", keywords.get("weights")))
        except UserError:  # reported as a mistake of ``weights``
            return True
        return value is names_weights
    return name == "resume" and value is False


def _settings_of_keyword(command: str, name: str, value: Any) -> dict[str, Any]:
    """Returns the checked values of the settings and hyper-parameters that a keyword sets: one, unless a keyword of
    Ultralytics means several or none."""
    field = _fields_by_keyword(COMMANDS[command].settings).get(name)
    hint = python_hint("keyword", field.name if field else name)
    if hint and value is not None:
        raise UserError(f"{name}={value!r}: {hint}")
    return {
        setting: checked_setting(owner_of(command, setting), setting, setting_value, name)
        for setting, setting_value in _translate_keyword(command, name, field, plain_value(name, value)).items()
    }


@functools.cache
def _fields_by_keyword(cls: type[DataclassInstance]) -> dict[str, dataclasses.Field]:
    """Returns the fields of ``cls`` by their names and by their other names, such as ``batch`` for ``batch_size``."""
    fields: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(cls):
        aliases = [alias.removeprefix("--").replace("-", "_") for alias in field.metadata["aliases"]]
        fields |= dict.fromkeys([field.name, *aliases], field)
    return fields


def _translate_keyword(command: str, name: str, field: dataclasses.Field | None, value: Any) -> dict[str, Any]:
    """Returns the settings and hyper-parameters that a keyword sets, by their names here. ``field``: our setting of
    this name, or None."""
    if field is not None:
        return {} if value is None else _translate_setting(command, name, field, value)
    if name in hyperparameters_of(command):
        is_unset = value is None and not parse_hint(hints_of(Hyperparameters)[name]).is_optional
        return {} if is_unset else {name: value}
    if flag_name(name) in actions_of(command):  # no_check, as in --no-check: check=False
        raise UserError(f"{name}={value!r}: {_describe_unknown(command, name)}")
    translation = translate_argument(command, name, str(value))
    if translation is None:
        raise UserError(f"{name}={value!r}: {_describe_unknown(command, name)}")
    return {} if value is None else _apply_translation(command, name, value, translation)


def _translate_setting(command: str, name: str, field: dataclasses.Field, value: Any) -> dict[str, Any]:
    """Returns our setting ``field`` with its value here: Ultralytics writes some values as others, or as lists."""
    action = actions_of(command)[flag_name(field.name)]
    takes_list = action.nargs == "+"
    if isinstance(value, list) and takes_list and action.type is str:
        elements: list[Any] = []
        for element in value:
            translation = translate_value(command, name, element) if isinstance(element, str) else None
            if translation is None:
                elements.append(element)
            else:
                elements += _apply_translation(command, name, element, translation).get(field.name, [])
        return {field.name: elements}
    translation = translate_value(command, name, str(value)) if isinstance(value, str | int | float | list) else None
    if translation is not None:
        return _apply_translation(command, name, value, translation)
    if isinstance(value, list) and not takes_list:
        raise UserError(f"{name}={value!r}: must be one value, not a list")
    return {field.name: value}


def _apply_translation(command: str, name: str, value: Any, translation: Translation) -> dict[str, Any]:
    """Returns the settings of a translation, and prints why it sets nothing, or how it understands the value. Raises
    UserError if it is a refusal."""
    if translation.refusal:
        reason = flags_as_keywords(translation.refusal, actions_of(command))
        raise UserError(f"{name}={value!r}: {reason}")
    if translation.without_effect:
        reason = flags_as_keywords(translation.without_effect, actions_of(command))
        print(f"{name}={value!r}: without effect ({reason})", flush=True)
    if translation.note:
        print(f"{name}={value!r}: {translation.note}", flush=True)
    return _retyped(translation.settings, value)


def _retyped(settings: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Returns the ``settings`` of a translation, which are text, with those numbers that it has taken from ``value`` as
    numbers again."""
    parts = value if isinstance(value, list) else [value]
    part_by_text = {str(part): part for part in parts}
    retyped: dict[str, Any] = {}
    for name, texts in settings.items():
        if isinstance(texts, list):
            retyped[name] = [part_by_text.get(text, text) for text in texts]
        else:
            retyped[name] = part_by_text.get(texts, texts) if isinstance(texts, str) else texts
    return retyped


def _describe_unknown(command: str, name: str) -> str:
    """Describes an unknown keyword, with the closest keyword of ``command``."""
    known = [*_fields_by_keyword(COMMANDS[command].settings), *hyperparameters_of(command)]
    return f"unknown{suggestion(name, known)}"
