"""Writes docs/settings.md, every flag and hyper-parameter with its default and meaning.

python -m tests.helpers.settings_page > docs/settings.md
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from utils.config import settings, tool_settings
from utils.config.commands import COMMANDS
from utils.config.flags import flag_name, shown_name
from utils.schema import type_of

INTRODUCTION = """\
# Settings

This page is generated from the commands in `utils/config/commands.py` and the dataclasses of their settings, by
`python -m tests.helpers.settings_page > docs/settings.md`.

Flags may be written with `-` or `_`. A flag `--x / --no-x` takes no value; a setting without values below is text.
Names in capitals are arguments without a flag. `--help` of a command prints the same reference. A run stores all its
settings in `settings.yaml` in its folder, and in its checkpoints.
"""
TRAIN = "train.py"
# Flags of train.py that kfold and search refuse (tools/experiment/experiment.py), the last one if there are folds.
REFUSED_FLAGS = ("--resume", "--exist-ok", "--export", "--time", "--keep-old", "--val-fraction")
HYPERPARAMETERS = """\
## Hyper-parameters

The keys of a recipe, the YAML file that `train.py --hyp` names ([recipes](training.md#hyper-parameters)).
`--set key=value` changes one.
"""


def main() -> None:
    print("\n".join(page()), end="")


def page() -> Iterator[str]:
    """Yields the sections of the page, each of which ends with a line break."""
    yield INTRODUCTION
    title_of: dict[str, str] = {}  # of each row, the first command that has it
    for command in COMMANDS.values():
        cls = command.settings
        title = command.typed if command.is_tool else command.title
        yield f"## {title}\n"
        own_first = sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__)
        own_rows = []
        shared: dict[str, list[str]] = {}
        for field in own_first:
            row = _row(field, cls)
            if row in title_of and settings.default_of(field) is not dataclasses.MISSING:
                shared.setdefault(title_of[row], []).append(f"`{flag_name(field.name)}`")
            else:
                own_rows.append(row)
                title_of[row] = title
        yield _table("flag", own_rows)
        if issubclass(cls, settings.TrainConfig) and shared:
            del shared[TRAIN]
            refused = ", ".join(f"`{flag}`" for flag in REFUSED_FLAGS)
            condition = "" if cls is tool_settings.KfoldConfig else " (with `--folds`)"
            yield f"All other flags of {TRAIN}, except those that are refused: {refused}{condition}.\n"
        for other, flags in shared.items():
            yield f"As in {other}: {', '.join(flags)}.\n"
    yield HYPERPARAMETERS
    cls = settings.Hyperparameters
    yield _table("key", [_row(field, cls) for field in dataclasses.fields(cls)])


def _table(first: str, rows: Sequence[str]) -> str:
    return "\n".join([f"| {first} | default | values | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _row(field: dataclasses.Field, cls: type) -> str:
    meaning = field.metadata["help"].replace("|", "\\|").replace("*", "\\*")
    return f"| {_names(field, cls)} | {_default(field)} | {_values(field, cls)} | {meaning} |"


def _names(field: dataclasses.Field, cls: type) -> str:
    first = shown_name(field)
    if cls is settings.Hyperparameters:
        first = field.name
    elif type_of(field, cls) is bool:
        first += f" / --no-{first[2:]}"
    return ", ".join(f"`{name}`" for name in (first, *field.metadata["aliases"]))


def _default(field: dataclasses.Field) -> str:
    default = field.metadata["flag"].get("default", settings.default_of(field))
    return "required" if default is dataclasses.MISSING else _text(default)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return "" if value in (None, "") else f"`{value}`"


def _values(field: dataclasses.Field, cls: type) -> str:
    """Returns the choices, bounds or type of a setting."""
    meta = field.metadata
    kind = type_of(field, cls)
    is_list = typing.get_origin(kind) is list
    element = typing.get_args(kind)[0] if is_list else kind
    bounds = meta["bounds"]
    if bounds.choices:
        text = ", ".join(f"`{choice}`" for choice in bounds.choices)
    elif bounds.low is not None and bounds.high is not None:
        text = f"{bounds.low} to {bounds.high}"
    elif bounds.low is not None:
        text = f"≥ {bounds.low}"
    else:
        text = {int: "integer", float: "number", dict: "mapping"}.get(element, "")
    if bounds.sentinel is not None:
        text += f", or {bounds.sentinel}"
    if meta["const"]:
        text += f"; alone: `{meta['const']}`"
    return (f"{text}; one or more" if is_list else text).removeprefix("; ")


if __name__ == "__main__":
    main()
