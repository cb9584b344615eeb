"""Reads YAML. Repeated keys and merges are errors, which name the file and line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from utils.errors import UserError
from utils.files.safe_io import read_text

MAX_BYTES = 1 << 24
_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"

if TYPE_CHECKING:
    from yaml import SafeLoader
else:
    SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


def load_yaml(path: str | Path, *, text_under: frozenset[str] = frozenset()) -> Any:
    """Reads a YAML file. Raises UserError, which names the file and line, if it is missing or malformed.

    ``text_under``: top-level keys whose values are text. What YAML would read as something else, such as "012" as 10
    and "yes" as true, is returned as written; an empty value and null are None.
    """
    text = read_text(path, max_bytes=MAX_BYTES)
    try:
        return _parse(text, text_under)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark else f"{path}"
        raise UserError(f"{location}: {_problem_of(error)}") from None


def parse_yaml_value(text: str, location: str) -> Any:
    """Parses the text of one value as YAML. Raises UserError that begins with ``location``."""
    if not text.strip():  # such as lr0=$LR of a script that does not set LR
        raise UserError(f"{location}: has no value; write null for none")
    try:
        return _parse(text)
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise UserError(f"{location}: {_problem_of(error)}") from None


def _parse(text: str, text_under: frozenset[str] = frozenset()) -> Any:
    loader = _Loader(text)
    loader.text_under = text_under
    try:
        return loader.get_single_data()
    except RecursionError:  # libyaml itself refuses more than 1000 levels
        raise yaml.YAMLError("nested too deeply") from None
    finally:
        loader.dispose()


def _problem_of(error: Exception) -> str:
    problem = getattr(error, "problem", None) or (str(error) if isinstance(error, yaml.YAMLError) else "malformed YAML")
    if "escape character" in problem or "hexdecimal" in problem:
        problem += "; in double quotes, \\ begins an escape: write / or leave out the quotes"
    return problem


class _Loader(SafeLoader):
    """A safe loader that refuses merges, and repeated keys, which PyYAML would silently resolve to the last one."""

    text_under: frozenset[str] = frozenset()  # see `load_yaml`

    def construct_document(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in self.text_under:
                    _keep_as_text(value)
        return super().construct_document(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise _error(key, "<< merges mappings, which is not supported; write the keys out")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            first_lines: dict[Any, int] = {}
            for key_node, _ in node.value:
                key = self.construct_object(key_node)  # already constructed, so this is a look-up
                line = key_node.start_mark.line + 1
                if key in first_lines:
                    first = first_lines[key]
                    raise _error(key_node, f"key '{key_node.value}' appears twice (first in line {first}); remove one")
                first_lines[key] = line
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, OverflowError, KeyError, IndexError):  # such as 2020-13-45
            kind = node.tag.rpartition(":")[2]
            raise _error(
                node, f"{str(node.value)[:60]!r} is not a valid {kind}; put it in quotes if it is text"
            ) from None


def _keep_as_text(node: yaml.Node) -> None:
    """Makes the scalars in a list, or the keys and values of a mapping, text, in nodes of their own: an alias may use a
    node as a number elsewhere."""
    if isinstance(node, yaml.SequenceNode):
        node.value = [_as_text(item) for item in node.value]
    elif isinstance(node, yaml.MappingNode):
        node.value = [(_as_text(key), _as_text(value)) for key, value in node.value]


def _as_text(node: yaml.Node) -> yaml.Node:
    if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL:
        return node
    return yaml.ScalarNode(_TEXT, node.value, node.start_mark, node.end_mark)


def _error(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
