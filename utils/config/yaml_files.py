"""Loads YAML files safely, with limits on size, nesting and aliases. Repeated keys, also 1 and 01, are errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from utils.errors import UserError
from utils.files.safe_io import read_text
from utils.schema import TOO_LONG, fits_64_bits

MAX_DEPTH = 100  # levels of nested lists and mappings
MAX_VALUES = 200_000
MAX_BYTES = 1 << 24
_MERGE = "tag:yaml.org,2002:merge"  # the key <<
_VALUE = "tag:yaml.org,2002:value"  # the key =
_TEXT = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_SURROGATE = re.compile("[\ud800-\udfff]")


def load_yaml(path: str | Path, *, text_under: frozenset[str] = frozenset()) -> Any:
    """Parses a YAML file. Raises UserError, which names the file and line, if it is missing or malformed.

    ``text_under``: top-level keys whose values are text. Numbers in them are returned as written, such as "012", which
    YAML reads as 10.
    """
    try:
        return parse_yaml(read_text(path, max_bytes=MAX_BYTES), text_under=text_under)
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark else f"{path}"
        raise UserError(f"{location}: {_problem_of(error)}") from None


def parse_yaml(text: str, *, text_under: frozenset[str] = frozenset()) -> Any:
    """Parses YAML like ``yaml.safe_load``, but refuses repeated keys, and uses libyaml, which is ten times faster, if
    PyYAML was built with it. ``text_under``: see `load_yaml`.

    Raises yaml.YAMLError, or RecursionError for text nested more than `MAX_DEPTH` deep, which could crash libyaml.
    """
    try:
        value = _load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader), text_under)
    except yaml.YAMLError:  # libyaml reports errors at other lines
        value = _load(text, yaml.SafeLoader, text_under)
    _check_value(value)
    return value


def parse_override(item: str) -> tuple[str, Any]:
    """Splits ``key=value``, as in ``--set``, and parses the value as YAML. Raises UserError if either fails."""
    key, separator, text = item.partition("=")
    if not separator:
        raise UserError(f"--set {item}: must be key=value")
    return key.strip(), parse_yaml_value(text, f"--set {item}")


def parse_yaml_value(text: str, location: str) -> Any:
    """Parses the text of one value as YAML. Raises UserError that begins with ``location``."""
    if not text.strip():  # such as lr0=$LR of a script that does not set LR
        raise UserError(f"{location}: has no value; write null for none")
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise UserError(f"{location}: {_problem_of(error)}") from None
    except RecursionError:
        raise UserError(f"{location}: the value is nested too deeply") from None


def _problem_of(error: Exception) -> str:
    return getattr(error, "problem", None) or "malformed YAML"


def _load(text: str, loader: type, text_under: frozenset[str]) -> Any:
    if _may_nest_deeply(text):
        _check_depth(text, loader)
    return yaml.load(text, Loader=_strict(loader, text_under))


def _may_nest_deeply(text: str) -> bool:
    """Returns whether ``text`` contains more than `MAX_DEPTH` characters that can open a level of nesting: brackets,
    dashes, question marks, and the spaces of an indentation."""
    marks = sum(map(text.count, "[{-?"))
    # `splitlines` breaks lines wherever YAML does, and elsewhere.
    indentation = max((len(row) - len(row.lstrip()) for row in text.splitlines()), default=0)
    return marks + indentation > MAX_DEPTH


def _check_depth(text: str, loader: type) -> None:
    """Raises RecursionError for text nested more than `MAX_DEPTH` deep."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise RecursionError


def _check_value(value: Any) -> None:
    """Raises yaml.YAMLError for a value that cannot be written out: one that contains itself or grows too large through
    aliases, text with characters that no file can hold, and integers of more than 64 bits."""
    pending = [value]
    count = 0
    while pending:
        item = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise yaml.constructor.ConstructorError(
                problem=f"more than {MAX_VALUES:,} values after expanding aliases, or an alias that contains itself"
            )
        if isinstance(item, str):
            if "\0" in item or (not item.isprintable() and _SURROGATE.search(item)):
                raise yaml.constructor.ConstructorError(problem="contains a NUL or an unpaired surrogate")
        elif isinstance(item, int):
            if not fits_64_bits(item):
                raise yaml.constructor.ConstructorError(problem=TOO_LONG)
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item


class _StrictConstructor(yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """Refuses merges, and repeated keys, which PyYAML would silently resolve to the last one."""

    text_under: frozenset[str] = frozenset()  # see `load_yaml`

    def construct_document(self, node: yaml.Node) -> Any:
        if self.text_under and isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in self.text_under:
                    self._keep_numbers_as_text(value)
        return super().construct_document(node)

    def _keep_numbers_as_text(self, node: yaml.Node) -> None:
        """Converts the numbers in a list, or in the keys and values of a mapping, to text."""
        if isinstance(node, yaml.SequenceNode):
            node.value = [self._as_text(item) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            node.value = [(self._as_text(key), self._as_text(value)) for key, value in node.value]

    def _as_text(self, node: yaml.Node) -> yaml.Node:
        """Returns ``node``, or a new text node if it is a number. (An alias may use the same node as a number
        elsewhere.)"""
        if node.tag not in _NUMBERS or self.resolve(yaml.ScalarNode, node.value, (True, False)) not in _NUMBERS:
            return node
        return yaml.ScalarNode(_TEXT, node.value, node.start_mark, node.end_mark)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuses merges (``<<``): a few lines of these can expand to more keys than memory holds."""
        for key, _ in node.value:
            if key.tag == _MERGE:
                raise _error(key, "<< merges mappings, which is not supported; write the keys out")
            if key.tag == _VALUE:
                key.tag = _TEXT

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            self._raise_repeated_key([key for key, _ in node.value])
        return mapping

    def _raise_repeated_key(self, keys: Sequence[yaml.Node]) -> NoReturn:
        """Raises yaml.YAMLError for the first of ``keys`` whose value an earlier one has, such as 1 and 01."""
        first_nodes: dict[Any, yaml.Node] = {}
        for key in keys:
            value = self.construct_object(key)  # already constructed, so this is a look-up
            if value in first_nodes:
                first = first_nodes[value]
                line = first.start_mark.line + 1
                if key.value == first.value:
                    raise _error(key, f"key '{key.value}' appears twice (first in line {line}); remove one")
                raise _error(key, f"key '{key.value}' means the same as '{first.value}' in line {line}; remove one")
            first_nodes[value] = key
        raise AssertionError("no key is repeated")

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, OverflowError, KeyError, IndexError):
            kind = node.tag.rpartition(":")[2]
            text = str(node.value)[:60]
            raise _error(node, f"{text!r} is not a valid {kind}; put it in quotes if it is text") from None


@functools.cache
def _strict(base: type, text_under: frozenset[str]) -> type:
    """Creates a `_StrictConstructor` that parses like the safe loader ``base``."""
    return type("Strict", (_StrictConstructor, base), {"text_under": text_under})


def _error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
