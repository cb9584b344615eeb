"""Looks up the ids with which the annotations of a COCO JSON refer to images and categories."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from data.labels.json_files import shown

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}(\.0*)?")
Id = TypeVar("Id", bound=int | str)


class Ids(Generic[Id]):
    """Looks up the ids with which annotations refer to images or categories. An integer, an integral float and a string
    with the same number are the same id if only one entry has that number."""

    def __init__(self, ids: Iterable[Id], owner: str) -> None:
        """``owner``: "the images'", for messages."""
        self._ids = frozenset(ids)
        self._owner = owner
        self._ids_by_number: dict[int, list[Id]] | None = None

    def find(self, value: Any) -> Id | None:
        """Returns the id that ``value``, from a JSON file, refers to, or None if no id or several match."""
        if type(value) in (int, str) and value in self._ids:
            return value
        number = whole_number(value)
        if number is None:
            return None
        matches = self._by_number(number)
        return matches[0] if len(matches) == 1 else None

    def _by_number(self, number: int) -> list[Id]:
        """Returns the ids that are this number or a string of it."""
        if self._ids_by_number is None:
            self._ids_by_number = {}
            for entry_id in self._ids:
                number_of_id = whole_number(entry_id)
                if number_of_id is not None:
                    self._ids_by_number.setdefault(number_of_id, []).append(entry_id)
        return self._ids_by_number.get(number, [])

    def mismatch(self, annotation: dict, key: str) -> str:
        """Returns why the value of ``key`` in an annotation refers to no entry."""
        return f"{key} {self._mismatch_of(annotation[key])}" if key in annotation else f"has no {key}"

    def _mismatch_of(self, value: Any) -> str:
        text = shown(value)
        if not self._ids:
            return f"{text} refers to an empty list: {self._owner} ids are missing"
        are_numbers = not any(isinstance(entry_id, str) for entry_id in self._ids)
        are_text = not any(isinstance(entry_id, int) for entry_id in self._ids)
        if isinstance(value, str) and are_numbers:
            return f"{text} is a string; {self._owner} ids are numbers"
        if isinstance(value, int | float) and are_text:
            return f"{text} is a number; {self._owner} ids are strings"
        number = whole_number(value)
        if number is not None and len(self._by_number(number)) > 1:
            return f"{text} matches several of {self._owner} ids"
        return f"{text} is not among {self._owner} ids"


def whole_number(value: Any) -> int | None:
    """Returns the integer that ``value`` is or, as a string, contains; None for other values."""
    if type(value) is int:
        return value
    if type(value) is float:
        return int(value) if value.is_integer() else None
    if type(value) is str and _WHOLE_NUMBER.fullmatch(value):
        return int(value.partition(".")[0])
    return None
