"""Which settings the functions take as keywords, and how `help`, notebooks and editors show them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from utils.config.settings import ExportConfig, TrainConfig, ValConfig, default_of
from utils.config.tool_settings import CheckConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Function = TypeVar("Function", bound=Callable[..., Any])

# Settings that are not among the ``**settings``: parameters of the functions themselves, and ``override``, because
# hyper-parameters are keywords.
NOT_KEYWORDS: dict[type, tuple[str, ...]] = {
    TrainConfig: ("data", "callbacks", "resume", "override"),
    ValConfig: ("weights", "data"),
    ExportConfig: ("weights",),
    CheckConfig: ("data", "json"),
}


def lists_settings(*configs: type[DataclassInstance]) -> Callable[[Function], Function]:
    """Makes `help` and notebooks list the settings that a function takes as ``**settings``: the fields of ``configs``.
    Editors and type checkers read their types in lockstep/settings.py."""
    fields = [field for config in configs for field in keyword_fields(config)]

    def decorate(function: Function) -> Function:
        # `inspect.signature` returns this; the type stubs of functions lack the attribute.
        function.__signature__ = _signature_with(function, fields)  # type: ignore[attr-defined]
        lines = [f"    {field.name}: {keyword_help(field)}" for field in fields]
        title = "Settings (None means not given unless stated otherwise):"
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", title, *lines])
        return function

    return decorate


def _signature_with(function: Callable, fields: Sequence[dataclasses.Field]) -> inspect.Signature:
    """Returns the signature of ``function`` with a keyword for each of ``fields`` in place of its last parameter,
    ``**settings``."""
    signature = inspect.signature(function)
    *explicit, _ = signature.parameters.values()
    keywords = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(field), annotation=field.type)
        for field in fields
    ]
    return signature.replace(parameters=[*explicit, *keywords])


def keyword_fields(config: type[DataclassInstance]) -> list[dataclasses.Field]:
    """Returns the fields of ``config`` that are keywords of its function."""
    return [field for field in dataclasses.fields(config) if field.name not in NOT_KEYWORDS.get(config, ())]


def keyword_help(field: dataclasses.Field) -> str:
    """Returns the help text of a keyword: that of its flag, with other flags named as keywords, and null as None."""
    return re.sub(r"\bnull\b", "None", flags_as_keywords(field.metadata["help"]))


def flags_as_keywords(text: str, flags: Container[str] | None = None) -> str:
    """Returns ``text`` with ``flags`` (None: all flags) named as keywords. Others stay as they are: a text may name a
    flag of another command (``detect.py --track``)."""

    def keyword(match: re.Match[str]) -> str:
        flag = match[0]
        if flags is not None and flag not in flags:
            return flag
        return f"`{flag.removeprefix('--').replace('-', '_')}`"

    return re.sub(r"--[a-z][a-z0-9-]*", keyword, text)
