"""YAML files, read with a check on their size, nesting and repeated keys; nothing in them runs."""

from __future__ import annotations

import difflib
import functools
import re
import typing
from pathlib import Path
from typing import Any

import yaml

from utils.errors import UserError
from utils.files.safe_io import read_regular

MOST_NESTED = 100  # levels of a YAML
MOST_VALUES = 200_000
MOST_BYTES = 1 << 24
_MOST_INTEGER = 2**63 - 1
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def load_yaml(path: str | Path) -> Any:
    """Parses a YAML file. Raises UserError naming file and line when it is missing or malformed."""
    try:
        return parse_yaml(read_regular(path, most=MOST_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, a YAML file is wanted") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"{mark.line + 1}: " if mark else " "
        raise UserError(f"{path}:{line}{getattr(error, 'problem', None) or 'malformed YAML'}") from None


def parse_yaml(text: str) -> Any:
    """As ``yaml.safe_load``, ten times faster where PyYAML came with libyaml; a repeated key is a mistake. Raises
    RecursionError for text nested deeper than any setting; libyaml's loader would end the process."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _checked_text(_loaded(text, loader))
    except yaml.YAMLError:  # libyaml sees mistakes in other lines
        return _checked_text(_loaded(text, yaml.SafeLoader))


def _loaded(text: str, loader: type) -> Any:
    if sum(map(text.count, "[{-?")) + max(len(row) - len(row.lstrip()) for row in text.split("\n")) > MOST_NESTED:
        _check_nesting(text, loader)
    return yaml.load(text, Loader=_once_each(loader))


def _checked_text(value: Any) -> Any:
    """``value``, of a YAML, if it can be written out: aliases may make it contain itself, or repeat parts billions of
    times; texts may hold what no file or terminal takes. Raises yaml.YAMLError."""
    sizes: dict[int, int] = {}  # of each list and mapping; 0 while it is being counted

    def size(part: Any) -> int:
        if isinstance(part, str):
            if "\0" in part or (not part.isprintable() and _HALF_CHARACTER.search(part)):
                raise yaml.constructor.ConstructorError(problem="text with a NUL or half a character")
            return 1
        if isinstance(part, int) and not -_MOST_INTEGER <= part <= _MOST_INTEGER:
            raise yaml.constructor.ConstructorError(problem="a number of more than 64 bits")
        if not isinstance(part, dict | list | tuple | set):
            return 1
        known = sizes.get(id(part))
        if known == 0:
            raise yaml.constructor.ConstructorError(problem="an alias refers to what it is part of")
        if known is None:
            sizes[id(part)] = 0
            parts = [*part.keys(), *part.values()] if isinstance(part, dict) else part
            known = sizes[id(part)] = 1 + sum(map(size, parts))
            if known > MOST_VALUES:
                raise yaml.constructor.ConstructorError(
                    problem=f"its aliases expand to more than {MOST_VALUES:,} values"
                )
        return known

    size(value)
    return value


@functools.cache
def _once_each(base: type) -> type:
    """The safe loader ``base``, refusing mappings that have a key twice: YAML would keep the last without a word."""

    class Strict(base):
        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._checked: set[int] = set()

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Comes before what ``<<`` merges in, which a mapping's own keys may replace, is put among them."""
            if id(node) not in self._checked:
                self._checked.add(id(node))
                lines: dict[tuple[str, str], int] = {}  # of each scalar key's tag and text
                for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                    first = lines.get((key.tag, key.value))
                    if first is not None:
                        problem = f"key '{key.value}' is there twice (first in line {first}); remove one"
                        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                    lines[key.tag, key.value] = key.start_mark.line + 1
            super().flatten_mapping(node)
            if len(node.value) > MOST_VALUES:
                raise yaml.constructor.ConstructorError(None, None, "its merges are too many", node.start_mark)

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep=deep)
            except (ValueError, TypeError, AttributeError, OverflowError, KeyError, IndexError):
                kind = node.tag.rpartition(":")[2]
                problem = f"{str(node.value)[:60]!r} is no {kind} that can be read; put it in quotes if it is text"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    return Strict


def _check_nesting(text: str, loader: type) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise RecursionError
