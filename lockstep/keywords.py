"""Keyword arguments of the Python API as flags of the commands.

The command parses them: ``device=0``, ``epochs="3"`` and ``classes="cat"`` mean the same as on a command line,
mistakes give the same messages, and arguments of Ultralytics use the same table. Refused here are unknown names, names
that mean something else in Ultralytics, and values that no command line can express (utils/config/plain_values.py) or
that are of the wrong kind for the flag: mappings, lists, true and false.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from utils.config.flags import flag_name, words_of_flag
from utils.config.other_programs.arguments import flags_of_argument
from utils.config.other_programs.table import actions_of, hyperparameters_of, python_hint, reason_without_effect
from utils.config.plain_values import plain_value
from utils.config.settings import ExportConfig, Hyperparameters, TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.errors import UserError
from utils.schema import hints_of, parse_hint, suggestion

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


def flags_of_keywords(command: str, keywords: Mapping[str, Any]) -> list[str]:
    """Converts ``keywords``, including hyper-parameters, to flags. None is the value null of a hyper-parameter that has
    it; any other known keyword that is None is skipped. Prints a line for each keyword of Ultralytics that has no
    effect. Raises UserError for keywords that are unknown or have another name here, and for values without a
    `plain_value`."""
    flags: list[str] = []
    for name, value in keywords.items():
        if not _requests_nothing(name, value, keywords):
            flags += _flags_of_keyword(command, name, value)
    return flags


def _requests_nothing(name: str, value: Any, keywords: Mapping[str, Any]) -> bool:
    """Returns whether a keyword of Ultralytics describes what happens anyway: ``resume=False``, and ``pretrained``, if
    it says whether the ``keywords`` name ``weights``."""
    if name == "pretrained":
        names_weights = bool(plain_value("weights", keywords.get("weights")))
        return value is names_weights
    return name == "resume" and value is False


def _flags_of_keyword(command: str, name: str, value: Any) -> list[str]:
    hint = python_hint("keyword", name)
    if hint and value is not None:
        raise UserError(f"{name}={value!r}: {hint}")
    plain = plain_value(name, value)
    if name in hyperparameters_of(command):
        return _flags_of_hyperparameter(name, plain)
    action = actions_of(command).get(flag_name(name))
    if action is None:
        return _flags_of_ultralytics_keyword(command, name, plain)
    return _flags_of_setting(command, name, plain, action)


def _flags_of_hyperparameter(name: str, value: Any) -> list[str]:
    is_optional = parse_hint(hints_of(Hyperparameters)[name]).is_optional
    if value is None and not is_optional:
        return []
    if isinstance(value, str):  # parsed, as on a command line
        return [f"--set={name}={value}"]
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return [f"--set={name}={text.removesuffix(_YAML_END).strip()}"]


def _flags_of_setting(command: str, name: str, value: Any, action: argparse.Action) -> list[str]:
    """Returns the flags for the ``value`` of one of our settings. ``action``: parses its flag."""
    if value is None:
        return []
    if isinstance(value, dict):
        raise UserError(f"{name}={value!r}: must not be a mapping")
    if isinstance(value, list):
        return _flags_of_list(command, name, value, takes_list=action.nargs == "+")
    if isinstance(value, bool) and not isinstance(action, argparse.BooleanOptionalAction):
        return _flags_of_ultralytics_keyword(command, name, value)
    return words_of_flag(name, value)


def _flags_of_list(command: str, name: str, values: list[Any], *, takes_list: bool) -> list[str]:
    """Returns the flags for a list; ``freeze=[3]`` is layer 3, as in Ultralytics. Raises UserError if the flag takes
    one value, unless Ultralytics writes that value as a list: ``device=[0, 1]``."""
    if takes_list:
        if not all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in values):
            raise UserError(f"{name}={values!r}: must contain only text and numbers")
        if name == "freeze" and len(values) == 1:
            (layer,) = values
            if isinstance(layer, int) and layer > 0:
                last = layer - 1
                print(
                    f"freeze={values!r} freezes layer {layer} only; freeze={layer} would freeze "
                    f"{f'layers 0 to {last}' if last else 'layer 0'}",
                    flush=True,
                )
            return _flags_of_ultralytics_keyword(command, name, values)
        return words_of_flag(name, values) if values else []
    if name not in _LISTS_IN_ULTRALYTICS:
        raise UserError(f"{name}={values!r}: must be one value, not a list")
    flags = _flags_of_ultralytics_keyword(command, name, values)
    if name == "imgsz" and any(size != values[0] for size in values):
        print(f"{name}={values!r}: used as {' '.join(flags)}, the larger one", flush=True)
    return flags


def _flags_of_ultralytics_keyword(command: str, name: str, value: Any) -> list[str]:
    """Returns our flags for a keyword with the name or the kind of value that Ultralytics uses; none if it is None."""
    try:
        flags = flags_of_argument(command, name, str(value))
    except UserError as error:
        reason = str(error)
        if reason and value is None:
            return []
        raise UserError(f"{name}={value!r}: {reason or _unknown(command, name)}") from None
    reason_for_none = reason_without_effect(command, name)
    if not flags and reason_for_none and value is not None:
        print(f"{name}={value!r}: without effect ({reason_for_none})", flush=True)
    return flags


def _unknown(command: str, name: str) -> str:
    """Describes an unknown keyword, with the closest keyword of ``command``."""
    flags = [flag.removeprefix("--").replace("-", "_") for flag in actions_of(command)]
    return f"unknown{suggestion(name, [*flags, *hyperparameters_of(command)])}"
