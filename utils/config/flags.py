"""Settings as words: the names of flags, and settings as users type them on a command line."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from utils.config.settings import HYPERPARAMETERS, RunSettings, changed_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_YAML_END = "...\n"  # after a document that is a number


def flag_name(name: str) -> str:
    """Returns the flag of the field ``name``, such as ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def shown_name(field: dataclasses.Field) -> str:
    """Returns the name of a setting in messages: its flag, or a positional argument's name in --help."""
    return field.metadata["usage"].positional or flag_name(field.name)


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


def unused_settings(
    config: DataclassInstance, table: Iterable[tuple[object, str, str]], run: RunSettings | None = None
) -> list[str]:
    """Returns a line for each row of ``table`` that says why settings that differ from their defaults have no effect.

    Args:
        table: rows of whether the settings have no effect, their names, and the reason.
        run: the run that ``config`` is of, with its hyper-parameters.
    """
    const_of = {field.name: field.metadata["usage"].const for field in dataclasses.fields(config)}
    given = {
        name: flag_name(name) if value == const_of[name] else as_flag(name, value)
        for name, value in changed_settings(config).items()
    }
    if run is not None:
        given |= {name: f"--set {name}" for name in run.overridden}
    lines = []
    for is_unused, names, reason in table:
        flags = [given[name] for name in names.split() if is_unused and name in given]
        if flags:
            lines.append(f"{' and '.join(flags)} {'do' if len(flags) > 1 else 'does'} nothing: {reason}")
    return lines


def override_of(name: str, value: Any) -> str:
    """Returns a hyper-parameter as ``--set`` takes it."""
    import yaml  # not needed for --help

    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return f"{name}={text.removesuffix(_YAML_END).strip()}"


def flags_as_keywords(text: str) -> str:
    """Returns ``text`` with our flags named as keywords of Python."""
    return re.sub(r"--([a-z][a-z0-9-]*)(?![\w=])", lambda match: f"`{match[1].replace('-', '_')}`", text)


def keyword_fields(config: type[DataclassInstance]) -> list[dataclasses.Field]:
    """Returns the fields of ``config`` that are keywords of its function."""
    return [field for field in dataclasses.fields(config) if field.metadata["usage"].is_keyword]


def keyword_help(field: dataclasses.Field) -> str:
    """Returns the help text of a keyword: that of its flag, with other flags named as keywords, and null as None."""
    return re.sub(r"\bnull\b", "None", flags_as_keywords(field.metadata["help"]))
