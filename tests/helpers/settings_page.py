"""Writes docs/settings.md, every flag and hyper-parameter with its default and meaning.

python -m tests.helpers.settings_page > docs/settings.md
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from utils.config import search_settings, settings
from utils.config.flags import flag_name
from utils.schema import type_of

COMMANDS: dict[str, type] = {
    "train.py": settings.TrainConfig,
    "val.py": settings.ValConfig,
    "detect.py": settings.DetectConfig,
    "export.py": settings.ExportConfig,
    "python -m tools.kfold": search_settings.KfoldConfig,
    "python -m tools.search": search_settings.SearchConfig,
}
INTRODUCTION = """\
# Settings

This page is generated from the dataclasses in `utils/config/settings.py` and `search_settings.py` by
`python -m tests.helpers.settings_page > docs/settings.md`.

Flags may be written with `-` or `_`. A flag `--x / --no-x` takes no value; a setting without values below is text.
`--help` of a command prints the same reference. A run stores all its settings in `settings.yaml` in its folder, and in
its checkpoints. `python -m tools.check`, `tools.convert`, `tools.shard` and `tools.weights` list theirs
with `--help`.
"""
HYPERPARAMETERS = """\
## Hyper-parameters

The keys of a recipe, the YAML file that `train.py --hyp` names ([recipes](training.md#hyper-parameters)).
`--set key=value` changes one.
"""


def main() -> None:
    print("\n".join(page()), end="")


def page() -> Iterator[str]:
    """The sections of the page, each ends with a line break."""
    yield INTRODUCTION
    of_train = {_row(field, settings.TrainConfig) for field in dataclasses.fields(settings.TrainConfig)}
    for command, cls in COMMANDS.items():
        yield f"## {command}\n"
        own_first = sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__)
        rows = {field.name: _row(field, cls) for field in own_first}
        shared = [name for name, row in rows.items() if row in of_train and cls is not settings.TrainConfig]
        yield _table("flag", [row for name, row in rows.items() if name not in shared])
        if issubclass(cls, settings.TrainConfig) and shared:
            yield "All other flags of train.py.\n"
        elif shared:
            yield f"As in train.py: {', '.join(f'`{flag_name(name)}`' for name in shared)}.\n"
    yield HYPERPARAMETERS
    cls = settings.Hyperparameters
    yield _table("key", [_row(field, cls) for field in dataclasses.fields(cls)])


def _table(first: str, rows: Sequence[str]) -> str:
    return "\n".join([f"| {first} | default | values | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _row(field: dataclasses.Field, cls: type) -> str:
    meaning = field.metadata["help"].replace("|", "\\|").replace("*", "\\*")
    return f"| {_names(field, cls)} | {_default(field)} | {_values(field, cls)} | {meaning} |"


def _names(field: dataclasses.Field, cls: type) -> str:
    first = flag_name(field.name)
    if cls is settings.Hyperparameters:
        first = field.name
    elif type_of(field, cls) is bool:
        first += f" / --no-{first[2:]}"
    return ", ".join(f"`{name}`" for name in (first, *field.metadata["aliases"]))


def _default(field: dataclasses.Field) -> str:
    default = settings.default_of(field)
    return "required" if default is dataclasses.MISSING else _text(default)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return "" if value in (None, "") else f"`{value}`"


def _values(field: dataclasses.Field, cls: type) -> str:
    """The type, choices and bounds of a setting."""
    meta = field.metadata
    kind = type_of(field, cls)
    is_list = typing.get_origin(kind) is list
    element = typing.get_args(kind)[0] if is_list else kind
    if meta["choices"]:
        text = ", ".join(f"`{choice}`" for choice in meta["choices"])
    else:
        text = {int: "integer", float: "number", dict: "mapping"}.get(element, "")
    low, high = meta["low"], meta["high"]
    if low is not None and high is not None:
        text += f", {low} to {high}"
    elif low is not None:
        text += f" ≥ {low}"
    if meta["sentinel"] is not None:
        text += f", or {meta['sentinel']}"
    if meta["const"]:
        text += f"; alone: `{meta['const']}`"
    return (f"{text}; one or more" if is_list else text).removeprefix("; ")


if __name__ == "__main__":
    main()
