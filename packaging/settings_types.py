"""Writes the settings as types of keyword arguments, for editors and type checkers: lockstep/settings.pyi of the wheel.

PYTHONPATH=. python packaging/settings_types.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from utils.config.flags import keyword_fields, keyword_help
from utils.config.parser import vocabulary
from utils.config.settings import ExportConfig, Hyperparameters, TrainConfig, ValConfig
from utils.config.tool_settings import CheckConfig
from utils.config.words import ANSWERS, Sets

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

INTRODUCTION = '''\
"""The keyword arguments of `lockstep.train`, `resume`, `val`, `export` and `check`."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict
'''
CONFIGS: tuple[type[DataclassInstance], ...] = (TrainConfig, ValConfig, ExportConfig, CheckConfig)
# Settings that name files or folders.
_PATHS = ("weights", "model", "teacher", "data", "hyp", "groups", "project", "cache_dir", "stage", "out")


def stub_lines() -> Iterator[str]:
    """Yields the stub's lines: a TypedDict for each settings class that functions of the package take."""
    yield INTRODUCTION
    bases = [base for config in CONFIGS for base in reversed(config.__mro__[:-1])]
    for config in dict.fromkeys([Hyperparameters, *bases]):
        parents = [_type_name(base) for base in config.__bases__ if base is not object] or ["TypedDict"]
        if config is TrainConfig:
            parents.append("Hyperparameters")
        yield f"\nclass {_type_name(config)}({', '.join(parents)}, total=False):"
        for field in keyword_fields(config):
            if field.name in config.__annotations__:
                yield f'    {field.name}: {_annotation(field)}\n    """{keyword_help(field)}"""'
        if config in CONFIGS:
            fields, answers = vocabulary(config)
            others = {name: field for name, field in fields.items() if name != field.name}
            yield from (f"    {name}: {_annotation(f)}" for name, f in others.items() if f.metadata["usage"].is_keyword)
            switches = {word for (word, _), answer in answers.items() if isinstance(answer, Sets)} - set(fields)
            yield from (f"    {word}: bool | None" for word in sorted(switches))


def _type_name(config: type) -> str:
    return config.__name__.strip("_").replace("Config", "Settings")


def _annotation(field: dataclasses.Field) -> str:
    """Returns the type of a keyword: what the functions take, which is more than the type of the setting."""
    annotation = str(field.type).removesuffix(" | None")
    if "dict" in annotation:
        return f"{annotation} | None"
    types = [annotation.removeprefix("list[").removesuffix("]")]
    if choices := field.metadata["bounds"].choices:
        types = [f"Literal{list(choices)}"]
    if field.name in ("classes", "device"):  # by name or number
        types.append("int")
    if field.name in _PATHS:
        types.append("PathLike[str]")
    is_switch = f"{field.name}=True" in ANSWERS["flag"]
    if field.metadata["usage"].const is not None or is_switch:  # cache=True, as --cache alone
        types.append("bool")
    if annotation.startswith("list"):  # or a single element
        types.append(f"Sequence[{' | '.join(types)}]")
    if field.name == "device":  # [0, 1], as in Ultralytics
        types.append("Sequence[int]")
    return " | ".join([*types, "None"])


if __name__ == "__main__":
    print("\n".join(stub_lines()))
