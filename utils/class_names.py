"""Class names: how they are compared, and which classes ``--classes`` and ``--fitness`` mean."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence

from utils.errors import UserError
from utils.schema import suggestion
from utils.strings import counted

_INDEX = "-?[0-9]{1,9}"
_SEVERAL = rf"{_INDEX}(?:, ?{_INDEX})+"
_INDEX_LIST = re.compile(rf"{_SEVERAL}|\[{_SEVERAL}\]|\({_SEVERAL}\)")
_IN_BRACKETS = re.compile(rf"\[{_INDEX}\]|\({_INDEX},\)")


def class_key(name: str) -> str:
    """Returns the key by which class names are compared, which ignores case and surrounding spaces."""
    return name.strip().lower()


def class_difference(names: Sequence[str], expected: Sequence[str]) -> str:
    """Describes the first difference between class names and the expected ones. Returns "" if there is none."""
    if len(names) != len(expected):
        return f"{counted(len(names), 'class')} against {len(expected)}"
    index = next((i for i, (a, b) in enumerate(zip(names, expected)) if a != b), None)
    return "" if index is None else f"class {index} is '{names[index]}' against '{expected[index]}'"


def class_numbers(
    classes: Iterable[int | str], names: Mapping[int, str], owner: str, flag: str = "--classes"
) -> tuple[int, ...]:
    """Converts ``classes`` to class numbers of ``owner`` ("the model"), whose classes are ``names``. Text is a name or
    a number; ``[1]`` is always a number.

    Raises TypeError for a value that is neither a number nor text, UserError for a class that is not in ``names``, and
    for digits that are the name of one class and the number of another.
    """
    number_by_name = {name: number for number, name in names.items()}
    numbers: list[int] = []
    for c in classes:
        if isinstance(c, str):
            number = _number_of_text(c, number_by_name, owner, flag)
        else:
            number = operator.index(c)
        if number not in names:
            raise UserError(f"{flag} {number}: {owner} has classes 0 to {len(names) - 1}")
        numbers.append(number)
    return tuple(numbers)


def _number_of_text(text: str, number_by_name: Mapping[str, int], owner: str, flag: str) -> int:
    """Returns the number of the class named ``text``, or else the number that ``text`` is."""
    named = number_by_name.get(text)
    is_number = re.fullmatch(_INDEX, text) or _IN_BRACKETS.fullmatch(text)
    typed = int(text.strip("[](),")) if is_number else None
    if named is None:
        if typed is None:
            hint = suggestion(text, number_by_name) or f"; its classes: {', '.join(number_by_name)}"
            raise UserError(f"{flag} {text}: {owner} has no class of this name{hint}")
        return typed
    if typed is not None and typed != named and typed in number_by_name.values():
        raise UserError(
            f"{flag} {text}: {owner} has a class of this name, number {named}, and another class of this number; write "
            f"[{named}] or [{typed}]"
        )
    return named


def typed_classes(words: Iterable[str]) -> list[int | str]:
    """Converts the words after ``--classes`` to classes for `class_numbers`. One word may be a list of numbers."""
    classes: list[int | str] = []
    for word in words:
        if is_index_list(word) or _IN_BRACKETS.fullmatch(word):
            classes += map(int, re.findall(_INDEX, word))
        else:
            classes.append(word)
    return classes


def is_index_list(word: str) -> bool:
    """Returns whether one word is a list of several class numbers: ``0,2`` or ``[0, 2]``, as Ultralytics writes it."""
    return _INDEX_LIST.fullmatch(word) is not None
