"""Keyword arguments of the Python API as flags of the commands.

A keyword is parsed like its flag: ``device=0``, ``epochs="3"`` and ``classes="cat"`` mean the same as on a command
line, mistakes give the same messages, and arguments of Ultralytics use the same table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from utils.config.flags import flag_name, words_of_flag
from utils.config.other_programs.arguments import flags_of_argument
from utils.config.other_programs.table import actions_of, hyperparameters_of, python_hint, reason_for_refusal
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
    effect, and raises UserError for keywords that are unknown or have another name here."""
    flags: list[str] = []
    for name, value in keywords.items():
        if value is not None or _can_be_null(command, name):
            plain = value.tolist() if hasattr(value, "tolist") else value  # NumPy arrays and numbers, tensors
            flags += _flags_of_keyword(command, name, plain)
        elif not _is_known(command, name):
            raise UserError(f"{name}={value!r}: {_unknown(command, name)}")
    return flags


def _can_be_null(command: str, name: str) -> bool:
    """Returns whether ``name`` is a hyper-parameter that can be null."""
    return name in hyperparameters_of(command) and parse_hint(hints_of(Hyperparameters)[name]).is_optional


def _is_known(command: str, name: str) -> bool:
    """Returns whether ``name`` is a keyword here or in Ultralytics."""
    if flag_name(name) in actions_of(command) or python_hint("keyword", name):
        return True
    try:
        flags_of_argument(command, name, "None")
    except UserError as error:
        return str(error) != ""
    return True


def _unknown(command: str, name: str) -> str:
    """Describes an unknown keyword, with the closest keyword of ``command``."""
    flags = [flag.removeprefix("--").replace("-", "_") for flag in actions_of(command)]
    return f"unknown{suggestion(name, [*flags, *hyperparameters_of(command)])}"


def _flags_of_keyword(command: str, name: str, value: Any) -> list[str]:
    hint = python_hint("keyword", name)
    if hint:
        raise UserError(f"{name}={value!r}: {hint}")
    if name in hyperparameters_of(command):
        return [f"--set={name}={json.dumps(value, default=float)}"]  # JSON is YAML
    action = actions_of(command).get(flag_name(name))
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    if action is None or (isinstance(value, bool) and not is_switch):
        return _flags_of_ultralytics_keyword(command, name, value)
    if isinstance(value, list | tuple):
        return _flags_of_list(command, name, list(value), takes_list=action.nargs == "+")
    return words_of_flag(name, value)


def _flags_of_list(command: str, name: str, values: list[Any], *, takes_list: bool) -> list[str]:
    """Returns the flags for a list, or none if it is empty. Raises UserError if the flag takes one value, unless
    Ultralytics writes that value as a list: ``device=[0, 1]``."""
    if not values:
        return []
    if takes_list:
        return words_of_flag(name, values)
    if name not in _LISTS_IN_ULTRALYTICS:
        raise UserError(f"{name}={values!r}: must be one value, not a list")
    flags = _flags_of_ultralytics_keyword(command, name, values)
    if name == "imgsz" and any(size != values[0] for size in values):
        print(f"{name}={values!r}: used as {' '.join(flags)}, the larger one", flush=True)
    return flags


def _flags_of_ultralytics_keyword(command: str, name: str, value: Any) -> list[str]:
    try:
        flags = flags_of_argument(command, name, str(value))
    except UserError as error:
        problem = str(error) or _unknown(command, name)
        raise UserError(f"{name}={value!r}: {problem}") from None
    reason_for_none = reason_for_refusal(command, flag_name(name))
    if not flags and reason_for_none:
        print(f"{name}={value!r}: without effect ({reason_for_none})", flush=True)
    return flags
